"""Inputs: what the node hears of cameras, joints and whoever instructs it.

Owns these subscriptions and the ObservationBuffer behind them, from configure to cleanup. Callbacks
run in the node's executor, store the newest message and do nothing else; the frame thread takes
snapshots. Knows neither engine nor commands: what a new instruction or another time makes obsolete
is thrown away by whoever planned it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rclpy.clock import JumpThreshold
from rclpy.duration import Duration
from rclpy.node import Node
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String

from oxygen_ros import conversions
from oxygen_ros.guard import Guard
from oxygen_ros.observation import NotReady, Observation, ObservationBuffer
from oxygen_ros.profile import CameraProfile, RobotProfile
from oxygen_ros.qos import QosWatch, sensor

MAX_INSTRUCTION_CHARS = 1000
FORWARD_JUMP_S = 2.0
"""A clock that leaps further ahead than this was seeked: what was seen before is another scene."""


class Inputs:
    def __init__(
        self,
        node: Node,
        profile: RobotProfile,
        *,
        control_ns: Callable[[], int],
        ros_ns: Callable[[], int],
        forget_plan: Callable[..., None],
    ) -> None:
        """Hear nothing yet.

        Args:
            control_ns: the control clock.
            ros_ns: the node's clock.
            forget_plan: throws away what was planned up to now, for the reason given, or up to
                the frame whose number comes second.
        """
        self._node, self._profile = node, profile
        self._control_ns, self._ros_ns, self._forget_plan = control_ns, ros_ns, forget_plan
        self.subscriptions: list[Any] = []
        """Those of the cameras, then the joints, both in the order of the buffer's status."""
        self._jump_handle: Any = None
        self.buffer = ObservationBuffer(
            profile.cameras,
            profile.joints,
            conversions.decode_image,
            feed_back=profile.memory.feed_back,
            instruction_max_age_s=profile.instruction.max_age_s,
        )

    def subscribe(self, qos: QosWatch, guard: Guard) -> None:
        """Begin to listen."""
        node, joints = self._node, self._profile.joints
        create = functools.partial(qos.create_subscription, node.create_subscription)
        for camera in self._profile.cameras:
            message_type = CompressedImage if camera.transport == 'compressed' else Image
            on_image = functools.partial(guard(self._on_image), camera)
            self.subscriptions.append(
                create(message_type, camera.topic, on_image, sensor(camera.deadline_s))
            )
        self.subscriptions.append(
            create(JointState, joints.topic, guard(self._on_joints), sensor(joints.deadline_s))
        )
        self.subscriptions += qos.create_latched_too(
            node.create_subscription,
            String,
            self._profile.instruction.topic,
            guard(self._on_instruction),
        )
        jump = JumpThreshold(
            min_forward=Duration(seconds=FORWARD_JUMP_S),
            min_backward=Duration(nanoseconds=-1),
            on_clock_change=False,
        )
        self._jump_handle = node.get_clock().create_jump_callback(
            jump, post_callback=self._on_clock_jump
        )

    def close(self) -> None:
        """Hear nothing more."""
        if self._jump_handle is not None:
            self._jump_handle.unregister()
        for subscription in self.subscriptions:
            self._node.destroy_subscription(subscription)

    # --- executor thread ----------------------------------------------------------------------

    def instruct(self, text: str) -> None:
        """Take a new instruction; what was planned for the old one is thrown away.

        One that cannot be used counts as none: the robot holds rather than carry on with what its
        operator no longer wants.
        """
        if len(text) > MAX_INSTRUCTION_CHARS:
            self.buffer.count_drop('instruction_too_long')
            self._node.get_logger().error(
                f'{self._profile.instruction.topic}: expected at most {MAX_INSTRUCTION_CHARS} '
                f'characters, got {len(text)}; holding without an instruction'
            )
            text = ''
        if self.buffer.set_instruction(text):
            self._forget_plan('instruction')
            self._node.get_logger().info(f'instruction: {text.strip()!r}')

    def _on_instruction(self, message: String) -> None:
        self.instruct(message.data)

    def _on_image(self, camera: CameraProfile, message: Any) -> None:
        conversions.take_image(self.buffer, message, camera, self._control_ns(), self._ros_ns())

    def _on_joints(self, message: JointState) -> None:
        conversions.take_joints(
            self.buffer, message, self._profile.joints, self._control_ns(), self._ros_ns()
        )

    def _on_clock_jump(self, jump: Any) -> None:
        """What was seen and planned belongs to another time, e.g. the end of a bag that loops."""
        self.buffer.clear()
        self._forget_plan('clock_jump')
        seconds = jump.delta.nanoseconds / 1e9
        self._node.get_logger().info(f'the clock jumped by {seconds:.3f} s')

    # --- frame thread -------------------------------------------------------------------------

    def snapshot(self, frame: int) -> Observation | NotReady:
        """Return what the frame of this number sees, or what is missing."""
        topic, limit_s = self._profile.instruction.topic, self._profile.instruction.max_age_s
        if self.buffer.expire_instruction(self._control_ns()):
            self._forget_plan('instruction_stale', frame)
            self._node.get_logger().warning(
                f'{topic}: nothing for {limit_s:g} s; no instruction any more'
            )
        observation = self.buffer.snapshot(frame, self._control_ns())
        if isinstance(observation, Observation) and not observation.instruction:
            when = f'for {limit_s:g} s' if limit_s else 'yet'
            return NotReady((f'no instruction on {topic} {when}',))
        return observation
