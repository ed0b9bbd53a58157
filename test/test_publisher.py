"""CommandPublisher: ticks driven by hand on fake clocks, then what the real thread must do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from oxygen_ros.actions import ActionBuffer, ActionChunk
from oxygen_ros.profile import CommandProfile
from oxygen_ros.publisher import ESTOP, HALTS, HOLD, CommandPublisher

MS = 1_000_000
PERIOD = 20 * MS
NAN, INF = float('nan'), float('inf')


def command_of(**changes: object) -> CommandProfile:
    values: dict[str, object] = {
        'interface': 'forward_command',
        'topic': 'commands',
        'names': ('a', 'b'),
        'quantity': ('position', 'position'),
        'rate_hz': 50.0,
        'lower': (-2.0, -2.0),
        'upper': (2.0, 2.0),
        'max_velocity': (5.0, 5.0),  # 0.1 per step
    }
    return CommandProfile(**{**values, **changes})  # type: ignore[arg-type]


class Bench:
    """A publisher between a fake clock, a fake arm and a list of what it sent."""

    def __init__(
        self,
        measured: object = (0.0, 0.0),
        rows_per_command: int = 1,
        sending: Callable[[], None] = lambda: None,
        **command: object,
    ) -> None:
        self.now_ns = 1_000_000 * MS
        self.start_ns = self.now_ns
        self.control_offset_ns = 0
        self.measured: np.ndarray | None = None if measured is None else np.array(measured)
        self.halt = ''
        self.sent: list[np.ndarray] = []
        self.sending = sending
        profile = command_of(**command)
        self.actions = ActionBuffer(len(profile.names), profile.interpolation)
        self.publisher = CommandPublisher(
            profile,
            self.actions,
            send=self._send,
            measured=lambda: self.measured,
            halt=lambda: self.halt,
            clock_ns=lambda: self.now_ns + self.control_offset_ns,
            monotonic_ns=lambda: self.now_ns,
            rows_per_command=rows_per_command,
        )

    def _send(self, rows: np.ndarray) -> None:
        self.sending()
        self.sent.append(rows.copy())

    def put(self, values: object, frame: int = 0, age_ns: int = 0) -> str | None:
        now_ns = self.now_ns + self.control_offset_ns
        chunk = ActionChunk(frame, 0, now_ns - age_ns, PERIOD, np.asarray(values, float))
        return self.actions.put(chunk, now_ns)

    def tick(self, count: int = 1, late_ns: int = 0) -> None:
        """Tick at each deadline; time stands still inside a tick and then goes on a period."""
        for _ in range(count):
            self.now_ns += late_ns
            self.publisher.tick()
            self.now_ns += PERIOD - late_ns

    @property
    def first_rows(self) -> np.ndarray:
        return np.array([rows[0] for rows in self.sent])


def ramp(start: float, stop: float, rows: int = 10) -> np.ndarray:
    return np.linspace(start, stop, rows)[:, None].repeat(2, axis=1)


# Chunk rows by time


def test_each_tick_sends_the_row_for_now() -> None:
    bench = Bench()
    bench.put(ramp(0, 0.9))
    bench.tick(10)
    np.testing.assert_allclose(bench.first_rows[:, 0], np.linspace(0, 0.9, 10))
    stats = bench.publisher.stats()
    assert (stats.commands, stats.misses, stats.fallback_commands) == (10, 0, 0)
    assert stats.source == 'chunk'


def test_rows_that_passed_while_the_model_was_thinking_are_skipped() -> None:
    bench = Bench(measured=(0.3, 0.3))
    bench.put(ramp(0, 0.9), age_ns=3 * PERIOD)
    bench.tick(2)
    np.testing.assert_allclose(bench.first_rows[:, 0], [0.3, 0.4])


def test_a_chunk_that_is_already_over_changes_nothing() -> None:
    bench = Bench()
    bench.put(np.zeros((10, 2)), frame=0)
    bench.tick()
    assert bench.put(ramp(0, 0.9), frame=1, age_ns=10 * PERIOD) == 'chunk_late'
    bench.tick()
    np.testing.assert_array_equal(bench.first_rows, np.zeros((2, 2)))


def test_a_chunk_with_nan_never_leaves_and_the_old_one_goes_on() -> None:
    bench = Bench()
    bench.put(np.zeros((10, 2)), frame=0)
    assert bench.put(np.full((10, 2), NAN), frame=1) == 'chunk_nonfinite'
    bench.tick(12)
    np.testing.assert_array_equal(bench.first_rows, np.zeros((12, 2)))


def test_a_trajectory_carries_all_rows_left() -> None:
    bench = Bench(rows_per_command=50)
    bench.put(ramp(0, 0.9))
    bench.tick(3)
    assert [len(rows) for rows in bench.sent] == [10, 9, 8]
    np.testing.assert_allclose(bench.sent[2][:, 0], np.linspace(0, 0.9, 10)[2:])


@pytest.mark.case(23, 45)
def test_an_engine_that_never_returns_changes_no_command() -> None:
    """CASES 45: the same commands with and without a thread stuck in a decode or a prefill."""

    def commands_of(bench: Bench) -> np.ndarray:
        bench.put(ramp(0, 0.9))
        bench.tick(20)
        return bench.first_rows

    undisturbed = commands_of(Bench())
    released = threading.Event()
    engine = threading.Thread(target=released.wait, daemon=True)
    engine.start()
    disturbed = commands_of(Bench())
    assert engine.is_alive()
    released.set()
    engine.join()
    np.testing.assert_array_equal(disturbed, undisturbed)
    assert len(disturbed) == 20


# Fallback


@pytest.mark.case(23)
def test_after_the_last_row_the_arm_holds_where_it_was_measured() -> None:
    """CASES 23: exactly the actions left, then the hold, once per period."""
    bench = Bench()
    bench.put(ramp(0, 0.4, rows=5))
    bench.tick(5)
    bench.measured = np.array([0.35, 0.36])
    bench.tick(3)
    np.testing.assert_allclose(bench.first_rows[5:], [[0.35, 0.36]] * 3)
    stats = bench.publisher.stats()
    assert (stats.commands, stats.fallback_commands, stats.source) == (8, 3, 'hold')


def test_a_sagging_arm_is_not_followed_down() -> None:
    bench = Bench(measured=(0.5, 0.5))
    for sag in np.linspace(0, 0.3, 20):
        bench.measured = np.array([0.5 - sag, 0.5])
        bench.tick()
    np.testing.assert_array_equal(bench.first_rows, np.full((20, 2), 0.5))


def test_each_hold_begins_at_its_own_measurement() -> None:
    bench = Bench()
    bench.tick(2)
    bench.measured = np.array([0.05, 0.0])
    bench.put([[0.05, 0.0]])
    bench.tick(3)
    np.testing.assert_allclose(bench.first_rows[:, 0], [0, 0, 0.05, 0.05, 0.05])


def test_the_hold_is_approached_at_limited_speed() -> None:
    """The arm lags behind its command; jumping back to it would jerk."""
    bench = Bench()
    bench.put(ramp(0, 0.9))
    bench.tick(10)
    bench.measured = np.array([0.65, 0.9])
    bench.tick(4)
    np.testing.assert_allclose(bench.first_rows[10:, 0], [0.8, 0.7, 0.65, 0.65])


def test_without_chunk_and_measurement_nothing_leaves() -> None:
    bench = Bench(measured=None)
    bench.tick(3)
    assert bench.sent == []
    stats = bench.publisher.stats()
    assert (stats.commands, stats.silent_ticks, stats.source) == (0, 3, 'silence')
    assert stats.interventions['no_reference'] == 3
    bench.measured = np.array([0.1, 0.2])
    bench.tick()
    np.testing.assert_array_equal(bench.first_rows, [[0.1, 0.2]])


def test_a_chunk_without_any_measurement_is_refused() -> None:
    bench = Bench(measured=None)
    bench.put(ramp(0, 0.9))
    bench.tick(3)
    assert bench.sent == []


def test_commands_go_on_when_only_the_measurement_is_lost() -> None:
    bench = Bench()
    bench.put(ramp(0, 0.4, rows=5))
    bench.tick(2)
    bench.measured = None
    bench.tick(5)
    np.testing.assert_allclose(bench.first_rows[:, 0], [0, 0.1, 0.2, 0.3, 0.4])
    assert bench.publisher.stats().source == 'silence'


def test_an_arm_moved_during_silence_is_not_pulled_back_to_the_old_hold() -> None:
    bench = Bench(measured=(0.0, 0.0))
    bench.tick()
    bench.sending = lambda: (_ for _ in ()).throw(RuntimeError('publisher is invalid'))
    bench.tick()
    bench.sending = lambda: None
    bench.measured = np.array([1.0, 0.0])
    bench.tick()
    np.testing.assert_array_equal(bench.first_rows, [[0, 0], [1, 0]])


def test_stop_publishes_nothing() -> None:
    bench = Bench(fallback='stop')
    bench.put(ramp(0, 0.4, rows=5))
    bench.tick(8)
    assert len(bench.sent) == 5
    assert bench.publisher.stats().silent_ticks == 3


def test_home_is_reached_at_limited_speed_and_kept() -> None:
    bench = Bench(measured=(0.35, -0.1), fallback='home', home=(0.0, 0.0))
    bench.tick(6)
    np.testing.assert_allclose(bench.first_rows[:, 0], [0.25, 0.15, 0.05, 0, 0, 0], atol=1e-12)
    np.testing.assert_allclose(bench.first_rows[:, 1], 0, atol=1e-12)
    assert bench.publisher.stats().source == 'home'


@pytest.mark.parametrize('measured', [(0.5, 0.5), None])
def test_a_velocity_is_held_at_zero_even_without_measurement(measured: object) -> None:
    bench = Bench(quantity=('velocity', 'velocity'))
    bench.put(np.ones((3, 2)))
    bench.tick(3)
    bench.measured = None if measured is None else np.array(measured)
    bench.tick(2)
    np.testing.assert_array_equal(bench.first_rows, [[1, 1]] * 3 + [[0, 0]] * 2)


def test_velocities_are_stopped_even_when_the_gripper_is_no_longer_measured() -> None:
    bench = Bench(quantity=('velocity', 'position'))
    bench.put([[1.0, 0.05]])
    bench.tick()
    bench.measured = None
    bench.tick(2)
    np.testing.assert_array_equal(bench.first_rows, [[1, 0.05], [0, 0.05], [0, 0.05]])


# Stop and hold by an operator


@pytest.mark.parametrize('halt', HALTS)
@pytest.mark.parametrize('fallback', ['hold', 'home'])
def test_a_halt_holds_at_the_next_tick_and_does_not_even_go_home(halt: str, fallback: str) -> None:
    bench = Bench(fallback=fallback, home=(1.0, 1.0))
    bench.put(ramp(0, 0.9))
    bench.tick(3)
    bench.halt = halt
    bench.measured = np.array([0.2, 0.15])
    bench.tick(4)
    np.testing.assert_allclose(bench.first_rows[3:], [[0.2, 0.15]] * 4)
    stats = bench.publisher.stats()
    assert (stats.source, stats.halt, stats.fallback_commands) == ('hold', halt, 4)
    assert stats.interventions[halt] == 4


def test_after_a_halt_the_rows_for_now_are_sent_from_where_the_arm_is() -> None:
    bench = Bench(measured=(0.1, 0.1))
    bench.put(ramp(0, 0.9))
    bench.halt = ESTOP
    bench.tick(3)
    bench.halt = ''
    bench.tick(2)
    np.testing.assert_allclose(bench.first_rows[:, 0], [0.1, 0.1, 0.1, 0.2, 0.3])
    assert bench.publisher.stats().halt == ''


def test_where_stop_is_declared_an_emergency_stop_is_silence_and_a_hold_holds() -> None:
    bench = Bench(fallback='stop', measured=(0.2, 0.2))
    bench.put(ramp(0, 0.9))
    bench.halt = ESTOP
    bench.tick(2)
    assert bench.sent == []
    assert bench.publisher.stats().source == 'silence'
    bench.halt = HOLD
    bench.tick(2)
    np.testing.assert_array_equal(bench.first_rows, [[0.2, 0.2]] * 2)


def test_a_halt_replaces_the_rest_of_a_trajectory_by_one_row() -> None:
    bench = Bench(rows_per_command=50)
    bench.put(ramp(0, 0.9))
    bench.tick()
    bench.halt = ESTOP
    bench.tick()
    assert [len(rows) for rows in bench.sent] == [10, 1]


def test_a_halt_stops_velocities_even_without_measurement() -> None:
    bench = Bench(
        measured=None, quantity=('velocity', 'velocity'), lower=(-INF, -INF), upper=(INF, INF)
    )
    bench.put(np.ones((5, 2)))
    bench.tick()
    bench.halt = ESTOP
    bench.tick(2)
    np.testing.assert_array_equal(bench.first_rows, [[1, 1], [0, 0], [0, 0]])


# Limits


@pytest.mark.case(39)
def test_a_seam_between_chunks_is_crossed_in_limited_monotone_steps() -> None:
    """CASES 39: 0.3 rad apart, 0.1 per step: there within ceil(0.3 / 0.1) ticks."""
    bench = Bench()
    bench.put(np.zeros((10, 2)), frame=0)
    bench.tick(3)
    bench.put(np.full((10, 2), 0.3), frame=1)
    bench.tick(6)
    moved = np.diff(bench.first_rows[:, 0])
    assert (moved >= -1e-12).all()
    assert moved.max() <= 0.1 + 1e-9
    np.testing.assert_allclose(bench.first_rows[3:, 0], [0.1, 0.2, 0.3, 0.3, 0.3, 0.3])
    assert bench.publisher.stats().last_intervention == 'limit_step: a, b'


@pytest.mark.case(37, 40)
def test_the_first_command_ramps_from_where_the_arm_stands() -> None:
    """CASES 40: state 0, first target 1.0."""
    bench = Bench()
    bench.put(np.ones((20, 2)))
    bench.tick(12)
    np.testing.assert_allclose(
        bench.first_rows[:, 0], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1]
    )
    assert bench.publisher.stats().interventions['limit_step'] == 9


@pytest.mark.case(40)
def test_after_a_hold_motion_begins_where_the_arm_was_moved_to() -> None:
    bench = Bench()
    bench.tick(2)
    bench.measured = np.array([1.0, 0.0])
    bench.put(np.full((10, 2), [1.05, 0.0]))
    bench.tick()
    np.testing.assert_allclose(bench.first_rows[-1], [1.05, 0.0])


def test_a_joint_that_is_no_longer_read_does_not_jump_back_to_its_last_reading() -> None:
    bench = Bench(measured=(0.0, 0.0))
    bench.put(ramp(0.0, 0.9))
    for _ in range(14):  # ten rows, then the hold; only the first joint is still read
        bench.tick()
        bench.measured = np.array([bench.first_rows[-1, 0] + 0.01, 0.0])
    bench.put(ramp(0.9, 0.9), frame=1)
    bench.tick(10)
    assert (np.abs(np.diff(bench.first_rows, axis=0)) <= 0.1 + 0.01 + 1e-9).all()
    assert bench.first_rows[-1] == pytest.approx([0.9, 0.9])


def test_no_command_leaves_the_limits() -> None:
    bench = Bench(measured=(1.95, 0.0))
    bench.put(np.full((10, 2), 9.0))
    bench.tick(30)
    assert np.abs(bench.first_rows).max() == 2.0
    assert bench.publisher.stats().interventions['limit_position'] == 10


# Time


@pytest.mark.case(26)
def test_a_jump_forward_sends_one_command_for_now_and_counts_the_rest() -> None:
    """CASES 26: SIGSTOP, suspend, or a clock that jumps; nothing is replayed."""
    bench = Bench(measured=(0.0, 0.0))
    bench.put(ramp(0, 0.0, rows=2000))
    bench.tick(3)
    bench.tick(late_ns=10_000 * MS)
    stats = bench.publisher.stats()
    assert (stats.commands, stats.misses) == (4, 500)
    assert stats.lateness_max_ms == 10_000
    # Back in phase: the next deadline is a whole number of periods after the start.
    bench.now_ns = bench.start_ns + 504 * PERIOD
    bench.tick(5)
    stats = bench.publisher.stats()
    assert (stats.commands, stats.misses) == (9, 500)


@pytest.mark.case(26)
def test_after_a_jump_the_row_for_now_is_sent() -> None:
    bench = Bench(measured=(0.0, 0.0), max_velocity=(1e6, 1e6))
    bench.put(ramp(0, 1.9, rows=20))
    bench.tick(2)
    bench.tick(late_ns=7 * PERIOD)
    np.testing.assert_allclose(bench.first_rows[:, 0], [0, 0.1, 0.9])


def test_a_blocked_send_is_lateness_and_costs_the_periods_it_blocked() -> None:
    bench = Bench()
    bench.put(np.zeros((100, 2)))
    bench.tick(2)

    def block() -> None:
        bench.now_ns += 50 * MS

    bench.sending = block
    bench.publisher.tick()
    bench.sending = lambda: None
    stats = bench.publisher.stats()
    assert (stats.commands, stats.misses) == (3, 2)
    assert stats.lateness_max_ms == 50


def test_lateness_is_measured_from_the_deadline() -> None:
    bench = Bench()
    for late_ms in range(10):
        bench.tick(late_ns=late_ms * MS)
    stats = bench.publisher.stats()
    assert stats.lateness_p50_ms == 4.5
    assert stats.lateness_max_ms == 9
    assert stats.misses == 0


@pytest.mark.case(27)
def test_a_stopped_control_clock_does_not_stop_the_commands() -> None:
    """CASES 27: deadlines are on the steady clock; a paused /clock repeats the row for then."""
    bench = Bench()
    bench.put(ramp(0, 0.9))
    for _ in range(5):
        bench.tick()
        bench.control_offset_ns -= PERIOD
    np.testing.assert_array_equal(bench.first_rows, np.zeros((5, 2)))


@pytest.mark.case(27)
def test_a_control_clock_set_back_ends_in_the_fallback() -> None:
    bench = Bench()
    bench.put(ramp(0, 0.9))
    bench.tick(2)
    bench.control_offset_ns = -30_000 * MS
    bench.tick()
    assert bench.publisher.stats().source == 'hold'


@pytest.mark.case(51)
def test_the_command_rate_falls_to_zero_when_stalled() -> None:
    """CASES 51: 50 Hz for 2 s, then nothing."""
    bench = Bench()
    assert bench.publisher.stats().command_hz == 0.0
    assert bench.publisher.stats().command_age_s == float('inf')
    bench.tick(100)
    assert abs(bench.publisher.stats().command_hz - 50) <= 1
    bench.now_ns += 1_000 * MS
    stats = bench.publisher.stats()
    assert stats.command_hz == 0.0
    assert stats.command_age_s >= 1.0


# Errors


def test_an_exception_in_send_is_kept_and_the_next_tick_goes_on() -> None:
    bench = Bench()

    def fail() -> None:
        raise RuntimeError('publisher is invalid')

    bench.sending = fail
    bench.tick(3)
    bench.sending = lambda: None
    bench.tick(2)
    stats = bench.publisher.stats()
    assert (stats.commands, stats.errors, stats.misses) == (2, 3, 0)
    assert str(bench.publisher.error) == 'publisher is invalid'


def test_an_exception_in_measured_does_not_leave_velocities_in_force() -> None:
    bench = Bench(quantity=('velocity', 'velocity'))
    bench.put(np.ones((1, 2)))
    bench.tick()

    def fail() -> np.ndarray | None:
        raise KeyError('joint_1')

    bench.publisher._measured = fail
    bench.tick()
    np.testing.assert_array_equal(bench.first_rows, [[1, 1], [0, 0]])
    assert isinstance(bench.publisher.error, KeyError)


# The real thread: order and counts only, no times


class Sink:
    """Collects commands and lets a test wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.commands: list[np.ndarray] = []
        self.times_ns: list[int] = []

    def send(self, rows: np.ndarray) -> None:
        with self._changed:
            self.times_ns.append(time.monotonic_ns())
            self.commands.append(rows.copy())
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.commands) >= count, timeout=30)


@pytest.fixture
def running() -> Iterator[Callable[..., tuple[CommandPublisher, ActionBuffer, Sink]]]:
    started: list[CommandPublisher] = []

    def start(**changes: object) -> tuple[CommandPublisher, ActionBuffer, Sink]:
        command = command_of(rate_hz=200.0, **changes)
        actions, sink = ActionBuffer(2, 'linear'), Sink()
        publisher = CommandPublisher(
            command, actions, send=sink.send, measured=lambda: np.array([0.5, 0.5])
        )
        started.append(publisher)
        publisher.start()
        return publisher, actions, sink

    yield start
    for publisher in started:
        assert publisher.stop(timeout_s=30)


Running = Callable[..., tuple[CommandPublisher, ActionBuffer, Sink]]


def test_the_thread_keeps_sending_in_order(running: Running) -> None:
    publisher, _, sink = running()
    sink.wait_for(20)
    assert publisher.stop(timeout_s=30)
    stats = publisher.stats()
    assert stats.commands == len(sink.commands)
    assert sink.times_ns == sorted(sink.times_ns)
    assert stats.scheduling.startswith('SCHED_')
    # Never faster than the rate, however late single ticks were: n deadlines span n - 1 periods,
    # and only the last command, sent by stop, may come before its deadline.
    assert sink.times_ns[-2] - sink.times_ns[0] >= (len(sink.times_ns) - 3) * 5 * MS


def test_a_chunk_takes_over_from_the_hold_and_back(running: Running) -> None:
    publisher, actions, sink = running()
    sink.wait_for(3)
    now_ns = time.monotonic_ns()
    actions.put(ActionChunk(0, 0, now_ns, 10_000 * MS, np.full((3, 2), 0.51)), now_ns)
    sink.wait_for(len(sink.commands) + 5)
    assert publisher.stats().commands > publisher.stats().fallback_commands
    actions.clear('test', first_frame=1)
    count = len(sink.commands)
    sink.wait_for(count + 3)
    np.testing.assert_array_equal(sink.commands[-1], [[0.5, 0.5]])


def test_stop_ends_with_a_hold_and_without_a_thread(running: Running) -> None:
    publisher, actions, sink = running()
    now_ns = time.monotonic_ns()
    actions.put(ActionChunk(0, 0, now_ns, 10_000 * MS, np.full((3, 2), 0.52)), now_ns)
    sink.wait_for(5)
    assert publisher.stop(timeout_s=30)
    assert publisher.stats().source == 'hold'
    np.testing.assert_allclose(sink.commands[-1], [[0.5, 0.5]])
    assert 'command_publisher' not in [thread.name for thread in threading.enumerate()]


def test_stop_ends_in_silence_where_the_profile_says_so(running: Running) -> None:
    publisher, actions, sink = running(fallback='stop')
    now_ns = time.monotonic_ns()
    actions.put(ActionChunk(0, 0, now_ns, 10_000 * MS, np.full((3, 2), 0.5)), now_ns)
    sink.wait_for(5)
    assert publisher.stop(timeout_s=30)
    assert publisher.stats().fallback_commands == 0


def test_a_blocked_send_cannot_keep_stop_or_the_process_waiting() -> None:
    entered, released = threading.Event(), threading.Event()

    def block(_: np.ndarray) -> None:
        entered.set()
        released.wait(30)

    publisher = CommandPublisher(
        command_of(), ActionBuffer(2, 'linear'), send=block, measured=lambda: np.zeros(2)
    )
    publisher.start()
    assert entered.wait(30)
    assert not publisher.stop(timeout_s=0.01)
    threads = [thread for thread in threading.enumerate() if thread.name == 'command_publisher']
    assert [thread.daemon for thread in threads] == [True]
    released.set()
    assert publisher.stop(timeout_s=30)


def test_a_publisher_starts_only_once(running: Running) -> None:
    publisher, _, _ = running()
    with pytest.raises(RuntimeError, match='was started before'):
        publisher.start()


def test_stopping_before_the_start_is_harmless() -> None:
    bench = Bench()
    assert bench.publisher.stop()
    assert bench.sent == []
