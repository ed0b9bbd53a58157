"""What is wrong with a profile, in plain words: compared with live topics and with a checkpoint.

Owns the comparisons and the sentences. Knows no rclpy: `profile_check.py` listens to the graph and
hands over what it saw, in the node's own ObservationBuffer. torch is only imported when there is a
checkpoint to compare with.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from oxygen_ros.model.continuous import within_half_turn
from oxygen_ros.model.openpi_bridge import OpenpiError
from oxygen_ros.monitor import Thresholds, gripper_problem
from oxygen_ros.observation import Observation, SourceStatus
from oxygen_ros.profile import CameraProfile, RobotProfile

if TYPE_CHECKING:
    from oxygen_ros.engine.factory import EngineOptions
    from oxygen_ros.model.openpi_bridge import OpenpiProcessor
    from oxygen_ros.model.processor import Processor

CAMERA_TYPES = {
    'raw': 'sensor_msgs/msg/Image',
    'compressed': 'sensor_msgs/msg/CompressedImage',
}
JOINT_TYPE = 'sensor_msgs/msg/JointState'
INSTRUCTION_TYPE = 'std_msgs/msg/String'
COMMAND_TYPES = {
    'joint_state': 'sensor_msgs/msg/JointState',
    'joint_trajectory': 'trajectory_msgs/msg/JointTrajectory',
    'forward_command': 'std_msgs/msg/Float64MultiArray',
}
MAX_NORMALIZED = 2.0
"""Training data lie in [-1, 1] for the most part; a state this far out was never seen."""


@dataclass(frozen=True)
class Finding:
    """One sentence; a problem keeps the robot from working as meant, a note may be intended."""

    kind: Literal['problem', 'note', 'ok']
    text: str


@dataclass(frozen=True)
class Endpoint:
    """A publisher or subscriber of a topic."""

    node: str
    type: str
    transient_local: bool = False


@dataclass(frozen=True)
class Graph:
    """Who publishes and who listens, by full topic name; the checking node itself left out."""

    publishers: Mapping[str, tuple[Endpoint, ...]]
    subscribers: Mapping[str, tuple[Endpoint, ...]]


@dataclass(frozen=True)
class Live:
    """What was seen on the graph in the time of the check; full topic names by profile name."""

    graph: Graph
    resolved: Mapping[str, str]
    status: Mapping[str, SourceStatus]
    joint_names: tuple[str, ...]
    positions: Mapping[str, float]


def profile_findings(profile: RobotProfile) -> list[Finding]:
    """Say what of a valid profile contradicts itself: cameras that seem to be swapped."""
    return [
        Finding(
            'problem',
            f'cameras: {first.slot} takes {first.topic} and {second.slot} takes {second.topic}: '
            f'are they swapped?',
        )
        for first, second in itertools.combinations(profile.cameras, 2)
        if _likeness(first.slot, second.topic) + _likeness(second.slot, first.topic)
        > _likeness(first.slot, first.topic) + _likeness(second.slot, second.topic)
    ]


def _likeness(slot: str, topic: str) -> int:
    """How many words a slot and a topic have in common: left, wrist, base ..."""
    words = [set(re.findall('[a-z]+', name.lower())) for name in (slot, topic)]
    return len(words[0] & words[1])


def live_findings(profile: RobotProfile, live: Live) -> list[Finding]:
    """Compare topics, types, publishers, rates, encodings and joints with the profile."""
    findings: list[Finding] = []
    for camera in profile.cameras:
        findings += _camera_findings(camera, live)
    findings += _joint_findings(profile, live)
    findings += _range_findings(profile, live)
    findings += _instruction_findings(profile, live)
    findings += _command_findings(profile, live)
    return findings


# --- topics ---------------------------------------------------------------------------------------


def _source_findings(name: str, topic: str, expected: str, live: Live) -> Iterator[Finding]:
    """What is wrong with a topic before any message of it is looked at."""
    full = live.resolved[topic]
    publishers = live.graph.publishers.get(full, ())
    if not publishers:
        yield Finding('problem', f'{name}: nobody publishes {full}{_other(full, expected, live)}')
        return
    types = sorted({publisher.type for publisher in publishers})
    if types != [expected]:
        yield Finding('problem', f'{name}: {full} is {" and ".join(types)}, expected {expected}')
    if len(publishers) > 1:
        nodes = ', '.join(sorted(publisher.node for publisher in publishers))
        yield Finding('problem', f'{name}: {full} has {len(publishers)} publishers: {nodes}')


def _other(full: str, expected: str, live: Live) -> str:
    """Name the topics of the right type that are published."""
    topics = [
        topic
        for topic, publishers in live.graph.publishers.items()
        if any(publisher.type == expected for publisher in publishers)
    ]
    if close := difflib.get_close_matches(full, topics, n=1):
        return f'; did you mean {close[0]}?'
    return f'; {expected} is on {", ".join(sorted(topics))}' if topics else ''


def _camera_findings(camera: CameraProfile, live: Live) -> Iterator[Finding]:
    name, status = f'camera {camera.slot}', live.status[camera.slot]
    expected = CAMERA_TYPES[camera.transport]
    wrong = list(_source_findings(name, camera.topic, expected, live))
    if wrong and not camera.required and not live.graph.publishers.get(live.resolved[camera.topic]):
        yield Finding('note', wrong[0].text + ' (not required: frames go on without it)')
        return
    for finding in wrong:
        other = 'compressed' if camera.transport == 'raw' else 'raw'
        hint = f'; set transport: {other}' if f'is {CAMERA_TYPES[other]}' in finding.text else ''
        yield Finding(finding.kind, finding.text + hint)
    if not wrong:
        yield from _message_findings(name, status, camera.expected_hz, camera.max_age_s)


def _message_findings(
    name: str, status: SourceStatus, expected_hz: float, max_age_s: float
) -> Iterator[Finding]:
    if not status.received:
        yield Finding('problem', f'{name}: {status.topic} is published, but nothing arrived')
        return
    if status.last_error:
        yield Finding('problem', f'{name}: {status.last_error}')
    if status.untrusted_stamps:
        yield Finding(
            'problem',
            f'{name}: {status.untrusted_stamps} of {status.received} stamps are implausible: are '
            f'the clocks of the machines set, and use_sim_time the same everywhere?',
        )
    if status.age_s is not None and status.age_s > max_age_s:
        yield Finding(
            'problem', f'{name}: the newest is {status.age_s:.2f} s old, limit {max_age_s:g} s'
        )
    if status.rate_hz < Thresholds.rate_share * expected_hz:
        yield Finding('problem', f'{name}: {status.rate_hz:.1f} Hz of {expected_hz:g} Hz arrive')
    elif 0 < status.rate_hz < 1 / max_age_s:
        yield Finding(
            'problem',
            f'{name}: arrives at {status.rate_hz:.1f} Hz, slower than max_age_s {max_age_s:g} s '
            f'allows',
        )
    elif not status.last_error:
        yield Finding('ok', f'{name}: {status.rate_hz:.1f} Hz on {status.topic}')


# --- joints ---------------------------------------------------------------------------------------


def _joint_findings(profile: RobotProfile, live: Live) -> Iterator[Finding]:
    joints = profile.joints
    wrong = list(_source_findings('joints', joints.topic, JOINT_TYPE, live))
    # Arm and gripper may well come from two publishers.
    severe = [finding for finding in wrong if 'publishers:' not in finding.text]
    yield from severe
    yield from (Finding('note', finding.text) for finding in wrong if finding not in severe)
    if severe:
        return
    yield from _message_findings('joints', live.status['joints'], 0.0, joints.max_age_s)
    spare = sorted(set(live.joint_names) - set(joints.names))
    for name in joints.names:
        if live.joint_names and name not in live.joint_names:
            close = difflib.get_close_matches(name, spare, n=1)
            hint = f'did you mean {close[0]!r}?' if close else f'there are: {", ".join(spare)}'
            yield Finding('problem', f'joints.names: {name!r} is not in the messages; {hint}')


def _range_findings(profile: RobotProfile, live: Live) -> Iterator[Finding]:
    command = profile.command
    for name, lower, upper in zip(command.names, command.lower, command.upper, strict=True):
        position = live.positions.get(name)
        if position is not None and not lower <= position <= upper:
            yield Finding(
                'problem',
                f'command.limits: {name} is at {position:g}, outside {lower:g} to {upper:g}; is '
                f'the unit right?',
            )
    for gripper in profile.grippers:
        position = live.positions.get(gripper.joint)
        if position is not None and (problem := gripper_problem(gripper, position)):
            yield Finding('problem', f'grippers: {problem}')


# --- instruction and command ----------------------------------------------------------------------


def _instruction_findings(profile: RobotProfile, live: Live) -> Iterator[Finding]:
    topic = live.resolved[profile.instruction.topic]
    publishers = live.graph.publishers.get(topic, ())
    for publisher in publishers:
        if publisher.type != INSTRUCTION_TYPE:
            yield Finding(
                'problem',
                f'instruction: {topic} is {publisher.type}, expected {INSTRUCTION_TYPE}',
            )
    if not publishers and not profile.instruction.default:
        yield Finding('note', f'instruction: nobody publishes {topic} yet; until then it holds')


def _command_findings(profile: RobotProfile, live: Live) -> Iterator[Finding]:
    topic = live.resolved[profile.command.topic]
    expected = COMMAND_TYPES[profile.command.interface]
    listeners = live.graph.subscribers.get(topic, ())
    if not listeners:
        close = difflib.get_close_matches(
            topic,
            [
                name
                for name, endpoints in live.graph.subscribers.items()
                if any(endpoint.type == expected for endpoint in endpoints)
            ],
            n=1,
        )
        hint = f'; did you mean {close[0]}?' if close else ''
        yield Finding('problem', f'command: nobody listens to {topic}{hint}')
    for listener in listeners:
        if listener.type != expected:
            yield Finding(
                'problem',
                f'command: {listener.node} takes {listener.type} on {topic}, but '
                f'command.interface {profile.command.interface} is {expected}',
            )
        elif listener.transient_local:
            yield Finding(
                'problem',
                f'command: {listener.node} wants latched commands (transient local) on {topic}; '
                f'ours are volatile and will not arrive',
            )
        else:
            yield Finding('ok', f'command: {listener.node} listens to {topic}')
    for publisher in live.graph.publishers.get(topic, ()):
        yield Finding('problem', f'command: {publisher.node} already publishes {topic}')


# --- checkpoint -----------------------------------------------------------------------------------


def checkpoint_findings(
    profile: RobotProfile, checkpoint: str, tokenizer: str, positions: Mapping[str, float]
) -> list[Finding]:
    """Compare sizes, tensors, tokenizer, statistics and measured positions with the profile.

    Of the weights only the headers are read. `positions` may be empty: nothing was measured.
    """
    from oxygen_ros.engine import factory
    from oxygen_ros.model.checkpoints import read_config
    from oxygen_ros.model.prompt import ByteTokenizer, Tokenizer
    from oxygen_ros.model.weights import check_checkpoint

    path = Path(checkpoint).expanduser()
    findings: list[Finding] = []
    options = factory.EngineOptions(checkpoint=checkpoint, tokenizer=tokenizer)
    with _Found(findings):
        declared = None
        with _Found(findings):
            declared = read_config(path)
        config = factory.model_config(profile, declared)
        if declared is not None:
            findings += [
                Finding('problem', problem)
                for problem in factory.declared_problems(profile, config, declared)
            ]
            findings += _step_findings(profile, declared.num_denoise_steps)
        with _Found(findings):
            tensors = check_checkpoint(config, path)
            findings.append(Finding('ok', f'checkpoint: all {len(tensors)} tensors fit'))
        words: Tokenizer = ByteTokenizer()
        with _Found(findings):
            words = factory.load_tokenizer(options, path, config)
            findings.append(Finding('ok', f'tokenizer: {words.vocab_size} pieces'))
        stats = factory.load_stats(profile, path)
        processor = factory.make_processor(profile, config, words, stats)
        if stats is not None:
            findings.append(Finding('ok', f'statistics: {stats.source}'))
            findings += state_findings(profile, processor, positions)
    return findings


def openpi_findings(
    profile: RobotProfile, options: EngineOptions, positions: Mapping[str, float]
) -> list[Finding]:
    """As `checkpoint_findings`, with sizes, transforms and statistics of openpi's config."""
    from oxygen_ros.engine import factory
    from oxygen_ros.model.weights import check_checkpoint

    path = Path(options.checkpoint).expanduser()
    findings: list[Finding] = []
    with _Found(findings):
        config, processor = factory.by_openpi(profile, options, path)
        findings.append(Finding('ok', f'openpi config {options.openpi_config}: fits the profile'))
        with _Found(findings):
            tensors = check_checkpoint(config, path)
            findings.append(Finding('ok', f'checkpoint: all {len(tensors)} tensors fit'))
        findings += state_findings(profile, processor, positions)
    return findings


class _Found:
    """Makes a problem of an error, so that one does not hide the next."""

    def __init__(self, findings: list[Finding]) -> None:
        self._findings = findings

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, (ValueError, OSError, OpenpiError)):
            return False
        self._findings.append(Finding('problem', str(error)))
        return True


def _step_findings(profile: RobotProfile, trained: int | None) -> Iterator[Finding]:
    steps = profile.model.num_denoise_steps
    if trained not in (None, steps):
        yield Finding(
            'note', f'model.num_denoise_steps is {steps}, the checkpoint was meant for {trained}'
        )


def state_findings(
    profile: RobotProfile, processor: Processor | OpenpiProcessor, positions: Mapping[str, float]
) -> list[Finding]:
    """Say which measured joints the model never saw like this in training."""
    names = profile.joints.names
    if not set(names) <= positions.keys():
        return []
    measured = np.array([positions[name] for name in names], np.float32)
    turning = [name in profile.command.continuous for name in names]
    measured[turning] = within_half_turn(measured[turning])
    state = processor.padded_state(Observation(0, 0, 0, {}, measured, ''))[: len(names)]
    far = [i for i in range(len(names)) if abs(state[i]) > MAX_NORMALIZED]
    if not far:
        return [Finding('ok', 'the measured state lies within the training data')]
    joints = ', '.join(f'{names[i]} {measured[i]:g} (normalised {state[i]:.1f})' for i in far)
    return [
        Finding(
            'problem',
            f'the measured state is far outside the training data (normalised -1 to 1): {joints}; '
            f'are the statistics, the order and the units those of this robot?',
        )
    ]
