"""Checkpoints: openpi's tensor names to ours, one table for both directions.

Reads safetensors only, never pickle, straight to the device and dtype. Knows nothing of how the
model computes. Called when the node is configured.
Source of names and dtypes: openpi examples/convert_jax_model_to_pytorch.py, gemma_pytorch.py
`to_bfloat16_for_selected_params`; LeRobot's files carry the same names behind `model.`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from oxygen_ros.model.config import Pi05Config
from oxygen_ros.model.pi05 import Pi05

PALIGEMMA = 'paligemma_with_expert.paligemma.'
EXPERT = 'paligemma_with_expert.gemma_expert.'
TIED_EMBEDDING = f'{PALIGEMMA}model.language_model.embed_tokens.weight'
LANGUAGE_HEAD = f'{PALIGEMMA}lm_head.weight'
UNUSED = (f'{EXPERT}lm_head.weight',)
"""Present in released files, random, read by nobody."""
MAX_LISTED = 100
"""Tensors that one error lists of each kind; a model of another size has thousands."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file and the tensors."""


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


def checkpoint_files(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: a file, or a directory, sharded or not.

    Raises:
        CheckpointError: nothing there, naming what was looked for.
    """
    if path.is_file():
        return [path]
    if not path.exists():
        raise CheckpointError(f'checkpoint {path}: no such file or directory')
    index = path / 'model.safetensors.index.json'
    if index.is_file():
        return [
            path / name
            for name in sorted(set(json.loads(index.read_text())['weight_map'].values()))
        ]
    if (path / 'model.safetensors').is_file():
        return [path / 'model.safetensors']
    raise CheckpointError(
        f'checkpoint {path}: expected model.safetensors (openpi PyTorch or LeRobot layout) in this '
        f'directory, found {sorted(p.name for p in path.iterdir())[:10]}'
    )


class _Tensors(Mapping[str, Any]):
    """Lazy view over all files of a checkpoint by openpi's names; nothing is read before use."""

    def __init__(self, path: Path, device: torch.device, stack: ExitStack) -> None:
        self._files: dict[str, tuple[Any, str]] = {}
        for file in checkpoint_files(path):
            try:
                handle = stack.enter_context(
                    safe_open(str(file), framework='pt', device=str(device))
                )
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f'checkpoint {file}: not a readable safetensors file: {error}'
                ) from error
            for key in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                self._files[key.removeprefix('model.')] = (handle, key)
        # openpi's converter keeps only the language head of the tied pair, others only the rest.
        if TIED_EMBEDDING in self._files:
            self._files.setdefault(LANGUAGE_HEAD, self._files[TIED_EMBEDDING])
            del self._files[TIED_EMBEDDING]

    def __getitem__(self, name: str) -> Tensor:
        handle, key = self._files[name]
        return handle.get_tensor(key)

    def shape(self, name: str) -> torch.Size:
        handle, key = self._files[name]
        return torch.Size(handle.get_slice(key).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _check(path: Path, tensors: _Tensors, expected: Mapping[str, torch.Size]) -> None:
    problems = {
        'wrong shape': [
            f'{name}: expected {list(shape)}, got {list(tensors.shape(name))}'
            for name, shape in expected.items()
            if name in tensors and tensors.shape(name) != shape
        ],
        'missing': [
            f'{name} {list(shape)}' for name, shape in expected.items() if name not in tensors
        ],
        'unexpected': [
            f'{name} {list(tensors.shape(name))}'
            for name in tensors
            if name not in expected and name not in UNUSED
        ],
    }
    lines = []
    for kind, entries in problems.items():
        lines += [f'{kind}: {entry}' for entry in entries[:MAX_LISTED]]
        if len(entries) > MAX_LISTED:
            lines.append(f'{kind}: ... and {len(entries) - MAX_LISTED} more')
    if lines:
        total = sum(map(len, problems.values()))
        raise CheckpointError(
            f'checkpoint {path} does not fit the model ({total} tensors):\n  ' + '\n  '.join(lines)
        )


def _set_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, attribute = name.rpartition('.')
    setattr(model.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))


@torch.inference_mode(mode=False)  # autograd could keep no weight made in inference mode
def load_model(config: Pi05Config, path: Path, *, device: torch.device, dtype: torch.dtype) -> Pi05:
    """Return the model of `config` with the weights of the checkpoint at `path`.

    Raises:
        CheckpointError: unreadable, or tensors missing, unexpected or of a wrong shape, all named.
    """
    with torch.device('meta'):
        model = Pi05(config)
    names = checkpoint_names(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    expected = {
        part: shape
        for name, parts in names.items()
        for part, shape in zip(parts, part_shapes(name, shapes[name], config), strict=True)
    }
    with ExitStack() as stack:
        tensors = _Tensors(path, device, stack)
        _check(path, tensors, expected)
        for name, parts in names.items():
            target = parameter_dtype(name, dtype)
            loaded = [tensors[part].to(target) for part in parts]
            _set_parameter(model, name, loaded[0] if len(loaded) == 1 else torch.cat(loaded))
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
