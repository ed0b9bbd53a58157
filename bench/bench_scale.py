"""How cost grows: per token with live sequences, per frame with cameras, and not with each other.

    ./run shell python bench/bench_scale.py --preset mid --dtype bfloat16

Decode steps of 1, 2, 4, 8 and 16 live sequences take turns in one process, as do frames with 1, 2
and 3 cameras; then the latency of an action chunk (frame start to chunk handed out) with no
sequence alive and with many. Process CPU time beside wall time. Draws growth.png into --out; the
last line is JSON.
"""

from __future__ import annotations

import argparse
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


def in_turns(works: dict[str, Callable[[], None]], rounds: int) -> dict[str, dict[str, float]]:
    """Run every work once per round; return medians and spread of wall and CPU time [ms]."""
    wall: dict[str, list[float]] = {name: [] for name in works}
    cpu: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 2):
        for name, work in works.items():
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= 2:  # two rounds of warm-up
                wall[name].append((time.perf_counter() - started_s) * 1e3)
                cpu[name].append((time.process_time() - started_cpu_s) * 1e3)
    return {
        name: {
            'wall_ms': statistics.median(wall[name]),
            'cpu_ms': statistics.median(cpu[name]),
            'cpu_min_ms': min(cpu[name]),
            'cpu_max_ms': max(cpu[name]),
        }
        for name in works
    }


def draw(report: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout='constrained')
    steps = [report['decode'][str(batch)]['cpu_ms'] for batch in BATCHES]
    left.plot(BATCHES, steps, 'o-', label='one step')
    left.plot(
        BATCHES, [s / b for s, b in zip(steps, BATCHES, strict=True)], 's--', label='per token'
    )
    left.set(xlabel='live sequences', ylabel='CPU time [ms]', title='Decode', ylim=(0, None))
    left.legend()
    cameras = sorted(report['frame'])
    right.plot([int(c) for c in cameras], [report['frame'][c]['cpu_ms'] for c in cameras], 'o-')
    right.set(xlabel='cameras present', ylabel='CPU time [ms]', title='Frame start to chunk')
    right.set(xticks=[int(c) for c in cameras], ylim=(0, None))
    options = report['options']
    figure.suptitle(f'{options["preset"]}, {report["dtype"]}, {report["device"]}')
    figure.savefig(path, dpi=120)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--preset', choices=sorted(PRESETS), default='mid')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--dtype', default='auto')
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--rounds', type=int, default=12)
    parser.add_argument('--out', type=Path, default=Path('bench_output'))
    options = parser.parse_args(arguments)

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
    scene = Scene(runner, task)
    spare = max(BATCHES)
    decode = in_turns({str(b): lambda b=b: scene.decode(b) for b in BATCHES}, options.rounds)
    frame = in_turns(
        {str(c): lambda c=c: scene.act(c, spare) for c in range(1, len(config.camera_slots) + 1)},
        options.rounds,
    )

    def act_beside(batch: int) -> None:
        scene.decode(batch)
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        scene.act(2, spare)
        beside[batch].append(
            ((time.perf_counter() - started_s) * 1e3, (time.process_time() - started_cpu_s) * 1e3)
        )

    beside: dict[int, list[tuple[float, float]]] = {1: [], 16: []}
    in_turns({str(b): lambda b=b: act_beside(b) for b in beside}, options.rounds)
    latency = {
        str(batch): statistics.median(cpu for _, cpu in times) for batch, times in beside.items()
    }
    report = {
        'options': {k: str(v) for k, v in vars(options).items()},
        'device': str(runner.device),
        'dtype': str(model.dtype).removeprefix('torch.'),
        'torch': torch.__version__,
        'decode': decode,
        'frame': frame,
        'chunk_latency_cpu_ms_beside_live_sequences': latency,
        'step_of_8_over_step_of_1': decode['8']['cpu_ms'] / decode['1']['cpu_ms'],
        'latency_beside_16_over_1': latency['16'] / latency['1'],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    draw(report, options.out / 'growth.png')
    for batch in BATCHES:
        step = decode[str(batch)]
        print(
            f'{batch:>3} live: step {step["cpu_ms"]:.1f} ms CPU '
            f'({step["cpu_min_ms"]:.1f}..{step["cpu_max_ms"]:.1f}), '
            f'{step["cpu_ms"] / batch:.2f} ms per token'
        )
    for cameras, cost in frame.items():
        print(f'{cameras} cameras: {cost["cpu_ms"]:.1f} ms CPU from frame start to chunk')
    print(f'step of 8 / step of 1: {report["step_of_8_over_step_of_1"]:.2f}')
    print(f'chunk latency beside 16 / beside 1: {report["latency_beside_16_over_1"]:.3f}')
    print(json.dumps(report))


if __name__ == '__main__':
    main(sys.argv[1:])
