"""What all tests share: the recordings, a ROS domain of its own for every file, a graph to talk to.

Nothing here imports ROS or torch before a test asks for it, so that the tests which need neither
run, fast, where neither is installed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NUM_DOMAINS = 100  # 1..100: with more, DDS ports reach into those the system hands out


@pytest.fixture(scope='session')
def bags() -> Path:
    """The folder of recordings beside the repository."""
    folder = ROOT.parent / 'shared' / 'bags'
    if not folder.is_dir():
        pytest.skip(f'no recordings: {folder} does not exist')
    return folder


@pytest.fixture(scope='module', autouse=True)
def ros_domain(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set ROS_DOMAIN_ID for this test file, also for the processes that its tests start."""
    before = os.environ.get('ROS_DOMAIN_ID')
    domain = DOMAINS[request.path.name]
    os.environ['ROS_DOMAIN_ID'] = str(domain)
    yield domain
    if before is None:
        del os.environ['ROS_DOMAIN_ID']
    else:
        os.environ['ROS_DOMAIN_ID'] = before


def assign_domains(names: list[str]) -> dict[str, int]:
    """A domain per file: the same in every run, never shared, another one in another checkout."""
    domains: dict[str, int] = {}
    for name in sorted(names):
        digest = hashlib.sha256(f'{ROOT}/{name}'.encode()).digest()
        domain = 1 + int.from_bytes(digest[:4], 'big') % NUM_DOMAINS
        while domain in domains.values():
            domain = 1 + domain % NUM_DOMAINS
        domains[name] = domain
    return domains


DOMAINS = assign_domains([path.name for path in Path(__file__).parent.glob('test_*.py')])


class Graph:
    """A bare node in the domain of the test file, and the executor that turns it."""

    def __init__(self) -> None:
        import rclpy
        from rclpy.executors import SingleThreadedExecutor

        self._context = rclpy.Context()
        rclpy.init(context=self._context)
        self.node = rclpy.create_node('test', context=self._context)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self.node)

    def add(self, node: Any) -> None:
        """Turn another node, too."""
        self._executor.add_node(node)

    def spin_until(self, is_true: Callable[[], Any], what: str, timeout_s: float = 30.0) -> None:
        """Turn the node until the condition holds; fail, naming what was waited for."""
        limit = time.monotonic() + timeout_s
        while not is_true():
            if time.monotonic() > limit:
                pytest.fail(f'waited {timeout_s:g} s for {what}')
            self._executor.spin_once(timeout_sec=0.05)

    def close(self) -> None:
        """Take the node out of the graph."""
        self._executor.shutdown()
        self.node.destroy_node()
        self._context.try_shutdown()


@pytest.fixture
def graph() -> Iterator[Graph]:
    """Skip without ROS; otherwise a node to publish, subscribe and call services with."""
    pytest.importorskip('rclpy')
    made = Graph()
    yield made
    made.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked cuda where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker('cuda')]
    if marked and not has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason='no CUDA device'))


def has_cuda() -> bool:
    """Whether torch is installed and sees a CUDA device."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
