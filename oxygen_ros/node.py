"""OxygenNode: parameters, topics and lifecycle of the robot's node, and the process around it.

Owns every ROS object and the wiring between the rooms; no tensor and no policy logic. Nobody
imports it but its entry point.

Threads. The main thread runs the executor: its callbacks store the newest message, nothing else.
The frame thread (`frame_loop.py`) runs the engine, the publisher thread (`publisher.py`) the
command tick. Both publish from their own thread, so neither waits for a callback. Stop and hold are
heard in a third (`interlock.py`).
"""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock, ClockType, JumpThreshold
from rclpy.duration import Duration
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import Float64MultiArray, String
from trajectory_msgs.msg import JointTrajectory

from oxygen_ros import conversions, garbage, monitor
from oxygen_ros.actions import ActionBuffer, ActionChunk
from oxygen_ros.annotated import Annotation
from oxygen_ros.engine.options import EngineOptions
from oxygen_ros.engine.process import EngineProcess
from oxygen_ros.frame_loop import FrameLoop
from oxygen_ros.interlock import Interlock
from oxygen_ros.memory_store import MAX_TIME_NS, MemoryStore, MemoryStoreError
from oxygen_ros.msg import ActionChunk as ActionChunkMessage
from oxygen_ros.msg import EngineStats, Note, Text
from oxygen_ros.neighbours import CommandTopic, Neighbours
from oxygen_ros.observation import NotReady, Observation, ObservationBuffer
from oxygen_ros.parameters import PARAMETERS
from oxygen_ros.profile import (
    CameraProfile,
    CommandProfile,
    RobotProfile,
    load_profile,
    share_folder,
)
from oxygen_ros.publisher import CommandPublisher
from oxygen_ros.qos import LATCHED, RELIABLE, QosWatch, newest, sensor
from oxygen_ros.srv import Recall

COMMAND_TYPES = {
    'joint_state': JointState,
    'joint_trajectory': JointTrajectory,
    'forward_command': Float64MultiArray,
}
# A trajectory carries the rest of the chunk: if we die, the motion ends by itself.
ROWS_PER_COMMAND = {'joint_state': 1, 'joint_trajectory': 1000, 'forward_command': 1}
STATS_PERIOD_S = 0.2
DIAGNOSTICS_PERIOD_S = 1.0
MAX_INSTRUCTION_CHARS = 1000
MAX_NOTICES_PER_LOOK = 5
DEFAULT_RECALL_LIMIT = 10
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
FORWARD_JUMP_S = 2.0
"""A clock that leaps further ahead than this was seeked: what was seen before is another scene."""
CLOSE_TIMEOUT_S = 3.0
"""Launch sends SIGTERM 5 s after SIGINT by default; the last hold has to be out by then."""


def guarded(callback: Callable[..., None]) -> Callable[..., None]:
    """Keep an exception of a callback from ending the executor, and with it every callback."""

    @functools.wraps(callback)
    def run(self: OxygenNode, *args: Any) -> None:
        try:
            callback(self, *args)
        except Exception as error:
            self.report_callback_error(callback.__name__, error)

    return run


@dataclass
class Parts:
    """What exists between configure and cleanup."""

    profile: RobotProfile
    control_ns: Callable[[], int]
    """The control clock: monotonic, or ROS time when that is simulated."""
    buffer: ObservationBuffer
    actions: ActionBuffer
    loop: FrameLoop
    monitor: monitor.Monitor
    neighbours: Neighbours
    commands: Any
    """Lifecycle publisher of the command topic: silent while the node is inactive."""
    chunks: Any
    news: dict[str, Any]
    """Publisher of each language task."""
    subscriptions: list[Any]
    memory: MemoryStore | None
    """Keeps notes across restarts; None where no parameter names a file."""
    process: EngineProcess | None
    """The engine's own process; None where it runs in the frame thread."""
    publisher: CommandPublisher | None = None
    annotation: Annotation | None = None
    """None where nobody asked for pictures."""
    annotated: Any = None
    draw_timer: Any = None
    numbers: dict[str, Any] = field(default_factory=dict)
    """Of the newest statistics."""
    recall: Any = None
    tick: Any = None
    jump_handle: Any = None
    observation_age_ms: float = 0.0


class OxygenNode(LifecycleNode):
    def __init__(self, stop: threading.Event) -> None:
        """Declare parameters and publish statistics; everything else waits for configure.

        Args:
            stop: set by a signal; a configure that is loading weights then gives up.
        """
        super().__init__('oxygen')
        self._stop = stop
        self._parts: Parts | None = None
        self._active = self._finalized = self._gave_up = False
        self._last_failure = ''
        self._callback_errors = 0
        # Before anything that may raise: rclpy destroys a half-made node, too.
        self._qos = QosWatch(self)
        self._interlock = Interlock(self, self._qos, self._forget_plan)
        for parameter in PARAMETERS:
            self.declare_parameter(parameter.name, parameter.default, parameter.descriptor())
        self.add_on_set_parameters_callback(self._on_parameters)

        # Diagnostics must go on when /clock does not, frames when the system clock is set back.
        self._steady = steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._clock_watch = monitor.ClockWatch()
        publisher = functools.partial(self._qos.create_publisher, self.create_publisher)
        self._stats = publisher(EngineStats, '~/stats', RELIABLE)
        self._diagnostics = publisher(DiagnosticArray, '/diagnostics', RELIABLE)
        self.create_timer(STATS_PERIOD_S, self._publish_stats, clock=steady)
        self.create_timer(DIAGNOSTICS_PERIOD_S, self._publish_diagnostics, clock=steady)

    # --- lifecycle ----------------------------------------------------------------------------

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Load profile and model, warm up, create topics. FAILURE leaves nothing half-made."""
        try:
            self._configure()
        except Exception as error:
            self.get_logger().error(f'configure failed: {error}')
            self.get_logger().debug(traceback.format_exc())
            self._tear_down()
            return TransitionCallbackReturn.FAILURE
        return super().on_configure(state)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Let commands flow and frames tick."""
        parts = self._parts
        assert parts is not None
        result = super().on_activate(state)
        command = parts.profile.command
        parts.publisher = CommandPublisher(
            command,
            parts.actions,
            send=self._send_command,
            measured=self._measured,
            halt=lambda: self._interlock.halt,
            clock_ns=parts.control_ns,
            rows_per_command=ROWS_PER_COMMAND[command.interface],
        )
        parts.publisher.start()
        parts.tick = self.create_timer(
            1.0 / parts.profile.frame_rate_hz,
            self._on_tick,
            # None is the node's clock: a replayed bag sets the pace.
            clock=None if self._value('use_sim_time') else self._steady,
        )
        self._active = True
        self.get_logger().info('active: frames tick and commands flow')
        return result

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Stop in the declared safe behaviour; a frame under way is thrown away when it is done."""
        self._deactivate()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free the model and the topics."""
        self._tear_down()
        return super().on_cleanup(state)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """From any state: first the safe behaviour, then free everything."""
        self._deactivate()
        self._tear_down()
        self._finalized = True
        return super().on_shutdown(state)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """A transition raised: free everything; the node can be configured again."""
        self._deactivate()
        self._tear_down()
        return TransitionCallbackReturn.SUCCESS

    # --- configure ----------------------------------------------------------------------------

    def _configure(self) -> None:
        profile = self._load_profile()
        use_sim_time = self._value('use_sim_time')
        control_ns = self._ros_ns if use_sim_time else time.monotonic_ns
        buffer = ObservationBuffer(
            profile.cameras,
            profile.joints,
            conversions.decode_image,
            feed_back=profile.memory.feed_back,
            instruction_max_age_s=profile.instruction.max_age_s,
        )
        buffer.set_instruction(self._value('instruction') or profile.instruction.default)
        publisher = functools.partial(self._qos.create_publisher, self.create_publisher)
        actions = ActionBuffer.of_profile(profile)
        process = self._engine_process(profile, actions)
        self._parts = parts = Parts(
            profile=profile,
            control_ns=control_ns,
            buffer=buffer,
            actions=actions,
            loop=FrameLoop(
                functools.partial(self._build_engine, profile, actions)
                if process is None
                else lambda frame_waiting: process,
                self._snapshot,
                period_ns=None if use_sim_time else round(1e9 / profile.frame_rate_hz),
                on_failure=self._on_engine_failure,
                on_waiting=None if process is None else process.set_frame_waiting,
            ),
            monitor=monitor.Monitor(profile, self._thresholds()),
            neighbours=Neighbours(),
            commands=self._create_command_publisher(profile.command),
            chunks=publisher(ActionChunkMessage, '~/actions', RELIABLE),
            news={
                task.name: publisher(Note, task.topic, LATCHED)
                if task.kind == 'memory'
                else publisher(Text, task.topic, RELIABLE)
                for task in profile.tasks
            },
            subscriptions=[],
            memory=self._open_memory(),
            process=process,
        )
        self._remember(parts)
        self._load_engine(parts)
        self._subscribe(parts)
        if parts.memory is not None:
            parts.recall = self.create_service(Recall, '~/recall', self._on_recall)
        if rate_hz := float(self._value('annotated_rate_hz')):
            parts.annotation = Annotation(profile)
            parts.annotated = publisher(Image, '~/annotated', newest(0.0))
            parts.draw_timer = self.create_timer(
                1.0 / rate_hz, self._publish_annotated, clock=self._steady
            )
        garbage.settle()
        self._interlock.expect_heartbeat(profile.command.estop_heartbeat_s)
        dry_run, topic = self._value('dry_run'), profile.command.topic
        where = 'nowhere but ~/would_be_command' if dry_run else topic
        self.get_logger().info(f'configured for {profile.name}: commands go to {where}')

    def _thresholds(self) -> monitor.Thresholds:
        names = [threshold.name for threshold in fields(monitor.Thresholds)]
        return monitor.Thresholds(**{name: self._value(f'warn_{name}') for name in names})

    def _create_command_publisher(self, command: CommandProfile) -> Any:
        def is_due() -> bool:
            publisher = self._parts.publisher if self._parts is not None else None
            return self._active and publisher is not None and publisher.source != 'silence'

        return self._qos.create_publisher(
            self.create_lifecycle_publisher,
            COMMAND_TYPES[command.interface],
            '~/would_be_command' if self._value('dry_run') else command.topic,
            newest(self._value('command_deadline_periods') / command.rate_hz),
            is_due,
        )

    def _open_memory(self) -> MemoryStore | None:
        path = self._value('memory_path')
        return MemoryStore(Path(path).expanduser()) if path else None

    def _remember(self, parts: Parts) -> None:
        """Begin with the notes of before, where they are kept and fed back."""
        if parts.memory is not None and (number := parts.profile.memory.feed_back):
            notes = parts.memory.recall('', limit=number)
            for note in reversed(notes):
                parts.buffer.put_note(note.text)
            self.get_logger().info(f'the prompt begins with {len(notes)} notes of before')

    def _load_profile(self) -> RobotProfile:
        profile = load_profile(self._value('profile'), share_folder() / 'config')
        if rate := float(self._value('frame_rate_hz')):
            profile = replace(profile, frame_rate_hz=rate)
        if rate := float(self._value('command_rate_hz')):
            profile = replace(profile, command=replace(profile.command, rate_hz=rate))
        if steps := self._value('num_denoise_steps'):
            profile = replace(profile, model=replace(profile.model, num_denoise_steps=steps))
        return profile

    def _engine_options(self) -> EngineOptions:
        return EngineOptions(
            checkpoint=self._value('checkpoint'),
            tokenizer=self._value('tokenizer'),
            openpi_config=self._value('openpi_config'),
            device=self._value('device'),
            dtype=self._value('dtype'),
            num_slots=self._value('num_slots'),
            max_batch=self._value('max_batch'),
            max_draft=self._value('max_draft'),
            seed=self._value('seed'),
            execution=self._value('execution'),
        )

    def _build_engine(
        self, profile: RobotProfile, actions: ActionBuffer, frame_waiting: Callable[[], bool]
    ) -> Any:
        """Runs in the frame thread. torch is imported here, so a node without a model is light."""
        from oxygen_ros.engine.factory import build_engine

        return build_engine(
            profile,
            self._engine_options(),
            on_chunk=self._on_chunk,
            on_text=self._on_text,
            leftover=actions.leftover,
            frame_waiting=frame_waiting,
            on_progress=monitor.progress_sentences(self.get_logger().info),
        )

    def _engine_process(self, profile: RobotProfile, actions: ActionBuffer) -> EngineProcess | None:
        """Return what will start the engine's process; None where the frame thread is to do it."""
        isolation = self._value('isolation')
        if isolation not in ('thread', 'process'):
            raise ValueError(
                f"parameter 'isolation': expected thread or process, got {isolation!r}"
            )
        if isolation == 'thread':
            return None
        return EngineProcess(
            profile,
            self._engine_options(),
            timeout_s=float(self._value('engine_timeout_s')),
            on_chunk=self._on_chunk,
            on_text=self._on_text,
            leftover=actions.leftover,
            on_progress=monitor.progress_sentences(self.get_logger().info),
            on_ready=lambda pid: self.get_logger().info(f'the engine is ready in process {pid}'),
            on_dying=self._on_engine_dying,
            on_lost=self._on_engine_lost,
        )

    def _load_engine(self, parts: Parts) -> None:
        weights = self._value('checkpoint') or 'random weights'
        self.get_logger().info(f'loading {parts.profile.model.preset} with {weights} ...')
        started_s = time.monotonic()
        parts.loop.start()
        while not parts.loop.ready.wait(0.1):
            if self._stop.is_set():
                raise RuntimeError('interrupted while loading the model')
        if parts.loop.build_error is not None:
            raise parts.loop.build_error
        took_s = time.monotonic() - started_s
        self.get_logger().info(f'model loaded and warmed up in {took_s:.1f} s')

    def _subscribe(self, parts: Parts) -> None:
        profile, joints = parts.profile, parts.profile.joints
        subscribe = functools.partial(self._qos.create_subscription, self.create_subscription)
        for camera in profile.cameras:
            message_type = CompressedImage if camera.transport == 'compressed' else Image
            on_image = functools.partial(self._on_image, camera)
            parts.subscriptions.append(
                subscribe(message_type, camera.topic, on_image, sensor(camera.deadline_s))
            )
        parts.subscriptions.append(
            subscribe(JointState, joints.topic, self._on_joints, sensor(joints.deadline_s))
        )
        parts.subscriptions += self._qos.create_latched_too(
            self.create_subscription, String, profile.instruction.topic, self._on_instruction
        )
        jump = JumpThreshold(
            min_forward=Duration(seconds=FORWARD_JUMP_S),
            min_backward=Duration(nanoseconds=-1),
            on_clock_change=False,
        )
        parts.jump_handle = self.get_clock().create_jump_callback(
            jump, post_callback=self._on_clock_jump
        )

    def _deactivate(self) -> None:
        parts = self._parts
        if parts is None or not self._active:
            return
        self._active = False
        self.destroy_timer(parts.tick)
        parts.actions.clear('deactivated', parts.loop.next_frame)
        parts.loop.rest()
        assert parts.publisher is not None
        if not parts.publisher.stop():
            self.get_logger().error('the command tick did not end in time')
        self._wait_for_delivery(parts)
        self.get_logger().info(f'inactive: {parts.profile.command.fallback} was the last command')

    def _wait_for_delivery(self, parts: Parts) -> None:
        """The last command is the one that must not be lost."""
        try:
            parts.commands.wait_for_all_acked(Duration(seconds=1))
        except Exception as error:
            self.get_logger().warning(f'the last command may not have arrived: {error}')

    def _tear_down(self) -> None:
        parts = self._parts
        if parts is None:
            return
        self._interlock.expect_heartbeat(0.0)
        if parts.jump_handle is not None:
            parts.jump_handle.unregister()
        for subscription in parts.subscriptions:
            self.destroy_subscription(subscription)
        if not self._close_engine(parts):
            self.get_logger().warning('the model did not return in time; its thread is left behind')
        for publisher in (parts.commands, parts.chunks, *parts.news.values()):
            self.destroy_publisher(publisher)
        if parts.recall is not None:
            self.destroy_service(parts.recall)
        if parts.draw_timer is not None:
            self.destroy_timer(parts.draw_timer)
            self.destroy_publisher(parts.annotated)
        if parts.memory is not None:
            parts.memory.close()
        self._parts = None
        garbage.release()

    def _close_engine(self, parts: Parts) -> bool:
        """End the frame thread and the engine's process; a process that is loading is not asked."""
        if parts.process is None:
            return parts.loop.close(CLOSE_TIMEOUT_S)
        if parts.loop.ready.is_set():
            parts.loop.close(CLOSE_TIMEOUT_S / 2)
        parts.process.close()
        return parts.loop.close(CLOSE_TIMEOUT_S / 2)

    # --- executor thread: callbacks only store ------------------------------------------------

    @guarded
    def _on_image(self, camera: CameraProfile, message: Any) -> None:
        parts = self._parts
        if parts is None:
            return
        conversions.take_image(parts.buffer, message, camera, parts.control_ns(), self._ros_ns())

    @guarded
    def _on_joints(self, message: JointState) -> None:
        parts = self._parts
        if parts is None:
            return
        conversions.take_joints(
            parts.buffer, message, parts.profile.joints, parts.control_ns(), self._ros_ns()
        )

    @guarded
    def _on_instruction(self, message: String) -> None:
        self._instruct(message.data)

    def _instruct(self, text: str) -> None:
        """Take a new instruction; what was planned for the old one is thrown away.

        One that cannot be used counts as none: the robot holds rather than carry on with what its
        operator no longer wants.
        """
        parts = self._parts
        if parts is None:
            return
        if len(text) > MAX_INSTRUCTION_CHARS:
            parts.buffer.count_drop('instruction_too_long')
            self.get_logger().error(
                f'{parts.profile.instruction.topic}: expected at most {MAX_INSTRUCTION_CHARS} '
                f'characters, got {len(text)}; holding without an instruction'
            )
            text = ''
        if parts.buffer.set_instruction(text):
            self._forget_plan('instruction')
            self.get_logger().info(f'instruction: {text.strip()!r}')

    def _on_recall(self, request: Recall.Request, response: Recall.Response) -> Recall.Response:
        """Answer from the file; a search that takes too long is given up, images come first."""
        parts = self._parts
        if parts is None or parts.memory is None:
            response.message = 'the node is not configured'
            return response
        try:
            found = parts.memory.recall(
                request.query,
                since_ns=conversions.stamp_to_ns(request.since),
                until_ns=conversions.stamp_to_ns(request.until) or MAX_TIME_NS,
                limit=request.limit or DEFAULT_RECALL_LIMIT,
            )
        except MemoryStoreError as error:
            response.message = str(error)
            return response
        response.notes = [conversions.stored_note_message(note) for note in found]
        return response

    @guarded
    def _on_tick(self) -> None:
        parts = self._parts
        if parts is not None and self._active:
            parts.loop.tick()

    def _on_clock_jump(self, jump: Any) -> None:
        """What was seen and planned belongs to another time, e.g. the end of a bag that loops."""
        parts = self._parts
        if parts is None:
            return
        parts.buffer.clear()
        self._forget_plan('clock_jump')
        self.get_logger().info(f'the clock jumped by {jump.delta.nanoseconds / 1e9:.3f} s')

    def _forget_plan(self, reason: str) -> None:
        """Play no chunk of a frame that was begun before now."""
        if (parts := self._parts) is not None:
            parts.actions.clear(reason, parts.loop.next_frame)

    def _on_parameters(self, parameters: list[Parameter]) -> SetParametersResult:
        """Refuse what needs a configure; apply a new instruction at once."""
        dynamic = {parameter.name for parameter in PARAMETERS if parameter.dynamic}
        fixed = {parameter.name for parameter in PARAMETERS} - dynamic
        for parameter in parameters:
            reason = ''
            if parameter.name in fixed and self._parts is not None:
                reason = 'can only be set before configure; clean up first'
            elif isinstance(parameter.value, float) and not math.isfinite(parameter.value):
                reason = f'expected a finite number, got {parameter.value}'
            if reason:
                return SetParametersResult(
                    successful=False, reason=f'parameter {parameter.name!r} {reason}'
                )
        for parameter in parameters:
            if parameter.name == 'instruction':
                self._instruct(parameter.value)
        return SetParametersResult(successful=True)

    def report_callback_error(self, name: str, error: Exception) -> None:
        """A bug of ours met a message; say so, count it, go on."""
        self._callback_errors += 1
        self.get_logger().error(
            f'{name}: {type(error).__name__}: {error}', throttle_duration_sec=1.0
        )

    # --- frame thread -------------------------------------------------------------------------

    def _snapshot(self, frame: int) -> Observation | NotReady:
        parts = self._parts
        if parts is None:
            return NotReady(('the node is being cleaned up',))
        topic, limit_s = parts.profile.instruction.topic, parts.profile.instruction.max_age_s
        if parts.buffer.expire_instruction(parts.control_ns()):
            parts.actions.clear('instruction_stale', frame)
            self.get_logger().warning(
                f'{topic}: nothing for {limit_s:g} s; no instruction any more'
            )
        observation = parts.buffer.snapshot(frame, parts.control_ns())
        if isinstance(observation, Observation) and not observation.instruction:
            when = f'for {limit_s:g} s' if limit_s else 'yet'
            return NotReady((f'no instruction on {topic} {when}',))
        if parts.annotation is not None and isinstance(observation, Observation):
            parts.annotation.see(observation)
        return observation

    def _on_chunk(self, chunk: ActionChunk) -> None:
        parts = self._parts
        if parts is None or parts.loop.engine is None:
            return
        now_ns = parts.control_ns()
        parts.actions.put(chunk, now_ns)
        parts.observation_age_ms = (now_ns - chunk.time_ns) / 1e6
        stats = parts.loop.engine.stats
        parts.chunks.publish(
            conversions.chunk_message(
                chunk,
                parts.profile.command.names,
                prefill_ms=stats.prefill_ms,
                denoise_ms=stats.denoise_ms,
            )
        )

    def _on_text(self, update: Any) -> None:
        parts = self._parts
        if parts is None:
            return
        if parts.annotation is not None:
            parts.annotation.hear(update)
        publisher = parts.news[update.task]
        if publisher.msg_type is Text:
            publisher.publish(conversions.text_message(update))
        elif update.reason is not None and update.reason.complete:
            # Half a note is no memory; the scheduler has counted it as dropped.
            publisher.publish(conversions.note_message(update))
            parts.buffer.put_note(update.text)
            if parts.memory is not None:
                parts.memory.add(conversions.stored_note(update))

    def _on_engine_failure(self, error: Exception) -> None:
        self._last_failure = f'{type(error).__name__}: {error}'
        self.get_logger().error(f'engine: {self._last_failure}', throttle_duration_sec=1.0)
        self.get_logger().debug(''.join(traceback.format_exception(error)))

    def _on_engine_dying(self) -> None:
        """By a thread of the engine's: nobody thinks for the robot from here on."""
        parts = self._parts
        if parts is not None:
            parts.actions.clear('engine_lost', parts.loop.next_frame)

    def _on_engine_lost(self, reason: str) -> None:
        """By the frame thread, or another while that one is idle."""
        self._last_failure = f'the engine process {reason}'
        self.get_logger().error(f'{self._last_failure}; it will be started again')

    # --- publisher thread ---------------------------------------------------------------------

    def _send_command(self, rows: np.ndarray) -> None:
        parts = self._parts
        assert parts is not None
        command = parts.profile.command
        stamp_ns = self._ros_ns()
        parts.commands.publish(
            conversions.command_message(command, rows, 1.0 / command.rate_hz, stamp_ns)
        )

    def _measured(self) -> np.ndarray | None:
        parts = self._parts
        assert parts is not None
        positions = parts.buffer.positions(parts.control_ns())
        if not positions:
            return None
        return np.array([positions.get(name, math.nan) for name in parts.profile.command.names])

    # --- statistics and diagnostics -----------------------------------------------------------

    @guarded
    def _publish_stats(self) -> None:
        parts = self._parts
        if parts is None or parts.loop.engine is None:
            return
        parts.numbers = parts.monitor.numbers(
            time.monotonic_ns(),
            parts.loop.engine.stats,
            parts.publisher.stats() if parts.publisher is not None else None,
            horizon=parts.loop.engine.action_horizon,
            active=self._active,
            observation_age_ms=parts.observation_age_ms,
        )
        parts.numbers |= self._interlock.numbers() | self._qos.numbers()
        self._stats.publish(
            conversions.stats_message(self._ros_ns(), parts.numbers, self._drops(parts))
        )

    @guarded
    def _publish_annotated(self) -> None:
        parts = self._parts
        if (
            parts is None
            or parts.annotation is None
            or not parts.annotated.get_subscription_count()
        ):
            return
        source = parts.publisher.source if parts.publisher is not None else 'silence'
        picture = parts.annotation.draw(parts.numbers, source, parts.control_ns())
        parts.annotated.publish(conversions.image_message(picture, self._ros_ns()))

    def _drops(self, parts: Parts) -> dict[str, int]:
        """Everything that was thrown away, by reason, wherever it happened."""
        engine = parts.loop.engine
        drops = {
            **parts.buffer.drops(),
            **parts.actions.drops(),
            **parts.loop.drops(),
            **(engine.stats.drops if engine is not None else {}),
        }
        if self._callback_errors:
            drops['callback_error'] = self._callback_errors
        if parts.memory is not None and parts.memory.lost:
            drops['memory_not_kept'] = parts.memory.lost
        return drops

    @guarded
    def _publish_diagnostics(self) -> None:
        parts, ros_ns = self._parts, self._ros_ns()
        use_sim_time = self._value('use_sim_time')
        numbers = self._interlock.numbers()
        statuses = [
            self._clock_watch.status(use_sim_time, ros_ns, time.monotonic_ns()),
            monitor.interlock_status(
                self._interlock.reasons(), numbers['estops'], numbers['holds']
            ),
        ]
        if parts is None:
            statuses.append(monitor.Status('engine', monitor.OK, 'not configured'))
        else:
            garbage.sweep()
            statuses += self._statuses(parts)
            for notice in parts.buffer.notices()[:MAX_NOTICES_PER_LOOK]:
                self.get_logger().warning(notice)
        self._diagnostics.publish(
            conversions.diagnostics_message(
                ros_ns,
                self.get_fully_qualified_name(),
                parts.profile.name if parts is not None else '',
                statuses,
            )
        )

    def _graph_status(self, parts: Parts) -> monitor.Status:
        statuses = parts.buffer.status(parts.control_ns())
        # The first subscriptions are those of the cameras and the joints, in this order.
        sources = [
            (status, self.count_publishers(subscription.topic_name))
            for status, subscription in zip(statuses, parts.subscriptions, strict=False)
        ]
        return parts.neighbours.status(sources, self._command_topic(parts))

    def _command_topic(self, parts: Parts) -> CommandTopic | None:
        if self._value('dry_run'):
            return None
        topic = parts.commands.topic_name
        publishers = [
            f'{endpoint.node_namespace.rstrip("/")}/{endpoint.node_name}'
            for endpoint in self.get_publishers_info_by_topic(topic)
        ]
        if (own := self.get_fully_qualified_name()) in publishers:
            publishers.remove(own)  # once: a twin of ours is a rival
        return CommandTopic(topic, parts.commands.get_subscription_count(), sorted(publishers))

    def _statuses(self, parts: Parts) -> list[monitor.Status]:
        commands = parts.publisher.stats() if parts.publisher is not None else None
        engine = parts.loop.engine.stats if parts.loop.engine is not None else None
        now_ns, chunk = parts.control_ns(), parts.actions.chunk
        chunk_age_s = (now_ns - chunk.time_ns) / 1e9 if chunk is not None else math.nan
        positions = parts.buffer.positions(now_ns)
        return [
            *([parts.monitor.gripper_status(positions)] if parts.profile.grippers else []),
            parts.monitor.command_status(self._active, commands, chunk_age_s),
            parts.monitor.engine_status(
                self._active,
                engine,
                not_ready=parts.loop.not_ready,
                last_error=self._last_failure,
                broken=parts.loop.broken,
                away=parts.process.away if parts.process is not None else '',
                drops=self._drops(parts),
            ),
            parts.monitor.middleware_status(self._qos.misfits(), self._qos.missed()),
            *map(parts.monitor.source_status, parts.buffer.status(now_ns)),
            self._graph_status(parts),
        ]

    # --- the process --------------------------------------------------------------------------

    def run(self) -> int:
        """Turn the executor until the end; return an exit code.

        The end is a signal, the shutdown transition, or an engine that had to be given up (1).
        """
        executor = SingleThreadedExecutor()
        executor.add_node(self)
        if self._value('autostart') and not self._start():
            return 0 if self._stop.is_set() else 1
        while not (self._stop.is_set() or self._finalized or self._broken):
            executor.spin_once(timeout_sec=0.1)
        if not self._finalized:
            self.trigger_shutdown()
        executor.shutdown()
        return 1 if self._gave_up else 0

    def destroy_node(self) -> None:
        """End the interlock's thread, too, while there is a context to end it in."""
        self._interlock.close()
        super().destroy_node()

    def _start(self) -> bool:
        success = TransitionCallbackReturn.SUCCESS
        return self.trigger_configure() == success and self.trigger_activate() == success

    @property
    def _broken(self) -> bool:
        if self._parts is not None and self._parts.loop.broken and not self._gave_up:
            self._gave_up = True
            self.get_logger().fatal(f'the engine is given up: {self._last_failure}')
        return self._gave_up

    def _ros_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)

    def _value(self, name: str) -> Any:
        return self.get_parameter(name).value


def main(args: list[str] | None = None) -> int:
    """Run the node until SIGINT or SIGTERM; both end in the robot's safe behaviour and code 0."""
    stop = threading.Event()
    # rclpy's own handlers would shut the context down first, and the last hold could not leave.
    for number in ENDING_SIGNALS:
        signal.signal(number, lambda *_: stop.set())
    # A busy Python thread may hold the others up for this long; 5 ms is CPython's default.
    sys.setswitchinterval(0.0005)
    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    try:
        node = OxygenNode(stop)
    except rclpy.exceptions.ParameterException as error:
        print(f'oxygen: {error}', file=sys.stderr)
        rclpy.try_shutdown()
        return 2
    code = node.run()
    node.destroy_node()
    rclpy.try_shutdown()
    # The ending interpreter gives our handlers up, and a second Ctrl-C would spoil the exit code.
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if any(thread.name == 'frame' for thread in threading.enumerate()):
        # The model is still computing in native code; the interpreter may not end around it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == '__main__':
    sys.exit(main())
