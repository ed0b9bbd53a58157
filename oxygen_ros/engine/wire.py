"""What the node and an engine in a process of its own tell each other, and in which form.

Words are lines of JSON on a socket, arrays lie in memory that both processes have mapped; nothing
here can carry code. Owns these forms and knows neither what is asked nor who answers: `process.py`
is the node's end, `child.py` the engine's.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from oxygen_ros.actions import ActionChunk, Leftover
from oxygen_ros.engine.engine import TextUpdate
from oxygen_ros.engine.lifeline import Lifeline
from oxygen_ros.engine.sequence import FinishReason
from oxygen_ros.observation import Observation

Plain = dict[str, Any]
"""What JSON holds."""

OBSERVATION_BYTES = 256 * 2**20
"""Room for ten pictures of 4K. Memory is taken from the system only where it is written."""
CHUNK_BYTES = 16 * 2**20
_TOTAL_BYTES = mmap.PAGESIZE + OBSERVATION_BYTES + CHUNK_BYTES
_ALIGNMENT = 64
_LIFELINE_OFFSET = 64


class Channel:
    """One end of a stream of messages. One thread uses it at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._unread = b''

    def send(self, message: Plain) -> None:
        """Send one message; raises OSError if the other end is gone."""
        self._socket.sendall(json.dumps(message).encode() + b'\n')

    def receive(self, timeout_s: float | None = None) -> Plain:
        """Wait for one message.

        Raises:
            EOFError: the other end is gone and has left nothing unread.
            TimeoutError: nothing came for so long; another call may follow.
        """
        while b'\n' not in self._unread:
            self._socket.settimeout(timeout_s)
            received = self._receive_some()
            if not received:
                raise EOFError('the other end of the channel is closed')
            self._unread += received
        line, _, self._unread = self._unread.partition(b'\n')
        message: Plain = json.loads(line)
        return message

    def _receive_some(self) -> bytes:
        try:
            return self._socket.recv(2**16)
        except ConnectionResetError:  # it died with something of ours unread
            return b''

    def end(self) -> None:
        """Tell the other end that nothing more will be sent."""
        with suppress(OSError):  # it has gone by itself
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


class Area:
    """A span of the shared memory that one side writes and the other reads, in turns."""

    def __init__(self, memory: mmap.mmap, start: int, size: int) -> None:
        self._memory, self._start, self._size = memory, start, size

    def put(self, arrays: Mapping[str, np.ndarray]) -> Plain:
        """Write arrays over those of the last call; return what `get` finds them by.

        Raises ValueError if they do not fit.
        """
        places: Plain = {}
        offset = 0
        for name, array in arrays.items():
            if offset + array.nbytes > self._size:
                total = sum(one.nbytes for one in arrays.values())
                raise ValueError(
                    f'the arrays {", ".join(arrays)} take {total} bytes: expected at most '
                    f'{self._size}'
                )
            self._view(offset, array.dtype.str, array.shape)[...] = array
            places[name] = [offset, array.dtype.str, list(array.shape)]
            offset += math.ceil(array.nbytes / _ALIGNMENT) * _ALIGNMENT
        return places

    def get(self, places: Plain) -> dict[str, np.ndarray]:
        """Return read-only views, good until the writer's next `put`."""
        views = {name: self._view(*place) for name, place in places.items()}
        for view in views.values():
            view.setflags(write=False)
        return views

    def _view(self, offset: int, dtype: str, shape: Any) -> np.ndarray:
        return np.ndarray(tuple(shape), dtype, buffer=self._memory, offset=self._start + offset)


class SharedMemory:
    """Memory without a name: the system frees it with the last process that has it mapped.

    [ frame waiting | beats | lifeline |   observation   |   chunk   ]
    0               8       64       a page: node writes   engine writes
    """

    def __init__(self, fd: int) -> None:
        """Map what `create` made, and own the file descriptor."""
        self._file = os.fdopen(fd, 'r+b', buffering=0)
        self._memory = mmap.mmap(fd, _TOTAL_BYTES)
        self.observation = Area(self._memory, mmap.PAGESIZE, OBSERVATION_BYTES)
        self.chunk = Area(self._memory, mmap.PAGESIZE + OBSERVATION_BYTES, CHUNK_BYTES)
        self._beats = memoryview(self._memory)[8:16].cast('Q')
        self.lifeline = Lifeline(self._memory, _LIFELINE_OFFSET)

    @classmethod
    def create(cls) -> SharedMemory:
        """Make new memory; raises ValueError where the system has none of this kind."""
        if not hasattr(os, 'memfd_create'):
            raise ValueError("parameter 'isolation': process needs Linux, use thread")
        fd = os.memfd_create('oxygen_engine')
        os.ftruncate(fd, _TOTAL_BYTES)
        memory = cls(fd)
        memory.lifeline.create()
        return memory

    @property
    def fd(self) -> int:
        """The file descriptor to map it by in another process."""
        return self._file.fileno()

    @property
    def frame_waiting(self) -> bool:
        """Whether decoding should give way. Written by the node, a byte: no lock."""
        return bool(self._memory[0])

    @frame_waiting.setter
    def frame_waiting(self, waiting: bool) -> None:
        self._memory[0] = waiting

    @property
    def beats(self) -> int:
        """How often the engine has shown that it lives. Written by the engine, a word: no lock."""
        return self._beats[0]

    def beat(self) -> None:
        self._beats[0] += 1

    def close(self) -> None:
        """Let no further process map it. What is mapped here stays until nobody holds this."""
        self._file.close()


# --- records, as plain values and arrays ----------------------------------------------------------


def plain_observation(observation: Observation, leftover: Leftover | None, area: Area) -> Plain:
    """Write an observation, and what the chunk in force has left of it, for the engine.

    Raises ValueError if the pictures are larger than the memory.
    """
    arrays = {f'image {slot}': image for slot, image in observation.images.items()}
    arrays['state'] = observation.state
    if leftover is not None:
        arrays['leftover'] = leftover.values
    return {
        'frame': observation.frame,
        'stamp_ns': observation.stamp_ns,
        'time_ns': observation.time_ns,
        'instruction': observation.instruction,
        'notes': list(observation.notes),
        'delay': None if leftover is None else leftover.delay,
        'arrays': area.put(arrays),
    }


def read_observation(plain: Plain, area: Area) -> tuple[Observation, Leftover | None]:
    """Read what `plain_observation` wrote; its arrays are good for this frame."""
    arrays = area.get(plain['arrays'])
    leftover = Leftover(arrays.pop('leftover'), plain['delay']) if 'leftover' in arrays else None
    state = arrays.pop('state')
    observation = Observation(
        frame=plain['frame'],
        stamp_ns=plain['stamp_ns'],
        time_ns=plain['time_ns'],
        images={name.removeprefix('image '): image for name, image in arrays.items()},
        state=state,
        instruction=plain['instruction'],
        notes=tuple(plain['notes']),
    )
    return observation, leftover


def plain_chunk(chunk: ActionChunk, area: Area) -> Plain:
    """Write a chunk for the node."""
    return {
        'frame': chunk.frame,
        'stamp_ns': chunk.stamp_ns,
        'time_ns': chunk.time_ns,
        'period_ns': chunk.period_ns,
        'arrays': area.put({'values': chunk.values}),
    }


def read_chunk(plain: Plain, area: Area) -> ActionChunk:
    """Read what `plain_chunk` wrote, as a copy."""
    values = area.get(plain['arrays'])['values']
    return ActionChunk(
        plain['frame'], plain['stamp_ns'], plain['time_ns'], plain['period_ns'], values
    )


def plain_text(update: TextUpdate) -> Plain:
    return asdict(update)


def read_text(plain: Plain) -> TextUpdate:
    reason = plain['reason']
    return TextUpdate(**{**plain, 'reason': None if reason is None else FinishReason(reason)})
