"""Turns an Observation into a ModelInput, and the model's actions into robot commands.

It owns the order in which the transforms of one robot and one checkpoint are applied, and checks
that profile, statistics and model fit together. It knows nothing about torch, devices, topics or
deadlines. The model runner calls `encode` before the prefill and `decode` after the denoising.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from oxygen_ros.model.prompt import PROMPT_FORMS, Tokenizer, prompt_tokens
from oxygen_ros.model.transforms import (
    NORMALIZATIONS,
    Adapter,
    NormStats,
    VectorStats,
    absolute_actions,
    delta_actions,
    normalize,
    pad_to_dim,
    resize_with_pad,
    to_uint8,
    unnormalize,
)

if TYPE_CHECKING:
    from oxygen_ros.observation import Observation


MAX_NORMALIZED = 10.0
"""Largest normalised command. A joint that never moved in training has a range of nothing, and the
smallest difference would be a million times what the model knows."""


@dataclass(frozen=True)
class ModelInput:
    """One observation as the model takes it."""

    images: dict[str, np.ndarray]  # slot -> uint8 (S, S, 3) RGB; slot order, present cameras only
    tokens: list[int]  # prompt, BOS first, unpadded, at most max_token_len
    truncated_tokens: int  # how many tokens did not fit; they were cut from the end
    omitted_notes: int = 0  # how many of the oldest notes did not fit


class Codec(Protocol):
    """What the engine asks of both ways between robot and model; see `Processor`."""

    tokenizer: Tokenizer
    image_size: int
    camera_slots: tuple[str, ...]
    max_token_len: int
    action_dim: int
    action_horizon: int

    def encode(self, observation: Observation) -> ModelInput: ...
    def decode(self, actions: np.ndarray, observation: Observation) -> np.ndarray: ...
    def encode_actions(self, commands: np.ndarray, observation: Observation) -> np.ndarray: ...


class Processor:
    """Both ways between robot and model for one profile and one checkpoint; holds no frame.

    Order in: adapter, normalise, resize, prompt. Order out: unnormalise, delta to absolute,
    adapter. This is openpi's order (`policies/policy_config.py`).
    """

    def __init__(
        self,
        *,
        image_size: int,
        camera_slots: Sequence[str],
        max_token_len: int,
        action_dim: int,
        action_horizon: int,
        tokenizer: Tokenizer,
        prompt: str,
        normalization: str,
        norm_stats: NormStats | None,
        adapter: Adapter,
        delta_mask: Sequence[bool],
    ) -> None:
        """Take the model's sizes and the profile's `model.*` and `action.*` choices.

        `adapter` comes from `make_adapter` and fixes the widths of state and command; `norm_stats`
        is None exactly if `normalization` is 'none'; an empty `delta_mask` means absolute actions.
        Raises ValueError naming the file or profile key where these do not fit together.
        """
        self.image_size = image_size
        self.camera_slots = tuple(camera_slots)
        self.max_token_len = max_token_len
        self.action_dim = action_dim
        self.action_horizon = action_horizon
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.normalization = normalization
        self.norm_stats = norm_stats
        self.adapter = adapter
        self.delta_mask = tuple(delta_mask)
        self._check_profile()
        self._check_stats()

    @property
    def num_joints(self) -> int:
        """Width of a command, in the order of the profile's command.names."""
        return self.adapter.action_width

    def encode(self, observation: Observation) -> ModelInput:
        """Raises ValueError if state or images are not what the profile declares."""
        state = self._normalized_state(observation)
        notes, instruction = observation.notes, observation.instruction
        # Notes are whole or not there: the newest as far as they fit, none before a cut prompt.
        for omitted in range(len(notes) + 1):
            tokens = prompt_tokens(self.prompt, instruction, state, self.tokenizer, notes[omitted:])
            if len(tokens) <= self.max_token_len:
                break
        return ModelInput(
            images=self._images(observation),
            tokens=tokens[: self.max_token_len],
            truncated_tokens=max(0, len(tokens) - self.max_token_len),
            omitted_notes=omitted,
        )

    def decode(self, actions: np.ndarray, observation: Observation) -> np.ndarray:
        """Model output (action_horizon, action_dim) to commands, float64 (action_horizon, joints).

        `observation` is the one the actions were computed from: deltas are relative to its state.
        """
        expected = (self.action_horizon, self.action_dim)
        if actions.shape != expected:
            raise ValueError(f'expected actions (horizon, dim) {expected}, got {actions.shape}')
        if self.norm_stats is not None:
            actions = unnormalize(actions, self.norm_stats.actions, self.normalization)
        if self.delta_mask:
            actions = absolute_actions(actions, self._model_state(observation), self.delta_mask)
        return self.adapter.decode_actions(actions).astype(np.float64)

    def encode_actions(self, commands: np.ndarray, observation: Observation) -> np.ndarray:
        """Commands (n, joints) to what the model would have put out, float32 (n, action_dim).

        The inverse of `decode`, for commands that an earlier chunk planned: their deltas are taken
        to the state of this observation, so the robot may have moved since. What the robot has no
        joint for is 0.
        """
        actions = self.adapter.encode_actions(commands)
        if self.delta_mask:
            actions = delta_actions(actions, self._model_state(observation), self.delta_mask)
        if self.norm_stats is not None:
            actions = normalize(actions, self.norm_stats.actions, self.normalization)
            actions = np.clip(actions, -MAX_NORMALIZED, MAX_NORMALIZED)
        return pad_to_dim(actions, self.action_dim).astype(np.float32)

    def padded_state(self, observation: Observation) -> np.ndarray:
        """Normalised state (action_dim,), padded with zeros: openpi's model input 'state'."""
        return pad_to_dim(self._normalized_state(observation), self.action_dim)

    def _normalized_state(self, observation: Observation) -> np.ndarray:
        state = observation.state
        if state.shape != (self.adapter.state_width,):
            raise ValueError(
                f'expected a state of {self.adapter.state_width} joints, got shape {state.shape}'
            )
        if not np.isfinite(state).all():
            raise ValueError(f'expected a finite state, got {state.tolist()}')
        state = self.adapter.encode_state(state)
        if self.norm_stats is None:
            return state
        return normalize(state, self.norm_stats.state, self.normalization)

    def _model_state(self, observation: Observation) -> np.ndarray:
        # Normalised, padded and unnormalised again, as openpi does: the round trip costs a
        # rounding that deltas inherit, and the goldens hold it.
        state = self.padded_state(observation)
        if self.norm_stats is None:
            return state
        return unnormalize(state, self.norm_stats.state, self.normalization)

    def _images(self, observation: Observation) -> dict[str, np.ndarray]:
        unknown = sorted(set(observation.images) - set(self.camera_slots))
        if unknown:
            raise ValueError(f'expected cameras among {list(self.camera_slots)}, got {unknown}')
        if not observation.images:
            raise ValueError(f'expected at least one camera of {list(self.camera_slots)}, got none')
        return {
            slot: self._image(slot, observation.images[slot])
            for slot in self.camera_slots
            if slot in observation.images
        }

    def _image(self, slot: str, image: np.ndarray) -> np.ndarray:
        try:
            return resize_with_pad(to_uint8(image), self.image_size)
        except ValueError as error:
            raise ValueError(f"camera '{slot}': {error}") from error

    def _check_profile(self) -> None:
        if self.prompt not in PROMPT_FORMS:
            raise ValueError(
                f"model.prompt: expected one of {list(PROMPT_FORMS)}, got '{self.prompt}'"
            )
        for key, width in (
            ('joints.names', self.adapter.state_width),
            ('command.names', self.adapter.action_width),
        ):
            if not 1 <= width <= self.action_dim:
                raise ValueError(
                    f'{key}: expected 1 to {self.action_dim} entries, the width of the model, '
                    f'got {width}'
                )
        if self.delta_mask and len(self.delta_mask) != self.adapter.action_width:
            raise ValueError(
                f'action.delta_mask: expected {self.adapter.action_width} entries, one per '
                f'command.names, or none, got {len(self.delta_mask)}'
            )
        if any(self.delta_mask[self.adapter.state_width :]):
            raise ValueError(
                f'action.delta_mask: a delta needs a state, but joints.names has only '
                f'{self.adapter.state_width} entries'
            )

    def _check_stats(self) -> None:
        if self.normalization not in NORMALIZATIONS:
            raise ValueError(
                f'model.normalization: expected one of {list(NORMALIZATIONS)}, '
                f"got '{self.normalization}'"
            )
        if self.norm_stats is None:
            if self.normalization != 'none':
                raise ValueError(
                    f"model.normalization is '{self.normalization}', which needs the checkpoint's "
                    f"norm_stats.json, got none; set it to 'none' only if the model was trained "
                    f'on raw values'
                )
            return
        if self.normalization == 'none':
            raise ValueError(
                f"{self.norm_stats.source}: statistics given, but model.normalization is 'none'"
            )
        source = self.norm_stats.source
        self._check_vector(f"{source}: 'state'", self.norm_stats.state, self.adapter.state_width)
        self._check_vector(
            f"{source}: 'actions'", self.norm_stats.actions, self.adapter.action_width
        )

    def _check_vector(self, where: str, stats: VectorStats, width: int) -> None:
        if not width <= stats.width <= self.action_dim:
            raise ValueError(
                f'{where}: expected statistics of {width} to {self.action_dim} dimensions '
                f'(the robot and the model), got {stats.width}; they belong to another robot'
            )
        if self.normalization == 'mean_std' and not np.isfinite([stats.mean, stats.std]).all():
            raise ValueError(f'{where}: no mean and std; set model.normalization to quantile')
        if self.normalization == 'quantile':
            try:
                stats.quantiles()
            except ValueError as error:
                raise ValueError(f'{where}: {error}') from error
