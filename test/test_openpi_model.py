"""openpi's own PI0Pytorch beside our Pi05: the same random weights, at the sizes of preset `mid`.

The goldens hold openpi's numbers for one tiny checkpoint; here openpi itself runs, where it is
installed with its changed transformers. One of three cameras is absent: masked there, left out
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from golden_pi05 import CPU, Prefilled

torch = pytest.importorskip('torch')
if find_spec('openpi') is None:
    pytest.skip('openpi is not installed', allow_module_level=True)

from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from oxygen_ros.model.checkpoints import TIED_EMBEDDING  # noqa: E402
from oxygen_ros.model.config import CAMERA_SLOTS, PRESETS  # noqa: E402
from oxygen_ros.model.weights import load_model  # noqa: E402

MID = PRESETS['mid']
ABSENT = CAMERA_SLOTS[1]
NUM_TOKENS = 24


@pytest.fixture(scope='module')
def build() -> Iterator[Callable[[str], Any]]:
    """Make openpi's model in 'float32' or 'bfloat16'; only its sizes are not the released ones."""
    try:
        from openpi.models_pytorch import gemma_pytorch, pi0_pytorch
        from transformers.models.siglip import check  # noqa: F401
    except (ImportError, TypeError) as error:
        pytest.skip(f'openpi without its changed transformers 4.53.2: {error}')
    variants = {'vlm': MID.vlm, 'expert': MID.expert}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pi0_pytorch._gemma, 'get_config', variants.__getitem__)
        patch.setattr(
            gemma_pytorch,
            'PaliGemmaForConditionalGeneration',
            smaller(gemma_pytorch.PaliGemmaForConditionalGeneration, shrink_paligemma),
        )
        patch.setattr(
            gemma_pytorch, 'GemmaForCausalLM', smaller(gemma_pytorch.GemmaForCausalLM, shrink_gemma)
        )
        yield lambda dtype: pi0_pytorch.PI0Pytorch(
            SimpleNamespace(
                pi05=True,
                dtype=dtype,
                paligemma_variant='vlm',
                action_expert_variant='expert',
                action_dim=MID.action_dim,
                action_horizon=MID.action_horizon,
                pytorch_compile_mode=None,
            )
        ).eval()


def smaller(kind: Any, shrink: Callable[[Any], None]) -> Callable[..., Any]:
    """openpi writes vocabulary and vision tower as literals; change them at the last moment."""

    def make(config: Any) -> Any:
        shrink(config)
        return kind(config=config)

    return make


def shrink_gemma(config: Any) -> None:
    config.vocab_size = MID.vocab_size


def shrink_paligemma(config: Any) -> None:
    shrink_gemma(config.text_config)
    config._vocab_size = MID.vocab_size
    vision, ours = config.vision_config, MID.vision
    vision.hidden_size, vision.num_hidden_layers = ours.width, ours.depth
    vision.intermediate_size, vision.num_attention_heads = ours.mlp_dim, ours.num_heads
    vision.projection_dim = config.projection_dim = MID.vlm.width


def randomise(model: Any) -> None:
    """Weights that keep activations near 1 and use every part, the adaptive norms' gates too."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            drawn /= np.sqrt(np.prod(parameter.shape[1:]))
        else:
            drawn *= 0.1
            if 'layer_norm' in name or ('layernorm' in name and 'vision' in name):
                drawn += 1
        parameter.data.copy_(drawn)


@pytest.fixture(scope='module')
def checkpoint(build: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """openpi's random weights in float32, saved with the names its converter writes."""
    model = build('float32')
    randomise(model)
    weights = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name != TIED_EMBEDDING
    }
    path = tmp_path_factory.mktemp('openpi') / 'model.safetensors'
    save_file(weights, path)
    return path


class Inputs:
    """One random observation, in openpi's shapes and in ours."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = (1, 3, MID.vision.image_size, MID.vision.image_size)
        self.images = {
            slot: 2 * torch.rand(shape, generator=generator) - 1 for slot in CAMERA_SLOTS
        }
        self.tokens = torch.randint(2, MID.vocab_size, (NUM_TOKENS,), generator=generator)
        self.noise = torch.randn((MID.action_horizon, MID.action_dim), generator=generator)

    def openpis(self) -> Any:
        prompt = torch.zeros((1, MID.max_token_len), dtype=torch.long)
        prompt[0, :NUM_TOKENS] = self.tokens
        return SimpleNamespace(
            images=self.images,
            image_masks={slot: torch.tensor([slot != ABSENT]) for slot in CAMERA_SLOTS},
            state=torch.zeros(1, MID.action_dim),
            tokenized_prompt=prompt,
            tokenized_prompt_mask=torch.arange(MID.max_token_len)[np.newaxis] < NUM_TOKENS,
            token_ar_mask=None,
            token_loss_mask=None,
        )

    def ours(self) -> Tensor:
        return torch.cat([self.images[slot] for slot in CAMERA_SLOTS if slot != ABSENT])


@pytest.fixture(scope='module')
def inputs() -> Inputs:
    return Inputs()


@pytest.fixture(scope='module')
def openpis(
    build: Callable[[str], Any], checkpoint: Path, inputs: Inputs
) -> Callable[[str], Tensor]:
    """openpi's actions (horizon, action_dim) in one of its precisions."""
    from safetensors.torch import load_file

    def actions(dtype: str) -> Tensor:
        model = build(dtype)
        missing, unexpected = model.load_state_dict(load_file(checkpoint), strict=False)
        assert set(missing) <= {TIED_EMBEDDING} and not unexpected
        noise = inputs.noise[np.newaxis]
        return model.sample_actions(CPU, inputs.openpis(), noise=noise)[0].float()

    return actions


@pytest.fixture(scope='module')
def exact(openpis: Callable[[str], Tensor]) -> Tensor:
    return openpis('float32')


def our_actions(checkpoint: Path, inputs: Inputs, dtype: torch.dtype) -> Tensor:
    model = load_model(MID, checkpoint, device=CPU, dtype=dtype)
    with torch.inference_mode():
        return Prefilled(model, inputs.ours(), inputs.tokens).denoise(model, inputs.noise)


def test_float32_actions_are_openpis(checkpoint: Path, inputs: Inputs, exact: Tensor) -> None:
    actions = our_actions(checkpoint, inputs, torch.float32)
    assert (exact - inputs.noise).abs().max() > 0.1, 'the model does something'
    torch.testing.assert_close(actions, exact, atol=5e-5, rtol=0)


def test_bfloat16_actions_are_as_near_to_float32_as_openpis_own(
    checkpoint: Path, inputs: Inputs, exact: Tensor, openpis: Callable[[str], Tensor]
) -> None:
    theirs = (openpis('bfloat16') - exact).abs()
    ours = (our_actions(checkpoint, inputs, torch.bfloat16) - exact).abs()
    assert ours.max() < 2.0 * theirs.max()
    assert ours.mean() < 1.5 * theirs.mean()


def test_a_camera_that_is_not_absent_would_be_seen(
    checkpoint: Path, inputs: Inputs, exact: Tensor
) -> None:
    """Guards the tolerance: it could not hide a camera too many."""
    model = load_model(MID, checkpoint, device=CPU, dtype=torch.float32)
    images = torch.cat(list(inputs.images.values()))
    with torch.inference_mode():
        actions = Prefilled(model, images, inputs.tokens).denoise(model, inputs.noise)
    assert (actions - exact).abs().max() > 1e-3
