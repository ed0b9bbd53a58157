"""The process that an engine has for itself: builds it, does what the node asks, and tells.

Owns the engine, and with it torch and the device; knows no ROS. Started by `process.py` as
`python -m oxygen_ros.engine.child`, never by a person. It ends when the node closes the channel,
and with the node's death in any case.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from oxygen_ros.actions import ActionChunk, Leftover
from oxygen_ros.engine.engine import TextUpdate
from oxygen_ros.engine.options import EngineOptions
from oxygen_ros.engine.sequence import FinishReason
from oxygen_ros.engine.wire import (
    Channel,
    Plain,
    SharedMemory,
    plain_chunk,
    plain_text,
    read_observation,
)
from oxygen_ros.profile import read_profile

if TYPE_CHECKING:
    from oxygen_ros.engine.engine import Engine

_PR_SET_PDEATHSIG = 1


class EngineServer:
    """Answers each message of the node with news and then one `done` or `error`."""

    def __init__(self, channel: Channel, memory: SharedMemory) -> None:
        self._channel = channel
        self._memory = memory
        self._engine: Engine | None = None
        self._leftover: Leftover | None = None
        self._live: list[list[Any]] = []
        """The live sequences that the node knows of."""
        self._acts: dict[str, Callable[..., None]] = {
            'build': self._build,
            'step': self._step,
            'decode': lambda deadline_ns: self._the_engine.decode(deadline_ns),
            'cancel': lambda reason: self._the_engine.cancel(FinishReason(reason)),
        }

    def run(self) -> None:
        """Serve until the node closes its end."""
        while True:
            try:
                message = self._channel.receive()
            except EOFError:
                return
            self._answer(message)

    def _answer(self, message: Plain) -> None:
        name = message.pop('do')
        outcome: Plain = {'say': 'done'}
        try:
            self._acts[name](**message)
        except Exception as error:
            outcome = {
                'say': 'error',
                'type': type(error).__name__,
                'message': str(error),
                'trace': traceback.format_exc(),
            }
        engine = self._engine
        if engine is not None:
            self._tell_live()
            outcome |= {'stats': asdict(engine.stats), 'horizon': engine.action_horizon}
        self._channel.send(outcome)

    @property
    def _the_engine(self) -> Engine:
        assert self._engine is not None, 'the node asks before it has had an engine built'
        return self._engine

    # --- what the node asks -------------------------------------------------------------------

    def _build(self, profile: Plain, options: Plain) -> None:
        """Load and warm up."""
        from oxygen_ros.engine.factory import build_engine

        engine = build_engine(
            read_profile(profile, f'profile {profile.get("name")}'),
            EngineOptions(**options),
            on_chunk=self._on_chunk,
            on_text=self._on_text,
            leftover=lambda time_ns: self._leftover,
            frame_waiting=self._frame_waiting,
            on_progress=self._on_progress,
        )
        engine.warm_up()
        self._engine = engine

    def _step(self, observation: Plain, deadline_ns: int) -> None:
        seen, self._leftover = read_observation(observation, self._memory.observation)
        self._the_engine.step(seen, deadline_ns)

    # --- what the engine tells ----------------------------------------------------------------

    def _on_chunk(self, chunk: ActionChunk) -> None:
        self._memory.beat()
        self._channel.send(
            {
                'say': 'chunk',
                'chunk': plain_chunk(chunk, self._memory.chunk),
                'stats': asdict(self._the_engine.stats),
            }
        )

    def _on_text(self, update: TextUpdate) -> None:
        self._memory.beat()
        self._channel.send({'say': 'text', 'text': plain_text(update)})

    def _on_progress(self, fraction: float) -> None:
        self._memory.beat()
        self._channel.send({'say': 'progress', 'fraction': fraction})

    def _frame_waiting(self) -> bool:
        """Asked by the engine before every decode step."""
        self._memory.beat()
        self._tell_live()
        return self._memory.frame_waiting

    def _tell_live(self) -> None:
        """The node has to end these texts if this process cannot."""
        live = [
            [sequence.task.name, sequence.frame.number, sequence.frame.stamp_ns]
            for sequence in self._the_engine.scheduler.live
        ]
        if live != self._live:
            self._live = live
            self._channel.send({'say': 'live', 'sequences': live})


def main() -> None:
    """Serve the node named on the command line: its process, and two file descriptors of it."""
    parent, channel_fd, memory_fd = map(int, sys.argv[1:])
    # The node gets these signals too, and decides.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _die_with(parent)
    faulthandler.enable()  # a crash in native code leaves more in the log than its exit code
    memory = SharedMemory(memory_fd)
    channel = Channel(socket.socket(fileno=channel_fd))
    # No pipe: nobody is left to tell.
    with memory.lifeline.held(), suppress(BrokenPipeError, ConnectionResetError):
        EngineServer(channel, memory).run()


def _die_with(parent: int) -> None:
    """Have the kernel end this process with the node, also in the middle of native code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        sys.exit()


if __name__ == '__main__':
    main()
