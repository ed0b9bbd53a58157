"""Stand-ins for LIBERO's environments, whose assets come from a hub: a fake, and robosuite's Lift.

`python libero_stand_ins.py fake|lift --ros-args ...` is `oxygen_libero` in one of them.
"""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oxygen_ros.sim.libero_tasks import CONTROL_HZ, IMAGE_SIZE, Task

needs_robosuite = pytest.mark.skipif(
    find_spec('robosuite') is None, reason='robosuite is not installed'
)


class LiftEnvironment:
    """One cube, LIBERO's arm, controller and cameras: real physics."""

    def __init__(self, use_camera_obs: bool = False) -> None:
        import robosuite
        from robosuite.controllers import load_controller_config

        self.env = robosuite.make(
            'Lift',
            robots='Panda',
            controller_configs=load_controller_config(default_controller='OSC_POSE'),
            has_renderer=False,
            has_offscreen_renderer=True,
            use_camera_obs=use_camera_obs,
            camera_names=['agentview', 'robot0_eye_in_hand'],
            camera_heights=IMAGE_SIZE,
            camera_widths=IMAGE_SIZE,
            control_freq=CONTROL_HZ,
            ignore_done=True,
        )

    @property
    def sim(self) -> Any:
        return self.env.sim

    def seed(self, seed: int) -> None:
        np.random.seed(seed)  # noqa: NPY002 - as LIBERO does

    def reset(self) -> Any:
        return self.env.reset()

    def set_init_state(self, init_state: np.ndarray) -> Any:
        self.env.sim.set_state_from_flattened(init_state)
        self.env.sim.forward()
        return self.env._get_observations(force_update=True)

    def step(self, action: np.ndarray) -> Any:
        return self.env.step(action)

    def check_success(self) -> bool:
        return bool(self.env._check_success())

    def close(self) -> None:
        self.env.close()


def a_quaternion(axis: tuple[float, float, float], angle_rad: float) -> np.ndarray:
    return np.r_[np.array(axis) * math.sin(angle_rad / 2), math.cos(angle_rad / 2)]


class FakeEnvironment:
    """Writes down what is done to it; its hand goes where the actions say, on noisy pictures.

    Its goal holds where x > goal_x, or from so many steps on, settling included.
    """

    def __init__(self, goal_x: float = 1.5, succeeds_after: float = math.inf) -> None:
        self.goal_x, self.succeeds_after, self.num_steps = goal_x, succeeds_after, 0
        self.done: list[tuple[str, Any]] = []
        self.place = np.zeros(3)
        self.sim = SimpleNamespace(render=self._render)

    def _render(self, **size: Any) -> np.ndarray:
        self.done.append(('render', size))
        shape = (size['height'], size['width'], 3)
        return np.random.default_rng(len(self.done)).integers(0, 255, shape, np.uint8)

    def _observation(self) -> dict[str, np.ndarray]:
        return {
            'robot0_eef_pos': self.place.copy(),
            'robot0_eef_quat': a_quaternion((0.0, 0.0, 1.0), 0.5),
            'robot0_gripper_qpos': np.array([0.02, -0.02]),
        }

    def seed(self, seed: int) -> None:
        self.done.append(('seed', seed))

    def reset(self) -> Any:
        self.done.append(('reset', None))
        self.place, self.num_steps = np.zeros(3), 0
        return self._observation()

    def set_init_state(self, init_state: np.ndarray) -> Any:
        self.done.append(('set_init_state', init_state.tolist()))
        return self._observation()

    def step(self, action: np.ndarray) -> Any:
        self.done.append(('step', action.tolist()))
        self.place += action[:3]
        self.num_steps += 1
        return self._observation(), 0.0, self.check_success(), {}

    def check_success(self) -> bool:
        return bool(self.place[0] > self.goal_x or self.num_steps >= self.succeeds_after)

    def close(self) -> None:
        self.done.append(('close', None))

    def actions(self) -> list[list[float]]:
        return [value for name, value in self.done if name == 'step']


def a_task(**changes: Any) -> Task:
    """A stand-in for a task of the benchmark."""
    given = {
        'suite': 'libero_spatial',
        'index': 0,
        'language': 'lift the red cube',
        'step_limit': 10,
        'make': FakeEnvironment,
    }
    return Task(**(given | changes))


def main() -> int:
    from oxygen_ros.sim import libero

    make = {'fake': FakeEnvironment, 'lift': LiftEnvironment}[sys.argv[1]]
    libero.suite_tasks = lambda suite: [a_task(suite=suite, index=i, make=make) for i in range(10)]
    return libero.main(sys.argv)


if __name__ == '__main__':
    sys.exit(main())
