"""The training pass is the serving pass: same logits, same flow, on the same inputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip('torch')

from golden_pi05 import GOLDEN  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from oxygen_ros.engine.model_runner import ModelRunner  # noqa: E402
from oxygen_ros.engine.sequence import Frame, Sequence  # noqa: E402
from oxygen_ros.engine.slots import SlotLayout  # noqa: E402
from oxygen_ros.engine.tasks import LanguageTask  # noqa: E402
from oxygen_ros.model.attention import rotary_table  # noqa: E402
from oxygen_ros.model.config import Pi05Config, preset  # noqa: E402
from oxygen_ros.model.pi05 import Pi05  # noqa: E402
from oxygen_ros.model.processor import ModelInput  # noqa: E402
from oxygen_ros.model.rtc import Continuation, Trained  # noqa: E402
from oxygen_ros.model.training import (  # noqa: E402
    TextBatch,
    TrainingBatch,
    flow_loss,
    forward,
    losses,
    row_times,
)
from oxygen_ros.model.weights import random_model  # noqa: E402

CPU = torch.device('cpu')
TASK_PROMPTS = ((7, 8, 9), (11,))
TEXTS = ((30, 31, 32, 33, 34), (40, 41, 42))
TOLERANCE = {'rtol': 0.0, 'atol': 2e-5}  # same function, other order of float32 sums


@pytest.fixture(scope='module')
def config() -> Pi05Config:
    return preset('tabletop', prefix_attention='bidirectional')


@pytest.fixture(scope='module')
def model(config: Pi05Config) -> Pi05:
    return random_model(config, seed=5, device=CPU, dtype=torch.float32)


@pytest.fixture(scope='module')
def inputs(config: Pi05Config) -> list[ModelInput]:
    """Two samples with both cameras; the prompt of the first is shorter and gets padded."""
    rng = np.random.default_rng(3)
    size = config.vision.image_size
    return [
        ModelInput(
            images={
                slot: rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
                for slot in config.camera_slots
            },
            tokens=[2, *rng.integers(50, 700, length).tolist()],
            truncated_tokens=0,
        )
        for length in (9, 14)
    ]


def training_batch(config: Pi05Config, inputs: list[ModelInput]) -> TrainingBatch:
    images = np.stack([np.stack(list(sample.images.values())) for sample in inputs])
    pixels = torch.from_numpy(images).float() / 255.0 * 2.0 - 1.0
    longest = max(len(sample.tokens) for sample in inputs)
    padding = 77  # any token will do, nobody may see it
    tokens = [sample.tokens + [padding] * (longest - len(sample.tokens)) for sample in inputs]
    texts = []
    for prompt, text in zip(TASK_PROMPTS, TEXTS, strict=True):
        row = torch.tensor([*prompt, *text]).expand(len(inputs), -1)
        counted = torch.arange(row.shape[1] - 1).expand(len(inputs), -1) >= len(prompt) - 1
        texts.append(TextBatch(row[:, :-1], row[:, 1:], counted))
    return TrainingBatch(
        images=pixels.permute(0, 1, 4, 2, 3),
        tokens=torch.tensor(tokens),
        num_tokens=torch.tensor([len(sample.tokens) for sample in inputs]),
        actions=torch.zeros(len(inputs), config.action_horizon, config.action_dim),
        texts=tuple(texts),
    )


def language_tasks() -> list[LanguageTask]:
    return [
        LanguageTask(
            name=f'task{i}',
            prompt_tokens=prompt,
            period_frames=1,
            max_new_tokens=8,
            max_age_ns=10**9,
            priority=0,
            stream=False,
        )
        for i, prompt in enumerate(TASK_PROMPTS)
    ]


class Served:
    """One frame in the ordinary model runner."""

    def __init__(
        self, model: Pi05, inputs: ModelInput, continuation: Continuation | None = None
    ) -> None:
        self.tasks = language_tasks()
        layout = SlotLayout(model.config.max_prefix_len, self.tasks, model.config.action_horizon)
        self.runner = ModelRunner(
            model, layout, num_slots=2, num_denoise_steps=2, continuation=continuation
        )
        self.frame = Frame(0, 0, 1, self.runner.prefix_len(inputs), 0)
        self.runner.prefill(self.frame, inputs)

    @torch.inference_mode()
    def velocity(self, noisy: torch.Tensor, time: float) -> torch.Tensor:
        model, layout, n = self.runner.model, self.runner.layout, self.frame.prefix_len
        rows = slice(layout.prefix_start(n), layout.prefix_capacity + len(noisy))
        k, v = (cache[:, self.frame.slot, :, rows] for cache in (self.runner.k, self.runner.v))
        rotary = rotary_table(n + len(noisy), model.config.vlm.head_dim, CPU)[n:]
        return model.velocity(noisy, model.modulations(torch.tensor([time]))[0], rotary, k, v)

    def logits(self, task: int, text: tuple[int, ...]) -> torch.Tensor:
        """The logits that lead to each token of `text`, which the tail is made to hold."""
        sequence = Sequence(self.tasks[task], self.frame, pending=TASK_PROMPTS[task])
        model, rows = self.runner.model, []
        read = model.greedy_tokens
        try:
            # The runner hands hidden rows to the greedy choice; what it would choose from is asked.
            model.greedy_tokens = lambda hidden: rows.append(hidden) or read(hidden)
            for token in text:
                self.runner.decode([sequence])
                sequence.append(token, eos_id=-1)
        finally:
            del model.greedy_tokens
        return torch.cat(rows) @ model.embedding.weight.T


@pytest.mark.parametrize('num_cameras', [1, 2])
def test_the_training_pass_equals_the_serving_path(
    config: Pi05Config, model: Pi05, inputs: list[ModelInput], num_cameras: int
) -> None:
    kept = [
        replace(sample, images=dict(list(sample.images.items())[:num_cameras])) for sample in inputs
    ]
    rng = np.random.default_rng(1)
    shape = (len(kept), 3, config.action_horizon, config.action_dim)
    noisy = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
    times = torch.from_numpy(rng.uniform(0.1, 1.0, shape[:2]).astype(np.float32))
    with torch.inference_mode():
        trained = forward(model, training_batch(config, kept), noisy, times)
    for i, sample in enumerate(kept):
        served = Served(model, sample)
        last = served.runner._last_hidden[served.frame.slot]
        torch.testing.assert_close(trained.prefix_rows[i], last, **TOLERANCE)
        for draw in range(shape[1]):
            expected = served.velocity(noisy[i, draw], float(times[i, draw]))
            torch.testing.assert_close(trained.velocity[i, draw], expected, **TOLERANCE)
        for task, text in enumerate(TEXTS):
            logits = trained.logits[task][i, len(TASK_PROMPTS[task]) - 1 :]
            torch.testing.assert_close(logits, served.logits(task, text), **TOLERANCE)


def test_every_weight_learns(config: Pi05Config, inputs: list[ModelInput]) -> None:
    model = random_model(config, seed=5, device=CPU, dtype=torch.float32).requires_grad_(True)
    batch = training_batch(config, inputs)
    noise = torch.randn(2, 2, config.action_horizon, config.action_dim)
    result = losses(model, batch, noise, torch.full((2, 2), 0.4))
    (result.flow + sum(result.texts)).backward()
    still = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert not still


def test_only_the_text_counts_not_the_task_prompt(
    config: Pi05Config, model: Pi05, inputs: list[ModelInput]
) -> None:
    batch = training_batch(config, inputs)
    text = batch.texts[0]
    targets = text.targets.clone()
    targets[:, 0] = 1  # inside the task prompt
    changed = replace(batch, texts=(replace(text, targets=targets), batch.texts[1]))
    noise = torch.zeros(2, 1, config.action_horizon, config.action_dim)
    times = torch.full((2, 1), 0.5)
    with torch.inference_mode():
        before, after = (losses(model, b, noise, times).texts[0] for b in (batch, changed))
    assert torch.equal(before, after)


def test_a_causal_prefix_is_refused(config: Pi05Config, inputs: list[ModelInput]) -> None:
    causal = replace(config, prefix_attention='causal')
    model = random_model(causal, seed=5, device=CPU, dtype=torch.float32)
    noisy = torch.zeros(2, 1, config.action_horizon, config.action_dim)
    with pytest.raises(ValueError, match='bidirectional'):
        forward(model, training_batch(config, inputs), noisy, torch.ones(2, 1))


# --- rows that are being executed already ---------------------------------------------------------


def test_rows_being_executed_are_clean_and_not_counted() -> None:
    """LeRobot's own training batch of golden/rtc, with its own velocity."""
    golden = {
        key.removeprefix('train.'): value
        for key, value in load_file(GOLDEN / 'rtc' / 'trained_rtc.safetensors').items()
        if key.startswith('train.')
    }
    actions, noise, delays = golden['actions'], golden['noise'], golden['delays']
    times = row_times(golden['time'], delays, actions.shape[1])
    torch.testing.assert_close(times, golden['model_time'], rtol=0, atol=0)
    noisy = times[..., None] * noise + (1 - times[..., None]) * actions
    torch.testing.assert_close(noisy, golden['x_t'], rtol=0, atol=1e-6)
    executed = torch.arange(actions.shape[1]) < delays[:, None]
    assert torch.equal(noisy[executed], actions[executed])
    loss = flow_loss(golden['pred_v'], noise - actions, times)
    torch.testing.assert_close(loss[None], golden['loss_mean'], rtol=0, atol=1e-6)
    each = [
        flow_loss(golden['pred_v'][i], (noise - actions)[i], times[i]) for i in range(len(delays))
    ]
    torch.testing.assert_close(torch.stack(each), golden['loss_per_sample'], rtol=0, atol=1e-6)


def test_a_loss_without_delays_is_the_loss_with_delays_of_zero(
    config: Pi05Config, model: Pi05, inputs: list[ModelInput]
) -> None:
    batch = training_batch(config, inputs)
    seeded = torch.Generator().manual_seed(4)
    noise = torch.randn(2, 3, config.action_horizon, config.action_dim, generator=seeded)
    times = torch.rand(2, 3, generator=seeded) * 0.9 + 0.1
    with torch.no_grad():
        plain = losses(model, batch, noise, times).flow
        none = losses(model, batch, noise, times, torch.zeros(2, 3, dtype=torch.int64)).flow
        some = losses(model, batch, noise, times, torch.full((2, 3), 2)).flow
    torch.testing.assert_close(none, plain, rtol=1e-5, atol=0)
    assert (some - plain).abs() > 1e-3 * plain


def test_a_chunk_that_continues_executed_rows_is_trained_as_it_is_served(
    config: Pi05Config, model: Pi05, inputs: list[ModelInput]
) -> None:
    """Two Euler steps of the training pass, with a time per row, are `denoise_after`."""
    seeded = torch.Generator().manual_seed(5)
    delay, leftover = 3, torch.randn(5, config.action_dim, generator=seeded)
    noise = torch.randn(config.action_horizon, config.action_dim, generator=seeded)
    served = Served(model, inputs[1], Trained(max_delay=4))
    ours = served.runner.denoise_after(served.frame, noise.numpy(), leftover.numpy(), delay)
    batch = training_batch(config, inputs[1:])
    x = noise.clone()
    for time in (1.0, 0.5):
        x[:delay] = leftover[:delay]
        rows = row_times(torch.tensor([[time]]), torch.tensor([[delay]]), config.action_horizon)
        with torch.no_grad():
            x = x - 0.5 * forward(model, batch, x[None, None], rows).velocity[0, 0]
    x[:delay] = leftover[:delay]
    torch.testing.assert_close(torch.from_numpy(ours), x, **TOLERANCE)
    assert np.array_equal(ours[:delay], leftover[:delay].numpy())
    plain = served.runner.denoise(served.frame, noise.numpy())
    assert np.abs(plain - ours)[delay:].max() > 1e-3  # the model saw what is executed
