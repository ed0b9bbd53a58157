"""Whole chains against openpi's own, robot to model and back; and parts that do not fit."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import golden_transforms as golden
import numpy as np
import pytest
from golden_transforms import assert_equal_up_to_arcsin, assert_identical

from oxygen_ros.model.processor import Processor
from oxygen_ros.model.prompt import ByteTokenizer
from oxygen_ros.model.transforms import NormStats, VectorStats, load_norm_stats, make_adapter
from oxygen_ros.observation import Observation

CHAINS = {chain['name']: chain for chain in golden.CONTENT['chains']}
SLOTS = ('base_0_rgb', 'left_wrist_0_rgb', 'right_wrist_0_rgb')
ALOHA_DELTAS = ((True,) * 6 + (False,)) * 2  # arms relative, grippers absolute


def chain_processor(name: str) -> Processor:
    robot = name.split('_')[1]
    widths = {'aloha': (14, 14), 'droid': (8, 8), 'libero': (8, 7)}[robot]
    return Processor(
        image_size=224,
        camera_slots=SLOTS,
        max_token_len=200,
        action_dim=32,
        action_horizon=10,
        tokenizer=ByteTokenizer(),
        prompt='plain' if name.endswith('no_state') else 'state',
        normalization='quantile',
        norm_stats=load_norm_stats(golden.GOLDEN / f'transforms.{name}.norm_stats.json'),
        adapter=make_adapter(robot, *widths),
        delta_mask=ALOHA_DELTAS if robot == 'aloha' else (),
    )


def chain_observation(name: str) -> Observation:
    inputs = golden.fields(f'{name}/in')
    return observation(
        images=golden.images(inputs),
        state=golden.state(inputs),
        instruction=CHAINS[name]['inputs'][f'{name}/in/prompt']['str'],
    )


def observation(**changes: Any) -> Observation:
    images = {slot: np.full((6, 8, 3), 200, np.uint8) for slot in SLOTS}
    fields = {'images': images, 'state': np.zeros(3, np.float32), 'instruction': 'wave', **changes}
    for array in (fields['state'], *fields['images'].values()):
        array.setflags(write=False)  # as ObservationBuffer hands them out
    return Observation(frame=0, stamp_ns=0, time_ns=0, **fields)


def vector(width: int) -> VectorStats:
    return VectorStats(np.zeros(width), np.ones(width), np.full(width, -2.0), np.full(width, 2.0))


STATS = NormStats('checkpoint/norm_stats.json', state=vector(3), actions=vector(3))


def processor(**changes: Any) -> Processor:
    """A robot of three joints and a small model; every test changes what it is about."""
    arguments = {
        'image_size': 16,
        'camera_slots': SLOTS,
        'max_token_len': 64,
        'action_dim': 8,
        'action_horizon': 4,
        'tokenizer': ByteTokenizer(),
        'prompt': 'state',
        'normalization': 'quantile',
        'norm_stats': STATS,
        'adapter': make_adapter('identity', 3, 3),
        'delta_mask': (),
    }
    return Processor(**{**arguments, **changes})


# --------------------------------------------------------------------------------- golden chains


@pytest.mark.parametrize('name', CHAINS)
def test_an_observation_becomes_openpis_model_input(name: str) -> None:
    chain, expected = CHAINS[name], golden.fields(f'{name}/model_input')
    seen = chain_processor(name).encode(chain_observation(name))
    text = chain['prompt_string'] or ''.join(text for text, _ in chain['encode_calls'])
    assert seen.tokens == [ByteTokenizer.bos_id, *ByteTokenizer().encode(text)]
    assert seen.truncated_tokens == 0
    assert list(seen.images) == [slot for slot in SLOTS if expected[f'image_mask/{slot}']]
    for slot, image in seen.images.items():
        record = chain['model_input'][f'{name}/model_input/image/{slot}']
        assert (image.dtype, image.shape) == (np.uint8, (224, 224, 3))
        assert hashlib.sha256(image.tobytes()).hexdigest() == record['sha256']


@pytest.mark.parametrize('name', CHAINS)
def test_the_padded_state_is_openpis(name: str) -> None:
    state = chain_processor(name).padded_state(chain_observation(name))
    assert_equal_up_to_arcsin(state, golden.ARRAYS[f'{name}/model_input/state'])


@pytest.mark.parametrize('name', CHAINS)
def test_model_actions_become_openpis_commands(name: str) -> None:
    actions = golden.ARRAYS[f'{name}/model_actions']
    before = actions.copy()
    commands = chain_processor(name).decode(actions, chain_observation(name))
    assert_identical(commands, golden.ARRAYS[f'{name}/out/actions'])
    assert_identical(actions, before)


# ------------------------------------------------------------------------------------ properties


def test_absent_cameras_are_left_out_and_the_rest_keeps_the_slot_order() -> None:
    images = {slot: np.zeros((6, 8, 3), np.uint8) for slot in (SLOTS[2], SLOTS[0])}
    seen = processor().encode(observation(images=images))
    assert list(seen.images) == [SLOTS[0], SLOTS[2]]


def test_pictures_are_fitted_to_the_model_and_padded_with_black() -> None:
    image = processor().encode(observation()).images[SLOTS[0]]
    assert image.shape == (16, 16, 3)
    assert not image[:2].any() and not image[14:].any()  # 6 x 8 fills 12 of 16 rows
    assert (image[2:14] == 200).all()


def test_a_prompt_that_is_too_long_is_cut_and_the_loss_told() -> None:
    whole = processor().encode(observation())
    cut = processor(max_token_len=10).encode(observation())
    assert cut.tokens == whole.tokens[:10]
    assert cut.truncated_tokens == len(whole.tokens) - 10
    exact = processor(max_token_len=len(whole.tokens)).encode(observation())
    assert (exact.tokens, exact.truncated_tokens) == (whole.tokens, 0)


def test_notes_that_do_not_fit_are_left_out_whole_the_oldest_first_and_counted() -> None:
    plain = processor().encode(observation())
    room = len(plain.tokens) + len(', Memory: two; three')
    seen = processor(max_token_len=room).encode(observation(notes=('one', 'two', 'three')))
    text = ByteTokenizer().decode(seen.tokens)
    assert 'Task: wave, Memory: two; three, State: ' in text
    assert (seen.omitted_notes, seen.truncated_tokens) == (1, 0)
    none = processor(max_token_len=len(plain.tokens)).encode(observation(notes=('one', 'two')))
    assert none.tokens == plain.tokens
    assert (none.omitted_notes, none.truncated_tokens) == (2, 0)


@pytest.mark.parametrize('entry', golden.CONTENT['token_padding'], ids=lambda e: e['n_tokens'])
def test_a_prompt_is_cut_where_openpi_cuts_it(entry: dict[str, Any]) -> None:
    # openpi's recorder returned ids 2, 3, 4, ...; we keep its valid ids and add no padding.
    class Counting(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return list(range(3, 2 + entry['n_tokens']))

    built = processor(tokenizer=Counting(), max_token_len=entry['max_len'])
    seen = built.encode(observation())
    valid = [i for i, is_valid in zip(entry['ids'], entry['mask'], strict=True) if is_valid]
    assert seen.tokens == valid
    assert seen.truncated_tokens == max(0, entry['n_tokens'] - entry['max_len'])


def test_the_prompt_holds_the_normalised_state() -> None:
    seen = processor().encode(observation(state=np.array([-3, 0.01, 2.1], np.float32)))
    assert seen.tokens[1:] == ByteTokenizer().encode('Task: wave, State: -1 128 255;\nAction: ')


@pytest.mark.case(37)
@pytest.mark.parametrize('normalization', ['quantile', 'mean_std', 'none'])
def test_zero_deltas_command_the_joints_to_stay(normalization: str) -> None:
    stats = None if normalization == 'none' else STATS
    built = processor(normalization=normalization, norm_stats=stats, delta_mask=(True, True, False))
    state = np.array([0.5, -1.5, 1.0], np.float32)
    commands = built.decode(np.zeros((4, 8), np.float32), observation(state=state))
    assert (commands.dtype, commands.shape) == (np.float64, (4, 3))
    np.testing.assert_allclose(commands, np.tile([0.5, -1.5, 0.0], (4, 1)), atol=1e-6)


def test_a_command_may_be_narrower_than_the_state() -> None:
    stats = replace(STATS, actions=vector(2))
    built = processor(norm_stats=stats, adapter=make_adapter('identity', 3, 2))
    assert built.num_joints == 2
    assert built.decode(np.ones((4, 8), np.float32), observation()).shape == (4, 2)


def test_statistics_as_wide_as_the_model_are_accepted() -> None:
    # Some checkpoints store statistics of the padded vectors.
    built = processor(norm_stats=NormStats('f', vector(8), vector(8)))
    narrow = processor()
    assert built.encode(observation()).tokens == narrow.encode(observation()).tokens
    actions = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    assert_identical(built.decode(actions, observation()), narrow.decode(actions, observation()))


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'state': np.zeros(4, np.float32)}, r'a state of 3 joints, got shape \(4,\)'),
        ({'state': np.array([0, np.nan, 0], np.float32)}, r'a finite state, got \[0.0, nan, 0.0\]'),
        ({'images': {}}, r'at least one camera of \[.base_0_rgb.*, got none'),
        ({'images': {'wrist': np.zeros((6, 8, 3), np.uint8)}}, r"cameras among .* got \['wrist'\]"),
        (
            {'images': {SLOTS[1]: np.zeros((6, 8), np.uint8)}},
            r"camera 'left_wrist_0_rgb': .* got shape \(6, 8\)",
        ),
    ],
)
def test_an_observation_of_another_robot_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        processor().encode(observation(**changes))


@pytest.mark.parametrize('name', CHAINS)
def test_commands_become_the_actions_they_came_from(name: str) -> None:
    chain, given = chain_processor(name), chain_observation(name)
    actions = np.random.default_rng(2).uniform(-1, 1, (10, 32)).astype(np.float32)
    encoded = chain.encode_actions(chain.decode(actions, given), given)
    width = chain.num_joints
    np.testing.assert_allclose(encoded[:, :width], actions[:, :width], atol=1e-5)
    assert encoded.dtype == np.float32
    assert encoded.shape == (10, 32)
    assert not encoded[:, width:].any()


@pytest.mark.case(22)
@pytest.mark.parametrize('normalization', ['quantile', 'mean_std', 'none'])
def test_commands_are_encoded_against_the_state_of_now(normalization: str) -> None:
    """What an earlier chunk planned stays where it was planned when the robot has moved."""
    stats = None if normalization == 'none' else STATS
    robot = processor(normalization=normalization, norm_stats=stats, delta_mask=(True, True, False))
    commands = np.random.default_rng(3).uniform(-0.5, 0.5, (4, 3))
    encoded = []
    for state in ([0.0, 0.1, 0.2], [0.1, 0.2, 0.3]):
        given = observation(state=np.array(state, np.float32))
        encoded.append(robot.encode_actions(commands, given))
        np.testing.assert_allclose(robot.decode(encoded[-1], given), commands, atol=1e-6)
    assert not np.allclose(encoded[0][:, :2], encoded[1][:, :2], atol=0.01)
    np.testing.assert_array_equal(encoded[0][:, 2], encoded[1][:, 2])


def test_a_joint_that_never_moved_in_training_does_not_blow_a_command_up() -> None:
    still = replace(vector(3), q01=np.zeros(3), q99=np.zeros(3))
    robot = processor(norm_stats=replace(STATS, actions=still), delta_mask=(True,) * 3)
    encoded = robot.encode_actions(np.full((4, 3), 0.01), observation())
    assert np.abs(encoded).max() == 10


def test_actions_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r'\(4, 8\), got \(1, 4, 8\)'):
        processor().decode(np.zeros((1, 4, 8), np.float32), observation())


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'prompt': 'chat'}, "model.prompt: expected one of .* got 'chat'"),
        ({'normalization': 'minmax'}, "model.normalization: expected one of .* got 'minmax'"),
        ({'norm_stats': None}, "model.normalization is 'quantile', which needs .* got none"),
        (
            {'normalization': 'none'},
            r"^checkpoint/norm_stats.json: .* model.normalization is 'none'",
        ),
        ({'delta_mask': (True, True)}, 'action.delta_mask: expected 3 entries, .* got 2'),
        (
            {'adapter': make_adapter('identity', 9, 3)},
            'joints.names: expected 1 to 8 entries, .* got 9',
        ),
        (
            {'adapter': make_adapter('identity', 3, 9)},
            'command.names: expected 1 to 8 entries, .* got 9',
        ),
        (
            {
                'adapter': make_adapter('identity', 2, 3),
                'delta_mask': (True, True, True),
                'norm_stats': replace(STATS, state=vector(2)),
            },
            'action.delta_mask: a delta needs a state, but joints.names has only 2 entries',
        ),
        (
            {'norm_stats': replace(STATS, state=vector(2))},
            r"^checkpoint/norm_stats.json: 'state': expected statistics of 3 to 8 .* got 2",
        ),
        (
            {'norm_stats': replace(STATS, actions=vector(9))},
            r"^checkpoint/norm_stats.json: 'actions': expected statistics of 3 to 8 .* got 9",
        ),
        (
            {
                'norm_stats': replace(
                    STATS, actions=VectorStats(np.zeros(3), np.ones(3), None, None)
                )
            },
            r"^checkpoint/norm_stats.json: 'actions': no q01 and q99: .* to mean_std",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_at_the_start(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        processor(**changes)
