"""The SigLIP vision tower and the projector into the backbone's width.

All present cameras of a frame are one batch; absent cameras never get here. Knows nothing of
prompts or attention masks. Source: openpi models/siglip.py and its PyTorch overlay, which leaves
out Hugging Face's division of image tokens by sqrt(width).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from oxygen_ros.model.config import SiglipConfig

EPS = 1e-6


class GeluLinear(nn.Linear):
    """The first layer of the MLP: gelu of a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(super().forward(x), approximate='tanh')


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend without a mask; plain products are the faster way in bfloat16 on a CPU."""
    if q.is_cpu and q.dtype == torch.bfloat16:
        weights = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2)).softmax(dim=-1)
        return torch.matmul(weights, v)
    return functional.scaled_dot_product_attention(q, k, v)


class Encoder(nn.Module):
    """One pre-LN transformer layer with biases, no mask and no rotary positions."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(config.width, eps=EPS)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width, eps=EPS)
        self.up = GeluLinear(config.width, config.mlp_dim)
        self.down = nn.Linear(config.mlp_dim, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (C, T, W)."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (C, heads, T, head dim)
        attended = _attend(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(self.up(self.mlp_norm(x)))


class Siglip(nn.Module):
    """Pixels to backbone tokens."""

    def __init__(self, config: SiglipConfig, output_width: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, config.width, config.patch_size, stride=config.patch_size)
        self.position = nn.Parameter(torch.zeros(config.tokens_per_image, config.width))
        self.encoders = nn.ModuleList(Encoder(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=EPS)
        self.project = nn.Linear(config.width, output_width)

    def encode(self, images: Tensor) -> Tensor:
        """Return (C, tokens, width) for images (C, 3, S, S) float32 in [-1, 1]."""
        x = self.patch(images).flatten(2).transpose(1, 2)  # row-major patches
        # Patches and positions stay float32 in bfloat16 serving (SPEC of openpi's converter).
        x = (x + self.position).to(self.project.weight.dtype)
        for encoder in self.encoders:
            x = encoder(x)
        return self.norm(x)

    def forward(self, images: Tensor) -> Tensor:
        """Return (C, tokens, output_width) for images (C, 3, S, S) float32 in [-1, 1]."""
        return self.project(self.encode(images))
