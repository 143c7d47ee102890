"""Text out of tokens: any ids, any cuts, every kind of decoder."""
from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.weights.tiny_tokenizers import byte_level, load_folder, sentencepiece, word_level
from weights.vocab import Detokenizer, Vocab

KINDS = {"byte level": byte_level(), "sentencepiece": sentencepiece(), "no space prefix": sentencepiece(False),
         "words": word_level()}


@pytest.fixture(scope="module")
def vocabs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Vocab]:
    return {kind: load_folder(tmp_path_factory.mktemp("v"), tokenizer) for kind, tokenizer in KINDS.items()}


def ids_of(vocab: Vocab, text: bytes) -> list[int]:
    """One id for each byte."""
    by_bytes = {vocab.token_bytes(token_id): token_id for token_id in range(vocab.size)}
    return [by_bytes[bytes([byte])] for byte in text]


def pushed(vocab: Vocab, prompt: list[int], output: list[int], cuts: list[int], skip: bool) -> str:
    detokenizer = Detokenizer(vocab, prompt, skip)
    bounds = [0, *sorted(cut % (len(output) + 1) for cut in cuts), len(output)]
    texts = [detokenizer.push(output[start:end]) for start, end in zip(bounds, bounds[1:], strict=False)]
    return "".join(texts) + detokenizer.flush()


def continuation(before: str, whole: str, kept: str) -> str:
    """`whole` without `before`. Where the output completed the prompt's last character, without what precedes it."""
    return whole.removeprefix(before) if whole.startswith(before) else whole.removeprefix(kept)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans(), cuts=st.lists(st.integers(0, 99), max_size=6))
def test_pushes_are_the_decoding_of_the_whole_without_the_prompt(
        vocabs: dict[str, Vocab], kind: str, data: st.DataObject, skip: bool, cuts: list[int]) -> None:
    vocab, tokenizer = vocabs[kind], KINDS[kind]
    # Bytes that begin and continue characters are frequent, and ids beyond the vocabulary occur.
    often = st.sampled_from([token_id for token_id in range(vocab.size) if vocab.token_bytes(token_id) >= b"\x80"]
                            or [0])
    ids = st.lists(st.integers(0, vocab.size + 1) | often, max_size=12)
    prompt, output = data.draw(ids), data.draw(ids)
    before, whole = vocab.decode(prompt, skip), vocab.decode(prompt + output, skip)
    text = pushed(vocab, prompt, output, cuts, skip)
    assert text == continuation(before, whole, before.removesuffix("\ufffd"))
    text.encode()
    # The library itself says the same, but for byte tokens that are not UTF-8 (see Vocab.decode).
    if kind in ("byte level", "words") or "\ufffd" not in tokenizer.decode(prompt + output, skip_special_tokens=skip):
        assert whole == tokenizer.decode(prompt + output, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "no space prefix"])
@given(text=st.text(max_size=20), cuts=st.lists(st.integers(0, 99), max_size=6))
def test_any_text_survives_byte_by_byte(vocabs: dict[str, Vocab], kind: str, text: str, cuts: list[int]) -> None:
    vocab = vocabs[kind]
    prompt, output = ids_of(vocab, b"x"), ids_of(vocab, text.encode())
    assert pushed(vocab, prompt, output, cuts, True) == text


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("skip", [True, False])
def test_a_prompt_that_ends_inside_a_character(vocabs: dict[str, Vocab], kind: str, skip: bool) -> None:
    vocab = vocabs[kind]
    euro = ids_of(vocab, "€".encode())
    for at in (1, 2):
        prompt = ids_of(vocab, b"hi ") + euro[:at]
        assert pushed(vocab, prompt, [*euro[at:], *ids_of(vocab, b"!")], [], skip) == "€!"
        assert pushed(vocab, prompt, ids_of(vocab, b"a!"), [], skip) == "a!", "the prompt's half character is not ours"
        assert pushed(vocab, prompt, [], [], skip) == ""
    # An incomplete character of four bytes, continued but not completed.
    smile = ids_of(vocab, "\N{GRINNING FACE}".encode())
    assert pushed(vocab, smile[:2], smile[2:3], [], skip) == ""
    assert pushed(vocab, smile[:2], [smile[2], *ids_of(vocab, b"ab")], [], skip) == "ab"


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_control_tokens_inside_a_prompts_character(vocabs: dict[str, Vocab], kind: str) -> None:
    vocab = vocabs[kind]
    euro, special = ids_of(vocab, "€".encode()), min(vocab.special_ids)
    assert pushed(vocab, [euro[0], special], euro[1:], [], True) == "€", "left out, it does not part the bytes"
    assert pushed(vocab, [euro[0], special], ids_of(vocab, b"a"), [], False) == "a"


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_an_output_cut_inside_a_character_ends_in_one_replacement(vocabs: dict[str, Vocab], kind: str,
                                                                  length: int) -> None:
    vocab = vocabs[kind]
    detokenizer = Detokenizer(vocab, (), True)
    tail = "\N{GRINNING FACE}".encode()[:length]
    assert [detokenizer.push([token_id]) for token_id in ids_of(vocab, b"a" + tail)] == ["a"] + [""] * length
    assert detokenizer.flush() == "\ufffd"
    assert vocab.token_bytes(ids_of(vocab, tail)[0]) == tail[:1]
    assert vocab.token_text(ids_of(vocab, tail)[0]) == "\ufffd"


def test_spaces_between_prompt_and_output(vocabs: dict[str, Vocab]) -> None:
    vocab = vocabs["sentencepiece"]
    word = vocab.encode("hi")
    assert vocab.decode(word) == "hi"
    assert pushed(vocab, word, word, [], True) == " hi"
    assert pushed(vocab, [], word, [], True) == "hi", "the space prefix of a text's first word is no text"
    assert pushed(vocab, [1], word, [], True) == "hi", "nor after a BOS that is not shown"
    assert pushed(vocab, [1], word, [], False) == " hi"
    bare = vocabs["no space prefix"]
    assert pushed(bare, [], bare.encode(" hi"), [], True) == " hi"
    words = vocabs["words"]
    assert pushed(words, [5], [6, 7], [1], True) == " w6 w7"
    assert pushed(words, [], [1, 6, 7], [1, 2], True) == "w6 w7"


def test_control_tokens_are_shown_or_left_out(vocabs: dict[str, Vocab]) -> None:
    vocab = vocabs["byte level"]
    ids = vocab.encode("he<|im_end|> <think>llo")
    assert pushed(vocab, [], ids, [1, 2, 3], True) == "he <think>llo"
    assert pushed(vocab, [], ids, [1, 2, 3], False) == "he<|im_end|> <think>llo"
    end = vocab.special_id("<|im_end|>")
    assert end is not None
    assert vocab.token_text(end) == "<|im_end|>"


def test_every_byte_has_its_letter(vocabs: dict[str, Vocab]) -> None:
    vocab = vocabs["byte level"]
    assert sorted(vocab.token_bytes(token_id) for token_id in range(256)) == [bytes([byte]) for byte in range(256)]


def test_an_added_token_with_other_letters_is_as_written(tmp_path: Path) -> None:
    tokenizer: Tokenizer = byte_level()
    tokenizer.add_tokens(["<\uff5cbegin\u2581of\u2581text\uff5c>"])
    vocab = load_folder(tmp_path, tokenizer)
    ids = vocab.encode("a<\uff5cbegin\u2581of\u2581text\uff5c>")
    assert vocab.decode(ids) == tokenizer.decode(ids) == "a<\uff5cbegin\u2581of\u2581text\uff5c>"


def test_ids_without_a_token_have_no_text(vocabs: dict[str, Vocab]) -> None:
    for vocab in vocabs.values():
        assert vocab.token_bytes(vocab.size) == b""
        assert vocab.token_text(vocab.size + 1000) == ""
