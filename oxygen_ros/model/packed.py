"""Linear layers whose weights oneDNN has laid out for itself, for serving on a CPU.

A plain `nn.Linear` hands oneDNN the weight as it is, and oneDNN reorders it in every call; with
the few rows of a denoise or decode step that costs more than the product. Knows nothing of what a
layer is for; called once, when a model is ready to be served.

The operators are those that torch's own compiler emits. They are not public API, so a torch that
lacks them keeps its plain layers: `available` asks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oxygen_ros.model.gemma import GatedLinear
from oxygen_ros.model.pi05 import Pi05
from oxygen_ros.model.siglip import GeluLinear

MIN_ELEMENTS = 1 << 17
"""Below this size of a weight the call costs more than the reordering it saves."""


def available() -> bool:
    """Whether this torch has the operators."""
    ops = torch.ops.mkldnn
    names = ('_linear_pointwise', '_reorder_linear_weight')
    return torch.backends.mkldnn.is_available() and all(hasattr(ops, name) for name in names)


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())


class PackedLinear(nn.Module):
    """Computes what an `nn.Linear` with this weight and bias does, to the bit in bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = _pack(weight), bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, 'none', [], '')


class PackedGeluLinear(PackedLinear):
    """A `GeluLinear` with the gelu inside the product."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, 'gelu', [], 'tanh')


class PackedGatedLinear(nn.Module):
    """A `GatedLinear` with the gelu inside the product.

    It is taken before the product is rounded, so in bfloat16 this is nearer to the exact function.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        gate, up = weight.chunk(2)
        self.gate, self.up = _pack(gate), _pack(up)

    def forward(self, x: Tensor) -> Tensor:
        linear = torch.ops.mkldnn._linear_pointwise
        gate = linear(x, self.gate, None, 'gelu', [], 'tanh')
        return gate * linear(x, self.up, None, 'none', [], '')


def pack(model: Pi05, *, differentiable_flow: bool = False) -> None:
    """Pack every large enough linear layer of a model on the CPU, and a copy of its language head.

    The plain weights are gone afterwards: such a model serves and is not saved. Packed layers have
    no derivative; `differentiable_flow` leaves plain what `Pi05.velocity` runs through.
    """
    flow = {model, *model.expert.modules()} if differentiable_flow else set()
    for module in list(model.modules()):
        if module in flow:
            continue
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear) and layer.weight.numel() >= MIN_ELEMENTS:
                setattr(module, name, _packed(layer))
    if model.embedding.weight.numel() >= MIN_ELEMENTS:
        model.head = PackedLinear(model.embedding.weight, None)


def _packed(layer: nn.Linear) -> nn.Module:
    if isinstance(layer, GatedLinear):
        return PackedGatedLinear(layer.weight)
    if isinstance(layer, GeluLinear):
        return PackedGeluLinear(layer.weight, layer.bias)
    return PackedLinear(layer.weight, layer.bias)
