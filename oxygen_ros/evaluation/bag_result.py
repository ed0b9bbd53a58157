"""BagResult: everything that is known about one evaluated recording, in memory and on disk.

Owns the files of a recording's folder: `result.json`, written last, so that it says the folder is
complete; `frames.csv`, `texts.csv`, `trace.npz` and the output bag. Knows no model. `Collector`
listens to a replay; the report and the comparison read results back.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from oxygen_ros.actions import ActionChunk
from oxygen_ros.engine.engine import TextUpdate
from oxygen_ros.evaluation.action_score import SHIFTS_NS, ActionScore, Sums
from oxygen_ros.evaluation.bag_source import BagSource
from oxygen_ros.evaluation.output_bag import OutputBag
from oxygen_ros.evaluation.replay import FrameDone, Replay

RESULT_FILE, FRAMES_FILE, TEXTS_FILE = 'result.json', 'frames.csv', 'texts.csv'
TRACE_FILE, OUTPUT_BAG = 'trace.npz', 'output_bag'
TIMES = ('chunk_ms', 'prefill_ms', 'denoise_ms', 'decode_ms')
PLAIN_COLUMNS = (
    'cameras', *TIMES, 'decode_steps', 'tokens', 'error', 'sent_error', 'jump', 'jerk',
)  # fmt: skip
JOINT_COLUMNS = ('error', 'bias', 'action', 'jump')
"""Columns of frames.csv that come once per joint, as NAME:JOINT."""
MAX_NOTICES = 20


@dataclass
class FrameRow:
    """One line of frames.csv; NaN is what could not be measured."""

    frame: int
    stamp_ns: int
    time_s: float  # of the tick, since the start of the recording
    plain: dict[str, float]
    joints: dict[str, np.ndarray]
    sent_errors: list[np.ndarray] = field(default_factory=list)
    jerks: list[np.ndarray] = field(default_factory=list)
    """Of the commands that were sent while this frame's chunk was in force; until `settle`."""

    def settle(self) -> None:
        """Turn what was collected per command into numbers: an hour has 200 000 commands."""
        self.plain['jump'] = _mean(self.joints['jump'])
        self.plain['jerk'] = _rms(self.jerks)
        self.plain['sent_error'] = _mean(np.abs(np.array(self.sent_errors)))
        self.sent_errors, self.jerks = [], []


@dataclass(frozen=True)
class BagResult:
    """A recording's folder, read back."""

    summary: dict[str, Any]
    """result.json."""
    frames: dict[str, np.ndarray]
    """Column -> (frames,); `stamp_ns` is int64, the others float64."""
    texts: list[dict[str, str]]
    trace: dict[str, np.ndarray]

    @property
    def name(self) -> str:
        return str(self.summary['bag'])

    @property
    def failed(self) -> str:
        """Why there is no result; '' if there is."""
        return str(self.summary['failed'])


class Collector:
    """Listens to a replay and writes what it hears; `finish` makes the summary."""

    def __init__(self, source: BagSource, score: ActionScore, bag: OutputBag, name: str) -> None:
        """Begin; `name` is what the recording is called in the run."""
        self._source, self._score, self._bag, self._name = source, score, bag, name
        self._start_ns = source.recording.start_ns
        self._kinds = {task.name: task.kind for task in source.profile.tasks}
        self._rows: list[FrameRow] = []
        self._by_frame: dict[int, FrameRow] = {}
        self._in_force: FrameRow | None = None
        self._texts: list[dict[str, Any]] = []
        self._commands: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._digest = hashlib.sha256()

    @property
    def num_frames(self) -> int:
        return len(self._rows)

    # --- Listener -------------------------------------------------------------------------------

    def on_frame(self, done: FrameDone) -> None:
        chunk = done.chunk
        error, bias = self._score.add_chunk(chunk)
        unknown = np.full(chunk.values.shape[1], math.nan)
        row = FrameRow(
            frame=chunk.frame,
            stamp_ns=chunk.stamp_ns,
            time_s=(done.tick_ns - self._start_ns) / 1e9,
            plain={
                'cameras': len(done.observation.images),
                'chunk_ms': done.chunk_ms,
                'prefill_ms': done.prefill_ms,
                'denoise_ms': done.denoise_ms,
                'decode_ms': done.decode_ms,
                'decode_steps': done.decode_steps,
                'tokens': done.tokens,
                'error': _mean(error),
            },
            joints={
                'error': error,
                'bias': bias,
                'action': chunk.values.mean(axis=0),
                'jump': unknown,
            },
        )
        self._rows.append(row)
        self._by_frame[chunk.frame] = row
        self._digest.update(chunk.stamp_ns.to_bytes(8, 'little', signed=True))
        self._digest.update(chunk.values.tobytes())
        self._totals.update(frames=1, tokens=done.tokens, decode_steps=done.decode_steps)
        self._bag.write_frame(done, self._stats(done))

    def _stats(self, done: FrameDone) -> dict[str, float]:
        frames = self._totals['frames']
        hz = frames / max((done.tick_ns - self._start_ns) / 1e9, 1e-9)
        steps = max(done.decode_steps, 1)
        return {
            'chunk_hz': hz,
            'action_hz': hz * len(done.chunk.values),
            'tokens_per_s': 1e3 * done.tokens / done.decode_ms if done.decode_ms else 0.0,
            'prefill_ms': done.prefill_ms,
            'denoise_ms': done.denoise_ms,
            'decode_step_ms': done.decode_ms / steps,
            'observation_age_ms': (done.tick_ns - done.chunk.time_ns) / 1e6,
            'frames': frames,
            'prefills': frames,
            'chunks': frames,
            'tokens': self._totals['tokens'],
        }

    def on_takeover(self, chunk: ActionChunk, before: np.ndarray, after: np.ndarray) -> None:
        row = self._by_frame.pop(chunk.frame)
        if self._in_force is not None:
            self._in_force.settle()
        self._in_force = row
        if np.isfinite(before).all() and np.isfinite(after).all():
            row.joints['jump'] = self._score.add_jump(before, after)

    def on_command(self, time_ns: int, row: np.ndarray | None, source: str) -> None:
        self._commands[source] += 1
        if row is None:
            self._score.break_commands()
            return
        error, jerk = self._score.add_command(time_ns, row, from_chunk=source == 'chunk')
        if self._in_force is not None and source == 'chunk':
            self._in_force.sent_errors.append(error)
            if jerk is not None:
                self._in_force.jerks.append(jerk)
        self._bag.write_command(time_ns, row)

    def on_text(self, time_ns: int, update: TextUpdate) -> None:
        self._bag.write_text(time_ns, update)
        if update.reason is None:
            return
        self._digest.update(f'{update.task} {update.stamp_ns} {update.text}'.encode())
        self._texts.append(
            {
                'time_s': f'{(update.stamp_ns - self._start_ns) / 1e9:.3f}',
                'stamp_ns': update.stamp_ns,
                'frame': update.frame,
                'task': update.task,
                'kind': self._kinds[update.task],
                'reason': update.reason.value,
                'num_tokens': update.num_tokens,
                'text': update.text,
            }
        )

    # --- the end --------------------------------------------------------------------------------

    def finish(self, replay: Replay, wall_s: float, folder: Path) -> None:
        """Write everything; the summary last."""
        never_in_force = self._by_frame.values()
        for row in (*never_in_force, *([self._in_force] if self._in_force else [])):
            row.settle()
        joints = self._source.profile.command.names
        _write_frames(folder / FRAMES_FILE, self._rows, joints)
        _write_rows(folder / TEXTS_FILE, TEXT_COLUMNS, self._texts)
        np.savez_compressed(folder / TRACE_FILE, **self._score.trace.arrays(len(joints)))
        write_json(folder / RESULT_FILE, self._summary(replay, wall_s))

    def _summary(self, replay: Replay, wall_s: float) -> dict[str, Any]:
        recording, profile = self._source.recording, self._source.profile
        commands = replay.commands()
        times = {
            name: _quantiles([row.plain[name] for row in self._rows if row.plain[name] > 0])
            for name in TIMES
        }
        decode_ms = sum(row.plain['decode_ms'] for row in self._rows)
        steps = self._totals['decode_steps']
        return {
            'bag': self._name,
            'path': str(recording.path),
            'failed': '',
            'duration_s': recording.duration_s,
            'topics': self._source.roles,
            'remarks': self._source.remarks,
            'joints': list(profile.command.names),
            'row_period_s': 1.0 / profile.action.rate_hz,
            'frames': len(self._rows),
            'ticks': replay.ticks,
            'not_ready': dict(replay.not_ready),
            'chunk_hz': len(self._rows) / recording.duration_s if recording.duration_s else 0.0,
            **self._action_summary(profile.command.names),
            'times': times,
            'decode_step_ms': decode_ms / steps if steps else None,
            'tokens': self._totals['tokens'],
            'tokens_per_s': 1e3 * self._totals['tokens'] / decode_ms if decode_ms else None,
            'ended': dict(Counter(f'{text["task"]} {text["reason"]}' for text in self._texts)),
            'commands': {
                'sent': commands.commands,
                'by_source': dict(self._commands),
                'interventions': {k: n for k, n in commands.interventions.items() if n},
            },
            'drops': replay.drops(),
            'notices': list(replay.notices())[-MAX_NOTICES:],
            'wall_s': wall_s,
            'digest': self._digest.hexdigest(),
        }

    def _action_summary(self, joints: tuple[str, ...]) -> dict[str, Any]:
        score = self._score
        best_ns = score.best_shift_ns()
        curve = [_finite(value) for value in score.swept.mae(axis=1)]
        best = None if best_ns is None else int(np.flatnonzero(best_ns == SHIFTS_NS)[0])
        return {
            'error': _errors(score.aligned, joints),
            'sent_error': _errors(score.sent, joints),
            'shift': {
                'best_ms': None if best_ns is None else best_ns / 1e6,
                'best_mae': None if best is None else curve[best],
                'ms': (SHIFTS_NS / 1e6).tolist(),
                'mae': curve,
            },
            'jump': {
                'mean': _finite(score.jumps.mae(axis=0)),
                'max': _finite(score.max_jump.max(initial=0.0)),
                'per_joint': _named(joints, score.jumps.mae()),
            },
            'jerk': {
                'rms': _finite(score.jerk.rmse(axis=0)),
                'per_joint': _named(joints, score.jerk.rmse()),
            },
        }


TEXT_COLUMNS = ('time_s', 'stamp_ns', 'frame', 'task', 'kind', 'reason', 'num_tokens', 'text')


def write_failure(folder: Path, bag: Path, name: str, reason: str) -> None:
    """Write a result that says why there is none; a resumed run tries the recording again."""
    summary = {'bag': name, 'path': str(bag), 'failed': reason}
    write_json(folder / RESULT_FILE, summary)


def read_result(folder: Path) -> BagResult | None:
    """Read a recording's folder; None if it is not complete."""
    try:
        summary = json.loads((folder / RESULT_FILE).read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return None
    if summary['failed']:
        return BagResult(summary, {}, [], {})
    with (folder / TEXTS_FILE).open(newline='', encoding='utf-8') as file:
        texts = list(csv.DictReader(file))
    with np.load(folder / TRACE_FILE) as trace:
        arrays = dict(trace)
    return BagResult(summary, _read_frames(folder / FRAMES_FILE), texts, arrays)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a whole file or none."""
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    partial = path.with_suffix('.partial')
    partial.write_text(f'{text}\n', encoding='utf-8')
    partial.replace(path)


def _write_frames(path: Path, rows: Iterable[FrameRow], joints: tuple[str, ...]) -> None:
    columns = ('frame', 'stamp_ns', 'time_s', *PLAIN_COLUMNS)
    per_joint = tuple(f'{name}:{joint}' for name in JOINT_COLUMNS for joint in joints)
    lines = []
    for row in rows:
        values = np.concatenate([row.joints[name] for name in JOINT_COLUMNS])
        line: dict[str, Any] = {name: _cell(row.plain[name]) for name in PLAIN_COLUMNS}
        line |= {'frame': row.frame, 'stamp_ns': row.stamp_ns, 'time_s': f'{row.time_s:.6f}'}
        line |= {name: _cell(value) for name, value in zip(per_joint, values, strict=True)}
        lines.append(line)
    _write_rows(path, (*columns, *per_joint), lines)


def _write_rows(path: Path, columns: tuple[str, ...], rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open('w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, columns, lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)


def _read_frames(path: Path) -> dict[str, np.ndarray]:
    with path.open(newline='', encoding='utf-8') as file:
        reader = csv.reader(file)
        columns = next(reader)
        rows = list(reader)
    found: dict[str, np.ndarray] = {}
    for number, name in enumerate(columns):
        cells = [row[number] for row in rows]
        if name in ('frame', 'stamp_ns'):
            found[name] = np.array([int(cell) for cell in cells], np.int64)
        else:
            found[name] = np.array([float(cell) if cell else math.nan for cell in cells])
    return found


def _cell(value: float) -> str:
    """A number with the digits that a difference of runs needs; empty for NaN."""
    return f'{float(value):.9g}' if math.isfinite(value) else ''


def _errors(sums: Sums, joints: tuple[str, ...]) -> dict[str, Any] | None:
    """Errors in numbers for JSON; None where nothing could be compared."""
    if not sums.count.any():
        return None
    steps = tuple(range(sums.count.ndim - 1))
    axes = steps or None
    per_joint = {
        joint: {'mae': _finite(mae), 'rmse': _finite(rmse), 'bias': _finite(bias)}
        for joint, mae, rmse, bias in zip(
            joints, sums.mae(axes), sums.rmse(axes), sums.bias(axes), strict=True
        )
    }
    everything = tuple(range(sums.count.ndim))
    found: dict[str, Any] = {
        'mae': _finite(sums.mae(everything)),
        'rmse': _finite(sums.rmse(everything)),
        'compared': int(sums.count.sum()),
        'per_joint': per_joint,
    }
    if steps:
        found['per_step_mae'] = [_finite(value) for value in sums.mae(axis=1)]
        found['per_step_joint_mae'] = [[_finite(v) for v in row] for row in sums.mae()]
    return found


def _named(joints: tuple[str, ...], values: np.ndarray) -> dict[str, float | None]:
    return {joint: _finite(value) for joint, value in zip(joints, values, strict=True)}


def _quantiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p95, largest = np.percentile(values, [50, 95, 100])
    mean = float(np.mean(values))
    return {'mean': mean, 'p50': float(p50), 'p95': float(p95), 'max': float(largest)}


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _rms(rows: list[np.ndarray]) -> float:
    return float(np.sqrt(np.mean(np.square(rows)))) if rows else math.nan


def _finite(value: Any) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return float(value) if math.isfinite(value) else None
