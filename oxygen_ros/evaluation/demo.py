"""`oxygen_demo`, what `./run demo` runs: the node at work, live, on photographs or a recording.

Owns the order of things: choose a profile, start the node as a process of its own, feed it over
real DDS, show what comes back, end it, and judge. Knows nothing of the model; what it measures it
measures as a subscriber. The exit code is 0 only if everything the profile promises arrived and the
node ended well.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from oxygen_ros.evaluation.bag_player import BagPlayer
from oxygen_ros.evaluation.bag_profile import profile_for
from oxygen_ros.evaluation.dashboard import Setting, live_view, plain_line, printable, summary
from oxygen_ros.evaluation.measurements import WINDOW_S, Measurements, resolve
from oxygen_ros.evaluation.node_process import NodeProcess
from oxygen_ros.evaluation.plots import save_plot
from oxygen_ros.evaluation.recording import BagError, Recording
from oxygen_ros.evaluation.sim_robot import PHOTOGRAPHS
from oxygen_ros.evaluation.stage import Plan, Stage, graph, isolate_graph
from oxygen_ros.profile import ProfileError, load_profile, share_folder

SECOND_INSTRUCTION = 'put the blue cup on the plate'
# A checkpoint of several gigabytes from a slow disk.
START_TIMEOUT_S = 600.0
LOOK_PERIOD_S = 0.25
PLAIN_LINE_PERIOD_S = 2.0
NUM_LOG_LINES = 20
MAX_STATUS_CHARS = 100
INTERRUPTED = 130


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


def main(args: list[str] | None = None) -> int:
    """Run the demo; 0 if all went well, 1 if something was missing, 130 after Ctrl-C."""
    options = _parse(sys.argv[1:] if args is None else args)
    console = Console()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        plan = _plan(options)
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
        description='Start the node, drive it with pictures and joint states, show what it does.',
    )
    add = parser.add_argument
    add('--seconds', type=float, default=20.0, help='measure for so long (default 20)')
    add('--profile', default='dummy', help='a name in config/ or a file (default dummy)')
    add('--checkpoint', default='', help='folder with the weights (default: random, see profile)')
    add('--device', default='auto', help='auto, cpu, cuda or cuda:N (default auto)')
    add(
        '--out',
        type=Path,
        default=Path('demo_output'),
        help='folder of plot and log (default ./demo_output)',
    )
    bag = parser.add_argument_group('with a recording instead of photographs')
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
    return options


# ---- before the node starts


def _plan(options: argparse.Namespace) -> Plan:
    """Choose the profile and look into the recording. Raises BagError and ProfileError."""
    folder = share_folder() / 'config'
    recording = robot = None
    argument = options.profile
    profile = load_profile(argument, folder)
    source = f'photographs of scikit-image ({", ".join(PHOTOGRAPHS[: len(profile.cameras)])})'
    if options.bag is not None:
        recording = Recording(options.bag)
        robot = profile_for(
            recording,
            _profile_path(argument, folder),
            options.out / 'bag_profile.yaml',
            cameras=_cameras(options.camera),
            joints=options.joints,
        )
        profile, argument = robot.profile, str(robot.profile_path.resolve())
        speed = '' if options.rate == 1.0 else f' at {options.rate:g} times its speed'
        source = f'{recording.path.name} ({recording.duration_s:.2f} s, repeated){speed}'
    setting = Setting(
        profile=profile.name,
        preset=profile.model.preset,
        device=_device_in_words(options.device),
        cores=len(os.sched_getaffinity(0)),
        source=source,
        random_weights=not options.checkpoint,
        due_hz=profile.command.rate_hz,
        seconds=options.seconds,
    )
    return Plan(profile, argument, recording, robot, setting)


def _profile_path(argument: str, folder: Path) -> Path:
    """The file behind a profile that has already been loaded."""
    named = folder / f'{argument}.yaml'
    return named if '/' not in argument and named.is_file() else Path(argument).expanduser()


def _cameras(rules: list[str]) -> dict[str, str]:
    cameras: dict[str, str] = {}
    for rule in rules:
        slot, separator, topic = rule.partition('=')
        if not (slot and separator and topic.startswith('/')):
            raise DemoError(f'--camera: expected SLOT=/TOPIC, got {rule!r}')
        if slot in cameras:
            raise DemoError(f'--camera: {slot} is given twice')
        cameras[slot] = topic
    return cameras


def _device_in_words(device: str) -> str:
    """What `auto` will be, as far as that can be told without torch."""
    if device != 'auto':
        return device
    return 'auto' if Path('/dev/nvidiactl').exists() else 'cpu (auto, no NVIDIA device here)'


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


def _run(plan: Plan, options: argparse.Namespace, console: Console) -> int:
    isolate_graph()
    process = NodeProcess(_node_parameters(plan, options), options.out / 'node.log')
    interrupted = False
    with ExitStack() as stack:
        # Whatever happens below, also a second Ctrl-C: the node does not outlive the demo.
        stack.callback(process.kill)
        with graph() as (node, spin):
            stage = Stage(node, plan, options.rate)
            spin()
            try:
                try:
                    if _start(process, stage, plan, console):
                        _watch(process, stage, plan, console)
                except KeyboardInterrupt:
                    interrupted = True
                died = process.exit_code is not None
                # The feeds go on until the node has ended, or its last hold would not be measured.
                exit_code = process.stop()
            finally:
                stage.stop()
    _conclude(plan, options, console, stage.seen)
    if interrupted:
        console.print(f'interrupted; the node has ended with exit code {exit_code}')
        return INTERRUPTED
    return _judge(_faults(plan, stage, exit_code, died=died), process, console)


def _node_parameters(plan: Plan, options: argparse.Namespace) -> dict[str, str | bool]:
    parameters: dict[str, str | bool] = {
        'profile': plan.profile_argument,
        'device': options.device,
        'use_sim_time': plan.recording is not None,
    }
    if options.checkpoint:
        parameters['checkpoint'] = options.checkpoint
    return parameters


def _start(process: NodeProcess, stage: Stage, plan: Plan, console: Console) -> bool:
    """Wait until commands flow; False if the node ended meanwhile or took too long."""
    for remark in plan.robot.remarks if plan.robot is not None else ():
        console.print(printable(remark), style='dim', markup=False, highlight=False)
    console.print(
        f'starting the node, process {process.pid}; its log is {process.log_path}',
        highlight=False,
        markup=False,
    )
    began_s = time.monotonic()
    with console.status('starting ...') as status:
        # A recording may be shorter than the loading of a model.
        heard = _wait(process, lambda: _is_heard(stage.player), status, began_s)
        stage.start()
        if not heard or not _wait(process, lambda: stage.seen.num_commands > 0, status, began_s):
            return False
        console.print(f'the node is ready after {time.monotonic() - began_s:.1f} s')
        # Rates are told over a window, which has to fill first.
        full_s = time.monotonic() + WINDOW_S
        return _wait(process, lambda: time.monotonic() > full_s, status, began_s)


def _is_heard(player: BagPlayer | None) -> bool:
    return player is None or not player.wait_for_subscribers(0.0)


def _wait(process: NodeProcess, is_done: Callable[[], bool], status: Any, began_s: float) -> bool:
    """Look again and again, showing the newest line of the node's log meanwhile."""
    while not is_done():
        waited_s = time.monotonic() - began_s
        if process.exit_code is not None or waited_s > START_TIMEOUT_S:
            return False
        newest = ''.join(process.log_tail(1)).rpartition(']: ')[2]
        status.update(Text(f'{waited_s:.0f} s  {printable(newest)[-MAX_STATUS_CHARS:]}'))
        time.sleep(0.1)
    return True


def _watch(process: NodeProcess, stage: Stage, plan: Plan, console: Console) -> None:
    """Show what happens until the time is up or something ends."""
    setting, seen = plan.setting, stage.seen
    seen.begin()
    show = _show_live if console.is_terminal else _show_lines
    changed = False
    for _ in show(setting, seen, console):
        if seen.elapsed_s >= setting.seconds or process.exit_code is not None:
            return
        if stage.player is not None and not stage.player.is_playing:
            return  # it repeats for ever, so it has met an error
        if not changed and seen.elapsed_s >= setting.seconds / 2:
            stage.instruct(SECOND_INSTRUCTION)
            changed = True
        time.sleep(LOOK_PERIOD_S)


def _show_live(setting: Setting, seen: Measurements, console: Console) -> Iterator[None]:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(live_view(setting, seen), refresh=True)
            yield


def _show_lines(setting: Setting, seen: Measurements, console: Console) -> Iterator[None]:
    console.print(setting.title, highlight=False, markup=False)
    if setting.about_text:
        console.print(setting.about_text, highlight=False)
    due_s = 0.0
    while True:
        if seen.elapsed_s >= due_s:
            print(plain_line(setting, seen), flush=True)
            due_s += PLAIN_LINE_PERIOD_S
        yield


# ---- after the node has ended


def _faults(plan: Plan, stage: Stage, exit_code: int, *, died: bool) -> list[str]:
    """Say what went wrong, or is promised by the profile and did not arrive."""
    if died:
        return [f'the node ended by itself with exit code {exit_code}']
    faults = [] if exit_code == 0 else [f'the node did not end well: exit code {exit_code}']
    if stage.player is not None and stage.player.error is not None:
        faults.append(str(stage.player.error))
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
    return faults + [text for count, text in arrived if count == 0]


def _conclude(
    plan: Plan, options: argparse.Namespace, console: Console, seen: Measurements
) -> None:
    """Print the summary and draw the plot, if there is anything to tell."""
    if not seen.samples or seen.num_commands == 0:
        return
    console.print(summary(plan.setting, seen))
    plot_path = options.out / 'demo.png'
    save_plot(
        plot_path,
        seen.samples,
        title='oxygen_ros demo',
        setting=f'{plan.setting.title}; pictures: {plan.setting.source}',
        due_hz=plan.setting.due_hz,
        instruction_changes_s=seen.instruction_changes_s,
    )
    console.print(f'plot: {plot_path}', highlight=False, markup=False)


def _judge(faults: list[str], process: NodeProcess, console: Console) -> int:
    if not faults:
        console.print('commands, chunks, text and notes arrived, and the node ended well')
        return 0
    for line in faults:
        console.print(line, style='bold red', highlight=False, markup=False)
    console.print(f'the last lines of {process.log_path}:', highlight=False, markup=False)
    for line in process.log_tail(NUM_LOG_LINES):
        console.print(f'  {printable(line)}', highlight=False, markup=False, soft_wrap=True)
    return 1


if __name__ == '__main__':
    sys.exit(main())
