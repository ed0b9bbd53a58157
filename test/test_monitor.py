"""What an operator is told: rates that fall to zero, levels and sentences. Clocks by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oxygen_ros.engine.engine import EngineStats
from oxygen_ros.monitor import (
    ERROR,
    OK,
    WARN,
    ClockWatch,
    Growth,
    Monitor,
    RateWindow,
    Thresholds,
    interlock_status,
    progress_sentences,
)
from oxygen_ros.observation import SourceStatus
from oxygen_ros.profile import GripperProfile, load_profile
from oxygen_ros.publisher import PublisherStats

CONFIG = Path(__file__).parents[1] / 'config'
S = 1_000_000_000
COMMANDS = PublisherStats(
    commands=100,
    fallback_commands=0,
    misses=0,
    silent_ticks=0,
    errors=0,
    interventions={'limit_step': 0},
    last_intervention='',
    command_hz=50.0,
    command_age_s=0.0,
    lateness_p50_ms=0.1,
    lateness_p99_ms=0.2,
    lateness_max_ms=0.3,
    source='chunk',
    halt='',
    scheduling='SCHED_OTHER',
)
CAMERA = SourceStatus('base_0_rgb', 'camera/base/image_raw', 60, 0, 0, 0.01, 30.0, '')


@pytest.fixture
def monitor(request) -> Monitor:
    return Monitor(load_profile('dummy', request.config.rootpath / 'config'), Thresholds())


def engine_status(monitor, stats=None, active=True, **changes):
    given = {'not_ready': (), 'last_error': '', 'broken': False, 'away': '', 'drops': {}, **changes}
    return monitor.engine_status(active, stats or EngineStats(frames=9), **given)


def test_a_rate_is_that_of_the_window_and_falls_to_zero_when_nothing_happens():
    rate = RateWindow()
    assert rate.add(0, 0) == 0
    for second in range(1, 5):
        assert rate.add(second * S, second * 10) == pytest.approx(10)
    rates = [rate.add(second * S, 40) for second in range(5, 9)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0


def test_a_counter_that_begins_anew_gives_no_negative_rate():
    rate = RateWindow()
    rate.add(0, 1000)
    assert rate.add(S, 5) == 0
    assert rate.add(2 * S, 15) == pytest.approx(10)


def test_growth_is_counted_from_one_look_to_the_next():
    growth = Growth()
    assert growth.grown({'a': 2}) == {'a': 2}
    assert growth.grown({'a': 2, 'b': 1}) == {'b': 1}
    assert growth.grown({'a': 5, 'b': 1}) == {'a': 3}


@pytest.mark.case(51)
def test_the_numbers_hold_both_rates_of_actions_and_stop_when_inactive(monitor):
    def numbers(now_ns, active=True, **changes):
        stats = EngineStats(finished={'text': 3, 'memory': 2}, **changes)
        return monitor.numbers(
            now_ns, stats, COMMANDS, horizon=20, active=active, observation_age_ms=7.0
        )

    assert numbers(0)['draft_acceptance'] == 0
    told = numbers(S, chunks=10, tokens=70, decode_steps=35, drafted=40, accepted=30)
    assert (told['chunk_hz'], told['action_hz'], told['tokens_per_s']) == (10, 200, 70)
    assert (told['tokens_per_pass'], told['draft_acceptance']) == (2, 0.75)
    assert (told['texts'], told['notes'], told['command_hz']) == (3, 2, 50.0)
    assert numbers(2 * S, active=False)['command_hz'] == 0


@pytest.mark.parametrize(
    'changes, level, text',
    [
        ({}, OK, 'fresh actions'),
        ({'source': 'hold'}, WARN, 'no fresh action: hold'),
        ({'source': 'hold', 'halt': 'estop'}, WARN, 'estop: hold'),
        ({'source': 'silence', 'halt': 'estop'}, WARN, 'estop: silence'),
        ({'source': 'silence'}, WARN, 'nothing that is allowed to leave'),
        ({'misses': 3}, WARN, '3 deadlines missed'),
        ({'errors': 1}, ERROR, 'could not be published'),
    ],
)
def test_the_command_tick_is_described(monitor, changes, level, text):
    status = monitor.command_status(True, replace(COMMANDS, **changes), 0.1)
    assert status.level == level
    assert text in status.message


WARN_LATER = Thresholds(rate_share=0.5, lateness_p99_ms=30.0, chunk_age_s=9.0, drops=5)


@pytest.mark.parametrize(
    'changes, chunk_age_s, text',
    [
        ({'command_hz': 39.0}, 0.1, '39.0 Hz of 50 Hz leave'),
        ({'lateness_p99_ms': 20.0}, 0.1, 'late by 20.00 ms (p99), expected at most 10 ms'),
        ({}, 1.5, 'the chunk is 1.50 s old, expected at most 1 s'),
    ],
)
def test_beyond_a_threshold_the_commands_are_warned_of_and_the_threshold_can_be_set(
    changes, chunk_age_s, text
):
    profile, stats = load_profile('dummy', CONFIG), replace(COMMANDS, **changes)
    warned = Monitor(profile, Thresholds()).command_status(True, stats, chunk_age_s)
    assert (warned.level, warned.message) == (WARN, text)
    assert Monitor(profile, WARN_LATER).command_status(True, stats, chunk_age_s).level == OK


def test_a_rate_is_not_judged_before_it_was_measured(monitor):
    begun = replace(COMMANDS, commands=3, command_hz=3.0)
    assert monitor.command_status(True, begun, 0.1).level == OK


def test_drops_up_to_the_threshold_are_no_warning():
    monitor = Monitor(load_profile('dummy', CONFIG), WARN_LATER)
    assert engine_status(monitor, drops={'image_older': 3, 'tick_skipped': 2}).level == OK
    assert engine_status(monitor, drops={'image_older': 9, 'tick_skipped': 2}).level == WARN


def test_a_camera_is_slow_below_the_share_that_was_set():
    half = replace(CAMERA, rate_hz=16.0)
    profile = load_profile('dummy', CONFIG)
    assert Monitor(profile, Thresholds()).source_status(half).level == WARN
    assert Monitor(profile, WARN_LATER).source_status(half).level == OK


def test_old_misses_are_no_news(monitor):
    late = replace(COMMANDS, misses=3)
    assert monitor.command_status(True, late, 0.1).level == WARN
    assert monitor.command_status(True, late, 0.1).level == OK


@pytest.mark.parametrize(
    'changes, level, text',
    [
        ({}, OK, 'running'),
        ({'active': False}, OK, 'inactive'),
        ({'not_ready': ('no image on /x yet',)}, WARN, 'no frame: no image on /x yet'),
        ({'drops': {'text_expired': 2}}, WARN, '2 text_expired'),
        ({'drops': {'frame_failed': 1}, 'last_error': 'OOM'}, ERROR, 'a frame failed: OOM'),
        ({'broken': True, 'last_error': 'OOM'}, ERROR, 'given up: OOM'),
        ({'away': 'it was ended; restart 1 in 1 s', 'active': False}, ERROR, 'restart 1 in 1 s'),
        ({'stats': EngineStats(starved_frames=4, prefill_ms=90.0)}, WARN, 'no time to write'),
    ],
)
def test_the_engine_is_described(monitor, changes, level, text):
    status = engine_status(monitor, **changes)
    assert status.level == level
    assert text in status.message


@pytest.mark.case(15)
@pytest.mark.parametrize(
    'changes, level, text',
    [
        ({}, OK, '30.0 Hz'),
        ({'age_s': None, 'rate_hz': 0.0}, ERROR, 'nothing on camera/base/image_raw yet'),
        ({'rate_hz': 0.0}, ERROR, 'any more'),
        ({'rate_hz': 9.0}, WARN, '9.0 Hz of 30 Hz'),
        ({'last_error': 'expected JPEG'}, WARN, 'expected JPEG'),
        ({'name': 'left_wrist_0_rgb', 'age_s': None}, WARN, 'yet'),  # optional
        ({'name': 'joints', 'rate_hz': 1.0}, OK, '1.0 Hz'),
    ],
)
def test_a_source_is_described(monitor, changes, level, text):
    status = monitor.source_status(replace(CAMERA, **changes))
    assert status.level == level
    assert text in status.message


@pytest.mark.parametrize(
    'reasons, level, message',
    [
        ({}, OK, 'released'),
        ({'hold': 'called'}, WARN, 'hold: called'),
        ({'hold': 'called', 'estop': 'true on /e'}, ERROR, 'hold: called; estop: true on /e'),
    ],
)
def test_what_an_operator_engaged_is_told_with_its_reason(reasons, level, message):
    status = interlock_status(reasons, estops=2, holds=1)
    assert (status.level, status.message) == (level, message)
    assert status.values == {'Emergency stops': 2, 'Holds': 1}


def test_endpoints_that_do_not_fit_and_missed_deadlines_are_told(monitor):
    assert monitor.middleware_status([], {}).level == OK
    status = monitor.middleware_status([], {'/commands': 3})
    assert (status.level, status.message) == (WARN, 'deadlines missed: 3 on /commands')
    status = monitor.middleware_status([], {'/commands': 3})
    assert status.level == OK, 'old misses are no news'
    assert status.values == {'Deadlines missed on /commands': 3}
    status = monitor.middleware_status(['/text: /ui asks for more'], {'/commands': 4})
    assert (status.level, status.message) == (WARN, '/text: /ui asks for more')


def test_a_simulated_clock_that_does_not_run_is_named():
    watch = ClockWatch()
    assert 'waiting for /clock' in watch.status(True, 0, 0).message
    assert watch.status(True, 5 * S, S).level == OK


@pytest.mark.case(27)
@pytest.mark.parametrize('step_ns', [-30 * S, 5 * S])
def test_a_system_clock_that_is_set_is_told_once_and_counted(step_ns):
    watch, ros_ns = ClockWatch(), 1000 * S
    assert watch.status(False, ros_ns, 0).level == OK
    assert watch.status(False, ros_ns + S, S).level == OK
    told = watch.status(False, ros_ns + 2 * S + step_ns, 2 * S)
    assert told.level == WARN
    assert f'stepped by {step_ns / S:+.3f} s' in told.message
    after = watch.status(False, ros_ns + 3 * S + step_ns, 3 * S)
    assert (after.level, after.values) == (OK, {'Steps': 1})


def test_a_system_clock_that_is_slewed_is_no_step():
    watch = ClockWatch()
    for k in range(100):
        assert watch.status(False, k * (S + S // 1000), k * S).level == OK


def test_a_slow_load_says_every_tenth_once_and_a_fast_one_nothing() -> None:
    for seconds, expected in ((0.001, []), (0.1, ['20 %', '30 %', '40 %', '50 %', '100 %'])):
        said: list[str] = []
        now_s = 0.0
        report = progress_sentences(said.append, lambda: now_s)  # noqa: B023
        for percent in (*range(1, 56), 100):
            now_s += seconds
            report(percent / 100)
        assert said == [f'weights loaded: {share}' for share in expected]


@pytest.mark.case(36)
@pytest.mark.parametrize(
    ('position', 'level'), [(0.0, OK), (0.87, OK), (-0.07, OK), (0.9, WARN), (-0.1, WARN)]
)
def test_a_gripper_more_than_a_tenth_outside_its_range_is_reported(position, level) -> None:
    gripper = GripperProfile(joint='gripper', model=(0.0, 1.0), robot=(0.0, 0.8), invert=True)
    profile = replace(load_profile('dummy', CONFIG), grippers=(gripper,))
    status = Monitor(profile, Thresholds()).gripper_status({'gripper': position})
    assert status.level == level
    assert ('is it another unit?' in status.message) == (level == WARN)


def test_a_gripper_that_is_not_measured_is_no_problem_of_its_range() -> None:
    gripper = GripperProfile(joint='gripper', model=(0.0, 1.0), robot=(0.0, 0.8))
    profile = replace(load_profile('dummy', CONFIG), grippers=(gripper,))
    assert Monitor(profile, Thresholds()).gripper_status({}).level == OK
