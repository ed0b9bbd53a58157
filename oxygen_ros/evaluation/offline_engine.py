"""OfflineEngine: the node's engine, fed by hand, with the wall time of every pass.

Owns the engine's clock and the stopwatch around its runner. Knows no recording; `replay.py` steps
it, one after the other for all recordings of a run, and every recording starts it anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from oxygen_ros.actions import ActionChunk, Leftover
from oxygen_ros.engine.engine import Engine, TextUpdate
from oxygen_ros.engine.factory import EngineOptions, build_engine
from oxygen_ros.engine.sequence import Frame, Sequence
from oxygen_ros.profile import RobotProfile


class TimedRunner:
    """A runner whose passes are timed [ms]. On a GPU a prefill is only launched; denoise waits."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.prefill_ms = self.denoise_ms = self.decode_ms = 0.0
        """Since `reset`."""
        self.decode_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    @property
    def num_prefills(self) -> int:
        return int(self._runner.num_prefills)

    @num_prefills.setter
    def num_prefills(self, count: int) -> None:
        self._runner.num_prefills = count

    def reset(self) -> None:
        """Begin to time a frame."""
        self.prefill_ms = self.denoise_ms = self.decode_ms = 0.0
        self.decode_steps = 0

    def prefill(self, frame: Frame, inputs: Any) -> None:
        started_s = time.perf_counter()
        self._runner.prefill(frame, inputs)
        self.prefill_ms += 1e3 * (time.perf_counter() - started_s)

    def denoise(
        self, frame: Frame, noise: np.ndarray, meanwhile: Callable[[int], None] | None = None
    ) -> np.ndarray:
        return self._timed_denoise(self._runner.denoise, frame, noise, meanwhile)

    def denoise_after(
        self, frame: Frame, noise: np.ndarray, leftover: np.ndarray, delay: int
    ) -> np.ndarray:
        return self._timed_denoise(self._runner.denoise_after, frame, noise, leftover, delay)

    def _timed_denoise(self, denoise: Callable[..., np.ndarray], *args: Any) -> np.ndarray:
        started_s, decoded_ms = time.perf_counter(), self.decode_ms
        actions = denoise(*args)
        # Steps beside it are reported as decoding.
        beside_ms = self.decode_ms - decoded_ms
        self.denoise_ms += 1e3 * (time.perf_counter() - started_s) - beside_ms
        return actions

    def decode(self, batch: list[Sequence]) -> list[list[int]]:
        started_s = time.perf_counter()
        predicted: list[list[int]] = self._runner.decode(batch)
        self.decode_ms += 1e3 * (time.perf_counter() - started_s)
        self.decode_steps += 1
        return predicted


class OfflineEngine:
    """An engine for many recordings; what it makes goes to whoever called `begin` last."""

    def __init__(self, profile: RobotProfile, options: EngineOptions, *, realtime: bool) -> None:
        """Load and warm up.

        Args:
            realtime: ages and deadlines are wall time, as in the node; else they are `now_ns`, so
                that what expires does not depend on the machine.

        Raises:
            ProfileError, CheckpointError, FileNotFoundError, ValueError: see `build_engine`.
        """
        self.now_ns = 0
        self._on_chunk: Callable[[ActionChunk], None]
        self._on_text: Callable[[TextUpdate], None]
        self._leftover: Callable[[int], Leftover | None]
        clock_ns = time.monotonic_ns if realtime else lambda: self.now_ns
        self.engine: Engine = build_engine(
            profile,
            options,
            on_chunk=lambda chunk: self._on_chunk(chunk),
            on_text=lambda update: self._on_text(update),
            leftover=lambda time_ns: self._leftover(time_ns),
            clock_ns=clock_ns,
        )
        self.timed = TimedRunner(self.engine.runner)
        self.engine.runner = self.timed
        self.engine.warm_up()

    def begin(
        self,
        on_chunk: Callable[[ActionChunk], None],
        on_text: Callable[[TextUpdate], None],
        leftover: Callable[[int], Leftover | None],
    ) -> None:
        """Start over for a recording; nothing of the one before it is left.

        Args:
            leftover: of the buffer that plays the chunks, for profiles whose chunks continue each
                other.
        """
        self._on_chunk, self._on_text, self._leftover = on_chunk, on_text, leftover
        self.engine.forget()
