"""Where sharing matters: the tabletop in real time, with more frames and more to say than usual.

Owns the real-time play and what is measured during it, for each execution of the engine in turn:
the node is the ordinary one, and the load is a matter of its profile alone (frame rate, and every
language task several times on every frame). Called by `episodes.py` for --load; the table and the
picture are `load_report.py`'s.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from rclpy.qos import DurabilityPolicy, QoSProfile
from rich.console import Console
from rich.progress import Progress
from std_msgs.msg import String

from oxygen_ros.conversions import stamp_to_ns
from oxygen_ros.evaluation import episodes, load_report
from oxygen_ros.evaluation.load_report import LoadRun, SaidLive
from oxygen_ros.evaluation.lockstep import START_TIMEOUT_S, LockStepError
from oxygen_ros.evaluation.lockstep_profile import load_profile_with
from oxygen_ros.evaluation.measurements import resolve
from oxygen_ros.evaluation.node_process import NodeProcess
from oxygen_ros.msg import ActionChunk, EngineStats, Note, Text
from oxygen_ros.profile import RobotProfile
from oxygen_ros.sim.robot import MAX_CATCH_UP_S
from oxygen_ros.sim.tabletop import TabletopRobot
from oxygen_ros.sim.world import TabletopWorld

JOINTS_HZ = 50.0
LOOKS_PER_FRAME = 3
"""With one, how old a view is would depend on the phase of two timers, another one in every run."""
PAUSE_S = 0.5
"""Between episodes: what was planned for the last one is thrown away meanwhile."""
FIRST_CHUNK_TIMEOUT_S = 30.0


class LiveTable:
    """The world at the pace of the wall clock, and everything that comes from the node meanwhile.

    One thread does it all, in turns: callbacks, physics, pictures.
    """

    def __init__(
        self,
        node: Any,
        executor: Any,
        robot: TabletopRobot,
        profile: RobotProfile,
        cameras: Sequence[str],
        run: LoadRun,
    ) -> None:
        self.robot, self.run = robot, run
        self.recording = False
        """Whether an episode is on; pauses are not measured."""
        self.num_chunks = 0
        self._executor, self._cameras = executor, tuple(cameras)
        self._camera_s = 1.0 / (LOOKS_PER_FRAME * profile.frame_rate_hz)
        self._kinds = {task.name: task.kind for task in profile.tasks}
        self._task = ''
        self._truth: dict[int, tuple[str, str]] = {}
        """By stamp: narration and memory; of recorded looks only."""
        self._chunk_stamp_ns: int | None = None
        self._lived_s = self._images_due_s = time.monotonic()
        latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._instruction = node.create_publisher(
            String, resolve(profile.instruction.topic), latched
        )
        subscribe = node.create_subscription
        subscribe(ActionChunk, resolve('~/actions'), self._on_chunk, 100)
        subscribe(EngineStats, resolve('~/stats'), self._on_stats, 10)
        for task in profile.tasks:
            kind = Note if task.kind == 'memory' else Text
            subscribe(kind, resolve(task.topic), self._on_text, 1000)

    def instruct(self, instruction: str) -> None:
        """Tell the node what to do; '' lets it hold."""
        self._task = instruction
        self._instruction.publish(String(data=instruction))

    def live(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Let time pass until something holds; False if it took too long."""
        limit_s = time.monotonic() + timeout_s
        while not is_over():
            if time.monotonic() > limit_s:
                return False
            self._turn()
        return True

    def _turn(self) -> None:
        joints_due_s = self._lived_s + 1.0 / JOINTS_HZ
        now_s = time.monotonic()
        if now_s >= joints_due_s:
            self._move(now_s)
        if now_s >= self._images_due_s:
            self._look(now_s)
        wait_s = min(joints_due_s, self._images_due_s) - time.monotonic()
        self._executor.spin_once(timeout_sec=max(0.0, wait_s))

    def _move(self, now_s: float) -> None:
        self.robot.advance(min(now_s - self._lived_s, MAX_CATCH_UP_S))
        self._lived_s = now_s
        stamp_ns = time.time_ns()
        self.robot.publish_joints(stamp_ns)
        if self.recording and self._chunk_stamp_ns is not None:
            self.run.ages_ms.append((stamp_ns - self._chunk_stamp_ns) / 1e6)

    def _look(self, now_s: float) -> None:
        stamp_ns, world = time.time_ns(), self.robot.world
        if self.recording:
            self._truth[stamp_ns] = world.narration(self._task), world.memory()
        self.robot.publish_images(stamp_ns, self._cameras)
        self._images_due_s = max(self._images_due_s + self._camera_s, now_s)

    def _on_chunk(self, message: ActionChunk) -> None:
        self.num_chunks += 1
        self._chunk_stamp_ns = stamp_to_ns(message.header.stamp)
        if self.recording:
            self.run.num_chunks += 1
            self.run.chunk_ms.append((time.time_ns() - self._chunk_stamp_ns) / 1e6)

    def _on_text(self, message: Any) -> None:
        stamp_ns = stamp_to_ns(message.header.stamp)
        if not getattr(message, 'final', True) or stamp_ns not in self._truth:
            return
        kind = self._kinds[message.task]
        narration, memory = self._truth[stamp_ns]
        self.run.said.append(
            SaidLive(
                kind=kind,
                exact=message.text == (memory if kind == 'memory' else narration),
                complete=message.reason in ('eos', 'length'),
                age_ms=(time.time_ns() - stamp_ns) / 1e6,
                later=self._chunk_stamp_ns is not None and self._chunk_stamp_ns > stamp_ns,
            )
        )

    def _on_stats(self, message: EngineStats) -> None:
        self.run.drops = dict(zip(message.drop_reasons, message.drop_counts, strict=True))
        self.run.lateness_p99_ms = message.lateness_p99_ms


def compare_under_load(options: argparse.Namespace, console: Console) -> int:
    """Play all episodes with each execution, print the table, write JSON and plot.

    Raises:
        LockStepError: a node ended or never acted.
    """
    setting = episodes.make_setting(
        options,
        lambda base, written: load_profile_with(
            base, written, frame_rate_hz=options.frame_rate, copies=options.copies
        ),
    )
    world = TabletopWorld()
    runs = []
    try:
        with Progress(console=console, transient=True) as progress:
            for execution in episodes.executions(options):
                bar = progress.add_task(execution, total=len(setting.seeds))
                advance = functools.partial(progress.advance, bar)
                runs.append(run_live(setting, execution, world, advance))
    finally:
        world.close()
    about = (
        f'{len(setting.seeds)} episodes from seed {setting.seeds[0]} in real time, '
        f'{options.frame_rate:g} frames/s, {len(setting.profile.tasks)} texts and notes per '
        f'frame; {setting.checkpoint or "random weights"}, {setting.device}, '
        f'{len(os.sched_getaffinity(0))} CPU cores'
    )
    episodes.printer().print(load_report.table(runs, f'The tabletop under load: {about}'))
    data = load_report.as_json(
        runs,
        {
            'checkpoint': setting.checkpoint,
            'device': setting.device,
            'episodes': len(setting.seeds),
            'first_seed': setting.seeds[0],
            'frame_rate_hz': options.frame_rate,
            'copies': options.copies,
            'tasks_per_frame': len(setting.profile.tasks),
        },
    )
    (setting.out / 'load.json').write_text(json.dumps(data, indent=2) + '\n', encoding='utf-8')
    load_report.save_plot(setting.out / 'load.png', runs, 'The tabletop under load', about)
    print(f'{setting.out}/load.json, {setting.out}/load.png')
    print(json.dumps(data))
    return 0


def run_live(
    setting: episodes.Setting,
    execution: str,
    world: TabletopWorld,
    progress: Callable[[], None],
) -> LoadRun:
    """Start the node with this execution and play all episodes against the wall clock."""
    run = LoadRun(execution, due_hz=setting.profile.frame_rate_hz)
    parameters = setting.node_parameters(execution, use_sim_time=False)
    process = NodeProcess(parameters, setting.out / f'node_load_{execution}.log')
    try:
        with episodes.ros_node('tabletop') as (node, executor):
            robot = TabletopRobot(node, world, interface=setting.profile.command.interface)
            table = LiveTable(node, executor, robot, setting.profile, setting.cameras, run)
            for seed in setting.seeds:
                _play(table, episodes.play_of(seed), setting, process)
                progress()
            if code := process.stop():
                raise LockStepError(f'the node ended with exit code {code}')
    except LockStepError as error:
        tail = '\n  '.join(process.log_tail(episodes.NUM_LOG_LINES))
        raise LockStepError(f'{execution}: {error}\n{process.log_path}:\n  {tail}') from error
    finally:
        process.kill()
    return run


def _play(
    table: LiveTable, play: episodes.Play, setting: episodes.Setting, process: NodeProcess
) -> None:
    robot, run = table.robot, table.run
    first = not run.successes
    table.instruct('')
    robot.reset(play.seed)
    robot.braked = True  # the node holds the arm where the last episode ended
    table.live(lambda: False, PAUSE_S)
    before = table.num_chunks
    table.instruct(play.instruction)
    timeout_s = START_TIMEOUT_S if first else FIRST_CHUNK_TIMEOUT_S
    if not table.live(
        lambda: table.num_chunks > before or process.exit_code is not None, timeout_s
    ):
        raise LockStepError(f'no chunk in {timeout_s:g} s')
    if process.exit_code is not None:
        raise LockStepError(f'the node ended with exit code {process.exit_code}')
    robot.braked, table.recording = False, True
    began_s = time.monotonic()
    table.live(lambda: robot.world.succeeded(play.instruction), setting.limit_s)
    table.recording = False
    run.recorded_s += time.monotonic() - began_s
    run.successes.append(robot.world.succeeded(play.instruction))
