"""The training data: moments of the table, each with the right answer to every instruction.

Owns how moments are drawn and the numpy file they are kept in. A moment is a layout and an arm, not
a step of an episode, so moments are independent and the expert labels all three instructions at
once. Knows no tensor and no tokenizer. Called by `train.py`, which also records moments that the
policy itself gets into (DAgger, Ross et al. 2011).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from oxygen_ros.model.transforms import delta_actions
from oxygen_ros.sim.expert import TOUCH_HEIGHT_M, expert_chunk, next_tip
from oxygen_ros.sim.world import (
    CAMERAS,
    COLOURS,
    INSTRUCTIONS,
    TabletopWorld,
    random_layout,
    random_tip,
    tip_to_joints,
)

ANYWHERE, ON_THE_WAY = 0.3, 0.55
"""Shares of moments anywhere above the table and on the way to a block; the rest have arrived."""
NOISE_TIP = (0.0, 0.012, 0.008)  # yaw [rad] gets its own, radius and height [m]
NOISE_JOINTS_RAD = (0.06, 0.0, 0.0, 0.05)
MAX_STEPS_ON_THE_WAY, STEPS_TO_ARRIVE = 30, 60


@dataclass(frozen=True)
class Moments:
    """n moments. Colours are in the order of `world.COLOURS`, cameras of `world.CAMERAS`."""

    images: np.ndarray  # (n, cameras, size, size, 3) uint8 RGB
    joints: np.ndarray  # (n, 4) float32 [rad], measured
    chunks: np.ndarray  # (n, colours, horizon, 4) float32 [rad], the expert's joint targets
    points: np.ndarray  # (n, cameras, 4, 2) float32 column and row in [0, 1]: three blocks, the tip
    narrations: np.ndarray  # (n, colours) str
    memories: np.ndarray  # (n,) str

    def __len__(self) -> int:
        return len(self.joints)

    def save(self, folder: Path) -> None:
        """Write one .npy file per field; a folder that exists is complete."""
        unfinished = folder.with_name(folder.name + '.part')
        unfinished.mkdir(parents=True, exist_ok=True)
        for field in fields(self):
            np.save(unfinished / f'{field.name}.npy', getattr(self, field.name))
        unfinished.rename(folder)


def load_moments(folder: Path) -> Moments:
    """Read what `Moments.save` wrote."""
    return Moments(*(np.load(folder / f'{field.name}.npy') for field in fields(Moments)))


def concatenate(parts: Iterable[Moments]) -> Moments:
    """Return all moments of all parts."""
    listed = list(parts)
    return Moments(
        *(np.concatenate([getattr(part, f.name) for part in listed]) for f in fields(Moments))
    )


class Recorder:
    """Collects what the world looks like at chosen moments, with the expert's answers."""

    def __init__(self, world: TabletopWorld, horizon: int) -> None:
        self._world = world
        self._horizon = horizon
        self._rows: list[tuple[object, ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def record(self) -> None:
        """Take the world as it is now."""
        world = self._world
        joints = world.joint_positions()
        marks = np.concatenate([world.tops(), world.tip()[None]])
        self._rows.append(
            (
                np.stack([world.render(camera) for camera in CAMERAS]),
                joints.astype(np.float32),
                expert_chunk(joints, world.blocks, self._horizon).astype(np.float32),
                np.stack([world.project(camera, marks) for camera in CAMERAS]).astype(np.float32),
                [world.narration(INSTRUCTIONS[0].format(colour)) for colour in COLOURS],
                world.memory(),
            )
        )

    def moments(self) -> Moments:
        """Return everything recorded so far."""
        return Moments(*(np.array(column) for column in zip(*self._rows, strict=True)))


def random_moment(world: TabletopWorld, rng: np.random.Generator) -> None:
    """Put the world into a state that a policy may meet on its way, or off it."""
    blocks = random_layout(rng)
    tip = random_tip(rng)
    kind = rng.random()
    if kind < ANYWHERE:
        tip = rng.uniform((-1.25, 0.18, 0.07), (1.25, 0.45, 0.22))
    else:
        goal = blocks[rng.integers(len(blocks))]
        arrived = kind >= ANYWHERE + ON_THE_WAY
        if rng.random() < 0.5:  # the way from another block: it begins with a rise
            tip = np.array([*blocks[rng.integers(len(blocks))], TOUCH_HEIGHT_M])
        steps = STEPS_TO_ARRIVE if arrived else rng.integers(MAX_STEPS_ON_THE_WAY)
        for _ in range(steps):
            tip = next_tip(tip, goal)
    tip = tip + rng.normal(0.0, 1.0, 3) * NOISE_TIP
    tip[2] = max(tip[2], 0.068)  # the finger does not reach into a block
    joints = tip_to_joints(tip) + rng.normal(0.0, 1.0, 4) * NOISE_JOINTS_RAD
    world.place(blocks, joints)


def norm_stats(moments: Moments) -> dict[str, object]:
    """Return openpi's `norm_stats.json` of states and of actions as differences to the state."""
    joints = moments.joints.astype(np.float64)
    deltas = delta_actions(
        moments.chunks.astype(np.float64), joints[:, None], (True,) * joints.shape[1]
    )
    return {
        'norm_stats': {'state': _statistics(joints), 'actions': _statistics(deltas)},
    }


def _statistics(values: np.ndarray) -> dict[str, list[float]]:
    rows = values.reshape(-1, values.shape[-1])
    q01, q99 = np.quantile(rows, (0.01, 0.99), axis=0)
    columns = {'mean': rows.mean(0), 'std': rows.std(0), 'q01': q01, 'q99': q99}
    return {name: [round(float(value), 6) for value in column] for name, column in columns.items()}


def write_norm_stats(moments: Moments, path: Path) -> None:
    """Write `norm_stats.json` where openpi's layout wants it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(norm_stats(moments), indent=2) + '\n', encoding='utf-8')
