"""What an evaluation on the tabletop asks of a profile, and the weights that it plays with.

Owns the check that a profile is one for the table at all, and the choice of cameras. What an
evaluation changes of a profile is `lockstep_profile.py`'s. Called by `episodes.py` and `load.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oxygen_ros.evaluation.lockstep_profile import check_robot
from oxygen_ros.profile import ProfileError, RobotProfile, share_folder
from oxygen_ros.sim.tabletop import TabletopRobot
from oxygen_ros.sim.world import CAMERAS, JOINTS, TabletopWorld


def check_fit(profile: RobotProfile, name: str) -> None:
    """Raise ProfileError unless the profile describes the simulated table."""
    check_robot(profile, name, 'the tabletop', TabletopRobot, TabletopWorld, JOINTS)


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
