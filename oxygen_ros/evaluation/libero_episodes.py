"""`oxygen_libero_eval`: the success rates of LIBERO, by openpi's protocol, over the live ROS graph.

Owns the choice of tasks and trials, the start of the node per execution and the judgement. The
robot waits for the node (`lockstep.py`), so that no result depends on how fast this machine is;
tables and files are `libero_report.py`'s. Exit code 0 if everything could be played; 1 otherwise, 2
for wrong arguments, 130 after Ctrl-C. What was played is told in any case.

The protocol (openpi examples/libero/main.py): every task from the initial states of the benchmark;
10 steps in which objects settle; at most 220, 280, 300 or 520 control steps at 20 Hz; of each chunk
5 rows are executed; success is what the environment says after a step. One thing differs: before
each reset the generator is seeded by the trial, there once per task.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from oxygen_ros.evaluation import libero_report as report
from oxygen_ros.evaluation.episodes import EXECUTIONS, INTERRUPTED, NUM_LOG_LINES, ros_node
from oxygen_ros.evaluation.libero_report import Played, Record
from oxygen_ros.evaluation.lockstep import LockStep, LockStepError
from oxygen_ros.evaluation.lockstep_profile import check_robot, lockstep_profile
from oxygen_ros.evaluation.node_process import NodeProcess
from oxygen_ros.evaluation.stage import isolate_graph
from oxygen_ros.profile import ProfileError, RobotProfile, load_profile, share_folder
from oxygen_ros.sim.libero import LiberoRobot
from oxygen_ros.sim.libero_tasks import CONTROL_HZ, NUM_TASKS, SUITES, Task, suite_tasks
from oxygen_ros.sim.libero_world import CAMERAS, COMMANDS, LiberoWorld
from oxygen_ros.sim.world import GraphicsError

MAX_TRIALS = 50
"""So many initial states has each task of the benchmark."""


@dataclass(frozen=True)
class Setting:
    """What is the same for all episodes and executions."""

    profile_path: Path  # the one made for the evaluation
    profile: RobotProfile
    checkpoint: str
    device: str
    executions: tuple[str, ...]
    trials: int  # of each task
    out: Path

    def node_parameters(self, execution: str) -> dict[str, str | bool]:
        """Return the ROS parameters of the node under test."""
        return {
            'profile': str(self.profile_path.resolve()),
            'checkpoint': self.checkpoint,
            'device': self.device,
            'execution': execution,
            'use_sim_time': True,
        }


def main(args: list[str] | None = None) -> int:
    """Play, print and write; see the exit codes above."""
    options = _parse(sys.argv[1:] if args is None else args)
    try:
        isolate_graph()
        setting = make_setting(options)
        tasks = [task for suite in options.suite for task in suite_tasks(suite)]
        return evaluate(setting, [task for task in tasks if task.index in options.task])
    except (ProfileError, GraphicsError, LockStepError, OSError) as error:
        print(f'oxygen_libero_eval: {error}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='oxygen_libero_eval',
        description='Let the node play LIBERO over ROS, and count its successes.',
    )
    add = parser.add_argument
    add('--suite', action='append', choices=SUITES, help='may be repeated (default all four)')
    add(
        '--task',
        action='append',
        type=int,
        choices=range(NUM_TASKS),
        help='number in its suite, may be repeated (default all)',
    )
    add('--trials', type=int, default=MAX_TRIALS, help=f'of each task (default {MAX_TRIALS})')
    add('--execution', choices=(*EXECUTIONS, 'all'), default='all', help='default all')
    add('--profile', default='libero', help='a name in config/ or a file (default libero)')
    add('--checkpoint', default='', help='folder with the weights')
    add('--device', default='auto', help='auto, cpu, cuda or cuda:N (default auto)')
    add('--rows', type=int, default=5, help='control steps (rows of a chunk) per look (default 5)')
    add('--copies', type=int, default=1, help='of each language task on every look; 0: no language')
    add('--out', type=Path, default=Path('libero_output'), help='folder of CSV, tables and logs')
    options = parser.parse_args(args)
    if not 1 <= options.trials <= MAX_TRIALS:
        parser.error(f'--trials: expected 1 to {MAX_TRIALS}, got {options.trials}')
    if options.rows < 1 or options.copies < 0:
        parser.error('--rows: expected at least 1; --copies: expected at least 0')
    options.suite = sorted(set(options.suite or SUITES), key=SUITES.index)
    options.task = set(range(NUM_TASKS) if options.task is None else options.task)
    return options


def make_setting(options: argparse.Namespace) -> Setting:
    """Derive the profile of this evaluation; check that all fits.

    Raises:
        ProfileError: no such profile, it is none for LIBERO's robot, or lacks a checkpoint.
    """
    name, config = options.profile, share_folder() / 'config'
    base = load_profile(name, config)
    check_robot(base, name, "LIBERO's robot", LiberoRobot, LiberoWorld, COMMANDS)
    horizon = base.model.action_horizon
    if 0 < horizon < options.rows:
        raise ProfileError(
            f'--rows: expected at most model.action_horizon of {name}, {horizon}, '
            f'got {options.rows}'
        )
    if not options.checkpoint and not base.model.random_weights:
        raise ProfileError(f'--checkpoint: {name} has no random weights; name a folder with some')
    path = Path(name).expanduser() if '/' in name or name.endswith(('.yaml', '.yml')) else None
    options.out.mkdir(parents=True, exist_ok=True)
    written = options.out / 'profile.yaml'
    profile = lockstep_profile(
        path or config / f'{name}.yaml',
        written,
        frame_rate_hz=CONTROL_HZ / options.rows,
        copies=options.copies,
    )
    return Setting(
        profile_path=written,
        profile=profile,
        checkpoint=options.checkpoint,
        device=options.device,
        executions=EXECUTIONS if options.execution == 'all' else (options.execution,),
        trials=options.trials,
        out=options.out,
    )


def evaluate(setting: Setting, tasks: Sequence[Task]) -> int:
    """Play all tasks under each execution; write down what was played, also if not all could be.

    Raises:
        FileExistsError: the folder holds a run already.
        GraphicsError: LIBERO, or a part of it, is missing.
        LockStepError: the node did not answer as it must.
    """
    record = Record(setting.out)
    world = LiberoWorld(tasks[0])
    due = len(setting.executions) * len(tasks) * setting.trials
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            for execution in setting.executions:
                bar = progress.add_task(execution, total=len(tasks) * setting.trials)
                for played in play_all(setting, execution, world, tasks):
                    record.add(played)
                    progress.advance(bar)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        world.close()
        _conclude(setting, record.played, due)
    return 0


def play_all(
    setting: Setting, execution: str, world: LiberoWorld, tasks: Sequence[Task]
) -> Iterator[Played]:
    """Start the node with this execution, play all trials of all tasks, end it.

    Raises:
        LockStepError: the node did not answer as it must, with the end of its log.
    """
    process = NodeProcess(setting.node_parameters(execution), setting.out / f'node_{execution}.log')
    try:
        with ros_node('libero') as (node, executor):
            robot = LiberoRobot(node, world, interface=setting.profile.command.interface)
            lockstep = LockStep(node, executor, robot, setting.profile, process, CAMERAS)
            lockstep.wait_until_active(tasks[0].language)
            for task in tasks:
                if world.task is not task:
                    world.enter(task)
                for trial in range(setting.trials):
                    yield play(lockstep, world, trial, execution, setting.profile)
            if lost := lockstep.count_lost():
                raise LockStepError(f'the node never received {lost} of the messages sent to it')
            if code := process.stop():
                raise LockStepError(f'the node ended with exit code {code}')
    except LockStepError as error:
        tail = '\n  '.join(process.log_tail(NUM_LOG_LINES))
        raise LockStepError(f'{execution}: {error}\n{process.log_path}:\n  {tail}') from error
    finally:
        process.kill()


def play(
    lockstep: LockStep, world: LiberoWorld, trial: int, execution: str, profile: RobotProfile
) -> Played:
    """Play one trial of the task that is on, to success or to its limit of steps."""
    task, began_s = world.task, time.monotonic()
    lockstep.robot.reset(trial)
    lockstep.begin(_place_in_time(task, trial), task.language)
    looks = []

    def is_over() -> bool:
        return world.succeeded() or world.num_steps >= task.step_limit

    while not is_over():
        looks.append(lockstep.look())
        lockstep.act(is_over)
    lockstep.finish_texts()
    due = [(language.name, look.stamp_ns) for language in profile.tasks for look in looks]
    return Played(
        execution=execution,
        suite=task.suite,
        task=task.index,
        language=task.language,
        trial=trial,
        success=world.succeeded(),
        steps=world.num_steps,
        looks=len(looks),
        texts_due=len(due),
        texts_ended=sum(lockstep.heard.endings.pop(key, None) is not None for key in due),
        chunk_ms=float(np.median([look.chunk_ms for look in looks])),
        wall_s=time.monotonic() - began_s,
    )


def _place_in_time(task: Task, trial: int) -> int:
    """One for each trial of the benchmark: an episode is the same, whatever was chosen with it."""
    return (SUITES.index(task.suite) * NUM_TASKS + task.index) * MAX_TRIALS + trial


def _conclude(setting: Setting, played: Sequence[Played], due: int) -> None:
    """Write and print the tables; the last line is the JSON."""
    about = (
        f'{len(played)} of {due} episodes, {setting.trials} trials of a task; '
        f'profile {setting.profile.name}, {setting.checkpoint or "random weights"}, '
        f'{setting.device}. Rates with their 95 % intervals (Wilson).'
    )
    text = report.markdown(played, about)
    (setting.out / 'libero.md').write_text(text, encoding='utf-8')
    data = report.as_json(
        played,
        {
            'profile': setting.profile.name,
            'checkpoint': setting.checkpoint,
            'device': setting.device,
            'trials': setting.trials,
            'frame_rate_hz': setting.profile.frame_rate_hz,
            'tasks_per_look': len(setting.profile.tasks),
        },
        due=due,
    )
    (setting.out / 'libero.json').write_text(json.dumps(data, indent=2) + '\n', encoding='utf-8')
    print(text)
    print(f'{setting.out}: {report.EPISODES_FILE}, libero.md, libero.json')
    print(json.dumps(data))


if __name__ == '__main__':
    sys.exit(main())
