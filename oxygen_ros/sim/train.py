"""`oxygen_train`: makes the model that ships in resource/tabletop, from nothing, on one CPU core.

Owns the recipe: data, tokenizer, vision warm-up, joint training, DAgger rounds, evaluation, export
in openpi's layout. The network and its loss are those of `model/`; nothing here is a layer that is
served. Seeded, and resumable at any step.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from oxygen_ros.model.config import Pi05Config, preset
from oxygen_ros.model.pi05 import Pi05
from oxygen_ros.model.processor import Processor
from oxygen_ros.model.prompt import SentencePieceTokenizer, Tokenizer, state_prompt
from oxygen_ros.model.training import TextBatch, TrainingBatch, losses
from oxygen_ros.model.transforms import (
    delta_actions,
    load_norm_stats,
    make_adapter,
    normalize,
    pad_to_dim,
)
from oxygen_ros.model.weights import random_model, save_model
from oxygen_ros.observation import Observation
from oxygen_ros.profile import RobotProfile, load_profile, share_folder
from oxygen_ros.sim.dataset import (
    Moments,
    Recorder,
    concatenate,
    load_moments,
    random_moment,
    write_norm_stats,
)
from oxygen_ros.sim.model_card import write_model_card
from oxygen_ros.sim.rollout import Pilot, Score, evaluate, record_on_policy
from oxygen_ros.sim.world import (
    CAMERAS,
    CELLS,
    COLOURS,
    IMAGE_SIZE,
    INSTRUCTIONS,
    JOINTS,
    TabletopWorld,
)

CHECKPOINT_EVERY = 200
EVALUATION_SEED = 50_000


@dataclass(frozen=True)
class Stage:
    """One stretch of optimisation."""

    name: str
    steps: int
    learning_rate: float
    auxiliary_weight: float
    joint: bool = True
    """False trains the vision tower alone."""
    flow_weight: float = 1.0
    num_draws: int = 3
    """Noise draws that share one prefix."""
    on_policy_share: float = 0.0
    """Part of each batch drawn from the DAgger frames."""


@dataclass(frozen=True)
class Recipe:
    seed: int
    num_moments: int
    num_on_policy: int
    stages: tuple[Stage, ...]
    num_episodes: int
    batch_size: int = 32


def full_recipe(seed: int) -> Recipe:
    return Recipe(
        seed=seed,
        num_moments=16_000,
        num_on_policy=2_000,
        stages=(
            Stage('vision', 400, 1.5e-3, 1.0, joint=False),
            Stage('joint', 2600, 1.5e-3, 0.5, flow_weight=4.0, num_draws=8),
            Stage('dagger-1', 1300, 8e-4, 0.5, flow_weight=4.0, num_draws=8, on_policy_share=0.4),
            Stage('dagger-2', 1400, 6e-4, 0.5, flow_weight=4.0, num_draws=8, on_policy_share=0.5),
        ),
        num_episodes=150,
    )


def quick_recipe(seed: int) -> Recipe:
    """Every step of the full recipe, in seconds: it learns a little and nothing useful."""
    return Recipe(
        seed=seed,
        num_moments=200,
        num_on_policy=20,
        stages=(
            Stage('vision', 10, 1.5e-3, 1.0, joint=False),
            Stage('joint', 30, 1.5e-3, 0.5),
            Stage('dagger-1', 5, 5e-4, 0.5, on_policy_share=0.5),
        ),
        num_episodes=2,
        batch_size=16,
    )


# --- tokenizer --------------------------------------------------------------------------------


def train_tokenizer(profile: RobotProfile, vocab_size: int, path: Path) -> None:
    """Write a SentencePiece BPE model that knows every word of the table and every state bin.

    The identity normaliser keeps the file at a hundredth of the default's size.
    """
    rng = np.random.default_rng(0)
    sentences = [str(number) for number in range(-1, 256) for _ in range(60)]
    for _ in range(3000):
        phrase = INSTRUCTIONS[rng.integers(len(INSTRUCTIONS))].format(rng.choice(COLOURS))
        # Cut before the first number and behind the last: a bin must stay a token of its own.
        head, _, end = state_prompt(phrase, np.zeros(1)).partition('128')
        sentences += [head, end]
        row, column = CELLS[rng.integers(len(CELLS))]
        sentences += [task.prompt for task in profile.tasks]
        sentences.append(f'moving to the {rng.choice(COLOURS)} block, {row} {column}')
        sentences.append(f'touching the {rng.choice(COLOURS)} block')
        sentences.append(f'red {row} {column}, green {row} {column}, blue {row} {column}')
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('wb') as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=file,
            model_type='bpe',
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=1.0,
            hard_vocab_limit=False,
            normalization_rule_name='identity',
            pad_id=0,
            eos_id=1,
            bos_id=2,
            unk_id=3,
            num_threads=1,
            minloglevel=2,
        )


# --- batches ----------------------------------------------------------------------------------


def make_processor(profile: RobotProfile, config: Pi05Config, folder: Path) -> Processor:
    """Return the processor that also serves the model of `folder`."""
    joints = profile.joints.names
    return Processor(
        image_size=config.vision.image_size,
        camera_slots=config.camera_slots,
        max_token_len=config.max_token_len,
        action_dim=config.action_dim,
        action_horizon=config.action_horizon,
        tokenizer=SentencePieceTokenizer(folder / 'tokenizer.model'),
        prompt=profile.model.prompt,
        normalization=profile.model.normalization,
        norm_stats=load_norm_stats(folder / 'assets' / profile.name / 'norm_stats.json'),
        adapter=make_adapter(profile.action.adapter, len(joints), len(profile.command.names)),
        delta_mask=profile.action.delta_mask,
    )


def encode_actions(processor: Processor, chunk: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Return (..., horizon, action_dim): the inverse of `Processor.decode`."""
    assert processor.norm_stats is not None
    deltas = delta_actions(chunk, state, processor.delta_mask)
    normalized = normalize(deltas, processor.norm_stats.actions, processor.normalization)
    return pad_to_dim(normalized, processor.action_dim)


def _padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    length = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (length - len(row))] for row in rows])


def text_batch(prompt: Sequence[int], texts: Sequence[Sequence[int]], eos_id: int) -> TextBatch:
    """Return the teacher-forced batch of one task: `texts` end with EOS and are all that counts."""
    rows = [[*prompt, *text, eos_id] for text in texts]
    inputs, targets = _padded([row[:-1] for row in rows], 0), _padded([row[1:] for row in rows], 0)
    index = torch.arange(inputs.shape[1])
    ends = torch.tensor([len(row) - 1 for row in rows])
    counted = (index >= len(prompt) - 1) & (index < ends[:, None])
    return TextBatch(inputs, targets, counted)


class Batches:
    """Draws training batches; the same numbers (seed, stage, step) give the same batch."""

    CAMERA_CHOICES = ((0, 1), (0, 1), (0, 1), (0,), (0,), (1,))
    """One camera is left out of a whole batch now and then: no padding, and the robot survives."""

    def __init__(
        self,
        profile: RobotProfile,
        processor: Processor,
        recipe: Recipe,
        moments: Moments,
        on_policy: Moments | None,
    ) -> None:
        self._slots = [camera.slot for camera in profile.cameras]
        self._tasks = [
            (task.kind, processor.tokenizer.encode(task.prompt)) for task in profile.tasks
        ]
        self._processor = processor
        self._recipe = recipe
        self._parts = [part for part in (moments, on_policy) if part is not None]

    def draw(self, stage: Stage, rng: np.random.Generator) -> tuple[TrainingBatch, Tensor, Tensor]:
        """Return a batch, the blocks and tip in its pictures (B, C, 4, 2), states (B, 4)."""
        cameras = self.CAMERA_CHOICES[rng.integers(len(self.CAMERA_CHOICES))]
        samples = [self._sample(stage, rng, cameras) for _ in range(self._recipe.batch_size)]
        images, prompts, actions, texts, points, states = zip(*samples, strict=True)
        pixels = torch.from_numpy(np.stack(images)).permute(0, 1, 4, 2, 3).float() / 127.5 - 1.0
        # Light and colour balance of no two cameras are alike.
        gain = torch.from_numpy(rng.normal(1.0, 0.05, (*pixels.shape[:3], 1, 1)))
        shift = torch.from_numpy(rng.normal(0.0, 0.05, (*pixels.shape[:2], 1, 1, 1)))
        pixels = (pixels * gain + shift).clamp(-1.0, 1.0).float()
        eos_id = self._processor.tokenizer.eos_id
        batch = TrainingBatch(
            images=pixels,
            tokens=_padded(prompts, self._processor.tokenizer.pad_id),
            num_tokens=torch.tensor([len(prompt) for prompt in prompts]),
            actions=torch.from_numpy(np.stack(actions)).float(),
            texts=tuple(
                text_batch(prompt, [text[i] for text in texts], eos_id)
                for i, (_, prompt) in enumerate(self._tasks)
            ),
        )
        return batch, torch.from_numpy(np.stack(points)), torch.from_numpy(np.stack(states)).float()

    def _sample(self, stage: Stage, rng: np.random.Generator, cameras: Sequence[int]) -> tuple:
        part = self._parts[-1 if rng.random() < stage.on_policy_share else 0]
        i, colour = int(rng.integers(len(part))), int(rng.integers(len(COLOURS)))
        state = part.joints[i]
        observation = Observation(
            frame=0,
            stamp_ns=0,
            time_ns=0,
            images={self._slots[c]: part.images[i, c] for c in cameras},
            state=state,
            instruction=INSTRUCTIONS[rng.integers(len(INSTRUCTIONS))].format(COLOURS[colour]),
        )
        inputs = self._processor.encode(observation)
        assert not inputs.truncated_tokens
        truth = {'text': part.narrations[i, colour], 'memory': part.memories[i]}
        encode = self._processor.tokenizer.encode
        return (
            np.stack(list(inputs.images.values())),
            inputs.tokens,
            encode_actions(self._processor, part.chunks[i, colour], state),
            [encode(str(truth[kind])) for kind, _ in self._tasks],
            part.points[i, list(cameras)],
            self._processor.padded_state(observation)[: len(JOINTS)],
        )


# --- model ------------------------------------------------------------------------------------


class Pointer(nn.Module):
    """Throw-away head: in which patch, and where in it, are the three blocks and the fingertip?

    Stands in for the pre-training of a vision tower, and keeps the pictures honest later on.
    """

    def __init__(self, width: int, num_marks: int, patches_per_side: int) -> None:
        super().__init__()
        self.read = nn.Linear(width, 3 * num_marks)
        self.side = patches_per_side

    def loss(self, image_tokens: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the share of patches found, for tokens (B, C, T, W), points
        (B, C, marks, 2)."""
        marks = points.shape[-2]
        out = self.read(image_tokens).transpose(-1, -2)  # (B, C, 3 * marks, T)
        logits, offsets = out[:, :, :marks], out[:, :, marks:].unflatten(2, (marks, 2))
        inside = ((points >= 0) & (points < 1)).all(-1)
        scaled = points.clamp(0, 1 - 1e-6) * self.side
        column, row = scaled.long().unbind(-1)
        target = row * self.side + column
        index = target[..., None, None].expand(*target.shape, 2, 1)
        offset = offsets.gather(-1, index)[..., 0]
        position = functional.cross_entropy(logits[inside], target[inside])
        within = functional.mse_loss(offset[inside], (scaled - scaled.floor() - 0.5)[inside])
        found = (logits.argmax(-1) == target)[inside].float().mean()
        return position + 4.0 * within, found


class Coach(nn.Module):
    """Throw-away head: what are the joints, and what should they do, said in one linear layer?

    It reads the last token of the prefix, so the backbone learns to read the state out of its bins
    and to combine it with what it sees. Does for a beginner what π0.5's backbone gets from
    predicting discrete action tokens (arXiv 2504.16054, section IV).
    """

    def __init__(self, width: int, horizon: int, num_joints: int) -> None:
        super().__init__()
        self.read = nn.Linear(width, (1 + horizon) * num_joints)
        self.num_joints = num_joints

    def loss(self, prefix_rows: Tensor, states: Tensor, actions: Tensor) -> Tensor:
        """Return the squared error for states (B, joints) and actions (B, H, joints or more)."""
        targets = torch.cat([states[:, None], actions[..., : self.num_joints]], dim=1)
        return functional.mse_loss(self.read(prefix_rows), targets.flatten(1))


def new_model(config: Pi05Config, tokenizer: Tokenizer, images: np.ndarray, seed: int) -> Pi05:
    """Return an untrained model whose first steps are short ones.

    Fan-in scaled weights; patches that start at zero mean and unit deviation over `images`
    (n, S, S, 3); open gates in the action expert, whatever the time; numbers whose embeddings
    vary smoothly.
    """
    model = random_model(config, seed=seed, device=torch.device('cpu'), dtype=torch.float32)
    model.requires_grad_(True)
    with torch.no_grad():
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        patches = model.vision.patch(pixels)
        deviation, mean = torch.std_mean(patches, dim=(0, 2, 3))
        model.vision.patch.weight /= deviation[:, None, None, None]
        model.vision.patch.bias = nn.Parameter(-mean / deviation)
        for name, parameter in model.expert.named_parameters():
            # Random weights here would let the fastest sinusoids of the time, which are noise to a
            # beginner, shake every norm.
            if name.endswith('dense.weight'):
                parameter.zero_()
            if name.endswith('dense.bias'):
                parameter[-config.expert.width :] = 1.0
        half = config.vlm.width // 2
        cycles = 0.25 * 32 ** (torch.arange(half) / (half - 1))
        for number in range(256):
            ids = tokenizer.encode(str(number))
            assert len(ids) == 1, f'the number {number} is not one token'
            angles = 2 * math.pi * cycles * number / 256
            row = torch.cat([angles.sin(), angles.cos()]) * math.sqrt(2 / config.vlm.width)
            model.embedding.weight[ids[0]] = row
    return model


class Trainer:
    """Model, head and optimiser of the running stage, and the file they survive in."""

    def __init__(self, model: Pi05, recipe: Recipe, checkpoint: Path) -> None:
        config = model.config
        side = config.vision.image_size // config.vision.patch_size
        torch.manual_seed(recipe.seed)
        self.model = model
        self.pointer = Pointer(config.vlm.width, len(COLOURS) + 1, side)
        self.coach = Coach(config.vlm.width, config.action_horizon, len(JOINTS))
        self.recipe = recipe
        self.stage_index = 0
        self.step = 0
        self.cpu_s = 0.0
        """Processor time of training so far, of this and earlier runs."""
        self._checkpoint = checkpoint
        self._optimizer = self._new_optimizer()

    def resume(self) -> bool:
        """Go on where the checkpoint file, if there is one, was written."""
        if not self._checkpoint.is_file():
            return False
        tensors = load_file(self._checkpoint)
        with safe_open(self._checkpoint, framework='pt') as file:
            progress = json.loads(file.metadata()['progress'])
        for part, module in self._modules().items():
            module.load_state_dict(_below(part, tensors))
        states: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _below('optimizer', tensors).items():
            number, _, quantity = name.partition('.')
            states.setdefault(int(number), {})[quantity] = tensor
        groups = progress['optimizer_groups']
        self._optimizer.load_state_dict({'state': states, 'param_groups': groups})
        self.stage_index, self.step = progress['stage'], progress['step']
        self.cpu_s = progress['cpu_s']
        return True

    def save(self) -> None:
        """Write the checkpoint file, all or nothing."""
        optimizer = self._optimizer.state_dict()
        tensors = {
            f'{part}.{name}': tensor
            for part, module in self._modules().items()
            for name, tensor in module.state_dict().items()
        }
        for number, state in optimizer['state'].items():
            tensors |= {f'optimizer.{number}.{quantity}': state[quantity] for quantity in state}
        progress = {
            'stage': self.stage_index,
            'step': self.step,
            'cpu_s': self.cpu_s,
            'optimizer_groups': optimizer['param_groups'],
        }
        unfinished = self._checkpoint.with_suffix('.part')
        save_file(tensors, unfinished, metadata={'progress': json.dumps(progress)})
        unfinished.rename(self._checkpoint)

    def run(self, stage: Stage, batches: Batches) -> Iterator[dict[str, float]]:
        """Do the remaining steps of the current stage; yield the losses of each."""
        self.model.train()
        while self.step < stage.steps:
            started = time.process_time()
            rng = np.random.default_rng((self.recipe.seed, self.stage_index, self.step))
            loss, numbers = self._loss(stage, batches, rng)
            self._descend(stage, loss)
            self.step += 1
            self.cpu_s += time.process_time() - started
            if self.step % CHECKPOINT_EVERY == 0:
                self.save()
            yield numbers
        self.stage_index, self.step = self.stage_index + 1, 0
        self._optimizer = self._new_optimizer()
        self.save()
        self.model.eval()

    def _loss(
        self, stage: Stage, batches: Batches, rng: np.random.Generator
    ) -> tuple[Tensor, dict[str, float]]:
        batch, points, states = batches.draw(stage, rng)
        if not stage.joint:
            tokens = self.model.vision(batch.images.flatten(0, 1)).unflatten(0, points.shape[:2])
            loss, found = self.pointer.loss(tokens, points)
            return loss, {'pointer': loss.item(), 'found': found.item()}
        size, horizon, dim = batch.actions.shape
        draws = (size, stage.num_draws)
        noise = rng.standard_normal((*draws, horizon, dim), dtype=np.float32)
        times = 0.999 * rng.beta(1.5, 1.0, draws) + 0.001  # openpi models/pi0.py
        result = losses(self.model, batch, torch.from_numpy(noise), torch.from_numpy(times).float())
        pointer, found = self.pointer.loss(result.image_tokens, points)
        total = stage.flow_weight * result.flow + sum(result.texts)
        coach = self.coach.loss(result.prefix_rows, states, batch.actions)
        total = total + stage.auxiliary_weight * (pointer + stage.flow_weight * coach)
        numbers = {'flow': result.flow.item(), 'coach': coach.item()}
        numbers.update({f'text{i}': text.item() for i, text in enumerate(result.texts)})
        numbers.update({'pointer': pointer.item(), 'found': found.item()})
        return total, numbers

    def _descend(self, stage: Stage, loss: Tensor) -> None:
        warm_up = min(80, stage.steps // 4 + 1)
        progress = self.step / stage.steps
        scale = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * progress))
        for group in self._optimizer.param_groups:
            group['lr'] = stage.learning_rate * scale * min(1.0, (self.step + 1) / warm_up)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters(), 1.0)
        self._optimizer.step()

    def _modules(self) -> dict[str, nn.Module]:
        return {'model': self.model, 'pointer': self.pointer, 'coach': self.coach}

    def _parameters(self) -> list[nn.Parameter]:
        modules = self._modules().values()
        return [parameter for module in modules for parameter in module.parameters()]

    def _new_optimizer(self) -> torch.optim.Optimizer:
        matrices = [p for p in self._parameters() if p.ndim > 1]
        vectors = [p for p in self._parameters() if p.ndim <= 1]
        groups = [
            {'params': matrices, 'weight_decay': 0.02},
            {'params': vectors, 'weight_decay': 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def _below(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = f'{part}.'
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


# --- the whole way ----------------------------------------------------------------------------


def bar() -> Progress:
    return Progress(
        TextColumn('{task.description:<34}'), BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip


def random_moments(cache: Path, recipe: Recipe, horizon: int) -> Moments:
    """Return the independent moments, from the cache where an earlier run left them."""
    folder = cache / f'moments-{recipe.seed}-{recipe.num_moments}'
    if folder.is_dir():
        return load_moments(folder)
    world = TabletopWorld()
    recorder = Recorder(world, horizon)
    with bar() as progress:
        task = progress.add_task('data', total=recipe.num_moments)
        for i in range(recipe.num_moments):
            random_moment(world, np.random.default_rng((recipe.seed, i)))
            recorder.record()
            progress.advance(task)
    world.close()
    moments = recorder.moments()
    moments.save(folder)
    return moments


def on_policy_moments(
    cache: Path, recipe: Recipe, stage: Stage, profile: RobotProfile, model: Pi05, output: Path
) -> Moments:
    """Return the moments into which the model as trained so far gets itself."""
    folder = cache / stage.name
    if folder.is_dir():
        return load_moments(folder)
    save_model(model, output / 'model.safetensors', dtype=torch.bfloat16)
    world = TabletopWorld()
    recorder = Recorder(world, model.config.action_horizon)
    rng = np.random.default_rng((recipe.seed, *stage.name.encode()))
    with bar() as progress:
        task = progress.add_task(f'{stage.name}: own frames', total=recipe.num_on_policy)
        record_on_policy(
            _pilot(profile, output), world, recorder, recipe.num_on_policy, rng,
            lambda: progress.advance(task),
        )  # fmt: skip
    world.close()
    moments = recorder.moments()
    moments.save(folder)
    return moments


def _pilot(profile: RobotProfile, checkpoint: Path) -> Pilot:
    threads = torch.get_num_threads()
    pilot = Pilot(profile, checkpoint)
    torch.set_num_threads(threads)  # building an engine sets it for a robot
    return pilot


def train_stage(trainer: Trainer, stage: Stage, batches: Batches) -> None:
    with bar() as progress:
        task = progress.add_task(stage.name, total=stage.steps, completed=trainer.step)
        recent: list[dict[str, float]] = []
        for numbers in trainer.run(stage, batches):
            recent.append(numbers)
            progress.advance(task)
            if len(recent) == 100:
                progress.console.print(_summary(stage, trainer, recent))
                recent.clear()
        if recent:
            progress.console.print(_summary(stage, trainer, recent))


def _summary(stage: Stage, trainer: Trainer, recent: list[dict[str, float]]) -> str:
    means = {key: float(np.mean([numbers[key] for numbers in recent])) for key in recent[0]}
    step = trainer.step or stage.steps
    listed = '  '.join(f'{key} {value:.4f}' for key, value in means.items())
    return f'{stage.name} {step}/{stage.steps}  {listed}  ({trainer.cpu_s:.0f} CPU s)'


def evaluate_all(profile: RobotProfile, checkpoint: Path, seeds: range) -> dict[str, Score]:
    """Play unseen layouts with both cameras, with each alone, and with a wrong instruction."""
    world = TabletopWorld()
    pilot = _pilot(profile, checkpoint)
    settings: dict[str, dict[str, Any]] = {
        'both cameras': {},
        'base camera only': {'cameras': CAMERAS[:1]},
        'side camera only': {'cameras': CAMERAS[1:]},
        'random other instruction': {'mislead': True},
    }
    scores = {}
    with bar() as progress:
        for name, arguments in settings.items():
            task = progress.add_task(f'evaluation, {name}', total=len(seeds))
            scores[name] = evaluate(
                pilot, world, seeds, progress=partial(progress.advance, task), **arguments
            )
    world.close()
    return scores


def train(recipe: Recipe, profile: RobotProfile, output: Path, cache: Path, resume: bool) -> None:
    """Do everything that `oxygen_train` does."""
    config = preset(profile.model.preset, prefix_attention=profile.model.prefix_attention)
    assert config.vision.image_size == IMAGE_SIZE
    cache.mkdir(parents=True, exist_ok=True)
    checkpoint = cache / 'checkpoint.safetensors'
    if not resume:
        checkpoint.unlink(missing_ok=True)
        for stage in recipe.stages:
            shutil.rmtree(cache / stage.name, ignore_errors=True)
    moments = random_moments(cache, recipe, config.action_horizon)
    write_norm_stats(moments, output / 'assets' / profile.name / 'norm_stats.json')
    train_tokenizer(profile, config.vocab_size, output / 'tokenizer.model')
    processor = make_processor(profile, config, output)
    first = moments.images[:64].reshape(-1, IMAGE_SIZE, IMAGE_SIZE, 3)
    trainer = Trainer(
        new_model(config, processor.tokenizer, first, recipe.seed), recipe, checkpoint
    )
    if resume and trainer.resume():
        print(f'resumed at stage {trainer.stage_index}, step {trainer.step}')

    own: list[Moments] = []
    for index, stage in enumerate(recipe.stages):
        if stage.on_policy_share:
            own.append(on_policy_moments(cache, recipe, stage, profile, trainer.model, output))
        if index >= trainer.stage_index:
            on_policy = concatenate(own) if own else None
            train_stage(trainer, stage, Batches(profile, processor, recipe, moments, on_policy))
    save_model(trainer.model, output / 'model.safetensors', dtype=torch.bfloat16)
    seeds = range(EVALUATION_SEED, EVALUATION_SEED + recipe.num_episodes)
    write_model_card(
        output,
        evaluate_all(profile, output, seeds),
        seeds=seeds,
        data=_data_text(recipe),
        training=_training_text(recipe),
        cpu_s=trainer.cpu_s,
        num_parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        num_denoise_steps=profile.model.num_denoise_steps,
        horizon=config.action_horizon,
    )


def _data_text(recipe: Recipe) -> str:
    return (
        f'{recipe.num_moments:,} independent moments (layout and arm drawn at random, seed '
        f'{recipe.seed}), each labelled for all three instructions, and {recipe.num_on_policy:,} '
        f'moments per DAgger round into which the policy got itself.'
    )


def _training_text(recipe: Recipe) -> str:
    stages = '; '.join(
        f'{stage.name} {stage.steps} steps at {stage.learning_rate:g}' for stage in recipe.stages
    )
    last = recipe.stages[-1]
    return (
        f'AdamW, batches of {recipe.batch_size}, {last.num_draws} noise draws per prefix, cosine '
        f'schedule, stages: {stages}. Loss: flow matching (weight {last.flow_weight:g}), plus '
        f'cross-entropy of text and of note, plus two throw-away heads: one points at blocks and '
        f'fingertip, one reads state and actions off the prefix. One camera is left out of half '
        f'of the batches.'
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='oxygen_train',
        description='Train the tabletop model from nothing: data, training, DAgger, evaluation.',
    )
    parser.add_argument(
        '--output',
        type=Path,
        default=share_folder() / 'resource' / 'tabletop',
        help='the checkpoint folder (default: where the shipped one lies)',
    )
    parser.add_argument(
        '--cache',
        type=Path,
        default=Path.home() / '.cache' / 'oxygen_ros' / 'tabletop',
        help='data (about 1 GB) and the unfinished training',
    )
    parser.add_argument('--profile', default='tabletop', help='name, or path of a YAML file')
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--threads', type=int, default=1, help='for torch; two pay on idle cores')
    parser.add_argument('--resume', action='store_true', help='go on where training was stopped')
    parser.add_argument('--quick', action='store_true', help='all steps in a minute, for tests')
    return parser.parse_args(arguments)


def main() -> None:
    """Entry point."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    recipe = (quick_recipe if arguments.quick else full_recipe)(arguments.seed)
    profile = load_profile(arguments.profile, share_folder() / 'config')
    train(recipe, profile, arguments.output, arguments.cache, arguments.resume)


if __name__ == '__main__':
    main()
