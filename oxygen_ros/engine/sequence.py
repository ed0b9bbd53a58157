"""Frame and Sequence: the two things the scheduler moves.

A frame owns one slot from prefill until its last reader is done; a sequence is one text growing in
a tail of that slot. Neither knows tensors, tokenizers or time limits. Written by the scheduler,
read by the model runner.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum

from oxygen_ros.engine.tasks import LanguageTask


class FinishReason(str, Enum):
    """Why a sequence ended; the value is what subscribers read."""

    EOS = 'eos'
    LENGTH = 'length'
    EXPIRED = 'expired'
    CANCELLED = 'cancelled'
    SHUTDOWN = 'shutdown'

    @property
    def complete(self) -> bool:
        """True if the model itself came to the end it was allowed."""
        return self in (FinishReason.EOS, FinishReason.LENGTH)


@dataclass(frozen=True)
class Frame:
    """One observation inside the engine."""

    number: int
    stamp_ns: int
    slot: int
    prefix_len: int
    opened_ns: int
    """When it was opened, on the engine's clock."""


@dataclass(eq=False)
class Sequence:
    """One text or memory generation of one frame.

    Rows [0, num_cached) of its tail hold K/V; `pending` are the tokens whose K/V come next, and
    `draft` is what may come behind them, fed in the same pass to be verified. A sequence without
    pending tokens takes its first token from the last row of the prefix.
    """

    task: LanguageTask
    frame: Frame
    pending: tuple[int, ...]
    num_cached: int = 0
    tokens: list[int] = field(default_factory=list)
    earlier: list[int] = field(default_factory=list)
    """Tokens of the text of this task before this one; may itself still grow."""
    draft: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None

    @property
    def live(self) -> bool:
        return self.finish_reason is None

    @property
    def fed(self) -> tuple[int, ...]:
        """The tokens of the next pass, one row each."""
        return self.pending + self.draft

    @property
    def max_draft(self) -> int:
        """Tokens that may be drafted without running past the allowed length."""
        return self.task.max_new_tokens - len(self.tokens) - 1

    def accept(self, predicted: SequenceOf[int], eos_id: int) -> int:
        """Take what a pass predicted behind the pending tokens and behind each drafted one.

        A prediction counts as long as every drafted token before it was right. Rows of wrong ones
        are written again by the next pass. Returns how many drafted tokens were right.
        """
        draft, self.draft = self.draft, ()
        for num_right, token in enumerate(predicted):
            self.append(token, eos_id)
            if not self.live or num_right == len(draft) or token != draft[num_right]:
                return num_right
        raise AssertionError('one prediction more than drafted tokens is expected')

    def append(self, token: int, eos_id: int) -> None:
        """Take the token that the pending ones led to; the end-of-sequence token is not kept."""
        assert self.live
        self.num_cached += len(self.pending)
        if token == eos_id:
            self.finish_reason = FinishReason.EOS
            return
        self.tokens.append(token)
        self.pending = (token,)
        if len(self.tokens) == self.task.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH
