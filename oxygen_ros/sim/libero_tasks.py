"""LIBERO's tasks as the installed benchmark lists them: words, initial states, environments.

Owns everything that is peculiar to the package hf-libero: where it keeps its files, the question it
asks when it is imported for the first time, the assets it fetches from a hub. Whatever is missing
is told in one LiberoError. Knows no ROS. `libero_world.py` lives in what a task makes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import yaml

from oxygen_ros.sim.world import GraphicsError, import_mujoco

STEP_LIMITS = {
    'libero_spatial': 220,
    'libero_object': 280,
    'libero_goal': 300,
    'libero_10': 520,
}
"""By suite (openpi examples/libero/main.py)."""
SUITES = tuple(STEP_LIMITS)
NUM_TASKS = 10
"""Of each suite."""

CONTROL_HZ = 20
IMAGE_SIZE = 256
INSTALL = 'pip install hf-libero==0.1.4, in an environment of its own: it needs MuJoCo before 3.9'


class LiberoError(GraphicsError):
    """LIBERO, or a part of it, is missing; the message says what to install or to set."""


class Environment(Protocol):
    """What a world needs of LIBERO's ControlEnv, which is robosuite's environment beneath."""

    sim: Any

    def seed(self, seed: int) -> None: ...
    def reset(self) -> Any: ...
    def set_init_state(self, init_state: np.ndarray) -> Any: ...
    def step(self, action: np.ndarray) -> Any: ...
    def check_success(self) -> bool: ...
    def close(self) -> None: ...


class MakeEnvironment(Protocol):
    """Makes a new environment at each call; with OSC_POSE, CONTROL_HZ and without a horizon."""

    def __call__(self) -> Environment: ...


@dataclass(frozen=True)
class Task:
    """One task of a suite."""

    suite: str
    index: int
    language: str
    """What the robot is told, word by word."""
    step_limit: int
    """Control steps after which an episode has failed."""
    make: MakeEnvironment
    init_states: Sequence[np.ndarray] = ()
    """Flattened MuJoCo states, one per trial; empty: the environment's own random ones."""


def suite_tasks(suite: str) -> tuple[Task, ...]:
    """Return the tasks of a suite, in the order of the benchmark.

    Raises:
        LiberoError: hf-libero or one of its parts is missing.
        GraphicsError: MuJoCo or a renderer is missing.
    """
    answer_first_question(_package_folder())
    import_mujoco()  # chooses the renderer, which is read when it is imported
    try:
        with _prints_to_stderr():
            from libero.libero import benchmark

            listed = benchmark.get_benchmark_dict()[suite]()
    except ModuleNotFoundError as error:
        raise _lacks(error) from error
    return tuple(_task(listed, suite, index) for index in range(listed.n_tasks))


def _task(listed: Any, suite: str, index: int) -> Task:
    return Task(
        suite=suite,
        index=index,
        language=listed.get_task(index).language,
        step_limit=STEP_LIMITS[suite],
        make=functools.partial(_make_environment, listed.get_task_bddl_file_path(index)),
        init_states=listed.get_task_init_states(index),
    )


def _package_folder() -> Path:
    # Found, not imported: the import is what asks.
    spec = find_spec('libero')
    if spec is None or not spec.submodule_search_locations:
        raise LiberoError(f'expected the LIBERO benchmark, which is not installed: {INSTALL}')
    return Path(spec.submodule_search_locations[0]) / 'libero'


def answer_first_question(package: Path) -> None:
    """Write LIBERO's config file, where it is missing, as its own answer 'N' would.

    Without the file `import libero.libero` asks on stdin where data sets are to lie; a node that
    nobody types to would wait for ever. Data sets are not used here.

    Raises:
        LiberoError: the file cannot be written, or names folders that do not exist.
    """
    folder = Path(os.environ.get('LIBERO_CONFIG_PATH', Path.home() / '.libero'))
    file = folder / 'config.yaml'
    if not file.exists():
        _write_config(file, package)
    try:
        config = yaml.safe_load(file.read_text(encoding='utf-8'))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LiberoError(f'{file}: expected the config file of LIBERO: {error}') from error
    for key in ('bddl_files', 'init_states'):
        named = config.get(key) if isinstance(config, dict) else None
        if not isinstance(named, str) or not Path(named).is_dir():
            raise LiberoError(
                f'{file}: {key}: expected a folder, got {named!r}; delete the file, and it is '
                f'written anew for the LIBERO in {package}'
            )


def _write_config(file: Path, package: Path) -> None:
    config = {
        'benchmark_root': str(package),
        'bddl_files': str(package / 'bddl_files'),
        'init_states': str(package / 'init_files'),
        'datasets': str(package.parent / 'datasets'),
        'assets': str(package / 'assets'),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Moved into place: another process must find all of it or nothing.
        with tempfile.NamedTemporaryFile(
            'w', dir=file.parent, suffix='.yaml', delete=False, encoding='utf-8'
        ) as written:
            yaml.safe_dump(config, written)
        os.replace(written.name, file)
    except OSError as error:
        raise LiberoError(
            f'{file}: LIBERO keeps its paths in this file, and it cannot be written ({error}): '
            f'set LIBERO_CONFIG_PATH to a folder that can be'
        ) from error


def _make_environment(bddl_file: str) -> Environment:
    try:
        from libero.libero import get_assets_path
        from libero.libero.envs import OffScreenRenderEnv
    except ModuleNotFoundError as error:
        raise _lacks(error) from error
    with _prints_to_stderr():
        assets = Path(get_assets_path())  # fetches them the first time
        if not (assets / 'scenes').is_dir():
            raise LiberoError(
                f'{assets}: the scenes and objects of LIBERO are not there, and could not be '
                f'fetched: start once with a network, or copy the folder ~/.cache/libero/assets '
                f'from a machine that has it'
            )
        environment: Environment = OffScreenRenderEnv(
            bddl_file_name=bddl_file,
            camera_heights=IMAGE_SIZE,
            camera_widths=IMAGE_SIZE,
            control_freq=CONTROL_HZ,
            use_camera_obs=False,  # pictures are taken when somebody looks
            ignore_done=True,  # a robot lives on; whoever counts steps ends the episode
        )
    return environment


def _lacks(error: ModuleNotFoundError) -> LiberoError:
    return LiberoError(f'LIBERO needs {error.name!r}, which is not installed: {INSTALL}')


def _prints_to_stderr() -> contextlib.redirect_stdout[Any]:
    """LIBERO prints as it goes, and the last line of an evaluation's stdout is its JSON."""
    return contextlib.redirect_stdout(sys.stderr)
