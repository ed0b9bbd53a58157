"""RunFolder: the folder of one evaluation, and whether it may be gone on with.

Owns the setting of a run (`run.json`) and the folder of every recording in it. Knows no model;
`offline.py` writes into it, the comparison reads another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oxygen_ros.evaluation.bag_result import BagResult, read_result, write_json
from oxygen_ros.profile import RobotProfile

RUN_FILE = 'run.json'
BAGS_FOLDER = 'bags'
HASHED_BYTES = 1 << 20


class RunError(ValueError):
    """A folder that cannot be used; one line that names it and says what to do."""


class RunFolder:
    """OUT/run.json and OUT/bags/NAME/ for every recording."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def setting(self) -> dict[str, Any]:
        """What the run was made with. Raises RunError if the folder is no run."""
        return dict(self._content()['setting'])

    @property
    def machine(self) -> dict[str, Any]:
        """What its times were measured on. Raises RunError if the folder is no run."""
        return dict(self._content()['machine'])

    def begin(
        self, setting: Mapping[str, Any], machine: Mapping[str, Any], *, resume: bool
    ) -> None:
        """Make the folder, or go on in one that was made with the same setting.

        Raises RunError if it holds another run, or one that nobody asked to resume.
        """
        if (self.path / RUN_FILE).exists():
            if not resume:
                raise RunError(
                    f'{self.path}: holds a run already; --resume goes on with it, '
                    f'--out takes another folder'
                )
            differing = [key for key in setting if self.setting.get(key) != setting[key]]
            if differing:
                key = differing[0]
                raise RunError(
                    f'{self.path}: --resume: the run was made with {key} = '
                    f'{self.setting.get(key)!r}, now it is {setting[key]!r}; take another --out'
                )
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / RUN_FILE, {'setting': setting, 'machine': machine})

    def _content(self) -> dict[str, Any]:
        try:
            content = json.loads((self.path / RUN_FILE).read_text(encoding='utf-8'))
            return {'setting': content['setting'], 'machine': content['machine']}
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f'{self.path}: is no run of oxygen_eval: {error}') from error

    def bag_folder(self, name: str) -> Path:
        """Return the folder of one recording; it exists."""
        folder = self.path / BAGS_FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def results(self) -> list[BagResult]:
        """Return every complete recording, failed ones included, by name."""
        folders = sorted((self.path / BAGS_FOLDER).glob('*'))
        found = [read_result(folder) for folder in folders]
        return [result for result in found if result is not None]


def folder_names(bags: Sequence[Path]) -> dict[Path, str]:
    """Return a folder name for every recording; equal names of different folders are numbered."""
    names: dict[Path, str] = {}
    for bag in bags:
        name, number = bag.name, 1
        while name in names.values():
            number += 1
            name = f'{bag.name}_{number}'
        names[bag] = name
    return names


def flat_setting(
    profile: RobotProfile, checkpoint: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything that may change a result, one plain value per dotted key."""
    setting: dict[str, Any] = dict(options)
    setting['checkpoint'] = checkpoint or 'random weights'
    setting['checkpoint_digest'] = checkpoint_digest(Path(checkpoint)) if checkpoint else ''
    _flatten(asdict(profile), 'profile', setting)
    return setting


def _flatten(value: Any, key: str, into: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for name, one in value.items():
            _flatten(one, f'{key}.{name}', into)
    elif isinstance(value, (list, tuple)):
        if any(isinstance(one, dict) for one in value):
            into[f'{key}.count'] = len(value)
            for one in value:
                _flatten(one, f'{key}.{one.get("slot", one.get("name"))}', into)
        else:
            into[key] = ', '.join(map(str, value))
    else:
        into[key] = value


def checkpoint_digest(path: Path) -> str:
    """Tell two checkpoints apart without reading gigabytes: sizes, and both ends of every file."""
    path = path.expanduser()
    files = sorted(path.glob('*.safetensors')) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        if not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f'{file.name} {size}\n'.encode())
        with file.open('rb') as opened:
            digest.update(opened.read(HASHED_BYTES))
            opened.seek(max(0, size - HASHED_BYTES))
            digest.update(opened.read())
    return digest.hexdigest()[:16]
