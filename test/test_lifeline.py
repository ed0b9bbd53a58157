"""A process learns of another's death before the kernel has cleared the dead one away."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from oxygen_ros.engine.wire import SharedMemory

ROOT = Path(__file__).parents[1]
HOLDER = """
import sys
from oxygen_ros.engine.wire import SharedMemory
memory = SharedMemory(int(sys.argv[1]))
ballast = bytearray(int(sys.argv[2]))
ballast[::4096] = b'x' * len(ballast[::4096])
with memory.lifeline.held():
    print('held', flush=True)
    while (line := sys.stdin.readline()) == 'still there?\\n':
        print('yes', flush=True)
    if line == 'fail\\n':
        raise SystemExit('failed')
"""
WAIT_S = 60.0

pytestmark = pytest.mark.skipif(not hasattr(os, 'memfd_create'), reason='needs Linux')


@pytest.fixture
def memory():
    memory = SharedMemory.create()
    yield memory
    memory.close()


@pytest.fixture
def hold(memory):
    processes: list[subprocess.Popen] = []

    def start(ballast: int = 0) -> subprocess.Popen:
        processes.append(
            subprocess.Popen(
                [sys.executable, '-c', HOLDER, str(memory.fd), str(ballast)],
                pass_fds=[memory.fd], cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip
        assert processes[-1].stdout.readline() == 'held\n'
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


class Watch:
    """A thread that waits for the end of whoever holds the lifeline, and notes when it came."""

    def __init__(self, memory: SharedMemory) -> None:
        self.events: list[str] = []
        self._waiting, self._over = threading.Event(), threading.Event()
        threading.Thread(target=self._run, args=(memory,)).start()
        assert self._waiting.wait(WAIT_S)

    def _run(self, memory: SharedMemory) -> None:
        self._waiting.set()
        memory.lifeline.wait()
        self.events.append('heard')
        self._over.set()

    def heard_of_the_end(self) -> bool:
        return self._over.wait(WAIT_S)


def end_by_signal(process):
    process.kill()


def end_by_itself(process):
    process.communicate('end\n')


def end_by_exception(process):
    process.communicate('fail\n')


@pytest.mark.parametrize('end', [end_by_signal, end_by_itself, end_by_exception])
def test_whoever_waits_hears_of_the_end_and_not_before(memory, hold, end):
    process = hold()
    watch = Watch(memory)
    assert is_still_there(process)
    watch.events.append('ended')
    end(process)
    assert watch.heard_of_the_end()
    assert watch.events == ['ended', 'heard']


def is_still_there(process) -> bool:
    """A round trip to the holder, in which a watch that does not wait would be through."""
    process.stdin.write('still there?\n')
    process.stdin.flush()
    return process.stdout.readline() == 'yes\n'


def test_it_serves_one_life_after_the_other_and_a_death_that_nobody_waited_for(memory, hold):
    for watched in (True, False, True, True):
        process = hold()
        if not watched:
            process.kill()
            process.wait()
            continue
        watch = Watch(memory)
        assert is_still_there(process)
        watch.events.append('ended')
        process.kill()
        assert watch.heard_of_the_end()
        assert watch.events == ['ended', 'heard']


def test_a_death_is_heard_of_while_the_dead_ones_memory_is_being_freed(memory, hold):
    """The machine may be busy with something else once or twice, but not each time."""
    first = []
    for _ in range(5):
        process = hold(ballast=2**30)
        watch = Watch(memory)
        handle = os.pidfd_open(process.pid)
        process.kill()
        assert watch.heard_of_the_end()
        has_ended, _, _ = select.select([handle], [], [], 0)
        os.close(handle)
        first.append(not has_ended)
        process.wait()
    assert any(first)
