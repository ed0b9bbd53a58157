"""The order in which streams are told to work, by streams that only note what they are told."""

from __future__ import annotations

import contextlib

import pytest
import torch

from oxygen_ros.engine.cuda import ActionLane, Graphs


class FakeCuda:
    """Stands in for the streams and events of `torch.cuda`; `log` is what the host asked for."""

    def __init__(self, monkeypatch):
        self.log: list[str] = []
        self.current = FakeStream(self, 'main')
        self._events = iter(('ready', 'done'))
        monkeypatch.setattr(torch.cuda, 'Stream', self._make_stream)
        monkeypatch.setattr(torch.cuda, 'Event', lambda **_: FakeEvent(self, next(self._events)))
        monkeypatch.setattr(torch.cuda, 'current_stream', lambda: self.current)
        monkeypatch.setattr(torch.cuda, 'stream', self._inside)

    def _make_stream(self, device, priority):
        assert priority < 0  # smaller goes first
        return FakeStream(self, 'lane')

    @contextlib.contextmanager
    def _inside(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def note(self, what: str) -> None:
        self.log.append(f'{self.current.name}: {what}')


class FakeStream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def wait_event(self, event):
        self.cuda.log.append(f'{self.name}: wait for {event.name}')

    def wait_stream(self, stream):
        self.cuda.log.append(f'{self.name}: wait for all of {stream.name}')


class FakeEvent:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def record(self):
        self.cuda.note(f'record {self.name}')

    def synchronize(self):
        self.cuda.log.append(f'host: wait for {self.name}')

    def elapsed_time(self, end):
        return 4.0  # ms


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def test_actions_wait_for_the_prefix_and_the_host_works_on_beside_them(cuda):
    lane, expected = ActionLane(torch.device('cuda')), []
    for _ in range(2):
        cuda.note('prefill')
        lane.run(
            lambda: cuda.note('denoise'), lambda ns: (expected.append(ns), cuda.note('decode'))
        )
    assert cuda.log[: len(cuda.log) // 2] == [
        'main: prefill',
        'main: record ready',
        'lane: wait for ready',
        'lane: denoise',
        'lane: record done',
        'host: wait for ready',
        'main: decode',
        'host: wait for done',
    ]
    assert expected == [0, 4_000_000]


def test_the_next_prefix_waits_for_actions_whose_company_failed(cuda):
    lane = ActionLane(torch.device('cuda'))
    with pytest.raises(ZeroDivisionError):
        lane.run(lambda: cuda.note('denoise'), lambda ns: 1 // 0)
    lane.hold_back_others()
    cuda.note('prefill')
    assert cuda.log[-2:] == ['main: wait for all of lane', 'main: prefill']


def test_without_cuda_work_is_done_where_it_is_called():
    lane, graphs, done = ActionLane(torch.device('cpu')), Graphs(torch.device('cpu')), []
    lane.hold_back_others()
    lane.run(lambda: graphs.run('key', lambda: done.append('denoise')), lambda ns: done.append(ns))
    assert done == ['denoise']
    assert lane.stream is None and len(graphs) == 0
