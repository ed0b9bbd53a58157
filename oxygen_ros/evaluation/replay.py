"""Replay: one recording through the node's own rooms, on the time of the recording.

Owns the order of events: a message arrives, the frame timer ticks, a chunk takes over, a command is
due. The observation buffer, conversions, engine, action buffer and command publisher are those of
the node; only the clock is another. Knows no file format and keeps no results: whoever calls it
(`offline.py`) is told of every event.

Time. Ticks lie at start + k * period of the log time, as the node's timer does under use_sim_time,
and a message is there at its log time. As fast as possible, a frame takes no time, its chunk takes
over `latency_ns` later and every text is decoded to its end, so everything depends on the
recording and the seed alone. In real time the recording sets the pace: decoding ends with the next
tick, the latency is the measured one, and a tick that finds the last frame unfinished waits for it;
of several such ticks only the newest becomes a frame, as in the node.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from oxygen_ros.actions import ActionBuffer, ActionChunk
from oxygen_ros.conversions import decode_image, take_image, take_joints
from oxygen_ros.engine.engine import (
    NO_DEADLINE_NS,
    NonFiniteActions,
    ObservationRefused,
    TextUpdate,
)
from oxygen_ros.evaluation.bag_source import Arrival, BagSource
from oxygen_ros.evaluation.offline_engine import OfflineEngine
from oxygen_ros.observation import NotReady, Observation, ObservationBuffer
from oxygen_ros.publisher import CommandPublisher, PublisherStats

NUMBERS = re.compile(r'\d+(\.\d+)?')


@dataclass(frozen=True)
class FrameDone:
    """One frame that went through the engine."""

    observation: Observation
    chunk: ActionChunk
    tick_ns: int
    chunk_ms: float
    """Wall time from the tick to the chunk."""
    prefill_ms: float
    denoise_ms: float
    decode_ms: float
    """All decode steps of this frame."""
    decode_steps: int
    tokens: int


class Listener(Protocol):
    """Who wants to know; called in the order of the recording's time."""

    def on_frame(self, done: FrameDone) -> None: ...
    def on_takeover(self, chunk: ActionChunk, before: np.ndarray, after: np.ndarray) -> None: ...
    def on_command(self, time_ns: int, row: np.ndarray | None, source: str) -> None: ...
    def on_text(self, time_ns: int, update: TextUpdate) -> None: ...


class Replay:
    """One pass over a recording; make a new one for the next."""

    def __init__(
        self,
        source: BagSource,
        engine: OfflineEngine,
        listener: Listener,
        *,
        instruction: str,
        latency_ns: int,
        realtime: bool,
    ) -> None:
        """Wire the node's parts to the time of the recording.

        Args:
            instruction: until the recording says otherwise; '' takes the profile's.
            latency_ns: from an observation to its chunk taking over; measured if realtime.
        """
        profile = source.profile
        self._profile, self._source = profile, source
        self._engine, self._listener = engine, listener
        self._latency_ns, self._realtime = latency_ns, realtime
        self._buffer = ObservationBuffer(
            profile.cameras,
            profile.joints,
            decode_image,
            feed_back=profile.memory.feed_back,
            instruction_max_age_s=profile.instruction.max_age_s,
        )
        self._memory_tasks = {task.name for task in profile.tasks if task.kind == 'memory'}
        self._buffer.set_instruction(instruction or profile.instruction.default)
        self._cameras = {camera.slot: camera for camera in profile.cameras}
        self._actions = ActionBuffer.of_profile(profile)
        self._publisher = CommandPublisher(
            profile.command,
            self._actions,
            send=self._keep_command,
            measured=self._measured,
            clock_ns=lambda: self._now_ns,
            monotonic_ns=lambda: self._now_ns,
        )
        self._now_ns = source.recording.start_ns
        # As rclpy computes the period of the node's timer.
        self._frame_period_ns = int(1.0 / profile.frame_rate_hz * 1e9)
        self._command_period_ns = round(1e9 / profile.command.rate_hz)
        self._next_tick_ns = self._now_ns + self._frame_period_ns
        self._next_command_ns = self._now_ns
        self._arriving: deque[tuple[int, ActionChunk]] = deque()
        self._next_frame = 0
        self._command: np.ndarray | None = None
        self._chunk: ActionChunk | None = None
        self._tick_s = self._chunk_ms = self._began_s = 0.0
        self._drops: Counter[str] = Counter()
        self.ticks = 0
        """Frame ticks so far, whether or not they became frames."""
        self.not_ready: Counter[str] = Counter()
        """Why ticks became no frame: sentence with its numbers blotted out -> how often."""

    def run(self, on_progress: Callable[[int], None]) -> None:
        """Play it all. `on_progress` is told the time [ns] that was reached.

        Raises BagError for damaged files, and whatever the engine raises but refused observations
        and non-finite actions, which are counted.
        """
        self._engine.begin(self._keep_chunk, self._keep_text, self._actions.leftover)
        self._began_s = time.monotonic()
        for arrival in self._source.messages():
            self._advance(arrival.log_ns)
            self._now_ns = arrival.log_ns
            self._take(arrival)
            on_progress(arrival.log_ns)
        self._advance(self._source.recording.end_ns + 1)
        self._engine.engine.decode(NO_DEADLINE_NS)

    def drops(self) -> dict[str, int]:
        """Everything that was thrown away, by reason, as the node counts it."""
        found = {
            **self._buffer.drops(),
            **self._actions.drops(),
            **self._engine.engine.stats.drops,
            **self._drops,
        }
        return {reason: count for reason, count in sorted(found.items()) if count}

    def notices(self) -> tuple[str, ...]:
        """The newest sentences that the node would have logged about its sources."""
        return self._buffer.notices()

    def commands(self) -> PublisherStats:
        """What the command tick counted."""
        return self._publisher.stats()

    # --- time -----------------------------------------------------------------------------------

    def _advance(self, until_ns: int) -> None:
        """Let everything happen that is due before `until_ns`."""
        while True:
            due = [
                (self._tick_due_ns(), self._tick),
                (self._arriving[0][0] if self._arriving else NO_DEADLINE_NS, self._take_over),
                (self._next_command_ns, self._send_command),
            ]
            # Of several at one moment the first: what a frame finds out is sent at once.
            now_ns, happen = min(due, key=lambda event: event[0])
            if now_ns >= until_ns:
                return
            self._now_ns = max(self._now_ns, now_ns)
            happen()

    def _tick_due_ns(self) -> int:
        """In real time a tick is late while the model computes, and sees what came meanwhile."""
        if not self._realtime:
            return self._next_tick_ns
        start_ns = self._source.recording.start_ns
        wall_ns = start_ns + round(1e9 * (time.monotonic() - self._began_s))
        return max(self._next_tick_ns, wall_ns)

    def _tick(self) -> None:
        late_ns = self._now_ns - self._next_tick_ns
        if self._realtime:
            skipped = late_ns // self._frame_period_ns
            self._drops['tick_skipped'] += skipped
            self.ticks += skipped
            self._next_tick_ns += skipped * self._frame_period_ns
            self._sleep_until(self._now_ns)
        self.ticks += 1
        self._next_tick_ns += self._frame_period_ns
        self._frame()

    def _sleep_until(self, bag_ns: int) -> None:
        due_s = self._began_s + (bag_ns - self._source.recording.start_ns) / 1e9
        time.sleep(max(0.0, due_s - time.monotonic()))

    # --- what happens ---------------------------------------------------------------------------

    def _take(self, arrival: Arrival) -> None:
        if arrival.message is None:
            source = 'joints' if arrival.part == 'joints' else arrival.slot
            self._buffer.count_drop('message_damaged', source)
        elif arrival.part == 'instruction':
            self._instruct(arrival.message.data)
        else:
            self._take_sample(arrival)

    def _instruct(self, text: str) -> None:
        """As in the node: what was planned for the old instruction is thrown away."""
        if self._buffer.set_instruction(text):
            self._forget_plan('instruction')

    def _forget_plan(self, reason: str) -> None:
        self._actions.clear(reason, self._next_frame)
        self._arriving.clear()

    def _take_sample(self, arrival: Arrival) -> None:
        buffer, message, now_ns = self._buffer, arrival.message, arrival.log_ns
        if arrival.part == 'image':
            take_image(buffer, message, self._cameras[arrival.slot], now_ns, now_ns)
        else:
            take_joints(buffer, message, self._profile.joints, now_ns, now_ns)

    def _frame(self) -> None:
        self._tick_s = time.monotonic()
        self._engine.now_ns = self._now_ns
        self._engine.timed.reset()
        if self._buffer.expire_instruction(self._now_ns):
            self._forget_plan('instruction_stale')
        observation = self._buffer.snapshot(self._next_frame, self._now_ns)
        if isinstance(observation, Observation) and not observation.instruction:
            observation = NotReady(('no instruction yet',))
        if isinstance(observation, NotReady):
            self.not_ready.update({NUMBERS.sub('#', reason) for reason in observation.reasons})
            self._engine.engine.decode(self._deadline_ns())
            return
        self._step(observation)

    def _step(self, observation: Observation) -> None:
        engine, timed = self._engine.engine, self._engine.timed
        self._chunk, tokens = None, engine.stats.tokens
        self._next_frame += 1
        try:
            engine.step(observation, self._deadline_ns())
        except ObservationRefused as error:
            self._drops['frame_refused'] += 1
            self.not_ready[str(error)] += 1
            return
        except NonFiniteActions:
            self._drops['frame_failed'] += 1
            return
        assert self._chunk is not None
        latency_ns = round(1e6 * self._chunk_ms) if self._realtime else self._latency_ns
        self._arriving.append((self._now_ns + latency_ns, self._chunk))
        self._listener.on_frame(
            FrameDone(
                observation=observation,
                chunk=self._chunk,
                tick_ns=self._now_ns,
                chunk_ms=self._chunk_ms,
                prefill_ms=timed.prefill_ms,
                denoise_ms=timed.denoise_ms,
                decode_ms=timed.decode_ms,
                decode_steps=timed.decode_steps,
                tokens=engine.stats.tokens - tokens,
            )
        )

    def _deadline_ns(self) -> int:
        if not self._realtime:
            return NO_DEADLINE_NS
        left_ns = self._next_tick_ns - self._source.recording.start_ns
        return round(1e9 * self._began_s) + left_ns

    def _take_over(self) -> None:
        _, chunk = self._arriving.popleft()
        before = self._row_now()
        if self._actions.put(chunk, self._now_ns) is None:
            self._listener.on_takeover(chunk, before, self._row_now())

    def _row_now(self) -> np.ndarray:
        """Return the row (joints,) that the newest chunk has for now; NaN without one."""
        command, chunk = self._profile.command, self._actions.chunk
        # Asked of a buffer of its own: what is asked of the robot's counts as commanded.
        alone = ActionBuffer(len(command.names), command.interpolation)
        if chunk is not None:
            alone.put(chunk, self._now_ns)
        rows = alone.rows(self._now_ns, period_ns=self._command_period_ns, count=1)
        return rows[0] if len(rows) else np.full(len(command.names), math.nan)

    def _send_command(self) -> None:
        self._command = None
        self._publisher.tick()
        self._next_command_ns += self._command_period_ns
        if self._publisher.error is not None:
            raise self._publisher.error
        self._listener.on_command(self._now_ns, self._command, self._publisher.source)

    # --- callbacks of the node's parts ----------------------------------------------------------

    def _keep_command(self, rows: np.ndarray) -> None:
        self._command = rows[0].copy()

    def _measured(self) -> np.ndarray | None:
        positions = self._buffer.positions(self._now_ns)
        if not positions:
            return None
        return np.array([positions.get(name, math.nan) for name in self._profile.command.names])

    def _keep_chunk(self, chunk: ActionChunk) -> None:
        self._chunk = chunk
        self._chunk_ms = 1e3 * (time.monotonic() - self._tick_s)

    def _keep_text(self, update: TextUpdate) -> None:
        complete = update.reason is not None and update.reason.complete
        if complete and update.task in self._memory_tasks:
            self._buffer.put_note(update.text)
        self._listener.on_text(self._now_ns, update)
