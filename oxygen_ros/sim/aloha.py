"""gym-aloha's robot on the ROS graph: `oxygen_aloha`, for the profile `aloha`.

Owns the names of ALOHA's topics and the topic that tells how far the task is; the rest is that of
`robot.py` and `aloha_world.py`. Known to `oxygen` by config/aloha.yaml only.
"""

from __future__ import annotations

import sys

from std_msgs.msg import String

from oxygen_ros.sim.aloha_tasks import TASKS
from oxygen_ros.sim.aloha_world import AlohaWorld
from oxygen_ros.sim.robot import RobotNode, RobotParameter, TargetRobot, parameters, run_robot

PARAMETERS = (
    *parameters(
        transport='compressed',
        command_interface='joint_state',
        camera_rate_hz=30.0,
        seed='Place of the objects, as in gym-aloha.',
    ),
    RobotParameter(
        'task', 'transfer', 'A cube from arm to arm, or a peg into a socket.', tuple(TASKS)
    ),
    RobotParameter(
        'shadows',
        True,
        'As in the pictures of gym-aloha. Without a GPU they cost three times the rest.',
    ),
)


class AlohaRobot(TargetRobot[AlohaWorld]):
    """Two arms and three cameras."""

    CAMERA_TOPIC = '{}/image_raw'
    COMMAND_TOPIC = 'joint_command'


class AlohaNode(RobotNode[AlohaWorld]):
    """The robot, and how far it is."""

    def __init__(self) -> None:
        """Load the scene and begin.

        Raises:
            GraphicsError: gym-aloha is not installed, or no pictures can be rendered here.
            ValueError: a parameter that is not one of its choices.
        """
        super().__init__('aloha', PARAMETERS)
        self._stage = self.create_publisher(String, '~/stage', 10)
        self.begin(AlohaRobot, AlohaWorld(self.value('task'), shadows=self.value('shadows')))

    def publish_truth(self) -> None:
        """Say how far the task has come."""
        self._stage.publish(String(data=self.robot.world.stage()))


def main(args: list[str] | None = None) -> int:
    """Run the robot; see `run_robot` for the exit codes."""
    return run_robot('oxygen_aloha', AlohaNode, args)


if __name__ == '__main__':
    sys.exit(main())
