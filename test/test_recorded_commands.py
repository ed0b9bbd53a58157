"""Recorded commands: what each interface says, and what held between two messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip('rosbags')

from made_bags import STORE, Message, write_bag

from oxygen_ros.evaluation.recorded_commands import RecordedCommands, read_commands
from oxygen_ros.evaluation.recording import BagError, Recording
from oxygen_ros.profile import CommandProfile

PERIOD_NS = 20_000_000
START_NS = 1_000_000_000_000
COMMAND = CommandProfile(
    interface='joint_state',
    topic='commands',
    names=('a', 'b'),
    quantity=('position', 'position'),
    rate_hz=50.0,
    lower=(-3.0, -3.0),
    upper=(3.0, 3.0),
    max_velocity=(1.0, 1.0),
)
TYPES = STORE.types


def message(type_name: str, log_ns: int, **fields: Any) -> Message:
    made = TYPES[type_name](**fields)
    return '/commands', type_name, log_ns, bytes(STORE.serialize_cdr(made, type_name))


def header(stamp_ns: int = 0) -> Any:
    stamp = TYPES['builtin_interfaces/msg/Time'](*divmod(stamp_ns, 10**9))
    return TYPES['std_msgs/msg/Header'](stamp=stamp, frame_id='')


def joint_state(log_ns: int, stamp_ns: int, names: list[str], values: list[float]) -> Message:
    none = np.empty(0)
    return message(
        'sensor_msgs/msg/JointState',
        log_ns,
        header=header(stamp_ns),
        name=names,
        position=np.array(values),
        velocity=none,
        effort=none,
    )


def array(log_ns: int, values: list[float], label: str = '') -> Message:
    dims = [TYPES['std_msgs/msg/MultiArrayDimension'](label=label, size=2, stride=2)]
    layout = TYPES['std_msgs/msg/MultiArrayLayout'](dim=dims if label else [], data_offset=0)
    return message('std_msgs/msg/Float64MultiArray', log_ns, layout=layout, data=np.array(values))


def trajectory(log_ns: int, values: list[list[float]]) -> Message:
    none = np.empty(0)
    duration = TYPES['builtin_interfaces/msg/Duration'](sec=0, nanosec=PERIOD_NS)
    points = [
        TYPES['trajectory_msgs/msg/JointTrajectoryPoint'](
            positions=np.array(row),
            velocities=none,
            accelerations=none,
            effort=none,
            time_from_start=duration,
        )
        for row in values
    ]
    return message(
        'trajectory_msgs/msg/JointTrajectory',
        log_ns,
        header=header(),
        joint_names=['b', 'a'],
        points=points,
    )


def read(folder: Path, messages: list[Message]) -> RecordedCommands:
    return read_commands(Recording(write_bag(folder / 'bag', messages)), '/commands', COMMAND)


def times(count: int) -> list[int]:
    return [START_NS + i * PERIOD_NS for i in range(count)]


def test_joints_are_taken_by_name_and_at_their_stamps(tmp_path: Path) -> None:
    jitter_ns = 3_000_000
    found = read(
        tmp_path,
        [
            joint_state(t + jitter_ns, t, ['b', 'gripper', 'a'], [2.0 * i, 9.0, 1.0 * i])
            for i, t in enumerate(times(5))
        ],
    )
    np.testing.assert_allclose(found.at(np.array(times(5))), [[i, 2 * i] for i in range(5)])
    half = np.array([START_NS + PERIOD_NS // 2])
    np.testing.assert_allclose(found.at(half), [[0.5, 1.0]])


def test_a_stamp_of_another_clock_gives_way_to_the_log_time(tmp_path: Path) -> None:
    found = read(tmp_path, [joint_state(t, 5, ['a', 'b'], [1.0, 2.0]) for t in times(3)])
    np.testing.assert_allclose(found.at(np.array(times(3))), [[1.0, 2.0]] * 3)


def test_joints_in_separate_messages_each_have_their_own_time(tmp_path: Path) -> None:
    arm = [joint_state(t, t, ['a'], [1.0]) for t in times(4)]
    gripper = [joint_state(t + 1, t + 1, ['b'], [2.0]) for t in times(4)]
    found = read(tmp_path, arm + gripper)
    np.testing.assert_allclose(found.at(np.array([START_NS + PERIOD_NS])), [[1.0, 2.0]])


def test_an_array_is_in_the_order_of_the_profile_unless_its_labels_say_another(
    tmp_path: Path,
) -> None:
    plain = read(tmp_path / '1', [array(t, [1.0, 2.0]) for t in times(3)])
    labelled = read(tmp_path / '2', [array(t, [1.0, 2.0], 'b,a') for t in times(3)])
    np.testing.assert_allclose(plain.at(np.array(times(1))), [[1.0, 2.0]])
    np.testing.assert_allclose(labelled.at(np.array(times(1))), [[2.0, 1.0]])


def test_of_a_trajectory_the_first_point_counts(tmp_path: Path) -> None:
    found = read(tmp_path, [trajectory(t, [[2.0, 1.0], [9.0, 9.0]]) for t in times(3)])
    np.testing.assert_allclose(found.at(np.array(times(1))), [[1.0, 2.0]])


@pytest.mark.parametrize(
    ('messages', 'said'),
    [
        ([array(t, [1.0, 2.0, 3.0]) for t in times(3)], 'has 3 values, expected 2'),
        (
            [joint_state(t, t, ['x'], [1.0]) for t in times(3)],
            'commands x, expected some of a, b',
        ),
        ([trajectory(t, []) for t in times(3)], 'trajectories without points'),
    ],
)
def test_commands_of_another_robot_are_refused_in_one_line(
    messages: list[Message], said: str, tmp_path: Path
) -> None:
    with pytest.raises(BagError, match=said) as caught:
        read(tmp_path, messages)
    assert '\n' not in str(caught.value)


def test_nothing_is_made_up_outside_the_commands_or_in_a_gap() -> None:
    moments = [*times(3), *(t + 1_000_000_000 for t in times(3))]
    found = RecordedCommands(COMMAND, np.array(moments), np.ones((6, 2)))
    inside, gap = START_NS + PERIOD_NS, START_NS + 500_000_000
    before, after = START_NS - 1, START_NS + 2_000_000_000
    known = np.isfinite(found.at(np.array([inside, gap, before, after]))).all(axis=1)
    assert known.tolist() == [True, False, False, False]


def test_where_rows_are_held_the_commands_are_too() -> None:
    held = replace(COMMAND, interpolation='previous')
    found = RecordedCommands(held, np.array(times(3)), np.array([[0.0, 0], [1, 1], [2, 2]]))
    moments = np.array([START_NS + PERIOD_NS - 1, START_NS + PERIOD_NS, START_NS + 2 * PERIOD_NS])
    np.testing.assert_allclose(found.at(moments)[:, 0], [0.0, 1.0, 2.0])


def test_between_two_sides_of_half_a_turn_a_continuous_joint_was_nowhere_near_zero() -> None:
    turning = replace(COMMAND, continuous=(COMMAND.names[0],))
    rows = np.array([[3.1, 3.1], [-3.1, -3.1]])
    found = RecordedCommands(turning, np.array(times(2)), rows)
    half_way = found.at(np.array([sum(times(2)) // 2]))[0]
    np.testing.assert_allclose(half_way, [np.pi, 0.0], atol=1e-9)
