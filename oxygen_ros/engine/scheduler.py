"""Scheduler: which frame gets a slot, which sequence a place, and when decoding has to stop.

All policy of the engine and none of its arithmetic: standard library only, time is passed in.
Owned and called by `engine.py` on the frame thread.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from oxygen_ros.engine.drafting import DraftLength, propose
from oxygen_ros.engine.sequence import FinishReason, Frame, Sequence
from oxygen_ros.engine.slots import SlotPool
from oxygen_ros.engine.tasks import LanguageTask


class StepTimes:
    """How long a decode step of a given number of rows is expected to take.

    Sizes are told apart by powers of two, so that every estimate is fresh. It is the second longest
    of the last few steps of that size: on the safe side, yet a single hiccup does not count.
    """

    WINDOW = 5

    def __init__(self) -> None:
        self._recent: dict[int, deque[int]] = {}

    def add(self, num_rows: int, duration_ns: int) -> None:
        size = num_rows.bit_length()
        self._recent.setdefault(size, deque(maxlen=self.WINDOW)).append(duration_ns)

    def expected_ns(self, num_rows: int) -> int:
        """Return the estimate for this size, else for the nearest size seen, else 0 (try it)."""
        if not self._recent:
            return 0
        nearest = min(self._recent, key=lambda size: abs(size - num_rows.bit_length()))
        longest = sorted(self._recent[nearest])
        return longest[-2] if len(longest) > 1 else longest[-1]


class Scheduler:
    """Opens frames, admits sequences, picks decode batches, retires what is done.

    One slot is always kept free for the next frame: text may wait for memory, actions never do.
    """

    MAX_STARVED_FRAMES = 10
    """After so many frames in a row without time for a decode step one is made all the same: an
    overloaded machine writes slowly instead of never."""

    def __init__(
        self,
        tasks: Iterable[LanguageTask],
        *,
        num_slots: int,
        max_batch: int,
        eos_id: int,
        max_draft: int,
    ) -> None:
        if num_slots < 2:
            raise ValueError(
                f'num_slots must be at least 2 (one is kept free for the next frame), '
                f'got {num_slots}'
            )
        if max_batch < 1:
            raise ValueError(f'max_batch must be at least 1, got {max_batch}')
        self.tasks = tuple(sorted(tasks, key=lambda task: -task.priority))
        self.pool = SlotPool(num_slots)
        self.live: list[Sequence] = []
        self.drops: Counter[str] = Counter()
        self._max_batch = max_batch
        self._eos_id = eos_id
        self._step_times = StepTimes()
        self._max_draft = max_draft
        self._draft_lengths = self._new_draft_lengths()
        self._earlier: dict[str, list[int]] = {task.name: [] for task in self.tasks}
        self.num_drafted = self.num_accepted = 0
        self._open: Frame | None = None
        self._stepped = True
        self.starved_frames = 0
        """Frames in a row that left no time for a single decode step of a live sequence."""

    # --- frames -------------------------------------------------------------------------------

    def open_frame(self, number: int, stamp_ns: int, prefix_len: int, now_ns: int) -> Frame:
        """Take a slot for a new frame; close it with `admit` or `abandon`."""
        assert self._open is None, 'the previous frame is still open'
        self._open = Frame(number, stamp_ns, self.pool.allocate(), prefix_len, now_ns)
        self._stepped = False
        return self._open

    def due(self, number: int) -> list[LanguageTask]:
        """Return the tasks that the frame of this number owes, higher priority first."""
        return [task for task in self.tasks if number % task.period_frames == 0]

    def admit(self, frame: Frame, due: list[LanguageTask]) -> list[Sequence]:
        """Give the open frame's slot over to sequences of the `due` tasks, and close the frame.

        Tasks that find no room are counted in `drops`.
        """
        if due and not self.can_admit():
            self.drops.update(f'{task.name}_no_slot' for task in due)
            due = []
        admitted = [Sequence(task, frame, pending=task.prompt_tokens) for task in due]
        for sequence in admitted:
            self.pool.share(frame.slot)
            sequence.earlier = self._earlier[sequence.task.name]
            self._earlier[sequence.task.name] = sequence.tokens
        self.live += admitted
        self._close(frame)
        return admitted

    def can_admit(self) -> bool:
        """True if the open frame may keep its slot and one is still left for the next frame."""
        return self.pool.num_free >= 1

    def abandon(self, frame: Frame) -> None:
        """Close the open frame without any sequence."""
        self._close(frame)

    def _close(self, frame: Frame) -> None:
        assert self._open is frame
        self._open = None
        self.pool.release(frame.slot)

    # --- decoding -----------------------------------------------------------------------------

    def next_batch(self, now_ns: int, deadline_ns: int) -> list[Sequence]:
        """Return the sequences for one more step, or none if it would not end by the deadline.

        Higher priority first, then the oldest frame.
        """
        batch = sorted(self.live, key=lambda s: (-s.task.priority, s.frame.number))
        batch = batch[: self._max_batch]
        for sequence in batch:
            limit = min(self._draft_lengths[sequence.task.name].tokens, sequence.max_draft)
            sequence.draft = propose(sequence.tokens, sequence.earlier, limit)
        if batch and not self._may_step(batch, now_ns, deadline_ns):
            self.starved_frames += not self._stepped
            self._stepped = True  # counted once per frame
            return []
        return batch

    def _may_step(self, batch: SequenceOf[Sequence], now_ns: int, deadline_ns: int) -> bool:
        if self.starved_frames >= self.MAX_STARVED_FRAMES:
            return True
        return now_ns + self._step_times.expected_ns(_num_rows(batch)) <= deadline_ns

    def commit(
        self,
        batch: SequenceOf[Sequence],
        predicted: SequenceOf[SequenceOf[int]],
        duration_ns: int,
    ) -> int:
        """Take the predictions of a pass (see `Sequence.accept`), retire what is done.

        Returns the number of new tokens, end tokens included.
        """
        self._step_times.add(_num_rows(batch), duration_ns)
        self._stepped, self.starved_frames = True, 0
        num_tokens = 0
        for sequence, tokens in zip(batch, predicted, strict=True):
            drafted = len(sequence.draft)
            accepted = sequence.accept(tokens, self._eos_id)
            num_tokens += accepted + 1
            if drafted:
                self._draft_lengths[sequence.task.name].report(drafted, accepted)
                self.num_drafted += drafted
                self.num_accepted += accepted
        self._retire()
        return num_tokens

    def expire(self, now_ns: int) -> list[Sequence]:
        """Give up sequences that are older than their task allows; they are counted in `drops`."""
        old = [s for s in self.live if now_ns - s.frame.opened_ns > s.task.max_age_ns]
        for sequence in old:
            sequence.finish_reason = FinishReason.EXPIRED
            self.drops[f'{sequence.task.name}_expired'] += 1
        self._retire()
        return old

    def cancel(self, reason: FinishReason) -> list[Sequence]:
        """End every live sequence; they are counted in `drops` by task and reason."""
        ended = list(self.live)
        for sequence in ended:
            sequence.finish_reason = reason
            self.drops[f'{sequence.task.name}_{reason.value}'] += 1
        self._retire()
        return ended

    def forget(self) -> None:
        """Forget texts, draft lengths and counters, when all sequences have ended."""
        assert not self.live
        self._earlier = {name: [] for name in self._earlier}
        self._draft_lengths = self._new_draft_lengths()
        self.num_drafted = self.num_accepted = self.starved_frames = 0
        self.drops.clear()

    def _new_draft_lengths(self) -> dict[str, DraftLength]:
        return {task.name: DraftLength(self._max_draft) for task in self.tasks}

    def _retire(self) -> None:
        for sequence in self.live:
            if not sequence.live:
                self.pool.release(sequence.frame.slot)
        self.live = [sequence for sequence in self.live if sequence.live]

    def check_integrity(self) -> None:
        """Assert that exactly the open frame and the live sequences hold slots."""
        holders = Counter(sequence.frame.slot for sequence in self.live)
        if self._open is not None:
            holders[self._open.slot] += 1
        self.pool.check_integrity(dict(holders))


def _num_rows(batch: Iterable[Sequence]) -> int:
    return sum(max(1, len(sequence.fed)) for sequence in batch)
