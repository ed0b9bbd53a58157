"""Stage: everything around the node in a demo: our own ROS graph, the feeds, the measurements.

Owns what is published to the node and when it starts and stops. Knows nothing of how the node is
started and of what is shown; `demo.py` sets it up. The simulated table is in `tabletop_stage.py`.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oxygen_ros.evaluation.bag_player import DEFAULT_CLOCK_HZ, BagPlayer
from oxygen_ros.evaluation.bag_profile import RecordedRobot
from oxygen_ros.evaluation.measurements import Measurements, resolve
from oxygen_ros.evaluation.recording import Recording
from oxygen_ros.evaluation.sim_robot import CameraFeed, JointFeed, command_type
from oxygen_ros.evaluation.table_score import TableScore
from oxygen_ros.profile import RobotProfile

SECOND_INSTRUCTION = 'put the blue cup on the plate'


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


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
    """What surrounds the node: feeds, measurements, and the one who changes the instruction.

    Worlds differ in what they derive from this.
    """

    score: TableScore | None = None
    """Of worlds that know what is true."""

    def __init__(self, node: Any, profile: RobotProfile, *, has_operator: bool = True) -> None:
        """Listen to the node; without an operator the instruction comes from elsewhere."""
        from rclpy.qos import DurabilityPolicy, QoSProfile
        from std_msgs.msg import String

        self.seen = Measurements(node, profile, command_type(profile.command))
        self._message = String
        self._instruction: Any = None
        if has_operator:
            latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
            topic = resolve(profile.instruction.topic)
            self._instruction = node.create_publisher(String, topic, latched)
        self._changed = False
        self._feeds: list[Any] = []
        self._started: list[Any] = []

    # --- in the order in which they are called

    def set_up(self) -> None:
        """Make what has to be there before the node. Raises DemoError."""

    @property
    def is_heard(self) -> bool:
        """Whether the node has got so far that the feeds may start."""
        return True

    def start(self) -> None:
        """Start the feeds."""
        for feed in self._feeds:
            feed.start()
            self._started.append(feed)

    def begin(self) -> None:
        """Measure from now on."""
        self.seen.begin()

    def operate(self, seconds: float) -> None:
        """Do what the operator does at this moment of a run of so many seconds."""
        if not self._changed and self.seen.elapsed_s >= seconds / 2:
            self.instruct(SECOND_INSTRUCTION)
            self._changed = True

    def instruct(self, text: str) -> None:
        """Give another instruction, if that is up to us."""
        if self._instruction is not None:
            self._instruction.publish(self._message(data=text))

    @property
    def fault(self) -> str | None:
        """What has gone wrong, if anything has; the run ends with it."""
        return None

    def stop(self) -> None:
        """Stop the feeds."""
        for feed in self._started:
            feed.stop()

    def missing(self) -> list[str]:
        """Say what this world promises and did not happen."""
        return []

    def save(self, folder: Path) -> list[Path]:
        """Write what there is to look at afterwards, besides the plot; return the files."""
        return []


class PhotographStage(Stage):
    """Photographs that the cameras pan over, and a simulated robot that sees nothing."""

    def __init__(self, node: Any, profile: RobotProfile) -> None:
        super().__init__(node, profile)
        self._feeds = [CameraFeed(node, profile.cameras), JointFeed(node, profile)]


class RecordingStage(Stage):
    """A recording, and a simulated robot where it has no joint states."""

    def __init__(
        self, node: Any, robot: RecordedRobot, recording: Recording, *, rate: float
    ) -> None:
        super().__init__(node, robot.profile, has_operator=not robot.has_instruction)
        self._player = BagPlayer(
            node,
            recording,
            {topic: topic for topic in robot.topics},
            rate=rate,
            clock_hz=DEFAULT_CLOCK_HZ,
            # Going back would end every text and chunk, in a short recording all the time.
            loop='onward',
        )
        self._feeds = [self._player]
        if not robot.has_joints:
            self._feeds.append(JointFeed(node, robot.profile, lambda: self._player.now_ns))

    @property
    def is_heard(self) -> bool:
        """A recording may be shorter than the loading of a model."""
        return not self._player.wait_for_subscribers(0.0)

    @property
    def fault(self) -> str | None:
        error = self._player.error
        return None if error is None else str(error)
