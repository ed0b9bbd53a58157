"""Fixed addresses and padded shapes against the plain runner: the arithmetic of CUDA graphs.

Without CUDA the same passes run one by one, so everything but the capture itself is tested here.
"""

from __future__ import annotations

import golden_pi05 as golden
import numpy as np
import pytest
import torch
from golden_pi05 import VARIANTS, Variant
from test_drafting import still_life
from test_engine import Bench, Live, finals, kinds, observation, task

from oxygen_ros.engine import static_runner
from oxygen_ros.engine.baselines import ContinuousBatchingEngine
from oxygen_ros.engine.engine import NO_DEADLINE_NS
from oxygen_ros.engine.model_runner import ModelRunner
from oxygen_ros.engine.slots import SlotLayout
from oxygen_ros.engine.static_runner import StaticRunner


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Golden prompts have 13 to 20 tokens; with buckets of 8 they fall into different ones."""
    monkeypatch.setattr(static_runner, 'PROMPT_BUCKET', 8)


class StaticBench(Bench):
    def __init__(self, *tasks, prefix_attention='bidirectional', num_slots=6):
        super().__init__(*tasks, prefix_attention=prefix_attention, num_slots=1)
        model = golden.model(prefix_attention)
        layout = SlotLayout(model.config.max_prefix_len, tasks, model.config.action_horizon)
        self.runner = StaticRunner(model, layout, num_slots=num_slots, num_denoise_steps=10)


@pytest.mark.parametrize('name', VARIANTS)
@pytest.mark.parametrize('prefix_attention', ['bidirectional', 'causal'])
def test_actions_and_texts_are_those_of_the_plain_runner(name, prefix_attention):
    variant = Variant(name)
    tasks = (task('text', prompt=(), length=12), task('memory', length=8))
    results = []
    for kind in (Bench, StaticBench):
        bench = kind(*tasks, prefix_attention=prefix_attention)
        frame = bench.prefill(variant, slot=3)
        actions = bench.runner.denoise(frame, variant.io('in.noise').numpy())
        texts = bench.finish(bench.sequence(frame, 0), bench.sequence(frame, 1))
        results.append((actions, texts))
    (plain_actions, plain_texts), (actions, texts) = results
    np.testing.assert_allclose(actions, plain_actions, atol=2e-5, rtol=0)
    assert texts == plain_texts


def test_actions_are_openpis():
    variant = Variant('a')
    bench = StaticBench(task())
    actions = bench.runner.denoise(bench.prefill(variant, slot=0), variant.io('in.noise').numpy())
    np.testing.assert_allclose(actions, variant.io('actions').numpy(), atol=5e-5, rtol=0)


def test_frames_of_several_lengths_and_ages_decode_together():
    tasks = (task('text', length=20), task('memory', length=15))
    together = StaticBench(*tasks)
    starts = [(Variant(name), slot, index) for slot, name in enumerate('abc') for index in (0, 1)]
    frames = {slot: together.prefill(variant, slot) for variant, slot, _ in starts}
    batch = [together.sequence(frames[slot], index) for _, slot, index in starts]
    together.step(*batch[:2])
    together.step(batch[0], batch[5])
    texts = together.finish(*batch)
    for (variant, slot, index), text in zip(starts, texts, strict=True):
        alone = Bench(*tasks)
        assert alone.finish(alone.sequence(alone.prefill(variant, slot), index)) == [text]


class StaticLive(Live):
    """The engine of `Live` on a static runner."""

    def __init__(self, *tasks, num_slots=6, **options):
        super().__init__(*tasks, num_slots=num_slots, **options)
        model = golden.model()
        layout = SlotLayout(model.config.max_prefix_len, tasks, model.config.action_horizon)
        self.runner._runner = StaticRunner(model, layout, num_slots=num_slots, num_denoise_steps=10)


def test_an_engine_with_drafts_and_deadlines_says_and_does_the_same():
    tasks = (task('text', length=18), task('memory', length=9, period=2))
    plain = Live(*tasks, num_slots=8, max_draft=5)
    static = StaticLive(*tasks, num_slots=8, max_draft=5)
    for number in range(6):
        for live in (plain, static):
            live.engine.step(still_life(number), live.clock.now_ns + 40 + 3 * 5)
    for live in (plain, static):
        live.engine.decode(NO_DEADLINE_NS)
    assert static.engine.stats.accepted > 0
    assert finals(static) == finals(plain)
    for ours, theirs in zip(static.chunks, plain.chunks, strict=True):
        np.testing.assert_allclose(ours.values, theirs.values, atol=2e-5, rtol=0)


def test_a_frame_that_failed_leaves_nothing_behind():
    static, healthy = StaticLive(task('text', length=5)), StaticLive(task('text', length=5))
    real = static.runner._runner
    static.runner.denoise = lambda frame, noise, meanwhile: real.denoise(
        frame, noise * np.float32(np.nan)
    )
    with pytest.raises(RuntimeError, match='non-finite'):
        static.step(0)
    del static.runner.denoise
    static.step(1)
    healthy.step(1)
    assert np.array_equal(static.chunks[0].values, healthy.chunks[0].values)
    assert finals(static) == finals(healthy)


def test_buffers_never_move_and_passes_come_in_few_shapes(monkeypatch):
    keys: list[tuple] = []
    monkeypatch.setattr(
        static_runner.Graphs, 'run', lambda self, key, work: (keys.append(key), work())
    )
    live = StaticLive(task('text', length=9), task('memory', length=5))
    runner = live.runner._runner

    def addresses():
        tensors = [runner.k, runner.v, runner._noise, runner._actions, runner._prompt]
        tensors += [*runner._pixels.values(), *runner._feeds.values()]
        return [tensor.data_ptr() for tensor in tensors]

    live.step(0)
    before, shapes = addresses(), set(keys)
    for number in range(1, 6):
        live.step(number)
    assert addresses() == before
    assert set(keys) == shapes
    assert {key[0] for key in shapes} == {'prefill', 'denoise', 'decode'}
    lone = observation(6)
    live.step(6, images={'base_0_rgb': lone.images['base_0_rgb']})
    assert len(set(keys)) == len(shapes) + 2  # one prefill and one denoise of another length


def test_everything_is_captured_before_the_robot_moves(monkeypatch):
    keys: list[tuple] = []
    monkeypatch.setattr(
        static_runner.Graphs, 'run', lambda self, key, work: (keys.append(key), work())
    )
    bench = StaticBench(task('text', length=9), task('memory', length=5))
    bench.runner.capture([13, 20], max_queries=8)
    captured = set(keys)
    keys.clear()
    for name in VARIANTS:
        variant = Variant(name)
        frame = bench.prefill(variant, slot=1)
        bench.runner.denoise(frame, variant.io('in.noise').numpy())
        bench.finish(bench.sequence(frame, 0), bench.sequence(frame, 1))
    assert set(keys) <= captured
    assert bench.runner.num_prefills == 3


def test_a_runner_that_disagrees_with_the_eager_one_is_noticed():
    bench, plain = StaticBench(task()), Bench(task())
    assert bench.runner.disagreement(plain.runner) < 2e-5
    bench.runner._modulations = bench.runner._modulations[:5]  # half of the denoise steps
    assert bench.runner.disagreement(plain.runner) > static_runner.MAX_DISAGREEMENT


class Lane:
    """A device in the two extremes: what others do meanwhile all comes before, or after."""

    stream = None

    def __init__(self, actions_first: bool, expected_ns: int = 10):
        self._actions_first, self._expected_ns = actions_first, expected_ns

    def run(self, work, meanwhile):
        steps = [work, lambda: meanwhile(self._expected_ns)]
        for step in steps if self._actions_first else reversed(steps):
            step()

    def hold_back_others(self):
        pass


def played(lane):
    live = StaticLive(task('text', length=18), task('memory', length=9, period=2), num_slots=8)
    if lane is not None:
        live.runner._runner._lane = lane
    for number in range(6):
        live.engine.step(still_life(number), live.clock.now_ns + 40 + 3 * 5)
    live.engine.decode(NO_DEADLINE_NS)
    live.scheduler.check_integrity()
    return live


@pytest.mark.parametrize('actions_first', [True, False])
def test_texts_of_earlier_frames_grow_beside_the_actions_and_change_neither(actions_first):
    plain, beside = played(None), played(Lane(actions_first))
    assert [chunk.frame for chunk in beside.chunks] == list(range(6))
    for ours, theirs in zip(beside.chunks, plain.chunks, strict=True):
        assert np.array_equal(ours.values, theirs.values)
    common = finals(plain).keys() & finals(beside).keys()
    assert len(common) > 6
    assert {key: finals(plain)[key] for key in common} == {
        key: finals(beside)[key] for key in common
    }


def test_only_earlier_frames_are_decoded_before_the_actions_and_only_as_long_as_steps_fit():
    live = played(Lane(actions_first=False, expected_ns=12))
    beside = []
    for number in range(6):
        start, end = live.log.index(('denoise', number)), live.log.index(('chunk', number))
        batches = [detail for work, detail in live.log[start:end] if work == 'decode']
        assert all(frame < number for batch in batches for _, frame, _ in batch)
        beside.append(len(batches))
    assert beside == [0, 2, 2, 2, 2, 2]  # at 5 ns each


def test_a_step_that_touched_what_the_actions_read_would_be_noticed():
    """Guards the tests above."""
    lane = Lane(actions_first=False)
    live = StaticLive(task('text', length=9))
    runner = live.runner._runner
    live.step(0)
    right = runner.k[:, runner._work_slot].clone()
    lane.run = lambda work, meanwhile: (runner.k[:, runner._work_slot].zero_(), work())
    runner._lane = lane
    other = StaticLive(task('text', length=9))
    for each in (live, other):
        each.step(1)
    assert right.any()
    assert not np.array_equal(live.chunks[-1].values, other.chunks[-1].values)


def test_a_step_that_fails_beside_the_actions_ends_the_texts_and_the_frame():
    live = StaticLive(task('text', length=30))
    live.runner._runner._lane = Lane(actions_first=False)
    live.engine.step(still_life(0), live.clock.now_ns + 50)
    live.runner.fail['decode'] = RuntimeError('device lost')
    with pytest.raises(RuntimeError, match='device lost'):
        live.engine.step(still_life(1), live.clock.now_ns + 50)
    assert [chunk.frame for chunk in live.chunks] == [0]
    assert live.scheduler.live == []
    live.scheduler.check_integrity()
    healthy = StaticLive(task('text', length=30))
    for each in (live, healthy):
        each.engine.step(still_life(2), NO_DEADLINE_NS)
    assert np.array_equal(live.chunks[-1].values, healthy.chunks[-1].values)


def test_the_papers_method_decodes_nothing_beside_the_actions():
    live = StaticLive(task('text', length=18), engine=ContinuousBatchingEngine)
    live.runner._runner._lane = Lane(actions_first=False)
    for number in range(3):
        live.engine.step(still_life(number), NO_DEADLINE_NS)
    assert kinds(live.log).count('decode') == 3 * ContinuousBatchingEngine.steps_per_frame


def test_without_cuda_the_plain_runner_serves():
    model = golden.model()
    layout = SlotLayout(model.config.max_prefix_len, (), model.config.action_horizon)
    runner = static_runner.make_runner(
        model, layout, num_slots=2, num_denoise_steps=10, max_queries=1
    )
    assert type(runner) is ModelRunner


@pytest.mark.cuda
def test_a_replayed_graph_equals_the_eager_pass():
    device = torch.device('cuda')
    model = golden.load_model(
        golden.config(), golden.CHECKPOINT, device=device, dtype=torch.float32
    )
    tasks = (task('text', prompt=(), length=12), task('memory', length=8))
    layout = SlotLayout(model.config.max_prefix_len, tasks, model.config.action_horizon)
    results = []
    for kind in (ModelRunner, StaticRunner):
        bench = Bench(*tasks)
        bench.runner = kind(model, layout, num_slots=6, num_denoise_steps=10)
        frames = [bench.prefill(Variant(name), slot) for slot, name in enumerate(VARIANTS)]
        noise = Variant('c').io('in.noise').numpy()
        actions = bench.runner.denoise(frames[-1], noise)
        batch = [bench.sequence(frame, index) for frame in frames for index in (0, 1)]
        results.append((actions, bench.finish(*batch)))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-4, rtol=0)
    assert results[0][1] == results[1][1]
    assert len(bench.runner.graphs) > 0


@pytest.mark.cuda
def test_actions_beside_decode_steps_equal_actions_alone():
    device = torch.device('cuda')
    model = golden.load_model(
        golden.config(), golden.CHECKPOINT, device=device, dtype=torch.float32
    )
    kind = task('text', length=40)
    layout = SlotLayout(model.config.max_prefix_len, [kind], model.config.action_horizon)
    bench = Bench(kind)
    bench.runner = StaticRunner(model, layout, num_slots=6, num_denoise_steps=10)
    texts = [bench.sequence(bench.prefill(Variant(name), slot)) for slot, name in enumerate('ab')]
    bench.step(*texts)
    frame, noise = bench.prefill(Variant('c'), slot=2), Variant('c').io('in.noise').numpy()
    alone = bench.runner.denoise(frame, noise)
    for _ in range(30):
        beside = bench.runner.denoise(frame, noise, lambda ns: bench.step(*texts))
        assert np.array_equal(beside, alone)
