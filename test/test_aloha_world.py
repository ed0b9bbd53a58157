"""gym-aloha's world without gym-aloha's environment: the same physics, objects and rewards."""

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

if find_spec('mujoco') is None:  # imported here, it would look for a screen
    pytest.skip('MuJoCo is not installed', allow_module_level=True)
if find_spec('gym_aloha') is None:
    pytest.skip('gym-aloha is not installed', allow_module_level=True)

from oxygen_ros.profile import load_profile
from oxygen_ros.sim.aloha_tasks import LEFT, PEG, PIN, RIGHT, TABLE, TASKS
from oxygen_ros.sim.aloha_world import (
    CAMERAS,
    CONTROL_HZ,
    IMAGE_HEIGHT,
    IMAGE_WIDTH,
    JOINTS,
    AlohaWorld,
)

ROOT = Path(__file__).resolve().parents[1]
PERIOD_S = 1 / CONTROL_HZ


@pytest.fixture(scope='module')
def open_world() -> Iterator[AlohaWorld]:
    world = AlohaWorld(shadows=False)
    yield world
    world.close()


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def world(open_world: AlohaWorld) -> AlohaWorld:
    open_world.reset(3)
    return open_world


def test_joints_and_home_are_those_of_the_profile(world: AlohaWorld) -> None:
    profile = load_profile('aloha', ROOT / 'config')
    assert profile.joints.names == profile.command.names == JOINTS
    assert profile.command.rate_hz == profile.action.rate_hz == CONTROL_HZ
    assert profile.command.home is not None
    arms = [i for i, name in enumerate(JOINTS) if 'gripper' not in name]
    np.testing.assert_allclose(world.joint_positions()[arms], np.array(profile.command.home)[arms])


def test_the_profiles_limits_are_within_those_of_the_scene(world: AlohaWorld) -> None:
    profile = load_profile('aloha', ROOT / 'config')
    scene = world._model.actuator_ctrlrange.reshape(2, 8, 2)[:, :6].reshape(-1, 2)
    arms = [i for i, name in enumerate(JOINTS) if 'gripper' not in name]
    assert (np.array(profile.command.lower)[arms] >= scene[:, 0]).all()
    assert (np.array(profile.command.upper)[arms] <= scene[:, 1]).all()


@pytest.mark.parametrize('joint', JOINTS)
def test_a_target_moves_the_named_joint_and_no_other(world: AlohaWorld, joint: str) -> None:
    world.step(world.joint_positions(), 1.0)  # gravity has its way first
    targets = before = world.joint_positions()
    index = JOINTS.index(joint)
    targets = before + 0.1 * np.eye(14)[index]
    world.step(targets, 1.0)
    moved = world.joint_positions() - before
    assert moved[index] == pytest.approx(0.1, abs=0.02)
    assert np.abs(np.delete(moved, index)).max() < 0.02


def test_a_gripper_opens_and_closes_as_far_as_its_fingers_go(world: AlohaWorld) -> None:
    grippers = [JOINTS.index('left_gripper'), JOINTS.index('right_gripper')]
    targets = world.joint_positions()
    for target, expected in ((1.0, 0.975), (0.0, 0.065)):
        targets[grippers] = target
        world.step(targets, 1.0)
        np.testing.assert_allclose(world.joint_positions()[grippers], expected, atol=0.05)


def test_velocities_are_the_change_of_positions(world: AlohaWorld) -> None:
    targets = world.joint_positions() + 0.2
    world.step(targets, 0.1)
    before, speed = world.joint_positions(), world.joint_velocities()
    world.step(targets, 0.002)
    change = (world.joint_positions() - before) / 0.002
    np.testing.assert_allclose(change, speed, atol=0.1 * np.abs(speed).max())


def test_the_seed_places_the_objects_above_the_table_where_the_task_says(task: str) -> None:
    world = AlohaWorld(task)
    places = []
    for seed in (1, 2, 1):
        world.reset(seed)
        places.append(world.objects())
    assert (places[0] == places[2]).all() and (places[0] != places[1]).any()
    low, high = np.array(TASKS[task].corners).transpose(1, 0, 2)
    assert (low <= places).all() and (places <= high).all()


def test_the_camera_above_sees_the_cube_and_each_wrist_its_own_gripper(world: AlohaWorld) -> None:
    before = {camera: world.render(camera).astype(int) for camera in CAMERAS}
    assert {picture.shape for picture in before.values()} == {(IMAGE_HEIGHT, IMAGE_WIDTH, 3)}
    above = before['cam_high']
    assert ((above[..., 0] > 150) & (above[..., 1] < 60)).any()
    targets = world.joint_positions()
    targets[JOINTS.index('left_gripper')] = 1.0
    world.step(targets, 1.0)
    changed = {camera: np.abs(world.render(camera) - before[camera]).mean() for camera in CAMERAS}
    assert changed['cam_left_wrist'] > 2 * changed['cam_right_wrist']


def test_a_camera_that_does_not_exist_is_refused(world: AlohaWorld) -> None:
    with pytest.raises(ValueError, match=r"'cam_high'.*got 'cam_low'"):
        world.render('cam_low')


CUBE_ON_TABLE = {frozenset(('red_box', TABLE))}
PEG_ON_TABLE, SOCKET_ON_TABLE = {frozenset((PEG, TABLE))}, {frozenset(('socket-2', TABLE))}
BOTH_HELD = {frozenset((PEG, RIGHT)), frozenset((LEFT, 'socket-3'))}


@pytest.mark.parametrize(
    ('task_name', 'contacts', 'stage'),
    [
        ('transfer', CUBE_ON_TABLE, 'untouched'),
        ('transfer', CUBE_ON_TABLE | {frozenset(('red_box', RIGHT))}, 'touched'),
        ('transfer', {frozenset(('red_box', RIGHT))}, 'lifted'),
        (
            'transfer',
            CUBE_ON_TABLE | {frozenset(('red_box', RIGHT)), frozenset(('red_box', LEFT))},
            'handed over',
        ),
        ('transfer', {frozenset(('red_box', LEFT))}, 'transferred'),
        ('insertion', PEG_ON_TABLE | SOCKET_ON_TABLE, 'untouched'),
        ('insertion', PEG_ON_TABLE | {frozenset((PEG, RIGHT))}, 'untouched'),
        ('insertion', PEG_ON_TABLE | BOTH_HELD, 'both touched'),
        ('insertion', SOCKET_ON_TABLE | BOTH_HELD, 'both touched'),
        ('insertion', BOTH_HELD, 'both lifted'),
        ('insertion', BOTH_HELD | {frozenset((PEG, 'socket-1'))}, 'put together'),
        ('insertion', BOTH_HELD | PEG_ON_TABLE | {frozenset((PEG, 'socket-1'))}, 'both touched'),
        ('insertion', BOTH_HELD | {frozenset((PEG, PIN))}, 'inserted'),
    ],
)
def test_the_reward_is_told_by_who_touches_whom(
    task_name: str, contacts: set[frozenset[str]], stage: str
) -> None:
    task = TASKS[task_name]
    assert task.stages[task.reward(contacts)] == stage


def test_what_has_fallen_to_the_table_touches_it_and_nobody(task: str) -> None:
    world = AlohaWorld(task)
    world.step(world.joint_positions(), 1.0)
    assert world.objects()[:, 2].max() < 0.05
    on_table = {pair for pair in world._contacts() if TABLE in pair}
    assert len(on_table) >= len(world.objects())
    assert world.stage() == 'untouched'


def test_a_peg_that_is_put_on_the_pin_counts_as_inserted() -> None:
    """The scene has the names that the reward looks for, and its contacts are unordered."""
    world = AlohaWorld('insertion')
    world.reset(0)
    pin = world._data.geom(PIN)
    world._data.qpos[16:19] = pin.xpos
    world._mujoco.mj_forward(world._model, world._data)
    assert world.stage() == 'inserted'


def test_without_gym_aloha_the_error_says_what_to_install() -> None:
    program = (
        'import importlib.util as u; u.find_spec = lambda name: None\n'
        'from oxygen_ros.sim.world import GraphicsError\n'
        'from oxygen_ros.sim.aloha_world import AlohaWorld\n'
        'try:\n    AlohaWorld()\nexcept GraphicsError as error:\n    print(error)\n'
    )
    result = subprocess.run(
        [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert 'pip install --no-deps gym-aloha' in result.stdout, result.stderr


# --- gym-aloha itself -----------------------------------------------------------------------------


@pytest.fixture(scope='module')
def gym_aloha(open_world: AlohaWorld) -> Any:
    """gym-aloha's own environment, whole; `open_world` has chosen the renderer."""
    if any(find_spec(name) is None for name in ('dm_control', 'gymnasium')):
        pytest.skip('needs gym-aloha with its dependencies: pip install gym-aloha')
    os.environ.setdefault('MUJOCO_GL', 'egl')
    from gym_aloha.env import AlohaEnv

    return AlohaEnv('transfer_cube', obs_type='pixels_agent_pos')


def test_the_world_is_gym_alohas_own_step_by_step(world: AlohaWorld, gym_aloha: Any) -> None:
    seen, _ = gym_aloha.reset(seed=3)
    rng, target = np.random.default_rng(0), world.joint_positions()
    np.testing.assert_array_equal(world.joint_positions(), seen['agent_pos'])
    np.testing.assert_array_equal(world.objects()[0], gym_aloha._env.physics.data.qpos[16:19])
    for _ in range(25):
        target = target + rng.uniform(-0.05, 0.05, 14)
        world.step(target, PERIOD_S)
        seen, reward, _, _, _ = gym_aloha.step(target)
        np.testing.assert_allclose(world.joint_positions(), seen['agent_pos'], atol=1e-9)
        assert world.reward() == reward


def test_the_picture_from_above_is_gym_alohas_own(world: AlohaWorld, gym_aloha: Any) -> None:
    seen, _ = gym_aloha.reset(seed=3)
    own = AlohaWorld()
    own.reset(3)
    picture = own.render('cam_high')
    own.close()
    difference = np.abs(picture.astype(int) - seen['pixels']['top'])
    assert np.mean(difference) < 1.0
