"""Slots: who holds which, and which row of a slot means what.

A slot is the KV memory of one frame. The pool counts holders and knows no tensor; the layout says
which row a tail begins at. Used by the scheduler (pool) and the model runner (layout).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from oxygen_ros.engine.sequence import Sequence
from oxygen_ros.engine.tasks import LanguageTask


class SlotLayout:
    """The rows of one slot.

        [      prefix      |  text tail  |  memory tail  ]
        0                prefix_capacity              length

    A prefix of n tokens stands right-aligned in [prefix_capacity - n, prefix_capacity), so prefix
    and first tail are one contiguous span whatever n is. The action expert's scratch rows are the
    first `horizon` rows behind the prefix: a frame is denoised before its first sequence is
    admitted, so scratch and tails never live at the same time, and denoising reads one plain view.
    """

    def __init__(self, prefix_capacity: int, tasks: Iterable[LanguageTask], horizon: int) -> None:
        self.prefix_capacity = prefix_capacity
        self._tail_start: dict[str, int] = {}
        end = prefix_capacity
        for task in tasks:
            self._tail_start[task.name] = end
            end += task.tail_len
        self.length = max(end, prefix_capacity + horizon)

    def prefix_start(self, prefix_len: int) -> int:
        return self.prefix_capacity - prefix_len

    def tail_start(self, sequence: Sequence) -> int:
        return self._tail_start[sequence.task.name]


class SlotPool:
    """Hands out slots by number, lowest first, and frees one with its last holder.

    Lowest first keeps the live slots together at the front of the KV tensor, so a decode batch is
    a plain slice of it.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f'num_slots must be at least 1, got {num_slots}')
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._holders: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._holders)

    def allocate(self) -> int:
        """Take the lowest free slot for one holder; ask `num_free` first."""
        assert self._free, 'allocate() without a free slot'
        slot = heapq.heappop(self._free)
        self._holders[slot] = 1
        return slot

    def share(self, slot: int) -> None:
        """Add a holder to a used slot."""
        self._holders[slot] += 1

    def release(self, slot: int) -> None:
        """Drop a holder; the slot is free when it was the last."""
        self._holders[slot] -= 1
        if not self._holders[slot]:
            del self._holders[slot]
            heapq.heappush(self._free, slot)

    def check_integrity(self, holders: dict[int, int]) -> None:
        """Assert that free and used slots are all slots, and that each has the `holders` given."""
        assert self._holders == holders, f'holders {self._holders}, expected {holders}'
        assert sorted([*self._free, *self._holders]) == list(range(self.num_slots)), (
            f'free {sorted(self._free)} and used {sorted(self._holders)} are not all '
            f'{self.num_slots} slots once'
        )
