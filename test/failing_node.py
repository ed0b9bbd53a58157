"""The node with an engine that fails frame FAIL_FROM up to frame FAIL_TO, as `-m failing_node`.

FAIL_BY is `raise`, or `hang` for a frame that never ends.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from oxygen_ros import node
from oxygen_ros.engine import factory
from oxygen_ros.engine.engine import Engine

build_engine = factory.build_engine


def build_failing_engine(*args: Any, **kwargs: Any) -> Engine:
    engine = build_engine(*args, **kwargs)
    step, failing = engine.step, range(int(os.environ['FAIL_FROM']), int(os.environ['FAIL_TO']))

    def step_or_fail(observation: Any, deadline_ns: int) -> None:
        if observation.frame in failing:
            if os.environ['FAIL_BY'] == 'hang':
                threading.Event().wait()
            raise RuntimeError('device lost')
        step(observation, deadline_ns)

    engine.step = step_or_fail  # type: ignore[method-assign]
    return engine


if __name__ == '__main__':
    factory.build_engine = build_failing_engine
    sys.exit(node.main())
