"""LIBERO's protocol: what is counted, what ends an episode, what is left when it is cut short.

The live runs let the node, with a small random model, play in stand-ins for LIBERO's environments.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip('rclpy')
if find_spec('mujoco') is None:  # imported here, it would look for a screen
    pytest.skip('MuJoCo is not installed', allow_module_level=True)
pytest.importorskip('oxygen_ros.msg', reason='messages not built: ./run build')

from libero_stand_ins import FakeEnvironment, LiftEnvironment, a_task, needs_robosuite

from oxygen_ros.evaluation import libero_episodes
from oxygen_ros.evaluation.libero_report import Played, Record, as_json, markdown
from oxygen_ros.evaluation.lockstep_profile import lockstep_profile
from oxygen_ros.profile import ProfileError, load_profile
from oxygen_ros.sim.libero_tasks import STEP_LIMITS, SUITES
from oxygen_ros.sim.libero_world import CONTROL_PERIOD_S, SETTLING_STEPS, LiberoWorld

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300.0


def small_profile(folder: Path) -> Path:
    """The profile as it ships, but for the model: tiny and random."""
    raw = yaml.safe_load((ROOT / 'config' / 'libero.yaml').read_text())
    raw['model'] |= {
        'preset': 'dummy',
        'random_weights': True,
        'normalization': 'none',
        'norm_stats': '',
    }
    for task in raw['tasks']:
        task['max_new_tokens'] = 4
    path = folder / 'libero_small.yaml'
    path.write_text(yaml.safe_dump(raw))
    return path


def parse(folder: Path, *more: str) -> argparse.Namespace:
    arguments = ['--profile', str(small_profile(folder)), '--out', str(folder / 'out'), *more]
    return libero_episodes._parse([*arguments, '--device', 'cpu'])


# --- counting -------------------------------------------------------------------------------------


def an_episode(**changes: Any) -> Played:
    episode = Played(
        execution='unified',
        suite='libero_goal',
        task=0,
        language='open the drawer',
        trial=0,
        success=False,
        steps=300,
        looks=60,
        texts_due=120,
        texts_ended=119,
        chunk_ms=20.0,
        wall_s=9.0,
    )
    return replace(episode, **changes)


def some_episodes() -> list[Played]:
    return [
        an_episode(success=True),
        an_episode(trial=1),
        an_episode(task=1, language='turn on the stove', success=True, chunk_ms=50.0),
        an_episode(suite='libero_10', language='do both'),
        an_episode(execution='shared', success=True),
    ]


def test_rates_are_per_suite_and_execution_and_successes_per_task() -> None:
    data = as_json(some_episodes(), {'trials': 2}, due=8)
    assert (data['episodes'], data['episodes_due'], data['setting']) == (5, 8, {'trials': 2})
    unified = data['executions']['unified']
    assert (unified['success']['hits'], unified['success']['total']) == (2, 4)
    goal = unified['suites']['libero_goal']
    assert goal['success']['rate'] == pytest.approx(2 / 3)
    # Wilson's interval of 2 of 3, by the formula.
    assert (goal['success']['low'], goal['success']['high']) == pytest.approx(
        (0.2077, 0.9385), abs=1e-4
    )
    assert goal['tasks'] == [
        {'task': 0, 'language': 'open the drawer', 'successes': 1, 'trials': 2},
        {'task': 1, 'language': 'turn on the stove', 'successes': 1, 'trials': 1},
    ]
    assert unified['suites']['libero_10']['success']['hits'] == 0
    assert (unified['texts_due'], unified['texts_ended']) == (480, 476)
    assert unified['chunk_ms'] == 20.0
    assert data['executions']['shared']['success']['rate'] == 1.0
    json.dumps(data, allow_nan=False)


def test_the_tables_say_the_same_in_words() -> None:
    lines = markdown(some_episodes(), 'about this run').splitlines()
    assert 'about this run' in lines
    assert '| suite | unified | shared |' in lines
    assert '| libero_goal | 66.7% [20.8%, 93.9%] of 3 | 100.0% [20.7%, 100.0%] of 1 |' in lines
    assert '| libero_10 | 0.0% [0.0%, 79.3%] of 1 | - |' in lines
    assert '| libero_goal | 0: open the drawer | 1 of 2 | 1 of 1 |' in lines


def test_nothing_played_makes_empty_tables_and_no_error() -> None:
    assert as_json([], {}, due=10)['executions'] == {}
    assert '| all |' in markdown([], 'nothing')


def test_every_episode_is_on_disk_at_once_and_a_second_run_does_not_overwrite_it(
    tmp_path: Path,
) -> None:
    record = Record(tmp_path)
    record.add(an_episode(language='put "it", there'))
    record.add(an_episode(trial=1))
    with (tmp_path / 'episodes.csv').open(newline='') as file:
        rows = list(csv.DictReader(file))
    assert [(row['language'], row['success'], row['steps']) for row in rows] == [
        ('put "it", there', 'False', '300'),
        ('open the drawer', 'False', '300'),
    ]
    with pytest.raises(FileExistsError, match=r'episodes\.csv: holds a run already'):
        Record(tmp_path)


# --- one episode ----------------------------------------------------------------------------------


class ScriptedStep:
    """A lock-step whose node always commands the same, five rows per look."""

    def __init__(self, world: LiberoWorld, row: list[float]) -> None:
        self.world, self.row = world, np.array(row)
        self.robot = SimpleNamespace(reset=world.reset)
        self.heard = SimpleNamespace(endings={('text', 1): 'said', ('text', 99): 'of another'})
        self.begun: list[tuple[int, str]] = []
        self.num_looks = 0

    def begin(self, number: int, instruction: str) -> None:
        self.begun.append((number, instruction))

    def look(self) -> Any:
        self.num_looks += 1
        return SimpleNamespace(stamp_ns=self.num_looks, chunk_ms=10.0 * self.num_looks)

    def act(self, is_over: Any) -> None:
        for _ in range(5):
            if not is_over():
                self.world.step(self.row, CONTROL_PERIOD_S)

    def finish_texts(self) -> None:
        pass


def play_scripted(row: list[float], **changes: Any) -> tuple[Played, ScriptedStep]:
    world = LiberoWorld(a_task(**changes))
    lockstep: Any = ScriptedStep(world, row)
    profile = load_profile('libero', ROOT / 'config')
    return libero_episodes.play(lockstep, world, 3, 'shared', profile), lockstep


def test_success_is_noticed_at_the_step_after_which_the_environment_says_so() -> None:
    played, lockstep = play_scripted([0.25, 0, 0, 0, 0, 0, 1], step_limit=100)
    assert (played.success, played.steps, played.looks) == (True, 7, 2)
    assert (played.execution, played.trial, played.chunk_ms) == ('shared', 3, 15.0)
    assert lockstep.begun == [(3, 'lift the red cube')]


def test_without_success_an_episode_ends_at_its_limit_of_steps_settling_not_counted() -> None:
    environment = FakeEnvironment()
    played, _ = play_scripted([0, 0, 0, 0, 0, 0, 1], step_limit=12, make=lambda: environment)
    assert (played.success, played.steps, played.looks) == (False, 12, 3)
    assert environment.num_steps == SETTLING_STEPS + 12


def test_texts_are_counted_by_the_stamps_of_their_looks_and_forgotten() -> None:
    played, lockstep = play_scripted([0, 0, 0, 0, 0, 0, 1])
    assert (played.looks, played.texts_due, played.texts_ended) == (2, 4, 1)
    assert list(lockstep.heard.endings) == [('text', 99)]


def test_limits_are_openpis_and_every_trial_has_a_time_of_its_own() -> None:
    assert STEP_LIMITS == {
        'libero_spatial': 220,
        'libero_object': 280,
        'libero_goal': 300,
        'libero_10': 520,
    }
    places = [
        libero_episodes._place_in_time(a_task(suite=suite, index=index), trial)
        for suite in SUITES
        for index in range(10)
        for trial in range(50)
    ]
    assert places == list(range(2000))


# --- setting and arguments ------------------------------------------------------------------------


def test_by_default_it_is_the_whole_protocol() -> None:
    options = libero_episodes._parse([])
    assert tuple(options.suite) == SUITES and options.task == set(range(10))
    assert (options.trials, options.rows, options.execution) == (50, 5, 'all')


def test_in_lock_step_limits_of_differences_stay_and_rows_come_four_times_a_second(
    tmp_path: Path,
) -> None:
    base = load_profile('libero', ROOT / 'config')
    made = lockstep_profile(
        ROOT / 'config' / 'libero.yaml', tmp_path / 'made.yaml', frame_rate_hz=4.0, copies=2
    )
    assert made.command.max_velocity == base.command.max_velocity == (1.0,) * 7
    assert (made.action, made.model, made.cameras) == (base.action, base.model, base.cameras)
    assert len(made.tasks) == 2 * len(base.tasks)


@pytest.mark.parametrize(
    ('change', 'key'),
    [
        (('topic: state ', 'topic: joints '), 'joints.topic'),
        (('topic: eye_in_hand/image_raw', 'topic: wrist/image_raw'), 'cameras: left_wrist_0_rgb'),
        (('quantity: velocity ', 'quantity: position '), 'command'),
    ],
)
def test_a_profile_of_another_robot_is_refused_by_key(
    tmp_path: Path, change: tuple[str, str], key: str
) -> None:
    text = (ROOT / 'config' / 'libero.yaml').read_text()
    assert change[0] in text
    path = tmp_path / 'other.yaml'
    path.write_text(text.replace(*change))
    options = libero_episodes._parse(['--profile', str(path), '--out', str(tmp_path / 'out')])
    with pytest.raises(ProfileError, match=key):
        libero_episodes.make_setting(options)


def test_as_many_rows_as_a_chunk_has_are_taken_and_no_more(tmp_path: Path) -> None:
    setting = libero_episodes.make_setting(parse(tmp_path, '--rows', '10'))
    assert setting.profile.frame_rate_hz == 2.0
    with pytest.raises(ProfileError, match=r'--rows: expected at most .* 10, got 11'):
        libero_episodes.make_setting(parse(tmp_path, '--rows', '11'))


def test_real_weights_must_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert libero_episodes.main(['--out', str(tmp_path)]) == 1
    assert '--checkpoint' in capsys.readouterr().err


@pytest.mark.parametrize(
    'arguments',
    [('--trials', '0'), ('--trials', '51'), ('--rows', '0'), ('--task', '10'), ('--suite', 'x')],
)
def test_wrong_arguments_are_refused_with_code_2(
    tmp_path: Path, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        libero_episodes.main(['--out', str(tmp_path), *arguments])
    assert refused.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.skipif(find_spec('libero') is not None, reason='hf-libero is installed')
def test_without_libero_it_says_what_to_install_and_ends_with_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_profile(tmp_path)
    arguments = ['--profile', str(path), '--out', str(tmp_path / 'out')]
    assert libero_episodes.main(arguments) == 1
    assert 'oxygen_libero_eval: expected the LIBERO benchmark' in capsys.readouterr().err


# --- over the live graph --------------------------------------------------------------------------


def test_a_node_that_cannot_start_is_told_with_its_log_and_the_tables_are_there(
    tmp_path: Path,
    ros_domain: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(libero_episodes, 'suite_tasks', lambda suite: [a_task(suite=suite)])
    arguments = ['--profile', str(small_profile(tmp_path)), '--out', str(tmp_path / 'out')]
    nowhere = str(tmp_path / 'nowhere')
    assert libero_episodes.main([*arguments, '--checkpoint', nowhere, '--device', 'cpu']) == 1
    said = capsys.readouterr()
    assert 'unified: the node ended with exit code 1' in said.err and nowhere in said.err
    assert json.loads(said.out.splitlines()[-1])['episodes'] == 0
    assert not (tmp_path / 'out' / 'episodes.csv').exists(), 'nothing is in the way of a second try'


@pytest.mark.slow
def test_the_node_plays_under_each_execution_and_success_is_counted(
    tmp_path: Path, ros_domain: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = parse(tmp_path, '--trials', '2')
    after = SETTLING_STEPS + 3
    tasks = [
        a_task(step_limit=6, make=lambda: FakeEnvironment(math.inf, succeeds_after=after)),
        a_task(
            step_limit=6, index=1, language='push the cube', make=lambda: FakeEnvironment(math.inf)
        ),
    ]
    assert libero_episodes.evaluate(libero_episodes.make_setting(options), tasks) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert data == json.loads((tmp_path / 'out' / 'libero.json').read_text())
    assert data['episodes'] == data['episodes_due'] == 12
    assert set(data['executions']) == {'unified', 'shared', 'isolated'}
    for execution in data['executions'].values():
        suite = execution['suites']['libero_spatial']
        assert [task['successes'] for task in suite['tasks']] == [2, 0]
        assert execution['control_steps'] == 2 * 3 + 2 * 6
        assert execution['looks'] == 2 * 1 + 2 * 2
        assert execution['texts_ended'] == execution['texts_due'] == 2 * execution['looks']
    rows = (tmp_path / 'out' / 'episodes.csv').read_text().splitlines()
    assert len(rows) == 1 + 12
    assert 'push the cube | 0 of 2' in (tmp_path / 'out' / 'libero.md').read_text()


@pytest.mark.slow
def test_equal_trials_are_equal_to_the_last_bit_whatever_execution_and_came_before(
    tmp_path: Path, ros_domain: int
) -> None:
    setting = libero_episodes.make_setting(parse(tmp_path, '--trials', '2'))
    before = a_task(index=1, step_limit=6, make=lambda: FakeEnvironment(math.inf))
    actions = []
    for execution, tasks in (('unified', [before]), ('isolated', [])):
        environment = FakeEnvironment(math.inf)
        task = a_task(index=2, make=lambda made=environment: made)
        played = list(
            libero_episodes.play_all(setting, execution, LiberoWorld(a_task()), [*tasks, task])
        )
        assert [one.steps for one in played[-2:]] == [10, 10]
        actions.append(environment.actions())
    np.testing.assert_array_equal(*actions)
    assert actions[0][-10:] != actions[0][10:20], 'another trial is another episode'


@pytest.mark.slow
def test_what_moves_the_hand_is_the_chunk_row_by_row_and_each_row_once(
    tmp_path: Path, ros_domain: int
) -> None:
    setting = libero_episodes.make_setting(
        parse(tmp_path, '--trials', '1', '--execution', 'unified', '--copies', '0')
    )
    environment = FakeEnvironment(goal_x=math.inf)
    world = LiberoWorld(a_task())
    looks = []
    original = libero_episodes.LockStep.look

    def look(lockstep: Any) -> Any:
        looks.append(original(lockstep))
        return looks[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libero_episodes.LockStep, 'look', look)
        task = a_task(make=lambda: environment)
        (played,) = libero_episodes.play_all(setting, 'unified', world, [task])
    assert (played.steps, played.looks, played.texts_due) == (10, 2, 0)
    expected = np.clip(np.vstack([look.chunk[:5] for look in looks]), -1.0, 1.0)
    assert expected.shape == (10, 7) and np.abs(expected).min() > 0
    np.testing.assert_allclose(environment.actions()[-10:], expected, atol=1e-9)


@needs_robosuite
@pytest.mark.slow
def test_the_node_plays_robosuites_lift(
    tmp_path: Path, ros_domain: int, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = libero_episodes.make_setting(
        parse(tmp_path, '--trials', '2', '--execution', 'unified')
    )
    assert libero_episodes.evaluate(setting, [a_task(make=LiftEnvironment)]) == 0
    unified = json.loads(capsys.readouterr().out.splitlines()[-1])['executions']['unified']
    assert (unified['success']['hits'], unified['success']['total']) == (0, 2)
    assert (unified['control_steps'], unified['looks']) == (20, 4)


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_played(tmp_path: Path, ros_domain: int) -> None:
    program = (
        'import sys\n'
        'from libero_stand_ins import a_task\n'
        'from oxygen_ros.evaluation import libero_episodes\n'
        'libero_episodes.suite_tasks = lambda suite: [a_task()]\n'
        'sys.exit(libero_episodes.main(sys.argv[1:]))\n'
    )
    paths = (str(ROOT), str(ROOT / 'test'), os.environ.get('PYTHONPATH', ''))
    process = subprocess.Popen(
        [sys.executable, '-c', program, '--profile', str(small_profile(tmp_path)),
         '--out', str(tmp_path / 'out'), '--suite', SUITES[0], '--execution', 'unified',
         '--copies', '0', '--device', 'cpu'],
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(paths)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    rows = tmp_path / 'out' / 'episodes.csv'
    limit_s = time.monotonic() + TIMEOUT_S
    while not (rows.is_file() and len(rows.read_text().splitlines()) > 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit_s
        time.sleep(0.05)  # polling a file, no evidence
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == libero_episodes.INTERRUPTED, errors
    assert 'Traceback' not in errors
    data = json.loads(output.splitlines()[-1])
    assert 2 <= data['episodes'] < data['episodes_due'] == 50
    assert len(rows.read_text().splitlines()) == 1 + data['episodes']
    assert data == json.loads((tmp_path / 'out' / 'libero.json').read_text())
