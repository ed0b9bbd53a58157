"""Checkpoint directories of openpi and LeRobot: what is taken from them, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden_pi05 as golden
import numpy as np
import pytest
import torch
from golden_pi05 import CHECKPOINT, CPU, GOLDEN
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from oxygen_ros.engine.factory import EngineOptions, build_engine, model_config
from oxygen_ros.model import checkpoints
from oxygen_ros.model.checkpoints import (
    EXPERT,
    LANGUAGE_HEAD,
    SKIPPED,
    TIED_EMBEDDING,
    CheckpointError,
    find_norm_stats,
    openpi_name,
    read_config,
    weight_files,
)
from oxygen_ros.model.config import PRESETS
from oxygen_ros.model.transforms import normalize, unnormalize
from oxygen_ros.model.weights import checkpoint_names, load_model, random_model, save_model
from oxygen_ros.profile import ModelProfile, load_profile

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = json.loads((GOLDEN / 'pi05_manifest.json').read_text())
LEROBOT_CONFIG: dict[str, Any] = {
    'type': 'pi05',
    'paligemma_variant': 'gemma_2b',
    'action_expert_variant': 'gemma_300m',
    'chunk_size': 50,
    'n_action_steps': 50,
    'max_state_dim': 32,
    'max_action_dim': 32,
    'num_inference_steps': 10,
    'tokenizer_max_length': 200,
    'image_resolution': [224, 224],
    'normalization_mapping': {'VISUAL': 'IDENTITY', 'STATE': 'QUANTILES', 'ACTION': 'QUANTILES'},
    'input_features': {
        'observation.images.top': {'type': 'VISUAL', 'shape': [3, 480, 640]},
        'observation.images.wrist': {'type': 'VISUAL', 'shape': [3, 480, 640]},
        'observation.images.empty_camera_0': {'type': 'VISUAL', 'shape': [3, 224, 224]},
        'observation.state': {'type': 'STATE', 'shape': [3]},
    },
    'output_features': {'action': {'type': 'ACTION', 'shape': [3]}},
    'use_relative_actions': False,
}
ROBOT = {'normalization': 'quantile', 'state_width': 3, 'action_width': 3, 'delta_mask': ()}

Write = Callable[..., Path]


def load(path: Path) -> torch.nn.Module:
    return load_model(golden.config(), path, device=CPU, dtype=torch.float32)


def is_golden(model: torch.nn.Module) -> bool:
    theirs = dict(golden.model().named_parameters())
    return all(torch.equal(p, theirs[name]) for name, p in model.named_parameters())


# --- tensors --------------------------------------------------------------------------------------


def lerobot_keys() -> set[str]:
    """All keys that LeRobot's release may hold, by the rules of the manifest."""
    keys = {f'model.{key}' for key in MANIFEST['openpi']['keys']}
    return keys | {f'model.{TIED_EMBEDDING}'}


def test_every_tensor_of_both_manifests_has_its_place_or_is_skipped_on_purpose() -> None:
    placed = {part for parts in checkpoint_names(PRESETS['pi05']).values() for part in parts}
    for keys in (set(MANIFEST['openpi']['keys']), lerobot_keys()):
        skipped = {key for key in keys if SKIPPED.fullmatch(openpi_name(key))}
        tied = {key for key in keys if openpi_name(key) == TIED_EMBEDDING}
        assert {openpi_name(key) for key in keys - skipped - tied} == placed
        assert {openpi_name(key) for key in skipped} == {f'{EXPERT}lm_head.weight'}


@pytest.mark.parametrize('prefix', ['', 'model.'])
def test_lerobots_renames_and_skips_are_followed(tmp_path: Path, prefix: str) -> None:
    weights = load_file(CHECKPOINT)
    for kind in ('in.weight', 'in.bias', 'out.weight', 'out.bias'):
        weights[f'action_time_mlp_{kind}'] = weights.pop(f'time_mlp_{kind}')
    weights['state_proj.weight'] = torch.zeros(2, 2)
    weights[f'{EXPERT}model.norm.weight'] = torch.zeros(2)
    weights[f'{EXPERT}model.layers.3.input_layernorm.weight'] = torch.zeros(2)
    weights[TIED_EMBEDDING] = weights[LANGUAGE_HEAD].clone()  # LeRobot keeps both
    renamed = {prefix + name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(renamed, tmp_path / 'model.safetensors')
    assert is_golden(load(tmp_path))


def test_a_pi0_checkpoint_is_called_that(tmp_path: Path) -> None:
    tensors = {'state_proj.weight': torch.zeros(2, 2), f'{EXPERT}model.norm.weight': torch.zeros(2)}
    save_file(tensors, tmp_path / 'model.safetensors')
    with pytest.raises(CheckpointError, match=r'expected pi0\.5, got pi0'):
        load(tmp_path)


def test_a_tensor_given_with_and_without_prefix_is_refused(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(2) for name in ('time_mlp_in.bias', 'model.time_mlp_in.bias')}
    save_file(tensors, tmp_path / 'model.safetensors')
    with pytest.raises(CheckpointError, match=r'time_mlp_in\.bias is given twice'):
        load(tmp_path)


def test_quantised_weights_are_refused_by_dtype(tmp_path: Path) -> None:
    weights = {name: tensor.contiguous() for name, tensor in load_file(CHECKPOINT).items()}
    weights['time_mlp_in.bias'] = torch.zeros(32, dtype=torch.int8)
    save_file(weights, tmp_path / 'model.safetensors')
    with pytest.raises(CheckpointError, match=r'wrong dtype: time_mlp_in\.bias: .*BF16.*got I8'):
        load(tmp_path)


@pytest.mark.parametrize('stored', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('served', [torch.float32, torch.bfloat16])
def test_any_stored_dtype_is_rounded_once_to_the_served_one(
    tmp_path: Path, stored: torch.dtype, served: torch.dtype
) -> None:
    save_model(golden.model(), tmp_path / 'model.safetensors', dtype=stored)
    model = load_model(golden.config(), tmp_path, device=CPU, dtype=served)
    for name, value in model.named_parameters():
        assert torch.equal(value, golden.model().get_parameter(name).to(stored).to(value.dtype))
    assert model.vlm.norm.weight.dtype == model.action_in.weight.dtype == torch.float32
    assert model.embedding.weight.dtype == served


def test_pieces_smaller_than_a_tensor_make_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('oxygen_ros.model.weights.STAGING_BYTES', 1000)  # cuts rows in two
    assert is_golden(load(CHECKPOINT))


def test_progress_grows_to_one() -> None:
    told: list[float] = []
    load_model(
        golden.config(), CHECKPOINT, device=CPU, dtype=torch.float32, on_progress=told.append
    )
    assert told == sorted(told)
    assert 0 < told[0] < told[-1] == 1.0


MEASURE = """
import sys, torch
from pathlib import Path
from oxygen_ros.model.config import PRESETS
from oxygen_ros.model.weights import load_model

def kilobytes(key):
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ':'))

def load(name):
    path, device = Path(sys.argv[1], name + '.safetensors'), torch.device('cpu')
    return load_model(PRESETS[name], path, device=device, dtype=getattr(torch, sys.argv[2]))

load('dummy')  # what torch imports at its first use is not part of a model
before = kilobytes('VmRSS')
Path('/proc/self/clear_refs').write_text('5')  # the peak begins anew
model = load('mid')
size = sum(p.numel() * p.element_size() for p in model.parameters())
print((kilobytes('VmHWM') - before) * 1024 / size)
"""


@pytest.mark.skipif(not Path('/proc/self/clear_refs').exists(), reason='needs Linux')
@pytest.mark.parametrize('served', ['float32', 'bfloat16'])
def test_loading_never_holds_more_than_a_tenth_beside_the_model(
    tmp_path: Path, served: str
) -> None:
    for name in ('dummy', 'mid'):
        model = random_model(PRESETS[name], seed=0, device=CPU, dtype=torch.float32)
        save_model(model, tmp_path / f'{name}.safetensors', dtype=torch.bfloat16)
    run = subprocess.run(
        [sys.executable, '-c', MEASURE, str(tmp_path), served],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0.9 < float(run.stdout) < 1.1


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    weights = load_file(CHECKPOINT)
    names = sorted(weights)
    weight_map = {}
    for file, part in (('one.safetensors', names[::2]), ('two.safetensors', names[1::2])):
        save_file({name: weights[name].contiguous() for name in part}, tmp_path / file)
        weight_map.update(dict.fromkeys(part, file))
    write_index(tmp_path, {'metadata': {}, 'weight_map': weight_map})
    return tmp_path


def write_index(folder: Path, content: Any) -> None:
    (folder / 'model.safetensors.index.json').write_text(json.dumps(content))


def read_index(folder: Path) -> Any:
    return json.loads((folder / 'model.safetensors.index.json').read_text())


@pytest.mark.parametrize('content', [[], {}, {'weight_map': []}, {'weight_map': {'a': 1}}])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, content: Any) -> None:
    write_index(tmp_path, content)
    with pytest.raises(CheckpointError, match=r'index\.json: expected an? '):
        load(tmp_path)


def test_an_index_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / 'model.safetensors.index.json').write_text('{"weight_map":')
    with pytest.raises(CheckpointError, match=r'index\.json: not readable as JSON'):
        load(tmp_path)


def test_a_shard_that_was_not_downloaded_is_named(sharded: Path) -> None:
    (sharded / 'two.safetensors').unlink()
    with pytest.raises(CheckpointError, match=r'are missing: two\.safetensors; was the download'):
        load(sharded)


def test_an_index_that_points_to_the_wrong_shard_is_refused(sharded: Path) -> None:
    index = read_index(sharded)
    index['weight_map'][LANGUAGE_HEAD] = 'one.safetensors'
    index['weight_map']['nothing'] = 'one.safetensors'
    write_index(sharded, index)
    with pytest.raises(CheckpointError, match=r'is in one\.safetensors, but it is not'):
        load(sharded)


@pytest.mark.parametrize('name', ['../outside.safetensors', '/outside.safetensors', 'a/../../b'])
def test_a_file_name_that_leads_out_of_the_directory_is_refused(sharded: Path, name: str) -> None:
    index = read_index(sharded)
    index['weight_map']['time_mlp_in.bias'] = name
    write_index(sharded, index)
    with pytest.raises(CheckpointError, match='expected files inside this directory'):
        load(sharded)


def test_a_link_out_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / 'checkpoint'
    folder.mkdir()
    (folder / 'model.safetensors').symlink_to(CHECKPOINT)
    with pytest.raises(CheckpointError, match='expected files inside this directory'):
        load(folder)


@pytest.mark.parametrize('asset', ['..', '../../elsewhere', 'a/../../..'])
def test_an_asset_id_that_leads_out_of_the_directory_is_refused(tmp_path: Path, asset: str) -> None:
    (tmp_path / 'checkpoint').mkdir()
    with pytest.raises(CheckpointError, match='expected files inside this directory'):
        find_norm_stats(tmp_path / 'checkpoint', asset)


def test_statistics_linked_from_elsewhere_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / 'secret.json').write_text('{}')
    assets = tmp_path / 'checkpoint' / 'assets' / 'robot'
    assets.mkdir(parents=True)
    (assets / 'norm_stats.json').symlink_to(tmp_path / 'secret.json')
    for named in ('', 'robot'):
        with pytest.raises(CheckpointError, match='expected files inside this directory'):
            find_norm_stats(tmp_path / 'checkpoint', named)


def test_links_of_an_installer_are_followed(tmp_path: Path) -> None:
    source, installed = tmp_path / 'source', tmp_path / 'installed'
    source.mkdir()
    installed.mkdir()
    (source / 'model.safetensors').write_bytes(CHECKPOINT.read_bytes())
    (installed / 'model.safetensors').symlink_to(source / 'model.safetensors')
    assert is_golden(load(installed))


def test_links_of_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = (
        tmp_path / 'models--a--b' / 'snapshots' / '0f',
        tmp_path / 'models--a--b/blobs',
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / 'sha').write_bytes(CHECKPOINT.read_bytes())
    (snapshot / 'model.safetensors').symlink_to('../../blobs/sha')
    assert is_golden(load(snapshot))


@pytest.mark.parametrize('inside', [True, False], ids=['checkpoint', 'params'])
def test_a_jax_checkpoint_tells_how_it_is_converted(tmp_path: Path, inside: bool) -> None:
    params = tmp_path / 'params'
    params.mkdir()
    (params / '_METADATA').write_text('{}')
    with pytest.raises(CheckpointError) as error:
        weight_files(tmp_path if inside else params)
    message = str(error.value)
    assert 'JAX (orbax) checkpoint' in message
    assert f'oxygen_convert CONFIG {tmp_path} OUTPUT' in message
    # openpi's script takes a checkpoint for one of pi0 unless its path says pi05.
    assert f'ln -s {tmp_path} /tmp/pi05' in message
    assert '--config_name CONFIG --checkpoint_dir /tmp/pi05 --output_path OUTPUT' in message
    assert f'cp -r {tmp_path}/assets OUTPUT/' in message


# --- config.json ----------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_config(**changes: Any) -> Path:
        content = {**LEROBOT_CONFIG, **changes}
        kept = {key: value for key, value in content.items() if value is not ...}
        (tmp_path / 'config.json').write_text(json.dumps(kept))
        return tmp_path

    return write_config


def test_lerobots_config_tells_sizes_cameras_and_meanings(write: Write) -> None:
    declared = read_config(write())
    assert declared is not None
    assert not declared.size_problems(PRESETS['pi05'])
    assert not declared.robot_problems(**ROBOT)
    assert declared.cameras == ('top', 'wrist')
    assert declared.num_denoise_steps == 10


def test_openpis_config_tells_sizes_only(tmp_path: Path) -> None:
    content = {
        'action_dim': 32,
        'action_horizon': 15,
        'paligemma_variant': 'gemma_2b',
        'action_expert_variant': 'gemma_300m',
        'precision': 'bfloat16',
    }
    (tmp_path / 'config.json').write_text(json.dumps(content))
    declared = read_config(tmp_path)
    assert declared is not None
    (problem,) = declared.size_problems(PRESETS['pi05'])
    assert 'action_horizon is 15, but the model of the profile has 50' in problem
    assert not declared.robot_problems(**ROBOT)


def test_a_directory_without_config_declares_nothing(tmp_path: Path) -> None:
    assert read_config(tmp_path) is None


@pytest.mark.parametrize(
    ('change', 'expected'),
    [
        ({'chunk_size': 30}, 'action_horizon is 30, but the model of the profile has 50'),
        ({'max_action_dim': 24}, 'action_dim is 24'),
        ({'tokenizer_max_length': 48}, 'max_token_len is 48'),
        ({'image_resolution': [336, 336]}, 'image_size is 336'),
        ({'paligemma_variant': 'gemma_300m'}, 'its vlm is gemma_300m of width 1024'),
    ],
)
def test_a_size_that_differs_from_the_preset_is_told(
    write: Write, change: dict[str, Any], expected: str
) -> None:
    declared = read_config(write(**change))
    assert declared is not None
    (problem,) = declared.size_problems(PRESETS['pi05'])
    assert expected in problem


@pytest.mark.parametrize(
    ('change', 'expected'),
    [
        ({'type': 'pi0'}, "expected a policy of type 'pi05', got 'pi0'"),
        ({'use_visual_memory': True}, 'use_visual_memory is set'),
        ({'use_proprioceptive_memory': True}, 'use_proprioceptive_memory is set'),
        ({'chunk_size': 'long'}, 'chunk_size: expected a whole number'),
        ({'image_resolution': [224, 320]}, 'expected square images'),
        ({'normalization_mapping': {'STATE': 'MIN_MAX', 'ACTION': 'MIN_MAX'}}, 'got MIN_MAX'),
        ({'normalization_mapping': {'STATE': 'QUANTILES'}}, 'got QUANTILES and IDENTITY'),
    ],
)
def test_a_policy_this_model_cannot_be_is_refused(
    write: Write, change: dict[str, Any], expected: str
) -> None:
    with pytest.raises(CheckpointError, match=expected):
        read_config(write(**change))


@pytest.mark.parametrize(
    ('change', 'robot', 'expected'),
    [
        ({}, {'normalization': 'mean_std'}, 'model.normalization should be quantile, got mean_std'),
        ({}, {'state_width': 7}, 'the number of joints.names should be 3, got 7'),
        ({}, {'action_width': 2}, 'the number of command.names should be 3, got 2'),
        ({}, {'delta_mask': (True, True, False)}, 'its actions are absolute'),
        ({'use_relative_actions': True}, {}, 'its actions are relative to the state'),
        (
            {
                'use_relative_actions': True,
                'relative_exclude_joints': ['gripper'],
                'action_feature_names': ['left.pos', 'right.pos', 'Gripper.pos'],
            },
            {'delta_mask': (True, True, True)},
            r'action.delta_mask should be \[True, True, False\]',
        ),
    ],
)
def test_a_robot_that_differs_from_training_is_told(
    write: Write, change: dict[str, Any], robot: dict[str, Any], expected: str
) -> None:
    declared = read_config(write(**change))
    assert declared is not None
    with pytest.raises(AssertionError, match=expected):
        assert not declared.robot_problems(**{**ROBOT, **robot}), '; '.join(
            declared.robot_problems(**{**ROBOT, **robot})
        )


def test_padded_widths_say_nothing_of_the_robot(write: Write) -> None:
    features = {'observation.state': {'type': 'STATE', 'shape': [32]}}
    declared = read_config(write(input_features=features, output_features=...))
    assert declared is not None
    assert (declared.state_width, declared.action_width) == (None, None)


# --- statistics -----------------------------------------------------------------------------------

VECTORS = {
    'observation.state.mean': [0.0, 1.0, 2.0],
    'observation.state.std': [1.0, 2.0, 0.0],
    'observation.state.q01': [-1.0, -2.0, 0.5],
    'observation.state.q99': [1.0, 3.0, 0.5],  # the last joint never moved
    'action.mean': [0.0, 0.0, 0.0],
    'action.std': [1.0, 1.0, 1.0],
    'action.q01': [-1.5, -1.5, 0.25],
    'action.q99': [1.5, 1.0, 0.25],
}


def write_lerobot_stats(folder: Path, step: int = 3, **changes: Any) -> Path:
    """Both pipelines, with the state where LeRobot's naming puts it for this step number."""
    vectors = {
        name.replace('__', '.'): np.array(value, np.float32)
        for name, value in {**VECTORS, **changes}.items()
        if value is not None
    }
    for pipeline, kind in (('pre', 'normalizer'), ('post', 'unnormalizer')):
        state_file = f'policy_{pipeline}processor_step_{step}_{kind}_processor.safetensors'
        save_arrays(vectors, folder / state_file)
        steps = [
            {'registry_name': 'rename_observations_processor', 'config': {'rename_map': {}}},
            {
                'registry_name': f'{kind}_processor',
                'config': {'eps': 1e-8},
                'state_file': state_file,
            },
        ]
        content = {'name': f'policy_{pipeline}processor', 'steps': steps}
        (folder / f'policy_{pipeline}processor.json').write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize('step', [2, 3])
def test_lerobots_statistics_are_found_wherever_the_step_stands(tmp_path: Path, step: int) -> None:
    stats = find_norm_stats(write_lerobot_stats(tmp_path, step), '')
    np.testing.assert_array_equal(stats.state.mean, np.float32([0, 1, 2]))
    np.testing.assert_array_equal(stats.actions.q99, np.float32([1.5, 1.0, 0.25]))
    assert stats.state.mean.dtype == np.float32
    assert f'step_{step}_unnormalizer' in stats.source


def test_quantiles_of_lerobot_are_scaled_by_its_own_formula(tmp_path: Path) -> None:
    stats = find_norm_stats(write_lerobot_stats(tmp_path), '').state
    values = np.array([[0.3, 0.7, 0.5], [-2.0, 4.0, 0.5]], np.float32)
    q01, q99 = np.float32(VECTORS['observation.state.q01']), np.float32([1.0, 3.0, 0.5])
    span = np.array([2.0, 5.0, 1e-8], np.float32)  # of the joint that never moved: epsilon
    assert (q99 - q01)[2] == 0
    expected = np.float32(2) * (values - q01) / span - np.float32(1)
    actual = normalize(values, stats, 'quantile')
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(unnormalize(actual, stats, 'quantile'), values, atol=1e-6)


def test_mean_and_deviation_of_lerobot_are_applied_by_its_own_formula(tmp_path: Path) -> None:
    stats = find_norm_stats(write_lerobot_stats(tmp_path), '').state
    values = np.array([0.5, 2.0, 2.0], np.float32)
    np.testing.assert_allclose(normalize(values, stats, 'mean_std'), [0.5, 0.5, 0.0], rtol=1e-7)
    back = unnormalize(np.float32([0.5, 0.5, 7.0]), stats, 'mean_std')
    np.testing.assert_array_equal(back, np.float32([0.5, 2.0, 2.0]))  # nothing added to a std of 0


@pytest.mark.parametrize(
    ('changes', 'expected'),
    [
        ({'observation.state.q01': [-1.0, float('nan'), 0.0]}, r'state\.q01: .*finite numbers'),
        ({'observation.state.q01': [2.0, 0.0, 0.0]}, 'expected std >= 0 and q01 <= q99'),
        ({'action.q99': None}, 'q01 and q99, of one length'),
        ({'action.q99': [1.0], 'action.q01': [0.0]}, 'of one length'),
    ],
)
def test_statistics_that_cannot_be_used_are_refused(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    write_lerobot_stats(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=expected):
        find_norm_stats(tmp_path, '')


def test_a_state_file_that_leads_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    write_lerobot_stats(tmp_path)
    pipeline = tmp_path / 'policy_preprocessor.json'
    content = json.loads(pipeline.read_text())
    content['steps'][1]['state_file'] = '../stats.safetensors'
    pipeline.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match='expected files inside this directory'):
        find_norm_stats(tmp_path, '')


def test_a_policy_saved_without_statistics_is_told(tmp_path: Path) -> None:
    write_lerobot_stats(tmp_path)
    pipeline = tmp_path / 'policy_preprocessor.json'
    content = json.loads(pipeline.read_text())
    del content['steps'][1]['state_file']
    pipeline.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match='was the policy saved without statistics'):
        find_norm_stats(tmp_path, '')


def test_the_constant_names_of_files_are_lerobots() -> None:
    files = MANIFEST['lerobot']['files']
    assert checkpoints.PREPROCESSOR in files['preprocessor']
    assert checkpoints.POSTPROCESSOR in files['postprocessor']


# --- profile and checkpoint together --------------------------------------------------------------


def profile_of(**model: Any) -> Any:
    return replace(
        load_profile('dummy', ROOT / 'config'),
        model=ModelProfile(preset='pi05', normalization='quantile', **model),
    )


def test_the_checkpoint_tells_the_horizon_and_the_order_of_cameras(write: Write) -> None:
    declared = read_config(write(chunk_size=30))
    config = model_config(profile_of(), declared)
    assert config.action_horizon == 30
    assert config.camera_slots == ('top', 'wrist')
    assert model_config(profile_of(action_horizon=12), declared).action_horizon == 12


@pytest.mark.case(22, 37)
def test_the_engine_refuses_a_profile_of_another_robot_in_one_error(write: Write) -> None:
    options = EngineOptions(checkpoint=str(write()))
    with pytest.raises(CheckpointError) as error:
        build_engine(
            profile_of(action_horizon=12), options, on_chunk=lambda _: None, on_text=lambda _: None
        )
    message = str(error.value)
    assert 'action_horizon is 50, but the model of the profile has 12' in message
    assert 'the number of joints.names should be 3, got 6' in message
    assert "cameras: expected slots among ['top', 'wrist'], got 'base_0_rgb'" in message
