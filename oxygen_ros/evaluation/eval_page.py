"""The page of an evaluation: one HTML file that needs nothing else.

Owns the layout and the words of the page. Knows only what `eval_report.py` hands over, which calls
it.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oxygen_ros.evaluation import eval_plots
from oxygen_ros.evaluation.bag_result import FRAMES_FILE, OUTPUT_BAG, BagResult
from oxygen_ros.evaluation.dashboard import printable
from oxygen_ros.evaluation.eval_numbers import BAG_COLUMNS, bag_cells, number, overall
from oxygen_ros.evaluation.run_comparison import NUM_RESAMPLES, Difference, RunComparison
from oxygen_ros.evaluation.run_folder import BAGS_FOLDER

MAX_TEXTS = 200
"""Texts of one recording on the page; texts.csv has all."""

STYLE = """
:root { color-scheme: light; --line: #d9dee3; --soft: #f5f7f9; --dim: #5b6670; --blue: #0072b2; }
body { font: 15px/1.5 system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; color: #1c2126;
  max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: 0; }
h2 { margin-top: 2.2rem; border-bottom: 2px solid var(--line); }
h3 { margin-bottom: .3rem; } .dim { color: var(--dim); } code { font-size: .9em; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .55rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { background: var(--soft); font-weight: 600; }
td.n, th.n { text-align: right; } td.n { white-space: nowrap; }
tr.changed td { background: #fdeee6; font-weight: 600; } .failed { color: #b03a00; }
.tiles { display: flex; flex-wrap: wrap; gap: .7rem; margin: 1rem 0; }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: .5rem 1rem; min-width: 8.5rem; }
.tile b { display: block; font-size: 1.35rem; } .tile span { color: var(--dim); font-size: .85rem; }
img { max-width: 100%; display: block; margin: .5rem 0; }
details { margin: .4rem 0; } summary { cursor: pointer; color: var(--blue); }
.wide { overflow-x: auto; }
"""


def make_page(
    folder: Path,
    setting: Mapping[str, Any],
    machine: Mapping[str, Any],
    results: Sequence[BagResult],
    comparison: RunComparison | None,
    other: Sequence[BagResult],
) -> str:
    """Return the whole page; `other` are the results of the run that is compared with."""
    theirs = {result.name: result for result in other if not result.failed}
    parts = [
        f'<h1>oxygen_eval: {_text(folder.resolve().name)}</h1>',
        f'<p class="dim">{_text(_headline(setting, machine))}</p>',
        _tiles(overall(results)),
        '' if comparison is None else _comparison(comparison),
        '<h2>Recordings</h2>',
        _bags_table(results),
        *(_bag(folder, result, theirs.get(result.name)) for result in results if not result.failed),
        '<h2>Setting</h2>',
        _details('everything that may change a result', _pairs_table(setting)),
    ]
    body = '\n'.join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<title>oxygen_eval: {_text(folder.resolve().name)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n'
        f'<body>\n{body}\n</body></html>\n'
    )


def _headline(setting: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    return (
        f'profile {setting.get("profile.name")}, model {setting.get("profile.model.preset")} '
        f'({setting.get("checkpoint")}), {setting.get("profile.model.num_denoise_steps")} denoise '
        f'steps, seed {setting.get("seed")}, rate {setting.get("rate")}; times measured on '
        f'{", ".join(f"{value} {key}" for key, value in machine.items())}'
    )


def _tiles(numbers: Mapping[str, Any]) -> str:
    tiles = [
        (f'{numbers["bags"]}', f'recordings, {numbers["duration_s"]:.1f} s'),
        (f'{numbers["frames"]}', f'frames of {numbers["ticks"]} ticks'),
        (number(numbers['error_mae']), 'mean action error [rad, m]'),
        (number(numbers['sent_error_mae']), 'error of sent commands'),
        (number(numbers['jump_mean']), 'mean jump between chunks'),
        (number(numbers['chunk_p50'], ' ms'), 'tick to chunk, median'),
        (number(numbers['tokens_per_s']), 'tokens/s while decoding'),
        (f'{sum(numbers["drops"].values())}', 'dropped'),
    ]
    if numbers['failed']:
        tiles.insert(1, (f'{numbers["failed"]}', 'not evaluated'))
    cells = ''.join(
        f'<div class="tile"><b>{_text(a)}</b><span>{_text(b)}</span></div>' for a, b in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _comparison(found: RunComparison) -> str:
    parts = [
        '<h2>Compared with the other run</h2>',
        f'<p>{_text(_verdict(found))}</p>',
        '<h3>Set differently</h3>',
        _table(
            ('', 'this run', 'other run'),
            [(key, ours, theirs) for key, (ours, theirs) in found.settings.items()],
        )
        if found.settings
        else '<p>nothing</p>',
        '<h3>What changed</h3>',
    ]
    if found.differences:
        picture = eval_plots.difference_plot(found.differences)
        parts += [_image(picture, 'differences with intervals'), _differences(found.differences)]
    parts.append(
        f'<p class="dim">Paired by recording and observation: {found.paired_frames} pairs, '
        f'{found.unpaired_frames} frames without a partner. 95 % interval of the mean difference: '
        f'block bootstrap, blocks of n^(1/3) frames in a row, {NUM_RESAMPLES} resamples. '
        f'Many rows are tested, so one of twenty changes by chance; and what else the machine did '
        f'while either run was made shows in the times.</p>'
    )
    return '\n'.join(parts)


def _verdict(found: RunComparison) -> str:
    if not found.bags:
        return 'The runs have no recording in common.'
    if found.bit_for_bit:
        return 'Both runs did and said exactly the same, bit for bit.'
    changed = found.changed()
    texts = f'{found.equal_texts} of {found.paired_texts} texts and notes are equal.'
    if not changed:
        return f'No mean differs beyond its interval. {texts}'
    return f'Different: {", ".join(changed)}. {texts}'


def _differences(differences: Sequence[Difference]) -> str:
    lines = []
    for one in differences:
        interval = '' if np.isnan(one.low) else f'[{one.low:.3g}, {one.high:.3g}]'
        numbers = (one.this, one.other, one.mean)
        cells = [_text(one.label), *(number(value) for value in numbers), interval, str(one.pairs)]
        row = ''.join(f'<td{" class=n" if i else ""}>{c}</td>' for i, c in enumerate(cells))
        lines.append(f'<tr{" class=changed" if one.changed else ""}>{row}</tr>')
    names = ('', 'this run', 'other run', 'difference', '95 % interval', 'pairs')
    head = ''.join(f'<th{" class=n" if i else ""}>{name}</th>' for i, name in enumerate(names))
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _bags_table(results: Sequence[BagResult]) -> str:
    done = [bag_cells(result) for result in results if not result.failed]
    failed = ''.join(
        f'<p class="failed"><b>{_text(result.name)}</b> was not evaluated: '
        f'{_text(result.failed)}</p>'
        for result in results
        if result.failed
    )
    return f'<div class="wide">{_table(BAG_COLUMNS, done, numbers=True)}</div>{failed}'


def _bag(folder: Path, result: BagResult, other: BagResult | None) -> str:
    bag = result.summary
    parts = [f'<h2>{_text(result.name)}</h2>', _remarks(bag)]
    if bag['frames']:
        if bag['error']:
            best = number(bag['shift']['best_ms'])
            parts += [
                '<h3>Error against the recorded commands</h3>',
                f'<p class="dim">{bag["error"]["compared"]} values compared. The recorded commands '
                f'fit best when they are taken {best} ms later (error '
                f'{number(bag["shift"]["best_mae"])}); --align-ms moves them.</p>',
                _image(eval_plots.error_plot(result, other), 'errors'),
                _details('by joint', _error_table(bag)),
            ]
        parts += [
            '<h3>Commands</h3>',
            _image(eval_plots.command_plot(result, other), 'commands'),
            '<h3>Smoothness</h3>',
            _image(eval_plots.smoothness_plot(result, other), 'jumps and jerk'),
            '<h3>Times</h3>',
            _image(eval_plots.time_plot(result, other), 'times'),
            _times_table(bag),
        ]
    parts += ['<h3>Text and notes</h3>', _texts(result)]
    parts += ['<h3>Commands sent, frames not taken, messages dropped</h3>', _losses(bag)]
    beside = f'{BAGS_FOLDER}/{result.name}'
    parts.append(
        f'<p class="dim">Beside this page: <code>{_text(beside)}/{FRAMES_FILE}</code> and '
        f'<code>texts.csv</code>; <code>{_text(beside)}/{OUTPUT_BAG}</code> is a recording (mcap) '
        f'of what the node would have published. Digest of everything done and said: '
        f'<code>{_text(bag["digest"][:16])}</code></p>'
    )
    return '\n'.join(parts)


def _remarks(bag: Mapping[str, Any]) -> str:
    roles = ', '.join(f'{part} {topic}' for part, topic in bag['topics'].items())
    remarks = ''.join(f'<li>{_text(remark)}</li>' for remark in [*bag['remarks'], *bag['notices']])
    listed = f'<ul>{remarks}</ul>' if remarks else ''
    return f'<p class="dim">{_text(bag["path"])}<br>{_text(roles)}</p>{listed}'


def _error_table(bag: Mapping[str, Any]) -> str:
    sent = (bag['sent_error'] or {}).get('per_joint', {})
    rows = [
        (
            joint,
            *(number(errors[name]) for name in ('mae', 'rmse', 'bias')),
            number(sent.get(joint, {}).get('mae')),
            number(bag['jump']['per_joint'][joint]),
            number(bag['jerk']['per_joint'][joint]),
        )
        for joint, errors in bag['error']['per_joint'].items()
    ]
    columns = ('joint', 'error', 'rms error', 'bias', 'error as sent', 'jump', 'jerk')
    return _table(columns, rows, numbers=True)


def _times_table(bag: Mapping[str, Any]) -> str:
    names = {
        'chunk_ms': 'tick to chunk',
        'prefill_ms': 'prefill',
        'denoise_ms': 'denoise',
        'decode_ms': 'decode, all steps of a frame that decoded',
    }
    rows = []
    for key, label in names.items():
        if times := bag['times'][key]:
            rows.append((label, *(number(times[name]) for name in ('mean', 'p50', 'p95', 'max'))))
    step = f'<p class="dim">one decode step: {number(bag["decode_step_ms"])} ms</p>'
    return _table(('[ms]', 'mean', 'p50', 'p95', 'max'), rows, numbers=True) + step


def _texts(result: BagResult) -> str:
    texts = result.texts
    if not texts:
        return '<p>none</p>'
    columns = ('time_s', 'frame', 'task', 'reason', 'num_tokens')
    rows = [(*(text[c] for c in columns), printable(text['text'])) for text in texts[:MAX_TEXTS]]
    more = f'; the first {MAX_TEXTS}, all in texts.csv' if len(texts) > MAX_TEXTS else ''
    heads = ('time of the observation [s]', 'frame', 'task', 'ended by', 'tokens', 'text')
    return _details(f'{len(texts)} texts and notes{more}', _table(heads, rows))


def _losses(bag: Mapping[str, Any]) -> str:
    commands = bag['commands']
    groups = {
        'commands from': commands['by_source'],
        'changed by the limits (ticks)': commands['interventions'],
        'ticks without a frame': bag['not_ready'],
        'dropped': bag['drops'],
    }
    rows = [
        (group, reason, str(count))
        for group, counts in groups.items()
        for reason, count in counts.items()
    ]
    return _table(('', 'what', 'how often'), rows) if rows else '<p>nothing</p>'


# ---- pieces


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    def kind(i: int) -> str:
        return ' class="n"' if numbers and i else ''

    head = ''.join(f'<th{kind(i)}>{_text(name)}</th>' for i, name in enumerate(columns))
    body = ''.join(
        '<tr>' + ''.join(f'<td{kind(i)}>{_text(cell)}</td>' for i, cell in enumerate(row)) + '</tr>'
        for row in rows
    )
    return f'<table><tr>{head}</tr>{body}</table>'


def _pairs_table(pairs: Mapping[str, Any]) -> str:
    return _table(('', ''), [(key, str(value)) for key, value in pairs.items()])


def _details(title: str, content: str) -> str:
    return f'<details><summary>{_text(title)}</summary><div class="wide">{content}</div></details>'


def _image(png: bytes, what: str) -> str:
    data = base64.b64encode(png).decode('ascii')
    return f'<img alt="{_text(what)}" src="data:image/png;base64,{data}">'


def _text(value: Any) -> str:
    return html.escape(str(value))
