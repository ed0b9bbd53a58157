"""The released size of pi0.5, once: a checkpoint is written, loaded and run for one frame.

Its weights are random; what is judged is that 7.2 GB of bfloat16 pass through the loader in the
memory of one model, and that a frame of the real shapes gives finite actions and tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from golden_pi05 import CPU, GOLDEN

torch = pytest.importorskip('torch')

from oxygen_ros.engine.model_runner import ModelRunner  # noqa: E402
from oxygen_ros.engine.sequence import Frame, Sequence  # noqa: E402
from oxygen_ros.engine.slots import SlotLayout  # noqa: E402
from oxygen_ros.engine.tasks import LanguageTask  # noqa: E402
from oxygen_ros.model.checkpoints import UNUSED  # noqa: E402
from oxygen_ros.model.config import CAMERA_SLOTS, PRESETS  # noqa: E402
from oxygen_ros.model.pi05 import Pi05  # noqa: E402
from oxygen_ros.model.processor import ModelInput  # noqa: E402
from oxygen_ros.model.weights import load_model  # noqa: E402

MANIFEST = json.loads((GOLDEN / 'pi05_manifest.json').read_text())['openpi']
DISK_BYTES = 20e9
MEMORY_BYTES = 12e9
BLOCK = 1 << 20


def kilobytes(file: str, key: str) -> int:
    """A line of a file in /proc."""
    lines = Path('/proc', file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f'{key}:'))


def write_random(path: Path) -> None:
    """Every tensor of the manifest in bfloat16, written by parts: never a model in memory.

    Weights of one random block again and again, small enough that activations stay finite.
    """
    header, start = {}, 0
    for name, shape in MANIFEST['keys'].items():
        end = start + 2 * int(np.prod(shape))
        header[name] = {'dtype': 'BF16', 'shape': shape, 'data_offsets': [start, end]}
        start = end
    encoded = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(0)
    block = (0.02 * torch.randn(BLOCK // 2, generator=generator)).to(torch.bfloat16)
    data = block.view(torch.uint8).numpy().tobytes()
    with path.open('wb') as file:
        file.write(len(encoded).to_bytes(8, 'little') + encoded)
        for first in range(0, start, BLOCK):
            file.write(data[: min(BLOCK, start - first)])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    if shutil.disk_usage(tmp_path).free < DISK_BYTES:
        pytest.skip(f'needs {DISK_BYTES / 1e9:.0f} GB of disk at {tmp_path}')
    if not Path('/proc/self/clear_refs').exists():
        pytest.skip('needs Linux')
    if kilobytes('meminfo', 'MemAvailable') * 1024 < MEMORY_BYTES:
        pytest.skip(f'needs {MEMORY_BYTES / 1e9:.0f} GB of memory')
    write_random(tmp_path / 'model.safetensors')
    yield tmp_path
    (tmp_path / 'model.safetensors').unlink()  # pytest keeps the folders of some runs


@pytest.mark.slow
@pytest.mark.long
def test_a_checkpoint_of_the_released_size_loads_and_runs_one_frame(checkpoint: Path) -> None:
    config = PRESETS['pi05']
    told: list[float] = []
    before = kilobytes('self/status', 'VmRSS')
    Path('/proc/self/clear_refs').write_text('5')  # the peak begins anew
    model = load_model(
        config, checkpoint, device=CPU, dtype=torch.bfloat16, on_progress=told.append
    )
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert told[-1] == 1.0
    assert (kilobytes('self/status', 'VmHWM') - before) * 1024 < 1.1 * size
    run_one_frame(model)


def run_one_frame(model: Pi05) -> None:
    config = model.config
    task = LanguageTask(
        name='text', prompt_tokens=(), period_frames=1, max_new_tokens=2, max_age_ns=10**12,
        priority=0, stream=False,
    )  # fmt: skip
    layout = SlotLayout(config.max_prefix_len, [task], config.action_horizon)
    runner = ModelRunner(model, layout, num_slots=2, num_denoise_steps=2)
    generator = np.random.default_rng(0)
    image = generator.integers(0, 255, (224, 224, 3), np.uint8)
    inputs = ModelInput(
        images=dict.fromkeys(CAMERA_SLOTS[:2], image),
        tokens=list(range(2, 40)),
        truncated_tokens=0,
    )
    frame = Frame(0, 0, 0, runner.prefix_len(inputs), 0)
    runner.prefill(frame, inputs)
    noise = generator.standard_normal((config.action_horizon, config.action_dim), np.float32)
    actions = runner.denoise(frame, noise)
    assert actions.shape == (config.action_horizon, config.action_dim)
    assert np.isfinite(actions).all()
    ((token,),) = runner.decode([Sequence(task, frame, ())])
    assert 0 <= token < config.vocab_size


def test_the_written_checkpoint_has_the_released_size() -> None:
    elements = sum(int(np.prod(shape)) for shape in MANIFEST['keys'].values())
    assert elements == MANIFEST['num_params_on_disk']
    assert set(UNUSED) <= set(MANIFEST['keys'])
