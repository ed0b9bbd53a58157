"""The node with its engine in a process of its own, on a real graph: the process is killed, stopped
and refused, and the robot goes on getting commands.
"""

from __future__ import annotations

import os
import re
import resource
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from robot import JOINTS, Robot, nanoseconds
from test_node import STEP, Lifecycle, hold_of

pytest.importorskip('rclpy')
PERIOD_NS = 20_000_000


@pytest.fixture
def robot(graph, tmp_path):
    made = Robot(graph, tmp_path)
    yield made
    made.close()


def engine_pids(process) -> list[int]:
    return [int(pid) for pid in re.findall(r'the engine is ready in process (\d+)', process.log)]


def has_torch(pid: int) -> bool:
    return 'libtorch' in Path(f'/proc/{pid}/maps').read_text()


def is_gone(pid: int) -> bool:
    return not Path(f'/proc/{pid}').exists()


def run_until_acting(robot) -> None:
    robot.heard['actions'].clear()
    robot.run_for(2, 'actions')


def lose_engine(robot, process, number: int) -> list:
    """Hurt the engine's process; return the commands from then until the node has told of it."""
    before = len(robot.heard['joint_command'])
    losses = process.log.count('it will be started again')
    os.kill(engine_pids(process)[-1], number)
    robot.run_until(
        lambda: process.log.count('it will be started again') > losses, 'the loss in the log'
    )
    robot.run_for(5, 'joint_command')
    return robot.heard['joint_command'][max(before - 1, 0) :]


def run_until_replaced(robot, process) -> None:
    count = len(engine_pids(process))
    robot.run_until(lambda: len(engine_pids(process)) > count, 'another engine')


def longest_gap_ns(commands: list) -> int:
    stamps = [nanoseconds(message.header.stamp) for message in commands]
    return max(later - earlier for earlier, later in pairwise(stamps))


def test_the_node_acts_and_speaks_without_torch_and_takes_its_engine_along(robot):
    process = robot.start(isolation='process')
    robot.run_until(lambda: robot.heard['memory'], 'a note')
    robot.run_until(lambda: any(m.final for m in robot.heard['text']), 'a whole text')
    (pid,) = engine_pids(process)
    assert has_torch(pid)
    assert not has_torch(process.process.pid)
    stats = robot.run_for(2, 'stats')[-1]
    assert stats.prefills == stats.frames > 0
    assert all(m.prefill_ms > 0 and m.denoise_ms > 0 for m in robot.heard['actions'])
    assert process.interrupt() == 0
    assert is_gone(pid)


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGSTOP], ids=['killed', 'hung'])
def test_a_lost_engine_leaves_the_robot_in_its_safe_behaviour_and_comes_back(robot, number):
    process = robot.start(isolation='process', engine_timeout_s=2.0)
    robot.run_until_active()
    robot.positions = dict.fromkeys(JOINTS, -0.5)  # a hold is told from a chunk's rows
    lose_engine(robot, process, number)
    robot.run_until_status('engine', '; restart 1 ')
    assert robot.status('engine').level == b'\x02'
    told = 'signal 9' if number == signal.SIGKILL else 'gave no sign for 2 s'
    assert told in robot.status('engine').message
    robot.run_until_status('commands', 'no fresh action: hold')

    run_until_replaced(robot, process)
    first, second = engine_pids(process)
    assert is_gone(first) and not is_gone(second)
    run_until_acting(robot)
    robot.run_until_status('engine', 'running')
    assert robot.drops()['engine_away'] >= 1
    positions = np.array([m.position for m in robot.heard['joint_command']])
    one_step = np.abs(np.diff(positions, axis=0)) <= STEP + 1e-9
    at_the_arm = np.abs(positions[1:] - hold_of(robot)) <= STEP + 1e-9
    assert (one_step | at_the_arm).all()
    assert process.interrupt() == 0
    assert is_gone(second)


def test_an_engine_that_gets_no_more_memory_is_replaced_by_one_that_does(robot):
    """A limit on its address space refuses memory to it as a device or a system that is full."""
    process = robot.start(isolation='process')
    robot.run_until_active()
    pid = engine_pids(process)[-1]
    robot.grow_pictures(20)  # so that a frame needs memory that the process has not yet
    resource.prlimit(pid, resource.RLIMIT_AS, (2**20, 2**20))
    robot.run_until(lambda: 'failed 3 frames in a row' in process.log, 'three failures')
    assert 'MemoryError' in process.log
    robot.run_until_status('commands', 'no fresh action: hold')
    run_until_replaced(robot, process)
    run_until_acting(robot)
    robot.run_until_status('engine', 'running')
    assert is_gone(pid)
    assert process.interrupt() == 0


def test_no_command_is_missing_around_the_death_of_the_engine(robot):
    """The machine may be busy with something else once or twice, but not each time."""
    process = robot.start(isolation='process')
    robot.run_until_active()
    gaps = []
    for _ in range(4):
        gaps.append(longest_gap_ns(lose_engine(robot, process, signal.SIGKILL)))
        if gaps[-1] <= 2 * PERIOD_NS:
            break
        run_until_replaced(robot, process)
        run_until_acting(robot)
    assert min(gaps) <= 2 * PERIOD_NS, gaps


def test_an_engine_that_cannot_be_built_fails_configure_in_its_own_words(robot):
    processes = [
        robot.start(isolation='process', checkpoint=robot.folder / 'nowhere'),
        robot.start(isolation='process', device='tpu'),
        robot.start(isolation='nowhere'),
    ]
    complaints = [
        'nowhere',
        "configure failed: parameter 'device': expected auto, cpu or cuda[:N], got 'tpu'",
        "configure failed: parameter 'isolation': expected thread or process, got 'nowhere'",
    ]
    for process, complaint in zip(processes, complaints, strict=True):
        assert process.wait() == 1
        assert 'configure failed' in process.log
        assert complaint in process.log
        assert 'Traceback' not in process.log


def test_a_signal_while_the_engine_loads_ends_both(robot):
    process = robot.start(isolation='process')
    process.wait_for_log('loading dummy')
    children = Path(f'/proc/{process.process.pid}/task')
    assert process.interrupt() == 0
    assert not children.exists()


def test_every_configure_gets_a_process_and_every_cleanup_ends_it(robot):
    from lifecycle_msgs.msg import State, Transition

    process = robot.start(isolation='process', autostart=False)
    lifecycle = Lifecycle(robot)
    for count in (1, 2):
        assert lifecycle.change(Transition.TRANSITION_CONFIGURE)
        assert len(engine_pids(process)) == count
        assert lifecycle.change(Transition.TRANSITION_ACTIVATE)
        run_until_acting(robot)
        assert lifecycle.change(Transition.TRANSITION_DEACTIVATE)
        assert not is_gone(engine_pids(process)[-1])
        assert lifecycle.change(Transition.TRANSITION_CLEANUP)
        assert lifecycle.state() == State.PRIMARY_STATE_UNCONFIGURED
        assert is_gone(engine_pids(process)[-1])
    assert process.interrupt() == 0
