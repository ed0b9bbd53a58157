"""LanguageTask: what a sequence of one kind may cost and how it is prompted.

Plain data in engine terms (tokens, frames, nanoseconds); topics and wording stay in the profile.
Made by `factory.py`, read by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LanguageTask:
    """One declared ability to write: the text of a frame, or its memory note."""

    name: str
    prompt_tokens: tuple[int, ...]
    """Appended causally behind the prefix; empty continues the prompt itself (OxyGen)."""
    period_frames: int
    """Due on every frame whose number is a multiple of it."""
    max_new_tokens: int
    max_age_ns: int
    """A sequence older than this is given up: it describes a world that is gone."""
    priority: int
    """Larger goes first when a decode batch or the slots are full."""
    stream: bool
    """Report every step, or only the finished text."""

    def __post_init__(self) -> None:
        for field in ('period_frames', 'max_new_tokens', 'max_age_ns'):
            if getattr(self, field) < 1:
                raise ValueError(
                    f'task {self.name}: {field} must be at least 1, got {getattr(self, field)}'
                )

    @property
    def tail_len(self) -> int:
        """Rows that a sequence writes at most: its prompt and all but the last new token."""
        return len(self.prompt_tokens) + self.max_new_tokens - 1
