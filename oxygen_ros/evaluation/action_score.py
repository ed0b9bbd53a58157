"""ActionScore: how far actions are from the recorded ones, and how smoothly they are joined.

Owns the arithmetic over chunks and commands; memory does not grow with the recording. Knows neither
the file nor the engine: `replay.py` feeds it, `results.py` writes what comes out.

Words. The *error* of a chunk's row is its value minus the recorded command for the time of that
row. The recorded robot may have been commanded with a delay, so errors are also taken against
commands that come `shift` later; the shift with the smallest error tells that delay. The *jump* is
how far the next chunk is from the rest of the one before it, where it takes over. The *jerk* is the
third derivative of the commands as they would have been sent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oxygen_ros.actions import ActionChunk
from oxygen_ros.model.continuous import within_half_turn
from oxygen_ros.profile import CommandProfile

SHIFTS_NS = np.arange(-200, 601, 20) * 1_000_000
"""Delays of the recorded commands that are tried."""
MIN_SHARE = 0.8
"""A shift that leaves fewer comparisons than this share of the most is not taken for the best."""
MAX_TRACE = 4000
"""Commands kept for the plot; when there are more, every second one is dropped."""

Recorded = Callable[[np.ndarray], np.ndarray]
"""Times int64 (n,) -> recorded commands float64 (n, num_joints), NaN where there is none."""


@dataclass
class Sums:
    """Count, sum of absolute values and sum of squares, any shape; NaN is left out."""

    count: np.ndarray
    absolute: np.ndarray
    squared: np.ndarray
    signed: np.ndarray

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Sums:
        return cls(*(np.zeros(shape) for _ in range(4)))

    def add(self, values: np.ndarray, over: tuple[int, ...] = ()) -> None:
        """Take values of this shape, or of one that has it when the axes `over` are summed."""
        known = np.isfinite(values)
        filled = np.where(known, values, 0.0)
        self.count += known.sum(axis=over)
        self.absolute += np.abs(filled).sum(axis=over)
        self.squared += (filled**2).sum(axis=over)
        self.signed += filled.sum(axis=over)

    def mae(self, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
        """Mean absolute value over all and over `axis`; NaN where nothing was counted."""
        return _ratio(self.absolute, self.count, axis)

    def rmse(self, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
        return np.sqrt(_ratio(self.squared, self.count, axis))

    def bias(self, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
        return _ratio(self.signed, self.count, axis)


def _ratio(total: np.ndarray, count: np.ndarray, axis: int | tuple[int, ...] | None) -> np.ndarray:
    if axis is not None:
        total, count = total.sum(axis=axis), count.sum(axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), math.nan)


class Trace:
    """Commands as sent and as recorded, thinned out so that a plot of any length is small."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._every = 1
        self._seen = 0

    def add(self, time_ns: int, sent: np.ndarray, recorded: np.ndarray) -> None:
        if self._seen % self._every == 0:
            self._rows.append((time_ns, sent, recorded))
        self._seen += 1
        if len(self._rows) > MAX_TRACE:
            self._rows = self._rows[::2]
            self._every *= 2

    def arrays(self, num_joints: int) -> dict[str, np.ndarray]:
        """Return time_ns (n,), sent (n, joints) and recorded (n, joints)."""
        times = np.array([time_ns for time_ns, _, _ in self._rows], np.int64)
        sent = np.array([row for _, row, _ in self._rows]).reshape(-1, num_joints)
        recorded = np.array([row for _, _, row in self._rows]).reshape(-1, num_joints)
        return {'time_ns': times, 'sent': sent, 'recorded': recorded}


class ActionScore:
    """Scores of one recording; every array is in the order of the commands, in robot units."""

    def __init__(self, command: CommandProfile, align_ns: int, recorded: Recorded | None) -> None:
        """Start at nothing.

        Args:
            align_ns: shift at which the errors of single frames and of commands are taken.
            recorded: the recorded commands; None if there are none.
        """
        num_joints = len(command.names)
        self._num_joints = num_joints
        self._period_s = 1.0 / command.rate_hz
        self._is_velocity = np.array([quantity == 'velocity' for quantity in command.quantity])
        self._turns = ~self._is_velocity & np.isin(command.names, command.continuous)
        self._align_ns = align_ns
        self._recorded = recorded
        self._swept: Sums | None = None
        self._aligned: Sums | None = None
        self.sent = Sums.zeros((num_joints,))
        """Errors of the commands as sent, those that came from a chunk."""
        self.jumps = Sums.zeros((num_joints,))
        self.jerk = Sums.zeros((num_joints,))
        self.max_jump = np.zeros(num_joints)
        self.trace = Trace()
        self._last: deque[np.ndarray] = deque(maxlen=4)

    @property
    def aligned(self) -> Sums:
        """Errors (horizon, joints) at the chosen shift; empty before the first chunk."""
        return self._aligned or Sums.zeros((0, self._num_joints))

    @property
    def swept(self) -> Sums:
        """Errors (shifts, joints), all rows of the horizon together."""
        return self._swept or Sums.zeros((len(SHIFTS_NS), self._num_joints))

    def add_chunk(self, chunk: ActionChunk) -> tuple[np.ndarray, np.ndarray]:
        """Compare a chunk; return its mean absolute and mean signed error (joints,)."""
        unknown = np.full(self._num_joints, math.nan)
        if self._recorded is None:
            return unknown, unknown
        horizon = len(chunk.values)
        times_ns = chunk.time_ns + chunk.period_ns * np.arange(horizon)
        errors = self._difference(chunk.values, self._recorded(times_ns + self._align_ns))
        self._aligned = self._aligned or Sums.zeros(errors.shape)
        self._aligned.add(errors)
        self._sweep(chunk, times_ns)
        return _mean_known(np.abs(errors)), _mean_known(errors)

    def _sweep(self, chunk: ActionChunk, times_ns: np.ndarray) -> None:
        assert self._recorded is not None
        self._swept = self._swept or Sums.zeros((len(SHIFTS_NS), self._num_joints))
        shifted = (times_ns[np.newaxis] + SHIFTS_NS[:, np.newaxis]).ravel()
        recorded = self._recorded(shifted).reshape(len(SHIFTS_NS), *chunk.values.shape)
        self._swept.add(self._difference(chunk.values, recorded), over=(1,))

    def _difference(self, values: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Return (..., joints): for a joint that turns without end the short way round."""
        difference = values - others
        return np.where(self._turns, within_half_turn(difference), difference)

    def best_shift_ns(self) -> int | None:
        """Return the delay of the recorded commands that fits best; None without comparisons."""
        swept = self.swept
        counts = swept.count.sum(axis=1)
        if not counts.any():
            return None
        enough = counts >= MIN_SHARE * counts.max()
        errors = np.where(enough, swept.mae(axis=1), math.inf)
        # Of equal ones the shortest delay.
        order = np.lexsort((np.abs(SHIFTS_NS), errors))
        return int(SHIFTS_NS[order[0]])

    def add_jump(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Compare the rows (joints,) of two chunks for the moment when the second takes over."""
        jump = np.abs(self._difference(after, before))
        self.jumps.add(jump)
        self.max_jump = np.maximum(self.max_jump, jump)
        return jump

    def add_command(
        self, time_ns: int, row: np.ndarray, *, from_chunk: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Take a command (joints,) as sent.

        Returns its error (joints,), NaN where there is nothing to compare with, and the jerk
        (joints,), None before four commands followed each other.
        """
        recorded = np.full(self._num_joints, math.nan)
        if self._recorded is not None:
            recorded = self._recorded(np.array([time_ns + self._align_ns]))[0]
        error = self._difference(row, recorded)
        if from_chunk:
            self.sent.add(error)
        self.trace.add(time_ns, row, row - error)
        self._last.append(row)
        if len(self._last) < 4:
            return error, None
        a, b, c, d = self._last
        third = (d - 3 * c + 3 * b - a) / self._period_s**3
        second = (d - 2 * c + b) / self._period_s**2
        jerk = np.where(self._is_velocity, second, third)
        self.jerk.add(jerk)
        return error, jerk

    def break_commands(self) -> None:
        """Nothing was sent at this tick, so there is no derivative over it."""
        self._last.clear()


def _mean_known(values: np.ndarray) -> np.ndarray:
    """Return the mean of the finite values of each column; NaN where there are none."""
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(axis=0)
    return _ratio(total, known.sum(axis=0), None)
