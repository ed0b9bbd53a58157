"""Drafting proposes, greedy verification decides: the text never differs, only the passes do."""

from __future__ import annotations

import dataclasses
import random
import statistics

import numpy as np
import pytest
from test_engine import Live, finals, kinds, observation, task
from test_scheduler import EOS, FOREVER, MS, open_and_admit, scheduler
from test_scheduler import task as plain_task

from oxygen_ros.engine.drafting import DraftLength, propose
from oxygen_ros.engine.engine import NO_DEADLINE_NS


@pytest.mark.parametrize(
    'tokens, earlier, limit, expected',
    [
        ([], [1, 2, 3, 4], 2, (1, 2)),
        ([1, 2], [1, 2, 3, 4], 9, (3, 4)),
        ([1, 2], [], 9, ()),
        ([1, 2], [1, 2, 3], 0, ()),
        ([9], [1, 2, 3], 9, (2, 3)),  # another first token, the rest as before
        ([1, 9], [1, 2, 3], 9, (3,)),  # a token in place of another
        ([8, 9], [1, 2, 3], 9, ()),  # two new ones in a row: nothing to go by
        ([1, 2, 3], [1, 2, 3], 9, ()),  # the earlier text has no more to say
        ([9, 2, 3], [1, 2, 3, 4], 9, (4,)),  # another beginning, the same run
        ([7, 8, 2], [2, 5, 7, 8, 2, 6], 9, (6,)),  # the longest run counts
        ([0, 0, 0, 2], [2, 5, 0, 0, 2, 6], 9, (6,)),  # of equal runs the nearest position
    ],
)
def test_a_draft_is_what_followed_the_same_words_before(tokens, earlier, limit, expected):
    assert propose(tokens, earlier, limit) == expected


def test_a_draft_is_as_long_as_it_is_likely_to_be_right():
    lengths = {}
    for chance in (0.5, 0.8, 0.95):
        length, luck, seen = DraftLength(50), random.Random(0), []
        for _ in range(500):
            seen.append(length.tokens)
            right = next((n for n in range(seen[-1]) if luck.random() > chance), seen[-1])
            length.report(seen[-1], right)
        lengths[chance] = statistics.median(seen[100:])
    assert 1 <= lengths[0.5] <= 3 < lengths[0.8] <= 9 < lengths[0.95] <= 45


def test_a_task_whose_drafts_fail_drafts_one_token_and_one_that_succeeds_drafts_many():
    length = DraftLength(8)
    assert length.tokens == 8
    for _ in range(100):
        length.report(drafted=length.tokens, accepted=0)
    assert length.tokens == 1
    for _ in range(200):
        length.report(drafted=length.tokens, accepted=length.tokens)
    assert length.tokens == 8
    assert DraftLength(0).tokens == 0


class Author:
    """A deterministic stand-in for the model: the next token follows from the text so far."""

    def __init__(self, seed: int, vocabulary: int):
        self.seed, self.vocabulary = seed, vocabulary

    def next(self, frame: int, tokens: list[int]) -> int:
        # Frames of one group say the same until a word that differs per frame.
        group = frame // 3 if len(tokens) % 5 else frame
        return random.Random(f'{self.seed} {group} {tokens}').randrange(self.vocabulary)

    def predict(self, sequence) -> list[int]:
        told = [*sequence.tokens]
        predicted = [self.next(sequence.frame.number, told)]
        for token in sequence.draft:
            told.append(token)
            predicted.append(self.next(sequence.frame.number, told))
        return predicted


def texts(seed: int, max_draft: int) -> tuple[dict, int, int]:
    """Random texts of a dozen frames, decoded with random patience; also passes and accepted."""
    author = Author(seed, vocabulary=6)
    kind = plain_task(prompt=(2,) * (seed % 3), length=12)
    s = scheduler(kind, num_slots=5, max_draft=max_draft)
    admitted, passes = [], 0
    patience = random.Random(seed)
    for number in range(12):
        admitted += open_and_admit(s, number)
        last = number == 11
        for _ in range(10**6 if last else patience.randrange(8)):
            batch = s.next_batch(0, FOREVER)
            if not batch:
                break
            passes += 1
            s.commit(batch, [author.predict(sequence) for sequence in batch], MS)
            s.check_integrity()
    ends = {q.frame.number: (tuple(q.tokens), q.finish_reason) for q in admitted}
    return ends, passes, s.num_accepted


@pytest.mark.parametrize('seed', range(60))
def test_drafted_texts_are_token_for_token_the_undrafted_ones(seed):
    plain, _, _ = texts(seed, max_draft=0)
    drafted, _, _ = texts(seed, max_draft=1 + seed % 7)
    common = plain.keys() & drafted.keys()  # who finds room depends on how fast texts end
    assert {n: plain[n] for n in common} == {n: drafted[n] for n in common}
    assert len(common) > 3
    assert all(EOS not in tokens for tokens, _ in drafted.values())


def test_drafts_are_accepted_and_save_passes():
    passes, accepted = zip(*(texts(seed, 7)[1:] for seed in range(20)), strict=True)
    plain_passes = [texts(seed, 0)[1] for seed in range(20)]
    assert sum(accepted) > 100
    assert sum(passes) < sum(plain_passes)


def still_life(number: int):
    """Nearly the same picture every frame, as a robot at work sees it."""
    first = observation(0)
    images = {
        slot: np.clip(pixels + (number % 2), 0, 255).astype(np.uint8)
        for slot, pixels in first.images.items()
    }
    return dataclasses.replace(first, frame=number, stamp_ns=1000 + number, images=images)


def test_the_models_drafted_text_is_its_undrafted_text_in_fewer_passes():
    tasks = (task('text', length=20), task('memory', length=9, period=2))
    plain, drafted = Live(*tasks, num_slots=8), Live(*tasks, num_slots=8, max_draft=7)
    for number in range(8):
        for live in (plain, drafted):
            live.engine.step(still_life(number), live.clock.now_ns + 40 + 5 * 5)
    for live in (plain, drafted):
        live.engine.decode(NO_DEADLINE_NS)
    common = finals(plain).keys() & finals(drafted).keys()
    assert len(common) > 8
    assert {key: finals(plain)[key] for key in common} == {
        key: finals(drafted)[key] for key in common
    }
    stats = drafted.engine.stats
    assert stats.accepted > stats.drafted / 2 > 0
    assert kinds(drafted.log).count('decode') < 0.8 * kinds(plain.log).count('decode')
    drafted.scheduler.check_integrity()


def test_drafts_change_neither_streamed_deltas_nor_counters():
    live = Live(task('text', length=15), max_draft=7)
    for number in range(3):
        live.engine.step(still_life(number), NO_DEADLINE_NS)
        pieces = [u for u in live.updates if u.frame == number]
        assert ''.join(u.delta for u in pieces) == pieces[-1].text
        assert pieces[-1].num_tokens == 15
    assert live.engine.stats.tokens == 45
