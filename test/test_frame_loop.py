"""The frame thread: ticks to frames, failures, rest and end. A made-up engine, no sleeping."""

from __future__ import annotations

import threading
import time

import pytest

from oxygen_ros.engine.engine import (
    NO_DEADLINE_NS,
    EngineAway,
    EngineStats,
    ObservationRefused,
)
from oxygen_ros.engine.sequence import FinishReason
from oxygen_ros.frame_loop import MAX_FAILURES, FrameLoop
from oxygen_ros.observation import NotReady

WAIT_S = 20.0


class Engine:
    """Logs what it is asked; blocks or fails on demand. Every call is announced to the test."""

    def __init__(self, frame_waiting=lambda: False):
        self.frame_waiting = frame_waiting
        self.stats = EngineStats()
        self.calls: list[tuple] = []
        self.threads: set[int] = set()
        self.errors: list[Exception] = []
        self.gate: threading.Event | None = None
        self._changed = threading.Condition()

    def warm_up(self):
        self._log('warm_up')

    def step(self, observation, deadline_ns):
        self._log('step', observation, deadline_ns)
        if self.gate is not None:
            assert self.gate.wait(WAIT_S)
        if self.errors:
            raise self.errors.pop(0)

    def decode(self, deadline_ns):
        self._log('decode', deadline_ns)

    def cancel(self, reason):
        self.stats = EngineStats()
        self._log('cancel', reason)

    def _log(self, *call):
        with self._changed:
            self.calls.append(call)
            self.threads.add(threading.get_ident())
            self._changed.notify_all()

    def wait_for(self, name, count=1):
        with self._changed:
            assert self._changed.wait_for(lambda: self.count(name) >= count, WAIT_S), self.calls

    def count(self, name):
        return sum(call[0] == name for call in self.calls)


class Loop:
    def __init__(self, period_ns=100, observe=lambda frame: ('observation', frame)):
        self.engine = Engine()
        self.failures: list[Exception] = []
        self.waiting: list[bool] = []
        self.loop = FrameLoop(
            self._build,
            observe,
            period_ns=period_ns,
            on_failure=self.failures.append,
            on_waiting=self.waiting.append,
        )
        self.loop.start()
        assert self.loop.ready.wait(WAIT_S)

    def _build(self, frame_waiting):
        self.engine.frame_waiting = frame_waiting
        return self.engine

    def tick(self, calls=1, name='step'):
        self.loop.tick()
        self.engine.wait_for(name, calls)


@pytest.fixture
def running():
    made: list[Loop] = []

    def start(*args, **kwargs) -> Loop:
        made.append(Loop(*args, **kwargs))
        return made[-1]

    yield start
    for loop in made:
        if loop.engine.gate is not None:
            loop.engine.gate.set()
        assert loop.loop.close(WAIT_S)


@pytest.mark.case(47)
def test_the_model_lives_in_one_thread_from_warm_up_to_the_end(running):
    made = running()
    for frame in range(100):
        made.tick(frame + 1)
    made.engine.stats = EngineStats(live_sequences=1)
    made.loop.rest()
    made.engine.wait_for('cancel')
    made.tick(101)
    assert made.loop.close(WAIT_S)
    assert made.engine.threads == {made.loop._thread.ident}


def test_only_ticks_that_become_frames_are_numbered(running):
    answers = iter([lambda f: f, lambda f: NotReady(('no image',)), lambda f: f, lambda f: f])
    made = running(observe=lambda frame: next(answers)(frame))
    made.tick(1)
    made.tick(1, name='decode')
    made.tick(2)
    made.tick(3)
    assert [call[1] for call in made.engine.calls if call[0] == 'step'] == [0, 1, 2]


def test_a_frame_may_decode_until_the_next_tick_is_due(running):
    made = running(period_ns=7_000)
    before_ns = time.monotonic_ns()
    made.tick()
    assert before_ns <= made.engine.calls[-1][2] - 7_000 <= time.monotonic_ns()


def test_on_a_simulated_clock_decoding_goes_on_until_the_next_tick_comes(running):
    made = running(period_ns=None)
    made.tick()
    assert made.engine.calls[-1][2] == NO_DEADLINE_NS
    assert not made.engine.frame_waiting()


@pytest.mark.case(19)
def test_ticks_during_a_frame_coalesce_and_are_counted(running):
    made = running()
    made.engine.gate = threading.Event()
    made.tick()
    for _ in range(5):
        made.loop.tick()
    assert made.engine.frame_waiting()  # the running frame's decoding gives way
    made.engine.gate.set()
    made.engine.wait_for('step', 2)
    assert made.loop.drops() == {'tick_skipped': 4}
    assert made.engine.count('step') == 2


def test_without_an_observation_the_texts_still_go_on(running):
    made = running(observe=lambda frame: NotReady(('camera base: no image on /x yet',)))
    made.tick(name='decode')
    assert made.loop.not_ready == ('camera base: no image on /x yet',)
    assert (made.engine.count('step'), made.loop.next_frame) == (0, 0)


def test_a_refused_observation_is_no_failure_of_the_engine(running):
    made = running()
    made.engine.errors = [ObservationRefused('the prompt is too long')]
    made.tick(1)
    made.tick(2)
    assert made.loop.drops() == {'frame_refused': 1}
    assert made.failures == []


@pytest.mark.case(43)
def test_a_failing_frame_is_reported_and_the_next_one_tried(running):
    made = running()
    made.engine.errors = [RuntimeError('out of memory')]
    made.tick(1)
    made.tick(2)
    made.tick(3)  # the second is over when the third begins
    assert [str(error) for error in made.failures] == ['out of memory']
    assert made.loop.failures == 0
    assert not made.loop.broken


@pytest.mark.case(43)
def test_an_engine_that_fails_again_and_again_is_given_up(running):
    made = running()
    made.engine.errors = [RuntimeError(f'device gone {i}') for i in range(MAX_FAILURES + 3)]
    for frame in range(MAX_FAILURES):
        made.tick(frame + 1)
    made.loop.tick()
    assert made.loop.close(WAIT_S)
    assert made.loop.broken
    assert made.engine.count('step') == MAX_FAILURES


def test_an_engine_that_is_away_is_waited_for_and_no_failure(running):
    made = running()
    made.engine.errors = [
        *(RuntimeError('device gone') for _ in range(MAX_FAILURES - 1)),
        EngineAway('the engine process was ended; restart 1 in 1 s'),
    ]
    for frame in range(MAX_FAILURES):
        made.tick(frame + 1)
    made.engine.wait_for('step', MAX_FAILURES)
    made.engine.errors = [RuntimeError('of the next process')]
    made.tick(MAX_FAILURES + 1)
    made.tick(MAX_FAILURES + 2)
    assert made.loop.drops() == {'engine_away': 1, 'frame_failed': MAX_FAILURES}
    assert not made.loop.broken


def test_an_engine_that_cannot_ask_is_told_whether_a_frame_waits(running):
    made = running()
    made.engine.gate = threading.Event()
    made.tick()
    assert made.waiting[-1] is False  # taken
    made.loop.tick()
    assert made.waiting[-1] is True
    made.engine.gate.set()
    made.engine.wait_for('step', 2)
    assert made.waiting[-1] is False
    made.loop.rest()
    assert made.waiting[-1] is True


def test_rest_ends_the_texts_as_cancelled_and_the_end_as_shut_down(running):
    made = running()
    made.tick()
    made.engine.stats = EngineStats(live_sequences=1)
    made.loop.rest()
    made.engine.wait_for('cancel')
    assert made.engine.calls[-1] == ('cancel', FinishReason.CANCELLED)
    made.loop.close(WAIT_S)
    assert made.engine.calls[-1] == ('cancel', FinishReason.SHUTDOWN)


@pytest.mark.case(46)
def test_rest_and_close_do_not_wait_for_a_frame_that_hangs(running):
    made = running()
    made.engine.gate = threading.Event()
    made.tick()
    made.loop.rest()
    assert made.engine.frame_waiting()
    assert not made.loop.close(timeout_s=0.01)
    assert made.loop.alive


def test_an_engine_that_cannot_be_built_says_why():
    def build(frame_waiting):
        raise ValueError('no such checkpoint')

    loop = FrameLoop(build, lambda frame: None, period_ns=1, on_failure=lambda error: None)
    loop.start()
    assert loop.ready.wait(WAIT_S)
    assert (loop.engine, str(loop.build_error)) == (None, 'no such checkpoint')
    assert loop.close(WAIT_S)
