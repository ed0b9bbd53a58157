"""Drafting: the previous frame's text proposes the next words of this frame's.

What a robot says of one frame is mostly what it said of the frame before, so several tokens can be
checked in one pass. Greedy verification keeps the text what it would have been without a draft.
Standard library only. The scheduler asks for drafts and reports what came of them. (Prompt lookup
decoding, with the previous text as the prompt.)
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

MAX_MATCH = 3
"""Longest run of own tokens that is looked up in the earlier text."""


def propose(tokens: SequenceOf[int], earlier: SequenceOf[int], limit: int) -> tuple[int, ...]:
    """Return at most `limit` tokens that may follow `tokens`, taken from an `earlier` text.

    The last few tokens are looked up in it, the longest run first, and of several places the one
    nearest to the same position; an empty text begins like the earlier one.
    """
    if limit < 1 or not earlier:
        return ()
    if not tokens:
        return tuple(earlier[:limit])
    for length in range(min(MAX_MATCH, len(tokens)), 0, -1):
        run = list(tokens[-length:])
        ends = [
            end for end in range(length, len(earlier)) if list(earlier[end - length : end]) == run
        ]
        if ends:
            end = min(ends, key=lambda end: abs(end - len(tokens)))
            return tuple(earlier[end : end + limit])
    return ()


class DraftLength:
    """How many tokens are worth drafting for one task, by how many were right lately.

    Rows of a pass are cheap but not free: a task whose texts do not resemble each other falls back
    to a single drafted token, which is enough to notice when they do again.
    """

    MEMORY = 0.9

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._share = 1.0

    @property
    def tokens(self) -> int:
        """How many tokens to draft now; 0 only if drafting is off."""
        return min(self._longest, max(1, round(self._longest * min(1.0, 2 * self._share))))

    def report(self, drafted: int, accepted: int) -> None:
        """Learn from one verified draft."""
        weight = self.MEMORY**drafted
        self._share = weight * self._share + (1 - weight) * accepted / drafted
