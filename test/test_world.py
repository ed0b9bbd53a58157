"""The simulated table: same seed, same world; words that are true; an expert that succeeds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

if find_spec('mujoco') is None:  # imported here, it would look for a screen
    pytest.skip('MuJoCo is not installed', allow_module_level=True)

from oxygen_ros.sim.dataset import (
    Recorder,
    concatenate,
    load_moments,
    norm_stats,
    random_moment,
)
from oxygen_ros.sim.expert import SPEED_M_S, expert_chunk
from oxygen_ros.sim.world import (
    BLOCK_M,
    CAMERAS,
    COLOURS,
    CONTROL_HZ,
    JOINTS,
    LOWER_RAD,
    RADII_M,
    SAY_TOUCHING_M,
    TOUCH_S,
    UPPER_RAD,
    YAWS_RAD,
    TabletopWorld,
    cell_of,
    joints_to_tip,
    named_colour,
    random_layout,
    tip_to_joints,
)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope='module')
def open_world() -> Iterator[TabletopWorld]:
    world = TabletopWorld()
    yield world
    world.close()


@pytest.fixture
def world(open_world: TabletopWorld) -> TabletopWorld:
    open_world.reset(3)
    return open_world


def above(block: np.ndarray, height: float) -> np.ndarray:
    return tip_to_joints(np.array([*block, height]))


def run_expert(world: TabletopWorld, colour: str, limit_s: float = 12.0) -> None:
    goal = world.blocks[[COLOURS.index(colour)]]
    until_s = world.time_s + limit_s
    while world.time_s < until_s and not world.succeeded(f'touch the {colour} block'):
        for row in expert_chunk(world.joint_positions(), goal, 5)[0]:
            world.step(row)


# --- the arm --------------------------------------------------------------------------------------


def test_the_inverse_of_the_arm_is_its_inverse_over_the_whole_table() -> None:
    rng = np.random.default_rng(0)
    tips = rng.uniform((-1.2, 0.18, 0.065), (1.2, 0.44, 0.22), (500, 3))
    np.testing.assert_allclose(joints_to_tip(tip_to_joints(tips)), tips, atol=1e-9)


def test_the_simulated_finger_is_where_the_arithmetic_says(world: TabletopWorld) -> None:
    for yaw, radius, height in ((0.3, 0.3, 0.1), (-1.0, 0.25, 0.2)):
        world.place(world.blocks, tip_to_joints(np.array([yaw, radius, height])))
        expected = (radius * np.cos(yaw), radius * np.sin(yaw), height)
        np.testing.assert_allclose(world.tip(), expected, atol=1e-6)


def test_what_is_out_of_reach_still_gives_legal_joints() -> None:
    joints = tip_to_joints(np.array([[0.0, 2.0, 0.1], [3.0, 0.0, 0.0], [0.0, 0.01, 0.12]]))
    assert np.isfinite(joints).all()
    assert (joints >= LOWER_RAD).all()
    assert (joints <= UPPER_RAD).all()


# --- seeds and time -------------------------------------------------------------------------------


def test_a_seed_gives_one_world_to_the_last_bit(world: TabletopWorld) -> None:
    def play(seed: int) -> list[np.ndarray]:
        world.reset(seed)
        for _ in range(3):
            world.step(np.array([0.2, 0.5, 1.5, 0.5]))
        return [world.blocks, world.joint_positions(), *map(world.render, CAMERAS)]

    first, again, other = play(11), play(11), play(12)
    assert all(map(np.array_equal, first, again))
    assert not any(map(np.array_equal, first, other))


def test_a_reset_forgets_the_episode_before(world: TabletopWorld) -> None:
    run_expert(world, 'red')
    assert world.touched('red')
    world.reset(3)
    assert world.time_s == 0.0
    assert not any(map(world.touched, COLOURS))
    assert not world.joint_velocities().any()


def test_a_control_period_is_a_tenth_of_a_second_and_can_be_cut(world: TabletopWorld) -> None:
    targets = np.array([0.4, 0.6, 1.7, 0.6])
    world.step(targets)
    assert world.time_s == pytest.approx(1 / CONTROL_HZ)
    whole = world.joint_positions()
    world.reset(3)
    for _ in range(5):
        world.step(targets, 0.02)
    np.testing.assert_array_equal(world.joint_positions(), whole)


def test_targets_beyond_the_limits_are_cut_to_them(world: TabletopWorld) -> None:
    for _ in range(60):
        world.step(np.full(len(JOINTS), 9.0))
    assert (world.joint_positions() <= np.array(UPPER_RAD) + 0.02).all()


# --- words ----------------------------------------------------------------------------------------


def test_left_and_near_are_those_of_the_picture(world: TabletopWorld) -> None:
    places = [(YAWS_RAD[column], RADII_M[row]) for row, column in (
        ('near', 'left'), ('near', 'right'), ('far', 'middle'))]  # fmt: skip
    world.place(np.array([[np.mean(yaw), np.mean(r)] for yaw, r in places]), np.zeros(4))
    assert world.memory() == 'red near left, green near right, blue far middle'
    red, green, blue = world.project('base', world.tops())
    assert red[0] < blue[0] < green[0]
    assert blue[1] < min(red[1], green[1])  # farther is higher in the picture


def test_every_layout_is_unambiguous_and_in_three_cells() -> None:
    for seed in range(200):
        layout = random_layout(np.random.default_rng(seed))
        cells = {cell_of(*block) for block in layout}
        assert len(cells) == len(COLOURS)
        for yaw, radius in layout:
            row, column = cell_of(yaw, radius)
            assert RADII_M[row][0] <= radius <= RADII_M[row][1]
            assert YAWS_RAD[column][0] <= yaw <= YAWS_RAD[column][1]


def test_blocks_stand_where_the_picture_shows_their_colour(world: TabletopWorld) -> None:
    for seed in range(5):
        world.reset(seed)
        for camera in CAMERAS:
            picture = world.render(camera).astype(int)
            for i, (column, row) in enumerate(world.project(camera, world.tops())):
                patch = picture[int(row * 96) - 2 : int(row * 96) + 3,
                                int(column * 96) - 2 : int(column * 96) + 3]  # fmt: skip
                others = np.delete(patch, i, axis=-1).max(-1)
                assert (patch[..., i] - others).max() > 50, (seed, camera, COLOURS[i])


def test_the_narrator_says_touching_from_the_line_on(world: TabletopWorld) -> None:
    colour, block = 'green', world.blocks[1]
    for margin, expected in ((0.004, 'moving to the green block'), (-0.004, 'touching the green')):
        world.place(world.blocks, above(block, BLOCK_M + SAY_TOUCHING_M + margin))
        assert world.narration(f'touch the {colour} block').startswith(expected)


@pytest.mark.parametrize(
    ('instruction', 'expected'),
    [('touch the red block', 'red'), ('  Tap the GREEN cube.', 'green'), ('blue', 'blue')],
)
def test_an_instruction_names_its_colour(instruction: str, expected: str) -> None:
    assert named_colour(instruction) == expected


@pytest.mark.parametrize('instruction', ['', 'wait', 'touch red and blue', 'feel bored'])
def test_an_instruction_that_names_no_single_block_is_refused(instruction: str) -> None:
    with pytest.raises(ValueError, match=r"\['red', 'green', 'blue'\]"):
        named_colour(instruction)


# --- success --------------------------------------------------------------------------------------


def test_a_block_is_touched_only_after_the_finger_has_stayed(world: TabletopWorld) -> None:
    joints = above(world.blocks[0], BLOCK_M + 0.015)
    world.place(world.blocks, joints)
    steps = round(TOUCH_S * CONTROL_HZ)
    for _ in range(steps - 1):
        world.step(joints)
    assert not world.touched('red')
    world.step(joints)
    assert world.touched('red')
    assert world.succeeded('touch the red block')
    assert not world.succeeded('touch the blue block')


def test_a_visit_that_is_interrupted_does_not_add_up(world: TabletopWorld) -> None:
    near, away = (above(world.blocks[0], BLOCK_M + h) for h in (0.015, 0.12))
    world.place(world.blocks, near)
    for joints in (near, near, near, away, away, away, near, near, near):
        world.step(joints)
    assert not world.touched('red')


def test_hitting_another_block_spoils_the_success(world: TabletopWorld) -> None:
    world.place(world.blocks, above(world.blocks[1], BLOCK_M + 0.03))
    for _ in range(10):
        world.step(above(world.blocks[1], 0.02))  # pushes down on the green one
    assert world.bumped('green')
    run_expert(world, 'red')
    assert world.touched('red')
    assert not world.succeeded('touch the red block')
    world.clear_touches()
    run_expert(world, 'red')
    assert world.succeeded('touch the red block')


def test_the_expert_succeeds_everywhere_at_a_speed_one_can_watch(world: TabletopWorld) -> None:
    durations = []
    for seed in range(30):
        world.reset(seed)
        run_expert(world, COLOURS[seed % 3])
        assert world.succeeded(f'touch the {COLOURS[seed % 3]} block'), seed
        durations.append(world.time_s)
    assert 1.5 < np.mean(durations) < 8.0


def test_the_expert_goes_from_block_to_block_without_a_reset(world: TabletopWorld) -> None:
    for seed in range(10):
        world.reset(seed)
        for colour in COLOURS:
            world.clear_touches()
            run_expert(world, colour)
            assert world.succeeded(f'touch the {colour} block'), (seed, colour)


def test_a_chunk_of_the_expert_is_smooth(world: TabletopWorld) -> None:
    chunks = expert_chunk(world.joint_positions(), world.blocks, 40)
    tips = joints_to_tip(chunks)
    flat = np.stack([tips[..., 1] * np.cos(tips[..., 0]), tips[..., 1] * np.sin(tips[..., 0])], -1)
    for before, after in pairwise(np.moveaxis(flat, 1, 0)):
        assert (np.linalg.norm(after - before, axis=-1) < 1.5 * SPEED_M_S / CONTROL_HZ).all()
    assert (np.abs(tips[:, -1, 2] - tips[:, -2, 2]) < 0.005).all()


# --- pictures and errors --------------------------------------------------------------------------


def test_a_picture_may_be_larger_for_people(world: TabletopWorld) -> None:
    assert world.render('base').shape == (96, 96, 3)
    assert world.render('side', 240).shape == (240, 240, 3)
    assert world.render('base').dtype == np.uint8


def test_an_unknown_camera_is_named(world: TabletopWorld) -> None:
    with pytest.raises(ValueError, match=r"'base', 'side'.*'wrist'"):
        world.render('wrist')


# Stands in for a machine without the libraries.
BLOCK_GL = """
import ctypes, os
real = ctypes.CDLL
def load(name, *args, **kwargs):
    if 'OSMesa' in str(name) or 'EGL' in str(name):
        raise OSError(f'{name}: cannot open shared object file')
    return real(name, *args, **kwargs)
ctypes.CDLL = load
"""
LOOK = """
from oxygen_ros.sim.world import GraphicsError, TabletopWorld
try:
    TabletopWorld().render('base')
except GraphicsError as error:
    print(error)
"""


@pytest.mark.parametrize(
    'choice', ["os.environ.pop('MUJOCO_GL', '')", "os.environ['MUJOCO_GL']='egl'"]
)
def test_without_a_gl_library_the_error_names_the_package(choice: str) -> None:
    result = subprocess.run(
        [sys.executable, '-c', f'{BLOCK_GL}\n{choice}\n{LOOK}'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 'apt install libosmesa6' in result.stdout, result.stderr


# --- data -----------------------------------------------------------------------------------------


def record(world: TabletopWorld, seeds: range) -> Recorder:
    recorder = Recorder(world, horizon=10)
    for seed in seeds:
        random_moment(world, np.random.default_rng((9, seed)))
        recorder.record()
    return recorder


def test_moments_survive_the_disk_and_add_up(world: TabletopWorld, tmp_path: Path) -> None:
    first, second = (record(world, range(a, a + 3)).moments() for a in (0, 3))
    first.save(tmp_path / 'first')
    both = concatenate([load_moments(tmp_path / 'first'), second])
    whole = record(world, range(6)).moments()
    assert len(both) == 6
    for name in ('images', 'joints', 'chunks', 'points', 'narrations', 'memories'):
        np.testing.assert_array_equal(getattr(both, name), getattr(whole, name))


def test_a_moment_holds_an_answer_to_every_instruction(world: TabletopWorld) -> None:
    moments = record(world, range(20)).moments()
    for i, narrations in enumerate(moments.narrations):
        for colour, said in zip(COLOURS, narrations, strict=True):
            assert colour in said
        assert np.ptp(moments.chunks[i], axis=0).any()  # three different ways to go


def test_moments_cover_the_way_and_the_arrival(world: TabletopWorld) -> None:
    said = record(world, range(150)).moments().narrations
    share = np.char.startswith(said, 'touching').mean()
    assert 0.05 < share < 0.4


def test_the_statistics_put_nearly_all_values_into_one_unit(world: TabletopWorld) -> None:
    moments = record(world, range(100)).moments()
    stats = norm_stats(moments)['norm_stats']
    low, high = (np.array(stats['state'][key]) for key in ('q01', 'q99'))
    scaled = (moments.joints - low) / (high - low)
    assert ((scaled >= 0) & (scaled <= 1)).mean() > 0.95
    assert len(stats['actions']['mean']) == len(JOINTS)
