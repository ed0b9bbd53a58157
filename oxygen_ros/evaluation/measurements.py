"""Measurements: what reaches a subscriber of the node, counted and kept over time.

Owns the demo's subscriptions and their history; the node's own claims (EngineStats) are kept beside
what was measured here. Knows nothing of how it is shown. `demo.py` makes it, its callbacks run in
the executor's thread, `dashboard.py` and `plots.py` read it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from oxygen_ros.profile import RobotProfile

# Commands are counted over so long.
WINDOW_S = 1.0
NUM_NOTES_KEPT = 3


@dataclass(frozen=True)
class Sample:
    """One EngineStats, and the command rate we measured when it came."""

    time_s: float  # since the measuring began
    command_hz: float  # measured here
    num_commands: int  # received by then
    stats: Any


class Measurements:
    def __init__(self, node: Any, profile: RobotProfile, command_type: Any) -> None:
        """Subscribe to everything that the node publishes for this profile.

        `command_type` is the message class of its command interface.
        """
        from rclpy.qos import QoSProfile, ReliabilityPolicy
        from std_msgs.msg import String

        from oxygen_ros.msg import ActionChunk, EngineStats, Note, Text

        self._began_s = time.monotonic()
        self._arrivals_s: deque[float] = deque()
        self.num_commands = self.num_chunks = self.num_text_messages = 0
        self.num_texts = self.num_notes = 0
        self.samples: list[Sample] = []
        self.stats: Any = None
        """Newest EngineStats; None before the first."""
        self.text: Any = None
        """Newest Text message of any text task."""
        self.notes: deque[Any] = deque(maxlen=NUM_NOTES_KEPT)
        """Newest Note messages, the newest last."""
        self.instruction = profile.instruction.default
        self.instruction_changes_s: list[float] = []

        # Best effort and deep: every publisher matches, and a busy moment loses nothing.
        deep = QoSProfile(depth=100, reliability=ReliabilityPolicy.BEST_EFFORT)
        subscribe = node.create_subscription
        subscribe(command_type, resolve(profile.command.topic), self._on_command, deep)
        subscribe(ActionChunk, resolve('~/actions'), self._on_chunk, 10)
        subscribe(EngineStats, resolve('~/stats'), self._on_stats, 10)
        subscribe(String, resolve(profile.instruction.topic), self._on_instruction, 10)
        for task in profile.tasks:
            kind, on_message = (
                (Note, self._on_note) if task.kind == 'memory' else (Text, self._on_text)
            )
            subscribe(kind, resolve(task.topic), on_message, 100)

    def begin(self) -> None:
        """Count from now on; what came while the node started is forgotten."""
        self._began_s = time.monotonic()
        self.num_commands = self.num_chunks = 0
        self.samples.clear()
        self.instruction_changes_s.clear()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the measuring began."""
        return time.monotonic() - self._began_s

    def command_hz(self) -> float:
        """Commands received in the last second; falls to 0 when none come."""
        since_s = time.monotonic() - WINDOW_S
        return sum(arrival_s > since_s for arrival_s in tuple(self._arrivals_s)) / WINDOW_S

    def _on_command(self, _: Any) -> None:
        now_s = time.monotonic()
        self.num_commands += 1
        self._arrivals_s.append(now_s)
        while self._arrivals_s[0] < now_s - WINDOW_S:
            self._arrivals_s.popleft()

    def _on_chunk(self, _: Any) -> None:
        self.num_chunks += 1

    def _on_stats(self, message: Any) -> None:
        self.stats = message
        self.samples.append(Sample(self.elapsed_s, self.command_hz(), self.num_commands, message))

    def _on_text(self, message: Any) -> None:
        self.text = message
        self.num_text_messages += 1
        self.num_texts += message.final

    def _on_note(self, message: Any) -> None:
        self.notes.append(message)
        self.num_notes += 1

    def _on_instruction(self, message: Any) -> None:
        if message.data != self.instruction:
            self.instruction = message.data
            self.instruction_changes_s.append(self.elapsed_s)


def resolve(topic: str) -> str:
    """Return the full name of a topic of the node `oxygen` in the root namespace."""
    if topic.startswith('~/'):
        return f'/oxygen/{topic[2:]}'
    return topic if topic.startswith('/') else f'/{topic}'
