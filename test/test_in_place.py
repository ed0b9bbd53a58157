"""What the passes may not do: copy keys and values, or wait for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_engine import Bench, Variant, inputs, task
from test_static_runner import StaticBench
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from oxygen_ros.engine.model_runner import bucket
from oxygen_ros.model import attention

PRODUCTS = ('mm', 'addmm', 'linear', '_linear_pointwise')
# Operators that wait until the device has come to this point.
WAITING = ('_local_scalar_dense', 'nonzero', 'equal', 'is_nonzero')


class Recorder(TorchDispatchMode):
    """Notes every operator and the shapes of the memory it newly allocates."""

    def __init__(self):
        super().__init__()
        self.operators: list[str] = []
        self.allocated: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        self.operators.append(name)
        given = {
            t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if tensor(t)
        }
        for result in tree_flatten(out)[0]:
            if tensor(result) and result.untyped_storage().data_ptr() not in given:
                self.allocated.append((name, result.shape))
        return out


def tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


class Passes:
    """A prefill, a denoise and a decode step of six sequences, each recorded."""

    def __init__(self, bench):
        self.records = {}
        frames = [bench.prefill(Variant(name), slot) for slot, name in enumerate('abc')]
        batch = [bench.sequence(frame, index) for frame in frames for index in (0, 1)]
        bench.step(*batch)
        noise = Variant('a').io('in.noise').numpy()
        frame, given = bench.prefill(Variant('a'), slot=3), inputs(Variant('a'))
        self._record('prefill', lambda: bench.runner.prefill(frame, given))
        self._record('denoise', lambda: bench.runner.denoise(frame, noise))
        bench.runner.decode(batch)  # a static runner puts its last prefix away
        self._record('decode', lambda: bench.runner.decode(batch))
        start, end, *_ = bench.runner._plan(batch)
        self.spans = {'denoise': frame.prefix_len + len(noise), 'decode': end - start}
        self.head_dim = bench.runner.k.shape[-1]

    def _record(self, name, work):
        with Recorder() as self.records[name]:
            work()

    def copies(self, name: str) -> list[str]:
        """Operators that allocated memory of the shape of the keys and values they attend to."""
        shape = (self.spans[name], self.head_dim)
        return [op for op, allocated in self.records[name].allocated if allocated[-2:] == shape]


@pytest.mark.parametrize('name', ['denoise', 'decode'])
def test_no_keys_or_values_are_copied(name):
    assert Passes(Bench(task('text', length=9), task('memory', length=9))).copies(name) == []


def test_a_copy_would_have_been_noticed(monkeypatch):
    """Guards the test above: attended to through copies, they are seen."""
    one_by_one = attention._attend_one_by_one
    monkeypatch.setattr(
        attention,
        '_attend_one_by_one',
        lambda rows, k, v, bias: one_by_one(rows, k.clone(), v.clone(), bias),
    )
    passes = Passes(Bench(task('text', length=9), task('memory', length=9)))
    assert passes.copies('denoise')
    assert passes.copies('decode')


@pytest.mark.parametrize('name', ['prefill', 'denoise', 'decode'])
def test_a_step_allocates_the_same_however_often_it_ran(name):
    """Nothing grows from step to step: shapes of the same pass repeat."""
    first, second = (Passes(Bench(task('text'), task('memory'))) for _ in range(2))
    assert first.records[name].allocated == second.records[name].allocated


def test_drafts_of_any_length_come_in_few_shapes():
    """oneDNN keeps a kernel for every number of rows it has multiplied."""
    bench = Bench(task('text', length=24), task('memory', length=24), num_slots=6)
    frames = [bench.prefill(Variant(name), slot) for slot, name in enumerate('abcab')]
    rows = set()
    for length in range(16):
        for num in range(1, len(frames) + 1):
            batch = [bench.sequence(frame) for frame in frames[:num]]
            bench.step(*batch)
            for sequence in batch:
                sequence.draft = (5,) * length
            with Recorder() as record:
                bench.runner.decode(batch)
            rows |= {shape[-2] for name, shape in record.allocated if name in PRODUCTS}
    assert len(rows) <= 4 * int(np.log2(max(rows))), sorted(rows)


def test_a_bucket_is_at_most_a_quarter_too_large():
    assert all(number <= bucket(number) <= 1.25 * number for number in range(1, 1000))


@pytest.mark.parametrize('kind', [Bench, StaticBench])
def test_the_host_waits_for_the_device_only_where_a_pass_ends(kind):
    passes = Passes(kind(task('text', length=9), task('memory', length=9)))
    for name in ('prefill', 'denoise', 'decode'):
        assert not set(passes.records[name].operators) & set(WAITING), name
