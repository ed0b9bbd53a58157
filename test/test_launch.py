"""The launch file: its argument table everywhere; where launch_ros is installed, a real launch."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
LAUNCH_FILE = ROOT / 'launch' / 'oxygen.launch.py'
TREE = ast.parse(LAUNCH_FILE.read_text(encoding='utf-8'))
ARGUMENTS = {
    'profile',
    'checkpoint',
    'openpi_config',
    'device',
    'dtype',
    'params_file',
    'namespace',
    'use_sim_time',
    'log_level',
    'autostart',
    'dry_run',
    'instruction',
}
# The file as `ros2 launch` runs it, for machines without the ros2 command.
LAUNCH = """
import sys
from launch import LaunchDescription, LaunchService
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource

arguments = [argument.split(':=', 1) for argument in sys.argv[2:]]
source = PythonLaunchDescriptionSource(sys.argv[1])
service = LaunchService()
service.include_launch_description(
    LaunchDescription([IncludeLaunchDescription(source, launch_arguments=arguments)])
)
sys.exit(service.run())
"""


def parameter_table() -> dict[str, tuple[str, str]]:
    """Argument name -> (type, description), from the PARAMETERS dictionary of the file."""
    for node in TREE.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == 'PARAMETERS':
            assert isinstance(node.value, ast.Dict)
            return {
                ast.literal_eval(key): (ast.unparse(value.elts[0]), ast.literal_eval(value.elts[1]))
                for key, value in zip(node.value.keys, node.value.values, strict=True)
                if key is not None and isinstance(value, ast.Tuple)
            }
    raise AssertionError('no PARAMETERS in the launch file')


def declared_arguments() -> dict[str, str]:
    """Argument name -> description, from the DeclareLaunchArgument calls with a literal name."""
    arguments = {}
    for node in ast.walk(TREE):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == 'DeclareLaunchArgument'):
            continue
        if isinstance(node.args[0], ast.Constant):
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            arguments[node.args[0].value] = ast.literal_eval(keywords['description'])
    return arguments


def test_the_launch_file_has_exactly_the_promised_arguments_each_described() -> None:
    described = {name: text for name, (_, text) in parameter_table().items()}
    described |= declared_arguments()
    assert set(described) == ARGUMENTS
    assert all(text.strip() for text in described.values())


def test_every_argument_for_the_node_is_in_the_sample_of_its_parameters_with_that_type() -> None:
    sample = yaml.safe_load((ROOT / 'config' / 'oxygen.yaml').read_text())
    parameters = sample['/**']['ros__parameters']
    for name, (kind, _) in parameter_table().items():
        if name != 'use_sim_time':  # every ROS node has it
            assert type(parameters[name]).__name__ == kind, name


def test_the_node_is_never_started_again_by_itself() -> None:
    (call,) = (
        node
        for node in ast.walk(TREE)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == 'LifecycleNode'
    )
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    assert 'respawn' not in keywords
    assert keywords['emulate_tty'] == 'True'
    assert keywords['executable'] == "'oxygen'"


@pytest.mark.case(52)
def test_a_launched_node_has_the_given_parameters_and_ends_cleanly_on_ctrl_c(graph: Any) -> None:
    pytest.importorskip('launch_ros')
    pytest.importorskip('oxygen_ros.msg', reason='package not built: ./run build')
    from rcl_interfaces.srv import GetParameters

    arguments = ['namespace:=left', 'profile:=dummy', 'dry_run:=true', 'autostart:=false']
    process = subprocess.Popen(
        [sys.executable, '-c', LAUNCH, str(LAUNCH_FILE), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        client = graph.node.create_client(GetParameters, '/left/oxygen/get_parameters')
        graph.spin_until(client.service_is_ready, 'the launched node', timeout_s=60)
        asked = GetParameters.Request(names=['profile', 'dry_run', 'autostart'])
        answer = client.call_async(asked)
        graph.spin_until(answer.done, 'its parameters')
        profile, dry_run, autostart = answer.result().values
        assert (profile.string_value, dry_run.bool_value, autostart.bool_value) == (
            'dummy',
            True,
            False,
        )
        # A terminal sends Ctrl-C to the whole group: launch and node.
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, output
    assert 'process has finished cleanly' in output
