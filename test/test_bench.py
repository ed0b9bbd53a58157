"""What the benchmarks compare: every setting gets the same frames and writes the same texts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from oxygen_ros.model.prompt import ByteTokenizer

BENCH = Path(__file__).resolve().parents[1] / 'bench'


@pytest.fixture
def frames(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module('frames')


@pytest.fixture
def threads():
    """Benchmarks set the number of threads of their process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench_frame(frames, threads) -> ModuleType:
    return importlib.import_module('bench_frame')


@pytest.fixture
def bench_scale(monkeypatch, threads) -> ModuleType:
    pytest.importorskip('matplotlib')
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module('bench_scale')


@pytest.mark.parametrize('change', [0.0, 0.2, 1.0])
def test_texts_differ_from_the_one_before_by_the_stated_share(frames, change):
    dictation = frames.Dictation('uniform', 30, change, seed=0)
    texts = np.array([dictation.texts(frame)['text_0'] for frame in range(100)])
    assert np.mean(texts[1:] != texts[:-1]) == pytest.approx(change, abs=0.03)


def test_requests_come_one_per_frame_on_average_and_often_none_or_several(frames):
    dictation = frames.Dictation('poisson', 3, 0.1, seed=0)
    counts = [len(dictation.texts(frame)) for frame in range(2000)]
    assert np.mean(counts) == pytest.approx(1.0, abs=0.1)
    assert set(counts) == set(range(frames.MOST_AT_ONCE + 1))


def test_a_text_of_random_length_ends_with_the_end_token(frames):
    dictation = frames.Dictation('random_length', 12, 0.1, seed=0)
    texts = [dictation.texts(frame)['text_0'] for frame in range(200)]
    assert {len(text) for text in texts} == set(range(frames.SHORTEST, 13))
    assert all(text[-1] == ByteTokenizer.eos_id for text in texts if len(text) < 12)
    assert not any(ByteTokenizer.eos_id in text[:-1] for text in texts)


def report(bench_frame, capsys, *arguments: str) -> dict:
    options = ['--preset', 'dummy', '--max-tokens', '6', '--steps-per-frame', '2', '--no-memory']
    bench_frame.main([*options, '--frames', '4', *arguments])
    return json.loads(capsys.readouterr().out.splitlines()[-1])['settings']


def test_every_setting_writes_as_many_tokens_and_pays_for_them_in_its_own_way(bench_frame, capsys):
    settings = report(bench_frame, capsys, '--text-change', '0')
    assert set(settings) == set(bench_frame.SETTINGS)
    assert {row['tokens_per_frame'] for row in settings.values()} == {6}
    assert {name: row['prefills_per_frame'] for name, row in settings.items()} == {
        'isolated': 2, 'parallel': 2, 'shared': 1,
        'continuous_batching': 1, 'undrafted': 1, 'unified': 1,
    }  # fmt: skip
    passes = {name: row['passes_per_frame'] for name, row in settings.items()}
    assert passes == {
        'isolated': 6, 'parallel': 6, 'shared': 6,
        'continuous_batching': 2, 'undrafted': 2, 'unified': 1,
    }  # fmt: skip
    assert settings['unified']['accepted_share'] == 1


def test_drafts_fail_where_texts_have_nothing_in_common(bench_frame, capsys):
    same = ('--settings', 'undrafted', 'unified', '--text-change')
    assert report(bench_frame, capsys, *same, '1')['unified']['accepted_share'] < 0.1


@pytest.mark.parametrize('arrivals', ['poisson', 'random_length'])
def test_irregular_requests_are_all_written(bench_frame, capsys, arrivals):
    settings = report(
        bench_frame, capsys, '--arrivals', arrivals, '--settings', 'isolated', 'shared'
    )
    assert settings['isolated']['tokens_per_frame'] == settings['shared']['tokens_per_frame'] > 0


def test_growth_is_told_for_every_size_and_drawn(bench_scale, capsys, tmp_path):
    bench_scale.main(['--preset', 'dummy', '--rounds', '1', '--out', str(tmp_path)])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    sizes = [str(batch) for batch in bench_scale.BATCHES]
    assert list(report['decode_ms']) == list(report['latency_ms']) == sizes
    assert list(report['frame_ms']) == ['1', '2', '3']
    assert (tmp_path / 'growth.png').stat().st_size > 0
