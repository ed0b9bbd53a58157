"""Annotation: what the robot looks at, and beside it what it was told, says, notes and sends.

Owns the newest of each and the drawing, with OpenCV, in a millisecond or two. Knows no topic and no
message. The frame thread tells it, with single assignments; `node.py` lets it draw in the executor
thread, a few times per second and only while somebody looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import cv2
import numpy as np

from oxygen_ros.engine.engine import TextUpdate
from oxygen_ros.observation import Observation
from oxygen_ros.profile import RobotProfile

PICTURE_HEIGHT = 240
MIN_WIDTH = 480
"""Of the whole: one small camera still leaves room for the words."""
LINE_HEIGHT, MARGIN = 18, 6
MAX_LINES = 2
"""Of one entry; what is longer ends in '...'."""
FONT, SCALE = cv2.FONT_HERSHEY_SIMPLEX, 0.42
BLACK, WHITE, GREY = (0, 0, 0), (235, 235, 235), (150, 150, 150)
GREEN, ORANGE = (90, 200, 110), (255, 150, 50)


class Annotation:
    """The newest observation, text and note of one robot, and the picture of all that."""

    def __init__(self, profile: RobotProfile) -> None:
        self._kinds = {task.name: task.kind for task in profile.tasks}
        self._observation: Observation | None = None
        self._said = {'text': '', 'memory': ''}
        self._misses = 0

    def see(self, observation: Observation) -> None:
        """Take the observation of a frame."""
        self._observation = observation

    def hear(self, update: TextUpdate) -> None:
        """Take news of a text, or a complete note."""
        kind = self._kinds[update.task]
        if kind == 'text' or (update.reason is not None and update.reason.complete):
            self._said[kind] = update.text

    def draw(self, numbers: Mapping[str, Any], source: str, now_ns: int) -> np.ndarray:
        """Return the picture, uint8 (h, w, 3) RGB.

        Args:
            numbers: the newest fields of EngineStats, by name.
            source: where the newest command came from: chunk, hold, home, or silence.
            now_ns: on the control clock.
        """
        observation = self._observation
        pictures = [] if observation is None else [_scaled(p) for p in observation.images.values()]
        empty = np.zeros((PICTURE_HEIGHT, MIN_WIDTH, 3), np.uint8)
        strip = np.hstack(pictures) if pictures else empty
        if (missing := MIN_WIDTH - strip.shape[1]) > 0:
            strip = np.pad(strip, ((0, 0), (0, missing), (0, 0)))
        lines = [
            *_wrapped('told', observation.instruction if observation else '', strip.shape[1]),
            *_wrapped('says', self._said['text'], strip.shape[1]),
            *_wrapped('notes', self._said['memory'], strip.shape[1]),
        ]
        age = f'{(now_ns - observation.time_ns) / 1e9:.2f} s ago' if observation else 'not yet'
        colour, state = self._deadlines(numbers, source)
        # As high whatever is said: a recorder of videos takes pictures of one size.
        num_rows = 3 * MAX_LINES + 2
        panel = np.zeros((num_rows * LINE_HEIGHT + 2 * MARGIN, strip.shape[1], 3), np.uint8)
        for row, (text, shade) in enumerate(lines):
            _write(panel, row, text, shade)
        _write(panel, num_rows - 2, f'frame {age}', GREY)
        _write(panel, num_rows - 1, state, colour)
        return np.vstack([strip, panel])

    def _deadlines(self, numbers: Mapping[str, Any], source: str) -> tuple[tuple[int, ...], str]:
        """How the commands keep their deadlines, and since the last picture whether they did."""
        misses = numbers.get('misses', 0)
        kept, self._misses = source == 'chunk' and misses == self._misses, misses
        state = (
            f'commands {numbers.get("command_hz", 0.0):.1f} Hz from {source}, chunks '
            f'{numbers.get("chunk_hz", 0.0):.1f} Hz, late p99 '
            f'{numbers.get("lateness_p99_ms", 0.0):.2f} ms, {misses} missed'
        )
        return (GREEN if kept else ORANGE), state


def _scaled(picture: np.ndarray) -> np.ndarray:
    height, width, _ = picture.shape
    size = (max(1, round(width * PICTURE_HEIGHT / height)), PICTURE_HEIGHT)
    return np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA))


def _wrapped(label: str, text: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the lines that a text takes, with their colour."""
    line, num_lines = f'{label}:', 1
    room = width - 2 * MARGIN - _width(' ...')
    for word in _plain(text or '-').split():
        if _width(f'{line} {word}') <= room:
            line = f'{line} {word}'
            continue
        if num_lines == MAX_LINES:
            line = f'{line} ...'
            break
        yield line, WHITE
        line, num_lines = f'    {word}', num_lines + 1
    yield line, WHITE


def _plain(text: str) -> str:
    """OpenCV's fonts have ASCII only."""
    return text.encode('ascii', 'replace').decode()


def _width(text: str) -> int:
    (width, _), _ = cv2.getTextSize(text, FONT, SCALE, 1)
    return int(width)


def _write(panel: np.ndarray, row: int, text: str, colour: tuple[int, ...]) -> None:
    at = (MARGIN, MARGIN + (row + 1) * LINE_HEIGHT - 5)
    cv2.putText(panel, text, at, FONT, SCALE, colour, 1, cv2.LINE_AA)
