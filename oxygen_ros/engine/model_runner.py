"""ModelRunner: the one hand on the device.

Owns the model, the KV tensor and everything else with an address; turns frames and sequences into
tensors and back. Decides nothing: which frame, which batch and when is the scheduler's affair.
Called by `engine.py` on the frame thread, and only there (captured graphs are bound to it).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oxygen_ros.engine.sequence import Frame, Sequence
from oxygen_ros.engine.slots import SlotLayout
from oxygen_ros.model import packed
from oxygen_ros.model.attention import MASKED, rotary_table
from oxygen_ros.model.config import Pi05Config
from oxygen_ros.model.gemma import Modulation
from oxygen_ros.model.pi05 import ExtendPlan, Pi05, causal_prefix_bias, euler_times
from oxygen_ros.model.processor import ModelInput
from oxygen_ros.model.rtc import Continuation, Trained
from oxygen_ros.model.weights import load_model, random_model

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16}
ROWS_BUCKET = 64
"""Views of slots in a decode step begin and end at a multiple of this many rows."""


def bucket(number: int) -> int:
    """Return the size that `number` of rows is padded to: at most a quarter more.

    On a CPU oneDNN compiles a kernel for every shape it meets and keeps the last thousand, some
    0.4 MB each; with drafts no two steps have the same number of tokens.
    """
    step = 1 << max(0, number.bit_length() - 3)
    return -(-number // step) * step


def _padded(values: list[int]) -> list[int]:
    """Return the values and the last one again, up to their bucket."""
    return values + values[-1:] * (bucket(len(values)) - len(values))


def set_num_threads(number: int) -> None:
    """Let torch use so many cores in the calling thread; 0 = all but one.

    The free one belongs to callbacks and commands; on a shared core a second thread of a small
    model is slower than none.
    """
    torch.set_num_threads(number or max(1, len(os.sched_getaffinity(0)) - 1))


def load_pi05(
    config: Pi05Config,
    checkpoint: Path | None,
    device: str,
    dtype: str,
    seed: int,
    *,
    differentiable_flow: bool = False,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> Pi05:
    """Return the model on `device` ('auto', 'cpu', 'cuda', 'cuda:1', ...) in `dtype`.

    'auto' is CUDA in bfloat16 where there is a CUDA device, else the CPU in float32. Without a
    checkpoint the weights are random, by `seed`. `on_progress`: see `load_model`.
    With `differentiable_flow` the action expert keeps plain layers on a CPU, where others are
    faster but have no derivative.

    Raises:
        CheckpointError: see `load_model`.
        ValueError: unknown dtype, or a device that is unknown or not there.
    """
    place = _device(device)
    if dtype == 'auto':
        dtype = 'float32' if place.type == 'cpu' else 'bfloat16'
    if dtype not in DTYPES:
        raise ValueError(
            f"parameter 'dtype': expected auto or one of {list(DTYPES)}, got {dtype!r}"
        )
    if checkpoint is None:
        model = random_model(config, seed=seed, device=place, dtype=DTYPES[dtype])
    else:
        model = load_model(
            config, checkpoint, device=place, dtype=DTYPES[dtype], on_progress=on_progress
        )
    if place.type == 'cpu' and packed.available():
        packed.pack(model, differentiable_flow=differentiable_flow)
    return model


def _device(name: str) -> torch.device:
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'cpu'
    kind, _, index = name.partition(':')
    if kind not in ('cpu', 'cuda') or (index and not index.isdigit()):
        raise ValueError(f"parameter 'device': expected auto, cpu or cuda[:N], got {name!r}")
    if kind == 'cuda' and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"parameter 'device': {name!r} was asked for, but torch {torch.__version__} sees "
            f'{torch.cuda.device_count()} CUDA devices here; use cpu, or a CUDA build of torch'
        )
    return torch.device(name)


def _where(rows: Tensor, there: list[Modulation], elsewhere: list[Modulation]) -> list[Modulation]:
    """Return modulations (H, W) per action row, those of `there` where `rows` (H, 1)."""
    return [
        (torch.where(rows, a, x), torch.where(rows, b, y), torch.where(rows, c, z))
        for (a, b, c), (x, y, z) in zip(there, elsewhere, strict=True)
    ]


class ModelRunner:
    """Prefill, denoise and decode on slots.

    `k`, `v`: (layers, slots, K, rows, D), allocated once; every pass reads and writes views.
    """

    @torch.inference_mode(mode=False)  # autograd may have to keep what is made here
    def __init__(
        self,
        model: Pi05,
        layout: SlotLayout,
        *,
        num_slots: int,
        num_denoise_steps: int,
        num_rows: int | None = None,
        continuation: Continuation | None = None,
    ) -> None:
        """Allocate the KV tensor.

        Args:
            num_rows: per slot; None takes the layout's.
            continuation: how `denoise_after` does its work; None if nobody will call it.
        """
        self.model = model
        self.layout = layout
        self.device = model.embedding.weight.device
        vlm = model.config.vlm
        rows = num_rows or layout.length
        shape = (vlm.depth, num_slots, vlm.num_kv_heads, rows, vlm.head_dim)
        self.k = torch.zeros(shape, dtype=model.dtype, device=self.device)
        self.v = torch.zeros_like(self.k)
        self._last_hidden = torch.zeros(num_slots, vlm.width, dtype=model.dtype, device=self.device)
        self._rotary = rotary_table(layout.length, vlm.head_dim, self.device).to(model.dtype)
        self._continuation = continuation
        with torch.no_grad():
            times = torch.from_numpy(euler_times(num_denoise_steps)).to(self.device)
            self._modulations = model.modulations(times)
            self._clean = model.modulations(torch.zeros_like(times[:1]))[0]
        self.num_prefills = 0

    def prefix_len(self, inputs: ModelInput) -> int:
        """Return the number of tokens that `prefill` will write for these inputs."""
        return len(inputs.images) * self.model.config.vision.tokens_per_image + len(inputs.tokens)

    @torch.inference_mode()
    def prefill(self, frame: Frame, inputs: ModelInput) -> None:
        """Write the K/V of the frame's present cameras and prompt into its slot."""
        images = torch.from_numpy(np.stack(list(inputs.images.values()))).to(self.device)
        pixels = (images.float() / 255.0 * 2.0 - 1.0).permute(0, 3, 1, 2)  # openpi: [-1, 1], CHW
        tokens = torch.from_numpy(np.array(inputs.tokens)).to(self.device)
        n = frame.prefix_len
        bias = None
        if self.model.config.prefix_attention == 'causal':
            bias = causal_prefix_bias(n - len(inputs.tokens), n, self.device)
        k, v = self._span(frame.slot, self.layout.prefix_start(n), self.layout.prefix_capacity)
        prefix = self.model.embed_prefix(pixels, tokens)
        hidden = self.model.prefill(prefix, self._rotary[:n], k, v, bias)
        self._last_hidden[frame.slot] = hidden[-1]
        self.num_prefills += 1

    @torch.inference_mode()
    def denoise(
        self, frame: Frame, noise: np.ndarray, meanwhile: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """Return actions (H, A) float32 for noise (H, A) float32 against the prefilled frame.

        `meanwhile` is called, with the time [ns] that is left, by runners that can decode beside
        it; this one cannot.
        """
        x = torch.from_numpy(noise).to(self.device)
        views = self._action_views(frame, len(noise))
        return self.model.denoise(x, self._modulations, *views).cpu().numpy()

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def denoise_after(
        self, frame: Frame, noise: np.ndarray, leftover: np.ndarray, delay: int
    ) -> np.ndarray:
        """As `denoise`, continuing an earlier chunk by the runner's continuation.

        Always an eager pass: its weights change from frame to frame, and the Jacobian needs
        autograd.

        Args:
            leftover: (T, A) float32 in model units, what the earlier chunk has for rows 0 .. T - 1.
            delay: how many of these rows will have been executed when this chunk comes.
        """
        continuation = self._continuation
        assert continuation is not None, 'denoise_after() of a runner without a continuation'
        x, rows = (torch.from_numpy(a).to(self.device) for a in (noise, leftover))
        views = self._action_views(frame, len(noise))
        told = self._modulations
        if isinstance(continuation, Trained):
            executed = torch.arange(len(noise), device=self.device)[:, None] < delay
            told = [_where(executed, self._clean, modulation) for modulation in told]

        def velocity(x: Tensor, step: int) -> Tensor:
            return self.model.velocity(x, told[step], *views)

        return continuation.denoise(velocity, x, len(told), rows, delay).cpu().numpy()

    @torch.inference_mode()
    def decode(self, batch: SequenceOf[Sequence]) -> list[list[int]]:
        """Feed the pending and drafted tokens of each sequence; frames and lengths mix freely.

        Returns for each sequence the token predicted behind its pending ones and behind each
        drafted one. Of a sequence without pending tokens the prefix predicts the first.
        """
        feeding = [sequence for sequence in batch if sequence.fed]
        fed = self._extend(feeding) if feeding else self._last_hidden[:0]
        prefixes = [sequence.frame.slot for sequence in batch if not sequence.pending]
        hidden = torch.cat([fed, self._last_hidden[prefixes]])

        rows: list[int] = []  # of `hidden`, one per prediction
        row, prefix_row = 0, len(fed)
        for sequence in batch:
            end = row + len(sequence.fed)
            if sequence.pending:
                row += len(sequence.pending) - 1  # earlier pending tokens predict what is known
            else:
                rows.append(prefix_row)
                prefix_row += 1
            rows += range(row, end)
            row = end
        tokens = iter(self.model.greedy_tokens(hidden[_padded(rows)]).tolist())
        return [[next(tokens) for _ in range(1 + len(sequence.draft))] for sequence in batch]

    def clear(self, slot: int) -> None:
        """Zero a slot. A masked key weighs 0, but 0 times NaN is NaN: numbers that went bad must
        not stay behind for the slot's next frame."""
        self.k[:, slot].zero_()
        self.v[:, slot].zero_()
        self._last_hidden[slot].zero_()

    def _action_views(self, frame: Frame, horizon: int) -> tuple[Tensor, ...]:
        """Return what every velocity of this frame is given: rotary, k and v."""
        n = frame.prefix_len
        start, end = self.layout.prefix_start(n), self.layout.prefix_capacity + horizon
        return self._rotary[n : n + horizon], *self._span(frame.slot, start, end)

    def _span(self, slot: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self.k[:, slot, :, start:end], self.v[:, slot, :, start:end]

    def _extend(self, batch: SequenceOf[Sequence]) -> Tensor:
        """Write the K/V of all fed tokens; return (R, W), their hidden rows in batch order."""
        tokens = [token for sequence in batch for token in sequence.fed]
        positions = [
            sequence.frame.prefix_len + sequence.num_cached + i
            for sequence in batch
            for i in range(len(sequence.fed))
        ]
        start, end, num_slots, plan = self._plan(batch)
        hidden = self.model.extend(
            torch.tensor(_padded(tokens), device=self.device),
            self._rotary[_padded(positions)],
            self.k[:, :num_slots, :, start:end],
            self.v[:, :num_slots, :, start:end],
            plan,
        )
        return hidden[: len(tokens)]

    def _plan(self, batch: SequenceOf[Sequence]) -> tuple[int, int, int, ExtendPlan]:
        """Return the first and last row and the number of slots of the common view, and the plan.

        The view holds every prefix and tail of the batch, and what is between and rounds it up;
        slots between that are not in the batch get masked rows nobody reads. Padding tokens are
        the last one again, which writes its own row once more.
        """
        layout = self.layout
        start = layout.prefix_start(max(sequence.frame.prefix_len for sequence in batch))
        start -= start % ROWS_BUCKET
        end = max(layout.tail_start(s) + s.num_cached + len(s.fed) for s in batch)
        end = min(-(-end // ROWS_BUCKET) * ROWS_BUCKET, layout.length)
        num_slots = max(sequence.frame.slot for sequence in batch) + 1
        fill = [0] * num_slots  # query rows taken so far in each slot
        slots, rows, queries = [], [], []
        for sequence in batch:
            slot = sequence.frame.slot
            first = layout.tail_start(sequence) + sequence.num_cached - start
            for i in range(len(sequence.fed)):
                slots.append(slot)
                rows.append(first + i)
                queries.append(fill[slot])
                fill[slot] += 1
        num_queries = bucket(max(fill))
        gather = np.zeros((num_slots, num_queries), np.int64)
        gather[slots, queries] = np.arange(len(slots))
        bias = np.full((num_slots, num_queries, end - start), MASKED, np.float32)
        token = 0
        for sequence in batch:
            own = layout.tail_start(sequence) - start
            prefix = layout.prefix_start(sequence.frame.prefix_len) - start
            for _ in sequence.fed:
                visible = bias[slots[token], queries[token]]
                visible[prefix : layout.prefix_capacity - start] = 0.0
                visible[own : rows[token] + 1] = 0.0
                token += 1
        scatter = [slot * num_queries + query for slot, query in zip(slots, queries, strict=True)]
        slots, rows, scatter = _padded(slots), _padded(rows), _padded(scatter)
        to_device = [torch.from_numpy(np.asarray(a)).to(self.device)
                     for a in (slots, rows, gather, scatter, bias)]  # fmt: skip
        return start, end, num_slots, ExtendPlan(*to_device)
