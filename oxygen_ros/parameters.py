"""The node's ROS parameters: names, defaults, ranges and the words `ros2 param describe` prints.

What belongs to one robot stands in its profile instead. Read by `node.py` alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor

from oxygen_ros.monitor import Thresholds


@dataclass(frozen=True)
class NodeParameter:
    """One ROS parameter: its default, what it means, and which values it may take."""

    name: str
    default: Any
    description: str
    minimum: float | None = None
    maximum: float | None = None
    dynamic: bool = False
    """May be set while the node is configured."""

    def descriptor(self) -> ParameterDescriptor:
        number = isinstance(self.default, (int, float)) and not isinstance(self.default, bool)
        when = '' if self.dynamic else ' Set it before configure.'
        # An int where a double is declared ('rate: 50') is no mistake worth refusing a launch for.
        descriptor = ParameterDescriptor(
            description=self.description + when, dynamic_typing=isinstance(self.default, float)
        )
        if number and self.minimum is not None and self.maximum is not None:
            low, high = self.minimum, self.maximum
            if isinstance(self.default, float):
                descriptor.floating_point_range = [
                    FloatingPointRange(from_value=float(low), to_value=float(high))
                ]
            descriptor.integer_range = [IntegerRange(from_value=int(low), to_value=int(high))]
        return descriptor


PARAMETERS = (
    NodeParameter('profile', 'dummy', 'Robot profile: a name in config/ or the path of a file.'),
    NodeParameter(
        'checkpoint',
        '',
        'Directory with model.safetensors (openpi PyTorch or LeRobot layout), or the file itself; '
        'empty only where the profile asks for random weights.',
    ),
    NodeParameter(
        'tokenizer', '', 'SentencePiece model; empty looks for tokenizer.model beside the weights.'
    ),
    NodeParameter(
        'openpi_config',
        '',
        'openpi training config, e.g. pi05_droid, to take sizes, transforms, statistics and prompt '
        'from; needs openpi. Empty takes the profile.',
    ),
    NodeParameter('device', 'auto', 'auto, cpu, cuda or cuda:N.'),
    NodeParameter('dtype', 'auto', 'auto (bfloat16 on CUDA, else float32), float32 or bfloat16.'),
    NodeParameter('seed', 0, 'Seed of the noise that actions start from.', 0, 2**31 - 1),
    NodeParameter(
        'num_slots', 8, 'KV slots; one is kept free, so one less may hold text.', 2, 1024
    ),
    NodeParameter('max_batch', 16, 'Most sequences in one decode step.', 1, 1024),
    NodeParameter(
        'max_draft',
        15,
        'Most tokens drafted from the text before per sequence and step; 0 turns drafting off.',
        0,
        64,
    ),
    NodeParameter(
        'num_denoise_steps', 0, 'Flow-matching steps per chunk; 0 takes the profile.', 0, 1000
    ),
    NodeParameter(
        'execution',
        'unified',
        'unified, or to compare with: shared (texts inside their frame), isolated (also a prefill '
        'per task).',
    ),
    NodeParameter(
        'isolation',
        'process' if sys.platform == 'linux' else 'thread',
        'Where the engine runs: process (its own, replaced when it is lost; needs Linux) or '
        'thread (of the node).',
    ),
    NodeParameter(
        'engine_timeout_s',
        10.0,
        'With isolation process: an engine that shows no sign of life for so long during a frame '
        'is replaced; 30 times as long while it loads [s].',
        0.1,
        3600,
    ),
    NodeParameter('frame_rate_hz', 0.0, 'Frames per second; 0 takes the profile.', 0, 1000),
    NodeParameter(
        'command_deadline_periods',
        2.0,
        'Deadline QoS that the command topic offers, in command periods; 0 offers none. DDS counts '
        'from one message to the next, so that 1 counts every jitter as a miss.',
        0,
        1000,
    ),
    NodeParameter('command_rate_hz', 0.0, 'Commands per second; 0 takes the profile.', 0, 1000),
    NodeParameter(
        'instruction',
        '',
        'What to do until the instruction topic says otherwise; empty takes the profile.',
        dynamic=True,
    ),
    NodeParameter(
        'memory_path',
        '',
        'File that keeps memory notes across restarts, for ~/recall; empty keeps none.',
    ),
    NodeParameter(
        'annotated_rate_hz',
        0.0,
        'Pictures per second on ~/annotated: cameras, instruction, text, note and deadlines; drawn '
        'only while somebody subscribes. 0 publishes none.',
        0,
        30,
    ),
    NodeParameter(
        'warn_rate_share',
        Thresholds.rate_share,
        '/diagnostics warns when cameras or commands come at less than this share of their rate.',
        0,
        1,
    ),
    NodeParameter(
        'warn_lateness_p99_ms',
        Thresholds.lateness_p99_ms,
        '/diagnostics warns when 1 of 100 commands is later than this [ms].',
        0,
        1e6,
    ),
    NodeParameter(
        'warn_chunk_age_s',
        Thresholds.chunk_age_s,
        '/diagnostics warns when the chunk in force was computed for a moment longer ago [s].',
        0,
        1e6,
    ),
    NodeParameter(
        'warn_drops',
        Thresholds.drops,
        '/diagnostics warns when more than this was thrown away in a second, all reasons together.',
        0,
        10**9,
    ),
    NodeParameter('autostart', True, 'Configure and activate by itself.'),
    NodeParameter('dry_run', False, 'Publish commands to ~/would_be_command only.'),
)
