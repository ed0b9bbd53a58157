"""How a chunk meets the one before it, against LeRobot's queue and ACT's ensembling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oxygen_ros.actions import REMEMBERED_LATENCIES, ActionBuffer, ActionChunk, CommandGate
from oxygen_ros.profile import load_profile

RTC = Path(__file__).parent / 'golden' / 'rtc'
CONFIG = Path(__file__).parents[1] / 'config'
QUEUE = json.loads((RTC / 'action_queue.json').read_text())['examples']
ROW = 20_000_000  # ns
T0 = 1_000 * ROW


def chunk_of(values: Any, frame: int = 0, time_ns: int = T0) -> ActionChunk:
    values = np.asarray(values, float)
    return ActionChunk(frame, time_ns, time_ns, ROW, values.reshape(len(values), -1))


def next_row(buffer: ActionBuffer, now_ns: int, period_ns: int = ROW) -> list[float]:
    return buffer.rows(now_ns, period_ns=period_ns, count=1).ravel().tolist()


class Player:
    """A robot that takes one row per period out of a buffer; what LeRobot's scripts are played on.

    A merge happens when its inference has taken `real_delay` periods, seen from when it began.
    """

    def __init__(self, blending: str) -> None:
        self.buffer = ActionBuffer(1, 'linear', blending=blending)
        self.now_ns, self.frame = T0, 0
        self.began_ns = T0

    def play(self, steps: list[dict[str, Any]]) -> Iterator[tuple[list, list]]:
        """Yield what each step of a script gives here, and gave there."""
        for step in steps:
            if step['op'] == 'get':
                yield self.get(step['n']), step['got']
            else:
                _, first, length, real_delay, _ = step['op']
                yield self.merge(first, length, real_delay), step['queue']

    def merge(self, first: float, length: int, real_delay: int) -> list[float]:
        """Take a chunk; return the queue, what will be played if nothing new comes."""
        self.now_ns = max(self.now_ns, self.began_ns + real_delay * ROW)
        chunk = chunk_of(first + np.arange(length), self.frame, self.began_ns)
        self.buffer.put(chunk, self.now_ns)
        self.frame += 1
        leftover = self.buffer.leftover(self.now_ns)
        return [] if leftover is None else leftover.values.ravel().tolist()

    def get(self, count: int) -> list[float | None]:
        self.began_ns = self.now_ns  # of the two before a merge the second counts
        taken: list[float | None] = []
        for _ in range(count):
            row = next_row(self.buffer, self.now_ns)
            taken.append(row[0] if row else None)
            self.now_ns += ROW
        return taken


# --- LeRobot's queue ------------------------------------------------------------------------------


@pytest.mark.parametrize('name', [name for name in QUEUE if QUEUE[name]['rtc_enabled']])
def test_the_next_action_is_that_of_lerobots_queue(name: str) -> None:
    """By its rule since #4454: skip what was played, and no more than the measured latency.

    q6, its queue without RTC, appends chunks and is not ours: `replace` goes by time.
    """
    for ours, golden in Player('rtc').play(QUEUE[name]['after_pr4454']):
        assert ours == golden


@pytest.mark.parametrize('name', ['q1_steady_delay_agrees', 'q4_queue_starved'])
def test_by_time_alone_the_next_action_is_that_of_lerobots_older_queue(name: str) -> None:
    """`replace` skips the measured latency, whatever was played."""
    for ours, golden in Player('replace').play(QUEUE[name]['snapshot_7427f31']):
        assert ours == golden


def test_a_first_chunk_begins_with_its_first_row_unless_it_was_seen_too_long_ago() -> None:
    buffer = ActionBuffer(1, 'linear', blending='rtc')
    assert buffer.put(chunk_of(np.arange(10)), T0 + 20 * ROW) == 'chunk_late'
    assert buffer.put(chunk_of(np.arange(10)), T0 + 9 * ROW) is None
    assert next_row(buffer, T0 + 9 * ROW) == [0.0]
    assert next_row(buffer, T0 + 10 * ROW) == [1.0]


def test_a_chunk_on_time_is_not_moved() -> None:
    buffers = [ActionBuffer(1, 'linear', blending=blending) for blending in ('replace', 'rtc')]
    seen = []
    for buffer in buffers:
        buffer.put(chunk_of(np.arange(10)), T0)
        rows = [next_row(buffer, T0 + k * ROW // 2, ROW // 2) for k in range(7)]
        buffer.put(chunk_of(100.0 + np.arange(10), 1, T0 + ROW), T0 + 3 * ROW)
        seen.append(rows + [next_row(buffer, T0 + k * ROW // 2) for k in range(6, 12)])
    assert seen[0][:7] == seen[1][:7]
    assert seen[1] == seen[0]


def test_after_a_clear_nothing_counts_as_played() -> None:
    buffer = ActionBuffer(1, 'linear', blending='rtc')
    buffer.put(chunk_of(np.arange(10)), T0)
    next_row(buffer, T0)
    buffer.clear('instruction', first_frame=1)
    assert buffer.leftover(T0 + ROW) is None
    buffer.put(chunk_of(np.arange(10), 1, T0), T0 + 4 * ROW)
    assert next_row(buffer, T0 + 4 * ROW) == [0.0]


# --- the leftover ---------------------------------------------------------------------------------


def played(latency_rows: float, **options: Any) -> ActionBuffer:
    """A buffer that plays its second chunk, which took so many rows from look to command."""
    buffer = ActionBuffer(1, 'linear', blending='rtc', **options)
    buffer.put(chunk_of(np.arange(20)), T0)
    next_row(buffer, T0 + 9 * ROW)
    latency_ns = round(latency_rows * ROW)
    second = chunk_of(100.0 + np.arange(20), 1, T0 + 10 * ROW - latency_ns)
    buffer.put(second, T0 + 10 * ROW)
    return buffer


def test_an_empty_buffer_and_a_chunk_that_is_over_leave_nothing() -> None:
    buffer = ActionBuffer(1, 'linear', blending='rtc')
    assert buffer.leftover(T0) is None
    buffer.put(chunk_of([1.0, 2.0]), T0)
    assert buffer.leftover(T0 + ROW) is not None
    assert buffer.leftover(T0 + 2 * ROW) is None


def test_a_leftover_is_what_will_be_commanded_row_by_row() -> None:
    buffer = ActionBuffer(1, 'linear', blending='rtc')
    buffer.put(chunk_of([0.0, 1.0, 4.0, 9.0]), T0)
    leftover = buffer.leftover(T0 + ROW + ROW // 2)
    assert leftover is not None
    np.testing.assert_allclose(leftover.values.ravel(), [2.5, 6.5, 9.0])
    for i, value in enumerate(leftover.values):
        assert next_row(buffer, T0 + ROW + ROW // 2 + i * ROW) == value.tolist()


def test_asking_for_the_leftover_does_not_count_as_playing() -> None:
    buffer = ActionBuffer(1, 'linear', blending='rtc')
    buffer.put(chunk_of(np.arange(10)), T0)
    buffer.leftover(T0 + 3 * ROW)
    buffer.put(chunk_of(np.arange(10), 1, T0), T0 + 4 * ROW)
    assert next_row(buffer, T0 + 4 * ROW) == [0.0]


@pytest.mark.parametrize(('latency_rows', 'delay'), [(0.0, 0), (2.0, 2), (2.1, 3), (2.9, 3)])
def test_the_delay_is_the_measured_latency_rounded_up(latency_rows: float, delay: int) -> None:
    leftover = played(latency_rows).leftover(T0 + 12 * ROW)
    assert leftover is not None
    assert leftover.delay == delay


def test_the_latency_of_a_first_chunk_is_no_measure() -> None:
    """It holds what happens once: a download, a compilation, a cold cache."""
    buffer = ActionBuffer(1, 'linear', blending='rtc')
    buffer.put(chunk_of(np.arange(20)), T0 + 15 * ROW)
    leftover = buffer.leftover(T0 + 15 * ROW)
    assert leftover is not None
    assert leftover.delay == 0


def test_one_slow_chunk_is_forgotten_in_the_end() -> None:
    """LeRobot #4223: a running maximum keeps a spike for good."""
    buffer, delays = played(8.0), []
    for frame in range(2, 2 + REMEMBERED_LATENCIES):
        now_ns = T0 + (10 + 2 * frame) * ROW
        next_row(buffer, now_ns - ROW)
        delays.append(buffer.leftover(now_ns - ROW).delay)
        buffer.put(chunk_of(np.arange(20), frame, now_ns - ROW), now_ns)
    assert set(delays) == {8}
    assert buffer.leftover(now_ns).delay == 1


def test_the_delay_is_no_longer_than_what_is_left() -> None:
    """More cannot be consumed: the smaller of measured latency and what will be played."""
    leftover = played(5.0).leftover(T0 + 22 * ROW)
    assert leftover is not None
    assert (len(leftover.values), leftover.delay) == (3, 3)


def test_a_delay_beyond_the_training_is_cut_and_counted() -> None:
    buffer = played(5.0, max_delay=2)
    leftover = buffer.leftover(T0 + 12 * ROW)
    assert leftover is not None
    assert leftover.delay == 2
    assert buffer.drops() == {'delay_beyond_training': 1}


# --- temporal ensembling --------------------------------------------------------------------------


@pytest.mark.parametrize('coefficient', [0.01, 0.1])
def test_a_chunk_per_row_is_ensembled_as_act_does(coefficient: float) -> None:
    load_file = pytest.importorskip('safetensors.numpy').load_file
    golden = load_file(RTC / 'temporal_ensemble.safetensors')
    chunks, actions = golden['chunks'], golden[f'coeff_{coefficient}.actions']
    buffer = ActionBuffer(
        chunks.shape[2], 'linear', blending='ensemble', ensemble_coefficient=coefficient
    )
    for step, (chunk, action) in enumerate(zip(chunks, actions, strict=True)):
        now_ns = T0 + step * ROW
        assert buffer.put(ActionChunk(step, now_ns, now_ns, ROW, chunk), now_ns) is None
        row = buffer.rows(now_ns, period_ns=ROW, count=1)[0]
        np.testing.assert_allclose(row, action, rtol=0, atol=1e-6)


def test_with_fewer_chunks_each_still_weighs_by_its_age() -> None:
    """A chunk every third row: the weight is that of its age, not of its place in the list."""
    buffer = ActionBuffer(1, 'linear', blending='ensemble', ensemble_coefficient=0.2)
    values = (1.0, 5.0, 7.0)
    for frame, value in enumerate(values):
        time_ns = T0 + 3 * frame * ROW
        buffer.put(chunk_of(np.full(10, value), frame, time_ns), time_ns)
    weights = np.exp(-0.2 * 3 * np.arange(3))
    assert next_row(buffer, T0 + 7 * ROW) == pytest.approx([weights @ values / weights.sum()])
    # Row 10 is beyond the first chunk, row 13 beyond the second.
    rows = buffer.rows(T0 + 9 * ROW, period_ns=ROW, count=99).ravel()
    two = (5.0 + weights[1] * 7.0) / (1 + weights[1])
    np.testing.assert_allclose(rows, [*[weights @ values / weights.sum()], *[two] * 3, *[7.0] * 3])


@pytest.mark.parametrize('coefficient', [0.0, 5000.0, -5000.0])
def test_the_mean_of_equal_chunks_is_the_chunk_at_any_coefficient(coefficient: float) -> None:
    buffer = ActionBuffer(1, 'linear', blending='ensemble', ensemble_coefficient=coefficient)
    for frame in range(4):
        time_ns = T0 + frame * ROW
        buffer.put(chunk_of(frame + np.arange(10.0), frame, time_ns), time_ns)
    rows = buffer.rows(T0 + 3 * ROW, period_ns=ROW // 2, count=99).ravel()
    assert len(rows) == 20
    np.testing.assert_allclose(rows[:19], 3 + np.arange(19) / 2)


def test_one_chunk_alone_is_played_as_without_ensembling() -> None:
    rows = []
    for blending in ('replace', 'ensemble'):
        buffer = ActionBuffer(2, 'linear', blending=blending, ensemble_coefficient=0.3)
        buffer.put(chunk_of(np.random.default_rng(0).standard_normal((10, 2))), T0)
        rows.append(buffer.rows(T0 + ROW // 3, period_ns=ROW // 4, count=99))
    np.testing.assert_array_equal(rows[0], rows[1])


def test_an_ensemble_ends_forgets_and_refuses_as_a_single_chunk_does() -> None:
    buffer = ActionBuffer(1, 'previous', blending='ensemble', ensemble_coefficient=0.1)
    buffer.put(chunk_of(np.zeros(10)), T0)
    buffer.put(chunk_of(np.ones(10), 1, T0 + 5 * ROW), T0 + 5 * ROW)
    assert len(buffer.rows(T0 + 15 * ROW, period_ns=ROW, count=9)) == 0
    assert len(buffer.rows(T0 - 5 * ROW, period_ns=ROW, count=9)) == 0
    assert buffer.put(chunk_of(np.ones(10), 0, T0 + 5 * ROW), T0 + 5 * ROW) == 'chunk_old'
    assert buffer.put(chunk_of(np.ones(10), 2, T0), T0 + 11 * ROW) == 'chunk_late'
    buffer.clear('instruction', first_frame=3)
    assert len(buffer.rows(T0 + 6 * ROW, period_ns=ROW, count=9)) == 0
    assert buffer.put(chunk_of(np.ones(10), 2, T0 + 6 * ROW), T0 + 6 * ROW) == 'chunk_cancelled'


def test_chunks_that_are_over_are_not_kept() -> None:
    buffer = ActionBuffer(1, 'linear', blending='ensemble', ensemble_coefficient=0.1)
    for frame in range(100):
        time_ns = T0 + 2 * frame * ROW
        buffer.put(chunk_of(np.zeros(10), frame, time_ns), time_ns)
    assert len(buffer._chunks) == 5


@pytest.mark.case(39)
@pytest.mark.parametrize('blending', ['replace', 'ensemble', 'rtc'])
def test_between_chunks_that_differ_the_command_steps_evenly_and_arrives(blending: str) -> None:
    """CASES 39: 0.3 rad apart, 0.1 per step; an ensemble is there when the old chunk is over."""
    command = replace(load_profile('dummy', CONFIG).command, max_velocity=(5.0,) * 6)
    gate, limit = CommandGate(command), 5.0 / command.rate_hz
    buffer = ActionBuffer(6, 'linear', blending=blending, ensemble_coefficient=0.1)
    buffer.put(chunk_of(np.zeros((10, 6))), T0)
    sent = [buffer.rows(T0 + 4 * ROW, period_ns=ROW, count=1)[0]]
    buffer.put(chunk_of(np.full((10, 6), 0.3), 1, T0 + 3 * ROW), T0 + 5 * ROW)
    for k in range(5, 13):
        rows = buffer.rows(T0 + k * ROW, period_ns=ROW, count=1)
        sent.append(gate.apply(rows, sent[-1], None).rows[0])
    steps = np.diff(np.array(sent), axis=0)
    assert (steps >= 0).all()
    assert (steps <= limit * (1 + 1e-9)).all()
    overlap = 5 if blending == 'ensemble' else 0
    np.testing.assert_allclose(sent[overlap + 3], 0.3)


# --- the profile ----------------------------------------------------------------------------------


def test_a_shipped_profile_replaces() -> None:
    profile = load_profile('dummy', CONFIG)
    buffer = ActionBuffer.of_profile(profile)
    joints = len(profile.command.names)
    for frame in range(2):
        buffer.put(chunk_of(np.full((10, joints), frame), frame), T0)
    assert next_row(buffer, T0) == [1.0] * joints
