"""A simulated robot in a process of its own, as somebody on the graph sees it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import JointState
from std_srvs.srv import Trigger

from oxygen_ros.conversions import command_message, joint_positions, stamp_to_ns
from oxygen_ros.profile import RobotProfile

TIMEOUT_S = 120.0


def ros_arguments(**parameters: Any) -> list[str]:
    settings = [part for name, value in parameters.items() for part in ('-p', f'{name}:={value}')]
    return ['--ros-args', *settings]


def end(process: subprocess.Popen[str]) -> str:
    """Interrupt the robot as Ctrl-C does; return what it said last."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=TIMEOUT_S)[1]
    finally:
        process.kill()


class SeenRobot:
    def __init__(
        self,
        graph: Any,
        profile: RobotProfile,
        process: subprocess.Popen[str],
        *,
        name: str,
        image: type,
        command: type,
        truth: Mapping[str, type],
    ) -> None:
        """Listen to all that the profile names, and to the `truth` in the robot's own namespace."""
        self.graph, self.node, self.profile, self.process = graph, graph.node, profile, process
        self.heard: dict[str, list[Any]] = {}
        for camera in profile.cameras:
            self.hear(camera.slot, image, camera.topic)
        self.hear('joints', JointState, profile.joints.topic)
        self.hear('clock', Clock, '/clock')
        for key, kind in truth.items():
            self.hear(key, kind, f'{name}/{key}')
        self.hear('commands', command, profile.command.topic)
        self.commands = self.node.create_publisher(command, profile.command.topic, 10)
        self._clients = {
            service: self.node.create_client(Trigger, f'{name}/{service}')
            for service in ('reset', 'step')
        }
        self._first = [*(camera.slot for camera in profile.cameras), *truth]

    def hear(self, key: str, kind: type, topic: str) -> None:
        self.heard[key] = []
        self.node.create_subscription(kind, topic, self.heard[key].append, 100)

    def until(self, is_true: Callable[[], Any], what: str) -> None:
        def look() -> Any:
            assert self.process.poll() is None, 'the robot ended'
            return is_true()

        self.graph.spin_until(look, what, TIMEOUT_S)

    def begin(self) -> None:
        """Wait for the robot, and put it where it starts."""
        self.until(
            lambda: self.heard['joints'] and self.commands.get_subscription_count() > 1,
            'the robot',  # it listens to commands, and so does this test
        )
        self.call('reset')
        # Whoever joins late has missed what was sent before.
        while not all(self.heard[key] for key in self._first):
            self.step()

    def call(self, name: str) -> str:
        client = self._clients[name]
        self.until(client.service_is_ready, name)
        future = client.call_async(Trigger.Request())
        self.until(future.done, f'the answer of {name}')
        return str(future.result().message)

    def step(self) -> None:
        """A control step passes; afterwards the joint states of that moment are here."""
        time_ns = round(float(self.call('step').split()[1]) * 1e9)
        self.until(lambda: self.time_ns() >= time_ns, 'the joints after the step')

    def send(self, rows: Any) -> None:
        """Command rows, and wait until they were certainly delivered to whoever listens."""
        command = self.profile.command
        self.heard['commands'].clear()
        self.commands.publish(command_message(command, np.atleast_2d(rows), 1 / command.rate_hz))
        self.until(lambda: self.heard['commands'], 'the command')

    def time_ns(self) -> int:
        return self.stamps_ns('joints')[-1]

    def stamps_ns(self, key: str) -> list[int]:
        return [stamp_to_ns(message.header.stamp) for message in self.heard[key]]

    def measured(self) -> np.ndarray:
        """Positions as the node reads them: by name, in the order of the profile."""
        found = joint_positions(self.heard['joints'][-1], self.profile.joints)
        return np.array([found[name] for name in self.profile.joints.names])
