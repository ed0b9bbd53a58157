"""The sentences of the profile check: what was seen on the graph or in a checkpoint, in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oxygen_ros.evaluation.profile_findings import (
    COMMAND_TYPES,
    INSTRUCTION_TYPE,
    JOINT_TYPE,
    Endpoint,
    Finding,
    Graph,
    Live,
    checkpoint_findings,
    live_findings,
    profile_findings,
)
from oxygen_ros.observation import SourceStatus
from oxygen_ros.profile import GripperProfile, RobotProfile, load_profile

CONFIG = Path(__file__).parents[1] / 'config'
IMAGE, COMPRESSED = 'sensor_msgs/msg/Image', 'sensor_msgs/msg/CompressedImage'
PROFILE = load_profile('dummy', CONFIG)
SHIPPED = sorted(p.stem for p in CONFIG.glob('*.yaml') if '\ncameras:' in p.read_text())
BASE, WRIST = '/camera/base/image_raw', '/camera/wrist/image_raw'
NAMES = PROFILE.joints.names


def status(name: str, topic: str, **changes: Any) -> SourceStatus:
    fields = {
        'received': 60, 'dropped': 0, 'untrusted_stamps': 0,
        'age_s': 0.02, 'rate_hz': 30.0, 'last_error': '', **changes,
    }  # fmt: skip
    return SourceStatus(name, topic, **fields)


def seen(
    publishers: dict[str, Any] | None = None,
    subscribers: dict[str, Any] | None = None,
    **changes: Any,
) -> Live:
    """The dummy robot, complete; a test changes what it is about. Topic: types or endpoints."""
    given = {BASE: [IMAGE], WRIST: [IMAGE], '/joint_states': [JOINT_TYPE]}
    listening = {'/joint_command': [COMMAND_TYPES['joint_state']]}
    statuses = {
        'base_0_rgb': status('base_0_rgb', BASE),
        'left_wrist_0_rgb': status('left_wrist_0_rgb', WRIST),
        'joints': status('joints', '/joint_states'),
        **changes.pop('status', {}),
    }
    topics = [camera.topic for camera in PROFILE.cameras]
    topics += [PROFILE.joints.topic, PROFILE.instruction.topic, PROFILE.command.topic]
    fields = {
        'joint_names': (*NAMES, 'wheel'),
        'positions': dict.fromkeys(NAMES, 0.1),
        **changes,
    }
    return Live(
        Graph(
            endpoints({**given, **(publishers or {})}),
            endpoints({**listening, **(subscribers or {})}),
        ),
        {topic: f'/{topic}' for topic in topics},
        statuses,
        **fields,
    )


def endpoints(topics: dict[str, Any]) -> dict[str, tuple[Endpoint, ...]]:
    return {
        topic: tuple(
            one if isinstance(one, Endpoint) else Endpoint(f'/driver_{i}', one)
            for i, one in enumerate(found)
        )
        for topic, found in topics.items()
    }


def texts(findings: list[Finding], kind: str = 'problem') -> list[str]:
    return [finding.text for finding in findings if finding.kind == kind]


def test_a_robot_that_fits_has_no_problems() -> None:
    findings = live_findings(PROFILE, seen())
    assert not texts(findings)
    assert 'camera base_0_rgb: 30.0 Hz on /camera/base/image_raw' in texts(findings, 'ok')
    assert 'command: /driver_0 listens to /joint_command' in texts(findings, 'ok')


@pytest.mark.parametrize(
    ('live', 'expected'),
    [
        # topics
        (
            seen({BASE: [], '/camera/base/image': [IMAGE]}),
            'nobody publishes /camera/base/image_raw; did you mean /camera/base/image?',
        ),
        (
            seen({BASE: [], WRIST: [], '/zed/left': [IMAGE], '/talk': [INSTRUCTION_TYPE]}),
            f'nobody publishes {BASE}; {IMAGE} is on /zed/left',
        ),
        (
            seen({BASE: [COMPRESSED]}),
            f'{BASE} is {COMPRESSED}, expected {IMAGE}; set transport: compressed',
        ),
        (
            seen({BASE: [IMAGE, IMAGE]}),
            f'{BASE} has 2 publishers: /driver_0, /driver_1',
        ),
        # messages
        (
            seen(status={'base_0_rgb': status('base_0_rgb', BASE, received=0, rate_hz=0.0)}),
            f'camera base_0_rgb: {BASE} is published, but nothing arrived',
        ),
        (
            seen(status={'base_0_rgb': status('base_0_rgb', BASE, last_error='got 32FC1')}),
            'camera base_0_rgb: got 32FC1',
        ),
        (
            seen(status={'base_0_rgb': status('base_0_rgb', BASE, rate_hz=12.0)}),
            'camera base_0_rgb: 12.0 Hz of 30 Hz arrive',
        ),
        (
            seen(status={'joints': status('joints', '/joint_states', untrusted_stamps=60)}),
            'joints: 60 of 60 stamps are implausible',
        ),
        (
            seen(status={'joints': status('joints', '/joint_states', age_s=0.9)}),
            'joints: the newest is 0.90 s old, limit 0.5 s',
        ),
        (
            seen(status={'joints': status('joints', '/joint_states', rate_hz=1.0)}),
            'joints: arrives at 1.0 Hz, slower than max_age_s 0.5 s allows',
        ),
        # joints
        (
            seen(joint_names=(*NAMES[:5], 'joint6', 'wheel')),
            "joints.names: 'joint_6' is not in the messages; did you mean 'joint6'?",
        ),
        (
            seen(joint_names=(*NAMES[:5], 'wheel')),
            "joints.names: 'joint_6' is not in the messages; there are: wheel",
        ),
        (
            seen(positions={'joint_2': 57.3}),
            'command.limits: joint_2 is at 57.3, outside -3.14 to 3.14; is the unit right?',
        ),
        # instruction and command
        (
            seen({'/instruction': ['std_msgs/msg/Int8']}),
            '/instruction is std_msgs/msg/Int8, expected std_msgs/msg/String',
        ),
        (
            seen(subscribers={'/joint_command': [], '/arm/joint_command': [JOINT_TYPE]}),
            'nobody listens to /joint_command; did you mean /arm/joint_command?',
        ),
        (
            seen(subscribers={'/joint_command': [COMMAND_TYPES['joint_trajectory']]}),
            '/driver_0 takes trajectory_msgs/msg/JointTrajectory on /joint_command, but '
            'command.interface joint_state is sensor_msgs/msg/JointState',
        ),
        (
            seen(subscribers={'/joint_command': [Endpoint('/arm', JOINT_TYPE, True)]}),
            '/arm wants latched commands (transient local) on /joint_command',
        ),
        (
            seen({'/joint_command': [Endpoint('/teleop', JOINT_TYPE)]}),
            'command: /teleop already publishes /joint_command',
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_on_the_graph_is_said_in_words(live: Live, expected: str) -> None:
    problems = texts(live_findings(PROFILE, live))
    assert any(expected in problem for problem in problems), problems


def test_an_optional_camera_that_is_absent_is_only_noted() -> None:
    findings = live_findings(PROFILE, seen({WRIST: []}))
    assert not texts(findings)
    assert any('not required: frames go on without it' in note for note in texts(findings, 'note'))


def test_joints_from_two_publishers_are_only_noted() -> None:
    findings = live_findings(PROFILE, seen({'/joint_states': [JOINT_TYPE, JOINT_TYPE]}))
    assert not texts(findings)
    assert any('/joint_states has 2 publishers' in note for note in texts(findings, 'note'))


def test_a_gripper_in_another_unit_is_a_problem() -> None:
    gripper = GripperProfile(joint='joint_6', model=(0.0, 1.0), robot=(0.0, 0.058))
    profile = replace(PROFILE, grippers=(gripper,))
    problems = texts(live_findings(profile, seen(positions={'joint_6': 0.8})))
    assert problems == [
        'grippers: joint_6 reads 0.8, but grippers says 0 to 0.058; is it another unit?'
    ]


# --- the profile alone ----------------------------------------------------------------------------


def with_topics(**topics: str) -> RobotProfile:
    aloha = load_profile('aloha', CONFIG)
    cameras = tuple(
        replace(camera, topic=topics.get(camera.slot, camera.topic)) for camera in aloha.cameras
    )
    return replace(aloha, cameras=cameras)


@pytest.mark.parametrize(
    ('first', 'second'),
    [
        ('left_wrist_0_rgb', 'right_wrist_0_rgb'),
        ('base_0_rgb', 'left_wrist_0_rgb'),
        ('base_0_rgb', 'right_wrist_0_rgb'),
    ],
)
def test_swapped_cameras_are_a_problem_that_names_both(first: str, second: str) -> None:
    topics = {camera.slot: camera.topic for camera in load_profile('aloha', CONFIG).cameras}
    swapped = {first: topics[second], second: topics[first]}
    problems = texts(profile_findings(with_topics(**swapped)))
    expected = (
        f'{first} takes {topics[second]} and {second} takes {topics[first]}: are they swapped?'
    )
    assert f'cameras: {expected}' in problems


@pytest.mark.parametrize('name', SHIPPED)
def test_no_shipped_profile_contradicts_itself(name: str) -> None:
    assert not profile_findings(load_profile(name, CONFIG))


def test_names_that_say_nothing_are_believed() -> None:
    assert not profile_findings(with_topics(base_0_rgb='video2', left_wrist_0_rgb='video0'))


# --- checkpoint -----------------------------------------------------------------------------------


def trained(profile: RobotProfile = PROFILE, **changes: Any) -> RobotProfile:
    return replace(
        profile,
        model=replace(profile.model, normalization='quantile', random_weights=False, **changes),
    )


@pytest.fixture(scope='module')
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip('torch')
    from oxygen_ros.model.config import PRESETS
    from oxygen_ros.model.weights import random_model, save_model

    path = tmp_path_factory.mktemp('weights') / 'model.safetensors'
    device = torch.device('cpu')
    model = random_model(PRESETS['dummy'], seed=0, device=device, dtype=torch.float32)
    save_model(model, path, dtype=torch.bfloat16)
    return path


def write_checkpoint(folder: Path, weights: Path, width: int = 6, q99: float = 1.0) -> str:
    (folder / 'model.safetensors').write_bytes(weights.read_bytes())
    vector = {
        'mean': [0.0] * width, 'std': [1.0] * width, 'q01': [-1.0] * width, 'q99': [q99] * width,
    }  # fmt: skip
    stats = folder / 'assets' / 'robot' / 'norm_stats.json'
    stats.parent.mkdir(parents=True)
    stats.write_text(json.dumps({'norm_stats': {'state': vector, 'actions': vector}}))
    return str(folder)


def test_a_checkpoint_lacks_only_its_tokenizer(tmp_path: Path, weights: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, weights)
    findings = checkpoint_findings(trained(), checkpoint, '', dict.fromkeys(NAMES, 0.5))
    (problem,) = texts(findings)
    assert 'tokenizer: expected one of' in problem
    good = texts(findings, 'ok')
    assert any('tensors fit' in text for text in good)
    assert 'the measured state lies within the training data' in good


def test_every_misfit_of_a_checkpoint_is_told_at_once(tmp_path: Path, weights: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, weights, width=4)
    (tmp_path / 'config.json').write_text(json.dumps({'action_dim': 32, 'action_horizon': 7}))
    problems = texts(
        checkpoint_findings(trained(preset='mid', action_horizon=9), checkpoint, '/no/words', {})
    )
    for expected in (
        'action_horizon is 7, but the model of the profile has 9',
        'does not fit the model',
        'no tokenizer at /no/words',
        'expected statistics of 6 to 32 dimensions',
    ):
        assert any(expected in problem for problem in problems), problems


def test_a_state_the_model_never_saw_names_the_joint(tmp_path: Path, weights: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, weights)
    positions = {**dict.fromkeys(NAMES, 0.0), 'joint_4': 57.3}  # degrees
    problems = texts(checkpoint_findings(trained(), checkpoint, '', positions))
    assert any('joint_4 57.3 (normalised 57.3)' in problem for problem in problems)


def test_a_missing_checkpoint_is_one_problem_each(tmp_path: Path) -> None:
    pytest.importorskip('torch')
    problems = texts(checkpoint_findings(trained(), str(tmp_path / 'nowhere'), '', {}))
    assert any('no such file or directory' in problem for problem in problems)


def test_other_denoise_steps_than_in_training_are_noted(tmp_path: Path, weights: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, weights)
    content = {'type': 'pi05', 'num_inference_steps': 5}
    (tmp_path / 'config.json').write_text(json.dumps(content))
    notes = texts(checkpoint_findings(trained(), checkpoint, '', {}), 'note')
    assert notes == ['model.num_denoise_steps is 10, the checkpoint was meant for 5']
