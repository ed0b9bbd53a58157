"""Turns robot units into model units and back: images, states and action chunks, in numpy.

It owns the arithmetic of openpi's data transforms: resizing, normalisation, delta actions and the
robot adapters. It knows nothing about torch, prompts, cameras or topics. `Processor` strings the
functions together; the golden tests call them one by one.

Order in (openpi `transforms.py`, `policies/*_policy.py`): adapter, normalise, pad. Order out:
unnormalise, delta to absolute, adapter. Dtypes follow openpi as well: statistics are float64, so
whatever they touch becomes float64.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NORMALIZATIONS = ('quantile', 'mean_std', 'none')
# openpi adds it to every divisor, so a joint that never moved in training does not divide by zero.
EPSILON = 1e-6
# Pillow before 9.1 (Ubuntu 22.04) has the name in `Image` itself.
_BILINEAR = getattr(Image, 'Resampling', Image).BILINEAR


# ---------------------------------------------------------------------------------------- images


def to_uint8(image: np.ndarray) -> np.ndarray:
    """Return an RGB image as uint8 (h, w, 3).

    Float images hold [0, 1]; 255 * x is truncated, not rounded (openpi `policies/*_policy.py`).
    A channel-first image (3, h, w) is turned channel-last. Raises ValueError for any other shape,
    dtype or float range.
    """
    if image.ndim != 3 or 3 not in (image.shape[0], image.shape[-1]):
        raise ValueError(f'expected an RGB image (h, w, 3) or (3, h, w), got shape {image.shape}')
    if image.shape[-1] != 3:
        image = np.moveaxis(image, 0, -1)
    if image.dtype == np.uint8:
        return image
    if not np.issubdtype(image.dtype, np.floating):
        raise ValueError(f'expected an image of uint8 or of floats in [0, 1], got {image.dtype}')
    # Written so that NaN fails too: as uint8 it, like 1.1, would wrap round to some other colour.
    if not (image.min() >= 0.0 and image.max() <= 1.0):
        raise ValueError(
            f'expected a float image in [0, 1], got values from {image.min()} to {image.max()}'
        )
    return (255 * image).astype(np.uint8)


def resize_with_pad(image: np.ndarray, size: int) -> np.ndarray:
    """Fit a uint8 image (h, w, 3) into (size, size, 3), keeping its proportions, centred on black.

    PIL's bilinear filter averages over the source pixels when it shrinks; cv2's and torch's do
    not, and give other pixels than the model was trained on (openpi_client `image_tools.py`).
    An image that already fits is returned as it is, not copied. Raises ValueError for an image so
    narrow that nothing of it would be left.
    """
    height, width = image.shape[:2]
    if height == width == size:
        return image
    ratio = max(width / size, height / size)
    new_height, new_width = int(height / ratio), int(width / ratio)
    if new_height == 0 or new_width == 0:
        raise ValueError(f'an image of {height} x {width} leaves no pixel at {size} x {size}')
    resized = Image.fromarray(image).resize((new_width, new_height), _BILINEAR)
    top, left = (size - new_height) // 2, (size - new_width) // 2
    canvas = np.zeros((size, size, 3), np.uint8)
    canvas[top : top + new_height, left : left + new_width] = np.asarray(resized)
    return canvas


# --------------------------------------------------------------------------------- normalisation


@dataclass(frozen=True)
class VectorStats:
    """Statistics of one vector over the training data, each (width,): openpi's are float64,
    LeRobot's float32."""

    mean: np.ndarray
    std: np.ndarray
    q01: np.ndarray | None  # 1 % and 99 % quantiles: pi0.5 has them, pi0 may not
    q99: np.ndarray | None
    lerobot_eps: float | None = None
    """None: openpi's formulas, which always add 1e-6 to a divisor. Else LeRobot's
    (`normalize_processor.py`), which put this in the place of a span of zero."""

    @property
    def width(self) -> int:
        return int(self.mean.shape[0])

    def span(self, q01: np.ndarray, q99: np.ndarray) -> np.ndarray:
        """What the distance of two quantiles is divided by."""
        if self.lerobot_eps is None:
            return q99 - q01 + EPSILON
        return np.where(q99 == q01, q99.dtype.type(self.lerobot_eps), q99 - q01)

    def quantiles(self) -> tuple[np.ndarray, np.ndarray]:
        """q01 and q99; raises ValueError where the file held none."""
        if self.q01 is None or self.q99 is None:
            raise ValueError(
                'no q01 and q99: this checkpoint was normalised by mean and standard deviation, '
                'set model.normalization to mean_std'
            )
        return self.q01, self.q99


@dataclass(frozen=True)
class NormStats:
    """What a checkpoint was normalised with; `source` is the file, for error messages."""

    source: str
    state: VectorStats
    actions: VectorStats


def load_norm_stats(path: Path) -> NormStats:
    """Read openpi's `norm_stats.json` (`shared/normalize.py`).

    Raises FileNotFoundError if there is no such file and ValueError, naming file and key, if it is
    not JSON, lacks 'state' or 'actions', or holds lists that are not finite or of unequal length.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f'no normalisation statistics at {path}: copy norm_stats.json from the checkpoint '
            f'(assets/<asset id>/norm_stats.json), or set model.norm_stats'
        )
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except ValueError as error:
        raise ValueError(f'{path}: expected JSON as openpi writes it, got: {error}') from error
    vectors = content.get('norm_stats') if isinstance(content, dict) else None
    if not isinstance(vectors, dict):
        raise ValueError(f"{path}: expected an object with the key 'norm_stats'")
    for key in ('state', 'actions'):
        if not isinstance(vectors.get(key), dict):
            raise ValueError(
                f"{path}: expected 'state' and 'actions' in 'norm_stats', "
                f"'{key}' is missing; found {sorted(vectors)}"
            )
    return NormStats(
        source=str(path),
        state=_vector_stats(vectors['state'], f'{path}: state'),
        actions=_vector_stats(vectors['actions'], f'{path}: actions'),
    )


def _vector_stats(fields: dict[str, Any], where: str) -> VectorStats:
    for key in ('mean', 'std'):
        if fields.get(key) is None:
            raise ValueError(f"{where} has no '{key}'; found {sorted(fields)}")
    columns = {
        key: _column(fields[key], f'{where}.{key}')
        for key in ('mean', 'std', 'q01', 'q99')
        if fields.get(key) is not None
    }
    widths = {key: column.shape[0] for key, column in columns.items()}
    if len(set(widths.values())) != 1:
        raise ValueError(f'{where}: expected lists of one length, got {widths}')
    q01, q99 = columns.get('q01'), columns.get('q99')
    if (q01 is None) != (q99 is None):
        raise ValueError(
            f"{where}: expected both 'q01' and 'q99' or neither; found {sorted(widths)}"
        )
    if (columns['std'] < 0).any() or (q01 is not None and q99 is not None and (q99 < q01).any()):
        raise ValueError(f'{where}: expected std >= 0 and q01 <= q99 in every dimension')
    return VectorStats(columns['mean'], columns['std'], q01, q99)


def _column(values: Any, where: str) -> np.ndarray:
    try:
        column = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f'{where}: expected a list of numbers, got {values!r}') from error
    if column.ndim != 1 or column.size == 0 or not np.isfinite(column).all():
        raise ValueError(f'{where}: expected a list of finite numbers, got {values!r}')
    column.setflags(write=False)
    return column


def normalize(values: np.ndarray, stats: VectorStats, normalization: str) -> np.ndarray:
    """Robot units (..., width) to model units, in the statistics' dtype; nothing is clipped.

    'quantile' maps [q01, q99] to [-1, 1], 'mean_std' to zero mean and unit deviation. Statistics
    wider than the values are cut (some checkpoints store 32 wide ones); narrower ones are a
    ValueError, since a dimension would silently stay in robot units.
    """
    width = values.shape[-1]
    if stats.width < width:
        raise ValueError(f'statistics of {stats.width} dimensions cannot normalise {width}')
    if _is_mean_std(normalization):
        epsilon = EPSILON if stats.lerobot_eps is None else stats.lerobot_eps
        return (values - stats.mean[:width]) / (stats.std[:width] + epsilon)
    q01, q99 = stats.quantiles()
    q01, q99 = q01[:width], q99[:width]
    if stats.lerobot_eps is not None:
        return 2.0 * (values - q01) / stats.span(q01, q99) - 1.0
    return (values - q01) / stats.span(q01, q99) * 2.0 - 1.0


def unnormalize(values: np.ndarray, stats: VectorStats, normalization: str) -> np.ndarray:
    """Model units (..., width) back to robot units: the inverse of `normalize`.

    Padding beyond the statistics carries no meaning. It passes through 'quantile' unchanged and is
    scaled by 1 + 1e-6 in 'mean_std' (openpi pads std with one). Statistics wider than the values
    are a ValueError.
    """
    width = values.shape[-1]
    if stats.width > width:
        raise ValueError(f'statistics of {stats.width} dimensions cannot unnormalise {width}')
    if _is_mean_std(normalization):
        padding = width - stats.width
        std = np.pad(stats.std, (0, padding), constant_values=1.0)
        epsilon = EPSILON if stats.lerobot_eps is None else 0.0
        return values * (std + epsilon) + np.pad(stats.mean, (0, padding))
    q01, q99 = stats.quantiles()
    known, padding_values = values[..., : stats.width], values[..., stats.width :]
    known = (known + 1.0) / 2.0 * stats.span(q01, q99) + q01
    return np.concatenate([known, padding_values], axis=-1)


def _is_mean_std(normalization: str) -> bool:
    if normalization not in ('quantile', 'mean_std'):
        raise ValueError(f"expected 'quantile' or 'mean_std', got '{normalization}'")
    return normalization == 'mean_std'


# --------------------------------------------------------------------------------------- actions


def pad_to_dim(values: np.ndarray, dim: int) -> np.ndarray:
    """Append zeros to the last axis up to `dim`; values that are wide enough are returned as is."""
    missing = dim - values.shape[-1]
    if missing <= 0:
        return values
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])


def delta_actions(actions: np.ndarray, state: np.ndarray, mask: Sequence[bool]) -> np.ndarray:
    """Absolute actions (..., horizon, width) to deltas to `state` where `mask` is True.

    The mask may be narrower than the actions; the rest stays absolute. Keeps the actions' dtype.
    """
    return _shift(actions, state, mask, sign=-1)


def absolute_actions(actions: np.ndarray, state: np.ndarray, mask: Sequence[bool]) -> np.ndarray:
    """Deltas back to absolute actions: the inverse of `delta_actions`, same shapes and dtype."""
    return _shift(actions, state, mask, sign=1)


def _shift(actions: np.ndarray, state: np.ndarray, mask: Sequence[bool], sign: int) -> np.ndarray:
    dims = len(mask)
    offset = np.where(np.asarray(mask, bool), state[..., :dims], 0)
    shifted = actions.copy()
    shifted[..., :dims] += sign * offset[..., None, :]  # in place: float32 actions stay float32
    return shifted


# ---------------------------------------------------------------------------------------- robots


@dataclass(frozen=True)
class Adapter:
    """A robot whose joints mean to the model what they mean on the bus; only the widths differ.

    `state_width` values go in, in the profile's joint order; of the model's padded action vector
    the first `action_width` come out. DROID: 7 joint positions and a gripper in [0, 1] in, 7 joint
    velocities and a gripper out (openpi `droid_policy.py`). LIBERO: end-effector position,
    axis-angle and two finger positions in, 6 end-effector deltas and a gripper out
    (`libero_policy.py`).
    """

    state_width: int
    action_width: int

    def encode_state(self, state: np.ndarray) -> np.ndarray:
        """Robot state (state_width,) to the state the model was trained on, same shape."""
        return state

    def encode_actions(self, actions: np.ndarray) -> np.ndarray:
        """Robot commands (horizon, action_width) to what the model was trained to predict."""
        return actions

    def decode_actions(self, actions: np.ndarray) -> np.ndarray:
        """Unnormalised model actions (horizon, >= action_width) to commands (.., action_width)."""
        return actions[:, : self.action_width]


@dataclass(frozen=True)
class GripperMap:
    """One joint that robot and model count differently; where it stands, None = nowhere."""

    state_index: int | None
    action_index: int | None
    model: tuple[float, float]
    robot: tuple[float, float]  # of the same two positions, so descending for an inverted one

    def to_model(self, value: np.ndarray) -> np.ndarray:
        """The robot's positions as the model counts; nothing is clipped."""
        return _unscale(_scale(value, *self.robot), *self.model)

    def to_robot(self, value: np.ndarray) -> np.ndarray:
        """The inverse of `to_model`."""
        return _unscale(_scale(value, *self.model), *self.robot)


@dataclass(frozen=True)
class GripperAdapter(Adapter):
    """Another adapter, for a robot whose grippers count differently: mapped before it on the way
    in and behind it on the way out, by one table, so that state and command agree."""

    inner: Adapter
    grippers: tuple[GripperMap, ...]

    def encode_state(self, state: np.ndarray) -> np.ndarray:
        mapped = state.astype(np.float64)
        for gripper in self.grippers:
            if (i := gripper.state_index) is not None:
                mapped[i] = gripper.to_model(mapped[i])
        return self.inner.encode_state(mapped)

    def encode_actions(self, actions: np.ndarray) -> np.ndarray:
        mapped = actions.astype(np.float64)
        for gripper in self.grippers:
            if (i := gripper.action_index) is not None:
                mapped[:, i] = gripper.to_model(mapped[:, i])
        return self.inner.encode_actions(mapped)

    def decode_actions(self, actions: np.ndarray) -> np.ndarray:
        decoded = self.inner.decode_actions(actions).astype(np.float64)
        for gripper in self.grippers:
            if (i := gripper.action_index) is not None:
                decoded[:, i] = gripper.to_robot(decoded[:, i])
        return decoded


# Sign of each ALOHA joint in the frame of pi's own robots: 6 arm joints and a gripper, twice.
_ALOHA_SIGNS = np.array([1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0] * 2)
_ALOHA_GRIPPERS = [6, 13]


@dataclass(frozen=True)
class AlohaAdapter(Adapter):
    """ALOHA as openpi feeds it to pi's checkpoints (`aloha_policy.py`, `adapt_to_pi=True`).

    [left arm 6, left gripper, right arm 6, right gripper]; arms in rad. Two joints of each arm
    turn the other way than on pi's robots, and ALOHA's grippers, 0 closed to 1 open, are linear
    in the finger stroke on the way in and in the motor angle on the way out.
    """

    state_width: int = 14
    action_width: int = 14

    def encode_state(self, state: np.ndarray) -> np.ndarray:
        encoded = _ALOHA_SIGNS * state
        encoded[_ALOHA_GRIPPERS] = gripper_to_angular(encoded[_ALOHA_GRIPPERS])
        return encoded

    def encode_actions(self, actions: np.ndarray) -> np.ndarray:
        encoded = _ALOHA_SIGNS * actions
        encoded[:, _ALOHA_GRIPPERS] = gripper_from_angular_inverse(encoded[:, _ALOHA_GRIPPERS])
        return encoded

    def decode_actions(self, actions: np.ndarray) -> np.ndarray:
        decoded = _ALOHA_SIGNS * actions[:, :14]
        decoded[:, _ALOHA_GRIPPERS] = gripper_from_angular(decoded[:, _ALOHA_GRIPPERS])
        return decoded


# Interbotix ViperX gripper: a horn on the motor drives the fingers through a rod (metres).
_HORN_M = 0.022
_ROD_M = 0.036
# Finger stroke of the follower, closed to open (m), and its motor angle (rad), both of ALOHA.
_STROKE_M = (0.01844, 0.05800)
_ALOHA_ANGLE_RAD = (-0.6213, 1.4910)
# Motor angle of pi's gripper, normalised to [0, 1] in training (rad): encoder counts 2405 to 3110.
_PI_ANGLE_RAD = (0.5476, 1.6296)


def gripper_to_angular(value: np.ndarray) -> np.ndarray:
    """ALOHA gripper state (linear in stroke, 0 to 1) to pi's (linear in motor angle)."""
    stroke = _unscale(value, *_STROKE_M)
    # Law of cosines in the triangle of horn, rod and stroke; beyond its reach the angle saturates.
    sine = (_HORN_M**2 + stroke**2 - _ROD_M**2) / (2 * _HORN_M * stroke)
    return _scale(np.arcsin(np.clip(sine, -1.0, 1.0)), *_PI_ANGLE_RAD)


def gripper_from_angular(value: np.ndarray) -> np.ndarray:
    """Model gripper action (rad above pi's closed angle) to ALOHA's command, 0 to 1 in its angle.

    Not the inverse of `gripper_to_angular`: ALOHA commands the motor angle but reports the stroke.
    """
    return _scale(value + _PI_ANGLE_RAD[0], *_ALOHA_ANGLE_RAD)


def gripper_from_angular_inverse(value: np.ndarray) -> np.ndarray:
    """ALOHA's gripper command to the model's action: the inverse of `gripper_from_angular`."""
    return _unscale(value, *_ALOHA_ANGLE_RAD) - _PI_ANGLE_RAD[0]


def _scale(value: np.ndarray, low: float, high: float) -> np.ndarray:
    return (value - low) / (high - low)


def _unscale(value: np.ndarray, low: float, high: float) -> np.ndarray:
    return value * (high - low) + low


_FIXED_ADAPTERS: dict[str, Adapter] = {
    'aloha': AlohaAdapter(),
    'droid': Adapter(state_width=8, action_width=8),
    'libero': Adapter(state_width=8, action_width=7),
}


def make_adapter(name: str, state_width: int, action_width: int) -> Adapter:
    """The adapter of a profile's `action.adapter`; 'identity' takes any widths.

    `state_width` is the number of profile joints, `action_width` that of commanded joints. Raises
    ValueError for an unknown name or widths that the robot does not have.
    """
    if name == 'identity':
        return Adapter(state_width, action_width)
    if name not in _FIXED_ADAPTERS:
        raise ValueError(
            f"action.adapter: expected one of {['identity', *_FIXED_ADAPTERS]}, got '{name}'"
        )
    adapter = _FIXED_ADAPTERS[name]
    if (state_width, action_width) != (adapter.state_width, adapter.action_width):
        raise ValueError(
            f"action.adapter '{name}': expected {adapter.state_width} entries in joints.names and "
            f'{adapter.action_width} in command.names, got {state_width} and {action_width}'
        )
    return adapter
