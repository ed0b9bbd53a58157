"""Profiles: the shipped files load, and a wrong one is refused by a message that helps."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from oxygen_ros.profile import (
    ProfileError,
    RobotProfile,
    load_profile,
    plain_profile,
    read_profile,
)

CONFIG = Path(__file__).parents[1] / 'config'
ROBOTS = ('aloha', 'droid', 'dummy', 'libero', 'tabletop', 'template')
DUMMY: dict[str, Any] = yaml.safe_load((CONFIG / 'dummy.yaml').read_text())

Load = Callable[[dict[str, Any]], RobotProfile]


def changed(key: str, value: Any) -> dict[str, Any]:
    """The dummy profile with one dotted key set; list elements by number."""
    raw = copy.deepcopy(DUMMY)
    *path, last = [int(part) if part.isdigit() else part for part in key.split('.')]
    node: Any = raw
    for part in path:
        node = node[part]
    node[last] = value
    return raw


def gripper(**changes: Any) -> dict[str, Any]:
    return {'joint': 'joint_6', 'model': [0.0, 1.0], 'robot': [0.0, 0.8], **changes}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load_raw(raw: dict[str, Any]) -> RobotProfile:
        path = tmp_path / 'robot.yaml'
        path.write_text(yaml.safe_dump(raw))
        return load_profile(str(path), CONFIG)

    return load_raw


def refusal(load: Load, raw: dict[str, Any]) -> str:
    with pytest.raises(ProfileError) as caught:
        load(raw)
    assert 'robot.yaml: ' in str(caught.value), 'the message must name the file'
    return str(caught.value)


@pytest.mark.parametrize('name', ROBOTS)
def test_every_shipped_profile_loads_under_its_own_name(name: str) -> None:
    assert load_profile(name, CONFIG).name == name


@pytest.mark.parametrize('name', ROBOTS)
def test_a_profile_survives_json(name: str) -> None:
    profile = load_profile(name, CONFIG)
    assert read_profile(json.loads(json.dumps(plain_profile(profile))), name) == profile


def test_every_profile_in_config_is_tested_here() -> None:
    files = {file.stem for file in CONFIG.glob('*.yaml')} - {'oxygen', 'diagnostics'}
    assert files == set(ROBOTS)


def test_the_node_parameters_apply_to_any_node_and_name_a_shipped_profile() -> None:
    raw = yaml.safe_load((CONFIG / 'oxygen.yaml').read_text())
    assert list(raw) == ['/**']
    assert raw['/**']['ros__parameters']['profile'] in ROBOTS


@pytest.mark.parametrize('name', ['dummy', 'template'])
def test_a_manual_shows_every_key(name: str) -> None:
    """A field added to the schema must be explained in both."""
    text = (CONFIG / f'{name}.yaml').read_text()
    profile = load_profile('template', CONFIG)
    records = [
        profile.cameras[0],
        profile.joints,
        profile.instruction,
        profile.command,
        profile.action,
        profile.grippers[0],
        profile.tasks[0],
        profile.memory,
        profile.model,
    ]
    for record in records:
        for name in record.__dataclass_fields__:
            assert f'{name}:' in text, f'{type(record).__name__}.{name}'


def test_aloha_has_fourteen_joints_with_absolute_grippers() -> None:
    profile = load_profile('aloha', CONFIG)
    absolute = [
        name
        for name, is_delta in zip(profile.command.names, profile.action.delta_mask, strict=True)
        if not is_delta
    ]
    assert len(profile.command.names) == 14
    assert absolute == ['left_gripper', 'right_gripper']


def test_libero_commands_other_names_than_it_measures() -> None:
    profile = load_profile('libero', CONFIG)
    assert (len(profile.joints.names), len(profile.command.names)) == (8, 7)
    assert all(camera.rotate_180 for camera in profile.cameras)


def test_command_names_default_to_the_joints(load: Load) -> None:
    profile = load(DUMMY)
    assert profile.command.names == profile.joints.names


def test_one_value_stands_for_all_joints(load: Load) -> None:
    profile = load(DUMMY)
    assert profile.command.lower == (-3.14,) * 6
    assert profile.command.quantity == ('position',) * 6
    assert load(changed('action.delta_mask', True)).action.delta_mask == (True,) * 6


def test_a_whole_number_is_accepted_where_a_number_is_expected(load: Load) -> None:
    rate_hz = load(changed('command.rate_hz', 50)).command.rate_hz
    assert isinstance(rate_hz, float)
    assert rate_hz == 50.0


def test_a_continuous_joint_may_be_unbounded(load: Load) -> None:
    assert load(changed('command.limits.upper', float('inf'))).command.upper == (float('inf'),) * 6


def test_an_unknown_profile_is_told_which_ones_there_are() -> None:
    with pytest.raises(ProfileError, match=r"did you mean 'aloha'\?; there are: aloha, droid"):
        load_profile('alhoa', CONFIG)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ProfileError, match=r'/nowhere/robot\.yaml: no such profile file'):
        load_profile('/nowhere/robot.yaml', CONFIG)


@pytest.mark.parametrize('text', ['cameras: [', 'a: 1\na: 2\n', '- 1\n', '', '\x00', 'x: \xff'])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / 'robot.yaml'
    path.write_bytes(text.encode('latin-1'))
    with pytest.raises(ProfileError, match=r'robot\.yaml'):
        load_profile(str(path), CONFIG)


def test_a_key_given_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / 'robot.yaml'
    path.write_text((CONFIG / 'dummy.yaml').read_text() + '\nname: other\n')
    with pytest.raises(ProfileError, match=r"(?s)'name' is given twice.*line \d+"):
        load_profile(str(path), CONFIG)


@pytest.mark.parametrize(
    'text',
    [
        'name: &a [x, x, x, x, x, x, x, x, x, x]\n'
        + ''.join(
            f'{k}: &{k} [{", ".join(["*" + before] * 10)}]\n' for before, k in pairwise('abcdefghi')
        ),
        'name: &a [*a]\n',
        'name: ' + '[' * 20_000,
        'name: 2026-99-99\n',
        'name: \x00\n',
        'name: ' + '9' * 5000 + '\n',
    ],
    ids=['aliases of aliases', 'a list of itself', 'deep', 'no date', 'nul', 'a long number'],
)
def test_a_file_that_would_exhaust_or_confuse_the_reader_is_refused(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / 'robot.yaml'
    path.write_text(text)
    with pytest.raises(ProfileError, match=r'robot\.yaml: not readable as YAML') as caught:
        load_profile(str(path), CONFIG)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize('key', ['name: ', 'frame_rate_hz: '])
def test_a_number_that_python_will_not_print_is_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / 'robot.yaml'
    text = (CONFIG / 'dummy.yaml').read_text()
    path.write_text(re.sub(f'^{key}.*', f'{key}0x{"f" * 5000}', text, flags=re.MULTILINE))
    with pytest.raises(ProfileError, match='got a whole number of 20000 bits'):
        load_profile(str(path), CONFIG)


def test_an_alias_may_be_used(tmp_path: Path) -> None:
    text = (CONFIG / 'dummy.yaml').read_text()
    text = text.replace('max_age_s: 0.5 ', 'max_age_s: &age 0.5 ', 1)
    path = tmp_path / 'robot.yaml'
    path.write_text(text.replace('    max_age_s: 0.5\n', '    max_age_s: *age\n', 1))
    assert '*age' in path.read_text()
    assert load_profile(str(path), CONFIG).cameras[1].max_age_s == 0.5


def test_no_file_can_run_code(tmp_path: Path) -> None:
    path = tmp_path / 'robot.yaml'
    path.write_text("name: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(ProfileError, match='not readable as YAML'):
        load_profile(str(path), CONFIG)


@pytest.mark.parametrize(
    ('key', 'value', 'expected'),
    [
        # unknown keys
        ('comand', {}, ['comand: unknown key', "did you mean 'command'?", 'allowed here: name']),
        ('cameras.1.topc', 'x', ['cameras[1].topc: unknown key', "did you mean 'topic'?"]),
        ('command.limits.uper', 1, ['command.limits.uper', "'upper'", 'lower, upper, max_vel']),
        ('command.lower', -1, ['command.lower: unknown key']),
        # wrong types
        ('frame_rate_hz', 'fast', ['frame_rate_hz: expected a number', "'fast' (str)"]),
        ('frame_rate_hz', True, ['frame_rate_hz: expected a number', 'True (bool)']),
        ('tasks.0.period_frames', True, ['tasks[0].period_frames: expected a whole number']),
        ('tasks.0.period_frames', 2.0, ['tasks[0].period_frames: expected a whole number']),
        ('cameras.0.required', 1, ['cameras[0].required: expected true or false', '1 (int)']),
        ('cameras.0.topic', 7, ['cameras[0].topic: expected a text']),
        ('cameras', 'one', ['cameras: expected a list']),
        ('joints', ['a'], ['joints: expected keys (topic, names']),
        ('tasks', None, ['tasks: expected a list; got None']),
        ('joints.names', ['a', 1], ['joints.names[1]: expected a text']),
        # choices
        ('cameras.0.transport', 'jpeg', ['cameras[0].transport', 'raw, compressed', "'jpeg'"]),
        ('command.interface', 'joint_states', ["did you mean 'joint_state'?"]),
        ('command.quantity', 'effort', ['command.quantity[0]', 'position, velocity']),
        ('model.preset', 'pi0', ['model.preset', 'pi05, mid, dummy']),
        ('action.blending', 'rtc_train', ['action.blending', "did you mean 'rtc_trained'?"]),
        ('action.guidance_schedule', 'cosine', ['action.guidance_schedule', 'zeros, ones, linear']),
        # ranges
        ('frame_rate_hz', 0, ['frame_rate_hz: expected a value of at least 0.001; got 0.0']),
        ('frame_rate_hz', float('nan'), ['frame_rate_hz: expected a finite number; got nan']),
        ('command.rate_hz', float('inf'), ['command.rate_hz: expected a finite number']),
        ('command.rate_hz', -1, ['command.rate_hz: expected a value of at least 0.001']),
        ('action.rate_hz', 1e9, ['action.rate_hz: expected a value of at most 1000; got']),
        ('action.rate_hz', 10**400, ['action.rate_hz: expected a number within 2^53']),
        ('tasks.0.period_frames', 10**400, ['tasks[0].period_frames', 'got', 'of 1329 bits']),
        ('joints.max_age_s', 1e300, ['joints.max_age_s: expected a value of at most']),
        ('cameras.0.max_age_s', 0.0, ['cameras[0].max_age_s']),
        ('cameras.0.expected_hz', -1, ['cameras[0].expected_hz: expected a value of at least 0']),
        ('cameras.0.deadline_s', -1, ['cameras[0].deadline_s: expected a value of at least 0']),
        ('joints.deadline_s', -1, ['joints.deadline_s: expected a value of at least 0']),
        ('instruction.max_age_s', -1, ['instruction.max_age_s: expected a value of at least 0']),
        ('command.estop_heartbeat_s', -1, ['command.estop_heartbeat_s', 'at least 0']),
        ('tasks.0.max_new_tokens', 0, ['tasks[0].max_new_tokens']),
        ('tasks.0.max_new_tokens', 2**40, ['tasks[0].max_new_tokens', 'at most 10000; got']),
        ('model.num_denoise_steps', 0, ['model.num_denoise_steps']),
        ('model.training_max_delay', -1, ['model.training_max_delay', 'at least 0']),
        ('action.execution_horizon', 0, ['action.execution_horizon', 'at least 1']),
        ('action.max_guidance_weight', 0, ['action.max_guidance_weight', 'above 0']),
        ('action.ensemble_coefficient', float('inf'), ['action.ensemble_coefficient']),
        ('command.limits.lower', float('nan'), ['command.limits.lower']),
        ('command.limits.max_velocity', 0.0, ['command.limits.max_velocity']),
        ('command.limits.max_velocity', float('inf'), ['command.limits.max_velocity']),
        ('command.home', float('inf'), ['command.home']),
        # lengths
        ('command.limits.lower', [-1.0, -1.0], ['command.limits.lower: expected 6', 'got 2']),
        ('command.quantity', ['position'], ['command.quantity: expected 6 values', 'got 1']),
        ('command.home', [0.0], ['command.home: expected 6']),
        ('action.delta_mask', [True] * 5, ['action.delta_mask: expected 6', 'got 5']),
        # names and topics
        ('name', '', ['name: is empty']),
        ('cameras', [], ['cameras: at least one']),
        ('cameras.1.slot', 'base_0_rgb', ["cameras: slot 'base_0_rgb' is given 2 times"]),
        ('cameras.1.slot', '', ['cameras[1].slot: is empty']),
        ('cameras.1.topic', 'camera/base/image_raw', ['cameras: topic', '2 times']),
        ('tasks.1.name', 'text', ["tasks: name 'text' is given 2 times"]),
        ('tasks.1.topic', '~/text', ["tasks: topic '~/text' is given 2 times"]),
        ('tasks.0.name', 'My Task', ['tasks[0].name', "'My Task'"]),
        ('joints.names', [], ['joints.names: at least one']),
        ('joints.names', ['a', 'b', 'c', 'a', 'd', 'e'], ["joints: names 'a' is given 2 times"]),
        ('joints.topic', '', ['joints.topic: expected a ROS topic name']),
        ('joints.topic', 'joint states', ['joints.topic', "'joint states'"]),
        ('joints.topic', '0joints', ['joints.topic']),
        ('joints.topic', 'a//b', ['joints.topic']),
        ('joints.topic', 'a/', ['joints.topic']),
        ('joints.topic', 'caméra', ['joints.topic']),
        ('command.topic', 'joint_states', ['command.topic: is also joints.topic']),
        # grippers
        ('grippers', [gripper(joint='thumb')], ["grippers[0].joint: 'thumb' is neither in"]),
        ('grippers', [gripper(robot=[0.8, 0.0])], ['grippers[0].robot: expected the lowest']),
        ('grippers', [gripper(model=[1.0])], ['grippers[0].model: expected the lowest']),
        ('grippers', [gripper(), gripper()], ["grippers: joint 'joint_6' is given 2 times"]),
        ('grippers', [gripper(invert=1)], ['grippers[0].invert: expected true or false']),
        # combinations
        ('action.blending', 'rtc_trained', ['action.blending: rtc_trained needs', 'got 0']),
        ('command.limits.lower', 4.0, ['joint_1: expected lower < upper; got 4 and 3.14']),
        ('command.home', 3.2, ['command.home: joint_1: 3.2 is outside its limits -3.14 to 3.14']),
        ('command.names', ['other', *DUMMY['joints']['names'][1:]], ["'other' is commanded"]),
        (
            'command.quantity',
            ['position'] * 5 + ['velocity'],
            ['command.quantity: joint_state carries either'],
        ),
    ],
)
def test_a_wrong_value_is_refused_by_name(
    load: Load, key: str, value: Any, expected: list[str]
) -> None:
    message = refusal(load, changed(key, value))
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ('section', 'key'),
    [('command', 'topic'), ('command', 'limits'), ('joints', 'max_age_s'), ('model', 'preset')],
)
def test_a_missing_key_is_named(load: Load, section: str, key: str) -> None:
    raw = copy.deepcopy(DUMMY)
    del raw[section][key]
    message = refusal(load, raw)
    assert f'{section}.{key}' in message
    assert 'is missing' in message


@pytest.mark.parametrize(
    ('command', 'expected'),
    [
        ({'fallback': 'home', 'home': None}, 'command.home: is missing'),
        ({'fallback': 'home', 'quantity': 'velocity'}, 'home needs positions'),
        ({'fallback': 'stop', 'quantity': 'velocity'}, 'leave the last velocity in force'),
        (
            {'fallback': 'stop', 'interface': 'joint_trajectory'},
            'leave the last trajectory',
        ),
        ({'interface': 'joint_trajectory', 'quantity': 'velocity'}, 'takes positions only'),
        ({'quantity': 'velocity'}, "'joint_6' is commanded by velocity"),
    ],
)
def test_a_dangerous_combination_is_refused(
    load: Load, command: dict[str, Any], expected: str
) -> None:
    raw = changed('grippers', [gripper()])
    raw['command'].update(command)
    assert expected in refusal(load, raw)


@pytest.mark.parametrize(
    ('changes', 'expected'),
    [
        ({}, 'joint_6 is in command.continuous, so expected -.inf and .inf; got -3.14 and 3.14'),
        ({'continuous': ['wheel']}, "'wheel' must be in joints.names and in command.names"),
    ],
)
def test_a_continuous_joint_is_known_and_has_no_end(
    load: Load, changes: dict[str, Any], expected: str
) -> None:
    raw = changed('command.continuous', ['joint_6'])
    raw['command'].update(changes)
    assert expected in refusal(load, raw)


def test_turns_are_not_averaged(load: Load) -> None:
    raw = changed('command.continuous', ['joint_6'])
    raw['command']['limits'].update(lower=[-3.0] * 5 + [-math.inf], upper=[3.0] * 5 + [math.inf])
    assert load(raw).command.continuous == ('joint_6',)
    raw['action']['blending'] = 'ensemble'
    assert 'ensemble cannot average the turns' in refusal(load, raw)


@pytest.mark.parametrize(
    ('key', 'value', 'expected'),
    [
        ('tasks', [DUMMY['tasks'][0]], 'expected 0 without a task of kind memory; got 3'),
        ('model.prompt', 'plain', 'expected 0 with model.prompt: plain'),
        ('memory.feed_back', -1, 'expected a value of at least 0'),
    ],
)
def test_notes_are_fed_back_only_where_there_are_any_and_the_prompt_has_a_place(
    load: Load, key: str, value: Any, expected: str
) -> None:
    raw = changed(key, value)
    raw['memory']['feed_back'] = min(3, raw['memory']['feed_back'] or 3)
    message = refusal(load, raw)
    assert 'memory.feed_back: ' in message
    assert expected in message


def test_a_delta_needs_the_same_joint_in_state_and_command(load: Load) -> None:
    """CASES 37: added by position in the list, so the lists must agree there."""
    raw = changed('action.delta_mask', True)
    raw['command']['names'] = [*DUMMY['joints']['names'][1:], 'joint_1']
    assert "action.delta_mask[0]: 'joint_2' would be added to state 0, which is 'joint_1'" in (
        refusal(load, raw)
    )


@pytest.mark.parametrize(
    ('blending', 'expected'),
    [
        ({'blending': 'rtc', 'execution_horizon': 21}, 'execution_horizon: expected at most 20'),
        ({'blending': 'rtc_trained'}, 'model.training_max_delay: expected less than 20'),
    ],
)
def test_blending_is_no_longer_than_a_chunk(
    load: Load, blending: dict[str, Any], expected: str
) -> None:
    raw = changed('model.action_horizon', 20)
    raw['model']['training_max_delay'] = 20
    raw['action'].update(blending)
    assert expected in refusal(load, raw)


def test_a_trained_checkpoint_may_continue_chunks(load: Load) -> None:
    raw = changed('model.training_max_delay', 5)
    raw['action']['blending'] = 'rtc_trained'
    assert load(raw).action.blending == 'rtc_trained'


def test_all_combination_problems_are_reported_at_once(load: Load) -> None:
    raw = changed('joints.topic', '')
    raw['command']['topic'] = 'a b'
    message = refusal(load, raw)
    assert 'joints.topic' in message
    assert 'command.topic' in message
