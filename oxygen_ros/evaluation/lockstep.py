"""A simulated robot and the live node in lock-step: the world waits for the node, not for time.

Owns /clock, the order of messages within a step and the matching of answers to moments. Knows
nothing of scores and tables; `episodes.py` and `libero_episodes.py` say which episodes to play. The
node is the ordinary one, in a process of its own, over DDS; it is told nothing but `use_sim_time`.

Why the result depends on the seed alone, however busy the machine:

1. Simulated time moves only when the node has answered. A frame is one look: /clock is set to the
   moment of the look; joints and images stamped with it are sent; then /clock moves on by
   1 microsecond, over a multiple of the frame period, and the node's frame timer ticks once.
2. `_settle` separates these steps: it asks the node's own executor (service get_state) and waits.
   The request arrives behind everything sent before it, since one DDS participant's messages take
   one path, and what arrived before a request is handled before anything sent after the answer. So
   the images are dated by the moment of the look, and no tick can come before them.
3. The chunk is recognised by its stamp. It depends on the observation, the weights and noise drawn
   from (seed, stamp); the stamps of an episode are a function of its seed.
4. Commands come from the node's steady command tick, at whatever pace. Its clock stands still, so
   it repeats the command for this moment; the world takes the first one that equals the row that
   the chunk holds for this moment, inside the limits. An older one that differs cannot be taken for
   it, and if the command path did anything else to the chunk, the run ends with an error. What is
   taken drives the world for one control period; how often it was repeated makes no difference.
5. Text may end at any time, a few frames later; it is known by the stamp of its frame, so that it
   can be compared with what was true then. With too many texts open the world waits, so that the
   node never has to drop one.

Measured live, and different every time: how long chunks and texts took, and how many frames later
a text was complete.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import State
from lifecycle_msgs.srv import GetState
from rclpy.qos import DurabilityPolicy, QoSProfile
from rosgraph_msgs.msg import Clock
from std_msgs.msg import String

from oxygen_ros.actions import ActionBuffer, ActionChunk
from oxygen_ros.conversions import ns_to_stamp, stamp_to_ns
from oxygen_ros.evaluation.measurements import resolve
from oxygen_ros.evaluation.node_process import NodeProcess
from oxygen_ros.msg import ActionChunk as ActionChunkMessage
from oxygen_ros.msg import Note, Text
from oxygen_ros.profile import CommandProfile, RobotProfile
from oxygen_ros.sim.robot import SimulatedRobot

EPISODE_SPAN_NS = 100_000_000_000
"""Simulated time from one seed's beginning to the next one's: the node sees a clock that leaps
ahead, and forgets what it saw and planned."""
MAX_SEED = 20_000_000  # seconds of a ROS stamp are 32 bits
TICK_DELAY_NS = 1_000
START_TIMEOUT_S = 300.0
FIRST_ANSWER_S = 10.0
TEXT_TIMEOUT_S = 20.0
ANSWER_TIMEOUT_S = 60.0
REPEAT_S = 0.5
"""/clock, images and joints are best effort: without an answer they are sent again."""
MAX_OPEN_LOOKS = 4
"""Looks with unfinished texts before the next one waits: with more, the node's 8 slots might run
out on a busy machine, and it would drop texts."""
COMMAND_TOLERANCE = 1e-9  # rounding


class LockStepError(RuntimeError):
    """The node did not answer as it must; the text says what was waited for."""


@dataclass(frozen=True)
class Look:
    """One frame: where the robot was, and what the node answered."""

    stamp_ns: int
    joints: np.ndarray  # (num_joints,)
    chunk: np.ndarray  # (horizon, num_commands)
    chunk_ms: float  # from the tick to the chunk's arrival here
    ticked_s: float  # wall clock


@dataclass(frozen=True)
class Ending:
    """The end of a text or note."""

    text: str
    reason: str
    arrived_s: float  # wall clock
    looks: int  # taken in all by then


@dataclass
class Heard:
    """What came from the node, by the stamp it belongs to."""

    chunks: dict[int, ActionChunkMessage] = field(default_factory=dict)
    endings: dict[tuple[str, int], Ending] = field(default_factory=dict)
    """By task and stamp."""
    diagnostics: dict[str, dict[str, str]] = field(default_factory=dict)
    """Values by the name of the part."""
    num_diagnostics: int = 0
    engine_message: str = ''
    """What the newest diagnostics say of the engine."""


class LockStep:
    """Plays one episode after the other."""

    def __init__(
        self,
        node: Any,
        executor: Any,
        robot: SimulatedRobot[Any],
        profile: RobotProfile,
        process: NodeProcess,
        cameras: Sequence[str],
    ) -> None:
        """Listen to the node and be its clock.

        Args:
            profile: the node's; a frame period is a whole number of control periods.
            cameras: those that are not lost, by their names in the world.
        """
        self.robot = robot
        self.heard = Heard()
        self.num_looks = 0
        self.clamped_rows = 0
        """Rows of chunks beyond a limit of position or velocity, as executed."""
        self._executor, self._profile, self._process = executor, profile, process
        self._cameras = tuple(cameras)
        self._joints_topic = profile.joints.topic
        self._image_topics = [
            camera.topic
            for camera in profile.cameras
            if camera.topic in {robot.camera_topic(name, camera.transport) for name in cameras}
        ]
        self._limits = _limits(profile.command)
        self._sent: Counter[str] = Counter()
        self._unfinished: dict[int, set[str]] = {}
        """Tasks that a look is still owed, by its stamp."""
        self._control_ns = 1_000_000_000 // robot.world.CONTROL_HZ
        self._now_ns = self._control_ns
        # As rclpy computes the period of the node's timer.
        self._frame_ns = int(1.0 / profile.frame_rate_hz * 1e9)
        self.rows_per_look, rest_ns = divmod(self._frame_ns, self._control_ns)
        if rest_ns or not self.rows_per_look:
            raise ValueError(
                f'frame_rate_hz: expected a whole number of control periods of '
                f'{self._control_ns / 1e9:g} s per frame, got {profile.frame_rate_hz:g}'
            )
        self._clock = node.create_publisher(Clock, '/clock', 10)
        latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._instruction = node.create_publisher(
            String, resolve(profile.instruction.topic), latched
        )
        self._get_state = node.create_client(GetState, resolve('~/get_state'))
        self._listen(node)

    def _listen(self, node: Any) -> None:
        subscribe = node.create_subscription
        subscribe(ActionChunkMessage, resolve('~/actions'), self._on_chunk, 10)
        subscribe(DiagnosticArray, '/diagnostics', self._on_diagnostics, 10)
        for task in self._profile.tasks:
            kind = Note if task.kind == 'memory' else Text
            subscribe(kind, resolve(task.topic), self._on_text, 1000)

    # --- one episode --------------------------------------------------------------------------

    def wait_until_active(self, instruction: str) -> None:
        """Let the node load its model; the clock stands still meanwhile.

        Then it takes first looks, for which it needs some instruction.
        """
        self._wait(self._get_state.service_is_ready, 'the node', START_TIMEOUT_S)
        limit_s = time.monotonic() + START_TIMEOUT_S
        while self._settle() != State.PRIMARY_STATE_ACTIVE:
            if time.monotonic() > limit_s:
                raise LockStepError(self._failure('the node to become active', START_TIMEOUT_S))
        self._wait(self._clock.get_subscription_count, 'the subscription of /clock')
        self._instruction.publish(String(data=instruction))
        self._try_a_look()
        self._wait_until_heard()

    def _try_a_look(self) -> None:
        """Let the node take frames until an answer of every kind has come back.

        That two ends of a topic have found each other is known to each for itself only.
        """
        limit_s = time.monotonic() + START_TIMEOUT_S
        names = {task.name for task in self._profile.tasks}
        while time.monotonic() < limit_s:
            periods = self._now_ns // self._frame_ns + 1
            stamp_ns = periods * self._frame_ns - TICK_DELAY_NS
            self._set_clock(stamp_ns)
            self._settle()
            self._show(stamp_ns)
            self._settle()
            self._set_clock(stamp_ns + TICK_DELAY_NS)
            answer_s = time.monotonic() + FIRST_ANSWER_S
            while time.monotonic() < answer_s:
                self._spin()
                said = {task for task, stamp in self.heard.endings if stamp == stamp_ns}
                if stamp_ns in self.heard.chunks and said == names:
                    return
        raise LockStepError(self._failure('a chunk and all texts of a first look', START_TIMEOUT_S))

    def _wait_until_heard(self) -> None:
        """Send until all sensors arrive, so that from then on everything sent must arrive."""
        topics = [self._joints_topic, *self._image_topics]
        self._wait(
            lambda: all(self._received()[topic] for topic in topics),
            f'the node to hear {", ".join(topics)}',
            again=lambda: self._show(self._now_ns),
        )
        before = self.heard.num_diagnostics
        # The next one may have been made before the last message arrived.
        self._wait(lambda: self.heard.num_diagnostics >= before + 2, 'diagnostics')
        self._sent = self._received()

    def begin(self, number: int, instruction: str) -> None:
        """Begin an episode in the world as it lies there, and tell the node what to do.

        The number is a place in time, and decides the noise; from one to the next it must grow.
        """
        start_ns = (number + 1) * EPISODE_SPAN_NS
        # The first look lies one microsecond before a multiple of the frame period.
        periods = -(-start_ns // self._frame_ns) + 1
        self._set_clock(periods * self._frame_ns - TICK_DELAY_NS - self._frame_ns // 2)
        self._settle()
        self._instruction.publish(String(data=instruction))
        self._settle()
        self._set_clock(periods * self._frame_ns - TICK_DELAY_NS)

    def look(self) -> Look:
        """Let the node take a frame of this moment; return when its chunk is here."""
        stamp_ns = self._now_ns
        self.finish_texts(MAX_OPEN_LOOKS)
        if self._profile.tasks:
            self._unfinished[stamp_ns] = {task.name for task in self._profile.tasks}
        self._settle()
        self._show(stamp_ns)
        self._settle()
        ticked_s = time.monotonic()
        self._set_clock(stamp_ns + TICK_DELAY_NS)
        self._wait(
            lambda: stamp_ns in self.heard.chunks,
            f'the chunk of {stamp_ns / 1e9:.6f} s',
            again=lambda: self._show(stamp_ns),
        )
        took_ms = (time.monotonic() - ticked_s) * 1e3
        message = self.heard.chunks.pop(stamp_ns)
        self._chunk = _chunk(message)
        self.num_looks += 1
        joints = self.robot.world.joint_positions()
        return Look(stamp_ns, joints, self._chunk.values, took_ms, ticked_s)

    def act(self, is_over: Callable[[], bool]) -> np.ndarray:
        """Obey the commands up to the moment of the next look; return them, (n, num_commands).

        Ends early when the episode is over.
        """
        start_ns, taken = self._chunk.stamp_ns, []
        for row in range(self.rows_per_look):
            if is_over():
                break
            at_ns = start_ns + row * self._control_ns
            command = self._command_for(at_ns if row else at_ns + TICK_DELAY_NS)
            self.robot.world.step(command, self._control_ns / 1e9)
            taken.append(command)
            self._set_clock(at_ns + self._control_ns)
            self._publish_joints(self._now_ns)
        return np.array(taken).reshape(-1, len(self._profile.command.names))

    def finish_texts(self, most_open: int = 0) -> None:
        """Let the node write until so many looks are unfinished; what takes too long never ends."""
        limit_s = time.monotonic() + TEXT_TIMEOUT_S
        while len(self._unfinished) > most_open:
            self._spin()
            if time.monotonic() > limit_s:
                self._unfinished.clear()

    def count_lost(self, timeout_s: float = 10.0) -> int:
        """Return how many images and joint states were sent and never received."""
        limit_s = time.monotonic() + timeout_s
        while (lost := self._num_missing()) and time.monotonic() < limit_s:
            self._spin()
        return lost

    def _num_missing(self) -> int:
        received = self._received()
        return sum(abs(count - received[topic]) for topic, count in self._sent.items())

    def _received(self) -> Counter[str]:
        return Counter(
            {
                values['Topic']: int(values['Received'])
                for values in self.heard.diagnostics.values()
                if 'Received' in values
            }
        )

    # --- messages -----------------------------------------------------------------------------

    def _set_clock(self, now_ns: int) -> None:
        self._now_ns = now_ns
        for _ in range(2):  # best effort, and a moment that was missed cannot be made up for
            self._clock.publish(Clock(clock=ns_to_stamp(now_ns)))

    def _show(self, stamp_ns: int) -> None:
        self._publish_joints(stamp_ns)
        self.robot.publish_images(stamp_ns, self._cameras)
        self._sent.update(self._image_topics)

    def _publish_joints(self, stamp_ns: int) -> None:
        self.robot.publish_joints(stamp_ns)
        self._sent[self._joints_topic] += 1

    def _command_for(self, now_ns: int) -> np.ndarray:
        """Return the command for this moment as the node sends it, when it does."""
        command = self._profile.command
        buffer = ActionBuffer(len(command.names), command.interpolation)
        buffer.put(self._chunk, now_ns)
        row = buffer.rows(now_ns, period_ns=self._control_ns, count=1)[0]
        expected = np.clip(row, *self._limits)
        self.clamped_rows += bool((row != expected).any())

        def has_come() -> bool:
            newest = self.robot.command
            return newest is not None and np.allclose(
                newest, expected, rtol=0.0, atol=COMMAND_TOLERANCE
            )

        self._wait(has_come, f'the command {expected.round(4).tolist()}')
        assert self.robot.command is not None
        return self.robot.command

    def _settle(self) -> int:
        """Return the state of the node, once it has handled everything that was sent to it."""
        future = self._get_state.call_async(GetState.Request())
        self._wait(future.done, 'the answer of get_state')
        return int(future.result().current_state.id)

    def _wait(
        self,
        is_done: Callable[[], Any],
        what: str,
        timeout_s: float = ANSWER_TIMEOUT_S,
        again: Callable[[], None] = lambda: None,
    ) -> None:
        limit_s = time.monotonic() + timeout_s
        repeat_s = time.monotonic() + REPEAT_S
        while not is_done():
            self._spin()
            now_s = time.monotonic()
            if self._process.exit_code is not None or now_s > limit_s:
                raise LockStepError(self._failure(what, timeout_s))
            if now_s > repeat_s:
                again()
                self._clock.publish(Clock(clock=ns_to_stamp(self._now_ns)))
                repeat_s = now_s + REPEAT_S

    def _spin(self) -> None:
        self._executor.spin_once(timeout_sec=0.05)

    def _failure(self, what: str, timeout_s: float) -> str:
        code = self._process.exit_code
        if code is not None:
            return f'the node ended with exit code {code} while waiting for {what}'
        command = self.robot.command
        newest = 'none' if command is None else command.round(4).tolist()
        return (
            f'waited {timeout_s:g} s for {what}; the newest command is {newest}; '
            f'the engine says: {self.heard.engine_message or "nothing"}'
        )

    # --- callbacks ----------------------------------------------------------------------------

    def _on_chunk(self, message: ActionChunkMessage) -> None:
        # A frame that comes twice for one moment has the same answer.
        self.heard.chunks.setdefault(stamp_to_ns(message.header.stamp), message)

    def _on_text(self, message: Any) -> None:
        if getattr(message, 'final', True):
            key = (message.task, stamp_to_ns(message.header.stamp))
            ending = Ending(message.text, message.reason, time.monotonic(), self.num_looks)
            self.heard.endings.setdefault(key, ending)
            if left := self._unfinished.get(key[1]):
                left.discard(message.task)
                if not left:
                    del self._unfinished[key[1]]

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        self.heard.num_diagnostics += 1
        for status in message.status:
            part = status.name.rpartition(': ')[2]
            self.heard.diagnostics[part] = {pair.key: pair.value for pair in status.values}
            if part == 'engine':
                self.heard.engine_message = status.message


def _limits(command: CommandProfile) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest command of each joint: a position, or a velocity."""
    is_position = np.array([quantity == 'position' for quantity in command.quantity])
    fastest = np.array(command.max_velocity)
    return (
        np.where(is_position, command.lower, -fastest),
        np.where(is_position, command.upper, fastest),
    )


def _chunk(message: ActionChunkMessage) -> ActionChunk:
    stamp_ns = stamp_to_ns(message.header.stamp)
    return ActionChunk(
        frame=message.frame,
        stamp_ns=stamp_ns,
        time_ns=stamp_ns,  # on a simulated clock the control clock is ROS time
        period_ns=round(message.period_s * 1e9),
        values=np.array(message.values).reshape(message.horizon, -1),
    )
