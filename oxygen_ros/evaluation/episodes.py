"""`oxygen_episodes`: how well the trained policy plays the table, measured over the live ROS graph.

Owns the choice of episodes, the start of the node per execution and the judgement. The lock-step
that makes the result a function of the seed is `lockstep.py`, the real-time comparison under load
`load.py`, tables and plots `episode_report.py`. Exit code 0 if everything could be played, nothing
was lost, and all executions acted alike; 1 otherwise, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from oxygen_ros.evaluation import episode_report as report
from oxygen_ros.evaluation.episode_report import Episode, Run, Said
from oxygen_ros.evaluation.lockstep import MAX_SEED, LockStep, LockStepError, Look
from oxygen_ros.evaluation.lockstep_profile import lockstep_profile
from oxygen_ros.evaluation.node_process import NodeProcess
from oxygen_ros.evaluation.stage import isolate_graph
from oxygen_ros.evaluation.tabletop_profile import check_fit, shipped_checkpoint, world_cameras
from oxygen_ros.profile import ProfileError, RobotProfile, load_profile, share_folder
from oxygen_ros.sim.tabletop import TabletopRobot
from oxygen_ros.sim.world import COLOURS, INSTRUCTIONS, GraphicsError, TabletopWorld

EXECUTIONS = ('unified', 'shared', 'isolated')
LIMIT_S = 12.0
NUM_LOG_LINES = 15
LOG_WIDTH = 140
# Without a measurement nothing leaves; that is so before the first joint states of each episode.
EXPECTED_INTERVENTION = 'no_reference'
INTERRUPTED = 130


@dataclass(frozen=True)
class Play:
    """What a seed stands for."""

    seed: int
    instruction: str
    random_instruction: str
    """Names a block drawn without regard to the instruction."""


@dataclass(frozen=True)
class Truth:
    """What a perfect observer would have written of a look."""

    narration: str
    memory: str


@dataclass(frozen=True)
class Setting:
    """What is the same for all episodes and executions."""

    profile_path: Path  # the one made for the evaluation
    profile: RobotProfile
    cameras: tuple[str, ...]  # of the world, those that are not lost
    checkpoint: str
    device: str
    seeds: tuple[int, ...]
    limit_s: float
    out: Path

    def node_parameters(self, execution: str, *, use_sim_time: bool) -> dict[str, str | bool]:
        """Return the ROS parameters of the node under test."""
        return {
            'profile': str(self.profile_path.resolve()),
            'checkpoint': self.checkpoint,
            'device': self.device,
            'execution': execution,
            'use_sim_time': use_sim_time,
        }


def play_of(seed: int) -> Play:
    """Choose phrasing and block by the seed, as `sim/rollout.py` does in one process."""
    rng = np.random.default_rng((seed, 1))
    phrase = INSTRUCTIONS[rng.integers(len(INSTRUCTIONS))]
    named, drawn = (COLOURS[i] for i in rng.integers(len(COLOURS), size=2))
    return Play(seed, phrase.format(named), phrase.format(drawn))


def main(args: list[str] | None = None) -> int:
    """Play, print and write; see the exit codes above, 130 after Ctrl-C."""
    options = _parse(sys.argv[1:] if args is None else args)
    console = Console(stderr=True)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        isolate_graph()
        if options.load:
            from oxygen_ros.evaluation.load import compare_under_load

            return compare_under_load(options, console)
        return _evaluate(options, console)
    except (ProfileError, GraphicsError, LockStepError, OSError) as error:
        print(f'oxygen_episodes: {error}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='oxygen_episodes',
        description='Let the node play the simulated table over ROS, and score it.',
    )
    add = parser.add_argument
    add('--episodes', type=int, default=None, help='how many (default 100; with --load 10)')
    add('--seed', type=int, default=10_000, help='of the first; the others count up')
    add(
        '--execution',
        choices=(*EXECUTIONS, 'all'),
        default=None,
        help='how the engine runs (default unified; with --load all)',
    )
    add('--profile', default='tabletop', help='a name in config/ or a file (default tabletop)')
    add('--checkpoint', default='', help='folder with the weights (default: the shipped ones)')
    add('--device', default='cpu', help='auto, cpu, cuda or cuda:N (default cpu)')
    add('--rows', type=int, default=5, help='control steps (rows of a chunk) per look')
    add(
        '--copies',
        type=int,
        default=None,
        help='of each language task on every look: more to say (default 1; with --load 4)',
    )
    add('--limit', type=float, default=LIMIT_S, metavar='S', help='simulated seconds per episode')
    add('--lose-camera', action='append', default=[], metavar='SLOT', help='switch a camera off')
    add('--out', type=Path, default=Path('episodes_output'), help='folder of JSON, plot and logs')
    load = parser.add_argument_group('real time instead of lock-step, where sharing matters')
    load.add_argument('--load', action='store_true', help='compare executions under load')
    load.add_argument('--frame-rate', type=float, default=15.0, metavar='HZ', help='default 15')
    options = parser.parse_args(args)
    if options.episodes is None:
        options.episodes = 10 if options.load else 100
    if options.copies is None:
        options.copies = 4 if options.load else 1
    if options.execution is None:
        options.execution = 'all' if options.load else 'unified'
    if options.episodes < 1 or options.limit <= 0 or options.limit > 90:
        parser.error('--episodes: expected at least 1; --limit: expected more than 0, at most 90')
    if not 1 <= options.rows <= 50 or options.copies < 1 or options.frame_rate <= 0:
        parser.error('--rows, --copies, --frame-rate: expected at least one of each')
    if options.seed < 0 or options.seed + options.episodes > MAX_SEED:
        parser.error(f'--seed: expected 0 to {MAX_SEED} less the episodes, got {options.seed}')
    return options


def executions(options: argparse.Namespace) -> tuple[str, ...]:
    """Return those that were asked for."""
    return EXECUTIONS if options.execution == 'all' else (options.execution,)


def make_setting(
    options: argparse.Namespace, write: Callable[[Path, Path], RobotProfile]
) -> Setting:
    """Derive the profile of this evaluation with `write(base, written)`; check that all fits."""
    config = share_folder() / 'config'
    base = load_profile(options.profile, config)
    check_fit(base, options.profile)
    cameras = world_cameras(base, options.lose_camera)
    name = options.profile
    path = Path(name).expanduser() if '/' in name or name.endswith(('.yaml', '.yml')) else None
    written = options.out / 'profile.yaml'
    profile = write(path or config / f'{name}.yaml', written)
    checkpoint = options.checkpoint
    if not checkpoint and not base.model.random_weights:
        checkpoint = str(shipped_checkpoint())
    return Setting(
        profile_path=written,
        profile=profile,
        cameras=cameras,
        checkpoint=checkpoint,
        device=options.device,
        seeds=tuple(range(options.seed, options.seed + options.episodes)),
        limit_s=options.limit,
        out=options.out,
    )


def printer() -> Console:
    """A console on stdout, wide enough for the tables also in a log."""
    console = Console()
    return console if console.is_terminal else Console(width=LOG_WIDTH)


@contextmanager
def ros_node(name: str) -> Iterator[tuple[Any, Any]]:
    """A node of ours and the executor that turns it, when asked to."""
    import rclpy
    from rclpy.executors import SingleThreadedExecutor
    from rclpy.logging import LoggingSeverity
    from rclpy.signals import SignalHandlerOptions

    context = rclpy.Context()
    rclpy.init(args=[], context=context, signal_handler_options=SignalHandlerOptions.NO)
    node = rclpy.create_node(name, context=context)
    # The node hears latched and volatile instructions with two subscriptions; rclpy would warn.
    node.get_logger().set_level(LoggingSeverity.ERROR)
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)
    try:
        yield node, executor
    finally:
        executor.shutdown()
        node.destroy_node()
        context.try_shutdown()


# ---- lock-step


def _evaluate(options: argparse.Namespace, console: Console) -> int:
    rate_hz = 10.0 / options.rows
    setting = make_setting(
        options,
        lambda base, written: lockstep_profile(
            base, written, frame_rate_hz=rate_hz, copies=options.copies
        ),
    )
    world = TabletopWorld()
    try:
        with Progress(console=console, transient=True) as progress:
            runs = []
            for execution in executions(options):
                bar = progress.add_task(execution, total=len(setting.seeds))
                advance = functools.partial(progress.advance, bar)
                runs.append(run_lockstep(setting, execution, world, advance))
    finally:
        world.close()
    return _conclude(options, setting, runs)


def run_lockstep(
    setting: Setting,
    execution: str,
    world: TabletopWorld,
    progress: Callable[[], None] = lambda: None,
) -> Run:
    """Start the node with this execution, play all episodes, end it.

    Raises:
        LockStepError: the node did not answer as it must, with the end of its log.
    """
    run = Run(execution)
    parameters = setting.node_parameters(execution, use_sim_time=True)
    process = NodeProcess(parameters, setting.out / f'node_{execution}.log')
    try:
        with ros_node('tabletop') as (node, executor):
            robot = TabletopRobot(node, world, interface=setting.profile.command.interface)
            lockstep = LockStep(node, executor, robot, setting.profile, process, setting.cameras)
            lockstep.wait_until_active(play_of(setting.seeds[0]).instruction)
            began_s = time.monotonic()
            for seed in setting.seeds:
                run.episodes.append(play(lockstep, play_of(seed), setting))
                progress()
            run.wall_s = time.monotonic() - began_s
            _account(run, lockstep)
            if code := process.stop():
                raise LockStepError(f'the node ended with exit code {code}')
    except LockStepError as error:
        tail = '\n  '.join(process.log_tail(NUM_LOG_LINES))
        raise LockStepError(f'{execution}: {error}\n{process.log_path}:\n  {tail}') from error
    finally:
        process.kill()
    return run


def play(lockstep: LockStep, play: Play, setting: Setting) -> Episode:
    """Play one episode to success or to its time limit; then let the node finish its sentences."""
    world = lockstep.robot.world
    first_look = lockstep.num_looks
    lockstep.robot.reset(play.seed)
    lockstep.begin(play.seed, play.instruction)
    looks: list[Look] = []
    truths: list[Truth] = []
    commands: list[np.ndarray] = []

    def is_over() -> bool:
        return world.succeeded(play.instruction) or world.time_s >= setting.limit_s - 1e-6

    while not is_over():
        looks.append(lockstep.look())
        truths.append(Truth(world.narration(play.instruction), world.memory()))
        commands.append(lockstep.act(is_over))
    lockstep.finish_texts()
    return Episode(
        seed=play.seed,
        instruction=play.instruction,
        success=world.succeeded(play.instruction),
        success_of_random=world.succeeded(play.random_instruction),
        duration_s=world.time_s,
        chunks=tuple(look.chunk for look in looks),
        commands=np.concatenate(commands),
        joints=np.array([look.joints for look in looks]),
        chunk_ms=tuple(look.chunk_ms for look in looks),
        said=tuple(_what_was_said(lockstep, looks, truths, first_look, setting.profile)),
    )


def _what_was_said(
    lockstep: LockStep,
    looks: Sequence[Look],
    truths: Sequence[Truth],
    first_look: int,
    profile: RobotProfile,
) -> Iterator[Said]:
    """Compare every text and note with the truth at the look it is stamped with."""
    for task in profile.tasks:
        for number, (look, known) in enumerate(zip(looks, truths, strict=True)):
            truth = known.memory if task.kind == 'memory' else known.narration
            ending = lockstep.heard.endings.pop((task.name, look.stamp_ns), None)
            if ending is None:
                yield Said(task.kind, look.stamp_ns, truth, None, '', math.nan, 0)
                continue
            yield Said(
                kind=task.kind,
                stamp_ns=look.stamp_ns,
                truth=truth,
                text=ending.text,
                reason=ending.reason,
                age_ms=(ending.arrived_s - look.ticked_s) * 1e3,
                looks_later=max(0, ending.looks - (first_look + number + 1)),
            )


def _account(run: Run, lockstep: LockStep) -> None:
    """Take what the node itself has counted."""
    run.lost_messages = lockstep.count_lost()
    run.clamped_rows = lockstep.clamped_rows
    run.interventions = _counts(lockstep, 'commands', 'Intervention ')
    run.interventions.pop(EXPECTED_INTERVENTION, None)
    run.drops = _counts(lockstep, 'engine', 'Dropped ')


def _counts(lockstep: LockStep, part: str, prefix: str) -> dict[str, int]:
    values = lockstep.heard.diagnostics.get(part, {})
    return {
        key.removeprefix(prefix): int(value)
        for key, value in values.items()
        if key.startswith(prefix)
    }


def _conclude(options: argparse.Namespace, setting: Setting, runs: list[Run]) -> int:
    """Print the table, write JSON and plot; the last line is the JSON."""
    lost = ', '.join(options.lose_camera)
    about = (
        f'{len(setting.seeds)} episodes from seed {setting.seeds[0]}, {options.rows} rows and '
        f'{len(setting.profile.tasks)} texts and notes per look'
        f'{f", without {lost}" if lost else ""}; {setting.checkpoint or "random weights"}, '
        f'{setting.device}, {len(os.sched_getaffinity(0))} CPU cores'
    )
    printer().print(report.table(runs, f'The tabletop over ROS, in lock-step: {about}'))
    data = report.as_json(
        runs,
        {
            'profile': setting.profile.name,
            'checkpoint': setting.checkpoint,
            'device': setting.device,
            'episodes': len(setting.seeds),
            'first_seed': setting.seeds[0],
            'rows_per_look': options.rows,
            'tasks_per_look': len(setting.profile.tasks),
            'lost_cameras': options.lose_camera,
        },
    )
    (setting.out / 'episodes.json').write_text(json.dumps(data, indent=2) + '\n')
    report.save_plot(setting.out / 'episodes.png', runs, 'The tabletop over ROS', about)
    print(f'{setting.out}/episodes.json, {setting.out}/episodes.png')
    print(json.dumps(data))
    unlike = any(difference != 0.0 for difference in data['largest_difference_rad'].values())
    return int(unlike or any(run.lost_messages or run.ticks_lost for run in runs))


if __name__ == '__main__':
    sys.exit(main())
