"""FrameLoop: the frame thread, in which the engine is built, warmed up and used.

Owns the engine and the numbering of frames; turns ticks into frames, newest tick only. Knows no ROS
and no tensor: building, snapshot and news are callables given by `node.py`, which starts and stops
it. One thread for the whole life of the model, because captured graphs are bound to theirs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from oxygen_ros.engine.engine import (
    NO_DEADLINE_NS,
    EngineAway,
    FrameEngine,
    ObservationRefused,
)
from oxygen_ros.engine.sequence import FinishReason
from oxygen_ros.observation import NotReady, Observation

MAX_FAILURES = 5
"""Frames that may fail in a row before the engine is given up: a glitch passes, a broken device or
model does not, and then somebody has to look."""


class FrameLoop:
    """Runs at most one frame at a time; a tick that comes meanwhile waits, more than one coalesce.

    `tick`, `rest` and `close` never wait for the model (`close` only as long as it is told to).
    """

    def __init__(
        self,
        build: Callable[[Callable[[], bool]], FrameEngine],
        snapshot: Callable[[int], Observation | NotReady],
        *,
        period_ns: int | None,
        on_failure: Callable[[Exception], None],
        on_waiting: Callable[[bool], None] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            build: makes the engine from its `frame_waiting`; runs in the frame thread.
            snapshot: takes the observation of the frame with this number.
            period_ns: time from a tick to the next, the deadline of decoding; None where ticks
                follow a simulated clock and nobody knows when the next one comes.
            on_failure: told every exception of the engine, in the frame thread.
            on_waiting: told what `frame_waiting` would say whenever it may have changed, for an
                engine that cannot ask; called by any thread, must not block.
        """
        self._build = build
        self._snapshot = snapshot
        self._period_ns = period_ns
        self._on_failure = on_failure
        self._on_waiting = on_waiting
        self._wake = threading.Condition()  # guards the three fields below
        self._tick_ns: int | None = None
        self._resting = True
        self._closing = False

        # Written by the frame thread, read by others: single assignments, no lock.
        self.engine: FrameEngine | None = None
        self.build_error: Exception | None = None
        self.next_frame = 0
        """Number of the first frame whose observation is certainly not taken yet."""
        self.not_ready: tuple[str, ...] = ()
        """Why the last tick became no frame; empty if it did."""
        self.failures = 0
        """Frames in a row that the engine failed."""
        self.ready = threading.Event()
        """Set when the engine is warm, or `build_error` says why there is none."""

        self._drops = Counter(tick_skipped=0, frame_failed=0, frame_refused=0, engine_away=0)
        self._thread = threading.Thread(target=self._run, name='frame', daemon=True)

    @property
    def broken(self) -> bool:
        """True once the engine has failed too often in a row; no frame is taken any more."""
        return self.failures >= MAX_FAILURES

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to build the engine; `ready` tells when that is over."""
        self._thread.start()

    def tick(self) -> None:
        """Ask for a frame, now. If the last tick still waits, this one takes its place."""
        with self._wake:
            self._drops['tick_skipped'] += self._tick_ns is not None
            self._tick_ns, self._resting = time.monotonic_ns(), False
            self._announce()

    def rest(self) -> None:
        """Take no more frames; end all texts as cancelled when the current pass is over."""
        with self._wake:
            self._tick_ns, self._resting = None, True
            self._announce()

    def close(self, timeout_s: float) -> bool:
        """End all texts and the thread; False if the model did not return in time."""
        with self._wake:
            self._tick_ns, self._closing = None, True
            self._announce()
        if self.alive:
            self._thread.join(timeout_s)
        return not self.alive

    def _announce(self) -> None:
        """Under the lock: something has changed, for the frame thread or for the engine."""
        self._tell_waiting()
        self._wake.notify()

    def _tell_waiting(self) -> None:
        if self._on_waiting is not None:
            self._on_waiting(self._frame_waiting())

    def drops(self) -> dict[str, int]:
        """Return how many ticks and frames came to nothing, by reason."""
        return {reason: count for reason, count in self._drops.items() if count}

    # --- the frame thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._build(self._frame_waiting)
            engine.warm_up()
        except Exception as error:
            self.build_error = error
            return
        else:
            self.engine = engine
        finally:
            self.ready.set()
        while not self._closing:
            tick_ns = self._wait_for_work(engine)
            if tick_ns is not None:
                self._take_frame(engine, tick_ns)
            else:
                self._end_texts(engine)

    def _frame_waiting(self) -> bool:
        """Whether decoding should give way: to a newer frame, to rest, or to the end."""
        return self._tick_ns is not None or self._resting or self._closing

    def _wait_for_work(self, engine: FrameEngine) -> int | None:
        """Return the time of the next tick, or None if it is time to rest or to end."""
        with self._wake:
            self._wake.wait_for(
                lambda: (
                    self._tick_ns is not None
                    or self._closing
                    or (self._resting and engine.stats.live_sequences)
                )
            )
            tick_ns, self._tick_ns = self._tick_ns, None
            self._tell_waiting()
            return tick_ns

    def _take_frame(self, engine: FrameEngine, tick_ns: int) -> None:
        deadline_ns = NO_DEADLINE_NS if self._period_ns is None else tick_ns + self._period_ns
        if self.broken:
            return
        number = self.next_frame
        # Before the snapshot: whoever changes the instruction now and asks for the next frame may
        # not be told a number whose observation was already taken.
        self.next_frame = number + 1
        try:
            observation = self._snapshot(number)
            if isinstance(observation, NotReady):
                self.next_frame, self.not_ready = number, observation.reasons
                engine.decode(deadline_ns)
                return
            engine.step(observation, deadline_ns)
            self.not_ready, self.failures = (), 0
        except ObservationRefused as error:
            self._drops['frame_refused'] += 1
            self.not_ready = (str(error),)
        except EngineAway as error:
            self._drops['engine_away'] += 1
            self.not_ready, self.failures = (str(error),), 0  # of the one that is gone
        except Exception as error:
            self._drops['frame_failed'] += 1
            self.failures += 1
            self._on_failure(error)

    def _end_texts(self, engine: FrameEngine) -> None:
        try:
            engine.cancel(FinishReason.SHUTDOWN if self._closing else FinishReason.CANCELLED)
        except Exception as error:
            self._on_failure(error)
