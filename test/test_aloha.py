"""gym-aloha's robot on a real graph, met by nothing but config/aloha.yaml.

The robot is a process of its own and stands still between steps, so that every rate is one of its
own clock. First the profile's words are held against what it publishes; then chunks go the way of
the node's commands, row by row through buffer, limits and message; then the node itself, with a
small random model, looks and acts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip('rclpy')
if find_spec('mujoco') is None:  # imported here, it would look for a screen
    pytest.skip('MuJoCo is not installed', allow_module_level=True)
if find_spec('gym_aloha') is None:
    pytest.skip('gym-aloha is not installed', allow_module_level=True)

from robot import NodeProcess
from seen_robot import TIMEOUT_S, SeenRobot, end, ros_arguments
from sensor_msgs.msg import CompressedImage, JointState
from std_msgs.msg import String

from oxygen_ros.actions import ActionBuffer, ActionChunk
from oxygen_ros.conversions import check_image, decode_image, stamp_to_ns
from oxygen_ros.profile import RobotProfile, load_profile
from oxygen_ros.publisher import CommandPublisher
from oxygen_ros.sim.aloha import AlohaRobot
from oxygen_ros.sim.aloha_tasks import TASKS
from oxygen_ros.sim.aloha_world import CAMERAS, CONTROL_HZ, IMAGE_HEIGHT, IMAGE_WIDTH

ROOT = Path(__file__).resolve().parents[1]
PERIOD_NS = 1_000_000_000 // CONTROL_HZ


def start(**parameters: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, '-m', 'oxygen_ros.sim.aloha', *ros_arguments(**parameters)],
        cwd=ROOT,
        env=dict(os.environ),
        stderr=subprocess.PIPE,
        text=True,
    )


class Aloha(SeenRobot):
    def __init__(self, graph: Any, profile: RobotProfile, process: subprocess.Popen[str]) -> None:
        super().__init__(
            graph,
            profile,
            process,
            name='aloha',
            image=CompressedImage,
            command=JointState,
            truth={'stage': String},
        )


@pytest.fixture(scope='module')
def profile() -> RobotProfile:
    return load_profile('aloha', ROOT / 'config')


@pytest.fixture(scope='module')
def process(ros_domain: int) -> Iterator[subprocess.Popen[str]]:
    """One robot for all tests; it stands still between them."""
    started = start(mode='stepped', shadows=False)
    yield started
    end(started)


@pytest.fixture
def aloha(graph: Any, profile: RobotProfile, process: subprocess.Popen[str]) -> Aloha:
    robot = Aloha(graph, profile, process)
    robot.begin()
    return robot


# --- in real time; before the robot of the other tests starts ------------------------------------


def test_in_real_time_it_stamps_with_the_system_clock_and_ends_with_code_0(
    graph: Any, profile: RobotProfile
) -> None:
    robot = Aloha(graph, profile, start(shadows=False, camera_rate_hz=2.0))
    robot.until(lambda: len(robot.heard['joints']) > 20, 'joint states')
    robot.until(lambda: robot.heard['right_wrist_0_rgb'], 'pictures')
    errors = end(robot.process)
    assert robot.process.returncode == 0
    assert 'Traceback' not in errors  # MuJoCo prints one where a renderer is left open
    assert (np.diff(robot.stamps_ns('joints')) > 0).all()
    assert not robot.heard['clock']


def test_another_task_has_other_stages_and_one_that_is_none_is_refused(
    graph: Any, profile: RobotProfile
) -> None:
    refused = start(task='juggling')
    _, errors = refused.communicate(timeout=TIMEOUT_S)
    assert refused.returncode == 2
    assert "parameter 'task': expected one of ['transfer', 'insertion'], got 'juggling'" in errors
    robot = Aloha(graph, profile, start(shadows=False, camera_rate_hz=2.0, task='insertion'))
    robot.until(lambda: robot.heard['stage'], 'the stage')
    end(robot.process)
    assert robot.heard['stage'][0].data in TASKS['insertion'].stages


# --- as declared ----------------------------------------------------------------------------------


def test_the_topics_are_the_profiles(profile: RobotProfile) -> None:
    topics = [AlohaRobot.camera_topic(camera, 'compressed') for camera in CAMERAS]
    assert [camera.topic for camera in profile.cameras] == topics
    assert profile.command.topic == AlohaRobot.COMMAND_TOPIC


def test_cameras_and_joints_are_what_the_profile_declares(aloha: Aloha) -> None:
    profile = aloha.profile
    for camera in profile.cameras:
        message = aloha.heard[camera.slot][0]
        check_image(message, camera)
        assert decode_image(message, camera).shape == (IMAGE_HEIGHT, IMAGE_WIDTH, 3)
    assert set(aloha.heard['joints'][0].name) == set(profile.joints.names)
    home = dict(zip(profile.command.names, profile.command.home, strict=True))
    for name, position in zip(profile.joints.names, aloha.measured(), strict=True):
        if 'gripper' in name:
            assert 0 <= position <= 1, 'grippers are open by a share, not by metres'
        else:
            assert position == pytest.approx(home[name], abs=0.02), name
    assert aloha.heard['stage'][-1].data == 'untouched'


def test_rates_are_the_declared_ones_of_the_robots_clock(aloha: Aloha) -> None:
    before_ns = aloha.time_ns()
    for _ in range(50):
        aloha.step()
    aloha.until(lambda: len(aloha.heard['right_wrist_0_rgb']) >= 31, 'the last picture')
    stamps_ns = sorted(set(aloha.stamps_ns('joints')))
    assert np.diff(stamps_ns).tolist() == [PERIOD_NS] * 50
    assert stamps_ns[-1] - before_ns == 1_000_000_000
    for camera in aloha.profile.cameras:
        taken_ns = [stamp for stamp in aloha.stamps_ns(camera.slot) if stamp > before_ns]
        assert len(taken_ns) == camera.expected_hz
        assert max(np.diff(taken_ns)) <= 1e9 * camera.max_age_s


# --- chunks ---------------------------------------------------------------------------------------


def play(aloha: Aloha, values: np.ndarray) -> list[np.ndarray]:
    """Let a chunk (rows, 14) run as the node would; return the commands that were sent."""
    sent: list[np.ndarray] = []

    def send(rows: np.ndarray) -> None:
        sent.append(rows[0])
        aloha.send(rows)

    profile = aloha.profile
    actions = ActionBuffer.of_profile(profile)
    publisher = CommandPublisher(
        profile.command,
        actions,
        send=send,
        measured=aloha.measured,
        clock_ns=aloha.time_ns,
        monotonic_ns=aloha.time_ns,
    )
    chunk = ActionChunk(0, aloha.time_ns(), aloha.time_ns(), PERIOD_NS, values)
    assert actions.put(chunk, aloha.time_ns()) is None
    for _ in range(len(values)):
        publisher.tick()
        aloha.step()
    assert publisher.error is None
    assert publisher.stats().commands == len(values)
    assert publisher.stats().fallback_commands == 0
    return sent


def settle(aloha: Aloha) -> np.ndarray:
    """Let gravity have its way; the arm hangs a little below what it is told."""
    for _ in range(15):
        aloha.step()
    return aloha.measured()


def test_a_chunk_that_holds_moves_nothing(aloha: Aloha) -> None:
    before = settle(aloha)
    sent = play(aloha, np.tile(before, (20, 1)))
    np.testing.assert_allclose(sent, np.tile(before, (20, 1)), atol=1e-9)
    # Told to be where it hangs it sinks once more by as much, a hundredth, and no further.
    np.testing.assert_allclose(aloha.measured(), before, atol=0.015)


def test_chunks_move_exactly_the_joints_they_name_one_after_the_other(aloha: Aloha) -> None:
    before = settle(aloha)
    target = before.copy()
    for index, joint in enumerate(aloha.profile.command.names):
        values = np.tile(target, (30, 1))  # a gripper needs half a second
        values[:, index] += 0.1 * np.minimum(np.arange(1, 31) / 10, 1)
        target = values[-1]
        play(aloha, values)
        moved = aloha.measured() - before
        np.testing.assert_allclose(moved, target - before, atol=0.02, err_msg=joint)


# --- the node -------------------------------------------------------------------------------------


def small_model(folder: Path) -> Path:
    """The profile as it ships, but for the model: tiny and random."""
    raw = yaml.safe_load((ROOT / 'config' / 'aloha.yaml').read_text())
    raw['model'] |= {
        'preset': 'dummy',
        'random_weights': True,
        'normalization': 'none',
        'norm_stats': '',
    }
    path = folder / 'aloha_small.yaml'
    path.write_text(yaml.safe_dump(raw))
    return path


def test_the_node_looks_and_acts_through_the_profile(aloha: Aloha, tmp_path: Path) -> None:
    messages = pytest.importorskip('oxygen_ros.msg', reason='package not built: ./run build')
    path = small_model(tmp_path)
    command = load_profile(str(path), tmp_path).command
    aloha.hear('chunks', messages.ActionChunk, 'oxygen/actions')
    aloha.hear('stats', messages.EngineStats, 'oxygen/stats')
    before = settle(aloha)
    oxygen = NodeProcess(
        tmp_path, {'profile': path, 'use_sim_time': True, 'instruction': 'transfer the cube'}
    )
    try:
        oxygen.wait_for_log('active')
        aloha.heard['commands'].clear()
        while len(aloha.heard['chunks']) < 3 or len(aloha.heard['commands']) < 50:
            aloha.step()
            assert oxygen.process.poll() is None, oxygen.log
        aloha.until(lambda: aloha.heard['stats'], 'statistics')
        commands = [np.array(message.position) for message in aloha.heard['commands']]
        moved = np.abs(aloha.measured() - before)
        assert oxygen.interrupt() == 0
    finally:
        oxygen.kill()

    chunk = aloha.heard['chunks'][-1]
    assert tuple(chunk.joint_names) == command.names
    assert (chunk.period_s, chunk.horizon) == (0.02, 50)
    assert len(chunk.values) == 50 * 14 and np.isfinite(chunk.values).all()
    assert stamp_to_ns(chunk.header.stamp) in aloha.stamps_ns('base_0_rgb')
    assert {tuple(message.name) for message in aloha.heard['commands']} == {command.names}
    assert (np.array(command.lower) <= commands).all()
    assert (commands <= np.array(command.upper)).all()
    assert moved.max() > 0.05, 'noise is no task, but it moves'
