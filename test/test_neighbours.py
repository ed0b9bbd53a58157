"""Who else is on the topics: silent publishers, rival commanders, nobody who listens."""

from __future__ import annotations

from pathlib import Path

import pytest
from robot import NodeProcess, Robot

from oxygen_ros.monitor import OK, WARN
from oxygen_ros.neighbours import CommandTopic, Neighbours
from oxygen_ros.observation import SourceStatus


def source(rate_hz: float) -> SourceStatus:
    return SourceStatus('base_0_rgb', 'camera', 0, 0, 0, None, rate_hz, '')


@pytest.mark.case(16)
def test_a_publisher_of_which_nothing_arrives_is_named_at_the_second_look() -> None:
    neighbours = Neighbours()
    assert neighbours.status([(source(0.0), 1)], None).level == OK
    status = neighbours.status([(source(0.0), 1)], None)
    assert status.level == WARN
    assert status.message.startswith('camera is published, but nothing arrives; in containers')
    assert neighbours.status([(source(30.0), 1)], None).level == OK
    assert neighbours.status([(source(0.0), 1)], None).level == OK


def test_a_topic_that_nobody_publishes_is_no_matter_of_transport() -> None:
    neighbours = Neighbours()
    for _ in range(3):
        assert neighbours.status([(source(0.0), 0)], None).level == OK


@pytest.mark.parametrize(
    ('listeners', 'rivals', 'message'),
    [
        (1, (), 'as expected'),
        (0, (), 'nobody listens on /command'),
        (1, ('/teleop', '/twin'), '/command is also published by /teleop, /twin'),
        (0, ('/a',), '/command is also published by /a; nobody listens on /command'),
    ],
)
def test_rivals_and_the_lack_of_listeners_are_told(
    listeners: int, rivals: tuple[str, ...], message: str
) -> None:
    status = Neighbours().status([], CommandTopic('/command', listeners, rivals))
    assert status.message == message
    assert status.level == (OK if message == 'as expected' else WARN)


# --- the live graph -----------------------------------------------------------------------------


@pytest.fixture
def robot(graph, tmp_path: Path):
    made = Robot(graph, tmp_path)
    yield made
    made.close()


@pytest.mark.case(16)
def test_a_camera_that_is_there_but_says_nothing_is_told_apart_from_none(robot) -> None:
    robot.cameras['base'] = False  # its publisher exists
    robot.start()
    robot.run_until_status('graph', 'camera/base/image_raw is published, but nothing arrives')
    robot.cameras['base'] = True
    robot.run_until_status('graph', 'as expected')
    robot.node.destroy_publisher(robot.image_publishers.pop('wrist'))
    del robot.cameras['wrist']
    robot.run_until_status('camera left_wrist_0_rgb', 'any more')
    assert robot.run_until_status('graph', 'as expected').level == b'\x00'


@pytest.mark.case(48)
def test_a_second_commander_is_named_while_it_is_there(robot) -> None:
    from sensor_msgs.msg import JointState

    rival = robot.node.create_publisher(JointState, 'joint_command', 10)
    robot.start()
    robot.run_until_status('graph', '/joint_command is also published by /test')
    robot.node.destroy_publisher(rival)
    robot.run_until_status('graph', 'as expected')


@pytest.mark.case(48)
def test_a_twin_of_the_node_is_a_rival(robot) -> None:
    robot.start()
    robot.run_until_active()
    robot.start()
    robot.run_until_status('graph', '/joint_command is also published by /oxygen')


@pytest.mark.case(17)
def test_a_node_that_nobody_listens_to_says_so_until_somebody_does(robot) -> None:
    from sensor_msgs.msg import JointState

    remaps = ('joint_command:=elsewhere',)
    robot.processes.append(NodeProcess(robot.folder, {'profile': 'dummy'}, remaps))
    robot.run_until_status('graph', 'nobody listens on /elsewhere')
    robot.hear('elsewhere', JointState, 'elsewhere')
    robot.run_for(5, 'elsewhere')
    robot.run_until_status('graph', 'as expected')
