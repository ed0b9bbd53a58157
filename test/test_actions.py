"""ActionBuffer and CommandGate: what may leave for the robot, by hand-driven clocks."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oxygen_ros.actions import INTERVENTIONS, ActionBuffer, ActionChunk, CommandGate
from oxygen_ros.profile import CommandProfile

MS = 1_000_000
T0 = 5_000 * MS
NAN, INF = float('nan'), float('inf')


def chunk_of(
    values: object, frame: int = 0, time_ns: int = T0, period_ns: int = 20 * MS
) -> ActionChunk:
    return ActionChunk(frame, time_ns, time_ns, period_ns, np.asarray(values, float))


def ramp(rows: int = 10, joints: int = 2, frame: int = 0, time_ns: int = T0) -> ActionChunk:
    """Row i is [i, i + 100]."""
    return chunk_of(
        np.arange(rows)[:, None] + 100.0 * np.arange(joints), frame=frame, time_ns=time_ns
    )


def command_of(**changes: object) -> CommandProfile:
    values: dict[str, object] = {
        'interface': 'forward_command',
        'topic': 'commands',
        'names': ('a', 'b'),
        'quantity': ('position', 'position'),
        'rate_hz': 50.0,
        'lower': (-1.0, -1.0),
        'upper': (1.0, 1.0),
        'max_velocity': (5.0, 5.0),  # 0.1 per step
    }
    return CommandProfile(**{**values, **changes})  # type: ignore[arg-type]


# ActionChunk


def test_a_chunk_is_read_only_and_independent_of_its_source() -> None:
    source = np.zeros((3, 2), np.float32)
    chunk = ActionChunk(0, 0, 0, MS, source)
    source[:] = 7
    assert chunk.values.dtype == np.float64
    assert not chunk.values.any()
    with pytest.raises(ValueError, match='read-only'):
        chunk.values[0, 0] = 1.0


@pytest.mark.parametrize('values', [np.zeros(3), np.zeros((0, 2)), np.zeros((1, 2, 3))])
def test_a_chunk_without_rows_is_refused(values: np.ndarray) -> None:
    with pytest.raises(ValueError, match='horizon, num_joints'):
        ActionChunk(0, 0, 0, MS, values)


def test_a_chunk_without_spacing_is_refused() -> None:
    with pytest.raises(ValueError, match='period_ns'):
        ActionChunk(0, 0, 0, 0, np.zeros((1, 2)))


# ActionBuffer


def test_an_empty_buffer_has_no_rows_of_the_right_width() -> None:
    rows = ActionBuffer(2, 'linear').rows(T0, period_ns=20 * MS, count=5)
    assert rows.shape == (0, 2)


def test_the_row_is_chosen_by_time_so_past_rows_are_skipped() -> None:
    buffer = ActionBuffer(2, 'linear')
    assert buffer.put(ramp(), T0 + 60 * MS) is None
    rows = buffer.rows(T0 + 60 * MS, period_ns=20 * MS, count=1)
    np.testing.assert_allclose(rows, [[3, 103]])


@pytest.mark.parametrize(('interpolation', 'expected'), [('linear', 3.25), ('previous', 3.0)])
def test_between_rows_the_profile_decides(interpolation: str, expected: float) -> None:
    buffer = ActionBuffer(2, interpolation)
    buffer.put(ramp(), T0)
    rows = buffer.rows(T0 + 65 * MS, period_ns=20 * MS, count=1)
    np.testing.assert_allclose(rows, [[expected, expected + 100]])


def test_a_faster_command_rate_resamples_the_chunk() -> None:
    buffer = ActionBuffer(2, 'linear')
    buffer.put(ramp(), T0)
    rows = buffer.rows(T0, period_ns=5 * MS, count=6)
    np.testing.assert_allclose(rows[:, 0], [0, 0.25, 0.5, 0.75, 1, 1.25])


def test_the_rows_left_end_with_the_chunk() -> None:
    buffer = ActionBuffer(2, 'linear')
    buffer.put(ramp(rows=10), T0)
    rows = buffer.rows(T0 + 150 * MS, period_ns=20 * MS, count=50)
    np.testing.assert_allclose(rows[:, 0], [7.5, 8.5, 9.0])


@pytest.mark.parametrize('interpolation', ['linear', 'previous'])
def test_the_last_row_lasts_its_period_and_not_longer(interpolation: str) -> None:
    buffer = ActionBuffer(2, interpolation)
    buffer.put(ramp(rows=10), T0)
    last = buffer.rows(T0 + 200 * MS - 1, period_ns=20 * MS, count=9)
    np.testing.assert_allclose(last, [[9, 109]])
    assert len(buffer.rows(T0 + 200 * MS, period_ns=20 * MS, count=9)) == 0


def test_a_clock_set_back_before_the_chunk_gives_no_rows() -> None:
    buffer = ActionBuffer(2, 'linear')
    buffer.put(ramp(), T0)
    np.testing.assert_allclose(buffer.rows(T0 - 5 * MS, period_ns=20 * MS, count=1), [[0, 100]])
    assert len(buffer.rows(T0 - 2_000 * MS, period_ns=20 * MS, count=1)) == 0


def test_a_new_chunk_replaces_the_rest_of_the_old_one() -> None:
    buffer = ActionBuffer(2, 'linear')
    buffer.put(ramp(frame=0), T0)
    buffer.put(chunk_of(np.full((10, 2), -1.0), frame=1, time_ns=T0 + 40 * MS), T0 + 60 * MS)
    rows = buffer.rows(T0 + 60 * MS, period_ns=20 * MS, count=3)
    np.testing.assert_allclose(rows, -1.0)
    assert buffer.chunk is not None
    assert buffer.chunk.frame == 1


@pytest.mark.parametrize(
    ('chunk', 'reason'),
    [
        (ramp(joints=3, frame=6), 'chunk_width'),
        (chunk_of([[0, 0], [0, NAN]], frame=6), 'chunk_nonfinite'),
        (chunk_of([[0, -INF]], frame=6), 'chunk_nonfinite'),
        (ramp(frame=4), 'chunk_old'),
        (ramp(frame=6, time_ns=T0 - 200 * MS), 'chunk_late'),
        (ramp(frame=6, time_ns=T0 + 3_600_000 * MS), 'chunk_future'),
    ],
)
def test_a_chunk_is_refused_with_a_reason_and_the_old_one_kept(
    chunk: ActionChunk, reason: str
) -> None:
    buffer = ActionBuffer(2, 'linear')
    held = ramp(frame=5)
    buffer.put(held, T0)
    assert buffer.put(chunk, T0) == reason
    assert buffer.chunk is held
    assert buffer.drops() == {reason: 1}


def test_after_a_clear_results_of_earlier_frames_are_discarded() -> None:
    """CASES 46: the prefill was running when the instruction changed or the node was stopped."""
    buffer = ActionBuffer(2, 'linear')
    buffer.put(ramp(frame=5), T0)
    buffer.clear('instruction', first_frame=7)
    assert len(buffer.rows(T0, period_ns=20 * MS, count=1)) == 0
    assert buffer.put(ramp(frame=6), T0) == 'chunk_cancelled'
    assert buffer.put(ramp(frame=7), T0) is None
    assert buffer.drops() == {'cleared_instruction': 1, 'chunk_cancelled': 1}


def test_clearing_an_empty_buffer_counts_nothing() -> None:
    buffer = ActionBuffer(2, 'linear')
    buffer.clear('clock', first_frame=0)
    assert buffer.drops() == {}


def test_a_reader_never_sees_a_mixture_of_two_chunks() -> None:
    buffer = ActionBuffer(2, 'linear')
    done = threading.Event()

    def write() -> None:
        for frame in range(2000):
            buffer.put(chunk_of(np.full((10, 2), frame % 2), frame=frame), T0)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not done.is_set() or not reads:
        rows = buffer.rows(T0 + 5 * MS, period_ns=5 * MS, count=8)
        reads += len(rows) > 0
        assert not len(rows) or len(np.unique(rows)) == 1
    writer.join()
    assert buffer.drops() == {}


# CommandGate


def test_a_good_command_passes_unchanged() -> None:
    rows = np.array([[0.05, -0.05], [0.1, -0.1]])
    gated = CommandGate(command_of()).apply(rows, np.zeros(2), None)
    np.testing.assert_array_equal(gated.rows, rows)
    assert gated.interventions == gated.joints == ()


@pytest.mark.parametrize('bad', [NAN, INF, -INF])
def test_a_nonfinite_row_and_those_behind_it_are_refused(bad: float) -> None:
    rows = np.array([[0.0, 0.0], [0.0, bad], [0.0, 0.0]])
    gate = CommandGate(command_of())
    gated = gate.apply(rows, np.zeros(2), None)
    assert len(gated.rows) == 1
    assert (gated.interventions, gated.joints) == (('nonfinite',), ('b',))
    assert len(gate.apply(rows[1:], np.zeros(2), None).rows) == 0


def test_a_position_outside_its_limits_is_clamped() -> None:
    gated = CommandGate(command_of()).apply(np.array([[0.97, 1.01]]), np.array([0.95, 0.95]), None)
    np.testing.assert_allclose(gated.rows, [[0.97, 1.0]])
    assert (gated.interventions, gated.joints) == (('limit_position',), ('b',))


def test_a_step_is_no_larger_than_the_velocity_allows() -> None:
    gated = CommandGate(command_of()).apply(np.array([[0.5, 0.0]]), np.zeros(2), None)
    np.testing.assert_allclose(gated.rows, [[0.1, 0.0]])
    assert (gated.interventions, gated.joints) == (('limit_step',), ('a',))


def test_each_row_is_one_step_from_the_row_before_it() -> None:
    rows = np.array([[0.5, 0.0]] * 7)
    gated = CommandGate(command_of()).apply(rows, np.zeros(2), None)
    np.testing.assert_allclose(gated.rows[:, 0], [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])


@pytest.mark.parametrize('reference', [None, np.array([0.0, NAN])])
def test_without_a_reference_a_position_is_refused(reference: np.ndarray | None) -> None:
    gated = CommandGate(command_of()).apply(np.zeros((1, 2)), reference, None)
    assert len(gated.rows) == 0
    assert gated.interventions == ('no_reference',)
    assert 'b' in gated.joints


def test_an_arm_just_outside_its_limits_is_brought_back() -> None:
    gated = CommandGate(command_of()).apply(np.array([[0.9, 0.0]]), np.array([1.08, 0.0]), None)
    np.testing.assert_allclose(gated.rows, [[0.98, 0.0]])


def test_rounding_does_not_carry_a_command_over_its_limit() -> None:
    command = command_of(upper=(0.94, 0.94))
    assert 1.04 - 0.1 > 0.94, 'the reason for this test'
    gated = CommandGate(command).apply(np.zeros((1, 2)), np.array([1.04, 0.0]), None)
    assert gated.rows[0, 0] == 0.94


def test_an_arm_far_outside_its_limits_is_left_to_the_operator() -> None:
    gated = CommandGate(command_of()).apply(np.array([[0.9, 0.0]]), np.array([1.5, 0.0]), None)
    assert len(gated.rows) == 0
    assert (gated.interventions, gated.joints) == (('outside_limits',), ('a',))


def test_a_velocity_is_clamped_and_needs_no_reference() -> None:
    gate = CommandGate(command_of(quantity=('velocity', 'velocity')))
    gated = gate.apply(np.array([[7.0, -1.0]]), None, np.zeros(2))
    np.testing.assert_allclose(gated.rows, [[5.0, -1.0]])
    assert (gated.interventions, gated.joints) == (('limit_velocity',), ('a',))


def test_at_a_position_limit_a_velocity_only_leads_back() -> None:
    gate = CommandGate(command_of(quantity=('velocity', 'velocity')))
    measured = np.array([1.0, -1.2])
    outwards = gate.apply(np.array([[1.0, -1.0]]), None, measured)
    np.testing.assert_array_equal(outwards.rows, [[0, 0]])
    assert (outwards.interventions, outwards.joints) == (('limit_position',), ('a', 'b'))
    back = gate.apply(np.array([[-1.0, 1.0]]), None, measured)
    np.testing.assert_array_equal(back.rows, [[-1, 1]])


@pytest.mark.parametrize('measured', [None, np.array([NAN, 0.0])])
def test_a_limited_joint_of_unknown_position_gets_no_velocity(
    measured: np.ndarray | None,
) -> None:
    gate = CommandGate(command_of(quantity=('velocity', 'velocity')))
    gated = gate.apply(np.array([[1.0, 0.0]]), None, measured)
    np.testing.assert_array_equal(gated.rows, [[0, 0]])
    assert (gated.interventions, gated.joints) == (('no_reference',), ('a',))


def test_an_unbounded_velocity_needs_no_measurement() -> None:
    """LIBERO's end-effector differences have no joint to measure."""
    command = command_of(quantity=('velocity',) * 2, lower=(-INF, -INF), upper=(INF, INF))
    gated = CommandGate(command).apply(np.array([[1.0, -1.0]]), None, np.array([NAN, NAN]))
    np.testing.assert_array_equal(gated.rows, [[1, -1]])
    assert gated.interventions == ()


def test_the_gate_changes_neither_rows_nor_reference() -> None:
    rows, reference = np.array([[9.0, -9.0]]), np.zeros(2)
    CommandGate(command_of()).apply(rows, reference, None)
    np.testing.assert_array_equal(rows, [[9, -9]])
    np.testing.assert_array_equal(reference, [0, 0])


any_float = st.one_of(
    st.floats(-3, 3), st.floats(), st.sampled_from([NAN, INF, -INF, 1.0, -1.0, 1.1, 0.0])
)
vector = st.lists(any_float, min_size=2, max_size=2).map(np.array)


@settings(max_examples=400, deadline=None)
@given(
    rows=st.lists(vector, min_size=1, max_size=4).map(np.array),
    reference=st.none() | vector,
    measured=st.none() | vector,
    quantity=st.sampled_from([('position',) * 2, ('velocity',) * 2, ('velocity', 'position')]),
)
def test_nothing_nonfinite_outside_or_too_fast_ever_passes(
    rows: np.ndarray,
    reference: np.ndarray | None,
    measured: np.ndarray | None,
    quantity: tuple[str, ...],
) -> None:
    command = command_of(quantity=quantity)
    gated = CommandGate(command).apply(rows, reference, measured)
    assert gated.rows.shape[1] == 2
    assert len(gated.rows) <= len(rows)
    assert set(gated.interventions) <= set(INTERVENTIONS)
    assert np.isfinite(gated.rows).all()
    if not len(gated.rows):
        assert gated.interventions, 'a refusal must say why'
        return
    for joint in range(2):
        values = gated.rows[:, joint]
        if quantity[joint] == 'velocity':
            assert (np.abs(values) <= 5.0).all()
        else:
            assert reference is not None
            assert (np.abs(values) <= 1.0).all()
            steps = np.diff(values, prepend=reference[joint])
            assert (np.abs(steps) <= 0.1 + 1e-8).all()
