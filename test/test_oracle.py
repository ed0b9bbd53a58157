"""An independent oracle: Hugging Face's PaliGemma with the same tiny weights.

Different authors, different code, padded tensors and its own cache; it has to say what we say.
"""

from __future__ import annotations

import golden_pi05 as golden
import pytest
import torch
from golden_pi05 import CHECKPOINT, VARIANTS, Prefilled, Variant
from safetensors.torch import load_file
from test_engine import Bench, task

transformers = pytest.importorskip('transformers', reason='the oracle is a test dependency')

IMAGE_TOKEN = 511  # the last id of the tiny vocabulary; no golden prompt uses it


@pytest.fixture(scope='module')
def paligemma():
    text = {
        'hidden_size': 64,
        'num_hidden_layers': 4,
        'intermediate_size': 128,
        'num_attention_heads': 8,
        'num_key_value_heads': 1,
        'head_dim': 16,
        'vocab_size': 512,
        'model_type': 'gemma',
        'hidden_activation': 'gelu_pytorch_tanh',
    }
    vision = {
        'hidden_size': 48,
        'intermediate_size': 96,
        'num_hidden_layers': 2,
        'num_attention_heads': 4,
        'patch_size': 14,
        'image_size': 56,
        'projection_dim': 64,
        'model_type': 'siglip_vision_model',
        'vision_use_head': False,
    }
    config = transformers.PaliGemmaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        projection_dim=64,
        hidden_size=64,
    )
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    prefix = 'paligemma_with_expert.paligemma.'
    weights = {
        name.removeprefix(prefix): tensor
        for name, tensor in load_file(CHECKPOINT).items()
        if name.startswith(prefix)
    }
    loaded = model.load_state_dict(weights, strict=False)
    assert not loaded.unexpected_keys
    assert not loaded.missing_keys
    return model


@pytest.fixture(params=VARIANTS)
def variant(request) -> Variant:
    return Variant(request.param)


def paligemma_inputs(variant: Variant) -> dict[str, torch.Tensor]:
    image_tokens = torch.full((16 * len(variant.pixels),), IMAGE_TOKEN)
    ids = torch.cat([image_tokens, variant.tokens])[None]
    return {
        'input_ids': ids,
        'attention_mask': torch.ones_like(ids),
        'token_type_ids': torch.zeros_like(ids),  # one bidirectional block, as in pi0.5
        'pixel_values': variant.images,
    }


def test_the_backbones_logits_are_those_of_paligemma(paligemma, variant):
    pi05 = golden.model()
    given = paligemma_inputs(variant)
    with torch.inference_mode():
        prefilled = Prefilled(pi05, variant.images, variant.tokens)
        ours = torch.nn.functional.linear(prefilled.hidden, pi05.embedding.weight)
        theirs = paligemma(**given, use_cache=True).logits[0]
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


def test_greedy_text_is_that_of_paligemmas_generate(paligemma, variant):
    given = paligemma_inputs(variant)
    with torch.inference_mode():
        generated = paligemma.generate(
            **given, max_new_tokens=16, do_sample=False, eos_token_id=None
        )
    bench = Bench(task(prompt=(), length=16))
    (tokens,) = bench.finish(bench.sequence(bench.prefill(variant, slot=1)))
    assert tokens == generated[0, given['input_ids'].shape[1] :].tolist()
