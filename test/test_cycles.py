"""Many lives of the node in one process, a thousand with `-m long`: nothing is left behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip('rclpy')
pytest.importorskip('torch')

import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import TransitionCallbackReturn
from robot import JOINTS

from oxygen_ros import conversions
from oxygen_ros.engine.engine import EngineStats
from oxygen_ros.node import OxygenNode

CYCLES = [50, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.long])]
SETTLED = 20
"""Cycles until pools of the middleware and of malloc have their size."""
GROWTH_KB_PER_CYCLE = 20.0
ALLOCATOR_KB = 4000.0
"""Plain rclpy loses 4 to 6 kB itself where it makes and destroys nine topics (Kilted, Fast DDS)."""


class TinyEngine:
    """Just what the node asks of an engine."""

    class Scheduler:
        live: tuple[()] = ()

    class Processor:
        action_horizon = 1

    def __init__(self) -> None:
        self.scheduler, self.processor, self.stats = (
            self.Scheduler(),
            self.Processor(),
            EngineStats(),
        )

    def warm_up(self) -> None:
        """Nothing is cold."""

    def cancel(self, reason: Any) -> None:
        """Nothing is being written."""


class InProcess:
    """The node in the test's own process, its services unused: transitions are called."""

    def __init__(self) -> None:
        settings = ('profile:=dummy', 'frame_rate_hz:=100.0', 'isolation:=thread')
        parameters = [part for setting in settings for part in ('-p', setting)]
        rclpy.init(args=['--ros-args', *parameters, '--log-level', 'error'])
        self.node = OxygenNode(threading.Event())
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self.node)

    def change(self, *transitions: str) -> None:
        for name in transitions:
            result = getattr(self.node, f'trigger_{name}')()
            assert result == TransitionCallbackReturn.SUCCESS, name

    def see(self) -> None:
        """Give the node a picture and joints of now, as its callbacks would."""
        parts, now_ns = self.node._parts, self.node._ros_ns()
        assert parts is not None
        image = np.zeros((48, 64, 3), np.uint8)
        message = _image(image, now_ns)
        parts.inputs.buffer.put_image('base_0_rgb', message, now_ns, parts.control_ns(), now_ns)
        joints = dict.fromkeys(JOINTS, 0.25)
        parts.inputs.buffer.put_joints(joints, now_ns, parts.control_ns(), now_ns)

    def spin_until(self, is_true: Any, what: str, turns: int = 2000) -> None:
        for _ in range(turns):
            self.see()
            self._executor.spin_once(timeout_sec=0.02)
            if is_true():
                return
        pytest.fail(f'after {turns} turns still no {what}')

    def close(self) -> None:
        self._executor.shutdown()
        self.node.destroy_node()
        rclpy.try_shutdown()


def _image(pixels: np.ndarray, stamp_ns: int) -> Any:
    from sensor_msgs.msg import Image

    height, width, _ = pixels.shape
    message = Image(
        height=height, width=width, encoding='rgb8', step=3 * width, data=pixels.tobytes()
    )
    message.header.stamp = conversions.ns_to_stamp(stamp_ns)
    return message


@pytest.fixture
def in_process() -> Iterator[InProcess]:
    made = InProcess()
    yield made
    made.close()


def held() -> dict[str, int]:
    """What this process holds of the machine now."""
    gc.collect()
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return {
        'threads': len(os.listdir('/proc/self/task')),
        'python threads': threading.active_count(),
        'files': len(os.listdir('/proc/self/fd')),
        'memory kB': pages * os.sysconf('SC_PAGE_SIZE') // 1024,
    }


@pytest.mark.parametrize('cycles', CYCLES)
def test_lives_leave_no_thread_file_or_memory_behind(
    in_process: InProcess, monkeypatch: pytest.MonkeyPatch, cycles: int
) -> None:
    monkeypatch.setattr(OxygenNode, '_build_engine', lambda *args: TinyEngine())
    for _ in range(SETTLED):
        in_process.change('configure', 'activate', 'deactivate', 'cleanup')
    before = held()
    for _ in range(cycles - SETTLED):
        in_process.change('configure', 'activate', 'deactivate', 'cleanup')
    after = held()
    grown_kb = after.pop('memory kB') - before.pop('memory kB')
    assert after == before
    assert grown_kb <= ALLOCATOR_KB + GROWTH_KB_PER_CYCLE * (cycles - SETTLED)
    assert gc.isenabled()


@pytest.mark.parametrize('cycles', CYCLES)
def test_activations_during_frames_and_texts_lose_no_slot(
    in_process: InProcess, cycles: int
) -> None:
    interlock = in_process.node._interlock._thread
    others = set(threading.enumerate()) - {interlock}  # of pytest and its plugins
    in_process.change('configure')
    parts = in_process.node._parts
    assert parts is not None
    engine = parts.loop.engine
    for _ in range(cycles):
        frames = engine.stats.frames
        in_process.change('activate')
        in_process.spin_until(lambda: engine.stats.frames > frames, 'frame')  # noqa: B023
        in_process.change('deactivate')
    in_process.spin_until(lambda: not engine.scheduler.live, 'end of the texts')
    assert set(threading.enumerate()) - others == {parts.loop._thread, interlock}
    assert engine.scheduler.pool.num_used == 0
    in_process.change('cleanup')


def test_no_collection_starts_in_the_thread_of_the_commands(in_process: InProcess) -> None:
    threads: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == 'start':
            threads.append(threading.current_thread().name)

    in_process.change('configure', 'activate')
    publisher = in_process.node._parts.publisher
    gc.callbacks.append(note)
    try:
        in_process.spin_until(
            lambda: len(threads) >= 3 and publisher.stats().commands >= 100, 'sweeps and commands'
        )
    finally:
        gc.callbacks.remove(note)
    assert set(threads) == {'MainThread'}, 'the executor sweeps, nobody else collects'
    in_process.change('deactivate', 'cleanup')
    assert gc.isenabled()
