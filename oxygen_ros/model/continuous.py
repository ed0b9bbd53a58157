"""ContinuousJoints: joints that turn without end, in front of any codec.

Owns the choice among positions that are whole turns apart: the model sees each such joint within
half a turn of 0, whatever the driver counts, and its commands come back as near to the measured
position as they can. Knows neither profiles nor topics; the factory puts it around a codec. The
last word on turns is the command gate's, which knows what was sent before (`actions.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from oxygen_ros.model.processor import Codec, ModelInput

if TYPE_CHECKING:
    from oxygen_ros.observation import Observation


def within_half_turn(angle: np.ndarray) -> np.ndarray:
    """Return the equal angle in [-pi, pi) [rad]."""
    return (angle + np.pi) % (2 * np.pi) - np.pi


def nearest_turn(path: np.ndarray, start: float) -> np.ndarray:
    """Return equal angles (n,) without a jump of half a turn, beginning beside `start` [rad]."""
    return np.unwrap(np.append(start, path))[1:]


class ContinuousJoints:
    """Another codec, whose state and commands are counted from the nearest whole turn."""

    def __init__(self, codec: Codec, joints: Sequence[tuple[int, int]]) -> None:
        """`joints` are the indices, in state and in command, of each continuous joint."""
        self.tokenizer = codec.tokenizer
        self.image_size = codec.image_size
        self.camera_slots = codec.camera_slots
        self.max_token_len = codec.max_token_len
        self.action_dim = codec.action_dim
        self.action_horizon = codec.action_horizon
        self._codec, self._joints = codec, tuple(joints)

    def encode(self, observation: Observation) -> ModelInput:
        """As the codec, of the state within half a turn."""
        return self._codec.encode(self._wrapped(observation))

    def decode(self, actions: np.ndarray, observation: Observation) -> np.ndarray:
        """As the codec; a joint then goes the short way from where it was measured."""
        commands = self._codec.decode(actions, self._wrapped(observation))
        for state, command in self._joints:
            commands[:, command] = nearest_turn(commands[:, command], observation.state[state])
        return commands

    def encode_actions(self, commands: np.ndarray, observation: Observation) -> np.ndarray:
        """As the codec, of commands beside the state that the model is shown."""
        shown, commands = self._wrapped(observation), commands.copy()
        for state, command in self._joints:
            commands[:, command] = nearest_turn(commands[:, command], shown.state[state])
        return self._codec.encode_actions(commands, shown)

    def _wrapped(self, observation: Observation) -> Observation:
        state = observation.state.copy()
        turning = [index for index, _ in self._joints]
        state[turning] = within_half_turn(state[turning])
        return replace(observation, state=state)
