"""What the demo's node senses: a small simulated robot, and cameras that pan over photographs.

Owns the motion of the joints and the pictures, and publishes both at a steady rate, each from a
thread of its own. Knows nothing of the model, nor of how the node is doing. `demo.py` makes it;
where a recording is played, it supplies only what the recording lacks.
"""

from __future__ import annotations

import array
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import cv2
import numpy as np

from oxygen_ros.conversions import ns_to_stamp
from oxygen_ros.evaluation.measurements import resolve
from oxygen_ros.profile import CameraProfile, CommandProfile, RobotProfile

JOINTS_HZ = 100.0
CAMERAS_HZ = 30.0
PICTURE_WIDTH, PICTURE_HEIGHT = 320, 240
JPEG_QUALITY = 90
# A joint covers 63 % of the way to its target in this time, as a stiff position controller does.
TIME_CONSTANT_S = 0.08
# Photographs inside the scikit-image wheel; nothing is downloaded.
PHOTOGRAPHS = ('coffee', 'chelsea', 'astronaut', 'rocket')


class SimRobot:
    """Joints that follow the commands they receive; without one they stay where they are.

    Commands come from the executor's thread, `step` is called by the publishing one.
    """

    def __init__(self, profile: RobotProfile) -> None:
        command = profile.command
        self.names = profile.joints.names
        self._quantity = dict(zip(command.names, command.quantity, strict=True))
        self._limits = dict(
            zip(command.names, zip(command.lower, command.upper, strict=True), strict=True)
        )
        start = dict(zip(command.names, command.home or (), strict=False))
        self._positions = {
            name: self._within_limits(name, start.get(name, 0.0)) for name in self.names
        }
        self._targets = dict(self._positions)
        self._velocities = dict.fromkeys(self.names, 0.0)
        self._lock = threading.Lock()

    def obey(self, values: Mapping[str, float]) -> None:
        """Take a command: joint name -> position or velocity, whichever the profile declares."""
        with self._lock:
            for name, value in values.items():
                if name not in self._positions:
                    continue
                if self._quantity[name] == 'velocity':
                    self._velocities[name] = value
                else:
                    self._targets[name] = value

    def step(self, duration_s: float) -> dict[str, float]:
        """Move on by a time; return the positions [rad or m]."""
        share = 1.0 - math.exp(-duration_s / TIME_CONSTANT_S)
        with self._lock:
            for name, position in self._positions.items():
                if self._quantity.get(name) == 'velocity':
                    position += self._velocities[name] * duration_s
                else:
                    position += (self._targets[name] - position) * share
                self._positions[name] = self._within_limits(name, position)
            return dict(self._positions)

    def _within_limits(self, name: str, position: float) -> float:
        lower, upper = self._limits.get(name, (-math.inf, math.inf))
        return min(max(position, lower), upper)


def command_type(command: CommandProfile) -> Any:
    """Return the message class that the node publishes commands with."""
    from sensor_msgs.msg import JointState
    from std_msgs.msg import Float64MultiArray
    from trajectory_msgs.msg import JointTrajectory

    return {
        'joint_state': JointState,
        'joint_trajectory': JointTrajectory,
        'forward_command': Float64MultiArray,
    }[command.interface]


def read_command(message: Any, command: CommandProfile) -> dict[str, float]:
    """Return the values of a command message by joint; of a trajectory its first point."""
    if command.interface == 'joint_trajectory':
        if not message.points:
            return {}
        return dict(zip(message.joint_names, message.points[0].positions, strict=True))
    if command.interface == 'forward_command':
        return dict(zip(command.names, message.data, strict=True))
    return dict(zip(message.name, message.position or message.velocity, strict=True))


class PanningCamera:
    """A window that wanders over a photograph, smoothly and for ever."""

    def __init__(self, photograph: np.ndarray, phase: float = 0.0) -> None:
        """`photograph` is uint8 (h, w, 3) RGB, scaled up if it is smaller than the window."""
        height, width = photograph.shape[:2]
        # A tenth more than the window, so that there is somewhere to wander.
        scale = 1.1 * max(PICTURE_HEIGHT / height, PICTURE_WIDTH / width)
        if scale > 1.0:
            size = (math.ceil(width * scale), math.ceil(height * scale))
            photograph = cv2.resize(photograph, size)
        self._photograph = photograph
        self._phase = phase

    def picture(self, time_s: float) -> np.ndarray:
        """Return uint8 (PICTURE_HEIGHT, PICTURE_WIDTH, 3) RGB, a function of time alone."""
        height, width = self._photograph.shape[:2]
        # Two periods without a common measure: the path does not repeat during a demo.
        across = 0.5 + 0.5 * math.sin(2 * math.pi * time_s / 7.0 + self._phase)
        down = 0.5 + 0.5 * math.sin(2 * math.pi * time_s / 11.0 + 2 * self._phase)
        left = round(across * (width - PICTURE_WIDTH))
        top = round(down * (height - PICTURE_HEIGHT))
        window = self._photograph[top : top + PICTURE_HEIGHT, left : left + PICTURE_WIDTH]
        return np.ascontiguousarray(window)


def photograph(number: int) -> np.ndarray:
    """Return one of scikit-image's photographs, uint8 (h, w, 3) RGB."""
    from skimage import data

    return np.asarray(getattr(data, PHOTOGRAPHS[number % len(PHOTOGRAPHS)])())


class Beat:
    """Calls `act` at a steady rate from its own thread; late calls are skipped, not made up."""

    def __init__(self, hz: float, act: Callable[[], None], name: str) -> None:
        self._period_ns = round(1e9 / hz)
        self._act = act
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        due_ns = time.monotonic_ns()
        while not self._stopping.wait(max(0, due_ns - time.monotonic_ns()) / 1e9):
            self._act()
            missed = max(0, time.monotonic_ns() - due_ns) // self._period_ns
            due_ns += (missed + 1) * self._period_ns


class JointFeed:
    """Publishes the joint states of the robot at JOINTS_HZ and lets it obey the command topic."""

    def __init__(
        self,
        node: Any,
        profile: RobotProfile,
        stamp_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`stamp_ns` is the node's ROS time: the system clock, or that of a recording."""
        from rclpy.qos import qos_profile_sensor_data
        from sensor_msgs.msg import JointState

        self.robot = SimRobot(profile)
        self._command = profile.command
        self._stamp_ns = stamp_ns
        self._message_type = JointState
        self._publisher = node.create_publisher(
            JointState, resolve(profile.joints.topic), qos_profile_sensor_data
        )
        node.create_subscription(
            command_type(profile.command),
            resolve(profile.command.topic),
            self._on_command,
            qos_profile_sensor_data,
        )
        self._stepped_s = time.monotonic()
        self._beat = Beat(JOINTS_HZ, self._publish, 'sim_joints')
        self.start, self.stop = self._beat.start, self._beat.stop

    def _on_command(self, message: Any) -> None:
        self.robot.obey(read_command(message, self._command))

    def _publish(self) -> None:
        now_s = time.monotonic()
        positions = self.robot.step(now_s - self._stepped_s)
        self._stepped_s = now_s
        message = self._message_type(name=list(positions), position=list(positions.values()))
        message.header.stamp = ns_to_stamp(self._stamp_ns())
        self._publisher.publish(message)


class CameraFeed:
    """Publishes every camera of a profile at CAMERAS_HZ, a photograph each."""

    def __init__(self, node: Any, cameras: tuple[CameraProfile, ...]) -> None:
        from rclpy.qos import qos_profile_sensor_data
        from sensor_msgs.msg import CompressedImage, Image

        self._message_types = {'raw': Image, 'compressed': CompressedImage}
        self._feeds = [
            (
                camera,
                PanningCamera(photograph(number), phase=float(number)),
                node.create_publisher(
                    self._message_types[camera.transport],
                    resolve(camera.topic),
                    qos_profile_sensor_data,
                ),
            )
            for number, camera in enumerate(cameras)
        ]
        self._beat = Beat(CAMERAS_HZ, self._publish, 'sim_cameras')
        self.start, self.stop = self._beat.start, self._beat.stop

    def _publish(self) -> None:
        stamp_ns, now_s = time.time_ns(), time.monotonic()
        for camera, panning, publisher in self._feeds:
            message = self._message_types[camera.transport]()
            message.header.stamp = ns_to_stamp(stamp_ns)
            message.header.frame_id = camera.slot
            fill_picture(message, panning.picture(now_s), camera)
            publisher.publish(message)


def fill_picture(message: Any, picture: np.ndarray, camera: CameraProfile) -> None:
    """Write uint8 (h, w, 3) RGB into an Image (rgb8) or a CompressedImage (JPEG)."""
    if camera.transport == 'compressed':
        parameters = [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]
        _, jpeg = cv2.imencode('.jpg', cv2.cvtColor(picture, cv2.COLOR_RGB2BGR), parameters)
        message.format = 'rgb8; jpeg compressed bgr8'
        data = jpeg.tobytes()
    else:
        message.height, message.width = picture.shape[:2]
        message.encoding = 'rgb8'
        message.step = 3 * picture.shape[1]
        data = picture.tobytes()
    # An array is copied in one go, bytes one by one.
    message.data = array.array('B', data)
