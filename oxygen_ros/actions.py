"""ActionChunk, ActionBuffer ("which command at time t?") and CommandGate, the last check.

Owns the rules of what may leave for the robot: only commands of the newest frame and of now,
finite, inside the limits and no faster than allowed. Knows neither ROS nor torch nor the model. The
frame thread puts chunks in; `publisher.py` takes rows out and sends each through the gate.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from oxygen_ros.profile import CommandProfile, RobotProfile

# Room for rounding where a value computed to lie on a limit is compared with it.
_ROUNDING = 1e-9

REMEMBERED_LATENCIES = 10
"""A chunk is made for the longest delay of so many before it. One slow pass is so forgotten."""

_NEVER_NS = -(2**63)

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


@dataclass(frozen=True, eq=False)
class Leftover:
    """What the chunk in force still has, in time with a chunk that is about to be made."""

    values: np.ndarray  # float64 (n >= 1, num_joints), robot units; row i belongs to its row i
    delay: int  # how many of these rows will probably be commanded before it comes; <= n


class ActionBuffer:
    """Holds the newest chunk; a new one replaces the rest of the old one.

    A chunk is indexed by the time of its observation, so rows that passed while the model was
    thinking are skipped, and a stalled reader goes on with the row for now.

    `ensemble` keeps every chunk that is not over. A command is their mean, where a chunk made n
    rows after the oldest weighs exp(-ensemble_coefficient * n): with a chunk per row that is ACT's
    temporal ensembling (arXiv 2304.13705). With fewer chunks there are fewer to average, and each
    still weighs by its age; one that is over leaves with a step of its weight.

    The `rtc` modes count time in what was commanded: rows are skipped for the time in which the
    chunk before was played, not for time in which nothing was. A first chunk therefore begins with
    its first row, and one after a gap begins where the robot stands. It may wait so for no longer
    than it is itself; then it is late.
    """

    def __init__(
        self,
        num_joints: int,
        interpolation: str,
        *,
        blending: str = 'replace',
        ensemble_coefficient: float = 0.0,
        max_delay: int = 0,
    ) -> None:
        """Begin empty.

        Args:
            blending: the profile's `action.blending`.
            ensemble_coefficient: see the class; only `ensemble` reads it.
            max_delay: most rows that `leftover` calls executed; 0 = any number.
        """
        self._num_joints = num_joints
        self._linear = interpolation == 'linear'
        self._ensemble, self._rtc = blending == 'ensemble', blending.startswith('rtc')
        self._coefficient = ensemble_coefficient
        self._max_delay = max_delay
        # Writers (frame thread: put; rclpy thread: clear) take the lock. The publisher only reads
        # `_chunks`, which is swapped whole, and so never waits for either.
        self._lock = threading.Lock()
        self._chunks: tuple[ActionChunk, ...] = ()  # newest last; one, but for `ensemble`
        self._first_frame = 0
        self._drops: Counter[str] = Counter()
        # Written by the publisher: until when it has commands of a chunk. Only `rtc` asks.
        self._commanded_ns = _NEVER_NS
        self._latencies_ns: deque[int] = deque(maxlen=REMEMBERED_LATENCIES)

    @classmethod
    def of_profile(cls, profile: RobotProfile) -> ActionBuffer:
        """The buffer that plays chunks as the profile says."""
        action = profile.action
        return cls(
            len(profile.command.names),
            profile.command.interpolation,
            blending=action.blending,
            ensemble_coefficient=action.ensemble_coefficient,
            max_delay=profile.model.training_max_delay if action.blending == 'rtc_trained' else 0,
        )

    @property
    def chunk(self) -> ActionChunk | None:
        """The newest chunk that commands are taken from, even if its rows have passed."""
        chunks = self._chunks
        return chunks[-1] if chunks else None

    def put(self, chunk: ActionChunk, now_ns: int) -> str | None:
        """Take a chunk, or return the reason why not; refusals are counted in `drops`.

        Reasons: chunk_width, chunk_nonfinite, chunk_cancelled (of a frame before the last `clear`),
        chunk_old (of an earlier frame than the one held), chunk_late (already over at now_ns),
        chunk_future (begins more than a row after now_ns). The chunk held stays in force.
        """
        with self._lock:
            latency_ns = now_ns - chunk.time_ns
            continued = self._commanded_ns > chunk.time_ns
            if self._rtc:
                chunk = self._without_idle_time(chunk, now_ns)
            reason = self._refusal(chunk, now_ns)
            if reason is not None:
                self._drops[reason] += 1
            elif self._ensemble:
                self._chunks = (*(old for old in self._chunks if old.end_ns > now_ns), chunk)
            else:
                self._chunks = (chunk,)
                if continued:  # the first chunk may have waited for things that happen once
                    self._latencies_ns.append(latency_ns)
        return reason

    def clear(self, reason: str, first_frame: int) -> None:
        """Throw the chunk away, and later all that come from frames before first_frame.

        For a new instruction, a jump of the clock, deactivation: a result still being computed
        belongs to the time before. Counted as `cleared_<reason>` if commands were left.
        """
        with self._lock:
            if self._chunks:
                self._drops[f'cleared_{reason}'] += 1
            self._chunks = ()
            self._first_frame = first_frame
            self._commanded_ns = _NEVER_NS

    def rows(self, now_ns: int, *, period_ns: int, count: int) -> np.ndarray:
        """The commands for now_ns, now_ns + period_ns, ...: float64 (n, num_joints), n <= count.

        Fewer where the chunk ends, none without a chunk. `linear` draws a line between rows,
        `previous` keeps each row for its whole period. The first row counts as commanded.
        """
        chunks = self._chunks
        if not chunks:
            return np.empty((0, self._num_joints))
        if self._ensemble:
            return self._mean(chunks, now_ns, period_ns, count)
        rows = self._sample(chunks[-1], now_ns, period_ns, count)
        if self._rtc and len(rows):
            self._commanded_ns = min(now_ns + period_ns, chunks[-1].end_ns)
        return rows

    def leftover(self, time_ns: int) -> Leftover | None:
        """What will be commanded from time_ns on if no new chunk comes; None if nothing will.

        For the frame thread, while it makes a chunk whose row 0 belongs to time_ns. The delay is
        the longest of the last latencies, each from observation to `put`; it is cut, and counted as
        delay_beyond_training in `drops`, where it exceeds max_delay.
        """
        chunk = self.chunk
        if chunk is None:
            return None
        values = self._sample(chunk, time_ns, chunk.period_ns, len(chunk.values))
        if not len(values):
            return None
        delay = -(-max(self._latencies_ns, default=0) // chunk.period_ns)  # rounded up
        delay = max(0, min(delay, len(values), len(chunk.values) - 1))
        if self._max_delay and delay > self._max_delay:
            delay = self._max_delay
            with self._lock:
                self._drops['delay_beyond_training'] += 1
        return Leftover(values, delay)

    def drops(self) -> dict[str, int]:
        """How many chunks were refused, cleared or made for a shorter delay, by reason."""
        with self._lock:
            return dict(self._drops)

    def _sample(self, chunk: ActionChunk, now_ns: int, period_ns: int, count: int) -> np.ndarray:
        # Long before row 0 there is nothing to do: the control clock has been set back.
        if now_ns < chunk.time_ns - chunk.period_ns:
            return np.empty((0, self._num_joints))
        left = -(-(chunk.end_ns - now_ns) // period_ns)  # rounded up
        return self._at(chunk, now_ns + period_ns * np.arange(max(0, min(count, left))))

    def _at(self, chunk: ActionChunk, times_ns: np.ndarray) -> np.ndarray:
        """The rows (n, num_joints) of a chunk for these moments; its last row has no end here."""
        index, rest_ns = np.divmod(np.maximum(times_ns - chunk.time_ns, 0), chunk.period_ns)
        last = len(chunk.values) - 1
        here = chunk.values[np.minimum(index, last)]
        if not self._linear:
            return here
        there = chunk.values[np.minimum(index + 1, last)]
        share = (rest_ns / chunk.period_ns)[:, np.newaxis]
        return here + share * (there - here)

    def _mean(
        self, chunks: tuple[ActionChunk, ...], now_ns: int, period_ns: int, count: int
    ) -> np.ndarray:
        """As `rows`, the weighted mean of all chunks that have a row for the moment."""
        left = -(-(max(chunk.end_ns for chunk in chunks) - now_ns) // period_ns)
        times_ns = now_ns + period_ns * np.arange(max(0, min(count, left)))
        row_ns = chunks[-1].period_ns
        begin_ns = np.array([[chunk.time_ns] for chunk in chunks])
        end_ns = np.array([[chunk.end_ns] for chunk in chunks])
        if self._linear:  # behind its last row a chunk has no line, and others do
            end_ns[:-1] -= row_ns - 1
        has_row = (times_ns >= begin_ns - row_ns) & (times_ns < end_ns)  # (chunks, n)
        if not has_row.any(axis=0).all():
            times_ns = times_ns[: has_row.any(axis=0).argmin()]
            has_row = has_row[:, : len(times_ns)]
        if not len(times_ns):
            return np.empty((0, self._num_joints))
        # Relative to the heaviest, so that no power is too large or too small for a float.
        power = np.where(has_row, -self._coefficient * (begin_ns - begin_ns[0]) / row_ns, -np.inf)
        weights = np.exp(power - power.max(axis=0))[..., np.newaxis]
        values = np.stack([self._at(chunk, times_ns) for chunk in chunks])
        mean: np.ndarray = (weights * values).sum(axis=0) / weights.sum(axis=0)
        return mean

    def _without_idle_time(self, chunk: ActionChunk, now_ns: int) -> ActionChunk:
        """Move a chunk by the time since its observation in which nothing was commanded.

        Robot and plan then meet again: LeRobot drops as many rows as were played, and no more than
        the measured latency (its pull request 4454).
        """
        idle_ns = now_ns - max(chunk.time_ns, self._commanded_ns)
        idle_ns = min(idle_ns, chunk.end_ns - chunk.time_ns)  # what was seen longer ago is late
        return replace(chunk, time_ns=chunk.time_ns + idle_ns) if idle_ns > 0 else chunk

    def _refusal(self, chunk: ActionChunk, now_ns: int) -> str | None:
        if chunk.values.shape[1] != self._num_joints:
            return 'chunk_width'
        if not np.isfinite(chunk.values).all():
            return 'chunk_nonfinite'
        if chunk.frame < self._first_frame:
            return 'chunk_cancelled'
        held = self.chunk
        if held is not None and chunk.frame < held.frame:
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
        self._continuous = np.array([name in command.continuous for name in command.names])
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
            rows = self._by_the_short_way(rows, reference)
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

    def _by_the_short_way(self, rows: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        """Of equal positions of a continuous joint those beside the reference: no turn back.

        A driver may count turns or not, and differently from what was commanded to it.
        """
        turning = self._continuous & self._is_position
        if reference is None or not turning.any():
            return rows
        path = np.unwrap(np.vstack([reference, rows])[:, turning], axis=0)
        rows = rows.copy()
        rows[:, turning] = path[1:]
        return rows

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
