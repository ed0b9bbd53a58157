"""The engine on the golden pi0.5: sharing, batching and time limits change nothing but speed."""

from __future__ import annotations

import dataclasses
import json

import golden_pi05 as golden
import numpy as np
import pytest
import torch
from golden_pi05 import GOLDEN, VARIANTS, Variant

from oxygen_ros.engine.baselines import (
    ContinuousBatchingEngine,
    IsolatedEngine,
    SharedEngine,
)
from oxygen_ros.engine.engine import (
    NO_DEADLINE_NS,
    Engine,
    NonFiniteActions,
    ObservationRefused,
)
from oxygen_ros.engine.model_runner import ModelRunner
from oxygen_ros.engine.scheduler import Scheduler
from oxygen_ros.engine.sequence import FinishReason, Frame, Sequence
from oxygen_ros.engine.slots import SlotLayout
from oxygen_ros.engine.tasks import LanguageTask
from oxygen_ros.model.processor import ModelInput, Processor
from oxygen_ros.model.prompt import ByteTokenizer
from oxygen_ros.model.transforms import make_adapter
from oxygen_ros.observation import Observation

NEVER = -1  # an end token no model produces
FOREVER_NS = 10**18
PROMPTS = {'text': (40, 41, 42), 'memory': (50,)}


def task(
    name='text', *, prompt=None, length=8, period=1, priority=0, stream=True, max_age_ns=FOREVER_NS
):
    prompt = PROMPTS[name] if prompt is None else tuple(prompt)
    return LanguageTask(name, prompt, period, length, max_age_ns, priority, stream)


def inputs(variant: Variant) -> ModelInput:
    images = {slot: pixels.numpy() for slot, pixels in variant.pixels.items()}
    return ModelInput(images, variant.tokens.tolist(), 0)


class Bench:
    """A model runner and frames on it, without engine or scheduler."""

    def __init__(self, *tasks, prefix_attention='bidirectional', num_slots=6):
        self.tasks = tasks
        model = golden.model(prefix_attention)
        layout = SlotLayout(model.config.max_prefix_len, tasks, model.config.action_horizon)
        self.runner = ModelRunner(model, layout, num_slots=num_slots, num_denoise_steps=10)

    def prefill(self, variant: Variant, slot: int) -> Frame:
        given = inputs(variant)
        frame = Frame(0, 0, slot, self.runner.prefix_len(given), 0)
        self.runner.prefill(frame, given)
        return frame

    def sequence(self, frame: Frame, index=0) -> Sequence:
        return Sequence(self.tasks[index], frame, self.tasks[index].prompt_tokens)

    def step(self, *batch: Sequence) -> None:
        for sequence, predicted in zip(batch, self.runner.decode(batch), strict=True):
            sequence.accept(predicted, NEVER)

    def finish(self, *batch: Sequence) -> list[list[int]]:
        while live := [sequence for sequence in batch if sequence.live]:
            self.step(*live)
        return [sequence.tokens for sequence in batch]


@pytest.fixture(params=VARIANTS)
def variant(request) -> Variant:
    return Variant(request.param)


# --- against the goldens --------------------------------------------------------------------------


def test_the_slots_give_openpis_actions(variant):
    bench = Bench(task())
    frame = bench.prefill(variant, slot=3)
    actions = bench.runner.denoise(frame, variant.io('in.noise').numpy())
    np.testing.assert_allclose(actions, variant.io('actions').numpy(), atol=5e-5, rtol=0)


def test_greedy_text_on_a_causal_prefix_is_oxygens_with_the_first_row_corrected(variant):
    bench = Bench(task(prompt=(), length=24), prefix_attention='causal')
    (tokens,) = bench.finish(bench.sequence(bench.prefill(variant, slot=2)))
    assert tokens == variant.text('fixed_gather.tokens').tolist()


def test_from_oxygens_own_first_token_on_its_text_and_kv_are_reproduced(variant):
    """Its first token comes from a wrong row where a camera is masked; everything after follows."""
    reference = variant.text('tokens').tolist()
    bench = Bench(task(prompt=reference[:1], length=23), prefix_attention='causal')
    frame = bench.prefill(variant, slot=0)
    (tokens,) = bench.finish(bench.sequence(frame))
    assert tokens == reference[1:]
    first = bench.runner.layout.prefix_capacity
    for layer in range(4):
        for name, cache in (('k', bench.runner.k), ('v', bench.runner.v)):
            theirs = variant.text(f'final_static_kv.{layer}.{name}')[:, 68 : 68 + 23]
            ours = cache[layer, 0, :, first : first + 23]
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_text_of_a_bidirectional_prefix_is_oxygens_decoder_on_openpis_mask(variant):
    reference = variant.text('tokens_if_prefix_bidirectional').tolist()
    bench = Bench(task(prompt=reference[:1], length=23))
    (tokens,) = bench.finish(bench.sequence(bench.prefill(variant, slot=1)))
    assert tokens == reference[1:]


def test_the_end_token_stops_where_oxygen_stops():
    example = json.loads((GOLDEN / 'tiny_pi05_text.json').read_text())['eos_example']
    first = example['tokens_returned'][0]
    bench = Bench(task(prompt=(first,), length=20), prefix_attention='causal')
    sequence = bench.sequence(bench.prefill(Variant('a'), slot=0))
    while sequence.live:
        sequence.accept(bench.runner.decode([sequence])[0], example['eos_token'])
    assert sequence.finish_reason == FinishReason.EOS
    # OxyGen keeps the end token as the last of its `current_step` tokens.
    kept = example['output_tokens'][: example['current_step']]
    assert [first, *sequence.tokens, example['eos_token']] == kept


# --- pairs: the same result by another way --------------------------------------------------------


def test_one_shared_prefill_equals_a_prefill_per_task(variant):
    shared = Bench(task('text'), task('memory'))
    frame = shared.prefill(variant, slot=0)
    actions = shared.runner.denoise(frame, variant.io('in.noise').numpy())
    texts = shared.finish(shared.sequence(frame, 0), shared.sequence(frame, 1))

    separate = Bench(task('text'), task('memory'))
    frames = [separate.prefill(variant, slot) for slot in range(3)]
    alone = separate.runner.denoise(frames[0], variant.io('in.noise').numpy())
    assert np.array_equal(actions, alone)
    assert texts == [
        separate.finish(separate.sequence(frames[1], 0))[0],
        separate.finish(separate.sequence(frames[2], 1))[0],
    ]
    assert (shared.runner.num_prefills, separate.runner.num_prefills) == (1, 3)


def test_sequences_of_different_frames_tasks_and_steps_in_one_batch_equal_each_alone():
    """Prefixes of three lengths, two tasks with prompts of two lengths, four different ages."""
    together = Bench(task('text', length=20), task('memory', length=15))
    starts = [(Variant(name), slot, index) for slot, name in enumerate('abc') for index in (0, 1)]
    frames = {slot: together.prefill(variant, slot) for variant, slot, _ in starts}
    batch = [together.sequence(frames[slot], index) for _, slot, index in starts]
    together.step(*batch[:2])
    together.step(*batch[:4])
    together.step(batch[0], batch[5])
    texts = together.finish(*batch)

    for (variant, slot, index), text in zip(starts, texts, strict=True):
        alone = Bench(task('text', length=20), task('memory', length=15))
        assert alone.finish(alone.sequence(alone.prefill(variant, slot), index)) == [text]
    assert len({tuple(text) for text in texts}) == len(texts)  # they are not all the same text


def test_attention_on_slots_equals_dense_attention_over_the_same_tokens():
    """The slot view with masks and right-aligned prefix against one plain causal pass."""
    bench = Bench(task('text', length=9))
    variant = Variant('b')
    frame = bench.prefill(variant, slot=4)
    (tokens,) = bench.finish(bench.sequence(frame))

    pi05 = golden.model()
    fed = [*PROMPTS['text'], *tokens[:-1]]
    with torch.inference_mode():
        dense = golden.Prefilled(pi05, variant.images, variant.tokens)
        prefix = pi05.embed_prefix(variant.images, variant.tokens)
        x = torch.cat([prefix, pi05.embed_tokens(torch.tensor(fed))])
        n, total = len(prefix), len(prefix) + len(fed)
        visible = torch.ones(total, total).tril().bool()
        visible[:, :n] = True
        bias = torch.zeros(total, total).masked_fill(~visible, float('-inf'))
        bias[:n, n:] = float('-inf')
        for layer in range(4):
            block = pi05.vlm.blocks[layer]
            q, k, v, _ = block.project(x, dense.rotary[:total])
            logits = torch.einsum('tnd,sd->nts', q, k[:, 0]) * 16**-0.5 + bias
            mixed = torch.einsum('nts,sd->tnd', logits.softmax(-1), v[:, 0])
            x = block.complete(x, mixed.flatten(1))
        predicted = pi05.greedy_tokens(pi05.vlm.norm(x)[0])[n + len(PROMPTS['text']) - 1 :]
    assert predicted.tolist() == tokens


def test_a_slot_used_before_gives_the_same_as_a_fresh_one():
    used, fresh = Bench(task('text'), task('memory')), Bench(task('text'), task('memory'))
    longer = used.prefill(Variant('b'), slot=0)
    used.finish(used.sequence(longer, 0), used.sequence(longer, 1))
    for bench in (used, fresh):
        frame = bench.prefill(Variant('a'), slot=0)
        bench.actions = bench.runner.denoise(frame, Variant('a').io('in.noise').numpy())
        bench.texts = bench.finish(bench.sequence(frame, 0), bench.sequence(frame, 1))
    assert np.array_equal(used.actions, fresh.actions)
    assert used.texts == fresh.texts


def test_text_that_grows_in_one_slot_does_not_touch_the_actions_of_another():
    bench = Bench(task())
    noise = Variant('a').io('in.noise').numpy()
    first, second = (bench.prefill(Variant('a'), slot) for slot in (0, 1))
    before = bench.runner.denoise(first, noise)
    bench.finish(bench.sequence(first))
    assert np.array_equal(bench.runner.denoise(second, noise), before)


# --- the engine -----------------------------------------------------------------------------------


class Clock:
    """Time that passes only when the runner works."""

    def __init__(self):
        self.now_ns = 0

    def __call__(self):
        return self.now_ns


class TimedRunner:
    """The real runner, with a price in nanoseconds on each pass and a log of what was done."""

    def __init__(self, runner: ModelRunner, clock: Clock, log: list[str]):
        self._runner, self._clock, self.log = runner, clock, log
        self.prices = {'prefill': 30, 'denoise': 10, 'decode': 5}
        self.fail: dict[str, Exception] = {}

    @property
    def num_prefills(self):
        return self._runner.num_prefills

    @num_prefills.setter
    def num_prefills(self, value):
        self._runner.num_prefills = value

    def prefix_len(self, given):
        return self._runner.prefix_len(given)

    def clear(self, slot):
        self._runner.clear(slot)

    def prefill(self, frame, given):
        self._pay('prefill', frame.number)
        self._runner.prefill(frame, given)

    def denoise(self, frame, noise, meanwhile=None):
        self._pay('denoise', frame.number)
        return self._runner.denoise(frame, noise, meanwhile)

    def denoise_after(self, frame, noise, leftover, delay):
        self._pay('denoise', frame.number)
        return self._runner.denoise_after(frame, noise, leftover, delay)

    def decode(self, batch):
        self._pay('decode', [(s.task.name, s.frame.number, len(s.tokens)) for s in batch])
        return self._runner.decode(batch)

    def _pay(self, work, detail):
        self.log.append((work, detail))
        self._clock.now_ns += self.prices[work]
        if work in self.fail:
            raise self.fail.pop(work)


class Live:
    """An engine on the golden model whose clock and log the test can read."""

    def __init__(
        self, *tasks, num_slots=6, max_batch=16, eos_id=NEVER, max_draft=0, engine=Engine,
        seed=7, continuation=None, leftover=None, delta_mask=(),
    ):  # fmt: skip
        model = golden.model()
        config = model.config
        self.clock, self.log, self.chunks, self.updates = Clock(), [], [], []
        self.waiting = False
        layout = SlotLayout(config.max_prefix_len, tasks, config.action_horizon)
        real = ModelRunner(
            model, layout, num_slots=num_slots, num_denoise_steps=10, continuation=continuation
        )
        self.runner = TimedRunner(real, self.clock, self.log)
        self.scheduler = Scheduler(
            tasks,
            num_slots=num_slots,
            max_batch=max_batch,
            eos_id=eos_id,
            max_draft=max_draft,
        )
        processor = Processor(
            image_size=56,
            camera_slots=config.camera_slots,
            max_token_len=config.max_token_len,
            action_dim=config.action_dim,
            action_horizon=config.action_horizon,
            tokenizer=ByteTokenizer(),
            prompt='plain',
            normalization='none',
            norm_stats=None,
            adapter=make_adapter('identity', 6, 6),
            delta_mask=delta_mask,
        )
        self.engine = engine(
            processor, self.scheduler, self.runner,
            action_period_ns=20, seed=seed,
            on_chunk=self._on_chunk, on_text=self._on_text, leftover=leftover,
            frame_waiting=lambda: self.waiting, clock_ns=self.clock,
        )  # fmt: skip

    def _on_chunk(self, chunk):
        self.log.append(('chunk', chunk.frame))
        self.chunks.append(chunk)

    def _on_text(self, update):
        self.log.append(('update', update.frame))
        self.updates.append(update)

    def step(self, number=0, deadline_ns=NO_DEADLINE_NS, **changes):
        self.engine.step(observation(number, **changes), deadline_ns)


def observation(number, seed=0, **changes):
    generator = np.random.default_rng(seed + number)
    given = Observation(
        frame=number,
        stamp_ns=1000 + number,
        time_ns=500 + number,
        images={
            slot: generator.integers(0, 255, (56, 56, 3), dtype=np.uint8)
            for slot in golden.CAMERA_SLOTS[:2]
        },
        state=np.zeros(6, np.float32),
        instruction='go',
    )
    return dataclasses.replace(given, **changes)


def kinds(log):
    return [entry[0] for entry in log]


def test_actions_leave_before_the_first_token_of_their_frame():
    live = Live(task('text', length=3), task('memory', length=3))
    live.step()
    assert kinds(live.log)[:4] == ['prefill', 'denoise', 'chunk', 'decode']
    assert live.chunks[0].values.shape == (10, 6)


def test_every_frame_is_prefilled_once_whatever_its_tasks():
    live = Live(task('text', length=2), task('memory', length=2))
    for number in range(5):
        live.step(number)
    assert live.engine.stats.prefills == live.engine.stats.frames == 5
    assert live.runner.num_prefills == 5


def test_a_chunk_carries_frame_stamp_and_time_of_its_observation():
    live = Live()
    live.step(3)
    chunk = live.chunks[0]
    assert (chunk.frame, chunk.stamp_ns, chunk.time_ns, chunk.period_ns) == (3, 1003, 503, 20)


def test_text_carries_frame_and_stamp_of_the_observation_it_describes_however_late_it_ends():
    live = Live(task('text', length=12))
    live.step(0, deadline_ns=60)  # time for four steps only
    live.step(1)
    final = {u.frame: u.stamp_ns for u in live.updates if u.reason}
    assert final == {0: 1000, 1: 1001}


def test_decoding_stops_when_the_next_step_would_not_fit():
    live = Live(task('text', length=50))
    live.step(0, deadline_ns=40 + 23)  # 23 ns for steps of 5 ns
    assert kinds(live.log).count('decode') == 4
    assert live.clock.now_ns <= 63


def test_old_and_new_frames_advance_in_one_pass():
    live = Live(task('text', length=6))
    live.step(0, deadline_ns=40 + 10)
    live.step(1)
    passes = [detail for kind, detail in live.log if kind == 'decode']
    assert passes[2] == [('text', 0, 2), ('text', 1, 0)]


def test_a_newer_frame_stops_decoding_after_at_most_one_step():
    live = Live(task('text', length=50, stream=True))
    live._on_text = lambda update: None
    steps = 0
    real = live.runner.decode

    def decode_and_announce(batch):
        nonlocal steps
        steps += 1
        live.waiting = steps == 3
        return real(batch)

    live.runner.decode = decode_and_announce
    live.step(0)
    assert steps == 3


def test_frames_that_always_wait_let_the_texts_grow_slowly():
    live = Live(task('text', length=50))
    live.waiting = True
    for number in range(1, 31):
        live.step(number)
    assert 0 < kinds(live.log).count('decode') <= 3
    assert live.engine.stats.starved_frames > 0
    assert len(live.chunks) == 30


def test_texts_cut_by_many_frames_equal_texts_written_at_leisure():
    """Cross-frame batching, deadlines and shared slots, against each frame alone."""
    hurried = Live(task('text', length=9), task('memory', length=7, period=2), num_slots=8)
    for number in range(6):
        hurried.step(number, deadline_ns=hurried.clock.now_ns + 40 + 12)
    hurried.engine.decode(NO_DEADLINE_NS)

    for number in range(6):
        alone = Live(task('text', length=9), task('memory', length=7, period=2), num_slots=8)
        alone.step(number)
        assert finals(alone) == {k: v for k, v in finals(hurried).items() if k[1] == number}
        assert np.array_equal(alone.chunks[0].values, hurried.chunks[number].values)


@pytest.mark.parametrize('other, prefills', [(SharedEngine, 4), (IsolatedEngine, 4 + 4 + 2)])
def test_sharing_changes_neither_actions_nor_texts(other, prefills):
    """unified == shared == isolated; only the number of prefills and the order of work differ."""
    tasks = (task('text', length=9), task('memory', length=7, period=2))
    unified, compared = Live(*tasks, num_slots=8), Live(*tasks, num_slots=8, engine=other)
    for number in range(4):
        for live in (unified, compared):
            live.waiting = live is compared  # a waiting frame does not cut a baseline short
            live.step(number, deadline_ns=live.clock.now_ns + 40 + 12)
    unified.engine.decode(NO_DEADLINE_NS)
    assert finals(unified) == finals(compared)
    for ours, theirs in zip(unified.chunks, compared.chunks, strict=True):
        assert np.array_equal(ours.values, theirs.values)
    assert unified.engine.stats.prefills == 4
    assert compared.engine.stats.prefills == prefills
    assert {len(detail) for kind, detail in compared.log if kind == 'decode'} <= {1, 2}
    compared.scheduler.check_integrity()


def test_the_papers_method_decodes_a_fixed_number_of_steps_and_hands_the_actions_out_last():
    tasks = (task('text', length=9), task('memory', length=7, period=2))
    unified, paper = Live(*tasks), Live(*tasks, engine=ContinuousBatchingEngine)
    for number in range(4):
        for live in (unified, paper):
            live.step(number, deadline_ns=0)
    assert kinds(paper.log)[:8] == ['prefill', 'denoise', *['decode', 'update'] * 5][:8]
    assert kinds(paper.log)[: kinds(paper.log).index('chunk')].count('decode') == 5
    unified.engine.decode(NO_DEADLINE_NS)
    for _ in range(4):
        paper.engine.decode(NO_DEADLINE_NS)
    assert finals(unified) == finals(paper)
    for ours, theirs in zip(unified.chunks, paper.chunks, strict=True):
        assert np.array_equal(ours.values, theirs.values)


def finals(live):
    return {(u.task, u.frame): (u.text, u.reason) for u in live.updates if u.reason}


def test_streamed_deltas_add_up_to_the_text():
    live = Live(task('text', length=20), task('memory', length=10, stream=False))
    live.step()
    text = [u for u in live.updates if u.task == 'text']
    memory = [u for u in live.updates if u.task == 'memory']
    assert ''.join(u.delta for u in text) == text[-1].text
    assert [u.reason for u in text[:-1]] == [None] * (len(text) - 1)
    assert [u.reason for u in memory] == [FinishReason.LENGTH]
    assert memory[0].delta == memory[0].text


def test_no_pass_runs_after_the_last_token():
    live = Live(task('text', length=4))
    live.step()
    assert kinds(live.log).count('decode') == 4
    assert live.engine.stats.tokens == 4


def test_an_end_token_frees_the_slot_at_once():
    probe = Live(task('text', length=4))
    tokens: list[int] = []  # the third of these becomes the end token
    decode = probe.runner.decode
    probe.runner.decode = lambda batch: [tokens.extend(new) or new for new in decode(batch)]
    probe.step()
    live = Live(task('text', length=40), eos_id=tokens[2])
    live.step()
    assert finals(live)['text', 0][1] == FinishReason.EOS
    assert live.engine.stats.slots_used == 0
    assert kinds(live.log).count('decode') <= 3


def test_a_sequence_that_grows_too_old_ends_as_expired_with_what_it_has():
    live = Live(task('text', length=50, max_age_ns=60))
    live.step(0, deadline_ns=52)
    live.clock.now_ns = 1000
    live.step(1, deadline_ns=1000)
    assert finals(live)['text', 0][1] == FinishReason.EXPIRED
    assert live.engine.stats.drops == {'text_expired': 1}


def test_the_noise_follows_the_stamp_so_a_replayed_frame_acts_alike():
    first, second = Live(), Live()
    first.step(0)
    first.step(1)
    second.step(1)
    assert np.array_equal(first.chunks[1].values, second.chunks[0].values)
    assert not np.array_equal(first.chunks[0].values, first.chunks[1].values)


def test_an_absent_camera_costs_no_prefix_tokens():
    live = Live()
    one, two = observation(0), observation(0)
    one = dataclasses.replace(one, images={'base_0_rgb': two.images['base_0_rgb']})
    lengths = [live.runner.prefix_len(live.engine.processor.encode(o)) for o in (one, two)]
    assert lengths[1] - lengths[0] == 16


# --- when things break ----------------------------------------------------------------------------


@pytest.mark.parametrize('work', ['prefill', 'denoise'])
def test_a_device_error_before_the_actions_leaves_no_slot_taken_and_the_next_frame_works(work):
    live = Live(task('text', length=2))
    live.runner.fail[work] = RuntimeError('out of memory')
    with pytest.raises(RuntimeError, match='out of memory'):
        live.step(0)
    live.scheduler.check_integrity()
    assert (live.chunks, live.engine.stats.slots_used) == ([], 0)
    live.step(1)
    assert [chunk.frame for chunk in live.chunks] == [1]


@pytest.mark.case(43)
def test_a_device_error_while_decoding_keeps_the_actions_and_ends_the_texts_as_cancelled():
    live = Live(task('text', length=9), task('memory', length=9))
    live.runner.fail['decode'] = RuntimeError('device gone')
    with pytest.raises(RuntimeError, match='device gone'):
        live.step(0)
    assert [chunk.frame for chunk in live.chunks] == [0]
    assert {reason for _, reason in finals(live).values()} == {FinishReason.CANCELLED}
    assert live.engine.stats.drops == {'text_cancelled': 1, 'memory_cancelled': 1}
    live.step(1)
    live.scheduler.check_integrity()
    assert finals(live)['text', 1][1] == FinishReason.LENGTH


def test_non_finite_actions_are_never_handed_out_and_spoil_no_later_frame():
    live, healthy = Live(task('text', length=5)), Live(task('text', length=5))
    real = live.runner._runner
    live.runner.denoise = lambda frame, noise, meanwhile: real.denoise(
        frame, noise * np.float32(np.nan)
    )
    with pytest.raises(NonFiniteActions, match='frame 0'):
        live.step(0)
    assert live.chunks == []
    del live.runner.denoise
    live.step(1)
    healthy.step(1)
    assert np.array_equal(live.chunks[0].values, healthy.chunks[0].values)
    assert finals(live) == finals(healthy)


@pytest.mark.parametrize(
    'changes, complaint',
    [
        ({'state': np.zeros(5, np.float32)}, 'expected a state of 6 joints'),
        ({'state': np.full(6, np.nan, np.float32)}, 'expected a finite state'),
        ({'images': {}}, 'expected at least one camera'),
        ({'instruction': 'very ' * 50}, 'tokens too long for the model'),
    ],
)
def test_a_wrong_observation_is_refused_before_anything_is_taken(changes, complaint):
    live = Live(task())
    with pytest.raises(ObservationRefused, match=complaint):
        live.step(0, **changes)
    assert live.engine.stats.frames == 0
    live.scheduler.check_integrity()


def test_shutting_down_ends_every_text_with_that_reason():
    live = Live(task('text', length=50), task('memory', length=50))
    live.step(0, deadline_ns=50)
    live.engine.cancel(FinishReason.SHUTDOWN)
    assert {reason for _, reason in finals(live).values()} == {FinishReason.SHUTDOWN}
    assert live.engine.stats.live_sequences == 0


def test_a_warm_up_leaves_no_trace_but_the_measured_step_time():
    live = Live(task('text', length=3), task('memory', length=3))
    live.engine.warm_up()
    assert (live.chunks, live.updates) == ([], [])
    stats = live.engine.stats
    assert (stats.frames, stats.prefills, stats.tokens, stats.drops) == (0, 0, 0, {})
    assert stats.slots_used == 0
    live.scheduler.admit(live.scheduler.open_frame(0, 0, 10, 0), [task('text', length=3)])
    assert not live.scheduler.next_batch(now_ns=0, deadline_ns=4)  # a step is known to take 5
