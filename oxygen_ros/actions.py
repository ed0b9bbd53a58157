"""ActionChunk, ActionBuffer ("which command at time t?") and CommandGate, the last check.

Owns the rules of what may leave for the robot: only commands of the newest frame and of now,
finite, inside the limits and no faster than allowed. Knows neither ROS nor torch nor the model. The
frame thread puts chunks in; `publisher.py` takes rows out and sends each through the gate.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from oxygen_ros.profile import CommandProfile

# Room for rounding where a value computed to lie on a limit is compared with it.
_ROUNDING = 1e-9

INTERVENTIONS = (
    'nonfinite',  # a NaN or infinity; the row and those after it are refused
    'no_reference',  # position neither measured nor commanded; refused, or a velocity set to 0
    'outside_limits',  # the arm stands too far outside to be back in one step; refused
    'limit_position',  # clamped to lower or upper, or a velocity outwards set to 0
    'limit_velocity',  # a velocity clamped to max_velocity
    'limit_step',  # a position clamped to one step from the one before
)


@dataclass(frozen=True, eq=False)
class ActionChunk:
    """The actions of one frame. Raises ValueError if it has no rows or no spacing."""

    frame: int
    stamp_ns: int  # of the observation, ROS time
    time_ns: int  # the same moment on the control clock; row 0 belongs to it
    period_ns: int  # row i belongs to time_ns + i * period_ns
    values: np.ndarray  # float64 (horizon, num_joints), robot units, command order; read-only

    def __post_init__(self) -> None:
        values = np.array(self.values, dtype=np.float64)  # a copy: nobody edits it later
        if values.ndim != 2 or not len(values):
            raise ValueError(f'chunk values: expected (horizon, num_joints), got {values.shape}')
        if self.period_ns <= 0:
            raise ValueError(f'chunk period_ns: expected a positive time, got {self.period_ns}')
        values.setflags(write=False)
        object.__setattr__(self, 'values', values)

    @property
    def end_ns(self) -> int:
        """When the last row has had its period, on the control clock."""
        return self.time_ns + len(self.values) * self.period_ns


class ActionBuffer:
    """Holds the newest chunk; a new one replaces the rest of the old one.

    A chunk is indexed by the time of its observation, so rows that passed while the model was
    thinking are skipped, and a stalled reader goes on with the row for now.
    """

    def __init__(self, num_joints: int, interpolation: str) -> None:
        self._num_joints = num_joints
        self._linear = interpolation == 'linear'
        # Writers (frame thread: put; rclpy thread: clear) take the lock. The publisher only reads
        # `_chunk`, which is swapped whole, and so never waits for either.
        self._lock = threading.Lock()
        self._chunk: ActionChunk | None = None
        self._first_frame = 0
        self._drops: Counter[str] = Counter()

    @property
    def chunk(self) -> ActionChunk | None:
        """The chunk commands are taken from, even if its rows have passed."""
        return self._chunk

    def put(self, chunk: ActionChunk, now_ns: int) -> str | None:
        """Take a chunk, or return the reason why not; refusals are counted in `drops`.

        Reasons: chunk_width, chunk_nonfinite, chunk_cancelled (of a frame before the last `clear`),
        chunk_old (of an earlier frame than the one held), chunk_late (already over at now_ns),
        chunk_future (begins more than a row after now_ns). The chunk held stays in force.
        """
        with self._lock:
            reason = self._refusal(chunk, now_ns)
            if reason is None:
                self._chunk = chunk
            else:
                self._drops[reason] += 1
        return reason

    def clear(self, reason: str, first_frame: int) -> None:
        """Throw the chunk away, and later all that come from frames before first_frame.

        For a new instruction, a jump of the clock, deactivation: a result still being computed
        belongs to the time before. Counted as `cleared_<reason>` if commands were left.
        """
        with self._lock:
            if self._chunk is not None:
                self._drops[f'cleared_{reason}'] += 1
            self._chunk = None
            self._first_frame = first_frame

    def rows(self, now_ns: int, *, period_ns: int, count: int) -> np.ndarray:
        """The commands for now_ns, now_ns + period_ns, ...: float64 (n, num_joints), n <= count.

        Fewer where the chunk ends, none without a chunk. `linear` draws a line between rows,
        `previous` keeps each row for its whole period.
        """
        chunk = self._chunk
        # Long before row 0 there is nothing to do: the control clock has been set back.
        if chunk is None or now_ns < chunk.time_ns - chunk.period_ns:
            return np.empty((0, self._num_joints))
        left = -(-(chunk.end_ns - now_ns) // period_ns)  # rounded up
        elapsed_ns = now_ns - chunk.time_ns + period_ns * np.arange(max(0, min(count, left)))
        index, rest_ns = np.divmod(np.maximum(elapsed_ns, 0), chunk.period_ns)
        here = chunk.values[index]
        if not self._linear:
            return here
        there = chunk.values[np.minimum(index + 1, len(chunk.values) - 1)]
        share = (rest_ns / chunk.period_ns)[:, np.newaxis]
        return here + share * (there - here)

    def drops(self) -> dict[str, int]:
        """How many chunks were refused or cleared, by reason."""
        with self._lock:
            return dict(self._drops)

    def _refusal(self, chunk: ActionChunk, now_ns: int) -> str | None:
        if chunk.values.shape[1] != self._num_joints:
            return 'chunk_width'
        if not np.isfinite(chunk.values).all():
            return 'chunk_nonfinite'
        if chunk.frame < self._first_frame:
            return 'chunk_cancelled'
        if self._chunk is not None and chunk.frame < self._chunk.frame:
            return 'chunk_old'
        if chunk.end_ns <= now_ns:
            return 'chunk_late'
        if now_ns < chunk.time_ns - chunk.period_ns:
            return 'chunk_future'
        return None


@dataclass(frozen=True, eq=False)
class Gated:
    """What the gate lets through, and what it had to do."""

    rows: np.ndarray  # float64 (n, num_joints), safe to send; n = 0: send nothing
    interventions: tuple[str, ...] = ()  # out of INTERVENTIONS
    joints: tuple[str, ...] = ()  # names concerned by any of them


class CommandGate:
    """The last check before a command leaves. It keeps nothing between calls.

    What comes out is finite, inside lower and upper, no faster than max_velocity, and each
    position is at most one step from the one before it.
    """

    def __init__(self, command: CommandProfile) -> None:
        self._names = np.array(command.names)
        self._is_position = np.array([quantity == 'position' for quantity in command.quantity])
        self._lower, self._upper = np.array(command.lower), np.array(command.upper)
        self._unbounded = np.isinf(self._lower) & np.isinf(self._upper)
        max_velocity = np.array(command.max_velocity)
        self._low = np.where(self._is_position, self._lower, -max_velocity)
        self._high = np.where(self._is_position, self._upper, max_velocity)
        self._max_step = np.where(self._is_position, max_velocity / command.rate_hz, np.inf)

    def apply(
        self, rows: np.ndarray, reference: np.ndarray | None, measured: np.ndarray | None
    ) -> Gated:
        """Make rows (n, num_joints), one command period apart, safe.

        Args:
            reference: (num_joints,) what row 0 is compared to: the last command sent, or the
                measured positions where there is none. NaN = unknown; unused for velocities.
            measured: (num_joints,) positions for the velocities' limits. NaN = unknown.
        """
        found: dict[str, np.ndarray] = {}
        rows = self._finite_rows(rows, found)
        unknown = self._is_position & (True if reference is None else np.isnan(reference))
        if unknown.any():
            found['no_reference'] = unknown
            rows = rows[:0]
        if len(rows):
            rows = self._clamp_values(rows, measured, found)
            rows = self._clamp_steps(rows, reference, found)
        concerned = np.any(list(found.values()), axis=0) if found else []
        return Gated(rows, tuple(found), tuple(self._names[concerned].tolist() if found else ()))

    def _finite_rows(self, rows: np.ndarray, found: dict[str, np.ndarray]) -> np.ndarray:
        """Rows up to the first bad one: a hole cannot be left out, rows are a period apart."""
        bad = ~np.isfinite(rows)
        if not bad.any():
            return rows
        first = int(bad.any(axis=1).argmax())
        found['nonfinite'] = bad[first]
        return rows[:first]

    def _clamp_values(
        self, rows: np.ndarray, measured: np.ndarray | None, found: dict[str, np.ndarray]
    ) -> np.ndarray:
        safe = np.clip(rows, self._low, self._high)
        changed = (safe != rows).any(axis=0)
        if changed.any():
            self._note(found, 'limit_position', changed & self._is_position)
            self._note(found, 'limit_velocity', changed & ~self._is_position)
        if not self._is_position.all():
            self._stop_at_position_limits(safe, measured, found)
        return safe

    def _stop_at_position_limits(
        self, safe: np.ndarray, measured: np.ndarray | None, found: dict[str, np.ndarray]
    ) -> None:
        """Zero each velocity that leads outwards at a limit, or from an unknown position."""
        position = np.full(len(self._names), np.nan) if measured is None else measured
        position = np.where(self._unbounded, 0.0, position)
        unknown = np.isnan(position)
        outwards = ((safe > 0) & ~(position < self._upper)) | (
            (safe < 0) & ~(position > self._lower)
        )
        outwards &= ~self._is_position
        if outwards.any():
            safe[outwards] = 0.0
            self._note(found, 'no_reference', outwards.any(axis=0) & unknown)
            self._note(found, 'limit_position', outwards.any(axis=0) & ~unknown)

    def _clamp_steps(
        self, rows: np.ndarray, reference: np.ndarray | None, found: dict[str, np.ndarray]
    ) -> np.ndarray:
        known = np.zeros(len(self._names)) if reference is None else reference
        start = np.where(self._is_position, known, 0.0)
        steps = np.abs(np.diff(rows, axis=0, prepend=start[np.newaxis]))
        too_fast = (steps > self._max_step * (1 + _ROUNDING)).any(axis=0)
        if not too_fast.any():
            return rows
        safe, before = rows.copy(), start
        for i in range(len(safe)):  # each row depends on the one before it
            before = safe[i] = np.clip(safe[i], before - self._max_step, before + self._max_step)
        outside = (safe[0] < self._low - _ROUNDING) | (safe[0] > self._high + _ROUNDING)
        if outside.any():
            # No command is both inside the limits and one step away: an operator must move the
            # arm or widen the limits, as MoveIt asks for a start outside its bounds.
            found['outside_limits'] = outside
            return safe[:0]
        found['limit_step'] = too_fast
        return np.clip(safe, self._low, self._high)

    @staticmethod
    def _note(found: dict[str, np.ndarray], intervention: str, joints: np.ndarray) -> None:
        if joints.any():
            found[intervention] = found.get(intervention, False) | joints
