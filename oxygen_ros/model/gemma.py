"""The Gemma stack of pi0.5, in its plain form (backbone) and its adaptive form (action expert).

A block hands out its queries, keys and values and takes the attention result back; where K/V are
kept and who may see whom is the caller's affair (`pi05.py`). Source: openpi models/gemma.py.

Axes: T tokens, W width, M mlp width, N query heads, K kv heads, D head dim. Leading axes are free.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from oxygen_ros.model.attention import rotate
from oxygen_ros.model.config import GemmaConfig

EPS = 1e-6


def _rms(x: Tensor) -> Tensor:
    """Normalise the last axis in float32."""
    return functional.rms_norm(x.float(), x.shape[-1:], eps=EPS)


class RMSNorm(nn.Module):
    """Gemma's RMSNorm: float32, times (1 + weight), no gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, modulation: None = None) -> tuple[Tensor, None]:
        return (_rms(x) * (1.0 + self.weight.float())).to(x.dtype), None


Modulation = tuple[Tensor, Tensor, Tensor]
"""What one adaptive norm is told by the time: 1 + scale, shift (float32), gate, each (..., W)."""


def split_modulation(raw: Tensor, dtype: torch.dtype) -> Modulation:
    """Cut (..., 3W) of an adaptive norm's dense layer; gates act in the activations' dtype."""
    scale, shift, gate = raw.chunk(3, dim=-1)
    return 1.0 + scale, shift, gate.to(dtype)


class AdaRMSNorm(nn.Module):
    """RMSNorm whose scale, shift and gate follow from the flow-matching time.

    They depend on no observation, so callers compute them once per denoise time and pass them in.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, modulation: Modulation) -> tuple[Tensor, Tensor]:
        scale, shift, gate = modulation
        return torch.addcmul(shift, _rms(x), scale).to(x.dtype), gate


class GatedLinear(nn.Linear):
    """Both input projections of Gemma's MLP: gelu(gate x) * up x; weight rows are [gate | up]."""

    def __init__(self, width: int, mlp_dim: int) -> None:
        super().__init__(width, 2 * mlp_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = super().forward(x).chunk(2, dim=-1)
        return functional.gelu(gate, approximate='tanh') * up


def residual(x: Tensor, update: Tensor, gate: Tensor | None) -> Tensor:
    return x + update if gate is None else x + gate * update


class Block(nn.Module):
    """One transformer layer, cut open at the attention."""

    def __init__(self, config: GemmaConfig, *, adaptive: bool) -> None:
        super().__init__()
        norm = AdaRMSNorm if adaptive else RMSNorm
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        heads = config.num_heads + 2 * config.num_kv_heads
        self.attention_norm = norm(config.width)
        # One product instead of three: rows are [q | k | v].
        self.qkv = nn.Linear(config.width, heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.num_heads * config.head_dim, config.width, bias=False)
        self.mlp_norm = norm(config.width)
        self.gate_up = GatedLinear(config.width, config.mlp_dim)
        self.down = nn.Linear(config.mlp_dim, config.width, bias=False)

    def project(
        self, x: Tensor, rotary: Tensor, modulation: Modulation | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q (..., T, N, D) and k (..., T, K, D), both rotated, v like k, and the gate."""
        normed, gate = self.attention_norm(x, modulation)
        heads = self.qkv(normed).unflatten(-1, (-1, self.head_dim))  # (..., T, N + 2K, D)
        rotated = rotate(heads[..., : -self.num_kv_heads, :], rotary)
        q, k = rotated.split([self.num_heads, self.num_kv_heads], dim=-2)
        return q, k, heads[..., -self.num_kv_heads :, :], gate

    def complete(
        self,
        x: Tensor,
        attended: Tensor,
        gate: Tensor | None = None,
        modulation: Modulation | None = None,
    ) -> Tensor:
        """Finish the layer: add the attention result (..., T, N * D) to x (..., T, W)."""
        x = residual(x, self.out(attended), gate)
        normed, gate = self.mlp_norm(x, modulation)
        return residual(x, self.down(self.gate_up(normed)), gate)


class Gemma(nn.Module):
    """A stack of blocks and the norm behind the last one."""

    def __init__(self, config: GemmaConfig, *, adaptive: bool) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Block(config, adaptive=adaptive) for _ in range(config.depth))
        self.norm = (AdaRMSNorm if adaptive else RMSNorm)(config.width)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)  # type: ignore[arg-type]  # nn.ModuleList forgets its type

    def modulations(self, cond: Tensor) -> Tensor:
        """Return (..., 2 * depth + 1, 3W) float32 for conditions (..., W) of an adaptive stack.

        Uncut (see `split_modulation`), attention and MLP norm of each block, then the final norm.
        """
        norms = [norm for norm in self.modules() if isinstance(norm, AdaRMSNorm)]
        return torch.stack([norm.dense(cond) for norm in norms], dim=-2)
