"""The simulated table as a robot on the ROS graph: pictures and joint states out, commands in.

Owns the robot's topics, its pace and its services; physics and truth are those of `world.py`. Knows
nothing of a policy: like any robot it is known to `oxygen` by a profile (config/tabletop.yaml) and
by nothing else. Run as `oxygen_tabletop`; the evaluation drives `TabletopRobot` itself.
"""

from __future__ import annotations

import array
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import rclpy
from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor
from rclpy.clock import Clock, ClockType
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from rosgraph_msgs.msg import Clock as ClockMessage
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import Float64MultiArray, String
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from oxygen_ros.conversions import ns_to_stamp
from oxygen_ros.sim.world import (
    CAMERAS,
    COLOURS,
    CONTROL_HZ,
    JOINTS,
    GraphicsError,
    TabletopWorld,
)

JOINTS_TOPIC = 'joint_states'
COMMAND_TOPIC = 'joint_commands'
INSTRUCTION_TOPIC = 'instruction'
IMAGE_TYPES = {'raw': Image, 'compressed': CompressedImage}
COMMAND_TYPES = {
    'forward_command': Float64MultiArray,
    'joint_state': JointState,
    'joint_trajectory': JointTrajectory,
}
JPEG_QUALITY = 95
NUM_SEEDS = 2**31

CONTROL_PERIOD_NS = 1_000_000_000 // CONTROL_HZ
TARGET_PERIOD_S = 0.02
"""How often the servos are told where a trajectory is by now."""
MAX_CATCH_UP_S = 0.2
"""After a longer stall the world has stood still meanwhile, rather than leap."""
STEPPED_START_NS = 1_000_000_000
"""Simulated time begins here: 0 would mean that there is no time yet."""
REPEAT_S = 0.1
"""A world that stands still says so: who joins late must hear where time and arm are."""


class CommandError(ValueError):
    """A command that the robot cannot follow."""


def camera_topic(camera: str, transport: str) -> str:
    """Return where a camera publishes, named as image_transport does."""
    return f'camera/{camera}/image_raw' + ('/compressed' if transport == 'compressed' else '')


def image_message(picture: np.ndarray, transport: str) -> Any:
    """Return uint8 (h, w, 3) RGB as an Image (rgb8) or, compressed, as a JPEG."""
    if transport == 'compressed':
        bgr = cv2.cvtColor(picture, cv2.COLOR_RGB2BGR)
        _, jpeg = cv2.imencode('.jpg', bgr, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
        # An array is copied in one go, bytes one by one.
        data = array.array('B', jpeg.tobytes())
        return CompressedImage(format='rgb8; jpeg compressed bgr8', data=data)
    height, width, _ = picture.shape
    data = array.array('B', picture.tobytes())
    return Image(height=height, width=width, encoding='rgb8', step=3 * width, data=data)


def command_rows(message: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return times (n,) [s] from now and joint positions (n, 4) [rad] of a command message.

    Raises:
        CommandError: not one finite position for each of the four joints.
    """
    if isinstance(message, JointTrajectory):
        order = _order(message.joint_names)
        times_s = [p.time_from_start.sec + p.time_from_start.nanosec / 1e9 for p in message.points]
        if not times_s or np.any(np.diff(times_s) <= 0):
            raise CommandError(f'expected points in order of time, got times {times_s}')
        rows = [_positions(point.positions, order) for point in message.points]
        return np.array(times_s), np.array(rows)
    if isinstance(message, JointState):
        values, order = message.position, _order(message.name)
    else:
        values, order = message.data, list(range(len(JOINTS)))
    return np.zeros(1), _positions(values, order)[np.newaxis]


def _order(names: Sequence[str]) -> list[int]:
    if sorted(names) != sorted(JOINTS):
        raise CommandError(f'expected the joints {list(JOINTS)}, got {list(names)}')
    return [list(names).index(joint) for joint in JOINTS]


def _positions(values: Sequence[float], order: list[int]) -> np.ndarray:
    found = np.array(values, np.float64)
    if found.shape != (len(JOINTS),) or not np.isfinite(found).all():
        raise CommandError(f'expected {len(JOINTS)} finite positions, got {list(values)}')
    return found[order]


@dataclass(frozen=True)
class Motion:
    """Where the joints should be over time; the last row stays in force."""

    began_s: float
    times_s: np.ndarray  # (n,) from `began_s`
    rows: np.ndarray  # (n, 4) [rad]

    def at(self, time_s: float) -> np.ndarray:
        """Return (4,) targets at a time of the world."""
        since_s = time_s - self.began_s
        return np.array([np.interp(since_s, self.times_s, column) for column in self.rows.T])


class TabletopRobot:
    """A world with topics: the cameras, the joints, and obedience to the newest command."""

    def __init__(
        self,
        node: Node,
        world: TabletopWorld,
        *,
        transport: str = 'raw',
        interface: str = 'forward_command',
    ) -> None:
        self.world = world
        self.command: np.ndarray | None = None
        """(4,) first row of the newest command [rad]; None before one, and after a reset."""
        self.braked = False
        """With the brakes on the arm stays where it is, whatever is commanded."""
        self._node = node
        self._transport = transport
        # Reliable publishers are heard by best-effort subscriptions as well.
        self._images = {
            camera: node.create_publisher(
                IMAGE_TYPES[transport], camera_topic(camera, transport), 5
            )
            for camera in CAMERAS
        }
        self._joints = node.create_publisher(JointState, JOINTS_TOPIC, 10)
        node.create_subscription(COMMAND_TYPES[interface], COMMAND_TOPIC, self._on_command, 1)
        self._motion = self._at_rest()

    def reset(self, seed: int) -> None:
        """Lay the table anew; the arm rests until it is commanded."""
        self.world.reset(seed)
        self.command, self._motion = None, self._at_rest()

    def is_heard(self, cameras: Sequence[str] = CAMERAS) -> bool:
        """Whether somebody has subscribed to the joint states and to each of these cameras."""
        publishers = [self._joints, *(self._images[camera] for camera in cameras)]
        return all(publisher.get_subscription_count() for publisher in publishers)

    def advance(self, duration_s: float) -> None:
        """Let time pass, the arm following its commands."""
        while duration_s > 1e-9:
            step_s = min(duration_s, TARGET_PERIOD_S)
            self.world.step(self._motion.at(self.world.time_s), step_s)
            duration_s -= step_s

    def publish_joints(self, stamp_ns: int) -> None:
        """Say where the joints are."""
        message = JointState(
            name=list(JOINTS),
            position=self.world.joint_positions().tolist(),
            velocity=self.world.joint_velocities().tolist(),
        )
        message.header.stamp = ns_to_stamp(stamp_ns)
        self._joints.publish(message)

    def publish_images(self, stamp_ns: int, cameras: Sequence[str] = CAMERAS) -> None:
        """Take a picture with each of these cameras, and publish it."""
        for camera in cameras:
            message = image_message(self.world.render(camera), self._transport)
            message.header.stamp = ns_to_stamp(stamp_ns)
            message.header.frame_id = camera
            self._images[camera].publish(message)

    def _on_command(self, message: Any) -> None:
        if self.braked:
            return
        try:
            times_s, rows = command_rows(message)
        except CommandError as error:
            self._node.get_logger().error(
                f'{COMMAND_TOPIC}: {error}; ignored', throttle_duration_sec=1.0
            )
            return
        now_s = self.world.time_s
        if times_s[0] > 0:  # a trajectory begins where the last one has got to
            times_s, rows = np.r_[0.0, times_s], np.vstack([self._motion.at(now_s), rows])
            self.command = rows[1]
        else:
            self.command = rows[0]
        self._motion = Motion(now_s, times_s, rows)

    def _at_rest(self) -> Motion:
        return Motion(self.world.time_s, np.zeros(1), self.world.joint_positions()[np.newaxis])


@dataclass(frozen=True)
class TableParameter:
    """One ROS parameter: its default, what it means, which values it may take."""

    name: str
    default: Any
    description: str
    choices: tuple[Any, ...] = ()
    """All of them; of numbers the least and the largest."""
    read_only: bool = True

    def descriptor(self) -> ParameterDescriptor:
        descriptor = ParameterDescriptor(description=self.description, read_only=self.read_only)
        if isinstance(self.default, str):
            descriptor.additional_constraints = f'one of: {", ".join(self.choices)}'
            return descriptor
        low, high = self.choices
        if isinstance(self.default, float):
            # An int where a double is declared ('rate: 50') is no mistake worth refusing.
            descriptor.dynamic_typing = True
            descriptor.floating_point_range = [FloatingPointRange(from_value=low, to_value=high)]
        descriptor.integer_range = [IntegerRange(from_value=int(low), to_value=int(high))]
        return descriptor


PARAMETERS = (
    TableParameter(
        'seed',
        0,
        'Layout of the blocks and pose of the arm. ~/reset lays out this one and adds 1.',
        (0, NUM_SEEDS - 1),
        read_only=False,
    ),
    TableParameter(
        'mode',
        'realtime',
        'realtime, or stepped: the world stands still but for calls of ~/step, and is the master '
        'of /clock.',
        ('realtime', 'stepped'),
    ),
    TableParameter(
        'transport', 'raw', 'Pictures as Image or as CompressedImage (JPEG).', tuple(IMAGE_TYPES)
    ),
    TableParameter(
        'command_interface',
        'forward_command',
        'What is obeyed on joint_commands: Float64MultiArray, JointState or JointTrajectory.',
        tuple(COMMAND_TYPES),
    ),
    TableParameter('camera_rate_hz', 10.0, 'Pictures of each camera per second.', (1.0, 100.0)),
    TableParameter('joint_rate_hz', 50.0, 'Joint states per second.', (1.0, 200.0)),
)


class TabletopNode(Node):
    """The robot in real time, or stepped by ~/step with a /clock of its own."""

    def __init__(self) -> None:
        """Build the world and begin.

        Raises:
            GraphicsError: no pictures can be rendered here.
            ValueError: a parameter that is not one of its choices.
        """
        super().__init__('tabletop')
        for parameter in PARAMETERS:
            self.declare_parameter(parameter.name, parameter.default, parameter.descriptor())
            value = self._value(parameter.name)
            if isinstance(value, str) and value not in parameter.choices:
                raise ValueError(
                    f'parameter {parameter.name!r}: expected one of {list(parameter.choices)}, '
                    f'got {value!r}'
                )
        self.robot = TabletopRobot(
            self,
            TabletopWorld(),
            transport=self._value('transport'),
            interface=self._value('command_interface'),
        )
        self._truth = {
            name: self.create_publisher(String, f'~/{name}', 10)
            for name in ('truth/narration', 'truth/memory', 'touched')
        }
        self._instruction = ''
        self.create_subscription(String, INSTRUCTION_TOPIC, self._on_instruction, 10)
        self.create_service(Trigger, '~/reset', self._on_reset)
        self._now_ns = STEPPED_START_NS
        self._stepped = self._value('mode') == 'stepped'
        self._reset()
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        if self._stepped:
            self._time = self.create_publisher(ClockMessage, '/clock', 10)
            self.create_service(Trigger, '~/step', self._on_step)
            self.create_timer(REPEAT_S, self._publish_standing, clock=steady)
            self._publish_all()
        else:
            self._lived_s = time.monotonic()
            joint_s = 1.0 / self._value('joint_rate_hz')
            self.create_timer(joint_s, self._on_joint_beat, clock=steady)
            camera_s = 1.0 / self._value('camera_rate_hz')
            self.create_timer(camera_s, self._on_camera_beat, clock=steady)

    def close(self) -> None:
        """Free what must not be left to the end of the interpreter."""
        self.robot.world.close()
        self.destroy_node()

    # --- real time ----------------------------------------------------------------------------

    def _on_joint_beat(self) -> None:
        passed_s = time.monotonic() - self._lived_s
        self._lived_s += passed_s
        self.robot.advance(min(passed_s, MAX_CATCH_UP_S))
        self.robot.publish_joints(self._stamp_ns())

    def _on_camera_beat(self) -> None:
        self.robot.publish_images(self._stamp_ns())
        self._publish_truth()

    # --- stepped ------------------------------------------------------------------------------

    def _on_step(self, _: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        """One control period passes, under the newest command."""
        self.robot.advance(1.0 / CONTROL_HZ)
        self._now_ns += CONTROL_PERIOD_NS
        self._publish_all()
        response.success, response.message = True, f'time {self._now_ns / 1e9:.1f} s'
        return response

    def _publish_standing(self) -> None:
        # The time first: what is stamped with a moment that has not come yet is not believed.
        self._time.publish(ClockMessage(clock=ns_to_stamp(self._now_ns)))
        self.robot.publish_joints(self._now_ns)

    def _publish_all(self) -> None:
        self._publish_standing()
        self.robot.publish_images(self._now_ns)
        self._publish_truth()

    # --- both ---------------------------------------------------------------------------------

    def _on_reset(self, _: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success, response.message = True, f'seed {self._reset()}'
        if self._stepped:
            self._publish_all()
        return response

    def _reset(self) -> int:
        seed = int(self._value('seed'))
        self.robot.reset(seed)
        self.set_parameters([rclpy.Parameter('seed', value=(seed + 1) % NUM_SEEDS)])
        return seed

    def _on_instruction(self, message: String) -> None:
        if message.data != self._instruction:
            self._instruction = message.data
            self.robot.world.clear_touches()

    def _publish_truth(self) -> None:
        world = self.robot.world
        try:
            narration = world.narration(self._instruction)
        except ValueError:  # nobody has named a block yet
            narration = ''
        touched = [colour for colour in COLOURS if world.touched(colour)]
        self._truth['truth/narration'].publish(String(data=narration))
        self._truth['truth/memory'].publish(String(data=world.memory()))
        self._truth['touched'].publish(String(data=', '.join(touched)))

    def _stamp_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)

    def _value(self, name: str) -> Any:
        return self.get_parameter(name).value


def main(args: list[str] | None = None) -> int:
    """Run the robot until SIGINT or SIGTERM (0); 1 without graphics, 2 for a bad parameter."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    try:
        node = TabletopNode()
        # Without a renderer there is no use in beginning.
        node.robot.world.render(CAMERAS[0])
    except GraphicsError as error:
        return _give_up(error, 1)
    except (ValueError, rclpy.exceptions.ParameterException) as error:
        return _give_up(error, 2)
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    node.get_logger().info(
        f'{", ".join(CAMERAS)} and {JOINTS_TOPIC} are published, {COMMAND_TOPIC} is obeyed'
    )
    while not stop.is_set():
        executor.spin_once(timeout_sec=0.1)
    executor.shutdown()
    node.close()
    rclpy.try_shutdown()
    return 0


def _give_up(error: Exception, code: int) -> int:
    print(f'oxygen_tabletop: {error}', file=sys.stderr)
    rclpy.try_shutdown()
    return code


if __name__ == '__main__':
    sys.exit(main())
