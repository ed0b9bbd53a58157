"""What the frames of a benchmark bring: pictures, requests for text, and what the texts say.

The same for every setting that is compared. Knows nothing of engines' policies or of measuring;
`bench_frame.py` is its only user.

Random weights write texts that repeat from frame to frame, so every draft would be right. Here the
texts are dictated instead: passes run as ever and are paid for, and their words are then replaced
by those of a text that differs from the one before by a stated share.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np

from oxygen_ros.engine.model_runner import ModelRunner
from oxygen_ros.engine.scheduler import Scheduler
from oxygen_ros.engine.sequence import Sequence
from oxygen_ros.engine.tasks import LanguageTask
from oxygen_ros.model.config import Pi05Config
from oxygen_ros.model.prompt import ByteTokenizer
from oxygen_ros.observation import Observation

NEVER_NS = 10**18
SHORTEST = 5
"""Tokens of the shortest text of random length, as in the paper's sweep."""
MOST_AT_ONCE = 4
"""Most requests in one frame; at one per frame on average, Poisson asks for more in 0.4 %."""
ARRIVALS = ('uniform', 'poisson', 'random_length')


@dataclass(frozen=True)
class Workload:
    """What a robot's frame looks like, as in the paper's configurations."""

    cameras: int
    horizon: int
    prompt_tokens: int
    action_rate_hz: float


WORKLOADS = {
    'libero': Workload(cameras=2, horizon=10, prompt_tokens=24, action_rate_hz=10.0),
    'droid': Workload(cameras=2, horizon=10, prompt_tokens=48, action_rate_hz=15.0),
    'aloha': Workload(cameras=3, horizon=10, prompt_tokens=72, action_rate_hz=50.0),
}


def observations(
    config: Pi05Config, workload: Workload, cameras: int, seed: int
) -> Iterator[Observation]:
    """Yield frames of a still scene with sensor noise, as a robot at work sees it."""
    generator = np.random.default_rng(seed)
    size = config.vision.image_size
    scene = generator.integers(0, 250, (cameras, size, size, 3), dtype=np.uint8)
    number = 0
    while True:
        noise = generator.integers(0, 6, scene.shape, dtype=np.uint8)
        yield Observation(
            frame=number,
            stamp_ns=number,
            time_ns=number,
            images=dict(zip(config.camera_slots, scene + noise, strict=False)),
            state=np.zeros(8, np.float32),
            instruction='x' * (workload.prompt_tokens - 2),  # with BOS and the newline
        )
        number += 1


class Dictation:
    """How many texts every frame asks for, and what they say."""

    def __init__(self, arrivals: str, max_tokens: int, change: float, seed: int) -> None:
        """Fix the texts of a run.

        Args:
            arrivals: 'uniform': a text of `max_tokens` in every frame; 'poisson': such texts, one
                per frame on average; 'random_length': one in every frame, of 5 to `max_tokens`;
                'none': no text.
            change: share of the tokens that differ from the text before, 0 to 1.
        """
        at_once = {'none': 0, 'poisson': MOST_AT_ONCE}.get(arrivals, 1)
        self.tasks = [
            LanguageTask(f'text_{index}', (), 1, max_tokens, NEVER_NS, 0, False)
            for index in range(at_once)
        ]
        self._arrivals, self._max_tokens, self._change = arrivals, max_tokens, change
        self._generator = np.random.default_rng(seed)
        self._newest = {task.name: self._new_words() for task in self.tasks}
        self._frames: list[dict[str, list[int]]] = []
        """Of every frame so far, its texts by task."""

    def texts(self, frame: int) -> dict[str, list[int]]:
        """Return the tokens of a frame's texts by task; a shorter text ends with the end token."""
        while len(self._frames) <= frame:
            count = self._generator.poisson(1.0) if self._arrivals == 'poisson' else 1
            due = self.tasks[:count]
            self._frames.append({task.name: self._next_text(task.name) for task in due})
        return self._frames[frame]

    def _next_text(self, task: str) -> list[int]:
        changed = self._generator.random(self._max_tokens) < self._change
        self._newest[task] = np.where(changed, self._new_words(), self._newest[task])
        tokens: list[int] = self._newest[task].tolist()
        if self._arrivals != 'random_length':
            return tokens
        length = self._generator.integers(min(SHORTEST, len(tokens)), len(tokens), endpoint=True)
        return [*tokens[: length - 1], ByteTokenizer.eos_id] if length < len(tokens) else tokens

    def _new_words(self) -> np.ndarray:
        first, end = ByteTokenizer.bos_id + 1, ByteTokenizer.vocab_size
        return self._generator.integers(first, end, self._max_tokens)


class DictatedScheduler(Scheduler):
    """A scheduler whose frames owe what the dictation asks for."""

    def __init__(self, dictation: Dictation, **options: int) -> None:
        super().__init__(dictation.tasks, eos_id=ByteTokenizer.eos_id, **options)
        self._dictation = dictation

    def due(self, number: int) -> list[LanguageTask]:
        texts = self._dictation.texts(number)
        return [task for task in self.tasks if task.name in texts]


class DictatedRunner:
    """A runner whose passes are run and paid for, and whose words are the dictation's."""

    def __init__(self, runner: ModelRunner, dictation: Dictation) -> None:
        self._runner = runner
        self._dictation = dictation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    @property
    def kind(self) -> str:
        """What `make_runner` chose; on CUDA a `ModelRunner` means that graphs are off."""
        return type(self._runner).__name__

    def decode(self, batch: SequenceOf[Sequence]) -> list[list[int]]:
        self._runner.decode(batch)
        return [self._following(sequence) for sequence in batch]

    def _following(self, sequence: Sequence) -> list[int]:
        text = self._dictation.texts(sequence.frame.number)[sequence.task.name]
        done = len(sequence.tokens)
        return text[done : done + 1 + len(sequence.draft)]
