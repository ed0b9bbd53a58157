"""EngineOptions: what is chosen per run and not per robot.

Plain data, so that a node whose engine runs in another process need not import torch to name them.
Made by the node and the evaluation, read by `factory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineOptions:
    """The choices; a wrong one is refused by `build_engine`."""

    checkpoint: str = ''
    """safetensors file or directory; empty only if the profile asks for random weights."""
    tokenizer: str = ''
    """SentencePiece model; empty looks beside the checkpoint."""
    openpi_config: str = ''
    """Name of an openpi training config that replaces the profile's `model` and `action.adapter`;
    '' = none."""
    device: str = 'auto'
    dtype: str = 'auto'
    num_slots: int = 8
    max_batch: int = 16
    seed: int = 0
    max_draft: int = 15
    """Most tokens drafted per sequence and decode step; 0 turns drafting off."""
    num_threads: int = 0
    """Of torch on the CPU; 0 = as many as there are cores, less one."""
    execution: str = 'unified'
    """'unified', or for comparison 'shared' or 'isolated' (see `baselines.py`)."""
