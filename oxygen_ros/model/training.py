"""What pi0.5 is trained on: flow matching for actions, cross-entropy for language, in one pass.

Composes the very layers that are served (`Block`, `Siglip`, `attend`) over a batch axis, with
masks where serving has slots; owns no layer of its own. Knows no data, robot or optimiser. Called
by training programs. Source: openpi models/pi0.py `compute_loss`; paper arXiv 2504.16054.

Axes: B batch, C cameras, P prompt tokens (padded), n = C * image tokens + P, T tokens of one
language task (padded), R noise draws per sample, H horizon, A action dim, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from oxygen_ros.model.attention import MASKED, attend, rotary_table
from oxygen_ros.model.gemma import split_modulation
from oxygen_ros.model.pi05 import Pi05


@dataclass(frozen=True)
class TextBatch:
    """One language task: its task prompt and the text it should write, teacher-forced."""

    tokens: Tensor  # (B, T) int64: task prompt, then the text but for its last token
    targets: Tensor  # (B, T) int64: what follows each token
    counted: Tensor  # (B, T) bool: where the target is part of the text (not prompt, not padding)


@dataclass(frozen=True)
class TrainingBatch:
    """Samples with the same cameras; prompts and texts are padded behind."""

    images: Tensor  # (B, C, 3, S, S) float32 in [-1, 1], in slot order
    tokens: Tensor  # (B, P) int64
    num_tokens: Tensor  # (B,) int64: valid ones of each prompt
    actions: Tensor  # (B, H, A) float32, normalised and padded
    texts: tuple[TextBatch, ...]


@dataclass(frozen=True)
class Outputs:
    velocity: Tensor  # (B, R, H, A)
    logits: tuple[Tensor, ...]  # (B, T, vocabulary) of each language task
    image_tokens: Tensor  # (B, C, tokens, W), as they enter the backbone
    prefix_rows: Tensor  # (B, W), the final hidden row of each prefix's last token


@dataclass(frozen=True)
class Losses:
    """Scalars, and what auxiliary losses read: see `Outputs`."""

    flow: Tensor
    texts: tuple[Tensor, ...]
    image_tokens: Tensor
    prefix_rows: Tensor


def _bias(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, MASKED)


def _block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    return torch.block_diag(*(block.float() for block in blocks)).bool()


def row_times(times: Tensor, delays: Tensor, horizon: int) -> Tensor:
    """Return (..., H): times (...) for every row but the first `delays` (...), which get 0.

    At time 0 a row is clean: it is being executed, and the rest must continue it. A model trained
    so serves as `rtc_trained` (arXiv 2512.05964), with delays drawn evenly from 0 to its largest.
    """
    executed = torch.arange(horizon, device=times.device) < delays[..., None]
    return times[..., None].expand(executed.shape).masked_fill(executed, 0.0)


def flow_loss(velocity: Tensor, target: Tensor, row_times: Tensor) -> Tensor:
    """Return the mean squared error of the flow (..., H, A) over rows of a time (..., H) > 0."""
    counted = (row_times > 0).expand(velocity.shape[:-1])
    return functional.mse_loss(velocity[counted], target[counted])


def forward(model: Pi05, batch: TrainingBatch, noisy: Tensor, times: Tensor) -> Outputs:
    """Return the flow and the logits of a batch; equals the serving path on each sample.

    Each prefix is computed once. All language tasks stand behind it, blind to each other, and the
    action expert reads its K/V with R independent noise draws; gradients flow through the K/V.

    Args:
        noisy: (B, R, H, A) float32 noisy actions.
        times: (B, R) float32 flow-matching times in (0, 1]; or (B, R, H), see `row_times`.

    Raises:
        ValueError: the model's prefix attention is not bidirectional, or a task has no tokens.
    """
    if model.config.prefix_attention != 'bidirectional':
        raise ValueError("prefix_attention: training supports 'bidirectional' only")
    if any(text.tokens.shape[1] == 0 for text in batch.texts):
        raise ValueError('texts: expected at least one token of task prompt per language task')
    size, num_draws, horizon, _ = noisy.shape
    device = noisy.device

    image_tokens = model.vision(batch.images.flatten(0, 1)).unflatten(0, (size, -1))
    images = image_tokens.flatten(1, 2)
    prompt_len = batch.tokens.shape[1]
    n = images.shape[1] + prompt_len
    valid = torch.ones(size, n, dtype=torch.bool, device=device)
    valid[:, images.shape[1] :] = (
        torch.arange(prompt_len, device=device) < batch.num_tokens[:, None]
    )
    lengths = images.shape[1] + batch.num_tokens

    suffixes = [text.tokens for text in batch.texts]
    x = torch.cat([images, model.embed_tokens(torch.cat([batch.tokens, *suffixes], dim=1))], dim=1)
    offsets = [torch.arange(tokens.shape[1], device=device) for tokens in suffixes]
    positions = torch.cat(
        [
            torch.arange(n, device=device).expand(size, n),
            *(lengths[:, None] + offset for offset in offsets),
        ],
        dim=1,
    )
    total = x.shape[1]
    visible = torch.zeros(size, total, total, dtype=torch.bool, device=device)
    visible[:, :, :n] = valid[:, None]
    visible[:, n:, n:] = _block_diagonal([o <= o[:, None] for o in offsets])
    bias = _bias(visible)

    steps = torch.arange(horizon, device=device).repeat(num_draws)
    own = torch.ones(horizon, horizon, dtype=torch.bool, device=device)
    expert_visible = torch.cat(
        [
            valid[:, None].expand(size, len(steps), n),
            _block_diagonal([own] * num_draws).expand(size, -1, -1),
        ],
        dim=2,
    )
    expert_bias = _bias(expert_visible)

    table = rotary_table(n + total + horizon, model.config.vlm.head_dim, device)
    rotary, expert_rotary = table[positions], table[lengths[:, None] + steps]
    told = times if times.ndim == 3 else times[:, :, None]  # (B, R, 1 or H)
    raw = model.expert.modulations(model.condition(told.flatten())).unflatten(0, told.shape)
    raw = raw.expand(-1, -1, horizon, -1, -1).flatten(1, 2)  # (B, R * H, norms, 3W)
    modulations = [split_modulation(norm, model.dtype) for norm in raw.unbind(2)]
    hidden = model.action_in(noisy).flatten(1, 2).to(model.dtype)

    for layer, (block, expert) in enumerate(zip(model.vlm, model.expert, strict=True)):
        q, key, value, _ = block.project(x, rotary)
        k, v = key.transpose(1, 2), value.transpose(1, 2)
        x = block.complete(x, attend(q, k, v, bias))

        before, after = modulations[2 * layer], modulations[2 * layer + 1]
        q, key, value, gate = expert.project(hidden, expert_rotary, before)
        k = torch.cat([k[:, :, :n], key.transpose(1, 2)], dim=2)
        v = torch.cat([v[:, :, :n], value.transpose(1, 2)], dim=2)
        hidden = expert.complete(hidden, attend(q, k, v, expert_bias), gate, after)

    velocity = model.action_out(model.expert.norm(hidden, modulations[-1])[0].float())
    rows = model.vlm.norm(x[:, n:])[0]
    logits = functional.linear(rows, model.embedding.weight)
    return Outputs(
        velocity.unflatten(1, (num_draws, horizon)),
        logits.split([tokens.shape[1] for tokens in suffixes], dim=1),
        image_tokens,
        model.vlm.norm(x[torch.arange(size, device=device), lengths - 1])[0],
    )


def losses(
    model: Pi05,
    batch: TrainingBatch,
    noise: Tensor,
    times: Tensor,
    delays: Tensor | None = None,
) -> Losses:
    """Return the mean squared error of the flow and the cross-entropy per token of each task.

    Args:
        noise: (B, R, H, A) float32 standard normal.
        times: (B, R) float32; openpi draws 0.999 * Beta(1.5, 1) + 0.001.
        delays: (B, R) int64 rows that are executed already, see `row_times`; None trains none.
    """
    actions = batch.actions[:, None]
    if delays is None:
        time = times[:, :, None]
    else:
        time = times = row_times(times, delays, noise.shape[2])
    noisy = time[..., None] * noise + (1 - time[..., None]) * actions
    outputs = forward(model, batch, noisy, times)
    flow = flow_loss(outputs.velocity, noise - actions, time)
    texts = tuple(
        functional.cross_entropy(logits[text.counted].float(), text.targets[text.counted])
        for text, logits in zip(batch.texts, outputs.logits, strict=True)
    )
    return Losses(flow, texts, outputs.image_tokens, outputs.prefix_rows)
