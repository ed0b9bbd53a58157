"""profile_check as a program on a real graph: what it prints and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip('rclpy')

ROOT = Path(__file__).resolve().parents[1]
JOINTS = [f'joint_{i}' for i in range(1, 7)]


class Robot:
    """Publishes what the dummy profile wants, and listens to its commands."""

    def __init__(self, graph: Any) -> None:
        from rclpy.qos import qos_profile_sensor_data
        from sensor_msgs.msg import Image, JointState

        self.graph, self.node = graph, graph.node
        self.names, self.encoding = JOINTS, 'rgb8'
        self._images = [
            self.node.create_publisher(Image, f'camera/{name}/image_raw', qos_profile_sensor_data)
            for name in ('base', 'wrist')
        ]
        self._joints = self.node.create_publisher(JointState, 'joint_states', 10)
        self.node.create_subscription(JointState, 'joint_command', lambda _: None, 10)
        self.node.create_timer(1 / 30, self._publish)

    def _publish(self) -> None:
        from sensor_msgs.msg import Image, JointState

        pixels = np.zeros((12, 16, 3), np.uint8)
        for publisher in self._images:
            image = Image(
                height=12, width=16, encoding=self.encoding, step=48, data=pixels.tobytes()
            )
            image.header.stamp = self.node.get_clock().now().to_msg()
            publisher.publish(image)
        joints = JointState(name=self.names, position=[0.1] * len(self.names))
        joints.header.stamp = self.node.get_clock().now().to_msg()
        self._joints.publish(joints)

    def check(self, *arguments: str) -> tuple[int, str]:
        """Run the program beside the robot."""
        process = subprocess.Popen(
            [sys.executable, '-m', 'oxygen_ros.evaluation.profile_check', *arguments],
            cwd=ROOT,
            env={**os.environ, 'PYTHONUNBUFFERED': '1'},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started_s = time.monotonic()
        try:
            self.graph.spin_until(lambda: process.poll() is not None, 'the check to end', 90.0)
        finally:
            process.kill()
        assert time.monotonic() - started_s < 90
        output, _ = process.communicate()
        return process.returncode, output


@pytest.fixture
def robot(graph: Any) -> Robot:
    return Robot(graph)


def test_a_robot_that_fits_its_profile_gives_code_0(robot: Robot, tmp_path: Path) -> None:
    raw = yaml.safe_load((ROOT / 'config' / 'dummy.yaml').read_text())
    for camera in raw['cameras']:
        camera['expected_hz'] = 0.0  # how fast this machine is, is another test's affair
    path = tmp_path / 'robot.yaml'
    path.write_text(yaml.safe_dump(raw))
    code, output = robot.check(str(path), '--seconds', '4')
    assert code == 0, output
    assert 'no problems' in output
    assert 'Hz on camera/wrist/image_raw' in output
    assert '/test listens to /joint_command' in output


def test_wrong_joints_and_encodings_are_named_and_give_code_1(robot: Robot) -> None:
    robot.names, robot.encoding = [*JOINTS[:5], 'gripper'], '32FC1'
    code, output = robot.check('dummy', '--seconds', '4')
    assert code == 1, output
    assert "'joint_6' is not in the messages" in output
    assert "expected a colour image, got '32fc1'" in output


def test_a_namespace_moves_the_whole_profile(robot: Robot) -> None:
    code, output = robot.check('dummy', '--seconds', '3', '--ros-args', '-r', '__ns:=/left')
    assert code == 1
    assert 'nobody publishes /left/joint_states; did you mean /joint_states?' in output


def test_a_profile_that_does_not_load_is_the_only_problem(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from oxygen_ros.evaluation.profile_check import main

    assert main(['nobody', '--seconds', '0']) == 1
    assert "no profile 'nobody'" in capsys.readouterr().out


def test_an_openpi_config_needs_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    from oxygen_ros.evaluation.profile_check import main

    with pytest.raises(SystemExit) as stop:
        main(['droid', '--seconds', '0', '--openpi-config', 'pi05_droid'])
    assert stop.value.code == 2
    assert 'expected --checkpoint DIR with it' in capsys.readouterr().err


def test_an_openpi_config_is_asked_of_openpi(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip('torch')
    from oxygen_ros.evaluation.profile_check import main

    monkeypatch.setitem(sys.modules, 'openpi', None)  # as where it is not installed
    arguments = ['--checkpoint', str(tmp_path), '--openpi-config', 'pi05_droid']
    assert main(['droid', '--seconds', '0', *arguments]) == 1
    assert 'openpi is not installed' in capsys.readouterr().out


def test_a_checkpoint_is_checked_without_a_robot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip('torch')
    from oxygen_ros.evaluation.profile_check import main

    assert main(['droid', '--seconds', '0', '--checkpoint', str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert 'expected model.safetensors' in output
    assert 'nobody publishes' not in output
