"""Attention over a view of a KV slot, and the rotary tables it needs.

Knows nothing of slots, tasks or layers: it gets queries, keys, values and perhaps a bias.
Called by every block of both Gemma stacks.

Axes: B batch, T query tokens, S key tokens, N query heads, K kv heads, G = N / K query heads per
kv head, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASKED = -2.3819763e38
"""Bias of a forbidden key. Finite, as in openpi (models/gemma.py), so that a row with no visible
key yields numbers and not NaN."""


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return softmax(q k^T / sqrt(D) + bias) v, heads side by side.

    The G query heads that share a kv head are folded into query rows, so keys and values are never
    repeated and may be strided views into a slot.

    Args:
        q: (..., T, N, D) rotated queries.
        k: (..., K, S, D) rotated keys.
        v: (..., K, S, D) values.
        bias: (..., T, S) float32 added to the logits, 0 or `MASKED`; None if all keys are visible.

    Returns:
        (..., T, N * D) in the dtype of `q`.
    """
    *lead, t, n, d = q.shape
    kv_heads, s = k.shape[-3], k.shape[-2]
    groups = n // kv_heads
    rows = q.unflatten(-2, (kv_heads, groups)).transpose(-4, -3)  # (..., K, T, G, D)
    rows = rows.reshape(*lead, kv_heads, t * groups, d) * d**-0.5
    logits = torch.matmul(rows, k.transpose(-1, -2)).float()  # (..., K, T * G, S)
    if bias is not None:
        logits.view(*lead, kv_heads, t, groups, s).add_(bias[..., None, :, None, :])
    weights = logits.softmax(dim=-1).to(v.dtype)
    out = torch.matmul(weights, v).view(*lead, kv_heads, t, groups, d)
    return out.transpose(-4, -3).reshape(*lead, t, n * d)


def rotary_table(num_positions: int, head_dim: int, device: torch.device) -> Tensor:
    """Return (num_positions, 2, D) float32: cosines and sines of every position's angles.

    Theta 10000; the two halves of D share their frequencies (rotate-half form, Gemma).
    """
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(
        torch.arange(num_positions, device=device, dtype=torch.float32), 10000.0**-exponent
    )
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate heads `x` (..., T, heads, D) by `rotary` (..., T, 2, D) in the dtype of `x`."""
    cos, sin = rotary.to(x.dtype).unsqueeze(-2).unbind(-3)  # each (..., T, 1, D)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
