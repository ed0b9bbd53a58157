"""How late commands leave: engine idle and saturated, in a thread and in a process, by rate.

    ./run shell python bench/bench_deadline.py

For every command rate two nodes are started, one per isolation, each in a namespace of its own.
They take turns: while one is active the other rests, first without pictures (the engine is idle,
the robot holds), then with pictures, frame after frame without a pause, every task on every frame.
So a machine that slows down slows all of them. Lateness is the command thread's own, measured when
the command has been published; nobody subscribes to the commands. Processor time of the node and
of the engine's process stands beside it, in cores. The last line is JSON.
"""

from __future__ import annotations

import argparse
import array
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from oxygen_ros.profile import RobotProfile, load_profile, plain_profile, share_folder

ROOT = Path(__file__).resolve().parents[1]
ISOLATIONS = ('thread', 'process')
LOADS = ('idle', 'saturated')
COLOURS = {'thread': 'tab:orange', 'process': 'tab:blue'}
SATURATING_HZ = 100.0
"""Frames asked for; no model here makes as many."""
JOINTS_HZ, CAMERAS_HZ = 50.0, 15.0
WIDTH, HEIGHT = 320, 240
SETTLE_S = 1.0
START_TIMEOUT_S = 300.0
MAX_TICKS = 1_000_000
TICKS_PER_S = os.sysconf('SC_CLK_TCK')


# --- inside the node's process --------------------------------------------------------------------


def serve(folder: Path, scheduling: str, ros_arguments: list[str]) -> int:
    """Run the node itself and keep every tick: a file of (deadline, lateness) per activation."""
    from oxygen_ros import node, publisher

    class WatchedPublisher(publisher.CommandPublisher):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._ticks = np.zeros((MAX_TICKS, 2), np.int64)
            self._num_ticks = 0

        def _count_and_advance(self, deadline_ns: int, *, sent: bool) -> None:
            self._ticks[self._num_ticks] = deadline_ns, self._monotonic_ns() - deadline_ns
            self._num_ticks += 1
            super()._count_and_advance(deadline_ns, sent=sent)

        def stop(self, timeout_s: float = 1.0) -> bool:
            ended = super().stop(timeout_s)
            number = len(list(folder.glob('*.npy')))
            np.save(folder / f'{number:03}.npy', self._ticks[: self._num_ticks])
            (folder / 'scheduling').write_text(self.stats().scheduling)
            return ended

    node.CommandPublisher = WatchedPublisher
    if scheduling == 'other':
        publisher._ask_for_fifo = lambda: 'SCHED_OTHER (as asked)'
    return node.main(ros_arguments)


# --- the two nodes and their robot ----------------------------------------------------------------


@dataclass
class Window:
    """A time in which one node did one thing."""

    load: str
    begin_ns: int = 0
    end_ns: int = 0
    node_cpu_s: float = 0.0
    engine_cpu_s: float = 0.0
    chunks: int = 0

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass
class Served:
    """A node under test."""

    isolation: str
    folder: Path
    process: subprocess.Popen[bytes]
    windows: list[Window] = field(default_factory=list)

    def cpu_s(self) -> tuple[float, float]:
        """Processor time so far of the node and of the engine's process, if it has one [s]."""
        own = cpu_s_of(self.process.pid)
        return own, sum(map(cpu_s_of, children_of(self.process.pid)))

    def samples(self) -> np.ndarray:
        """All ticks of all activations: int64 (n, 2), deadline and lateness [ns]."""
        return np.concatenate([np.load(path) for path in sorted(self.folder.glob('*.npy'))])


def cpu_s_of(pid: int) -> float:
    after_name = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    return (int(after_name[11]) + int(after_name[12])) / TICKS_PER_S


def children_of(pid: int) -> list[int]:
    tasks = Path(f'/proc/{pid}/task').glob('*/children')
    return [int(child) for task in tasks for child in task.read_text().split()]


class Driver:
    """Senses for one node at a time, and the hand on its lifecycle."""

    def __init__(self, profile: RobotProfile) -> None:
        import rclpy
        from rclpy.executors import SingleThreadedExecutor

        rclpy.init()
        self.node = rclpy.create_node('bench_deadline')
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self.node)
        self._profile = profile
        self._senses = {isolation: self._publishers(isolation) for isolation in ISOLATIONS}
        self._clients = {isolation: self._client(isolation) for isolation in ISOLATIONS}
        self._active: str | None = None
        self._pictures_on = False
        noise = np.random.default_rng(0).integers(0, 255, WIDTH * HEIGHT * 3, np.uint8)
        self._pixels = array.array('B', noise.tobytes())
        self.chunks = 0
        self.node.create_timer(1 / JOINTS_HZ, self._publish_joints)
        self.node.create_timer(1 / CAMERAS_HZ, self._publish_pictures)

    def _publishers(self, isolation: str) -> tuple[Any, list[Any]]:
        from rclpy.qos import qos_profile_sensor_data
        from sensor_msgs.msg import Image, JointState

        from oxygen_ros.msg import ActionChunk

        def publisher(kind: type, topic: str) -> Any:
            return self.node.create_publisher(
                kind, f'/{isolation}/{topic.lstrip("/")}', qos_profile_sensor_data
            )

        topic = f'/{isolation}/oxygen/actions'
        self.node.create_subscription(ActionChunk, topic, self._on_chunk, 10)
        cameras = [publisher(Image, camera.topic) for camera in self._profile.cameras]
        return publisher(JointState, self._profile.joints.topic), cameras

    def _client(self, isolation: str) -> Any:
        from lifecycle_msgs.srv import ChangeState

        return self.node.create_client(ChangeState, f'/{isolation}/oxygen/change_state')

    def _on_chunk(self, message: Any) -> None:
        self.chunks += 1

    def _publish_joints(self) -> None:
        from sensor_msgs.msg import JointState

        if self._active is not None:
            names = list(self._profile.joints.names)
            message = JointState(name=names, position=self._positions())
            message.header.stamp = self.node.get_clock().now().to_msg()
            self._senses[self._active][0].publish(message)

    def _positions(self) -> list[float]:
        command = self._profile.command
        limits = dict(
            zip(command.names, zip(command.lower, command.upper, strict=True), strict=True)
        )
        return [
            float(np.clip(0.0, *limits.get(name, (0.0, 0.0))))
            for name in self._profile.joints.names
        ]

    def _publish_pictures(self) -> None:
        from sensor_msgs.msg import Image

        if self._active is None or not self._pictures_on:
            return
        message = Image(width=WIDTH, height=HEIGHT, encoding='rgb8', step=3 * WIDTH)
        message.data = self._pixels
        message.header.stamp = self.node.get_clock().now().to_msg()
        for publisher in self._senses[self._active][1]:
            publisher.publish(message)

    def spin_for(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._executor.spin_once(timeout_sec=min(left_s, 0.1))

    def change(self, isolation: str, transition: int) -> None:
        """Walk a node through its lifecycle; raises RuntimeError if it does not go."""
        from lifecycle_msgs.srv import ChangeState

        call = ChangeState.Request()
        call.transition.id = transition
        client = self._clients[isolation]
        limit_s = time.monotonic() + START_TIMEOUT_S
        while not client.service_is_ready() and time.monotonic() < limit_s:
            self.spin_for(0.1)
        future = client.call_async(call)
        while not future.done() and time.monotonic() < limit_s:
            self._executor.spin_once(timeout_sec=0.1)
        if not future.done() or not future.result().success:
            raise RuntimeError(f'the node /{isolation}/oxygen refused transition {transition}')

    @contextmanager
    def senses_for(self, served: Served) -> Iterator[None]:
        from lifecycle_msgs.msg import Transition

        self._active, self._pictures_on = served.isolation, False
        self.change(served.isolation, Transition.TRANSITION_ACTIVATE)
        yield
        self.change(served.isolation, Transition.TRANSITION_DEACTIVATE)
        self._active = None

    def measure(self, served: Served, load: str, seconds: float) -> None:
        """Let the node do one thing for a time."""
        self._pictures_on = load == 'saturated'
        chunks, limit_s = self.chunks, time.monotonic() + START_TIMEOUT_S
        while self._pictures_on and self.chunks == chunks:
            if time.monotonic() > limit_s:
                raise RuntimeError(f'the node /{served.isolation}/oxygen made no chunk')
            self.spin_for(0.1)
        self.spin_for(SETTLE_S)
        window, before = Window(load), served.cpu_s()
        window.begin_ns, chunks = time.monotonic_ns(), self.chunks
        self.spin_for(seconds)
        window.end_ns, window.chunks = time.monotonic_ns(), self.chunks - chunks
        after = served.cpu_s()
        window.node_cpu_s, window.engine_cpu_s = after[0] - before[0], after[1] - before[1]
        served.windows.append(window)


def start(isolation: str, rate_hz: float, options: argparse.Namespace) -> Served:
    folder = options.out / f'{isolation}_{rate_hz:g}'
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob('*.npy'):
        path.unlink()
    parameters = {
        'profile': str(options.out / 'busy.yaml'),
        'checkpoint': options.checkpoint,
        'isolation': isolation,
        'execution': 'shared',  # writes every text inside its frame: work of all kinds, no pause
        'command_rate_hz': rate_hz,
        'frame_rate_hz': SATURATING_HZ,
        'autostart': False,
    }
    command = [
        sys.executable, __file__, '--serve', str(folder), '--scheduling', options.scheduling,
        '--ros-args', '-r', f'__ns:=/{isolation}',
    ]  # fmt: skip
    for name, value in parameters.items():
        command += ['-p', f'{name}:={json.dumps(value)}']
    with (folder / 'log').open('wb') as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    return Served(isolation, folder, process)


def run_rate(driver: Driver, rate_hz: float, options: argparse.Namespace) -> list[Served]:
    from lifecycle_msgs.msg import Transition

    nodes = [start(isolation, rate_hz, options) for isolation in ISOLATIONS]
    try:
        for served in nodes:
            driver.change(served.isolation, Transition.TRANSITION_CONFIGURE)
        for number in range(options.rounds):
            for served in nodes[:: 1 if number % 2 == 0 else -1]:
                with driver.senses_for(served):
                    for load in LOADS:
                        driver.measure(served, load, options.seconds)
    finally:
        for served in nodes:
            served.process.send_signal(signal.SIGINT)
            served.process.wait(START_TIMEOUT_S)
    return nodes


# --- what it came to ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """Commands of one rate, isolation and load, over all rounds."""

    rate_hz: float
    isolation: str
    load: str
    lateness_ms: np.ndarray
    misses: int
    seconds: float
    node_cores: float
    engine_cores: float
    chunk_hz: float

    def report(self) -> dict[str, Any]:
        p50, p99, p999 = np.percentile(self.lateness_ms, [50, 99, 99.9])
        return {
            'rate_hz': self.rate_hz, 'isolation': self.isolation, 'engine': self.load,
            'commands': len(self.lateness_ms), 'seconds': self.seconds,
            'p50_ms': p50, 'p99_ms': p99, 'p99.9_ms': p999, 'max_ms': self.lateness_ms.max(),
            'misses': self.misses, 'node_cores': self.node_cores,
            'engine_cores': self.engine_cores, 'chunk_hz': self.chunk_hz,
        }  # fmt: skip


def cell_of(served: Served, rate_hz: float, load: str) -> Cell:
    samples = served.samples()
    windows = [window for window in served.windows if window.load == load]
    inside = np.zeros(len(samples), bool)
    for window in windows:
        inside |= (samples[:, 0] >= window.begin_ns) & (samples[:, 0] < window.end_ns)
    lateness_ns = samples[inside, 1]
    seconds = sum(window.duration_s for window in windows)
    return Cell(
        rate_hz, served.isolation, load,
        lateness_ms=lateness_ns / 1e6,
        misses=int((lateness_ns // round(1e9 / rate_hz)).sum()),
        seconds=seconds,
        node_cores=sum(window.node_cpu_s for window in windows) / seconds,
        engine_cores=sum(window.engine_cpu_s for window in windows) / seconds,
        chunk_hz=sum(window.chunks for window in windows) / seconds,
    )  # fmt: skip


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        f'{"Hz":>4} {"isolation":9} {"engine":10}{"p50":>8}{"p99":>8}{"p99.9":>8}{"max":>8} ms'
        f'{"misses":>8}{"of":>7}{"node":>7}{"engine":>7} cores{"chunk/s":>9}{"p99 ratio":>11}'
    )
    idle: dict[tuple[float, str], float] = {}
    for row in rows:
        key = (row['rate_hz'], row['isolation'])
        idle.setdefault(key, row['p99_ms'])
        print(
            f'{row["rate_hz"]:>4g} {row["isolation"]:9} {row["engine"]:10}{row["p50_ms"]:8.2f}'
            f'{row["p99_ms"]:8.2f}{row["p99.9_ms"]:8.2f}{row["max_ms"]:8.2f}   '
            f'{row["misses"]:>8}{row["commands"]:>7}{row["node_cores"]:7.2f}'
            f'{row["engine_cores"]:7.2f}      {row["chunk_hz"]:9.1f}'
            f'{row["p99_ms"] / idle[key]:11.2f}'
        )


def draw(cells: list[Cell], path: Path) -> None:
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    rates = sorted({cell.rate_hz for cell in cells})
    figure, axes = pyplot.subplots(
        len(LOADS), len(rates), figsize=(5 * len(rates), 6), layout='constrained', squeeze=False
    )
    bins = np.geomspace(0.01, 100, 80)
    for cell in cells:
        axis = axes[LOADS.index(cell.load), rates.index(cell.rate_hz)]
        axis.hist(
            np.clip(cell.lateness_ms, bins[0], bins[-1]), bins,
            histtype='step', label=cell.isolation, color=COLOURS[cell.isolation],
        )  # fmt: skip
        axis.axvline(1e3 / cell.rate_hz, color='grey', linestyle=':')
        axis.set(xscale='log', yscale='log', title=f'{cell.rate_hz:g} Hz, engine {cell.load}')
        axis.set(xlabel='lateness [ms]', ylabel='commands')
        axis.legend(loc='upper right')
    figure.savefig(path, dpi=120)


def write_busy_profile(options: argparse.Namespace) -> RobotProfile:
    """Write the profile with every task due on every frame, for the nodes to read."""
    profile = load_profile(options.profile, share_folder() / 'config')
    tasks = tuple(replace(task, period_frames=1) for task in profile.tasks)
    profile = replace(profile, tasks=tasks)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / 'busy.yaml').write_text(yaml.safe_dump(plain_profile(profile)))
    return profile


def measure_all(options: argparse.Namespace) -> None:
    driver = Driver(write_busy_profile(options))
    cells = []
    for rate_hz in options.rates:
        nodes = run_rate(driver, rate_hz, options)
        cells += [cell_of(served, rate_hz, load) for served in nodes for load in LOADS]
        scheduling = (nodes[0].folder / 'scheduling').read_text()
    rows = [cell.report() for cell in cells]
    draw(cells, options.out / 'deadline.png')
    print_table(rows)
    print(f'scheduling of the command thread: {scheduling}')
    report = {
        'profile': options.profile, 'rounds': options.rounds, 'block_s': options.seconds,
        'scheduling': scheduling, 'cores': len(os.sched_getaffinity(0)),
        'machine': platform.processor() or platform.machine(), 'load_average': os.getloadavg(),
        'cells': rows,
    }  # fmt: skip
    print(json.dumps(report))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--rates', type=float, nargs='+', default=[50.0, 100.0, 200.0])
    parser.add_argument('--seconds', type=float, default=10.0, help='of a block [s]')
    parser.add_argument('--rounds', type=int, default=2, help='blocks per cell')
    parser.add_argument('--scheduling', choices=('other', 'fifo'), default='fifo')
    parser.add_argument('--profile', default='tabletop')
    parser.add_argument('--checkpoint', default=str(ROOT / 'resource' / 'tabletop'))
    parser.add_argument('--out', type=Path, default=Path('bench_output'))
    parser.add_argument('--serve', type=Path, help=argparse.SUPPRESS)
    options, ros_arguments = parser.parse_known_args(arguments)
    if options.serve is not None:
        return serve(options.serve, options.scheduling, ros_arguments)
    measure_all(options)
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
