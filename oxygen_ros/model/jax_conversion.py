"""`oxygen_convert`: from a checkpoint of JAX to one of PyTorch by openpi's own converter.

Owns the call of it and what must be right before: the converter reads for minutes, tells pi0.5 by
the path of the checkpoint, and leaves out without a word what it does not know. Knows nothing of
tensors: `weights.py` loads what comes out. Called from the command line.
Source: openpi examples/convert_jax_model_to_pytorch.py `convert_pi0_checkpoint`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from oxygen_ros.model.checkpoints import WEIGHTS, CheckpointError, jax_root
from oxygen_ros.model.openpi_bridge import OpenpiError, openpi_modules, train_config

CONVERTER = Path('examples', 'convert_jax_model_to_pytorch.py')
REPLACEMENTS = Path('src', 'openpi', 'models_pytorch', 'transformers_replace')
VARIANTS = ('gemma_2b', 'gemma_300m')
"""Those whose sizes stand in openpi's converter as literals."""


def convert(config: str, checkpoint: str, output: Path, precision: str) -> None:
    """Write `output` with model.safetensors, config.json and the assets of the checkpoint.

    `checkpoint` is a folder with params/, or what openpi downloads (gs://...). `precision` is
    'float32' or 'bfloat16'.

    Raises:
        OpenpiError: openpi is not there or not whole, or its converter cannot take this.
        CheckpointError: the checkpoint is none of JAX, or the output is in use.
    """
    openpi = openpi_modules()
    model = train_config(openpi, config).model
    _refuse_unknown_variants(config, model)
    _refuse_used(output)
    _require_changed_transformers(openpi.checkout)
    converter = _converter(openpi.checkout / CONVERTER)
    root = _root(_local(openpi.download, checkpoint))
    with tempfile.TemporaryDirectory() as folder:
        try:
            # Built in the config's own dtype, nearly always bfloat16, it would round to that first
            # and then widen to float32.
            converter(
                str(_linked(root, Path(folder))),
                precision,
                str(output),
                replace(model, dtype=precision),
            )
        except Exception as error:
            raise OpenpiError(
                f"{root}: openpi's converter failed ({type(error).__name__}: {error}); was this "
                f'checkpoint trained with config {config!r}?'
            ) from error


def _refuse_unknown_variants(config: str, model: Any) -> None:
    variants = (model.paligemma_variant, model.action_expert_variant)
    if variants != VARIANTS:
        raise OpenpiError(
            f"openpi config {config!r}: openpi's converter knows {' and '.join(VARIANTS)} only, "
            f'got {" and ".join(variants)}; of a model trained with LoRA it would leave out '
            f'without a word what was trained'
        )


def _refuse_used(output: Path) -> None:
    # The converter would overwrite weights, and delete assets that are there.
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f'output {output}: expected a new or an empty directory')


def _require_changed_transformers(checkout: Path) -> None:
    try:
        check = importlib.import_module('transformers.models.siglip.check')
        problem = (
            None
            if check.check_whether_transformers_replace_is_installed_correctly()
            else 'it is changed, but of another version'
        )
    except ImportError as error:
        problem = str(error)
    if problem is not None:
        spec = importlib.util.find_spec('transformers')
        folder = Path(spec.origin).parent if spec and spec.origin else 'site-packages/transformers'
        raise OpenpiError(
            f"openpi's converter needs transformers 4.53.2 with openpi's changes ({problem}):\n"
            f'  {sys.executable} -m pip install transformers==4.53.2\n'
            f'  cp -r {checkout / REPLACEMENTS}/* {folder}/'
        )


def _converter(script: Path) -> Callable[[str, str, str, Any], None]:
    if not script.is_file():
        raise OpenpiError(
            f'{script}: no such file; openpi must be installed from a checkout with pip install -e'
        )
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise OpenpiError(f"{script}: openpi's converter cannot be loaded: {error}") from error
    return module.convert_pi0_checkpoint


def _local(download: Any, checkpoint: str) -> Path:
    try:
        return Path(download.maybe_download(checkpoint))
    except Exception as error:  # of whatever file system the address is
        raise CheckpointError(
            f'checkpoint {checkpoint}: not to be had ({type(error).__name__}: {error})'
        ) from error


def _root(path: Path) -> Path:
    if (path / WEIGHTS).is_file():
        raise CheckpointError(
            f'checkpoint {path}: has {WEIGHTS}, so it is a PyTorch checkpoint: use it as it is'
        )
    root = jax_root(path)
    if root is None or not (root / 'params').is_dir():
        found = sorted(p.name for p in path.iterdir())[:10] if path.is_dir() else 'a file'
        raise CheckpointError(
            f'checkpoint {path}: expected params/, as in one step of a training run in JAX, found '
            f'{found}'
        )
    return root


def _linked(root: Path, folder: Path) -> Path:
    """Make a path to the checkpoint as the converter wants it, for one of pi0.5 and its assets."""
    if (root / 'assets').is_dir():
        (folder / 'assets').symlink_to(root.absolute() / 'assets')
    else:
        print(f'oxygen_convert: {root}: has no assets/, so no statistics', file=sys.stderr)
    link = folder / 'pi05'
    link.symlink_to(root.absolute())
    return link


def main(args: list[str] | None = None) -> int:
    """Run `convert` from the command line; 1 if it could not."""
    parser = argparse.ArgumentParser(
        prog='oxygen_convert', description="Convert a JAX checkpoint with openpi's own converter."
    )
    parser.add_argument('config', help='openpi training config, e.g. pi05_droid')
    parser.add_argument('checkpoint', help='folder with params/ and assets/, or its gs:// address')
    parser.add_argument('output', type=Path, help='directory to write')
    parser.add_argument('--precision', default='bfloat16', choices=['bfloat16', 'float32'])
    options = parser.parse_args(args)
    try:
        convert(options.config, options.checkpoint, options.output, options.precision)
    except (OpenpiError, CheckpointError) as error:
        print(f'oxygen_convert: {error}', file=sys.stderr)
        return 1
    return 0
