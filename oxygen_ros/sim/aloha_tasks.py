"""gym-aloha's tasks: what lies on the table, where a seed puts it, and how far it has come.

Plain data and pure functions of who touches whom; physics and pictures are `aloha_world.py`'s.
Source: gym_aloha tasks/sim.py `get_reward` and utils.py `sample_*_pose` (gym-aloha 0.1.5).
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

import numpy as np

LEFT, RIGHT = 'vx300s_left/10_left_gripper_finger', 'vx300s_right/10_right_gripper_finger'
CUBE, TABLE = 'red_box', 'table'
PEG, PIN = 'red_peg', 'pin'
SOCKET = ('socket-1', 'socket-2', 'socket-3', 'socket-4')

Contacts = Set[frozenset[str]]
"""Pairs of the names of two bodies that touch."""


@dataclass(frozen=True)
class Task:
    scene: str
    """File beside gym-aloha's other assets."""
    corners: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]
    """Of each object, the lowest and the highest place (x, y, z) [m] where a seed puts it."""
    stages: tuple[str, ...]
    """By reward; the last is success."""
    reward: Callable[[Contacts], int]

    def places(self, seed: int) -> np.ndarray:
        """Return (objects, 7): position [m] and upright quaternion, those of gym-aloha's seed."""
        # The generator is gym-aloha's, so that episodes can be compared seed by seed.
        random = np.random.RandomState(seed)
        return np.array([[*random.uniform(*corner), 1.0, 0.0, 0.0, 0.0] for corner in self.corners])


def _touch(contacts: Contacts, one: str, *others: str) -> bool:
    return any(frozenset((one, other)) in contacts for other in others)


def _transfer(contacts: Contacts) -> int:
    lifted = not _touch(contacts, CUBE, TABLE)
    if _touch(contacts, CUBE, LEFT):
        return 3 + lifted
    if _touch(contacts, CUBE, RIGHT):
        return 1 + lifted
    return 0


def _insertion(contacts: Contacts) -> int:
    lifted = not _touch(contacts, PEG, TABLE) and not _touch(contacts, TABLE, *SOCKET)
    if _touch(contacts, PEG, PIN):
        return 4
    if lifted and _touch(contacts, PEG, *SOCKET):
        return 3
    if _touch(contacts, PEG, RIGHT) and _touch(contacts, LEFT, *SOCKET):
        return 1 + lifted
    return 0


TASKS = {
    'transfer': Task(
        scene='bimanual_viperx_transfer_cube.xml',
        corners=(((0.0, 0.4, 0.05), (0.2, 0.6, 0.05)),),
        stages=('untouched', 'touched', 'lifted', 'handed over', 'transferred'),
        reward=_transfer,
    ),
    'insertion': Task(
        scene='bimanual_viperx_insertion.xml',
        corners=(((0.1, 0.4, 0.05), (0.2, 0.6, 0.05)), ((-0.2, 0.4, 0.05), (-0.1, 0.6, 0.05))),
        stages=('untouched', 'both touched', 'both lifted', 'put together', 'inserted'),
        reward=_insertion,
    ),
}
