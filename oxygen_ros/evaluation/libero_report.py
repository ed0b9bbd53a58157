"""What episodes of LIBERO amount to: successes per task, rates with intervals, CSV, table, JSON.

Owns the arithmetic, the words and the file that grows with every episode. Knows neither ROS nor the
world; `libero_episodes.py` hands over plain records.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from oxygen_ros.evaluation.episode_report import Rate

EPISODES_FILE = 'episodes.csv'


@dataclass(frozen=True)
class Played:
    """One episode as it was played."""

    execution: str
    suite: str
    task: int
    language: str
    trial: int
    success: bool
    steps: int  # of control, without those in which objects settle
    looks: int
    texts_due: int
    texts_ended: int
    chunk_ms: float  # from tick to chunk, the median; wall clock
    wall_s: float


class Record:
    """The episodes so far, in memory and line by line in OUT/episodes.csv."""

    def __init__(self, out: Path) -> None:
        """Begin; there is a file once there is an episode.

        Raises:
            FileExistsError: the folder holds a run already.
        """
        out.mkdir(parents=True, exist_ok=True)
        self.played: list[Played] = []
        self._path = out / EPISODES_FILE
        if self._path.exists():
            raise FileExistsError(f'{self._path}: holds a run already; --out takes another folder')

    def add(self, played: Played) -> None:
        """Keep an episode; it is on disk when this returns."""
        with self._path.open('a', newline='', encoding='utf-8') as file:
            writer = csv.writer(file)
            if not self.played:
                writer.writerow(field.name for field in fields(Played))
            writer.writerow(asdict(played).values())
        self.played.append(played)


def rate_of(played: Sequence[Played]) -> Rate:
    """Return how often the goal was reached."""
    return Rate(sum(one.success for one in played), len(played))


def markdown(played: Sequence[Played], about: str) -> str:
    """Return two tables: rates per suite and execution, and successes per task."""
    executions, suites = _seen(played, 'execution'), _seen(played, 'suite')
    lines = [f'# LIBERO over ROS\n\n{about}\n', _row('suite', *executions)]
    lines.append(_row(*['---'] * (1 + len(executions))))
    for suite in [*suites, 'all']:
        cells = [str(rate_of(_of(played, execution, suite))) for execution in executions]
        lines.append(_row(suite, *cells))
    lines.append('\n' + _row('suite', 'task', *executions))
    lines.append(_row(*['---'] * (2 + len(executions))))
    for suite in suites:
        for task, language in _tasks(played, suite):
            rates = [rate_of(_of(played, execution, suite, task)) for execution in executions]
            cells = [f'{rate.hits} of {rate.total}' for rate in rates]
            lines.append(_row(suite, f'{task}: {language}', *cells))
    return '\n'.join(lines) + '\n'


def _row(*cells: str) -> str:
    return f'| {" | ".join(cells)} |'


def as_json(played: Sequence[Played], setting: Mapping[str, Any], *, due: int) -> dict[str, Any]:
    """Return all but the single episodes; `due` is how many there should be."""
    return {
        'setting': dict(setting),
        'episodes': len(played),
        'episodes_due': due,
        'executions': {
            execution: _execution_as_json(_of(played, execution))
            for execution in _seen(played, 'execution')
        },
    }


def _execution_as_json(played: Sequence[Played]) -> dict[str, Any]:
    return {
        'success': rate_of(played).as_json(),
        'suites': {suite: _suite_as_json(played, suite) for suite in _seen(played, 'suite')},
        'looks': sum(one.looks for one in played),
        'control_steps': sum(one.steps for one in played),
        'texts_due': sum(one.texts_due for one in played),
        'texts_ended': sum(one.texts_ended for one in played),
        'chunk_ms': round(float(np.median([one.chunk_ms for one in played])), 3),
        'wall_s': round(sum(one.wall_s for one in played), 1),
    }


def _suite_as_json(played: Sequence[Played], suite: str) -> dict[str, Any]:
    mine = [one for one in played if one.suite == suite]
    tasks = []
    for task, language in _tasks(played, suite):
        rate = rate_of([one for one in mine if one.task == task])
        tasks.append(
            {'task': task, 'language': language, 'successes': rate.hits, 'trials': rate.total}
        )
    return {'success': rate_of(mine).as_json(), 'tasks': tasks}


def _seen(played: Sequence[Played], field: str) -> list[str]:
    """Values in order of appearance."""
    return list(dict.fromkeys(getattr(one, field) for one in played))


def _tasks(played: Sequence[Played], suite: str) -> Iterator[tuple[int, str]]:
    yield from dict.fromkeys((one.task, one.language) for one in played if one.suite == suite)


def _of(
    played: Sequence[Played], execution: str, suite: str = 'all', task: int | None = None
) -> list[Played]:
    return [
        one
        for one in played
        if one.execution == execution and suite in ('all', one.suite) and task in (None, one.task)
    ]
