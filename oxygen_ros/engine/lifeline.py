"""Lifeline: how one process learns at once that another is dying.

A mutex in memory that both have mapped, held by the one from its start to its end. It is robust in
the sense of POSIX, so the kernel gives it up for a holder that dies, and does so first of all:
sockets are closed and parents told only after the dead process's memory is freed, which takes 30 ms
for a small model and longer for a large one.

Knows nothing of engines. Python has no such mutex, so this is the one place that speaks to the C
library. Owned by `wire.py`, held by `child.py`, watched by `process.py`.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LIFELINE_BYTES = 64
"""More than a pthread_mutex_t and a pthread_mutexattr_t take anywhere."""
_PROCESS_SHARED = 1
_ROBUST = 1


class Lifeline:
    def __init__(self, memory: Any, offset: int) -> None:
        """Find it in a writable buffer, in which LIFELINE_BYTES are its own.

        Raises ValueError where the C library has no robust mutexes.
        """
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, 'pthread_mutexattr_setrobust'):
            raise ValueError("parameter 'isolation': process needs robust mutexes, use thread")
        self._mutex = (ctypes.c_char * LIFELINE_BYTES).from_buffer(memory, offset)

    def create(self) -> None:
        """Make it, once, before another process maps the memory."""
        attributes = (ctypes.c_char * LIFELINE_BYTES)()
        self._call('pthread_mutexattr_init', attributes)
        self._call('pthread_mutexattr_setpshared', attributes, _PROCESS_SHARED)
        self._call('pthread_mutexattr_setrobust', attributes, _ROBUST)
        self._call('pthread_mutex_init', self._mutex, attributes)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it until the end of the block or the death of the calling thread.

        The block must end before the memory is unmapped, which an interpreter that ends does: the
        kernel could not find the mutex any more.
        """
        self._lock()
        try:
            yield
        finally:
            self._unlock()

    def wait(self) -> None:
        """Return when nobody holds it. Python's other threads run meanwhile."""
        self._lock()
        self._unlock()

    def _unlock(self) -> None:
        self._call('pthread_mutex_unlock', self._mutex)

    def _lock(self) -> None:
        if self._call('pthread_mutex_lock', self._mutex, but=errno.EOWNERDEAD):
            self._call('pthread_mutex_consistent', self._mutex)

    def _call(self, name: str, *arguments: Any, but: int = 0) -> int:
        """Call a function that returns 0 or an error, of which one may be expected."""
        function: Callable[..., int] = getattr(self._library, name)
        error = function(*arguments)
        if error not in (0, but):
            raise OSError(error, f'{name}: {os.strerror(error)}')
        return error
