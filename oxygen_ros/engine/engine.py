"""Engine: one frame at a time, actions first, language in the time that is left.

Owns the order of things within a frame; the policy is the scheduler's, the arithmetic the model
runner's. Knows no topic and no ROS. Its owner is the frame thread: everything but `stats` is used
there. Idea: OxyGen, arXiv 2603.14371 (cross-task KV sharing, cross-frame continuous batching).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from oxygen_ros.actions import ActionChunk, Leftover
from oxygen_ros.engine.scheduler import Scheduler
from oxygen_ros.engine.sequence import FinishReason, Frame, Sequence
from oxygen_ros.model.processor import Codec, ModelInput
from oxygen_ros.observation import Observation

NO_DEADLINE_NS = 2**63 - 1


@dataclass(frozen=True)
class TextUpdate:
    """News of one sequence. `text` never ends in half a character."""

    task: str
    frame: int
    stamp_ns: int
    """Stamp of the observation that the text describes."""
    delta: str
    """What `text` has more than in the previous update of this sequence."""
    text: str
    num_tokens: int
    reason: FinishReason | None
    """None while the sequence grows."""


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made, and the latest durations."""

    frames: int = 0
    prefills: int = 0
    chunks: int = 0
    tokens: int = 0
    decode_steps: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Complete sequences by task."""
    drops: dict[str, int] = field(default_factory=dict)
    """What was given up, by reason."""
    prefill_ms: float = 0.0
    denoise_ms: float = 0.0
    decode_step_ms: float = 0.0
    live_sequences: int = 0
    slots_used: int = 0
    slots_total: int = 0
    starved_frames: int = 0
    drafted: int = 0
    """Tokens proposed from the text before."""
    accepted: int = 0
    """Those of them that the model would have written itself."""


class Runner(Protocol):
    """What the engine asks of a `ModelRunner`."""

    num_prefills: int

    def prefix_len(self, inputs: ModelInput) -> int: ...
    def prefill(self, frame: Frame, inputs: ModelInput) -> None: ...
    def denoise(
        self, frame: Frame, noise: np.ndarray, meanwhile: Callable[[int], None] | None = None
    ) -> np.ndarray: ...
    def denoise_after(
        self, frame: Frame, noise: np.ndarray, leftover: np.ndarray, delay: int
    ) -> np.ndarray: ...
    def decode(self, batch: list[Sequence]) -> list[list[int]]: ...
    def clear(self, slot: int) -> None: ...


class ObservationRefused(ValueError):
    """The observation is not one the model can act on; nothing was computed."""


class NonFiniteActions(RuntimeError):
    """The model answered a frame with NaN or infinity; the frame was thrown away."""


class EngineAway(RuntimeError):
    """The process of the engine is gone and the next one is not ready; the message says both."""


class FrameEngine(Protocol):
    """What the frame thread asks of an engine, be it here or in a process of its own."""

    @property
    def stats(self) -> EngineStats: ...
    @property
    def action_horizon(self) -> int: ...
    def warm_up(self) -> None: ...
    def step(self, observation: Observation, deadline_ns: int) -> None: ...
    def decode(self, deadline_ns: int) -> None: ...
    def cancel(self, reason: FinishReason) -> None: ...


class Engine:
    def __init__(
        self,
        processor: Codec,
        scheduler: Scheduler,
        runner: Runner,
        *,
        action_period_ns: int,
        seed: int,
        on_chunk: Callable[[ActionChunk], None],
        on_text: Callable[[TextUpdate], None],
        leftover: Callable[[int], Leftover | None] | None = None,
        frame_waiting: Callable[[], bool] = lambda: False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Wire the parts.

        Args:
            action_period_ns: spacing of the rows of a chunk.
            seed: with an observation's stamp it fixes the noise of that frame's actions, so a
                replayed frame gets the same actions as the live one.
            on_chunk, on_text: called on the frame thread; must not block.
            leftover: what the robot will be commanded from a moment of the control clock on, if
                nothing new comes (`ActionBuffer.leftover`); chunks then continue it. None makes
                every chunk from its observation alone.
            frame_waiting: true while a newer observation waits; decoding then gives way.
            clock_ns: monotonic clock of deadlines and ages.
        """
        self.processor = processor
        self.scheduler = scheduler
        self.runner = runner
        self._action_period_ns = action_period_ns
        self._seed = seed
        self._on_chunk = on_chunk
        self._on_text = on_text
        self._leftover = leftover
        self._frame_waiting = frame_waiting
        self._clock_ns = clock_ns
        self._texts: dict[Sequence, str] = {}
        self._reset_counters()

    # --- one frame ----------------------------------------------------------------------------

    def step(self, observation: Observation, deadline_ns: int) -> None:
        """Take one observation through the engine; return when no decode step fits any more.

        The actions are handed out before the first token of this frame is decoded.

        Raises:
            ObservationRefused: the observation is not what the profile declares, or the prompt is
                too long: cut, it would ask for something else.
            NonFiniteActions: nothing of this frame was handed out.
            RuntimeError: whatever the device raised; no slot stays taken by the failed work.
        """
        inputs = self._encode(observation)
        frame = self._open(observation, inputs)
        with self._abandoned_on_error(frame):
            self._prefill(frame, inputs)
            self._on_chunk(self._denoise(frame, observation))
        self.scheduler.admit(frame, self.scheduler.due(frame.number))
        self.decode(deadline_ns)

    def decode(self, deadline_ns: int) -> None:
        """Advance all live sequences together, step by step, as long as a step fits.

        Stops for the deadline, for a newer frame, or because everything is said. If the device
        fails, the sequences are ended as cancelled (their K/V may be torn) and the error goes on.
        """
        try:
            while batch := self._next_batch(deadline_ns):
                self._decode_step(batch)
        except BaseException:
            self.cancel(FinishReason.CANCELLED)
            raise
        finally:
            self._update_stats()

    def cancel(self, reason: FinishReason) -> None:
        """End every live sequence and say so."""
        self._report(self.scheduler.cancel(reason))
        self._update_stats()

    # --- steps of a frame ---------------------------------------------------------------------

    def _encode(self, observation: Observation) -> ModelInput:
        try:
            inputs = self.processor.encode(observation)
        except ValueError as error:
            raise ObservationRefused(str(error)) from error
        if inputs.truncated_tokens:
            raise ObservationRefused(
                f'the prompt for the instruction of {len(observation.instruction)} characters is '
                f'{inputs.truncated_tokens} tokens too long for the model '
                f'(max_token_len {self.processor.max_token_len}); use a shorter instruction'
            )
        if inputs.omitted_notes:
            self.scheduler.drops['note_not_fed_back'] += inputs.omitted_notes
        return inputs

    def _open(self, observation: Observation, inputs: ModelInput) -> Frame:
        self._frames += 1
        return self.scheduler.open_frame(
            observation.frame,
            observation.stamp_ns,
            self.runner.prefix_len(inputs),
            self._clock_ns(),
        )

    @contextmanager
    def _abandoned_on_error(self, frame: Frame) -> Iterator[None]:
        """Give the slot of an open frame back, clean, if its work raises."""
        try:
            yield
        except BaseException:
            self.scheduler.abandon(frame)
            self.runner.clear(frame.slot)
            self._update_stats()
            raise

    def _prefill(self, frame: Frame, inputs: ModelInput) -> None:
        started_ns = self._clock_ns()
        self.runner.prefill(frame, inputs)
        self._prefill_ms = self._ms_since(started_ns)

    def _denoise(self, frame: Frame, observation: Observation) -> ActionChunk:
        shape = (self.processor.action_horizon, self.processor.action_dim)
        noise = self.noise(observation.stamp_ns, shape)
        leftover = None if self._leftover is None else self._leftover(observation.time_ns)
        started_ns = self._clock_ns()
        if leftover is None:
            actions = self.runner.denoise(frame, noise, self._decode_beside)
        else:
            rows = self.processor.encode_actions(leftover.values, observation)
            actions = self.runner.denoise_after(frame, noise, rows, leftover.delay)
        self._denoise_ms = self._ms_since(started_ns)
        if not np.isfinite(actions).all():
            raise NonFiniteActions(f'frame {frame.number}: the model returned non-finite actions')
        values = self.processor.decode(actions, observation)
        if leftover is not None:
            # Guidance is soft; these rows are the old chunk's, whichever of the two is played.
            values[: leftover.delay] = leftover.values[: leftover.delay]
        self._chunks += 1
        self._update_stats()  # whoever gets the chunk may ask how long it took
        return ActionChunk(
            frame=frame.number,
            stamp_ns=observation.stamp_ns,
            time_ns=observation.time_ns,
            period_ns=self._action_period_ns,
            values=values,
        )

    def _decode_beside(self, duration_ns: int) -> None:
        """Advance texts of earlier frames while the device makes actions for so long.

        Steps beside actions take longer, and the scheduler plans with that: on the safe side.
        """
        self.decode(self._clock_ns() + duration_ns)

    def noise(self, stamp_ns: int, shape: tuple[int, int]) -> np.ndarray:
        """Return the float32 starting noise of the frame with this stamp, on any device alike."""
        generator = np.random.default_rng((self._seed, stamp_ns % 2**64))
        return generator.standard_normal(shape, dtype=np.float32)

    def _next_batch(self, deadline_ns: int) -> list[Sequence]:
        self._report(self.scheduler.expire(self._clock_ns()))
        if self._frame_waiting():
            deadline_ns = 0  # it has passed
        return self.scheduler.next_batch(self._clock_ns(), deadline_ns)

    def _decode_step(self, batch: list[Sequence]) -> None:
        started_ns = self._clock_ns()
        predicted = self.runner.decode(batch)
        duration_ns = self._clock_ns() - started_ns
        self._decode_step_ms = duration_ns / 1e6
        self._decode_steps += 1
        self._tokens += self.scheduler.commit(batch, predicted, duration_ns)
        self._report([s for s in batch if s.task.stream or not s.live])

    def _report(self, sequences: list[Sequence]) -> None:
        """Hand out what is new in these sequences; forget those that have ended."""
        for sequence in sequences:
            reason = sequence.finish_reason
            tokenizer = self.processor.tokenizer
            read = tokenizer.stable_text if reason is None else tokenizer.decode
            text, before = read(sequence.tokens), self._texts.get(sequence, '')
            if reason is None:
                self._texts[sequence] = text
            else:
                self._texts.pop(sequence, None)
                self._finished[sequence.task.name] += reason.complete
            if reason is not None or text != before:
                self._on_text(
                    TextUpdate(
                        task=sequence.task.name,
                        frame=sequence.frame.number,
                        stamp_ns=sequence.frame.stamp_ns,
                        delta=text.removeprefix(before),
                        text=text,
                        num_tokens=len(sequence.tokens),
                        reason=reason,
                    )
                )

    # --- warm-up and numbers ------------------------------------------------------------------

    def warm_up(self) -> None:
        """Take a blank frame of the largest size through everything and hand nothing out.

        The first pass pays for allocators and kernels; the second teaches the scheduler how long a
        step takes. Counters start at zero afterwards.
        """
        size = self.processor.image_size
        blank = np.zeros((size, size, 3), np.uint8)
        inputs = ModelInput(
            images=dict.fromkeys(self.processor.camera_slots, blank),
            tokens=[self.processor.tokenizer.bos_id] * self.processor.max_token_len,
            truncated_tokens=0,
        )
        shape = (self.processor.action_horizon, self.processor.action_dim)
        for _ in range(2):
            frame = self.scheduler.open_frame(0, 0, self.runner.prefix_len(inputs), 0)
            self.runner.prefill(frame, inputs)
            self.runner.denoise(frame, self.noise(0, shape))
            if self._leftover is not None:
                self.runner.denoise_after(frame, self.noise(0, shape), self.noise(1, shape), 0)
            self.scheduler.admit(frame, list(self.scheduler.tasks))
            while batch := self.scheduler.next_batch(0, NO_DEADLINE_NS):
                started_ns = self._clock_ns()
                predicted = self.runner.decode(batch)
                self.scheduler.commit(batch, predicted, self._clock_ns() - started_ns)
        self.forget()

    def forget(self) -> None:
        """Start over as if just warmed up, when no sequence lives: the next recording of a replay
        shall not depend on the one before it."""
        self.scheduler.forget()
        self.runner.num_prefills = 0
        self._reset_counters()

    @property
    def stats(self) -> EngineStats:
        """Numbers of the latest moment between two passes; may be read from any thread."""
        return self._stats  # one assignment by the frame thread, no lock

    @property
    def action_horizon(self) -> int:
        """Rows of every chunk."""
        return self.processor.action_horizon

    def _reset_counters(self) -> None:
        self._frames = self._chunks = self._tokens = self._decode_steps = 0
        self._finished: Counter[str] = Counter()
        self._prefill_ms = self._denoise_ms = self._decode_step_ms = 0.0
        self._update_stats()

    def _update_stats(self) -> None:
        self._stats = EngineStats(
            frames=self._frames,
            prefills=self.runner.num_prefills,
            chunks=self._chunks,
            tokens=self._tokens,
            decode_steps=self._decode_steps,
            finished=dict(self._finished),
            drops=dict(self.scheduler.drops),
            prefill_ms=self._prefill_ms,
            denoise_ms=self._denoise_ms,
            decode_step_ms=self._decode_step_ms,
            live_sequences=len(self.scheduler.live),
            slots_used=self.scheduler.pool.num_used,
            slots_total=self.scheduler.pool.num_slots,
            starved_frames=self.scheduler.starved_frames,
            drafted=self.scheduler.num_drafted,
            accepted=self.scheduler.num_accepted,
        )

    def _ms_since(self, started_ns: int) -> float:
        return (self._clock_ns() - started_ns) / 1e6
