"""MemoryStore: the memory notes of one robot on disk, found again by their words and times.

Owns the SQLite file, its bound and the thread that writes it. Knows neither ROS nor the model: a
note is a text with a stamp. `node.py` adds every note it publishes, and answers `~/recall`.
"""

from __future__ import annotations

import queue
import re
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import astuple, dataclass
from pathlib import Path

SCHEMA_VERSION = 1
MAX_NOTES = 1_000_000
"""The oldest notes go first; at a note per second this is 11 days without a break."""
MAX_WAITING = 1000
"""Notes that wait for a slow disk before further ones are dropped."""
QUERY_LIMIT_S = 0.2
"""A query is given up after so long: the executor thread has images to store."""
BUSY_TIMEOUT_S = 5.0
MAX_TIME_NS = 2**63 - 1

# FTS5 keeps the words, `notes` the text itself; the triggers keep them together.
SCHEMA = """
CREATE TABLE notes (
    id INTEGER PRIMARY KEY,
    stamp_ns INTEGER NOT NULL,
    frame INTEGER NOT NULL,
    task TEXT NOT NULL,
    text TEXT NOT NULL,
    reason TEXT NOT NULL,
    num_tokens INTEGER NOT NULL
);
CREATE INDEX notes_by_stamp ON notes (stamp_ns);
CREATE VIRTUAL TABLE words USING fts5 (
    text, content='notes', content_rowid='id', tokenize='porter unicode61'
);
CREATE TRIGGER note_added AFTER INSERT ON notes BEGIN
    INSERT INTO words (rowid, text) VALUES (new.id, new.text);
END;
CREATE TRIGGER note_removed AFTER DELETE ON notes BEGIN
    INSERT INTO words (words, rowid, text) VALUES ('delete', old.id, old.text);
END;
"""
COLUMNS = 'stamp_ns, frame, task, notes.text, reason, num_tokens'
BETWEEN = 'stamp_ns BETWEEN ? AND ?'
NEWEST = f'SELECT {COLUMNS} FROM notes WHERE {BETWEEN} ORDER BY stamp_ns DESC LIMIT ?'
MATCHING = (
    f'SELECT {COLUMNS} FROM words JOIN notes ON notes.id = words.rowid '
    f'WHERE words MATCH ? AND {BETWEEN}'
)
RANKED = f'{MATCHING} ORDER BY words.rank, stamp_ns DESC LIMIT ?'
NEWEST_WITH = f'{MATCHING} ORDER BY words.rowid DESC LIMIT ?'  # written last

# In a question these say nothing about where to look, and nearly every note has them.
EMPTY_WORDS = frozenset(
    [
        'a', 'an', 'and', 'are', 'at', 'did', 'do', 'does', 'have', 'has', 'how', 'i', 'in',
        'is', 'it', 'my', 'of', 'on', 'or', 'that', 'the', 'there', 'this', 'to', 'was',
        'were', 'what', 'when', 'where', 'which', 'who', 'you', 'your',
    ]
)  # fmt: skip
WORD = re.compile(r'\w+')


class MemoryStoreError(ValueError):
    """The file cannot be used, or a recall failed; one line that says why."""


@dataclass(frozen=True)
class StoredNote:
    """One complete memory note, with the fields of the Note message."""

    stamp_ns: int
    """Of the observation described, ROS time."""
    frame: int
    task: str
    text: str
    reason: str
    num_tokens: int


class MemoryStore:
    """Notes of one robot, across restarts.

    `add` never waits for the disk; a thread writes. A note is safe from a kill of the process once
    it is written (WAL), from a power cut once the log was synced, at the latest after a few
    megabytes; neither can damage what is there. `recall` reads beside the writer.
    """

    def __init__(self, path: Path, *, max_notes: int = MAX_NOTES) -> None:
        """Open or make the file. Raises MemoryStoreError if it is something else, or damaged."""
        self._path = path
        self._max_notes = max_notes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(_connect(path)) as connection:
                _prepare(connection)
        except (OSError, sqlite3.Error) as error:
            raise MemoryStoreError(
                f'{path}: cannot be used as memory: {error}; give another memory_path or move the '
                f'file away'
            ) from error
        self._waiting: queue.Queue[StoredNote | None] = queue.Queue(MAX_WAITING)
        self._lock = threading.Lock()  # one recall at a time
        self._reader = _connect(path)
        # The first by `add`, the others by the writer thread; anybody reads single values.
        self._refused = self._failed = 0
        self.written = 0
        self.error: sqlite3.Error | None = None
        """The newest failure to write; its notes are lost, the next ones are tried."""
        self._thread = threading.Thread(target=self._write, name='memory', daemon=True)
        self._thread.start()

    def add(self, note: StoredNote) -> None:
        """Hand a note to the writer; with too many waiting it is counted in `lost`."""
        try:
            self._waiting.put_nowait(note)
        except queue.Full:
            self._refused += 1

    @property
    def lost(self) -> int:
        """Notes that were not kept: the disk is too slow, or full."""
        return self._refused + self._failed

    def recall(
        self, query: str, *, since_ns: int = 0, until_ns: int = MAX_TIME_NS, limit: int = 10
    ) -> list[StoredNote]:
        """Find notes about moments in [since_ns, until_ns].

        With words, those that share a word (in any form: key, keys) come, the best match first:
        more and rarer words count more, of equals the newest is first. Where so many match that
        to rank them takes too long, those with all the words come first, each kind newest first.
        Without words, the newest come.

        Raises MemoryStoreError where the file fails or even that takes too long.
        """
        words = [f'"{word}"' for word in _search_words(query)]
        bounds = (since_ns, until_ns, limit)
        with self._lock:
            try:
                if not words:
                    return self._select(NEWEST, bounds)
                return self._find(words, bounds)
            except sqlite3.Error as error:
                raise MemoryStoreError(f'{self._path}: recall of {query!r}: {error}') from error

    def _find(self, words: list[str], bounds: tuple[int, int, int]) -> list[StoredNote]:
        any_word, all_words = ' OR '.join(words), ' AND '.join(words)
        try:
            return self._select(RANKED, (any_word, *bounds))
        except sqlite3.OperationalError:
            found = self._select(NEWEST_WITH, (all_words, *bounds))
            found += self._select(NEWEST_WITH, (any_word, *bounds))
            return list(dict.fromkeys(found))[: bounds[-1]]

    def _select(self, sql: str, values: tuple[str | int, ...]) -> list[StoredNote]:
        """Run one query; raises sqlite3.OperationalError when it takes too long."""
        give_up_s = time.monotonic() + QUERY_LIMIT_S
        self._reader.set_progress_handler(lambda: time.monotonic() > give_up_s, 10_000)
        return [StoredNote(*row) for row in self._reader.execute(sql, values)]

    def flush(self) -> None:
        """Wait until every note that was added is written, or failed."""
        self._waiting.join()

    def close(self) -> None:
        """Write what waits, then close."""
        self._waiting.put(None)
        self._thread.join()
        self._reader.close()

    # --- the writer thread ----------------------------------------------------------------------

    def _write(self) -> None:
        with closing(_connect(self._path)) as connection:
            while True:
                notes = self._take()
                kept = [note for note in notes if note is not None]
                try:
                    self._write_notes(connection, kept)
                except sqlite3.Error as error:
                    self.error = error
                    self._failed += len(kept)
                for _ in notes:
                    self._waiting.task_done()
                if None in notes:
                    return

    def _take(self) -> list[StoredNote | None]:
        """Wait for a note; take with it what else is there, so that a slow disk catches up."""
        notes = [self._waiting.get()]
        while notes[-1] is not None and len(notes) < MAX_WAITING:
            try:
                notes.append(self._waiting.get_nowait())
            except queue.Empty:
                break
        return notes

    def _write_notes(self, connection: sqlite3.Connection, notes: list[StoredNote]) -> None:
        with connection:
            connection.executemany(
                'INSERT INTO notes (stamp_ns, frame, task, text, reason, num_tokens) '
                'VALUES (?, ?, ?, ?, ?, ?)',
                map(astuple, notes),
            )
            connection.execute(
                'DELETE FROM notes WHERE id <= (SELECT max(id) FROM notes) - ?', (self._max_notes,)
            )
        self.written += len(notes)


def _connect(path: Path) -> sqlite3.Connection:
    # The reader is made in one thread and asked in another, one at a time.
    return sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)


def _prepare(connection: sqlite3.Connection) -> None:
    """Make the tables in a new file; raises sqlite3.Error for one that is not ours."""
    connection.execute('PRAGMA journal_mode = WAL')
    (version,) = connection.execute('PRAGMA user_version').fetchone()
    (tables,) = connection.execute('SELECT count(*) FROM sqlite_master').fetchone()
    if version == 0 and tables == 0:
        connection.executescript(
            f'BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;'
        )
    elif version != SCHEMA_VERSION:
        raise sqlite3.DatabaseError(f'expected schema {SCHEMA_VERSION}, got {version}')
    # A file that was cut or overwritten opens well and fails later, in the middle of a run.
    (found,) = connection.execute('PRAGMA quick_check(1)').fetchone()
    if found != 'ok':
        raise sqlite3.DatabaseError(found)


def _search_words(query: str) -> list[str]:
    """Return the words that a search is made of; [] for a query without any."""
    words = WORD.findall(query.lower())
    return [word for word in words if word not in EMPTY_WORDS] or words
