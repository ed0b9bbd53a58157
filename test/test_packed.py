"""Serving layouts against plain layers, and the two ways to attend: pairs that must agree."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from oxygen_ros.model import packed
from oxygen_ros.model.attention import (
    MASKED,
    _attend_batched,
    _attend_one_by_one,
    attend,
)
from oxygen_ros.model.config import PRESETS, GemmaConfig, SiglipConfig
from oxygen_ros.model.gemma import Block, GatedLinear
from oxygen_ros.model.pi05 import first_largest
from oxygen_ros.model.siglip import Encoder
from oxygen_ros.model.weights import random_model

CPU = torch.device('cpu')
needs_onednn = pytest.mark.skipif(not packed.available(), reason='this torch has no such operators')


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@needs_onednn
@pytest.mark.parametrize('rows', [1, 6, 10, 200])
def test_a_packed_layer_gives_the_same_bits_in_bfloat16(rows):
    layer = nn.Linear(256, 640, bias=rows % 2 == 0).bfloat16()
    x = torch.randn(rows, 256).bfloat16()
    assert torch.equal(packed.PackedLinear(layer.weight, layer.bias)(x), layer(x))


@needs_onednn
@pytest.mark.parametrize('dtype, limit', [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_gelu_inside_the_product_is_as_near_to_the_exact_one_as_the_plain_layer(dtype, limit):
    layer = GatedLinear(256, 512).to(dtype)
    x = torch.randn(10, 256).to(dtype)
    exact = layer.double()(x.double())
    layer = layer.to(dtype)
    ours = (packed.PackedGatedLinear(layer.weight)(x) - exact).abs()
    plain = (layer(x) - exact).abs()
    assert ours.max() < limit
    assert ours.mean() <= 1.1 * plain.mean() + 1e-7


@needs_onednn
@pytest.mark.parametrize('dtype, limit', [(torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
def test_a_packed_vision_layer_is_the_plain_one(dtype, limit):
    plain = Encoder(SiglipConfig(256, 1, 1024, 4, 14, 56)).to(dtype).eval()
    serving = copy.deepcopy(plain)
    for name, layer in list(serving.named_children()):
        if isinstance(layer, nn.Linear):
            setattr(serving, name, packed._packed(layer))
    x = torch.randn(2, 16, 256).to(dtype)
    torch.testing.assert_close(serving(x), plain(x), atol=limit, rtol=limit)


@pytest.mark.parametrize('vocabulary', [512, 32000, 257152, 100])
def test_the_first_of_equal_largest_entries_is_found(vocabulary):
    logits = torch.randint(0, 40, (5, vocabulary)).to(torch.bfloat16)  # full of ties
    logits[3] = 1.0
    logits[4] = float('-inf')
    assert torch.equal(first_largest(logits), logits.argmax(dim=-1))


@needs_onednn
@pytest.mark.parametrize('dtype, limit', [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_a_packed_block_is_the_plain_block(dtype, limit):
    plain = Block(GemmaConfig(512, 1, 2048, 8, 1, 64), adaptive=False).to(dtype).eval()
    serving = copy.deepcopy(plain)
    for name, layer in list(serving.named_children()):
        if isinstance(layer, nn.Linear):
            setattr(serving, name, packed._packed(layer))
    x, attended = torch.randn(5, 512).to(dtype), torch.randn(5, 512).to(dtype)
    expected, got = plain.complete(x, attended), serving.complete(x, attended)
    torch.testing.assert_close(got, expected, atol=limit, rtol=limit)


@needs_onednn
def test_packing_replaces_large_layers_and_the_head_and_leaves_small_ones():
    tiny = random_model(PRESETS['dummy'], seed=0, device=CPU, dtype=torch.float32)
    packed.pack(tiny)
    assert tiny.head is None
    assert not any(isinstance(m, packed.PackedLinear) for m in tiny.modules())

    mid = random_model(PRESETS['mid'], seed=0, device=CPU, dtype=torch.bfloat16)
    hidden = torch.randn(3, 512).bfloat16()
    before = mid.logits(hidden)
    packed.pack(mid)
    assert torch.equal(mid.logits(hidden), before)
    assert isinstance(mid.vlm.blocks[0].gate_up, packed.PackedGatedLinear)
    assert isinstance(mid.vlm.blocks[0].down, packed.PackedLinear)


# --- attention ------------------------------------------------------------------------------------


def visible(*shape):
    """A random mask in which every row sees at least its first key."""
    seen = torch.rand(shape) < 0.7
    seen[..., 0] = True
    return torch.zeros(shape).masked_fill(~seen, MASKED)


@pytest.mark.parametrize('kv_heads', [1, 2])
@pytest.mark.parametrize('batch', [(), (3,)])
@pytest.mark.parametrize('tokens', [1, 3, 150])
@pytest.mark.parametrize('masked', [False, True])
def test_slot_by_slot_in_blocks_equals_one_batched_product(kv_heads, batch, tokens, masked):
    heads, dim, keys = 8, 16, 90
    store = torch.randn(*batch, kv_heads, keys + 20, dim)
    k, v = store[..., 5 : 5 + keys, :], store[..., 12 : 12 + keys, :]  # strided views, as of a slot
    rows = torch.randn(*batch, kv_heads, tokens * heads // kv_heads, dim)
    bias = visible(*batch, tokens, keys) if masked else None
    torch.testing.assert_close(
        _attend_one_by_one(rows, k, v, bias), _attend_batched(rows, k, v, bias)
    )


@pytest.mark.parametrize('kv_heads', [1, 2])
def test_folded_heads_equal_repeated_keys_and_values(kv_heads):
    q, bias = torch.randn(7, 8, 16), visible(7, 30)
    k, v = torch.randn(2, kv_heads, 30, 16)
    repeated_k, repeated_v = (x.repeat_interleave(8 // kv_heads, dim=0) for x in (k, v))
    logits = torch.einsum('tnd,nsd->nts', q, repeated_k) / 4 + bias
    expected = torch.einsum('nts,nsd->tnd', logits.softmax(-1), repeated_v).flatten(1)
    torch.testing.assert_close(attend(q, k, v, bias), expected)


def test_a_row_that_sees_nothing_gives_numbers():
    q, k, v = torch.randn(1, 8, 16), torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    for dtype in (torch.float32, torch.bfloat16):
        out = attend(q.to(dtype), k.to(dtype), v.to(dtype), torch.full((1, 5), MASKED))
        assert out.isfinite().all()
