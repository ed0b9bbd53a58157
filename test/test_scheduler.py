"""Slots, sequences and the scheduler: plain Python, clocks driven by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from oxygen_ros.engine.scheduler import Scheduler, StepTimes
from oxygen_ros.engine.sequence import FinishReason, Frame, Sequence
from oxygen_ros.engine.slots import SlotLayout, SlotPool
from oxygen_ros.engine.tasks import LanguageTask

EOS = 1
MS = 1_000_000
FOREVER = 10**18


def task(name='text', *, prompt=(5, 6), period=1, length=4, max_age_ms=1000, priority=0):
    return LanguageTask(name, tuple(prompt), period, length, max_age_ms * MS, priority, True)


def scheduler(*tasks, num_slots=4, max_batch=8, max_draft=0):
    return Scheduler(
        tasks, num_slots=num_slots, max_batch=max_batch, eos_id=EOS, max_draft=max_draft
    )


def open_and_admit(s, number, now_ns=0):
    frame = s.open_frame(number, stamp_ns=number, prefix_len=10, now_ns=now_ns)
    return s.admit(frame, s.due(number))


def run_until_idle(s, token=7):
    steps = 0
    while batch := s.next_batch(0, FOREVER):
        s.commit(batch, [[token]] * len(batch), duration_ns=MS)
        steps += 1
        s.check_integrity()
    return steps


# --- slots ----------------------------------------------------------------------------------------


def test_a_slot_is_free_again_only_when_its_last_holder_lets_go():
    pool = SlotPool(2)
    slot = pool.allocate()
    pool.share(slot)
    pool.release(slot)
    assert pool.num_used == 1
    pool.release(slot)
    assert (pool.num_used, pool.num_free) == (0, 2)
    pool.check_integrity({})


def test_the_lowest_free_slot_is_taken_first():
    pool = SlotPool(4)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    pool.release(1)
    pool.release(0)
    assert pool.allocate() == 0


def test_a_slot_released_twice_is_caught():
    pool = SlotPool(2)
    pool.release(pool.allocate())
    with pytest.raises(KeyError):
        pool.release(0)


def test_integrity_fails_on_a_holder_that_nobody_knows():
    pool = SlotPool(2)
    pool.allocate()
    with pytest.raises(AssertionError, match='holders'):
        pool.check_integrity({})


def test_tails_lie_behind_the_prefix_and_never_overlap():
    tasks = (task('text', length=4), task('memory', prompt=(), length=9))
    layout = SlotLayout(100, tasks, horizon=3)
    frame = Frame(0, 0, slot=0, prefix_len=30, opened_ns=0)
    starts = [layout.tail_start(Sequence(t, frame, ())) for t in tasks]
    assert starts == [100, 100 + tasks[0].tail_len]
    assert layout.length == starts[1] + tasks[1].tail_len
    assert layout.prefix_start(30) == 70


def test_a_slot_is_long_enough_for_the_horizon_when_there_are_no_tails():
    assert SlotLayout(100, (), horizon=50).length == 150


# --- sequences ------------------------------------------------------------------------------------


def sequence(**kwargs):
    t = task(**kwargs)
    return Sequence(t, Frame(0, 0, 0, 10, 0), t.prompt_tokens)


def test_a_sequence_feeds_its_prompt_first_and_then_its_own_tokens():
    s = sequence(prompt=(5, 6))
    assert (s.pending, s.num_cached) == ((5, 6), 0)
    s.append(9, EOS)
    assert (s.pending, s.num_cached, s.tokens) == ((9,), 2, [9])


def test_the_end_token_ends_a_sequence_and_is_no_part_of_its_text():
    s = sequence()
    s.append(9, EOS)
    s.append(EOS, EOS)
    assert (s.tokens, s.finish_reason) == ([9], FinishReason.EOS)


def test_a_sequence_never_writes_more_rows_than_its_tail_has():
    s = sequence(prompt=(5, 6), length=4)
    while s.live:
        assert s.num_cached + len(s.pending) <= s.task.tail_len
        s.append(9, EOS)
    assert s.finish_reason == FinishReason.LENGTH
    assert len(s.tokens) == 4
    assert s.num_cached == s.task.tail_len


# --- admission ------------------------------------------------------------------------------------


def test_tasks_are_due_in_their_period():
    s = scheduler(task('text', period=2), task('memory', period=3), num_slots=20)
    due = [[q.task.name for q in open_and_admit(s, n)] for n in range(7)]
    assert due == [['text', 'memory'], [], ['text'], ['memory'], ['text'], [], ['text', 'memory']]


def test_text_and_memory_of_a_frame_share_its_slot():
    s = scheduler(task('text'), task('memory'))
    text, memory = open_and_admit(s, 0)
    assert text.frame.slot == memory.frame.slot
    assert s.pool.num_used == 1
    s.check_integrity()


def test_a_slot_outlives_the_shorter_of_its_sequences():
    s = scheduler(task('text', length=1), task('memory', length=3))
    open_and_admit(s, 0)
    s.commit(s.next_batch(0, FOREVER), [[7], [7]], MS)
    assert [q.task.name for q in s.live] == ['memory']
    assert s.pool.num_used == 1
    run_until_idle(s)
    assert s.pool.num_used == 0


def test_a_slot_is_always_left_for_the_next_frame_and_what_found_no_room_is_counted():
    s = scheduler(task('text'), task('memory'), num_slots=3)
    for number in range(6):
        open_and_admit(s, number)
        s.check_integrity()
        assert s.pool.num_free >= 1
    assert len(s.live) == 4
    assert s.drops == {'text_no_slot': 4, 'memory_no_slot': 4}


def test_an_abandoned_frame_gives_its_slot_back():
    s = scheduler(task())
    s.abandon(s.open_frame(0, 0, 10, 0))
    assert (s.pool.num_used, s.live) == (0, [])
    s.check_integrity()


def test_a_frame_without_due_tasks_holds_no_slot():
    s = scheduler(task(period=5))
    open_and_admit(s, 1)
    assert s.pool.num_used == 0


@pytest.mark.parametrize('kwargs', [{'num_slots': 1}, {'max_batch': 0}])
def test_a_size_that_cannot_work_is_refused(kwargs):
    with pytest.raises(ValueError, match=f'{next(iter(kwargs))} must be at least'):
        scheduler(task(), **kwargs)


# --- batches and deadlines ------------------------------------------------------------------------


def test_sequences_of_old_and_new_frames_stand_in_one_batch():
    s = scheduler(task(length=9))
    open_and_admit(s, 0)
    s.commit(s.next_batch(0, FOREVER), [[7]], MS)
    open_and_admit(s, 1)
    batch = s.next_batch(0, FOREVER)
    assert [(q.frame.number, len(q.tokens)) for q in batch] == [(0, 1), (1, 0)]


def test_a_full_batch_takes_priority_first_and_then_age():
    s = scheduler(task('text', priority=0), task('memory', priority=5), max_batch=3, num_slots=8)
    open_and_admit(s, 0)
    open_and_admit(s, 1)
    batch = s.next_batch(0, FOREVER)
    assert [(q.task.name, q.frame.number) for q in batch] == [
        ('memory', 0),
        ('memory', 1),
        ('text', 0),
    ]


def test_no_step_is_started_that_would_end_after_the_deadline():
    s = scheduler(task(length=100))
    open_and_admit(s, 0)
    for _ in range(5):
        s.commit(s.next_batch(0, FOREVER), [[7]], 10 * MS)
    assert s.next_batch(now_ns=90 * MS, deadline_ns=100 * MS)
    assert not s.next_batch(now_ns=91 * MS, deadline_ns=100 * MS)


def test_one_slow_step_does_not_stop_decoding():
    s = scheduler(task(length=100))
    open_and_admit(s, 0)
    for duration in (10, 10, 500, 10):
        s.commit(s.next_batch(0, FOREVER), [[7]], duration * MS)
    assert s.next_batch(now_ns=90 * MS, deadline_ns=100 * MS)


def test_a_machine_that_is_always_too_slow_still_makes_a_step_now_and_then():
    s = scheduler(task(length=100))
    open_and_admit(s, 0)
    s.commit(s.next_batch(0, FOREVER), [[7]], 100 * MS)
    stepped_at = []
    for number in range(1, 40):
        s.abandon(s.open_frame(number, number, 10, 0))
        for _ in range(3):  # asking again in the same frame starves nobody twice
            if batch := s.next_batch(now_ns=0, deadline_ns=30 * MS):
                stepped_at.append(number)
                s.commit(batch, [[7]], 100 * MS)
    assert stepped_at == [10, 20, 30]
    assert s.starved_frames == 9


def test_step_times_of_a_size_never_seen_come_from_the_nearest_one():
    times = StepTimes()
    assert times.expected_ns(4) == 0
    times.add(1, 10)
    times.add(8, 80)
    assert (times.expected_ns(2), times.expected_ns(16)) == (10, 80)


# --- ends -----------------------------------------------------------------------------------------


def test_a_sequence_that_is_too_old_is_given_up_counted_and_frees_its_slot():
    s = scheduler(task(max_age_ms=100))
    open_and_admit(s, 0, now_ns=0)
    assert s.expire(now_ns=100 * MS) == []
    (old,) = s.expire(now_ns=101 * MS)
    assert old.finish_reason == FinishReason.EXPIRED
    assert s.drops == {'text_expired': 1}
    assert s.pool.num_used == 0
    s.check_integrity()


@pytest.mark.parametrize('reason', [FinishReason.CANCELLED, FinishReason.SHUTDOWN])
def test_cancelling_ends_everything_with_its_reason(reason):
    s = scheduler(task('text'), task('memory'))
    open_and_admit(s, 0)
    open_and_admit(s, 1)
    ended = s.cancel(reason)
    assert {q.finish_reason for q in ended} == {reason}
    assert s.drops == {f'text_{reason.value}': 2, f'memory_{reason.value}': 2}
    assert (s.live, s.pool.num_used) == ([], 0)
    s.check_integrity()


def test_everything_admitted_ends_with_a_reason_and_all_slots_come_back():
    s = scheduler(task('text', length=5), task('memory', length=11, period=2), num_slots=3)
    admitted = []
    for number in range(200):
        admitted += open_and_admit(s, number)
        if number % 3:
            batch = s.next_batch(0, FOREVER)
            s.commit(batch, [[EOS if number % 7 == 0 else 7]] * len(batch), MS)
        s.check_integrity()
    run_until_idle(s)
    assert s.pool.num_used == 0
    ends = Counter(q.finish_reason for q in admitted)
    assert set(ends) == {FinishReason.EOS, FinishReason.LENGTH}
    no_slot = s.drops['text_no_slot'] + s.drops['memory_no_slot']
    assert len(admitted) + no_slot == 200 + 100
