"""Interlock on a real graph, beside a node that nobody turns: it listens in its own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip('rclpy')

import rclpy
from std_msgs.msg import Bool
from std_srvs.srv import SetBool

from oxygen_ros.interlock import Interlock
from oxygen_ros.qos import LATCHED, RELIABLE, QosWatch


class Operator:
    """The graph's node with both hands on the stops of an interlock; its node is never turned."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.released: list[tuple[str, str]] = []  # what, and what was halted at that moment
        self.on_release: Callable[[str], None] = self._note
        self.estop = graph.node.create_publisher(Bool, '/left/arm/estop', RELIABLE)
        self.hold = graph.node.create_client(SetBool, '/left/arm/hold')
        self._made: list[tuple[Interlock, Any]] = []

    def _note(self, halt: str) -> None:
        self.released.append((halt, self.interlock.halt))

    @property
    def interlock(self) -> Interlock:
        return self._made[-1][0]

    def start(self, *arguments: str, is_heard: bool = True) -> Interlock:
        node = rclpy.create_node(
            'arm', namespace='/left', context=self.graph.node.context, cli_args=[*arguments]
        )
        interlock = Interlock(node, QosWatch(node), lambda halt: self.on_release(halt))
        self._made.append((interlock, node))
        if is_heard:
            self.graph.spin_until(self.estop.get_subscription_count, 'the subscription')
            self.graph.spin_until(self.hold.service_is_ready, 'the service')
        return interlock

    def say(self, stop: bool) -> None:
        self.estop.publish(Bool(data=stop))

    def call(self, hold: bool) -> SetBool.Response:
        future = self.hold.call_async(SetBool.Request(data=hold))
        self.graph.spin_until(future.done, 'the answer')
        return future.result()

    def wait_for(self, halt: str) -> None:
        self.graph.spin_until(lambda: self.interlock.halt == halt, f'halt to be {halt!r}')

    def close(self) -> None:
        for interlock, node in self._made:
            interlock.close()
            node.destroy_node()


@pytest.fixture
def operator(graph: Any) -> Iterator[Operator]:
    made = Operator(graph)
    yield made
    made.close()


def test_a_true_stops_until_a_false_and_is_counted_once(operator: Operator) -> None:
    interlock = operator.start()
    assert (interlock.halt, interlock.reasons()) == ('', {})
    for _ in range(3):
        operator.say(True)
    operator.wait_for('estop')
    assert interlock.reasons() == {'estop': 'true on /left/arm/estop'}
    operator.say(False)
    operator.wait_for('')
    assert interlock.numbers() == {'halt': 0, 'estops': 1, 'holds': 0}


def test_what_was_planned_is_thrown_away_before_the_release_is_seen(operator: Operator) -> None:
    operator.start()
    operator.say(True)
    operator.wait_for('estop')
    operator.say(False)
    operator.wait_for('')
    assert operator.released == [('estop', 'estop')]


def test_a_false_without_a_stop_throws_nothing_away(operator: Operator) -> None:
    operator.start()
    operator.say(False)
    operator.say(True)  # the sentinel
    operator.wait_for('estop')
    assert operator.released == []


def test_a_stop_that_was_latched_before_the_start_is_heard(operator: Operator) -> None:
    latched = operator.graph.node.create_publisher(Bool, '/left/arm/estop', LATCHED)
    latched.publish(Bool(data=True))
    operator.start()
    operator.wait_for('estop')


def test_the_hold_service_answers_what_is_engaged(operator: Operator) -> None:
    interlock = operator.start()
    answer = operator.call(True)
    assert (answer.success, interlock.halt) == (True, 'hold')
    assert answer.message == 'hold: the hold service was called'
    assert interlock.numbers()['halt'] == 1
    assert operator.call(False).message == 'released'
    assert interlock.halt == ''


def test_a_stop_outranks_a_hold_and_each_is_released_by_its_own_hand(operator: Operator) -> None:
    interlock = operator.start()
    operator.call(True)
    operator.say(True)
    operator.wait_for('estop')
    assert interlock.numbers() == {'halt': 2, 'estops': 1, 'holds': 1}
    assert operator.call(False).message == 'estop: true on /left/arm/estop'
    assert interlock.halt == 'estop'
    operator.call(True)
    operator.say(False)
    operator.wait_for('hold')


def test_silence_where_a_heartbeat_is_expected_is_a_stop_until_it_is_back(
    operator: Operator,
) -> None:
    interlock = operator.start()
    interlock.expect_heartbeat(0.2)
    operator.wait_for('estop')
    assert interlock.reasons() == {'estop': 'nothing on /left/arm/estop for 0.2 s'}
    operator.say(False)
    operator.wait_for('')
    operator.wait_for('estop')  # and silence again
    interlock.expect_heartbeat(0.0)
    operator.say(False)
    operator.wait_for('')
    assert interlock._silence.is_canceled()


def test_the_stop_may_be_remapped_as_any_topic_of_the_node(operator: Operator) -> None:
    remap = ('--ros-args', '-r', '~/estop:=/emergency_stop')
    operator.start(*remap, is_heard=False)
    elsewhere = operator.graph.node.create_publisher(Bool, '/emergency_stop', LATCHED)
    elsewhere.publish(Bool(data=True))
    operator.wait_for('estop')


def test_a_release_that_fails_is_none_and_listening_goes_on(operator: Operator) -> None:
    interlock = operator.start()

    def fail(halt: str) -> None:
        raise RuntimeError('no buffer')

    operator.on_release = fail
    operator.call(True)
    operator.hold.call_async(SetBool.Request(data=False))
    operator.wait_for('estop')
    assert interlock.reasons() == {
        'hold': 'the hold service was called',
        'estop': 'listening failed: RuntimeError: no buffer',
    }
    operator.on_release = lambda halt: None
    operator.say(False)
    operator.wait_for('hold')
