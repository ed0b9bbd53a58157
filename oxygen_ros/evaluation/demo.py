"""`oxygen_demo`, what `./run demo` runs: the node at work, live: at a simulated table, on
photographs, or on a recording.

Owns the order of things: set up the world, start the node as a process of its own, show what comes
back over real DDS, end it, and judge. Knows nothing of the model; what it measures it measures as a
subscriber. The exit code is 0 only if everything the profile promises arrived, the node ended well
and, at the table, at least one instruction was fulfilled.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from oxygen_ros.evaluation.dashboard import Setting, live_view, plain_line, printable, summary
from oxygen_ros.evaluation.measurements import WINDOW_S, resolve
from oxygen_ros.evaluation.node_process import NodeProcess
from oxygen_ros.evaluation.plan import WORLDS, Plan, make_plan
from oxygen_ros.evaluation.plots import save_plot
from oxygen_ros.evaluation.recording import BagError
from oxygen_ros.evaluation.stage import DemoError, Stage, graph, isolate_graph
from oxygen_ros.profile import ProfileError
from oxygen_ros.sim.robot import NUM_SEEDS

# A checkpoint of several gigabytes from a slow disk.
START_TIMEOUT_S = 600.0
LOOK_PERIOD_S = 0.25
PLAIN_LINE_PERIOD_S = 2.0
NUM_LOG_LINES = 20
MAX_STATUS_CHARS = 100
INTERRUPTED = 130


def main(args: list[str] | None = None) -> int:
    """Run the demo; 0 if all went well, 1 if something was missing, 130 after Ctrl-C."""
    options = _parse(sys.argv[1:] if args is None else args)
    console = Console()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        plan = make_plan(options)
        with _signals_as_interrupt():
            return _run(plan, options, console)
    except (BagError, ProfileError, DemoError, OSError) as error:
        print(f'oxygen_demo: {error}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='oxygen_demo',
        description='Start the node and a world for it, tell it what to do, show what it does.',
    )
    add = parser.add_argument
    add(
        '--world',
        choices=WORLDS,
        help='tabletop: a simulated arm and three blocks, and a model that was trained for them; '
        'photographs: any profile, also with random weights (default tabletop)',
    )
    add('--seconds', type=float, default=30.0, help='measure for so long (default 30)')
    add('--seed', type=int, default=0, help='of the table and the instructions (default 0)')
    add('--profile', default='', help='a name in config/ or a file (default: fits the world)')
    add(
        '--checkpoint',
        default='',
        help='folder with the weights (default: the shipped ones at the table, else random)',
    )
    add('--device', default='auto', help='auto, cpu, cuda or cuda:N (default auto)')
    add(
        '--out',
        type=Path,
        default=Path('demo_output'),
        help='folder of plot, pictures and logs (default ./demo_output)',
    )
    bag = parser.add_argument_group('with a recording instead of these worlds')
    bag.add_argument('--bag', type=Path, help='rosbag2 folder, or its .mcap or .db3 file')
    bag.add_argument(
        '--camera',
        nargs='+',
        default=[],
        metavar='SLOT=TOPIC',
        help='which topic is which camera of the model (default: found by type and name)',
    )
    bag.add_argument('--joints', default='', metavar='TOPIC', help='joint states of the recording')
    bag.add_argument('--rate', type=float, default=1.0, help='recorded seconds per second')
    options = parser.parse_args(args)
    if options.seconds <= 0 or options.rate <= 0:
        parser.error('--seconds and --rate: expected a value above 0')
    if options.bag is None and (options.camera or options.joints or options.rate != 1.0):
        parser.error('--camera, --joints and --rate choose from a recording: --bag is missing')
    if options.bag is not None and options.world is not None:
        parser.error('--bag and --world: expected one of them')
    if not 0 <= options.seed < NUM_SEEDS:
        parser.error(f'--seed: expected 0 to {NUM_SEEDS - 1}, got {options.seed}')
    return options


@contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """Let a closed terminal and a polite kill end the demo as Ctrl-C does: with its node."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- the run


@dataclass(frozen=True)
class Ending:
    """How the node came to its end."""

    exit_code: int
    died: bool  # by itself, before it was asked to
    interrupted: bool  # by Ctrl-C


def _run(plan: Plan, options: argparse.Namespace, console: Console) -> int:
    isolate_graph()
    log_path = options.out / 'node.log'
    with ExitStack() as stack:
        node, spin = stack.enter_context(graph())
        stage = plan.make_stage(node)
        spin()
        try:
            with console.status('setting up the world ...'):
                stage.set_up()
            process = NodeProcess(plan.parameters, log_path)
            # Whatever happens below, also a second Ctrl-C: the node does not outlive the demo.
            stack.callback(process.kill)
            ending = _let_run(process, stage, plan, console)
        finally:
            # After the node has ended, or its last hold would not be measured.
            stage.stop()
    _conclude(plan, options, console, stage)
    if ending.interrupted:
        console.print(f'interrupted; the node has ended with exit code {ending.exit_code}')
        return INTERRUPTED
    return _judge(_faults(plan, stage, ending), stage, process, console)


def _let_run(process: NodeProcess, stage: Stage, plan: Plan, console: Console) -> Ending:
    interrupted = False
    try:
        if _start(process, stage, plan, console):
            _watch(process, stage, plan, console)
    except KeyboardInterrupt:
        interrupted = True
    died = process.exit_code is not None
    return Ending(process.stop(), died, interrupted)


def _start(process: NodeProcess, stage: Stage, plan: Plan, console: Console) -> bool:
    """Wait until commands flow; False if something ended meanwhile or took too long."""
    for remark in plan.remarks:
        console.print(printable(remark), style='dim', markup=False, highlight=False)
    console.print(
        f'starting the node, process {process.pid}; its log is {process.log_path}',
        highlight=False,
        markup=False,
    )
    began_s = time.monotonic()
    with console.status('starting ...') as status:

        def wait(is_done: Callable[[], bool]) -> bool:
            return _wait(process, stage, is_done, status, began_s)

        heard = wait(lambda: stage.is_heard)
        stage.start()
        if not heard or not wait(lambda: stage.seen.num_commands > 0):
            return False
        console.print(f'the node is ready after {time.monotonic() - began_s:.1f} s')
        # Rates are told over a window, which has to fill first.
        full_s = time.monotonic() + WINDOW_S
        return wait(lambda: time.monotonic() > full_s)


def _wait(
    process: NodeProcess, stage: Stage, is_done: Callable[[], bool], status: Any, began_s: float
) -> bool:
    """Look again and again, showing the newest line of the node's log meanwhile."""
    while not is_done():
        waited_s = time.monotonic() - began_s
        if process.exit_code is not None or stage.fault or waited_s > START_TIMEOUT_S:
            return False
        newest = ''.join(process.log_tail(1)).rpartition(']: ')[2]
        status.update(Text(f'{waited_s:.0f} s  {printable(newest)[-MAX_STATUS_CHARS:]}'))
        time.sleep(0.1)
    return True


def _watch(process: NodeProcess, stage: Stage, plan: Plan, console: Console) -> None:
    """Show what happens until the time is up or something ends."""
    setting = plan.setting
    stage.begin()
    show = _show_live if console.is_terminal else _show_lines
    for _ in show(setting, stage, console):
        if stage.seen.elapsed_s >= setting.seconds or process.exit_code is not None or stage.fault:
            return
        stage.operate(setting.seconds)
        time.sleep(LOOK_PERIOD_S)


def _show_live(setting: Setting, stage: Stage, console: Console) -> Iterator[None]:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(live_view(setting, stage.seen, stage.score), refresh=True)
            yield


def _show_lines(setting: Setting, stage: Stage, console: Console) -> Iterator[None]:
    console.print(setting.title, highlight=False, markup=False)
    if setting.about_text:
        console.print(setting.about_text, highlight=False)
    due_s = 0.0
    while True:
        if stage.seen.elapsed_s >= due_s:
            print(plain_line(setting, stage.seen, stage.score), flush=True)
            due_s += PLAIN_LINE_PERIOD_S
        yield


# ---- after the node has ended


def _faults(plan: Plan, stage: Stage, ending: Ending) -> list[str]:
    """Say what went wrong, or is promised by the profile and did not arrive."""
    if ending.died:
        return [f'the node ended by itself with exit code {ending.exit_code}']
    code = ending.exit_code
    faults = [] if code == 0 else [f'the node did not end well: exit code {code}']
    if stage.fault is not None:
        faults.append(stage.fault)
    seen, profile = stage.seen, plan.profile
    kinds = {task.kind: resolve(task.topic) for task in profile.tasks}
    arrived = [
        (seen.num_commands, f'no command on {resolve(profile.command.topic)}'),
        (seen.num_chunks, 'no action chunk on /oxygen/actions'),
    ]
    if 'text' in kinds:
        arrived.append((seen.num_text_messages, f'no text on {kinds["text"]}'))
    if 'memory' in kinds:
        arrived.append((seen.num_notes, f'no memory note on {kinds["memory"]}'))
    return [*faults, *(text for count, text in arrived if count == 0), *stage.missing()]


def _conclude(plan: Plan, options: argparse.Namespace, console: Console, stage: Stage) -> None:
    """Print the summary and draw the pictures, if there is anything to tell."""
    seen, score = stage.seen, stage.score
    if not seen.samples or seen.num_commands == 0:
        return
    console.print(summary(plan.setting, seen, score))
    plot_path = options.out / 'demo.png'
    save_plot(
        plot_path,
        seen.samples,
        title='oxygen_ros demo',
        setting=f'{plan.setting.title}; pictures: {plan.setting.source}',
        due_hz=plan.setting.due_hz,
        instruction_changes_s=seen.instruction_changes_s,
        touches_s=[] if score is None else score.touches_s,
    )
    for path in (plot_path, *stage.save(options.out)):
        console.print(f'picture: {path}', highlight=False, markup=False)


def _judge(faults: list[str], stage: Stage, process: NodeProcess, console: Console) -> int:
    if not faults:
        touched = '' if stage.score is None else ', instructions were fulfilled'
        console.print(f'commands, chunks, text and notes arrived{touched}, and the node ended well')
        return 0
    for line in faults:
        console.print(line, style='bold red', highlight=False, markup=False)
    console.print(f'the last lines of {process.log_path}:', highlight=False, markup=False)
    for line in process.log_tail(NUM_LOG_LINES):
        console.print(f'  {printable(line)}', highlight=False, markup=False, soft_wrap=True)
    return 1


if __name__ == '__main__':
    sys.exit(main())
