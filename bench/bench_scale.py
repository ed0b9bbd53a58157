"""How cost grows: per token with live sequences, per frame with cameras, and not with each other.

    ./run shell python bench/bench_scale.py --preset mid --dtype bfloat16

Decode steps of 1, 2, 4, 8 and 16 live sequences take turns in one process, as do frames with 1, 2
and 3 cameras; then the latency of an action chunk (frame start to chunk handed out) beside 1 to 16
live sequences. What is told is the time of the process on a CPU, wall time on a GPU. Draws
growth.png into --out; the last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from oxygen_ros.engine.model_runner import ModelRunner, load_pi05
from oxygen_ros.engine.sequence import Frame, Sequence
from oxygen_ros.engine.slots import SlotLayout
from oxygen_ros.engine.static_runner import make_runner
from oxygen_ros.engine.tasks import LanguageTask
from oxygen_ros.model.config import PRESETS, preset
from oxygen_ros.model.processor import ModelInput

BATCHES = (1, 2, 4, 8, 16)
PROMPT_TOKENS = 24
TEXT_TOKENS = 30


class Scene:
    """Frames of random pictures on a runner, and sequences in the middle of their text."""

    def __init__(self, runner: ModelRunner, task: LanguageTask) -> None:
        self.runner = runner
        self.task = task
        config = runner.model.config
        generator = np.random.default_rng(0)
        size = config.vision.image_size
        self._pictures = {
            slot: generator.integers(0, 255, (size, size, 3), dtype=np.uint8)
            for slot in config.camera_slots
        }
        shape = (config.action_horizon, config.action_dim)
        self._noise = generator.standard_normal(shape, dtype=np.float32)
        self.sequences = [self._sequence(slot) for slot in range(max(BATCHES))]

    def inputs(self, cameras: int) -> ModelInput:
        pictures = dict(itertools.islice(self._pictures.items(), cameras))
        return ModelInput(pictures, [2] + [5] * (PROMPT_TOKENS - 1), 0)

    def act(self, cameras: int, slot: int) -> None:
        """Everything from a frame's start to its chunk."""
        inputs = self.inputs(cameras)
        frame = Frame(0, 0, slot, self.runner.prefix_len(inputs), 0)
        self.runner.prefill(frame, inputs)
        self.runner.denoise(frame, self._noise)

    def decode(self, batch: int) -> None:
        """One step of sequences that stand in the middle of their text."""
        for sequence in self.sequences[:batch]:
            sequence.num_cached, sequence.pending = TEXT_TOKENS // 2, (5,)
        self.runner.decode(self.sequences[:batch])

    def _sequence(self, slot: int) -> Sequence:
        inputs = self.inputs(2)
        frame = Frame(0, 0, slot, self.runner.prefix_len(inputs), 0)
        self.runner.prefill(frame, inputs)
        return Sequence(self.task, frame, (5,))


class Stopwatch:
    """Process time on a CPU, where only that repeats on a shared machine; wall time on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now_s = time.perf_counter if device.type == 'cuda' else time.process_time

    def ms(self, work: Callable[[], None]) -> float:
        started_s = self._now_s()
        work()
        if self._device.type == 'cuda':
            torch.cuda.synchronize(self._device)
        return (self._now_s() - started_s) * 1e3


def in_turns(works: dict[int, Callable[[], float]], rounds: int) -> dict[int, dict[str, float]]:
    """Run every work once per round, after two of warm-up; return the spread of what they say."""
    times: dict[int, list[float]] = {size: [] for size in works}
    for _ in range(rounds + 2):
        for size, work in works.items():
            times[size].append(work())
    return {
        size: {'median': statistics.median(ms[2:]), 'min': min(ms[2:]), 'max': max(ms[2:])}
        for size, ms in times.items()
    }


def draw(report: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    def medians(name: str) -> list[float]:
        return [cost['median'] for cost in report[name].values()]

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4), layout='constrained')
    steps = medians('decode_ms')
    left.plot(BATCHES, steps, 'o-', label='one step')
    per_token = [step / batch for step, batch in zip(steps, BATCHES, strict=True)]
    left.plot(BATCHES, per_token, 's--', label='per token')
    left.set(xlabel='live sequences', ylabel='ms', title='Decode', ylim=(0, None))
    left.legend()
    middle.plot(BATCHES, medians('latency_ms'), 'o-')
    middle.set(xlabel='live sequences', title='Frame start to chunk, 2 cameras', ylim=(0, None))
    cameras = list(report['frame_ms'])
    right.plot(cameras, medians('frame_ms'), 'o-')
    right.set(xlabel='cameras present', title='Frame start to chunk', ylim=(0, None))
    right.set_xticks(cameras)
    options = report['options']
    figure.suptitle(f'{options["preset"]}, {report["dtype"]}, {report["device"]}')
    figure.savefig(path, dpi=120)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--preset', choices=sorted(PRESETS), default='mid')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--dtype', default='auto')
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--rounds', type=int, default=12)
    parser.add_argument('--out', type=Path, default=Path('bench_output'))
    return parser.parse_args(arguments)


def make_scene(options: argparse.Namespace) -> Scene:
    torch.set_num_threads(options.threads)
    config = preset(options.preset, prefix_attention='bidirectional', action_horizon=10)
    model = load_pi05(config, None, options.device, options.dtype, 0)
    task = LanguageTask('text', (), 1, TEXT_TOKENS, 10**18, 0, False)
    runner = make_runner(
        model,
        SlotLayout(config.max_prefix_len, [task], config.action_horizon),
        num_slots=max(BATCHES) + 1,
        num_denoise_steps=10,
        max_queries=1,
    )
    return Scene(runner, task)


def measure(scene: Scene, rounds: int) -> dict[str, dict[int, dict[str, float]]]:
    """Return the times [ms] of decode steps, of frames, and of frames beside decode steps."""
    watch, spare = Stopwatch(scene.runner.device), max(BATCHES)
    cameras = range(1, len(scene.runner.model.config.camera_slots) + 1)

    def decode(batch: int) -> float:
        return watch.ms(lambda: scene.decode(batch))

    def act(cameras: int) -> float:
        return watch.ms(lambda: scene.act(cameras, spare))

    def act_beside(batch: int) -> float:
        scene.decode(batch)
        return act(2)

    return {
        'decode_ms': in_turns({b: functools.partial(decode, b) for b in BATCHES}, rounds),
        'frame_ms': in_turns({c: functools.partial(act, c) for c in cameras}, rounds),
        'latency_ms': in_turns({b: functools.partial(act_beside, b) for b in BATCHES}, rounds),
    }


def print_costs(report: dict) -> None:
    for batch, step in report['decode_ms'].items():
        print(
            f'{batch:>3} live: step {step["median"]:.1f} ms ({step["min"]:.1f}..{step["max"]:.1f})'
            f', {step["median"] / batch:.2f} ms per token, '
            f'chunk beside it {report["latency_ms"][batch]["median"]:.1f} ms'
        )
    for cameras, cost in report['frame_ms'].items():
        print(f'{cameras} cameras: {cost["median"]:.1f} ms from frame start to chunk')
    print(f'step of 8 / step of 1: {report["step_of_8_over_step_of_1"]:.2f}')
    print(f'chunk latency beside 16 / beside 1: {report["latency_beside_16_over_1"]:.3f}')


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    scene = make_scene(options)
    times = measure(scene, options.rounds)
    decode, latency = times['decode_ms'], times['latency_ms']
    report = {
        'options': {k: str(v) for k, v in vars(options).items()},
        'device': str(scene.runner.device),
        'dtype': str(scene.runner.model.dtype).removeprefix('torch.'),
        'torch': torch.__version__,
        **times,
        'step_of_8_over_step_of_1': decode[8]['median'] / decode[1]['median'],
        'latency_beside_16_over_1': latency[16]['median'] / latency[1]['median'],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    draw(report, options.out / 'growth.png')
    print_costs(report)
    print(json.dumps(report))


if __name__ == '__main__':
    main(sys.argv[1:])
