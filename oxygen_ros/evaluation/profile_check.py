"""profile_check: listens to a robot for a few seconds and says what its profile gets wrong.

Owns the listening: subscribes as the node does, to the same topics with the same QoS, and publishes
nothing. Knows no comparison; those are in `profile_findings.py`. Started by hand, before the node:

    ros2 run oxygen_ros profile_check PROFILE [--checkpoint DIR] [--openpi-config NAME]
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, qos_profile_sensor_data
from rclpy.utilities import remove_ros_args
from sensor_msgs.msg import CompressedImage, Image, JointState

from oxygen_ros import conversions
from oxygen_ros.conversions import ConversionError
from oxygen_ros.evaluation.profile_findings import (
    Endpoint,
    Finding,
    Graph,
    Live,
    checkpoint_findings,
    live_findings,
    openpi_findings,
    profile_findings,
)
from oxygen_ros.observation import ObservationBuffer
from oxygen_ros.profile import CameraProfile, ProfileError, RobotProfile, load_profile, share_folder

DECODED_PICTURES = 5
"""Pictures of each camera that are decoded as a whole."""


class Listener(Node):
    """Stores what arrives, as the node would."""

    def __init__(self, profile: RobotProfile) -> None:
        """Subscribe to cameras and joints."""
        super().__init__('oxygen_profile_check')
        self.profile = profile
        self.buffer = ObservationBuffer(profile.cameras, profile.joints, conversions.decode_image)
        self._joint_names: dict[str, None] = {}
        self._decoded: Counter[str] = Counter()
        for camera in profile.cameras:
            self.create_subscription(
                CompressedImage if camera.transport == 'compressed' else Image,
                camera.topic,
                functools.partial(self._on_image, camera),
                qos_profile_sensor_data,
            )
        self.create_subscription(
            JointState, profile.joints.topic, self._on_joints, qos_profile_sensor_data
        )

    def _on_image(self, camera: CameraProfile, message: Any) -> None:
        try:
            conversions.check_image(message, camera)
            # A damaged picture shows only when it is decoded; all would cost us messages.
            if self._decoded[camera.slot] < DECODED_PICTURES:
                self._decoded[camera.slot] += 1
                conversions.decode_image(message, camera)
        except ConversionError as error:
            self.buffer.count_drop(error.reason, camera.slot, str(error))
            return
        stamp_ns = conversions.stamp_to_ns(message.header.stamp)
        self.buffer.put_image(camera.slot, message, stamp_ns, time.monotonic_ns(), self._ros_ns())

    def _on_joints(self, message: Any) -> None:
        self._joint_names.update(dict.fromkeys(message.name))
        conversions.take_joints(
            self.buffer, message, self.profile.joints, time.monotonic_ns(), self._ros_ns()
        )

    def _ros_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)

    def live(self) -> Live:
        """Return what was seen until now."""
        now_ns, profile = time.monotonic_ns(), self.profile
        topics = [camera.topic for camera in profile.cameras]
        topics += [profile.joints.topic, profile.instruction.topic, profile.command.topic]
        return Live(
            graph=self._graph(),
            resolved={topic: self.resolve_topic_name(topic) for topic in topics},
            status={status.name: status for status in self.buffer.status(now_ns)},
            joint_names=tuple(self._joint_names),
            positions=self.buffer.positions(now_ns),
        )

    def _graph(self) -> Graph:
        names = [name for name, _ in self.get_topic_names_and_types()]
        return Graph(
            {name: self._endpoints(self.get_publishers_info_by_topic(name)) for name in names},
            {name: self._endpoints(self.get_subscriptions_info_by_topic(name)) for name in names},
        )

    def _endpoints(self, infos: list[Any]) -> tuple[Endpoint, ...]:
        return tuple(
            Endpoint(
                f'{info.node_namespace.rstrip("/")}/{info.node_name}',
                info.topic_type,
                info.qos_profile.durability == DurabilityPolicy.TRANSIENT_LOCAL,
            )
            for info in infos
            if info.node_name != self.get_name()
        )


def listen(profile: RobotProfile, seconds: float) -> Live:
    """Hear what the robot publishes for so long."""
    node = Listener(profile)
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        executor.spin_once(timeout_sec=0.05)
    live = node.live()
    executor.shutdown()
    node.destroy_node()
    return live


def report(findings: list[Finding]) -> int:
    """Print them, problems last; return the exit code."""
    order = ('ok', 'note', 'problem')
    for finding in sorted(findings, key=lambda finding: order.index(finding.kind)):
        print(f'{finding.kind:8}{finding.text}')
    problems = sum(finding.kind == 'problem' for finding in findings)
    print(f'{problems} problems' if problems else 'no problems')
    return 1 if problems else 0


def main(args: list[str] | None = None) -> int:
    """Check and report: 0 without problems, 1 with, 2 if it was called wrongly."""
    arguments = sys.argv if args is None else ['profile_check', *args]
    parser = _parser()
    options = parser.parse_args(remove_ros_args(arguments)[1:])
    if options.openpi_config and not options.checkpoint:
        parser.error('--openpi-config: expected --checkpoint DIR with it')
    try:
        profile = load_profile(options.profile, share_folder() / 'config')
    except ProfileError as error:
        return report([Finding('problem', str(error))])
    findings = profile_findings(profile)
    positions: Mapping[str, float] = {}
    if options.seconds > 0:
        rclpy.init(args=arguments)
        live = listen(profile, options.seconds)
        rclpy.try_shutdown()
        findings += live_findings(profile, live)
        positions = live.positions
    if options.openpi_config:
        from oxygen_ros.engine.factory import EngineOptions

        chosen = EngineOptions(options.checkpoint, options.tokenizer, options.openpi_config)
        findings += openpi_findings(profile, chosen, positions)
    elif options.checkpoint:
        findings += checkpoint_findings(profile, options.checkpoint, options.tokenizer, positions)
    return report(findings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='profile_check', description='Compare a profile with live topics and a checkpoint.'
    )
    parser.add_argument('profile', help='a name in config/ or the path of a file')
    parser.add_argument('--checkpoint', default='', help='directory or safetensors file')
    parser.add_argument(
        '--openpi-config', default='', metavar='NAME', help='as the node parameter openpi_config'
    )
    parser.add_argument('--tokenizer', default='', help='if it is not beside the weights')
    parser.add_argument(
        '--seconds', type=float, default=5.0, help='how long to listen (default 5); 0: not at all'
    )
    return parser


if __name__ == '__main__':
    sys.exit(main())
