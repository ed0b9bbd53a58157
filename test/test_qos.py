"""QosWatch on a real graph: deadlines that the middleware counts, endpoints that do not fit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip('rclpy')

from rclpy.duration import Duration
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from std_msgs.msg import String

from oxygen_ros import qos
from oxygen_ros.qos import LATCHED, RELIABLE, QosWatch, newest, sensor

BEST_EFFORT = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
LATCHING = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)


def ignore(message: Any) -> None:
    """Hear a message that means nothing here."""


class Watched:
    """A node of ours under watch; the graph's own node is the stranger."""

    def __init__(self, graph: Any) -> None:
        import rclpy

        self.graph = graph
        self.node = rclpy.create_node('ours', context=graph.node.context, namespace='/left')
        graph.add(self.node)
        self.watch = QosWatch(self.node)
        self.publisher = functools.partial(
            self.watch.create_publisher, self.node.create_publisher, String
        )
        self.subscription = functools.partial(
            self.watch.create_subscription, self.node.create_subscription, String
        )

    def misfit(self) -> str:
        self.graph.spin_until(self.watch.misfits, 'a misfit')
        (sentence,) = self.watch.misfits()
        return sentence

    def spin_until(self, is_true: Callable[[], Any], what: str) -> None:
        self.graph.spin_until(is_true, what)


@pytest.fixture
def watched(graph: Any) -> Any:
    made = Watched(graph)
    yield made
    made.node.destroy_node()


def test_a_publisher_that_cannot_be_heard_is_named_with_both_policies_until_it_is_gone(
    watched: Watched,
) -> None:
    watched.subscription('instruction', ignore, RELIABLE)
    theirs = watched.graph.node.create_publisher(String, '/left/instruction', BEST_EFFORT)
    assert watched.misfit() == (
        '/left/instruction: /test offers best effort volatile, '
        'this node asks for reliable volatile: nothing passes '
        '(best effort publisher and reliable subscription); change the QoS of one of them'
    )
    watched.graph.node.destroy_publisher(theirs)
    watched.spin_until(lambda: not watched.watch.misfits(), 'the misfit to go')


def test_a_subscriber_that_hears_nothing_is_named_with_both_policies(watched: Watched) -> None:
    watched.publisher('text', RELIABLE)
    watched.graph.node.create_subscription(String, '/left/text', ignore, LATCHING)
    sentence = watched.misfit()
    assert '/test asks for reliable transient local, this node offers reliable volatile' in sentence
    assert 'volatile publisher and transient local subscription' in sentence


@pytest.mark.parametrize(('asked_s', 'words'), [(0.05, 'deadline 0.05 s'), (0.02, '')])
def test_a_deadline_that_nobody_offers_is_told_in_seconds(
    watched: Watched, asked_s: float, words: str
) -> None:
    """A subscriber may ask for no more than is offered; asking for as much fits."""
    heard: list[Any] = []
    watched.subscription('image', heard.append, sensor(asked_s))
    offered = QoSProfile(depth=1, deadline=Duration(seconds=0.02 if not words else 1.0))
    theirs = watched.graph.node.create_publisher(String, '/left/image', offered)
    if words:
        assert words in watched.misfit()
        assert 'deadline 1 s' in watched.misfit()
    else:
        watched.spin_until(lambda: theirs.get_subscription_count(), 'the match')
        watched.spin_until(lambda: theirs.publish(String()) or heard, 'a message')
        assert watched.watch.misfits() == []


def test_of_two_subscriptions_one_that_fits_is_enough(watched: Watched) -> None:
    heard: list[Any] = []
    watched.watch.create_latched_too(
        watched.node.create_subscription, String, 'instruction', heard.append
    )
    theirs = watched.graph.node.create_publisher(String, '/left/instruction', RELIABLE)
    # The latched one reported a misfit before a message can come through the other.
    watched.spin_until(lambda: watched.watch._suspects, 'the report of the latched one')
    watched.spin_until(lambda: theirs.publish(String()) or heard, 'a message')
    assert watched.watch.misfits() == []


def test_what_was_latched_before_is_heard(watched: Watched) -> None:
    heard: list[Any] = []
    theirs = watched.graph.node.create_publisher(String, '/left/instruction', LATCHED)
    theirs.publish(String(data='pick'))
    watched.watch.create_latched_too(
        watched.node.create_subscription, String, 'instruction', heard.append
    )
    watched.spin_until(lambda: heard, 'the latched message')
    assert heard[0].data == 'pick'


def test_a_misfit_is_logged_once(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(
        watched.node, 'get_logger', lambda: type('Log', (), {'warning': logged.append})
    )
    watched.subscription('instruction', ignore, RELIABLE)
    watched.graph.node.create_publisher(String, '/left/instruction', BEST_EFFORT)
    sentence = watched.misfit()
    assert watched.watch.misfits() == [sentence]
    assert logged == [sentence]


def test_silence_counts_as_a_missed_deadline_only_while_something_is_due(watched: Watched) -> None:
    due = False
    publisher = watched.publisher('commands', newest(0.02), lambda: due)
    witness = watched.publisher('other', newest(0.02))
    for silent in (publisher, witness):
        silent.publish(String())  # from here on the middleware counts

    def missed(topic: str) -> int:
        return watched.watch.missed().get(topic, 0)

    watched.spin_until(lambda: missed('/left/other') >= 10, 'ten misses')
    assert missed('/left/commands') == 0
    due = True
    watched.spin_until(lambda: missed('/left/commands') >= 2, 'misses that count')
    numbers = watched.watch.numbers()
    assert numbers['offered_deadline_misses'] == sum(watched.watch.missed().values())
    assert numbers['requested_deadline_misses'] == 0


def test_a_source_that_falls_silent_is_counted_under_its_topic(watched: Watched) -> None:
    heard: list[Any] = []
    watched.subscription('joint_states', heard.append, sensor(0.05))
    theirs = watched.graph.node.create_publisher(String, '/left/joint_states', newest(0.05))
    watched.spin_until(lambda: theirs.publish(String()) or heard, 'a message')
    watched.spin_until(lambda: watched.watch.missed().get('/left/joint_states'), 'a miss')
    assert watched.watch.numbers()['requested_deadline_misses'] > 0


def test_a_middleware_without_deadline_events_still_carries_the_topic(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(
        watched.node, 'get_logger', lambda: type('Log', (), {'warning': logged.append})
    )
    real = qos.PublisherEventCallbacks

    def without_deadline(**callbacks: Any) -> Any:
        if 'deadline' in callbacks:
            raise qos.UnsupportedEventTypeError('no such event')
        return real(**callbacks)

    monkeypatch.setattr(qos, 'PublisherEventCallbacks', without_deadline)
    heard: list[Any] = []
    watched.graph.node.create_subscription(String, '/left/commands', heard.append, 1)
    publisher = watched.publisher('commands', newest(0.02))
    watched.spin_until(lambda: publisher.publish(String()) or heard, 'a command')
    assert logged == ['/left/commands: this middleware does not watch deadlines']
