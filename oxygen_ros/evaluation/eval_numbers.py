"""The numbers of an evaluation over all its recordings, and how they are written.

Owns the arithmetic over results and the row of a recording in a table. Knows neither page nor
terminal; `eval_page.py` and `eval_report.py` show them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oxygen_ros.evaluation.bag_result import BagResult
from oxygen_ros.evaluation.dashboard import printable

TIMES = ('chunk', 'prefill', 'denoise')
BAG_COLUMNS = (
    'recording',
    'length [s]',
    'frames / ticks',
    'chunk Hz',
    'error',
    'sent error',
    'best delay [ms]',
    'jump',
    'jerk',
    'prefill / denoise [ms]',
    'tokens/s',
    'texts',
    'drops',
)


def bag_cells(result: BagResult) -> list[str]:
    """Return one cell for each of BAG_COLUMNS, of a recording that was evaluated."""
    bag = result.summary
    times = [bag['times'][name] for name in ('prefill_ms', 'denoise_ms')]
    return [
        printable(result.name),
        f'{bag["duration_s"]:.1f}',
        f'{bag["frames"]} / {bag["ticks"]}',
        number(bag['chunk_hz']),
        number(bag['error'] and bag['error']['mae']),
        number(bag['sent_error'] and bag['sent_error']['mae']),
        number(bag['shift']['best_ms']),
        number(bag['jump']['mean']),
        number(bag['jerk']['rms']),
        ' / '.join(number(time and time['p50']) for time in times),
        number(bag['tokens_per_s']),
        str(sum(bag['ended'].values())),
        str(sum(bag['drops'].values())),
    ]


def number(value: float | None, unit: str = '') -> str:
    """Return a number in a few digits, a dash where there is none."""
    if value is None or np.isnan(value):
        return '–'
    digits = f'{value:.0f}' if abs(value) >= 1000 else f'{value:.3g}'
    return f'{digits}{unit}'


def overall(results: Sequence[BagResult]) -> dict[str, Any]:
    """Return the numbers over all recordings that were evaluated; None = nothing to measure."""
    done = [result.summary for result in results if not result.failed]
    frames = _joined(results)
    seconds = sum(bag['duration_s'] for bag in done)
    decode_s = float(np.nansum(frames.get('decode_ms', np.zeros(0)))) / 1e3
    tokens = sum(bag['tokens'] for bag in done)
    drops: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for bag in done:
        drops.update(bag['drops'])
        ended.update(bag['ended'])
    return {
        'bags': len(done),
        'failed': len(results) - len(done),
        'duration_s': seconds,
        'frames': sum(bag['frames'] for bag in done),
        'ticks': sum(bag['ticks'] for bag in done),
        'chunk_hz': sum(bag['frames'] for bag in done) / seconds if seconds else None,
        'error_mae': _weighted(done, 'error'),
        'sent_error_mae': _weighted(done, 'sent_error'),
        'jump_mean': _mean(frames.get('jump')),
        'jerk_mean': _mean(frames.get('jerk')),
        **{f'{name}_p50': _median(frames.get(f'{name}_ms')) for name in TIMES},
        'tokens': tokens,
        'tokens_per_s': tokens / decode_s if decode_s else None,
        'ended': dict(ended),
        'drops': dict(drops),
    }


def _joined(results: Sequence[BagResult]) -> dict[str, np.ndarray]:
    """Return the columns that do not belong to a joint, of all recordings one after the other."""
    done = [result.frames for result in results if not result.failed]
    names = [name for name in done[0] if ':' not in name] if done else []
    return {name: np.concatenate([frames[name] for frames in done]) for name in names}


def _weighted(bags: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Return the mean absolute error over all compared values."""
    found = [bag[key] for bag in bags if bag[key]]
    compared = sum(errors['compared'] for errors in found)
    return sum(e['mae'] * e['compared'] for e in found) / compared if compared else None


def _mean(values: np.ndarray | None) -> float | None:
    known = np.zeros(0) if values is None else values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _median(values: np.ndarray | None) -> float | None:
    known = np.zeros(0) if values is None else values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None
