"""What the real-time comparison under load amounts to: table, JSON and picture.

Owns the arithmetic and the drawing; `load.py` fills the records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from rich.table import Table

from oxygen_ros.evaluation.episode_report import COLORS, GREY, STYLE, Rate, pair, percentiles


@dataclass(frozen=True)
class SaidLive:
    """One text or note that came to an end."""

    kind: str
    exact: bool
    complete: bool
    """False if it was given up."""
    age_ms: float  # from the stamp of what it describes to its end
    later: bool = False
    """Whether the chunk of a later look came before it ended: it was written across frames."""


@dataclass
class LoadRun:
    """What was measured under one execution; pauses between episodes are left out."""

    execution: str
    due_hz: float
    """Frames that the profile asks for."""
    recorded_s: float = 0.0
    num_chunks: int = 0
    successes: list[bool] = field(default_factory=list)
    chunk_ms: list[float] = field(default_factory=list)
    """From the stamp of the observation to the chunk."""
    ages_ms: list[float] = field(default_factory=list)
    """Age of the newest chunk's observation, at 50 Hz: how old the view is that commands follow."""
    said: list[SaidLive] = field(default_factory=list)
    drops: dict[str, int] = field(default_factory=dict)
    lateness_p99_ms: float = math.nan
    """Of the command tick, over the last 2048 commands."""

    @property
    def chunk_hz(self) -> float:
        return self.num_chunks / self.recorded_s if self.recorded_s else math.nan

    @property
    def ticks_lost(self) -> float:
        """Share of the due frames that were never taken."""
        return max(0.0, 1.0 - self.chunk_hz / self.due_hz)

    @property
    def success(self) -> Rate:
        return Rate(sum(self.successes), len(self.successes))

    @property
    def complete_per_s(self) -> float:
        complete = sum(one.complete for one in self.said)
        return complete / self.recorded_s if self.recorded_s else math.nan

    def exact(self, kind: str) -> Rate:
        """Return how often complete texts or notes equal the truth of their frame."""
        said = [one for one in self.said if one.kind == kind and one.complete]
        return Rate(sum(one.exact for one in said), len(said))

    @property
    def written_later(self) -> Rate:
        """Return how many complete texts and notes were written across frames."""
        complete = [one for one in self.said if one.complete]
        return Rate(sum(one.later for one in complete), len(complete))

    @property
    def text_ms(self) -> np.ndarray:
        """Return how old complete texts and notes were at their end (n,)."""
        return np.array([one.age_ms for one in self.said if one.complete])


def table(runs: Sequence[LoadRun], title: str) -> Table:
    """One column per execution."""
    made = Table(title=title, title_justify='left')
    made.add_column('')
    for run in runs:
        made.add_column(run.execution)
    for name, cells in (
        (f'chunks per second, of {runs[0].due_hz:g}', [f'{run.chunk_hz:.2f}' for run in runs]),
        ('ticks lost', [f'{run.ticks_lost:.1%}' for run in runs]),
        ('look to chunk p50 / p95 [ms]', [pair(np.array(run.chunk_ms)) for run in runs]),
        ('age of the view that commands follow [ms]', [pair(np.array(r.ages_ms)) for r in runs]),
        ('look to end of text p50 / p95 [ms]', [pair(run.text_ms) for run in runs]),
        ('ended after a later chunk', [f'{run.written_later.value:.0%}' for run in runs]),
        ('texts and notes per second', [f'{run.complete_per_s:.1f}' for run in runs]),
        ('text exact', [str(run.exact('text')) for run in runs]),
        ('note exact', [str(run.exact('memory')) for run in runs]),
        ('success', [str(run.success) for run in runs]),
        ('command lateness p99 [ms]', [f'{run.lateness_p99_ms:.2f}' for run in runs]),
    ):
        made.add_row(name, *cells)
    return made


def as_json(runs: Sequence[LoadRun], setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything, ready for json.dumps."""
    return {'setting': dict(setting), 'runs': {run.execution: _as_json(run) for run in runs}}


def _as_json(run: LoadRun) -> dict[str, Any]:
    return {
        'chunk_hz': run.chunk_hz,
        'due_hz': run.due_hz,
        'ticks_lost': run.ticks_lost,
        'chunk_ms': _quantiles(run.chunk_ms),
        'view_age_ms': _quantiles(run.ages_ms),
        'text_age_ms': _quantiles(run.text_ms),
        'texts_per_s': run.complete_per_s,
        'ended_after_a_later_chunk': run.written_later.as_json(),
        'text_exact': run.exact('text').as_json(),
        'note_exact': run.exact('memory').as_json(),
        'success': run.success.as_json(),
        'command_lateness_p99_ms': run.lateness_p99_ms,
        'drops': run.drops,
        'recorded_s': run.recorded_s,
    }


def _quantiles(values: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    found = percentiles(np.array(values), 50, 95)
    return {
        name: round(value, 2) if math.isfinite(value) else None
        for name, value in zip(('p50', 'p95'), found, strict=True)
    }


def save_plot(path: Path, runs: Sequence[LoadRun], title: str, setting: str) -> None:
    """Draw one panel per thing that matters, one bar per execution."""
    panels: tuple[tuple[str, list[list[float]]], ...] = (
        ('chunks per second', [[run.chunk_hz] for run in runs]),
        ('ticks lost [%]', [[100 * run.ticks_lost] for run in runs]),
        ('age of the view that\ncommands follow [ms]', [_spread(run.ages_ms) for run in runs]),
        ('look to end of text [ms]', [_spread(run.text_ms) for run in runs]),
        ('success [%]', [[100 * run.success.value] for run in runs]),
    )
    with plt.rc_context(STYLE):
        figure, all_axes = plt.subplots(1, len(panels), figsize=(14, 4), layout='constrained')
        for axes, (name, values) in zip(all_axes, panels, strict=True):
            _draw_bars(axes, runs, values)
            axes.set_title(name, fontsize=10)
        all_axes[0].axhline(runs[0].due_hz, color=GREY, linestyle='--', linewidth=1)
        all_axes[0].text(-0.55, 1.01 * runs[0].due_hz, 'due', color=GREY, fontsize=8, va='bottom')
        all_axes[0].set_ylim(0, 1.15 * runs[0].due_hz)
        intervals = 100 * np.array([run.success.interval for run in runs])
        heights = np.array([100 * run.success.value for run in runs])
        errors = np.maximum([heights - intervals[:, 0], intervals[:, 1] - heights], 0.0)
        all_axes[-1].errorbar(
            range(len(runs)), heights, errors, fmt='none', ecolor='black', capsize=3, linewidth=1
        )
        all_axes[-1].set_ylim(0, 112)
        figure.suptitle(f'{title}\n', fontsize=13, x=0.01, ha='left', fontweight='bold')
        figure.text(0.01, 0.93, setting, fontsize=9, va='top')
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _spread(values: Sequence[float] | np.ndarray) -> list[float]:
    return percentiles(np.array(values), 50, 95)


def _draw_bars(axes: Any, runs: Sequence[LoadRun], values: list[list[float]]) -> None:
    """Draw a bar each, and where there is a 95th percentile a thin line up to it."""
    for x, (run, value) in enumerate(zip(runs, values, strict=True)):
        axes.bar(x, value[0], 0.7, color=COLORS[run.execution])
        if len(value) > 1:
            axes.plot([x, x], value, color=COLORS[run.execution], linewidth=2)
            axes.plot([x - 0.15, x + 0.15], [value[1]] * 2, color=COLORS[run.execution])
            axes.annotate('p95', (x + 0.17, value[1]), fontsize=7, va='center', color=GREY)
        # Inside the bar: above it there may be another line.
        axes.annotate(
            f'{value[0]:.3g}', (x, 0), ha='center', va='bottom', fontsize=9, fontweight='bold',
            color='black', xytext=(0, 4), textcoords='offset points',
        )  # fmt: skip
    axes.set_xticks(range(len(runs)), [run.execution for run in runs], rotation=20)
    axes.set_xlim(-0.6, len(runs) - 0.4)
