"""Recordings for tests, made from others: with commands, compressed, split, without a topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from oxygen_ros.evaluation.recording import Recording

STORE = get_typestore(Stores.ROS2_HUMBLE)
Message = tuple[str, str, int, bytes]
"""Topic, type, log time [ns], CDR bytes."""


def messages_of(path: Path) -> list[Message]:
    recording = Recording(path)
    return [
        (topic, recording.topics[topic].type_name, log_ns, data)
        for topic, log_ns, data in recording.messages(list(recording.topics))
    ]


def write_bag(
    path: Path,
    messages: list[Message],
    *,
    plugin: StoragePlugin = StoragePlugin.SQLITE3,
    compression: CompressionMode = CompressionMode.NONE,
) -> Path:
    writer = Writer(path, version=9, storage_plugin=plugin)
    writer.set_compression(compression, CompressionFormat.ZSTD)
    with writer:
        connections: dict[str, Any] = {}
        for topic, type_name, log_ns, data in sorted(messages, key=lambda message: message[2]):
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, type_name, typestore=STORE)
            writer.write(connections[topic], log_ns, data)
    return path


def write_split_bag(path: Path, messages: list[Message]) -> Path:
    """Two files in one folder, as rosbag2 writes when it splits by duration."""
    ordered = sorted(messages, key=lambda message: message[2])
    half = len(ordered) // 2
    parts = [
        write_bag(path.with_name(f'{path.name}_{i}'), part)
        for i, part in enumerate((ordered[:half], ordered[half:]))
    ]
    infos = [
        yaml.safe_load((part / 'metadata.yaml').read_text())['rosbag2_bagfile_information']
        for part in parts
    ]
    path.mkdir()
    for part, info in zip(parts, infos, strict=True):
        name = info['relative_file_paths'][0]
        (part / name).rename(path / name)
    merged = infos[0]
    counts: dict[str, dict[str, Any]] = {}
    for info in infos:
        for entry in info['topics_with_message_count']:
            name = entry['topic_metadata']['name']
            if name in counts:
                counts[name]['message_count'] += entry['message_count']
            else:
                counts[name] = entry
    merged['topics_with_message_count'] = list(counts.values())
    merged['relative_file_paths'] = [info['relative_file_paths'][0] for info in infos]
    merged['files'] = [info['files'][0] for info in infos]
    merged['message_count'] = len(ordered)
    merged['duration']['nanoseconds'] = ordered[-1][2] - ordered[0][2]
    (path / 'metadata.yaml').write_text(yaml.safe_dump({'rosbag2_bagfile_information': merged}))
    return path


def renamed(messages: list[Message], old: str, new: str) -> Iterator[Message]:
    """Only the messages of one topic, under another name."""
    for topic, type_name, log_ns, data in messages:
        if topic == old:
            yield new, type_name, log_ns, data


def changed(
    messages: list[Message], topic: str, change: Callable[[Any], None]
) -> Iterator[Message]:
    """Let `change` edit every message of one topic."""
    for name, type_name, log_ns, data in messages:
        if name == topic:
            message = STORE.deserialize_cdr(data, type_name)
            change(message)
            data = bytes(STORE.serialize_cdr(message, type_name))
        yield name, type_name, log_ns, data
