"""The paper's experiment on our engine: what one frame costs, setting by setting.

    ./run shell python bench/bench_frame.py --preset mid --dtype bfloat16

Every frame brings new requests for text (`--arrivals`; one of `--max-tokens` tokens, if not said
otherwise), so in the steady state every setting writes as many tokens per frame; what differs is
how often the model is prefilled and how many passes the tokens take:

    isolated              a prefill for the actions and one for each text, written in the frame
    parallel              the same, as two workers side by side (naive parallelisation)
    shared                one prefill, the texts still written inside the frame
    continuous_batching   the paper's method: texts of several frames, at most
                          `--steps-per-frame` passes each frame, then the actions
    undrafted             ours without drafts: the actions first, then the same passes
    unified               ours: the actions first, drafted texts, at most as many passes

Texts are dictated (see `frames.py`): each differs from the one before by `--text-change`.

The settings take turns frame by frame in one process, so that a machine that slows down slows all
of them. Process CPU time stands beside wall time: on a shared machine only the former repeats. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import glob
import json
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from frames import (
    ARRIVALS,
    WORKLOADS,
    DictatedRunner,
    DictatedScheduler,
    Dictation,
    Workload,
    observations,
)

from oxygen_ros.engine.baselines import ContinuousBatchingEngine, IsolatedEngine, SharedEngine
from oxygen_ros.engine.engine import NO_DEADLINE_NS, Engine
from oxygen_ros.engine.model_runner import load_pi05
from oxygen_ros.engine.sequence import Sequence
from oxygen_ros.engine.slots import SlotLayout
from oxygen_ros.engine.static_runner import make_runner
from oxygen_ros.model.config import PRESETS, Pi05Config, preset
from oxygen_ros.model.pi05 import Pi05
from oxygen_ros.model.processor import Processor
from oxygen_ros.model.prompt import ByteTokenizer
from oxygen_ros.model.transforms import make_adapter
from oxygen_ros.observation import Observation


class CountedEngine(Engine):
    """Ours, with the time of a frame counted in passes, to compare at equal tokens."""

    steps_per_frame = 5

    def step(self, observation: Observation, deadline_ns: int) -> None:
        self._passes_left = self.steps_per_frame
        super().step(observation, NO_DEADLINE_NS)

    def _next_batch(self, deadline_ns: int) -> list[Sequence]:
        batch = super()._next_batch(deadline_ns) if self._passes_left else []
        self._passes_left -= bool(batch)
        return batch


class ParallelEngines:
    """An action worker and a text worker with a prefill each, side by side in two threads."""

    def __init__(self, make: Callable[..., Engine], dictation: Dictation) -> None:
        self._acting = make(Engine, Dictation('none', 1, 0.0, 0))
        self._writing = make(SharedEngine, dictation)
        # On one stream the workers would take turns.
        device = self._writing.runner.device
        self._stream = torch.cuda.Stream(device) if device.type == 'cuda' else None

    def step(self, observation: Observation, deadline_ns: int) -> None:
        writer = threading.Thread(target=self._write, args=(observation,))
        writer.start()
        self._acting.step(observation, 0)
        writer.join()

    def _write(self, observation: Observation) -> None:
        with torch.cuda.stream(self._stream):
            self._write_texts(observation)

    def _write_texts(self, observation: Observation) -> None:
        engine = self._writing
        inputs = engine.processor.encode(observation)
        frame = engine.scheduler.open_frame(
            observation.frame, 0, engine.runner.prefix_len(inputs), 0
        )
        engine.runner.prefill(frame, inputs)
        engine.scheduler.admit(frame, engine.scheduler.due(observation.frame))
        engine.decode(NO_DEADLINE_NS)

    @property
    def runner(self) -> DictatedRunner:
        return self._writing.runner

    @property
    def prefills(self) -> int:
        return self._acting.runner.num_prefills + self._writing.runner.num_prefills

    @property
    def tokens(self) -> int:
        return self._writing.stats.tokens

    @property
    def decode_steps(self) -> int:
        return self._writing.stats.decode_steps


@dataclass
class Setting:
    """One way to run a frame, and what its frames cost."""

    name: str
    engine: Engine | ParallelEngines
    chunk_at: list[float]
    """Filled by the engine's chunk callback: the time of the newest chunk."""
    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    chunk_ms: list[float] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    before: tuple[int, int, int] = (0, 0, 0)

    def counters(self) -> tuple[int, int, int]:
        """Prefills, tokens and decode passes so far."""
        if isinstance(self.engine, ParallelEngines):
            return self.engine.prefills, self.engine.tokens, self.engine.decode_steps
        stats = self.engine.stats
        return stats.prefills, stats.tokens, stats.decode_steps

    def run(self, observation: Observation, energy: Energy, device: torch.device) -> None:
        joules = energy.read()
        wall, cpu = time.perf_counter(), time.process_time()
        self.engine.step(observation, 0)
        if device.type == 'cuda':
            torch.cuda.synchronize(device)
        self.wall_ms.append((time.perf_counter() - wall) * 1e3)
        self.cpu_ms.append((time.process_time() - cpu) * 1e3)
        self.chunk_ms.append((self.chunk_at[-1] - wall) * 1e3)
        after = energy.read()
        if joules is not None and after is not None and after >= joules:
            self.joules.append(after - joules)


class Energy:
    """Joules used so far, by NVML on a GPU or RAPL on a CPU; None where neither can be read."""

    PACKAGES = '/sys/class/powercap/intel-rapl:[0-9]'

    def __init__(self, device: torch.device) -> None:
        self._gpu: Callable[[], float] | None = None
        self._packages: list[Path] = []
        if device.type == 'cuda':
            self._gpu = _nvml_joules(device)
        else:
            self._packages = [Path(folder) / 'energy_uj' for folder in glob.glob(self.PACKAGES)]

    def read(self) -> float | None:
        """Counters of CPUs wrap once in an hour or so; the caller drops what went backwards."""
        if self._gpu is not None:
            return self._gpu()
        try:
            joules = [int(counter.read_text()) / 1e6 for counter in self._packages]
        except OSError:  # they are root's
            return None
        return sum(joules) if joules else None


def _nvml_joules(device: torch.device) -> Callable[[], float] | None:
    try:
        import pynvml
    except ImportError:
        return None

    def read() -> float:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)
        read()
    except pynvml.NVMLError:  # no such counter, or a container without the driver's library
        return None
    return read


def make_engine(
    model: Pi05,
    workload: Workload,
    options: argparse.Namespace,
    chunk_at: list[float],
    kind: type[Engine],
    dictation: Dictation,
    *,
    max_draft: int = 0,
) -> Engine:
    """Return an engine of its own KV memory on the shared weights."""
    config = model.config
    num_slots = 2 + -(-options.max_tokens // options.steps_per_frame)
    processor = Processor(
        image_size=config.vision.image_size,
        camera_slots=config.camera_slots,
        max_token_len=config.max_token_len,
        action_dim=config.action_dim,
        action_horizon=config.action_horizon,
        tokenizer=ByteTokenizer(),
        prompt='plain',
        normalization='none',
        norm_stats=None,
        adapter=make_adapter('identity', 8, 8),
        delta_mask=(),
    )
    runner = make_runner(
        model,
        SlotLayout(config.max_prefix_len, dictation.tasks, config.action_horizon),
        num_slots=num_slots,
        num_denoise_steps=options.denoise_steps,
        max_queries=(1 + max_draft) * max(1, len(dictation.tasks)),
    )
    engine = kind(
        processor,
        DictatedScheduler(dictation, num_slots=num_slots, max_batch=64, max_draft=max_draft),
        DictatedRunner(runner, dictation),
        action_period_ns=round(1e9 / workload.action_rate_hz),
        seed=options.seed,
        on_chunk=lambda chunk: chunk_at.append(time.perf_counter()),
        on_text=lambda update: None,
    )
    if isinstance(engine, ContinuousBatchingEngine | CountedEngine):
        engine.steps_per_frame = options.steps_per_frame
    return engine


KINDS = {
    'isolated': IsolatedEngine,
    'shared': SharedEngine,
    'continuous_batching': ContinuousBatchingEngine,
    'undrafted': CountedEngine,
    'unified': CountedEngine,
}
SETTINGS = ('isolated', 'parallel', 'shared', 'continuous_batching', 'undrafted', 'unified')


def make_setting(name: str, model: Pi05, workload: Workload, options) -> Setting:
    chunk_at: list[float] = []
    make = functools.partial(make_engine, model, workload, options, chunk_at)
    # One for each setting, and all alike.
    dictation = Dictation(options.arrivals, options.max_tokens, options.text_change, options.seed)
    if name == 'parallel':
        return Setting(name, ParallelEngines(make, dictation), chunk_at)
    max_draft = options.max_draft if name == 'unified' else 0
    return Setting(name, make(KINDS[name], dictation, max_draft=max_draft), chunk_at)


def measure(settings: list[Setting], options, config: Pi05Config, workload: Workload, device):
    """Run all settings in turns: warm-up until batches are steady, then the counted frames."""
    cameras = options.cameras or workload.cameras
    energy = Energy(device)
    frames = observations(config, workload, cameras, options.seed)
    warm_up = options.warm_up + -(-options.max_tokens // options.steps_per_frame)
    for number in range(warm_up + options.frames):
        if number == warm_up:
            for setting in settings:
                setting.before = setting.counters()
                for series in (setting.wall_ms, setting.cpu_ms, setting.chunk_ms, setting.joules):
                    series.clear()
        observation = next(frames)
        turn = number % len(settings)
        for setting in settings[turn:] + settings[:turn]:
            setting.run(observation, energy, device)
        if options.verbose:
            print(f'frame {number + 1} of {warm_up + options.frames}', file=sys.stderr)


def spread(values: list[float]) -> dict[str, float]:
    return {
        'min': min(values),
        'median': statistics.median(values),
        'mean': statistics.fmean(values),
        'max': max(values),
    }


def result(setting: Setting, model: Pi05, frames: int, command_hz: float):
    """Return what one setting's frames cost, per frame and per token."""
    counted = [a - b for a, b in zip(setting.counters(), setting.before, strict=True)]
    prefills, tokens, steps = counted
    wall, cpu = spread(setting.wall_ms), spread(setting.cpu_ms)
    chunk_hz = 1e3 / wall['median']
    return {
        'frame_ms': wall,
        'cpu_ms': cpu,
        'chunk_latency_ms': spread(setting.chunk_ms),
        'chunk_hz': chunk_hz,
        'action_hz': chunk_hz * model.config.action_horizon,
        'command_hz': command_hz,
        'tokens_per_s': tokens / frames * chunk_hz,
        'tokens_per_frame': tokens / frames,
        'prefills_per_frame': prefills / frames,
        'passes_per_frame': steps / frames,
        'tokens_per_pass': tokens / steps if steps else 0.0,
        'weight_bytes_per_token': language_bytes(model) * steps / tokens if tokens else 0.0,
        'accepted_share': accepted_share(setting),
        'runner': setting.engine.runner.kind,
        'joules_per_frame': spread(setting.joules) if setting.joules else None,
    }


def accepted_share(setting: Setting) -> float | None:
    """Return which share of the drafted tokens was right, None without drafts."""
    if isinstance(setting.engine, ParallelEngines) or not setting.engine.stats.drafted:
        return None
    return setting.engine.stats.accepted / setting.engine.stats.drafted


def language_bytes(model: Pi05) -> int:
    """Bytes of weights that one decode pass reads: the backbone's layers and the head."""
    config = model.config.vlm
    per_layer = config.width * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    per_layer += 3 * config.width * config.mlp_dim
    elements = config.depth * per_layer + model.config.vocab_size * config.width
    return elements * model.embedding.weight.element_size()


def forget_peak() -> None:
    """Begin the peak anew where the kernel can (Linux): loading takes more than any frame."""
    with suppress(OSError):
        Path('/proc/self/clear_refs').write_text('5')


def peak_mib() -> float:
    """Peak resident memory [MiB] since `forget_peak`, or of the whole process elsewhere."""
    with suppress(OSError):
        for line in Path('/proc/self/status').read_text().splitlines():
            if line.startswith('VmHWM:'):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_memory(name: str, arguments: list[str]) -> float:
    """Peak resident memory [MiB] of a process of its own that runs only this setting."""
    command = [sys.executable, __file__, *arguments, '--settings', name]
    command += ['--frames', '2', '--warm-up', '1', '--no-memory']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])['peak_memory_mib']


def print_table(report: dict) -> None:
    columns = (
        ('frame ms', lambda r: f'{r["frame_ms"]["median"]:.1f}'),
        ('cpu ms', lambda r: f'{r["cpu_ms"]["median"]:.1f}'),
        ('mean', lambda r: f'{r["cpu_ms"]["mean"]:.1f}'),
        ('min..max', lambda r: f'{r["cpu_ms"]["min"]:.0f}..{r["cpu_ms"]["max"]:.0f}'),
        ('chunk ms', lambda r: f'{r["chunk_latency_ms"]["median"]:.1f}'),
        ('chunk Hz', lambda r: f'{r["chunk_hz"]:.1f}'),
        ('action Hz', lambda r: f'{r["action_hz"]:.0f}'),
        ('tokens/s', lambda r: f'{r["tokens_per_s"]:.0f}'),
        ('tok/frame', lambda r: f'{r["tokens_per_frame"]:.1f}'),
        ('prefills', lambda r: f'{r["prefills_per_frame"]:.1f}'),
        ('passes', lambda r: f'{r["passes_per_frame"]:.1f}'),
        ('MB/token', lambda r: f'{r["weight_bytes_per_token"] / 1e6:.1f}'),
        ('drafts ok', lambda r: '-' if r["accepted_share"] is None else f'{r["accepted_share"]:.2f}'),  # noqa: E501
        ('J/frame', lambda r: f'{r["joules_per_frame"]["mean"]:.2f}' if r["joules_per_frame"] else '-'),  # noqa: E501
        ('peak MiB', lambda r: f'{r["peak_memory_mib"]:.0f}' if 'peak_memory_mib' in r else '-'),
    )  # fmt: skip
    command_hz = report['workload']['action_rate_hz']
    print(f'{report["options"]["workload"]}: {command_hz:g} commands/s, whatever a frame takes')
    print(f'{"setting":<20}' + ''.join(f'{title:>11}' for title, _ in columns))
    for name, row in report['settings'].items():
        print(f'{name:<20}' + ''.join(f'{show(row):>11}' for _, show in columns))
    for pair, ratio in report['cpu_ratios'].items():
        print(
            f'{pair}: {ratio["of_sums"]:.2f}x in CPU time, frame by frame '
            f'{ratio["median"]:.2f}x ({ratio["min"]:.2f}..{ratio["max"]:.2f})'
        )


def ratios(settings: list[Setting]) -> dict[str, dict[str, float]]:
    """Return how much longer each other setting takes than unified, frame by frame."""
    by_name = {setting.name: setting for setting in settings}
    if 'unified' not in by_name:
        return {}
    ours = by_name.pop('unified').cpu_ms
    return {
        f'{name} / unified': {
            'of_sums': sum(other.cpu_ms) / sum(ours),
            **spread([a / b for a, b in zip(other.cpu_ms, ours, strict=True)]),
        }
        for name, other in by_name.items()
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--preset', choices=sorted(PRESETS), default='mid')
    parser.add_argument('--workload', choices=sorted(WORKLOADS), default='libero')
    parser.add_argument('--settings', nargs='+', choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument('--cameras', type=int, default=0, help='present ones; 0: the workload')
    parser.add_argument('--denoise-steps', type=int, default=10)
    parser.add_argument('--max-tokens', type=int, default=30, help='per text')
    parser.add_argument('--steps-per-frame', type=int, default=5, help='most passes for text')
    parser.add_argument('--max-draft', type=int, default=15, help='of unified')
    parser.add_argument('--arrivals', choices=ARRIVALS, default='uniform')
    parser.add_argument(
        '--text-change', type=float, default=0.05, help='share of tokens unlike the text before'
    )
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--dtype', default='auto')
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--frames', type=int, default=12)
    parser.add_argument('--warm-up', type=int, default=3, help='frames before steady batches')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--no-memory', action='store_true', help='no peak memory per setting')
    parser.add_argument('--verbose', action='store_true')
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    workload = WORKLOADS[options.workload]
    config = preset(
        options.preset, prefix_attention='bidirectional', action_horizon=workload.horizon
    )
    torch.set_num_threads(options.threads)
    model = load_pi05(config, None, options.device, options.dtype, options.seed)
    device = model.embedding.weight.device
    settings = [make_setting(name, model, workload, options) for name in options.settings]
    forget_peak()
    measure(settings, options, config, workload, device)
    report = {
        'options': vars(options),
        'workload': asdict(workload),
        'machine': {
            'processor': platform.processor() or platform.machine(),
            'device': torch.cuda.get_device_name(device) if device.type == 'cuda' else 'cpu',
            'torch': torch.__version__,
            'dtype': str(model.dtype),
        },
        'settings': {
            s.name: result(s, model, options.frames, workload.action_rate_hz) for s in settings
        },
        'cpu_ratios': ratios(settings),
        'peak_memory_mib': peak_mib(),
    }
    if device.type == 'cuda':
        report['peak_device_memory_mib'] = torch.cuda.max_memory_allocated(device) / 2**20
    if not options.no_memory:
        for name in options.settings:
            report['settings'][name]['peak_memory_mib'] = peak_memory(name, arguments)
    print_table(report)
    print(json.dumps(report))


if __name__ == '__main__':
    main(sys.argv[1:])
