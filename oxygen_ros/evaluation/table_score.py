"""How the policy does at the simulated table: what it was told, what it touched, what it said.

Owns the operator's plan (which block next, and when) and the score against the table's own truth.
Knows no topics; `tabletop_stage.py` feeds it, `dashboard.py` and `film.py` read it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from oxygen_ros.conversions import stamp_to_ns
from oxygen_ros.evaluation.episode_report import Rate, Verdict, exact_rate
from oxygen_ros.sim.world import COLOURS, CONTROL_HZ, INSTRUCTIONS, TOUCH_S

COMPLETE = ('eos', 'length')
"""Reasons of an ending that leave a whole text."""
LIMIT_S = 10.0
"""An instruction that was not fulfilled by then makes room for the next one."""
HOLD_S = 1.2
"""So long the finger stays on a block, so that the text can say so."""
UNSETTLED_NS = (-300_000_000, 100_000_000)
"""A picture so long before or after a new instruction may have been looked at under either one."""
CAMERA_PERIOD_NS = 1_000_000_000 // CONTROL_HZ


def instructions(seed: int) -> Iterator[tuple[str, str]]:
    """Yield (colour, instruction) for ever: all blocks in turn, in another order every time."""
    rng = np.random.default_rng((seed, 2))
    last = ''
    while True:
        order = [COLOURS[i] for i in rng.permutation(len(COLOURS))]
        if order[0] == last:  # it is there already
            order.reverse()
        for colour in order:
            yield colour, INSTRUCTIONS[rng.integers(len(INSTRUCTIONS))].format(colour)
        last = order[-1]


@dataclass
class Attempt:
    """One instruction, and what came of it; times since the measuring began."""

    colour: str
    instruction: str
    began_s: float
    touched_s: float | None = None

    def is_over(self, now_s: float) -> bool:
        """Whether the block was touched and held, or the time is up."""
        if self.touched_s is not None:
            return now_s >= self.touched_s + HOLD_S
        return now_s >= self.began_s + LIMIT_S

    @property
    def took_s(self) -> float | None:
        """From the instruction to the touch; None without one."""
        return None if self.touched_s is None else self.touched_s - self.began_s


class TruthLog:
    """One kind of truth, told again and again, to be looked up by the stamp of a picture.

    The table publishes it right after the pictures of the same moment. It has no stamp, but DDS
    tells when it was published.
    """

    def __init__(self, most_after_ns: int) -> None:
        """`most_after_ns`: a truth that was told later is not about the picture any more."""
        self._most_after_ns = most_after_ns
        self._times_ns: list[int] = []
        self._texts: list[str] = []

    def put(self, published_ns: int, text: str) -> None:
        """Take the next one; times grow."""
        self._times_ns.append(published_ns)
        self._texts.append(text)

    def find(self, stamp_ns: int) -> str | None:
        """Return the truth about a picture; None if there is none."""
        index = bisect_left(self._times_ns, stamp_ns)
        if index == len(self._times_ns) or self._times_ns[index] > stamp_ns + self._most_after_ns:
            return None
        return self._texts[index]


class TableScore:
    """Filled by callbacks of one thread and by the operator of another, read by both."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.said: dict[str, list[Verdict]] = {'text': [], 'memory': []}
        """What could be compared, by kind of task."""
        self.num_not_compared = 0
        """Complete texts that began around a new instruction, or whose truth did not arrive."""
        self.truths = {kind: TruthLog(CAMERA_PERIOD_NS) for kind in ('text', 'memory')}
        self._instructed_ns = 0

    def instruct(self, colour: str, instruction: str, now_s: float) -> None:
        """Note that something else is to be touched from now on."""
        self._instructed_ns = time.time_ns()
        self.attempts.append(Attempt(colour, instruction, now_s))

    def touch(self, colours: list[str], now_s: float) -> None:
        """Note what the table says has been touched since the instruction."""
        if not self.attempts:
            return
        attempt = self.attempts[-1]
        # No touch is shorter, so what is told earlier is about the instruction before.
        is_news = now_s >= attempt.began_s + TOUCH_S
        if is_news and attempt.touched_s is None and attempt.colour in colours:
            attempt.touched_s = now_s

    def hear(self, message: Any, kind: str) -> Verdict | None:
        """Compare a complete Text or Note with the truth; None where that cannot be done."""
        if not self.attempts or message.reason not in COMPLETE:
            return None
        stamp_ns = stamp_to_ns(message.header.stamp)
        truth = self.truths[kind].find(stamp_ns)
        low_ns, high_ns = UNSETTLED_NS
        unsettled = kind == 'text' and low_ns < stamp_ns - self._instructed_ns < high_ns
        if truth is None or unsettled:
            self.num_not_compared += 1
            return None
        verdict = Verdict(kind, stamp_ns, truth, message.text)
        self.said[kind].append(verdict)
        return verdict

    def finished(self, now_s: float) -> list[Attempt]:
        """Return the attempts that succeeded or ran out of time; the last may be under way."""
        return [
            attempt
            for attempt in self.attempts
            if attempt.touched_s is not None
            or attempt is not self.attempts[-1]
            or attempt.is_over(now_s)
        ]

    @property
    def touches_s(self) -> list[float]:
        """When, since the measuring began."""
        return [attempt.touched_s for attempt in self.attempts if attempt.touched_s is not None]

    def exact(self, kind: str) -> Rate:
        """Return how often a complete text or note was exactly the truth."""
        return exact_rate(self.said[kind])
