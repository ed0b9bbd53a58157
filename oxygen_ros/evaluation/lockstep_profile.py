"""Profiles for evaluating on a simulated robot: a given one with other rates and more to say.

Owns what an evaluation may change of a profile, and the check that a profile describes a simulated
robot at all. Limits, model, prompts and topics stay as they are. Called by the evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from oxygen_ros.profile import ProfileError, RobotProfile, load_profile
from oxygen_ros.sim.robot import SimulatedRobot

LOCKSTEP_COMMAND_HZ = 200.0
"""The world waits for a command in every control step, so they come as fast as is cheap."""
UNLIMITED_S = 600.0


def check_robot(
    profile: RobotProfile,
    name: str,
    what: str,
    robot: type[SimulatedRobot[Any]],
    world: type[Any],
    command_names: Sequence[str],
) -> None:
    """Raise ProfileError, with `name` and the key, unless the profile describes the robot.

    `what` is how one speaks of the robot.
    """
    command = profile.command
    expected = {
        'joints.topic': (profile.joints.topic, robot.JOINTS_TOPIC),
        'joints.names': (profile.joints.names, world.JOINTS),
        'command.topic': (command.topic, robot.COMMAND_TOPIC),
        'command.names': (command.names, tuple(command_names)),
        'command.quantity': (set(command.quantity), {robot.COMMAND_QUANTITY}),
        'action.rate_hz': (profile.action.rate_hz, world.CONTROL_HZ),
    }
    for key, (got, wanted) in expected.items():
        if got != wanted:
            raise ProfileError(f'{name}: {key}: {what} has {wanted!r}, got {got!r}')
    known = {robot.camera_topic(camera, 'raw') for camera in world.CAMERAS}
    for camera in profile.cameras:
        if camera.topic not in known:
            raise ProfileError(
                f'{name}: cameras: {camera.slot}: expected one of {sorted(known)}, '
                f'got {camera.topic!r}'
            )


def lockstep_profile(
    base: Path, written: Path, *, frame_rate_hz: float, copies: int = 1
) -> RobotProfile:
    """Write a profile for lock-step: every language task `copies` times on every look.

    In lock-step a whole control period passes between two commands that differ, so a step may be
    as large as the velocity limit allows in a control period: the same limit per simulated second.
    A velocity is no step, and its limit stays.
    """
    raw = _read(base)
    raw['frame_rate_hz'] = frame_rate_hz
    command = raw['command']
    if command['interface'] != 'joint_trajectory':  # whose messages are long, and dear
        command['rate_hz'] = LOCKSTEP_COMMAND_HZ
    scale = command['rate_hz'] / raw['action']['rate_hz']
    given = load_profile(str(base), base.parent).command
    command['limits']['max_velocity'] = [
        limit * scale if quantity == 'position' else limit
        for limit, quantity in zip(given.max_velocity, given.quantity, strict=True)
    ]
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
