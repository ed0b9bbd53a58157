"""A recording replayed offline and the same recording played into the live node: one result.

The node is the ordinary process over DDS. The player below is its clock: it moves on when the node
has taken what was sent, so that both sides see every message before or after the same tick.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip('rclpy')
pytest.importorskip('rosbags')
pytest.importorskip('torch')
pytest.importorskip('oxygen_ros.msg', reason='messages not built: ./run build')

from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from robot import TIMEOUT_S, NodeProcess, nanoseconds
from rosgraph_msgs.msg import Clock
from std_msgs.msg import String
from test_offline import JOINTS, Keeper, plan_of, replayed

from oxygen_ros.conversions import ns_to_stamp
from oxygen_ros.evaluation.offline_engine import OfflineEngine
from oxygen_ros.evaluation.recording import Recording, message_class
from oxygen_ros.msg import ActionChunk, Note, Text
from oxygen_ros.profile import RobotProfile, load_profile

ROOT = Path(__file__).resolve().parents[1]
REPEAT_S = 0.5
LEAP_NS = 100_000_000_000
"""The clock leaps so far to the first message: the node forgets what was sent to find it."""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """The dummy robot with the topics and joints of derived_camera_joint, and enough to say."""
    raw = yaml.safe_load((ROOT / 'config' / 'dummy.yaml').read_text())
    raw['cameras'][0]['topic'] = 'base/image_raw'
    raw['cameras'][1] |= {'topic': 'wrist/image_raw/compressed', 'transport': 'compressed'}
    raw['joints']['names'] = JOINTS
    for task, period in zip(raw['tasks'], (2, 3), strict=True):
        # The age of a text is wall time in the node.
        task |= {'period_frames': period, 'max_age_s': 600.0}
    raw['memory'] = {'feed_back': 1}
    raw['tasks'][1]['max_new_tokens'] = 8  # a prompt of bytes has little room for notes
    path = tmp_path / 'arm.yaml'
    path.write_text(yaml.safe_dump(raw))
    return path


class SteppedPlayer:
    """Plays a recording into a node on simulated time, one message and one tick at a time."""

    def __init__(self, graph: Any, process: NodeProcess, recording: Recording, profile: Path):
        self._graph, self._process, self._recording = graph, process, recording
        self._profile: RobotProfile = load_profile(str(profile), profile.parent)
        self._now_ns = recording.start_ns - LEAP_NS
        self.chunks: dict[int, Any] = {}
        self.endings: dict[tuple[str, int], Any] = {}
        """The last message of every text and note, by task and frame."""
        self._statuses: list[dict[str, Any]] = []
        node = graph.node
        node.create_subscription(ActionChunk, 'oxygen/actions', self._on_chunk, 50)
        for task in self._profile.tasks:
            kind = Note if task.kind == 'memory' else Text
            node.create_subscription(kind, f'oxygen/{task.name}', self._on_text, 500)
        node.create_subscription(DiagnosticArray, '/diagnostics', self._on_diagnostics, 10)
        self._clock = node.create_publisher(Clock, '/clock', 10)
        self._publishers = {
            name: node.create_publisher(message_class(recording.topics[name].type_name), name, 10)
            for name in ('/base/image_raw', '/wrist/image_raw/compressed', '/joint_states')
        }
        self._publishers['/instruction'] = node.create_publisher(String, '/instruction', 10)
        self._change = node.create_client(ChangeState, 'oxygen/change_state')
        self._get_state = node.create_client(GetState, 'oxygen/get_state')

    # --- what happens -------------------------------------------------------------------------

    def prepare(self) -> None:
        """Bring the node to the moment of the first message, with nothing seen yet."""
        self._wait(self._change.service_is_ready, 'the node')
        self._wait(lambda: self._statuses, 'diagnostics')
        self._set_clock(self._now_ns)
        self._transition(Transition.TRANSITION_CONFIGURE)
        self._wait(self._all_heard, 'the node to hear every topic', self._send_first_messages)
        for text in ('hello', self._profile.instruction.default):
            self._instruct(text)
        self._set_clock(self._recording.start_ns)
        self._settle()
        self._transition(Transition.TRANSITION_ACTIVATE)

    def play(self, frames: dict[int, int]) -> None:
        """Play it all; `frames` are the ticks that become frames, with the frames' numbers."""
        period_ns = int(1.0 / self._profile.frame_rate_hz * 1e9)  # as rclpy does
        tick_ns = self._recording.start_ns + period_ns
        for topic, log_ns, data in self._recording.messages(list(self._publishers)):
            while tick_ns < log_ns:
                self._tick(tick_ns, frames.get(tick_ns))
                tick_ns += period_ns
            # What comes at the moment of a tick comes before it.
            self._set_clock(log_ns - (log_ns == tick_ns))
            self._settle()
            self._publishers[topic].publish(data)
            self._settle()
        while tick_ns <= self._recording.end_ns:
            self._tick(tick_ns, frames.get(tick_ns))
            tick_ns += period_ns

    def _tick(self, tick_ns: int, frame: int | None) -> None:
        self._set_clock(tick_ns)
        if frame is None:
            before = len(self._statuses)
            self._wait(
                lambda: len(self._statuses) >= before + 2 and 'no frame' in self._said('engine'),
                'a tick without a frame',
                self._repeat_clock,
            )
            return
        due = {(t.name, frame) for t in self._profile.tasks if frame % t.period_frames == 0}
        self._wait(
            lambda: frame in self.chunks and due <= self.endings.keys(),
            f'chunk and texts of frame {frame}',
            self._repeat_clock,
        )

    # --- the node -----------------------------------------------------------------------------

    def _send_first_messages(self) -> None:
        for name, publisher in self._publishers.items():
            if name != '/instruction':
                _, _, data = next(self._recording.messages([name]))
                publisher.publish(data)

    def _instruct(self, text: str) -> None:
        said = f'instruction: {text!r}'
        self._wait(
            lambda: said in self._process.log,
            said,
            lambda: self._publishers['/instruction'].publish(String(data=text)),
        )

    def _all_heard(self) -> bool:
        counts = [
            int(pair.value)
            for status in self._statuses[-1].values()
            for pair in status.values
            if pair.key == 'Received'
        ]
        return len(counts) == 3 and all(counts)

    def _said(self, part: str) -> str:
        return str(self._statuses[-1][part].message)

    def _transition(self, number: int) -> None:
        call = ChangeState.Request()
        call.transition.id = number
        assert self._call(self._change, call).success, self._process.log

    def _settle(self) -> None:
        """Return when the node has taken everything that was sent."""
        self._call(self._get_state, GetState.Request())

    def _call(self, client: Any, call: Any) -> Any:
        future = client.call_async(call)
        self._wait(future.done, client.srv_name)
        return future.result()

    def _set_clock(self, now_ns: int) -> None:
        self._now_ns = now_ns
        self._repeat_clock()

    def _repeat_clock(self) -> None:
        self._clock.publish(Clock(clock=ns_to_stamp(self._now_ns)))

    def _wait(self, is_true: Any, what: str, again: Any = lambda: None) -> None:
        """Spin until it holds; what may have been lost is sent `again` every now and then."""
        repeat_s = 0.0

        def look() -> bool:
            nonlocal repeat_s
            assert self._process.process.poll() is None, f'the node ended:\n{self._process.log}'
            if time.monotonic() > repeat_s:
                again()
                repeat_s = time.monotonic() + REPEAT_S
            return bool(is_true())

        self._graph.spin_until(look, what, TIMEOUT_S)

    def _on_chunk(self, message: Any) -> None:
        self.chunks[message.frame] = message

    def _on_text(self, message: Any) -> None:
        if getattr(message, 'final', True):
            self.endings[message.task, message.frame] = message

    def _on_diagnostics(self, message: Any) -> None:
        self._statuses.append({s.name.rpartition(': ')[2]: s for s in message.status})


@pytest.fixture
def process(tmp_path: Path, profile: Path) -> Iterator[NodeProcess]:
    started = NodeProcess(
        tmp_path,
        {'profile': profile, 'autostart': False, 'use_sim_time': True, 'device': 'cpu'},
    )
    yield started
    started.kill()


def test_a_recording_into_the_live_node_gives_what_its_replay_gives(
    graph: Any, process: NodeProcess, profile: Path, bags: Path
) -> None:
    path = bags / 'derived_camera_joint'
    plan = plan_of(profile)
    engine = OfflineEngine(plan.profile, plan.engine, realtime=False)
    offline: Keeper = replayed(engine, profile, path)

    live = SteppedPlayer(graph, process, Recording(path), profile)
    live.prepare()
    live.play({done.tick_ns: done.chunk.frame for done in offline.frames})

    assert len(offline.frames) == 17
    fed_back = [done.observation.notes for done in offline.frames]
    assert (len(fed_back[0]), len(fed_back[-1])) == (0, 1)
    assert not engine.engine.stats.drops  # the notes had room in the prompt
    assert sorted(live.chunks) == [done.chunk.frame for done in offline.frames]
    for done in offline.frames:
        message = live.chunks[done.chunk.frame]
        assert nanoseconds(message.header.stamp) == done.chunk.stamp_ns
        values = np.reshape(message.values, (message.horizon, -1))
        np.testing.assert_array_equal(values, done.chunk.values)
    ended = {(u.task, u.frame): u for u in offline.texts if u.reason is not None}
    assert {task for task, _ in ended} == {'text', 'memory'}
    assert live.endings.keys() == ended.keys()
    for key, update in ended.items():
        message = live.endings[key]
        assert message.text == update.text
        assert message.reason == update.reason.value
        assert nanoseconds(message.header.stamp) == update.stamp_ns
    assert process.interrupt() == 0
