"""Scores of actions on signals whose error, delay and jerk are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip('rosbags')

from oxygen_ros.actions import ActionChunk
from oxygen_ros.evaluation.action_score import MAX_TRACE, ActionScore, Trace
from oxygen_ros.profile import CommandProfile

PERIOD_NS = 20_000_000


def command(quantity: tuple[str, str] = ('position', 'position')) -> CommandProfile:
    return CommandProfile(
        interface='joint_state',
        topic='commands',
        names=('a', 'b'),
        quantity=quantity,  # type: ignore[arg-type]
        rate_hz=50.0,
        lower=(-9.0, -9.0),
        upper=(9.0, 9.0),
        max_velocity=(9.0, 9.0),
    )


def wave(times_ns: np.ndarray) -> np.ndarray:
    return np.stack([np.sin(times_ns / 2e8), np.cos(times_ns / 3e8)], axis=-1)


def chunk_at(time_ns: int, offset: tuple[float, float] = (0.0, 0.0)) -> ActionChunk:
    values = wave(time_ns + PERIOD_NS * np.arange(10)) + offset
    return ActionChunk(0, time_ns, time_ns, PERIOD_NS, values)


def scored(delay_ns: int, align_ns: int = 0) -> ActionScore:
    """The recorded robot was commanded the very same, `delay_ns` later."""
    score = ActionScore(command(), align_ns, lambda times: wave(times - delay_ns))
    for number in range(40):
        score.add_chunk(chunk_at(10**10 + number * 100_000_000))
    return score


@pytest.mark.parametrize('delay_ms', [-100, 0, 60, 400])
def test_the_delay_of_the_recorded_commands_is_found(delay_ms: int) -> None:
    score = scored(delay_ms * 1_000_000)
    assert score.best_shift_ns() == delay_ms * 1_000_000


def test_aligned_by_that_delay_the_error_is_gone() -> None:
    assert scored(60_000_000).aligned.mae((0, 1)) > 0.1
    assert scored(60_000_000, 60_000_000).aligned.mae((0, 1)) < 1e-12


def test_a_joint_that_turns_without_end_is_compared_the_short_way_round() -> None:
    turning = replace(command(), continuous=('b',))
    score = ActionScore(turning, 0, wave)
    error, bias = score.add_chunk(chunk_at(0, (2 * np.pi, 2 * np.pi - 0.25)))
    np.testing.assert_allclose(error, [2 * np.pi, 0.25])
    np.testing.assert_allclose(bias, [2 * np.pi, -0.25])
    np.testing.assert_allclose(score.swept.mae(0)[1], scored_offset(-0.25))
    jump = score.add_jump(np.array([0.0, 3.1]), np.array([0.5, -3.1]))
    np.testing.assert_allclose(jump, [0.5, 2 * np.pi - 6.2])
    sent = wave(np.array([0]))[0] + [0.0, 4 * np.pi + 0.5]
    error, _ = score.add_command(0, sent, from_chunk=True)
    np.testing.assert_allclose(error, [0.0, 0.5], atol=1e-12)


def scored_offset(offset: float) -> float:
    """What joint b's swept error is at that offset, without turns."""
    score = ActionScore(command(), 0, wave)
    score.add_chunk(chunk_at(0, (0.0, offset)))
    return float(score.swept.mae(0)[1])


def test_an_offset_of_one_joint_is_its_error_and_bias_and_no_other_joints() -> None:
    score = ActionScore(command(), 0, wave)
    error, bias = score.add_chunk(chunk_at(0, (0.0, -0.25)))
    np.testing.assert_allclose(error, [0.0, 0.25])
    np.testing.assert_allclose(bias, [0.0, -0.25])
    np.testing.assert_allclose(score.aligned.mae(), np.tile([0.0, 0.25], (10, 1)))


def test_rows_without_a_recorded_command_count_for_nothing() -> None:
    def only_first_rows(times_ns: np.ndarray) -> np.ndarray:
        known = wave(times_ns)
        known[times_ns >= 3 * PERIOD_NS] = np.nan
        return known

    score = ActionScore(command(), 0, only_first_rows)
    error, _ = score.add_chunk(chunk_at(0, (1.0, 1.0)))
    np.testing.assert_allclose(error, [1.0, 1.0])
    assert score.aligned.count[:, 0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]


def test_without_recorded_commands_there_is_no_error_and_no_delay() -> None:
    score = ActionScore(command(), 0, None)
    error, _ = score.add_chunk(chunk_at(0))
    assert np.isnan(error).all()
    assert score.best_shift_ns() is None


def test_jerk_is_the_third_derivative_of_positions_and_the_second_of_velocities() -> None:
    score = ActionScore(command(('position', 'velocity')), 0, None)
    jerk = None
    for tick in range(6):
        t = tick * PERIOD_NS / 1e9
        _, jerk = score.add_command(tick, np.array([t**3, t**2]), from_chunk=True)
    assert jerk is not None
    np.testing.assert_allclose(jerk, [6.0, 2.0], rtol=1e-6)


def test_no_jerk_is_taken_over_a_moment_without_commands() -> None:
    score = ActionScore(command(), 0, None)
    for tick in range(3):
        assert score.add_command(tick, np.zeros(2), from_chunk=True)[1] is None
    score.break_commands()
    for tick in range(3):
        assert score.add_command(tick, np.ones(2), from_chunk=True)[1] is None
    assert score.add_command(9, np.ones(2), from_chunk=True)[1] is not None


def test_a_trace_of_any_length_stays_small_and_spans_everything() -> None:
    trace = Trace()
    for tick in range(20 * MAX_TRACE):
        trace.add(tick, np.zeros(2), np.zeros(2))
    times = trace.arrays(2)['time_ns']
    assert MAX_TRACE / 2 < len(times) <= MAX_TRACE + 1
    assert times[0] == 0
    assert times[-1] > 19.9 * MAX_TRACE
    assert len(set(np.diff(times).tolist())) == 1
