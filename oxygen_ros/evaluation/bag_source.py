"""BagSource: which topic of a recording plays which part of a robot profile, and its messages.

Owns the matching of names, and the sentences about what is missing. Knows neither rclpy nor time:
messages are read by rosbags, so a machine without ROS can evaluate. `offline.py` makes one per
recording, `replay.py` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rosbags.typesys import Stores, get_typestore

from oxygen_ros.evaluation.bag_profile import JOINT_STATE, STRING, TRANSPORTS
from oxygen_ros.evaluation.measurements import resolve
from oxygen_ros.evaluation.recording import BagError, Recording
from oxygen_ros.profile import CameraProfile, CommandProfile, RobotProfile

# Definitions of the standard messages; a recording of Humble carries none, and these never changed.
TYPES = get_typestore(Stores.ROS2_HUMBLE)

COMMAND_TYPES = {
    JOINT_STATE: 'joint_state',
    'trajectory_msgs/msg/JointTrajectory': 'joint_trajectory',
    'std_msgs/msg/Float64MultiArray': 'forward_command',
}
MAX_PADDING = 16
"""Bytes without meaning behind a message: rclpy's serialize_message, with which Python programs
write recordings, reserves 4 for every empty array of doubles, as in a JointState without efforts.
The rosbags package takes at most 3."""
MAX_NAMED = 6
"""Topics that a sentence lists; a recording may hold a hundred."""

Part = Literal['image', 'joints', 'instruction']


@dataclass(frozen=True)
class Given:
    """What the user says about a recording whose names differ from the profile's; '' = look."""

    cameras: Mapping[str, str] = field(default_factory=dict)
    """Model camera slot -> recorded topic."""
    joints: str = ''
    commands: str = ''
    dropped_cameras: tuple[str, ...] = ()
    """Slots that are treated as if they were not recorded."""


@dataclass(frozen=True)
class Arrival:
    """One message of the recording; None is one that is no message of its type."""

    part: Part
    slot: str
    """Of an image; '' otherwise."""
    log_ns: int
    message: Any | None


class BagSource:
    """The messages of one recording that a profile can use, in the order of their log times."""

    def __init__(self, recording: Recording, profile: RobotProfile, given: Given) -> None:
        """Match topics. Raises BagError with one line that says what is missing and what is there.

        An absent camera that is not required, and absent commands, are told in `remarks`.
        """
        self.recording = recording
        self.remarks: list[str] = []
        self.profile = self._matched(profile, given)
        self._instruction = self._find(profile.instruction.topic, (STRING,))
        if not self._instruction and not profile.instruction.default:
            self.remarks.append(
                f'no instruction: {resolve(profile.instruction.topic)} is not recorded and the '
                f'profile has no default; say --instruction TEXT'
            )
        self.commands = self._commands(profile.command, given.commands)
        """Recorded topic of the commands to compare with; '' if there is none."""

    @property
    def roles(self) -> dict[str, str]:
        """What plays which part -> recorded topic."""
        cameras = {f'camera {camera.slot}': camera.topic for camera in self.profile.cameras}
        others = {
            'joints': self.profile.joints.topic,
            'instruction': self._instruction,
            'recorded commands': self.commands,
        }
        return cameras | {part: topic for part, topic in others.items() if topic}

    def inputs(self, profile: RobotProfile) -> dict[str, str]:
        """Return recorded topic -> name in `profile`, of everything that a live node hears.

        Raises BagError if a camera was recorded in another form than the node subscribes to.
        """
        wanted = {camera.slot: camera for camera in profile.cameras}
        found = {}
        for camera in self.profile.cameras:
            live = wanted[camera.slot]
            if camera.transport != live.transport:
                raise BagError(
                    f'{self.recording.path}: {camera.topic} is {camera.transport}, the profile '
                    f'expects {live.transport}; set transport and topic of camera {camera.slot} in '
                    f'the profile, or use oxygen_eval'
                )
            found[camera.topic] = resolve(live.topic)
        found[self.profile.joints.topic] = resolve(profile.joints.topic)
        if self._instruction:
            found[self._instruction] = resolve(profile.instruction.topic)
        return found

    def messages(self) -> Iterator[Arrival]:
        """Yield everything that is put into the observation, oldest first. Raises BagError."""
        parts: dict[str, list[tuple[Part, str]]] = {}
        for camera in self.profile.cameras:
            parts.setdefault(camera.topic, []).append(('image', camera.slot))
        parts.setdefault(self.profile.joints.topic, []).append(('joints', ''))
        if self._instruction:
            parts.setdefault(self._instruction, []).append(('instruction', ''))
        for topic, log_ns, data in self.recording.messages(list(parts)):
            message = read_message(self.recording, topic, data)
            for part, slot in parts[topic]:
                yield Arrival(part, slot, log_ns, message)

    # ---- matching

    def _matched(self, profile: RobotProfile, given: Given) -> RobotProfile:
        """Return the profile with the recorded names of cameras and joints."""
        self._check_slots(profile, given)
        missing: list[str] = []  # all of it is told at once
        cameras = []
        for camera in profile.cameras:
            if camera.slot not in given.dropped_cameras:
                cameras += self._camera(camera, given.cameras.get(camera.slot, ''), missing)
        if not cameras and not missing:
            missing.append(f'no camera is left; {self._there(TRANSPORTS)}')
        wanted = given.joints or profile.joints.topic
        joints = self._find(wanted, (JOINT_STATE,))
        if not joints:
            missing.append(
                f'joint states: {self._absent(wanted, (JOINT_STATE,))}; say --joints TOPIC'
            )
        if missing:
            raise BagError(f'{self.recording.path}: {". And ".join(missing)}')
        return replace(
            profile, cameras=tuple(cameras), joints=replace(profile.joints, topic=joints)
        )

    def _check_slots(self, profile: RobotProfile, given: Given) -> None:
        slots = [camera.slot for camera in profile.cameras]
        for slot in (*given.cameras, *given.dropped_cameras):
            if slot not in slots:
                raise BagError(
                    f'camera {slot}: expected one of the slots of profile {profile.name}: '
                    f'{", ".join(slots)}'
                )

    def _camera(self, camera: CameraProfile, given: str, missing: list[str]) -> list[CameraProfile]:
        """Return the camera with its recorded name, or nothing and, if that matters, say why."""
        types = tuple(TRANSPORTS)
        wanted = given or camera.topic
        # A recorder is often told to keep the compressed pictures only.
        topic = self._find(wanted, types) or self._find(f'{wanted}/compressed', types)
        if topic:
            transport = TRANSPORTS[self.recording.topics[topic].type_name]
            return [replace(camera, topic=topic, transport=transport)]
        hint = f'camera {camera.slot}: {self._absent(wanted, TRANSPORTS)}'
        if given or camera.required:
            missing.append(
                f'{hint}; say --camera {camera.slot}=TOPIC, or --drop-camera {camera.slot}'
            )
            return []
        self.remarks.append(f'{hint}; it is optional, so its tokens are left out')
        return []

    def _commands(self, command: CommandProfile, given: str) -> str:
        topic = self._find(given or command.topic, tuple(COMMAND_TYPES))
        if topic:
            return topic
        sentence = f'commands: {self._absent(given or command.topic, COMMAND_TYPES)}'
        if given:
            raise BagError(f'{self.recording.path}: {sentence}')
        self.remarks.append(f'{sentence}; without them no action error; say --commands TOPIC')
        return ''

    def _find(self, wanted: str, type_names: tuple[str, ...]) -> str:
        """Return the topic of that full name, else the only one of that name in a namespace."""
        usable = {t.name for t in self.recording.topics.values() if t.type_name in type_names}
        if resolve(wanted) in usable:
            return resolve(wanted)
        ending = f'/{wanted.removeprefix("~").lstrip("/")}'
        found = [topic for topic in usable if topic.endswith(ending)]
        if len(found) != 1:
            return ''
        self.remarks.append(f'{found[0]} is taken for {resolve(wanted)}')
        return found[0]

    def _absent(self, wanted: str, type_names: Mapping[str, Any] | tuple[str, ...]) -> str:
        there = self.recording.topics.get(resolve(wanted))
        if there is not None:
            expected = ' or '.join(type_names)
            return f'{there.name} is a {there.type_name}, expected {expected}'
        return f'has no topic {resolve(wanted)}; {self._there(type_names)}'

    def _there(self, type_names: Mapping[str, Any] | tuple[str, ...]) -> str:
        topics = self.recording.topics.values()
        usable = sorted(t.name for t in topics if t.type_name in type_names)
        kinds = ' or '.join(name.rpartition('/')[2] for name in type_names)
        more = f' and {len(usable) - MAX_NAMED} more' if len(usable) > MAX_NAMED else ''
        listed = f'{", ".join(usable[:MAX_NAMED])}{more}' if usable else 'none'
        return f'recorded as {kinds}: {listed}'


def read_message(recording: Recording, topic: str, data: bytes) -> Any | None:
    """Return the message, or None where the bytes are none of the topic's type."""
    type_name = recording.topics[topic].type_name
    for padding in range(0, MAX_PADDING + 1, 4):
        try:
            return TYPES.deserialize_cdr(data[: len(data) - padding], type_name)
        except Exception:  # damaged bytes provoke anything from struct to numpy errors
            continue
    return None
