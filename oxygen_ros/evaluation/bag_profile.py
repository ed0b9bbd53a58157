"""A robot profile for a recording: which of its topics are cameras, joints and instruction.

Owns the choice, and the check that pictures can be decoded with the node's own code before the
node is started. Knows nothing of playing; `demo.py` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from oxygen_ros.conversions import ConversionError, decode_image, joint_positions
from oxygen_ros.evaluation.recording import BagError, Recording, message_class
from oxygen_ros.profile import CameraProfile, JointsProfile, RobotProfile, load_profile

TRANSPORTS: dict[str, Literal['raw', 'compressed']] = {
    'sensor_msgs/msg/Image': 'raw',
    'sensor_msgs/msg/CompressedImage': 'compressed',
}
JOINT_STATE = 'sensor_msgs/msg/JointState'
STRING = 'std_msgs/msg/String'
# Enough to tell a camera with a few broken pictures from one whose pictures are all broken.
MAX_PROBED_PICTURES = 10
# A joint may be missing from single messages; after so many it is not part of the robot.
MAX_PROBED_JOINTS = 50


@dataclass(frozen=True)
class RecordedRobot:
    """What of a recording is played into the node."""

    profile: RobotProfile
    profile_path: Path
    topics: tuple[str, ...]
    """To be played; nothing else of the recording is, commands least of all."""
    has_joints: bool
    has_instruction: bool
    remarks: tuple[str, ...]
    """One line per choice made, for people."""


def profile_for(
    recording: Recording,
    base_path: Path,
    written_path: Path,
    *,
    cameras: dict[str, str],
    joints: str,
) -> RecordedRobot:
    """Write a profile like the one at `base_path`, with the topics of the recording.

    Args:
        cameras: model camera slot -> topic; empty chooses for every slot of the base profile.
        joints: topic of the joint states; '' looks for one.

    Raises:
        BagError: no picture of the recording can be used, or a topic is not what it should be.
        ProfileError: the base profile does not fit the recording.
    """
    raw = yaml.safe_load(base_path.read_text(encoding='utf-8'))
    base = load_profile(str(base_path), base_path.parent)
    chosen = _given_cameras(recording, cameras) if cameras else _find_cameras(recording, base)
    raw['cameras'] = [
        _camera_entry(recording, slot, topic, required=number == 0)
        for number, (slot, topic) in enumerate(chosen.items())
    ]
    remarks = [f'camera {slot}: {topic}' for slot, topic in chosen.items()]
    topics = list(chosen.values())
    joints = _joints_topic(recording, joints)
    if joints:
        raw['joints']['topic'] = joints
        names = _joint_names(recording, joints)
        if not set(base.joints.names) <= set(names):
            raw['joints']['names'] = names
            raw['command'].pop('names', None)
        topics.append(joints)
        remarks.append(f'joints: {joints} (recorded, so commands move nothing)')
    else:
        remarks.append('joints: of the simulated robot, the recording has none')
    instruction = _instruction_topic(recording)
    if instruction:
        raw['instruction']['topic'] = instruction
        topics.append(instruction)
        remarks.append(f'instruction: {instruction} (recorded)')
    text = yaml.safe_dump(raw, sort_keys=False, allow_unicode=True)
    written_path.write_text(f'# Made from {base_path.name} for {recording.path.name}\n{text}')
    return RecordedRobot(
        profile=load_profile(str(written_path), written_path.parent),
        profile_path=written_path,
        topics=tuple(topics),
        has_joints=bool(joints),
        has_instruction=bool(instruction),
        remarks=tuple(remarks),
    )


# ---- cameras


def _given_cameras(recording: Recording, cameras: dict[str, str]) -> dict[str, str]:
    recording.check_topics(list(cameras.values()))
    for slot, topic in cameras.items():
        if reason := _why_unusable(recording, topic):
            raise BagError(f'{recording.path}: no image of camera {slot} could be used: {reason}')
    return cameras


def _find_cameras(recording: Recording, base: RobotProfile) -> dict[str, str]:
    """Give every slot a usable topic: one that shares a word with it if there is one."""
    pictures = [t.name for t in recording.topics.values() if t.type_name in TRANSPORTS]
    if not pictures:
        raise BagError(f'{recording.path}: no image could be used: it holds no image topic')
    reasons = {topic: _why_unusable(recording, topic) for topic in pictures}
    free = [topic for topic in pictures if not reasons[topic]]
    if not free:
        told = '; '.join(reasons.values())
        raise BagError(f'{recording.path}: no image could be used: {told}')
    chosen: dict[str, str] = {}
    for camera in base.cameras:
        if free:
            words = set(camera.slot.split('_'))
            named = [topic for topic in free if words & set(topic.replace('/', '_').split('_'))]
            chosen[camera.slot] = (named or free)[0]
            free.remove(chosen[camera.slot])
    return chosen


def _why_unusable(recording: Recording, topic: str) -> str:
    """Say why no picture of a topic can be decoded; '' if one can."""
    type_name = recording.topics[topic].type_name
    if type_name not in TRANSPORTS:
        return f'{topic} is a {type_name}, expected one of {", ".join(TRANSPORTS)}'
    camera = CameraProfile(
        slot='probe', topic=topic, transport=TRANSPORTS[type_name], max_age_s=1.0
    )
    reason = f'{topic} holds no message'
    for message in _messages(recording, topic, MAX_PROBED_PICTURES):
        try:
            decode_image(message, camera)
            return ''
        except ConversionError as error:
            reason = str(error)
    return reason


def _camera_entry(recording: Recording, slot: str, topic: str, *, required: bool) -> dict[str, Any]:
    recorded = recording.topics[topic]
    rate_hz = 0.0
    if recorded.num_messages > 1 and recording.duration_s > 0:
        rate_hz = (recorded.num_messages - 1) / recording.duration_s
    return {
        'slot': slot,
        'topic': topic,
        'transport': TRANSPORTS[recorded.type_name],
        'required': required,
        # Three pictures may be lost before a camera counts as absent.
        'max_age_s': max(0.5, round(3.0 / rate_hz, 2)) if rate_hz else 1.0,
        'expected_hz': 0.0,  # the recording's own dropouts are no fault to report
    }


# ---- joints and instruction


def _joints_topic(recording: Recording, wanted: str) -> str:
    if wanted:
        recording.check_topics([wanted])
        if recording.topics[wanted].type_name != JOINT_STATE:
            found = recording.topics[wanted].type_name
            raise BagError(f'{recording.path}: {wanted} is a {found}, expected {JOINT_STATE}')
        return wanted
    # Commands are JointStates too on some robots, so the name has to say what it is.
    found_topics = [t.name for t in recording.topics.values() if t.type_name == JOINT_STATE]
    return next((topic for topic in found_topics if topic.endswith('joint_states')), '')


def _joint_names(recording: Recording, topic: str) -> list[str]:
    """Return every joint with a position, in the order of their first appearance."""
    names: dict[str, None] = {}
    for message in _messages(recording, topic, MAX_PROBED_JOINTS):
        recorded = JointsProfile(topic=topic, names=tuple(message.name), max_age_s=1.0)
        try:
            found = joint_positions(message, recorded)
        except ConversionError:
            continue
        names.update(dict.fromkeys(name for name in found if math.isfinite(found[name])))
    if not names:
        raise BagError(f'{recording.path}: {topic} holds no named joint positions')
    return list(names)


def _instruction_topic(recording: Recording) -> str:
    strings = [t.name for t in recording.topics.values() if t.type_name == STRING]
    return next((topic for topic in strings if topic.endswith('instruction')), '')


def _messages(recording: Recording, topic: str, most: int) -> Iterator[Any]:
    from rclpy.serialization import deserialize_message

    kind: Any = message_class(recording.topics[topic].type_name)
    for number, (_, _, data) in enumerate(recording.messages([topic])):
        if number == most:
            return
        yield deserialize_message(data, kind)
