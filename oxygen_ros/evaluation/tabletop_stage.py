"""The stage of the simulated table: a robot in a process of its own, an operator, and a witness.

Owns the table's process, the instructions that are given while it runs, and what is written down of
the table's own truth and pictures. To the node it is a robot like any other. `plan.py` chooses it.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

from oxygen_ros.conversions import decode_image, stamp_to_ns
from oxygen_ros.evaluation.film import Caption, Film
from oxygen_ros.evaluation.measurements import resolve
from oxygen_ros.evaluation.node_process import NodeProcess
from oxygen_ros.evaluation.stage import DemoError, Stage
from oxygen_ros.evaluation.table_score import TableScore, instructions
from oxygen_ros.profile import RobotProfile

MODULE = 'oxygen_ros.sim.tabletop'
TRUTHS = {'text': '/tabletop/truth/narration', 'memory': '/tabletop/truth/memory'}
TOUCHED = '/tabletop/touched'
START_TIMEOUT_S = 60.0
HOLD_STILL = ''
"""An instruction with which the node waits."""
FILM_NAME, SHEET_NAME = 'demo.gif', 'contact_sheet.png'


class TabletopStage(Stage):
    """The table in real time; the operator names the next block once one was touched."""

    def __init__(self, node: Any, profile: RobotProfile, *, seed: int, log_path: Path) -> None:
        super().__init__(node, profile)
        self.score: TableScore = TableScore()
        self.film = Film()
        self._seed, self._log_path = seed, log_path
        self._instructions = instructions(seed)
        self._camera = profile.cameras[0]
        self._process: NodeProcess | None = None
        self._is_stopping = False
        self._num_pictures = 0
        self._witness(node, profile)

    def _witness(self, node: Any, profile: RobotProfile) -> None:
        from rclpy.qos import qos_profile_sensor_data
        from sensor_msgs.msg import CompressedImage, Image

        from oxygen_ros.msg import Note, Text

        subscribe = node.create_subscription
        for kind, topic in TRUTHS.items():
            subscribe(self._message, topic, functools.partial(self._on_truth, kind), 100)
        subscribe(self._message, TOUCHED, self._on_touched, 10)
        image = CompressedImage if self._camera.transport == 'compressed' else Image
        topic = resolve(self._camera.topic)
        subscribe(image, topic, self._on_picture, qos_profile_sensor_data)
        for task in profile.tasks:
            message = Note if task.kind == 'memory' else Text
            on_said = functools.partial(self._on_said, task.kind)
            subscribe(message, resolve(task.topic), on_said, 100)

    # --- the order of things

    def set_up(self) -> None:
        """Start the table, and wait until it shows pictures.

        Raises:
            DemoError: it does not, most often because nothing can be rendered here.
        """
        self.instruct(HOLD_STILL)
        self._process = NodeProcess({'seed': self._seed}, self._log_path, MODULE)
        limit_s = time.monotonic() + START_TIMEOUT_S
        while not self._num_pictures:
            if self.fault is not None or time.monotonic() > limit_s:
                reason = self.fault or f'no picture on {resolve(self._camera.topic)}'
                raise DemoError(f'{reason}; or do without the table: --world photographs')
            time.sleep(0.05)

    def operate(self, seconds: float) -> None:
        """Name the next block when the last one was touched, or after a while."""
        now_s, attempts = self.seen.elapsed_s, self.score.attempts
        if not attempts or attempts[-1].is_over(now_s):
            colour, instruction = next(self._instructions)
            self.score.instruct(colour, instruction, now_s)
            self.instruct(instruction)

    @property
    def fault(self) -> str | None:
        """The last words of the table, if it has ended by itself."""
        if self._process is None or self._is_stopping or self._process.exit_code is None:
            return None
        last = ''.join(self._process.log_tail(1)) or f'its log {self._log_path} is empty'
        return f'the table ended with exit code {self._process.exit_code}: {last}'

    def stop(self) -> None:
        if self._process is not None and self.fault is None:
            self._is_stopping = True
            self._process.stop()

    def missing(self) -> list[str]:
        faults = []
        if not self.score.touches_s:
            faults.append('no instruction was fulfilled: no named block was touched')
        if self._process is not None and self._is_stopping and self._process.exit_code:
            faults.append(f'the table did not end well: exit code {self._process.exit_code}')
        return faults

    def save(self, folder: Path) -> list[Path]:
        """Write the contact sheet and the film, where there were pictures."""
        return self.film.save(folder / SHEET_NAME, folder / FILM_NAME)

    # --- what the executor's thread hears

    def _on_truth(self, kind: str, message: Any, info: Any) -> None:
        self.score.truths[kind].put(info['source_timestamp'], message.data)

    def _on_touched(self, message: Any) -> None:
        self.score.touch(message.data.split(', '), self.seen.elapsed_s)

    def _on_said(self, kind: str, message: Any) -> None:
        if not getattr(message, 'final', True):
            return
        verdict = self.score.hear(message, kind)
        if verdict is not None:
            self.film.say(verdict)

    def _on_picture(self, message: Any) -> None:
        self._num_pictures += 1
        if not self.score.attempts:
            return
        attempt = self.score.attempts[-1]
        self.film.add(
            stamp_to_ns(message.header.stamp),
            decode_image(message, self._camera),
            Caption(self.seen.elapsed_s, attempt.instruction, attempt.touched_s is not None),
        )
