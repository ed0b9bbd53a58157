"""The bridge to openpi, where it is installed: a training config of its own instead of our table.

Owns every import of openpi, which is optional: sizes, transforms, statistics and prompts are taken
from its TrainConfig, so that a config somebody wrote for their robot works unchanged. Knows nothing
of profiles or topics. The factory calls it when `openpi_config` is set, `jax_conversion` for a
checkpoint that openpi trained in JAX.
Source of the order of transforms: openpi policies/policy_config.py `create_trained_policy`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from oxygen_ros.model.config import CAMERA_SLOTS, PRESETS, GemmaConfig, Pi05Config
from oxygen_ros.model.processor import MAX_NORMALIZED, ModelInput
from oxygen_ros.model.prompt import Tokenizer
from oxygen_ros.model.transforms import Adapter, to_uint8

if TYPE_CHECKING:
    from oxygen_ros.observation import Observation

PALIGEMMA_TOKENIZER = 'gs://big_vision/paligemma_tokenizer.model'


class OpenpiError(RuntimeError):
    """openpi is not there, or a config of it cannot be used here; says what to do."""


@dataclass(frozen=True)
class RobotKeys:
    """How the input of openpi's robot transforms is called; a dot goes one mapping deeper."""

    images: Mapping[str, str]  # by model camera slot
    state: tuple[tuple[str, int, int | None], ...]  # key, first and last joint of it
    channel_first: bool = False


_OWN_DATA = RobotKeys(
    {'base_0_rgb': 'observation/image', 'left_wrist_0_rgb': 'observation/wrist_image'},
    (('observation/state', 0, None),),
)
ROBOT_KEYS = {
    # openpi policies/aloha_policy.py, droid_policy.py, libero_policy.py; the last is also openpi's
    # example for own data sets.
    'aloha': RobotKeys(
        {
            'base_0_rgb': 'images.cam_high',
            'left_wrist_0_rgb': 'images.cam_left_wrist',
            'right_wrist_0_rgb': 'images.cam_right_wrist',
        },
        (('state', 0, None),),
        channel_first=True,
    ),
    'droid': RobotKeys(
        {
            'base_0_rgb': 'observation/exterior_image_1_left',
            'left_wrist_0_rgb': 'observation/wrist_image_left',
        },
        (('observation/joint_position', 0, 7), ('observation/gripper_position', 7, 8)),
    ),
    'libero': _OWN_DATA,
    'identity': _OWN_DATA,
}
"""By the profile's `action.adapter`; `openpi_key` of a camera or the joints says otherwise."""


def robot_keys(adapter: str, cameras: Mapping[str, str], joints: str) -> RobotKeys:
    """Return the keys of a robot; `cameras` (by slot) and `joints` overrule those of the adapter.

    Raises:
        OpenpiError: a camera that has no key.
    """
    known = ROBOT_KEYS[adapter]
    given = {slot: key or known.images.get(slot, '') for slot, key in cameras.items()}
    if nameless := sorted(slot for slot, key in given.items() if not key):
        raise OpenpiError(
            f'cameras: expected an openpi_key for {", ".join(nameless)}: the key under which the '
            f'openpi config takes this picture'
        )
    return RobotKeys(
        {**known.images, **given},
        ((joints, 0, None),) if joints else known.state,
        known.channel_first,
    )


def openpi_modules() -> SimpleNamespace:
    """Return the parts of openpi that are used, and the checkout or folder it was installed in.

    Raises:
        OpenpiError: it cannot be imported, telling what is missing and how to install it.
    """
    try:
        import openpi
        from openpi import transforms
        from openpi.models import gemma
        from openpi.shared import download, normalize
        from openpi.training import config
    except ImportError as error:
        raise OpenpiError(_how_to_install(error)) from error
    return SimpleNamespace(
        checkout=Path(openpi.__file__).resolve().parents[2],
        config=config,
        download=download,
        gemma=gemma,
        normalize=normalize,
        transforms=transforms,
    )


def _how_to_install(error: ImportError) -> str:
    missing = (error.name or 'openpi').partition('.')[0]
    problem = (
        'openpi is not installed'
        if missing == 'openpi'
        else f'openpi is installed, but {missing}, which it needs, is missing or another version,'
    )
    return (
        f'{problem} for {sys.executable} ({error}). Install it with its dependencies from its '
        f'repository (the package of that name on PyPI is empty):\n'
        f'  git clone https://github.com/Physical-Intelligence/openpi\n'
        f'  GIT_LFS_SKIP_SMUDGE=1 {sys.executable} -m pip install '
        f'-e openpi/packages/openpi-client -e openpi'
    )


def train_config(openpi: SimpleNamespace, name: str) -> Any:
    """Return openpi's training config of that name.

    Raises:
        OpenpiError: there is none, or it is not of pi0.5.
    """
    try:
        train = openpi.config.get_config(name)
    except ValueError as error:
        raise OpenpiError(f'openpi config {name!r}: {error}') from error
    if not getattr(train.model, 'pi05', False):
        raise OpenpiError(
            f'openpi config {name!r}: expected a config of pi0.5, but its model is '
            f'{type(train.model).__name__} without pi05=True'
        )
    return train


@dataclass(frozen=True)
class OpenpiPolicy:
    """A training config and the statistics of a checkpoint, ready to process observations."""

    name: str
    config: Pi05Config
    encode: Any
    """openpi's transforms from a robot's observation to the input of the model."""
    decode: Any
    """openpi's transforms from the output of the model to a robot's actions."""


def load_policy(name: str, checkpoint: Path) -> OpenpiPolicy:
    """Return openpi's training config `name` with the statistics of the checkpoint directory.

    Raises:
        OpenpiError: openpi is not installed, has no such config, or it is not of pi0.5.
        FileNotFoundError: the checkpoint has no statistics for the config's asset id.
    """
    try:
        openpi = openpi_modules()
    except OpenpiError as error:
        raise OpenpiError(
            f"parameter 'openpi_config': {error}\n"
            f'or leave openpi_config empty: the profile then says what the config would'
        ) from error
    train = train_config(openpi, name)
    data = _offline(train.data, checkpoint / 'assets').create(train.assets_dirs, train.model)
    if data.asset_id is None:
        raise OpenpiError(f'openpi config {name!r}: has no asset id, so no statistics are known')
    stats = openpi.normalize.load(checkpoint / 'assets' / data.asset_id)
    t, quantiles = openpi.transforms, data.use_quantile_norm
    return OpenpiPolicy(
        name,
        _sizes(openpi.gemma, train.model),
        t.compose(
            [
                *data.data_transforms.inputs,
                t.Normalize(stats, use_quantiles=quantiles),
                *data.model_transforms.inputs,
            ]
        ),
        t.compose(
            [
                *data.model_transforms.outputs,
                t.Unnormalize(stats, use_quantiles=quantiles),
                *data.data_transforms.outputs,
            ]
        ),
    )


def _offline(factory: Any, assets: Path) -> Any:
    """A data config that finds its statistics in the checkpoint.

    As it is, it may fetch those of the model that was fine-tuned from the network, for nothing.
    """
    if not hasattr(factory, 'assets'):
        return factory
    return replace(factory, assets=replace(factory.assets, assets_dir=str(assets)))


def _sizes(gemma: Any, model: Any) -> Pi05Config:
    def stack(variant: str) -> GemmaConfig:
        c = gemma.get_config(variant)
        return GemmaConfig(c.width, c.depth, c.mlp_dim, c.num_heads, c.num_kv_heads, c.head_dim)

    return Pi05Config(
        vlm=stack(model.paligemma_variant),
        expert=stack(model.action_expert_variant),
        vision=PRESETS['pi05'].vision,  # openpi has no other
        vocab_size=gemma.PALIGEMMA_VOCAB_SIZE,
        action_dim=model.action_dim,
        action_horizon=model.action_horizon,
        max_token_len=model.max_token_len,
        camera_slots=CAMERA_SLOTS,
    )


def tokenizer_path() -> Path:
    """Return PaliGemma's tokenizer as openpi caches it; downloads it where it is not there yet."""
    return Path(openpi_modules().download.maybe_download(PALIGEMMA_TOKENIZER, gs={'token': 'anon'}))


class OpenpiProcessor:
    """Both ways between robot and model by openpi's own transforms; see `processor.Processor`.

    `adapter` maps only what robot and openpi count differently (grippers); the widths of state and
    command are its.
    """

    def __init__(
        self, policy: OpenpiPolicy, keys: RobotKeys, adapter: Adapter, tokenizer: Tokenizer
    ) -> None:
        """Try everything once on a blank observation.

        Raises:
            OpenpiError: the transforms of the config do not take or give what the profile says.
        """
        config = policy.config
        self.tokenizer = tokenizer
        self.image_size = config.vision.image_size
        self.camera_slots = config.camera_slots
        self.max_token_len = config.max_token_len
        self.action_dim = config.action_dim
        self.action_horizon = config.action_horizon
        self._policy, self._keys, self._adapter = policy, keys, adapter
        self._check()

    def encode(self, observation: Observation) -> ModelInput:
        """Raises ValueError if the state is not what the profile declares."""
        outputs = self._encoded(observation)
        mask = np.asarray(outputs['tokenized_prompt_mask'], bool)
        return ModelInput(
            # The black pictures of absent cameras were only for the transforms.
            images={
                slot: to_uint8(np.asarray(outputs['image'][slot]))
                for slot in self.camera_slots
                if slot in observation.images and outputs['image_mask'][slot]
            },
            tokens=np.asarray(outputs['tokenized_prompt'])[mask].tolist(),
            # openpi cuts silently; a prompt that fills every place has in all likelihood been cut.
            truncated_tokens=int(mask.all()),
        )

    def decode(self, actions: np.ndarray, observation: Observation) -> np.ndarray:
        """Model output (action_horizon, action_dim) to commands, float64 (action_horizon, joints).

        `observation` is the one the actions were computed from: deltas are relative to its state.
        """
        return self._adapter.decode_actions(self._commands(actions, observation))

    def encode_actions(self, commands: np.ndarray, observation: Observation) -> np.ndarray:
        """Commands (n, joints) to what the model would have put out, float32 (n, action_dim).

        openpi's transforms for training do it; see `processor.Processor.encode_actions`.
        """
        actions = self._adapter.encode_actions(commands)
        encoded = np.asarray(self._encoded(observation, actions=actions)['actions'])
        return np.clip(encoded, -MAX_NORMALIZED, MAX_NORMALIZED).astype(np.float32)

    def padded_state(self, observation: Observation) -> np.ndarray:
        """Normalised state (action_dim,), padded with zeros; see `processor.Processor`."""
        return np.asarray(self._encoded(observation)['state'])

    def _commands(self, actions: np.ndarray, observation: Observation) -> np.ndarray:
        state = self.padded_state(observation)
        outputs = self._policy.decode({'state': state, 'actions': actions})
        return np.asarray(outputs['actions'], np.float64)

    def _encoded(self, observation: Observation, **extra: np.ndarray) -> Any:
        state = observation.state
        if state.shape != (self._adapter.state_width,) or not np.isfinite(state).all():
            raise ValueError(
                f'expected a finite state of {self._adapter.state_width} joints, got {state}'
            )
        state = self._adapter.encode_state(state)
        data: dict[str, Any] = {'prompt': observation.instruction, **extra}
        for key, first, last in self._keys.state:
            _put(data, key, state[first:last])
        for slot, key in self._keys.images.items():
            image = observation.images.get(slot)
            if image is None:
                image = np.zeros((self.image_size, self.image_size, 3), np.uint8)
            _put(data, key, np.moveaxis(image, -1, 0) if self._keys.channel_first else image)
        return self._policy.encode(data)

    def _check(self) -> None:
        from oxygen_ros.observation import Observation

        size = (self.image_size, self.image_size, 3)
        images = {slot: np.zeros(size, np.uint8) for slot in self._keys.images}
        state = np.zeros(self._adapter.state_width, np.float32)
        blank = Observation(0, 0, 0, images, state, 'check')
        name = f'openpi config {self._policy.name!r}'
        try:
            inputs = self.encode(blank)
            commands = self._commands(np.zeros((self.action_horizon, self.action_dim)), blank)
        except Exception as error:
            raise OpenpiError(
                f'{name}: its transforms fail on a blank observation ({type(error).__name__}: '
                f'{error}) with the keys {sorted(self._keys.images.values())} and '
                f'{[key for key, _, _ in self._keys.state]}; set openpi_key of cameras and joints '
                f'to what they expect'
            ) from error
        sizes = {image.shape for image in inputs.images.values()}
        if sizes != {size}:
            raise OpenpiError(f'{name}: expected pictures of {size}, got {sorted(sizes)}')
        if not (np.isfinite(commands).all() and np.isfinite(self.padded_state(blank)).all()):
            raise OpenpiError(
                f'{name}: expected finite numbers for a blank observation, got NaN or infinity; '
                f"are there any in the checkpoint's norm_stats.json?"
            )
        expected = (self.action_horizon, self._adapter.action_width)
        if commands.shape != expected:
            raise OpenpiError(
                f'{name}: expected commands (horizon, command.names) {expected}, got '
                f'{commands.shape}'
            )


def _put(data: dict[str, Any], key: str, value: np.ndarray) -> None:
    *path, last = key.split('.')
    for name in path:
        data = data.setdefault(name, {})
    data[last] = value
