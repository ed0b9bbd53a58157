"""SoakRobot: a synthetic robot that does to the node what robots do on bad days.

Owns what is published to the node: the base camera and the joints from here, the wrist camera from
a process of its own. Everything passes through a hook on its way out, which a fault replaces for a
while. Knows nothing of which fault is on; `soak.py` makes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oxygen_ros.conversions import ns_to_stamp
from oxygen_ros.evaluation.measurements import resolve
from oxygen_ros.evaluation.node_process import NodeProcess
from oxygen_ros.evaluation.sim_robot import Beat, SimRobot, read_command
from oxygen_ros.evaluation.soak_camera import CAMERA_HZ, HEIGHT, WIDTH, noise
from oxygen_ros.profile import RobotProfile

JOINTS_HZ = 50.0
Hook = Callable[[Any], Any]


def unchanged(message: Any) -> Any:
    """The hook of a good day."""
    return message


class SoakRobot:
    def __init__(
        self,
        node: Any,
        profile: RobotProfile,
        out: Path,
        on_measured: Callable[[list[float]], None],
    ) -> None:
        """Make the publishers; nothing is published before `start`.

        `on_measured` is told every position that is published, in the order of the command.
        """
        from rclpy.qos import qos_profile_sensor_data
        from sensor_msgs.msg import Image, JointState
        from std_msgs.msg import String

        self.on_image: Hook = unchanged
        """Takes the message that is about to leave; returns what does, None = nothing."""
        self.on_joints: Hook = unchanged
        self._image, self._joint_state, self._string = Image, JointState, String
        self._profile, self._out, self._on_measured = profile, out, on_measured
        self._arm = SimRobot(profile)
        base, self._wrist = profile.cameras
        publisher = node.create_publisher
        self._images = publisher(Image, resolve(base.topic), qos_profile_sensor_data)
        self._joints = publisher(JointState, resolve(profile.joints.topic), qos_profile_sensor_data)
        self._instructions = publisher(String, resolve(profile.instruction.topic), 500)
        node.create_subscription(
            JointState, resolve(profile.command.topic), self._on_command, qos_profile_sensor_data
        )
        self._pixels = noise(0)
        self._beats = (
            Beat(CAMERA_HZ, self._publish_image, 'soak_camera'),
            Beat(JOINTS_HZ, self._publish_joints, 'soak_joints'),
        )
        self.wrist_camera: NodeProcess | None = None
        self._num_cameras = 0

    def start(self) -> None:
        """Begin to publish."""
        self.start_wrist_camera()
        for beat in self._beats:
            beat.start()

    def start_wrist_camera(self) -> None:
        """Start the process of the second camera, also after it was killed."""
        self._num_cameras += 1
        self.wrist_camera = NodeProcess(
            {'topic': resolve(self._wrist.topic)},
            self._out / f'camera_{self._num_cameras}.log',
            'oxygen_ros.evaluation.soak_camera',
        )

    def stop(self) -> None:
        """End everything that publishes."""
        for beat in self._beats:
            beat.stop()
        if self.wrist_camera is not None:
            self.wrist_camera.kill()

    def instruct(self, text: str) -> None:
        self._instructions.publish(self._string(data=text))

    def _on_command(self, message: Any) -> None:
        self._arm.obey(read_command(message, self._profile.command))

    def _publish_image(self) -> None:
        message = self._image(height=HEIGHT, width=WIDTH, encoding='rgb8', step=3 * WIDTH)
        message.data = self._pixels
        message.header.stamp = ns_to_stamp(time.time_ns())
        message = self.on_image(message)
        if message is not None:
            self._images.publish(message)

    def _publish_joints(self) -> None:
        positions = self._arm.step(1 / JOINTS_HZ)
        self._on_measured([positions[name] for name in self._profile.command.names])
        message = self._joint_state(name=list(positions), position=list(positions.values()))
        message.header.stamp = ns_to_stamp(time.time_ns())
        message = self.on_joints(message)
        if message is not None:
            self._joints.publish(message)
