"""What only CUDA has: captured passes, and a stream on which actions go before everything else.

Knows no model, frame or buffer. Without CUDA both run what they are given where they are called, so
that the code around them is the same. Used by `static_runner.py` on the frame thread.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch


class Graphs:
    """Captured passes by key. A pass takes no argument: it works on buffers that never move."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Passes keep the priority of the `stream` on which they are captured, whichever replays
        them; None: the usual one."""
        self._device = device
        self._stream = stream
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # memory that all graphs share, as they never run at once

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Replay the pass of this key, capturing it first if it is new; without CUDA, run it."""
        if self._device.type != 'cuda':
            work()
            return
        if key not in self._graphs:
            self._graphs[key] = self._capture(work)
        self._graphs[key].replay()

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels pick their algorithms and workspaces before the capture
                work()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        self._pool = graph.pool()
        return graph


class ActionLane:
    """Where actions are made: a stream of higher priority, beside which others may work.

    Actions begin when what the caller's stream was given so far is done (the prefix), and the
    caller may go on giving it work. `hold_back_others` before anything the actions read or write is
    touched again.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream | None = None
        if device.type == 'cuda':
            self.stream = torch.cuda.Stream(device, priority=-1)
            self._ready, self._done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._expected_ns = 0

    def run(self, work: Callable[[], None], meanwhile: Callable[[int], None] | None) -> None:
        """Do `work`, return when it is done.

        `meanwhile` is called as soon as the device has begun with it, with the time [ns] that it
        took the last time; without CUDA never, there the work is done at once.
        """
        if self.stream is None:
            work()
            return
        self._ready.record()
        self.stream.wait_event(self._ready)
        with torch.cuda.stream(self.stream):
            work()
            self._done.record()
        if meanwhile is not None:
            self._ready.synchronize()
            meanwhile(self._expected_ns)
        self._done.synchronize()
        self._expected_ns = round(self._ready.elapsed_time(self._done) * 1e6)

    def hold_back_others(self) -> None:
        """Let the caller's stream wait until the actions are there, even if `meanwhile` raised."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
