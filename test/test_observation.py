"""observation.py: order, age and completeness of what a frame sees, on hand-driven clocks."""

from __future__ import annotations

import threading
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oxygen_ros.conversions import check_image, decode_image, joint_positions, stamp_to_ns
from oxygen_ros.observation import (
    OLDER_BEFORE_RESET,
    ConversionError,
    NotReady,
    Observation,
    ObservationBuffer,
    SourceStatus,
)
from oxygen_ros.profile import CameraProfile, JointsProfile

MS = 1_000_000
S = 1_000_000_000
EPOCH = 1_700_000_000 * S  # ROS time minus control clock in these tests

BASE = CameraProfile(slot='base_0_rgb', topic='/base/image_raw', max_age_s=0.5)
WRIST = CameraProfile(
    slot='left_wrist_0_rgb', topic='/wrist/image_raw', required=False, max_age_s=0.5
)
JOINTS = JointsProfile(topic='/joint_states', names=('shoulder', 'elbow'), max_age_s=0.2)


class Robot:
    """A buffer with both clocks in one hand; a message is the brightness of its picture."""

    def __init__(
        self, *cameras: CameraProfile, joints: JointsProfile = JOINTS, feed_back: int = 0
    ) -> None:
        self.now_ns = 100 * S
        self.decoded: list[Any] = []  # messages, in the order they were decoded
        self.buffer = ObservationBuffer(
            cameras or (BASE,), joints, self.decode, feed_back=feed_back
        )

    def decode(self, message: Any, camera: CameraProfile) -> np.ndarray:
        self.decoded.append(message)
        if message == 'broken':
            raise ConversionError('image_decode', f'{camera.topic}: broken')
        return np.full((2, 3, 3), message, np.uint8)

    def image(self, message: Any, stamp_ns: int | None = None, slot: str = BASE.slot) -> None:
        """Receive an image now; its stamp is now unless given on the control clock."""
        stamp_ns = self.now_ns if stamp_ns is None else stamp_ns
        self.header_image(message, stamp_ns + EPOCH, slot)

    def header_image(self, message: Any, header_ns: int, slot: str = BASE.slot) -> None:
        self.buffer.put_image(slot, message, header_ns, self.now_ns, self.now_ns + EPOCH)

    def joints(self, stamp_ns: int | None = None, **positions: float) -> None:
        stamp_ns = (self.now_ns if stamp_ns is None else stamp_ns) + EPOCH
        positions = positions or {'shoulder': 1.0, 'elbow': 2.0}
        self.buffer.put_joints(positions, stamp_ns, self.now_ns, self.now_ns + EPOCH)

    def snapshot(self, frame: int = 0) -> Observation | NotReady:
        return self.buffer.snapshot(frame, self.now_ns)

    def observation(self) -> Observation:
        snapshot = self.snapshot()
        assert isinstance(snapshot, Observation), snapshot
        return snapshot

    def reasons(self) -> tuple[str, ...]:
        snapshot = self.snapshot()
        assert isinstance(snapshot, NotReady), snapshot
        return snapshot.reasons

    def brightness(self, slot: str = BASE.slot) -> int:
        return int(self.observation().images[slot][0, 0, 0])

    def status(self, name: str = BASE.slot) -> SourceStatus:
        return next(s for s in self.buffer.status(self.now_ns) if s.name == name)


# ---- the observation


def test_an_observation_holds_the_newest_notes_as_many_as_are_fed_back() -> None:
    robot, forgetful = Robot(feed_back=2), Robot()
    for one in (robot, forgetful):
        one.joints()
        one.image(1)
        for note in ('first', 'second', 'third'):
            one.buffer.put_note(note)
    assert robot.observation().notes == ('second', 'third')
    assert forgetful.observation().notes == ()
    robot.buffer.clear()  # of another time
    robot.joints()
    robot.image(1)
    assert robot.observation().notes == ()


def test_an_observation_holds_the_newest_of_every_source_in_profile_order() -> None:
    robot = Robot(BASE, WRIST)
    robot.buffer.set_instruction('pick')
    robot.joints(elbow=2.5, wheel=9.0, shoulder=1.5)
    robot.now_ns += 40 * MS
    robot.image(10)
    robot.image(20, robot.now_ns - 15 * MS, WRIST.slot)
    robot.now_ns += 5 * MS
    snapshot = robot.buffer.snapshot(7, robot.now_ns)
    assert isinstance(snapshot, Observation)
    assert snapshot.frame == 7
    assert snapshot.time_ns == robot.now_ns - 5 * MS
    assert snapshot.stamp_ns == snapshot.time_ns + EPOCH
    assert snapshot.state.dtype == np.float32
    assert snapshot.state.tolist() == [1.5, 2.5]
    assert snapshot.instruction == 'pick'
    assert {slot: image[0, 0, 0] for slot, image in snapshot.images.items()} == {
        'base_0_rgb': 10,
        'left_wrist_0_rgb': 20,
    }
    assert robot.buffer.skew_s == pytest.approx(0.040)


def test_an_observation_does_not_change_and_cannot_be_changed() -> None:
    robot = Robot()
    robot.buffer.set_instruction('pick')
    robot.image(1)
    robot.joints(shoulder=1.0, elbow=2.0)
    before = robot.observation()
    robot.now_ns += 10 * MS
    robot.buffer.set_instruction('place')
    robot.image(2)
    robot.joints(shoulder=1.2, elbow=2.0)
    robot.observation()
    assert before.state.tolist() == [1.0, 2.0]
    assert before.instruction == 'pick'
    assert (before.images[BASE.slot] == 1).all()
    with pytest.raises(ValueError, match='read-only'):
        before.images[BASE.slot][0, 0, 0] = 9
    with pytest.raises(ValueError, match='read-only'):
        before.state[0] = 9
    with pytest.raises(FrozenInstanceError):
        before.instruction = 'place'  # type: ignore[misc]


@pytest.mark.case(22)
def test_swapped_camera_slots_swap_the_images() -> None:
    pictures = []
    for slots in (('a', 'b'), ('b', 'a')):
        cameras = [
            CameraProfile(slot=slot, topic=topic, max_age_s=0.5)
            for slot, topic in zip(slots, ('left', 'right'), strict=True)
        ]
        robot = Robot(*cameras)
        for camera, brightness in zip(cameras, (10, 20), strict=True):
            robot.image(brightness, slot=camera.slot)
        robot.joints()
        pictures.append((robot.brightness('a'), robot.brightness('b')))
    assert pictures == [(10, 20), (20, 10)]


@pytest.mark.case(22)
def test_everything_is_taken_at_one_moment_though_decoding_takes_long() -> None:
    robot = Robot()

    def decode_while_the_world_moves(message: Any, camera: CameraProfile) -> np.ndarray:
        robot.now_ns += 100 * MS
        robot.joints(shoulder=1.1, elbow=2.0)
        robot.image(99)
        robot.buffer.set_instruction('place')
        return np.full((2, 2, 3), message, np.uint8)

    robot.buffer = ObservationBuffer((BASE,), JOINTS, decode_while_the_world_moves)
    robot.buffer.set_instruction('pick')
    robot.image(10)
    robot.joints(shoulder=1.0, elbow=2.0)
    snapshot = robot.observation()
    assert (snapshot.images[BASE.slot] == 10).all()
    assert snapshot.state.tolist() == [1.0, 2.0]
    assert snapshot.instruction == 'pick'
    assert robot.brightness() == 99  # and the picture that came meanwhile is not lost


# ---- what is missing


def test_each_missing_source_is_named_with_its_topic() -> None:
    robot = Robot(BASE, WRIST)
    assert robot.reasons() == (
        'camera base_0_rgb: no image on /base/image_raw yet',
        'joints shoulder, elbow: no position on /joint_states yet',
    )
    robot.image(1)
    robot.joints(shoulder=1.0)
    assert robot.reasons() == ('joint elbow: no position on /joint_states yet',)


def test_a_stale_source_is_named_with_its_age_and_limit() -> None:
    robot = Robot()
    robot.image(1)
    robot.joints()
    robot.now_ns += 800 * MS
    robot.joints(elbow=2.0)
    assert robot.reasons() == (
        'camera base_0_rgb: last image on /base/image_raw is 0.8 s old, limit 0.5 s',
        'joint shoulder: last position on /joint_states is 0.8 s old, limit 0.2 s',
    )


def test_the_age_limit_itself_is_still_fresh() -> None:
    robot = Robot()
    robot.image(1)
    robot.now_ns += 500 * MS
    robot.joints()
    robot.observation()
    robot.now_ns += 1
    assert len(robot.reasons()) == 1


def test_an_optional_camera_is_left_out_while_it_is_absent_or_stale() -> None:
    robot = Robot(BASE, WRIST)
    robot.image(1)
    robot.joints()
    assert set(robot.observation().images) == {BASE.slot}
    robot.image(2, slot=WRIST.slot)
    assert set(robot.observation().images) == {BASE.slot, WRIST.slot}
    robot.now_ns += 600 * MS
    robot.image(3)
    robot.joints()
    assert set(robot.observation().images) == {BASE.slot}


def test_a_frame_without_any_image_does_not_start() -> None:
    robot = Robot(WRIST)
    robot.joints()
    assert robot.reasons() == ('camera left_wrist_0_rgb: no image on /wrist/image_raw yet',)


def test_nothing_is_decoded_while_something_is_missing() -> None:
    robot = Robot()
    robot.image(1)
    robot.reasons()
    assert robot.decoded == []


# ---- newest wins, decoded once


@pytest.mark.case(12, 19)
def test_the_newest_image_at_the_tick_is_used_and_only_that_one_is_decoded() -> None:
    robot = Robot()
    used = []
    for counter in range(30):  # 30 Hz camera, a frame every tenth image
        robot.now_ns += 33 * MS
        robot.image(counter)
        robot.joints()
        if counter % 10 == 9:
            used.append(robot.brightness())
    assert used == [9, 19, 29]
    assert robot.decoded == [9, 19, 29]


def test_an_image_that_is_used_twice_is_decoded_once() -> None:
    robot = Robot()
    robot.image(1)
    robot.joints()
    first, second = robot.observation(), robot.observation()
    assert first.images[BASE.slot] is second.images[BASE.slot]
    assert robot.decoded == [1]


def test_decoding_happens_in_the_callers_thread_and_without_the_lock() -> None:
    robot = Robot()
    seen: dict[str, Any] = {}

    def decode(message: Any, camera: CameraProfile) -> np.ndarray:
        seen['thread'] = threading.get_ident()
        # Would wait for ever if the lock were held.
        callback = threading.Thread(target=lambda: robot.image(2), daemon=True)
        callback.start()
        callback.join(timeout=10)
        seen['callback returned'] = not callback.is_alive()
        return np.zeros((1, 1, 3), np.uint8)

    robot.buffer = ObservationBuffer((BASE,), JOINTS, decode)
    robot.image(1)
    robot.joints()
    robot.observation()
    assert seen == {'thread': threading.get_ident(), 'callback returned': True}


# ---- broken images


def test_a_broken_newest_image_is_counted_and_the_one_before_stands_in_with_its_own_age() -> None:
    robot = Robot()
    robot.joints()
    robot.image(1)
    robot.now_ns += 30 * MS
    robot.image('broken')
    snapshot = robot.observation()
    assert (snapshot.images[BASE.slot] == 1).all()
    assert snapshot.time_ns == robot.now_ns - 30 * MS
    assert robot.buffer.drops() == {'image_decode': 1}
    robot.observation()
    assert robot.buffer.drops() == {'image_decode': 1}  # it is gone, not tried again


def test_the_last_decoded_image_stands_in_until_it_is_too_old() -> None:
    robot = Robot()
    robot.image(1)
    robot.joints()
    robot.observation()
    for _ in range(5):
        robot.now_ns += 100 * MS
        robot.image('broken')
        robot.joints()
        assert robot.brightness() == 1
    robot.now_ns += 100 * MS
    robot.image('broken')
    robot.joints()
    assert robot.reasons() == (
        'camera base_0_rgb: last image on /base/image_raw is 0.6 s old, limit 0.5 s '
        '(/base/image_raw: broken)',
    )
    assert robot.buffer.drops() == {'image_decode': 6}


def test_a_camera_that_only_ever_sent_broken_images_says_so() -> None:
    robot = Robot()
    robot.image('broken')
    robot.joints()
    expected = 'camera base_0_rgb: no image on /base/image_raw yet (/base/image_raw: broken)'
    assert robot.reasons() == (expected,)


@pytest.mark.case(2, 8)
def test_a_failing_and_a_recovering_camera_are_told_once_each() -> None:
    robot = Robot()
    robot.joints()
    robot.image(1)
    robot.observation()
    for _ in range(3):
        robot.now_ns += 20 * MS
        robot.image('broken')
        robot.observation()
    assert robot.status().last_error == '/base/image_raw: broken'
    robot.now_ns += 20 * MS
    robot.image(2)
    robot.observation()
    assert robot.status().last_error == ''
    assert robot.buffer.notices() == (
        'camera base_0_rgb: /base/image_raw: broken',
        'camera base_0_rgb: recovered on /base/image_raw',
    )
    assert robot.buffer.notices() == ()


def test_images_refused_at_arrival_are_counted_and_leave_other_cameras_alone() -> None:
    robot = Robot(BASE, WRIST)
    robot.image(1)
    robot.joints()
    for _ in range(2):
        robot.buffer.count_drop('image_truncated', WRIST.slot, '/wrist/image_raw: too short')
    robot.buffer.count_drop('chunk_late')
    assert robot.buffer.drops() == {'image_truncated': 2, 'chunk_late': 1}
    wrist = robot.status(WRIST.slot)
    assert (wrist.received, wrist.dropped) == (2, 2)
    assert wrist.last_error == '/wrist/image_raw: too short'
    assert robot.buffer.notices() == ('camera left_wrist_0_rgb: /wrist/image_raw: too short',)
    assert robot.status().last_error == ''
    assert robot.brightness() == 1


# ---- order


@pytest.mark.case(21)
def test_an_older_image_arriving_later_is_dropped_and_counted() -> None:
    robot = Robot()
    robot.joints()
    robot.image(1)
    robot.now_ns += 50 * MS
    robot.image(2, robot.now_ns - 150 * MS)
    assert robot.brightness() == 1
    assert robot.buffer.drops() == {'image_older': 1}
    robot.image(3)
    assert robot.brightness() == 3


@pytest.mark.case(21)
def test_ten_images_of_an_earlier_epoch_are_a_clock_reset_accepted_once() -> None:
    robot = Robot()
    robot.image(0)
    used = []
    for i in range(1, 13):
        robot.now_ns += 20 * MS
        robot.joints()
        robot.image(i, robot.now_ns - 1_000_000 * S)
        used.append(robot.brightness())
    assert used == [0] * (OLDER_BEFORE_RESET - 1) + [10, 11, 12]
    assert robot.buffer.drops() == {'image_older': OLDER_BEFORE_RESET - 1}
    resets = [notice for notice in robot.buffer.notices() if 'set back' in notice]
    assert len(resets) == 1


def test_a_clock_set_back_a_little_is_believed_after_ten_images() -> None:
    robot = Robot()
    robot.image(0)
    for i in range(OLDER_BEFORE_RESET):
        robot.image(1 + i, robot.now_ns - 400 * MS + i)
    robot.joints()
    assert robot.brightness() == OLDER_BEFORE_RESET
    assert robot.status().age_s == pytest.approx(0.4)
    assert robot.status().untrusted_stamps == 0


def test_older_images_between_newer_ones_never_add_up_to_a_reset() -> None:
    robot = Robot()
    robot.joints()
    for i in range(30):
        robot.now_ns += MS
        robot.image(1)
        robot.image(2, robot.now_ns - 50 * MS)
        assert robot.brightness() == 1, i
    assert robot.buffer.drops() == {'image_older': 30}


def test_a_frozen_camera_repeating_its_stamp_grows_old() -> None:
    robot = Robot()
    frozen_ns = robot.now_ns
    for _ in range(10):
        robot.image(1, frozen_ns)
        robot.now_ns += 60 * MS
    robot.joints()
    status = robot.status()
    assert status.received == 10
    assert status.age_s == pytest.approx(0.6)
    assert robot.buffer.drops() == {'image_repeated': 9}
    assert '0.6 s old' in robot.reasons()[0]


# ---- stamps that cannot be believed


@pytest.mark.case(20)
@pytest.mark.parametrize(
    'header_ns',
    [
        0,
        100 * S,  # another epoch, 1.7e9 s away
        EPOCH + 100 * S + 3600 * S,
        EPOCH + 100 * S + 101 * MS,
        EPOCH + 100 * S - 5001 * MS,  # older than ten limits
    ],
)
def test_an_implausible_stamp_falls_back_to_the_time_of_receipt(header_ns: int) -> None:
    robot = Robot()
    for brightness in range(3):
        robot.header_image(brightness, header_ns + brightness)
    robot.joints()
    snapshot = robot.observation()
    assert (snapshot.images[BASE.slot] == 2).all()
    assert snapshot.time_ns == robot.now_ns
    assert snapshot.stamp_ns == robot.now_ns + EPOCH
    assert robot.status().untrusted_stamps == 3
    notices = robot.buffer.notices()
    assert len(notices) == 1
    assert '/base/image_raw' in notices[0]
    assert 'implausible' in notices[0]


def test_images_without_a_stamp_are_ordered_by_arrival() -> None:
    robot = Robot()
    robot.joints()
    for brightness in range(15):
        robot.header_image(brightness, 0)
        assert robot.brightness() == brightness
    assert robot.buffer.drops() == {}
    assert robot.status().untrusted_stamps == 15


@pytest.mark.parametrize('header_ns', [EPOCH + 100 * S + 100 * MS, EPOCH + 100 * S - 5000 * MS])
def test_a_stamp_at_the_edge_of_the_plausible_is_believed(header_ns: int) -> None:
    robot = Robot()
    robot.header_image(1, header_ns)
    assert robot.status().untrusted_stamps == 0
    assert robot.status().age_s == max(0.0, (EPOCH + robot.now_ns - header_ns) / S)


def test_one_stamp_in_the_future_does_not_shut_out_the_good_ones_after_it() -> None:
    robot = Robot()
    robot.joints()
    robot.image(1)
    robot.now_ns += 20 * MS
    robot.image(2, robot.now_ns + 3600 * S)
    robot.now_ns += 20 * MS
    robot.image(3)
    assert robot.brightness() == 3
    assert robot.buffer.drops() == {}


@pytest.mark.case(20)
def test_a_slow_drift_shows_in_the_age_until_it_is_too_old() -> None:
    robot = Robot()
    ages = []
    for second in range(60):  # the device's clock loses 10 ms/s
        robot.now_ns += S
        robot.image(second % 256, robot.now_ns - second * 10 * MS)
        robot.joints()
        ages.append(robot.status().age_s)
        assert isinstance(robot.snapshot(), Observation) == (second <= 50)
    assert ages == pytest.approx([0.01 * second for second in range(60)])
    assert robot.buffer.notices() == ()


# ---- joints


def test_a_joint_keeps_its_last_reading_until_that_is_too_old() -> None:
    robot = Robot()
    robot.image(1)
    robot.joints(shoulder=1.0, elbow=2.0)
    robot.now_ns += 200 * MS
    robot.joints(shoulder=1.1)  # elbow read NaN, conversions left it out
    assert robot.observation().state.tolist() == pytest.approx([1.1, 2.0])
    assert robot.buffer.positions(robot.now_ns) == {'shoulder': 1.1, 'elbow': 2.0}
    assert robot.buffer.skew_s == pytest.approx(0.2)
    robot.now_ns += MS
    assert robot.reasons() == (
        'joint elbow: last position on /joint_states is 0.2 s old, limit 0.2 s',
    )
    assert robot.buffer.positions(robot.now_ns) == {'shoulder': 1.1}


def test_arm_and_gripper_may_be_published_apart_with_interleaved_stamps() -> None:
    robot = Robot()
    robot.image(1)
    for i in range(20):
        robot.now_ns += 10 * MS
        robot.joints(shoulder=0.01 * i)
        robot.joints(robot.now_ns - 5 * MS, elbow=0.02 * i)  # a slower host
    assert robot.observation().state.tolist() == pytest.approx([0.19, 0.38])
    assert robot.buffer.drops() == {}


def test_older_and_repeated_joint_states_are_dropped_and_counted_once_per_message() -> None:
    robot = Robot()
    robot.image(1)
    robot.joints(shoulder=1.0, elbow=2.0)
    robot.joints(shoulder=8.0, elbow=8.0)
    robot.joints(robot.now_ns - 10 * MS, shoulder=9.0, elbow=9.0)
    assert robot.observation().state.tolist() == [1.0, 2.0]
    assert robot.buffer.drops() == {'joints_repeated': 1, 'joints_older': 1}
    assert robot.status('joints').dropped == 2


def test_a_joint_clock_set_back_is_accepted_after_ten_messages() -> None:
    robot = Robot()
    robot.joints(shoulder=1.0, elbow=2.0)
    for _ in range(OLDER_BEFORE_RESET):
        robot.now_ns += 10 * MS
        robot.joints(robot.now_ns - 150 * MS, shoulder=1.5, elbow=2.5)
    assert robot.buffer.positions(robot.now_ns) == {'shoulder': 1.5, 'elbow': 2.5}
    assert robot.buffer.drops() == {'joints_older': OLDER_BEFORE_RESET - 1}
    assert len(robot.buffer.notices()) == 1


def publish_50_hz(robot: Robot, seconds: float, zeros_every: int = 0) -> list[Any]:
    """Publish 1.0 rad at 50 Hz, and zeros after every so many; return a snapshot after each."""
    snapshots = []
    for i in range(round(50 * seconds)):
        robot.now_ns += 10 * MS
        robot.joints(shoulder=1.0, elbow=1.0)
        robot.image(1)
        snapshots.append(robot.snapshot())
        robot.now_ns += 10 * MS
        if zeros_every and i % zeros_every == 0:
            robot.joints(shoulder=0.0, elbow=0.0)
            snapshots.append(robot.snapshot())
    return snapshots


@pytest.mark.case(31)
def test_a_second_publisher_of_zeros_stops_frames_until_a_second_after_it_is_gone() -> None:
    robot = Robot()
    # From the second jump on it is known; what the first one was cannot be told from one sample.
    publish_50_hz(robot, 0.04, zeros_every=5)
    for snapshot in publish_50_hz(robot, 2.0, zeros_every=5):
        assert isinstance(snapshot, NotReady)
        assert snapshot.reasons == (
            'joints shoulder, elbow: positions on /joint_states jump to and fro; '
            'are there two publishers?',
        )
    assert robot.buffer.positions(robot.now_ns) == {}  # neither is a position to hold
    ready = [isinstance(snapshot, Observation) for snapshot in publish_50_hz(robot, 2.0)]
    first = ready.index(True)
    assert 0.8 <= first / 50 <= 1.02
    assert all(ready[first:])


@pytest.mark.parametrize('offset', [0.0, np.pi])
def test_fast_motion_and_a_continuous_joint_turning_over_are_no_conflict(offset: float) -> None:
    robot = Robot()
    for i in range(200):
        robot.now_ns += 10 * MS
        angle = offset + np.sin(2 * np.pi * i / 100)  # up to 6.3 rad/s, to and fro
        robot.joints(shoulder=float(np.angle(np.exp(1j * angle))), elbow=0.0)
        robot.image(1)
        robot.observation()


def test_a_joint_that_jumped_once_is_believed() -> None:
    robot = Robot()
    robot.image(1)
    robot.joints(shoulder=0.0, elbow=0.0)
    robot.now_ns += 20 * MS
    robot.joints(shoulder=1.0, elbow=0.0)  # homed: the encoder's zero moved
    assert robot.observation().state.tolist() == [1.0, 0.0]


# ---- instruction, clear, status


@pytest.mark.case(14)
def test_the_same_instruction_again_is_no_change() -> None:
    robot = Robot()
    assert robot.buffer.set_instruction(' pick the cup\n')
    assert not robot.buffer.set_instruction('pick the cup')
    assert robot.buffer.set_instruction('')
    assert not robot.buffer.set_instruction('  ')


class Instructed:
    """A buffer whose instruction may be 10 s old."""

    def __init__(self) -> None:
        self.buffer = ObservationBuffer(
            (BASE,), JOINTS, lambda message, camera: message, instruction_max_age_s=10.0
        )
        self.buffer.set_instruction('pick')
        self.buffer.expire_instruction(100 * S)  # the first look, its age begins

    def expires_at(self, second: float) -> bool:
        return self.buffer.expire_instruction(round(second * S))


def test_an_instruction_that_is_too_old_is_none_which_is_told_once() -> None:
    instructed = Instructed()
    assert not instructed.expires_at(110.0)
    assert [instructed.expires_at(second) for second in (110.1, 111.0)] == [True, False]
    assert instructed.buffer.drops() == {'instruction_stale': 1}
    assert instructed.buffer.set_instruction('pick'), 'the same one again is a new one now'
    assert not instructed.expires_at(200.0)


def test_the_same_instruction_again_keeps_it_young() -> None:
    instructed = Instructed()
    assert not instructed.buffer.set_instruction('pick')
    assert not instructed.expires_at(115.0)
    assert not instructed.expires_at(125.0)
    assert instructed.expires_at(125.1)


def test_a_clock_that_jumps_does_not_age_the_instruction() -> None:
    instructed = Instructed()
    instructed.buffer.clear()
    assert not instructed.expires_at(5000.0)
    assert instructed.expires_at(5010.1)


def test_without_a_limit_an_instruction_stays_for_ever() -> None:
    robot = Robot()
    robot.buffer.set_instruction('pick')
    assert not robot.buffer.expire_instruction(0)
    assert not robot.buffer.expire_instruction(10**9 * S)


def test_clear_forgets_images_and_joints_but_not_the_instruction() -> None:
    robot = Robot()
    robot.buffer.set_instruction('pick')
    robot.image(1)
    robot.joints()
    robot.observation()
    robot.buffer.clear()
    assert len(robot.reasons()) == 2
    robot.now_ns -= 50 * S  # the clock jumped back; older stamps are the new normal
    robot.image(2)
    robot.joints()
    assert robot.brightness() == 2
    assert robot.observation().instruction == 'pick'
    assert robot.buffer.drops() == {}


def test_a_snapshot_under_way_when_the_clock_jumps_comes_to_nothing() -> None:
    robot = Robot()

    def decode(message: Any, camera: CameraProfile) -> np.ndarray:
        robot.buffer.clear()
        return np.zeros((1, 1, 3), np.uint8)

    robot.buffer = ObservationBuffer((BASE,), JOINTS, decode)
    robot.image(1)
    robot.joints()
    assert robot.reasons() == ('the clock jumped while the frame was taken',)
    assert len(robot.reasons()) == 2  # nothing of the old epoch came back


@pytest.mark.case(15)
def test_the_rate_is_that_of_the_last_two_seconds_and_falls_to_zero() -> None:
    robot = Robot()
    assert robot.status().rate_hz == 0.0
    for i in range(90):
        robot.now_ns += S // 30
        robot.image(i)
    assert robot.status().rate_hz == pytest.approx(30, rel=0.02)
    assert robot.status().received == 90
    robot.now_ns += S
    assert 10 < robot.status().rate_hz < 20
    robot.now_ns += 2 * S
    assert robot.status().rate_hz == 0.0
    assert robot.status().age_s == pytest.approx(3.0)


def test_status_lists_cameras_in_profile_order_then_the_joints() -> None:
    robot = Robot(WRIST, BASE)
    statuses = robot.buffer.status(robot.now_ns)
    assert [status.name for status in statuses] == ['left_wrist_0_rgb', 'base_0_rgb', 'joints']
    assert [status.age_s for status in statuses] == [None, None, None]
    robot.joints(shoulder=1.0)
    assert robot.status('joints').age_s is None  # one joint is still unknown
    robot.now_ns += 20 * MS
    robot.joints(elbow=1.0)
    assert robot.status('joints').age_s == pytest.approx(0.02)


def test_writers_and_the_frame_thread_never_mix_two_moments() -> None:
    robot = Robot()
    stop = threading.Event()

    def publish() -> None:
        value = 0
        while not stop.is_set():
            value += 1
            robot.buffer.put_joints({'shoulder': value, 'elbow': value}, 0, 0, 0)
            robot.buffer.put_image(BASE.slot, value % 256, 0, 0, 0)

    robot.buffer.put_image(BASE.slot, 0, 0, 0, 0)
    robot.buffer.put_joints({'shoulder': 0, 'elbow': 0}, 0, 0, 0)
    writer = threading.Thread(target=publish, daemon=True)
    writer.start()
    try:
        snapshots = [robot.buffer.snapshot(i, 0) for i in range(300)]
    finally:
        stop.set()
        writer.join(timeout=10)
    for snapshot in snapshots:
        assert isinstance(snapshot, Observation)
        shoulder, elbow = snapshot.state
        assert shoulder == elbow
        assert len(np.unique(snapshot.images[BASE.slot])) == 1


# ---- recordings


def read_bag(path: Path) -> list[tuple[str, int, Any]]:
    """Return topic, time of receipt and message of a recording, in the order of receipt."""
    highlevel = pytest.importorskip('rosbags.highlevel')
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_HUMBLE)
    with highlevel.AnyReader([path], default_typestore=store) as reader:
        return [
            (connection.topic, time_ns, reader.deserialize(data, connection.msgtype))
            for connection, time_ns, data in reader.messages()
        ]


ARM = JointsProfile(
    topic='/joint_states',
    names=('shoulder_pan', 'shoulder_lift', 'elbow', 'wrist_1', 'wrist_2', 'wrist_3', 'gripper'),
    max_age_s=0.2,
)
RECORDED_BASE = CameraProfile(slot='base_0_rgb', topic='/base/image_raw', max_age_s=0.3)
RECORDED_WRIST = CameraProfile(
    slot='left_wrist_0_rgb',
    topic='/wrist/image_raw/compressed',
    transport='compressed',
    required=False,
    max_age_s=0.3,
)


def test_a_recording_gives_frames_until_its_base_camera_dies(bags: Path) -> None:
    buffer = ObservationBuffer((RECORDED_BASE, RECORDED_WRIST), ARM, decode_image)
    cameras = {camera.topic: camera for camera in (RECORDED_BASE, RECORDED_WRIST)}
    messages = read_bag(bags / 'derived_camera_joint')
    origin_ns = messages[0][1]
    snapshots: list[tuple[float, Observation | NotReady]] = []
    tick_ns = origin_ns + 200 * MS
    for topic, received_ns, message in messages:
        while received_ns >= tick_ns:
            snapshots.append(((tick_ns - origin_ns) / S, buffer.snapshot(0, tick_ns - EPOCH)))
            tick_ns += 100 * MS
        now_ns = received_ns - EPOCH
        if topic in cameras:
            check_image(message, cameras[topic])
            stamp_ns = stamp_to_ns(message.header.stamp)
            buffer.put_image(cameras[topic].slot, message, stamp_ns, now_ns, received_ns)
        elif topic == ARM.topic:
            stamp_ns = stamp_to_ns(message.header.stamp)
            buffer.put_joints(joint_positions(message, ARM), stamp_ns, now_ns, received_ns)
    ready = [time_s for time_s, snapshot in snapshots if isinstance(snapshot, Observation)]
    dead = [(t, s) for t, s in snapshots if isinstance(s, NotReady)]
    # 20 frames at 15 Hz, then 0.3 s of grace. NaN, missing joints and the early stamp cost nothing.
    assert len(ready) + len(dead) == len(snapshots) == 18
    assert max(ready) < min(t for t, _ in dead)
    assert 1.5 <= max(ready) <= 1.7
    for _, snapshot in dead:
        (reason,) = snapshot.reasons
        assert reason.startswith('camera base_0_rgb: last image on /base/image_raw is ')
    for _, snapshot in snapshots:
        if isinstance(snapshot, Observation):
            assert set(snapshot.images) == {'base_0_rgb', 'left_wrist_0_rgb'}
            assert {image.shape[-1] for image in snapshot.images.values()} == {3}
            assert np.isfinite(snapshot.state).all()
    assert buffer.drops() == {'image_older': 1}  # wrist frame 12, stamped 200 ms early
    wrist = next(s for s in buffer.status(tick_ns - EPOCH) if s.name == 'left_wrist_0_rgb')
    assert (wrist.received, wrist.dropped) == (30, 1)


@pytest.mark.case(8)
def test_recorded_good_and_damaged_jpegs_leave_the_last_good_one_in_use(bags: Path) -> None:
    odd = {topic: message for topic, _, message in read_bag(bags / 'derived_odd_encodings')}
    truth = odd['/truth/rgb8'].data.reshape(48, 64, 3)
    camera = CameraProfile(slot='base_0_rgb', topic='/comp', transport='compressed', max_age_s=0.5)
    robot = Robot(camera)
    robot.buffer = ObservationBuffer((camera,), JOINTS, decode_image)
    used = []
    for name in ('jpeg', 'jpeg_truncated', 'jpeg_10_bytes', 'empty', 'png'):
        robot.now_ns += 33 * MS
        robot.joints()
        message = odd[f'/comp/{name}']
        try:
            check_image(message, camera)
        except ConversionError as error:
            robot.buffer.count_drop(error.reason, camera.slot, str(error))
        else:
            robot.image(message)
        used.append(robot.observation())
    ages_ms = [round((100 * S + 33 * (i + 1) * MS - o.time_ns) / MS) for i, o in enumerate(used)]
    assert ages_ms == [0, 33, 66, 99, 0]
    assert used[3].images[camera.slot] is used[0].images[camera.slot]
    assert (used[4].images[camera.slot] == truth).all()
    assert robot.buffer.drops() == {'image_truncated': 3}
    failed, recovered = robot.buffer.notices()
    assert '/comp' in failed
    assert 'recovered' in recovered


def test_real_pictures_pass_through_unchanged(bags: Path) -> None:
    robot = Robot()
    robot.buffer = ObservationBuffer((BASE,), JOINTS, decode_image)
    for _, _, message in read_bag(bags / 'derived_amber_640x480'):
        robot.now_ns += 33 * MS
        robot.joints()
        robot.header_image(message, stamp_to_ns(message.header.stamp))  # simulator time, 8.29 s
        snapshot = robot.observation()
        assert snapshot.time_ns == robot.now_ns
        truth = message.data.reshape(480, 640, 3)
        assert (snapshot.images[BASE.slot] == truth).all()
    assert robot.status().untrusted_stamps == 2
