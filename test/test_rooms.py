"""Who may import whom. The rooms keep the fast tests free of torch and the engine free of ROS."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'oxygen_ros'
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob('*.py'))

# Torch stays with the tensors, rclpy with the node, message packages where messages are converted.
# Command-line programs of evaluation/ are ROS nodes of their own; they measure and use no tensor.
TORCH = {'torch', 'torchvision', 'safetensors', 'transformers'}
TORCH_ROOMS = (
    'model/',
    'engine/cuda.py',
    'engine/model_runner.py',
    'engine/static_runner.py',
    'sim/train.py',
)
RCLPY = {'rclpy', 'launch', 'launch_ros'}
ROBOTS = ('sim/robot.py', 'sim/tabletop.py', 'sim/aloha.py', 'sim/libero.py')
NODE = ('node.py', 'inputs.py', 'news.py', 'reports.py', 'interlock.py')
RCLPY_ROOMS = (*NODE, 'qos.py', *ROBOTS, 'evaluation/')
MESSAGE_ROOMS = (
    *NODE,
    'parameters.py',
    'conversions.py',
    *ROBOTS,
    'evaluation/',
)
DECISIONS = ('engine/scheduler.py', 'engine/sequence.py', 'engine/slots.py', 'engine/tasks.py')
# Openings of the engine for plain Python and GPU machines without ROS.
WITHOUT_ROS = ('oxygen_ros.engine.engine', 'oxygen_ros.model.pi05')


def imports_of(module: str) -> Iterator[str]:
    """Every module that a file imports, also inside functions; relative names resolved."""
    package = ['oxygen_ros', *Path(module).parts[:-1]]
    for node in ast.walk(ast.parse((PACKAGE / module).read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = '.'.join([*base, *([node.module] if node.module else [])])
            yield source
            yield from (f'{source}.{alias.name}' for alias in node.names)


def roots_of(module: str) -> set[str]:
    return {name.partition('.')[0] for name in imports_of(module)}


def is_message_package(root: str) -> bool:
    return root.endswith(('_msgs', '_srvs', '_interfaces'))


@pytest.mark.parametrize('module', MODULES)
def test_torch_is_imported_only_beside_the_tensors(module: str) -> None:
    if not module.startswith(TORCH_ROOMS):
        assert not roots_of(module) & TORCH


@pytest.mark.parametrize('module', MODULES)
def test_openpi_is_imported_only_by_its_bridge(module: str) -> None:
    if module != 'model/openpi_bridge.py':
        assert 'openpi' not in roots_of(module)


@pytest.mark.parametrize('module', MODULES)
def test_rclpy_is_imported_only_by_the_node_and_programs(module: str) -> None:
    if not module.startswith(RCLPY_ROOMS):
        assert not roots_of(module) & RCLPY


@pytest.mark.parametrize('module', MODULES)
def test_messages_are_known_only_to_conversions_node_and_programs(module: str) -> None:
    if not module.startswith(MESSAGE_ROOMS):
        assert not {root for root in roots_of(module) if is_message_package(root)}
        assert not {name for name in imports_of(module) if name.startswith('oxygen_ros.msg')}


@pytest.mark.parametrize('module', DECISIONS)
def test_decisions_of_the_engine_need_only_the_standard_library(module: str) -> None:
    ours = {name for name in imports_of(module) if name.startswith('oxygen_ros.')}
    assert roots_of(module) - {'oxygen_ros'} <= set(sys.stdlib_module_names)
    assert all(name.startswith('oxygen_ros.engine.') for name in ours), ours
    assert not {name for name in ours if 'model_runner' in name}


@pytest.mark.parametrize('module', MODULES)
def test_nobody_imports_the_node(module: str) -> None:
    assert 'oxygen_ros.node' not in set(imports_of(module))


@pytest.mark.parametrize('module', [name for name in MODULES if name.startswith('model/')])
def test_the_model_knows_neither_the_engine_nor_the_robot_side(module: str) -> None:
    ours = {name for name in imports_of(module) if name.startswith('oxygen_ros.')}
    its_input = {'oxygen_ros.observation', 'oxygen_ros.observation.Observation'}
    assert all(name.startswith('oxygen_ros.model') for name in ours - its_input), ours


@pytest.mark.parametrize('module', [name for name in MODULES if name.endswith('__init__.py')])
def test_init_files_import_nothing(module: str) -> None:
    expected = {'pkgutil', 'pkgutil.extend_path'} if module == '__init__.py' else set()
    assert set(imports_of(module)) == expected


@pytest.mark.parametrize('module', MODULES)
def test_modules_open_with_a_docstring(module: str) -> None:
    tree = ast.parse((PACKAGE / module).read_text(encoding='utf-8'))
    assert not tree.body or ast.get_docstring(tree)


def test_engine_and_model_run_where_no_ros_is_installed() -> None:
    pytest.importorskip('torch')
    blocked = ('rclpy', 'sensor_msgs', 'std_msgs', 'trajectory_msgs', 'oxygen_ros.msg')
    program = (
        'import sys\n'
        f'sys.modules.update(dict.fromkeys({blocked!r}))\n'
        f'import {", ".join(WITHOUT_ROS)}\n'
    )
    result = subprocess.run(
        [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_an_import_inside_a_function_or_of_a_neighbour_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'engine').mkdir()
    (tmp_path / 'engine' / 'sample.py').write_text(
        'def late():\n    import torch.cuda\n    from ..node import main\n    from . import slots\n'
    )
    monkeypatch.setattr(sys.modules[__name__], 'PACKAGE', tmp_path)
    assert set(imports_of('engine/sample.py')) == {
        'torch.cuda',
        'oxygen_ros.node',
        'oxygen_ros.node.main',
        'oxygen_ros.engine',
        'oxygen_ros.engine.slots',
    }
