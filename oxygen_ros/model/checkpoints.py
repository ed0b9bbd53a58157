"""Checkpoint directories: which file holds what, in openpi's PyTorch layout and in LeRobot's.

Owns tensor headers, config.json and statistics files, and trusts no name that stands in them.
Knows nothing of our parameters or of torch: `weights.py` reads the tensors it finds, the factory
and the profile check ask it for sizes and statistics.
Source of the layouts: openpi examples/convert_jax_model_to_pytorch.py; LeRobot
policies/pi05/modeling_pi05.py, processor/pipeline.py and normalize_processor.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from oxygen_ros.model.config import PRESETS, Pi05Config
from oxygen_ros.model.transforms import NormStats, VectorStats, load_norm_stats

PALIGEMMA = 'paligemma_with_expert.paligemma.'
EXPERT = 'paligemma_with_expert.gemma_expert.'
TIED_EMBEDDING = f'{PALIGEMMA}model.language_model.embed_tokens.weight'
LANGUAGE_HEAD = f'{PALIGEMMA}lm_head.weight'
UNUSED = (f'{EXPERT}lm_head.weight',)
"""Present in released files, random, read by nobody."""
RENAMED = {'action_time_mlp_in.': 'time_mlp_in.', 'action_time_mlp_out.': 'time_mlp_out.'}
"""Beginnings of names that LeRobot renames when it loads."""
SKIPPED = re.compile(
    rf'{re.escape(UNUSED[0])}|state_proj\..+'
    rf'|{re.escape(EXPERT)}model\.(layers\.\d+\.(input|post_attention)_layernorm|norm)\.weight'
)
"""Left over from pi0 or unused: LeRobot skips them, and so do we."""

WEIGHTS = 'model.safetensors'
INDEX = f'{WEIGHTS}.index.json'
PREPROCESSOR, POSTPROCESSOR = 'policy_preprocessor.json', 'policy_postprocessor.json'
_ORBAX = ('_METADATA', 'manifest.ocdbt', '_CHECKPOINT_METADATA')

# LeRobot's NormalizationMode; its MIN_MAX and QUANTILE10 are not among ours.
_NORMALIZATIONS = {'QUANTILES': 'quantile', 'MEAN_STD': 'mean_std', 'IDENTITY': 'none'}
_VARIANTS = {'gemma_2b': PRESETS['pi05'].vlm, 'gemma_300m': PRESETS['pi05'].expert}


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file and the tensors."""


# ----------------------------------------------------------------------------------------- files


def folder_of(path: Path) -> Path:
    """Return the directory of a checkpoint that is given as a directory or as its weights file."""
    return path if path.is_dir() else path.parent


def member(folder: Path, name: str) -> Path:
    """Return the path of `name` inside the checkpoint directory.

    Names come from files of the checkpoint, which come from anywhere. A link may lead to another
    place of the directory, to where the Hugging Face cache keeps the files of a snapshot, or to a
    file of the same name, as installers make them (`colcon build --symlink-install`).

    Raises:
        CheckpointError: the name or its link leads out of the directory.
    """
    path, home = folder / name, folder.resolve()
    homes = [home]
    if home.parent.name == 'snapshots':
        homes.append(home.parents[1] / 'blobs')
    target = path.resolve()
    inside = any(target.is_relative_to(home) for home in homes)
    installed = path.is_symlink() and target.name == path.name
    if '..' in Path(name).parts or not (inside or installed):
        raise CheckpointError(
            f'checkpoint {folder}: expected files inside this directory, but {name!r} leads to '
            f'{target}'
        )
    return path


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: a file, or a directory, sharded or not.

    Raises:
        CheckpointError: nothing there, naming what was looked for; a broken index; or a JAX
            checkpoint, telling how it is converted.
    """
    if path.is_file():
        return [path]
    if not path.exists():
        raise CheckpointError(f'checkpoint {path}: no such file or directory')
    if (path / INDEX).is_file():
        return _shards(path)
    if (path / WEIGHTS).is_file():
        return [member(path, WEIGHTS)]
    if (root := jax_root(path)) is not None:
        raise CheckpointError(f'checkpoint {path}: {_how_to_convert(root)}')
    raise CheckpointError(
        f'checkpoint {path}: expected model.safetensors (openpi PyTorch or LeRobot layout) in this '
        f'directory, found {sorted(p.name for p in path.iterdir())[:10]}'
    )


def jax_root(path: Path) -> Path | None:
    """Return the folder with params/ of a JAX (orbax) checkpoint, given as it or as a part of it.

    None if this is no such checkpoint.
    """
    if not any((folder / name).exists() for folder in (path, path / 'params') for name in _ORBAX):
        return None
    return path if (path / 'params').is_dir() else path.parent


def _how_to_convert(root: Path) -> str:
    # openpi's script takes a model for pi0.5 by the path of its checkpoint, and copies the assets
    # from beside it; those of trained and of released ones lie inside.
    return (
        f'this is a JAX (orbax) checkpoint; convert it once to PyTorch, where openpi is '
        f'installed:\n'
        f'  ros2 run oxygen_ros oxygen_convert CONFIG {root} OUTPUT\n'
        f'or in a checkout of openpi without this package:\n'
        f'  ln -s {root.absolute()} /tmp/pi05\n'
        f'  uv run examples/convert_jax_model_to_pytorch.py --config_name CONFIG '
        f'--checkpoint_dir /tmp/pi05 --output_path OUTPUT\n'
        f'  cp -r {root}/assets OUTPUT/\n'
        f'CONFIG is its openpi training config, e.g. pi05_droid.'
    )


def _shards(folder: Path) -> list[Path]:
    index = member(folder, INDEX)
    weight_map = _json_object(index).get('weight_map')
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise CheckpointError(
            f"{index}: expected an object 'weight_map' from tensor names to file names"
        )
    files = {name: member(folder, name) for name in sorted(set(weight_map.values()))}
    absent = [name for name, file in files.items() if not file.is_file()]
    if absent:
        raise CheckpointError(
            f'{index}: lists {len(files)} files, of which are missing: {", ".join(absent)}; was '
            f'the download complete?'
        )
    headers = {name: read_header(file) for name, file in files.items()}
    for key, name in weight_map.items():
        if key not in headers[name]:
            raise CheckpointError(f'{index}: says that {key} is in {name}, but it is not')
    return list(files.values())


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise CheckpointError(f'{path}: not readable as JSON: {error}') from error
    if not isinstance(content, dict):
        raise CheckpointError(f'{path}: expected a JSON object, got {type(content).__name__}')
    return content


# --------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True)
class StoredTensor:
    """Where the bytes of one tensor are, little-endian and row-major, and what they are."""

    file: Path
    start: int  # offset of the first byte
    dtype: str  # safetensors' name: F32, BF16, ...
    shape: tuple[int, ...]
    num_bytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file by the names in it; no weight is read.

    Raises:
        CheckpointError: not a whole safetensors file.
    """
    try:
        with safe_open(str(file), framework='numpy'):
            pass  # the library checks that the header is sound and the file as long as it says
        with file.open('rb') as stream:
            length = int.from_bytes(stream.read(8), 'little')
            header = json.loads(stream.read(length))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f'checkpoint {file}: not a readable safetensors file: {error}'
        ) from error
    header.pop('__metadata__', None)
    return {
        key: StoredTensor(
            file,
            8 + length + entry['data_offsets'][0],
            entry['dtype'],
            tuple(entry['shape']),
            entry['data_offsets'][1] - entry['data_offsets'][0],
        )
        for key, entry in header.items()
    }


def openpi_name(key: str) -> str:
    """Return openpi's name of a tensor of either layout."""
    name = key.removeprefix('model.')
    for theirs, ours in RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def find_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint that anybody reads, by openpi's names.

    Of the tied pair only the language head is told: openpi's converter keeps that one alone, others
    keep only the embedding.

    Raises:
        CheckpointError: unreadable, a tensor given twice, or a pi0 checkpoint.
    """
    found: dict[str, StoredTensor] = {}
    for file in weight_files(path):
        for key, tensor in read_header(file).items():
            name = openpi_name(key)
            if name in found:
                raise CheckpointError(
                    f'checkpoint {path}: {name} is given twice, in {found[name].file.name} and in '
                    f'{file.name}'
                )
            found[name] = tensor
    if 'state_proj.weight' in found and f'{EXPERT}model.norm.dense.weight' not in found:
        raise CheckpointError(
            f'checkpoint {path}: expected pi0.5, got pi0: it projects the state (state_proj) and '
            f"its expert's norms are not adaptive"
        )
    if TIED_EMBEDDING in found:
        found.setdefault(LANGUAGE_HEAD, found[TIED_EMBEDDING])
        del found[TIED_EMBEDDING]
    return {name: tensor for name, tensor in found.items() if not SKIPPED.fullmatch(name)}


# ----------------------------------------------------------------------------------- config.json


@dataclass(frozen=True)
class Declared:
    """What the config.json of a checkpoint says about it; None and () where it says nothing.

    openpi's converter writes sizes only; LeRobot also cameras, widths and how actions are meant.
    """

    source: Path
    sizes: Mapping[str, int]
    """By field of `Pi05Config` (`image_size` of its `vision`)."""
    variants: Mapping[str, str]
    """openpi's name of the Gemma behind `vlm` and `expert`."""
    num_denoise_steps: int | None = None
    normalization: str | None = None
    cameras: tuple[str, ...] = ()
    """In the order in which their tokens entered the prefix in training."""
    state_width: int | None = None
    action_width: int | None = None
    delta_mask: tuple[bool, ...] | None = None

    def size_problems(self, config: Pi05Config) -> list[str]:
        """Say what of the model of `config` is not as the checkpoint was trained."""
        actual = {
            'action_dim': config.action_dim,
            'action_horizon': config.action_horizon,
            'max_token_len': config.max_token_len,
            'image_size': config.vision.image_size,
        }
        problems = [
            f'{self.source}: {name} is {size}, but the model of the profile has {actual[name]}'
            + ('; set model.action_horizon' if name == 'action_horizon' else '')
            for name, size in self.sizes.items()
            if actual[name] != size
        ]
        for stack, variant in self.variants.items():
            known, ours = _VARIANTS.get(variant), getattr(config, stack)
            if known is not None and known != ours:
                problems.append(
                    f'{self.source}: its {stack} is {variant} of width {known.width}, but that of '
                    f'the profile has width {ours.width}; set model.preset: pi05'
                )
        return problems

    def robot_problems(
        self,
        *,
        normalization: str,
        state_width: int,
        action_width: int,
        delta_mask: Sequence[bool],
    ) -> list[str]:
        """Say what of the profile's robot is not as the checkpoint was trained."""
        pairs = (
            ('model.normalization', self.normalization, normalization),
            ('the number of joints.names', self.state_width, state_width),
            ('the number of command.names', self.action_width, action_width),
        )
        problems = [
            f'{self.source}: {what} should be {expected}, got {got}'
            for what, expected, got in pairs
            if expected not in (None, got)
        ]
        if self.delta_mask is not None and any(self.delta_mask) != any(delta_mask):
            meaning = 'relative to the state' if any(self.delta_mask) else 'absolute'
            problems.append(
                f'{self.source}: its actions are {meaning}, but action.delta_mask is '
                f'{list(delta_mask)}'
            )
        elif self.delta_mask and tuple(delta_mask) != self.delta_mask[: len(delta_mask)]:
            problems.append(
                f'{self.source}: action.delta_mask should be {list(self.delta_mask)}, got '
                f'{list(delta_mask)}'
            )
        return problems


def read_config(path: Path) -> Declared | None:
    """Return what config.json beside the weights declares, or None without one.

    Raises:
        CheckpointError: unreadable, another policy than pi0.5, or a feature this model lacks.
    """
    folder = folder_of(path)
    file = member(folder, 'config.json')
    if not file.is_file():
        return None
    content = _json_object(file)
    if 'type' in content:
        return _lerobot_config(file, content)
    return Declared(
        source=file,
        sizes=_integers(file, content, {'action_dim': 'action_dim', 'action_horizon': None}),
        variants=_variants(content),
    )


def _lerobot_config(file: Path, content: dict[str, Any]) -> Declared:
    if content['type'] != 'pi05':
        raise CheckpointError(f"{file}: expected a policy of type 'pi05', got {content['type']!r}")
    for flag in ('use_visual_memory', 'use_proprioceptive_memory'):
        if content.get(flag):
            raise CheckpointError(f'{file}: {flag} is set, which this model does not have')
    sizes = _integers(
        file,
        content,
        {
            'max_action_dim': 'action_dim',
            'chunk_size': 'action_horizon',
            'tokenizer_max_length': 'max_token_len',
        },
    )
    resolution = content.get('image_resolution')
    if isinstance(resolution, list) and resolution:
        if len(set(resolution)) != 1:
            raise CheckpointError(f'{file}: expected square images, got {resolution}')
        sizes['image_size'] = int(resolution[0])
    inputs, outputs = content.get('input_features') or {}, content.get('output_features') or {}
    action_width = _width(outputs.get('action'), content.get('max_action_dim'))
    return Declared(
        source=file,
        sizes=sizes,
        variants=_variants(content),
        num_denoise_steps=content.get('num_inference_steps'),
        normalization=_lerobot_normalization(file, content.get('normalization_mapping')),
        cameras=tuple(
            name.removeprefix('observation.images.')
            for name, feature in inputs.items()
            if feature.get('type') == 'VISUAL' and 'empty_camera' not in name
        ),
        state_width=_width(inputs.get('observation.state'), content.get('max_state_dim')),
        action_width=action_width,
        delta_mask=_lerobot_deltas(content, action_width),
    )


def _integers(
    file: Path, content: dict[str, Any], names: Mapping[str, str | None]
) -> dict[str, int]:
    found = {}
    for theirs, ours in names.items():
        value = content.get(theirs)
        if value is not None and type(value) is not int:
            raise CheckpointError(f'{file}: {theirs}: expected a whole number, got {value!r}')
        if value is not None:
            found[ours or theirs] = value
    return found


def _variants(content: dict[str, Any]) -> dict[str, str]:
    keys = {'vlm': 'paligemma_variant', 'expert': 'action_expert_variant'}
    return {stack: str(content[key]) for stack, key in keys.items() if key in content}


def _width(feature: Any, padded: Any) -> int | None:
    """A feature as wide as the padding was never told the width of the robot."""
    shape = feature.get('shape') if isinstance(feature, dict) else None
    return int(shape[0]) if shape and shape[0] != padded else None


def _lerobot_normalization(file: Path, modes: Any) -> str | None:
    if not isinstance(modes, dict):
        return None
    state, action = modes.get('STATE', 'IDENTITY'), modes.get('ACTION', 'IDENTITY')
    if state != action or state not in _NORMALIZATIONS:
        raise CheckpointError(
            f'{file}: normalization_mapping: expected one of {", ".join(_NORMALIZATIONS)} for both '
            f'STATE and ACTION, got {state} and {action}'
        )
    return _NORMALIZATIONS[state]


def _lerobot_deltas(content: dict[str, Any], width: int | None) -> tuple[bool, ...] | None:
    """The mask of LeRobot's RelativeActionsProcessorStep: without names, all is relative."""
    if 'use_relative_actions' not in content:
        return None
    names = content.get('action_feature_names')
    if not content['use_relative_actions']:
        return (False,) * (width or 1)
    excluded = [str(token).lower() for token in content.get('relative_exclude_joints') or ()]
    if not names or not excluded:
        return (True,) * (width or 1)
    return tuple(not any(token in str(name).lower() for token in excluded) for name in names)


# ------------------------------------------------------------------------------------ statistics


def find_norm_stats(checkpoint: Path | None, named: str) -> NormStats:
    """Return the statistics of a checkpoint.

    `named` is a path, or the asset id of openpi's layout; '' takes the only one there is. LeRobot's
    layout has exactly one, in the state of its normalizer.

    Raises:
        FileNotFoundError: none, or more than one, naming where they were looked for.
        CheckpointError: LeRobot's files are not as expected, or a name leads out of the checkpoint.
        ValueError: see `load_norm_stats`.
    """
    if named and (path := Path(named).expanduser()).is_file():
        return load_norm_stats(path)
    found: list[Path] = []
    if checkpoint is not None:
        folder = folder_of(checkpoint)
        if (folder / PREPROCESSOR).is_file():
            return _lerobot_stats(folder)
        names = [f'{named}/norm_stats.json'] if named else _asset_files(folder)
        candidates = [member(folder, f'assets/{name}') for name in names]
        found = [path for path in candidates if path.is_file()]
    if len(found) != 1:
        where = f'{folder_of(checkpoint)}/assets' if checkpoint else 'a checkpoint'
        raise FileNotFoundError(
            f'model.norm_stats: expected exactly one norm_stats.json ({named or "any"} under '
            f'{where}), found {[str(path) for path in found]}'
        )
    return load_norm_stats(found[0])


def _asset_files(folder: Path) -> list[str]:
    assets = folder / 'assets'
    return sorted(str(path.relative_to(assets)) for path in assets.glob('**/norm_stats.json'))


def _lerobot_stats(folder: Path) -> NormStats:
    step, file = _step(folder, PREPROCESSOR, 'normalizer_processor')
    state = _lerobot_vector(file, step, 'observation.state')
    if (folder / POSTPROCESSOR).is_file():
        step, file = _step(folder, POSTPROCESSOR, 'unnormalizer_processor')
    return NormStats(source=str(file), state=state, actions=_lerobot_vector(file, step, 'action'))


def _step(folder: Path, pipeline: str, kind: str) -> tuple[dict[str, Any], Path]:
    """Return one step of a processor pipeline and the file of its state."""
    source = member(folder, pipeline)
    steps = _json_object(source).get('steps')
    # The number of the step moves between releases of LeRobot, so it is found by its kind.
    found = [
        step
        for step in (steps if isinstance(steps, list) else [])
        if isinstance(step, dict) and step.get('registry_name') == kind
    ]
    if len(found) != 1 or not isinstance(found[0].get('state_file'), str):
        raise CheckpointError(
            f"{source}: expected exactly one step '{kind}' with a 'state_file'; was the policy "
            f'saved without statistics?'
        )
    file = member(folder, found[0]['state_file'])
    if not file.is_file():
        raise CheckpointError(f"{source}: state_file of '{kind}': no such file: {file.name}")
    return found[0], file


def _lerobot_vector(file: Path, step: dict[str, Any], feature: str) -> VectorStats:
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f'{file}: not a readable safetensors file: {error}') from error
    columns: dict[str, np.ndarray | None] = {}
    for name in ('mean', 'std', 'q01', 'q99'):
        column = tensors.get(f'{feature}.{name}')
        if column is not None and (column.ndim != 1 or not np.isfinite(column).all()):
            raise CheckpointError(
                f'{file}: {feature}.{name}: expected a list of finite numbers, got {column}'
            )
        columns[name] = None if column is None else column.astype(np.float32)
    present = {name: len(column) for name, column in columns.items() if column is not None}
    if len(set(present.values())) != 1 or ('q01' in present) != ('q99' in present):
        raise CheckpointError(
            f'{file}: {feature}: expected mean and std, or q01 and q99, of one length; found '
            f'{present or sorted(tensors)[:10]}'
        )
    absent = np.full(next(iter(present.values())), np.nan, np.float32)
    mean, std, q01, q99 = columns['mean'], columns['std'], columns['q01'], columns['q99']
    if (std is not None and (std < 0).any()) or (
        q01 is not None and q99 is not None and (q99 < q01).any()
    ):
        raise CheckpointError(f'{file}: {feature}: expected std >= 0 and q01 <= q99 everywhere')
    return VectorStats(
        mean=absent if mean is None else mean,
        std=absent if std is None else std,
        q01=q01,
        q99=q99,
        lerobot_eps=float(step.get('config', {}).get('eps', 1e-8)),
    )
