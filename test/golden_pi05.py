"""The golden pi0.5: openpi's and OxyGen's own outputs for one tiny checkpoint (see golden/)."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from oxygen_ros.model.attention import rotary_table
from oxygen_ros.model.config import CAMERA_SLOTS, GemmaConfig, Pi05Config, SiglipConfig
from oxygen_ros.model.pi05 import Pi05, causal_prefix_bias, euler_times
from oxygen_ros.model.weights import load_model

GOLDEN = Path(__file__).parent / 'golden'
CHECKPOINT = GOLDEN / 'tiny_pi05.weights.safetensors'
VARIANTS = ('a', 'b', 'c')  # last camera masked; all present; middle camera masked
CPU = torch.device('cpu')

# Tensors this small are slower on two threads, by far if the machine is shared.
torch.set_num_threads(1)


def config(prefix_attention: str = 'bidirectional') -> Pi05Config:
    return Pi05Config(
        vlm=GemmaConfig(64, 4, 128, 8, 1, 16),
        expert=GemmaConfig(32, 4, 64, 8, 1, 16),
        vision=SiglipConfig(48, 2, 96, 4, 14, 56),
        vocab_size=512,
        action_horizon=10,
        max_token_len=20,
        prefix_attention=prefix_attention,
    )


@functools.cache
def model(prefix_attention: str = 'bidirectional', dtype: torch.dtype = torch.float32) -> Pi05:
    return load_model(config(prefix_attention), CHECKPOINT, device=CPU, dtype=dtype)


@functools.cache
def tensors(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f'{name}.safetensors')


class Variant:
    """One golden input and the references computed from it; batch axis taken off."""

    def __init__(self, name: str) -> None:
        self.name = name

    def io(self, key: str) -> Tensor:
        """openpi's tensor."""
        return tensors('tiny_pi05.io')[f'{self.name}.{key}'].squeeze(0)

    def text(self, key: str) -> Tensor:
        """OxyGen's tensor."""
        return tensors('tiny_pi05_text')[f'{self.name}.{key}'].squeeze(0)

    @property
    def pixels(self) -> dict[str, Tensor]:
        """uint8 (h, w, 3) of the present cameras, in slot order."""
        return {
            slot: self.io(f'in.image_uint8.{slot}')
            for slot in CAMERA_SLOTS
            if tensors('tiny_pi05.io')[f'{self.name}.in.image_mask.{slot}'].item()
        }

    @property
    def images(self) -> Tensor:
        """(C, 3, S, S) float32 in [-1, 1] of the present cameras."""
        stacked = torch.stack(list(self.pixels.values()))
        return (stacked.float() / 255.0 * 2.0 - 1.0).permute(0, 3, 1, 2)

    @property
    def tokens(self) -> Tensor:
        """(P,) valid prompt tokens."""
        return self.io('in.tokenized_prompt')[self.io('in.tokenized_prompt_mask')].long()

    @property
    def valid(self) -> Tensor:
        """(68,) bool: the rows of the padded golden prefix that exist in a packed one."""
        return self.io('prefix_pad_mask')


class Prefilled:
    """The K/V, hidden rows and rotary table of one prefix, in tensors of their own."""

    def __init__(
        self, pi05: Pi05, images: Tensor, tokens: Tensor, *, last_only: bool = False
    ) -> None:
        self.prefix = pi05.embed_prefix(images, tokens)
        self.length = len(self.prefix)
        vlm = pi05.config.vlm
        room = self.length + pi05.config.action_horizon + 64
        shape = (vlm.depth, vlm.num_kv_heads, room, vlm.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=pi05.dtype) for _ in range(2))
        self.rotary = rotary_table(room, vlm.head_dim, CPU)
        bias = None
        if pi05.config.prefix_attention == 'causal':
            bias = causal_prefix_bias(self.length - len(tokens), self.length, CPU)
        n = self.length
        self.hidden = pi05.prefill(
            self.prefix, self.rotary[:n], self.k[:, :, :n], self.v[:, :, :n], bias,
            last_only=last_only,
        )  # fmt: skip

    def denoise(self, pi05: Pi05, noise: Tensor, num_steps: int = 10) -> Tensor:
        end = self.length + len(noise)
        modulations = pi05.modulations(torch.from_numpy(euler_times(num_steps)))
        rotary = self.rotary[self.length : end]
        return pi05.denoise(noise, modulations, rotary, self.k[:, :, :end], self.v[:, :, :end])
