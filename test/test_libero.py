"""LIBERO's robot on a real graph, met by nothing but config/libero.yaml.

LIBERO's scenes come from a hub, so that the robot lives in a stand-in: a fake environment that
writes down its actions, or, where robosuite is installed, its Lift.
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

pytest.importorskip('rclpy')
if find_spec('mujoco') is None:  # imported here, it would look for a screen
    pytest.skip('MuJoCo is not installed', allow_module_level=True)

from libero_stand_ins import FakeEnvironment, a_task, needs_robosuite
from seen_robot import TIMEOUT_S, SeenRobot, end, ros_arguments
from sensor_msgs.msg import Image
from std_msgs.msg import Bool, Float64MultiArray, String

from oxygen_ros.conversions import check_image, decode_image
from oxygen_ros.profile import RobotProfile, load_profile
from oxygen_ros.sim.libero import MAX_WAITING, LiberoRobot
from oxygen_ros.sim.libero_tasks import IMAGE_SIZE
from oxygen_ros.sim.libero_world import CAMERAS, CONTROL_PERIOD_S, LiberoWorld

ROOT = Path(__file__).resolve().parents[1]
STAND_INS = ROOT / 'test' / 'libero_stand_ins.py'
FORWARD = [0.25, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.fixture(scope='module')
def profile() -> RobotProfile:
    return load_profile('libero', ROOT / 'config')


# --- what a command means -------------------------------------------------------------------------


@pytest.fixture
def fake(graph: Any) -> tuple[LiberoRobot, FakeEnvironment]:
    """The robot in this process, with nothing of the start left in its environment's book."""
    environment = FakeEnvironment()
    robot = LiberoRobot(graph.node, LiberoWorld(a_task(make=lambda: environment)))
    environment.done.clear()
    return robot, environment


def command(x: float, gripper: float = 1.0) -> Float64MultiArray:
    return Float64MultiArray(data=[x, 0.0, 0.0, 0.0, 0.0, 0.0, gripper])


def test_a_command_counts_for_one_control_step_and_then_the_arm_stays(
    fake: tuple[LiberoRobot, FakeEnvironment],
) -> None:
    robot, environment = fake
    robot.obey(command(0.3))
    robot.advance(3 * CONTROL_PERIOD_S)
    assert environment.actions() == [
        [0.3, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 1],
    ]


def test_time_passes_in_whole_control_steps_and_no_rest_is_lost(
    fake: tuple[LiberoRobot, FakeEnvironment],
) -> None:
    robot, environment = fake
    robot.obey(command(0.3))
    for _ in range(2):
        robot.advance(0.02)
    assert environment.actions() == [], 'not yet'
    for _ in range(48):
        robot.advance(0.02)
    assert robot.world.num_steps == 20
    assert sum(action[0] for action in environment.actions()) == pytest.approx(0.3)


def test_two_commands_within_a_step_are_played_one_after_the_other_and_of_more_the_newest(
    fake: tuple[LiberoRobot, FakeEnvironment],
) -> None:
    robot, environment = fake
    assert MAX_WAITING == 2
    for x in (0.1, 0.2, 0.3):
        robot.obey(command(x))
    robot.advance(4 * CONTROL_PERIOD_S)
    assert [action[0] for action in environment.actions()] == [0.2, 0.3, 0.0, 0.0]


def test_commands_that_come_while_the_robot_is_busy_are_all_heard(
    graph: Any, fake: tuple[LiberoRobot, FakeEnvironment]
) -> None:
    robot, environment = fake
    publisher = graph.node.create_publisher(Float64MultiArray, LiberoRobot.COMMAND_TOPIC, 10)
    graph.spin_until(publisher.get_subscription_count, 'the robot')
    for x in (0.1, 0.2):
        publisher.publish(command(x))
    graph.spin_until(
        lambda: robot.command is not None and robot.command[0] == 0.2, 'the second command'
    )
    robot.advance(2 * CONTROL_PERIOD_S)
    assert [action[0] for action in environment.actions()] == [0.1, 0.2]


def test_after_a_reset_what_waited_is_forgotten(
    fake: tuple[LiberoRobot, FakeEnvironment],
) -> None:
    robot, environment = fake
    robot.obey(command(0.5))
    robot.advance(0.04)
    robot.reset(0)
    environment.done.clear()
    robot.advance(0.04)
    assert environment.actions() == []
    robot.advance(CONTROL_PERIOD_S)
    assert environment.actions() == [[0, 0, 0, 0, 0, 0, -1]]
    assert robot.command is None


# --- the robot as a process -----------------------------------------------------------------------


def start(environment: str, **parameters: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(STAND_INS), environment, *ros_arguments(**parameters)],
        env={**os.environ, 'PYTHONPATH': f'{ROOT}{os.pathsep}{os.environ.get("PYTHONPATH", "")}'},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


class Libero(SeenRobot):
    def __init__(self, graph: Any, profile: RobotProfile, process: subprocess.Popen[str]) -> None:
        super().__init__(
            graph,
            profile,
            process,
            name='libero',
            image=Image,
            command=Float64MultiArray,
            truth={'language': String, 'success': Bool},
        )


# Before the robot of the other tests starts.


def test_in_real_time_it_stamps_with_the_system_clock_and_ends_with_code_0(
    graph: Any, profile: RobotProfile
) -> None:
    robot = Libero(graph, profile, start('fake'))
    robot.until(lambda: len(robot.heard['joints']) > 20, 'the state')
    robot.until(lambda: robot.heard['left_wrist_0_rgb'], 'pictures')
    errors = end(robot.process)
    assert robot.process.returncode == 0
    assert 'Traceback' not in errors
    assert (np.diff(robot.stamps_ns('joints')) > 0).all()
    assert not robot.heard['clock']


@needs_robosuite
def test_the_arm_of_robosuite_follows_commands_over_the_graph(
    graph: Any, profile: RobotProfile, ros_domain: int
) -> None:
    robot = Libero(graph, profile, start('lift', mode='stepped'))
    try:
        robot.begin()
        before = robot.measured()
        for _ in range(6):
            robot.send([0.0, 0.0, 0.8, 0.0, 0.0, 0.0, 1.0])
            robot.step()
        moved = robot.measured() - before
        robot.step()
    finally:
        errors = end(robot.process)
    assert robot.process.returncode == 0, errors
    assert moved[2] > 0.02
    assert moved[6] < -0.01, 'the fingers close'


def test_the_topics_are_the_profiles(profile: RobotProfile) -> None:
    topics = [LiberoRobot.camera_topic(camera, 'raw') for camera in CAMERAS]
    assert [camera.topic for camera in profile.cameras] == topics
    assert profile.joints.topic == LiberoRobot.JOINTS_TOPIC
    assert profile.command.topic == LiberoRobot.COMMAND_TOPIC
    assert set(profile.command.quantity) == {LiberoRobot.COMMAND_QUANTITY}


@pytest.fixture(scope='module')
def process(ros_domain: int) -> Iterator[subprocess.Popen[str]]:
    """One robot for the tests below; it stands still between them."""
    started = start('fake', mode='stepped', suite='libero_goal', task=3)
    yield started
    end(started)


@pytest.fixture
def libero(graph: Any, profile: RobotProfile, process: subprocess.Popen[str]) -> Libero:
    robot = Libero(graph, profile, process)
    robot.begin()
    return robot


def test_cameras_state_and_task_are_what_profile_and_parameters_say(libero: Libero) -> None:
    for camera in libero.profile.cameras:
        message = libero.heard[camera.slot][0]
        check_image(message, camera)
        assert decode_image(message, camera).shape == (IMAGE_SIZE, IMAGE_SIZE, 3)
    assert tuple(libero.heard['joints'][0].name) == libero.profile.joints.names
    np.testing.assert_allclose(libero.measured(), [0, 0, 0, 0, 0, 0.5, 0.02, -0.02], atol=1e-9)
    assert libero.heard['language'][-1].data == 'lift the red cube'
    assert libero.heard['success'][-1].data is False


def test_rates_are_the_declared_ones_of_the_robots_clock(libero: Libero) -> None:
    before_ns = libero.stamps_ns('joints')[-1]
    for _ in range(20):
        libero.step()
    slot = libero.profile.cameras[-1].slot
    libero.until(lambda: libero.stamps_ns(slot)[-1] >= before_ns + 10**9, 'the last picture')
    states_ns = sorted(stamp for stamp in set(libero.stamps_ns('joints')) if stamp >= before_ns)
    assert np.diff(states_ns).tolist() == [50_000_000] * 20
    for camera in libero.profile.cameras:
        taken_ns = [stamp for stamp in libero.stamps_ns(camera.slot) if stamp > before_ns]
        assert len(taken_ns) == camera.expected_hz


def test_a_command_over_the_graph_moves_the_hand_once(libero: Libero) -> None:
    places = []
    libero.send(FORWARD)
    for _ in range(3):
        libero.step()
        places.append(libero.measured()[0])
    assert places == pytest.approx([0.25, 0.25, 0.25])
    libero.send(FORWARD)
    libero.step()
    assert libero.measured()[0] == pytest.approx(0.5)


def test_a_command_that_is_none_is_ignored(libero: Libero) -> None:
    libero.commands.publish(Float64MultiArray(data=FORWARD[:6]))
    libero.send([*FORWARD[:6], float('nan')])
    libero.step()
    assert libero.measured()[0] == 0.0


def test_success_is_published_when_the_environment_says_so(libero: Libero) -> None:
    for _ in range(7):
        libero.send(FORWARD)
        libero.step()
    libero.until(lambda: libero.heard['success'][-1].data, 'success')
    libero.heard['success'].clear()
    libero.call('reset')
    libero.until(lambda: libero.heard['success'], 'the truth after the reset')
    assert not libero.heard['success'][-1].data


# --- what is missing ------------------------------------------------------------------------------


def start_really(tmp_path: Path, **parameters: Any) -> subprocess.CompletedProcess[str]:
    """`oxygen_libero` itself, whom nobody types to; that it ends at all is part of the test."""
    arguments = [part for name, value in parameters.items() for part in ('-p', f'{name}:={value}')]
    return subprocess.run(
        [sys.executable, '-m', 'oxygen_ros.sim.libero', '--ros-args', *arguments],
        cwd=ROOT,
        env={**os.environ, 'LIBERO_CONFIG_PATH': str(tmp_path), 'HOME': str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.skipif(find_spec('libero') is not None, reason='hf-libero is installed')
def test_without_libero_it_says_what_to_install_and_ends_with_code_1(tmp_path: Path) -> None:
    result = start_really(tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith('oxygen_libero: expected the LIBERO benchmark')
    assert 'pip install hf-libero' in result.stderr and 'Traceback' not in result.stderr


@pytest.mark.skipif(find_spec('libero') is None, reason='hf-libero is not installed')
def test_without_assets_it_names_their_folder_and_ends_with_code_1(tmp_path: Path) -> None:
    result = start_really(tmp_path, suite='libero_object', task=2)
    if result.returncode == 0:
        pytest.skip('the assets are there')
    assert result.returncode == 1
    assert 'oxygen_libero: ' in result.stderr and 'scenes and objects' in result.stderr
    assert 'Traceback' not in result.stderr


@pytest.mark.parametrize(
    ('parameters', 'name'),
    [
        ({'suite': 'libero_90'}, 'suite'),
        ({'task': 10}, 'task'),
        ({'command_interface': 'joint_trajectory'}, 'command_interface'),
    ],
)
def test_a_wrong_parameter_is_named_with_code_2(
    tmp_path: Path, parameters: dict[str, Any], name: str
) -> None:
    result = start_really(tmp_path, **parameters)
    assert result.returncode == 2
    assert name in result.stderr and 'Traceback' not in result.stderr
