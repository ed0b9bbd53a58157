"""Public bug reports of other packages: each has tests, and those that fit nowhere else are here.

A test names the reports it answers by number, `@pytest.mark.case(13)`; `pytest -m case` runs them.
"""

from __future__ import annotations

import ast
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from robot import Robot, nanoseconds

ROOT = Path(__file__).resolve().parents[1]
COLLECTION = ROOT.parent / 'shared' / 'CASES.md'
CASES = {
    *range(2, 18), *range(19, 24), *range(26, 30), 31, 32, 34, 36, 37, 39, 40, 42, 43,
    *range(45, 53),
}  # fmt: skip


def answered(source: str) -> Iterator[tuple[str, int]]:
    """Name and case of every test that carries the marker."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith('case'):
                    yield from ((node.name, ast.literal_eval(case)) for case in decorator.args)


def test_every_case_has_a_test_and_no_test_names_another() -> None:
    found = [
        (name, case)
        for path in Path(__file__).parent.glob('test_*.py')
        for name, case in answered(path.read_text(encoding='utf-8'))
    ]
    assert {case for _, case in found} == CASES
    assert all(name.startswith('test_') for name, _ in found)


def test_the_cases_are_those_of_the_collection() -> None:
    if not COLLECTION.is_file():
        pytest.skip(f'no collection: {COLLECTION} does not exist')
    numbers = re.findall(r'^### (\d+)\. ', COLLECTION.read_text(encoding='utf-8'), re.MULTILINE)
    assert {int(number) for number in numbers} == CASES


# --- on the live graph ---------------------------------------------------------------------------


@pytest.fixture
def robot(graph, tmp_path: Path) -> Iterator[Robot]:
    made = Robot(graph, tmp_path)
    yield made
    made.close()


@pytest.mark.case(13)
def test_reliable_publishers_are_heard_as_best_effort_ones_are(robot) -> None:
    from sensor_msgs.msg import Image, JointState

    base = robot.node.create_publisher(Image, 'camera/base/image_raw', 10)
    robot.node.destroy_publisher(robot.image_publishers['base'])
    robot.image_publishers['base'] = base  # the other camera stays best effort
    robot.node.destroy_publisher(robot.joint_publisher)
    robot.joint_publisher = robot.node.create_publisher(JointState, 'joint_states', 10)
    robot.start()
    robot.run_until_active()
    for part in ('camera base_0_rgb', 'camera left_wrist_0_rgb', 'joint states'):
        assert robot.run_until_status(part, 'Hz')


@pytest.mark.case(26)
def test_a_node_that_was_stopped_sends_the_command_for_now_and_counts_what_it_lost(robot) -> None:
    process = robot.start(command_rate_hz=50.0)
    robot.run_until_active()
    before = robot.run_for(2, 'stats')[-1]
    process.process.send_signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    robot.run_until(lambda: time.monotonic() > stopped_s + 1.0, 'a second to pass')
    robot.heard['joint_command'].clear()
    process.process.send_signal(signal.SIGCONT)
    lost = int(50 * (time.monotonic() - stopped_s)) - 2
    robot.run_until(
        lambda: robot.heard['stats'][-1].misses >= before.misses + lost, f'{lost} misses'
    )
    robot.run_for(20, 'joint_command')
    stamps = [nanoseconds(m.header.stamp) for m in robot.heard['joint_command']]
    # Five periods hold five commands, one that was late before them, and one at either edge.
    bursts = [sum(first <= stamp < first + 100_000_000 for stamp in stamps) for first in stamps]
    assert max(bursts) <= 7
    assert process.interrupt() == 0


@pytest.mark.case(49)
def test_numbers_that_make_no_sense_end_the_start_and_are_named(robot) -> None:
    cases = [
        ('frame_rate_hz', -1.0, 2),
        ('command_rate_hz', 1e9, 2),
        ('command_rate_hz', '.nan', 2),
        ('instruction', 7, 2),
        # To rclpy an empty list is "not set", so configure is the first to see it.
        ('num_slots', '[]', 1),
    ]
    processes = [(robot.start(**{name: value}), name, code) for name, value, code in cases]
    for process, name, code in processes:
        assert process.wait() == code, process.log
        assert name in process.log
        assert 'Traceback' not in process.log


@pytest.mark.case(49)
def test_parameters_that_are_set_together_are_all_set_or_none(robot) -> None:
    from rcl_interfaces.srv import SetParametersAtomically
    from rclpy.parameter import Parameter

    process = robot.start()
    robot.run_until_active()
    client = robot.node.create_client(SetParametersAtomically, 'oxygen/set_parameters_atomically')
    robot.run_until(client.service_is_ready, 'the parameter service')
    together = {'instruction': 'dance', 'seed': 3}
    call = SetParametersAtomically.Request(
        parameters=[Parameter(name, value=v).to_parameter_msg() for name, v in together.items()]
    )
    future = client.call_async(call)
    robot.run_until(future.done, 'the answer')
    assert not future.result().result.successful
    assert "'seed' can only be set before configure" in future.result().result.reason
    robot.instruct('the sentinel')
    robot.run_until(lambda: "instruction: 'the sentinel'" in process.log, 'the sentinel')
    assert 'dance' not in process.log
