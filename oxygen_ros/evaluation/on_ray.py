"""Recordings on Ray: a task each, on as many processes and machines as the cluster has.

Owns the connection to the cluster, the tasks, and the way of their files back into the run's
folder; what a task does is `bag_evaluation.py`, as without Ray. `offline.py` calls it.

A task depends on its recording alone. Ray starts it again elsewhere when its worker or machine
dies, and what is done is in the run's folder of whoever asked: nothing that was finished is lost.
Recordings, checkpoint and this package have the same paths on every machine.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from oxygen_ros.engine.factory import EngineOptions
from oxygen_ros.evaluation.bag_evaluation import Plan, evaluate_or_say_why
from oxygen_ros.evaluation.bag_result import RESULT_FILE, write_failure
from oxygen_ros.evaluation.offline_engine import OfflineEngine
from oxygen_ros.evaluation.run_folder import RunFolder
from oxygen_ros.profile import RobotProfile

LOCAL = 'local'
MAX_RETRIES = 3
"""Times that a recording is begun again after a worker died under it."""


class RayError(ValueError):
    """Ray is not installed, or there is no cluster to be had; one line."""


def evaluate_on_ray(
    plan: Plan, left: Mapping[Path, str], run: RunFolder, address: str
) -> Iterator[str]:
    """Evaluate recordings in any order; yield per recording why it failed, '' if it did not.

    Args:
        left: recording -> its name in the run.
        address: of a cluster; 'local' starts one on this machine that ends with the run.

    Raises:
        RayError: Ray is not installed, or there is no cluster.
        ProfileError, CheckpointError, FileNotFoundError, ValueError: no worker can make the engine.
    """
    ray = _connect(address)
    try:
        # A core per task is what Ray counts with; torch would take them all.
        plan = replace(plan, engine=replace(plan.engine, num_threads=1))
        task = ray.remote(
            num_gpus=_gpus(ray, plan.engine.device),
            max_retries=MAX_RETRIES,
            max_calls=0,  # or a worker with a GPU would load the model anew for each recording
        )(_evaluate_away)
        pending = {
            task.remote(plan, bag.absolute(), name): (bag, name) for bag, name in left.items()
        }
        while pending:
            (done,), _ = ray.wait(list(pending), num_returns=1)
            bag, name = pending.pop(done)
            folder = run.bag_folder(name)
            try:
                reason, files = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                reason = f'{bag}: the worker died {MAX_RETRIES + 1} times: {type(error).__name__}'
                write_failure(folder, bag, name, reason)
            else:
                _write_files(folder, files)
            yield reason
    finally:
        ray.shutdown()


def _connect(address: str) -> Any:
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')  # by default Ray reports to its makers
    try:
        import ray
    except ImportError as error:
        raise RayError('--ray: expected the package ray, found none: pip install ray') from error
    own = {'include_dashboard': False} if address == LOCAL else {}
    try:
        ray.init(address=address, logging_level='error', log_to_driver=False, **own)
    except Exception as error:  # of many types, plain Exception among them
        raise RayError(f'--ray {address}: {" ".join(str(error).split())}') from error
    return ray


def _gpus(ray: Any, device: str) -> int:
    """Return how many GPUs a task takes: one, where the cluster has any and may use it."""
    if device == 'auto':
        return int(ray.cluster_resources().get('GPU', 0) > 0)
    return int(device != 'cpu')


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a recording's folder anew; the result last, which says that it is complete."""
    shutil.rmtree(folder)
    for name in sorted(files, key=lambda name: name == RESULT_FILE):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[name])


# --- in a worker ------------------------------------------------------------------------------


def _evaluate_away(plan: Plan, bag: Path, name: str) -> tuple[str, dict[str, bytes]]:
    """Return why the recording failed, '' if it did not, and its folder's files."""
    engine = _engine(plan.profile, plan.engine)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / name
        folder.mkdir()
        reason = evaluate_or_say_why(plan, bag, engine, folder, lambda share, words: None)
        files = [path for path in folder.rglob('*') if path.is_file()]
        return reason, {str(path.relative_to(folder)): path.read_bytes() for path in files}


@functools.lru_cache(maxsize=1)
def _engine(profile: RobotProfile, options: EngineOptions) -> OfflineEngine:
    """The engine of this worker, loaded once."""
    return OfflineEngine(profile, options, realtime=False)
