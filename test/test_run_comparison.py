"""Comparison of two runs: pairs, intervals, and what counts as a change."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip('rosbags')

from oxygen_ros.evaluation.bag_result import BagResult
from oxygen_ros.evaluation.run_comparison import block_bootstrap, compare_runs

COLUMNS = ('error', 'action:elbow', 'action:wrist')


def result(name: str, stamps: list[int], digest: str = 'x', **columns: np.ndarray) -> BagResult:
    frames = {column: np.zeros(len(stamps)) for column in COLUMNS}
    frames |= {'frame': np.arange(len(stamps)), 'stamp_ns': np.array(stamps)}
    frames |= {key.replace('__', ':'): values for key, values in columns.items()}
    summary = {'bag': name, 'failed': '', 'joints': ['elbow', 'wrist'], 'digest': digest}
    return BagResult(summary, frames, [], {})


def test_frames_are_paired_by_their_observation_whatever_else_was_taken() -> None:
    ours = result('bag', [10, 20, 30], action__elbow=np.array([1.0, 2.0, 3.0]))
    theirs = result('bag', [30, 40, 10], action__elbow=np.array([3.0, 9.0, 1.0]))
    found = compare_runs([ours], [theirs], {}, {})
    assert (found.paired_frames, found.unpaired_frames) == (2, 2)
    elbow = next(d for d in found.differences if d.column == 'action:elbow')
    assert (elbow.mean, elbow.pairs) == (0.0, 2)


def test_frames_that_share_a_picture_are_paired_in_their_order() -> None:
    ours = result('bag', [10, 10, 20], action__elbow=np.array([1.0, 2.0, 3.0]))
    theirs = result('bag', [10, 10, 20], action__elbow=np.array([1.0, 2.0, 3.0]))
    found = compare_runs([ours], [theirs], {}, {})
    assert found.paired_frames == 3
    assert all(d.mean == 0 and not d.changed for d in found.differences)


def test_a_biased_joint_is_the_only_one_that_changed() -> None:
    stamps = list(range(100))
    noise = np.random.default_rng(0).normal(size=100)
    ours = result('bag', stamps, 'a', action__elbow=noise + 0.1, action__wrist=noise)
    theirs = result('bag', stamps, 'b', action__elbow=noise, action__wrist=noise)
    found = compare_runs([ours], [theirs], {'seed': 0, 'k': 1}, {'seed': 0, 'k': 2})
    changed = [d for d in found.differences if d.changed]
    assert [d.column for d in changed] == ['action:elbow']
    assert changed[0].mean == pytest.approx(0.1)
    assert found.settings == {'k': ('1', '2')}
    assert not found.bit_for_bit


def test_recordings_of_one_run_only_are_named_and_left_out() -> None:
    found = compare_runs([result('a', [1]), result('b', [1])], [result('b', [1])], {}, {})
    assert (found.bags, found.only_this, found.only_other) == (('b',), ('a',), ())
    assert found.bit_for_bit


def test_the_interval_covers_the_truth_of_frames_that_resemble_each_other() -> None:
    """95 % is nominal; it came to 85 % here, and to 55 % with frames taken as independent."""
    covered = 0
    for seed in range(60):
        steps = np.random.default_rng(seed).normal(size=4000)
        series = np.zeros(4000)
        for i in range(1, 4000):
            series[i] = 0.7 * series[i - 1] + steps[i]
        low, high = block_bootstrap([series[2000:2400], series[3000:3400]])
        covered += low <= 0 <= high
    assert covered >= 48


def test_too_few_frames_have_no_interval_and_no_verdict() -> None:
    assert all(map(math.isnan, block_bootstrap([np.arange(3.0)])))
    ours = result('bag', [1, 2], action__elbow=np.array([5.0, 6.0]))
    found = compare_runs([ours], [result('bag', [1, 2])], {}, {})
    assert not any(d.changed for d in found.differences)
    assert found.as_json()['differences'][1]['low'] is None
