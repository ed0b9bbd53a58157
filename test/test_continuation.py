"""Chunks that continue an earlier one, on the golden pi0.5: runner, engine and buffer together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import golden_pi05 as golden
import numpy as np
import pytest
import torch
from golden_pi05 import Variant
from test_engine import Live, inputs, observation, task

from oxygen_ros.actions import ActionBuffer, Leftover
from oxygen_ros.engine.factory import EngineOptions, build_engine
from oxygen_ros.engine.model_runner import ModelRunner
from oxygen_ros.engine.sequence import Frame
from oxygen_ros.engine.slots import SlotLayout
from oxygen_ros.engine.static_runner import StaticRunner
from oxygen_ros.model import packed
from oxygen_ros.model.pi05 import euler_times
from oxygen_ros.model.rtc import Continuation, Guided, Trained
from oxygen_ros.profile import ProfileError, RobotProfile, load_profile

CONFIG = Path(__file__).parents[1] / 'config'
JACOBIAN = Guided(jacobian=True, schedule='linear', execution_horizon=8, max_weight=10.0)
IDENTITY = replace(JACOBIAN, jacobian=False)
TRAINED = Trained(max_delay=5)
RUNNERS = (ModelRunner, StaticRunner)
of_every_kind = pytest.mark.parametrize(
    'continuation', [IDENTITY, JACOBIAN, TRAINED], ids=['identity', 'jacobian', 'trained']
)
LEFTOVER = np.random.default_rng(1).standard_normal((8, 32)).astype(np.float32)
ROW = 20  # ns, of the golden engine


class Prefilled:
    """One frame in a runner that can continue chunks."""

    def __init__(
        self, continuation: Continuation | None, kind: type[ModelRunner] = ModelRunner
    ) -> None:
        model, given = golden.model(), inputs(Variant('a'))
        layout = SlotLayout(model.config.max_prefix_len, (), model.config.action_horizon)
        self.runner = kind(
            model, layout, num_slots=2, num_denoise_steps=10, continuation=continuation
        )
        self.frame = Frame(0, 0, 1, self.runner.prefix_len(given), 0)
        self.runner.prefill(self.frame, given)
        self.noise = Variant('a').io('in.noise').numpy()

    def plain(self) -> np.ndarray:
        return self.runner.denoise(self.frame, self.noise)

    def after(self, delay: int, leftover: np.ndarray = LEFTOVER) -> np.ndarray:
        return self.runner.denoise_after(self.frame, self.noise, leftover, delay)


# --- the runner -----------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', RUNNERS)
@of_every_kind
def test_a_runner_continues_a_chunk_and_stays_as_it_was(kind, continuation) -> None:
    bench = Prefilled(continuation, kind)
    plain = bench.plain()
    drawn = bench.after(delay=3)
    before, now = (np.abs(actions[:3] - LEFTOVER[:3]).max() for actions in (plain, drawn))
    assert now < 0.1 * before
    if continuation is TRAINED:
        assert now == 0
    assert np.array_equal(bench.plain(), plain)
    with torch.inference_mode():
        assert np.array_equal(bench.after(delay=3), drawn)


@of_every_kind
def test_padded_buffers_continue_a_chunk_as_plain_ones_do(continuation) -> None:
    plain, static = (Prefilled(continuation, kind).after(delay=2) for kind in RUNNERS)
    np.testing.assert_allclose(static, plain, atol=2e-5, rtol=0)


@pytest.mark.cuda
@of_every_kind
def test_beside_captured_graphs_a_chunk_is_continued_as_on_a_cpu(continuation) -> None:
    model = golden.load_model(
        golden.config(), golden.CHECKPOINT, device=torch.device('cuda'), dtype=torch.float32
    )
    layout = SlotLayout(model.config.max_prefix_len, (), model.config.action_horizon)
    runner = StaticRunner(
        model, layout, num_slots=2, num_denoise_steps=10, continuation=continuation
    )
    given, noise = inputs(Variant('a')), Variant('a').io('in.noise').numpy()
    frame = Frame(0, 0, 1, runner.prefix_len(given), 0)
    runner.prefill(frame, given)
    replayed = runner.denoise(frame, noise)
    actions = runner.denoise_after(frame, noise, LEFTOVER, 3)
    np.testing.assert_allclose(actions, Prefilled(continuation).after(delay=3), atol=1e-3, rtol=0)
    assert np.array_equal(runner.denoise(frame, noise), replayed)


def test_guidance_of_no_weight_is_the_plain_chunk_to_the_bit() -> None:
    bench = Prefilled(replace(IDENTITY, schedule='zeros'))
    assert np.array_equal(bench.after(delay=0), bench.plain())
    bench = Prefilled(TRAINED)
    assert np.array_equal(bench.after(delay=0), bench.plain())
    bench = Prefilled(replace(JACOBIAN, schedule='zeros'))
    np.testing.assert_allclose(bench.after(delay=0), bench.plain(), atol=1e-5, rtol=0)


def test_the_jacobian_of_the_network_is_that_of_finite_differences() -> None:
    bench = Prefilled(JACOBIAN)
    runner, model = bench.runner, golden.model()
    views = runner._action_views(bench.frame, 10)
    modulation = model.modulations(torch.from_numpy(euler_times(10)))[4]
    seeded = torch.Generator().manual_seed(3)
    x, error, way = (torch.randn(10, 32, generator=seeded) for _ in range(3))
    x.requires_grad_()
    (pulled,) = torch.autograd.grad(model.velocity(x, modulation, *views), x, error)
    with torch.no_grad():
        step = 1e-2
        ahead, behind = (model.velocity(x + s * way, modulation, *views) for s in (step, -step))
    expected = ((ahead - behind) / (2 * step) * error).sum()
    assert (pulled * way).sum().item() == pytest.approx(expected.item(), rel=2e-3)


def test_autograd_leaves_no_graph_and_no_row_in_the_slot() -> None:
    bench = Prefilled(JACOBIAN)
    bench.plain()
    before = bench.runner.k.clone(), bench.runner.v.clone()
    bench.after(delay=2)
    assert not (bench.runner.k.requires_grad or bench.runner.v.requires_grad)
    assert torch.equal(bench.runner.k, before[0])
    assert torch.equal(bench.runner.v, before[1])


def test_a_model_loaded_in_inference_mode_is_differentiable_too() -> None:
    with torch.inference_mode():
        model = golden.load_model(
            golden.config(), golden.CHECKPOINT, device=golden.CPU, dtype=torch.float32
        )
        layout = SlotLayout(model.config.max_prefix_len, (), model.config.action_horizon)
        runner = StaticRunner(
            model, layout, num_slots=1, num_denoise_steps=10, continuation=JACOBIAN
        )
        given = inputs(Variant('a'))
        frame = Frame(0, 0, 0, runner.prefix_len(given), 0)
        runner.prefill(frame, given)
        actions = runner.denoise_after(frame, Variant('a').io('in.noise').numpy(), LEFTOVER, 3)
    np.testing.assert_allclose(actions, Prefilled(JACOBIAN).after(delay=3), atol=2e-5, rtol=0)


def test_bfloat16_serves_the_jacobian_too() -> None:
    model, given = golden.model(dtype=torch.bfloat16), inputs(Variant('a'))
    layout = SlotLayout(model.config.max_prefix_len, (), model.config.action_horizon)
    runner = ModelRunner(model, layout, num_slots=1, num_denoise_steps=10, continuation=JACOBIAN)
    frame = Frame(0, 0, 0, runner.prefix_len(given), 0)
    runner.prefill(frame, given)
    noise = Variant('a').io('in.noise').numpy()
    exact = Prefilled(JACOBIAN).after(delay=3)
    np.testing.assert_allclose(runner.denoise_after(frame, noise, LEFTOVER, 3), exact, atol=0.3)


@pytest.mark.skipif(not packed.available(), reason='this torch has no packed layers')
def test_packed_layers_leave_the_flow_differentiable_when_asked(monkeypatch) -> None:
    monkeypatch.setattr(packed, 'MIN_ELEMENTS', 1)
    exact = Prefilled(JACOBIAN).after(delay=3)
    model = golden.load_model(
        golden.config(), golden.CHECKPOINT, device=golden.CPU, dtype=torch.float32
    )
    packed.pack(model, differentiable_flow=True)
    assert any(isinstance(module, packed.PackedLinear) for module in model.vlm.modules())
    monkeypatch.setattr(golden, 'model', lambda: model)
    np.testing.assert_allclose(Prefilled(JACOBIAN).after(delay=3), exact, atol=1e-4, rtol=0)


# --- the engine -----------------------------------------------------------------------------------


class Robot:
    """The golden engine and the buffer that plays its chunks; every pass takes its rows of time."""

    def __init__(self, blending: str, *, seed: int = 7, latency_rows: int = 3, **options: Any):
        continuation = {'rtc': JACOBIAN, 'rtc_identity': IDENTITY, 'rtc_trained': TRAINED}
        self.buffer = ActionBuffer(6, 'linear', blending=blending)
        self.live = Live(
            task(),
            seed=seed,
            continuation=continuation.get(blending),
            leftover=self.buffer.leftover if blending in continuation else None,
            **options,
        )
        self.latency_ns = latency_rows * ROW
        self.seams: list[float] = []

    def look(self, number: int, **changes: Any) -> None:
        """One frame, five rows after the one before; notes how far the command jumps."""
        time_ns = 1_000 + 5 * ROW * number
        for tick_ns in range(time_ns - 5 * ROW, time_ns + self.latency_ns, ROW):
            if number:
                self.buffer.rows(tick_ns, period_ns=ROW, count=1)
        self.live.step(number, time_ns=time_ns, **changes)
        now_ns = time_ns + self.latency_ns
        before = self.buffer.leftover(now_ns)
        assert self.buffer.put(self.live.chunks[-1], now_ns) is None
        after = self.buffer.leftover(now_ns)
        if before is not None:
            self.seams.append(float(np.abs(after.values[0] - before.values[0]).max()))


@pytest.mark.parametrize('seed', range(5))
def test_the_seam_between_chunks_is_smaller_with_guidance(seed: int) -> None:
    robots = {
        blending: Robot(blending, seed=seed) for blending in ('replace', 'rtc', 'rtc_identity')
    }
    for robot in robots.values():
        for number in range(6):
            robot.look(number)
    # The first pair has no measured delay yet and is drawn from its first row on.
    seams = {blending: np.array(robot.seams[1:]) for blending, robot in robots.items()}
    assert len(seams['replace']) == 4
    for blending in ('rtc', 'rtc_identity'):
        assert seams[blending].mean() < 0.5 * seams['replace'].mean(), seams
        assert seams[blending].max() < seams['replace'].max(), seams


def test_replacing_is_the_path_of_before_bit_for_bit() -> None:
    """An engine that is never asked to continue, and one whose buffer has nothing left."""
    plain, asked = Live(task()), Live(task(), continuation=JACOBIAN, leftover=lambda now_ns: None)
    for number in range(3):
        plain.step(number)
        asked.step(number)
    for ours, theirs in zip(asked.chunks, plain.chunks, strict=True):
        assert np.array_equal(ours.values, theirs.values)
    assert asked.updates == plain.updates


def test_the_leftover_is_asked_for_the_moment_of_the_observation() -> None:
    asked: list[int] = []
    live = Live(task(), continuation=JACOBIAN, leftover=lambda time_ns: asked.append(time_ns))
    live.step(0, time_ns=12_345)
    assert asked == [12_345]


def test_rows_that_are_executed_meanwhile_are_the_old_chunks_own() -> None:
    robot = Robot('rtc')
    for number in range(3):
        robot.look(number)
    chunks = robot.live.chunks
    assert np.array_equal(chunks[2].values[:3], chunks[1].values[5:8])
    assert not np.array_equal(chunks[2].values[3:5], chunks[1].values[8:10])


def test_a_warm_up_runs_the_continuation_and_is_no_measure_of_its_delay() -> None:
    robot = Robot('rtc')
    robot.live.engine.warm_up()
    assert robot.live.log.count(('denoise', 0)) == 4  # two of each kind
    assert robot.live.chunks == []
    assert robot.buffer.leftover(0) is None
    robot.look(0)
    assert robot.buffer.leftover(1_000 + 5 * ROW).delay == 0


@pytest.mark.parametrize('drift', [0.0, 0.1])
def test_a_moved_robot_does_not_shift_the_leftover_of_delta_actions(drift: float) -> None:
    """lerobot #3453: the stale, normalised leftover moves with the state it was a delta to."""
    given: list[np.ndarray] = []
    robot = Robot('rtc', delta_mask=(True,) * 5 + (False,))
    real = robot.live.runner._runner.denoise_after
    robot.live.runner.denoise_after = lambda frame, noise, leftover, delay: (
        given.append(leftover) or real(frame, noise, leftover, delay)
    )
    state = np.linspace(-0.2, 0.3, 6, dtype=np.float32)
    robot.look(0, state=state)
    leftover = robot.buffer.leftover(1_000 + 5 * ROW)
    moved = state + np.float32(drift)
    robot.look(1, state=moved)
    processor = robot.live.engine.processor
    rows = np.zeros((10, 32), np.float32)
    rows[: len(given[0])] = given[0]
    again = processor.decode(rows, observation(1, state=moved))[: len(given[0])]
    np.testing.assert_allclose(again, leftover.values, atol=1e-6)
    stale = processor.decode(rows, observation(1, state=state))[: len(given[0]), :5]
    np.testing.assert_allclose(leftover.values[:, :5] - stale, drift, atol=1e-6)


def test_a_drift_of_the_state_does_not_shift_the_seam() -> None:
    seams = []
    for drift in (0.0, 0.1):
        robot = Robot('rtc_identity', delta_mask=(True,) * 6)
        for number in range(6):
            robot.look(number, state=np.full(6, drift * number, np.float32))
        seams.append(np.mean(robot.seams[1:]))
    assert abs(seams[1] - seams[0]) < 0.02


# --- the profile ----------------------------------------------------------------------------------


def dummy(blending: str, *, training_max_delay: int = 0, **changes: Any) -> RobotProfile:
    profile = load_profile('dummy', CONFIG)
    return replace(
        profile,
        action=replace(profile.action, blending=blending, **changes),
        model=replace(profile.model, training_max_delay=training_max_delay),
    )


def built(profile: RobotProfile, leftover: Any) -> Any:
    return build_engine(
        profile,
        EngineOptions(device='cpu'),
        on_chunk=lambda chunk: None,
        on_text=lambda update: None,
        leftover=leftover,
    )


@pytest.mark.parametrize(
    ('profile', 'continuation'),
    [
        (dummy('replace'), None),
        (dummy('ensemble'), None),
        (dummy('rtc', guidance_schedule='exp'), Guided(True, 'exp', 10, 10.0)),
        (dummy('rtc_identity', execution_horizon=7), Guided(False, 'linear', 7, 10.0)),
        (dummy('rtc_trained', training_max_delay=4), Trained(4)),
    ],
    ids=lambda value: value.action.blending if isinstance(value, RobotProfile) else '',
)
def test_a_profile_says_how_chunks_are_continued(profile: RobotProfile, continuation) -> None:
    asked: list[int] = []

    def leftover(time_ns: int) -> Leftover:
        asked.append(time_ns)
        return Leftover(np.zeros((5, 6)), 1)

    engine = built(profile, leftover)
    assert engine.runner._continuation == continuation
    size = engine.processor.image_size
    images = {engine.processor.camera_slots[0]: np.zeros((size, size, 3), np.uint8)}
    engine.step(observation(0, images=images), 0)
    assert len(asked) == (continuation is not None)


def test_where_nobody_plays_the_chunks_they_are_not_continued() -> None:
    assert built(dummy('rtc'), None).runner._continuation is None


@pytest.mark.parametrize(
    ('profile', 'message'),
    [
        (dummy('rtc', execution_horizon=999), 'action.execution_horizon: expected at most'),
        (dummy('rtc_trained', training_max_delay=999), 'model.training_max_delay: expected less'),
    ],
    ids=['execution_horizon', 'training_max_delay'],
)
def test_blending_longer_than_a_chunk_is_refused(profile: RobotProfile, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        built(profile, lambda time_ns: None)
