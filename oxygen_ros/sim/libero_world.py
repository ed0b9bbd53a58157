"""LiberoWorld: LIBERO's Panda, one control step at a time, as openpi's client plays it.

Owns the environment of the task that is on, the settling of its objects, the state as the policy
knows it, and the pictures. Knows no ROS, and of LIBERO only what `libero_tasks.py` says of an
environment, so that any of robosuite's will do. `libero.py` is the robot, `evaluation/` the
protocol. Source of state, settling and seed: openpi examples/libero/main.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from oxygen_ros.sim.libero_tasks import CONTROL_HZ, IMAGE_SIZE, Environment, Task
from oxygen_ros.sim.world import GraphicsError, import_mujoco, no_graphics

CAMERAS = ('agentview', 'eye_in_hand')
SCENE_CAMERAS = {'agentview': 'agentview', 'eye_in_hand': 'robot0_eye_in_hand'}
STATE = (
    *('eef_x', 'eef_y', 'eef_z'),
    *('eef_rx', 'eef_ry', 'eef_rz'),
    *('finger_left', 'finger_right'),
)
COMMANDS = (
    *('delta_x', 'delta_y', 'delta_z'),
    *('delta_rx', 'delta_ry', 'delta_rz'),
    'gripper',
)
CONTROL_PERIOD_S = 1 / CONTROL_HZ
STAY = np.zeros(len(COMMANDS))
OPEN = -1.0
SETTLING_STEPS = 10
"""After a reset objects hang a little above the table, and fall."""
SETTLING_ACTION = np.array([0.0] * 6 + [OPEN])
SEED = 7
"""Where fixtures stand is drawn at a reset, also with an initial state."""


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Return the axis times the angle [rad] (3,) of a unit quaternion (x, y, z, w).

    As openpi's client: the angle is 0 to 2 π, so that a quaternion and its negative differ.
    """
    w = min(1.0, max(-1.0, float(quaternion[3])))
    sine = math.sqrt(1.0 - w * w)
    if sine == 0.0:
        return np.zeros(3)
    return np.asarray(quaternion[:3], np.float64) * (2.0 * math.acos(w) / sine)


class LiberoWorld:
    """One task of LIBERO. Owned by one thread, like its renderer.

    Of actions (7,), 1.0 is 0.05 m or 0.5 rad of one control step; the gripper closes above 0 and
    opens below, and at 0 it goes on as before. robosuite itself would stop the fingers midway.
    """

    CAMERAS = CAMERAS
    JOINTS = STATE
    CONTROL_HZ = CONTROL_HZ

    def __init__(self, task: Task) -> None:
        """Make the environment of the task, and reset with seed 0.

        Raises:
            LiberoError: a part of LIBERO is missing.
            GraphicsError: MuJoCo or a renderer is missing, or does not work.
        """
        import_mujoco()  # chooses the renderer
        self._environment: Environment | None = None
        self.enter(task)

    def enter(self, task: Task) -> None:
        """Leave the task that is on for another one; raises as the constructor does."""
        self.close()
        try:
            self._environment = task.make()
        except GraphicsError:
            raise
        except (ImportError, RuntimeError) as error:  # what robosuite's GL contexts raise
            raise no_graphics(error) from error
        self.task = task
        self.reset(0)

    # --- time ---------------------------------------------------------------------------------

    def reset(self, seed: int) -> None:
        """Lay out the task's initial state of this number, and let everything fall into place.

        Numbers beyond the last initial state begin anew. The result depends on the seed alone.
        """
        self._the_environment.seed(SEED + seed)
        observation = self._the_environment.reset()
        if states := len(self.task.init_states):
            observation = self._the_environment.set_init_state(self.task.init_states[seed % states])
        for _ in range(SETTLING_STEPS):
            observation = self._the_environment.step(SETTLING_ACTION)[0]
        self._observe(observation)
        self._gripper = OPEN
        self.num_steps = 0

    def step(self, action: np.ndarray, duration_s: float) -> None:
        """Apply an action (7,) for one control step: robosuite knows no other duration.

        Raises:
            ValueError: another duration.
        """
        if not math.isclose(duration_s, CONTROL_PERIOD_S, rel_tol=1e-6):
            raise ValueError(f'duration_s: expected {CONTROL_PERIOD_S:g}, got {duration_s:g}')
        applied = np.array(action, np.float64)
        self._gripper = applied[6] = applied[6] or self._gripper
        self._observe(self._the_environment.step(applied)[0])
        self.num_steps += 1

    @property
    def time_s(self) -> float:
        """Simulated time since the reset."""
        return self.num_steps * CONTROL_PERIOD_S

    def close(self) -> None:
        """Free the environment and its renderer."""
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    # --- what the robot feels and sees --------------------------------------------------------

    def joint_positions(self) -> np.ndarray:
        """Return (8,) float64 in the order of `STATE`: [m], axis-angle [rad], fingers [m]."""
        return self._state.copy()

    def joint_velocities(self) -> np.ndarray:
        """Return (0,): LIBERO's policies know none."""
        return np.empty(0)

    def render(self, camera: str) -> np.ndarray:
        """Return what a camera sees, uint8 (256, 256, 3) RGB, upside down as LIBERO has it."""
        if camera not in SCENE_CAMERAS:
            raise ValueError(f'camera: expected one of {list(CAMERAS)}, got {camera!r}')
        picture = self._the_environment.sim.render(
            camera_name=SCENE_CAMERAS[camera], width=IMAGE_SIZE, height=IMAGE_SIZE
        )
        return np.array(picture)

    # --- the truth ----------------------------------------------------------------------------

    def succeeded(self) -> bool:
        """Return whether the goal holds at this moment, by the environment's own check."""
        return bool(self._the_environment.check_success())

    @property
    def _the_environment(self) -> Environment:
        assert self._environment is not None, 'the world is closed'
        return self._environment

    def _observe(self, observation: Mapping[str, Any]) -> None:
        orientation = axis_angle(observation['robot0_eef_quat'])
        fingers_m = observation['robot0_gripper_qpos']
        self._state = np.r_[observation['robot0_eef_pos'], orientation, fingers_m]
