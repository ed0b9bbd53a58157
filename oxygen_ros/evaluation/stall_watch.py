"""When the machine did not let a thread run: what explains a missed deadline without the node.

Run as a program it only wants to wake up in time, and writes down when it could not; its scheduling
is the ordinary one of every thread behind the command tick. A thread that computes is held up where
one that sleeps is not, so `RunDelay` asks the kernel as well. Knows neither ROS nor the node.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PERIOD_NS = 2_000_000


def main(path: str, min_stall_ns: str) -> None:
    """Write `from until` [ns, steady clock] for every stall, until killed."""
    with Path(path).open('w', encoding='ascii', buffering=1) as file:
        due_ns = time.monotonic_ns()
        while True:
            time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            now_ns = time.monotonic_ns()
            if now_ns - due_ns >= int(min_stall_ns):
                file.write(f'{due_ns} {now_ns}\n')
            due_ns = max(due_ns + PERIOD_NS, now_ns)


def stalls(path: Path) -> list[tuple[int, int]]:
    """What was written so far; a line that is not whole yet is left for later."""
    lines = path.read_text(encoding='ascii').split('\n')[:-1]
    return [(int(begin), int(end)) for begin, end in (line.split() for line in lines)]


class RunDelay:
    """How long the threads of a process were ready to run while the machine ran others."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f'/proc/{pid}/task')
        self._before: dict[str, int] = {}

    def longest_ns(self) -> int:
        """Since the last call, of the thread that waited longest; 0 where no kernel tells."""
        now = dict(self._read())
        waited = [delay_ns - self._before.get(task, delay_ns) for task, delay_ns in now.items()]
        self._before = now
        return max(waited, default=0)

    def _read(self) -> Iterator[tuple[str, int]]:
        for task in self._tasks.glob('*'):
            # Threads end while we look, and a kernel without CONFIG_SCHED_INFO has no such file.
            with suppress(OSError):
                yield task.name, int((task / 'schedstat').read_text().split()[1])


if __name__ == '__main__':
    main(*sys.argv[1:])
