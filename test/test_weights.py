"""Checkpoints: openpi's names, shapes and dtypes, and what a user is told when they do not fit."""

from __future__ import annotations

import json

import golden_pi05 as golden
import pytest
import torch
from golden_pi05 import CHECKPOINT, CPU, GOLDEN
from safetensors.torch import load_file, save_file

from oxygen_ros.model.checkpoints import (
    LANGUAGE_HEAD,
    TIED_EMBEDDING,
    UNUSED,
    CheckpointError,
)
from oxygen_ros.model.config import PRESETS
from oxygen_ros.model.pi05 import Pi05
from oxygen_ros.model.weights import (
    checkpoint_names,
    load_model,
    parameter_dtype,
    part_shapes,
    random_model,
    save_model,
)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return load_file(CHECKPOINT)


@pytest.fixture(scope='module')
def full_size() -> dict[str, torch.nn.Parameter]:
    with torch.device('meta'):
        return dict(Pi05(PRESETS['pi05']).named_parameters())


@pytest.fixture(scope='module')
def manifest() -> dict:
    return json.loads((GOLDEN / 'pi05_manifest.json').read_text())['openpi']


def load(path, config=None):
    return load_model(config or golden.config(), path, device=CPU, dtype=torch.float32)


def saved(tmp_path, tensors):
    path = tmp_path / 'model.safetensors'
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def same(ours, other) -> bool:
    theirs = dict(other.named_parameters())
    return all(torch.equal(p, theirs[name]) for name, p in ours.named_parameters())


def test_every_tensor_of_the_released_model_has_its_place_and_shape(full_size, manifest):
    names = checkpoint_names(PRESETS['pi05'])
    assert names.keys() == full_size.keys()
    ours = {
        part: list(shape)
        for name, parts in names.items()
        for part, shape in zip(
            parts, part_shapes(name, full_size[name].shape, PRESETS['pi05']), strict=True
        )
    }
    assert ours == {key: shape for key, shape in manifest['keys'].items() if key not in UNUSED}


def test_bfloat16_serving_keeps_exactly_openpis_float32_list(full_size, manifest):
    names = checkpoint_names(PRESETS['pi05'])
    islands = {
        part
        for name, parts in names.items()
        if parameter_dtype(name, torch.bfloat16) == torch.float32
        for part in parts
    }
    assert islands == set(manifest['runtime_float32_in_bfloat16_mode']['names'])


@pytest.mark.parametrize('absent', [(), (LANGUAGE_HEAD,), (TIED_EMBEDDING,), UNUSED])
def test_either_name_of_the_tied_embedding_will_do(tmp_path, weights, absent):
    kept = {name: tensor for name, tensor in weights.items() if name not in absent}
    assert same(load(saved(tmp_path, kept)), golden.model())


def test_lerobots_prefix_is_understood(tmp_path, weights):
    renamed = {f'model.{name}': tensor for name, tensor in weights.items()}
    assert same(load(saved(tmp_path, renamed)), golden.model())


def test_a_sharded_directory_loads_like_one_file(tmp_path, weights):
    names = sorted(weights)
    shards = {'one.safetensors': names[::2], 'two.safetensors': names[1::2]}
    for file, part in shards.items():
        save_file({name: weights[name].contiguous() for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
    assert same(load(tmp_path), golden.model())


def test_one_error_lists_all_missing_unexpected_and_misshapen_tensors(tmp_path, weights):
    del weights['time_mlp_in.bias']
    weights['memory_proj.weight'] = torch.zeros(2, 2)
    weights['action_out_proj.weight'] = torch.zeros(7, 32)
    with pytest.raises(CheckpointError) as error:
        load(saved(tmp_path, weights))
    message = str(error.value)
    assert str(tmp_path) in message
    assert 'missing: time_mlp_in.bias [32]' in message
    assert 'unexpected: memory_proj.weight [2, 2]' in message
    assert 'wrong shape: action_out_proj.weight: expected [32, 32], got [7, 32]' in message


def test_a_checkpoint_of_another_size_is_refused_by_name(tmp_path, weights):
    with pytest.raises(CheckpointError, match=r'wrong shape: .*embeddings.patch_embedding'):
        load(saved(tmp_path, weights), PRESETS['mid'])


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(CheckpointError, match='nowhere: no such file'):
        load(tmp_path / 'nowhere')


def test_a_directory_without_weights_says_what_it_looked_for(tmp_path):
    (tmp_path / 'params').mkdir()
    with pytest.raises(CheckpointError, match=r'expected model.safetensors .*params'):
        load(tmp_path)


@pytest.mark.parametrize('content', [b'', b'\x80\x04pickle', b'\xff' * 64])
def test_a_file_that_is_no_safetensors_is_refused(tmp_path, content):
    path = tmp_path / 'model.safetensors'
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match='not a readable safetensors file'):
        load(path)


def test_a_truncated_checkpoint_is_refused(tmp_path):
    path = tmp_path / 'model.safetensors'
    path.write_bytes(CHECKPOINT.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match='not a readable safetensors file'):
        load(path)


def test_random_weights_follow_the_seed():
    def draw(seed):
        return random_model(PRESETS['dummy'], seed=seed, device=CPU, dtype=torch.float32)

    assert same(draw(1), draw(1))
    assert not same(draw(1), draw(2))


def test_what_is_saved_has_openpis_names_and_loads_to_the_same_model(tmp_path):
    path = tmp_path / 'model.safetensors'
    save_model(golden.model(), path, dtype=torch.float32)
    assert same(load(path), golden.model())
    theirs = load_file(CHECKPOINT)
    for name in (*UNUSED, TIED_EMBEDDING):
        del theirs[name]
    ours = load_file(path)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
