"""Real-time chunking against LeRobot's own outputs; with the Jacobian they are kinetix', too."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
import torch
from golden_pi05 import GOLDEN
from safetensors.torch import load_file
from torch import Tensor

from oxygen_ros.model import rtc

RTC = GOLDEN / 'rtc'
GUIDED: dict[str, Any] = json.loads((RTC / 'rtc_guided.json').read_text())['cases']
TRAINED: dict[str, Any] = json.loads((RTC / 'trained_rtc.json').read_text())['infer']
WEIGHTS: list[dict[str, Any]] = json.loads((RTC / 'prefix_weights.json').read_text())
PAIRS = [
    (name, mode)
    for name, case in GUIDED.items()
    if case['prev'] is not None
    for mode in case['modes']
]


@functools.cache
def tensors(name: str) -> dict[str, Tensor]:
    return load_file(RTC / f'{name}.safetensors')


def field(name: str, x: Tensor, time: Tensor) -> Tensor:
    """The velocity of every case, at one time or one per row (..., H, 1)."""
    mix, rows, drift, bend = (tensors('rtc_guided')[f'field.{name}.{part}'] for part in 'ASbc')
    x = x.clone()  # the last bit of a product depends on where a tensor begins in memory
    return x @ mix.T + rows @ x + drift * time + bend * torch.tanh(x)


class Case:
    """One golden run; `steps` fills as it is repeated, with x before each step."""

    def __init__(self, case: dict[str, Any]) -> None:
        golden = tensors('rtc_guided')
        self.num_steps, self.delay = case['N'], case['inference_delay']
        self.noise = golden[f'noise.{case["noise"]}']
        self.leftover = None
        if case['prev'] is not None:
            rows = golden[f'prev.{case["prev"]}']
            rows = rows if rows.ndim == 3 else rows[None]
            self.leftover = torch.nn.functional.pad(rows, (0, case['D'] - rows.shape[-1]))
        self.field, self.steps = case['field'], []

    def velocity(self, x: Tensor, k: int) -> Tensor:
        self.steps.append(x.detach().clone())
        return field(self.field, x, torch.tensor(1.0 - k / self.num_steps))

    def each(self, continuation: rtc.Continuation, velocity: rtc.Velocity) -> Tensor:
        """Denoise the batch one by one, as a robot does."""
        return torch.stack(
            [
                continuation.denoise(velocity, noise, self.num_steps, leftover, self.delay)
                for noise, leftover in zip(self.noise, self.leftover, strict=True)
            ]
        )


def guided_by(case: dict[str, Any], mode: str, **changes: Any) -> rtc.Guided:
    settings = {
        'jacobian': mode == 'vjp',
        'schedule': case['schedule'].lower(),
        'execution_horizon': case['execution_horizon'],
        'max_weight': case['max_guidance_weight'],
    }
    return rtc.Guided(**{**settings, **changes})


def close(ours: Tensor, golden: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(ours, golden, atol=tolerance, rtol=0)


# --- guidance -------------------------------------------------------------------------------------


@pytest.mark.parametrize('case', WEIGHTS, ids=lambda case: case['key'])
def test_the_weights_of_the_rows_are_lerobots(case: dict[str, Any]) -> None:
    ours = rtc.prefix_weights(
        case['schedule'].lower(), case['delay'], case['horizon'], case['total']
    )
    close(ours, tensors('prefix_weights')[case['key']], 1e-6)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one of .*'linear'.* got 'cosine'"):
        rtc.prefix_weights('cosine', 1, 2, 3)


def test_all_twenty_six_guided_cases_are_here() -> None:
    assert len(PAIRS) == 26


@pytest.mark.parametrize(('name', 'mode'), PAIRS)
def test_guided_chunks_are_the_golden_ones_step_by_step(name: str, mode: str) -> None:
    golden, given = tensors('rtc_guided'), GUIDED[name]
    case = Case(given)
    final = case.each(guided_by(given, mode), case.velocity)
    close(final, golden[f'case.{name}.{mode}.final'], 5e-6)
    steps = torch.stack(case.steps).unflatten(0, (len(case.noise), -1)).transpose(0, 1)
    close(steps, golden[f'case.{name}.{mode}.x'], 5e-6)


@pytest.mark.parametrize(('name', 'mode'), PAIRS)
def test_each_correction_and_guided_flow_is_the_golden_one(name: str, mode: str) -> None:
    """From the golden state before each step, so that no error of a step hides in the next."""
    golden, given = tensors('rtc_guided'), GUIDED[name]
    case, key = Case(given), f'case.{name}.{mode}'
    weights = golden[f'case.{name}.weights']
    target = torch.zeros_like(case.noise)
    rows = min(case.leftover.shape[1], target.shape[1])
    target[:, :rows] = case.leftover[:, :rows]
    correct = rtc.correction_by_jacobian if mode == 'vjp' else rtc.correction_by_identity
    for k in range(case.num_steps):
        time = 1.0 - k / case.num_steps
        x = golden[f'{key}.x'][k]
        flow, correction = correct(case.velocity, x, k, time, target, weights[:, None])
        strength = rtc.guidance_weight(time, given['max_guidance_weight'])
        assert strength == pytest.approx(golden[f'case.{name}.guidance_weight'][k].item(), rel=1e-6)
        close(flow - strength * correction, golden[f'{key}.v_guided'][k], 1e-4)
        if f'{key}.correction' in golden:
            close(correction, golden[f'{key}.correction'][k], 2e-5)
            close(flow, golden[f'{key}.v_base'][k], 2e-5)


def test_the_two_kinds_of_guidance_are_far_apart() -> None:
    """Why the profile names them apart: what LeRobot ships is not what the paper says."""
    golden = tensors('rtc_guided')
    for name in {name for name, _ in PAIRS}:
        pair = [golden[f'case.{name}.{mode}.final'] for mode in ('identity', 'vjp')]
        assert (pair[0] - pair[1]).abs().max() > 0.4, name


@pytest.mark.parametrize(
    'changes',
    [{'jacobian': False}, {'schedule': 'ones'}, {'max_weight': 1e9}, {'execution_horizon': 3}],
    ids=str,
)
def test_a_wrong_setting_is_seen_by_the_goldens(changes: dict[str, Any]) -> None:
    given = GUIDED['a_linear']
    case = Case(given)
    final = case.each(guided_by(given, 'vjp', **changes), case.velocity)
    assert (final - tensors('rtc_guided')['case.a_linear.vjp.final']).abs().max() > 1e-3


@pytest.mark.parametrize('jacobian', [False, True])
def test_guidance_of_no_weight_is_plain_euler_to_the_bit(jacobian: bool) -> None:
    """`zeros` without a delay draws no row; the golden without a leftover says what is plain."""
    case = Case(GUIDED['a_none'])
    guided = rtc.Guided(jacobian, 'zeros', 8, 10.0)
    leftover = torch.full_like(case.noise[0], 3.0)
    x = guided.denoise(case.velocity, case.noise[0], case.num_steps, leftover, delay=0)
    plain, step = case.noise[0], float(np.float32(-1.0 / case.num_steps))
    for k in range(case.num_steps):
        plain = plain + step * case.velocity(plain, k)
    assert torch.equal(x, plain)
    close(x[None], tensors('rtc_guided')['case.a_none.identity.final'], 5e-6)


def test_rows_of_padding_draw_nobody() -> None:
    """A short leftover, padded with zeros, would decode to the mean of the data (lerobot 4454)."""
    case = Case(GUIDED['a_linear'])
    guided = guided_by(GUIDED['a_linear'], 'identity', schedule='ones')
    short = case.leftover[0, :4]
    seen = [
        guided.denoise(case.velocity, case.noise[0], 10, rows, delay=2)
        for rows in (short, torch.cat([short, torch.zeros(4, 4)]))
    ]
    assert (seen[0] - seen[1]).abs().max() > 0.1
    free = rtc.prefix_weights('ones', 2, 4, 10)[4:]
    assert not free.any()


def test_the_jacobian_is_found_inside_inference_mode() -> None:
    case, guided = Case(GUIDED['a_linear']), guided_by(GUIDED['a_linear'], 'vjp')
    with torch.inference_mode():
        noise, leftover = case.noise[0].clone(), case.leftover[0].clone()
        final = guided.denoise(case.velocity, noise, 10, leftover, case.delay)
    assert final.is_inference()
    close(final[None], tensors('rtc_guided')['case.a_linear.vjp.final'], 5e-6)


# --- trained --------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', TRAINED)
def test_a_trained_continuation_is_the_golden_one(name: str) -> None:
    given, golden = TRAINED[name], tensors('trained_rtc')
    case = Case(given)
    times = []

    def velocity(x: Tensor, k: int) -> Tensor:
        case.steps.append(x.clone())
        rows = torch.full((len(x), 1), 1.0 - k / case.num_steps)
        rows[: case.delay] = 0.0
        times.append(rows[:, 0])
        return field(case.field, x, rows)

    final = case.each(rtc.Trained(given['training_max_delay']), velocity)
    close(final, golden[f'infer.{name}.final'], 5e-6)
    assert torch.equal(final[:, : case.delay], case.leftover[:, : case.delay])
    for ours, key in ((case.steps, 'x'), (times, 't')):
        ours = torch.stack(ours).unflatten(0, (len(case.noise), -1)).transpose(0, 1)
        close(ours, golden[f'infer.{name}.{key}'], 5e-6)


def test_without_delay_a_trained_continuation_is_plain_to_the_bit() -> None:
    case = Case(GUIDED['a_linear'])
    trained = rtc.Trained(5).denoise(case.velocity, case.noise[0], 10, case.leftover[0], 0)
    guided = rtc.Guided(False, 'zeros', 8, 10.0)
    assert torch.equal(
        trained, guided.denoise(case.velocity, case.noise[0], 10, case.leftover[0], 0)
    )


@pytest.mark.parametrize(('delay', 'most'), [(6, 5), (4, 3), (-1, 5)])
def test_a_delay_the_training_never_saw_is_refused(delay: int, most: int) -> None:
    case = Case(GUIDED['a_linear'])
    leftover = case.leftover[0, :most] if most == 3 else case.leftover[0]
    with pytest.raises(ValueError, match=rf'expected 0 to {most} rows .* got {delay}'):
        rtc.Trained(5).denoise(case.velocity, case.noise[0], 10, leftover, delay)
