"""SoakOperator: a hand on the node's services, as an impatient operator has.

Owns the clients, and waits for every answer. Knows nothing of faults. Called by the main thread of
`soak.py`, while another one turns the executor.
"""

from __future__ import annotations

import threading
from typing import Any

ANSWER_TIMEOUT_S = 60.0


class SoakOperator:
    def __init__(self, node: Any) -> None:
        from lifecycle_msgs.msg import Transition
        from lifecycle_msgs.srv import ChangeState
        from rcl_interfaces.srv import SetParameters

        self._transition, self._change, self._set = Transition, ChangeState, SetParameters
        self._lifecycle = node.create_client(ChangeState, '/oxygen/change_state')
        self._parameters = node.create_client(SetParameters, '/oxygen/set_parameters')

    def change(self, transition: str) -> None:
        """Do one transition, e.g. 'deactivate'. Raises SoakError if the node refuses."""
        call = self._change.Request()
        call.transition.id = getattr(self._transition, f'TRANSITION_{transition.upper()}')
        if not _answer(self._lifecycle, call).success:
            raise SoakError(f'the node refused to {transition}')

    def set_parameter(self, name: str, value: Any) -> bool:
        """Return whether the node took it."""
        from rclpy.parameter import Parameter

        call = self._set.Request(parameters=[Parameter(name, value=value).to_parameter_msg()])
        return bool(_answer(self._parameters, call).results[0].successful)


class SoakError(Exception):
    """The node did not do what it must; the text says what."""


def _answer(client: Any, call: Any) -> Any:
    if not client.wait_for_service(ANSWER_TIMEOUT_S):
        raise SoakError(f'{client.srv_name} is not offered')
    done = threading.Event()
    future = client.call_async(call)
    future.add_done_callback(lambda _: done.set())
    if not done.wait(ANSWER_TIMEOUT_S):
        raise SoakError(f'{client.srv_name} did not answer within {ANSWER_TIMEOUT_S:g} s')
    return future.result()
