"""What the packaging files promise each other: versions, executables, dependencies, messages."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
INTERFACES = sorted([*(ROOT / 'msg').glob('*.msg'), *(ROOT / 'srv').glob('*.srv')])
EXECUTABLE = re.compile(r'^ +(\w+)=(oxygen_ros[\w.]*):(\w+)$', re.MULTILINE)
EXECUTABLES = EXECUTABLE.findall((ROOT / 'CMakeLists.txt').read_text())
# Python modules whose rosdep key is not python3-NAME.
ROSDEP_KEYS = {'cv2': 'python3-opencv', 'PIL': 'python3-pil'}
# What rosdep does not know (see package.xml) or what only the replay and demo programs use.
PIP_ONLY = {'torch', 'safetensors', 'sentencepiece'} | {
    'rosbags',
    'skimage',
    'matplotlib',
    'rich',
    'mujoco',
    'openpi',
    'libero',
    'ray',
}


@pytest.fixture(scope='module')
def manifest() -> Any:
    """package.xml as the ROS tools read it."""
    packages = pytest.importorskip('catkin_pkg.package')
    return packages.parse_package(str(ROOT))


def test_all_files_name_the_same_version(manifest: Any) -> None:
    setup = re.search(r"version='(.+)'", (ROOT / 'setup.py').read_text())
    changelog = re.search(
        r'^(\d+\.\d+\.\d+) \(', (ROOT / 'CHANGELOG.rst').read_text(), re.MULTILINE
    )
    assert setup and changelog
    assert setup.group(1) == changelog.group(1) == manifest.version


def test_the_manifest_is_valid_for_the_ros_tools(manifest: Any) -> None:
    warnings: list[str] = []
    manifest.validate(warnings=warnings)
    assert not warnings
    assert manifest.get_build_type() == 'ament_cmake'
    assert [group.name for group in manifest.member_of_groups] == ['rosidl_interface_packages']
    assert (ROOT / manifest.licenses[0].file).is_file()


def test_every_import_of_the_sources_is_a_declared_dependency(manifest: Any) -> None:
    declared = {dependency.name for dependency in manifest.exec_depends}
    missing = {}
    for path in sorted([*ROOT.glob('oxygen_ros/**/*.py'), *ROOT.glob('launch/*.py')]):
        for module in (
            imported_roots(path) - set(sys.stdlib_module_names) - PIP_ONLY - {'oxygen_ros'}
        ):
            keys = {module, f'python3-{module}', ROSDEP_KEYS.get(module, '')}
            if not keys & declared:
                missing[module] = path.relative_to(ROOT).as_posix()
    assert not missing


def imported_roots(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition('.')[0])
    return names


@pytest.mark.case(52)
@pytest.mark.parametrize(('name', 'module', 'function'), EXECUTABLES)
def test_an_executable_names_a_function_that_exists(name: str, module: str, function: str) -> None:
    path = ROOT / (module.replace('.', '/') + '.py')
    functions = {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    }
    assert function in functions, f'{name} runs {module}:{function}'


def test_the_programs_are_executables() -> None:
    programs = {'oxygen', 'oxygen_demo', 'oxygen_episodes', 'oxygen_play', 'oxygen_tabletop'}
    programs |= {'oxygen_convert', 'oxygen_profile_check', 'oxygen_train', 'profile_check'}
    programs |= {
        'oxygen_aloha',
        'oxygen_eval',
        'oxygen_libero',
        'oxygen_libero_eval',
        'oxygen_soak',
    }
    assert programs <= {name for name, _, _ in EXECUTABLES}


def test_cmake_generates_every_message_file() -> None:
    listed = re.findall(
        r'^ +(?:msg|srv)/(\w+\.(?:msg|srv))$', (ROOT / 'CMakeLists.txt').read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(path.name for path in INTERFACES)


@pytest.mark.parametrize('path', INTERFACES, ids=lambda path: path.name)
def test_every_message_field_says_what_it_is_and_every_number_its_unit(path: Path) -> None:
    lines = path.read_text().splitlines()
    fields = [line for line in lines if line and line != '---' and not line.startswith('#')]
    assert fields
    for field in fields:
        declaration, _, comment = field.partition('#')
        assert comment.strip(), field
        if declaration.startswith(('float', 'int', 'uint')):
            assert re.search(r'\[.+\]', comment), f'no unit: {field}'


@pytest.mark.parametrize('script', ['run', '.ci/run'])
def test_scripts_can_be_executed(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith('#!/usr/bin/env bash\n')


def test_every_requirement_is_pinned() -> None:
    files = ('requirements.txt', 'requirements-alone.txt')
    lines = [line for name in files for line in (ROOT / name).read_text().splitlines()]
    requirements = [line for line in lines if line and not line.startswith('#')]
    loose = [
        line for line in requirements if not re.match(r'^[\w.-]+==[\w.]+(; python_version|$)', line)
    ]
    assert loose == ['setuptools<80']
    assert '# everywhere' in lines, 'run cuts the file there'


@pytest.mark.case(52)
def test_messages_arrive_over_dds_as_they_were_sent(graph: Any) -> None:
    messages = pytest.importorskip('oxygen_ros.msg', reason='messages not built: ./run build')
    sent = [
        messages.Text(frame=2**40, task='text', delta='lo π', text='hello π', num_tokens=3),
        messages.Note(frame=7, task='memory', text='cup on the left', reason='eos', num_tokens=5),
        messages.ActionChunk(
            joint_names=['a', 'b'], period_s=0.02, horizon=2, values=[1.0, 2, 3, 4]
        ),
        messages.EngineStats(
            command_hz=50.0, drops=3, drop_reasons=['chunk_late'], drop_counts=[3]
        ),
    ]
    received: dict[str, Any] = {}
    publishers = []
    for message in sent:
        kind = type(message)
        graph.node.create_subscription(
            kind, kind.__name__, lambda got, name=kind.__name__: received.update({name: got}), 10
        )
        publishers.append(graph.node.create_publisher(kind, kind.__name__, 10))
    graph.spin_until(
        lambda: all(publisher.get_subscription_count() for publisher in publishers), 'discovery'
    )
    for publisher, message in zip(publishers, sent, strict=True):
        publisher.publish(message)
    graph.spin_until(lambda: len(received) == len(sent), 'all messages')
    assert [received[type(message).__name__] for message in sent] == sent
