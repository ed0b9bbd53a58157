"""SoakWitness: what a soak hears of the node, and whether it was right.

Owns the checks of every command against the limits of the profile, and the record of misses and of
diagnostics. Knows no fault. Its callbacks run in the executor's thread, `soak.py` reads it.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from oxygen_ros.conversions import stamp_to_ns
from oxygen_ros.evaluation.measurements import resolve
from oxygen_ros.evaluation.stall_watch import RunDelay
from oxygen_ros.profile import RobotProfile

MAX_VIOLATIONS = 20
# A hold begins where the arm was measured; the node may have heard that some messages ago.
NUM_MEASURED = 100


@dataclass(frozen=True)
class Misses:
    """Deadlines that passed between two statistics of the node [ns, steady clock]."""

    begin_ns: int
    end_ns: int
    count: int


class CommandCheck:
    """Whether commands are finite, inside the limits, and no faster than allowed."""

    def __init__(self, profile: RobotProfile) -> None:
        command = profile.command
        self._names = command.names
        self._lower, self._upper = np.array(command.lower), np.array(command.upper)
        self._step = np.array(command.max_velocity) / command.rate_hz * (1 + 1e-6) + 1e-9
        self._period_ns = round(1e9 / command.rate_hz)
        self._last: np.ndarray | None = None
        self._last_ns = 0
        self._measured: deque[np.ndarray] = deque(maxlen=NUM_MEASURED)

    def measure(self, positions: Iterable[float]) -> None:
        """Where the arm stands now, in the order of the command."""
        self._measured.append(np.array(list(positions)))

    def wrong(self, names: Iterable[str], positions: Iterable[float], stamp_ns: int) -> str:
        """Say what is wrong with a position command; '' if nothing is."""
        command = np.array(list(positions), np.float64)
        if tuple(names) != self._names or command.shape != self._step.shape:
            return f'expected a position for each of {self._names}, got {list(names)}'
        last, periods = self._last, self._periods_since(stamp_ns)
        self._last, self._last_ns = command, stamp_ns
        if not np.isfinite(command).all():
            return f'not finite: {command}'
        if ((command < self._lower) | (command > self._upper)).any():
            return f'outside the limits: {command}'
        starts = [] if last is None else [(last, periods * self._step)]
        starts += [(measured, self._step) for measured in tuple(self._measured)]
        # Joint by joint: of one there may be a newer reading than of another.
        if not np.any([np.abs(command - start) <= room for start, room in starts], axis=0).all():
            return f'a step too large: {command}, the one before was {last}'
        return ''

    def _periods_since(self, stamp_ns: int) -> int:
        """Commands may be lost on the way here; each that is allows the next another step."""
        return max(1, math.ceil((stamp_ns - self._last_ns) / self._period_ns - 0.5))


class SoakWitness:
    def __init__(self, node: Any, profile: RobotProfile, run_delay: RunDelay) -> None:
        """Listen to the node from now on; `run_delay` is that of its process."""
        from diagnostic_msgs.msg import DiagnosticArray
        from sensor_msgs.msg import JointState

        from oxygen_ros.msg import ActionChunk, EngineStats

        self.check = CommandCheck(profile)
        self.violations: list[str] = []
        self.num_commands = self.num_chunks = self.num_violations = 0
        self.num_acted = 0
        """Commands that came of a chunk, as the node counts them."""
        self.stats: Any = None
        """Newest EngineStats."""
        self.misses: list[Misses] = []
        self.starved: list[tuple[int, int]] = []
        """When a thread of the node was ready and the machine let it wait [ns, steady clock]."""
        self.drops: Counter[str] = Counter()
        """What the node threw away, by reason, over all its configurations."""
        self._stats_ns = 0
        self._growth = _Growth()
        self._run_delay = run_delay
        self._max_delay_ns = round(1e9 / profile.command.rate_hz) // 2
        self._diagnostics: dict[str, tuple[int, str]] = {}
        subscribe = node.create_subscription
        subscribe(JointState, resolve(profile.command.topic), self._on_command, 200)
        subscribe(ActionChunk, resolve('~/actions'), self._on_chunk, 50)
        subscribe(EngineStats, resolve('~/stats'), self._on_stats, 50)
        subscribe(DiagnosticArray, '/diagnostics', self._on_diagnostics, 50)

    def told(self, part: str, text: str, since_ns: int) -> bool:
        """Whether the diagnostics of a part said so in their newest word since then."""
        arrived_ns, message = self._diagnostics.get(f'/oxygen: {part}', (0, ''))
        return arrived_ns > since_ns and text in message

    def violate(self, sentence: str) -> None:
        """Note something that must not be; the first ones are kept, all are counted."""
        self.num_violations += 1
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(sentence)

    def _on_command(self, message: Any) -> None:
        self.num_commands += 1
        stamp_ns = stamp_to_ns(message.header.stamp)
        if wrong := self.check.wrong(message.name, message.position, stamp_ns):
            self.violate(f'command {self.num_commands}: {wrong}')

    def _on_chunk(self, message: Any) -> None:
        self.num_chunks += 1

    def _on_stats(self, message: Any) -> None:
        # The node says when it looked; when its message was read here depends on us.
        stamp_ns = stamp_to_ns(message.header.stamp) - time.time_ns() + time.monotonic_ns()
        if self._run_delay.longest_ns() >= self._max_delay_ns:
            self.starved.append((self._stats_ns, time.monotonic_ns()))
        self.stats, grown = message, self._growth.since_last(message)
        if missed := grown.pop('misses'):
            self.misses.append(Misses(self._stats_ns or stamp_ns, stamp_ns, missed))
        self.num_acted += grown.pop('acted')
        self.drops.update(grown)
        self._stats_ns = stamp_ns

    def _on_diagnostics(self, message: Any) -> None:
        for status in message.status:
            self._diagnostics[status.name] = (time.monotonic_ns(), status.message)


class _Growth:
    """By how much counters grew that begin anew with every activation or configuration."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def since_last(self, stats: Any) -> dict[str, int]:
        now = {
            'misses': stats.misses,
            'acted': stats.commands - stats.fallback_commands,
            **dict(zip(stats.drop_reasons, stats.drop_counts, strict=True)),
        }
        before, self._before = self._before, now
        return {
            name: count - before.get(name, 0) if count >= before.get(name, 0) else count
            for name, count in now.items()
        }


def ours(
    misses: Iterable[Misses], excused: Iterable[tuple[int, int]], room_ns: int
) -> list[Misses]:
    """The misses that nothing but the node explains.

    Args:
        excused: when the machine stalled, or we had stopped the node [ns, steady clock].
        room_ns: a miss is counted when its command leaves at last, so what explains it may have
            ended so long before the statistics in between.
    """
    spans = list(excused)
    return [
        miss
        for miss in misses
        if not any(
            begin_ns <= miss.end_ns and end_ns >= miss.begin_ns - room_ns
            for begin_ns, end_ns in spans
        )
    ]
