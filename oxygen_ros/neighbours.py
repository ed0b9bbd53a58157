"""Neighbours: who else is on the node's topics, in the words of its diagnostics.

Owns what it saw at the last look, so that a source which has only just appeared is not called
silent. Counts and names in, one status out; knows no ROS. The node's diagnostics timer calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from oxygen_ros.monitor import OK, WARN, Status
from oxygen_ros.observation import SourceStatus

# Discovery goes by UDP, data on one machine by shared memory, which another user cannot open.
_WHY_SILENT = (
    'is published, but nothing arrives; in containers share /dev/shm (--ipc=host) and the user id, '
    'or set FASTDDS_BUILTIN_TRANSPORTS=UDPv4'
)


@dataclass(frozen=True)
class CommandTopic:
    """The topic that commands go to, as the graph knows it now."""

    name: str
    listeners: int
    rivals: Sequence[str]  # full names of other nodes that publish it


class Neighbours:
    """Says what about the graph keeps the robot from being fed or from obeying this node alone."""

    def __init__(self) -> None:
        self._silent: frozenset[str] = frozenset()

    def status(
        self, sources: Iterable[tuple[SourceStatus, int]], command: CommandTopic | None
    ) -> Status:
        """Describe the graph.

        Args:
            sources: each camera and the joints, with the number of publishers of its topic.
            command: None while nothing is to reach a robot.
        """
        silent = frozenset(
            source.topic for source, publishers in sources if publishers and not source.rate_hz
        )
        problems = [f'{topic} {_WHY_SILENT}' for topic in sorted(silent & self._silent)]
        self._silent = silent
        if command is not None:
            problems += _command_problems(command)
        return Status('graph', WARN if problems else OK, '; '.join(problems) or 'as expected')


def _command_problems(command: CommandTopic) -> Iterator[str]:
    if command.rivals:
        yield f'{command.name} is also published by {", ".join(command.rivals)}'
    if not command.listeners:
        yield f'nobody listens on {command.name}'
