"""What the engine is compared with: the same parts without the paper's ideas.

Nobody drives a robot with these; the evaluation and the benchmarks do, to show what sharing and
cross-frame batching are worth and that they change no action and no word. Paper: arXiv 2603.14371,
"isolated execution", cross-task sharing alone, and cross-frame continuous batching.
"""

from __future__ import annotations

from oxygen_ros.engine.engine import NO_DEADLINE_NS, Engine
from oxygen_ros.observation import Observation


class SharedEngine(Engine):
    """One prefill per frame, but every text is written to its end inside its own frame."""

    def step(self, observation: Observation, deadline_ns: int) -> None:
        """As `Engine.step`, with neither deadline nor newer frame cutting the texts short."""
        super().step(observation, NO_DEADLINE_NS)

    def decode(self, deadline_ns: int) -> None:
        """Write all live sequences to their end."""
        waiting, self._frame_waiting = self._frame_waiting, lambda: False
        try:
            super().decode(NO_DEADLINE_NS)
        finally:
            self._frame_waiting = waiting


class IsolatedEngine(SharedEngine):
    """A prefill for the actions and another for each text, one after the other, every frame."""

    def step(self, observation: Observation, deadline_ns: int) -> None:
        """Act as one model, then write each due text as if a model of its own were asked."""
        inputs = self._encode(observation)
        frame = self._open(observation, inputs)
        with self._abandoned_on_error(frame):
            self._prefill(frame, inputs)
            self._on_chunk(self._denoise(frame, observation))
        self.scheduler.abandon(frame)
        for task in self.scheduler.due(observation.frame):
            frame = self.scheduler.open_frame(
                observation.frame, observation.stamp_ns, frame.prefix_len, self._clock_ns()
            )
            with self._abandoned_on_error(frame):
                self._prefill(frame, inputs)
            self.scheduler.admit(frame, [task])
            self.decode(NO_DEADLINE_NS)


class ContinuousBatchingEngine(Engine):
    """The paper's method: a fixed number of decode steps in every frame, then the actions.

    Its code returns a frame's actions when the steps are done, however long they take.
    """

    steps_per_frame = 5

    def step(self, observation: Observation, deadline_ns: int) -> None:
        """As `Engine.step`, with steps counted instead of timed, and the actions last."""
        inputs = self._encode(observation)
        frame = self._open(observation, inputs)
        with self._abandoned_on_error(frame):
            self._prefill(frame, inputs)
            chunk = self._denoise(frame, observation)
        self.scheduler.admit(frame, self.scheduler.due(frame.number))
        self.decode(deadline_ns)
        self._on_chunk(chunk)

    def _decode_beside(self, duration_ns: int) -> None:
        """Decode nothing: all steps come after the actions."""

    def decode(self, deadline_ns: int) -> None:
        """Advance all live sequences by `steps_per_frame` passes."""
        for _ in range(self.steps_per_frame):
            if batch := self.scheduler.next_batch(0, NO_DEADLINE_NS):
                self._decode_step(batch)
        self._update_stats()
