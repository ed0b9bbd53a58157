"""LIBERO's robot on the ROS graph: `oxygen_libero`, for the profile `libero`.

Owns the names of its topics, the meaning of its commands over time, and the topics that tell the
task and whether its goal holds; the rest is that of `robot.py`, `libero_world.py` and
`libero_tasks.py`. Known to `oxygen` by config/libero.yaml only.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import numpy as np
from std_msgs.msg import Bool, String

from oxygen_ros.sim.libero_tasks import CONTROL_HZ, NUM_TASKS, SUITES, suite_tasks
from oxygen_ros.sim.libero_world import COMMANDS, CONTROL_PERIOD_S, STAY, LiberoWorld
from oxygen_ros.sim.robot import (
    RobotNode,
    RobotParameter,
    SimulatedRobot,
    command_rows,
    parameters,
    run_robot,
)

MAX_WAITING = 2
"""Two clocks of 20 Hz drift: now no command comes within a control step, now two."""
PARAMETERS = (
    *parameters(
        transport='raw',
        command_interface='forward_command',
        command_interfaces=('forward_command', 'joint_state'),
        camera_rate_hz=float(CONTROL_HZ),
        seed="Number of the task's initial state, as LIBERO counts them.",
    ),
    RobotParameter('suite', SUITES[0], 'Suite of the benchmark.', SUITES),
    RobotParameter('task', 0, 'Number of the task in its suite.', (0, NUM_TASKS - 1)),
)


class LiberoRobot(SimulatedRobot[LiberoWorld]):
    """An arm whose commands are differences: each one counts for a single control step.

    Without a fresh command the arm stays, and the gripper keeps its direction.
    """

    CAMERA_TOPIC = '{}/image_raw'
    JOINTS_TOPIC = 'state'
    COMMAND_TOPIC = 'osc_pose/commands'
    COMMAND_QUANTITY = 'velocity'
    COMMAND_DEPTH = 10

    def rest(self) -> None:
        """Forget the commands that wait."""
        self._waiting: deque[np.ndarray] = deque(maxlen=MAX_WAITING)
        self._owed_s = 0.0

    def obey(self, message: Any) -> np.ndarray:
        """Let a command wait for the next control step that is free; the oldest makes room.

        Raises:
            CommandError: not one finite value for each of `COMMANDS`.
        """
        _, rows = command_rows(message, COMMANDS)
        if len(self._waiting) == MAX_WAITING:
            self._node.get_logger().warning(
                f'{self.COMMAND_TOPIC}: commands come faster than control steps of '
                f'{CONTROL_HZ} Hz; one was lost',
                throttle_duration_sec=5.0,
            )
        self._waiting.append(rows[0])
        return np.array(rows[0])

    def advance(self, duration_s: float) -> None:
        """Let time pass, in whole control steps; what is left over counts the next time."""
        self._owed_s += duration_s
        while self._owed_s > CONTROL_PERIOD_S - 1e-9:
            action = self._waiting.popleft() if self._waiting else STAY
            self.world.step(action, CONTROL_PERIOD_S)
            self._owed_s -= CONTROL_PERIOD_S


class LiberoNode(RobotNode[LiberoWorld]):
    """The robot, what it should do, and whether it is done."""

    def __init__(self) -> None:
        """Make the environment of the task and begin.

        Raises:
            LiberoError: LIBERO or a part of it is missing.
            GraphicsError: no pictures can be rendered here.
            ValueError: a parameter that is not one of its choices.
        """
        super().__init__('libero', PARAMETERS)
        self._language = self.create_publisher(String, '~/language', 10)
        self._success = self.create_publisher(Bool, '~/success', 10)
        task = suite_tasks(self.value('suite'))[self.value('task')]
        self.begin(LiberoRobot, LiberoWorld(task))

    def publish_truth(self) -> None:
        """Say what the task is called, and whether its goal holds."""
        world = self.robot.world
        self._language.publish(String(data=world.task.language))
        self._success.publish(Bool(data=world.succeeded()))


def main(args: list[str] | None = None) -> int:
    """Run the robot; see `run_robot` for the exit codes."""
    return run_robot('oxygen_libero', LiberoNode, args)


if __name__ == '__main__':
    sys.exit(main())
