"""Interlock: the emergency stop and the hold, heard in a thread of their own.

Owns the topic `~/estop`, the service `~/hold`, and what both say now. Knows neither commands nor
chunks: the command tick reads `halt`, one attribute, and what a release has to throw away is a
callable. `node.py` makes it with the node and closes it with the process, so it outlives every
configure and activate.

Why a thread. The node's executor has one, and that one may be busy: with loading a model, which
takes minutes, with a search for notes, up to 0.2 s, with pictures. This one waits for nothing else.
It turns a second, hidden ROS node, because rclpy ties the callbacks of a node to one executor.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import rclpy
from rclpy.clock import Clock, ClockType
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from std_msgs.msg import Bool
from std_srvs.srv import SetBool

from oxygen_ros.publisher import ESTOP, HALTS, HOLD
from oxygen_ros.qos import QosWatch

RETRY_S = 0.1
"""Pause after an error of the middleware, which may be there to stay."""


class Interlock:
    """Says whether an operator wants no motion now: `halt` is 'estop', 'hold' or ''.

    Both are latched: the emergency stop until a false on its topic, the hold until the service is
    called with false. While one is released, `on_release` is called before the tick may see it.
    """

    def __init__(self, node: Node, qos_watch: QosWatch, on_release: Callable[[str], None]) -> None:
        """Begin to listen.

        Args:
            node: names and namespace are taken from it, and its logger.
            on_release: throws away what was planned so far; called in the interlock's thread with
                what is released.
        """
        self._logger = node.get_logger()
        self._on_release = on_release
        # Written by the interlock's thread only.
        self.halt = ''
        self._reasons: dict[str, str] = {}
        self._counts = Counter(dict.fromkeys(HALTS, 0))

        # Names as the node's own remappings make them; they do not apply to this second node.
        self._topic = node.resolve_topic_name('~/estop')
        self._node = rclpy.create_node(
            f'_{node.get_name()}_interlock',
            context=node.context,
            namespace=node.get_namespace(),
            use_global_arguments=False,
            enable_rosout=False,
            start_parameter_services=False,
        )
        qos_watch.create_latched_too(
            self._node.create_subscription, Bool, self._topic, self._on_estop
        )
        self._node.create_service(SetBool, node.resolve_service_name('~/hold'), self._on_hold)
        # Runs only while a heartbeat is expected; it outlasts configures, as the thread does.
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._silence = self._node.create_timer(1.0, self._on_silence, clock=steady)
        self._silence.cancel()

        self._closing = threading.Event()
        self._executor = SingleThreadedExecutor(context=node.context)
        self._executor.add_node(self._node)
        self._thread = threading.Thread(target=self._run, name='interlock', daemon=True)
        self._thread.start()

    def expect_heartbeat(self, period_s: float) -> None:
        """Take a silence on the topic of more than this for an emergency stop; 0: expect none."""
        self._silence.cancel()
        if period_s:
            self._silence.timer_period_ns = round(period_s * 1e9)
            self._silence.reset()

    def reasons(self) -> dict[str, str]:
        """Return what is engaged now, and why."""
        return dict(self._reasons)

    def numbers(self) -> dict[str, int]:
        """Return the fields of EngineStats that are about the interlock."""
        return {
            'halt': ('', HOLD, ESTOP).index(self.halt),
            'estops': self._counts[ESTOP],
            'holds': self._counts[HOLD],
        }

    def close(self) -> None:
        """Listen no more. What is engaged stays so."""
        self._closing.set()
        self._executor.shutdown()
        self._thread.join()
        self._node.destroy_node()

    # --- the interlock's thread

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._executor.spin_once()
            except Exception as error:
                # Whatever could not be read may have been a stop.
                self._engage(ESTOP, f'listening failed: {type(error).__name__}: {error}')
                self._closing.wait(RETRY_S)

    def _on_estop(self, message: Bool) -> None:
        if not self._silence.is_canceled():
            self._silence.reset()
        if message.data:
            self._engage(ESTOP, f'true on {self._topic}')
        else:
            self._release(ESTOP)

    def _on_silence(self) -> None:
        period_s = self._silence.timer_period_ns / 1e9
        self._engage(ESTOP, f'nothing on {self._topic} for {period_s:g} s')

    def _on_hold(self, call: SetBool.Request, answer: SetBool.Response) -> SetBool.Response:
        if call.data:
            self._engage(HOLD, 'the hold service was called')
        else:
            self._release(HOLD)
        answer.success = True
        answer.message = f'{self.halt}: {self._reasons[self.halt]}' if self.halt else 'released'
        return answer

    def _engage(self, halt: str, reason: str) -> None:
        if halt in self._reasons:
            return
        self._reasons = {**self._reasons, halt: reason}
        self.halt = ESTOP if ESTOP in self._reasons else HOLD
        self._counts[halt] += 1
        self._logger.warning(f'{halt}: {reason}')

    def _release(self, halt: str) -> None:
        if halt not in self._reasons:
            return
        # First: the tick must not find a plan that was made before the release.
        self._on_release(halt)
        self._reasons = {name: why for name, why in self._reasons.items() if name != halt}
        self.halt = next(iter(self._reasons), '')
        self._logger.warning(f'{halt} released; {self.halt or "fresh actions"} from now on')
