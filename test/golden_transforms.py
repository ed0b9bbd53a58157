"""Golden data of openpi's transforms, as openpi itself produced it (see golden/transforms.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

GOLDEN = Path(__file__).parent / 'golden'
CONTENT: dict[str, Any] = json.loads((GOLDEN / 'transforms.json').read_text(encoding='utf-8'))
ARRAYS = load_file(GOLDEN / 'transforms.safetensors')

# Which of our model slots openpi's robots fill with which camera. ALOHA's cam_low is not used.
SLOT_OF_CAMERA = {
    'images/cam_high': 'base_0_rgb',
    'images/cam_left_wrist': 'left_wrist_0_rgb',
    'images/cam_right_wrist': 'right_wrist_0_rgb',
    'observation/exterior_image_1_left': 'base_0_rgb',
    'observation/wrist_image_left': 'left_wrist_0_rgb',
    'observation/image': 'base_0_rgb',
    'observation/wrist_image': 'left_wrist_0_rgb',
}


def fields(prefix: str) -> dict[str, np.ndarray]:
    """The arrays below `prefix/`, by the rest of their name."""
    return {
        key[len(prefix) + 1 :]: array
        for key, array in ARRAYS.items()
        if key.startswith(prefix + '/')
    }


def images(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """openpi's input pictures by model slot."""
    return {SLOT_OF_CAMERA[key]: inputs[key] for key in inputs if key in SLOT_OF_CAMERA}


def state(inputs: dict[str, np.ndarray]) -> np.ndarray:
    """openpi's input state as one vector in joint order, as our profiles declare it."""
    if 'observation/joint_position' in inputs:
        return np.append(
            inputs['observation/joint_position'], inputs['observation/gripper_position']
        )
    return inputs['observation/state'] if 'observation/state' in inputs else inputs['state']


def assert_identical(actual: np.ndarray, expected: np.ndarray) -> None:
    """Same dtype, same shape, same bits."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(actual, expected)


def assert_equal_up_to_arcsin(actual: np.ndarray, expected: np.ndarray) -> None:
    """Same dtype, shape and numbers, but for the last bits of numpy's arcsin.

    ALOHA's gripper curve needs it, and it differs by some units in the last place between numpy
    builds and CPUs (with and without AVX-512).
    """
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    tolerance = 8 * np.finfo(expected.dtype).eps
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
