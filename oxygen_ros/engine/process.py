"""EngineProcess: an engine in a process of its own, with the surface of the one in a thread.

Owns the child process from start to end, and replaces it when it is lost: killed, crashed, hung,
or failing frame after frame. Knows neither ROS nor torch. Its users are the frame thread, which
calls it as it would call an Engine, and `node.py`, which makes and closes it. `child.py` is the
other side, `wire.py` what is said between them.

Nothing is forked: the child starts as a fresh interpreter, because a copy of a process with
threads, CUDA or DDS in it is a copy of their locks.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from oxygen_ros.actions import ActionChunk, Leftover
from oxygen_ros.engine.engine import (
    EngineAway,
    EngineStats,
    NonFiniteActions,
    ObservationRefused,
    TextUpdate,
)
from oxygen_ros.engine.options import EngineOptions
from oxygen_ros.engine.sequence import FinishReason
from oxygen_ros.engine.wire import (
    Channel,
    Plain,
    SharedMemory,
    plain_observation,
    read_chunk,
    read_text,
)
from oxygen_ros.observation import Observation
from oxygen_ros.profile import RobotProfile, plain_profile

MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
"""Before the first restart and, doubled each time, before a later one at most."""
STEADY_S = 60.0
"""An engine that has lived for so long is no part of a series of crashes."""
LOADING_FACTOR = 30
"""Loading and warm-up may be silent for so many times the time limit."""
MAX_FAILED_STEPS = 3
"""Frames that may fail in a row: some errors of a device go away only with its process."""
END_TIMEOUT_S = 1.0
_KNOWN_ERRORS = {error.__name__: error for error in (ObservationRefused, NonFiniteActions)}
_COUNTERS = (
    'frames', 'prefills', 'chunks', 'tokens', 'decode_steps', 'drafted', 'accepted',
)  # fmt: skip


class ChildTraceback(Exception):
    """Stands as the cause of an error that the child had, for the log."""

    def __str__(self) -> str:
        return f'\n{self.args[0]}'


class _Lost(Exception):
    """The child is gone, or not what it should be."""


class _Child:
    """One life of the engine's process: to ask, to listen, to end."""

    def __init__(self, memory: SharedMemory) -> None:
        """Start it. The calling thread has to outlive it, or the kernel ends it."""
        self._memory = memory
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable, '-m', 'oxygen_ros.engine.child',
                    str(os.getpid()), str(theirs.fileno()), str(memory.fd),
                ],
                pass_fds=(theirs.fileno(), memory.fd),
                stdin=subprocess.DEVNULL,
                env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
            )  # fmt: skip
        self._channel = Channel(ours)
        self._why = ''
        self._ended = threading.Event()
        self.pid = self._process.pid
        self.using = threading.Lock()
        """Held while it is asked and listened to."""
        self.warm_s = math.inf
        """When its engine was warm, on the monotonic clock."""
        self.live: dict[tuple[str, int], TextUpdate] = {}
        """The last news of every sequence that has not ended."""

    def ask(self, message: Plain, timeout_s: float, listen: Callable[[Plain], None]) -> Plain:
        """Return the answer; it and the news before it go to `listen`.

        Raises _Lost if the child ends meanwhile, or lives without a sign for timeout_s to twice
        that; it is then killed.
        """
        with self.using:
            try:
                self._channel.send(message)
                answer, failure = self._listen(timeout_s, listen)
            except (OSError, EOFError) as error:
                raise _Lost from error
        if failure is not None:
            raise failure
        return answer

    def _listen(
        self, timeout_s: float, listen: Callable[[Plain], None]
    ) -> tuple[Plain, Exception | None]:
        """Hear everything out, even if `listen` fails: the next answer is not to be mistaken."""
        failure: Exception | None = None
        while True:
            answer = self._receive(timeout_s)
            try:
                listen(answer)
            except Exception as error:
                failure = failure or error
            if answer['say'] in ('done', 'error'):
                return answer, failure

    def _receive(self, timeout_s: float) -> Plain:
        while True:
            beats = self._memory.beats
            try:
                return self._channel.receive(timeout_s)
            except TimeoutError:
                if self._memory.beats == beats:
                    self.kill(f'gave no sign for {timeout_s:g} s, see engine_timeout_s')
                    raise

    def kill(self, why: str) -> None:
        """End it at once; the first reason given is the one told."""
        self._why = self._why or why
        self._process.kill()

    def ask_to_end(self) -> None:
        """Let it end by itself if it is idle, else at once: it may be loading, or hang."""
        if self.using.acquire(blocking=False):
            self._channel.end()
            self.using.release()
        else:
            self.kill('closed')

    def wait(self, limit_s: float | None = None) -> None:
        """Wait for the end, if need be make one after limit_s. By one thread alone."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill('closed its channel')
            self._process.wait()
        self._ended.set()

    def await_end(self, limit_s: float) -> None:
        """As `wait`, by another thread."""
        if not self._ended.wait(limit_s):
            self.kill('closed its channel')
            self._ended.wait()

    @property
    def reason(self) -> str:
        """Why it has ended."""
        code = self._process.returncode
        if self._why or code >= 0:
            return self._why or f'ended by itself with code {code}'
        hint = ', perhaps by the kernel for lack of memory' * (code == -signal.SIGKILL)
        return f'was ended by signal {-code} ({signal.strsignal(-code)}){hint}'

    def close(self) -> None:
        """Free the channel of a child that has ended."""
        with self.using:
            self._channel.close()


@dataclass(frozen=True)
class _Absence:
    """Why there is no engine, and when the next one starts."""

    reason: str
    restart: int
    due_s: float

    def __str__(self) -> str:
        left_s = self.due_s - time.monotonic()
        when = f'in {left_s:.0f} s' if left_s > 0 else 'under way'
        return f'the engine process {self.reason}; restart {self.restart} {when}'


class EngineProcess:
    """A `FrameEngine` that outlives its processes.

    `step`, `decode` and `cancel` belong to the frame thread. What was being written when a process
    is lost ends as cancelled, and counters go on, so that nothing is missing in the sums.
    """

    def __init__(
        self,
        profile: RobotProfile,
        options: EngineOptions,
        *,
        timeout_s: float,
        on_chunk: Callable[[ActionChunk], None],
        on_text: Callable[[TextUpdate], None],
        leftover: Callable[[int], Leftover | None],
        on_progress: Callable[[float], None],
        on_ready: Callable[[int], object],
        on_dying: Callable[[], object],
        on_lost: Callable[[str], None],
    ) -> None:
        """Start nothing yet.

        Args:
            timeout_s: how long the child may show no sign of life during a frame.
            on_chunk, on_text, leftover: as the Engine's. A lost process's texts are ended from
                another thread, but no two calls overlap.
            on_progress: told the fraction of the weights that is loaded.
            on_ready: told the process id of each engine that is warm.
            on_dying: told, from another thread, that an engine is being lost, within a millisecond
                or so of a death whose reason is not known yet; chunks that it left may still come.
            on_lost: told why it was lost, once it has ended, from any thread; must not block.
        """
        self._setup = {
            'do': 'build', 'profile': plain_profile(profile), 'options': asdict(options),
        }  # fmt: skip
        self._continues = profile.action.blending.startswith('rtc')
        self._timeout_s = timeout_s
        self._on_chunk, self._on_text = on_chunk, on_text
        self._leftover = leftover
        self._on_progress, self._on_ready = on_progress, on_ready
        self._on_dying, self._on_lost = on_dying, on_lost

        self._memory = SharedMemory.create()
        self._thread = threading.Thread(target=self._supervise, name='engine_process', daemon=True)
        self._lock = threading.Lock()  # guards the two fields below
        self._closing = threading.Event()
        self._newest: _Child | None = None
        self._first_over = threading.Event()
        self._first_error: Exception | None = RuntimeError('closed before the engine was ready')

        # Written by whoever uses the child; single assignments for all others.
        self._child: _Child | None = None  # the newest, while it is warm and not lost
        self._absence: _Absence | None = None
        self._before = self._stats = EngineStats()
        self._failed_steps = self._losses = 0
        self.action_horizon = 0
        """Rows of every chunk."""

    # --- what the frame thread asks -----------------------------------------------------------

    def warm_up(self) -> None:
        """Start the process and wait until its engine is warm; raises what that one raised."""
        self._thread.start()
        self._first_over.wait()
        if self._first_error is not None:
            raise self._first_error

    def step(self, observation: Observation, deadline_ns: int) -> None:
        """As `Engine.step`; raises EngineAway while there is no engine."""
        leftover = self._leftover(observation.time_ns) if self._continues else None
        try:
            plain = plain_observation(observation, leftover, self._memory.observation)
        except ValueError as error:
            raise ObservationRefused(str(error)) from error
        try:
            self._ask({'do': 'step', 'observation': plain, 'deadline_ns': deadline_ns})
        except (EngineAway, ObservationRefused):
            raise
        except Exception as error:
            self._count_failed_step(error)
            raise
        self._failed_steps = 0

    def decode(self, deadline_ns: int) -> None:
        """As `Engine.decode`; raises EngineAway while there is no engine."""
        self._ask({'do': 'decode', 'deadline_ns': deadline_ns})

    def cancel(self, reason: FinishReason) -> None:
        """As `Engine.cancel`; of an engine that is away the texts have ended."""
        with suppress(EngineAway):
            self._ask({'do': 'cancel', 'reason': reason})

    @property
    def stats(self) -> EngineStats:
        """Counters over all processes; may be read from any thread."""
        return self._stats

    def _ask(self, message: Plain) -> None:
        child = self._child
        if child is None:
            raise EngineAway(self.away or 'the engine process is being closed')
        try:
            answer = child.ask(message, self._timeout_s, lambda news: self._hear(child, news))
        except _Lost:
            child.await_end(END_TIMEOUT_S)
            self._settle(child)
            raise EngineAway(self.away or 'the engine process is being closed') from None
        if answer['say'] == 'error':
            known = answer['type'] in _KNOWN_ERRORS
            raise _error_of(answer, f'{"" if known else answer["type"] + ": "}{answer["message"]}')

    def _count_failed_step(self, error: Exception) -> None:
        self._failed_steps += 1
        child = self._child
        if self._failed_steps >= MAX_FAILED_STEPS and child is not None:
            child.kill(f'failed {self._failed_steps} frames in a row: {error}')

    # --- what the child tells -----------------------------------------------------------------

    def _hear(self, child: _Child, news: Plain) -> None:
        if 'stats' in news:
            self._take_stats(news['stats'])  # whoever gets a chunk may ask how long it took
        if news['say'] == 'chunk':
            self._on_chunk(read_chunk(news['chunk'], self._memory.chunk))
        elif news['say'] == 'text':
            update = read_text(news['text'])
            if update.reason is None:
                child.live[update.task, update.frame] = update
            else:
                child.live.pop((update.task, update.frame), None)
            self._on_text(update)
        elif news['say'] == 'live':
            child.live = {
                (task, frame): child.live.get((task, frame), _nothing_said(task, frame, stamp_ns))
                for task, frame, stamp_ns in news['sequences']
            }
        elif news['say'] == 'progress':
            self._on_progress(news['fraction'])

    def _take_stats(self, plain: Plain) -> None:
        now, before = EngineStats(**plain), self._before
        self._stats = replace(
            now,
            **{name: getattr(before, name) + getattr(now, name) for name in _COUNTERS},
            finished=dict(Counter(before.finished) + Counter(now.finished)),
            drops=dict(Counter(before.drops) + Counter(now.drops)),
        )

    # --- what the node asks, from any thread --------------------------------------------------

    @property
    def away(self) -> str:
        """Why there is no engine and when there will be one; '' while there is."""
        absence = self._absence
        return '' if absence is None else str(absence)

    def set_frame_waiting(self, waiting: bool) -> None:
        """Make decoding give way, or let it go on."""
        self._memory.frame_waiting = waiting

    def close(self) -> None:
        """End the process: at once if it is busy, for its work is no longer wanted. Then forget
        the memory; nobody may use this object any more."""
        with self._lock:
            self._closing.set()
            newest = self._newest
        if newest is not None:
            newest.ask_to_end()
        if self._thread.is_alive():
            self._thread.join(END_TIMEOUT_S)
        if self._thread.is_alive() and newest is not None:
            newest.kill('closed')
            self._thread.join()
        self._memory.close()

    # --- the supervising thread ---------------------------------------------------------------

    def _supervise(self) -> None:
        """Run processes, one after the other; only the first one's failure to start ends it."""
        while not self._closing.is_set():
            error = self._run_one()
            if error is not None and self._first_over.is_set():
                self._be_away(f'could not start: {error}', math.inf)
            elif error is not None:
                self._first_error = error
                self._closing.set()
            self._closing.wait(self._pause_s())
        self._first_over.set()

    def _run_one(self) -> Exception | None:
        """See a process from its start to its end; return why it never had an engine."""
        try:
            child = self._start()
        except OSError as error:  # the system has no memory or no process to spare
            return error
        if child is None:
            return None
        problem = self._build(child)
        if problem is None:
            self._memory.lifeline.wait()
            if not self._closing.is_set():
                self._on_dying()
            child.wait()
            self._settle(child)
        child.close()
        return problem

    def _pause_s(self) -> float:
        absence = self._absence
        return 0.0 if absence is None else max(0.0, absence.due_s - time.monotonic())

    def _start(self) -> _Child | None:
        """Start the next process; None if this object is being closed."""
        with self._lock:
            if self._closing.is_set():
                return None
            self._newest = _Child(self._memory)
            return self._newest

    def _build(self, child: _Child) -> Exception | None:
        """Have the engine loaded and warmed up; return why there is none."""
        try:
            answer = child.ask(
                self._setup, LOADING_FACTOR * self._timeout_s, lambda news: self._hear(child, news)
            )
        except _Lost:
            child.wait(END_TIMEOUT_S)
            return RuntimeError(f'the engine process {child.reason}')
        if answer['say'] == 'error':
            child.kill('could not be built')
            child.wait()
            return _error_of(answer, answer['message'])
        self.action_horizon = answer['horizon']
        child.warm_s = time.monotonic()
        self._failed_steps, self._absence, self._child = 0, None, child
        self._first_error = None
        self._on_ready(child.pid)
        self._first_over.set()
        return None

    def _settle(self, child: _Child) -> None:
        """See to what a process has left; whoever notices its end first does."""
        with child.using:  # news that it sent before its end come first
            if self._child is not child:
                return
            self._child = None
            self._be_away(child.reason, child.warm_s)
            self._end_texts(child)

    def _end_texts(self, child: _Child) -> None:
        closing = self._closing.is_set()
        reason = FinishReason.SHUTDOWN if closing else FinishReason.CANCELLED
        ended = Counter(f'{task}_{reason.value}' for task, _ in child.live)
        self._before = self._stats = replace(
            self._stats,
            drops=dict(Counter(self._stats.drops) + ended),
            live_sequences=0,
            slots_used=0,
            starved_frames=0,
        )
        for update in child.live.values():
            self._on_text(replace(update, delta='', reason=reason))

    def _be_away(self, reason: str, warm_s: float) -> None:
        if self._closing.is_set():
            return
        now_s = time.monotonic()
        self._losses = 1 if now_s - warm_s > STEADY_S else self._losses + 1
        pause_s = min(MIN_PAUSE_S * 2 ** (self._losses - 1), MAX_PAUSE_S)
        self._absence = _Absence(reason, self._losses, now_s + pause_s)
        self._on_lost(reason)


def _nothing_said(task: str, frame: int, stamp_ns: int) -> TextUpdate:
    return TextUpdate(task, frame, stamp_ns, delta='', text='', num_tokens=0, reason=None)


def _error_of(answer: Plain, message: str) -> Exception:
    error = _KNOWN_ERRORS.get(answer['type'], RuntimeError)(message)
    error.__cause__ = ChildTraceback(answer['trace'])
    return error
