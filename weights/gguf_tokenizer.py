"""A `tokenizers.Tokenizer` from the vocabulary that a GGUF file carries.

Source: the GGUF specification (keys `tokenizer.ggml.*`); pre-tokenizer expressions as published with the models.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from weights.gguf import Gguf

# tokenizer.ggml.token_type; the others are 5 unused and 6 byte.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

_SPACE = "\u2581"                           # "▁", SentencePiece's space

# Words as Llama 3 and Qwen 2 cut them; they differ in how many digits go together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gguf_tokenizer(file: Gguf) -> Tokenizer:
    """The tokenizer of a GGUF file. Control and user-defined tokens are recognised in text, each as one id.

    Raises: ValueError for a missing or malformed key, an unknown tokenizer model or pre-tokenizer.
    """
    tokens = file.get_strings("tokenizer.ggml.tokens") or []
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocab[token] != token_id)
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens has {twice!r} twice")
    types = _column(file, "token_type", len(tokens)) or [NORMAL] * len(tokens)

    model = file.require("tokenizer.ggml.model", str)
    if model == "gpt2":
        tokenizer = _byte_level_bpe(file, vocab)
    elif model == "llama":
        tokenizer = _sentencepiece_bpe(file, vocab, tokens, types)
    else:
        raise ValueError(f"{file.path}: tokenizer.ggml.model {model!r} is not supported (gpt2 and llama are)")

    # The ids that the file gives a role are control tokens even where their type does not say so.
    control_ids = {named_id(file, name) for name in ("bos", "eos", "eot", "eom")}
    tokenizer.add_tokens([
        AddedToken(token, normalized=False, special=kind != USER_DEFINED or token_id in control_ids)
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) or token_id in control_ids])
    return tokenizer


def named_id(file: Gguf, name: str) -> int | None:
    """The id under `tokenizer.ggml.{name}_token_id`, None where the file has none."""
    return file.get(f"tokenizer.ggml.{name}_token_id", int)


def adds_bos(file: Gguf) -> bool:
    """Whether a prompt begins with BOS. Where the file is silent, SentencePiece models and Llama 3 have one."""
    stated = file.get("tokenizer.ggml.add_bos_token", bool)
    if stated is not None:
        return stated
    return file.get("tokenizer.ggml.model", str) == "llama" or file.get("tokenizer.ggml.pre", str) in _LLAMA3


def _byte_level_bpe(file: Gguf, vocab: dict[str, int]) -> Tokenizer:
    """BPE over bytes written as letters, as GPT-2 has it, with ranked merges."""
    name = file.get("tokenizer.ggml.pre", str)
    if name not in _PRE_TOKENIZERS:
        raise ValueError(f"{file.path}: tokenizer.ggml.pre {name!r} is not a known pre-tokenizer "
                         f"({', '.join(_PRE_TOKENIZERS)} are)")
    ranked = file.get_strings("tokenizer.ggml.merges")
    if ranked is None:
        raise ValueError(f"{file.path}: metadata key tokenizer.ggml.merges is missing")
    merges = []
    for merge in ranked:
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    tokenizer = Tokenizer(_bpe(file, vocab, merges, ignore_merges=name in _LLAMA3))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[name]())
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(file: Gguf, vocab: dict[str, int], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """BPE over characters that joins the pair whose whole has the highest score; unknown characters become bytes."""
    scores = _column(file, "scores", len(tokens))
    if scores is None:
        raise ValueError(f"{file.path}: metadata key tokenizer.ggml.scores is missing")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    unknown_id = named_id(file, "unknown")
    if unknown_id is not None and 0 <= unknown_id < len(tokens):
        unknown = tokens[unknown_id]
    tokenizer = Tokenizer(_bpe(file, vocab, _merges_by_score(tokens, types, scores), byte_fallback=True,
                               fuse_unk=True, unk_token=unknown))
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", bool) is False:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges_by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens to a third, best score first; for one whole the longer left part first.

    Only normal tokens take part, so that no text can merge into a control token.
    """
    normal_ids = [token_id for token_id, kind in enumerate(types) if kind == NORMAL]
    normal = {tokens[token_id] for token_id in normal_ids}
    merges = []
    for token_id in sorted(normal_ids, key=lambda token_id: -scores[token_id]):
        whole = tokens[token_id]
        for cut in range(len(whole) - 1, 0, -1):
            left = whole[:cut]
            if left in normal:              # asked first, as most cuts fail here: Gemma's vocabulary has 1.6 million
                right = whole[cut:]
                if right in normal:
                    merges.append((left, right))
    return merges


def _bpe(file: Gguf, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab, merges, **options)
    except Exception as error:              # the library raises bare Exception
        raise ValueError(f"{file.path}: tokenizer.ggml.merges: {error}") from None


def _column(file: Gguf, name: str, length: int) -> list[Any] | None:
    """Numbers, one a token; None where the file has none."""
    key = f"tokenizer.ggml.{name}"
    numbers = file.get_numbers(key)
    if numbers is None:
        return None
    if len(numbers) != length:
        raise ValueError(f"{file.path}: {key} has {len(numbers)} entries, the vocabulary {length}")
    column: list[Any] = numbers.tolist()
    return column


def _split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _gpt2() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _smollm() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


def _llama3() -> list[pre_tokenizers.PreTokenizer]:
    return _split(_WORDS.format(digits=r"\p{N}{1,3}"))


def _qwen2() -> list[pre_tokenizers.PreTokenizer]:
    return _split(_WORDS.format(digits=r"\p{N}"))


_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_PRE_TOKENIZERS = {"gpt2": _gpt2, "gpt-2": _gpt2, "smollm": _smollm, "qwen2": _qwen2} | dict.fromkeys(_LLAMA3, _llama3)
