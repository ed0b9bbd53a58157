"""Reports: how the node is, as statistics, diagnostics and, where somebody asks, pictures.

Owns these publishers and their timers for the whole life of the node, so that it also says that it
is not configured. Reads everybody and changes nobody; rates and sentences are made by `monitor.py`,
`neighbours.py` and `annotated.py`. Runs in the node's executor.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from sensor_msgs.msg import Image

from oxygen_ros import conversions, garbage, monitor
from oxygen_ros.guard import Guard
from oxygen_ros.interlock import Interlock
from oxygen_ros.msg import EngineStats
from oxygen_ros.neighbours import CommandTopic
from oxygen_ros.observation import SourceStatus
from oxygen_ros.parts import Parts
from oxygen_ros.qos import RELIABLE, QosWatch, newest

STATS_PERIOD_S = 0.2
DIAGNOSTICS_PERIOD_S = 1.0
MAX_NOTICES_PER_LOOK = 5


class Reports:
    def __init__(
        self,
        node: Node,
        qos: QosWatch,
        interlock: Interlock,
        guard: Guard,
        parts: Callable[[], Parts | None],
        ros_ns: Callable[[], int],
    ) -> None:
        """Begin to report.

        Args:
            parts: what there is, None while nothing is configured.
            ros_ns: the node's clock.
        """
        self._node, self._qos, self._interlock, self._guard = node, qos, interlock, guard
        self._parts, self._ros_ns = parts, ros_ns
        # Diagnostics must go on when /clock does not.
        self._steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._clock_watch = monitor.ClockWatch()
        self._create = functools.partial(qos.create_publisher, node.create_publisher)
        self._stats = self._create(EngineStats, '~/stats', RELIABLE)
        self._diagnostics = self._create(DiagnosticArray, '/diagnostics', RELIABLE)
        self._pictures: Any = None
        self._draw_timer: Any = None
        for period_s, publish in (
            (STATS_PERIOD_S, self._publish_stats),
            (DIAGNOSTICS_PERIOD_S, self._publish_diagnostics),
        ):
            node.create_timer(period_s, guard(publish), clock=self._steady)

    def begin_pictures(self, rate_hz: float) -> None:
        """Publish annotated pictures, while somebody looks."""
        self._pictures = self._create(Image, '~/annotated', newest(0.0))
        self._draw_timer = self._node.create_timer(
            1.0 / rate_hz, self._guard(self._publish_picture), clock=self._steady
        )

    def end_pictures(self) -> None:
        """Publish none any more, if any were."""
        if self._pictures is not None:
            self._node.destroy_timer(self._draw_timer)
            self._node.destroy_publisher(self._pictures)
            self._pictures = self._draw_timer = None

    # --- statistics and pictures --------------------------------------------------------------

    def _publish_stats(self) -> None:
        parts = self._parts()
        if parts is None or parts.loop.engine is None:
            return
        parts.numbers = parts.monitor.numbers(
            time.monotonic_ns(),
            parts.loop.engine.stats,
            parts.publisher.stats() if parts.publisher is not None else None,
            horizon=parts.loop.engine.action_horizon,
            active=parts.active,
            observation_age_ms=parts.observation_age_ms,
        )
        parts.numbers |= self._interlock.numbers() | self._qos.numbers()
        self._stats.publish(
            conversions.stats_message(self._ros_ns(), parts.numbers, self._drops(parts))
        )

    def _publish_picture(self) -> None:
        parts = self._parts()
        if parts is None or parts.annotation is None:
            return
        if self._pictures.get_subscription_count():
            picture = parts.annotation.draw(parts.numbers, parts.source, parts.control_ns())
            self._pictures.publish(conversions.image_message(picture, self._ros_ns()))

    def _drops(self, parts: Parts) -> dict[str, int]:
        """Everything that was thrown away, by reason, wherever it happened."""
        engine = parts.loop.engine
        drops = {
            **parts.inputs.buffer.drops(),
            **parts.actions.drops(),
            **parts.loop.drops(),
            **(engine.stats.drops if engine is not None else {}),
        }
        if self._guard.num_errors:
            drops['callback_error'] = self._guard.num_errors
        if parts.news.lost_notes:
            drops['memory_not_kept'] = parts.news.lost_notes
        return drops

    # --- diagnostics --------------------------------------------------------------------------

    def _publish_diagnostics(self) -> None:
        parts, ros_ns = self._parts(), self._ros_ns()
        numbers = self._interlock.numbers()
        statuses = [
            self._clock_watch.status(self._value('use_sim_time'), ros_ns, time.monotonic_ns()),
            monitor.interlock_status(
                self._interlock.reasons(), numbers['estops'], numbers['holds']
            ),
        ]
        if parts is None:
            statuses.append(monitor.Status('engine', monitor.OK, 'not configured'))
        else:
            garbage.sweep()
            statuses += self._statuses(parts)
            for notice in parts.inputs.buffer.notices()[:MAX_NOTICES_PER_LOOK]:
                self._node.get_logger().warning(notice)
        self._diagnostics.publish(
            conversions.diagnostics_message(
                ros_ns,
                self._node.get_fully_qualified_name(),
                parts.profile.name if parts is not None else '',
                statuses,
            )
        )

    def _statuses(self, parts: Parts) -> list[monitor.Status]:
        commands = parts.publisher.stats() if parts.publisher is not None else None
        engine = parts.loop.engine.stats if parts.loop.engine is not None else None
        now_ns, chunk = parts.control_ns(), parts.actions.chunk
        chunk_age_s = (now_ns - chunk.time_ns) / 1e9 if chunk is not None else math.nan
        positions = parts.inputs.buffer.positions(now_ns)
        sources = parts.inputs.buffer.status(now_ns)
        return [
            *([parts.monitor.gripper_status(positions)] if parts.profile.grippers else []),
            parts.monitor.command_status(parts.active, commands, chunk_age_s),
            parts.monitor.engine_status(
                parts.active,
                engine,
                not_ready=parts.loop.not_ready,
                last_error=parts.last_failure,
                broken=parts.loop.broken,
                away=parts.process.away if parts.process is not None else '',
                drops=self._drops(parts),
            ),
            parts.monitor.middleware_status(self._qos.misfits(), self._qos.missed()),
            *map(parts.monitor.source_status, sources),
            self._graph_status(parts, sources),
        ]

    def _graph_status(self, parts: Parts, sources: Sequence[SourceStatus]) -> monitor.Status:
        # The first subscriptions are those of the cameras and the joints, in this order.
        fed = [
            (source, self._node.count_publishers(subscription.topic_name))
            for source, subscription in zip(sources, parts.inputs.subscriptions, strict=False)
        ]
        return parts.neighbours.status(fed, self._command_topic(parts))

    def _command_topic(self, parts: Parts) -> CommandTopic | None:
        if self._value('dry_run'):
            return None
        topic = parts.commands.topic_name
        publishers = [
            f'{endpoint.node_namespace.rstrip("/")}/{endpoint.node_name}'
            for endpoint in self._node.get_publishers_info_by_topic(topic)
        ]
        if (own := self._node.get_fully_qualified_name()) in publishers:
            publishers.remove(own)  # once: a twin of ours is a rival
        return CommandTopic(topic, parts.commands.get_subscription_count(), sorted(publishers))

    def _value(self, name: str) -> Any:
        return self._node.get_parameter(name).value
