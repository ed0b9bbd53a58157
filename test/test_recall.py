"""~/recall on a real graph: notes are kept, asked for, and there after the node was killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from robot import ROOT, Robot, nanoseconds

pytest.importorskip('rclpy')
pytest.importorskip('oxygen_ros.srv', reason='services not built: ./run build')


@pytest.fixture
def robot(graph: Any, tmp_path: Path) -> Iterator[Robot]:
    made = Robot(graph, tmp_path)
    yield made
    made.close()


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """The dummy robot, with a short note every second: a busy machine finds time for it."""
    raw = yaml.safe_load((ROOT / 'config' / 'dummy.yaml').read_text())
    raw['frame_rate_hz'] = 2.0
    raw['memory'] = {'feed_back': 2}
    raw['tasks'] = [raw['tasks'][1] | {'period_frames': 2, 'max_new_tokens': 4}]
    path = tmp_path / 'noting.yaml'
    path.write_text(yaml.safe_dump(raw))
    return path


def recalled(robot: Robot, **request: Any) -> Any:
    from oxygen_ros.srv import Recall

    client = robot.node.create_client(Recall, '/oxygen/recall')
    robot.graph.spin_until(client.service_is_ready, 'the recall service', timeout_s=60)
    asked: list[Any] = []
    again_s = 0.0

    def answered() -> bool:
        # A killed node is in the graph until its lease is over, and takes requests with it.
        nonlocal again_s
        if time.monotonic() > again_s:
            again_s = time.monotonic() + 2.0
            asked.append(client.call_async(Recall.Request(**request)))
        return any(future.done() for future in asked)

    robot.graph.spin_until(answered, 'the answer of recall', timeout_s=120)
    robot.node.destroy_client(client)
    return next(future.result() for future in asked if future.done())


def test_notes_are_kept_found_by_time_and_there_after_a_kill(
    robot: Robot, profile: Path, tmp_path: Path
) -> None:
    path = tmp_path / 'memory.db'
    process = robot.start(profile=profile, memory_path=path)
    robot.run_until(lambda: len(robot.heard['memory']) >= 2, 'two notes')
    robot.run_until(lambda: len(recalled(robot).notes) >= 2, 'both on disk')
    first, second = robot.heard['memory'][:2]

    answer = recalled(robot, limit=100)
    assert answer.message == ''
    stamps = [nanoseconds(one.header.stamp) for one in answer.notes]
    assert stamps == sorted(stamps, reverse=True)
    assert first in answer.notes
    assert second in answer.notes
    about_first = {'since': first.header.stamp, 'until': first.header.stamp}
    assert recalled(robot, **about_first).notes == [first]

    process.kill()
    process = robot.start(profile=profile, memory_path=path)
    assert recalled(robot, **about_first).notes == [first]
    process.wait_for_log('the prompt begins with 2 notes of before')


def test_without_a_file_nothing_is_offered_and_a_wrong_one_ends_the_node(
    robot: Robot, tmp_path: Path
) -> None:
    path = tmp_path / 'letter.txt'
    path.write_text('dear operator, ' * 100)
    process = robot.start(memory_path=path)
    assert process.wait() == 1
    assert f'{path}: cannot be used as memory' in process.log
    assert path.read_text() == 'dear operator, ' * 100

    robot.start()
    robot.run_until(lambda: robot.heard['stats'], 'statistics')
    services = {name for name, _ in robot.node.get_service_names_and_types()}
    assert '/oxygen/get_state' in services
    assert '/oxygen/recall' not in services
