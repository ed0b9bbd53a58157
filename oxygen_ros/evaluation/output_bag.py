"""OutputBag: what the node would have published, as a rosbag2 recording (mcap).

Owns the file and the layout of the messages in it; opens in Foxglove, PlotJuggler, rqt_bag and
`ros2 bag play`. Written by rosbags, with the definitions of our messages inside, so it needs no
ROS. `bag_result.py` writes it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from oxygen_ros.conversions import NS_PER_S
from oxygen_ros.engine.engine import TextUpdate
from oxygen_ros.evaluation.bag_profile import JOINT_STATE
from oxygen_ros.evaluation.measurements import resolve
from oxygen_ros.evaluation.replay import FrameDone
from oxygen_ros.profile import RobotProfile, share_folder

COMMAND_TOPIC = '~/would_be_command'
PACKAGE = 'oxygen_ros/msg/'
MESSAGES = ('ActionChunk', 'EngineStats', 'Note', 'Text')


def our_types() -> Any:
    """Return a type store with the standard messages and ours. Raises FileNotFoundError."""
    store = get_typestore(Stores.ROS2_HUMBLE)
    for name in MESSAGES:
        text = (share_folder() / 'msg' / f'{name}.msg').read_text(encoding='utf-8')
        store.register(get_types_from_msg(text, f'{PACKAGE}{name}'))
    return store


class OutputBag:
    """A new recording; every message is logged at the time of the tick that made it."""

    def __init__(self, folder: Path, profile: RobotProfile) -> None:
        """Begin; what an interrupted run left at `folder` is replaced."""
        shutil.rmtree(folder, ignore_errors=True)
        self._profile = profile
        self._store = our_types()
        self._writer = Writer(folder, version=9, storage_plugin=StoragePlugin.MCAP)
        self._connections: dict[str, Any] = {}
        self._kinds = {task.name: task for task in profile.tasks}

    def __enter__(self) -> OutputBag:
        self._writer.open()
        self._add('~/actions', f'{PACKAGE}ActionChunk')
        self._add('~/stats', f'{PACKAGE}EngineStats')
        # By name whatever the robot's interface is, so that plots can tell the joints apart.
        self._add(COMMAND_TOPIC, JOINT_STATE)
        for task in self._profile.tasks:
            self._add(task.topic, f'{PACKAGE}{"Note" if task.kind == "memory" else "Text"}')
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.close()

    def write_frame(self, done: FrameDone, stats: Mapping[str, float]) -> None:
        """Write the chunk of a frame, and statistics (fields of EngineStats, the rest is 0)."""
        chunk = done.chunk
        self._write(
            '~/actions',
            done.tick_ns,
            header=self._header(chunk.stamp_ns),
            frame=chunk.frame,
            joint_names=list(self._profile.command.names),
            period_s=chunk.period_ns / NS_PER_S,
            horizon=len(chunk.values),
            values=chunk.values.ravel(),
            prefill_ms=done.prefill_ms,
            denoise_ms=done.denoise_ms,
        )
        fields: dict[str, Any] = dict.fromkeys(self._fields(f'{PACKAGE}EngineStats'), 0)
        fields |= {'drop_reasons': [], 'drop_counts': np.empty(0, np.uint64)}
        fields |= {'header': self._header(done.tick_ns)} | dict(stats)
        self._write('~/stats', done.tick_ns, **fields)

    def write_command(self, time_ns: int, row: np.ndarray) -> None:
        """Write a command (joints,) as it would have been sent."""
        is_position = set(self._profile.command.quantity) == {'position'}
        none = np.empty(0)
        self._write(
            COMMAND_TOPIC,
            time_ns,
            header=self._header(time_ns),
            name=list(self._profile.command.names),
            position=row if is_position else none,
            velocity=none if is_position else row,
            effort=none,
        )

    def write_text(self, time_ns: int, update: TextUpdate) -> None:
        """Write news of a text, or a complete note; as the node does, half a note is none."""
        task = self._kinds[update.task]
        reason = '' if update.reason is None else update.reason.value
        fields: dict[str, Any] = {
            'header': self._header(update.stamp_ns),
            'frame': update.frame,
            'task': update.task,
            'text': update.text,
            'reason': reason,
            'num_tokens': update.num_tokens,
        }
        if task.kind == 'text':
            fields |= {'delta': update.delta, 'final': update.reason is not None}
        elif update.reason is None or not update.reason.complete:
            return
        self._write(task.topic, time_ns, **fields)

    def _add(self, topic: str, type_name: str) -> None:
        self._connections[topic] = self._writer.add_connection(
            resolve(topic), type_name, typestore=self._store
        )

    def _write(self, topic: str, time_ns: int, **fields: Any) -> None:
        connection = self._connections[topic]
        message = self._store.types[connection.msgtype](**fields)
        data = self._store.serialize_cdr(message, connection.msgtype)
        self._writer.write(connection, time_ns, data)

    def _fields(self, type_name: str) -> list[str]:
        specs = self._store.types[type_name].__dataclass_fields__
        return [name for name in specs if name != '__msgtype__']

    def _header(self, stamp_ns: int) -> Any:
        types = self._store.types
        sec, nanosec = divmod(stamp_ns, NS_PER_S)
        stamp = types['builtin_interfaces/msg/Time'](sec=sec, nanosec=nanosec)
        return types['std_msgs/msg/Header'](stamp=stamp, frame_id='')
