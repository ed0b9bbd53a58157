"""RecordedCommands: what the robot was told while a bag was recorded, as a function of time.

Owns the reading of the three command interfaces and the lookup between messages. Knows nothing of
the model; `replay.py` compares with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from oxygen_ros.conversions import stamp_to_ns
from oxygen_ros.evaluation.bag_source import COMMAND_TYPES, read_message
from oxygen_ros.evaluation.recording import BagError, Recording
from oxygen_ros.profile import CommandProfile

# A header stamp that differs from the log time by more is another clock's.
MAX_STAMP_DIFFERENCE_NS = 1_000_000_000
# Between messages further apart than so many usual periods nobody commanded anything.
MAX_GAP_PERIODS = 5
MIN_GAP_NS = 200_000_000


class RecordedCommands:
    """Commands by joint and time; NaN where there was none."""

    def __init__(self, command: CommandProfile, times_ns: np.ndarray, values: np.ndarray) -> None:
        """Take samples.

        Args:
            command: its `interpolation` says what holds between two samples.
            times_ns: int64 (n,), any order.
            values: float64 (n, num_joints) in the order of command.names; NaN = not in the message.
        """
        order = np.argsort(times_ns, kind='stable')
        self._linear = command.interpolation == 'linear'
        # Joint by joint: arm and gripper may come in separate messages.
        self._series: list[tuple[np.ndarray, np.ndarray, float]] = []
        for name, quantity, column in zip(
            command.names, command.quantity, values[order].T, strict=True
        ):
            known = np.isfinite(column)
            times, series = times_ns[order][known], column[known]
            if name in command.continuous and quantity == 'position':
                series = np.unwrap(series)  # between pi and -pi it went the short way
            self._series.append((times, series, _longest_gap_ns(times)))

    def at(self, times_ns: np.ndarray) -> np.ndarray:
        """Return float64 (n, num_joints) for int64 (n,) times."""
        found = [self._joint_at(*series, times_ns) for series in self._series]
        return np.stack(found, axis=-1)

    def _joint_at(
        self, times: np.ndarray, values: np.ndarray, longest_gap_ns: float, at_ns: np.ndarray
    ) -> np.ndarray:
        if len(times) < 2:
            return np.full(len(at_ns), math.nan)
        after = np.clip(np.searchsorted(times, at_ns, side='right'), 1, len(times) - 1)
        before = after - 1
        gap_ns = np.maximum(times[after] - times[before], 1)
        share = (at_ns - times[before]) / gap_ns
        line = values[before] + share * (values[after] - values[before])
        step = np.where(at_ns >= times[after], values[after], values[before])
        found = line if self._linear else step
        inside = (at_ns >= times[0]) & (at_ns <= times[-1]) & (gap_ns <= longest_gap_ns)
        return np.where(inside, found, math.nan)


def _longest_gap_ns(times: np.ndarray) -> float:
    """Return how far apart two samples may be for the line between them to mean something."""
    if len(times) < 2:
        return MIN_GAP_NS
    return max(MIN_GAP_NS, MAX_GAP_PERIODS * float(np.median(np.diff(times))))


def read_commands(recording: Recording, topic: str, command: CommandProfile) -> RecordedCommands:
    """Read the whole topic. Raises BagError if no message of it commands a joint of the profile."""
    interface = COMMAND_TYPES[recording.topics[topic].type_name]
    times, rows = [], []
    problem = 'holds no message'
    for _, log_ns, data in recording.messages([topic]):
        message = read_message(recording, topic, data)
        try:
            if message is None:
                raise ValueError('holds damaged messages')
            rows.append(_row(message, interface, command))
        except ValueError as error:
            problem = str(error)
            continue
        times.append(_time_ns(message, interface, log_ns))
    if not rows:
        raise BagError(f'{recording.path}: commands: {topic} {problem}')
    return RecordedCommands(command, np.array(times, np.int64), np.array(rows))


def _row(message: Any, interface: str, command: CommandProfile) -> np.ndarray:
    """Return float64 (num_joints,), NaN where the message says nothing. Raises ValueError."""
    if interface == 'forward_command':
        return _unnamed_row(np.asarray(message.data, np.float64), _labels(message), command)
    if interface == 'joint_trajectory':
        if not len(message.points):
            raise ValueError('holds trajectories without points')
        point = message.points[0]  # it begins at once: the later ones are replaced by the next
        return _named_row(message.joint_names, point.positions, point.velocities, command)
    return _named_row(message.name, message.position, message.velocity, command)


def _named_row(
    names: Iterable[str], positions: Any, velocities: Any, command: CommandProfile
) -> np.ndarray:
    column = {name: i for i, name in enumerate(names)}
    row = np.full(len(command.names), math.nan)
    for joint, (name, quantity) in enumerate(zip(command.names, command.quantity, strict=True)):
        values = positions if quantity == 'position' else velocities
        if name in column and column[name] < len(values):
            row[joint] = values[column[name]]
    if not np.isfinite(row).any():
        raise ValueError(
            f'commands {", ".join(column) or "nothing"}, expected some of '
            f'{", ".join(command.names)} (command.names of the profile)'
        )
    return row


def _unnamed_row(values: np.ndarray, labels: list[str], command: CommandProfile) -> np.ndarray:
    if len(labels) == len(values):
        return _named_row(labels, values, values, command)
    if len(values) != len(command.names):
        raise ValueError(f'has {len(values)} values, expected {len(command.names)} as the profile')
    return values


def _labels(message: Any) -> list[str]:
    """The joints' names that our own node writes into the layout; [] of any other publisher."""
    dims = message.layout.dim
    return dims[0].label.split(',') if len(dims) == 1 and dims[0].label else []


def _time_ns(message: Any, interface: str, log_ns: int) -> int:
    """The header stamp where it can be one; the log time has the jitter of the recorder."""
    if interface == 'joint_state':  # a trajectory's stamp is its start, or 0
        stamp_ns = stamp_to_ns(message.header.stamp)
        if abs(stamp_ns - log_ns) < MAX_STAMP_DIFFERENCE_NS:
            return stamp_ns
    return log_ns
