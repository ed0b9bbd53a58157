"""The report of an evaluation: an HTML page, JSON and CSV beside it, and a table for the terminal.

Owns the files of a report. Knows neither model nor recording, only results as `run_folder.py` reads
them; `offline.py` calls it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from oxygen_ros.evaluation.bag_result import BagResult, write_json
from oxygen_ros.evaluation.dashboard import printable
from oxygen_ros.evaluation.eval_numbers import BAG_COLUMNS, bag_cells, overall
from oxygen_ros.evaluation.eval_page import make_page
from oxygen_ros.evaluation.run_comparison import RunComparison

TERMINAL_COLUMNS = ('recording', 'frames / ticks', 'error', 'sent error', 'jump', 'drops')
HTML_FILE, JSON_FILE, CSV_FILE = 'report.html', 'report.json', 'report.csv'


def write_report(
    folder: Path,
    setting: Mapping[str, Any],
    machine: Mapping[str, Any],
    results: Sequence[BagResult],
    comparison: RunComparison | None = None,
    other: Sequence[BagResult] = (),
) -> Path:
    """Write report.html, report.json and report.csv; return the path of the page."""
    content = {
        'setting': dict(setting),
        'machine': dict(machine),
        'overall': overall(results),
        'bags': [result.summary for result in results],
        'comparison': None if comparison is None else comparison.as_json(),
    }
    write_json(folder / JSON_FILE, content)
    _write_csv(folder / CSV_FILE, results)
    page = make_page(folder, setting, machine, results, comparison, other)
    (folder / HTML_FILE).write_text(page, encoding='utf-8')
    return folder / HTML_FILE


def results_table(results: Sequence[BagResult], comparison: RunComparison | None) -> Table:
    """What a terminal shows at the end."""
    table = Table(title='oxygen_eval', caption_justify='left')
    for column in TERMINAL_COLUMNS:
        table.add_column(column, justify='left' if column == 'recording' else 'right')
    for result in results:
        if result.failed:
            table.add_row(Text(printable(result.name)), Text('failed', style='red'))
            continue
        cells = dict(zip(BAG_COLUMNS, bag_cells(result), strict=True))
        table.add_row(*(Text(cells[column]) for column in TERMINAL_COLUMNS))
    if comparison is not None:
        table.caption = Text(f'changed: {", ".join(comparison.changed()) or "nothing"}')
    return table


def _write_csv(path: Path, results: Sequence[BagResult]) -> None:
    """One number per line: recording, quantity, joint and row where it has them."""
    with path.open('w', newline='', encoding='utf-8') as file:
        writer = csv.writer(file, lineterminator='\n')
        writer.writerow(('bag', 'quantity', 'joint', 'row', 'value'))
        for result in results:
            if not result.failed:
                writer.writerows((result.name, *line) for line in _csv_lines(result.summary))


def _csv_lines(bag: Mapping[str, Any]) -> Iterable[tuple[str, str, int | str, Any]]:
    for name in ('duration_s', 'frames', 'ticks', 'chunk_hz', 'tokens', 'tokens_per_s'):
        yield name, '', '', bag[name]
    for name, numbers in bag['times'].items():
        for quantile, value in (numbers or {}).items():
            yield f'{name}_{quantile}', '', '', value
    for kind in ('error', 'sent_error'):
        errors = bag[kind] or {}
        for joint, values in errors.get('per_joint', {}).items():
            for name, value in values.items():
                yield f'{kind}_{name}', joint, '', value
        for row, per_joint in enumerate(errors.get('per_step_joint_mae', [])):
            for joint, value in zip(bag['joints'], per_joint, strict=True):
                yield f'{kind}_mae', joint, row, value
    for kind, name in (('jump', 'jump_mean'), ('jerk', 'jerk_rms')):
        for joint, value in bag[kind]['per_joint'].items():
            yield name, joint, '', value
    for reason, count in bag['drops'].items():
        yield f'dropped_{reason}', '', '', count
