"""Observation, what the robot saw and felt at one moment, and ObservationBuffer, the newest of it.

The buffer decides which sample of each camera and joint is the newest, how old it is and whether a
frame may start. It knows no ROS message and no tensor: messages are opaque objects, decoding is a
function it is given. The node's callbacks write it, the frame thread takes snapshots from it.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from oxygen_ros.profile import CameraProfile, JointsProfile

# A stamp further ahead of the clock than this is another clock's, not a fast network.
FUTURE_TOLERANCE_NS = 100_000_000
# A stamp older than this many age limits is another clock's or another epoch's.
IMPLAUSIBLE_AGE_LIMITS = 10
# So many older stamps in a row are no stragglers: the source's clock was set back.
OLDER_BEFORE_RESET = 10
RATE_WINDOW_NS = 2_000_000_000
# No arm joint moves faster than this (rad/s or m/s); the interval has a floor because messages
# without a usable stamp may arrive in bunches.
MAX_JOINT_SPEED = 20.0
MIN_JUMP_INTERVAL_NS = 20_000_000
# After two publishers were seen to disagree, wait for so long without a disagreement.
CONFLICT_HOLD_NS = 1_000_000_000
MAX_NOTICES = 64


class ConversionError(ValueError):
    """A message that cannot be used; `reason` is the short word it is counted under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


# The data format, written here once; every other file points to it.
#
#   field        dtype[shape]             unit, range             clock
#   frame        int                      counted from 0          -
#   stamp_ns     int                      ns                      ROS time, of the newest image
#   time_ns      int                      ns                      control clock, the same moment
#   images       {slot: uint8[h, w, 3]}   RGB, 0..255, C order    within max_age_s of the snapshot
#   state        float32[num_joints]      rad or m, profile order within max_age_s of the snapshot
#   instruction  str                      stripped, may be ''     newest at the snapshot
#   notes        (str, ...)               oldest first            complete at the snapshot
#
# Images have the camera's own size (the model resizes), one per model camera slot; the key of an
# absent camera is absent. Where a header stamp is unusable, stamp_ns is the time of receipt.
# Arrays are read-only: an image is shared by every frame that still uses it.
@dataclass(frozen=True)
class Observation:
    """One look at the world; everything a frame may know. See the table above."""

    frame: int
    stamp_ns: int
    time_ns: int
    images: Mapping[str, np.ndarray]
    state: np.ndarray
    instruction: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotReady:
    """Why no frame can start now: one sentence per missing source, each with its topic."""

    reasons: tuple[str, ...]


@dataclass(frozen=True)
class SourceStatus:
    """What diagnostics show of one camera (`name` is its slot) or of 'joints'.

    `received` counts messages, `dropped` the broken, older or repeated of them. `age_s` is the age
    of the newest sample (of the oldest joint for 'joints'), None before the first; `rate_hz` that
    of the messages that reached the buffer; `untrusted_stamps` counts messages that were dated by
    their time of receipt; `last_error` is '' while all is well.
    """

    name: str
    topic: str
    received: int
    dropped: int
    untrusted_stamps: int
    age_s: float | None
    rate_hz: float
    last_error: str


@dataclass(frozen=True)
class _Moment:
    """When a sample was taken: as the header says, and as we decided to believe."""

    header_ns: int  # ROS time, untouched; orders the samples of one source
    stamp_ns: int  # ROS time, the header's or that of receipt
    time_ns: int  # control clock
    trusted: bool  # whether stamp_ns is the header's


def _moment(stamp_ns: int, now_ns: int, ros_now_ns: int, max_age_ns: int) -> _Moment:
    age_ns = ros_now_ns - stamp_ns
    if stamp_ns > 0 and -FUTURE_TOLERANCE_NS <= age_ns <= IMPLAUSIBLE_AGE_LIMITS * max_age_ns:
        return _Moment(stamp_ns, stamp_ns, now_ns - max(age_ns, 0), True)
    return _Moment(stamp_ns, ros_now_ns, now_ns, False)


@dataclass
class _Order:
    """Keeps one stream of samples in order of their header stamps."""

    last: _Moment | None = None
    older_in_a_row: int = 0

    def admit(self, moment: _Moment) -> str:
        """Say 'newer', 'repeated', 'older' or 'reset'; newer and reset become the last."""
        outcome = self._compare(moment)
        if outcome == 'older':
            self.older_in_a_row += 1
            if self.older_in_a_row == OLDER_BEFORE_RESET:
                outcome = 'reset'
        if outcome in ('newer', 'reset'):
            self.last, self.older_in_a_row = moment, 0
        return outcome

    def _compare(self, moment: _Moment) -> str:
        last = self.last
        if last is None or moment.header_ns == 0:  # 0 means "no stamp", it orders nothing
            return 'newer'
        if moment.header_ns == last.header_ns:
            return 'repeated'
        if moment.trusted and not last.trusted:
            return 'newer'  # the source's clock has come right; its old stamps say nothing
        return 'older' if moment.header_ns < last.header_ns else 'newer'


@dataclass
class _Source:
    """Counters of one topic."""

    name: str
    topic: str
    label: str  # how sentences name it
    max_age_ns: int
    received: int = 0
    dropped: int = 0
    untrusted_stamps: int = 0
    last_error: str = ''
    arrivals_ns: deque[int] = field(default_factory=deque)

    def arrive(self, now_ns: int) -> None:
        self.received += 1
        self.arrivals_ns.append(now_ns)
        self._forget_arrivals(now_ns)

    def rate_hz(self, now_ns: int) -> float:
        """Return the rate over the window up to now, so that it falls when messages stop."""
        self._forget_arrivals(now_ns)
        if len(self.arrivals_ns) < 2 or now_ns <= self.arrivals_ns[0]:
            return 0.0
        return (len(self.arrivals_ns) - 1) * 1e9 / (now_ns - self.arrivals_ns[0])

    def _forget_arrivals(self, now_ns: int) -> None:
        while self.arrivals_ns and now_ns - self.arrivals_ns[0] > RATE_WINDOW_NS:
            self.arrivals_ns.popleft()


@dataclass(frozen=True, eq=False)
class _Undecoded:
    moment: _Moment
    message: Any


@dataclass(frozen=True, eq=False)
class _Decoded:
    moment: _Moment
    pixels: np.ndarray


@dataclass
class _Camera:
    profile: CameraProfile
    source: _Source
    order: _Order = field(default_factory=_Order)
    # Newest last. Two, so that a broken newest one is replaced by the one just before it.
    pending: deque[_Undecoded] = field(default_factory=lambda: deque(maxlen=2))
    decoded: _Decoded | None = None

    def newest(self) -> _Moment | None:
        image = self.pending[-1] if self.pending else self.decoded
        return None if image is None else image.moment

    def is_fresh(self, moment: _Moment | None, now_ns: int) -> bool:
        return moment is not None and now_ns - moment.time_ns <= self.source.max_age_ns

    def forget(self) -> None:
        self.order = _Order()
        self.pending.clear()
        self.decoded = None
        self.source.arrivals_ns.clear()


@dataclass
class _Joint:
    order: _Order = field(default_factory=_Order)
    position: float = 0.0
    jump: float = 0.0  # the last step too fast to be motion
    jump_ns: int = 0
    conflict_ns: int | None = None  # when a jump was last followed by the jump back

    def move(self, position: float, previous: _Moment | None, moment: _Moment) -> None:
        """Take a position; note when it jumps there and back, as two publishers make it do."""
        if previous is not None:
            interval_ns = max(moment.time_ns - previous.time_ns, MIN_JUMP_INTERVAL_NS)
            # remainder: a continuous joint that passes +pi has not moved by a turn
            step = math.remainder(position - self.position, 2 * math.pi)
            if abs(step) > MAX_JOINT_SPEED * interval_ns / 1e9:
                returned = abs(step + self.jump) < abs(step) / 2
                if returned and moment.time_ns - self.jump_ns < CONFLICT_HOLD_NS:
                    self.conflict_ns = moment.time_ns
                self.jump, self.jump_ns = step, moment.time_ns
        self.position = position


class ObservationBuffer:
    """The newest sample per source, and whether together they make an observation.

    The executor thread calls `put_*`, `set_instruction`, `count_drop`, `clear`; the frame thread
    calls `snapshot`, which decodes (in its own thread, only the images it uses, each once).
    `positions`, `status`, `drops`, `notices` may be called from anywhere.

    `decode(message, camera)` returns uint8 (h, w, 3) RGB and raises ConversionError on a message it
    cannot read. `now_ns` is the control clock, `ros_now_ns` the ROS clock, read at the same moment.
    """

    def __init__(
        self,
        cameras: tuple[CameraProfile, ...],
        joints: JointsProfile,
        decode: Callable[[Any, CameraProfile], np.ndarray],
        *,
        feed_back: int = 0,
        instruction_max_age_s: float = 0.0,
    ) -> None:
        """Begin with nothing; `feed_back` is how many notes an observation may hold."""
        self._decode = decode
        self._joints_profile = joints
        # One lock for everything below, held for bookkeeping only, never while decoding.
        self._lock = threading.Lock()
        self._cameras = {
            camera.slot: _Camera(
                camera,
                _Source(camera.slot, camera.topic, f'camera {camera.slot}', _ns(camera.max_age_s)),
            )
            for camera in cameras
        }
        self._joints_source = _Source('joints', joints.topic, 'joints', _ns(joints.max_age_s))
        self._joints = {name: _Joint() for name in joints.names}
        self._instruction = ''
        self._notes: deque[str] = deque(maxlen=feed_back)
        self._instruction_ns: int | None = None  # control clock; None = not looked at since it came
        self._instruction_max_age_ns = _ns(instruction_max_age_s)
        self._drops: Counter[str] = Counter()
        self._notices: deque[str] = deque(maxlen=MAX_NOTICES)
        # Raised by clear(), so that a snapshot under way cannot bring old images back.
        self._epoch = 0
        self._skew_s: float | None = None

    # ---- written by the executor thread

    def put_image(
        self, slot: str, message: Any, stamp_ns: int, now_ns: int, ros_now_ns: int
    ) -> None:
        """Keep an undecoded image if it is newer than the one held."""
        with self._lock:
            camera = self._cameras[slot]
            camera.source.arrive(now_ns)
            moment = self._date(camera.source, stamp_ns, now_ns, ros_now_ns)
            outcome = camera.order.admit(moment)
            if outcome in ('newer', 'reset'):
                if outcome == 'reset':
                    self._note_reset(camera.source)
                camera.pending.append(_Undecoded(moment, message))
            else:
                self._drop(camera.source, f'image_{outcome}')

    def put_joints(
        self, positions: Mapping[str, float], stamp_ns: int, now_ns: int, ros_now_ns: int
    ) -> None:
        """Keep the positions (rad or m) of one message, joint by joint.

        Each joint has its own order and age: arm and gripper may come from two publishers, and a
        joint whose reading is missing keeps its last one until that is too old. Joints that are not
        in the profile are ignored.
        """
        with self._lock:
            source = self._joints_source
            source.arrive(now_ns)
            moment = self._date(source, stamp_ns, now_ns, ros_now_ns)
            outcomes = {
                self._put_joint(self._joints[name], position, moment)
                for name, position in positions.items()
                if name in self._joints
            }
            if outcomes & {'newer', 'reset'}:
                self._recover(source)
                if 'reset' in outcomes:
                    self._note_reset(source)
            elif outcomes:
                self._drop(source, 'joints_older' if 'older' in outcomes else 'joints_repeated')

    def set_instruction(self, text: str) -> bool:
        """Set the instruction; False if it is the one already held, as latched topics repeat it."""
        text = text.strip()
        with self._lock:
            changed = text != self._instruction
            self._instruction, self._instruction_ns = text, None
        return changed

    def expire_instruction(self, now_ns: int) -> bool:
        """Forget the instruction if it is too old; True if that happened now.

        Its age begins with the first look after it was set, repeated, or the clock jumped. Whoever
        planned for it has to throw the plan away.
        """
        with self._lock:
            if not self._instruction or not self._instruction_max_age_ns:
                return False
            if self._instruction_ns is None:
                self._instruction_ns = now_ns
            if now_ns - self._instruction_ns <= self._instruction_max_age_ns:
                return False
            self._instruction = ''
            self._drops['instruction_stale'] += 1
            return True

    def count_drop(self, reason: str, source: str = '', detail: str = '') -> None:
        """Count a message that was refused before it came here.

        `source` is a camera slot or 'joints'; '' is none of them. `detail` is the sentence that
        diagnostics show, and that becomes a notice if the source was well until now.
        """
        with self._lock:
            if not source:
                self._drops[reason] += 1
                return
            refused = self._joints_source if source == 'joints' else self._cameras[source].source
            refused.received += 1
            self._drop(refused, reason, detail)

    def clear(self) -> None:
        """Forget images, joints and notes, as the clock jumped; instruction and counters stay."""
        with self._lock:
            self._epoch += 1
            self._notes.clear()
            for camera in self._cameras.values():
                camera.forget()
            self._joints = {name: _Joint() for name in self._joints}
            self._joints_source.arrivals_ns.clear()
            self._instruction_ns = None
            self._skew_s = None

    def put_note(self, text: str) -> None:
        """Keep a complete memory note for the observations to come; called by the frame thread."""
        with self._lock:
            self._notes.append(text)

    # ---- read by the frame thread

    def snapshot(self, frame: int, now_ns: int) -> Observation | NotReady:
        """Take everything of one moment; the observation never changes afterwards.

        A newest image that cannot be decoded is counted, and the one before it stands in, with its
        own age. Required cameras and all joints must be within their age limit; an optional camera
        that is not is left out.
        """
        with self._lock:
            epoch, instruction = self._epoch, self._instruction
            notes = tuple(self._notes)
            reasons = [*self._cameras_missing(now_ns), *self._joints_missing(now_ns)]
            if reasons:
                return NotReady(tuple(reasons))
            held = {slot: tuple(camera.pending) for slot, camera in self._cameras.items()}
            positions = [joint.position for joint in self._joints.values()]
            times_ns = [
                joint.order.last.time_ns for joint in self._joints.values() if joint.order.last
            ]

        for slot, images in held.items():
            self._decode_newest(self._cameras[slot], images, epoch)

        with self._lock:
            if epoch != self._epoch:
                return NotReady(('the clock jumped while the frame was taken',))
            # Undecodable images are gone now, so only decoded ones answer. One that came meanwhile
            # waits in `pending` for the next frame.
            used = {
                slot: camera.decoded
                for slot, camera in self._cameras.items()
                if camera.decoded and camera.is_fresh(camera.decoded.moment, now_ns)
            }
            reasons = [
                self._why_absent(camera, camera.decoded.moment if camera.decoded else None, now_ns)
                for slot, camera in self._cameras.items()
                if slot not in used and (camera.profile.required or not used)
            ]
            if reasons:
                return NotReady(tuple(reasons))
            moments = [image.moment for image in used.values()]
            newest = max(moments, key=lambda moment: moment.time_ns)
            times_ns += [moment.time_ns for moment in moments]
            self._skew_s = (max(times_ns) - min(times_ns)) / 1e9

        state = np.array(positions, dtype=np.float32)
        state.setflags(write=False)
        pictures = {slot: image.pixels for slot, image in used.items()}
        return Observation(
            frame, newest.stamp_ns, newest.time_ns, pictures, state, instruction, notes
        )

    # ---- read by the publisher thread

    def positions(self, now_ns: int) -> dict[str, float]:
        """Return the newest position (rad or m) of each joint that can be relied on now, by name.

        A joint that is unseen, stale or reported differently by two publishers is left out.
        """
        with self._lock:
            return {
                name: joint.position
                for name, joint in self._joints.items()
                if not self._joint_fault(joint, now_ns)
            }

    # ---- read by diagnostics

    @property
    def skew_s(self) -> float | None:
        """Time between the oldest and the newest member of the last snapshot, None before one."""
        with self._lock:
            return self._skew_s

    def drops(self) -> dict[str, int]:
        """Return how many messages were dropped, by reason, since the start."""
        with self._lock:
            return dict(self._drops)

    def notices(self) -> tuple[str, ...]:
        """Take the sentences an operator should read, each once: a source fails, recovers, resets.

        A source that is good and bad in turns gives a pair each time: whoever logs them throttles.
        """
        with self._lock:
            taken = tuple(self._notices)
            self._notices.clear()
        return taken

    def status(self, now_ns: int) -> tuple[SourceStatus, ...]:
        """Return one status per camera, in profile order, and one for the joints."""
        with self._lock:
            statuses = []
            for camera in self._cameras.values():
                newest = camera.newest()
                taken_ns = newest.time_ns if newest else None
                statuses.append(_status(camera.source, taken_ns, now_ns))
            lasts = [joint.order.last for joint in self._joints.values()]
            seen_ns = [last.time_ns for last in lasts if last is not None]
            oldest_ns = min(seen_ns) if seen_ns and len(seen_ns) == len(lasts) else None
            statuses.append(_status(self._joints_source, oldest_ns, now_ns))
            return tuple(statuses)

    # ---- below: the lock is held, except in _decode_newest

    def _date(self, source: _Source, stamp_ns: int, now_ns: int, ros_now_ns: int) -> _Moment:
        moment = _moment(stamp_ns, now_ns, ros_now_ns, source.max_age_ns)
        if not moment.trusted:
            if source.untrusted_stamps == 0:
                self._notices.append(
                    f'{source.label}: stamp {stamp_ns / 1e9:.3f} s on {source.topic} is '
                    f'implausible at ROS time {ros_now_ns / 1e9:.3f} s; the time of receipt is used'
                )
            source.untrusted_stamps += 1
        return moment

    def _put_joint(self, joint: _Joint, position: float, moment: _Moment) -> str:
        previous = joint.order.last
        outcome = joint.order.admit(moment)
        if outcome == 'newer':
            joint.move(position, previous, moment)
        elif outcome == 'reset':
            joint.position = position
        return outcome

    def _drop(self, source: _Source, reason: str, detail: str = '') -> None:
        source.dropped += 1
        self._drops[reason] += 1
        if detail:
            if not source.last_error:
                self._notices.append(f'{source.label}: {detail}')
            source.last_error = detail

    def _recover(self, source: _Source) -> None:
        if source.last_error:
            self._notices.append(f'{source.label}: recovered on {source.topic}')
            source.last_error = ''

    def _note_reset(self, source: _Source) -> None:
        self._notices.append(
            f'{source.label}: {OLDER_BEFORE_RESET} older stamps in a row on {source.topic}, '
            'taken as a clock set back'
        )

    def _decode_newest(self, camera: _Camera, images: tuple[_Undecoded, ...], epoch: int) -> None:
        """Decode the newest of the pending images that can be; called without the lock."""
        failures: list[ConversionError] = []
        decoded = None
        for image in reversed(images):
            try:
                pixels = self._decode(image.message, camera.profile)
            except ConversionError as error:
                failures.append(error)
                continue
            pixels.setflags(write=False)
            decoded = _Decoded(image.moment, pixels)
            break
        with self._lock:
            if epoch != self._epoch:
                return
            for image in images:
                if image in camera.pending:
                    camera.pending.remove(image)
            if decoded is not None:
                camera.decoded = decoded
            for failure in failures:
                self._drop(camera.source, failure.reason, str(failure))
            if decoded is not None and not failures:
                self._recover(camera.source)

    def _cameras_missing(self, now_ns: int) -> Iterable[str]:
        for camera in self._cameras.values():
            newest = camera.newest()
            if camera.profile.required and not camera.is_fresh(newest, now_ns):
                yield self._why_absent(camera, newest, now_ns)

    def _why_absent(self, camera: _Camera, newest: _Moment | None, now_ns: int) -> str:
        source = camera.source
        error = f' ({source.last_error})' if source.last_error else ''
        if newest is None:
            return f'{source.label}: no image on {source.topic} yet{error}'
        return (
            f'{source.label}: last image on {source.topic} is '
            f'{(now_ns - newest.time_ns) / 1e9:.1f} s old, '
            f'limit {camera.profile.max_age_s:g} s{error}'
        )

    def _joint_fault(self, joint: _Joint, now_ns: int) -> str:
        if joint.order.last is None:
            return 'unseen'
        if now_ns - joint.order.last.time_ns > self._joints_source.max_age_ns:
            return 'stale'
        if joint.conflict_ns is not None and now_ns - joint.conflict_ns < CONFLICT_HOLD_NS:
            return 'conflict'
        return ''

    def _joints_missing(self, now_ns: int) -> Iterable[str]:
        topic, limit_s = self._joints_profile.topic, self._joints_profile.max_age_s
        error = f' ({self._joints_source.last_error})' if self._joints_source.last_error else ''
        faulty: dict[str, list[str]] = {}
        for name, joint in self._joints.items():
            faulty.setdefault(self._joint_fault(joint, now_ns), []).append(name)
        if names := faulty.get('unseen'):
            yield f'{_joint_names(names)}: no position on {topic} yet{error}'
        if names := faulty.get('stale'):
            lasts = [self._joints[name].order.last for name in names]
            age_s = max((now_ns - last.time_ns) / 1e9 for last in lasts if last is not None)
            yield (
                f'{_joint_names(names)}: last position on {topic} is {age_s:.1f} s old, '
                f'limit {limit_s:g} s{error}'
            )
        if names := faulty.get('conflict'):
            yield (
                f'{_joint_names(names)}: positions on {topic} jump to and fro; '
                'are there two publishers?'
            )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _joint_names(names: list[str]) -> str:
    return ('joint ' if len(names) == 1 else 'joints ') + ', '.join(names)


def _status(source: _Source, taken_ns: int | None, now_ns: int) -> SourceStatus:
    return SourceStatus(
        name=source.name,
        topic=source.topic,
        received=source.received,
        dropped=source.dropped,
        untrusted_stamps=source.untrusted_stamps,
        age_s=None if taken_ns is None else (now_ns - taken_ns) / 1e9,
        rate_hz=source.rate_hz(now_ns),
        last_error=source.last_error,
    )
