"""The annotated picture: what is on it, that it keeps its size, and that it is cheap to have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oxygen_ros.annotated import GREEN, ORANGE, PICTURE_HEIGHT, Annotation
from oxygen_ros.engine.engine import TextUpdate
from oxygen_ros.engine.sequence import FinishReason
from oxygen_ros.observation import Observation
from oxygen_ros.profile import load_profile

CONFIG = Path(__file__).resolve().parents[1] / 'config'
RED = np.zeros((48, 64, 3), np.uint8) + np.array([200, 0, 0], np.uint8)
NUMBERS = {'command_hz': 50.0, 'chunk_hz': 5.0, 'lateness_p99_ms': 0.3, 'misses': 0}


@pytest.fixture
def annotation() -> Annotation:
    return Annotation(load_profile('dummy', CONFIG))


def observation(instruction: str = 'wave', **images: np.ndarray) -> Observation:
    return Observation(1, 0, 0, images or {'base_0_rgb': RED}, np.zeros(6, np.float32), instruction)


def update(task: str, text: str, reason: FinishReason | None = None) -> TextUpdate:
    return TextUpdate(task, 1, 0, text, text, 3, reason)


def draw(annotation: Annotation, source: str = 'chunk', **numbers: Any) -> np.ndarray:
    return annotation.draw(NUMBERS | numbers, source, now_ns=10**8)


def words(annotation: Annotation) -> np.ndarray:
    return draw(annotation)[PICTURE_HEIGHT:]


def has(picture: np.ndarray, colour: tuple[int, int, int]) -> bool:
    return bool((np.abs(picture.astype(int) - colour).sum(axis=2) < 12).any())


def test_before_anything_was_seen_there_is_a_picture_all_the_same(annotation: Annotation) -> None:
    assert annotation.draw({}, 'silence', 0).dtype == np.uint8
    assert draw(annotation).any()


def test_the_cameras_stand_side_by_side_at_one_height(annotation: Annotation) -> None:
    blue = np.zeros((480, 640, 3), np.uint8) + np.array([0, 0, 200], np.uint8)
    annotation.see(observation(base_0_rgb=RED, left_wrist_0_rgb=blue))
    picture = draw(annotation)
    assert picture.shape[1] == 640
    np.testing.assert_array_equal(picture[10, 10], [200, 0, 0])
    np.testing.assert_array_equal(picture[PICTURE_HEIGHT - 10, 630], [0, 0, 200])


def test_instruction_text_and_note_are_written_and_change_the_picture(
    annotation: Annotation,
) -> None:
    annotation.see(observation())
    seen = [words(annotation)]
    for change in (
        lambda: annotation.see(observation('stop')),
        lambda: annotation.hear(update('text', 'moving')),
        lambda: annotation.hear(update('memory', 'a cup', FinishReason.EOS)),
    ):
        change()
        seen.append(words(annotation))
        assert (seen[-1] != seen[-2]).any()


def test_half_a_note_is_not_shown(annotation: Annotation) -> None:
    before = words(annotation)
    annotation.hear(update('memory', 'half'))
    annotation.hear(update('memory', 'half', FinishReason.EXPIRED))
    np.testing.assert_array_equal(words(annotation), before)


@pytest.mark.parametrize('text', ['word ' * 300, 'x' * 900, 'grün → 青い\nnew line\x1b[2J'])
def test_the_size_does_not_depend_on_what_is_said(annotation: Annotation, text: str) -> None:
    annotation.see(observation())
    expected = draw(annotation).shape
    annotation.see(observation(text))
    annotation.hear(update('text', text))
    annotation.hear(update('memory', text, FinishReason.EOS))
    assert draw(annotation).shape == expected


def test_the_deadline_line_is_green_until_commands_are_missed_or_made_up(
    annotation: Annotation,
) -> None:
    draw(annotation)
    assert has(draw(annotation), GREEN)
    assert has(draw(annotation, misses=3), ORANGE)
    assert has(draw(annotation, misses=3), GREEN)  # old misses are no news
    assert has(draw(annotation, 'hold', misses=3), ORANGE)
