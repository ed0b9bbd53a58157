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
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from oxygen_ros.engine.factory import EngineOptions
from oxygen_ros.evaluation.bag_evaluation import REALTIME, Plan, evaluate_or_say_why
from oxygen_ros.evaluation.bag_result import read_result
from oxygen_ros.evaluation.bag_source import Given
from oxygen_ros.evaluation.eval_report import results_table, write_report
from oxygen_ros.evaluation.offline_engine import OfflineEngine
from oxygen_ros.evaluation.on_ray import LOCAL, evaluate_on_ray
from oxygen_ros.evaluation.run_comparison import compare_runs
from oxygen_ros.evaluation.run_folder import RunFolder, folder_names
from oxygen_ros.model.openpi_bridge import OpenpiError
from oxygen_ros.profile import load_profile, share_folder

INTERRUPTED = 130


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
    if options.ray:
        machine['Ray'] = options.ray
    run.begin(plan.setting(), machine, resume=options.resume)
    evaluate(plan, options.bags, run, console, ray=options.ray)
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
    *,
    ray: str = '',
    change: Callable[[OfflineEngine], None] = lambda engine: None,
) -> None:
    """Evaluate every recording that has no result yet; a failing one does not end the others.

    Args:
        ray: address of the Ray cluster that does it; '' = this process.
        change: told the engine of this process before it is used, to try a change that no option
            makes.
    """
    names = folder_names(bags)
    left = {bag: name for bag, name in names.items() if not _is_done(run.bag_folder(name))}
    if skipped := len(names) - len(left):
        console.print(f'{skipped} of {len(names)} recordings have a result already')
    if not left:
        return
    with _progress(console) as progress:
        bar = progress.add_task('recordings', total=len(left), told='')
        if ray:
            outcomes = evaluate_on_ray(plan, left, run, ray)
        else:
            outcomes = _evaluate_here(plan, left, run, progress, change)
        for reason in outcomes:
            progress.advance(bar)
            if reason:
                console.print(
                    f'[red]not evaluated:[/red] {reason}', highlight=False, soft_wrap=True
                )


def _evaluate_here(
    plan: Plan,
    left: Mapping[Path, str],
    run: RunFolder,
    progress: Progress,
    change: Callable[[OfflineEngine], None],
) -> Iterator[str]:
    """Evaluate one after the other; yield per recording why it failed, '' if it did not."""
    loading = progress.add_task('loading the model', total=None, told='')
    engine = OfflineEngine(plan.profile, plan.engine, realtime=plan.realtime)
    change(engine)
    progress.remove_task(loading)
    for bag, name in left.items():
        bar = progress.add_task(bag.name, total=1.0, told='')

        def told(share: float, words: str, bar: Any = bar) -> None:
            progress.update(bar, completed=share, told=words)

        yield evaluate_or_say_why(plan, bag, engine, run.bag_folder(name), told)


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
    add(
        '--ray',
        nargs='?',
        const=LOCAL,
        default='',
        metavar='ADDRESS',
        help='a task per recording on Ray, behind the recordings: of all cores of this machine, or '
        'of the cluster at HOST:PORT or "auto" (the same paths on every machine)',
    )
    add('--seed', type=int, default=0, help='of the action noise (default 0)')
    add('--tokenizer', default='', help='SentencePiece model, if not beside the weights')
    add('--openpi-config', default='', metavar='NAME', help='as the node parameter openpi_config')
    add('--device', default='auto', help='auto, cpu, cuda or cuda:N')
    add('--dtype', default='auto', help='auto, float32 or bfloat16')
    _add_topics(parser)
    _add_changes(parser)
    options = parser.parse_args(args)
    if options.ray and options.rate == REALTIME:
        parser.error('--rate recorded measures this machine: expected no --ray beside it')
    if options.ray not in ('', LOCAL, 'auto') and ':' not in options.ray:
        parser.error(f'--ray: expected an address or nothing behind it, got {options.ray!r}')
    return options


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
