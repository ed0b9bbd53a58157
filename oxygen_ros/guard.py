"""Guard: callbacks that may fail without taking the others along.

An exception that leaves a callback ends rclpy's executor, and with it every callback of the node.
Knows no ROS but a logger; every room that has callbacks is given the node's one guard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Guard:
    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.num_errors = 0
        """Exceptions that were kept from the executor."""

    def __call__(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Return the callback; a bug of ours that meets a message is told and counted instead."""

        @functools.wraps(callback)
        def run(*args: Any) -> None:
            try:
                callback(*args)
            except Exception as error:
                self.num_errors += 1
                self._logger.error(
                    f'{callback.__name__}: {type(error).__name__}: {error}',
                    throttle_duration_sec=1.0,
                )

        return run
