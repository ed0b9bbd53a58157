"""The transforms against openpi's own outputs, bit for bit, and against unusable inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden_transforms as golden
import numpy as np
import pytest
from golden_transforms import assert_equal_up_to_arcsin, assert_identical

from oxygen_ros.model import transforms
from oxygen_ros.model.transforms import (
    Adapter,
    GripperAdapter,
    GripperMap,
    NormStats,
    VectorStats,
    load_norm_stats,
    make_adapter,
)

CASES = {case['name']: case for case in golden.CONTENT['cases']}
RESIZES = {entry['key']: entry for entry in golden.CONTENT['resize']['list']}


def cases(prefix: str) -> list[str]:
    return [name for name in CASES if name.startswith(prefix)]


def adapter_of(case: str) -> transforms.Adapter:
    if case.endswith('no_adapt'):  # adapt_to_pi=False: ALOHA without its conversions
        return make_adapter('identity', 14, 14)
    robot = case.split('_')[0]
    return make_adapter(robot, *{'aloha': (14, 14), 'droid': (8, 8), 'libero': (8, 7)}[robot])


def stats_of(case: str) -> NormStats:
    wide = case.endswith('stats_wider_than_data')
    return load_norm_stats(golden.GOLDEN / f'transforms.norm_stats{"32" if wide else ""}.json')


def normalization_of(case: str) -> str:
    return 'mean_std' if 'meanstd' in case else 'quantile'


# ---------------------------------------------------------------------------------- golden cases


@pytest.mark.parametrize(
    'case', [name for robot in ('aloha', 'droid', 'libero') for name in cases(f'{robot}_in')]
)
def test_robot_inputs_are_openpis(case: str) -> None:
    inputs, outputs = golden.fields(f'{case}/in'), golden.fields(f'{case}/out')
    adapter, images = adapter_of(case), golden.images(inputs)
    assert_state = assert_equal_up_to_arcsin if case.startswith('aloha') else assert_identical
    assert_state(adapter.encode_state(golden.state(inputs)), outputs['state'])
    for slot in ('base_0_rgb', 'left_wrist_0_rgb', 'right_wrist_0_rgb'):
        # openpi fills an absent camera with black and masks it; we leave its key out.
        assert bool(outputs[f'image_mask/{slot}']) == (slot in images)
        if slot in images:
            assert_identical(transforms.to_uint8(images[slot]), outputs[f'image/{slot}'])
    if 'actions' in inputs:
        assert_identical(adapter.encode_actions(inputs['actions']), outputs['actions'])


@pytest.mark.parametrize(
    'case', [name for robot in ('aloha', 'droid', 'libero') for name in cases(f'{robot}_out')]
)
def test_robot_outputs_are_openpis(case: str) -> None:
    actions = adapter_of(case).decode_actions(golden.ARRAYS[f'{case}/in/actions'])
    assert_identical(actions, golden.ARRAYS[f'{case}/out/actions'])


@pytest.mark.parametrize(
    ('function', 'key'),
    [
        (transforms.gripper_to_angular, 'to_angular'),
        (transforms.gripper_from_angular, 'from_angular'),
        (transforms.gripper_from_angular_inverse, 'from_angular_inv'),
    ],
)
def test_the_gripper_curves_of_aloha_are_openpis(function: Any, key: str) -> None:
    curve = golden.fields('aloha_gripper_curve')
    assert_equal_up_to_arcsin(function(curve['gripper_in']), curve[key])


@pytest.mark.parametrize('vector', ['state', 'actions'])
@pytest.mark.parametrize('case', cases('normalize') + cases('unnormalize'))
def test_normalisation_is_openpis(case: str, vector: str) -> None:
    stats = getattr(stats_of(case), vector)
    function = transforms.normalize if case.startswith('normalize') else transforms.unnormalize
    values = function(golden.ARRAYS[f'{case}/in/{vector}'], stats, normalization_of(case))
    assert_identical(values, golden.ARRAYS[f'{case}/out/{vector}'])


@pytest.mark.parametrize('case', cases('delta_actions') + cases('absolute_actions'))
def test_delta_and_absolute_actions_are_openpis(case: str) -> None:
    inputs, mask = golden.fields(f'{case}/in'), CASES[case]['mask']
    before = inputs['actions'].copy()
    is_delta = case.startswith('delta')
    function = transforms.delta_actions if is_delta else transforms.absolute_actions
    actions = function(inputs['actions'], inputs['state'], mask)
    assert_identical(actions, golden.ARRAYS[f'{case}/out/actions'])
    assert_identical(inputs['actions'], before)  # the caller's array is not written to


@pytest.mark.parametrize('case', cases('pad_states'))
def test_padding_is_openpis(case: str) -> None:
    for vector, values in golden.fields(f'{case}/in').items():
        assert_identical(transforms.pad_to_dim(values, 32), golden.ARRAYS[f'{case}/out/{vector}'])


@pytest.mark.parametrize('key', RESIZES)
def test_resizing_is_openpis(key: str) -> None:
    y, x = np.mgrid[: RESIZES[key]['h'], : RESIZES[key]['w']]
    channels = [
        (7 * x + 3 * y) % 256,
        (x * y // 5 + 11 * x) % 256,
        ((x // 8 + y // 8) % 2) * 200 + (x + y) % 56,
    ]
    image = np.stack(channels, axis=-1).astype(np.uint8)
    assert_identical(transforms.resize_with_pad(image, 224), golden.ARRAYS[key])


def test_resizing_of_noise_is_openpis() -> None:
    noise = golden.fields('resize/random_30x47')
    assert_identical(transforms.resize_with_pad(noise['in'], 224), noise['out'])
    batch = golden.fields('resize/batch_2x19x11')  # openpi takes a batch, we take its images
    for image, expected in zip(batch['in'], batch['out'], strict=True):
        assert_identical(transforms.resize_with_pad(image, 224), expected)


def test_every_golden_array_belongs_to_a_check() -> None:
    families = ('aloha', 'droid', 'libero', 'normalize', 'unnormalize', 'delta', 'absolute', 'pad')
    here = {name for name in CASES if name.startswith(families)}
    assert here == set(CASES)
    elsewhere = {
        'digitize': 'test_prompt.py',
        'prompt': 'test_prompt.py',
        **{chain['name']: 'test_processor.py' for chain in golden.CONTENT['chains']},
        'uint8_to_float': 'not a transform here: the model scales pixels on its device (pi05.py)',
    }
    groups = {key.split('/')[0] for key in golden.ARRAYS}
    assert groups == here | {'resize'} | set(elsewhere)
    extra = {'resize/random_30x47', 'resize/batch_2x19x11'}
    assert set(golden.CONTENT['resize']['extra']) == extra


# ---------------------------------------------------------------------------- properties, errors


@pytest.mark.parametrize('normalization', ['quantile', 'mean_std'])
def test_unnormalising_undoes_normalising(normalization: str) -> None:
    stats = stats_of('').actions
    values = np.random.default_rng(0).normal(size=(5, 7)) * 3  # beyond the quantiles: no clipping
    there = transforms.normalize(values, stats, normalization)
    np.testing.assert_allclose(transforms.unnormalize(there, stats, normalization), values)


@pytest.mark.case(36)
def test_aloha_commands_survive_the_way_to_the_model_and_back() -> None:
    commands = np.random.default_rng(0).uniform(0, 1, (5, 14))
    adapter = make_adapter('aloha', 14, 14)
    np.testing.assert_allclose(adapter.decode_actions(adapter.encode_actions(commands)), commands)


def test_an_aloha_gripper_beyond_its_stroke_saturates_instead_of_becoming_nan() -> None:
    angles = transforms.gripper_to_angular(np.array([-0.2, 0.0, 1.0, 1.5]))
    assert np.isfinite(angles).all()
    assert (np.diff(angles) >= 0).all()


def test_an_image_that_fits_is_not_copied() -> None:
    image = np.zeros((56, 56, 3), np.uint8)
    assert transforms.resize_with_pad(image, 56) is image


def test_an_image_too_narrow_to_shrink_is_refused() -> None:
    with pytest.raises(ValueError, match='1 x 500 leaves no pixel at 224 x 224'):
        transforms.resize_with_pad(np.zeros((1, 500, 3), np.uint8), 224)


@pytest.mark.parametrize(
    ('image', 'message'),
    [
        (np.zeros((4, 4), np.uint8), r'got shape \(4, 4\)'),
        (np.zeros((4, 4, 4), np.uint8), r'got shape \(4, 4, 4\)'),
        (np.zeros((4, 4, 3), np.uint16), 'got uint16'),
        (np.full((4, 4, 3), 1.1, np.float32), 'got values from 1.1'),
        (np.full((4, 4, 3), -0.1), 'got values from -0.1'),
        (np.full((4, 4, 3), np.nan), 'got values from nan'),
    ],
)
def test_an_image_of_another_format_is_refused(image: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transforms.to_uint8(image)


def test_statistics_of_another_width_are_refused() -> None:
    stats = stats_of('').state  # 8 wide
    with pytest.raises(ValueError, match='8 dimensions cannot normalise 9'):
        transforms.normalize(np.zeros(9), stats, 'quantile')
    with pytest.raises(ValueError, match='8 dimensions cannot unnormalise 7'):
        transforms.unnormalize(np.zeros(7), stats, 'quantile')


def test_quantiles_that_the_file_lacks_point_to_the_other_normalisation() -> None:
    stats = VectorStats(np.zeros(2), np.ones(2), None, None)
    with pytest.raises(ValueError, match=r'set model\.normalization to mean_std'):
        transforms.normalize(np.zeros(2), stats, 'quantile')


def test_an_unknown_normalisation_is_refused() -> None:
    with pytest.raises(ValueError, match="'quantile' or 'mean_std', got 'none'"):
        transforms.unnormalize(np.zeros(8), stats_of('').state, 'none')


@pytest.mark.parametrize(
    ('name', 'widths', 'message'),
    [
        ('alloha', (14, 14), "expected one of .*'identity', 'aloha'.*, got 'alloha'"),
        ('aloha', (7, 7), 'expected 14 entries in joints.names and 14 .* got 7 and 7'),
        ('libero', (8, 8), 'expected 8 entries in joints.names and 7 .* got 8 and 8'),
    ],
)
def test_an_adapter_that_does_not_fit_the_robot_is_refused(
    name: str, widths: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_adapter(name, *widths)


def test_a_missing_statistics_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r'norm_stats\.json: copy norm_stats.json'):
        load_norm_stats(tmp_path / 'norm_stats.json')


def vector(**changes: Any) -> dict[str, Any]:
    return {'mean': [0, 0], 'std': [1, 1], 'q01': [-1, -1], 'q99': [1, 1], **changes}


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ([], "an object with the key 'norm_stats'"),
        ({'state': vector()}, "an object with the key 'norm_stats'"),
        ({'norm_stats': {'state': vector()}}, r"'actions' is missing; found \['state'\]"),
        ({'norm_stats': {'actions': vector(), 'qpos': vector()}}, "'state' is missing"),
        ({'norm_stats': {'state': vector(), 'actions': {'mean': [0]}}}, "actions has no 'std'"),
        (vector(mean=[0]), r"lists of one length, got \{'mean': 1, 'std': 2"),
        (vector(q99=None), "both 'q01' and 'q99' or neither"),
        (vector(q99=['far', 1]), 'state.q99: expected a list of numbers'),
        (vector(std=[float('nan'), 1]), 'state.std: expected a list of finite numbers'),
        (vector(mean=0.5), 'state.mean: expected a list of finite numbers'),
        (vector(std=[-1, 1]), 'std >= 0'),
        (vector(q01=[2, 2]), 'q01 <= q99'),
    ],
)
def test_statistics_that_cannot_be_used_name_the_file_and_the_key(
    tmp_path: Path, content: Any, message: str
) -> None:
    if isinstance(content, dict) and 'mean' in content:
        content = {'norm_stats': {'state': content, 'actions': vector()}}
    path = tmp_path / 'norm_stats.json'
    path.write_text(json.dumps(content), encoding='utf-8')
    with pytest.raises(ValueError, match=message) as caught:
        load_norm_stats(path)
    assert str(path) in str(caught.value)


def test_a_statistics_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / 'norm_stats.json'
    path.write_text('version https://git-lfs.github.com/spec/v1\n', encoding='utf-8')
    with pytest.raises(ValueError, match=r'norm_stats\.json: expected JSON'):
        load_norm_stats(path)


@pytest.mark.parametrize('absent', [{'q01': None, 'q99': None}, {}])
def test_statistics_without_quantiles_load(tmp_path: Path, absent: dict[str, Any]) -> None:
    # pi0 checkpoints; whether mean and deviation are enough depends on model.normalization.
    content = {'mean': [0.5, 0], 'std': [1, 1], **absent}
    path = tmp_path / 'norm_stats.json'
    path.write_text(json.dumps({'norm_stats': {'state': content, 'actions': content}}))
    stats = load_norm_stats(path)
    assert stats.state.q01 is None
    assert_identical(stats.state.mean, np.array([0.5, 0.0]))


# ------------------------------------------------------------------------------------- grippers


def gripper(model: tuple[float, float], robot: tuple[float, float]) -> GripperAdapter:
    """Two joints, of which the second is a gripper."""
    return GripperAdapter(2, 2, Adapter(2, 2), (GripperMap(1, 1, model, robot),))


@pytest.mark.case(36)
@pytest.mark.parametrize(
    ('model', 'robot', 'position', 'expected'),
    [
        ((0.0, 1.0), (0.0449, 0.058), 0.058, 1.0),  # ALOHA's fingers [m], 1 = open
        ((0.0, 1.0), (0.8, 0.0), 0.8, 0.0),  # Robotiq [rad], closed at 0.8: inverted
        ((0.0, 1.0), (0.8, 0.0), 0.2, 0.75),
        ((-1.0, 1.0), (0.0, 255.0), 127.5, 0.0),
    ],
)
def test_a_gripper_is_mapped_linearly_and_back_to_itself(
    model: tuple[float, float], robot: tuple[float, float], position: float, expected: float
) -> None:
    adapter = gripper(model, robot)
    state = np.array([0.3, position], np.float32)
    encoded = adapter.encode_state(state)
    np.testing.assert_allclose(encoded, [0.3, expected], atol=1e-6)
    command = adapter.decode_actions(np.array([[*encoded, 0.0, 0.0]]))  # the model's padding
    np.testing.assert_allclose(command, [[0.3, position]], atol=1e-6)
    np.testing.assert_allclose(adapter.encode_actions(command)[0], encoded, atol=1e-6)
    assert state[1] == np.float32(position), 'the observation is not written to'


def test_a_gripper_outside_its_range_is_not_clipped() -> None:
    adapter = gripper((0.0, 1.0), (0.0, 0.8))
    assert adapter.encode_state(np.array([0.0, 0.88]))[1] == pytest.approx(1.1)


def test_a_gripper_may_be_only_measured_or_only_commanded() -> None:
    table = GripperMap(None, 0, (0.0, 1.0), (0.8, 0.0))
    adapter = GripperAdapter(1, 1, Adapter(1, 1), (table,))
    np.testing.assert_array_equal(adapter.encode_state(np.array([0.5])), [0.5])
    np.testing.assert_allclose(adapter.decode_actions(np.array([[0.25]])), [[0.6]])


def test_a_gripper_is_mapped_before_the_robots_own_transform() -> None:
    aloha = make_adapter('aloha', 14, 14)
    table = GripperMap(6, 6, (0.0, 1.0), (0.0449, 0.058))
    adapter = GripperAdapter(14, 14, aloha, (table,))
    state = np.zeros(14, np.float32)
    state[6] = 0.05145
    half = np.zeros(14)
    half[6] = 0.5
    np.testing.assert_allclose(adapter.encode_state(state), aloha.encode_state(half), atol=1e-4)
