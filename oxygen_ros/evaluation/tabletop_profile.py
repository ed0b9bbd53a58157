"""Profiles for evaluating on the tabletop: the shipped one with other rates and more to say.

Owns what an evaluation may change of a profile, and the check that a profile is one for the table
at all. Limits, model, prompts and topics stay as they are. Called by `episodes.py` and `load.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from oxygen_ros.profile import ProfileError, RobotProfile, load_profile, share_folder
from oxygen_ros.sim.robot import JOINTS_TOPIC
from oxygen_ros.sim.tabletop import INSTRUCTION_TOPIC, TabletopRobot
from oxygen_ros.sim.world import CAMERAS, CONTROL_HZ, JOINTS

LOCKSTEP_COMMAND_HZ = 200.0
"""The world waits for a command in every control step, so they come as fast as is cheap."""
UNLIMITED_S = 600.0


def check_fit(profile: RobotProfile, name: str) -> None:
    """Raise ProfileError unless the profile describes the simulated table."""
    command = profile.command
    expected = {
        'joints.topic': (profile.joints.topic, JOINTS_TOPIC),
        'joints.names': (profile.joints.names, JOINTS),
        'instruction.topic': (profile.instruction.topic, INSTRUCTION_TOPIC),
        'command.topic': (command.topic, TabletopRobot.COMMAND_TOPIC),
        'command.names': (command.names, JOINTS),
        'command.quantity': (set(command.quantity), {'position'}),
        'action.rate_hz': (profile.action.rate_hz, CONTROL_HZ),
    }
    for key, (got, wanted) in expected.items():
        if got != wanted:
            raise ProfileError(f'{name}: {key}: the tabletop has {wanted!r}, got {got!r}')
    known = {TabletopRobot.camera_topic(camera, 'raw') for camera in CAMERAS}
    for camera in profile.cameras:
        if camera.topic not in known:
            raise ProfileError(
                f'{name}: cameras: {camera.slot}: expected one of {sorted(known)}, '
                f'got {camera.topic!r}'
            )


def world_cameras(profile: RobotProfile, lost_slots: Sequence[str]) -> tuple[str, ...]:
    """Return the world's names of the profile's cameras, without those that are lost.

    Raises:
        ProfileError: no such slot, none would be left, or the profile requires a lost one.
    """
    slots = {camera.slot: camera for camera in profile.cameras}
    for slot in lost_slots:
        if slot not in slots:
            raise ProfileError(f'--lose-camera: expected one of {sorted(slots)}, got {slot!r}')
        if slots[slot].required:
            raise ProfileError(
                f'--lose-camera: {profile.name} requires {slot}; a model that was trained to do '
                f'without has required: false'
            )
    topics = [camera.topic for slot, camera in slots.items() if slot not in lost_slots]
    if not topics:
        raise ProfileError('--lose-camera: expected at least one camera to be left')
    return tuple(
        camera for camera in CAMERAS if TabletopRobot.camera_topic(camera, 'raw') in topics
    )


def shipped_checkpoint() -> Path:
    """Return the folder of the trained weights.

    Raises:
        FileNotFoundError: there are none.
    """
    folder = share_folder() / 'resource' / 'tabletop'
    if (folder / 'model.safetensors').is_file():
        return folder
    raise FileNotFoundError(
        f'checkpoint: expected model.safetensors in {folder}; train it with oxygen_train, or say '
        f'--checkpoint DIR'
    )


def lockstep_profile(
    base: Path, written: Path, *, frame_rate_hz: float, copies: int = 1
) -> RobotProfile:
    """Write a profile for lock-step: every language task `copies` times on every look.

    In lock-step a whole control period passes between two commands that differ, so a step may be
    as large as the velocity limit allows in a control period: the same limit per simulated second.
    """
    raw = _read(base)
    raw['frame_rate_hz'] = frame_rate_hz
    command = raw['command']
    if command['interface'] != 'joint_trajectory':  # whose messages are long, and dear
        command['rate_hz'] = LOCKSTEP_COMMAND_HZ
    limit = command['limits']['max_velocity']
    scale = command['rate_hz'] / CONTROL_HZ
    scaled = [scale * one for one in limit] if isinstance(limit, list) else scale * limit
    command['limits']['max_velocity'] = scaled
    raw['tasks'] = _repeated(raw, copies)
    for task in raw['tasks']:
        task['max_age_s'] = UNLIMITED_S  # of the wall clock, which means nothing here
    return _write(raw, base, written)


def load_profile_with(
    base: Path, written: Path, *, frame_rate_hz: float, copies: int
) -> RobotProfile:
    """Write a profile that asks for more: every language task `copies` times on every frame."""
    raw = _read(base)
    raw['frame_rate_hz'] = frame_rate_hz
    raw['tasks'] = _repeated(raw, copies)
    return _write(raw, base, written)


def _repeated(raw: dict[str, Any], copies: int) -> list[dict[str, Any]]:
    return [
        {
            **task,
            'name': f'{task["name"]}_{number}',
            'topic': f'{task["topic"]}_{number}',
            'period_frames': 1,
        }
        for task in raw.get('tasks', [])
        for number in range(1, copies + 1)
    ]


def _read(path: Path) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(path.read_text(encoding='utf-8'))
    return raw


def _write(raw: dict[str, Any], base: Path, written: Path) -> RobotProfile:
    text = yaml.safe_dump(raw, sort_keys=False, allow_unicode=True)
    written.write_text(f'# Made from {base.name} for an evaluation\n{text}', encoding='utf-8')
    return load_profile(str(written), written.parent)
