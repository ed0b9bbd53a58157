"""Recording: the topics and the raw messages of a rosbag2 file, whatever its storage.

Owns everything that is asked of the rosbags package, and turns its errors into one line each. Knows
neither rclpy nor time; the player and the choice of a profile read from it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rosbags.interfaces import QosDurability, QosReliability
from rosbags.rosbag2 import Reader

NS_PER_S = 1_000_000_000
# Deep enough that a slow reliable subscriber loses nothing of a burst.
MIN_DEPTH = 100


class BagError(ValueError):
    """A recording that cannot be played; one line that names the file and what is wrong."""


@dataclass(frozen=True)
class RecordedTopic:
    name: str
    type_name: str  # 'sensor_msgs/msg/Image', also where the file says 'sensor_msgs/Image'
    num_messages: int
    reliable: bool  # as offered when it was recorded; reliable if the file does not tell
    latched: bool  # transient_local when it was recorded
    depth: int


class Recording:
    """A rosbag2 folder, or one of its .mcap or .db3 files; compressed or not.

    No message definition is needed, bytes are never parsed here. The file is opened anew for every
    pass, so that passes may happen in any thread.
    """

    def __init__(self, path: Path) -> None:
        """Read what is in it. Raises BagError."""
        self.path = path
        with _Opened(path) as reader:
            connections = _connections(reader)
            self.start_ns = int(reader.start_time)
            self.end_ns = max(self.start_ns, int(reader.end_time) - 1)  # of the last message
            num_messages = int(reader.message_count)
        if num_messages == 0:
            raise BagError(f'{path}: holds no message')
        self.topics: dict[str, RecordedTopic] = {}
        for topic in sorted({connection.topic for connection in connections}):
            same = [connection for connection in connections if connection.topic == topic]
            self.topics[topic] = _recorded_topic(topic, same)

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / NS_PER_S

    def check_topics(self, names: list[str]) -> None:
        """Raise BagError if a topic is not in the recording."""
        for name in names:
            if name not in self.topics:
                there = ', '.join(sorted(self.topics))
                raise BagError(f'{self.path}: has no topic {name}; there are: {there}')

    def messages(self, names: list[str]) -> Iterator[tuple[str, int, bytes]]:
        """Yield topic, log time [ns] and CDR bytes, oldest first. Raises BagError."""
        with _Opened(self.path) as reader:
            wanted = [c for c in _connections(reader) if c.topic in names]
            if not wanted:
                return
            for connection, time_ns, data in reader.messages(wanted):
                # The two plain encapsulations; a bare .db3 file does not tell its format.
                if data[:2] not in (b'\x00\x00', b'\x00\x01'):
                    raise BagError(f'{self.path}: {connection.topic} is not serialized as CDR')
                yield connection.topic, int(time_ns), bytes(data)


class _Opened:
    """An opened rosbags reader whose errors come out as BagError, in one line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader: Any = None

    def __enter__(self) -> Any:
        if not self._path.exists():
            raise BagError(f'{self._path}: no such file or folder')
        if self._path.is_dir() and not (self._path / 'metadata.yaml').is_file():
            raise BagError(f'{self._path}: is no rosbag2 recording, it has no metadata.yaml')
        try:
            self._reader = Reader(self._path)
            self._reader.open()
        except Exception as error:  # damaged files provoke anything from struct to sqlite3
            raise self._bag_error(error) from error
        return self._reader

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._reader.close()
        if isinstance(error, Exception) and not isinstance(error, BagError):
            raise self._bag_error(error) from error

    def _bag_error(self, error: Exception) -> BagError:
        reason = ' '.join(str(error).split()) or type(error).__name__
        return BagError(f'{self._path}: cannot be read as a rosbag2 recording: {reason}')


def _connections(reader: Any) -> list[Any]:
    """Return the topics as the files describe them, not metadata.yaml.

    Where the two disagree on the QoS of a topic, as in a recording of rosbag2's own, rosbags finds
    no message of it and says nothing.
    """
    files = getattr(reader.storage, 'storages', ())  # none where a file was opened by itself
    return [c for file in files for c in file.connections] or list(reader.connections)


def _recorded_topic(name: str, connections: list[Any]) -> RecordedTopic:
    offered = [qos for connection in connections for qos in connection.ext.offered_qos_profiles]
    package, _, message = connections[0].msgtype.rpartition('/')
    return RecordedTopic(
        name=name,
        type_name=f'{package.partition("/")[0]}/msg/{message}',
        num_messages=sum(connection.msgcount for connection in connections),
        reliable=all(qos.reliability is not QosReliability.BEST_EFFORT for qos in offered),
        latched=any(qos.durability is QosDurability.TRANSIENT_LOCAL for qos in offered),
        depth=max([MIN_DEPTH, *(qos.depth for qos in offered)]),
    )


def message_class(type_name: str) -> Any | None:
    """Return the Python class of 'package/msg/Name', or None where it is not installed."""
    package, _, name = type_name.partition('/msg/')
    try:
        found = getattr(importlib.import_module(f'{package}.msg'), name)
        type(found).__import_type_support__()  # without its library it cannot be published
    except (ImportError, AttributeError):
        return None
    return found
