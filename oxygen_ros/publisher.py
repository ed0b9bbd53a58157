"""CommandPublisher: the hard-deadline tick that sends one command per period, whatever happens.

Owns its thread, the choice between chunk and fallback, and the counting of lateness and misses.
Knows neither ROS messages nor torch, and never waits for the engine: it reads the ActionBuffer, and
what it sends and measures with are two callables given by `node.py`, which starts and stops it.

Time. Deadlines lie on the steady clock, at start + k * period, so neither NTP nor a paused /clock
stops the commands. Which row of a chunk is due is asked of the control clock, where chunks live.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from oxygen_ros.actions import INTERVENTIONS, ActionBuffer, CommandGate, Gated

if TYPE_CHECKING:
    from oxygen_ros.profile import CommandProfile

HALTS = ESTOP, HOLD = 'estop', 'hold'
"""Why an operator may want no motion."""

# Commands over which lateness is told: 10 s at 200 Hz.
_RING = 2048

# Below the kernel's interrupt threads (50) and above everything that is not real-time.
_FIFO_PRIORITY = 40

# Longest single sleep, so that `stop` need not wait for a slow command period.
_MAX_SLEEP_NS = 50_000_000


@dataclass(frozen=True)
class PublisherStats:
    """What happened since the start; lateness is over the last 2048 commands."""

    commands: int  # sent, fallback included
    fallback_commands: int  # sent to hold or go home
    misses: int  # deadlines that passed while an earlier command was late; never made up for
    silent_ticks: int  # deadlines kept, but with nothing that was allowed to leave
    errors: int  # exceptions of `send` or `measured`; see CommandPublisher.error
    interventions: dict[str, int]  # ticks in which the gate or an operator interfered, by reason
    last_intervention: str  # e.g. 'limit_step: elbow, wrist'; '' = none so far
    command_hz: float  # over the last second, or five periods; 0.0 when stalled
    command_age_s: float  # since the last command left; inf before the first
    lateness_p50_ms: float
    lateness_p99_ms: float
    lateness_max_ms: float
    source: str  # of the last tick: chunk, hold, home, or silence
    halt: str  # of the last tick: estop or hold if an operator wanted no motion, else ''
    scheduling: str  # of the thread: SCHED_FIFO, or why not


class CommandPublisher:
    """Sends rows of the newest chunk; without a fresh one it does what the profile declares.

    `hold` stays where the arm was measured when the hold began: that value is kept, or a sagging
    arm would be followed down. A velocity is held at 0. `home` returns at limited speed, `stop`
    sends nothing. Without a measurement nothing leaves, except velocities of 0.

    While an operator wants no motion it holds, whatever chunks there are and wherever home is; an
    emergency stop of a robot whose fallback is `stop` is silence.
    """

    def __init__(
        self,
        command: CommandProfile,
        actions: ActionBuffer,
        *,
        send: Callable[[np.ndarray], None],
        measured: Callable[[], np.ndarray | None],
        halt: Callable[[], str] = lambda: '',
        clock_ns: Callable[[], int] = time.monotonic_ns,
        rows_per_command: int = 1,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Nothing leaves before `start` (or a `tick` by hand, in tests).

        Args:
            send: publishes float64 (n, num_joints) rows, one command period apart, the first for
                now. Called by the publisher's thread alone.
            measured: float64 (num_joints,) fresh positions in command order, NaN where a command
                has no joint; None without a fresh measurement. Must not block.
            halt: why an operator wants no motion now, out of HALTS, or ''. Must not block.
            clock_ns: the control clock.
            rows_per_command: 1, or for a trajectory as many as it may be long.
        """
        self._command = command
        self._actions = actions
        self._send = send
        self._measured = measured
        self._halt = halt
        self._clock_ns = clock_ns
        self._rows_per_command = rows_per_command
        self._monotonic_ns = monotonic_ns
        self._sleep = sleep

        self._period_ns = round(1e9 / command.rate_hz)
        self._gate = CommandGate(command)
        self._is_velocity = np.array([quantity == 'velocity' for quantity in command.quantity])
        self._home = None if command.home is None else np.array(command.home)
        self._no_rows = np.empty((0, len(command.names)))

        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

        # Everything below is written by the publisher's thread only; others read single values.
        self._deadline_ns: int | None = None
        self._last: np.ndarray | None = None  # sent in the tick before; None = that was silent
        self._hold: np.ndarray | None = None  # latched target while holding
        self._reading: np.ndarray | None = None  # measured when the last row of a chunk was sent
        self._source = 'silence'
        self._halted = ''
        self._scheduling = 'not started'
        self._error: Exception | None = None
        self._commands = self._fallback_commands = self._misses = 0
        self._silent_ticks = self._errors = 0
        # All keys from the start, so that a reader's copy never meets a growing dict.
        self._interventions = dict.fromkeys((*INTERVENTIONS, *HALTS), 0)
        self._last_intervention = ''
        self._sent_ns = np.zeros(_RING, np.int64)
        self._lateness_ns = np.zeros(_RING, np.int64)

    @property
    def error(self) -> Exception | None:
        """The newest exception of `send` or `measured`. The thread goes on in spite of it."""
        return self._error

    @property
    def source(self) -> str:
        """Where the last tick's command came from: chunk, hold, home, or silence."""
        return self._source

    def start(self) -> None:
        """Begin, with the first command due at once. A publisher starts once."""
        if self._thread is not None:
            raise RuntimeError('CommandPublisher.start: was started before; make a new one')
        self._thread = threading.Thread(target=self._run, name='command_publisher', daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> bool:
        """End in the declared safe behaviour: a last hold, or silence where fallback is stop.

        Returns False if the thread did not end in time, because `send` or `measured` blocks. It is
        a daemon, so it cannot keep the process alive.
        """
        self._stopping.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def tick(self) -> None:
        """Send at most one command, now, and set the next deadline. Never raises, never waits.

        The command is always the one for now. Deadlines that passed meanwhile are counted as
        misses and skipped, not replayed.
        """
        self._tick(self._choose_rows)

    def stats(self) -> PublisherStats:
        """May be called from any thread."""
        now_ns, count = self._monotonic_ns(), min(self._commands, _RING)
        sent_ns = self._sent_ns[:count].copy()
        lateness_ms = self._lateness_ns[:count] / 1e6 if count else np.zeros(1)
        p50, p99 = np.percentile(lateness_ms, [50, 99])
        window_ns = max(1_000_000_000, 5 * self._period_ns)
        return PublisherStats(
            commands=self._commands,
            fallback_commands=self._fallback_commands,
            misses=self._misses,
            silent_ticks=self._silent_ticks,
            errors=self._errors,
            interventions=dict(self._interventions),
            last_intervention=self._last_intervention,
            command_hz=float(np.count_nonzero(sent_ns > now_ns - window_ns) / (window_ns / 1e9)),
            command_age_s=float((now_ns - sent_ns.max()) / 1e9) if count else float('inf'),
            lateness_p50_ms=float(p50),
            lateness_p99_ms=float(p99),
            lateness_max_ms=float(lateness_ms.max()),
            source=self._source,
            halt=self._halted,
            scheduling=self._scheduling,
        )

    # The thread

    def _run(self) -> None:
        self._scheduling = _ask_for_fifo()
        while self._reached_deadline():
            self.tick()
        if self._command.fallback != 'stop':
            # Hold, also where the fallback is home: there is no time left to go anywhere.
            self._tick(self._hold_rows)

    def _reached_deadline(self) -> bool:
        """Sleep until the next deadline; False if stopped meanwhile.

        No spinning: on two quiet cores at 200 Hz a plain sleep was late by 0.15 / 0.22 ms
        (p50 / p99). Spinning the last 0.2 ms gains just that, holds the GIL against the engine
        meanwhile, and no robot feels it. Event.wait instead of sleep was 0.08 ms later.
        """
        while not self._stopping.is_set():
            left_ns = (self._deadline_ns or 0) - self._monotonic_ns()
            if left_ns <= 0:
                return True
            self._sleep(min(left_ns, _MAX_SLEEP_NS) / 1e9)
        return False

    def _tick(self, choose: Callable[[np.ndarray | None], np.ndarray]) -> None:
        if self._deadline_ns is None:
            self._deadline_ns = self._monotonic_ns()
        try:
            rows = choose(self._measured_or_none())
            if len(rows):
                self._send(rows)
            self._last = rows[0].copy() if len(rows) else None
        except Exception as error:
            # Whether a command left is unknown, so the next one begins at the measurement.
            self._note_error(error)
            self._last, self._source = None, 'silence'
        self._count_and_advance(self._deadline_ns, sent=self._last is not None)

    def _measured_or_none(self) -> np.ndarray | None:
        """An exception counts as no measurement: commands, and velocities of 0, must go on."""
        try:
            return self._measured()
        except Exception as error:
            self._note_error(error)
            return None

    def _note_error(self, error: Exception) -> None:
        self._error = error
        self._errors += 1

    def _count_and_advance(self, deadline_ns: int, *, sent: bool) -> None:
        now_ns = self._monotonic_ns()
        lateness_ns = max(0, now_ns - deadline_ns)
        lost = lateness_ns // self._period_ns
        self._misses += lost
        self._deadline_ns = deadline_ns + (lost + 1) * self._period_ns
        if not sent:
            self._silent_ticks += 1
            return
        self._sent_ns[self._commands % _RING] = now_ns
        self._lateness_ns[self._commands % _RING] = lateness_ns
        self._commands += 1
        if self._source != 'chunk':
            self._fallback_commands += 1

    # What to send

    def _choose_rows(self, measured: np.ndarray | None) -> np.ndarray:
        """Safe rows for now (n, num_joints): of the chunk, else of the fallback, else none."""
        self._halted = self._halt()
        if self._halted:
            return self._halted_rows(measured)
        rows = self._actions.rows(
            self._clock_ns(), period_ns=self._period_ns, count=self._rows_per_command
        )
        if len(rows):
            gated = self._gate.apply(rows, self._chunk_reference(measured), measured)
            self._count(gated)
            if len(gated.rows):
                self._source, self._reading = 'chunk', measured
                return gated.rows
        return self._fallback_rows(measured)

    def _chunk_reference(self, measured: np.ndarray | None) -> np.ndarray | None:
        """Between rows of chunks the command before; after a hold or silence the arm itself.

        It may have been moved by hand or have sagged meanwhile, and then the command before is
        not where the motion begins. A joint that still reads what it did at the last row may not
        have been read since, and has been commanded on: there the command before is all we know.
        """
        if self._last is None:
            return measured
        if self._source == 'chunk' or measured is None:
            return self._last
        unread = np.isnan(measured)
        if self._reading is not None:
            unread |= measured == self._reading
        return np.where(unread, self._last, measured)

    def _fallback_rows(self, measured: np.ndarray | None) -> np.ndarray:
        if self._command.fallback == 'hold':
            return self._hold_rows(measured)
        if self._command.fallback == 'home' and self._home is not None:
            return self._gated_target(self._home, measured, 'home')
        self._source = 'silence'
        return self._no_rows

    def _halted_rows(self, measured: np.ndarray | None) -> np.ndarray:
        self._interventions[self._halted] += 1
        if self._halted == ESTOP and self._command.fallback == 'stop':
            self._source = 'silence'
            return self._no_rows
        return self._hold_rows(measured)

    def _hold_rows(self, measured: np.ndarray | None) -> np.ndarray:
        # Latched only while it is being sent: after silence the arm may have been moved away.
        if self._source != 'hold':
            self._hold = self._hold_target(measured)
        if self._hold is None:
            self._source = 'silence'
            self._interventions['no_reference'] += 1
            return self._no_rows
        return self._gated_target(self._hold, measured, 'hold')

    def _hold_target(self, measured: np.ndarray | None) -> np.ndarray | None:
        """The measured positions and velocities of 0; None if a position is not measured."""
        target = np.full(len(self._is_velocity), np.nan) if measured is None else measured.copy()
        target[self._is_velocity] = 0.0
        unknown = np.isnan(target)
        if unknown.any() and self._is_velocity.any() and self._last is not None:
            # Silence would leave the other joints' velocities in force, so this one is repeated.
            target[unknown] = self._last[unknown]
        return None if np.isnan(target).any() else target

    def _gated_target(
        self, target: np.ndarray, measured: np.ndarray | None, source: str
    ) -> np.ndarray:
        reference = measured if self._last is None else self._last
        gated = self._gate.apply(target[np.newaxis], reference, measured)
        self._count(gated)
        self._source = source if len(gated.rows) else 'silence'
        return gated.rows

    def _count(self, gated: Gated) -> None:
        if gated.interventions:
            for intervention in gated.interventions:
                self._interventions[intervention] += 1
            self._last_intervention = f'{", ".join(gated.interventions)}: {", ".join(gated.joints)}'


def _ask_for_fifo() -> str:
    """Ask for real-time scheduling of the calling thread; returns what it got, and why.

    With SCHED_FIFO the worst lateness beside a busy engine was 0.3 ms instead of 4 ms. It needs
    CAP_SYS_NICE or an rtprio entry in /etc/security/limits.conf. Threads started from here on do
    not inherit it.
    """
    try:
        policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(_FIFO_PRIORITY))
    except (AttributeError, OSError) as error:
        return f'SCHED_OTHER (SCHED_FIFO refused: {error})'
    return f'SCHED_FIFO {_FIFO_PRIORITY}'
