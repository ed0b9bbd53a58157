"""What LIBERO's package is asked for, and how everything that it lacks is told in one error.

A package of the same shape, made here, stands in for hf-libero, so that each fault can be made. It
asks on stdin as the real one does. Where the real one is installed, its lists are read.
"""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import yaml

if find_spec('mujoco') is None:  # imported here, it would look for a screen
    pytest.skip('MuJoCo is not installed', allow_module_level=True)

from oxygen_ros.sim import libero_tasks
from oxygen_ros.sim.libero_tasks import (
    NUM_TASKS,
    STEP_LIMITS,
    SUITES,
    LiberoError,
    answer_first_question,
    suite_tasks,
)

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 120.0

ASKS = """
import os, yaml
folder = os.environ['LIBERO_CONFIG_PATH']
if not os.path.exists(os.path.join(folder, 'config.yaml')):
    input('Do you want to specify a custom path for the dataset folder? (Y/N): ')
def get_assets_path():
    print('Local assets not found. Downloading ...')
    return os.path.join(os.path.dirname(__file__), 'assets')
"""
BENCHMARK = """
from types import SimpleNamespace
class Suite:
    def __init__(self):
        print('[info] using task orders')
        self.n_tasks = 10
    def get_task(self, i):
        return SimpleNamespace(language=f'do the thing {i}')
    def get_task_bddl_file_path(self, i):
        return f'/bddl/{i}.bddl'
    def get_task_init_states(self, i):
        return [[float(i)]] * 50
def get_benchmark_dict():
    return dict.fromkeys(('libero_spatial', 'libero_object', 'libero_goal', 'libero_10'), Suite)
"""
ENVIRONMENTS = """
class OffScreenRenderEnv:
    def __init__(self, **given):
        self.given = given
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `libero/libero` of a stand-in that can be imported by programs started here."""
    folder = tmp_path / 'site' / 'libero' / 'libero'
    for name in ('bddl_files', 'init_files', 'benchmark', 'envs'):
        (folder / name).mkdir(parents=True)
    (folder.parent / '__init__.py').write_text('')
    (folder / '__init__.py').write_text(ASKS)
    (folder / 'benchmark' / '__init__.py').write_text(BENCHMARK)
    (folder / 'envs' / '__init__.py').write_text(ENVIRONMENTS)
    paths = (str(folder.parents[1]), str(ROOT), os.environ.get('PYTHONPATH', ''))
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join(paths))
    monkeypatch.setenv('LIBERO_CONFIG_PATH', str(tmp_path / 'config'))
    return folder


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program whom nobody types to; that it ends at all is part of the test."""
    return subprocess.run(
        [sys.executable, '-c', program, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


LIST = """
from oxygen_ros.sim.libero_tasks import suite_tasks
tasks = suite_tasks('libero_goal')
print([task.language for task in tasks][:2], tasks[3].init_states[0], tasks[3].step_limit)
"""
MAKE = """
from oxygen_ros.sim.libero_tasks import LiberoError, suite_tasks
try:
    print(sorted(suite_tasks('libero_goal')[3].make().given.items()))
except LiberoError as error:
    print('LiberoError:', error)
"""


# --- the question on stdin ------------------------------------------------------------------------


def test_the_question_of_the_first_import_is_answered_before_it_is_asked(package: Path) -> None:
    asked = run('import libero.libero')
    assert asked.returncode == 1 and 'EOFError' in asked.stderr, 'or this test shows nothing'
    result = run(LIST)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "['do the thing 0', 'do the thing 1'] [3.0] 300\n"
    assert 'using task orders' in result.stderr, 'stdout is for results'
    assert run(LIST).stdout == result.stdout, 'and so with the file that is there now'


def test_the_answer_names_the_installed_package_and_leaves_nothing_else(
    package: Path, tmp_path: Path
) -> None:
    answer_first_question(package)
    assert [path.name for path in (tmp_path / 'config').iterdir()] == ['config.yaml']
    config = yaml.safe_load((tmp_path / 'config' / 'config.yaml').read_text())
    assert config['bddl_files'] == str(package / 'bddl_files')
    assert config['init_states'] == str(package / 'init_files')
    assert set(config) == {'benchmark_root', 'bddl_files', 'init_states', 'datasets', 'assets'}


def test_a_users_own_file_is_left_as_it_is(package: Path, tmp_path: Path) -> None:
    file = tmp_path / 'config' / 'config.yaml'
    file.parent.mkdir()
    text = f'bddl_files: {tmp_path}\ninit_states: {tmp_path}\n'
    file.write_text(text)
    answer_first_question(package)
    assert file.read_text() == text


@pytest.mark.parametrize(
    ('text', 'key', 'got'),
    [
        ('bddl_files: /nowhere/bddl\n', 'bddl_files', '/nowhere/bddl'),
        ('bddl_files: /\n', 'init_states', 'None'),
        ('just words\n', 'bddl_files', 'None'),
    ],
)
def test_a_config_file_of_another_installation_is_told_by_file_key_and_value(
    package: Path, tmp_path: Path, text: str, key: str, got: str
) -> None:
    file = tmp_path / 'config' / 'config.yaml'
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(LiberoError) as refused:
        answer_first_question(package)
    message = str(refused.value)
    assert message.startswith(f'{file}: {key}: expected a folder')
    assert got in message and 'delete the file' in message


def test_a_config_file_that_is_no_yaml_is_named(package: Path, tmp_path: Path) -> None:
    file = tmp_path / 'config' / 'config.yaml'
    file.parent.mkdir()
    file.write_text('a: [\n')
    with pytest.raises(LiberoError, match=f'{file}: expected the config file of LIBERO'):
        answer_first_question(package)


def test_a_folder_that_cannot_be_written_is_told_with_the_way_out(
    package: Path, tmp_path: Path
) -> None:
    (tmp_path / 'config').write_text('a file where the folder should be')
    with pytest.raises(LiberoError, match=r'config.yaml: .* set LIBERO_CONFIG_PATH'):
        answer_first_question(package)


# --- what is missing ------------------------------------------------------------------------------


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libero_tasks, 'find_spec', lambda name: None)
    with pytest.raises(LiberoError, match=r'not installed: pip install hf-libero==0.1.4') as error:
        suite_tasks('libero_goal')
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(('file', 'program'), [('benchmark', LIST), ('envs', MAKE)])
def test_a_module_that_libero_lacks_is_named(package: Path, file: str, program: str) -> None:
    path = package / file / '__init__.py'
    path.write_text(f'import robosuite_of_old\n{path.read_text()}')
    result = run(program)
    assert (
        "LIBERO needs 'robosuite_of_old', which is not installed" in result.stdout + result.stderr
    )


@pytest.mark.parametrize('there', [(), ('assets',)])
def test_without_assets_the_folder_and_two_ways_out_are_named(
    package: Path, there: tuple[str, ...]
) -> None:
    for name in there:  # a download that broke off leaves an empty folder
        (package / name).mkdir()
    result = run(MAKE)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f'LiberoError: {package / "assets"}: the scenes')
    assert 'with a network' in result.stdout and '.cache/libero/assets' in result.stdout


def test_with_assets_the_environment_is_made_of_the_tasks_own_file(package: Path) -> None:
    (package / 'assets' / 'scenes').mkdir(parents=True)
    result = run(MAKE)
    assert result.returncode == 0, result.stderr
    given = dict(ast.literal_eval(result.stdout))
    assert given['bddl_file_name'] == '/bddl/3.bddl'
    assert (given['control_freq'], given['camera_heights'], given['camera_widths']) == (
        20,
        256,
        256,
    )


# --- the real package -----------------------------------------------------------------------------

needs_libero = pytest.mark.skipif(find_spec('libero') is None, reason='hf-libero is not installed')


@needs_libero
@pytest.mark.parametrize('suite', SUITES)
def test_the_benchmark_lists_ten_tasks_with_fifty_initial_states_each(
    suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('LIBERO_CONFIG_PATH', str(tmp_path))
    tasks = suite_tasks(suite)
    assert [task.index for task in tasks] == list(range(NUM_TASKS))
    assert len({task.language for task in tasks}) == NUM_TASKS
    assert all(' ' in task.language and '_' not in task.language for task in tasks)
    assert {len(task.init_states) for task in tasks} == {50}
    assert all(np.isfinite(task.init_states).all() for task in tasks)
    assert {task.step_limit for task in tasks} == {STEP_LIMITS[suite]}


@needs_libero
def test_the_environment_takes_what_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('LIBERO_CONFIG_PATH', str(tmp_path))
    suite_tasks('libero_goal')
    given = {'bddl_file_name', 'camera_heights', 'camera_widths', 'control_freq'}
    given |= {'use_camera_obs', 'ignore_done'}
    from libero.libero.envs.env_wrapper import ControlEnv

    assert given <= set(inspect.signature(ControlEnv.__init__).parameters)
    wanted = ('seed', 'reset', 'set_init_state', 'step', 'check_success', 'close', 'sim')
    assert all(hasattr(ControlEnv, name) for name in wanted)
