"""Turns an instruction and a robot state into prompt tokens, and generated tokens into text.

It owns the tokenizers and the wording each checkpoint family was trained with. It knows nothing
about images, devices or decoding. `Processor` builds the prompt of a frame; the engine encodes task
prompts and reads generated text through the same `Tokenizer`.
"""

from __future__ import annotations

import codecs
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

PROMPT_FORMS = ('state', 'plain', 'subtask')


class Tokenizer(Protocol):
    """Text to token ids and back; `bos_id` and `eos_id` are never part of what `encode` returns."""

    @property
    def bos_id(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without BOS and EOS."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a finished sequence. Special and unknown ids give no text."""
        ...

    def stable_text(self, ids: Sequence[int]) -> str:
        """The text of a growing sequence, without a character whose bytes are not all there yet.

        Each call's text starts with the text of the call before, so the difference can be streamed.
        """
        ...


class ByteTokenizer:
    """One token per UTF-8 byte, for models with random weights: no file to download.

    Random weights speak random bytes, so what cannot be printed on a line is shown as '·'.
    """

    pad_id = 0
    eos_id = 1
    bos_id = 2
    vocab_size = 259  # three special ids and 256 bytes; a model's vocabulary may be larger

    _FIRST_BYTE = 3

    def encode(self, text: str) -> list[int]:
        return [self._FIRST_BYTE + byte for byte in text.encode('utf-8')]

    def decode(self, ids: Sequence[int]) -> str:
        return self._text(ids, final=True)

    def stable_text(self, ids: Sequence[int]) -> str:
        return self._text(ids, final=False)

    def _text(self, ids: Iterable[int], final: bool) -> str:
        data = bytes(i - self._FIRST_BYTE for i in ids if self._FIRST_BYTE <= i < self.vocab_size)
        # An incremental decoder that is not told the end holds back an unfinished character.
        text = codecs.getincrementaldecoder('utf-8')('replace').decode(data, final)
        return ''.join(c if c.isprintable() and c != '\ufffd' else '·' for c in text)


class SentencePieceTokenizer:
    """PaliGemma's tokenizer, read from its `tokenizer.model` file (SentencePiece)."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError if there is no file, ValueError if it is not a usable model."""
        if not path.is_file():
            raise FileNotFoundError(
                f"no tokenizer at {path}: put PaliGemma's tokenizer.model there (openpi names it "
                f'paligemma_tokenizer.model; it may not be redistributed with this package)'
            )
        # Imported here because the dummy preset must run without the library.
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(path.read_bytes())
        except RuntimeError as error:
            raise ValueError(f'{path}: expected a SentencePiece model, got: {error}') from error
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self.pad_id: int = self._processor.pad_id()
        self.vocab_size: int = self._processor.vocab_size()
        if min(self.bos_id, self.eos_id, self.pad_id) < 0:
            raise ValueError(
                f'{path}: expected a tokenizer with BOS, EOS and padding tokens, got ids '
                f'{self.bos_id}, {self.eos_id}, {self.pad_id} (-1: none)'
            )

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        # A model's embedding table may have more rows than the tokenizer has pieces.
        known = [int(i) for i in ids if 0 <= i < self.vocab_size]
        return str(self._processor.decode(known))

    def stable_text(self, ids: Sequence[int]) -> str:
        # Byte pieces of an unfinished character each decode to U+FFFD. A genuine one at the end is
        # held back too, until the next character or the final `decode` brings it.
        return self.decode(ids).rstrip('\ufffd')


# --------------------------------------------------------------------------------------- prompts


def discretize_state(state: np.ndarray) -> np.ndarray:
    """Normalised state (width,) to int64 bins of [-1, 1]: 0 to 255, and -1 below the range.

    The -1 is openpi's (`models/tokenizer.py`); it reaches the prompt as the text '-1'.
    """
    return np.digitize(state, np.linspace(-1.0, 1.0, 257)[:-1]) - 1


def state_prompt(instruction: str, state: np.ndarray, notes: Sequence[str] = ()) -> str:
    """The prompt of openpi's pi0.5: instruction, then the normalised, unpadded state in bins.

    With `notes` (oldest first), which openpi does not know, they stand between the two:
    'Task: INSTRUCTION, Memory: NOTE; NOTE, State: BINS;', so that the state stays where the model
    looks for it.
    """
    bins = ' '.join(map(str, discretize_state(state)))
    memory = f', Memory: {"; ".join(map(_clean, notes))}' if notes else ''
    return f'Task: {_clean(instruction)}{memory}, State: {bins};\nAction: '


def subtask_prompt(instruction: str) -> str:
    """The prompt of OxyGen's `pi05_o2_*` checkpoints (`models/tokenizer.py`), without a state."""
    text = _clean(instruction.lower())
    if text and text[-1] in string.punctuation:
        text = text[:-1]
    return f'Task: {text}. Subtask: '


def prompt_tokens(
    form: str,
    instruction: str,
    state: np.ndarray,
    tokenizer: Tokenizer,
    notes: Sequence[str] = (),
) -> list[int]:
    """The prompt of one frame as token ids, BOS first, neither padded nor cut.

    `form`: 'state' (openpi pi0.5), 'plain' (openpi pi05_libero: the instruction, then a newline
    encoded on its own) or 'subtask' (OxyGen). `state` is the normalised, unpadded state; only
    'state' reads it, and `notes`. An empty instruction is legal and gives 'Task: , State: ...', as
    in openpi: whether a robot may move without one is the node's decision, not the tokenizer's.
    Raises ValueError for an unknown form.
    """
    if form == 'state':
        return [tokenizer.bos_id, *tokenizer.encode(state_prompt(instruction, state, notes))]
    if form == 'plain':
        # Encoded apart, so the newline is a token of its own whatever the text ends in.
        return [tokenizer.bos_id, *tokenizer.encode(_clean(instruction)), *tokenizer.encode('\n')]
    if form == 'subtask':
        return [tokenizer.bos_id, *tokenizer.encode(subtask_prompt(instruction))]
    raise ValueError(f"model.prompt: expected one of {list(PROMPT_FORMS)}, got '{form}'")


def _clean(instruction: str) -> str:
    # Stripped first, so an underscore or newline inside the ends becomes a space that stays.
    return instruction.strip().replace('_', ' ').replace('\n', ' ')
