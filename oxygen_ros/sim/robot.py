"""A simulated robot on the ROS graph: pictures and joint states out, commands in.

Owns the robot's topics, its pace and its services, whatever world it lives in; physics and truth
are the world's. Knows nothing of a policy: like any robot it is known to `oxygen` by a profile and
by nothing else. `tabletop.py`, `aloha.py` and `libero.py` are such robots; the evaluation drives
them itself.
"""

from __future__ import annotations

import array
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

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
from std_msgs.msg import Float64MultiArray
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from oxygen_ros.conversions import ns_to_stamp
from oxygen_ros.sim.world import GraphicsError

IMAGE_TYPES = {'raw': Image, 'compressed': CompressedImage}
COMMAND_TYPES = {
    'forward_command': Float64MultiArray,
    'joint_state': JointState,
    'joint_trajectory': JointTrajectory,
}
JPEG_QUALITY = 95
NUM_SEEDS = 2**31

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


class World(Protocol):
    """What a robot needs of the world it lives in; used by one thread."""

    @property
    def CAMERAS(self) -> tuple[str, ...]: ...
    @property
    def JOINTS(self) -> tuple[str, ...]: ...
    @property
    def CONTROL_HZ(self) -> int: ...
    @property
    def time_s(self) -> float: ...
    def reset(self, seed: int) -> None: ...
    def step(self, targets: np.ndarray, duration_s: float) -> None: ...
    def joint_positions(self) -> np.ndarray: ...
    def joint_velocities(self) -> np.ndarray: ...  # (0,) where they are not known
    def render(self, camera: str) -> np.ndarray: ...
    def close(self) -> None: ...


WorldT = TypeVar('WorldT', bound=World)


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


def command_rows(message: Any, joints: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return times (n,) [s] from now and positions (n, len(joints)) of a command message.

    Raises:
        CommandError: not one finite position for each of the joints.
    """
    if isinstance(message, JointTrajectory):
        order = _order(message.joint_names, joints)
        times_s = [p.time_from_start.sec + p.time_from_start.nanosec / 1e9 for p in message.points]
        if not times_s or np.any(np.diff(times_s) <= 0):
            raise CommandError(f'expected points in order of time, got times {times_s}')
        rows = [_positions(point.positions, order) for point in message.points]
        return np.array(times_s), np.array(rows)
    if isinstance(message, JointState):
        values, order = message.position, _order(message.name, joints)
    else:
        values, order = message.data, list(range(len(joints)))
    return np.zeros(1), _positions(values, order)[np.newaxis]


def _order(names: Sequence[str], joints: Sequence[str]) -> list[int]:
    if sorted(names) != sorted(joints):
        raise CommandError(f'expected the joints {list(joints)}, got {list(names)}')
    return [list(names).index(joint) for joint in joints]


def _positions(values: Sequence[float], order: list[int]) -> np.ndarray:
    found = np.array(values, np.float64)
    if found.shape != (len(order),) or not np.isfinite(found).all():
        raise CommandError(f'expected {len(order)} finite positions, got {list(values)}')
    return found[order]


@dataclass(frozen=True)
class Motion:
    """Where the joints should be over time; the last row stays in force."""

    began_s: float
    times_s: np.ndarray  # (n,) from `began_s`
    rows: np.ndarray  # (n, num_joints)

    def at(self, time_s: float) -> np.ndarray:
        """Return (num_joints,) targets at a time of the world."""
        since_s = time_s - self.began_s
        return np.array([np.interp(since_s, self.times_s, column) for column in self.rows.T])


class SimulatedRobot(ABC, Generic[WorldT]):
    """A world with topics: the cameras, the joints, and obedience, of which there are kinds.

    A kind of robot says in `rest`, `obey` and `advance` what its commands mean over time.
    """

    CAMERA_TOPIC = 'camera/{}/image_raw'
    JOINTS_TOPIC = 'joint_states'
    COMMAND_TOPIC = 'joint_commands'
    COMMAND_QUANTITY = 'position'
    """As a profile calls what is commanded."""
    COMMAND_DEPTH = 1
    """So many commands may come while a picture is taken; of targets the newest is enough."""

    def __init__(
        self,
        node: Node,
        world: WorldT,
        *,
        transport: str = 'raw',
        interface: str = 'forward_command',
    ) -> None:
        self.world = world
        self.command: np.ndarray | None = None
        """(num_joints,) first row of the newest command; None before one, and after a reset."""
        self.braked = False
        """With the brakes on the arm stays where it is, whatever is commanded."""
        self._node = node
        self._transport = transport
        # Reliable publishers are heard by best-effort subscriptions as well.
        self._images = {
            camera: node.create_publisher(
                IMAGE_TYPES[transport], self.camera_topic(camera, transport), 5
            )
            for camera in world.CAMERAS
        }
        self._joints = node.create_publisher(JointState, self.JOINTS_TOPIC, 10)
        node.create_subscription(
            COMMAND_TYPES[interface], self.COMMAND_TOPIC, self._on_command, self.COMMAND_DEPTH
        )
        self.rest()

    @classmethod
    def camera_topic(cls, camera: str, transport: str) -> str:
        """Return where a camera publishes, named as image_transport does."""
        return cls.CAMERA_TOPIC.format(camera) + (
            '/compressed' if transport == 'compressed' else ''
        )

    def reset(self, seed: int) -> None:
        """Lay the world out anew; the arm rests until it is commanded."""
        self.world.reset(seed)
        self.command = None
        self.rest()

    @abstractmethod
    def rest(self) -> None:
        """Forget what was commanded; the arm stays."""

    @abstractmethod
    def obey(self, message: Any) -> np.ndarray:
        """Follow a command from now on; return its first row.

        Raises:
            CommandError: it cannot be followed.
        """

    @abstractmethod
    def advance(self, duration_s: float) -> None:
        """Let time pass, the arm following its commands."""

    def is_heard(self, cameras: Sequence[str] | None = None) -> bool:
        """Whether somebody has subscribed to the joint states and to each of these cameras."""
        cameras = self.world.CAMERAS if cameras is None else cameras
        publishers = [self._joints, *(self._images[camera] for camera in cameras)]
        return all(publisher.get_subscription_count() for publisher in publishers)

    def publish_joints(self, stamp_ns: int) -> None:
        """Say where the joints are."""
        message = JointState(
            name=list(self.world.JOINTS),
            position=self.world.joint_positions().tolist(),
            velocity=self.world.joint_velocities().tolist(),
        )
        message.header.stamp = ns_to_stamp(stamp_ns)
        self._joints.publish(message)

    def publish_images(self, stamp_ns: int, cameras: Sequence[str] | None = None) -> None:
        """Take a picture with each of these cameras (None = all), and publish it."""
        for camera in self.world.CAMERAS if cameras is None else cameras:
            message = image_message(self.world.render(camera), self._transport)
            message.header.stamp = ns_to_stamp(stamp_ns)
            message.header.frame_id = camera
            self._images[camera].publish(message)

    def _on_command(self, message: Any) -> None:
        if self.braked:
            return
        try:
            self.command = self.obey(message)
        except CommandError as error:
            self._node.get_logger().error(
                f'{self.COMMAND_TOPIC}: {error}; ignored', throttle_duration_sec=1.0
            )


class TargetRobot(SimulatedRobot[WorldT]):
    """A robot that is told where its joints should be; the newest command stays in force."""

    def rest(self) -> None:
        """Stay where the joints are."""
        rows = self.world.joint_positions()[np.newaxis]
        self._motion = Motion(self.world.time_s, np.zeros(1), rows)

    def obey(self, message: Any) -> np.ndarray:
        """Drive towards one target, or along a trajectory.

        Raises:
            CommandError: not one finite position for each joint.
        """
        times_s, rows = command_rows(message, self.world.JOINTS)
        first, now_s = rows[0], self.world.time_s
        if times_s[0] > 0:  # a trajectory begins where the last one has got to
            times_s, rows = np.r_[0.0, times_s], np.vstack([self._motion.at(now_s), rows])
        self._motion = Motion(now_s, times_s, rows)
        return np.array(first)

    def advance(self, duration_s: float) -> None:
        """Let time pass; the servos hear every TARGET_PERIOD_S where they should be."""
        while duration_s > 1e-9:
            step_s = min(duration_s, TARGET_PERIOD_S)
            self.world.step(self._motion.at(self.world.time_s), step_s)
            duration_s -= step_s


@dataclass(frozen=True)
class RobotParameter:
    """One ROS parameter: its default, what it means, which values it may take."""

    name: str
    default: Any
    description: str
    choices: tuple[Any, ...] = ()
    """All of them; of numbers the least and the largest; none for true or false."""
    read_only: bool = True

    def descriptor(self) -> ParameterDescriptor:
        descriptor = ParameterDescriptor(description=self.description, read_only=self.read_only)
        if isinstance(self.default, bool):
            return descriptor
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


def parameters(
    *,
    transport: str,
    command_interface: str,
    command_interfaces: tuple[str, ...] = tuple(COMMAND_TYPES),
    camera_rate_hz: float,
    seed: str,
) -> tuple[RobotParameter, ...]:
    """Return what every simulated robot can be told, with the defaults of one; `seed` describes."""
    return (
        RobotParameter(
            'seed',
            0,
            f'{seed} ~/reset lays out this one and adds 1.',
            (0, NUM_SEEDS - 1),
            read_only=False,
        ),
        RobotParameter(
            'mode',
            'realtime',
            'realtime, or stepped: the world stands still but for calls of ~/step, and is the '
            'master of /clock.',
            ('realtime', 'stepped'),
        ),
        RobotParameter(
            'transport',
            transport,
            'Pictures as Image or as CompressedImage (JPEG).',
            tuple(IMAGE_TYPES),
        ),
        RobotParameter(
            'command_interface',
            command_interface,
            'What is obeyed as a command: Float64MultiArray, JointState or JointTrajectory.',
            command_interfaces,
        ),
        RobotParameter(
            'camera_rate_hz', camera_rate_hz, 'Pictures of each camera per second.', (1.0, 100.0)
        ),
        RobotParameter('joint_rate_hz', 50.0, 'Joint states per second.', (1.0, 200.0)),
    )


class RobotNode(Node, Generic[WorldT]):
    """A robot in real time, or stepped by ~/step with a /clock of its own."""

    def __init__(self, name: str, parameters: Sequence[RobotParameter]) -> None:
        """Declare the parameters; whoever derives from it makes a world and calls `begin`.

        Raises:
            ValueError: a parameter that is not one of its choices.
        """
        super().__init__(name)
        for parameter in parameters:
            self.declare_parameter(parameter.name, parameter.default, parameter.descriptor())
            value = self.value(parameter.name)
            if isinstance(value, str) and value not in parameter.choices:
                raise ValueError(
                    f'parameter {parameter.name!r}: expected one of {list(parameter.choices)}, '
                    f'got {value!r}'
                )

    def begin(self, robot: type[SimulatedRobot[WorldT]], world: WorldT) -> None:
        """Put a robot into the world, and let time pass or wait for steps."""
        self.robot = robot(
            self,
            world,
            transport=self.value('transport'),
            interface=self.value('command_interface'),
        )
        self.create_service(Trigger, '~/reset', self._on_reset)
        self._stepped = self.value('mode') == 'stepped'
        self._control_ns = 1_000_000_000 // world.CONTROL_HZ
        self._camera_s = 1.0 / self.value('camera_rate_hz')
        self._joint_s = 1.0 / self.value('joint_rate_hz')
        self._now_ns = STEPPED_START_NS
        self._reset()
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        if self._stepped:
            self._time = self.create_publisher(ClockMessage, '/clock', 10)
            self.create_service(Trigger, '~/step', self._on_step)
            self.create_timer(REPEAT_S, self._publish_standing, clock=steady)
            self._publish_all()
        else:
            self._lived_s = time.monotonic()
            self.create_timer(self._joint_s, self._on_joint_beat, clock=steady)
            self.create_timer(self._camera_s, self._on_camera_beat, clock=steady)

    def publish_truth(self) -> None:
        """Say what a perfect observer knows, after the pictures; a robot may know nothing."""

    def close(self) -> None:
        """Free what must not be left to the end of the interpreter."""
        self.robot.world.close()
        self.destroy_node()

    def value(self, name: str) -> Any:
        """Return the value of a parameter."""
        return self.get_parameter(name).value

    # --- real time ----------------------------------------------------------------------------

    def _on_joint_beat(self) -> None:
        passed_s = time.monotonic() - self._lived_s
        self._lived_s += passed_s
        self.robot.advance(min(passed_s, MAX_CATCH_UP_S))
        self.robot.publish_joints(self._stamp_ns())

    def _on_camera_beat(self) -> None:
        for camera in self.robot.world.CAMERAS:
            self.robot.publish_images(self._stamp_ns(), [camera])
            # A slow renderer must not silence the joints, or nobody would believe them.
            if time.monotonic() - self._lived_s > self._joint_s:
                self._on_joint_beat()
        self.publish_truth()

    # --- stepped ------------------------------------------------------------------------------

    def _on_step(self, _: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        """One control period passes, under the newest command."""
        self.robot.advance(self._control_ns / 1e9)
        before_ns, self._now_ns = self._now_ns, self._now_ns + self._control_ns
        if self._pictures_until(self._now_ns) > self._pictures_until(before_ns):
            self._publish_all()
        else:
            self._publish_standing()
        response.success, response.message = True, f'time {self._now_ns / 1e9:.2f} s'
        return response

    def _pictures_until(self, now_ns: int) -> int:
        return int((now_ns - STEPPED_START_NS) / 1e9 / self._camera_s + 1e-6)

    def _publish_standing(self) -> None:
        # The time first: what is stamped with a moment that has not come yet is not believed.
        self._time.publish(ClockMessage(clock=ns_to_stamp(self._now_ns)))
        self.robot.publish_joints(self._now_ns)

    def _publish_all(self) -> None:
        self._publish_standing()
        self.robot.publish_images(self._now_ns)
        self.publish_truth()

    # --- both ---------------------------------------------------------------------------------

    def _on_reset(self, _: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success, response.message = True, f'seed {self._reset()}'
        if self._stepped:
            self._publish_all()
        return response

    def _reset(self) -> int:
        seed = int(self.value('seed'))
        self.robot.reset(seed)
        self.set_parameters([rclpy.Parameter('seed', value=(seed + 1) % NUM_SEEDS)])
        return seed

    def _stamp_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)


def run_robot(program: str, make_node: Callable[[], RobotNode[Any]], args: list[str] | None) -> int:
    """Run a robot until SIGINT or SIGTERM (0); 1 without graphics, 2 for a bad parameter."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    try:
        node = make_node()
        world = node.robot.world
        # Without a renderer there is no use in beginning.
        world.render(world.CAMERAS[0])
    except GraphicsError as error:
        return _give_up(program, error, 1)
    except (ValueError, rclpy.exceptions.ParameterException) as error:
        return _give_up(program, error, 2)
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    node.get_logger().info(
        f'{", ".join(world.CAMERAS)} and {node.robot.JOINTS_TOPIC} are published, '
        f'{node.robot.COMMAND_TOPIC} is obeyed'
    )
    while not stop.is_set():
        executor.spin_once(timeout_sec=0.1)
    executor.shutdown()
    node.close()
    rclpy.try_shutdown()
    return 0


def _give_up(program: str, error: Exception, code: int) -> int:
    print(f'{program}: {error}', file=sys.stderr)
    rclpy.try_shutdown()
    return code
