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
BLOCK_ROWS = 512
"""Query rows of one block on a CPU."""


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
    kv_heads = k.shape[-3]
    groups = n // kv_heads
    rows = q.unflatten(-2, (kv_heads, groups)).transpose(-4, -3)  # (..., K, T, G, D)
    rows = rows.reshape(*lead, kv_heads, t * groups, d) * d**-0.5
    if q.is_cpu and not torch.is_grad_enabled():
        out = _attend_one_by_one(rows, k, v, bias)
    else:
        out = _attend_batched(rows, k, v, bias)
    out = out.view(*lead, kv_heads, t, groups, d)
    return out.transpose(-4, -3).reshape(*lead, t, n * d)


def _attend_batched(rows: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """All slots and kv heads in one product: rows (..., K, T * G, D) to the same shape."""
    logits = torch.matmul(rows, k.transpose(-1, -2))  # (..., K, T * G, S)
    if bias is not None:
        grouped = logits.unflatten(-2, (bias.shape[-2], -1))
        logits = (grouped + bias[..., None, :, None, :].to(logits.dtype)).flatten(-3, -2)
    # softmax computes in float32 inside, whatever it takes and gives.
    return torch.matmul(logits.softmax(dim=-1), v)


def _attend_one_by_one(rows: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """The same on a CPU, slot by slot and head by head.

    A batched product copies a strided view of slots first, a plain one does not.
    """
    out = torch.empty_like(rows)
    if rows.ndim > 3:  # over slots
        for i in range(len(rows)):
            for head in range(rows.shape[1]):
                slot_bias = None if bias is None else bias[i]
                _attend_in_blocks(rows[i, head], k[i, head], v[i, head], slot_bias, out[i, head])
    else:
        for head in range(len(rows)):
            _attend_in_blocks(rows[head], k[head], v[head], bias, out[head])
    return out


def _attend_in_blocks(rows: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Attend from rows (T * G, D) to keys and values (S, D), a block of rows at a time, so that
    the logits of a block stay in the cache. bias: (T, S) or (1, S)."""
    num_tokens = len(rows) if bias is None else len(bias)
    groups = len(rows) // num_tokens
    block_tokens = max(1, BLOCK_ROWS // groups)
    keys = k.t()
    for first in range(0, num_tokens, block_tokens):
        block = slice(first * groups, (first + block_tokens) * groups)
        logits = torch.mm(rows[block], keys)
        if bias is not None:
            tokens = bias[first : first + block_tokens, None].to(logits.dtype)
            logits.view(-1, groups, logits.shape[-1]).add_(tokens)
        torch.mm(logits.softmax(dim=-1), v, out=out[block])


def rotary_table(num_positions: int, head_dim: int, device: torch.device) -> Tensor:
    """Return (num_positions, 2, D) float32: what `rotate` multiplies by at every position.

    Cosines, and sines with the first half negated. Theta 10000; the two halves of D share their
    frequencies (rotate-half form, Gemma).
    """
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(
        torch.arange(num_positions, device=device, dtype=torch.float32), 10000.0**-exponent
    )
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)], dim=1)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate heads `x` (..., T, heads, D) by `rotary` (..., T, 2, D) in the dtype of `x`."""
    cos, sin = rotary.to(x.dtype).unsqueeze(-2).unbind(-3)  # each (..., T, 1, D)
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin
