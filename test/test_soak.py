"""The soak: what its witness and its verdict catch, and that a run injects, survives and judges."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oxygen_ros.evaluation import soak, stall_watch
from oxygen_ros.evaluation.soak_faults import FAULTS
from oxygen_ros.evaluation.soak_witness import CommandCheck, Misses, ours
from oxygen_ros.profile import RobotProfile, load_profile

ROOT = Path(__file__).parents[1]
MS = 1_000_000
PERIOD_NS = 20 * MS
STEP = 1.0 / 50


@pytest.fixture(scope='module')
def profile() -> RobotProfile:
    return load_profile('dummy', ROOT / 'config')


# --- commands


@pytest.fixture
def check(profile: RobotProfile) -> CommandCheck:
    made = CommandCheck(profile)
    made.measure([0.0] * 6)
    assert made.wrong(profile.command.names, [0.0] * 6, PERIOD_NS) == ''
    return made


@pytest.mark.parametrize(
    ('position', 'periods', 'wrong'),
    [
        (STEP, 1, ''),
        (1.1 * STEP, 1, 'a step too large'),
        (1.1 * STEP, 2, ''),  # one in between was lost on the way
        (2.1 * STEP, 2, 'a step too large'),
        (math.nan, 1, 'not finite'),
        (math.inf, 1, 'not finite'),
        (3.2, 1000, 'outside the limits'),
    ],
)
def test_a_command_is_finite_inside_and_slow_enough(
    check: CommandCheck, profile: RobotProfile, position: float, periods: int, wrong: str
) -> None:
    said = check.wrong(profile.command.names, [position] * 6, (1 + periods) * PERIOD_NS)
    assert wrong in said
    assert bool(wrong) == bool(said)


def test_a_hold_may_begin_where_the_arm_was_measured(
    check: CommandCheck, profile: RobotProfile
) -> None:
    check.measure([1.0] * 6)
    assert check.wrong(profile.command.names, [1.0] * 6, 2 * PERIOD_NS) == ''


def test_a_command_of_other_joints_is_wrong(check: CommandCheck, profile: RobotProfile) -> None:
    assert 'expected a position for each' in check.wrong(['a'], [0.0], 2 * PERIOD_NS)
    assert 'expected a position for each' in check.wrong(profile.command.names, [], 3 * PERIOD_NS)


# --- misses


def test_a_miss_is_ours_unless_something_else_kept_us_from_running() -> None:
    misses = [Misses(1000 * MS, 1200 * MS, 3)]
    stall = (1100 * MS, 1130 * MS)
    assert ours(misses, [], 40 * MS) == misses
    assert ours(misses, [stall], 40 * MS) == []
    assert ours(misses, [(900 * MS, 950 * MS)], 40 * MS) == misses
    assert ours(misses, [(1210 * MS, 1300 * MS)], 40 * MS) == misses
    assert ours(misses, [(900 * MS, 970 * MS)], 40 * MS) == []


def test_the_watch_writes_down_when_it_was_kept_from_waking(tmp_path: Path) -> None:
    path = tmp_path / 'stalls.txt'
    watch = subprocess.Popen([sys.executable, '-m', stall_watch.__name__, str(path), '0'], cwd=ROOT)
    try:
        limit_s = time.monotonic() + 60
        while not (path.is_file() and len(stall_watch.stalls(path)) > 5):
            assert time.monotonic() < limit_s
            time.sleep(0.01)  # polling a file, no evidence
    finally:
        watch.kill()
        watch.wait()
    for begin_ns, end_ns in stall_watch.stalls(path):
        assert 0 < begin_ns <= end_ns <= time.monotonic_ns()


def test_the_kernel_tells_how_long_a_thread_had_to_wait() -> None:
    delay = stall_watch.RunDelay(os.getpid())
    assert delay.longest_ns() == 0  # nothing to compare with yet
    if not Path('/proc/self/schedstat').is_file():
        pytest.skip('this kernel keeps no run delay')
    asked_ns = time.monotonic_ns()
    limit_ns = asked_ns + 10**9
    rivals = [
        subprocess.Popen([sys.executable, '-c', 'while True: pass'])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        while time.monotonic_ns() < limit_ns:
            pass  # wants to run all the time, beside twice as many as there are cores
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert 10 * MS < delay.longest_ns() <= time.monotonic_ns() - asked_ns


def test_a_process_that_is_gone_waits_for_nothing() -> None:
    ended = subprocess.Popen([sys.executable, '-c', ''])
    ended.wait()
    assert stall_watch.RunDelay(ended.pid).longest_ns() == 0


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / 'stalls.txt'
    path.write_text('1 2\n3 4\n5')
    assert stall_watch.stalls(path) == [(1, 2), (3, 4)]


# --- the verdict


def result(**changes: object) -> soak.Result:
    made = soak.Result(seed=0, exit_code=0, faults={'camera dies': soak.Tally(2, 2, 2)})
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ('changes', 'died', 'problem'),
    [
        ({'num_violations': 1, 'violations': ['x']}, None, '1 commands were wrong: x'),
        ({}, 1, 'ended by itself with exit code 1'),
        ({'exit_code': -9}, None, 'did not end well: exit code -9'),
        ({'misses_ours': 4}, None, '4 deadlines missed while the machine was awake'),
        ({'slots_leaked': 1}, None, '1 slots still in use'),
        ({'faults': {'a': soak.Tally(2, 1, 2)}}, None, 'a: not told 1 of 2 times'),
        ({'faults': {'a': soak.Tally(3, 3, 1)}}, None, 'a: no recovery 2 of 3 times'),
    ],
)
def test_everything_that_must_not_be_is_a_problem(
    changes: dict[str, object], died: int | None, problem: str
) -> None:
    assert soak.problems(result(), None) == []
    (found,) = soak.problems(result(**changes), died)
    assert problem in found


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


# --- live


def test_a_run_injects_survives_and_judges(
    ros_domain: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip('rclpy')
    names = ['camera dies', 'stamps skew', 'deactivated']
    code = soak.main(['--minutes', '0.15', '--out', str(tmp_path), '--only', *names])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    # Deadlines are for a machine that has time; here other tests may run beside this one.
    assert not [problem for problem in told['problems'] if 'deadlines missed' not in problem]
    assert code == int(not told['ok']) == int(bool(told['problems']))
    assert set(told['faults']) == set(names)
    assert sum(tally['injected'] for tally in told['faults'].values()) >= 2
    assert told['commands'] > 50
    assert told['drops']['cleared_deactivated'] >= 1


PLANTED = '''
import sys
import numpy as np
from oxygen_ros import node
from oxygen_ros.actions import CommandGate, Gated

honest = CommandGate.apply

def careless(self, rows, *rest):
    """Every hundredth command leaves with a jump."""
    careless.calls += 1
    gated = honest(self, rows, *rest)
    if careless.calls % 100 or not len(gated.rows):
        return gated
    return Gated(np.clip(gated.rows + 0.5, -3, 3))

careless.calls = 0
CommandGate.apply = careless
sys.exit(node.main())
'''


def test_a_node_with_a_planted_fault_does_not_pass(
    ros_domain: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip('rclpy')
    (tmp_path / 'planted_node.py').write_text(PLANTED)
    paths = f'{tmp_path}:{ROOT}:{os.environ.get("PYTHONPATH", "")}'
    monkeypatch.setenv('PYTHONPATH', paths)
    found = soak.Soak(tmp_path, 0, ['stamps skew'], module='planted_node').run(8.0)
    assert not found.ok
    assert 'a step too large' in found.problems[0]
