"""Memory on disk: what is found again, what is bounded, and what survives."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oxygen_ros.memory_store import MemoryStore, MemoryStoreError, StoredNote

ROOT = Path(__file__).resolve().parents[1]
NUM_MANY = 200_000
SECOND = 1_000_000_000
# A robot that notes without end, and says what is certainly on disk.
ENDLESS = """
import sys
from pathlib import Path
from oxygen_ros.memory_store import MemoryStore, StoredNote

store, number = MemoryStore(Path(sys.argv[1])), 0
while True:
    for _ in range(50):
        store.add(StoredNote(number, number, 'memory', f'note {number}', 'eos', 3))
        number += 1
    store.flush()
    print(number, flush=True)
"""


def note(second: int, text: str) -> StoredNote:
    return StoredNote(second * SECOND, second, 'memory', text, 'eos', len(text.split()))


Open = Callable[..., MemoryStore]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Open the same file again and again; all are closed at the end."""
    stores: list[MemoryStore] = []

    def open_store(**options: int) -> MemoryStore:
        stores.append(MemoryStore(tmp_path / 'robot' / 'memory.db', **options))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def remember(store: MemoryStore, *notes: StoredNote) -> None:
    for one in notes:
        store.add(one)
    store.flush()
    assert store.error is None


KITCHEN = (
    note(1, 'the keys are on the table beside the cup'),
    note(2, 'the red cup is in the sink'),
    note(3, 'a person took the key from the table'),
    note(4, 'the table is empty'),
)


def test_a_question_finds_the_notes_that_share_its_words_in_any_form(opened: Open) -> None:
    store = opened()
    remember(store, *KITCHEN)
    found = store.recall('Where are the keys?')
    assert {one.stamp_ns for one in found} == {1 * SECOND, 3 * SECOND}
    assert found[0] in KITCHEN


def test_more_and_rarer_words_come_first(opened: Open) -> None:
    store = opened()
    remember(store, *KITCHEN)
    assert store.recall('is the red cup on the table?')[0] == KITCHEN[1]


def test_without_words_the_newest_notes_come_and_times_bound_both_kinds(opened: Open) -> None:
    store = opened()
    remember(store, *KITCHEN)
    assert store.recall('', limit=2) == [KITCHEN[3], KITCHEN[2]]
    assert store.recall('', since_ns=2 * SECOND, until_ns=3 * SECOND) == [KITCHEN[2], KITCHEN[1]]
    assert store.recall('table', since_ns=2 * SECOND, until_ns=3 * SECOND) == [KITCHEN[2]]
    assert store.recall('table', since_ns=9 * SECOND) == []


@pytest.mark.parametrize('query', ['"', "it's", 'a AND', 'NEAR(', 'text:cup*', '-', '% ;--', 'the'])
def test_nothing_that_is_asked_is_taken_for_a_search_language(query: str, opened: Open) -> None:
    store = opened()
    remember(store, *KITCHEN)
    assert isinstance(store.recall(query), list)


def test_words_of_any_script_are_found(opened: Open) -> None:
    store = opened()
    remember(store, note(1, 'die Schlüssel liegen im Café'), note(2, 'ключи на столе'))
    assert [one.frame for one in store.recall('schlussel')] == [1]
    assert [one.frame for one in store.recall('КЛЮЧИ')] == [2]


def test_notes_are_there_after_a_restart(opened: Open, tmp_path: Path) -> None:
    first = MemoryStore(tmp_path / 'robot' / 'memory.db')
    for one in KITCHEN:
        first.add(one)
    first.close()
    store = opened()
    assert store.recall('', limit=4) == list(reversed(KITCHEN))
    remember(store, note(5, 'the lamp is on'))
    assert store.recall('lamp')[0].frame == 5


def test_a_bounded_memory_forgets_the_oldest_and_their_words(opened: Open) -> None:
    store = opened(max_notes=100)
    remember(store, *(note(i, f'number n{i} is here') for i in range(250)))
    kept = store.recall('', limit=1000)
    assert [one.frame for one in kept] == list(range(249, 149, -1))
    assert store.recall('n149') == []
    assert store.recall('n150')[0].frame == 150


def test_a_killed_process_loses_nothing_that_was_written(tmp_path: Path, opened: Open) -> None:
    path = tmp_path / 'robot' / 'memory.db'
    process = subprocess.Popen(
        [sys.executable, '-c', ENDLESS, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    written = 0
    while written < 500:
        line = process.stdout.readline()
        assert line, 'the writer ended'
        written = int(line)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    with sqlite3.connect(path) as connection:
        assert connection.execute('PRAGMA integrity_check').fetchone() == ('ok',)
        connection.execute("INSERT INTO words (words) VALUES ('integrity-check')")
    store = opened()
    frames = {one.frame for one in store.recall('', limit=10**6)}
    assert set(range(written)) <= frames
    assert store.recall(f'{written - 1}')[0].frame == written - 1


def test_adding_never_waits_for_a_disk_that_hangs(opened: Open, tmp_path: Path) -> None:
    store = opened()
    remember(store, *KITCHEN)
    # Another program holds the file: the writer has to wait.
    other = sqlite3.connect(tmp_path / 'robot' / 'memory.db', isolation_level=None)
    other.execute('BEGIN IMMEDIATE')
    started_s = time.monotonic()
    for number in range(3000):
        store.add(note(number, 'more'))
    took_s = time.monotonic() - started_s
    assert store.lost > 0
    assert len(store.recall('table')) == 3  # reading goes on
    other.execute('ROLLBACK')
    other.close()
    store.flush()
    assert took_s < 3.0  # the writer alone would have waited 5 s
    assert store.written + store.lost == 3000 + len(KITCHEN)


@pytest.mark.parametrize('content', [b'not a database at all' * 100, b''])
def test_a_file_that_is_no_memory_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / 'memory.db'
    path.write_bytes(content)
    if not content:  # an empty file is a new one
        MemoryStore(path).close()
        return
    with pytest.raises(MemoryStoreError, match='cannot be used as memory') as caught:
        MemoryStore(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_a_database_of_another_program_or_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / 'other.db'
    with sqlite3.connect(path) as connection:
        connection.execute('CREATE TABLE songs (title)')
    with pytest.raises(MemoryStoreError, match='expected schema 1, got 0'):
        MemoryStore(path)


@pytest.mark.slow
def test_among_many_notes_a_rare_word_and_a_common_one_are_both_found_in_time(
    opened: Open, tmp_path: Path
) -> None:
    store = opened()
    with sqlite3.connect(tmp_path / 'robot' / 'memory.db') as connection:
        connection.executemany(
            'INSERT INTO notes (stamp_ns, frame, task, text, reason, num_tokens) '
            "VALUES (?, ?, 'memory', ?, 'eos', 9)",
            (
                (i * SECOND, i, f'block {i} of {i % 97} is beside the tray number {i % 1009}')
                for i in range(NUM_MANY)
            ),
        )
    remember(store, note(2_000_000, 'the keys hang behind the door'))
    assert store.recall('where are the keys?')[0].frame == 2_000_000
    assert 123456 in {one.frame for one in store.recall('block 123456')}
    assert len(store.recall('block tray', limit=5)) == 5
    assert len(store.recall('', limit=5)) == 5
