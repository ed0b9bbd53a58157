"""pi0.5: one prefix, read by the action expert and by the language head.

Owns the arithmetic of a frame: embed and prefill the prefix, denoise an action chunk against it,
extend language sequences behind it. Knows no slot bookkeeping, task or deadline: it gets views into
the KV tensor and writes into them. Called by `engine/model_runner.py`.
Source: openpi models_pytorch/pi0_pytorch.py and gemma_pytorch.py; paper arXiv 2504.16054.

Axes: n prefix tokens, H horizon, A action dim, R rows (new tokens of a batch), S slots, Q query
rows per slot, L visible span of a slot, N query heads, K kv heads, D head dim, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from oxygen_ros.model.attention import MASKED, attend
from oxygen_ros.model.config import Pi05Config
from oxygen_ros.model.gemma import Gemma, Modulation, split_modulation
from oxygen_ros.model.siglip import Siglip

MIN_PERIOD, MAX_PERIOD = 4e-3, 4.0
"""Shortest and longest period of the sinusoidal embedding of the flow-matching time."""
ARGMAX_BLOCK = 128
"""Divides the vocabularies of PaliGemma and of the presets."""


@dataclass(frozen=True)
class ExtendPlan:
    """Where the R new tokens of one batched pass stand, and what each may see."""

    slots: Tensor  # (R,) int64: index on the slot axis of the views
    rows: Tensor  # (R,) int64: row of the view into which the token's K/V go
    gather: Tensor  # (S, Q) int64: token that sits in query row q of slot s (padding: any token)
    scatter: Tensor  # (R,) int64: s * Q + q of each token, the inverse of `gather`
    bias: Tensor  # (S, Q, L) float32: 0 where the query row may see the key, else MASKED


def euler_times(num_steps: int) -> np.ndarray:
    """Return (num_steps,) float32 flow-matching times from 1 towards 0.

    Accumulated in float32 exactly as openpi's loop does, so 1.0, 0.9, 0.79999995, ...
    """
    times = np.empty(num_steps, np.float32)
    step, time = np.float32(-1.0 / num_steps), np.float32(1.0)
    for i in range(num_steps):
        times[i] = time
        time = np.float32(time + step)
    return times


def causal_prefix_bias(num_image_tokens: int, length: int, device: torch.device) -> Tensor:
    """Return (length, length) float32: image rows see images, prompt rows also earlier prompt.

    OxyGen's prefix (its models_pytorch/pi05_pytorch.py `embed_prefix`).
    """
    index = torch.arange(length, device=device)
    visible = (index < num_image_tokens) | (index <= index[:, None])
    return torch.zeros(length, length, device=device).masked_fill_(~visible, MASKED)


def _ending_with(cache: Tensor, rows: Tensor) -> Tensor:
    """Return (K, n + H, D): a layer's keys or values whose last H are `rows` (K, H, D)."""
    horizon = rows.shape[1]
    if torch.is_grad_enabled():  # written into the slot they would tie it to this pass's graph
        return torch.cat([cache[:, :-horizon], rows], dim=1)
    cache[:, -horizon:].copy_(rows)
    return cache


def first_largest(logits: Tensor) -> Tensor:
    """Return (R,) int64, the first largest entry of each row (R, vocab).

    On a CPU argmax is not vectorised and the maximum is, so the row is searched block by block.
    """
    if not logits.is_cpu or logits.shape[-1] % ARGMAX_BLOCK:
        return logits.argmax(dim=-1)
    blocks = logits.unflatten(-1, (-1, ARGMAX_BLOCK))
    block = blocks.amax(dim=-1).argmax(dim=-1)
    within = blocks[torch.arange(len(logits)), block].argmax(dim=-1)
    return block * ARGMAX_BLOCK + within


class Pi05(nn.Module):
    def __init__(self, config: Pi05Config) -> None:
        super().__init__()
        self.config = config
        self.vision = Siglip(config.vision, config.vlm.width)
        self.embedding = nn.Embedding(config.vocab_size, config.vlm.width)
        # The language head is the embedding, unless a copy laid out for products stands here.
        self.head: nn.Module | None = None
        self.vlm = Gemma(config.vlm, adaptive=False)
        self.expert = Gemma(config.expert, adaptive=True)
        self.action_in = nn.Linear(config.action_dim, config.expert.width)
        self.action_out = nn.Linear(config.expert.width, config.action_dim)
        self.time_in = nn.Linear(config.expert.width, config.expert.width)
        self.time_out = nn.Linear(config.expert.width, config.expert.width)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and K/V (float32 islands: see `weights.parameter_dtype`)."""
        return self.embedding.weight.dtype

    # --- prefix -------------------------------------------------------------------------------

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Return (..., W) scaled embeddings of int token ids (...)."""
        return self.embedding(tokens) * math.sqrt(self.config.vlm.width)

    def embed_prefix(self, images: Tensor, tokens: Tensor) -> Tensor:
        """Return (n, W): the tokens of the present cameras, then the valid prompt tokens.

        Args:
            images: (C, 3, S, S) float32 in [-1, 1], present cameras only, in slot order.
            tokens: (P,) int64 prompt tokens without padding.
        """
        return torch.cat([self.vision(images).flatten(0, 1), self.embed_tokens(tokens)])

    def prefill(
        self,
        prefix: Tensor,
        rotary: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None = None,
        *,
        last_only: bool = True,
    ) -> Tensor:
        """Write the K/V of a prefix and return its final hidden rows.

        Everyone reads the K/V, but only the last token's hidden row is ever used (for the first
        token of a task without a task prompt), so the last layer computes only that one.

        Args:
            prefix: (n, W) from `embed_prefix`.
            rotary: (n, 2, D) of positions 0 .. n - 1.
            k, v: (layers, K, n, D) views, written.
            bias: (n, n) or (1, n) float32, or None if every row sees the whole prefix.
            last_only: False computes all n rows of the last layer as well.

        Returns:
            (1, W), or (n, W) if not `last_only`.
        """
        x = prefix
        last_layer = self.config.vlm.depth - 1
        for layer, block in enumerate(self.vlm):
            q, key, value, _ = block.project(x, rotary)
            k[layer].copy_(key.transpose(0, 1))
            v[layer].copy_(value.transpose(0, 1))
            if last_only and layer == last_layer:
                x, q = x[-1:], q[-1:]
                bias = None if bias is None else bias[-1:]
            x = block.complete(x, attend(q, k[layer], v[layer], bias))
        return self.vlm.norm(x)[0]

    # --- actions ------------------------------------------------------------------------------

    def time_embedding(self, times: Tensor) -> Tensor:
        """Return (T, W) float32 sines then cosines of float times (T,)."""
        half = self.config.expert.width // 2
        fraction = torch.linspace(0.0, 1.0, half, dtype=torch.float64, device=times.device)
        period = MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** fraction
        angle = times.double()[:, None] * (2 * math.pi / period)
        return torch.cat([angle.sin(), angle.cos()], dim=-1).float()

    def condition(self, times: Tensor) -> Tensor:
        """Return (T, W) float32, the adaRMS condition of float times (T,)."""
        hidden = functional.silu(self.time_in(self.time_embedding(times)))
        return functional.silu(self.time_out(hidden))

    def modulations(self, times: Tensor) -> list[list[Modulation]]:
        """Return for each float time (T,) what every expert norm is told.

        They depend on the time alone, so a fixed number of denoise steps needs them once.
        """
        raw = self.expert.modulations(self.condition(times))  # (T, 2 * depth + 1, 3W)
        return [[split_modulation(norm, self.dtype) for norm in time] for time in raw]

    def velocity(
        self,
        x: Tensor,
        modulation: list[Modulation],
        rotary: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return (H, A) float32, the flow at noisy actions x (H, A) and one time.

        Args:
            modulation: of one time, from `modulations`; or with a leading H axis, of one per row.
            rotary: (H, 2, D) of positions n .. n + H - 1.
            k, v: (layers, K, n + H, D) views; the last H rows are scratch and are overwritten,
                except under autograd, which follows x alone and finds the views untouched.
            bias: (1, n + H) float32, or None if every row of the views is visible.
        """
        hidden = self.action_in(x).to(self.dtype)
        for layer, block in enumerate(self.expert):
            before, after = modulation[2 * layer], modulation[2 * layer + 1]
            q, key, value, gate = block.project(hidden, rotary, before)
            keys = _ending_with(k[layer], key.transpose(0, 1))
            values = _ending_with(v[layer], value.transpose(0, 1))
            hidden = block.complete(hidden, attend(q, keys, values, bias), gate, after)
        return self.action_out(self.expert.norm(hidden, modulation[-1])[0].float())

    def denoise(
        self,
        noise: Tensor,
        modulations: list[list[Modulation]],
        rotary: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Integrate from noise (H, A) at time 1 to actions (H, A) at time 0.

        One Euler step per entry of `modulations`; other arguments as in `velocity`.
        """
        step = float(np.float32(-1.0 / len(modulations)))
        x = noise
        for modulation in modulations:
            x = x + step * self.velocity(x, modulation, rotary, k, v, bias)
        return x

    # --- language -----------------------------------------------------------------------------

    def extend(
        self, tokens: Tensor, rotary: Tensor, k: Tensor, v: Tensor, plan: ExtendPlan
    ) -> Tensor:
        """Advance language sequences of several slots in one pass.

        Args:
            tokens: (R,) int64, the new tokens of all sequences.
            rotary: (R, 2, D) of their positions.
            k, v: (layers, S, K, L, D) views, written at `plan.slots`, `plan.rows`.

        Returns:
            (R, W) final hidden rows.
        """
        x = self.embed_tokens(tokens)
        for layer, block in enumerate(self.vlm):
            q, key, value, _ = block.project(x, rotary)
            k[layer, plan.slots, :, plan.rows] = key
            v[layer, plan.slots, :, plan.rows] = value
            attended = attend(q[plan.gather], k[layer], v[layer], plan.bias)
            x = block.complete(x, attended.flatten(0, 1)[plan.scatter])
        return self.vlm.norm(x)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return (..., vocab) raw logits of hidden rows (..., W); there is no soft-cap."""
        if self.head is not None:
            return self.head(hidden)
        return functional.linear(hidden, self.embedding.weight)

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        """Return (R,) int64, the most likely next token of each hidden row (R, W)."""
        return first_largest(self.logits(hidden))
