"""The plan of a demo: which world, profile and weights the command line asks for.

Owns every choice that can be made before anything is started, and its error messages. Knows no
process and no graph; `demo.py` carries the plan out.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oxygen_ros.evaluation.bag_profile import profile_for
from oxygen_ros.evaluation.dashboard import Setting
from oxygen_ros.evaluation.recording import Recording
from oxygen_ros.evaluation.sim_robot import PHOTOGRAPHS
from oxygen_ros.evaluation.stage import DemoError, PhotographStage, RecordingStage, Stage
from oxygen_ros.evaluation.tabletop_profile import check_fit, shipped_checkpoint
from oxygen_ros.evaluation.tabletop_stage import TabletopStage
from oxygen_ros.profile import RobotProfile, load_profile, share_folder

WORLDS = ('tabletop', 'photographs')


@dataclass(frozen=True)
class Plan:
    """Everything that is known before the node starts."""

    profile: RobotProfile
    parameters: dict[str, str | bool]
    """ROS parameters of the node."""
    setting: Setting
    make_stage: Callable[[Any], Stage]
    """Takes our own ROS node."""
    remarks: tuple[str, ...] = ()
    """One line per choice made for the user."""


def make_plan(options: argparse.Namespace) -> Plan:
    """Choose; look into the recording. Raises BagError, ProfileError, DemoError and OSError."""
    if options.bag is not None:
        return _plan_recording(options)
    if options.world == 'photographs':
        return _plan_photographs(options)
    return _plan_tabletop(options)


def _plan_tabletop(options: argparse.Namespace) -> Plan:
    name = options.profile or 'tabletop'
    profile = load_profile(name, _config())
    check_fit(profile, name)
    checkpoint = options.checkpoint
    if not checkpoint and not profile.model.random_weights:
        checkpoint = str(shipped_checkpoint())
    return Plan(
        profile=profile,
        parameters=_parameters(options, name, checkpoint),
        setting=_setting(
            options, profile, checkpoint, f'a simulated table, seed {options.seed}, in real time'
        ),
        make_stage=lambda node: TabletopStage(
            node, profile, seed=options.seed, log_path=options.out / 'tabletop.log'
        ),
    )


def _plan_photographs(options: argparse.Namespace) -> Plan:
    name = options.profile or 'dummy'
    profile = load_profile(name, _config())
    shown = ', '.join(PHOTOGRAPHS[: len(profile.cameras)])
    return Plan(
        profile=profile,
        parameters=_parameters(options, name, options.checkpoint),
        setting=_setting(
            options, profile, options.checkpoint, f'photographs of scikit-image ({shown})'
        ),
        make_stage=lambda node: PhotographStage(node, profile),
    )


def _plan_recording(options: argparse.Namespace) -> Plan:
    name = options.profile or 'dummy'
    load_profile(name, _config())  # or its path would be looked for in vain
    recording = Recording(options.bag)
    robot = profile_for(
        recording,
        _profile_path(name),
        options.out / 'bag_profile.yaml',
        cameras=_cameras(options.camera),
        joints=options.joints,
    )
    speed = '' if options.rate == 1.0 else f' at {options.rate:g} times its speed'
    source = f'{recording.path.name} ({recording.duration_s:.2f} s, repeated){speed}'
    parameters = _parameters(options, str(robot.profile_path.resolve()), options.checkpoint)
    return Plan(
        profile=robot.profile,
        parameters={**parameters, 'use_sim_time': True},
        setting=_setting(options, robot.profile, options.checkpoint, source),
        make_stage=lambda node: RecordingStage(node, robot, recording, rate=options.rate),
        remarks=robot.remarks,
    )


def _config() -> Path:
    return share_folder() / 'config'


def _parameters(
    options: argparse.Namespace, profile: str, checkpoint: str
) -> dict[str, str | bool]:
    parameters: dict[str, str | bool] = {'profile': profile, 'device': options.device}
    if checkpoint:
        parameters['checkpoint'] = checkpoint
    return parameters


def _setting(
    options: argparse.Namespace, profile: RobotProfile, checkpoint: str, source: str
) -> Setting:
    return Setting(
        profile=profile.name,
        preset=profile.model.preset,
        device=_device_in_words(options.device),
        cores=len(os.sched_getaffinity(0)),
        source=source,
        random_weights=not checkpoint,
        due_hz=profile.command.rate_hz,
        seconds=options.seconds,
    )


def _profile_path(argument: str) -> Path:
    """The file behind a profile that has already been loaded."""
    named = _config() / f'{argument}.yaml'
    return named if '/' not in argument and named.is_file() else Path(argument).expanduser()


def _cameras(rules: list[str]) -> dict[str, str]:
    cameras: dict[str, str] = {}
    for rule in rules:
        slot, separator, topic = rule.partition('=')
        if not (slot and separator and topic.startswith('/')):
            raise DemoError(f'--camera: expected SLOT=/TOPIC, got {rule!r}')
        if slot in cameras:
            raise DemoError(f'--camera: {slot} is given twice')
        cameras[slot] = topic
    return cameras


def _device_in_words(device: str) -> str:
    """What `auto` will be, as far as that can be told without torch."""
    if device != 'auto':
        return device
    return 'auto' if Path('/dev/nvidiactl').exists() else 'cpu (auto, no NVIDIA device here)'
