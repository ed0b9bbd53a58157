"""The pictures of an evaluation: one PNG per question, as bytes.

Owns the drawing only; `eval_report.py` puts them into the page. Every picture takes one or two runs
of the same recording, this one in blue, the other in orange.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib

matplotlib.use('Agg')  # no window, also where there is a display

import matplotlib.pyplot as plt
import numpy as np

from oxygen_ros.evaluation.bag_result import BagResult
from oxygen_ros.evaluation.plots import BLUE, GREEN, GREY, ORANGE, RED
from oxygen_ros.evaluation.run_comparison import Difference

RUN_COLORS = (BLUE, ORANGE)
STYLE: Any = {
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'axes.axisbelow': True,
    'axes.titlelocation': 'left',
    'axes.titlesize': 10,
    'grid.alpha': 0.25,
    'legend.frameon': False,
    'font.size': 9,
}
DPI = 110
WIDTH = 10.5  # inches, one page
MAX_PERCENT = 200.0
"""An error of almost nothing may grow a million times, and shall not hide the rest: differences of
runs are drawn to scale up to here, beyond as an arrow with a number."""


def command_plot(result: BagResult, other: BagResult | None) -> bytes:
    """Commands over time, joint by joint: as they would have been sent, and as recorded."""
    joints = result.summary['joints']
    rows = math.ceil(len(joints) / 2)

    def draw(axes: np.ndarray) -> None:
        flat = axes.ravel()
        for number, joint in enumerate(joints):
            _draw_joint(flat[number], number, result, other)
            flat[number].set_title(joint)
        for empty in flat[len(joints) :]:
            empty.set_visible(False)
        flat[0].legend(loc='best', fontsize=8)
        for bottom in axes[-1]:
            bottom.set_xlabel('time [s]')

    return _png(draw, rows, 2, height=1.2 + 1.5 * rows)


def _draw_joint(axes: Any, joint: int, result: BagResult, other: BagResult | None) -> None:
    recorded = result.trace['recorded'][:, joint]
    if np.isfinite(recorded).any():
        times_s = _trace_s(result, result)
        axes.plot(times_s, recorded, color=GREY, linewidth=2.5, alpha=0.5, label='recorded')
    for run, color, label in _runs(result, other):
        sent = run.trace['sent'][:, joint]
        axes.plot(_trace_s(run, result), sent, color=color, linewidth=1, label=label)


def _trace_s(run: BagResult, first: BagResult) -> np.ndarray:
    """Seconds since the recording began; both runs begin with its first command."""
    times_ns = run.trace['time_ns']
    start_ns = first.trace['time_ns'][:1]
    return (times_ns - start_ns) / 1e9 if len(start_ns) else np.empty(0)


def error_plot(result: BagResult, other: BagResult | None) -> bytes:
    """Error by joint, by row of the chunk, over time, and by the delay that is assumed."""

    def draw(axes: np.ndarray) -> None:
        by_joint, by_step, over_time, by_shift = axes.ravel()
        runs = [run for run in _runs(result, other) if run[0].summary['error']]
        _draw_bars(by_joint, result.summary['joints'], runs)
        for run, color, label in runs:
            steps = _numbers(run.summary['error']['per_step_mae'])
            ahead_s = np.arange(len(steps)) * run.summary['row_period_s']
            by_step.plot(ahead_s, steps, color=color, label=label)
            over_time.plot(run.frames['time_s'], run.frames['error'], color=color, linewidth=1)
            shift = run.summary['shift']
            by_shift.plot(shift['ms'], _numbers(shift['mae']), color=color)
            by_shift.axvline(shift['best_ms'], color=color, linestyle=':', linewidth=1)
        by_joint.set_title('mean absolute error by joint [rad, m]')
        by_step.set_title('by how far ahead the row is [s]')
        over_time.set_title('of each chunk, over time [s]')
        by_shift.set_title('by delay of the recorded commands [ms]; dotted: the best')
        for one in (by_step, over_time, by_shift):
            one.set_ylim(bottom=0)

    return _png(draw, 2, 2, height=5.6)


def _draw_bars(
    axes: Any, joints: Sequence[str], runs: Sequence[tuple[BagResult, str, str]]
) -> None:
    width = 0.8 / max(1, len(runs))
    for number, (run, color, label) in enumerate(runs):
        per_joint = run.summary['error']['per_joint']
        heights = _numbers([per_joint.get(joint, {}).get('mae') for joint in joints])
        x = np.arange(len(joints)) + (number - (len(runs) - 1) / 2) * width
        axes.bar(x, heights, 0.92 * width, color=color, label=label)
    axes.set_xticks(range(len(joints)), joints, rotation=30, ha='right', fontsize=8)
    axes.legend(loc='best', fontsize=8)


def smoothness_plot(result: BagResult, other: BagResult | None) -> bytes:
    """Jumps where a chunk takes over from the one before it, and jerk in between."""

    def draw(axes: np.ndarray) -> None:
        jump, jerk = axes.ravel()
        for run, color, label in _runs(result, other):
            times_s = run.frames['time_s']
            jump.plot(times_s, run.frames['jump'], color=color, linewidth=1, label=label)
            jerk.plot(times_s, run.frames['jerk'], color=color, linewidth=1)
        jump.set_title('jump from chunk to chunk, mean over joints [rad, m]')
        jerk.set_title('jerk of the commands, rms over joints [1/s³ of these]')
        for one in (jump, jerk):
            one.set_ylim(bottom=0)
            one.set_xlabel('time [s]')
        jump.legend(loc='best', fontsize=8)

    return _png(draw, 1, 2, height=2.9)


def time_plot(result: BagResult, other: BagResult | None) -> bytes:
    """Where the time of a frame goes, over the recording and as a distribution."""

    def draw(axes: np.ndarray) -> None:
        over_time, shares = axes.ravel()
        times_s = result.frames['time_s']
        for name, color in (('prefill_ms', GREEN), ('denoise_ms', BLUE), ('decode_ms', RED)):
            label = name.removesuffix('_ms')
            over_time.plot(
                times_s, result.frames[name], '.', color=color, markersize=3, label=label
            )
        over_time.set_title('time of each frame [ms]')
        over_time.set_xlabel('time [s]')
        over_time.legend(loc='best', fontsize=8)
        for run, color, label in _runs(result, other):
            values = np.sort(run.frames['chunk_ms'])
            shares.plot(values, np.arange(1, len(values) + 1) / len(values), color=color)
            shares.plot([], [], color=color, label=label)
        shares.set_title('share of chunks that were done within … ms of their tick')
        shares.set_xlim(left=0)
        shares.set_ylim(0, 1.02)
        shares.legend(loc='lower right', fontsize=8)

    return _png(draw, 1, 2, height=2.9)


def difference_plot(differences: Sequence[Difference]) -> bytes:
    """What changed, in % of the other run: mean and 95 % interval; what did not is grey."""
    shown = [d for d in differences if ':' not in d.column and d.other][::-1]
    joints = [d for d in differences if d.column.startswith('action:')][::-1]

    def draw(axes: np.ndarray) -> None:
        relative, absolute = axes.ravel()
        _draw_intervals(relative, shown, [100 / abs(d.other) for d in shown], MAX_PERCENT)
        relative.set_title('this run − other run [% of the other]')
        _draw_intervals(absolute, joints, [1.0] * len(joints))
        absolute.locator_params(axis='x', nbins=5)
        absolute.set_title('mean action, this run − other run [rad, m]')

    return _png(draw, 1, 2, height=1.2 + 0.3 * max(len(shown), len(joints), 3))


def _draw_intervals(
    axes: Any, differences: Sequence[Difference], scale: Sequence[float], limit: float = math.inf
) -> None:
    axes.axvline(0, color=GREY, linewidth=1)
    for y, (difference, factor) in enumerate(zip(differences, scale, strict=True)):
        color = RED if difference.changed else GREY
        mean = factor * difference.mean
        if abs(mean) > limit:
            _draw_beyond(axes, mean, y, limit, color)
            continue
        axes.plot(mean, y, 'o', color=color, markersize=5)
        if math.isfinite(difference.low):
            ends = np.clip([factor * difference.low, factor * difference.high], -limit, limit)
            axes.plot(ends, [y, y], color=color, linewidth=2)
    axes.set_yticks(range(len(differences)), [d.label for d in differences])
    axes.margins(y=0.15)


def _draw_beyond(axes: Any, mean: float, y: int, limit: float, color: str) -> None:
    """An arrow at the limit, and how far it really is."""
    right = mean > 0
    axes.plot(math.copysign(limit, mean), y, '>' if right else '<', color=color, markersize=6)
    axes.annotate(
        f'{mean:+.2g} ',
        (math.copysign(limit, mean), y),
        xytext=(-8 if right else 8, 0),
        textcoords='offset points',
        ha='right' if right else 'left',
        va='center',
        color=color,
    )


def _runs(result: BagResult, other: BagResult | None) -> list[tuple[BagResult, str, str]]:
    runs = [(result, RUN_COLORS[0], 'this run')]
    return runs if other is None else [(other, RUN_COLORS[1], 'other run'), *runs]


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values])


def _png(draw: Callable[[np.ndarray], None], rows: int, columns: int, *, height: float) -> bytes:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows, columns, figsize=(WIDTH, height), layout='constrained', squeeze=False
        )
        draw(axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format='png', dpi=DPI)
        plt.close(figure)
    return buffer.getvalue()
