"""The scripted expert: how a finger gets onto a block, as a pure function of where it is.

Owns the motion that the policy is taught. Markov in the fingertip alone, so any state of the arm
has a right answer and a chunk is computed without physics. Knows no picture, no ROS, no tensor.
Called by the data collection and by tests of the world.
"""

from __future__ import annotations

import numpy as np

from oxygen_ros.sim.world import CONTROL_HZ, joints_to_tip, tip_to_joints

SPEED_M_S, CLIMB_M_S = 0.30, 0.15
"""Sideways, and up or down; slow enough to watch."""
APPROACH_S = 0.35
"""Time constant of the approach. Within speed limits a chunk is linear in where block and finger
are, which a small network learns in a fraction of the steps that a constant speed takes it. A chunk
lasts three of them: it names the block itself, so an error in it is not multiplied on the way."""
SETTLE_S = 0.25
"""Time constant of the height."""
TOUCH_HEIGHT_M = 0.074
HOVER_HEIGHT_M = 0.13
DESCENT = 0.6
"""Height per distance of the way down."""
LANDING_M = 0.02
"""Over the block the finger is down already: whoever misses its middle still touches it."""


def next_tip(tip: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Return the fingertip (..., 3) one control period later, on its way to blocks (..., 2).

    It rises where it would scrape over other blocks, crosses at hover height, and glides down.
    """
    yaw, radius, height = np.moveaxis(tip, -1, 0)
    block_yaw, block_radius = np.moveaxis(block, -1, 0)
    arc = 0.5 * (radius + block_radius) * (block_yaw - yaw)
    distance = np.hypot(arc, block_radius - radius)

    wanted = TOUCH_HEIGHT_M + DESCENT * np.maximum(distance - LANDING_M, 0.0)
    wanted = np.minimum(wanted, HOVER_HEIGHT_M)
    climb = np.clip((wanted - height) / SETTLE_S, -CLIMB_M_S, CLIMB_M_S)

    away = np.clip(distance / 0.04, 0.0, 1.0)
    clear = np.clip((height - 0.07) / 0.02, 0.1, 1.0)
    speed = np.minimum(SPEED_M_S, distance / APPROACH_S) * (1 - away * (1 - clear))
    share = speed / CONTROL_HZ / np.maximum(distance, 1e-6)
    return np.stack(
        [
            yaw + share * (block_yaw - yaw),
            radius + share * (block_radius - radius),
            height + climb / CONTROL_HZ,
        ],
        axis=-1,
    )


def expert_chunk(joints: np.ndarray, blocks: np.ndarray, horizon: int) -> np.ndarray:
    """Return (n, horizon, 4) joint targets from joints (4,) to each of the blocks (n, 2).

    Rows are one control period apart; row 0 is the target of the period that begins now.
    """
    tip = np.broadcast_to(joints_to_tip(joints), (len(blocks), 3))
    rows = []
    for _ in range(horizon):
        tip = next_tip(tip, blocks)
        rows.append(tip_to_joints(tip))
    return np.stack(rows, axis=1)
