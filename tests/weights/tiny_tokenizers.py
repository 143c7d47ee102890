"""Small vocabularies, as tokenizer.json folders and as GGUF files."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from weights.gguf import Gguf
from weights.vocab import Vocab

SPACE = "\u2581"
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
          "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# What GPT-2's alphabet calls the 256 bytes, in the library's own words.
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def special(text: str, **options: Any) -> AddedToken:
    return AddedToken(text, normalized=False, special=True, **options)


def byte_level(merges: tuple[tuple[str, str], ...] = (("h", "e"), ("he", "l"), ("Ġ", "w"))) -> Tokenizer:
    """256 bytes, some merges, ChatML's control tokens, and the user-defined token <think>."""
    tokens = [*LETTERS, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({token: token_id for token_id, token in enumerate(tokens)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([*(special(text) for text in CHATML_TOKENS),
                          AddedToken("<think>", normalized=False, special=False)])
    return tokenizer


def sentencepiece(add_space_prefix: bool = True) -> Tokenizer:
    """SentencePiece's manner: spaces are letters, unknown characters are bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)),
             SPACE, "h", "i", "hi", f"{SPACE}hi", "é", SPACE * 2]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)},
                                     [("h", "i"), (SPACE, "hi"), (SPACE, SPACE)],
                                     byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_tokens([special(text) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def word_level() -> Tokenizer:
    """Token i reads wi, and there is no decoder: words joined by spaces."""
    words = ["<pad>", "<s>", "</s>", *(f"w{index}" for index in range(3, 20))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([special(text) for text in words[:3]])
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, **files: dict[str, Any]) -> Path:
    """`files`: JSON files beside tokenizer.json, by name without .json."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def load_folder(folder: Path, tokenizer: Tokenizer, **files: dict[str, Any]) -> Vocab:
    return Vocab.from_folder(write_folder(folder, tokenizer, **files))


def open_gguf(folder: Path, **fields: Any) -> Gguf:
    """A GGUF file without tensors. `fields` are keys of tokenizer.ggml, `chat_template` its own."""
    path = folder / "vocab.gguf"
    writer = GGUFWriter(path, "llama")
    for name, value in fields.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Gguf(path)


def load_gguf(folder: Path, **fields: Any) -> Vocab:
    return Vocab.from_gguf(open_gguf(folder, **fields))


def byte_level_fields(*merges: str, pre: str = "gpt-2", added: tuple[tuple[str, int], ...] = ()) -> dict[str, Any]:
    """Fields of a byte-level vocabulary: 256 letters, what `merges` make, then `added` tokens with their types."""
    merges = merges or ("h e",)
    tokens = [*LETTERS, *(merge.replace(" ", "") for merge in merges)]
    types = [1] * len(tokens) + [kind for _, kind in added]
    return {"model": "gpt2", "pre": pre, "tokens": [*tokens, *(text for text, _ in added)], "token_type": types,
            "merges": list(merges)}


def sentencepiece_fields(pieces: dict[str, float], **fields: Any) -> dict[str, Any]:
    """Fields of a SentencePiece vocabulary: <unk> <s> </s>, 256 bytes, then pieces with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {"model": "llama", "tokens": tokens, "scores": [0.0] * 259 + list(pieces.values()),
            "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
            "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **fields}
