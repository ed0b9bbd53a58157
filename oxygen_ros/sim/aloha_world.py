"""AlohaWorld: gym-aloha's two arms and what they handle, at any pace and through three cameras.

Owns the physics and the pictures; what lies on the table is `aloha_tasks.py`'s affair, and the
scene is that of gym-aloha, whose files are read where it is installed. Its own environment takes
pictures at every step, six times slower than real time, so it is not used; a test holds this world
to it. Knows no ROS. `aloha.py` is the robot.
Source of the constants: gym_aloha constants.py and tasks/sim.py (gym-aloha 0.1.5).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from oxygen_ros.sim.aloha_tasks import TASKS, Task
from oxygen_ros.sim.world import GraphicsError, import_mujoco, no_graphics

CAMERAS = ('cam_high', 'cam_left_wrist', 'cam_right_wrist')
SCENE_CAMERAS = {
    'cam_high': 'top',
    'cam_left_wrist': 'left_wrist',
    'cam_right_wrist': 'right_wrist',
}
ARM = ('waist', 'shoulder', 'elbow', 'forearm_roll', 'wrist_angle', 'wrist_rotate', 'gripper')
JOINTS = tuple(f'{side}_{joint}' for side in ('left', 'right') for joint in ARM)
CONTROL_HZ = 50
IMAGE_WIDTH, IMAGE_HEIGHT = 640, 480

START_POSE = np.array([0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.02239, -0.02239] * 2)
"""Six angles [rad] and two fingers [m] of each arm."""
FINGER_CLOSED_M, FINGER_OPEN_M = 0.01844, 0.05800
"""Where a gripper is at 0 and at 1. The scene's fingers stop at 0.021 and 0.057, so it never is."""


def scene_file(task: Task) -> Path:
    """Return the task's scene of the installed gym-aloha.

    Raises:
        GraphicsError: gym-aloha is not installed.
    """
    # Found, not imported: that would need gymnasium and dm_control, of which nothing is used.
    spec = find_spec('gym_aloha')
    if spec is None or spec.origin is None:
        raise GraphicsError(
            'expected the scene of gym-aloha, which is not installed: '
            'pip install --no-deps gym-aloha (only its scene files are read)'
        )
    return Path(spec.origin).parent / 'assets' / task.scene


class AlohaWorld:
    """Two arms at one task. Owned by one thread, like its renderer.

    Angles are in rad, grippers 0 (closed) to 1 (open), for positions and targets alike.
    """

    CAMERAS = CAMERAS
    JOINTS = JOINTS
    CONTROL_HZ = CONTROL_HZ

    def __init__(self, task: str = 'transfer', *, shadows: bool = True) -> None:
        """Load the scene of one of `TASKS`, reset with seed 0. gym-aloha's own pictures have
        shadows.

        Raises:
            GraphicsError: gym-aloha, MuJoCo or a renderer is missing.
        """
        self._task = TASKS[task]
        self._mujoco = import_mujoco()
        self._model = self._mujoco.MjModel.from_xml_path(str(scene_file(self._task)))
        self._data = self._mujoco.MjData(self._model)
        self._shadows = shadows
        self._renderer: Any = None
        self.reset(0)

    # --- time ---------------------------------------------------------------------------------

    def reset(self, seed: int) -> None:
        """Put the arms to their start and the objects where gym-aloha puts them for this seed."""
        self._mujoco.mj_resetData(self._model, self._data)
        self._data.qpos[:] = [*START_POSE, *self._task.places(seed).ravel()]
        self._data.ctrl[:] = START_POSE
        self._mujoco.mj_forward(self._model, self._data)

    def step(self, targets: np.ndarray, duration_s: float) -> None:
        """Drive the joints towards targets (14,); `duration_s` in whole physics steps of 2 ms."""
        self._data.ctrl[:] = _with_fingers(targets)
        steps = max(1, round(duration_s / self._model.opt.timestep))
        self._mujoco.mj_step(self._model, self._data, steps)

    @property
    def time_s(self) -> float:
        """Simulated time since the reset."""
        return float(self._data.time)

    def close(self) -> None:
        """Free the renderer; MuJoCo prints a traceback at exit where this is forgotten."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    # --- what the robot feels and sees --------------------------------------------------------

    def joint_positions(self) -> np.ndarray:
        """Return (14,) float64, in the order of `JOINTS`."""
        arms = _without_second_fingers(self._data.qpos)
        arms[:, -1] = (arms[:, -1] - FINGER_CLOSED_M) / (FINGER_OPEN_M - FINGER_CLOSED_M)
        return arms.ravel()

    def joint_velocities(self) -> np.ndarray:
        """Return (14,) float64, per second."""
        arms = _without_second_fingers(self._data.qvel)
        arms[:, -1] /= FINGER_OPEN_M - FINGER_CLOSED_M
        return arms.ravel()

    def render(self, camera: str) -> np.ndarray:
        """Return what a camera sees, uint8 (480, 640, 3) RGB.

        Raises:
            GraphicsError: no picture can be made on this machine.
        """
        if camera not in SCENE_CAMERAS:
            raise ValueError(f'camera: expected one of {list(CAMERAS)}, got {camera!r}')
        if self._renderer is None:
            self._renderer = self._make_renderer()
        self._renderer.update_scene(self._data, camera=SCENE_CAMERAS[camera])
        return np.array(self._renderer.render())

    def _make_renderer(self) -> Any:
        try:
            renderer = self._mujoco.Renderer(self._model, IMAGE_HEIGHT, IMAGE_WIDTH)
        except Exception as error:  # whatever the GL library of this machine raises
            raise no_graphics(error) from error
        renderer.scene.flags[self._mujoco.mjtRndFlag.mjRND_SHADOW] = self._shadows
        return renderer

    # --- the truth ----------------------------------------------------------------------------

    def objects(self) -> np.ndarray:
        """Return (objects, 3), the position of each [m]."""
        return np.array(self._data.qpos[16:]).reshape(-1, 7)[:, :3]

    def reward(self) -> int:
        """Return gym-aloha's reward at this moment, 0 to 4."""
        return self._task.reward(self._contacts())

    def stage(self) -> str:
        """Return how far the task has come, in words."""
        return self._task.stages[self.reward()]

    def _contacts(self) -> set[frozenset[str]]:
        contacts = self._data.contact[: self._data.ncon]
        return {
            frozenset(self._model.geom(int(geom)).name for geom in contact.geom)
            for contact in contacts
        }


def _with_fingers(targets: np.ndarray) -> np.ndarray:
    """(14,) targets to (16,) of the servos: a gripper's two fingers move apart."""
    arms = np.asarray(targets, np.float64).reshape(2, 7)
    finger_m = FINGER_CLOSED_M + arms[:, -1:] * (FINGER_OPEN_M - FINGER_CLOSED_M)
    return np.hstack([arms[:, :-1], finger_m, -finger_m]).ravel()


def _without_second_fingers(values: np.ndarray) -> np.ndarray:
    """The first 16 of qpos or qvel to (2, 7), the last column of fingers."""
    return np.array(values[:16]).reshape(2, 8)[:, :7]
