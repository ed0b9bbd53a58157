"""What episodes amount to: rates with intervals, differences, a table, JSON and a picture.

Owns the arithmetic, the words and the drawing. Knows neither ROS nor the world; `episodes.py` and
`load.py` hand over plain records.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use('Agg')  # no window, also where there is a display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D
from rich.table import Table

Z_95 = 1.959964
# Okabe-Ito: told apart by everybody.
COLORS = {'unified': '#0072B2', 'shared': '#E69F00', 'isolated': '#D55E00'}
GREY = '#666666'
STYLE: Any = {
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'axes.axisbelow': True,
    'grid.alpha': 0.25,
    'legend.frameon': False,
    'font.size': 10,
}


@dataclass(frozen=True)
class Rate:
    """How often something held, with its 95 % interval (Wilson 1927)."""

    hits: int
    total: int

    @property
    def value(self) -> float:
        """NaN where nothing was counted."""
        return self.hits / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """All of [0, 1] where nothing was counted."""
        n = self.total
        if not n:
            return 0.0, 1.0
        squared = Z_95 * Z_95 / n
        centre = (self.value + squared / 2) / (1 + squared)
        spread = math.sqrt(self.value * (1 - self.value) / n + squared / (4 * n))
        half = Z_95 * spread / (1 + squared)
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        if not self.total:
            return '-'
        low, high = self.interval
        return f'{self.value:.1%} [{low:.1%}, {high:.1%}] of {self.total}'

    def as_json(self) -> dict[str, Any]:
        """Return plain numbers; `rate` is None where nothing was counted."""
        low, high = self.interval
        rate = self.value if self.total else None
        return {'rate': rate, 'low': low, 'high': high, 'hits': self.hits, 'total': self.total}


@dataclass(frozen=True)
class Verdict:
    """A text or note beside the truth of the frame that it is stamped with."""

    kind: str  # 'text' or 'memory'
    stamp_ns: int
    truth: str
    text: str | None  # None: never ended

    @property
    def exact(self) -> bool:
        """Whether it is, letter by letter, what a perfect observer would have written."""
        return self.text == self.truth


@dataclass(frozen=True)
class Said(Verdict):
    """One text or note that was due, and what became of it."""

    reason: str  # '' if it never ended
    age_ms: float  # from the tick to the end, wall clock; NaN if it never ended
    looks_later: int  # looks taken between its own and its end


def exact_rate(verdicts: Sequence[Verdict]) -> Rate:
    """Return how often texts or notes equal the truth; one that never ended does not."""
    return Rate(sum(one.exact for one in verdicts), len(verdicts))


@dataclass(frozen=True)
class Episode:
    """One episode as it was played."""

    seed: int
    instruction: str
    success: bool
    success_of_random: bool
    """Whether a block drawn without regard to the instruction counts as touched, no other hit. The
    same as to give a random instruction and to score a fixed block: the control."""
    duration_s: float  # simulated
    chunks: tuple[np.ndarray, ...]  # (horizon, joints) each [rad]
    commands: np.ndarray  # (n, joints) [rad], as obeyed
    joints: np.ndarray  # (looks, joints) [rad], as measured
    chunk_ms: tuple[float, ...]  # wall clock
    said: tuple[Said, ...]


@dataclass
class Run:
    """All episodes under one execution."""

    execution: str
    episodes: list[Episode] = field(default_factory=list)
    wall_s: float = 0.0
    lost_messages: int = 0
    """Images and joint states that the node never received."""
    interventions: dict[str, int] = field(default_factory=dict)
    """How often the command gate interfered, by reason, as the node counts."""
    drops: dict[str, int] = field(default_factory=dict)
    """What the node threw away, by reason, as it counts."""
    clamped_rows: int = 0
    """Rows beyond a position limit, as executed."""

    @property
    def success(self) -> Rate:
        return Rate(sum(e.success for e in self.episodes), len(self.episodes))

    @property
    def random_block(self) -> Rate:
        """Success of a random block: about 1/3 for a robot that obeys."""
        return Rate(sum(e.success_of_random for e in self.episodes), len(self.episodes))

    def said(self, kind: str) -> list[Said]:
        """Return all texts, or all notes, that were due."""
        return [said for e in self.episodes for said in e.said if said.kind == kind]

    def exact(self, kind: str) -> Rate:
        """Return how often texts or notes equal the truth; one that never ended does not."""
        return exact_rate(self.said(kind))

    def ages_ms(self, kind: str) -> np.ndarray:
        """Return the wall time (n,) from tick to end of all that ended."""
        ages = np.array([one.age_ms for one in self.said(kind)])
        return ages[np.isfinite(ages)]

    @property
    def endings(self) -> dict[str, int]:
        """Return how often texts and notes ended for each reason; '' did not end."""
        return dict(Counter(one.reason for e in self.episodes for one in e.said))

    @property
    def ticks_lost(self) -> int:
        return self.drops.get('tick_skipped', 0)

    @property
    def written_later(self) -> Rate:
        """Texts and notes that were complete only after a later look: batched across frames."""
        said = [one for e in self.episodes for one in e.said if one.text is not None]
        return Rate(sum(one.looks_later > 0 for one in said), len(said))

    @property
    def chunk_ms(self) -> np.ndarray:
        return np.array([took for e in self.episodes for took in e.chunk_ms])

    @property
    def num_steps(self) -> int:
        return sum(len(e.commands) for e in self.episodes)


def largest_difference(one: Run, other: Run) -> float:
    """Return the largest difference [rad] of any chunk, command or joint position.

    Infinite where the runs are not even equally long.
    """
    if [e.seed for e in one.episodes] != [e.seed for e in other.episodes]:
        return math.inf
    largest = 0.0
    for a, b in zip(one.episodes, other.episodes, strict=True):
        pairs = [(a.commands, b.commands), (a.joints, b.joints)]
        if len(a.chunks) != len(b.chunks):
            return math.inf
        pairs += list(zip(a.chunks, b.chunks, strict=True))
        for x, y in pairs:
            if x.shape != y.shape:
                return math.inf
            largest = max(largest, float(np.abs(x - y).max(initial=0.0)))
    return largest


def percentiles(values: np.ndarray, *ranks: float) -> list[float]:
    """Return percentiles; NaN without values."""
    if not len(values):
        return [math.nan] * len(ranks)
    return [float(value) for value in np.percentile(values, ranks)]


def pair(values: np.ndarray) -> str:
    """Return median and 95th percentile in words."""
    return '-' if not len(values) else ' / '.join(f'{p:.0f}' for p in percentiles(values, 50, 95))


def table(runs: Sequence[Run], title: str) -> Table:
    """One column per execution."""
    made = Table(title=title, title_justify='left')
    made.add_column('')
    for run in runs:
        made.add_column(run.execution)
    rows: list[tuple[str, list[str]]] = [
        ('success', [str(run.success) for run in runs]),
        ('text exact', [str(run.exact('text')) for run in runs]),
        ('note exact', [str(run.exact('memory')) for run in runs]),
        ('success of a random block', [str(run.random_block) for run in runs]),
        (f'largest difference to {runs[0].execution} [rad]', _differences(runs)),
        ('mean duration [simulated s]', [f'{_mean_duration_s(run):.2f}' for run in runs]),
        ('looks / control steps', [f'{len(run.chunk_ms)} / {run.num_steps}' for run in runs]),
        ('rows beyond a position limit', [str(run.clamped_rows) for run in runs]),
        ('texts and notes ended by', [_counts(run.endings) for run in runs]),
        ('commands the gate changed', [_counts(run.interventions) for run in runs]),
        ('ticks lost, messages lost', [f'{run.ticks_lost}, {run.lost_messages}' for run in runs]),
        ('live: tick to chunk p50 / p95 [ms]', [pair(run.chunk_ms) for run in runs]),
        ('live: tick to text p50 / p95 [ms]', [pair(run.ages_ms('text')) for run in runs]),
        ('live: tick to note p50 / p95 [ms]', [pair(run.ages_ms('memory')) for run in runs]),
        ('live: ended after a later look', [f'{run.written_later.value:.0%}' for run in runs]),
        ('live: control steps per second', [f'{run.num_steps / run.wall_s:.0f}' for run in runs]),
    ]
    for name, cells in rows:
        made.add_row(name, *cells)
    return made


def _differences(runs: Sequence[Run]) -> list[str]:
    return ['-', *(f'{largest_difference(runs[0], run):g}' for run in runs[1:])]


def _mean_duration_s(run: Run) -> float:
    return float(np.mean([e.duration_s for e in run.episodes])) if run.episodes else math.nan


def _counts(counts: Mapping[str, int]) -> str:
    return ', '.join(f'{count} {reason or "never"}' for reason, count in counts.items()) or '0'


def as_json(runs: Sequence[Run], setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything but the arrays, ready for json.dumps."""
    return {
        'setting': dict(setting),
        'runs': {run.execution: _run_as_json(run) for run in runs},
        'largest_difference_rad': {
            run.execution: _finite(largest_difference(runs[0], run)) for run in runs[1:]
        },
    }


def _run_as_json(run: Run) -> dict[str, Any]:
    return {
        'success': run.success.as_json(),
        'text_exact': run.exact('text').as_json(),
        'note_exact': run.exact('memory').as_json(),
        'success_of_random_block': run.random_block.as_json(),
        'looks': len(run.chunk_ms),
        'control_steps': run.num_steps,
        'wall_s': round(run.wall_s, 2),
        'lost_messages': run.lost_messages,
        'ticks_lost': run.ticks_lost,
        'endings': run.endings,
        'interventions': run.interventions,
        'drops': run.drops,
        'clamped_rows': run.clamped_rows,
        'ended_after_a_later_look': run.written_later.as_json(),
        'chunk_ms': _quantiles(run.chunk_ms),
        'text_age_ms': _quantiles(run.ages_ms('text')),
        'note_age_ms': _quantiles(run.ages_ms('memory')),
        'failed_seeds': [e.seed for e in run.episodes if not e.success],
    }


def _quantiles(values: np.ndarray) -> dict[str, float | None]:
    names = ('p50', 'p95', 'max')
    return {
        name: _finite(round(value, 3))
        for name, value in zip(names, percentiles(values, 50, 95, 100), strict=True)
    }


def _finite(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def save_plot(path: Path, runs: Sequence[Run], title: str, setting: str) -> None:
    """Draw rates with their intervals, and when words are there."""
    with plt.rc_context(STYLE):
        figure, (rates, ages) = plt.subplots(
            1, 2, figsize=(12, 4.6), layout='constrained', width_ratios=(3, 2)
        )
        _draw_rates(rates, runs)
        _draw_ages(ages, runs)
        figure.suptitle(title, fontsize=13, x=0.01, ha='left', fontweight='bold')
        rates.set_title(setting, fontsize=9, loc='left')
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _draw_rates(axes: Any, runs: Sequence[Run]) -> None:
    names = ('success', 'text exact', 'note exact', 'random block')
    width = 0.8 / len(runs)
    for number, run in enumerate(runs):
        rates = (run.success, run.exact('text'), run.exact('memory'), run.random_block)
        x = np.arange(len(names)) + (number - (len(runs) - 1) / 2) * width
        heights = np.array([rate.value if rate.total else 0.0 for rate in rates])
        low, high = np.array([rate.interval for rate in rates]).T
        axes.bar(x, heights, 0.9 * width, color=COLORS[run.execution], label=run.execution)
        errors = np.maximum([heights - low, high - heights], 0.0)
        axes.errorbar(x, heights, errors, fmt='none', ecolor='black', capsize=3, linewidth=1)
        for at, height, top in zip(x, heights, high, strict=True):
            axes.text(at, top + 0.015, f'{100 * height:.3g}', ha='center', fontsize=8)
    axes.axhline(1 / 3, color=GREY, linestyle=':', linewidth=1)
    axes.text(-0.58, 1 / 3 + 0.01, 'chance', color=GREY, fontsize=8, ha='left')
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 1.12)
    axes.set_yticks(np.linspace(0, 1, 6), range(0, 101, 20))
    axes.set_ylabel('share [%], 95 % interval')
    axes.legend(loc='upper right', fontsize=9)


def _draw_ages(axes: Any, runs: Sequence[Run]) -> None:
    for run in runs:
        color = COLORS[run.execution]
        for values, style in (
            (run.chunk_ms, '-'),
            (run.ages_ms('text'), '--'),
            (run.ages_ms('memory'), ':'),
        ):
            shares = np.arange(1, len(values) + 1) / max(1, len(values))
            axes.plot(np.sort(values), shares, style, color=color)
    axes.set_xlim(left=0)
    axes.set_xlabel('from tick to its end, wall clock [ms]')
    axes.set_ylabel('share done by then')
    axes.set_title('live: measured on this machine', fontsize=9, loc='left')
    # The colours are told by the other panel.
    lines = [Line2D([], [], color=GREY, linestyle=style) for style in ('-', '--', ':')]
    axes.legend(lines, ('chunk', 'text', 'note'), loc='lower right', fontsize=9)
