"""What an operator watches: rates over a sliding window, and the state of each part in words.

Plain numbers in, plain numbers and sentences out; knows no topic and no message. Called by the
node's statistics and diagnostics timers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oxygen_ros.engine.engine import EngineStats
from oxygen_ros.observation import SourceStatus
from oxygen_ros.profile import GripperProfile, RobotProfile
from oxygen_ros.publisher import PublisherStats

# diagnostic_msgs/DiagnosticStatus levels
OK, WARN, ERROR, STALE = range(4)

RATE_WINDOW_NS = 2_000_000_000

GRIPPER_PLAY = 0.1
"""Share of its range by which a gripper may read outside it."""
MIN_CLOCK_STEP_NS = 200_000_000
"""Between two looks a clock that is only slewed moves by less, and so does a process held up."""

QUIET_LOAD_S = 2.0
"""Weights that are loaded sooner need no progress in the log."""

ENGINE_NUMBERS = (
    'prefill_ms', 'denoise_ms', 'decode_step_ms', 'frames', 'prefills', 'chunks', 'tokens',
    'live_sequences', 'slots_used', 'slots_total',
)  # fmt: skip
COMMAND_NUMBERS = (
    'command_hz', 'lateness_p50_ms', 'lateness_p99_ms', 'lateness_max_ms', 'commands', 'misses',
    'fallback_commands',
)  # fmt: skip
"""Fields of EngineStats and PublisherStats that the message carries under the same name."""


@dataclass(frozen=True)
class Status:
    """One line of the diagnostics."""

    name: str
    level: int
    message: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Thresholds:
    """From where on an operator is warned; the node's parameters `warn_*` of the same names."""

    rate_share: float = 0.8
    """Share of its declared rate below which a camera or the commands are slow."""
    lateness_p99_ms: float = 10.0
    chunk_age_s: float = 1.0
    """Since the moment that the chunk in force was computed for."""
    drops: int = 0
    """Things that may be thrown away between two diagnostics, a second apart."""


def gripper_problem(gripper: GripperProfile, position: float) -> str:
    """Say that a gripper reads more than a tenth outside its range; '' if it does not."""
    if -GRIPPER_PLAY <= gripper.share(position) <= 1 + GRIPPER_PLAY:
        return ''
    return (
        f'{gripper.joint} reads {position:g}, but grippers says {gripper.robot[0]:g} to '
        f'{gripper.robot[1]:g}; is it another unit?'
    )


def progress_sentences(
    say: Callable[[str], object], clock_s: Callable[[], float] = time.monotonic
) -> Callable[[float], None]:
    """Return what takes the fraction of the weights that is loaded and says every tenth of it."""
    started_s, said = clock_s(), 0

    def report(fraction: float) -> None:
        nonlocal said
        tenths = int(10 * fraction)
        if tenths > said and clock_s() - started_s > QUIET_LOAD_S:
            say(f'weights loaded: {10 * tenths} %')
            said = tenths

    return report


class RateWindow:
    """The rate of a growing counter over the last two seconds; falls to 0 when it stands still."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque()

    def add(self, now_ns: int, count: int) -> float:
        """Take the counter's value now and return its rate [1/s]."""
        if self._samples and count < self._samples[-1][1]:
            self._samples.clear()  # the counter began anew
        self._samples.append((now_ns, count))
        while len(self._samples) > 2 and now_ns - self._samples[0][0] > RATE_WINDOW_NS:
            self._samples.popleft()
        first_ns, first = self._samples[0]
        return (count - first) * 1e9 / (now_ns - first_ns) if now_ns > first_ns else 0.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class Growth:
    """Whether counters have grown since they were last looked at."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def grown(self, counters: Mapping[str, int]) -> dict[str, int]:
        """Return by how much each counter grew since the last call, those that did."""
        grown = {
            name: count - self._before.get(name, 0)
            for name, count in counters.items()
            if count > self._before.get(name, 0)
        }
        self._before = dict(counters)
        return grown


class Monitor:
    """Turns the parts' counters into what one robot's operator is told."""

    def __init__(self, profile: RobotProfile, warn: Thresholds) -> None:
        self._profile, self._warn = profile, warn
        self._cameras = {camera.slot: camera for camera in profile.cameras}
        self._rates = {
            name: RateWindow()
            for name in ('chunks', 'tokens', 'decode_steps', 'drafted', 'accepted')
        }
        self._command_growth, self._drop_growth, self._missed_growth = Growth(), Growth(), Growth()

    def numbers(
        self,
        now_ns: int,
        engine: EngineStats,
        commands: PublisherStats | None,
        *,
        horizon: int,
        active: bool,
        observation_age_ms: float,
    ) -> dict[str, Any]:
        """Return the fields of the EngineStats message but its drops, by name."""
        rates = {
            name: window.add(now_ns, getattr(engine, name)) for name, window in self._rates.items()
        }
        numbers: dict[str, Any] = {
            'chunk_hz': rates['chunks'],
            'action_hz': rates['chunks'] * horizon,
            'tokens_per_s': rates['tokens'],
            'tokens_per_pass': _share(rates['tokens'], rates['decode_steps']),
            'draft_acceptance': _share(rates['accepted'], rates['drafted']),
            'observation_age_ms': observation_age_ms,
            'texts': self._finished(engine, 'text'),
            'notes': self._finished(engine, 'memory'),
            **{name: getattr(engine, name) for name in ENGINE_NUMBERS},
        }
        if commands is not None:
            numbers |= {name: getattr(commands, name) for name in COMMAND_NUMBERS}
        if not active:
            numbers['command_hz'] = 0.0
        return numbers

    def _finished(self, engine: EngineStats, kind: str) -> int:
        names = (task.name for task in self._profile.tasks if task.kind == kind)
        return sum(engine.finished.get(name, 0) for name in names)

    def command_status(
        self, active: bool, stats: PublisherStats | None, chunk_age_s: float
    ) -> Status:
        """Describe the command tick; the age is that of the chunk in force, NaN without one."""
        if not active or stats is None:
            return Status('commands', OK, 'inactive: no commands')
        values = {
            'Actual frequency (Hz)': f'{stats.command_hz:.1f}',
            'Target frequency (Hz)': f'{self._profile.command.rate_hz:g}',
            'Source': stats.source,
            'Chunk age (s)': f'{chunk_age_s:.3f}',
            'Halt': stats.halt or 'none',
            'Lateness p50/p99/max (ms)': f'{stats.lateness_p50_ms:.2f} / '
            f'{stats.lateness_p99_ms:.2f} / {stats.lateness_max_ms:.2f}',
            'Commands': stats.commands,
            'Fallback commands': stats.fallback_commands,
            'Missed deadlines': stats.misses,
            'Silent ticks': stats.silent_ticks,
            'Errors': stats.errors,
            'Last intervention': stats.last_intervention or 'none',
            'Scheduling': stats.scheduling,
            **{f'Intervention {name}': n for name, n in stats.interventions.items() if n},
        }
        grown = self._command_growth.grown({'misses': stats.misses, 'errors': stats.errors})
        if 'errors' in grown:
            return Status('commands', ERROR, 'a command could not be published', values)
        if stats.halt:
            return Status('commands', WARN, f'{stats.halt}: {stats.source}', values)
        if stats.source == 'silence':
            return Status('commands', WARN, 'nothing that is allowed to leave', values)
        if stats.source != 'chunk':
            return Status('commands', WARN, f'no fresh action: {stats.source}', values)
        if 'misses' in grown:
            return Status('commands', WARN, f'{grown["misses"]} deadlines missed', values)
        if problem := self._command_problem(stats, chunk_age_s):
            return Status('commands', WARN, problem, values)
        return Status('commands', OK, 'commands from fresh actions', values)

    def _command_problem(self, stats: PublisherStats, chunk_age_s: float) -> str:
        """Say which threshold the commands are beyond; '' if none."""
        rate_hz, warn = self._profile.command.rate_hz, self._warn
        measured = stats.commands >= max(rate_hz, 5)  # the rate is one of a second, or of 5 periods
        if measured and stats.command_hz < warn.rate_share * rate_hz:
            return f'{stats.command_hz:.1f} Hz of {rate_hz:g} Hz leave'
        if stats.lateness_p99_ms > warn.lateness_p99_ms:
            return (
                f'late by {stats.lateness_p99_ms:.2f} ms (p99), expected at most '
                f'{warn.lateness_p99_ms:g} ms'
            )
        if chunk_age_s > warn.chunk_age_s:
            return f'the chunk is {chunk_age_s:.2f} s old, expected at most {warn.chunk_age_s:g} s'
        return ''

    def engine_status(
        self,
        active: bool,
        stats: EngineStats | None,
        *,
        not_ready: Sequence[str],
        last_error: str,
        broken: bool,
        away: str,
        drops: Mapping[str, int],
    ) -> Status:
        """Describe the engine and what was dropped on the way in and out."""
        if stats is None:
            return Status('engine', OK, 'not configured')
        tick_ms = 1000.0 / self._profile.frame_rate_hz
        values = {
            'Prefill (ms)': f'{stats.prefill_ms:.1f}',
            'Denoise (ms)': f'{stats.denoise_ms:.1f}',
            'Decode step (ms)': f'{stats.decode_step_ms:.2f}',
            'Tick (ms)': f'{tick_ms:g}',
            'Frames': stats.frames,
            'Prefills': stats.prefills,
            'Live sequences': stats.live_sequences,
            'Slots': f'{stats.slots_used} of {stats.slots_total}',
            'Last error': last_error or 'none',
            **{f'Dropped {reason}': count for reason, count in drops.items()},
        }
        grown = self._drop_growth.grown(drops)
        if broken:
            return Status('engine', ERROR, f'given up: {last_error}', values)
        if away:
            return Status('engine', ERROR, away, values)
        if 'frame_failed' in grown:
            return Status('engine', ERROR, f'a frame failed: {last_error}', values)
        if not active:
            return Status('engine', OK, 'ready, inactive', values)
        if not_ready:
            return Status('engine', WARN, f'no frame: {"; ".join(not_ready)}', values)
        if stats.starved_frames:
            busy_ms = stats.prefill_ms + stats.denoise_ms
            message = (
                f'no time to write: prefill and denoise take {busy_ms:.0f} of {tick_ms:.0f} ms; '
                f'lower frame_rate_hz'
            )
            return Status('engine', WARN, message, values)
        if sum(grown.values()) > self._warn.drops:
            reasons = ', '.join(f'{count} {reason}' for reason, count in grown.items())
            return Status('engine', WARN, f'dropped: {reasons}', values)
        return Status('engine', OK, 'running', values)

    def source_status(self, status: SourceStatus) -> Status:
        """Describe a camera or the joint states."""
        camera = self._cameras.get(status.name)
        expected_hz = camera.expected_hz if camera else 0.0
        name = f'camera {status.name}' if camera else 'joint states'
        values = {
            'Topic': status.topic,
            'Actual frequency (Hz)': f'{status.rate_hz:.1f}',
            'Target frequency (Hz)': f'{expected_hz:g}',
            'Age (s)': 'none yet' if status.age_s is None else f'{status.age_s:.3f}',
            'Received': status.received,
            'Dropped': status.dropped,
            'Untrusted stamps': status.untrusted_stamps,
            'Last error': status.last_error or 'none',
        }
        absent = WARN if camera and not camera.required else ERROR
        if status.last_error:
            return Status(name, WARN, status.last_error, values)
        if status.age_s is None:
            return Status(name, absent, f'nothing on {status.topic} yet', values)
        if status.rate_hz == 0:
            return Status(name, absent, f'nothing on {status.topic} any more', values)
        if expected_hz and status.rate_hz < self._warn.rate_share * expected_hz:
            message = f'{status.rate_hz:.1f} Hz of {expected_hz:g} Hz arrive'
            return Status(name, WARN, message, values)
        return Status(name, OK, f'{status.rate_hz:.1f} Hz', values)

    def middleware_status(self, misfits: Sequence[str], missed: Mapping[str, int]) -> Status:
        """Describe what the middleware saw: endpoints that do not fit, deadlines by topic."""
        values = {f'Deadlines missed on {topic}': count for topic, count in missed.items()}
        grown = self._missed_growth.grown(missed)
        if misfits:
            return Status('middleware', WARN, '; '.join(misfits), values)
        if grown:
            topics = ', '.join(f'{count} on {topic}' for topic, count in grown.items())
            return Status('middleware', WARN, f'deadlines missed: {topics}', values)
        return Status('middleware', OK, 'all ends fit', values)

    def gripper_status(self, positions: Mapping[str, float]) -> Status:
        """Describe whether grippers read what the profile says they may, by joint name."""
        problems = [
            problem
            for gripper in self._profile.grippers
            if gripper.joint in positions
            and (problem := gripper_problem(gripper, positions[gripper.joint]))
        ]
        return Status('grippers', WARN if problems else OK, '; '.join(problems) or 'within range')


def interlock_status(reasons: Mapping[str, str], estops: int, holds: int) -> Status:
    """Describe what an operator keeps engaged, and why."""
    values = {'Emergency stops': estops, 'Holds': holds}
    if not reasons:
        return Status('interlock', OK, 'released', values)
    message = '; '.join(f'{halt}: {reason}' for halt, reason in reasons.items())
    return Status('interlock', ERROR if 'estop' in reasons else WARN, message, values)


class ClockWatch:
    """Notices when somebody sets the clock that stamps and ages are read from."""

    def __init__(self) -> None:
        self._offset_ns: int | None = None
        self._steps = 0

    def status(self, use_sim_time: bool, ros_now_ns: int, monotonic_ns: int) -> Status:
        """Describe the clock. Commands and frames do not follow the system clock, stamps do."""
        if use_sim_time:
            if ros_now_ns == 0:
                return Status('clock', WARN, 'use_sim_time is set: waiting for /clock')
            return Status('clock', OK, 'simulated time', {'Time (s)': f'{ros_now_ns / 1e9:.3f}'})
        before_ns, self._offset_ns = self._offset_ns, ros_now_ns - monotonic_ns
        step_ns = 0 if before_ns is None else self._offset_ns - before_ns
        if abs(step_ns) < MIN_CLOCK_STEP_NS:
            return Status('clock', OK, 'system clock', {'Steps': self._steps})
        self._steps += 1
        message = f'the system clock stepped by {step_ns / 1e9:+.3f} s'
        return Status('clock', WARN, message, {'Steps': self._steps})
