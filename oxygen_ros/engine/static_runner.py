"""StaticRunner: the model runner with fixed addresses and shapes, so that CUDA can replay it.

A launch-bound GPU spends most of a frame starting kernels; a captured graph starts once. Every pass
therefore reads its inputs from buffers that never move and comes in few shapes: a prefix is padded
to a bucket (on its left, masked), a decode step to a rectangle of slots and query rows. The same
code runs without CUDA, pass by pass, which is how its arithmetic is tested.

Decides nothing; used by `factory.py` on CUDA in place of the plain `ModelRunner`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oxygen_ros.engine.cuda import ActionLane, Graphs
from oxygen_ros.engine.model_runner import ModelRunner
from oxygen_ros.engine.sequence import Frame, Sequence
from oxygen_ros.engine.slots import SlotLayout
from oxygen_ros.model.attention import MASKED
from oxygen_ros.model.pi05 import ExtendPlan, Pi05
from oxygen_ros.model.processor import ModelInput
from oxygen_ros.model.rtc import Continuation

PROMPT_BUCKET = 64
"""Prompts are padded to a multiple of this many tokens."""
USUAL_PROMPTS = (64, 128)
"""Prompt lengths that are captured at the start: an instruction and a robot's state."""
MAX_DISAGREEMENT = 0.05
"""Largest difference of a normalised action between replayed and eager passes in bfloat16."""

log = logging.getLogger(__name__)


def make_runner(
    model: Pi05,
    layout: SlotLayout,
    *,
    num_slots: int,
    num_denoise_steps: int,
    max_queries: int,
    continuation: Continuation | None = None,
) -> ModelRunner:
    """Return the runner for the model's device: on CUDA one that replays checked graphs.

    If the device cannot capture the passes, or a replay disagrees with the eager pass, the plain
    runner is returned and the reason logged: slower, and right.

    Args:
        max_queries: most query rows that a slot may have in one decode step.
        continuation: of chunks that continue an earlier one; those are never replayed.
    """
    options: dict[str, Any] = {
        'num_slots': num_slots,
        'num_denoise_steps': num_denoise_steps,
        'continuation': continuation,
    }
    plain = ModelRunner(model, layout, **options)
    if plain.device.type != 'cuda':
        return plain
    static = StaticRunner(model, layout, **options)
    try:
        static.capture(USUAL_PROMPTS, max_queries)
    except RuntimeError as error:
        log.warning('CUDA graphs are off, the passes cannot be captured: %s', error)
        return plain
    disagreement = static.disagreement(plain)
    if not disagreement <= MAX_DISAGREEMENT:  # NaN disagrees
        log.warning('CUDA graphs are off, a replayed action is off by %.3g', disagreement)
        return plain
    return static


class StaticRunner(ModelRunner):
    """Prefill and denoise in a slot of their own, decode in a rectangle of all slots.

    The work slot lies behind the pool's slots. A frame's prefix is copied from it to the frame's
    slot when its first sequence is decoded, or when the next frame needs the work slot: one copy of
    a few megabytes instead of a graph per slot. Until then decode steps touch nothing that
    denoising reads or writes, so they may run beside it. A chunk that continues another is denoised
    eagerly, on the same buffers (`ModelRunner.denoise_after`).
    """

    def __init__(
        self,
        model: Pi05,
        layout: SlotLayout,
        *,
        num_slots: int,
        num_denoise_steps: int,
        continuation: Continuation | None = None,
    ) -> None:
        # One more row per slot takes the K/V of padding.
        self._trash_row = layout.length
        super().__init__(
            model,
            layout,
            num_slots=num_slots + 1,
            num_denoise_steps=num_denoise_steps,
            num_rows=layout.length + 1,
            continuation=continuation,
        )
        self._work_slot = num_slots
        self._num_slots = num_slots
        self._staged: Frame | None = None
        self.graphs = Graphs(self.device)
        self._lane = ActionLane(self.device)
        # Other graphs may run beside these, so they share no memory with them.
        self._action_graphs = Graphs(self.device, self._lane.stream)
        config = model.config
        size, horizon = config.vision.image_size, config.action_horizon

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self._pixels = {
            cameras: buffer(cameras, size, size, 3, dtype=torch.uint8)
            for cameras in range(1, len(config.camera_slots) + 1)
        }
        self._prompt = buffer(config.max_token_len)
        self._gather = buffer(config.max_prefix_len)
        self._prefix_len = buffer(1)
        self._noise = buffer(horizon, config.action_dim, dtype=torch.float32)
        self._actions = torch.zeros_like(self._noise)
        # Pinned, or the host would wait for the lane when it copies.
        on_cuda = self.device.type == 'cuda'
        self._noise_here, self._actions_here = (
            torch.zeros(self._noise.shape, pin_memory=on_cuda) for _ in range(2)
        )
        self._feeds: dict[int, Tensor] = {}  # query rows per slot -> (6, S, Q), see `_FEED`
        self._predicted: dict[int, Tensor] = {}
        self._keys = torch.arange(layout.length + 1, device=self.device)

    # --- prefix and actions -------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, frame: Frame, inputs: ModelInput) -> None:
        """Write the K/V of the frame's present cameras and prompt into the work slot."""
        self._lane.hold_back_others()
        self._unstage()
        cameras, tokens = len(inputs.images), len(inputs.tokens)
        bucket = self._padded(tokens)
        self._pixels[cameras].copy_(torch.from_numpy(np.stack(list(inputs.images.values()))))
        self._prompt[:tokens].copy_(torch.from_numpy(np.array(inputs.tokens)))
        # The padding of a bucket stands on the left, so that prefix and tail stay one span.
        num_images = cameras * self.model.config.vision.tokens_per_image
        padding = bucket - tokens
        index = np.zeros(num_images + bucket, np.int64)
        index[padding:] = np.arange(num_images + tokens)
        self._gather[: len(index)].copy_(torch.from_numpy(index))
        self._prefix_len.fill_(frame.prefix_len)
        key = ('prefill', cameras, bucket)
        self.graphs.run(key, lambda: self._prefill_pass(cameras, bucket))
        self._staged = frame
        self._bucket_rows = num_images + bucket
        self.num_prefills += 1

    def _prefill_pass(self, cameras: int, bucket: int) -> None:
        model, layout = self.model, self.layout
        num_images = cameras * model.config.vision.tokens_per_image
        rows = num_images + bucket
        pixels = (self._pixels[cameras].float() / 255.0 * 2.0 - 1.0).permute(0, 3, 1, 2)
        embedded = model.embed_prefix(pixels, self._prompt[:bucket])
        prefix = embedded[self._gather[:rows]]
        padding = rows - self._prefix_len
        row = self._keys[:rows]
        visible = (row >= padding)[None]
        if model.config.prefix_attention == 'causal':
            visible = visible & ((row < padding + num_images) | (row <= row[:, None]))
        start = layout.prefix_capacity - rows
        k, v = self._span(self._work_slot, start, layout.prefix_capacity)
        rotary = self._rotary[(row - padding).clamp_(min=0)]
        hidden = model.prefill(prefix, rotary, k, v, _bias(visible))
        self._last_hidden[self._work_slot].copy_(hidden[-1])

    @torch.inference_mode()
    def denoise(
        self, frame: Frame, noise: np.ndarray, meanwhile: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """As `ModelRunner.denoise`; on CUDA `meanwhile` is called, and may decode other frames."""
        assert self._staged is frame, 'denoise() of a frame that was not prefilled last'
        self._noise_here.copy_(torch.from_numpy(noise))
        rows = self._bucket_rows
        self._lane.run(lambda: self._act(rows), meanwhile)
        return self._actions_here.numpy().copy()

    def _act(self, rows: int) -> None:
        self._noise.copy_(self._noise_here, non_blocking=True)
        self._action_graphs.run(('denoise', rows), lambda: self._denoise_pass(rows))
        self._actions_here.copy_(self._actions, non_blocking=True)

    def _denoise_pass(self, rows: int) -> None:
        views = self._work_views(rows, len(self._noise))
        self._actions.copy_(self.model.denoise(self._noise, self._modulations, *views))

    def _action_views(self, frame: Frame, horizon: int) -> tuple[Tensor, ...]:
        assert self._staged is frame, 'actions of a frame that was not prefilled last'
        return self._work_views(self._bucket_rows, horizon)

    def _work_views(self, rows: int, horizon: int) -> tuple[Tensor, ...]:
        """Return rotary, k, v and bias of actions behind a prefix padded to this many rows."""
        start, capacity = self.layout.prefix_capacity - rows, self.layout.prefix_capacity
        k, v = self._span(self._work_slot, start, capacity + horizon)
        visible = (self._keys[: rows + horizon] >= rows - self._prefix_len)[None]
        rotary = self._rotary[self._prefix_len + self._keys[:horizon]]
        return rotary, k, v, _bias(visible)

    def _unstage(self) -> None:
        """Move the prefix of the last frame from the work slot to the frame's own."""
        frame, self._staged = self._staged, None
        if frame is None:
            return
        start, end = self.layout.prefix_start(frame.prefix_len), self.layout.prefix_capacity
        for cache in (self.k, self.v):
            cache[:, frame.slot, :, start:end].copy_(cache[:, self._work_slot, :, start:end])
        self._last_hidden[frame.slot].copy_(self._last_hidden[self._work_slot])

    def clear(self, slot: int) -> None:
        """Zero a slot and, if its frame is still there, the work slot."""
        if self._staged is not None and self._staged.slot == slot:
            self._staged = None
            super().clear(self._work_slot)
        super().clear(slot)

    # --- language -----------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(self, batch: SequenceOf[Sequence]) -> list[list[int]]:
        """As `ModelRunner.decode`, with all slots side by side and padded query rows."""
        if any(sequence.frame is self._staged for sequence in batch):
            self._unstage()
        fill = [0] * self._num_slots
        for sequence in batch:
            fill[sequence.frame.slot] += max(1, len(sequence.pending)) + len(sequence.draft)
        feed, first_rows = self._feed(batch, 1 << (max(fill) - 1).bit_length())
        predicted = self._decode_rectangle(feed).tolist()  # the step's only copy to the host
        return [
            predicted[sequence.frame.slot][row : row + 1 + len(sequence.draft)]
            for sequence, row in zip(batch, first_rows, strict=True)
        ]

    def _decode_rectangle(self, feed: np.ndarray) -> Tensor:
        """Return (S, Q) int64, the token predicted behind each row of a feed (6, S, Q)."""
        queries = feed.shape[-1]
        if queries not in self._feeds:
            self._feeds[queries] = torch.zeros(feed.shape, dtype=torch.int64, device=self.device)
            self._predicted[queries] = torch.zeros_like(self._feeds[queries][0])
        self._feeds[queries].copy_(torch.from_numpy(feed))
        self.graphs.run(('decode', queries), lambda: self._decode_pass(queries))
        return self._predicted[queries]

    def _feed(self, batch: SequenceOf[Sequence], queries: int) -> tuple[np.ndarray, list[int]]:
        """Return what the rectangle is fed, int64 (6, S, Q), and each sequence's first prediction.

        Per query row: token, position, row of the slot it is written to, first visible row of the
        prefix, first visible row of the tail, and 1 where the prefix itself predicts.
        """
        feed = np.zeros((6, self._num_slots, queries), np.int64)
        feed[2], feed[3], feed[4] = self._trash_row, self.layout.length, self.layout.length
        taken, first_rows = [0] * self._num_slots, []
        for sequence in batch:
            slot, prefix_len = sequence.frame.slot, sequence.frame.prefix_len
            own = self.layout.tail_start(sequence)
            if not sequence.pending:
                feed[5, slot, taken[slot]] = 1
                taken[slot] += 1
            first_rows.append(taken[slot] + len(sequence.pending) - 1)
            for i, token in enumerate(sequence.fed):
                done = sequence.num_cached + i
                feed[:, slot, taken[slot]] = (
                    token,
                    prefix_len + done,
                    own + done,
                    self.layout.prefix_start(prefix_len),
                    own,
                    0,
                )
                taken[slot] += 1
        return feed, first_rows

    def _decode_pass(self, queries: int) -> None:
        num_slots, capacity = self._num_slots, self.layout.prefix_capacity
        token, position, row, prefix_start, own, from_prefix = self._feeds[queries]
        keys = self._keys
        in_prefix = (keys >= prefix_start[..., None]) & (keys < capacity)
        in_tail = (keys >= own[..., None]) & (keys <= row[..., None])
        order = torch.arange(num_slots * queries, device=self.device)
        plan = ExtendPlan(
            slots=order // queries,
            rows=row.flatten(),
            gather=order.view(num_slots, queries),
            scatter=order,
            bias=_bias(in_prefix | in_tail),
        )
        hidden = self.model.extend(
            token.flatten(),
            self._rotary[position.flatten()],
            self.k[:, :num_slots],
            self.v[:, :num_slots],
            plan,
        ).view(num_slots, queries, -1)
        last = self._last_hidden[:num_slots, None]
        hidden = torch.where(from_prefix[..., None].bool(), last, hidden)
        predicted = self.model.greedy_tokens(hidden.flatten(0, 1))
        self._predicted[queries].copy_(predicted.view(num_slots, queries))

    # --- before the robot moves ---------------------------------------------------------------

    def capture(self, prompt_lengths: SequenceOf[int], max_queries: int) -> None:
        """Capture the passes of every camera count, of these prompt lengths, and decode steps.

        Called when the node is configured, so that no frame pays for a capture.
        """
        config = self.model.config
        blank = np.zeros((config.vision.image_size, config.vision.image_size, 3), np.uint8)
        noise = np.zeros((config.action_horizon, config.action_dim), np.float32)
        buckets = sorted({self._padded(length) for length in prompt_lengths})
        for cameras in self._pixels:
            for bucket in buckets:
                images = dict.fromkeys(config.camera_slots[:cameras], blank)
                inputs = ModelInput(images, [0] * bucket, 0)
                frame = Frame(0, 0, 0, self.prefix_len(inputs), 0)
                self.prefill(frame, inputs)
                self.denoise(frame, noise)
        for exponent in range((max_queries - 1).bit_length() + 1):
            self._decode_rectangle(self._feed((), 1 << exponent)[0])
        self._staged = None
        self.num_prefills = 0

    def disagreement(self, plain: ModelRunner) -> float:
        """Return the largest difference between this runner's and another's actions of a frame."""
        config = self.model.config
        generator = np.random.default_rng(0)
        shape = (config.vision.image_size, config.vision.image_size, 3)
        images = {
            slot: generator.integers(0, 255, shape, dtype=np.uint8) for slot in config.camera_slots
        }
        tokens = generator.integers(3, config.vocab_size, config.max_token_len // 2)
        inputs = ModelInput(images, tokens.tolist(), 0)
        noise = generator.standard_normal(
            (config.action_horizon, config.action_dim), dtype=np.float32
        )
        frame = Frame(0, 0, 0, self.prefix_len(inputs), 0)
        actions = []
        for runner in (self, plain):
            runner.prefill(frame, inputs)
            actions.append(runner.denoise(frame, noise))
            runner.num_prefills = 0
        self._staged = None
        return float(np.abs(actions[0] - actions[1]).max())

    def _padded(self, num_tokens: int) -> int:
        """Return the bucket of a prompt; the last one is as long as prompts may be."""
        bucket = -(-num_tokens // PROMPT_BUCKET) * PROMPT_BUCKET
        return min(bucket, self.model.config.max_token_len)


def _bias(visible: Tensor) -> Tensor:
    """Return float32 0 where visible and MASKED elsewhere, without waiting for the device."""
    return torch.where(visible, 0.0, MASKED)
