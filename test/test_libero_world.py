"""LIBERO's world: in robosuite's Lift, where that is installed, and in a made-up environment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if find_spec('mujoco') is None:  # imported here, it would look for a screen
    pytest.skip('MuJoCo is not installed', allow_module_level=True)

from libero_stand_ins import FakeEnvironment, LiftEnvironment, a_quaternion, a_task, needs_robosuite

from oxygen_ros.profile import load_profile
from oxygen_ros.sim.libero_tasks import CONTROL_HZ, IMAGE_SIZE
from oxygen_ros.sim.libero_world import (
    CAMERAS,
    COMMANDS,
    CONTROL_PERIOD_S,
    OPEN,
    SEED,
    SETTLING_ACTION,
    SETTLING_STEPS,
    STATE,
    STAY,
    LiberoWorld,
    axis_angle,
)
from oxygen_ros.sim.world import GraphicsError

ROOT = Path(__file__).resolve().parents[1]


# --- without robosuite ----------------------------------------------------------------------------


@pytest.mark.parametrize('angle_rad', [0.1, 1.0, math.pi / 2, 3.0, math.pi, 4.0, 6.2])
def test_a_rotation_is_its_axis_times_its_angle(angle_rad: float) -> None:
    axis = (2 / 3, -1 / 3, 2 / 3)
    found = axis_angle(a_quaternion(axis, angle_rad))
    np.testing.assert_allclose(found, angle_rad * np.array(axis), atol=1e-9)


def test_a_quaternion_and_its_negative_are_not_made_equal_as_openpi_does_not() -> None:
    quaternion = a_quaternion((0.0, 0.0, 1.0), 1.0)
    np.testing.assert_allclose(axis_angle(-quaternion), [0, 0, -(2 * math.pi - 1)], atol=1e-9)


@pytest.mark.parametrize('w', [1.0, -1.0, 1.0 + 1e-9, -1.0 - 1e-9])
def test_no_rotation_and_rounding_beyond_one_give_zeros(w: float) -> None:
    assert axis_angle(np.array([0.0, 0.0, 0.0, w])).tolist() == [0.0, 0.0, 0.0]


def fake_world(**changes: Any) -> tuple[LiberoWorld, FakeEnvironment]:
    environment = FakeEnvironment()
    world = LiberoWorld(a_task(**({'make': lambda: environment} | changes)))
    environment.done.clear()
    return world, environment


def test_names_are_the_profiles() -> None:
    profile = load_profile('libero', ROOT / 'config')
    assert profile.joints.names == STATE
    assert profile.command.names == COMMANDS
    assert profile.command.rate_hz == profile.action.rate_hz == CONTROL_HZ


def test_a_reset_takes_the_initial_state_of_that_number_and_lets_objects_settle() -> None:
    world, environment = fake_world(init_states=np.arange(6.0).reshape(3, 2))
    world.reset(1)
    assert environment.done[:3] == [
        ('seed', SEED + 1),
        ('reset', None),
        ('set_init_state', [2.0, 3.0]),
    ]
    assert environment.done[3:] == [('step', SETTLING_ACTION.tolist())] * SETTLING_STEPS
    assert SETTLING_ACTION.tolist() == [0, 0, 0, 0, 0, 0, -1]
    assert (world.num_steps, world.time_s) == (0, 0.0)
    world.reset(4)
    assert ('set_init_state', [2.0, 3.0]) in environment.done[4:], 'they begin anew'


def test_the_state_is_position_axis_angle_and_fingers() -> None:
    world, _ = fake_world()
    world.step(np.array([0.25, 0.5, -0.5, 0, 0, 0, 1]), CONTROL_PERIOD_S)
    expected = [0.25, 0.5, -0.5, 0.0, 0.0, 0.5, 0.02, -0.02]
    np.testing.assert_allclose(world.joint_positions(), expected, atol=1e-9)
    assert world.joint_velocities().size == 0
    assert world.time_s == pytest.approx(0.05)


def test_at_zero_the_gripper_keeps_its_direction_from_the_open_start_on() -> None:
    world, environment = fake_world()
    for gripper in (0.0, 0.9, 0.0, 0.0, -0.4, 0.0):
        world.step(np.array([0, 0, 0, 0, 0, 0, gripper]), CONTROL_PERIOD_S)
    assert [action[6] for action in environment.actions()] == [OPEN, 0.9, 0.9, 0.9, -0.4, -0.4]
    world.reset(0)
    environment.done.clear()
    world.step(STAY, CONTROL_PERIOD_S)
    assert environment.actions()[0][6] == OPEN, 'a reset forgets'
    assert STAY.tolist() == [0.0] * 7, 'nobody has written into it'


def test_a_step_is_one_control_period_and_nothing_else() -> None:
    world, _ = fake_world()
    with pytest.raises(ValueError, match=r'duration_s: expected 0.05, got 0.02'):
        world.step(STAY, 0.02)


def test_success_is_noticed_when_the_environment_says_so() -> None:
    world, _ = fake_world()
    forward = np.array([1.0, 0, 0, 0, 0, 0, 1])
    found = []
    for _ in range(3):
        world.step(forward, CONTROL_PERIOD_S)
        found.append(world.succeeded())
    assert found == [False, True, True]


def test_pictures_are_taken_of_the_cameras_by_their_names_in_the_scene() -> None:
    world, environment = fake_world()
    assert world.render('eye_in_hand').shape == (IMAGE_SIZE, IMAGE_SIZE, 3)
    size = {'camera_name': 'robot0_eye_in_hand', 'width': 256, 'height': 256}
    assert environment.done == [('render', size)]
    with pytest.raises(ValueError, match=r"camera: expected one of .*, got 'top'"):
        world.render('top')


def test_entering_another_task_closes_the_environment_before() -> None:
    world, environment = fake_world()
    other = FakeEnvironment()
    world.enter(a_task(language='push the cube', make=lambda: other))
    assert environment.done == [('close', None)]
    assert world.task.language == 'push the cube'
    world.close()
    world.close()
    assert other.done[-1] == ('close', None) and other.done.count(('close', None)) == 1


def test_a_renderer_that_refuses_is_one_error_that_names_the_remedy() -> None:
    def refuse() -> Any:
        raise ImportError('Cannot initialize a EGL device display')

    with pytest.raises(GraphicsError, match=r'EGL device display.*apt install'):
        LiberoWorld(a_task(make=refuse))


# --- robosuite's own Lift -------------------------------------------------------------------------


@pytest.fixture(scope='module')
def lift() -> Iterator[LiberoWorld]:
    world = LiberoWorld(a_task(make=LiftEnvironment))
    yield world
    world.close()


@needs_robosuite
def test_a_difference_of_one_moves_the_hand_by_some_centimetres_and_none_by_none(
    lift: LiberoWorld,
) -> None:
    lift.reset(0)
    before = lift.joint_positions()
    for _ in range(5):
        lift.step(STAY, CONTROL_PERIOD_S)
    np.testing.assert_allclose(lift.joint_positions(), before, atol=5e-3)
    for _ in range(10):
        lift.step(np.array([0, 0, 0.5, 0, 0, 0, 0]), CONTROL_PERIOD_S)
    moved = lift.joint_positions() - before
    assert 0.03 < moved[2] < 0.25, 'at most ten times 2.5 cm, behind which the arm lags'
    np.testing.assert_allclose(moved[[0, 1]], 0, atol=0.02)


@needs_robosuite
def test_positive_closes_the_fingers(lift: LiberoWorld) -> None:
    lift.reset(0)
    assert lift.joint_positions()[6] > 0.035, 'they are open after settling'
    for _ in range(12):
        lift.step(np.array([0, 0, 0, 0, 0, 0, 1.0]), CONTROL_PERIOD_S)
    assert lift.joint_positions()[6] < 0.005
    assert lift.joint_positions()[7] > -0.005


@needs_robosuite
def test_equal_seeds_give_equal_worlds_whatever_was_played_before(lift: LiberoWorld) -> None:
    def played(seed: int) -> np.ndarray:
        lift.reset(seed)
        for _ in range(3):
            lift.step(np.array([0.5, 0.2, -0.3, 0.1, 0, 0.2, 1]), CONTROL_PERIOD_S)
        environment: Any = lift._environment
        return np.array(environment.sim.get_state().flatten())

    once, other, again = played(3), played(4), played(3)
    np.testing.assert_array_equal(once, again)
    assert not np.array_equal(once, other)


@needs_robosuite
def test_an_initial_state_is_where_the_episode_begins(lift: LiberoWorld) -> None:
    lift.reset(5)
    for _ in range(6):
        lift.step(np.array([0.4, 0, 0.4, 0, 0, 0, 0]), CONTROL_PERIOD_S)
    environment: Any = lift._environment
    state, place = environment.sim.get_state().flatten(), lift.joint_positions()[:3]
    lift.reset(0)
    usual = lift.joint_positions()[:3]
    lift.task = replace(lift.task, init_states=[state])
    lift.reset(0)
    away, near = np.abs(usual - place).max(), np.abs(lift.joint_positions()[:3] - place).max()
    assert near < 0.01 < 0.03 < away


@needs_robosuite
def test_pictures_are_robosuites_own_upside_down_and_all(lift: LiberoWorld) -> None:
    """An environment that takes them at every step gives the same, at 160 ms more per step."""
    with_pictures = LiftEnvironment(use_camera_obs=True)
    try:
        with_pictures.seed(SEED)
        with_pictures.reset()
        for _ in range(SETTLING_STEPS):
            with_pictures.step(SETTLING_ACTION)
        action = np.array([0.5, 0.2, -0.3, 0.1, 0, 0.2, 1])
        observation = with_pictures.step(action)[0]
        lift.task = replace(lift.task, init_states=())
        lift.reset(0)
        lift.step(action, CONTROL_PERIOD_S)
        for camera, key in zip(CAMERAS, ('agentview', 'robot0_eye_in_hand'), strict=True):
            picture = lift.render(camera)
            assert picture.std() > 10
            np.testing.assert_array_equal(picture, observation[f'{key}_image'])
        np.testing.assert_array_equal(lift.joint_positions()[:3], observation['robot0_eef_pos'])
    finally:
        with_pictures.close()


@needs_robosuite
def test_lifting_the_cube_by_script_is_success_and_waving_is_none(lift: LiberoWorld) -> None:
    lift.task = replace(lift.task, init_states=())
    lift.reset(0)
    environment: Any = lift._environment
    assert not lift.succeeded()

    def go(target: np.ndarray, gripper: float, steps: int) -> None:
        for _ in range(steps):
            delta = np.clip(10 * (target - lift.joint_positions()[:3]), -1, 1)
            lift.step(np.r_[delta, 0, 0, 0, gripper], CONTROL_PERIOD_S)

    cube = np.array(environment.env._get_observations(force_update=True)['cube_pos'])
    go(cube + np.array([0, 0, 0.1]), OPEN, 25)
    assert not lift.succeeded()
    go(cube, OPEN, 25)
    go(cube, 1.0, 12)
    go(cube + np.array([0, 0, 0.15]), 1.0, 25)
    assert lift.succeeded()
