"""Prompt texts against openpi's own; tokenizers there and back, whole and as a growing text."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import golden_transforms as golden
import numpy as np
import pytest
from golden_transforms import assert_identical
from hypothesis import given
from hypothesis import strategies as st

from oxygen_ros.model import prompt
from oxygen_ros.model.prompt import ByteTokenizer, SentencePieceTokenizer, Tokenizer

PROMPTS = golden.CONTENT['prompts']
SENTENCES = ['pick up the cup', 'Fold the towel.', 'Task: open the drawer, State: 1 23 -1;'] * 20


@pytest.fixture(scope='module')
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tokenizer with PaliGemma's special ids and byte fallback."""
    sentencepiece = pytest.importorskip('sentencepiece')
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        vocab_size=330,
        hard_vocab_limit=False,
        byte_fallback=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name='identity',
        user_defined_symbols=['\n'],
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp('tokenizer') / 'tokenizer.model'
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope='module', params=['bytes', 'sentencepiece'])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == 'bytes':
        return ByteTokenizer()
    return SentencePieceTokenizer(request.getfixturevalue('tokenizer_file'))


class Recorder(ByteTokenizer):
    """A tokenizer that remembers what it was asked to encode."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return super().encode(text)


# -------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_the_state_bins_are_openpis(dtype: str) -> None:
    table = golden.fields('digitize')
    assert_identical(prompt.discretize_state(table[f'in_{dtype}']), table[f'out_{dtype}'])
    edges = table['bin_left_edges']
    assert_identical(prompt.discretize_state(edges), np.arange(256))  # an edge opens its bin
    assert_identical(prompt.discretize_state(np.nextafter(edges, -2)), np.arange(256) - 1)


@pytest.mark.parametrize('entry', PROMPTS, ids=lambda entry: entry['prompt'].strip() or 'empty')
def test_the_state_prompt_is_openpis(entry: dict[str, str]) -> None:
    state = golden.ARRAYS[entry['state']]
    assert prompt.state_prompt(entry['prompt'], state) == entry['string']
    recorder = Recorder()
    tokens = prompt.prompt_tokens('state', entry['prompt'], state, recorder)
    assert recorder.texts == [entry['string']]
    assert tokens == [recorder.bos_id, *ByteTokenizer().encode(entry['string'])]


def test_notes_stand_between_task_and_state_oldest_first() -> None:
    text = prompt.state_prompt('find_it', np.zeros(1), ['keys on table\n', 'cup in sink'])
    assert text == 'Task: find it, Memory: keys on table; cup in sink, State: 128;\nAction: '


def test_the_plain_prompt_encodes_the_newline_apart_as_openpi_does() -> None:
    entry = golden.CONTENT['prompt_without_state']
    recorder = Recorder()
    tokens = prompt.prompt_tokens('plain', entry['input'], np.zeros(8), recorder)
    assert recorder.texts == [text for text, _ in entry['encode_calls']]
    # openpi asks the tokenizer for BOS in the first call only.
    assert [with_bos for _, with_bos in entry['encode_calls']] == [True, False]
    assert tokens == [2, *ByteTokenizer().encode(''.join(recorder.texts))]


@pytest.mark.parametrize(
    ('instruction', 'expected'),
    [
        ('Pick up the CUP', 'Task: pick up the cup. Subtask: '),
        ('  fold_the\ntowel.  ', 'Task: fold the towel. Subtask: '),
        ('really?!', 'Task: really?. Subtask: '),  # one mark is dropped, not all
        ('wait...', 'Task: wait... Subtask: '),
        ('.', 'Task: . Subtask: '),
        ('', 'Task: . Subtask: '),
    ],
)
def test_the_subtask_prompt_is_oxygens(instruction: str, expected: str) -> None:
    assert prompt.subtask_prompt(instruction) == expected
    recorder = Recorder()
    tokens = prompt.prompt_tokens('subtask', instruction, np.zeros(8), recorder)
    assert (tokens[0], recorder.texts) == (recorder.bos_id, [expected])


@pytest.mark.parametrize('form', ['plain', 'subtask'])
def test_only_the_state_form_reads_the_state(form: str) -> None:
    tokenizer = ByteTokenizer()
    some = prompt.prompt_tokens(form, 'wave', np.zeros(8), tokenizer)
    assert some == prompt.prompt_tokens(form, 'wave', np.ones(8), tokenizer)
    assert prompt.prompt_tokens('state', 'wave', np.zeros(8), tokenizer) != (
        prompt.prompt_tokens('state', 'wave', np.ones(8), tokenizer)
    )


@pytest.mark.parametrize(
    ('form', 'text'),
    [
        ('state', 'Task: , State: 128 128;\nAction: '),
        ('plain', '\n'),
        ('subtask', 'Task: . Subtask: '),
    ],
)
def test_an_empty_instruction_still_gives_a_prompt(form: str, text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = prompt.prompt_tokens(form, ' \n', np.zeros(2), tokenizer)
    assert tokens == [tokenizer.bos_id, *tokenizer.encode(text)]


def test_an_unknown_prompt_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.prompt: expected one of .*, got 'chat'"):
        prompt.prompt_tokens('chat', 'wave', np.zeros(2), ByteTokenizer())


# ----------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize(
    'text', ['', 'pick up the cup', 'Falte das Handtuch – 折叠毛巾 🤖', 'a  b ']
)
def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(ids)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_special_ids_and_ids_beyond_the_vocabulary_give_no_text(tokenizer: Tokenizer) -> None:
    special = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size, 257151]
    assert tokenizer.decode([*special, *tokenizer.encode('cup'), *special]) == 'cup'
    assert tokenizer.stable_text([*special, *tokenizer.encode('cup'), *special]) == 'cup'


def test_the_special_ids_are_paligemmas(tokenizer: Tokenizer) -> None:
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (0, 1, 2)


def test_bytes_that_do_not_print_become_dots() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([3 + byte for byte in b'a\x00\x1b\n\xffb\xc3']) == 'a····b·'


@given(ids=st.lists(st.integers(0, 300), max_size=12))
def test_streamed_text_only_grows_and_ends_in_the_final_text(
    tokenizer: Tokenizer, ids: list[int]
) -> None:
    assert_grows(tokenizer, ids)


@given(text=st.text(st.sampled_from('aé€🤖 '), max_size=6))
def test_no_half_character_is_ever_streamed(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert_grows(tokenizer, ids)
    assert tokenizer.stable_text(ids) == text
    for count in range(len(ids)):
        assert text.startswith(tokenizer.stable_text(ids[:count]))


def assert_grows(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    texts = [tokenizer.stable_text(ids[:count]) for count in range(len(ids) + 1)]
    texts.append(tokenizer.decode(ids))
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter)


def test_a_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model: put PaliGemma's"):
        SentencePieceTokenizer(tmp_path / 'tokenizer.model')


@pytest.mark.parametrize('content', [b'', b'<!DOCTYPE html>'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip('sentencepiece')
    path = tmp_path / 'tokenizer.model'
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r'tokenizer\.model: expected a SentencePiece model'):
        SentencePieceTokenizer(path)


def test_a_tokenizer_without_special_tokens_is_refused(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip('sentencepiece')
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        vocab_size=50,
        hard_vocab_limit=False,
        minloglevel=2,
    )  # SentencePiece's own default has no padding token
    path = tmp_path / 'tokenizer.model'
    path.write_bytes(model.getvalue())
    with pytest.raises(ValueError, match=r'got ids 1, 2, -1'):
        SentencePieceTokenizer(path)


def test_byte_tokens_need_no_library() -> None:
    code = (
        "import sys; sys.modules['sentencepiece'] = None\n"
        'from oxygen_ros.model.prompt import ByteTokenizer\n'
        "print(ByteTokenizer().encode('a'))"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == '[100]'
