"""One recording evaluated into its folder: the unit of work of `oxygen_eval`.

Owns the plan of a run and the way from recording to result, here or on another machine. Knows
neither options nor the other recordings; `offline.py` and `on_ray.py` call it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oxygen_ros.engine.factory import EngineOptions
from oxygen_ros.evaluation.action_score import ActionScore
from oxygen_ros.evaluation.bag_result import OUTPUT_BAG, Collector, write_failure
from oxygen_ros.evaluation.bag_source import BagSource, Given
from oxygen_ros.evaluation.offline_engine import OfflineEngine
from oxygen_ros.evaluation.output_bag import OutputBag
from oxygen_ros.evaluation.recorded_commands import read_commands
from oxygen_ros.evaluation.recording import BagError, Recording
from oxygen_ros.evaluation.replay import Replay
from oxygen_ros.evaluation.run_folder import flat_setting
from oxygen_ros.profile import ProfileError, RobotProfile

REALTIME = 'recorded'


@dataclass(frozen=True)
class Plan:
    """What is to be evaluated, and how."""

    profile: RobotProfile
    given: Given
    engine: EngineOptions
    instruction: str
    realtime: bool
    latency_ns: int
    align_ns: int

    def setting(self) -> dict[str, Any]:
        """Return what the results depend on."""
        options = {
            'rate': REALTIME if self.realtime else 'fast',
            'seed': self.engine.seed,
            'openpi_config': self.engine.openpi_config,
            'device': self.engine.device,
            'dtype': self.engine.dtype,
            'num_slots': self.engine.num_slots,
            'max_batch': self.engine.max_batch,
            'max_draft': self.engine.max_draft,
            'latency_ms': self.latency_ns / 1e6,
            'align_ms': self.align_ns / 1e6,
            'instruction': self.instruction or 'of the profile or the recording',
            'dropped_cameras': ', '.join(self.given.dropped_cameras),
            'commands': self.given.commands or 'of the profile',
        }
        return flat_setting(self.profile, self.engine.checkpoint, options)


def evaluate_or_say_why(
    plan: Plan,
    bag: Path,
    engine: OfflineEngine,
    folder: Path,
    told: Callable[[float, str], None],
) -> str:
    """Evaluate one recording into its folder; return why that cannot be, '' if it could."""
    try:
        told(1.0, evaluate_bag(plan, bag, engine, folder, told))
    except (BagError, ProfileError) as error:
        write_failure(folder, bag, folder.name, str(error))
        return str(error)
    return ''


def evaluate_bag(
    plan: Plan,
    bag: Path,
    engine: OfflineEngine,
    folder: Path,
    told: Callable[[float, str], None],
) -> str:
    """Evaluate one recording into its folder; return how it went in a few words.

    Raises BagError, with one line, if it cannot be used.
    """
    shutil.rmtree(folder)
    folder.mkdir()
    started_s = time.monotonic()
    recording = Recording(bag)
    source = BagSource(recording, plan.profile, plan.given)
    command, recorded = source.profile.command, None
    if source.commands:
        recorded = read_commands(recording, source.commands, command).at
    score = ActionScore(command, plan.align_ns, recorded)
    with OutputBag(folder / OUTPUT_BAG, source.profile) as output:
        collector = Collector(source, score, output, folder.name)
        replay = Replay(
            source,
            engine,
            collector,
            instruction=plan.instruction,
            latency_ns=plan.latency_ns,
            realtime=plan.realtime,
        )

        def on_progress(now_ns: int) -> None:
            done_s = (now_ns - recording.start_ns) / 1e9
            share = done_s / recording.duration_s if recording.duration_s else 1.0
            told(share, f'{done_s:.0f} of {recording.duration_s:.0f} s')

        replay.run(on_progress)
    collector.finish(replay, time.monotonic() - started_s, folder)
    return f'{collector.num_frames} frames of {replay.ticks} ticks'
