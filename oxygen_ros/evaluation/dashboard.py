"""What the demo shows: a live table on a terminal, plain lines elsewhere, and the last summary.

Owns the words and the layout. Knows no topic and no process, only `Measurements`; `demo.py` calls
it a few times per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from oxygen_ros.evaluation.measurements import Measurements
from oxygen_ros.evaluation.table_score import Attempt, TableScore

MAX_TEXT_CHARS = 240
MAX_ATTEMPTS = 6
KINDS = {'text': 'text', 'memory': 'notes'}
"""Kinds of language tasks, and what people call their output."""


@dataclass(frozen=True)
class Setting:
    """What the numbers were measured on: it stands above every one of them."""

    profile: str
    preset: str
    device: str
    cores: int
    source: str  # of the pictures
    random_weights: bool
    due_hz: float  # commands, as the profile wants them
    seconds: float

    @property
    def title(self) -> str:
        weights = 'random weights' if self.random_weights else 'checkpoint'
        return (
            f'profile {self.profile}, model {self.preset} ({weights}), device {self.device}, '
            f'{self.cores} CPU cores'
        )

    @property
    def about_text(self) -> str:
        """One honest line about what the language below is worth; '' if it is worth something."""
        if self.random_weights:
            return 'random weights: the text is noise; a trained model comes with a checkpoint'
        return ''


def printable(text: str) -> str:
    """Escape what would move the cursor, ring the bell or show as nothing."""
    return ''.join(
        c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in text
    )


def live_view(
    setting: Setting, seen: Measurements, score: TableScore | None = None
) -> RenderableType:
    """Everything at a glance; as high at the end as at the start, so that nothing jumps."""
    language = [_text_panel(seen, score), _notes_panel(seen, score)]
    if score is not None:
        language.insert(0, _touched(seen, score))
    if setting.about_text:
        language.insert(0, Text(setting.about_text, style='yellow'))
    return Panel(
        Group(
            Text(setting.title, style='dim'),
            Text(f'pictures: {printable(setting.source)}', style='dim'),
            _time_bar(setting, seen),
            _numbers(setting, seen),
            _labelled('instruction', printable(seen.instruction) or '(none)', 'bold'),
            *language,
        ),
        title='[bold]oxygen_ros demo[/bold]',
        subtitle='Ctrl-C ends it',
    )


def plain_line(setting: Setting, seen: Measurements, score: TableScore | None = None) -> str:
    """The same in one line, for logs."""
    stats = seen.stats
    if stats is None:
        return f'{seen.elapsed_s:5.1f} s  no statistics yet'
    return (
        f'{seen.elapsed_s:5.1f} s  commands {seen.command_hz():.0f}/{setting.due_hz:g} Hz  '
        f'late p99 {stats.lateness_p99_ms:.1f} ms  misses {stats.misses}  '
        f'chunks {stats.chunk_hz:.1f} Hz  {stats.tokens_per_s:.0f} tokens/s  '
        f'texts {seen.num_texts}  notes {seen.num_notes}  drops {stats.drops}'
        f'{"" if score is None else "  " + _score_in_short(seen, score)}'
    )


def summary(
    setting: Setting, seen: Measurements, score: TableScore | None = None
) -> RenderableType:
    """The numbers over the whole run, of which there is at least one sample."""
    table = Table(show_header=False)
    table.add_column(style='cyan', no_wrap=True)
    table.add_column()
    rows = summary_rows(setting, seen)
    if score is not None:
        # What was cut off by the end of the run is not a failure.
        rows += score_rows(score, min(seen.elapsed_s, setting.seconds))
    for name, value in rows:
        table.add_row(name, printable(value))
    return Group(Text(f'Summary: {setting.title}', style='bold'), table)


def summary_rows(setting: Setting, seen: Measurements) -> list[tuple[str, str]]:
    first, last = seen.samples[0], seen.samples[-1]
    duration_s = last.time_s - first.time_s
    mean_hz = (last.num_commands - first.num_commands) / duration_s if duration_s else 0.0
    stats = last.stats
    return [
        ('measured for', f'{duration_s:.1f} s'),
        (
            'commands',
            f'{last.num_commands} received, {mean_hz:.1f} Hz on average, {setting.due_hz:g} Hz due',
        ),
        ('lateness', f'{_lateness(stats)}, {stats.misses} misses'),
        (
            'frames since the start',
            f'{stats.frames}, prefills {stats.prefills}, chunks {stats.chunks}',
        ),
        ('without a fresh action', f'{stats.fallback_commands} of {stats.commands} commands'),
        ('newest times', _times(stats)),
        (
            'language',
            f'{seen.num_texts} texts in {seen.num_text_messages} messages, {seen.num_notes} notes, '
            f'{stats.tokens} tokens',
        ),
        ('drops', _drops(stats)),
    ]


def score_rows(score: TableScore, until_s: float) -> list[tuple[str, str]]:
    """What the table itself says of a run that ended then."""
    finished = score.finished(until_s)
    rows = [('instructions', f'{len(score.touches_s)} of {len(finished)} fulfilled')]
    rows += [('', _attempt(attempt)) for attempt in finished]
    rows += [
        (f'{name} exact', f'{_hits(score, kind)}, as the table sees its picture')
        for kind, name in KINDS.items()
    ]
    if score.num_not_compared:
        rows.append(('not compared', f'{score.num_not_compared}, of a moment between two tasks'))
    return rows


# ---- pieces


def _time_bar(setting: Setting, seen: Measurements) -> RenderableType:
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column(ratio=1)
    row.add_column(justify='right', width=16)
    elapsed_s = min(seen.elapsed_s, setting.seconds)
    row.add_row(
        ProgressBar(total=setting.seconds, completed=elapsed_s),
        f'{elapsed_s:.0f} of {setting.seconds:g} s',
    )
    return row


def _numbers(setting: Setting, seen: Measurements) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style='cyan', no_wrap=True, width=11)
    table.add_column()
    stats = seen.stats
    if stats is None:
        table.add_row('statistics', 'none yet')
        return table
    measured_hz = seen.command_hz()
    style = 'bold green' if measured_hz > 0.9 * setting.due_hz else 'bold red'
    table.add_row(
        'commands',
        Text.assemble(
            (f'{measured_hz:5.1f} Hz measured here', style),
            f'   {stats.command_hz:.1f} Hz says the node, {setting.due_hz:g} Hz are due',
        ),
    )
    table.add_row('lateness', f'{_lateness(stats)}   misses {stats.misses}')
    table.add_row(
        'chunks', f'{stats.chunk_hz:5.1f} Hz   {stats.action_hz:.0f} actions/s   {_times(stats)}'
    )
    table.add_row(
        'language',
        f'{stats.tokens_per_s:5.0f} tokens/s   live sequences {stats.live_sequences}   '
        f'slots {stats.slots_used} of {stats.slots_total}',
    )
    table.add_row('drops', _drops(stats))
    return table


def _lateness(stats: Any) -> str:
    return (
        f'p50 {stats.lateness_p50_ms:.2f}, p99 {stats.lateness_p99_ms:.2f}, '
        f'max {stats.lateness_max_ms:.2f} ms'
    )


def _times(stats: Any) -> str:
    return (
        f'prefill {stats.prefill_ms:.1f}, denoise {stats.denoise_ms:.1f}, '
        f'decode step {stats.decode_step_ms:.1f} ms'
    )


def _drops(stats: Any) -> str:
    reasons = zip(stats.drop_reasons, stats.drop_counts, strict=True)
    return ', '.join(f'{printable(reason)} {count}' for reason, count in reasons) or 'none'


def _text_panel(seen: Measurements, score: TableScore | None) -> RenderableType:
    text = seen.text
    if text is None:
        return _panel(Text('nothing yet', style='dim'), 'text')
    ending = f'ended: {text.reason}' if text.final else 'streaming'
    body = Text(_shortened(text.text), style='' if text.final else 'green')
    title = f'text of frame {text.frame}, {text.num_tokens} tokens, {ending}'
    return _panel(body, title, _verdict('text', score))


def _notes_panel(seen: Measurements, score: TableScore | None) -> RenderableType:
    notes = list(seen.notes)
    if not notes:
        return _panel(Text('nothing yet', style='dim'), 'notes')
    lines = [
        Text.assemble((f'frame {note.frame}: ', 'dim'), _shortened(note.text))
        for note in reversed(notes)
    ]
    return _panel(Group(*lines), f'notes ({seen.num_notes} so far)', _verdict('memory', score))


def _panel(body: RenderableType, title: str, verdict: Text | None = None) -> RenderableType:
    return Panel(body, title=title, title_align='left', subtitle=verdict, subtitle_align='left')


def _touched(seen: Measurements, score: TableScore) -> RenderableType:
    finished = score.finished(seen.elapsed_s)
    told = ', '.join(_in_short(attempt) for attempt in finished[-MAX_ATTEMPTS:])
    return _labelled('touched', f'{len(score.touches_s)} of {len(finished)}   {told}', 'bold')


def _verdict(kind: str, score: TableScore | None) -> Text | None:
    """What the table says of the newest one, and of all so far."""
    if score is None or not score.said[kind]:
        return None
    newest = score.said[kind][-1]
    told = f'{_hits(score, kind)} exact, the newest is'
    if newest.exact:
        return Text(f'{told} right', style='green')
    return Text(f'{told} wrong, truth: {_shortened(newest.truth)}', style='red')


def _score_in_short(seen: Measurements, score: TableScore) -> str:
    instruction = f'“{printable(seen.instruction)}”'
    touched = f'touched {len(score.touches_s)}/{len(score.finished(seen.elapsed_s))}'
    rates = '  '.join(f'{name} right {_hits(score, kind)}' for kind, name in KINDS.items())
    return f'{touched}  {rates}  {instruction}'


def _hits(score: TableScore, kind: str) -> str:
    rate = score.exact(kind)
    return f'{rate.hits} of {rate.total}'


def _in_short(attempt: Attempt) -> str:
    took_s = attempt.took_s
    return f'{attempt.colour} {"not" if took_s is None else f"{took_s:.1f} s"}'


def _attempt(attempt: Attempt) -> str:
    took_s = attempt.took_s
    told = 'not fulfilled' if took_s is None else f'touched after {took_s:.1f} s'
    return f'{attempt.began_s:5.1f} s  {attempt.instruction}: {told}'


def _labelled(label: str, value: str, style: str) -> Text:
    return Text.assemble((f'{label:<13}', 'cyan'), (value, style))


def _shortened(text: str) -> str:
    """The end of a text is what is new in it."""
    shown = printable(text)
    return shown if len(shown) <= MAX_TEXT_CHARS else f'…{shown[-MAX_TEXT_CHARS:]}'
