"""Stage: everything around the node in a demo: our own ROS graph, the feeds, the measurements.

Owns what is published to the node and when it starts and stops. Knows nothing of how the node is
started and of what is shown; `demo.py` sets it up.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from oxygen_ros.evaluation.bag_player import DEFAULT_CLOCK_HZ, BagPlayer
from oxygen_ros.evaluation.bag_profile import RecordedRobot
from oxygen_ros.evaluation.dashboard import Setting
from oxygen_ros.evaluation.measurements import Measurements, resolve
from oxygen_ros.evaluation.recording import Recording
from oxygen_ros.evaluation.sim_robot import CameraFeed, JointFeed, command_type
from oxygen_ros.profile import RobotProfile


@dataclass(frozen=True)
class Plan:
    """Everything that is known before the node starts."""

    profile: RobotProfile
    profile_argument: str  # what the node is told
    recording: Recording | None
    robot: RecordedRobot | None  # None without a recording
    setting: Setting


def isolate_graph() -> None:
    """Keep to this machine, and to a DDS domain of our own unless one is set."""
    if not os.environ.get('ROS_DOMAIN_ID'):
        os.environ['ROS_DOMAIN_ID'] = str(_free_domain())
    os.environ.setdefault('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')


def _free_domain() -> int:
    """Return a DDS domain that nobody on this machine seems to use.

    Its first participant receives on UDP port 7400 + 250 * domain + 10 (DDSI-RTPS 9.6.1.1).
    """
    domains = random.sample(range(1, 101), 100)
    for domain in domains:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind(('', 7400 + 250 * domain + 10))
            except OSError:
                continue
            return domain
    return domains[0]


@contextmanager
def graph() -> Iterator[tuple[Any, Callable[[], None]]]:
    """Our own ROS node, and a function that lets its callbacks run in a thread."""
    import rclpy
    from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
    from rclpy.logging import LoggingSeverity
    from rclpy.signals import SignalHandlerOptions

    # Python's own handler: rclpy's would shut the graph down before the node has ended.
    rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
    node = rclpy.create_node('oxygen_demo')
    # The node hears latched and volatile instructions with two subscriptions; of each publisher
    # one cannot match, and rclpy would warn of it.
    node.get_logger().set_level(LoggingSeverity.ERROR)
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    stopping = threading.Event()

    def spin() -> None:
        try:
            while not stopping.is_set():
                executor.spin_once(timeout_sec=0.1)
        except ExternalShutdownException:
            return

    thread = threading.Thread(target=spin, name='demo_executor', daemon=True)
    try:
        yield node, thread.start
    finally:
        stopping.set()
        if thread.ident is not None:
            thread.join()
        executor.shutdown()
        node.destroy_node()
        rclpy.try_shutdown()


class Stage:
    """What surrounds the node: feeds, measurements, and the one who changes the instruction."""

    def __init__(self, node: Any, plan: Plan, rate: float) -> None:
        from rclpy.qos import DurabilityPolicy, QoSProfile
        from std_msgs.msg import String

        profile = plan.profile
        self.seen = Measurements(node, profile, command_type(profile.command))
        self.player: BagPlayer | None = None
        self.cameras: CameraFeed | None = None
        if plan.recording is not None and plan.robot is not None:
            self.player = BagPlayer(
                node,
                plan.recording,
                {topic: topic for topic in plan.robot.topics},
                rate=rate,
                clock_hz=DEFAULT_CLOCK_HZ,
                # Going back would end every text and chunk, in a short recording all the time.
                loop='onward',
            )
        else:
            self.cameras = CameraFeed(node, profile.cameras)
        self.joints: JointFeed | None = None
        if plan.robot is None or not plan.robot.has_joints:
            self.joints = JointFeed(node, profile, self._stamp_ns)
        self._instruction: Any = None
        if plan.robot is None or not plan.robot.has_instruction:
            latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
            topic = resolve(profile.instruction.topic)
            self._instruction = node.create_publisher(String, topic, latched)
        self._message = String
        self._feeds = [feed for feed in (self.player, self.cameras, self.joints) if feed]

    def start(self) -> None:
        for feed in self._feeds:
            feed.start()

    def stop(self) -> None:
        for feed in self._feeds:
            feed.stop()

    def instruct(self, text: str) -> None:
        """Give another instruction, unless the recording has its own."""
        if self._instruction is not None:
            self._instruction.publish(self._message(data=text))

    def _stamp_ns(self) -> int:
        return time.time_ns() if self.player is None else self.player.now_ns
