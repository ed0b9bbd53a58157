"""The demo's picture: command rate, lateness, chunk and token rate over time, as PNG.

Owns the drawing only; `demo.py` hands it the samples that `Measurements` kept.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use('Agg')  # no window, also where there is a display

import matplotlib.pyplot as plt

from oxygen_ros.evaluation.measurements import Sample

# Okabe-Ito: told apart by everybody.
BLUE, ORANGE, GREEN, RED, GREY = '#0072B2', '#E69F00', '#009E73', '#D55E00', '#666666'


def save_plot(
    path: Path,
    samples: Sequence[Sample],
    *,
    title: str,
    setting: str,
    due_hz: float,
    instruction_changes_s: Sequence[float],
    touches_s: Sequence[float],
) -> None:
    """Draw at least one sample; `setting` says what was measured on what."""
    style: Any = {
        'axes.spines.top': False,
        'axes.spines.right': False,
        'axes.grid': True,
        'grid.alpha': 0.25,
        'legend.frameon': False,
        'font.size': 10,
    }
    with plt.rc_context(style):
        figure, (commands, lateness, chunks) = plt.subplots(
            3, 1, figsize=(10, 8), sharex=True, layout='constrained'
        )
        times_s = [sample.time_s for sample in samples]
        _draw_commands(commands, times_s, samples, due_hz)
        _draw_lateness(lateness, times_s, samples)
        tokens = _draw_rates(chunks, times_s, samples)
        for axes in (commands, lateness, tokens):
            _mark(axes, instruction_changes_s, 'new instruction', color=GREY, linestyle=':')
            _mark(axes, touches_s, 'block touched', color=GREEN, linestyle='--')
        # One key per plot, above it, so that no curve runs through it.
        for axes in (commands, lateness):
            _add_key(axes, [axes])
        _add_key(chunks, [chunks, tokens])
        chunks.set_xlabel('time [s]')
        chunks.set_xlim(0, max(times_s))
        _add_title(commands, title, textwrap.wrap(setting, 120))
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _add_title(axes: Any, title: str, setting: list[str]) -> None:
    """Title, then the setting in small print, both above the key."""
    key_points, line_points = 24, 13
    axes.annotate(
        '\n'.join(setting),
        (0, 1),
        xytext=(0, key_points),
        xycoords='axes fraction',
        textcoords='offset points',
        fontsize=9,
    )
    above = key_points + line_points * len(setting) + 4
    axes.set_title(title, loc='left', pad=above, fontsize=13, fontweight='bold')


def _draw_commands(axes: Any, times_s: list[float], samples: Sequence[Sample], due: float) -> None:
    axes.axhline(due, color=GREY, linewidth=1, linestyle='--', label=f'due: {due:g} Hz')
    claimed = [sample.stats.command_hz for sample in samples]
    axes.plot(times_s, claimed, color=ORANGE, linewidth=3, alpha=0.5, label='says the node')
    measured = [sample.command_hz for sample in samples]
    axes.plot(times_s, measured, color=BLUE, linewidth=1.5, label='measured by a subscriber')
    axes.set_ylabel('commands [1/s]')
    axes.set_ylim(0, 1.15 * max([due, *claimed, *measured]))


def _draw_lateness(axes: Any, times_s: list[float], samples: Sequence[Sample]) -> None:
    curves = {
        name: [getattr(sample.stats, f'lateness_{name}_ms') for sample in samples]
        for name in ('max', 'p99', 'p50')
    }
    for (name, values), color in zip(curves.items(), (RED, ORANGE, BLUE), strict=True):
        axes.plot(times_s, values, color=color, linewidth=1.5, label=name)
    axes.set_ylabel('command lateness [ms]\n(last 2048 commands)')
    least, most = min(curves['p50']), max(curves['max'])
    if least > 0 and most > 20 * least:  # one late command would flatten everything else
        axes.set_yscale('log')
        axes.yaxis.set_major_formatter('{x:g}')
    else:
        axes.set_ylim(0, 1.15 * max(most, 0.1))


def _draw_rates(axes: Any, times_s: list[float], samples: Sequence[Sample]) -> Any:
    chunk_hz = [sample.stats.chunk_hz for sample in samples]
    axes.plot(times_s, chunk_hz, color=GREEN, linewidth=1.5, label='action chunks')
    axes.set_ylabel('chunks [1/s]', color=GREEN)
    axes.set_ylim(0, 1.15 * max([*chunk_hz, 1.0]))
    right = axes.twinx()
    right.spines['right'].set_visible(True)
    right.grid(False)
    tokens_per_s = [sample.stats.tokens_per_s for sample in samples]
    right.plot(times_s, tokens_per_s, color=RED, linewidth=1.5, label='tokens')
    right.set_ylabel('tokens [1/s]', color=RED)
    right.set_ylim(0, 1.15 * max([*tokens_per_s, 1.0]))
    return right


def _mark(axes: Any, times_s: Sequence[float], label: str, **style: str) -> None:
    for number, time_s in enumerate(times_s):
        axes.axvline(time_s, linewidth=1, label=None if number else label, **style)


def _add_key(axes: Any, sources: Sequence[Any]) -> None:
    entries = [source.get_legend_handles_labels() for source in sources]
    handles = [handle for one, _ in entries for handle in one]
    labels = [label for _, some in entries for label in some]
    axes.legend(
        handles, labels, loc='lower right', bbox_to_anchor=(1, 1), ncol=len(labels), fontsize=9
    )
