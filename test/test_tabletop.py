"""The simulated table as a robot: real processes on a real graph, driven as a policy would."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip('rclpy')
if find_spec('mujoco') is None:  # imported here, it would look for a screen
    pytest.skip('MuJoCo is not installed', allow_module_level=True)

from builtin_interfaces.msg import Duration
from rclpy.qos import qos_profile_sensor_data
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import Float64MultiArray, String
from std_srvs.srv import Trigger
from test_launch import LAUNCH
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from oxygen_ros.conversions import (
    check_image,
    command_message,
    decode_image,
    joint_positions,
    stamp_to_ns,
)
from oxygen_ros.profile import CameraProfile, RobotProfile, load_profile
from oxygen_ros.sim.expert import expert_chunk
from oxygen_ros.sim.robot import CommandError, Motion, command_rows
from oxygen_ros.sim.tabletop import TabletopRobot
from oxygen_ros.sim.world import COLOURS, JOINTS, TabletopWorld

ROOT = Path(__file__).resolve().parents[1]
LAUNCH_FILE = ROOT / 'launch' / 'tabletop.launch.py'
TIMEOUT_S = 60.0
COMMAND_TYPES = {
    'forward_command': Float64MultiArray,
    'joint_state': JointState,
    'joint_trajectory': JointTrajectory,
}


class Table:
    """The world in a process of its own, and what a policy has of it: topics and services."""

    def __init__(self, graph: Any, process: subprocess.Popen[str], **parameters: Any) -> None:
        self.graph, self.node, self.process = graph, graph.node, process
        self.interface = parameters.get('command_interface', 'forward_command')
        self.heard: dict[str, list[Any]] = {}
        transport = parameters.get('transport', 'raw')
        kind = CompressedImage if transport == 'compressed' else Image
        for camera in ('base', 'side'):
            self.hear(camera, kind, TabletopRobot.camera_topic(camera, transport))
        self.hear('joints', JointState, 'joint_states')
        self.hear('clock', Clock, '/clock')
        for name in ('truth/narration', 'truth/memory', 'touched'):
            self.hear(name, String, f'tabletop/{name}')
        self.commands = self.node.create_publisher(
            COMMAND_TYPES[self.interface], 'joint_commands', 10
        )
        self.clients = {
            name: self.node.create_client(Trigger, f'tabletop/{name}') for name in ('reset', 'step')
        }
        self.instructions = self.node.create_publisher(String, 'instruction', 10)
        self.until(
            lambda: self.heard['joints'] and self.commands.get_subscription_count(), 'the table'
        )

    def hear(self, key: str, kind: type, topic: str) -> None:
        self.heard[key] = []
        self.node.create_subscription(kind, topic, self.heard[key].append, qos_profile_sensor_data)

    def until(self, is_true: Callable[[], Any], what: str) -> None:
        def look() -> Any:
            assert self.process.poll() is None, 'the table ended'
            return is_true()

        self.graph.spin_until(look, what, TIMEOUT_S)

    def call(self, name: str) -> str:
        client = self.clients[name]
        self.until(client.service_is_ready, name)
        future = client.call_async(Trigger.Request())
        self.until(future.done, f'the answer of {name}')
        assert future.result().success
        return str(future.result().message)

    def command(self, profile: RobotProfile, row: np.ndarray) -> None:
        self.commands.publish(command_message(profile.command, row[np.newaxis], 0.02))

    def positions(self) -> np.ndarray:
        return np.array(self.heard['joints'][-1].position)

    def time_ns(self) -> int:
        return stamp_to_ns(self.heard['joints'][-1].header.stamp)


def start(environment: dict[str, str] | None = None, **parameters: Any) -> subprocess.Popen[str]:
    arguments = [part for name, value in parameters.items() for part in ('-p', f'{name}:={value}')]
    return subprocess.Popen(
        [sys.executable, '-m', 'oxygen_ros.sim.tabletop', '--ros-args', *arguments],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def tables(graph: Any) -> Iterator[Callable[..., Table]]:
    processes: list[subprocess.Popen[str]] = []

    def make(**parameters: Any) -> Table:
        processes.append(start(**parameters))
        return Table(graph, processes[-1], **parameters)

    yield make
    for process in processes:
        process.send_signal(signal.SIGINT)  # one that is killed leaves its shared memory behind
    for process in processes:
        try:
            process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()


@pytest.fixture(scope='module')
def profile() -> RobotProfile:
    return load_profile('tabletop', ROOT / 'config')


def with_interface(folder: Path, interface: str) -> RobotProfile:
    text = (ROOT / 'config' / 'tabletop.yaml').read_text()
    path = folder / 'profile.yaml'
    path.write_text(text.replace('interface: forward_command', f'interface: {interface}'))
    return load_profile(str(path), folder)


# ---- commands


def test_joints_are_commanded_by_name_in_any_order() -> None:
    backwards = JointState(name=list(JOINTS[::-1]), position=[4.0, 3.0, 2.0, 1.0])
    times_s, rows = command_rows(backwards, JOINTS)
    assert times_s.tolist() == [0.0]
    assert rows.tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_a_trajectory_is_followed_along_straight_lines_and_then_held() -> None:
    motion = Motion(5.0, np.array([0.0, 0.1, 0.3]), np.array([[0.0] * 4, [1.0] * 4, [3.0] * 4]))
    assert motion.at(5.05).tolist() == pytest.approx([0.5] * 4)
    assert motion.at(5.2).tolist() == pytest.approx([2.0] * 4)
    assert motion.at(9.0).tolist() == [3.0] * 4


def point(*positions: float, seconds: int = 1) -> JointTrajectoryPoint:
    return JointTrajectoryPoint(positions=list(positions), time_from_start=Duration(sec=seconds))


@pytest.mark.parametrize(
    ('message', 'reason'),
    [
        (Float64MultiArray(data=[0.0, 0.0, 0.0]), 'expected 4 finite positions'),
        (Float64MultiArray(data=[0.0, 0.0, 0.0, float('nan')]), 'expected 4 finite positions'),
        (JointState(name=list(JOINTS), velocity=[0.0] * 4), 'expected 4 finite positions'),
        (JointState(name=['yaw'] * 4, position=[0.0] * 4), 'expected the joints'),
        (JointTrajectory(joint_names=list(JOINTS)), 'expected points in order of time'),
        (
            JointTrajectory(
                joint_names=list(JOINTS), points=[point(0, 0, 0, 0), point(0, 0, 0, 0)]
            ),
            'expected points in order of time',
        ),
    ],
)
def test_a_command_that_cannot_be_followed_is_refused_by_reason(message: Any, reason: str) -> None:
    with pytest.raises(CommandError, match=reason):
        command_rows(message, JOINTS)


# ---- real time


@pytest.mark.parametrize('transport', ['raw', 'compressed'])
def test_cameras_and_joints_are_what_the_profile_wants(
    tables: Any, profile: RobotProfile, transport: str
) -> None:
    table = tables(transport=transport)
    table.until(lambda: table.heard['base'] and table.heard['side'], 'both cameras')
    names = [camera.topic for camera in profile.cameras]
    assert names == [TabletopRobot.camera_topic(camera, 'raw') for camera in ('base', 'side')]
    pictures = []
    for name in ('base', 'side'):
        camera = CameraProfile(
            slot=name,
            topic=TabletopRobot.camera_topic(name, transport),
            transport=transport,
            max_age_s=1.0,
        )
        check_image(table.heard[name][0], camera)
        pictures.append(decode_image(table.heard[name][0], camera))
    assert [picture.shape for picture in pictures] == [(96, 96, 3)] * 2
    assert np.abs(pictures[0].astype(int) - pictures[1]).max() > 50
    found = joint_positions(table.heard['joints'][0], profile.joints)
    assert tuple(found) == profile.joints.names


@pytest.mark.parametrize('interface', COMMAND_TYPES)
def test_the_arm_goes_where_the_commands_of_the_node_send_it(
    tables: Any, tmp_path: Path, interface: str
) -> None:
    table = tables(command_interface=interface)
    profile = with_interface(tmp_path, interface)
    target = table.positions() + np.array([0.3, 0.1, 0.1, 0.1])

    def is_there() -> bool:
        table.command(profile, target)
        return bool(np.abs(table.positions() - target).max() < 0.02)

    table.until(is_there, 'the arm at its target')


def test_the_arm_stays_where_it_is_after_nonsense(tables: Any) -> None:
    table = tables()
    before = table.positions()
    table.commands.publish(Float64MultiArray(data=[float('nan')] * 4))
    heard = len(table.heard['joints'])
    table.until(lambda: len(table.heard['joints']) > heard + 25, 'half a second')
    assert np.abs(table.positions() - before).max() < 0.01


def test_stamps_are_of_the_system_clock_and_there_is_no_other(tables: Any) -> None:
    table = tables(joint_rate_hz=20.0)
    table.until(lambda: len(table.heard['joints']) > 40, '2 s of joint states')
    stamps_ns = [stamp_to_ns(message.header.stamp) for message in table.heard['joints']]
    assert abs(stamps_ns[-1] - time.time_ns()) < 5e9  # a busy machine
    assert (np.diff(stamps_ns) > 0).all()
    assert not table.heard['clock']


def test_the_truth_is_published_for_whoever_wants_to_compare(tables: Any) -> None:
    table = tables(seed=4)
    table.until(lambda: table.heard['truth/memory'], 'the truth')
    world = TabletopWorld()
    world.reset(4)
    assert table.heard['truth/memory'][-1].data == world.memory()
    assert table.heard['truth/narration'][-1].data == ''

    def is_narrated() -> bool:
        table.instructions.publish(String(data='touch the blue block'))
        return bool(table.heard['truth/narration'][-1].data)

    table.until(is_narrated, 'a narration')
    assert table.heard['truth/narration'][-1].data == world.narration('touch the blue block')
    world.close()


def test_each_reset_lays_out_the_next_seed(tables: Any) -> None:
    table = tables(seed=11)
    assert table.call('reset') == 'seed 12'
    world = TabletopWorld()
    world.reset(12)
    table.until(
        lambda: String(data=world.memory()) in table.heard['truth/memory'], 'the layout of seed 12'
    )
    assert table.call('reset') == 'seed 13'
    world.close()


def test_ctrl_c_ends_it_with_code_0(tables: Any) -> None:
    table = tables()
    table.process.send_signal(signal.SIGINT)
    assert table.process.wait(TIMEOUT_S) == 0


def test_without_graphics_it_names_the_package_to_install() -> None:
    process = start(environment={'MUJOCO_GL': 'none of them'})
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert 'apt install libosmesa6' in errors
    assert 'Traceback' not in errors


def test_a_mode_that_does_not_exist_is_refused_by_name() -> None:
    process = start(mode='backwards')
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert "parameter 'mode': expected one of ['realtime', 'stepped'], got 'backwards'" in errors


# ---- stepped


def reset_when_obeyed(table: Table, profile: RobotProfile) -> int:
    """Lay the table anew once it certainly hears commands; return the seed."""
    before = table.positions()
    while np.abs(table.positions() - before).max() < 0.01:
        table.command(profile, before + 0.1)
        step(table)
    return int(table.call('reset').removeprefix('seed '))


def step(table: Table) -> None:
    before_ns, told = table.time_ns(), len(table.heard['touched'])
    table.call('step')
    table.until(
        lambda: table.time_ns() > before_ns and len(table.heard['touched']) > told,
        'what the step has changed',
    )


def play_expert(table: Table, profile: RobotProfile, colour: str) -> np.ndarray:
    """Let the scripted expert play through the graph; return the joints after each step (n, 4)."""
    seed = reset_when_obeyed(table, profile)
    world = TabletopWorld()  # the expert is no policy: it is told where the blocks lie
    world.reset(seed)
    table.until(lambda: np.allclose(table.positions(), world.joint_positions()), 'the reset')
    block = world.blocks[COLOURS.index(colour)][np.newaxis]
    world.close()
    joints, began_ns = [table.positions()], table.time_ns()
    while table.heard['touched'][-1].data != colour:
        assert len(joints) < 100, 'not touched within 10 s'
        table.command(profile, expert_chunk(joints[-1], block, 1)[0, 0])
        step(table)
        joints.append(table.positions())
    assert table.time_ns() - began_ns == 100_000_000 * (len(joints) - 1)
    return np.array(joints)


def test_the_scripted_expert_touches_the_block_through_the_graph_alike_every_time(
    tables: Any, profile: RobotProfile
) -> None:
    played = []
    for _ in range(2):
        table = tables(mode='stepped', seed=3)
        played.append(play_expert(table, profile, 'green'))
        table.process.send_signal(signal.SIGINT)
        assert table.process.wait(TIMEOUT_S) == 0
    assert len(played[0]) > 15
    assert np.array_equal(played[0], played[1])


def test_a_stepped_world_stands_still_until_it_is_told(tables: Any, profile: RobotProfile) -> None:
    table = tables(mode='stepped')
    before = table.positions()
    table.command(profile, before + 0.2)
    clocks = len(table.heard['clock'])
    table.until(lambda: len(table.heard['clock']) > clocks + 5, 'half a second of /clock')
    assert len({stamp_to_ns(message.clock) for message in table.heard['clock']}) == 1
    assert np.array_equal(table.positions(), before)
    table.call('step')
    table.until(lambda: not np.array_equal(table.positions(), before), 'motion')


# ---- launch


def declared_arguments() -> dict[str, str]:
    """Argument name -> description, from the DeclareLaunchArgument calls."""
    arguments = {}
    for node in ast.walk(ast.parse(LAUNCH_FILE.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == 'DeclareLaunchArgument':
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            arguments[ast.literal_eval(node.args[0])] = ast.literal_eval(keywords['description'])
    return arguments


def test_the_launch_file_has_exactly_the_promised_arguments_each_described() -> None:
    arguments = declared_arguments()
    assert set(arguments) == {'seed', 'instruction', 'checkpoint', 'device', 'rqt'}
    assert all(text.strip() for text in arguments.values())


def test_the_launch_file_starts_the_table_and_includes_the_node() -> None:
    text = LAUNCH_FILE.read_text(encoding='utf-8')
    assert "executable='oxygen_tabletop'" in text
    assert "'oxygen.launch.py'" in text
    assert "'profile': 'tabletop'" in text
    assert 'respawn' not in text


def test_launched_together_the_node_meets_the_table_and_both_end_on_ctrl_c(graph: Any) -> None:
    pytest.importorskip('launch_ros')
    pytest.importorskip('oxygen_ros.msg', reason='package not built: ./run build')
    heard: list[Any] = []
    graph.node.create_subscription(
        JointState, 'joint_states', heard.append, qos_profile_sensor_data
    )
    # Without weights the node gives up, and says so; the table goes on.
    process = subprocess.Popen(
        [sys.executable, '-c', LAUNCH, str(LAUNCH_FILE), 'rqt:=false', 'checkpoint:=/nowhere'],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        graph.spin_until(lambda: heard, 'joint states of the launched table', TIMEOUT_S)
        names = graph.node.get_node_names
        graph.spin_until(lambda: 'oxygen' in names(), 'the launched node', TIMEOUT_S)
        graph.spin_until(lambda: 'oxygen' not in names(), 'the end of the node', TIMEOUT_S)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert '/nowhere' in output
    assert '[oxygen_tabletop-1]: process has finished cleanly' in output
