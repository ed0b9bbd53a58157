"""`oxygen_eval`: recordings through the model, straight from the file, and a report about it.

Owns the order of things: options, one engine for all recordings, a folder per recording, resuming,
the comparison with another run. Knows nothing of what a frame is. No ROS is needed. Exit code 0 if
every recording was evaluated, 1 if some were not, 2 if the run itself could not be, 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from oxygen_ros.engine.factory import EngineOptions
from oxygen_ros.evaluation.action_score import ActionScore
from oxygen_ros.evaluation.bag_result import OUTPUT_BAG, Collector, read_result, write_failure
from oxygen_ros.evaluation.bag_source import BagSource, Given
from oxygen_ros.evaluation.eval_report import results_table, write_report
from oxygen_ros.evaluation.offline_engine import OfflineEngine
from oxygen_ros.evaluation.output_bag import OutputBag
from oxygen_ros.evaluation.recorded_commands import read_commands
from oxygen_ros.evaluation.recording import BagError, Recording
from oxygen_ros.evaluation.replay import Replay
from oxygen_ros.evaluation.run_comparison import compare_runs
from oxygen_ros.evaluation.run_folder import RunFolder, flat_setting, folder_names
from oxygen_ros.model.openpi_bridge import OpenpiError
from oxygen_ros.profile import ProfileError, RobotProfile, load_profile, share_folder

INTERRUPTED = 130
REALTIME = 'recorded'


@dataclass(frozen=True)
class Plan:
    """What is to be evaluated, and how."""

    profile: RobotProfile
    given: Given
    engine: EngineOptions
    instruction: str
    realtime: bool
    latency_ns: int
    align_ns: int

    def setting(self) -> dict[str, Any]:
        """Return what the results depend on."""
        options = {
            'rate': REALTIME if self.realtime else 'fast',
            'seed': self.engine.seed,
            'openpi_config': self.engine.openpi_config,
            'device': self.engine.device,
            'dtype': self.engine.dtype,
            'num_slots': self.engine.num_slots,
            'max_batch': self.engine.max_batch,
            'max_draft': self.engine.max_draft,
            'latency_ms': self.latency_ns / 1e6,
            'align_ms': self.align_ns / 1e6,
            'instruction': self.instruction or 'of the profile or the recording',
            'dropped_cameras': ', '.join(self.given.dropped_cameras),
            'commands': self.given.commands or 'of the profile',
        }
        return flat_setting(self.profile, self.engine.checkpoint, options)


def main(args: list[str] | None = None) -> int:
    """Evaluate from the command line."""
    options = _parse(sys.argv[1:] if args is None else args)
    console = Console(stderr=True)
    try:
        return _run(options, console)
    except KeyboardInterrupt:
        console.print('oxygen_eval: stopped; --resume goes on with the recordings that are left')
        return INTERRUPTED
    except (OSError, ValueError, OpenpiError) as error:
        print(f'oxygen_eval: {error}', file=sys.stderr)
        return 2


def _run(options: argparse.Namespace, console: Console) -> int:
    plan = make_plan(options)
    run = RunFolder(options.out)
    other = RunFolder(options.compare) if options.compare else None
    if other is not None:
        _ = other.setting  # before an hour of work
    machine = {'CPU cores': os.cpu_count() or 0, 'device': options.device}
    run.begin(plan.setting(), machine, resume=options.resume)
    evaluate(plan, options.bags, run, console)
    results, theirs = run.results(), other.results() if other is not None else []
    comparison = None
    if other is not None:
        comparison = compare_runs(results, theirs, run.setting, other.setting)
    report = write_report(run.path, run.setting, run.machine, results, comparison, theirs)
    Console().print(results_table(results, comparison))
    console.print(f'report: {report}')
    return 1 if any(result.failed for result in results) else 0


def make_plan(options: argparse.Namespace) -> Plan:
    """Put the command line into plain values. Raises ProfileError."""
    profile = load_profile(options.profile, share_folder() / 'config')
    if options.frame_rate_hz:
        profile = replace(profile, frame_rate_hz=options.frame_rate_hz)
    if options.num_denoise_steps:
        model = replace(profile.model, num_denoise_steps=options.num_denoise_steps)
        profile = replace(profile, model=model)
    return Plan(
        profile=profile,
        given=Given(
            cameras=dict(options.camera),
            joints=options.joints,
            commands=options.commands,
            dropped_cameras=tuple(options.drop_camera),
        ),
        engine=EngineOptions(
            checkpoint=options.checkpoint,
            tokenizer=options.tokenizer,
            openpi_config=options.openpi_config,
            device=options.device,
            dtype=options.dtype,
            seed=options.seed,
        ),
        instruction=options.instruction,
        realtime=options.rate == REALTIME,
        latency_ns=round(1e6 * options.latency_ms),
        align_ns=round(1e6 * options.align_ms),
    )


def evaluate(
    plan: Plan,
    bags: list[Path],
    run: RunFolder,
    console: Console,
    change: Callable[[OfflineEngine], None] = lambda engine: None,
) -> None:
    """Evaluate every recording that has no result yet; a failing one does not end the others.

    Args:
        change: told the engine before it is used, to try a change that no option makes.
    """
    names = folder_names(bags)
    left = [bag for bag in bags if not _is_done(run.bag_folder(names[bag]))]
    if skipped := len(bags) - len(left):
        console.print(f'{skipped} of {len(bags)} recordings have a result already')
    if not left:
        return
    with console.status('loading the model'):
        engine = OfflineEngine(plan.profile, plan.engine, realtime=plan.realtime)
        change(engine)
    with _progress(console) as progress:
        for number, bag in enumerate(left):
            title = f'[{number + 1}/{len(left)}] {bag.name}'
            task = progress.add_task(title, total=1.0, told='')
            folder = run.bag_folder(names[bag])

            def told(share: float, words: str, task: Any = task) -> None:
                progress.update(task, completed=share, told=words)

            try:
                told(1.0, evaluate_bag(plan, bag, engine, folder, told))
            except (BagError, ProfileError) as error:
                write_failure(folder, bag, names[bag], str(error))
                told(0.0, '[red]failed[/red]')
                console.print(f'[red]not evaluated:[/red] {error}', highlight=False, soft_wrap=True)


def evaluate_bag(
    plan: Plan,
    bag: Path,
    engine: OfflineEngine,
    folder: Path,
    told: Callable[[float, str], None],
) -> str:
    """Evaluate one recording into its folder; return how it went in a few words.

    Raises BagError, with one line, if it cannot be used.
    """
    shutil.rmtree(folder)
    folder.mkdir()
    started_s = time.monotonic()
    recording = Recording(bag)
    source = BagSource(recording, plan.profile, plan.given)
    command, recorded = source.profile.command, None
    if source.commands:
        recorded = read_commands(recording, source.commands, command).at
    score = ActionScore(command, plan.align_ns, recorded)
    with OutputBag(folder / OUTPUT_BAG, source.profile) as output:
        collector = Collector(source, score, output, folder.name)
        replay = Replay(
            source,
            engine,
            collector,
            instruction=plan.instruction,
            latency_ns=plan.latency_ns,
            realtime=plan.realtime,
        )

        def on_progress(now_ns: int) -> None:
            done_s = (now_ns - recording.start_ns) / 1e9
            share = done_s / recording.duration_s if recording.duration_s else 1.0
            told(share, f'{done_s:.0f} of {recording.duration_s:.0f} s')

        replay.run(on_progress)
    collector.finish(replay, time.monotonic() - started_s, folder)
    return f'{collector.num_frames} frames of {replay.ticks} ticks'


def _is_done(folder: Path) -> bool:
    result = read_result(folder)
    return result is not None and not result.failed


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn('{task.description}', markup=False),
        BarColumn(),
        TextColumn('{task.fields[told]}'),
        TimeRemainingColumn(),
        console=console,
    )


# ---- options


def _parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='oxygen_eval',
        description='Evaluate a model on rosbag2 recordings (sqlite3 or mcap, split or compressed) '
        'and write a report.',
    )
    add = parser.add_argument
    add('bags', nargs='+', type=Path, metavar='BAG', help='folder of a recording, or its file')
    add('--profile', required=True, help='robot profile: a name in config/ or a file')
    add('--checkpoint', default='', help='folder of the weights; none only with random weights')
    add('--out', type=Path, default=Path('eval'), help='folder of the results (default: eval)')
    add('--resume', action='store_true', help='go on with the recordings that have no result')
    add('--compare', type=Path, metavar='OTHER_RUN', help='--out of another run: compare with it')
    add(
        '--rate',
        choices=('fast', REALTIME),
        default='fast',
        help='fast (default): as fast as possible, the same result on any run; recorded: at the '
        'pace of the recording, with the deadlines and losses of this machine',
    )
    add('--seed', type=int, default=0, help='of the action noise (default 0)')
    add('--tokenizer', default='', help='SentencePiece model, if not beside the weights')
    add('--openpi-config', default='', metavar='NAME', help='as the node parameter openpi_config')
    add('--device', default='auto', help='auto, cpu, cuda or cuda:N')
    add('--dtype', default='auto', help='auto, float32 or bfloat16')
    _add_topics(parser)
    _add_changes(parser)
    return parser.parse_args(args)


def _add_topics(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('what the recording calls it')
    add = group.add_argument
    add(
        '--camera',
        action='append',
        default=[],
        type=_slot_and_topic,
        metavar='SLOT=TOPIC',
        help='topic of a model camera slot (default: of the profile, in any namespace)',
    )
    add('--joints', default='', metavar='TOPIC', help='topic of the joint states')
    add('--commands', default='', metavar='TOPIC', help='topic of the commands to compare with')
    add('--instruction', default='', metavar='TEXT', help='until the recording says otherwise')


def _add_changes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('what to try, and how to compare')
    add = group.add_argument
    add('--num-denoise-steps', type=_count, metavar='N', help='instead of the profile')
    add('--frame-rate-hz', type=_positive, metavar='HZ', help='instead of the profile')
    add(
        '--drop-camera',
        action='append',
        default=[],
        metavar='SLOT',
        help='evaluate without this camera',
    )
    add(
        '--latency-ms',
        type=_not_negative,
        default=0.0,
        metavar='MS',
        help='a chunk takes over so long after its observation (default 0; measured with --rate '
        'recorded)',
    )
    add(
        '--align-ms',
        type=float,
        default=0.0,
        metavar='MS',
        help='the recorded command for a moment came so much later (default 0); the report says '
        'which value fits best',
    )


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f'expected at least 1, got {text}')
    return int(text)


def _positive(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f'expected a value above 0, got {text}')
    return float(text)


def _not_negative(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f'expected 0 or more, got {text}')
    return float(text)


def _slot_and_topic(text: str) -> tuple[str, str]:
    slot, separator, topic = text.partition('=')
    if not (slot and separator and topic):
        raise argparse.ArgumentTypeError(f'expected SLOT=TOPIC, got {text!r}')
    return slot, topic


if __name__ == '__main__':
    sys.exit(main())
