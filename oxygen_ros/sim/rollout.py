"""Lets a trained policy play at the table, in one process: the ordinary Engine in a plain loop.

Owns the loop look, think, act, and the bookkeeping of success and of exact texts. Knows neither ROS
nor tensors. Called by `train.py`, to record moments for DAgger and to measure what was trained; the
same episodes through the live graph are the business of `evaluation/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from oxygen_ros.actions import ActionChunk
from oxygen_ros.engine.engine import NO_DEADLINE_NS, TextUpdate
from oxygen_ros.engine.factory import EngineOptions, build_engine
from oxygen_ros.observation import Observation
from oxygen_ros.profile import RobotProfile
from oxygen_ros.sim.dataset import Recorder
from oxygen_ros.sim.world import CAMERAS, COLOURS, CONTROL_HZ, INSTRUCTIONS, TabletopWorld

LIMIT_S = 12.0
"""An episode without success ends here."""
EXECUTED_ROWS = 5
PERIOD_NS = 10**9 // CONTROL_HZ


class Pilot:
    """A trained policy that answers one look with a chunk and all texts."""

    def __init__(self, profile: RobotProfile, checkpoint: Path) -> None:
        """Load the checkpoint by the ordinary loader; every task is due on every look."""
        always = tuple(replace(task, period_frames=1) for task in profile.tasks)
        self._slots = [camera.slot for camera in profile.cameras]
        self._chunk = np.empty(0)
        self._texts: dict[str, str] = {}
        self._frame = 0
        self._engine = build_engine(
            replace(profile, tasks=always),
            EngineOptions(checkpoint=str(checkpoint)),
            on_chunk=self._take_chunk,
            on_text=self._take_text,
        )

    def look(
        self, world: TabletopWorld, instruction: str, cameras: Sequence[str], stamp_ns: int
    ) -> tuple[np.ndarray, dict[str, str]]:
        """Return the chunk (horizon, 4) and the text of each task; the stamp fixes the noise."""
        slots = zip(CAMERAS, self._slots, strict=True)
        observation = Observation(
            frame=self._frame,
            stamp_ns=stamp_ns,
            time_ns=stamp_ns,
            images={slot: world.render(name) for name, slot in slots if name in cameras},
            state=world.joint_positions().astype(np.float32),
            instruction=instruction,
        )
        self._frame += 1
        self._engine.step(observation, NO_DEADLINE_NS)
        return self._chunk, dict(self._texts)

    def _take_chunk(self, chunk: ActionChunk) -> None:
        self._chunk = chunk.values

    def _take_text(self, update: TextUpdate) -> None:
        self._texts[update.task] = update.text


@dataclass
class Score:
    """Counts of an evaluation: (right, of how many)."""

    success: list[bool] = field(default_factory=list)
    narration: list[bool] = field(default_factory=list)
    memory: list[bool] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)


def wilson(hits: Sequence[bool]) -> tuple[float, float, float]:
    """Return a rate and its 95 % interval (Wilson 1927)."""
    n, z = len(hits), 1.959964
    if not n:
        return 0.0, 0.0, 1.0
    rate = sum(hits) / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return rate, max(0.0, centre - half), min(1.0, centre + half)


def evaluate(
    pilot: Pilot,
    world: TabletopWorld,
    seeds: Sequence[int],
    *,
    cameras: Sequence[str] = CAMERAS,
    mislead: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> Score:
    """Play one episode per seed and score it against the simulator's truth.

    `mislead` gives the policy a random instruction and still scores the seed's own: a policy that
    ignores its instruction would not notice, one that obeys succeeds in a third.
    """
    score = Score()
    for seed in seeds:
        world.reset(seed)
        rng = np.random.default_rng((seed, 1))
        phrase = INSTRUCTIONS[rng.integers(len(INSTRUCTIONS))]
        goal, given = (COLOURS[i] for i in rng.integers(len(COLOURS), size=2))
        _play(pilot, world, seed, phrase.format(given if mislead else goal), goal, cameras, score)
        progress()
    return score


def _play(
    pilot: Pilot,
    world: TabletopWorld,
    seed: int,
    given: str,
    goal: str,
    cameras: Sequence[str],
    score: Score,
) -> None:
    judged = f'touch the {goal} block'
    while world.time_s < LIMIT_S and not world.succeeded(judged):
        stamp_ns = seed * 10**12 + round(world.time_s * 1e9)
        chunk, texts = pilot.look(world, given, cameras, stamp_ns)
        score.narration.append(texts.get('text') == world.narration(given))
        score.memory.append(texts.get('memory') == world.memory())
        for row in chunk[:EXECUTED_ROWS]:
            world.step(row)
    score.success.append(world.succeeded(judged))
    score.durations_s.append(world.time_s)


def record_on_policy(
    pilot: Pilot,
    world: TabletopWorld,
    recorder: Recorder,
    num_moments: int,
    rng: np.random.Generator,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Record `num_moments` states that the policy itself gets into: the DAgger frames.

    Two instructions in a row per layout, one to six rows per look, now and then a lost camera.
    """
    while len(recorder) < num_moments:
        world.reset(int(rng.integers(2**31, 2**32)))  # evaluation seeds are smaller
        for colour in rng.permutation(COLOURS)[:2]:
            instruction = INSTRUCTIONS[rng.integers(len(INSTRUCTIONS))].format(colour)
            cameras = (CAMERAS, CAMERAS, CAMERAS[:1], CAMERAS[1:])[rng.integers(4)]
            world.clear_touches()
            until_s = world.time_s + LIMIT_S
            while world.time_s < until_s and not world.succeeded(instruction):
                if len(recorder) == num_moments:
                    return
                recorder.record()
                progress()
                stamp_ns = int(rng.integers(2**62))
                chunk, _ = pilot.look(world, instruction, cameras, stamp_ns)
                for row in chunk[: rng.integers(1, 7)]:
                    world.step(row)
