"""How our topics are offered and asked for, and what the middleware reports about them.

Owns the quality-of-service profiles and QosWatch, which makes publishers and subscriptions whose
missed deadlines and misfits are counted and put into words. Knows no message and no robot; the node
and its interlock create their topics through it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from rclpy.duration import Duration
from rclpy.node import Node
from rclpy.qos import (
    DurabilityPolicy,
    QoSCompatibility,
    QoSProfile,
    ReliabilityPolicy,
    qos_check_compatible,
    qos_profile_sensor_data,
)

try:
    from rclpy.event_handler import (
        PublisherEventCallbacks,
        SubscriptionEventCallbacks,
        UnsupportedEventTypeError,
    )
except ImportError:  # Humble
    from rclpy.qos_event import (
        PublisherEventCallbacks,
        SubscriptionEventCallbacks,
        UnsupportedEventTypeError,
    )

RELIABLE = QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE)
LATCHED = QoSProfile(
    depth=10,
    reliability=ReliabilityPolicy.RELIABLE,
    durability=DurabilityPolicy.TRANSIENT_LOCAL,
)


def newest(deadline_s: float) -> QoSProfile:
    """Reliable, the newest only, and offered at least this often; 0: no promise."""
    return QoSProfile(
        depth=1, reliability=ReliabilityPolicy.RELIABLE, deadline=Duration(seconds=deadline_s)
    )


def sensor(deadline_s: float) -> QoSProfile:
    """Best effort, asked for at least this often; 0: however seldom it comes."""
    return QoSProfile(
        depth=qos_profile_sensor_data.depth,
        reliability=qos_profile_sensor_data.reliability,
        deadline=Duration(seconds=deadline_s),
    )


class QosWatch:
    """Makes topics, and keeps what the middleware itself sees of them, as a witness.

    The events come in the thread of the node that a topic belongs to; every topic has one node, so
    each counter has one writer.
    """

    def __init__(self, node: Node) -> None:
        """Watch nothing yet; `node` is asked for the graph and says what does not fit."""
        self._node = node
        self._ours: set[tuple[str, str]] = set()
        self._suspects: dict[str, None] = {}  # topics of which a misfit was reported; ordered
        self._told: set[str] = set()
        self._offered_missed: Counter[str] = Counter()
        self._requested_missed: Counter[str] = Counter()

    # --- making topics

    def create_publisher(
        self,
        create: Callable[..., Any],
        message_type: type,
        topic: str,
        qos: QoSProfile,
        is_due: Callable[[], bool] = lambda: True,
    ) -> Any:
        """Make a publisher by `node.create_publisher` or `node.create_lifecycle_publisher`.

        `is_due` says whether something ought to be published now: the middleware's deadline runs
        on from the last message, also while silence is what we want.
        """
        full = self._adopt(create, topic)

        def missed(event: Any) -> None:
            if is_due():
                self._offered_missed[full] += event.total_count_change

        def make(**events: Any) -> Any:
            suspect = self._suspicion(full)
            callbacks = PublisherEventCallbacks(incompatible_qos=suspect, **events)
            return create(message_type, topic, qos, event_callbacks=callbacks)

        return self._make_witnessed(make, full, qos, missed)

    def create_subscription(
        self,
        create: Callable[..., Any],
        message_type: type,
        topic: str,
        callback: Callable[[Any], None],
        qos: QoSProfile,
    ) -> Any:
        """Make a subscription by `node.create_subscription`."""
        full = self._adopt(create, topic)

        def missed(event: Any) -> None:
            self._requested_missed[full] += event.total_count_change

        def make(**events: Any) -> Any:
            suspect = self._suspicion(full)
            callbacks = SubscriptionEventCallbacks(incompatible_qos=suspect, **events)
            return create(message_type, topic, callback, qos, event_callbacks=callbacks)

        return self._make_witnessed(make, full, qos, missed)

    def create_latched_too(
        self,
        create: Callable[..., Any],
        message_type: type,
        topic: str,
        callback: Callable[[Any], None],
    ) -> list[Any]:
        """Make two subscriptions, for publishers that latch and for those that do not.

        Neither kind hears the other's publishers: a latched message sent before we started needs
        transient local, `ros2 topic pub` needs volatile. The callback meets some messages twice.
        """
        return [
            self.create_subscription(create, message_type, topic, callback, qos)
            for qos in (LATCHED, RELIABLE)
        ]

    def _adopt(self, create: Callable[..., Any], topic: str) -> str:
        node: Node = create.__self__  # type: ignore[attr-defined]
        self._ours.add((node.get_name(), node.get_namespace()))
        return str(node.resolve_topic_name(topic))

    def _suspicion(self, topic: str) -> Callable[[Any], None]:
        def suspect(event: Any) -> None:
            self._suspects[topic] = None

        return suspect

    def _make_witnessed(
        self,
        make: Callable[..., Any],
        topic: str,
        qos: QoSProfile,
        missed: Callable[[Any], None],
    ) -> Any:
        if not qos.deadline.nanoseconds:
            return make()
        try:
            return make(deadline=missed)
        except UnsupportedEventTypeError:  # e.g. rmw_zenoh
            self._node.get_logger().warning(f'{topic}: this middleware does not watch deadlines')
            return make()

    # --- what was seen

    def numbers(self) -> dict[str, int]:
        """Return the fields of EngineStats that the middleware counts."""
        return {
            'offered_deadline_misses': self._offered_missed.total(),
            'requested_deadline_misses': self._requested_missed.total(),
        }

    def missed(self) -> dict[str, int]:
        """Return how often each topic missed its deadline, those that did."""
        return dict(self._offered_missed + self._requested_missed)

    def misfits(self) -> list[str]:
        """Return a sentence for each endpoint that now cannot talk to ours; a new one is logged.

        Looked up in the graph each time, so it goes away when the other side does. The middleware
        itself tells one policy of one endpoint, once.
        """
        found = [sentence for topic in list(self._suspects) for sentence in self._misfits(topic)]
        for sentence in found:
            if sentence not in self._told:
                self._told.add(sentence)
                self._node.get_logger().warning(sentence)
        return found

    def _misfits(self, topic: str) -> Iterator[str]:
        publishers = self._node.get_publishers_info_by_topic(topic)
        subscriptions = self._node.get_subscriptions_info_by_topic(topic)
        for theirs in filter(self._is_foreign, publishers):
            ours = [one for one in subscriptions if not self._is_foreign(one)]
            reasons = [_misfit(theirs, one) for one in ours]
            if reasons and all(reasons):  # one that fits is enough, see create_latched_too
                yield _sentence(topic, theirs, 'offers', ours[-1], 'asks for', reasons[-1])
        for theirs in filter(self._is_foreign, subscriptions):
            ours = [one for one in publishers if not self._is_foreign(one)]
            reasons = [_misfit(one, theirs) for one in ours]
            if reasons and all(reasons):
                yield _sentence(topic, theirs, 'asks for', ours[-1], 'offers', reasons[-1])

    def _is_foreign(self, endpoint: Any) -> bool:
        return (endpoint.node_name, endpoint.node_namespace) not in self._ours


def _misfit(publisher: Any, subscription: Any) -> str:
    """Say why nothing passes between two endpoints of the graph; '' if it does."""
    fit, reason = qos_check_compatible(publisher.qos_profile, subscription.qos_profile)
    if fit != QoSCompatibility.ERROR:
        return ''
    reasons = (part.partition('ERROR: ')[2] for part in reason.split(';'))
    return ', '.join(part.lower() for part in reasons if part)


def _sentence(topic: str, theirs: Any, does: str, ours: Any, we_do: str, reason: str) -> str:
    name = f'{theirs.node_namespace.rstrip("/")}/{theirs.node_name}'
    return (
        f'{topic}: {name} {does} {_words(theirs.qos_profile)}, this node {we_do} '
        f'{_words(ours.qos_profile)}: nothing passes ({reason}); change the QoS of one of them'
    )


def _words(qos: QoSProfile) -> str:
    deadline = qos.deadline.nanoseconds
    policies = [qos.reliability.name.lower(), qos.durability.name.lower()]
    if 0 < deadline < Duration(seconds=2**31 - 1).nanoseconds:  # else infinite
        policies.append(f'deadline {deadline / 1e9:g} s')
    return ' '.join(policies).replace('_', ' ')
