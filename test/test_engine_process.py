"""An engine in a process of its own: the same results, and what happens when the process is lost.

Real processes with the dummy model. Everything is awaited by events, nothing by sleeping.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip('torch')

from oxygen_ros.actions import ActionBuffer, Leftover
from oxygen_ros.engine import process, wire
from oxygen_ros.engine.engine import (
    NO_DEADLINE_NS,
    EngineAway,
    ObservationRefused,
)
from oxygen_ros.engine.factory import build_engine
from oxygen_ros.engine.options import EngineOptions
from oxygen_ros.engine.process import EngineProcess
from oxygen_ros.engine.sequence import FinishReason
from oxygen_ros.observation import Observation
from oxygen_ros.profile import load_profile
from oxygen_ros.publisher import CommandPublisher

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 120.0
OPTIONS = EngineOptions(device='cpu')
EVERY_FRAME = 1


def profile_of(name: str, blending: str = 'replace'):
    profile = load_profile(name, ROOT / 'config')
    tasks = tuple(replace(task, period_frames=EVERY_FRAME) for task in profile.tasks)
    return replace(profile, tasks=tasks, action=replace(profile.action, blending=blending))


def observation(profile, frame: int) -> Observation:
    random = np.random.default_rng(frame)
    cameras = profile.cameras[: 1 + frame % len(profile.cameras)]
    return Observation(
        frame=frame,
        stamp_ns=10**18 + frame,
        time_ns=10**9 * frame,
        images={
            camera.slot: random.integers(0, 255, (48 + frame, 64, 3), np.uint8)
            for camera in cameras
        },
        state=random.uniform(-0.5, 0.5, len(profile.joints.names)).astype(np.float32),
        instruction='touch the red block',
    )


class Heard:
    """What an engine hands out, and a leftover that depends on nothing but that."""

    def __init__(self) -> None:
        self.chunks: list = []
        self.texts: list = []
        self.leftovers_asked: list[int] = []

    def leftover(self, time_ns: int) -> Leftover | None:
        self.leftovers_asked.append(time_ns)
        return Leftover(self.chunks[-1].values[3:], 2) if self.chunks else None

    @property
    def last_reasons(self) -> dict[tuple[str, int], str | None]:
        return {(update.task, update.frame): update.reason for update in self.texts}


class Running(Heard):
    """An EngineProcess, its news, and a hand on its process."""

    def __init__(self, profile, options=OPTIONS, timeout_s: float = 60.0) -> None:
        super().__init__()
        self.profile = profile
        self.pids: list[int] = []
        self.losses: list[str] = []
        self.dying: list[float] = []
        self.start_error: Exception | None = None
        self._changed = threading.Condition()
        self.on_text = self.texts.append
        self.engine = EngineProcess(
            profile,
            options,
            timeout_s=timeout_s,
            on_chunk=self.chunks.append,
            on_text=lambda update: self.on_text(update),
            leftover=self.leftover,
            on_progress=lambda fraction: None,
            on_ready=lambda pid: self._note(self.pids, pid),
            on_dying=lambda: self._note(self.dying, time.monotonic()),
            on_lost=lambda reason: self._note(self.losses, reason),
        )

    def step(self, frame: int, deadline_ns: int = NO_DEADLINE_NS) -> None:
        self.engine.step(observation(self.profile, frame), deadline_ns)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[-1], number)

    def wait_for(self, events: list, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(events) >= count, WAIT_S), self.losses

    def start(self) -> None:
        try:
            self.engine.warm_up()
        except RuntimeError as error:
            self.start_error = error

    def _note(self, events: list, event) -> None:
        with self._changed:
            events.append(event)
            self._changed.notify_all()


@pytest.fixture
def running(monkeypatch):
    monkeypatch.setattr(process, 'MIN_PAUSE_S', 0.05)
    made: list[Running] = []

    def start(*args, **kwargs) -> Running:
        made.append(Running(*args, **kwargs))
        made[-1].engine.warm_up()
        return made[-1]

    yield start
    for one in made:
        one.engine.close()


# --- the same engine ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'name, blending, execution',
    [
        ('dummy', 'replace', 'unified'),
        ('dummy', 'rtc', 'unified'),
        ('dummy', 'replace', 'isolated'),
        ('tabletop', 'replace', 'unified'),
    ],
)
def test_chunks_texts_and_counters_are_those_of_the_engine_in_a_thread(
    running, name, blending, execution
):
    profile = profile_of(name, blending)
    checkpoint = '' if name == 'dummy' else str(ROOT / 'resource' / name)
    options = replace(OPTIONS, checkpoint=checkpoint, execution=execution)
    here, there = Heard(), running(profile, options)
    engine = build_engine(
        profile, options,
        on_chunk=here.chunks.append, on_text=here.texts.append, leftover=here.leftover,
    )  # fmt: skip
    engine.warm_up()
    for frame in range(4):
        engine.step(observation(profile, frame), NO_DEADLINE_NS)
        there.step(frame)

    assert there.engine.action_horizon == engine.action_horizon
    assert there.leftovers_asked == here.leftovers_asked
    assert bool(here.leftovers_asked) == (blending == 'rtc')
    assert len(there.chunks) == 4
    for ours, theirs in zip(here.chunks, there.chunks, strict=True):
        assert ours.values.tobytes() == theirs.values.tobytes()
        assert (ours.frame, ours.stamp_ns, ours.time_ns, ours.period_ns) == (
            theirs.frame, theirs.stamp_ns, theirs.time_ns, theirs.period_ns
        )  # fmt: skip
    assert here.texts == there.texts
    assert {update.task for update in there.texts} == {task.name for task in profile.tasks}
    for field in ('frames', 'prefills', 'chunks', 'tokens', 'decode_steps', 'finished', 'drafted'):
        assert getattr(engine.stats, field) == getattr(there.engine.stats, field), field


def test_every_field_of_an_observation_arrives():
    memory = wire.SharedMemory.create()
    sent = replace(observation(profile_of('dummy'), 3), notes=('red near left', 'green far left'))
    leftover = Leftover(np.arange(12.0).reshape(2, 6), 1)
    plain = json.loads(json.dumps(wire.plain_observation(sent, leftover, memory.observation)))
    received, continued = wire.read_observation(plain, memory.observation)
    assert (continued.delay, continued.values.tolist()) == (1, leftover.values.tolist())
    for field in fields(Observation):
        one, other = getattr(received, field.name), getattr(sent, field.name)
        assert one is not field.default, f'{field.name}: the test sends nothing to lose'
        np.testing.assert_equal(one, other, field.name)
    memory.close()


def test_decoding_gives_way_as_soon_as_a_frame_waits_and_goes_on_when_asked(running):
    there = running(profile_of('dummy'))
    there.on_text = lambda update: (there.texts.append(update), give_way(update))

    def give_way(update) -> None:
        there.engine.set_frame_waiting(True)

    there.step(0)
    assert there.engine.stats.live_sequences > 0
    assert there.texts[-1].reason is None
    there.engine.set_frame_waiting(False)
    there.on_text = there.texts.append
    there.engine.decode(NO_DEADLINE_NS)
    assert there.engine.stats.live_sequences == 0
    assert set(there.last_reasons.values()) == {FinishReason.LENGTH}


def test_errors_of_the_child_are_those_of_an_engine_here(running):
    profile = profile_of('dummy')
    there = running(profile)
    many_words = replace(observation(profile, 0), instruction='many words ' * 100)
    with pytest.raises(ObservationRefused, match='tokens too long for the model'):
        there.engine.step(many_words, NO_DEADLINE_NS)
    huge = np.broadcast_to(np.uint8(0), (2**15, 2**15, 3))
    with pytest.raises(ObservationRefused, match='expected at most 268435456'):
        there.engine.step(replace(observation(profile, 0), images={'base_0_rgb': huge}), 0)

    def fail(update) -> None:
        raise KeyError('no such topic')

    there.on_text = fail
    with pytest.raises(KeyError, match='no such topic'):  # ours, and the exchange is not torn
        there.step(1)
    there.on_text = there.texts.append
    there.step(2)
    assert [chunk.frame for chunk in there.chunks] == [1, 2]
    assert there.losses == []


def test_a_child_that_cannot_load_says_so_in_its_own_words():
    made = Running(profile_of('dummy'), replace(OPTIONS, device='tpu'))
    with pytest.raises(RuntimeError, match=r"^parameter 'device': expected auto, cpu or cuda"):
        made.engine.warm_up()
    made.engine.close()
    assert made.losses == made.pids == []


def test_the_process_of_the_node_imports_no_torch():
    program = """if True:
        import sys
        from pathlib import Path
        from oxygen_ros import frame_loop, monitor
        from oxygen_ros.engine.options import EngineOptions
        from oxygen_ros.engine.process import EngineProcess
        from oxygen_ros.profile import load_profile

        nothing = lambda *news: None
        engine = EngineProcess(
            load_profile('dummy', Path('config')), EngineOptions(device='cpu'), timeout_s=60.0,
            on_chunk=nothing, on_text=nothing, leftover=nothing, on_progress=nothing,
            on_ready=nothing, on_dying=nothing, on_lost=nothing,
        )
        engine.warm_up()
        engine.close()
        print('torch' in sys.modules, engine.action_horizon)
    """
    output = subprocess.run(
        [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == ['False', '20']


# --- a lost process -------------------------------------------------------------------------------


def test_a_killed_child_is_noticed_though_idle_and_replaced(running):
    there = running(profile_of('dummy'))
    there.step(0)
    tokens = there.engine.stats.tokens
    there.kill()
    there.wait_for(there.losses, 1)
    there.wait_for(there.pids, 2)
    assert there.losses == [
        'was ended by signal 9 (Killed), perhaps by the kernel for lack of memory'
    ]
    there.step(1)
    assert [chunk.frame for chunk in there.chunks] == [0, 1]
    assert there.engine.stats.frames == 2  # counters go on
    assert there.engine.stats.tokens > tokens


def test_texts_of_a_killed_child_end_as_cancelled_and_are_counted(running):
    there = running(profile_of('dummy'))

    def kill_once(update) -> None:
        there.texts.append(update)
        there.on_text = there.texts.append
        there.kill()

    there.on_text = kill_once
    with pytest.raises(EngineAway, match=r'signal 9 .*; restart 1 (in|under way)'):
        there.step(0)
    assert there.last_reasons == {
        ('text', 0): FinishReason.CANCELLED,
        ('memory', 0): FinishReason.CANCELLED,
    }
    texts = [update for update in there.texts if update.task == 'text']
    assert texts[-1].text == texts[-2].text  # what was said stays said
    assert there.engine.stats.live_sequences == 0
    assert there.engine.stats.drops == {'text_cancelled': 1, 'memory_cancelled': 1}
    there.engine.cancel(FinishReason.CANCELLED)  # nothing is left to cancel, and nobody to ask
    there.wait_for(there.pids, 2)
    there.step(1)
    assert there.last_reasons['text', 1] == FinishReason.LENGTH


def test_the_next_command_after_a_loss_is_the_declared_safe_behaviour(running):
    profile = profile_of('dummy')
    there = running(profile)
    actions, sent = ActionBuffer.of_profile(profile), []
    publisher = CommandPublisher(
        profile.command, actions,
        send=sent.append, measured=lambda: np.full(6, 0.25), clock_ns=lambda: 10**9,
    )  # fmt: skip
    there.engine._on_dying = lambda: (
        actions.clear('engine_lost', 2), there._note(there.dying, time.monotonic()),
    )  # fmt: skip
    there.step(1)
    actions.put(there.chunks[0], 10**9)
    publisher.tick()
    assert publisher.source == 'chunk'
    there.kill()
    there.wait_for(there.dying, 1)
    publisher.tick()
    assert publisher.source == 'hold'
    assert len(sent) == 2
    assert actions.put(there.chunks[0], 10**9) == 'chunk_cancelled'  # read late, of its last frame
    assert actions.drops() == {'cleared_engine_lost': 1, 'chunk_cancelled': 1}


def test_a_child_that_hangs_is_killed_when_its_time_is_over(running, monkeypatch):
    monkeypatch.setattr(process, 'LOADING_FACTOR', 1000)
    there = running(profile_of('dummy'), timeout_s=0.5)
    there.kill(signal.SIGSTOP)
    with pytest.raises(EngineAway, match=r'gave no sign for 0.5 s, see engine_timeout_s'):
        there.step(0)
    there.wait_for(there.pids, 2)
    assert there.engine.away == ''
    assert len(set(there.pids)) == 2


def test_a_child_at_work_is_not_taken_for_one_that_hangs(running, monkeypatch):
    there = running(profile_of('dummy'))
    beats = iter(range(10**9))
    monkeypatch.setattr(type(there.engine._memory), 'beats', property(lambda memory: next(beats)))
    there.engine._timeout_s = 0.001
    there.step(0)
    assert there.losses == []
    assert len(there.chunks) == 1


def test_a_child_that_fails_frame_after_frame_is_replaced(running, monkeypatch):
    there = running(profile_of('dummy'))
    with monkeypatch.context() as broken:
        broken.setattr(process, 'plain_observation', lambda *seen: {})
        for _ in range(process.MAX_FAILED_STEPS):
            with pytest.raises(RuntimeError, match=r"^KeyError: 'arrays'$") as caught:
                there.step(0)
    assert 'child.py' in str(caught.value.__cause__)
    there.wait_for(there.pids, 2)
    assert there.losses == ["failed 3 frames in a row: KeyError: 'arrays'"]
    there.step(1)
    assert there.engine.stats.chunks == 1


def test_restarts_wait_longer_each_time_and_say_when(running, monkeypatch):
    there = running(profile_of('dummy'))
    pauses: list[float] = []
    monkeypatch.setattr(there.engine._closing, 'wait', lambda s: pauses.append(s))
    monkeypatch.setattr(process, 'MIN_PAUSE_S', 1.0)
    monkeypatch.setattr(process, 'MAX_PAUSE_S', 3.0)
    monkeypatch.setattr(there.engine, '_setup', {**there.engine._setup, 'options': {'device': 'x'}})
    said: list[str] = []
    there.engine._on_lost = lambda reason: (said.append(there.engine.away), enough())

    def enough() -> None:
        if len(said) == 4:
            there.engine._closing.set()

    there.kill()
    there.engine._thread.join(WAIT_S)
    assert [round(pause) for pause in pauses] == [1, 2, 3, 3]
    assert said[0].endswith('; restart 1 in 1 s')
    assert "could not start: parameter 'device': expected auto" in said[1]
    assert said[-1].endswith('; restart 4 in 3 s')


# --- the end --------------------------------------------------------------------------------------


def open_files() -> Counter:
    """The kinds of files that this process has open."""
    paths = [f'/proc/self/fd/{fd}' for fd in os.listdir('/proc/self/fd')]
    names = [os.readlink(path) for path in paths if os.path.lexists(path)]  # not listdir's own
    return Counter(name.partition(':')[0] for name in names)


def mapped() -> int:
    return Path('/proc/self/maps').read_text().count('oxygen_engine')


def children() -> list[str]:
    """Process ids of this process's children, zombies included."""
    tasks = Path('/proc/self/task').glob('*/children')
    return [pid for task in tasks for pid in task.read_text().split()]


def start_and_close(profile, *, warm: bool) -> None:
    one = Running(profile)
    starter = threading.Thread(target=one.start)
    starter.start()
    if warm:
        one.wait_for(one.pids, 1)
    one.engine.close()
    starter.join(WAIT_S)
    assert not starter.is_alive()
    assert (one.start_error is None) == warm


def test_many_starts_and_ends_leave_no_process_file_thread_or_memory():
    profile = profile_of('dummy')
    start_and_close(profile, warm=True)
    gc.collect()
    before = (open_files(), mapped(), children(), threading.active_count())
    for number in range(8):
        start_and_close(profile, warm=number == 4)
    gc.collect()
    assert (open_files(), mapped(), children(), threading.active_count()) == before


@pytest.mark.parametrize('stopped', [False, True], ids=['idle', 'deaf'])
def test_the_child_dies_with_the_node(stopped):
    program = f"""if True:
        import os, signal, sys
        sys.path.insert(0, 'test')
        from test_engine_process import Running, profile_of

        there = Running(profile_of('dummy'))
        there.engine.warm_up()
        if {stopped}:
            there.kill(signal.SIGSTOP)
        print(there.pids[0], flush=True)
        sys.stdin.read()
    """
    parent = subprocess.Popen(
        [sys.executable, '-c', program],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.communicate()
        ended, _, _ = select.select([child], [], [], WAIT_S)
        assert ended
    finally:
        os.close(child)


def test_signals_of_the_terminal_are_left_to_the_node(running):
    there = running(profile_of('dummy'))
    for number in (signal.SIGINT, signal.SIGTERM):
        there.kill(number)
    there.step(0)
    assert len(there.chunks) == 1
    assert there.losses == []
