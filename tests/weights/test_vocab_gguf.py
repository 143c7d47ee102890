"""Tokenizers built from GGUF metadata."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.weights.tiny_tokenizers import CHATML, SPACE, byte_level_fields, load_gguf, sentencepiece_fields
from weights.vocab import Vocab

DIGITS = ("1 2", "12 3", "123 4")
PIECES = {SPACE: -1.0, "h": -2.0, "i": -3.0, "hi": -4.0, f"{SPACE}hi": -5.0, "é": -6.0}


def texts(vocab: Vocab, text: str) -> list[str]:
    return [vocab.token_text(token_id) for token_id in vocab.encode(text, add_special=False)]


# Byte level


@pytest.mark.parametrize(("pre", "pieces"), [
    ("gpt2", ["1234"]), ("gpt-2", ["1234"]), ("smollm", ["1", "2", "3", "4"]), ("qwen2", ["1", "2", "3", "4"]),
    ("llama-bpe", ["123", "4"]), ("llama3", ["123", "4"])])
def test_pre_tokenizers_cut_digits_their_way(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    assert texts(load_gguf(tmp_path, **byte_level_fields(*DIGITS, pre=pre)), "1234") == pieces


@pytest.mark.parametrize(("pre", "pieces"), [
    ("gpt2", ["a", ".", "b", "'", "S", "\n", "\n"]), ("smollm", ["a", ".", "b", "'", "S", "\n", "\n"]),
    ("llama-bpe", ["a", ".b", "'S", "\n\n"]), ("qwen2", ["a", ".b", "'S", "\n\n"])])
def test_pre_tokenizers_cut_words_their_way(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    # Merges exist for everything: what stays apart was cut before. gpt2 leaves the last line break to what follows.
    fields = byte_level_fields(". b", "' S", "Ċ Ċ", "a .", "b '", pre=pre)
    assert texts(load_gguf(tmp_path, **fields), "a.b'S\n\nx")[:-1] == pieces


def test_llama3_takes_a_whole_word_before_merging(tmp_path: Path) -> None:
    fields = byte_level_fields("a b", pre="llama-bpe")
    fields["tokens"].append("abc")              # no merge leads to it
    fields["token_type"].append(1)
    assert texts(load_gguf(tmp_path, **fields), "abc") == ["abc"]
    assert texts(load_gguf(tmp_path, **fields | {"pre": "qwen2"}), "abc") == ["ab", "c"]


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    vocab = load_gguf(tmp_path, **byte_level_fields(pre="qwen2"))
    assert vocab.decode(vocab.encode("e\u0301")) == "\u00e9"


@pytest.mark.parametrize("pre", ["deepseek-llm", "default", None])
def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path, pre: str | None) -> None:
    fields = byte_level_fields()
    if pre is None:
        del fields["pre"]
    else:
        fields["pre"] = pre
    with pytest.raises(ValueError, match=rf"vocab.gguf: tokenizer.ggml.pre {pre!r} is not a known pre-tokenizer"):
        load_gguf(tmp_path, **fields)


def test_control_and_user_defined_tokens_are_one_id(tmp_path: Path) -> None:
    fields = byte_level_fields("t h", pre="smollm", added=(("<|im_start|>", 3), ("<think>", 4), ("</think>", 4)))
    vocab = load_gguf(tmp_path, **fields)
    assert vocab.encode("<think>x</think>") == [vocab.size - 2, *vocab.encode("x"), vocab.size - 1]
    assert vocab.encode("<|im_start|>") == [vocab.size - 3]
    assert vocab.special_ids == {vocab.size - 3}
    assert vocab.decode(vocab.encode("<|im_start|><think>"), skip_special_tokens=True) == "<think>"


def test_the_named_ids_are_control_tokens_whatever_their_type(tmp_path: Path) -> None:
    fields = byte_level_fields(added=(("<eos>", 1), ("<eot>", 4)))
    vocab = load_gguf(tmp_path, **fields, eos_token_id=257, eot_token_id=258)
    assert vocab.stop_ids == vocab.special_ids == {257, 258}
    assert vocab.encode("<eos><eot>") == [257, 258]


# Stop ids, BOS, template


def test_stop_ids(tmp_path: Path) -> None:
    added = (("<|endoftext|>", 3), ("<|im_end|>", 3), ("<|eom_id|>", 3), ("<|end|>", 1))
    fields = byte_level_fields(added=added)
    assert load_gguf(tmp_path, **fields, eos_token_id=257).stop_ids == {257, 258}, "an end of turn is known by name"
    assert load_gguf(tmp_path, **fields, eos_token_id=257, eot_token_id=259).stop_ids == {257, 259}
    assert load_gguf(tmp_path, **fields, eom_token_id=259).stop_ids == {258, 259}


@pytest.mark.parametrize(("fields", "prefix"), [
    (byte_level_fields(added=(("<s>", 3),)), ()),
    (byte_level_fields(added=(("<s>", 3),)) | {"add_bos_token": True}, (257,)),
    (byte_level_fields(added=(("<s>", 3),), pre="llama-bpe"), (257,)),
    (byte_level_fields(added=(("<s>", 3),), pre="llama-bpe") | {"add_bos_token": False}, ())])
def test_bos(tmp_path: Path, fields: dict[str, Any], prefix: tuple[int, ...]) -> None:
    vocab = load_gguf(tmp_path, **fields, bos_token_id=257)
    assert (vocab.bos_id, vocab.prefix_ids) == (257, prefix)
    assert load_gguf(tmp_path, **fields).prefix_ids == (), "no BOS is known"


def test_chat_template_of_the_metadata(tmp_path: Path) -> None:
    fields = byte_level_fields(added=(("<s>", 3), ("<|im_start|>", 3), ("<|im_end|>", 3)))
    vocab = load_gguf(tmp_path, **fields, bos_token_id=257, add_bos_token=True,
                      chat_template="{{ bos_token }}" + CHATML)
    chat = [{"role": "user", "content": "x"}]
    assert vocab.render_chat(chat).startswith("<s><|im_start|>user\nx<|im_end|>")
    assert vocab.encode_chat(chat) == vocab.encode(vocab.render_chat(chat))
    assert vocab.encode_chat(chat).count(257) == 1


# SentencePiece


def test_sentencepiece_space_prefix(tmp_path: Path) -> None:
    vocab = load_gguf(tmp_path, **sentencepiece_fields(PIECES))
    hi = vocab.encode("hi", add_special=False)
    assert [vocab.token_text(token_id) for token_id in hi] == [" hi"]
    assert vocab.encode("hi") == [1, *hi]
    assert vocab.encode("<s>hi") == [1, *hi]
    assert vocab.decode(hi) == "hi"
    bare = load_gguf(tmp_path, **sentencepiece_fields(PIECES, add_space_prefix=False, add_bos_token=False))
    assert texts(bare, "hi hi") == ["hi", " hi"]
    assert bare.encode("hi") == bare.encode("hi", add_special=False)


def test_sentencepiece_bytes_for_unknown_characters(tmp_path: Path) -> None:
    vocab = load_gguf(tmp_path, **sentencepiece_fields(PIECES, add_space_prefix=False))
    assert vocab.encode("é€", add_special=False) == [264, *(3 + byte for byte in "€".encode())]
    assert vocab.decode(vocab.encode("hi €\n"), skip_special_tokens=True) == "hi €\n"


def test_user_defined_pieces_with_spaces(tmp_path: Path) -> None:
    fields = sentencepiece_fields(PIECES, add_space_prefix=False)
    fields = {**fields, "tokens": [*fields["tokens"], "  ", "\n\n"], "scores": [*fields["scores"], -1000.0, -1000.0],
              "token_type": [*fields["token_type"], 4, 4]}
    vocab = load_gguf(tmp_path, **fields)
    assert texts(vocab, "hi  hi\n\nhi") == ["hi", "  ", "hi", "\n\n", "hi"]


def merged_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule, written plainly: join the best-scored neighbours, leftmost first, until none is left."""
    pieces = list(text)
    while True:
        joins = [(-scores[left + right], at) for at, (left, right) in enumerate(zip(pieces, pieces[1:], strict=False))
                 if left + right in scores]
        if not joins:
            return pieces
        at = min(joins)[1]
        pieces[at:at + 2] = [pieces[at] + pieces[at + 1]]


SCORES = {piece: -float(rank) for rank, piece in enumerate(
    ["a", "b", "c", "ab", "abc", "bc", "ca", "abca", "cab", "bcab", "aa", "aab", "bb", "abb", "cc"])}


@pytest.fixture(scope="module")
def abc(tmp_path_factory: pytest.TempPathFactory) -> Vocab:
    return load_gguf(tmp_path_factory.mktemp("abc"), **sentencepiece_fields(SCORES, add_space_prefix=False))


@given(text=st.text("abc", max_size=16))
def test_sentencepiece_merges_by_score(abc: Vocab, text: str) -> None:
    assert texts(abc, text) == merged_by_score(text, SCORES)


def test_no_text_merges_into_a_control_token(tmp_path: Path) -> None:
    fields = sentencepiece_fields({"<": -1.0, "s": -2.0, ">": -3.0, "<s": -4.0, "x": -5.0}, add_space_prefix=False,
                                  chat_template="{{ messages[0].content }}", add_bos_token=False)
    vocab = load_gguf(tmp_path, **fields)
    ids = vocab.encode_chat([{"role": "user", "content": "x<s>x"}])
    assert [vocab.token_text(token_id) for token_id in ids] == ["x", "<s", ">", "x"]
    assert 1 not in ids


# Malformed metadata


def changed(fields: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**fields, **changes}.items() if value is not None}


@pytest.mark.parametrize(("changes", "message"), [
    ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
    ({"model": None}, "tokenizer.ggml.model is missing"),
    ({"scores": None}, "tokenizer.ggml.scores is missing"),
    ({"scores": [0.5]}, "tokenizer.ggml.scores has 1 entries, the vocabulary 265"),
    ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries, the vocabulary 265"),
    ({"tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens has 'a' twice"),
    ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is not an array of strings"),
    ({"bos_token_id": 265}, "tokenizer.ggml.bos_token_id 265 is not in the vocabulary"),
    ({"eos_token_id": "2"}, "tokenizer.ggml.eos_token_id is not a single int"),
    ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is not a single bool"),
    ({"chat_template": "{% if %}"}, "the chat template does not compile"),
])
def test_malformed_sentencepiece_metadata(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_gguf(tmp_path, **changed(sentencepiece_fields(PIECES), **changes))
    assert "vocab.gguf" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("merge", ["ab", "a bc", "", " a", "a ", "zz zz"])
def test_malformed_merges(tmp_path: Path, merge: str) -> None:
    with pytest.raises(ValueError, match=r"vocab.gguf: .*merges"):
        load_gguf(tmp_path, **byte_level_fields() | {"merges": ["h e", merge]})


def test_missing_merges(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer.ggml.merges is missing"):
        load_gguf(tmp_path, **changed(byte_level_fields(), merges=None))


def test_a_file_without_a_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"vocab.gguf: .*tokenizer.ggml"):
        load_gguf(tmp_path)
