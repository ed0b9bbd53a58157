"""Real-time chunking: a new chunk that begins where the one before it is going.

Owns the arithmetic by which denoising is drawn to the rows an earlier chunk has left, with and
without the Jacobian, and by which a model trained for it is told what is executed meanwhile. Knows
no network, slot or robot: the flow is a callable, rows are in model units. Called by
`engine/model_runner.py`. Sources: arXiv 2506.07339 (guidance), LeRobot `policies/rtc` (the same
without the Jacobian), arXiv 2512.05964 (trained).

Axes: leading ones are free, H rows of a chunk, A action dim. Row 0 of the leftover belongs to row 0
of the new chunk. Flow-matching time runs from 1 (noise) to 0, a velocity is noise - actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SCHEDULES = ('zeros', 'ones', 'linear', 'exp')

Velocity = Callable[[Tensor, int], Tensor]
"""Flow (..., H, A) at noisy actions (..., H, A) and the time of this Euler step."""


@dataclass(frozen=True)
class Guided:
    """Draw the chunk to the leftover while it is denoised; any checkpoint will do."""

    jacobian: bool
    """True is the paper's guidance, with a backward pass per step; False is LeRobot's."""
    schedule: str
    """One of `SCHEDULES`."""
    execution_horizon: int
    """Rows from here on are free (LeRobot's meaning of the word, not the paper's)."""
    max_weight: float

    def denoise(
        self, velocity: Velocity, noise: Tensor, num_steps: int, leftover: Tensor, delay: int
    ) -> Tensor:
        """Return actions (H, A) from noise (H, A), drawn to leftover (T, A), of which the first
        `delay` rows will have been executed."""
        horizon = min(self.execution_horizon, len(leftover))  # rows of zero padding draw nobody
        weights = prefix_weights(self.schedule, delay, horizon, len(noise)).to(noise.device)
        target = torch.zeros_like(noise)
        target[: len(leftover)] = leftover[: len(noise)]
        return guide(
            velocity, noise, num_steps, target, weights, self.max_weight, jacobian=self.jacobian
        )


@dataclass(frozen=True)
class Trained:
    """Tell the model which rows are being executed; for checkpoints trained that way only."""

    max_delay: int
    """Largest delay of the training, in rows."""

    def denoise(
        self, velocity: Velocity, noise: Tensor, num_steps: int, leftover: Tensor, delay: int
    ) -> Tensor:
        """As `Guided.denoise`; the velocity must be told time 0 of the first `delay` rows.

        Raises:
            ValueError: the delay is longer than the training's, the leftover or the chunk.
        """
        most = min(self.max_delay, len(leftover), len(noise) - 1)
        if not 0 <= delay <= most:
            raise ValueError(
                f'delay: expected 0 to {most} rows (training {self.max_delay}, leftover '
                f'{len(leftover)}, chunk {len(noise)}), got {delay}'
            )
        return continue_rows(velocity, noise, num_steps, leftover[:delay])


Continuation = Guided | Trained


# --- guidance -------------------------------------------------------------------------------------


def prefix_weights(schedule: str, delay: int, horizon: int, total: int) -> Tensor:
    """Return (total,) float32: how much each row is drawn to the leftover.

    1 before row `delay`, 0 from row `horizon` on; between them 0 (zeros), 1 (ones), a falling line
    (linear) or that line bent down by an exponential (exp).
    """
    horizon = min(horizon, total)
    delay = min(delay, horizon)
    row = torch.arange(total, dtype=torch.float64)
    if schedule == 'zeros':
        weights = torch.zeros_like(row)
    elif schedule == 'ones':
        weights = torch.ones_like(row)
    elif schedule in ('linear', 'exp'):
        weights = ((horizon - row) / (horizon - delay + 1)).clamp(0.0, 1.0)
        if schedule == 'exp':
            weights = weights * torch.expm1(weights) / math.expm1(1.0)
    else:
        raise ValueError(f'guidance_schedule: expected one of {SCHEDULES}, got {schedule!r}')
    weights = torch.where(row < delay, 1.0, weights)
    return torch.where(row < horizon, weights, 0.0).float()


def guidance_weight(time: float, max_weight: float) -> float:
    """Return the strength of the guidance at a flow-matching time in (0, 1], at most max_weight."""
    tau = 1.0 - time
    if tau <= 0.0:
        return max_weight
    return min(max_weight, (tau**2 + time**2) / (tau * time))


def guide(
    velocity: Velocity,
    noise: Tensor,
    num_steps: int,
    target: Tensor,
    weights: Tensor,
    max_weight: float,
    *,
    jacobian: bool,
) -> Tensor:
    """Integrate from noise to actions (..., H, A), drawn to the target where weights (H,) are.

    With weights of 0 this is plain Euler integration, to the bit.
    """
    step = float(np.float32(-1.0 / num_steps))
    correct = correction_by_jacobian if jacobian else correction_by_identity
    x, row_weights = noise, weights[:, None]
    for k in range(num_steps):
        time = 1.0 - k / num_steps
        flow, correction = correct(velocity, x, k, time, target, row_weights)
        x = x + step * (flow - guidance_weight(time, max_weight) * correction)
    return x


def correction_by_identity(
    velocity: Velocity, x: Tensor, k: int, time: float, target: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the flow and the weighted way from the predicted clean chunk to the target."""
    flow = velocity(x, k)
    return flow, weights * (target - (x - time * flow))


def correction_by_jacobian(
    velocity: Velocity, x: Tensor, k: int, time: float, target: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The same, pulled back through the prediction: how x must change for the way to shrink.

    Works inside `inference_mode`, whose tensors autograd refuses to keep: x becomes a plain copy,
    and of what the velocity captures nothing may be an inference tensor.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = x.clone().requires_grad_()
        graph = velocity(x, k)
        flow = graph.detach()
        error = weights * (target - (x.detach() - time * flow))
        (pulled,) = torch.autograd.grad(graph, x, error)
    return flow, error - time * pulled


# --- trained --------------------------------------------------------------------------------------


def continue_rows(velocity: Velocity, noise: Tensor, num_steps: int, rows: Tensor) -> Tensor:
    """Integrate from noise to actions (..., H, A) whose first rows are, and stay, `rows`."""
    step = float(np.float32(-1.0 / num_steps))
    delay = rows.shape[-2]

    def held(x: Tensor) -> Tensor:
        return torch.cat([rows, x[..., delay:, :]], dim=-2)

    x = held(noise)
    for k in range(num_steps):
        x = held(x + step * velocity(x, k))
    return x
