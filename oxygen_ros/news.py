"""News: what the node tells of its thoughts, as chunks, texts and memory notes.

Owns their publishers, the file of notes and the service that searches it, from configure to
cleanup. Called by the frame thread, which publishes itself and so waits for no callback; the
service runs in the node's executor. Commands are not news: they have a deadline (`publisher.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rclpy.node import Node

from oxygen_ros import conversions
from oxygen_ros.actions import ActionChunk
from oxygen_ros.engine.engine import EngineStats, TextUpdate
from oxygen_ros.memory_store import MAX_TIME_NS, MemoryStore, MemoryStoreError
from oxygen_ros.msg import ActionChunk as ActionChunkMessage
from oxygen_ros.msg import Note, Text
from oxygen_ros.profile import RobotProfile
from oxygen_ros.qos import LATCHED, RELIABLE, QosWatch
from oxygen_ros.srv import Recall

DEFAULT_RECALL_LIMIT = 10


class News:
    def __init__(
        self,
        node: Node,
        qos: QosWatch,
        profile: RobotProfile,
        *,
        memory_path: str,
        put_note: Callable[[str], None],
    ) -> None:
        """Create the publishers and open the file.

        Args:
            memory_path: where notes are kept across restarts; '' keeps none.
            put_note: takes a note for the prompts to come.

        Raises:
            MemoryStoreError: no file of notes can be there.
        """
        self._node, self._profile, self._put_note = node, profile, put_note
        self._memory = MemoryStore(Path(memory_path).expanduser()) if memory_path else None
        create = functools.partial(qos.create_publisher, node.create_publisher)
        self._chunks = create(ActionChunkMessage, '~/actions', RELIABLE)
        self._words = {
            task.name: create(Note, task.topic, LATCHED)
            if task.kind == 'memory'
            else create(Text, task.topic, RELIABLE)
            for task in profile.tasks
        }
        self._recall: Any = None

    def offer_recall(self) -> None:
        """Begin to answer searches, where notes are kept."""
        if self._memory is not None:
            self._recall = self._node.create_service(Recall, '~/recall', self._on_recall)

    def remember(self) -> None:
        """Begin with the notes of before, where they are kept and fed back."""
        if self._memory is not None and (number := self._profile.memory.feed_back):
            notes = self._memory.recall('', limit=number)
            for note in reversed(notes):
                self._put_note(note.text)
            self._node.get_logger().info(f'the prompt begins with {len(notes)} notes of before')

    def close(self) -> None:
        """Tell nothing more, and keep what is to be kept."""
        for publisher in (self._chunks, *self._words.values()):
            self._node.destroy_publisher(publisher)
        if self._recall is not None:
            self._node.destroy_service(self._recall)
        if self._memory is not None:
            self._memory.close()

    @property
    def lost_notes(self) -> int:
        """Notes that could not be kept."""
        return 0 if self._memory is None else self._memory.lost

    # --- frame thread -------------------------------------------------------------------------

    def tell_chunk(self, chunk: ActionChunk, stats: EngineStats) -> None:
        """Publish a chunk, and how long it took."""
        self._chunks.publish(
            conversions.chunk_message(
                chunk,
                self._profile.command.names,
                prefill_ms=stats.prefill_ms,
                denoise_ms=stats.denoise_ms,
            )
        )

    def tell_words(self, update: TextUpdate) -> None:
        """Publish a piece of text, or a note when it is whole."""
        publisher = self._words[update.task]
        if publisher.msg_type is Text:
            publisher.publish(conversions.text_message(update))
        elif update.reason is not None and update.reason.complete:
            # Half a note is no memory; the scheduler has counted it as dropped.
            publisher.publish(conversions.note_message(update))
            self._put_note(update.text)
            if self._memory is not None:
                self._memory.add(conversions.stored_note(update))

    # --- executor thread ----------------------------------------------------------------------

    def _on_recall(self, request: Recall.Request, response: Recall.Response) -> Recall.Response:
        """Answer from the file; a search that takes too long is given up, images come first."""
        assert self._memory is not None
        try:
            found = self._memory.recall(
                request.query,
                since_ns=conversions.stamp_to_ns(request.since),
                until_ns=conversions.stamp_to_ns(request.until) or MAX_TIME_NS,
                limit=request.limit or DEFAULT_RECALL_LIMIT,
            )
        except MemoryStoreError as error:
            response.message = str(error)
            return response
        response.notes = [conversions.stored_note_message(note) for note in found]
        return response
