"""Frame and Sequence: the two things the scheduler moves.

A frame owns one slot from prefill until its last reader is done; a sequence is one text growing in
a tail of that slot. Neither knows tensors, tokenizers or time limits. Written by the scheduler,
read by the model runner.
"""

from __future__ import annotations

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

    Rows [0, num_cached) of its tail hold K/V; `pending` are the tokens whose K/V come next. A
    sequence without pending tokens takes its first token from the last row of the prefix.
    """

    task: LanguageTask
    frame: Frame
    pending: tuple[int, ...]
    num_cached: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def live(self) -> bool:
        return self.finish_reason is None

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
