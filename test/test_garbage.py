"""The collector while a model is loaded: never by itself, and nothing of it stays afterwards."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from oxygen_ros import garbage


class Ring:
    """Garbage that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """The names of the threads in which a collection starts."""
    threads: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == 'start':
            threads.append(threading.current_thread().name)

    gc.callbacks.append(note)
    yield threads
    gc.callbacks.remove(note)
    garbage.release()


def allocate_much() -> None:
    """More containers than any threshold of the collector."""
    kept = [[] for _ in range(100_000)]  # type: ignore[var-annotated]
    assert len(kept) == 100_000


def test_no_thread_collects_by_itself_once_settled(collections: list[str]) -> None:
    garbage.settle()
    collections.clear()
    tick = threading.Thread(target=allocate_much, name='command_publisher')
    tick.start()
    tick.join()
    assert collections == []
    garbage.sweep()
    assert collections == [threading.current_thread().name]


def test_the_same_allocations_do_collect_without_it(collections: list[str]) -> None:
    tick = threading.Thread(target=allocate_much, name='command_publisher')
    tick.start()
    tick.join()
    assert 'command_publisher' in collections


def test_a_sweep_frees_what_was_made_since(collections: list[str]) -> None:
    garbage.settle()
    ring = weakref.ref(Ring())
    assert ring() is not None
    garbage.sweep()
    assert ring() is None


def test_after_release_what_was_set_aside_can_be_freed(collections: list[str]) -> None:
    ring = Ring()
    seen = weakref.ref(ring)
    garbage.settle()
    del ring
    garbage.sweep()
    assert seen() is not None
    garbage.release()
    gc.collect()
    assert seen() is None
    assert gc.isenabled()
