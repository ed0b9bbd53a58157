"""Anything at all: messages, profiles and sequences of chunks, clocks and measurements at random.

The ordinary suite tries a few hundred; `pytest -m fuzz` more than 10,000. Both are seeded: the same
inputs every time, others with OXYGEN_FUZZ_SEED, which every run prints.
"""

from __future__ import annotations

import copy
import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from oxygen_ros import conversions
from oxygen_ros.actions import ActionBuffer, ActionChunk
from oxygen_ros.conversions import ConversionError
from oxygen_ros.monitor import Monitor, Thresholds
from oxygen_ros.observation import NotReady, Observation, ObservationBuffer
from oxygen_ros.profile import CommandProfile, ProfileError, RobotProfile, load_profile
from oxygen_ros.publisher import CommandPublisher

CONFIG = Path(__file__).parents[1] / 'config'
SEED = int(os.environ.get('OXYGEN_FUZZ_SEED', '0'))
MS = 1_000_000
NAN, INF = float('nan'), float('inf')


def inputs(many: int) -> pytest.MarkDecorator:
    """How many inputs a property is tried on: a few by default, `many` of them with -m fuzz."""
    marks = [pytest.mark.slow, pytest.mark.long, pytest.mark.fuzz]
    return pytest.mark.parametrize('inputs', [80, pytest.param(many, marks=marks)])


def fuzz(inputs: int, property_: Callable[..., None]) -> None:
    """Try a property that takes what `given` draws."""
    print(f'OXYGEN_FUZZ_SEED={SEED}')
    chosen = settings(
        max_examples=inputs,
        deadline=None,
        database=None,  # what is tried depends on the seed alone
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )
    seed(SEED)(chosen(property_))()


numbers = st.one_of(
    st.floats(-4, 4), st.floats(), st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1e-320, 1e308])
)

# --- messages -------------------------------------------------------------------------------------

sizes = st.integers(0, 9) | st.sampled_from([640, 2**31, 2**32 - 1])
encodings = st.one_of(
    st.sampled_from(conversions.supported_encodings()),
    st.sampled_from(['32FC1', '16UC1', '8UC3', 'RGB8', ' yuyv ', '']),
    st.text(max_size=8),
)
raw_images = st.builds(
    SimpleNamespace,
    height=sizes,
    width=sizes,
    encoding=encodings,
    is_bigendian=st.integers(0, 255),
    step=st.integers(0, 80) | sizes,
    data=st.binary(max_size=720).map(lambda data: array('B', data)),
)
PICTURES = tuple(
    cv2.imencode(suffix, np.full((8, 8, *channels), 90, dtype))[1].tobytes()
    for suffix, channels, dtype in (
        ('.jpg', (3,), np.uint8), ('.jpg', (), np.uint8), ('.png', (3,), np.uint8),
        ('.png', (4,), np.uint8), ('.png', (), np.uint16),
    )
)  # fmt: skip


@st.composite
def compressed_images(draw: st.DrawFn) -> SimpleNamespace:
    """Bytes that are a picture, were one, or never will be; headers and sizes are damaged too."""
    data = bytearray(draw(st.sampled_from(PICTURES) | st.binary(max_size=200)))
    for at, value in draw(st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=4)):
        if data:
            data[at % len(data)] = value
    data = data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data
    return SimpleNamespace(format=draw(st.text(max_size=20)), data=array('B', data))


JOINTS = ('joint_1', 'joint_2', 'joint_3')
joint_states = st.builds(
    SimpleNamespace,
    name=st.lists(st.sampled_from(JOINTS) | st.text(max_size=3), max_size=5)
    | st.permutations(JOINTS),
    position=st.lists(numbers, max_size=5).map(lambda values: array('d', values))
    | st.lists(numbers, min_size=3, max_size=3),
)
steps_ns = st.sampled_from([0, 1, MS, 20 * MS, 400 * MS, 3_000 * MS, -500 * MS, -(10**12)])
stamps_ns = st.one_of(st.just(0), st.integers(-(2**31) * 10**9, 2**31 * 10**9), steps_ns)
arrivals = st.lists(
    st.one_of(
        st.tuples(st.just('base'), raw_images, stamps_ns),
        st.tuples(st.just('wrist'), compressed_images(), stamps_ns),
        st.tuples(st.just('joints'), joint_states, stamps_ns),
        st.tuples(st.just('instruction'), st.text(max_size=30), stamps_ns),
        st.tuples(st.just('snapshot'), st.none(), steps_ns),
        st.tuples(st.just('clear'), st.none(), steps_ns),
    ),
    max_size=12,
)


class Inputs:
    """The way of a message from the callback to the frame, as `node.py` wires it."""

    def __init__(self, profile: RobotProfile) -> None:
        self.cameras = {'base': profile.cameras[0], 'wrist': profile.cameras[1]}
        self.joints = profile.joints
        self.buffer = ObservationBuffer(profile.cameras, profile.joints, conversions.decode_image)
        self.now_ns = 10**15

    def take(self, kind: str, message: Any, stamp_ns: int) -> None:
        """A stamp that is small is relative to now."""
        stamp_ns += self.now_ns if abs(stamp_ns) <= 10**12 and stamp_ns else 0
        getattr(self, f'take_{kind}')(message, stamp_ns)

    def take_base(self, message: Any, stamp_ns: int) -> None:
        self._take_image(self.cameras['base'], message, stamp_ns)

    def take_wrist(self, message: Any, stamp_ns: int) -> None:
        self._take_image(self.cameras['wrist'], message, stamp_ns)

    def _take_image(self, camera: Any, message: Any, stamp_ns: int) -> None:
        with refusal_names(camera.topic):
            conversions.check_image(message, camera)
            self.buffer.put_image(camera.slot, message, stamp_ns, self.now_ns, self.now_ns)

    def take_joints(self, message: Any, stamp_ns: int) -> None:
        with refusal_names(self.joints.topic):
            positions = conversions.joint_positions(message, self.joints)
            assert set(positions) <= set(self.joints.names)
            self.buffer.put_joints(positions, stamp_ns, self.now_ns, self.now_ns)

    def take_instruction(self, text: str, stamp_ns: int) -> None:
        self.buffer.set_instruction(text)

    def take_clear(self, message: None, stamp_ns: int) -> None:
        self.buffer.clear()

    def take_snapshot(self, message: None, stamp_ns: int) -> None:
        self.now_ns = stamp_ns or self.now_ns
        observation = self.buffer.snapshot(0, self.now_ns)
        if isinstance(observation, NotReady):
            assert observation.reasons and all(observation.reasons)
        else:
            check_observation(observation, len(self.joints.names))
        assert all(np.isfinite(list(self.buffer.positions(self.now_ns).values())))
        assert len(self.buffer.status(self.now_ns)) == 3


class refusal_names:
    """Allow a ConversionError, and only one that names the topic."""

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, ConversionError):
            assert error.reason and str(error).startswith(f'{self._topic}: ')
            return True
        return False


def check_observation(observation: Observation, num_joints: int) -> None:
    assert observation.state.shape == (num_joints,)
    assert observation.state.dtype == np.float32
    assert np.isfinite(observation.state).all()
    for image in observation.images.values():
        assert image.dtype == np.uint8
        assert image.ndim == 3 and image.shape[2] == 3 and image.size


@inputs(3500)
def test_whatever_arrives_becomes_a_frame_or_is_refused_by_name(inputs: int) -> None:
    profile = small_profile()

    @given(arrivals)
    def property_(messages: list[tuple[str, Any, int]]) -> None:
        arriving = Inputs(profile)
        for kind, message, stamp_ns in messages:
            arriving.take(kind, message, stamp_ns)
        arriving.take('snapshot', None, 0)

    fuzz(inputs, property_)


def small_profile() -> RobotProfile:
    from dataclasses import replace

    profile = load_profile('dummy', CONFIG)
    base, wrist = profile.cameras
    return replace(
        profile,
        cameras=(base, replace(wrist, transport='compressed')),
        joints=replace(profile.joints, names=JOINTS),
    )


@inputs(2500)
def test_any_instruction_makes_a_prompt_of_the_models_own_tokens(inputs: int) -> None:
    pytest.importorskip('torch')
    from oxygen_ros.engine.factory import make_processor
    from oxygen_ros.model.config import preset
    from oxygen_ros.model.prompt import SentencePieceTokenizer

    profile = load_profile('tabletop', CONFIG)
    folder = CONFIG.parent / 'resource' / 'tabletop'
    tokenizer = SentencePieceTokenizer(folder / 'tokenizer.model')
    from oxygen_ros.model.checkpoints import find_norm_stats

    config = preset('tabletop', prefix_attention='bidirectional')
    processor = make_processor(profile, config, tokenizer, find_norm_stats(folder, ''))
    picture = np.zeros((96, 96, 3), np.uint8)
    num_joints = len(profile.joints.names)

    @given(
        st.text(max_size=40) | st.text('\x00\u2581 \ufffd\U0010ffff\n<', max_size=400),
        st.lists(st.floats(width=32), min_size=num_joints, max_size=num_joints),
    )
    def property_(instruction: str, state: list[float]) -> None:
        observation = Observation(
            frame=0,
            stamp_ns=0,
            time_ns=0,
            images={profile.cameras[0].slot: picture},
            state=np.array(state, np.float32),
            instruction=instruction,
        )
        try:
            encoded = processor.encode(observation)
        except ValueError as error:  # the engine makes an ObservationRefused of it
            assert 'state' in str(error)
            assert not np.isfinite(observation.state).all()
            return
        assert 0 < len(encoded.tokens) <= config.max_token_len
        assert all(0 <= token < config.vocab_size for token in encoded.tokens)

    fuzz(inputs, property_)


# --- profiles -------------------------------------------------------------------------------------

SHIPPED = tuple(
    yaml.safe_load((CONFIG / f'{name}.yaml').read_text())
    for name in ('aloha', 'droid', 'dummy', 'libero', 'tabletop')
)
EXTREMES = (0, -1, 1, 5e-324, 1e-9, 0.001, 1e3, 1e9, 1e20, 10**30, 10**400, 1e308, NAN, INF)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3) | st.integers(),
    numbers,
    st.text(max_size=6),
    st.sampled_from(['position', 'velocity', 'hold', 'home', 'rtc', 'joint_1', '~/text', 'a b']),
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value of a profile, blocks and lists included."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in children:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


@st.composite
def damaged_profiles(draw: st.DrawFn) -> Any:
    """A shipped profile of which some values are others, are gone, or are of another profile."""
    tree = copy.deepcopy(draw(st.sampled_from(SHIPPED)))
    for _ in range(draw(st.integers(1, 4))):
        *path, last = draw(st.sampled_from(list(places(tree))))
        node = value_at(tree, path)
        if draw(st.integers(0, 4)) == 0:
            del node[last]
        elif type(node[last]) in (int, float):
            node[last] = draw(st.sampled_from(EXTREMES) | numbers)
        else:
            elsewhere = value_at(draw(st.sampled_from(SHIPPED)), [*path, last])
            node[last] = draw(trees | st.just(copy.deepcopy(elsewhere)))
    return tree


def value_at(tree: Any, path: list[Any]) -> Any:
    """None where this profile has no such place."""
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


profile_texts = st.one_of(
    damaged_profiles().map(yaml.safe_dump),
    trees.map(lambda tree: yaml.safe_dump(tree, allow_unicode=True)),
    st.text('abz: -[]{},&*!|>\'"\n#%@\t0.1e9_\x00é', max_size=60),
)


@inputs(1500)
def test_any_profile_is_refused_by_name_or_makes_a_robot_that_keeps_its_limits(
    inputs: int, tmp_path: Path
) -> None:
    path = tmp_path / 'robot.yaml'

    @given(profile_texts)
    def property_(text: str) -> None:
        path.write_text(text, encoding='utf-8', errors='surrogatepass')
        try:
            profile = load_profile(str(path), CONFIG)
        except ProfileError as error:
            assert all(str(path) in line for line in str(error).splitlines()[:1])
            return
        Monitor(profile, Thresholds())
        ObservationBuffer(profile.cameras, profile.joints, conversions.decode_image)
        driven = Driven(profile.command, ActionBuffer.of_profile(profile))
        driven.measured = np.clip(0.0, profile.command.lower, profile.command.upper)
        driven.put(0, 0, round(1e9 / profile.action.rate_hz), np.ones((5, driven.num_joints)))
        for _ in range(4):
            driven.tick(0)

    fuzz(inputs, property_)


# --- commands -------------------------------------------------------------------------------------


class Driven:
    """A publisher on clocks driven by hand, and what it must never do, checked at every tick."""

    def __init__(self, command: CommandProfile, actions: ActionBuffer) -> None:
        self.command, self.actions = command, actions
        self.num_joints = len(command.names)
        self.now_ns, self.control_offset_ns = 10**15, 0
        self.measured: np.ndarray | None = None
        self.sent: list[np.ndarray] = []
        self.last: np.ndarray | None = None  # sent in the tick before
        self.last_end_ns = -(2**62)  # of all chunks since the last clear, on the control clock
        self.publisher = CommandPublisher(
            command,
            actions,
            send=self.sent.append,
            measured=lambda: self.measured,
            clock_ns=lambda: self.control_ns,
            monotonic_ns=lambda: self.now_ns,
            rows_per_command=5 if command.interface == 'joint_trajectory' else 1,
        )
        self.period_ns = round(1e9 / command.rate_hz)
        self.is_position = np.array([quantity == 'position' for quantity in command.quantity])

    @property
    def control_ns(self) -> int:
        return self.now_ns + self.control_offset_ns

    def put(self, frame: int, age_ns: int, period_ns: int, values: np.ndarray) -> None:
        chunk = ActionChunk(frame, 0, self.control_ns - age_ns, period_ns, values)
        if self.actions.put(chunk, self.control_ns) is None:
            assert np.isfinite(values).all()
            # The `rtc` modes may play it later, by no more than its length.
            self.last_end_ns = max(self.last_end_ns, 2 * chunk.end_ns - chunk.time_ns)

    def clear(self, first_frame: int) -> None:
        self.actions.clear('instruction', first_frame)
        self.last_end_ns = -(2**62)

    def tick(self, late_ns: int) -> None:
        self.now_ns += late_ns
        self.sent.clear()
        self.publisher.tick()
        assert self.publisher.error is None
        assert len(self.sent) <= 1
        source = self.publisher.source
        if self.sent:
            self.check(self.sent[0], source)
            self.last = self.sent[0][0].copy()
        else:
            assert source == 'silence'
            self.last = None
        self.now_ns += self.period_ns

    def check(self, rows: np.ndarray, source: str) -> None:
        command = self.command
        assert np.isfinite(rows).all()
        if source == 'chunk':
            assert self.control_ns < self.last_end_ns, 'an action after its time'
        else:
            assert source == command.fallback
            assert len(rows) == 1
        self.check_positions(rows[:, self.is_position])
        velocities = rows[:, ~self.is_position]
        most = np.array(command.max_velocity)[~self.is_position]
        assert (np.abs(velocities) <= most).all()
        if source == 'hold' and self.measured is not None and not np.isnan(self.measured).any():
            assert (velocities == 0).all()

    def check_positions(self, rows: np.ndarray) -> None:
        lower, upper, most = (
            np.array(limits)[self.is_position]
            for limits in (self.command.lower, self.command.upper, self.command.max_velocity)
        )
        assert ((lower <= rows) & (rows <= upper)).all()
        room = most / self.command.rate_hz * (1 + 1e-6) + 1e-9
        # From the command before or from the arm, joint by joint: one may be known and one not.
        near = [
            np.abs(rows[0] - start[self.is_position]) <= room
            for start in (self.last, self.measured)
            if start is not None
        ]
        assert np.any(near, axis=0).all() or not rows.size
        assert (np.abs(np.diff(rows, axis=0)) <= room).all()


periods_ns = st.sampled_from([1, MS, 7 * MS, 20 * MS, 500 * MS, 10**11])
chunk_values = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.lists(numbers, min_size=width, max_size=width), min_size=1, max_size=6
    ).map(np.array)
) | st.lists(st.lists(st.floats(-2, 2), min_size=2, max_size=2), min_size=1, max_size=8).map(
    np.array
)
events = st.lists(
    st.one_of(
        st.tuples(st.just('put'), st.integers(0, 6), steps_ns, periods_ns, chunk_values),
        st.tuples(st.just('clear'), st.integers(0, 6)),
        st.tuples(st.just('tick'), st.sampled_from([0, 0, 0, MS, 19 * MS, 45 * MS, 10**10])),
        st.tuples(st.just('shift_control'), steps_ns),
        st.tuples(st.just('measure'), st.none() | st.lists(numbers, min_size=2, max_size=2)),
        st.tuples(st.just('leftover'), steps_ns),
    ),
    max_size=40,
)


@st.composite
def publishers(draw: st.DrawFn) -> Driven:
    quantity = draw(
        st.sampled_from(
            [('position', 'position'), ('velocity', 'velocity'), ('velocity', 'position')]
        )
    )
    mixed = 'velocity' in quantity
    command = CommandProfile(
        interface=draw(
            st.sampled_from(['forward_command', *([] if mixed else ['joint_trajectory'])])
        ),
        topic='commands',
        names=('a', 'b'),
        quantity=quantity,
        rate_hz=50.0,
        fallback='hold' if mixed else draw(st.sampled_from(['hold', 'stop', 'home'])),
        home=(0.5, -0.5),
        lower=(-1.0, draw(st.sampled_from([-2.0, -INF]))),
        upper=(1.0, draw(st.sampled_from([0.5, INF]))),
        max_velocity=(5.0, 0.5),
    )
    actions = ActionBuffer(
        2,
        draw(st.sampled_from(['linear', 'previous'])),
        blending=draw(st.sampled_from(['replace', 'ensemble', 'rtc'])),
        ensemble_coefficient=draw(st.sampled_from([0.0, 0.01, 5.0, -5.0])),
        max_delay=draw(st.sampled_from([0, 2])),
    )
    return Driven(command, actions)


def apply(driven: Driven, event: tuple[Any, ...]) -> None:
    kind, *values = event
    if kind == 'measure':
        driven.measured = None if values[0] is None else finite_or_nan(np.array(values[0]))
    elif kind == 'shift_control':
        driven.control_offset_ns += values[0]
    elif kind == 'leftover':
        leftover = driven.actions.leftover(driven.control_ns + values[0])
        assert leftover is None or 0 <= leftover.delay <= len(leftover.values)
    else:
        getattr(driven, kind)(*values)


def finite_or_nan(values: np.ndarray) -> np.ndarray:
    """As the ObservationBuffer gives them: an infinite position never gets there."""
    return np.where(np.isfinite(values), values, NAN)


@inputs(3000)
def test_whatever_happens_a_command_is_finite_inside_its_limits_slow_enough_and_of_now(
    inputs: int,
) -> None:
    @given(publishers(), events)
    def property_(driven: Driven, happening: list[tuple[Any, ...]]) -> None:
        for event in happening:
            apply(driven, event)
        driven.tick(0)

    fuzz(inputs, property_)


def test_the_oracle_of_commands_catches_a_gate_that_lets_everything_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from oxygen_ros.actions import CommandGate, Gated

    monkeypatch.setattr(CommandGate, 'apply', lambda self, rows, *rest: Gated(rows))
    with pytest.raises(AssertionError):
        test_whatever_happens_a_command_is_finite_inside_its_limits_slow_enough_and_of_now(200)
