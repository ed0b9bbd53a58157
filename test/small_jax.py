"""A checkpoint of pi0.5 that openpi saves in JAX, and its conversion: a program of its own.

    small_jax.py make FOLDER               # FOLDER/jax/0, and FOLDER/jax.npz: what JAX makes of it
    small_jax.py convert CHECKPOINT OUTPUT # oxygen_convert

Model, training state, saving and sampling are openpi's. Only what its converter does not write down
as a literal is smaller than released: the vocabulary, and the hidden layer of both Gemmas.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

CONFIG = 'pi05_small_droid'
VOCAB_SIZE, MLP_DIM, HORIZON = 768, 64, 5
ABSENT = 'left_wrist_0_rgb'
NUM_TOKENS, NUM_STEPS = 20, 4


def shrink() -> Any:
    """Make openpi's Gemmas smaller; return a config of its Droid model with them, now known."""
    from openpi.models import gemma
    from openpi.models_pytorch import gemma_pytorch
    from openpi.training import config

    released = gemma.get_config
    gemma.get_config = lambda variant: dataclasses.replace(released(variant), mlp_dim=MLP_DIM)
    gemma.PALIGEMMA_VOCAB_SIZE = VOCAB_SIZE
    for name in ('PaliGemmaForConditionalGeneration', 'GemmaForCausalLM'):
        setattr(gemma_pytorch, name, with_few_words(getattr(gemma_pytorch, name)))
    droid = config.get_config('pi05_droid')
    model = dataclasses.replace(droid.model, action_horizon=HORIZON)
    config._CONFIGS_DICT[CONFIG] = dataclasses.replace(droid, name=CONFIG, model=model)
    return model


def with_few_words(kind: Any) -> Callable[..., Any]:
    """openpi's PyTorch model has its vocabulary as a literal; change it at the last moment."""

    def make(config: Any) -> Any:
        text = getattr(config, 'text_config', config)
        config._vocab_size = text.vocab_size = VOCAB_SIZE
        return kind(config=config)

    return make


def make(folder: Path) -> None:
    # float32, so that what is compared is the conversion and not the rounding.
    config = dataclasses.replace(shrink(), dtype='float32')
    model = config.load(random_parameters(config))
    given = inputs(config)
    np.savez(folder / 'jax.npz', actions=sample(model, config, given), **given)
    save(model, folder / 'jax')


def random_parameters(config: Any) -> dict[str, Any]:
    """Every part counts in them: fresh ones have the adaptive norms, so the expert, at zero."""
    import jax
    from flax import nnx, traverse_util

    generator = np.random.default_rng(0)

    def draw(path: tuple[str, ...], shape: tuple[int, ...]) -> Any:
        drawn = generator.standard_normal(shape, np.float32)
        if path[-1] in ('bias', 'scale'):
            drawn = 0.1 * drawn + ('img' in path and path[-1] == 'scale')
        else:
            drawn *= 0.02
        return jax.numpy.asarray(drawn)

    shapes = nnx.state(nnx.eval_shape(config.create, jax.random.key(0))).to_pure_dict()
    flat = traverse_util.flatten_dict(shapes)
    return traverse_util.unflatten_dict({path: draw(path, s.shape) for path, s in flat.items()})


def inputs(config: Any) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    slots = ('base_0_rgb', 'left_wrist_0_rgb', 'right_wrist_0_rgb')
    return {
        **{slot: generator.integers(0, 256, (224, 224, 3), np.uint8) for slot in slots},
        'tokens': generator.integers(2, VOCAB_SIZE, NUM_TOKENS),
        'noise': generator.standard_normal((config.action_horizon, config.action_dim), np.float32),
    }


def sample(model: Any, config: Any, given: dict[str, np.ndarray]) -> np.ndarray:
    """JAX's actions (horizon, action_dim); one camera is absent, the prompt is padded."""
    import jax
    from openpi.models.model import Observation
    from openpi.shared import nnx_utils

    prompt = np.zeros((1, config.max_token_len), np.int32)
    prompt[0, :NUM_TOKENS] = given['tokens']
    slots = [name for name in given if name.endswith('_rgb')]
    observation = Observation.from_dict(
        {
            'image': {slot: given[slot][np.newaxis] for slot in slots},
            'image_mask': {slot: np.array([slot != ABSENT]) for slot in slots},
            'state': np.zeros((1, config.action_dim), np.float32),
            'tokenized_prompt': prompt,
            'tokenized_prompt_mask': np.arange(config.max_token_len)[np.newaxis] < NUM_TOKENS,
        }
    )
    observation, noise = jax.tree.map(jax.numpy.asarray, (observation, given['noise'][np.newaxis]))
    with jax.default_matmul_precision('highest'):
        run = nnx_utils.module_jit(model.sample_actions)
        return np.asarray(run(jax.random.key(0), observation, noise=noise, num_steps=NUM_STEPS))[0]


def save(model: Any, folder: Path) -> None:
    """Save step 0 as openpi's training does."""
    import optax
    from flax import nnx
    from openpi.shared.normalize import NormStats
    from openpi.training.utils import TrainState

    stand_in_for_lerobot()
    from openpi.training import checkpoints

    graph, parameters = nnx.split(model)
    state = TrainState(
        step=0, params=parameters, model_def=graph, opt_state=(), tx=optax.identity(),
        ema_decay=None,
    )  # fmt: skip
    stats = NormStats(*(np.full(8, value, np.float32) for value in (0.0, 1.0, -2.0, 2.0)))
    data = SimpleNamespace(norm_stats={'state': stats, 'actions': stats}, asset_id='droid')
    loader = SimpleNamespace(data_config=lambda: data)
    manager, _ = checkpoints.initialize_checkpoint_dir(
        folder, keep_period=None, overwrite=False, resume=False
    )
    checkpoints.save_state(manager, state, loader, step=0)
    manager.wait_until_finished()


def stand_in_for_lerobot() -> None:
    """openpi's checkpoints import its data loader, and that LeRobot's data sets; none is read."""
    names = ['lerobot', 'lerobot.common', 'lerobot.common.datasets']
    datasets = ModuleType('lerobot.common.datasets.lerobot_dataset')
    sys.modules.update({name: ModuleType(name) for name in names}, **{datasets.__name__: datasets})
    vars(sys.modules[names[-1]])['lerobot_dataset'] = datasets


def convert(checkpoint: str, output: str) -> int:
    from oxygen_ros.model import jax_conversion

    shrink()
    return jax_conversion.main([CONFIG, checkpoint, output, '--precision', 'float32'])


if __name__ == '__main__':
    if sys.argv[1] == 'make':
        make(Path(sys.argv[2]))
    else:
        sys.exit(convert(*sys.argv[2:]))
