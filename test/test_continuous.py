"""Joints without an end: what the model sees, and which of all equal positions is commanded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_processor import observation, processor

from oxygen_ros.actions import ActionBuffer, ActionChunk, CommandGate
from oxygen_ros.model.continuous import ContinuousJoints, nearest_turn, within_half_turn
from oxygen_ros.model.processor import Processor
from oxygen_ros.observation import Observation
from oxygen_ros.profile import CommandProfile, load_profile
from oxygen_ros.publisher import CommandPublisher

TURN = 2 * np.pi
PERIOD_NS = 20_000_000


def raw_processor(delta: bool) -> Processor:
    """Three joints in the model's own units."""
    mask = (delta,) * 3 if delta else ()
    return processor(normalization='none', norm_stats=None, delta_mask=mask)


def at(joint: float) -> Observation:
    return observation(state=np.array([0.3, joint, -0.2], np.float32))


def model_actions(joint: list[float]) -> np.ndarray:
    actions = np.zeros((4, 8))
    actions[:, 1] = joint
    return actions


def test_angles_are_brought_within_half_a_turn() -> None:
    angles = np.array([0.0, 3.0, 3.3, -3.3, 13.0])
    np.testing.assert_allclose(
        within_half_turn(angles), [0.0, 3.0, 3.3 - TURN, TURN - 3.3, 13.0 - 2 * TURN]
    )


def test_a_path_begins_beside_its_start_and_never_jumps() -> None:
    path = nearest_turn(np.array([3.1, -3.1, -3.0]), 2 * TURN + 3.0)
    np.testing.assert_allclose(path, 2 * TURN + np.array([3.1, TURN - 3.1, TURN - 3.0]))


@pytest.mark.parametrize('turns', [-3, 0, 2])
def test_the_model_sees_the_same_whatever_the_driver_counts(turns: int) -> None:
    codec = ContinuousJoints(raw_processor(delta=False), [(1, 1)])
    assert codec.encode(at(0.7 + turns * TURN)).tokens == codec.encode(at(0.7)).tokens
    assert codec.encode(at(0.7)).tokens == raw_processor(delta=False).encode(at(0.7)).tokens


@pytest.mark.parametrize('turns', [-3, 0, 2])
@pytest.mark.parametrize('delta', [True, False], ids=['delta', 'absolute'])
def test_commands_stay_beside_the_joint_and_cross_the_half_turn(delta: bool, turns: int) -> None:
    codec = ContinuousJoints(raw_processor(delta), [(1, 1)])
    given = [0.1, 0.2, 0.3, 0.4] if delta else [3.1, 3.2 - TURN, 3.3 - TURN, 3.4 - TURN]
    commands = codec.decode(model_actions(given), at(3.0 + turns * TURN))
    np.testing.assert_allclose(
        commands[:, 1], turns * TURN + np.array([3.1, 3.2, 3.3, 3.4]), atol=1e-5
    )
    np.testing.assert_allclose(commands[:, 0], 0.3 if delta else 0.0, atol=1e-6)


@pytest.mark.parametrize('delta', [True, False], ids=['delta', 'absolute'])
def test_commands_become_the_actions_they_came_from(delta: bool) -> None:
    codec = ContinuousJoints(raw_processor(delta), [(1, 1)])
    actions, seen = model_actions([0.1, 0.2, 0.3, 0.4]), at(0.5 - 2 * TURN)
    commands = codec.decode(actions, seen)
    np.testing.assert_allclose(codec.encode_actions(commands, seen), actions, atol=1e-5)


def test_the_sizes_are_those_of_the_codec() -> None:
    inner = raw_processor(delta=False)
    codec = ContinuousJoints(inner, [(1, 1)])
    for name in ('image_size', 'camera_slots', 'max_token_len', 'action_dim', 'action_horizon'):
        assert getattr(codec, name) == getattr(inner, name)


def test_the_factory_puts_it_around_the_codec_of_a_profile_that_asks() -> None:
    pytest.importorskip('torch')
    from oxygen_ros.engine.factory import EngineOptions, build_engine

    profile = load_profile('dummy', Path(__file__).parents[1] / 'config')
    turning = replace(profile, command=replace(profile.command, continuous=('joint_6',)))
    engines = [
        build_engine(
            one, EngineOptions(device='cpu'), on_chunk=lambda _: None, on_text=lambda _: None
        )
        for one in (profile, turning)
    ]
    assert [type(engine.processor) for engine in engines] == [Processor, ContinuousJoints]


# --- commands -------------------------------------------------------------------------------------


@pytest.fixture
def command() -> CommandProfile:
    """One wrist without an end beside the joints of the dummy robot."""
    dummy = load_profile('dummy', Path(__file__).parents[1] / 'config').command
    return replace(
        dummy,
        names=('elbow', 'wrist'),
        continuous=('wrist',),
        quantity=('position', 'position'),
        lower=(-3.0, -np.inf),
        upper=(3.0, np.inf),
        max_velocity=(2.0, 2.0),
        home=None,
    )


def test_the_gate_goes_the_short_way_and_only_with_continuous_joints(
    command: CommandProfile,
) -> None:
    rows = np.array([[-2.9, -3.12], [-2.9, -3.09]])
    gated = CommandGate(command).apply(rows, np.array([2.9, 3.14]), None)
    np.testing.assert_allclose(gated.rows[:, 1], [TURN - 3.12, TURN - 3.09])
    assert gated.rows[0, 0] == pytest.approx(2.9 - 2.0 / command.rate_hz)
    assert (gated.interventions, gated.joints) == (('limit_step',), ('elbow',))


@pytest.mark.parametrize('counts_turns', [True, False], ids=['multi-turn', 'wrapping'])
def test_a_wrist_turns_on_and_holds_past_the_half_turn(
    command: CommandProfile, counts_turns: bool
) -> None:
    """A driver that wraps reports -3 where it was told 3.28; nothing may turn back."""
    now_ns, sent = 0, [np.array([0.0, 3.0])]

    def measured() -> np.ndarray:
        where = sent[-1].copy()
        where[1] = where[1] if counts_turns else within_half_turn(where[1])
        return where

    actions = ActionBuffer(2, 'linear')
    publisher = CommandPublisher(
        command,
        actions,
        send=lambda rows: sent.append(rows[0]),
        measured=measured,
        clock_ns=lambda: now_ns,
        monotonic_ns=lambda: now_ns,
    )
    for frame in range(5):
        # As the codec hands them over: beside what was measured.
        values = measured() + np.outer(np.arange(1, 11), [0.0, 0.03])
        assert actions.put(ActionChunk(frame, now_ns, now_ns, PERIOD_NS, values), now_ns) is None
        for _ in range(10):
            publisher.tick()
            now_ns += PERIOD_NS
    for _ in range(10):  # no chunk any more
        publisher.tick()
        now_ns += PERIOD_NS
    path = np.array(sent)[:, 1]
    assert publisher.source == 'hold'
    assert path[-1] == pytest.approx(3.0 + 50 * 0.03)
    assert (np.diff(path) > -1e-9).all()
    assert np.abs(np.diff(path)).max() < 0.031
