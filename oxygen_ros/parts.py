"""Parts: what the node is made of between configure and cleanup.

A record and nothing more. `node.py` makes, fills and drops it; `reports.py` reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from oxygen_ros.actions import ActionBuffer
from oxygen_ros.annotated import Annotation
from oxygen_ros.engine.process import EngineProcess
from oxygen_ros.frame_loop import FrameLoop
from oxygen_ros.inputs import Inputs
from oxygen_ros.monitor import Monitor
from oxygen_ros.neighbours import Neighbours
from oxygen_ros.news import News
from oxygen_ros.profile import RobotProfile
from oxygen_ros.publisher import CommandPublisher


@dataclass
class Parts:
    profile: RobotProfile
    control_ns: Callable[[], int]
    """The control clock: monotonic, or ROS time when that is simulated."""
    inputs: Inputs
    actions: ActionBuffer
    process: EngineProcess | None
    """The engine's own process; None where it runs in the frame thread."""
    loop: FrameLoop
    commands: Any
    """Lifecycle publisher of the command topic: silent while the node is inactive."""
    news: News
    monitor: Monitor
    neighbours: Neighbours
    annotation: Annotation | None
    """None where nobody asked for pictures."""

    # While the node is active
    active: bool = False
    publisher: CommandPublisher | None = None
    """Of the last activation, so that its counts can still be read."""
    tick: Any = None

    # What became of it
    last_failure: str = ''
    """Of the engine, in words."""
    observation_age_ms: float = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)
    """Of the newest statistics."""

    @property
    def source(self) -> str:
        """Where the newest command came from: chunk, hold, home, or silence."""
        return self.publisher.source if self.publisher is not None else 'silence'
