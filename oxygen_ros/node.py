"""OxygenNode: parameters, topics and lifecycle of the robot's node, and the process around it.

Owns the lifecycle, the command topic and the wiring between the rooms; no tensor and no policy
logic. Nobody imports it but its entry point.

Threads. The main thread runs the executor: its callbacks store the newest message (`inputs.py`) and
report (`reports.py`), nothing else. The frame thread (`frame_loop.py`) runs the engine, the
publisher thread (`publisher.py`) the command tick. Both publish from their own thread, so neither
waits for a callback. Stop and hold are heard in a third (`interlock.py`).
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
from dataclasses import fields, replace
from typing import Any

import numpy as np
import rclpy
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock, ClockType
from rclpy.duration import Duration
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory

from oxygen_ros import conversions, garbage, monitor
from oxygen_ros.actions import ActionBuffer, ActionChunk
from oxygen_ros.annotated import Annotation
from oxygen_ros.engine.engine import TextUpdate
from oxygen_ros.engine.options import EngineOptions
from oxygen_ros.engine.process import EngineProcess
from oxygen_ros.frame_loop import FrameLoop
from oxygen_ros.guard import Guard
from oxygen_ros.inputs import Inputs
from oxygen_ros.interlock import Interlock
from oxygen_ros.neighbours import Neighbours
from oxygen_ros.news import News
from oxygen_ros.observation import NotReady, Observation
from oxygen_ros.parameters import PARAMETERS
from oxygen_ros.parts import Parts
from oxygen_ros.profile import CommandProfile, RobotProfile, load_profile, share_folder
from oxygen_ros.publisher import CommandPublisher
from oxygen_ros.qos import QosWatch, newest
from oxygen_ros.reports import Reports

COMMAND_TYPES = {
    'joint_state': JointState,
    'joint_trajectory': JointTrajectory,
    'forward_command': Float64MultiArray,
}
# A trajectory carries the rest of the chunk: if we die, the motion ends by itself.
ROWS_PER_COMMAND = {'joint_state': 1, 'joint_trajectory': 1000, 'forward_command': 1}
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLOSE_TIMEOUT_S = 3.0
"""Launch sends SIGTERM 5 s after SIGINT by default; the last hold has to be out by then."""


class OxygenNode(LifecycleNode):
    def __init__(self, stop: threading.Event) -> None:
        """Declare parameters and publish statistics; everything else waits for configure.

        Args:
            stop: set by a signal; a configure that is loading weights then gives up.
        """
        super().__init__('oxygen')
        self._stop = stop
        self._parts: Parts | None = None
        self._finalized = self._gave_up = False
        # Before anything that may raise: rclpy destroys a half-made node, too.
        self._qos = QosWatch(self)
        self._interlock = Interlock(self, self._qos, self._forget_plan)
        for parameter in PARAMETERS:
            self.declare_parameter(parameter.name, parameter.default, parameter.descriptor())
        self.add_on_set_parameters_callback(self._on_parameters)

        # Frames must go on when the system clock is set back.
        self._steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._guard = Guard(self.get_logger())
        self._reports = Reports(
            self, self._qos, self._interlock, self._guard, lambda: self._parts, self._ros_ns
        )

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
            self._guard(self._on_tick),
            # None is the node's clock: a replayed bag sets the pace.
            clock=None if self._value('use_sim_time') else self._steady,
        )
        parts.active = True
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
        self._parts = parts = self._make_parts(self._load_profile())
        instruction = self._value('instruction') or parts.profile.instruction.default
        parts.inputs.buffer.set_instruction(instruction)
        parts.news.remember()
        self._load_engine(parts)
        parts.inputs.subscribe(self._qos, self._guard)
        parts.news.offer_recall()
        if parts.annotation is not None:
            self._reports.begin_pictures(float(self._value('annotated_rate_hz')))
        garbage.settle()
        self._interlock.expect_heartbeat(parts.profile.command.estop_heartbeat_s)
        dry_run, topic = self._value('dry_run'), parts.profile.command.topic
        where = 'nowhere but ~/would_be_command' if dry_run else topic
        self.get_logger().info(f'configured for {parts.profile.name}: commands go to {where}')

    def _make_parts(self, profile: RobotProfile) -> Parts:
        control_ns = self._ros_ns if self._value('use_sim_time') else time.monotonic_ns
        inputs = Inputs(
            self,
            profile,
            control_ns=control_ns,
            ros_ns=self._ros_ns,
            forget_plan=self._forget_plan,
        )
        actions = ActionBuffer.of_profile(profile)
        process = self._engine_process(profile, actions)
        return Parts(
            profile=profile,
            control_ns=control_ns,
            inputs=inputs,
            actions=actions,
            process=process,
            loop=self._make_loop(profile, actions, process),
            monitor=monitor.Monitor(profile, self._thresholds()),
            neighbours=Neighbours(),
            annotation=Annotation(profile) if self._value('annotated_rate_hz') else None,
            news=News(
                self,
                self._qos,
                profile,
                memory_path=self._value('memory_path'),
                put_note=inputs.buffer.put_note,
            ),
            commands=self._create_command_publisher(profile.command),
        )

    def _make_loop(
        self, profile: RobotProfile, actions: ActionBuffer, process: EngineProcess | None
    ) -> FrameLoop:
        return FrameLoop(
            functools.partial(self._build_engine, profile, actions)
            if process is None
            else lambda frame_waiting: process,
            self._snapshot,
            period_ns=None if self._value('use_sim_time') else round(1e9 / profile.frame_rate_hz),
            on_failure=self._on_engine_failure,
            on_waiting=None if process is None else process.set_frame_waiting,
        )

    def _thresholds(self) -> monitor.Thresholds:
        names = [threshold.name for threshold in fields(monitor.Thresholds)]
        return monitor.Thresholds(**{name: self._value(f'warn_{name}') for name in names})

    def _create_command_publisher(self, command: CommandProfile) -> Any:
        def is_due() -> bool:
            parts = self._parts
            return parts is not None and parts.active and parts.source != 'silence'

        return self._qos.create_publisher(
            self.create_lifecycle_publisher,
            COMMAND_TYPES[command.interface],
            '~/would_be_command' if self._value('dry_run') else command.topic,
            newest(self._value('command_deadline_periods') / command.rate_hz),
            is_due,
        )

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

    def _deactivate(self) -> None:
        parts = self._parts
        if parts is None or not parts.active:
            return
        parts.active = False
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
        parts.inputs.close()
        if not self._close_engine(parts):
            self.get_logger().warning('the model did not return in time; its thread is left behind')
        self.destroy_publisher(parts.commands)
        parts.news.close()
        self._reports.end_pictures()
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

    # --- executor thread ----------------------------------------------------------------------

    def _on_tick(self) -> None:
        parts = self._parts
        if parts is not None and parts.active:
            parts.loop.tick()

    def _on_parameters(self, parameters: list[Parameter]) -> SetParametersResult:
        """Refuse what needs a configure; apply a new instruction at once."""
        parts = self._parts
        dynamic = {parameter.name for parameter in PARAMETERS if parameter.dynamic}
        fixed = {parameter.name for parameter in PARAMETERS} - dynamic
        for parameter in parameters:
            reason = ''
            if parameter.name in fixed and parts is not None:
                reason = 'can only be set before configure; clean up first'
            elif isinstance(parameter.value, float) and not math.isfinite(parameter.value):
                reason = f'expected a finite number, got {parameter.value}'
            if reason:
                return SetParametersResult(
                    successful=False, reason=f'parameter {parameter.name!r} {reason}'
                )
        for parameter in parameters:
            if parameter.name == 'instruction' and parts is not None:
                parts.inputs.instruct(parameter.value)
        return SetParametersResult(successful=True)

    def _forget_plan(self, reason: str, first_frame: int | None = None) -> None:
        """Play no chunk of a frame that was begun before now, or before `first_frame`."""
        if (parts := self._parts) is not None:
            first = parts.loop.next_frame if first_frame is None else first_frame
            parts.actions.clear(reason, first)

    # --- frame thread -------------------------------------------------------------------------

    def _snapshot(self, frame: int) -> Observation | NotReady:
        parts = self._parts
        if parts is None:
            return NotReady(('the node is being cleaned up',))
        observation = parts.inputs.snapshot(frame)
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
        parts.news.tell_chunk(chunk, parts.loop.engine.stats)

    def _on_text(self, update: TextUpdate) -> None:
        parts = self._parts
        if parts is None:
            return
        if parts.annotation is not None:
            parts.annotation.hear(update)
        parts.news.tell_words(update)

    def _on_engine_failure(self, error: Exception) -> None:
        failure = f'{type(error).__name__}: {error}'
        self._note_failure(failure)
        self.get_logger().error(f'engine: {failure}', throttle_duration_sec=1.0)
        self.get_logger().debug(''.join(traceback.format_exception(error)))

    def _on_engine_dying(self) -> None:
        """By a thread of the engine's: nobody thinks for the robot from here on."""
        self._forget_plan('engine_lost')

    def _on_engine_lost(self, reason: str) -> None:
        """By the frame thread, or another while that one is idle."""
        failure = f'the engine process {reason}'
        self._note_failure(failure)
        self.get_logger().error(f'{failure}; it will be started again')

    def _note_failure(self, failure: str) -> None:
        if (parts := self._parts) is not None:
            parts.last_failure = failure

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
        positions = parts.inputs.buffer.positions(parts.control_ns())
        if not positions:
            return None
        return np.array([positions.get(name, math.nan) for name in parts.profile.command.names])

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
        parts = self._parts
        if parts is not None and parts.loop.broken and not self._gave_up:
            self._gave_up = True
            self.get_logger().fatal(f'the engine is given up: {parts.last_failure}')
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
