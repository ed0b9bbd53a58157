"""The simulated table as a robot: `oxygen_tabletop`.

Owns what the table tells beside being a robot: the truth of narration, memory and touches. Topics,
pace and services are those of `robot.py`, physics and truth those of `world.py`. Known to `oxygen`
by config/tabletop.yaml and by nothing else; the evaluation drives `TabletopRobot` itself.
"""

from __future__ import annotations

import sys

from std_msgs.msg import String

from oxygen_ros.sim.robot import RobotNode, TargetRobot, parameters, run_robot
from oxygen_ros.sim.world import COLOURS, TabletopWorld

INSTRUCTION_TOPIC = 'instruction'
PARAMETERS = parameters(
    transport='raw',
    command_interface='forward_command',
    camera_rate_hz=10.0,
    seed='Layout of the blocks and pose of the arm.',
)


class TabletopRobot(TargetRobot[TabletopWorld]):
    """The arm at the table."""


class TabletopNode(RobotNode[TabletopWorld]):
    """The table, and on topics of its own what is true of it."""

    def __init__(self) -> None:
        """Build the world and begin.

        Raises:
            GraphicsError: no pictures can be rendered here.
            ValueError: a parameter that is not one of its choices.
        """
        super().__init__('tabletop', PARAMETERS)
        self._truth = {
            name: self.create_publisher(String, f'~/{name}', 10)
            for name in ('truth/narration', 'truth/memory', 'touched')
        }
        self._instruction = ''
        self.create_subscription(String, INSTRUCTION_TOPIC, self._on_instruction, 10)
        self.begin(TabletopRobot, TabletopWorld())

    def publish_truth(self) -> None:
        """Say what is to be said of the instruction, what to remember, and what was touched."""
        world = self.robot.world
        try:
            narration = world.narration(self._instruction)
        except ValueError:  # nobody has named a block yet
            narration = ''
        touched = [colour for colour in COLOURS if world.touched(colour)]
        self._truth['truth/narration'].publish(String(data=narration))
        self._truth['truth/memory'].publish(String(data=world.memory()))
        self._truth['touched'].publish(String(data=', '.join(touched)))

    def _on_instruction(self, message: String) -> None:
        if message.data != self._instruction:
            self._instruction = message.data
            self.robot.world.clear_touches()


def main(args: list[str] | None = None) -> int:
    """Run the table; see `run_robot` for the exit codes."""
    return run_robot('oxygen_tabletop', TabletopNode, args)


if __name__ == '__main__':
    sys.exit(main())
