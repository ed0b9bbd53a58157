"""The model card of the trained checkpoint: what it is, how it was made, how well it does.

Owns the wording of MODEL_CARD.md and the evaluation numbers beside it (evaluation.json), both
written from what was measured, never by hand. Called by `train.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from oxygen_ros.sim.rollout import EXECUTED_ROWS, LIMIT_S, Score, wilson
from oxygen_ros.sim.world import INSTRUCTIONS, TOUCH_M, TOUCH_S

_CARD = """# The tabletop model

A π0.5 of {parameters:,} parameters (preset `tabletop`) that plays the simulated table of
`oxygen_ros/sim`: it touches the block it is told to, says what it is doing, and notes where the
blocks lie. It is of use for nothing else. Written by `oxygen_train`; not edited by hand.

| file | bytes | sha256 |
|---|---|---|
{files}

## Data

Simulated only. {data}
The expert is scripted (`oxygen_ros/sim/expert.py`); phrasings: {phrasings}.

## Training

{training}
Processor time of one core: {cpu_min:.1f} minutes, without data and evaluation.

## Measured

In one process (`oxygen_ros/sim/rollout.py`), float32 from this bfloat16 file, {steps} denoise
steps, {rows} of {horizon} rows executed per look, unseen layouts, seeds {first} to {last}.
Success: the finger stays within {touch_cm:.0f} cm of the middle of the named block's top for
{touch_s} s within {limit_s:.0f} s, and the arm hits no other block. Texts are compared letter by
letter with the simulator's truth at every look. In brackets: 95 % interval (Wilson).

| setting | success | text | note | mean duration |
|---|---|---|---|---|
{results}

With a random instruction the seed's own one is still scored, so about a third is what obedience
gives.

## Limits

One scene, one light, three colours, four phrasings; blocks lie in six cells. The text is wrong
mostly where the finger is about to arrive. Other instructions give arbitrary motion.
"""


def sha256(path: Path) -> str:
    """Return the hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _percent(hits: list[bool]) -> str:
    rate, low, high = wilson(hits)
    return f'{100 * rate:.1f} % [{100 * low:.1f}, {100 * high:.1f}] of {len(hits)}'


def write_model_card(
    folder: Path,
    scores: Mapping[str, Score],
    *,
    seeds: range,
    data: str,
    training: str,
    cpu_s: float,
    num_parameters: int,
    num_denoise_steps: int,
    horizon: int,
) -> None:
    """Write MODEL_CARD.md and evaluation.json into `folder`, beside the files they describe."""
    files = [
        path for path in sorted(folder.rglob('*')) if path.suffix in ('.safetensors', '.model')
    ]
    files += sorted(folder.rglob('norm_stats.json'))
    card = _CARD.format(
        parameters=num_parameters,
        files='\n'.join(
            f'| {path.relative_to(folder)} | {path.stat().st_size} | {sha256(path)} |'
            for path in files
        ),
        data=data,
        phrasings=', '.join(f'"{phrase.format("red")}"' for phrase in INSTRUCTIONS),
        training=training,
        cpu_min=cpu_s / 60,
        steps=num_denoise_steps,
        rows=EXECUTED_ROWS,
        horizon=horizon,
        first=seeds[0],
        last=seeds[-1],
        touch_cm=TOUCH_M * 100,
        touch_s=TOUCH_S,
        limit_s=LIMIT_S,
        results='\n'.join(
            f'| {name} | {_percent(score.success)} | {_percent(score.narration)} | '
            f'{_percent(score.memory)} | {np.mean(score.durations_s):.1f} s |'
            for name, score in scores.items()
        ),
    )
    (folder / 'MODEL_CARD.md').write_text(card, encoding='utf-8')
    numbers = {
        name: {
            'success': wilson(score.success),
            'text': wilson(score.narration),
            'note': wilson(score.memory),
            'episodes': len(score.success),
            'looks': len(score.memory),
            'failed_seeds': [
                seed for seed, good in zip(seeds, score.success, strict=True) if not good
            ],
        }
        for name, score in scores.items()
    }
    text = json.dumps(numbers, indent=2) + '\n'
    (folder / 'evaluation.json').write_text(text, encoding='utf-8')
