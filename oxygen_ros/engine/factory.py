"""From a robot profile and a checkpoint to a ready Engine.

The only place that knows how the parts fit together; owns nothing afterwards. Called by the node
when it is configured, by the evaluation and by the benchmarks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from oxygen_ros.actions import ActionChunk, Leftover
from oxygen_ros.engine.baselines import IsolatedEngine, SharedEngine
from oxygen_ros.engine.engine import Engine, TextUpdate
from oxygen_ros.engine.model_runner import load_pi05, set_num_threads
from oxygen_ros.engine.options import EngineOptions as EngineOptions
from oxygen_ros.engine.scheduler import Scheduler
from oxygen_ros.engine.slots import SlotLayout
from oxygen_ros.engine.static_runner import make_runner
from oxygen_ros.engine.tasks import LanguageTask
from oxygen_ros.model.checkpoints import (
    CheckpointError,
    Declared,
    find_norm_stats,
    folder_of,
    member,
    read_config,
)
from oxygen_ros.model.config import Pi05Config, preset
from oxygen_ros.model.continuous import ContinuousJoints
from oxygen_ros.model.processor import Codec, Processor
from oxygen_ros.model.prompt import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from oxygen_ros.model.rtc import Continuation, Guided, Trained
from oxygen_ros.model.transforms import Adapter, GripperAdapter, GripperMap, NormStats, make_adapter
from oxygen_ros.profile import ProfileError, RobotProfile, TaskProfile, blending_misfits

if TYPE_CHECKING:
    from oxygen_ros.model.openpi_bridge import OpenpiProcessor

EXECUTIONS = {'unified': Engine, 'shared': SharedEngine, 'isolated': IsolatedEngine}
TOKENIZER_FILES = ('tokenizer.model', 'paligemma_tokenizer.model')


def build_engine(
    profile: RobotProfile,
    options: EngineOptions,
    *,
    on_chunk: Callable[[ActionChunk], None],
    on_text: Callable[[TextUpdate], None],
    leftover: Callable[[int], Leftover | None] | None = None,
    frame_waiting: Callable[[], bool] = lambda: False,
    on_progress: Callable[[float], None] = lambda fraction: None,
    clock_ns: Callable[[], int] = time.monotonic_ns,
) -> Engine:
    """Load everything and wire it, in the thread that will use it; the callbacks are the Engine's,
    but for `on_progress`, which is told the fraction of the weights that is loaded.

    `leftover` is asked only by profiles whose `action.blending` continues chunks (`rtc*`). Where
    it is None, because nobody plays the chunks in time, every chunk is made from its observation
    alone.

    Raises:
        ProfileError: profile and checkpoint do not fit, naming the key.
        CheckpointError: config.json or the weights do not fit, naming fields or tensors.
        OpenpiError: `openpi_config` is set, but openpi or the config cannot be used.
        FileNotFoundError: tokenizer or statistics are missing, naming the path.
        ValueError: unknown device, dtype or execution, or options that make no engine.
    """
    if options.execution not in EXECUTIONS:
        raise ValueError(
            f"parameter 'execution': expected one of {list(EXECUTIONS)}, got {options.execution!r}"
        )
    checkpoint = find_checkpoint(profile, options)
    config, processor = (by_openpi if options.openpi_config else _by_profile)(
        profile, options, checkpoint
    )
    processor = _with_turns(profile, processor)
    tokenizer = processor.tokenizer
    _refuse_blending(profile, config)
    continuation = None if leftover is None else _continuation(profile)
    tasks = [_language_task(task, tokenizer) for task in profile.tasks]
    scheduler = Scheduler(
        tasks,
        num_slots=options.num_slots,
        max_batch=options.max_batch,
        eos_id=tokenizer.eos_id,
        max_draft=options.max_draft,
    )
    set_num_threads(options.num_threads)
    model = load_pi05(
        config,
        checkpoint,
        options.device,
        options.dtype,
        options.seed,
        on_progress=on_progress,
        differentiable_flow=isinstance(continuation, Guided) and continuation.jacobian,
    )
    runner = make_runner(
        model,
        SlotLayout(config.max_prefix_len, tasks, config.action_horizon),
        num_slots=options.num_slots,
        num_denoise_steps=profile.model.num_denoise_steps,
        max_queries=sum(max(len(task.prompt_tokens), 1 + options.max_draft) for task in tasks),
        continuation=continuation,
    )
    return EXECUTIONS[options.execution](
        processor,
        scheduler,
        runner,
        action_period_ns=round(1e9 / profile.action.rate_hz),
        seed=options.seed,
        on_chunk=on_chunk,
        on_text=on_text,
        leftover=None if continuation is None else leftover,
        frame_waiting=frame_waiting,
        clock_ns=clock_ns,
    )


def _by_profile(
    profile: RobotProfile, options: EngineOptions, checkpoint: Path | None
) -> tuple[Pi05Config, Codec]:
    declared = read_config(checkpoint) if checkpoint else None
    config = model_config(profile, declared)
    if declared is not None:
        _refuse(declared_problems(profile, config, declared))
    tokenizer = load_tokenizer(options, checkpoint, config)
    stats = load_stats(profile, checkpoint)
    return config, make_processor(profile, config, tokenizer, stats)


def by_openpi(
    profile: RobotProfile, options: EngineOptions, checkpoint: Path | None
) -> tuple[Pi05Config, OpenpiProcessor]:
    """Take from openpi what it knows; of the profile's `model` only the prefix attention counts.

    Raises as `build_engine` does, but for the weights.
    """
    from oxygen_ros.model import openpi_bridge

    if checkpoint is None:
        raise ProfileError("parameter 'openpi_config': expected parameter 'checkpoint', got ''")
    if profile.memory.feed_back:
        raise ProfileError(
            f"profile {profile.name}: memory.feed_back: expected 0 with parameter 'openpi_config', "
            f'whose prompts are made by openpi, got {profile.memory.feed_back}'
        )
    policy = openpi_bridge.load_policy(options.openpi_config, folder_of(checkpoint))
    config = replace(policy.config, prefix_attention=profile.model.prefix_attention)
    if profile.model.action_horizon not in (0, config.action_horizon):
        raise ProfileError(
            f'profile {profile.name}: model.action_horizon: expected 0 or {config.action_horizon}, '
            f'that of {options.openpi_config}, got {profile.model.action_horizon}'
        )
    try:
        tokenizer = load_tokenizer(options, checkpoint, config)
    except FileNotFoundError:
        if options.tokenizer:
            raise
        tokenizer = SentencePieceTokenizer(openpi_bridge.tokenizer_path())
    keys = openpi_bridge.robot_keys(
        profile.action.adapter,
        {camera.slot: camera.openpi_key for camera in profile.cameras},
        profile.joints.openpi_key,
    )
    return config, openpi_bridge.OpenpiProcessor(
        policy, keys, _adapter(profile, 'identity'), tokenizer
    )


def _with_turns(profile: RobotProfile, codec: Codec) -> Codec:
    joints, command = profile.joints.names, profile.command
    if not command.continuous:
        return codec
    return ContinuousJoints(
        codec, [(joints.index(name), command.names.index(name)) for name in command.continuous]
    )


def _continuation(profile: RobotProfile) -> Continuation | None:
    action = profile.action
    if action.blending == 'rtc_trained':
        return Trained(profile.model.training_max_delay)
    if action.blending in ('rtc', 'rtc_identity'):
        return Guided(
            jacobian=action.blending == 'rtc',
            schedule=action.guidance_schedule,
            execution_horizon=action.execution_horizon,
            max_weight=action.max_guidance_weight,
        )
    return None


def find_checkpoint(profile: RobotProfile, options: EngineOptions) -> Path | None:
    """Return the path of the checkpoint, or None for random weights."""
    if options.checkpoint:
        return Path(options.checkpoint).expanduser()
    if profile.model.random_weights:
        return None
    raise ProfileError(
        f"profile {profile.name}: expected parameter 'checkpoint' (a directory with "
        f"model.safetensors, openpi PyTorch or LeRobot layout), got ''; random weights are used "
        f'only by a profile with model.random_weights: true'
    )


def model_config(profile: RobotProfile, declared: Declared | None) -> Pi05Config:
    """Return the sizes of the model: the preset's, and what only the checkpoint can tell."""
    horizon = declared.sizes.get('action_horizon', 0) if declared is not None else 0
    config = preset(
        profile.model.preset,
        prefix_attention=profile.model.prefix_attention,
        action_horizon=profile.model.action_horizon or horizon,
    )
    if declared is not None and declared.cameras:
        config = replace(config, camera_slots=declared.cameras)
    return config


def declared_problems(profile: RobotProfile, config: Pi05Config, declared: Declared) -> list[str]:
    """Say what of the profile is not as the checkpoint's config.json wants it."""
    unknown = {camera.slot for camera in profile.cameras} - set(config.camera_slots)
    return [
        *declared.size_problems(config),
        *declared.robot_problems(
            normalization=profile.model.normalization,
            state_width=len(profile.joints.names),
            action_width=len(profile.command.names),
            delta_mask=profile.action.delta_mask,
        ),
        *(
            f'{declared.source}: cameras: expected slots among {list(config.camera_slots)}, got '
            f'{slot!r}'
            for slot in sorted(unknown)
        ),
    ]


def _refuse_blending(profile: RobotProfile, config: Pi05Config) -> None:
    if misfits := list(blending_misfits(profile, config.action_horizon)):
        raise ProfileError('\n'.join(f'profile {profile.name}: {misfit}' for misfit in misfits))


def _refuse(problems: list[str]) -> None:
    if problems:
        raise CheckpointError('profile and checkpoint do not fit:\n  ' + '\n  '.join(problems))


def load_tokenizer(
    options: EngineOptions, checkpoint: Path | None, config: Pi05Config
) -> Tokenizer:
    """Return the tokenizer of a parameter, of the checkpoint, or of random weights."""
    tokenizer: Tokenizer
    if options.tokenizer:
        tokenizer = SentencePieceTokenizer(Path(options.tokenizer).expanduser())
    elif checkpoint is None:
        tokenizer = ByteTokenizer()  # random weights write noise in any alphabet
    else:
        tokenizer = SentencePieceTokenizer(_beside(checkpoint, TOKENIZER_FILES))
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f'tokenizer {options.tokenizer or checkpoint}: expected at most {config.vocab_size} '
            f'pieces, the vocabulary of the model, got {tokenizer.vocab_size}'
        )
    return tokenizer


def _beside(checkpoint: Path, names: tuple[str, ...]) -> Path:
    folder = folder_of(checkpoint)
    for name in names:
        if (path := member(folder, name)).is_file():
            return path
    raise FileNotFoundError(
        f"tokenizer: expected one of {list(names)} in {folder}, or parameter 'tokenizer' with the "
        f'path of the SentencePiece model that the checkpoint was trained with'
    )


def load_stats(profile: RobotProfile, checkpoint: Path | None) -> NormStats | None:
    """Return what the checkpoint was normalised with; None where the profile says `none`."""
    if profile.model.normalization == 'none':
        return None
    try:
        return find_norm_stats(checkpoint, profile.model.norm_stats)
    except FileNotFoundError as error:
        raise FileNotFoundError(f'profile {profile.name}: {error}') from error


def _language_task(task: TaskProfile, tokenizer: Tokenizer) -> LanguageTask:
    return LanguageTask(
        name=task.name,
        prompt_tokens=tuple(tokenizer.encode(task.prompt)) if task.prompt else (),
        period_frames=task.period_frames,
        max_new_tokens=task.max_new_tokens,
        max_age_ns=round(task.max_age_s * 1e9),
        priority=task.priority,
        stream=task.stream,
    )


def make_processor(
    profile: RobotProfile, config: Pi05Config, tokenizer: Tokenizer, norm_stats: NormStats | None
) -> Processor:
    """Return both ways between robot and model; ValueError where the parts do not fit."""
    return Processor(
        image_size=config.vision.image_size,
        camera_slots=config.camera_slots,
        max_token_len=config.max_token_len,
        action_dim=config.action_dim,
        action_horizon=config.action_horizon,
        tokenizer=tokenizer,
        prompt=profile.model.prompt,
        normalization=profile.model.normalization,
        norm_stats=norm_stats,
        adapter=_adapter(profile, profile.action.adapter),
        delta_mask=profile.action.delta_mask,
    )


def _adapter(profile: RobotProfile, name: str) -> Adapter:
    joints, commands = profile.joints.names, profile.command.names
    adapter = make_adapter(name, len(joints), len(commands))
    if not profile.grippers:
        return adapter
    maps = tuple(
        GripperMap(
            state_index=joints.index(gripper.joint) if gripper.joint in joints else None,
            action_index=commands.index(gripper.joint) if gripper.joint in commands else None,
            model=(gripper.model[0], gripper.model[1]),
            robot=(gripper.robot[gripper.invert], gripper.robot[not gripper.invert]),
        )
        for gripper in profile.grippers
    )
    return GripperAdapter(len(joints), len(commands), adapter, maps)
