"""Garbage collection kept out of the command tick.

Owns the interpreter's collector while a model is loaded; knows nothing else. `node.py` calls
`settle` when it is configured, `sweep` once a second from its executor, `release` at cleanup.

Why. A collection starts in whichever thread happens to allocate and holds the interpreter until it
is done. Over the 190 thousand objects of torch and rclpy a full one took 130 ms of processor time,
six periods at 50 Hz. None of those objects is garbage, so they are set aside; over what is left,
the objects of the last second, a sweep takes 0.1 ms.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """Set aside what exists, and collect from here on only when `sweep` says so."""
    gc.collect()
    gc.freeze()
    gc.disable()


def sweep() -> None:
    """Collect what has become garbage since the last sweep, now, in the calling thread."""
    gc.collect()


def release() -> None:
    """Give the collector back, so that the parts that were set aside can be freed."""
    gc.unfreeze()
    gc.enable()
