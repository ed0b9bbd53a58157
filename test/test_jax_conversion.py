"""`oxygen_convert`, against a stand-in for openpi's converter, and against openpi and JAX.

The stand-in knows of openpi's converter what went wrong with it: that it looks at the path of the
checkpoint, and beside it. With openpi and JAX installed, a checkpoint that JAX saved is converted,
and JAX's own actions judge what we make of it; see `small_jax.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small_jax
import torch
from golden_pi05 import CPU, Prefilled
from torch import Tensor

from oxygen_ros.actions import ActionChunk
from oxygen_ros.engine.factory import EngineOptions, build_engine
from oxygen_ros.model import checkpoints, jax_conversion
from oxygen_ros.model.config import CAMERA_SLOTS, PRESETS, Pi05Config
from oxygen_ros.model.weights import load_model
from oxygen_ros.observation import Observation
from oxygen_ros.profile import load_profile

ROOT = Path(__file__).parents[1]

CONVERTER = """
import json, pathlib, shutil

def convert_pi0_checkpoint(checkpoint_dir, precision, output_path, model_config):
    if 'pi05' not in checkpoint_dir:
        raise KeyError('llm/layers/pre_attention_norm_1/scale')
    source, output = pathlib.Path(checkpoint_dir), pathlib.Path(output_path)
    if (source / 'params' / '_METADATA').read_text() != 'pi05':
        raise KeyError('llm/layers/pre_attention_norm_1/Dense_0/bias')
    output.mkdir(exist_ok=True)
    if (source.parent / 'assets').exists():
        shutil.copytree(source.parent / 'assets', output / 'assets')
    told = {'precision': precision, 'dtype': model_config.dtype}
    (output / 'told.json').write_text(json.dumps(told))
"""


@dataclass(frozen=True)
class Model:
    """openpi's Pi0Config, as far as it is read."""

    pi05: bool = True
    paligemma_variant: str = 'gemma_2b'
    action_expert_variant: str = 'gemma_300m'
    dtype: str = 'bfloat16'


MODELS = {
    'pi05_droid': Model(),
    'pi0_droid': Model(pi05=False),
    'pi05_lora': Model(paligemma_variant='gemma_2b_lora'),
    'debug_pi05': Model(paligemma_variant='dummy', action_expert_variant='dummy'),
}


def get_config(name: str) -> SimpleNamespace:
    if name not in MODELS:
        raise ValueError(f"Config '{name}' not found.")
    return SimpleNamespace(model=MODELS[name])


def maybe_download(url: str) -> Path:
    if '://' in url:
        raise ConnectionError(f'no way to {url}')
    if not (path := Path(url)).exists():
        raise FileNotFoundError(f'File not found at {url}')
    return path.resolve()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of the stand-in, installed as with `pip install -e`."""
    root = tmp_path / 'openpi'
    contents: dict[str, dict[str, Any]] = {
        'openpi': {'__file__': str(root / 'src' / 'openpi' / '__init__.py')},
        'openpi.transforms': {},
        'openpi.models': {},
        'openpi.models.gemma': {},
        'openpi.shared': {},
        'openpi.shared.download': {'maybe_download': maybe_download},
        'openpi.shared.normalize': {},
        'openpi.training': {},
        'openpi.training.config': {'get_config': get_config},
        'transformers.models.siglip.check': {
            'check_whether_transformers_replace_is_installed_correctly': lambda: True
        },
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition('.')
        if parent in contents:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
    script = root / jax_conversion.CONVERTER
    script.parent.mkdir(parents=True)
    script.write_text(CONVERTER)
    return root


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step of a training run, whose path says nothing of pi0.5."""
    folder = tmp_path / 'mine' / '19999'
    for file, text in {
        '_CHECKPOINT_METADATA': '{}',
        'params/_METADATA': 'pi05',
        'assets/droid/norm_stats.json': '{}',
        'train_state/_METADATA': '{}',
    }.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder


def run(*args: object) -> int:
    return jax_conversion.main([str(arg) for arg in args])


# --- what openpi's converter is given -------------------------------------------------------------


@pytest.mark.usefixtures('checkout')
@pytest.mark.parametrize('part', ['.', 'params'])
def test_a_checkpoint_is_converted_wherever_it_lies_and_its_assets_are_taken_along(
    step: Path, tmp_path: Path, part: str
) -> None:
    output = tmp_path / 'torch'
    assert run('pi05_droid', step / part, output) == 0
    assert (output / 'assets' / 'droid' / 'norm_stats.json').read_text() == '{}'
    assert not (output / 'assets').is_symlink()
    assert sorted(path.name for path in step.parent.iterdir()) == ['19999']


@pytest.mark.usefixtures('checkout')
def test_a_relative_path_is_converted(
    step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(step.parent)
    assert run('pi05_droid', '19999', '../torch') == 0
    assert (tmp_path / 'torch' / 'assets' / 'droid' / 'norm_stats.json').is_file()


@pytest.mark.usefixtures('checkout')
@pytest.mark.parametrize('precision', ['float32', 'bfloat16'])
def test_the_model_is_built_in_the_precision_that_is_written(
    step: Path, tmp_path: Path, precision: str
) -> None:
    """Or float32 would be what bfloat16 leaves of it, in twice the space."""
    assert run('pi05_droid', step, tmp_path / 'torch', '--precision', precision) == 0
    told = json.loads((tmp_path / 'torch' / 'told.json').read_text())
    assert told == {'precision': precision, 'dtype': precision}


@pytest.mark.usefixtures('checkout')
def test_a_checkpoint_without_assets_is_converted_and_that_is_said(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (step / 'assets' / 'droid' / 'norm_stats.json').unlink()
    (step / 'assets' / 'droid').rmdir()
    (step / 'assets').rmdir()
    assert run('pi05_droid', step, tmp_path / 'torch') == 0
    assert 'has no assets/, so no statistics' in capsys.readouterr().err


# --- what is refused before minutes are spent -----------------------------------------------------


@pytest.mark.usefixtures('checkout')
@pytest.mark.parametrize(
    ('config', 'problem'),
    [
        ('pi05_drod', "openpi config 'pi05_drod': Config 'pi05_drod' not found."),
        ('pi0_droid', "openpi config 'pi0_droid': expected a config of pi0.5"),
        ('pi05_lora', 'knows gemma_2b and gemma_300m only, got gemma_2b_lora and gemma_300m'),
        ('debug_pi05', 'knows gemma_2b and gemma_300m only, got dummy and dummy'),
    ],
)
def test_a_config_that_openpis_converter_cannot_take_is_refused(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, problem: str
) -> None:
    assert run(config, step, tmp_path / 'torch') == 1
    assert problem in capsys.readouterr().err
    assert not (tmp_path / 'torch').exists()


@pytest.mark.usefixtures('checkout')
@pytest.mark.parametrize(
    ('part', 'problem'),
    [
        ('no_such', 'not to be had (FileNotFoundError: File not found at '),
        ('..', r"expected params/, as in one step of a training run in JAX, found ['19999']"),
        ('params/_METADATA', 'found a file'),
    ],
)
def test_a_path_that_is_no_jax_checkpoint_is_refused(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str, problem: str
) -> None:
    assert run('pi05_droid', step / part, tmp_path / 'torch') == 1
    assert problem in capsys.readouterr().err


@pytest.mark.usefixtures('checkout')
def test_an_address_is_openpis_to_download(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = 'gs://openpi-assets/checkpoints/pi05_droid'
    assert run('pi05_droid', address, tmp_path / 'torch') == 1
    assert f'(ConnectionError: no way to {address})' in capsys.readouterr().err


@pytest.mark.usefixtures('checkout')
def test_a_step_whose_parameters_were_not_saved_to_the_end_is_refused(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (step / 'params').rename(step / 'params.orbax-checkpoint-tmp-17')
    assert run('pi05_droid', step, tmp_path / 'torch') == 1
    assert "'params.orbax-checkpoint-tmp-17'" in capsys.readouterr().err


@pytest.mark.usefixtures('checkout')
def test_a_pytorch_checkpoint_needs_no_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / 'model.safetensors').touch()
    assert run('pi05_droid', tmp_path, tmp_path / 'torch') == 1
    assert 'so it is a PyTorch checkpoint: use it as it is' in capsys.readouterr().err


@pytest.mark.usefixtures('checkout')
def test_an_output_that_is_in_use_is_refused(
    step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """openpi's converter would delete the assets there, were it those of the checkpoint itself."""
    assert run('pi05_droid', step, step) == 1
    assert f'output {step}: expected a new or an empty directory' in capsys.readouterr().err
    assert (step / 'assets' / 'droid' / 'norm_stats.json').is_file()


@pytest.mark.usefixtures('checkout')
def test_a_checkpoint_of_another_model_is_named_with_the_converters_own_words(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (step / 'params' / '_METADATA').write_text('pi0')
    assert run('pi05_droid', step, tmp_path / 'torch') == 1
    message = capsys.readouterr().err
    assert f"{step}: openpi's converter failed (KeyError: 'llm/layers" in message
    assert "trained with config 'pi05_droid'?" in message


# --- an openpi that is not whole ------------------------------------------------------------------


def test_an_openpi_without_its_examples_is_refused(
    checkout: Path, step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = checkout / jax_conversion.CONVERTER
    script.unlink()
    assert run('pi05_droid', step, tmp_path / 'torch') == 1
    message = f'{script}: no such file; openpi must be installed from a checkout'
    assert message in capsys.readouterr().err


def test_a_converter_that_lacks_a_module_is_named_with_it(
    checkout: Path, step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / jax_conversion.CONVERTER).write_text('import a_module_that_is_nowhere')
    assert run('pi05_droid', step, tmp_path / 'torch') == 1
    assert "cannot be loaded: No module named 'a_module_that_is_nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize('state', ['unchanged', 'of another version'])
def test_transformers_without_openpis_changes_are_refused_with_what_to_do(
    checkout: Path,
    step: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
) -> None:
    name = 'transformers.models.siglip.check'
    if state == 'unchanged':
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    else:
        check = sys.modules[name]
        wrong = 'check_whether_transformers_replace_is_installed_correctly'
        monkeypatch.setattr(check, wrong, lambda: False)
    assert run('pi05_droid', step, tmp_path / 'torch') == 1
    message = capsys.readouterr().err
    assert f'{sys.executable} -m pip install transformers==4.53.2' in message
    assert f'cp -r {checkout / jax_conversion.REPLACEMENTS}/* ' in message


def test_without_openpi_the_error_says_how_to_install_it(
    step: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, 'openpi', None)  # type: ignore[arg-type]
    assert run('pi05_droid', step, tmp_path / 'torch') == 1
    message = capsys.readouterr().err
    assert 'oxygen_convert: openpi is not installed' in message
    assert 'git clone https://github.com/Physical-Intelligence/openpi' in message
    assert 'openpi_config' not in message


# --- openpi and JAX -------------------------------------------------------------------------------


def needs(gigabytes: float, folder: Path) -> None:
    if not (memory := Path('/proc/meminfo')).exists():
        pytest.skip('needs Linux')
    lines = memory.read_text().splitlines()
    (kilobytes,) = (int(line.split()[1]) for line in lines if line.startswith('MemAvailable:'))
    if kilobytes * 1024 < 1e9 * gigabytes:
        pytest.skip(f'needs {gigabytes} GB of memory')
    if shutil.disk_usage(folder).free < 1e9 * gigabytes:
        pytest.skip(f'needs {gigabytes} GB of disk at {folder}')


SMALL_JAX = str(Path(small_jax.__file__))


@pytest.fixture(scope='module')
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `jax/0`, what JAX makes of it in `jax.npz`, and the PyTorch of it in `torch`.

    Each in a process of its own: JAX keeps memory, and openpi is changed for them.
    """
    for module in ('openpi', 'jax', 'orbax', 'tyro'):
        if find_spec(module) is None:
            pytest.skip(f'{module} is not installed')
    folder = tmp_path_factory.mktemp('openpi_jax')
    needs(10.0, folder)
    for command in (['make', folder], ['convert', folder / 'jax' / '0', folder / 'torch']):
        done = subprocess.run(
            [sys.executable, SMALL_JAX, *command],
            env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
            text=True,
            capture_output=True,
            check=False,
        )
        if 'transformers==4.53.2' in done.stderr:
            pytest.skip(done.stderr)
        assert done.returncode == 0, done.stderr
    yield folder
    shutil.rmtree(folder)  # pytest keeps the folders of some runs


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Pi05Config:
    """The sizes of the converted model, which are now those of the preset."""
    released = PRESETS['pi05']
    config = replace(
        released,
        vlm=replace(released.vlm, mlp_dim=small_jax.MLP_DIM),
        expert=replace(released.expert, mlp_dim=small_jax.MLP_DIM),
        vocab_size=small_jax.VOCAB_SIZE,
    )
    monkeypatch.setitem(PRESETS, 'pi05', config)
    monkeypatch.setitem(checkpoints._VARIANTS, 'gemma_2b', config.vlm)
    monkeypatch.setitem(checkpoints._VARIANTS, 'gemma_300m', config.expert)
    return replace(config, action_horizon=small_jax.HORIZON)


@pytest.mark.slow
@pytest.mark.long
def test_the_converted_model_does_what_jax_does(converted: Path, small: Pi05Config) -> None:
    jax = {name: torch.from_numpy(array) for name, array in np.load(converted / 'jax.npz').items()}
    model = load_model(small, converted / 'torch', device=CPU, dtype=torch.float32)

    def actions(*slots: str) -> Tensor:
        images = torch.stack([jax[slot].permute(2, 0, 1) for slot in slots])
        with torch.inference_mode():
            prefilled = Prefilled(model, images.float() / 255 * 2 - 1, jax['tokens'])
            return prefilled.denoise(model, jax['noise'], small_jax.NUM_STEPS)

    present = [slot for slot in CAMERA_SLOTS if slot != small_jax.ABSENT]
    assert (jax['actions'] - jax['noise']).abs().max() > 0.1, 'the model does something'
    torch.testing.assert_close(actions(*present), jax['actions'], atol=5e-5, rtol=0)
    assert (actions(*CAMERA_SLOTS) - jax['actions']).abs().max() > 1e-3, 'the tolerance is small'


@pytest.mark.slow
@pytest.mark.long
def test_the_converted_folder_is_all_a_profile_needs_but_the_tokenizer(
    converted: Path, small: Pi05Config
) -> None:
    profile = load_profile('droid', ROOT / 'config')
    profile = replace(profile, model=replace(profile.model, action_horizon=0))
    tokenizer = ROOT / 'resource' / 'tabletop' / 'tokenizer.model'
    chunks: list[ActionChunk] = []
    engine = build_engine(
        profile,
        EngineOptions(
            str(converted / 'torch'), str(tokenizer), device='cpu', dtype='bfloat16', num_slots=2
        ),
        on_chunk=chunks.append,
        on_text=lambda update: None,
    )
    image = np.zeros((224, 224, 3), np.uint8)
    images = {camera.slot: image for camera in profile.cameras}
    engine.step(Observation(0, 0, 0, images, np.zeros(8, np.float32), 'fold'), deadline_ns=0)
    assert chunks[0].values.shape == (small.action_horizon, len(profile.command.names))
    assert np.isfinite(chunks[0].values).all()
