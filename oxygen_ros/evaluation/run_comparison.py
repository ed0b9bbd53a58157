"""RunComparison: what changed between two runs over the same recordings.

Owns the pairing and the intervals. Frames are paired by recording and by the stamp of their
observation, texts by task and stamp; whatever is in one run only is counted and left out. Knows
neither files nor words; the report shows it.

Intervals. A frame resembles the one before it, so frames are no independent samples. The 95 %
interval of a mean difference is a block bootstrap: blocks of n^(1/3) frames in a row of a recording
are drawn with replacement, and the middle 95 % of the means are shown (percentile method, fixed
seed). Where frames resemble each other over longer than a block it is still too narrow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oxygen_ros.evaluation.bag_result import BagResult

NUM_RESAMPLES = 2000
MIN_BLOCKS = 6
"""With fewer, as in a recording of two seconds, every frame is a block: such an interval is too
narrow where frames resemble each other. With fewer frames than this there is none."""
COMPARED = {
    'error': 'action error',
    'sent_error': 'error of sent commands',
    'jump': 'jump between chunks',
    'jerk': 'jerk of the commands',
    'cameras': 'cameras per frame',
    'chunk_ms': 'tick to chunk [ms]',
    'prefill_ms': 'prefill [ms]',
    'denoise_ms': 'denoise [ms]',
    'decode_ms': 'decode per frame [ms]',
    'tokens': 'tokens per frame',
}
PER_JOINT = {'action': 'action', 'error': 'action error'}


@dataclass(frozen=True)
class Difference:
    """This run minus the other, over all pairs."""

    column: str
    """As in frames.csv."""
    label: str
    this: float
    other: float
    mean: float
    low: float
    high: float
    """NaN where there are too few pairs for an interval."""
    pairs: int

    @property
    def changed(self) -> bool:
        """Whether the interval leaves zero out; without one nothing can be said."""
        return math.isfinite(self.low) and not self.low <= 0.0 <= self.high

    def as_json(self) -> dict[str, Any]:
        """Return plain numbers, None for NaN."""
        numbers = {name: getattr(self, name) for name in ('this', 'other', 'mean', 'low', 'high')}
        plain = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        changed = {'pairs': self.pairs, 'changed': self.changed}
        return {'column': self.column, 'label': self.label} | plain | changed


@dataclass(frozen=True)
class RunComparison:
    """This run (A) against another one (B)."""

    settings: dict[str, tuple[str, str]]
    """What was set differently: key -> this, other."""
    bags: tuple[str, ...]
    """Compared recordings."""
    only_this: tuple[str, ...]
    only_other: tuple[str, ...]
    paired_frames: int
    unpaired_frames: int
    bit_for_bit: bool
    """Whether both runs did and said the same, bit for bit."""
    paired_texts: int
    equal_texts: int
    differences: tuple[Difference, ...]

    def changed(self) -> list[str]:
        """Return in words what differs beyond its interval, joints at the end and counted."""
        words = [d.label for d in self.differences if d.changed and ':' not in d.column]
        for name, label in PER_JOINT.items():
            of_joints = [d for d in self.differences if d.column.startswith(f'{name}:')]
            joints = [d.column.partition(':')[2] for d in of_joints if d.changed]
            if joints:
                named = ', '.join(joints[:3]) + (', …' if len(joints) > 3 else '')
                words.append(f'{label} of {len(joints)} of {len(of_joints)} joints ({named})')
        return words

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            'settings': {key: list(pair) for key, pair in self.settings.items()},
            'bags': list(self.bags),
            'only_this': list(self.only_this),
            'only_other': list(self.only_other),
            'paired_frames': self.paired_frames,
            'unpaired_frames': self.unpaired_frames,
            'bit_for_bit': self.bit_for_bit,
            'paired_texts': self.paired_texts,
            'equal_texts': self.equal_texts,
            'interval': f'95 %, block bootstrap over frames, {NUM_RESAMPLES} resamples',
            'differences': [difference.as_json() for difference in self.differences],
        }


def compare_runs(
    this: Sequence[BagResult],
    other: Sequence[BagResult],
    this_setting: Mapping[str, Any],
    other_setting: Mapping[str, Any],
) -> RunComparison:
    """Compare what both runs have; failed recordings count as absent."""
    ours = {result.name: result for result in this if not result.failed}
    theirs = {result.name: result for result in other if not result.failed}
    names = [name for name in ours if name in theirs]
    pairs = [(ours[name], theirs[name]) for name in names]
    indices = [_paired(a.frames['stamp_ns'], b.frames['stamp_ns']) for a, b in pairs]
    num_paired = sum(len(rows) for rows, _ in indices)
    num_frames = sum(len(a.frames['frame']) + len(b.frames['frame']) for a, b in pairs)
    texts = [_paired_texts(a, b) for a, b in pairs]
    return RunComparison(
        settings=_changed_settings(this_setting, other_setting),
        bags=tuple(names),
        only_this=tuple(name for name in ours if name not in theirs),
        only_other=tuple(name for name in theirs if name not in ours),
        paired_frames=num_paired,
        unpaired_frames=num_frames - 2 * num_paired,
        bit_for_bit=bool(pairs)
        and all(a.summary['digest'] == b.summary['digest'] for a, b in pairs),
        paired_texts=sum(len(found) for found in texts),
        equal_texts=sum(sum(found) for found in texts),
        differences=tuple(_differences(pairs, indices)),
    )


def _changed_settings(
    this: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    keys = [*this, *(key for key in other if key not in this)]
    return {
        key: (str(this.get(key, '-')), str(other.get(key, '-')))
        for key in keys
        if this.get(key) != other.get(key)
    }


def _paired(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return indices (n,) of the same observation in both.

    Where no new picture came between two frames they share a stamp; the first is paired with the
    first, and so on.
    """
    there = {key: row for row, key in enumerate(_numbered(theirs))}
    found = [(row, there[key]) for row, key in enumerate(_numbered(ours)) if key in there]
    rows, other_rows = np.array(found, np.int64).reshape(-1, 2).T
    return rows, other_rows


def _numbered(stamps: np.ndarray) -> list[tuple[int, int]]:
    """Return each stamp with how often it came before."""
    seen: Counter[int] = Counter()
    numbered = []
    for stamp in stamps.tolist():
        numbered.append((stamp, seen[stamp]))
        seen[stamp] += 1
    return numbered


def _paired_texts(this: BagResult, other: BagResult) -> list[bool]:
    theirs = {(text['task'], text['stamp_ns']): text['text'] for text in other.texts}
    keys = [(text['task'], text['stamp_ns'], text['text']) for text in this.texts]
    return [theirs[task, stamp] == text for task, stamp, text in keys if (task, stamp) in theirs]


def _differences(
    pairs: Sequence[tuple[BagResult, BagResult]],
    indices: Sequence[tuple[np.ndarray, np.ndarray]],
) -> list[Difference]:
    columns = dict(COMPARED)
    for joint in dict.fromkeys(name for a, _ in pairs for name in a.summary['joints']):
        columns |= {f'{name}:{joint}': f'{label}, {joint}' for name, label in PER_JOINT.items()}
    found = []
    for column, label in columns.items():
        samples = [
            (a.frames[column][rows], b.frames[column][other_rows])
            for (a, b), (rows, other_rows) in zip(pairs, indices, strict=True)
            if column in a.frames and column in b.frames
        ]
        known = [(a[keep], b[keep]) for a, b in samples if (keep := np.isfinite(a - b)).any()]
        if known:
            found.append(_difference(column, label, known))
    return found


def _difference(
    column: str, label: str, samples: Sequence[tuple[np.ndarray, np.ndarray]]
) -> Difference:
    ours = np.concatenate([a for a, _ in samples])
    theirs = np.concatenate([b for _, b in samples])
    low, high = block_bootstrap([a - b for a, b in samples])
    return Difference(
        column=column,
        label=label,
        this=float(ours.mean()),
        other=float(theirs.mean()),
        mean=float((ours - theirs).mean()),
        low=low,
        high=high,
        pairs=len(ours),
    )


def block_bootstrap(series: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the 95 % interval of the mean over several series (n,), NaN if they are too short."""
    blocks: list[np.ndarray] = []
    for values in series:
        length = max(1, round(len(values) ** (1 / 3)))
        blocks += np.array_split(values, max(1, len(values) // length))
    if len(blocks) < MIN_BLOCKS:
        blocks = [frame for values in series for frame in np.array_split(values, len(values))]
    if len(blocks) < MIN_BLOCKS:
        return math.nan, math.nan
    sums = np.array([block.sum() for block in blocks])
    sizes = np.array([len(block) for block in blocks])
    means = np.empty(NUM_RESAMPLES)
    generator = np.random.default_rng(0)
    for i in range(NUM_RESAMPLES):  # one at a time: an hour of frames has a thousand blocks
        drawn = generator.integers(0, len(blocks), len(blocks))
        means[i] = sums[drawn].sum() / sizes[drawn].sum()
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
