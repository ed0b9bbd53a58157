"""Pictures of a run at the table, with what was asked, said and noted: a contact sheet and a GIF.

Owns what is kept of a run and the drawing. On the contact sheet every picture is the one that the
text below it was written about; in the film the text is the newest one of that moment, as one sees
it live. Knows no topics; `tabletop_stage.py` fills it.
"""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use('Agg')  # no window, also where there is a display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

from oxygen_ros.evaluation.episode_report import Verdict
from oxygen_ros.evaluation.plots import GREEN, GREY, RED

# A text ends within a second or two after its picture, and cameras take some ten per second.
NUM_RECENT = 50
MAX_FRAMES = 400
"""Kept of a run; of a longer one every second, every fourth and so on."""
MAX_MOMENTS = 1000
NUM_COLUMNS, NUM_ROWS = 4, 3
SIDE, MARGIN, HEADING, CAPTION = 3.5, 0.15, 0.35, 1.25  # of the contact sheet [inch]
CELL_WIDTH, CELL_HEIGHT = SIDE + 2 * MARGIN, HEADING + SIDE + CAPTION
CAPTION_CHARS = 52
MAX_GIF_BYTES = 2_000_000
GIF_FRAMES = 150
GIF_SIDE, GIF_STRIP, GIF_FONT = 288, 42, 13  # pixels
GIF_COLOURS = 128


@dataclass(frozen=True)
class Caption:
    """When a picture came, and what was asked of the robot then."""

    time_s: float
    instruction: str
    touched: bool  # the block that the instruction names


@dataclass(frozen=True)
class Shot:
    """One picture and the language that belongs to it."""

    stamp_ns: int
    picture: np.ndarray  # uint8 (h, w, 3) RGB
    caption: Caption
    text: Verdict | None
    note: Verdict | None


class Film:
    """Filled by one thread; saved when nothing is added any more."""

    def __init__(self) -> None:
        self._recent: deque[Shot] = deque(maxlen=NUM_RECENT)
        self._frames: list[Shot] = []
        self._every = 1
        self._num_added = 0
        self._moments: deque[Shot] = deque(maxlen=MAX_MOMENTS)
        self._newest: dict[str, Verdict] = {}

    def add(self, stamp_ns: int, picture: np.ndarray, caption: Caption) -> None:
        """Take a picture, uint8 (h, w, 3) RGB."""
        said = self._newest.get('text'), self._newest.get('memory')
        shot = Shot(stamp_ns, picture, caption, *said)
        self._recent.append(shot)
        if self._num_added % self._every == 0:
            self._frames.append(shot)
        self._num_added += 1
        if len(self._frames) > MAX_FRAMES:
            del self._frames[1::2]
            self._every *= 2

    def say(self, verdict: Verdict) -> None:
        """Take a complete text or note; a text is put below the picture that it is about."""
        self._newest[verdict.kind] = verdict
        if verdict.kind != 'text':
            return
        # The text's stamp is its newest camera's; this one may have been a picture behind.
        about = [shot for shot in self._recent if shot.stamp_ns <= verdict.stamp_ns]
        if about:
            shot, note = about[-1], self._newest.get('memory')
            self._moments.append(Shot(shot.stamp_ns, shot.picture, shot.caption, verdict, note))

    def save(self, sheet_path: Path, gif_path: Path) -> list[Path]:
        """Write what there is of both; return the files written."""
        written = []
        if self._moments:
            save_contact_sheet(sheet_path, evenly(self._moments, NUM_COLUMNS * NUM_ROWS))
            written.append(sheet_path)
        if len(self._frames) > 1:
            save_gif(gif_path, evenly(self._frames, GIF_FRAMES))
            written.append(gif_path)
        return written


def evenly(shots: Sequence[Shot], most: int) -> list[Shot]:
    """Return at most so many, the first and the last among them, evenly over time."""
    numbers = np.linspace(0, len(shots) - 1, min(most, len(shots))).round().astype(int)
    return [shots[number] for number in numbers]


# ---- contact sheet


def save_contact_sheet(path: Path, shots: Sequence[Shot]) -> None:
    """Draw pictures in rows, each with its moment, instruction, text and note."""
    columns = min(NUM_COLUMNS, len(shots))
    rows = -(-len(shots) // columns)
    width, height = columns * CELL_WIDTH, rows * CELL_HEIGHT  # [inch]
    figure = plt.figure(figsize=(width, height))
    for number, shot in enumerate(shots):
        row, column = divmod(number, columns)
        left = column * CELL_WIDTH + MARGIN
        bottom = height - row * CELL_HEIGHT - HEADING - SIDE
        axes = figure.add_axes((left / width, bottom / height, SIDE / width, SIDE / height))
        _draw_shot(axes, shot)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_shot(axes: Any, shot: Shot) -> None:
    axes.axis('off')
    axes.imshow(shot.picture, interpolation='lanczos')
    caption = shot.caption
    done = ' — touched' if caption.touched else ''
    heading = f'{caption.time_s:.1f} s: {caption.instruction}{done}'
    axes.set_title(heading, loc='left', fontsize=11, fontweight='bold', pad=5)
    lines = [*_verdict_lines('says', shot.text), *_verdict_lines('notes', shot.note)]
    for number, (line, color) in enumerate(lines):
        axes.annotate(
            line,
            (0, 0),
            xytext=(0, -13 - 13 * number),
            xycoords='axes fraction',
            textcoords='offset points',
            fontsize=10,
            color=color,
        )


def _verdict_lines(verb: str, verdict: Verdict | None) -> list[tuple[str, str]]:
    """Wrapped lines with their colours: green for what is true, red for what is not, and why."""
    if verdict is None:
        return [(f'{verb}: nothing yet', GREY)]
    mark, color = ('✓', GREEN) if verdict.exact else ('✗', RED)
    said = textwrap.wrap(f'{mark} {verb}: {verdict.text}', CAPTION_CHARS)
    lines = [(line, color) for line in said]
    if not verdict.exact:
        lines += [(line, GREY) for line in textwrap.wrap(f'truth: {verdict.truth}', CAPTION_CHARS)]
    return lines


# ---- film


def save_gif(path: Path, shots: Sequence[Shot]) -> None:
    """Write an animation at the pace of the run, with fewer frames until it is small enough."""
    while True:
        _write_gif(path, shots)
        if path.stat().st_size <= MAX_GIF_BYTES or len(shots) < 4:
            return
        shots = evenly(shots, len(shots) // 2)


def _write_gif(path: Path, shots: Sequence[Shot]) -> None:
    font = ImageFont.truetype(findfont('DejaVu Sans'), GIF_FONT)
    frames = [_gif_frame(shot, font) for shot in shots]
    # One palette for all: colours do not flicker, and what stands still costs nothing.
    # An octree keeps the colours of small things; by their median, blocks turn grey.
    palette = frames[len(frames) // 2].quantize(GIF_COLOURS, method=Image.Quantize.FASTOCTREE)
    indexed = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    spans_s = np.diff([shot.caption.time_s for shot in shots])
    indexed[0].save(
        path,
        save_all=True,
        append_images=indexed[1:],
        duration=max(20, round(1e3 * float(spans_s.mean()))),
        loop=0,
    )


def _gif_frame(shot: Shot, font: Any) -> Image.Image:
    frame = Image.new('RGB', (GIF_SIDE, GIF_SIDE + GIF_STRIP), 'white')
    picture = Image.fromarray(shot.picture)
    frame.paste(picture.resize((GIF_SIDE, GIF_SIDE), Image.Resampling.LANCZOS))
    draw = ImageDraw.Draw(frame)
    caption = shot.caption
    done = '✓ ' if caption.touched else ''
    draw.text((6, GIF_SIDE + 4), f'{done}{caption.instruction}', fill='black', font=font)
    if shot.text is not None:
        color = GREEN if shot.text.exact else RED
        draw.text((6, GIF_SIDE + 22), shot.text.text or '', fill=color, font=font)
    return frame
