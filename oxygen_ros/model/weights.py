"""Weights: openpi's tensor names to ours, one table for both directions.

Reads safetensors only, never pickle, straight to the device and dtype. Knows nothing of how the
model computes, nor which file holds what (`checkpoints.py`). Called when the node is configured.
Source of names and dtypes: openpi examples/convert_jax_model_to_pytorch.py, gemma_pytorch.py
`to_bfloat16_for_selected_params`. Its rule of dtypes holds for LeRobot's files too; LeRobot's own
bfloat16 mode keeps the whole vision tower in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from oxygen_ros.model.checkpoints import (
    EXPERT,
    LANGUAGE_HEAD,
    PALIGEMMA,
    CheckpointError,
    StoredTensor,
    find_tensors,
)
from oxygen_ros.model.config import Pi05Config
from oxygen_ros.model.pi05 import Pi05

STORED_DTYPES = {
    'BF16': torch.bfloat16,
    'F16': torch.float16,
    'F32': torch.float32,
    'F64': torch.float64,
}
"""Dtypes in which weights may be stored, by safetensors' names."""
STAGING_BYTES = 8 << 20
"""Of a weights file held at a time."""
MAX_LISTED = 100
"""Tensors that one error lists of each kind; a model of another size has thousands."""


def checkpoint_names(config: Pi05Config) -> dict[str, tuple[str, ...]]:
    """Return our parameter name -> openpi tensors that are stacked (dim 0) to make it."""
    vision = f'{PALIGEMMA}model.vision_tower.vision_model.'
    names: dict[str, tuple[str, ...]] = {
        'vision.position': (f'{vision}embeddings.position_embedding.weight',),
        'embedding.weight': (LANGUAGE_HEAD,),
    }

    def linear(ours: str, *theirs: str, bias: bool = True) -> None:
        for kind in ('weight', 'bias') if bias else ('weight',):
            names[f'{ours}.{kind}'] = tuple(f'{name}.{kind}' for name in theirs)

    linear('vision.patch', f'{vision}embeddings.patch_embedding')
    for i in range(config.vision.depth):
        ours, theirs = f'vision.encoders.{i}.', f'{vision}encoder.layers.{i}.'
        linear(f'{ours}attention_norm', f'{theirs}layer_norm1')
        linear(f'{ours}qkv', *(f'{theirs}self_attn.{p}_proj' for p in 'qkv'))
        linear(f'{ours}out', f'{theirs}self_attn.out_proj')
        linear(f'{ours}mlp_norm', f'{theirs}layer_norm2')
        linear(f'{ours}up', f'{theirs}mlp.fc1')
        linear(f'{ours}down', f'{theirs}mlp.fc2')
    linear('vision.norm', f'{vision}post_layernorm')
    linear('vision.project', f'{PALIGEMMA}model.multi_modal_projector.linear')

    for stack, theirs_stack, adaptive in (
        ('vlm.', f'{PALIGEMMA}model.language_model.', False),
        ('expert.', f'{EXPERT}model.', True),
    ):

        def norm(ours: str, theirs: str, adaptive: bool = adaptive) -> None:
            suffix = '.dense' if adaptive else ''
            linear(ours + suffix, theirs + suffix, bias=adaptive)

        for i in range(config.vlm.depth):
            ours, theirs = f'{stack}blocks.{i}.', f'{theirs_stack}layers.{i}.'
            norm(f'{ours}attention_norm', f'{theirs}input_layernorm')
            linear(f'{ours}qkv', *(f'{theirs}self_attn.{p}_proj' for p in 'qkv'), bias=False)
            linear(f'{ours}out', f'{theirs}self_attn.o_proj', bias=False)
            norm(f'{ours}mlp_norm', f'{theirs}post_attention_layernorm')
            linear(f'{ours}gate_up', f'{theirs}mlp.gate_proj', f'{theirs}mlp.up_proj', bias=False)
            linear(f'{ours}down', f'{theirs}mlp.down_proj', bias=False)
        norm(f'{stack}norm', f'{theirs_stack}norm')

    for ours, theirs in (
        ('action_in', 'action_in_proj'),
        ('action_out', 'action_out_proj'),
        ('time_in', 'time_mlp_in'),
        ('time_out', 'time_mlp_out'),
    ):
        linear(ours, theirs)
    return names


def part_shapes(name: str, shape: torch.Size, config: Pi05Config) -> list[torch.Size]:
    """Return the shapes of the checkpoint tensors that our parameter `name` is stacked from."""
    if '.qkv.' in name and name.startswith('vision.'):
        rows = [shape[0] // 3] * 3
    elif '.qkv.' in name:
        kv_rows = config.vlm.num_kv_heads * config.vlm.head_dim
        rows = [shape[0] - 2 * kv_rows, kv_rows, kv_rows]
    elif '.gate_up.' in name:
        rows = [shape[0] // 2] * 2
    else:
        rows = [shape[0]]
    return [torch.Size((r, *shape[1:])) for r in rows]


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which our parameter `name` is served.

    In bfloat16 openpi keeps float32 for patch and position embeddings, every Gemma norm (the
    expert's dense included), the action projections and the time MLP.
    """
    gemma_norm = 'norm.' in name and not name.startswith('vision.')
    embeddings = name.startswith(('vision.patch.', 'vision.position'))
    outside = name.startswith(('action_', 'time_'))
    return torch.float32 if gemma_norm or embeddings or outside else dtype


def _problems(
    tensors: Mapping[str, StoredTensor], expected: Mapping[str, torch.Size]
) -> dict[str, list[str]]:
    return {
        'wrong shape': [
            f'{name}: expected {list(shape)}, got {list(tensors[name].shape)}'
            for name, shape in expected.items()
            if name in tensors and tensors[name].shape != shape
        ],
        'wrong dtype': [
            f'{name}: expected one of {", ".join(STORED_DTYPES)}, got {tensors[name].dtype}'
            for name in expected
            if name in tensors and tensors[name].dtype not in STORED_DTYPES
        ],
        'missing': [
            f'{name} {list(shape)}' for name, shape in expected.items() if name not in tensors
        ],
        'unexpected': [
            f'{name} {list(tensor.shape)}'
            for name, tensor in tensors.items()
            if name not in expected
        ],
    }


def check_checkpoint(config: Pi05Config, path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint that fits the model of `config`; reads only headers.

    Raises:
        CheckpointError: unreadable, or tensors missing, unexpected, or of a wrong shape or dtype,
            all named.
    """
    with torch.device('meta'):
        shapes = {name: p.shape for name, p in Pi05(config).named_parameters()}
    expected = {
        part: shape
        for name, parts in checkpoint_names(config).items()
        for part, shape in zip(parts, part_shapes(name, shapes[name], config), strict=True)
    }
    tensors = find_tensors(path)
    lines, total = [], 0
    for kind, entries in _problems(tensors, expected).items():
        total += len(entries)
        lines += [f'{kind}: {entry}' for entry in entries[:MAX_LISTED]]
        if len(entries) > MAX_LISTED:
            lines.append(f'{kind}: ... and {len(entries) - MAX_LISTED} more')
    if lines:
        raise CheckpointError(
            f'checkpoint {path} does not fit the model ({total} tensors):\n  ' + '\n  '.join(lines)
        )
    return tensors


class _Reader:
    """Reads tensors piece by piece into memory of any device and dtype.

    Not mapped: pages of the file would count as ours beside the weights, and a checkpoint that is
    replaced while the robot moves would end the process.
    """

    def __init__(self, num_bytes: int, on_progress: Callable[[float], None]) -> None:
        self._staging = bytearray(STAGING_BYTES)
        self._num_bytes = num_bytes
        self._done = 0
        self._on_progress = on_progress

    def read(self, stored: StoredTensor, target: Tensor) -> None:
        """Fill the contiguous `target`, which has the shape of the stored tensor."""
        dtype, flat = STORED_DTYPES[stored.dtype], target.view(-1)
        step = STAGING_BYTES // dtype.itemsize
        with stored.file.open('rb') as stream:
            stream.seek(stored.start)
            for piece in flat.split(step):
                count = piece.numel() * dtype.itemsize
                if stream.readinto(memoryview(self._staging)[:count]) != count:
                    raise CheckpointError(f'checkpoint {stored.file}: got shorter while it is read')
                piece.copy_(torch.frombuffer(self._staging, dtype=dtype, count=piece.numel()))
                self._done += count
                self._on_progress(self._done / self._num_bytes)


def _set_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, attribute = name.rpartition('.')
    setattr(model.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))


@torch.inference_mode(mode=False)  # autograd could keep no weight made in inference mode
def load_model(
    config: Pi05Config,
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> Pi05:
    """Return the model of `config` with the weights of the checkpoint at `path`.

    No weight is ever held twice. `on_progress` is told the fraction that is loaded, often.

    Raises:
        CheckpointError: see `check_checkpoint`.
    """
    tensors = check_checkpoint(config, path)
    reader = _Reader(sum(tensor.num_bytes for tensor in tensors.values()), on_progress)
    with torch.device('meta'):
        model = Pi05(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name, parts in checkpoint_names(config).items():
        value = torch.empty(shapes[name], dtype=parameter_dtype(name, dtype), device=device)
        sizes = [tensors[part].shape[0] for part in parts]
        for part, rows in zip(parts, value.split(sizes), strict=True):
            reader.read(tensors[part], rows)
        _set_parameter(model, name, value)
    return model.eval()


def save_model(model: Pi05, path: Path, *, dtype: torch.dtype) -> None:
    """Write the weights to `path` under openpi's names, all in `dtype`; `load_model` reads it."""
    names = checkpoint_names(model.config)
    tensors = {}
    for name, parameter in model.named_parameters():
        shapes = part_shapes(name, parameter.shape, model.config)
        parts = parameter.detach().split([shape[0] for shape in shapes])
        for theirs, part in zip(names[name], parts, strict=True):
            # A copy: safetensors refuses tensors that share memory.
            tensors[theirs] = part.to('cpu', dtype, copy=True).contiguous()
    save_file(tensors, str(path))


@torch.inference_mode(mode=False)
def random_model(
    config: Pi05Config, *, seed: int, device: torch.device, dtype: torch.dtype
) -> Pi05:
    """Return the model of `config` with seeded random weights: same seed and device, same weights.

    Scaled by fan-in so that activations stay of order one through the depth of any preset.
    """
    with torch.device('meta'):
        model = Pi05(config)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        target = parameter_dtype(name, dtype)
        shape = parameter.shape
        if name.endswith('norm.weight'):
            fill = 1.0 if name.startswith('vision.') else 0.0  # Gemma's norms multiply by 1 + w
            value = torch.full(shape, fill, device=device)
        elif len(shape) < 2:
            value = torch.zeros(shape, device=device)
        else:
            value = torch.randn(shape, generator=generator, device=device)
            value *= 1.0 / math.sqrt(math.prod(shape[1:]))
        _set_parameter(model, name, value.to(target))
    return model.eval()
