"""Faults on the live graph: what robot, operator or machine do to the node, and what then happens.

The table in README.md ("When something fails") names these tests. No clock of the wall is read: a
test waits for what is said or sent, and a sentinel proves that something was not.
"""

from __future__ import annotations

import copy
import re
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from robot import Lifecycle, NodeProcess, Robot, hold_of, nanoseconds, write_profile

pytest.importorskip('rclpy')


@pytest.fixture
def robot(graph, tmp_path):
    made = Robot(graph, tmp_path)
    yield made
    made.close()


# A chunk of 2 s and sources that may be 3 s old: a busy machine is none of the faults below.
PATIENT = (
    ('rate_hz: 50.0                # rows', 'rate_hz: 10.0                # rows'),
    ('max_age_s: 0.5 ', 'max_age_s: 3.0 '),
)


def start(robot: Robot, *changes: tuple[str, str], **parameters: Any) -> NodeProcess:
    """Start the node on a patient dummy robot, with further pieces of its profile changed."""
    return robot.start(profile=write_profile(robot, *PATIENT, *changes), **parameters)


def run_until_holding(robot: Robot, count: int = 10) -> None:
    """Wait for so many commands in a row that keep the arm where it is."""

    def holds() -> bool:
        last = [list(m.position) for m in robot.heard['joint_command'][-count:]]
        return len(last) == count and all(position == hold_of(robot) for position in last)

    robot.run_until(holds, f'{count} commands that hold')


def source(robot: Robot) -> str:
    """Where commands come from, as diagnostics say; '' before the first."""
    status = robot.status('commands')
    values = {pair.key: pair.value for pair in status.values} if status is not None else {}
    return values.get('Source', '')


def run_until_source(robot: Robot, *sources: str) -> None:
    robot.run_until(lambda: source(robot) in sources, f'commands from {" or ".join(sources)}')


def run_until_stat(robot: Robot, name: str, value: int) -> None:
    robot.run_until(
        lambda: robot.heard['stats'] and getattr(robot.heard['stats'][-1], name) == value,
        f'{name} to be {value}',
    )


# --- stop and hold --------------------------------------------------------------------------------


class Operator:
    """Both hands on the stops."""

    def __init__(self, robot: Robot):
        from std_msgs.msg import Bool
        from std_srvs.srv import SetBool

        self._robot = robot
        self._estop = robot.node.create_publisher(Bool, robot.name('oxygen/estop'), 10)
        self._hold = robot.node.create_client(SetBool, robot.name('oxygen/hold'))
        robot.run_until(self._estop.get_subscription_count, 'the node to hear the stop')

    def stop(self, on: bool) -> None:
        from std_msgs.msg import Bool

        self._estop.publish(Bool(data=on))

    def hold(self, on: bool) -> str:
        from std_srvs.srv import SetBool

        self._robot.run_until(self._hold.service_is_ready, 'the hold service')
        future = self._hold.call_async(SetBool.Request(data=on))
        self._robot.run_until(future.done, 'the answer')
        return future.result().message


def test_an_emergency_stop_holds_while_texts_go_on_and_the_old_plan_is_not_resumed(robot):
    process = start(robot)
    operator = Operator(robot)
    robot.run_until_active()
    operator.stop(True)
    run_until_stat(robot, 'halt', 2)
    run_until_holding(robot)
    robot.run_for(1, 'text')
    robot.run_for(3, 'actions')  # seen, but not sent
    assert all(list(m.position) == hold_of(robot) for m in robot.run_for(10, 'joint_command'))
    status = robot.run_until_status('interlock', 'estop: true on /oxygen/estop')
    assert status.level == b'\x02'
    robot.run_until_status('commands', 'estop: hold')

    operator.stop(False)
    run_until_stat(robot, 'halt', 0)
    run_until_source(robot, 'chunk')
    assert robot.drops()['cleared_estop'] == 1
    assert robot.heard['stats'][-1].estops == 1
    assert process.interrupt() == 0


def test_an_emergency_stop_outlives_deactivation_and_activation(robot):
    from lifecycle_msgs.msg import Transition

    start(robot)
    operator, lifecycle = Operator(robot), Lifecycle(robot)
    robot.run_until_active()
    operator.stop(True)
    run_until_stat(robot, 'halt', 2)
    assert lifecycle.change(Transition.TRANSITION_DEACTIVATE)
    robot.heard['joint_command'].clear()
    assert lifecycle.change(Transition.TRANSITION_ACTIVATE)
    robot.run_for(5, 'actions')
    commands = robot.heard['joint_command']
    assert commands
    assert all(list(m.position) == hold_of(robot) for m in commands)


def test_a_stop_that_was_latched_before_the_node_existed_lets_no_action_out(robot):
    from rclpy.qos import DurabilityPolicy, QoSProfile
    from std_msgs.msg import Bool

    latched = robot.node.create_publisher(
        Bool, 'oxygen/estop', QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    )
    latched.publish(Bool(data=True))
    start(robot)
    robot.run_for(5, 'actions')
    assert all(list(m.position) == hold_of(robot) for m in robot.heard['joint_command'])


def test_the_hold_service_holds_and_lets_go(robot):
    start(robot)
    operator = Operator(robot)
    robot.run_until_active()
    assert operator.hold(True) == 'hold: the hold service was called'
    run_until_holding(robot)
    run_until_stat(robot, 'halt', 1)
    robot.run_until_status('commands', 'hold: hold')
    assert operator.hold(False) == 'released'
    run_until_source(robot, 'chunk')
    assert robot.heard['stats'][-1].holds == 1


def test_silence_of_the_stop_is_a_stop_where_the_profile_expects_a_heartbeat(robot):
    process = start(robot, ('estop_heartbeat_s: 0.0', 'estop_heartbeat_s: 2.0'))
    operator = Operator(robot)
    robot.run_until_status('interlock', 'estop: nothing on /oxygen/estop for 2 s')
    run_until_holding(robot)

    def acts() -> bool:
        operator.stop(False)
        return source(robot) == 'chunk'

    robot.run_until(acts, 'actions while the heartbeat is there')
    run_until_stat(robot, 'halt', 2)  # and it is gone again
    assert process.interrupt() == 0


# --- what the middleware sees ---------------------------------------------------------------------


def subscriber(robot: Robot, deadline_s: float) -> tuple[list[Any], list[Any]]:
    """Subscribe to the commands, asking for a deadline; the messages and the missed deadlines."""
    from rclpy.duration import Duration
    from rclpy.event_handler import SubscriptionEventCallbacks
    from rclpy.qos import QoSProfile
    from sensor_msgs.msg import JointState

    messages: list[Any] = []
    missed: list[Any] = []
    robot.node.create_subscription(
        JointState,
        'joint_command',
        messages.append,
        QoSProfile(depth=1, deadline=Duration(seconds=deadline_s)),
        event_callbacks=SubscriptionEventCallbacks(deadline=missed.append),
    )
    return messages, missed


def test_the_middleware_is_witness_that_commands_stopped_when_the_process_was(robot):
    process = start(robot)
    messages, missed = subscriber(robot, 2 / 50)
    robot.run_until(lambda: messages, 'a command')
    misses = robot.run_for(1, 'stats')[-1].misses
    missed.clear()
    process.process.send_signal(signal.SIGSTOP)
    robot.run_until(lambda: len(missed) >= 10, 'ten deadlines that DDS saw missed')
    process.process.send_signal(signal.SIGCONT)
    # A deadline is two periods, and some of the ten may have been on their way before the stop.
    robot.run_until(lambda: robot.heard['stats'][-1].misses >= misses + 9, 'our own count of them')
    assert process.interrupt() == 0


def test_a_subscriber_that_asks_for_more_than_is_offered_is_named(robot):
    process = start(robot)
    messages, _ = subscriber(robot, 0.01)
    status = robot.run_until_status('middleware', '/joint_command: /test asks for')
    assert 'deadline 0.01 s' in status.message
    assert 'this node offers reliable volatile deadline 0.04 s' in status.message
    assert messages == []
    assert process.log.count('/joint_command: /test asks for') == 1


def test_a_deadline_asked_of_a_camera_that_offers_none_is_named_and_stops_its_frames(robot):
    deadline = ('deadline_s: 0.0            # Deadline', 'deadline_s: 0.1            # Deadline')
    start(robot, deadline)
    status = robot.run_until_status('middleware', '/camera/base/image_raw: /test offers')
    assert 'best effort volatile, this node asks for best effort volatile deadline 0.1 s' in (
        status.message
    )
    robot.run_until_status('engine', 'no image on camera/base/image_raw yet')


def test_a_subscriber_that_joins_late_hears_commands_and_the_latched_notes(robot):
    from rclpy.qos import DurabilityPolicy, QoSProfile

    from oxygen_ros.msg import Note

    start(robot)
    robot.run_for(1, 'memory')
    messages, _ = subscriber(robot, 0.0)
    latched = QoSProfile(depth=10, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    robot.hear('oxygen/memory', Note, 'late_memory', latched)
    robot.run_until(lambda: messages and robot.heard['late_memory'], 'a command and the note')
    assert robot.heard['late_memory'][0] == robot.heard['memory'][0]


# --- what the operator says -----------------------------------------------------------------------


def test_an_instruction_that_nobody_repeats_grows_old_and_the_same_one_counts_again(robot):
    process = start(robot, ('  max_age_s: 0.0 ', '  max_age_s: 3.0 '))
    robot.run_until_active()
    robot.run_until_status('engine', 'no frame: no instruction on instruction for 3 s')
    run_until_holding(robot)
    assert 'instruction: nothing for 3 s; no instruction any more' in process.log
    assert robot.drops()['instruction_stale'] == 1
    robot.heard['actions'].clear()
    robot.instruct('move the arm to the red block')
    robot.run_until_active()


def test_a_flood_of_instructions_leaves_commands_and_the_last_word(robot):
    process = start(robot)
    robot.run_until_active()
    commands = len(robot.heard['joint_command'])
    for number in range(2000):
        robot.instruct(f'wave {number} times')
    robot.run_for(20, 'joint_command')
    assert len(robot.heard['joint_command']) > commands

    def last_word() -> bool:
        robot.instruct('be still')
        return "instruction: 'be still'" in process.log

    robot.run_until(last_word, 'the last word')
    robot.heard['actions'].clear()
    robot.run_until_active()
    assert process.interrupt() == 0


# --- cameras and joints ---------------------------------------------------------------------------


def test_a_camera_that_repeats_one_picture_is_no_camera(robot):
    start(robot)
    robot.run_until_active()
    robot.cameras['base'] = False
    frozen = robot.image()

    def too_old() -> bool:
        robot.image_publishers['base'].publish(frozen)
        status = robot.status('engine')
        return status is not None and 'limit 3 s' in status.message

    robot.run_until(too_old, 'the frozen picture to be too old')
    assert robot.drops()['image_repeated'] > 0
    run_until_holding(robot)


def shifted(image: Any, seconds: int) -> Any:
    moved = copy.deepcopy(image)
    moved.header.stamp.sec += seconds
    return moved


def test_pictures_stamped_out_of_order_are_left_out_and_counted(robot):
    start(robot)
    robot.run_until_active()
    robot.run_for(5, 'actions')

    def counted() -> bool:
        robot.image_publishers['base'].publish(shifted(robot.image(), -1))
        return robot.drops().get('image_older', 0) >= 3

    robot.run_until(counted, 'three older pictures')
    robot.run_for(5, 'actions')
    stamps = {nanoseconds(m.header.stamp) for m in robot.heard['actions']}
    assert stamps <= robot.image_stamps


def test_pictures_stamped_in_the_future_are_dated_by_their_arrival_and_used(robot):
    start(robot)
    robot.cameras['base'] = False

    def acts() -> bool:
        robot.image_publishers['base'].publish(shifted(robot.image(), 3600))
        return len(robot.heard['actions']) >= 5

    robot.run_until(acts, 'chunks')
    now_s = robot.stamp().sec
    assert all(m.header.stamp.sec <= now_s for m in robot.heard['actions'])
    status = robot.run_until_status('camera base_0_rgb', '')
    assert int(next(v.value for v in status.values if v.key == 'Untrusted stamps')) > 0


def test_without_joint_states_nothing_new_is_sent_until_they_are_back(robot):
    start(robot)
    robot.run_until_active()
    robot.joints_on = False
    robot.run_until_status('engine', 'last position on joint_states is')

    run_until_source(robot, 'hold', 'silence')
    robot.joints_on = True
    run_until_source(robot, 'chunk')
    positions = np.array([m.position for m in robot.heard['joint_command']])
    assert (np.abs(positions) <= 3.14).all()


def test_without_any_clock_a_simulated_robot_holds_and_the_stop_works(robot):
    process = start(robot, use_sim_time=True)
    operator = Operator(robot)
    robot.run_until_status('clock', 'use_sim_time is set: waiting for /clock')
    run_until_holding(robot)
    operator.stop(True)
    run_until_stat(robot, 'halt', 2)
    assert robot.heard['actions'] == []
    assert process.interrupt() == 0


# --- the engine and the machine -------------------------------------------------------------------


@pytest.fixture
def start_failing(robot, monkeypatch):
    """Start the node with an engine that fails by raising or hanging, from frame 5 up to `end`."""

    def start_failing(how: str, end: int) -> NodeProcess:
        monkeypatch.setenv('FAIL_BY', how)
        monkeypatch.setenv('FAIL_FROM', '5')
        monkeypatch.setenv('FAIL_TO', str(end))
        monkeypatch.setenv('PYTHONPATH', 'test', prepend=':')
        return start(robot, module='failing_node', isolation='thread')

    return start_failing


def test_an_engine_that_raises_costs_its_frames_and_is_reported(robot, start_failing):
    process = start_failing('raise', end=8)
    robot.run_until_active()
    robot.run_until(
        lambda: any(m.frame >= 10 for m in robot.heard['actions']), 'frames behind the failing ones'
    )
    robot.run_for(1, 'stats')
    assert robot.drops()['frame_failed'] == 3
    assert not {5, 6, 7} & {m.frame for m in robot.heard['actions']}
    assert 'engine: RuntimeError: device lost' in process.log
    assert process.interrupt() == 0


def test_an_engine_that_fails_for_good_ends_the_node_with_a_last_hold_and_code_1(
    robot, start_failing
):
    process = start_failing('raise', end=10**9)
    robot.run_until(lambda: process.process.poll() is not None, 'the end of the node')
    assert process.wait() == 1
    assert 'the engine is given up: RuntimeError: device lost' in process.log
    assert 'inactive: hold was the last command' in process.log


def test_an_engine_that_hangs_ends_in_a_hold_and_keeps_nobody_waiting(robot, start_failing):
    process = start_failing('hang', end=10**9)
    robot.run_until(lambda: any(m.frame == 4 for m in robot.heard['actions']), 'the last chunk')
    robot.heard['joint_command'].clear()
    run_until_holding(robot)
    assert max(m.frame for m in robot.heard['actions']) == 4
    assert process.interrupt() == 0
    assert 'inactive: hold was the last command' in process.log
    assert 'the model did not return in time' in process.log


def test_a_full_disk_costs_log_and_notes_but_no_command(robot):
    """A limit on the size of files refuses every further byte, as a full disk does."""
    memory = robot.folder / 'notes.sqlite'
    process = start(robot, memory_path=memory)
    robot.run_for(1, 'memory')
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    def lost() -> bool:
        robot.instruct(f'wave {len(robot.heard["stats"])} times')  # each wants a line in the log
        return robot.drops().get('memory_not_kept', 0) >= 2

    robot.run_until(lost, 'two notes that could not be kept')
    robot.run_for(50, 'joint_command')
    robot.run_for(3, 'actions')
    run_until_source(robot, 'chunk')
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert process.interrupt() == 0


PHASES = ('loading dummy', 'model loaded', 'configured for', 'active: frames tick')


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize('phase', PHASES)
def test_a_signal_in_any_phase_of_the_start_ends_the_node_cleanly(robot, phase, number):
    process = start(robot)
    process.wait_for_log(phase)
    assert process.interrupt(number) == 0
    assert 'Traceback' not in process.log


def catches_signals(pid: int) -> bool:
    """Whether it has come so far that it handles SIGTERM."""
    status = Path(f'/proc/{pid}/status').read_text()
    caught = int(re.search(r'^SigCgt:\s*(\w+)$', status, re.MULTILINE)[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize('imported', ['', 'multiarray_umath', '_rclpy_pybind11'])
def test_a_signal_while_modules_are_imported_ends_the_node_cleanly(graph, imported, number):
    packages = pytest.importorskip('ament_index_python.packages')
    prefix = packages.get_package_prefix('oxygen_ros')
    process = subprocess.Popen(
        [f'{prefix}/lib/oxygen_ros/oxygen'],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    memory = Path(f'/proc/{process.pid}/maps')
    while not (catches_signals(process.pid) and imported in memory.read_text()):
        assert process.poll() is None
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert 'Traceback' not in output


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signals_that_repeat_while_the_node_ends_change_nothing(robot, number):
    process = start(robot)
    robot.run_until_active()

    def ended() -> bool:
        if process.process.poll() is None:
            process.process.send_signal(number)
        return process.process.poll() is not None

    robot.run_until(ended, 'the end of the node')
    assert process.wait() == 0
    assert 'Traceback' not in process.log
    assert 'inactive: hold was the last command' in process.log
