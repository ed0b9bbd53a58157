"""A robot for tests: cameras, joints and an operator on a real graph, and the node as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
JOINTS = tuple(f'joint_{i}' for i in range(1, 7))
TIMEOUT_S = 180.0
END_TIMEOUT_S = 20.0


class NodeProcess:
    """The node under test, started as `ros2 run` starts it; its log in a file."""

    def __init__(
        self,
        folder: Path,
        parameters: dict[str, Any],
        remaps: tuple[str, ...] = (),
        module: str = 'oxygen_ros.node',
    ):
        self.log_path = folder / f'oxygen_{len(list(folder.glob("oxygen_*")))}.log'
        arguments = [f'-p{name}:={value}' for name, value in parameters.items()]
        flat = [part for argument in arguments for part in (argument[:2], argument[2:])]
        flat += [part for remap in remaps for part in ('-r', remap)]
        with self.log_path.open('wb') as log:
            self.process = subprocess.Popen(
                [sys.executable, '-m', module, '--ros-args', *flat],
                cwd=ROOT,
                env={**os.environ, 'PYTHONUNBUFFERED': '1'},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors='replace')

    def wait_for_log(self, text: str) -> None:
        limit = time.monotonic() + TIMEOUT_S
        while text not in self.log:
            assert self.process.poll() is None, f'the node ended:\n{self.log}'
            assert time.monotonic() < limit, f'no {text!r} in the log:\n{self.log}'
            time.sleep(0.02)  # polling a file, no evidence

    def interrupt(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f'the node did not end:\n{self.log}')

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def ask_to_end(self) -> None:
        """As Ctrl-C does: whoever is killed leaves its shared memory to the system for good."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def end(self) -> None:
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()


class Robot:
    """Publishes what the dummy profile wants, hears what the node says."""

    def __init__(self, graph, folder: Path, namespace: str = ''):
        from diagnostic_msgs.msg import DiagnosticArray
        from rclpy.qos import qos_profile_sensor_data
        from sensor_msgs.msg import Image, JointState
        from std_msgs.msg import String

        from oxygen_ros.msg import ActionChunk, EngineStats, Note, Text

        self.graph, self.node, self.folder, self.namespace = graph, graph.node, folder, namespace
        self.processes: list[NodeProcess] = []
        self.heard: dict[str, list[Any]] = {}
        self.positions: dict[str, float] = dict.fromkeys(JOINTS, 0.25)
        self.image_stamps: set[int] = set()
        self.cameras = {'base': True, 'wrist': True}
        self.joints_on = True
        self._round = 0
        self._pixels = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
        publisher = self.node.create_publisher
        self.image_publishers = {
            name: publisher(Image, self.name(f'camera/{name}/image_raw'), qos_profile_sensor_data)
            for name in self.cameras
        }
        self.joint_publisher = publisher(
            JointState, self.name('joint_states'), qos_profile_sensor_data
        )
        self.instruction_publisher = publisher(String, self.name('instruction'), 10)
        for topic, kind in (
            ('oxygen/text', Text),
            ('oxygen/memory', Note),
            ('oxygen/actions', ActionChunk),
            ('oxygen/stats', EngineStats),
            ('joint_command', JointState),
        ):
            self.hear(self.name(topic), kind, topic.rpartition('/')[2])
        self.hear('/diagnostics', DiagnosticArray, 'diagnostics')

    def name(self, topic: str) -> str:
        return f'{self.namespace}/{topic}'

    def hear(self, topic: str, kind: type, key: str, qos: Any = 50) -> None:
        self.heard[key] = []
        self.node.create_subscription(kind, topic, self.heard[key].append, qos)

    def start(self, module: str = 'oxygen_ros.node', **parameters: Any) -> NodeProcess:
        remaps = (f'__ns:={self.namespace}',) if self.namespace else ()
        process = NodeProcess(self.folder, {'profile': 'dummy', **parameters}, remaps, module)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.ask_to_end()
        for process in self.processes:
            process.end()

    # --- what the robot does ------------------------------------------------------------------

    def stamp(self) -> Any:
        return self.node.get_clock().now().to_msg()

    def image(self, **changes: Any) -> Any:
        from sensor_msgs.msg import Image

        height, width, _ = self._pixels.shape
        fields = {
            'height': height,
            'width': width,
            'encoding': 'rgb8',
            'step': 3 * width,
            'data': self._pixels.tobytes(),
            **changes,
        }
        message = Image(**fields)
        message.header.stamp = self.stamp()
        return message

    def grow_pictures(self, factor: int) -> None:
        """Have cameras deliver so many times the rows and columns from now on."""
        self._pixels = self._pixels.repeat(factor, axis=0).repeat(factor, axis=1)

    def joints(self) -> Any:
        from sensor_msgs.msg import JointState

        names = list(self.positions)
        self._round += 1
        np.random.default_rng(self._round).shuffle(names)  # no order is promised
        message = JointState(
            name=[*names, 'wheel'], position=[*map(self.positions.get, names), 9.0]
        )
        message.header.stamp = self.stamp()
        return message

    def publish(self) -> None:
        for name, on in self.cameras.items():
            if on:
                image = self.image()
                self.image_stamps.add(nanoseconds(image.header.stamp))
                self.image_publishers[name].publish(image)
        if self.joints_on:
            self.joint_publisher.publish(self.joints())

    def instruct(self, text: str) -> None:
        from std_msgs.msg import String

        self.instruction_publisher.publish(String(data=text))

    # --- what the test asks -------------------------------------------------------------------

    def run_until(self, is_true: Callable[[], Any], what: str) -> None:
        """Publish at some 30 Hz until the condition holds."""
        next_s = 0.0

        def step() -> Any:
            nonlocal next_s
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + 0.03
                self.publish()
            return is_true()

        try:
            self.graph.spin_until(step, what, TIMEOUT_S)
        except pytest.fail.Exception:
            logs = '\n'.join(process.log for process in self.processes)
            pytest.fail(f'waited {TIMEOUT_S:g} s for {what}; log of the node:\n{logs}')

    def run_for(self, count: int, key: str) -> list[Any]:
        """Run until `count` more messages were heard, and return those."""
        before = len(self.heard[key])
        self.run_until(lambda: len(self.heard[key]) >= before + count, f'{count} x {key}')
        return self.heard[key][before:]

    def run_until_active(self) -> None:
        self.run_until(lambda: self.heard['actions'], 'the first chunk')

    def status(self, name: str) -> Any:
        """The newest diagnostic status of a part, None before the first."""
        full = f'{self.namespace}/oxygen: {name}'
        for message in reversed(self.heard['diagnostics']):
            for status in message.status:
                if status.name == full:
                    return status
        return None

    def run_until_status(self, name: str, text: str) -> Any:
        def found() -> bool:
            status = self.status(name)
            return status is not None and text in status.message

        self.run_until(found, f'{text!r} in the diagnostics of {name}')
        return self.status(name)

    def drops(self) -> dict[str, int]:
        stats = self.heard['stats'][-1]
        return dict(zip(stats.drop_reasons, stats.drop_counts, strict=True))


def nanoseconds(stamp: Any) -> int:
    return stamp.sec * 10**9 + stamp.nanosec


def hold_of(robot: Robot) -> list[float]:
    """The command that holds the robot where it is."""
    return [robot.positions[name] for name in JOINTS]


def write_profile(robot: Robot, *changes: tuple[str, str]) -> str:
    """The dummy profile with pieces of its text replaced; returns the path."""
    text = (ROOT / 'config' / 'dummy.yaml').read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path = robot.folder / 'profile.yaml'
    path.write_text(text)
    return str(path)


class Lifecycle:
    """An operator with the lifecycle services in hand."""

    def __init__(self, robot):
        from lifecycle_msgs.srv import ChangeState, GetState

        self._robot = robot
        self._change = self._client(ChangeState, 'change_state')
        self._get = self._client(GetState, 'get_state')

    def _client(self, kind, name):
        client = self._robot.node.create_client(kind, self._robot.name(f'oxygen/{name}'))
        self._robot.run_until(client.service_is_ready, name)
        return client

    def change(self, transition: int) -> bool:
        from lifecycle_msgs.srv import ChangeState

        call = ChangeState.Request()
        call.transition.id = transition
        return self._call(self._change, call).success

    def state(self) -> int:
        from lifecycle_msgs.srv import GetState

        return self._call(self._get, GetState.Request()).current_state.id

    def _call(self, client, call):
        future = client.call_async(call)
        self._robot.run_until(future.done, client.srv_name)
        return future.result()
