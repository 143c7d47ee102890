"""Encoding, stop ids, defaults, and tokenizer.json folders."""
from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, processors

from tests.weights.tiny_tokenizers import (
    CHATML,
    byte_level,
    load_folder,
    sentencepiece,
    special,
    word_level,
    write_folder,
)
from weights.hub import resolve
from weights.load import open_model
from weights.vocab import Vocab

GOLDEN = Path(__file__).parents[1] / "golden"


def bos_first(tokenizer: Tokenizer, text: str) -> Any:
    return processors.TemplateProcessing(single=f"{text} $A </s>", special_tokens=[
        (text, tokenizer.token_to_id(text)), ("</s>", tokenizer.token_to_id("</s>"))])


def check_golden(vocab: Vocab, name: str) -> None:
    golden = json.loads((GOLDEN / "tokenizer" / f"{name}.json").read_text(encoding="utf-8"))
    assert len(golden["encode"]) >= 125
    for entry in golden["encode"]:
        assert vocab.encode(entry["text"], add_special=False) == entry["ids"], entry["text"]
        assert vocab.decode(entry["ids"]) == entry["text"]
    for entry in golden["chat"]:
        assert vocab.render_chat(entry["messages"], entry["add_generation_prompt"]) == entry["rendered"]
        assert vocab.encode_chat(entry["messages"], entry["add_generation_prompt"]) == entry["ids"]


@pytest.mark.real_model
def test_smollm2_encodes_as_transformers_and_llama_cpp() -> None:
    vocab = Vocab.load(open_model(resolve("smollm2", print).path))
    check_golden(vocab, "smollm2")
    assert (vocab.size, vocab.bos_id, vocab.prefix_ids) == (49152, 1, ())
    assert vocab.stop_ids == {2}


@pytest.mark.slow
@pytest.mark.real_model
def test_gemma3_encodes_as_transformers_and_llama_cpp() -> None:
    not_cached = "gemma3 is not in the cache: python -m tools.chat --model gemma3 fetches it"
    path = resolve("gemma3", lambda line: pytest.skip(not_cached)).path
    vocab = Vocab.load(open_model(path))
    check_golden(vocab, "gemma3")
    assert (vocab.size, vocab.bos_id, vocab.prefix_ids) == (262144, 2, (2,))
    assert vocab.stop_ids == {1, 106}, "<end_of_turn> is known by its name"
    assert vocab.encode("Hi") == [2, *vocab.encode("Hi", add_special=False)]
    with pytest.raises(ValueError, match="has no chat template; use completions"):
        vocab.encode_chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_word_level_folders_of_the_golden_models(name: str) -> None:
    vocab = Vocab.from_folder(GOLDEN / "models" / name)
    assert vocab.encode("w5 w6") == [*vocab.prefix_ids, 5, 6]
    assert vocab.decode([5, 6]) == "w5 w6"
    assert vocab.stop_ids
    assert not vocab.has_chat_template


# Raw prompts


def test_a_raw_prompt_may_spell_control_tokens(tmp_path: Path) -> None:
    vocab = load_folder(tmp_path, byte_level())
    end = vocab.special_id("<|im_end|>")
    assert end is not None
    assert vocab.encode("a<|im_end|>b").count(end) == 1
    assert vocab.special_id("<think>") is None, "it is an added token but no control token"
    assert vocab.special_id("<|im_end|> ") is None


def test_one_bos_whether_or_not_the_text_spells_it(tmp_path: Path) -> None:
    tokenizer = sentencepiece()
    tokenizer.post_processor = bos_first(tokenizer, "<s>")
    vocab = load_folder(tmp_path, tokenizer, tokenizer_config={"bos_token": "<s>"})
    assert (vocab.bos_id, vocab.prefix_ids) == (1, (1,)), "</s> at the end is left out: a prompt is to be continued"
    assert vocab.encode("hi") == [1, *vocab.encode("hi", add_special=False)]
    assert vocab.encode("<s>hi") == vocab.encode("hi")
    assert vocab.encode("") == [1]


@pytest.mark.parametrize(("add_bos_token", "prefix"), [(True, (1,)), (False, ()), (None, ())])
def test_add_bos_token_of_the_settings(tmp_path: Path, add_bos_token: bool | None, prefix: tuple[int, ...]) -> None:
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "add_bos_token": add_bos_token}
    assert load_folder(tmp_path, sentencepiece(), tokenizer_config=settings).prefix_ids == prefix


def test_add_bos_token_false_overrules_the_post_processor(tmp_path: Path) -> None:
    tokenizer = sentencepiece()
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), bos_first(tokenizer, "<s>")])
    assert load_folder(tmp_path / "a", tokenizer, tokenizer_config={"bos_token": "<s>"}).prefix_ids == (1,)
    off = {"bos_token": "<s>", "add_bos_token": False}
    assert load_folder(tmp_path / "b", tokenizer, tokenizer_config=off).prefix_ids == ()


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\ude00\ud83d"])
def test_lone_surrogates_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"prompt: character \d is the lone surrogate U\+D"):
        load_folder(tmp_path, byte_level()).encode(text)


def test_characters_beyond_the_first_plane_are_encoded(tmp_path: Path) -> None:
    vocab = load_folder(tmp_path, byte_level())
    assert vocab.decode(vocab.encode("\N{GRINNING FACE}\0")) == "\N{GRINNING FACE}\0"


def test_text_without_ids_is_an_error_of_the_caller(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(word_level().to_str().replace('"unk_token":"<unk>"', '"unk_token":"nowhere"'))
    vocab = load_folder(tmp_path, tokenizer)
    with pytest.raises(ValueError, match="the tokenizer cannot encode the text"):
        vocab.encode("unheard of")


def test_a_prompt_is_never_cut_or_filled(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    assert len(load_folder(tmp_path, tokenizer).encode("xyzxyz")) == 6


def test_threads_may_encode_at_the_same_time(tmp_path: Path) -> None:
    vocab = load_folder(tmp_path, byte_level(), tokenizer_config={"chat_template": CHATML})
    texts = [f"hello world {index} <|im_end|>" * 20 for index in range(40)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    alone = [(vocab.encode(text), vocab.encode_chat(chat)) for text, chat in zip(texts, chats, strict=True)]
    fresh = Vocab.from_folder(tmp_path)         # its lazy parts are made by racing threads
    with ThreadPoolExecutor(8) as pool:
        encoded, chatted = pool.map(fresh.encode, texts), pool.map(fresh.encode_chat, chats)
        assert list(zip(encoded, chatted, strict=True)) == alone


# Folders


def test_stop_ids_are_the_union_of_all_files(tmp_path: Path) -> None:
    vocab = load_folder(tmp_path, word_level(), tokenizer_config={"eos_token": "</s>", "eot_token": "w5"},
                        config={"eos_token_id": 3, "text_config": {"eos_token_id": [4]}},
                        generation_config={"eos_token_id": [6, 7]})
    assert vocab.stop_ids == {2, 3, 4, 5, 6, 7}


@pytest.mark.parametrize("bad", ["</s>", -1, [1, "2"], True, {"a": 1}])
def test_a_bad_stop_id_is_named(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id: .* is not a token id"):
        load_folder(tmp_path, word_level(), generation_config={"eos_token_id": bad})


def test_sampling_defaults(tmp_path: Path) -> None:
    advised = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": None, "repetition_penalty": 1.1,
               "max_length": 20, "max_new_tokens": 300, "do_sample": True}
    assert load_folder(tmp_path, word_level(), generation_config=advised).defaults == {
        "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 300}
    greedy = load_folder(tmp_path, word_level(), generation_config=advised | {"do_sample": False})
    assert greedy.defaults == {"repetition_penalty": 1.1, "max_tokens": 300}
    for name, bad in (("temperature", "hot"), ("top_k", 1.5), ("top_p", True), ("max_new_tokens", 3.0)):
        with pytest.raises(ValueError, match=f"generation_config.json: {name} .* is not a number"):
            load_folder(tmp_path, word_level(), generation_config={name: bad})


def test_the_chat_template_is_found(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    folder = write_folder(tmp_path, byte_level(), tokenizer_config={"chat_template": "from settings"})
    assert Vocab.from_folder(folder).render_chat(chat) == "from settings"
    write_folder(tmp_path, byte_level(), tokenizer_config={"chat_template": [
        {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "by name"}]})
    assert Vocab.from_folder(folder).render_chat(chat) == "by name"
    (folder / "chat_template.jinja").write_text("from its own file {{ bos_token }}", encoding="utf-8")
    assert Vocab.from_folder(folder).render_chat(chat) == "from its own file "


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        Vocab.from_folder(tmp_path)
    folder = write_folder(tmp_path, word_level(), tokenizer_config={"chat_template": 5})
    with pytest.raises(ValueError, match="tokenizer_config.json: chat_template is not a template"):
        Vocab.from_folder(folder)
    (folder / "tokenizer.json").write_text('{"version": 1', encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer.json: cannot be read"):
        Vocab.from_folder(folder)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Metaspace(), decoders.Strip(" ", 1, 0),
                                     decoders.Sequence([decoders.Replace("ab", "c"), decoders.Fuse()])])
def test_an_unknown_decoder_is_refused(tmp_path: Path, decoder: Any) -> None:
    tokenizer = word_level()
    tokenizer.decoder = decoder
    with pytest.raises(ValueError, match="decoder .* is not supported"):
        load_folder(tmp_path, tokenizer)


def test_lstrip_control_tokens_keep_their_one_id(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([special("<|sep|>", lstrip=True, rstrip=True)])
    vocab = load_folder(tmp_path, tokenizer)
    assert vocab.encode("a  <|sep|>  b") == vocab.encode("a<|sep|>b")


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(tmp_path: Path) -> None:
    """FAULTS A14: 16 MiB of text took a tokenizer 19 seconds and gigabytes."""
    vocab = load_folder(tmp_path, byte_level())
    assert len(vocab.encode("a" * 64, max_tokens=64)) == 64
    with pytest.raises(ValueError, match="16777216 characters, far more than the 64 tokens"):
        vocab.encode("a" * (16 << 20), max_tokens=64)
    words = load_folder(tmp_path / "words", word_level())
    assert words.encode("w5" + " " * 5000, max_tokens=1) == [5], "spaces between words are no tokens"
