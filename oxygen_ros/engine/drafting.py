"""Drafting: the previous frame's text proposes the next words of this frame's.

What a robot says of one frame is mostly what it said of the frame before, so several tokens can be
checked in one pass. Greedy verification keeps the text what it would have been without a draft.
Standard library only. The scheduler asks for drafts and reports what came of them. (Prompt lookup
decoding, with the previous text as the prompt.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

MAX_MATCH = 3
"""Longest run of own tokens that is looked up in the earlier text."""


def propose(tokens: SequenceOf[int], earlier: SequenceOf[int], limit: int) -> tuple[int, ...]:
    """Return at most `limit` tokens that may follow `tokens`, taken from an `earlier` text.

    The last few tokens are looked up in it, the longest run first, and of several places the one
    nearest to the same position; an empty text begins like the earlier one. If the last token is
    new, it is taken to stand in place of another: what is looked up are those before it.
    """
    for changed in (0, 1):
        known = tokens[: len(tokens) - changed]
        end = _end_of_run(known, earlier)
        if end is not None:
            return tuple(earlier[end + changed :][: max(0, limit)])
    return ()


def _end_of_run(tokens: SequenceOf[int], earlier: SequenceOf[int]) -> int | None:
    """Return where the last few `tokens` end in the earlier text, before its last token."""
    if not tokens:
        return 0
    for length in range(min(MAX_MATCH, len(tokens)), 0, -1):
        run = list(tokens[-length:])
        ends = [
            end for end in range(length, len(earlier)) if list(earlier[end - length : end]) == run
        ]
        if ends:
            return min(ends, key=lambda end: abs(end - len(tokens)))
    return None


class DraftLength:
    """How many tokens are worth drafting for one task, by how many were right lately.

    A row of a pass is cheap but not free. A task whose texts do not resemble each other falls back
    to a single drafted token, which is enough to notice when they do again.
    """

    MEMORY = 0.98
    WORTH = 0.2
    """Least chance of being right, together with all before it, for which a token is drafted."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._chance = 1.0
        """Of a drafted token, if those before it are right."""

    @property
    def tokens(self) -> int:
        """How many tokens to draft now; 0 only if drafting is off."""
        if self._chance**self._longest >= self.WORTH:
            return self._longest
        return max(1, int(math.log(self.WORTH) / math.log(self._chance)))

    def report(self, drafted: int, accepted: int) -> None:
        """Learn from one verified draft; what stands behind a wrong token says nothing."""
        weight = self.MEMORY**accepted
        self._chance = weight * self._chance + (1 - weight)
        if accepted < drafted:
            self._chance *= self.MEMORY
