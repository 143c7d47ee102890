"""Text to token ids and back: the tokenizer of a model, its chat prompts, and text out of generated tokens."""
from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from weights.chat_template import ChatTemplate, check_messages, map_strings, require_unicode
from weights.files import read_json
from weights.gguf import Gguf
from weights.gguf_tokenizer import adds_bos, gguf_tokenizer, named_id
from weights.load import ModelFile
from weights.token_bytes import TokenBytes, TokenDecoder

# Control tokens that end a turn.
# NOTE: many GGUF converters leave eot_token_id out; a chat model from such a file would never stop.
END_OF_TURN_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")

# What generation_config.json may advise, and what it is called here. True: only for sampling, so not for a model that
# asks for greedy decoding.
_SAMPLING_DEFAULTS = {
    "temperature": ("temperature", True), "top_p": ("top_p", True), "top_k": ("top_k", True), "min_p": ("min_p", True),
    "repetition_penalty": ("repetition_penalty", False), "max_new_tokens": ("max_tokens", False)}
_INTEGER_DEFAULTS = ("top_k", "max_new_tokens")

_NOT_SPECIAL = 0                            # what `_special_finder` says of everything but control tokens
_FIRST_PLACEHOLDER = 0xF0000                # Supplementary Private Use Area-A: characters without a meaning


class Vocab:
    """A model's vocabulary. Methods may be called from any thread, at the same time.

    size: number of token ids.
    roles: the texts of its bos_token, eos_token and the like, of those that it has.
    bos_id: beginning of text, None where the model has none.
    prefix_ids: what an encoded prompt begins with, usually (bos_id,) or nothing.
    stop_ids: ids that end a sequence.
    special_ids: control tokens: recognised in raw prompts, left out of answers.
    defaults: sampling parameters that the model's authors advise.
    """

    def __init__(self, tokenizer: Tokenizer, *, origin: str, roles: Mapping[str, str], prefix_ids: Sequence[int] = (),
                 stop_ids: Iterable[int] = (), chat_template: str | None = None,
                 defaults: Mapping[str, float] | None = None) -> None:
        """`origin` names the files in errors of loading; `roles` has the texts of bos_token, eos_token and the like.

        Raises: ValueError for a chat template or decoder that cannot be used.
        """
        # NOTE: a tokenizer.json may ask to cut or fill texts to a length; a prompt is never cut unasked.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._added = dict(sorted(tokenizer.get_added_tokens_decoder().items()))
        self._special_id_of = {token.content: token_id for token_id, token in self._added.items() if token.special}
        self._unknown_id = _token_id(tokenizer, roles.get("unk_token"))
        self.size = max(tokenizer.get_vocab_size(), *(token_id + 1 for token_id in self._added), 0)
        self.roles = dict(roles)
        self.bos_id = _token_id(tokenizer, roles.get("bos_token"))
        self.prefix_ids = tuple(prefix_ids)
        self.stop_ids = frozenset(stop_ids)
        self.special_ids = frozenset(self._special_id_of.values())
        self.defaults = dict(defaults or {})
        self._template = None if chat_template is None else ChatTemplate(chat_template, origin, roles)
        decoder = tokenizer.decoder
        self._decoder = TokenDecoder(None if decoder is None else json.loads(decoder.__getstate__()), origin)
        self._bytes = TokenBytes(self._bytes_of)
        self._bytes_without_special = TokenBytes(
            lambda token_id: b"" if token_id in self.special_ids else self._bytes[token_id])

    @staticmethod
    def load(model: ModelFile) -> Vocab:
        """The vocabulary of an opened model. Raises: ValueError naming file and cause."""
        return Vocab.from_gguf(model.source) if isinstance(model.source, Gguf) else Vocab.from_folder(model.path)

    @staticmethod
    def from_gguf(file: Gguf) -> Vocab:
        """From a GGUF file's metadata."""
        return _from_gguf(file)

    @staticmethod
    def from_folder(folder: Path) -> Vocab:
        """From a folder in Hugging Face layout, of which tokenizer.json must be there."""
        return _from_folder(folder)

    # Encoding

    def encode(self, text: str, add_special: bool = True, max_tokens: int | None = None) -> list[int]:
        """A raw prompt. Control tokens that it spells are control tokens, as in transformers and vLLM.

        add_special: begin with `prefix_ids`, unless the text spells them itself.
        max_tokens: refuse a text that must have more, before time and memory go into it.

        Raises: ValueError for text that is not Unicode, too long, or that the tokenizer has no ids for.
        """
        self._check_length(text, max_tokens)
        ids = self._encode(require_unicode(text, "prompt"), self._tokenizer)
        return self._with_prefix(ids) if add_special else ids

    def encode_chat(self, messages: object, add_generation_prompt: bool = True, max_tokens: int | None = None,
                    continue_final_message: bool = False, kwargs: Mapping[str, Any] | None = None,
                    tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """Messages as OpenAI's API has them, as one prompt. It has exactly one BOS if the model begins texts with one.

        Control tokens come from the template alone: what a message, a tool or one of `kwargs` spells stays text.
        continue_final_message: the prompt ends with the last message's content, as it is: a template may trim it
        elsewhere, not here.
        kwargs: what else the template is given. tools: as OpenAI's API has them.

        Raises: ValueError naming the message's field, with the template's own message, or if there is no template.
        """
        rendered, hidden = self._render(messages, add_generation_prompt, continue_final_message, kwargs or {}, tools)
        self._check_length(rendered, max_tokens)
        if not hidden:
            return self._with_prefix(self._encode(rendered, self._tokenizer))
        ids: list[int] = []
        for piece, special_id in self._split_at_special(rendered):
            ids += [special_id] if special_id is not None else self._encode_literally(piece.translate(hidden))
        return self._with_prefix(ids)

    def render_chat(self, messages: object, add_generation_prompt: bool = True, continue_final_message: bool = False,
                    kwargs: Mapping[str, Any] | None = None, tools: Sequence[dict[str, Any]] | None = None) -> str:
        """The same prompt as text. Raises: ValueError."""
        rendered, hidden = self._render(messages, add_generation_prompt, continue_final_message, kwargs or {}, tools)
        return rendered.translate(hidden)

    @property
    def reserved_template_names(self) -> frozenset[str]:
        """What `kwargs` may not hold."""
        return frozenset() if self._template is None else self._template.reserved_names

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> str | None:
        """The template's source."""
        return None if self._template is None else self._template.source

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template tells the model of tools."""
        return self._template is not None and self._template.uses("tools")

    @property
    def control_tokens(self) -> frozenset[str]:
        """How control tokens are spelled."""
        return frozenset(self._special_id_of)

    def special_id(self, text: str) -> int | None:
        """The id of the control token that is spelled exactly so."""
        return self._special_id_of.get(text)

    # Decoding

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text that has begun: perhaps a part of a character, of a control token its name.

        Empty for an id without a token.
        """
        return self._bytes[token_id]

    def token_name(self, token_id: int) -> str:
        """What the vocabulary calls it, e.g. "\u0120hello"; "" for an id without a token."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        """The same as text, with U+FFFD for what is no complete character."""
        return self._bytes[token_id].decode(errors="replace")

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Token ids as text. Bytes that are not UTF-8 become U+FFFD.

        This is the decoding of `tokenizers` with one difference: it turns a run of byte tokens that is not UTF-8 as a
        whole into U+FFFD throughout, valid characters too, so that a character could change after it was shown.
        """
        detokenizer = Detokenizer(self, (), skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    # How it is done

    def _encode(self, text: str, tokenizer: Tokenizer) -> list[int]:
        try:
            # NOTE: `encode` holds the GIL, for seconds where the text is long; the batch calls let it go.
            return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except Exception as error:          # the library raises bare Exception
            raise ValueError(f"the tokenizer cannot encode the text: {error}") from None

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        longest = self._max_token_characters
        if max_tokens is not None and longest is not None and len(text) > max_tokens * longest:
            raise ValueError(f"the prompt has {len(text)} characters, far more than the {max_tokens} tokens of this "
                             f"model's context can hold")

    @cached_property
    def _max_token_characters(self) -> int | None:
        """No token stands for more characters; None where an unknown word of any length is one token."""
        return max(map(len, self._tokenizer.get_vocab())) if self._decoder.covers_bytes else None

    def _with_prefix(self, ids: list[int]) -> list[int]:
        prefix = list(self.prefix_ids)
        return ids if ids[:len(prefix)] == prefix else prefix + ids

    def _render(self, messages: object, add_generation_prompt: bool, continue_final_message: bool,
                kwargs: Mapping[str, Any],
                tools: Sequence[dict[str, Any]] | None) -> tuple[str, dict[int, str]]:
        """The rendered prompt, in which private characters stand for the control tokens that messages spell.

        Returns it and, by the characters' code points, what they stand for.
        """
        if self._template is None:
            raise ValueError("this model has no chat template; use completions")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if reserved := self._template.reserved_names & kwargs.keys():
            raise ValueError(f"chat_template_kwargs: {min(reserved)} is not the caller's to set")
        checked = check_messages(messages)
        given = map_strings(dict(kwargs), require_unicode, "chat_template_kwargs")
        known = map_strings(list(tools or ()), require_unicode, "tools")
        placeholders: dict[str, str] = {}
        free = _unused_private_characters((checked, given, known))

        def hide(text: str, _field: str) -> str:
            pieces = []
            for piece, special_id in self._split_at_special(text):
                if special_id is not None and piece not in placeholders:
                    placeholders[piece] = next(free)
                pieces.append(piece if special_id is None else placeholders[piece])
            return "".join(pieces)

        checked, given = map_strings(checked, hide, "messages"), map_strings(given, hide, "chat_template_kwargs")
        known = map_strings(known, hide, "tools")
        final = ""
        if continue_final_message:
            # A mark in its place shows where it begins, whatever the template does to a content.
            final, checked[-1]["content"] = checked[-1]["content"], (mark := next(free))
        rendered = self._template.render(checked, add_generation_prompt, given, known)
        if continue_final_message:
            before, found, _ = rendered.rpartition(mark)
            if not found:
                raise ValueError("the chat template leaves the last message out: it cannot be continued")
            rendered = before.replace(mark, final) + final
        return rendered, {ord(placeholder): text for text, placeholder in placeholders.items()}

    def _split_at_special(self, text: str) -> list[tuple[str, int | None]]:
        """`text` cut where the tokenizer sees control tokens: (piece, the control token's id or None)."""
        pieces: list[tuple[str, int | None]] = []
        position = 0
        finder, id_of = self._special_finder
        found = finder.encode_batch([text], add_special_tokens=False)[0]
        for finder_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            if finder_id != _NOT_SPECIAL:
                pieces += [(text[position:start], None), (text[start:end], id_of[finder_id])]
                position = end
        pieces.append((text[position:], None))
        return [(piece, special_id) for piece, special_id in pieces if piece]

    @cached_property
    def _special_finder(self) -> tuple[Tokenizer, dict[int, int]]:
        """Finds control tokens as the tokenizer itself does and takes all else for unknown words; its ids to ours."""
        finder = Tokenizer(models.WordLevel({"\0": _NOT_SPECIAL}, unk_token="\0"))
        if self._tokenizer.normalizer is not None:
            finder.normalizer = self._tokenizer.normalizer
        finder.add_tokens([token for token in self._added.values() if token.special])
        ours_of = {token_id: self._special_id_of[token.content]
                   for token_id, token in finder.get_added_tokens_decoder().items()}
        return finder, ours_of

    @cached_property
    def _literal_tokenizer(self) -> Tokenizer:
        """The tokenizer, blind to control tokens. The model, which is what is large, is shared."""
        literal = Tokenizer(self._tokenizer.model)
        if self._tokenizer.normalizer is not None:
            literal.normalizer = self._tokenizer.normalizer
        if self._tokenizer.pre_tokenizer is not None:
            literal.pre_tokenizer = self._tokenizer.pre_tokenizer
        literal.add_tokens(list(self._added.values()))
        literal.encode_special_tokens = True
        assert literal.get_added_tokens_decoder().keys() == self._added.keys(), "added tokens keep their ids"
        return literal

    def _encode_literally(self, text: str) -> list[int]:
        """Encode `text` without control tokens, whatever it spells."""
        ids = self._encode(text, self._literal_tokenizer)
        if any(token_id in self.special_ids and token_id != self._unknown_id for token_id in ids):
            raise ValueError("messages: spell a control token that this tokenizer cannot encode as text")
        return ids

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._decoder.bytes_of(token)


class Detokenizer:
    """The text of one sequence, from its tokens as they come. Never splits a character, never shows the prompt.

    What `push` and `flush` return is, joined, decode(prompt + output) without decode(prompt). A character that begins
    in the prompt comes out whole if the output completes it, and not at all if the output does not.
    """

    def __init__(self, vocab: Vocab, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._bytes = vocab._bytes_without_special if skip_special_tokens else vocab._bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_start = vocab._decoder.strip_start and not any(self._bytes[token_id] for token_id in prompt_ids)
        begun = self._incomplete_character(prompt_ids)
        self._utf8.decode(begun)
        self._in_prompt_character = begun != b""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        table = self._bytes
        data = b"".join([table[token_id] for token_id in token_ids])
        if self._strip_start and data:
            data = data.removeprefix(b" ")
            self._strip_start = False
        return self._emit(self._utf8.decode(data))

    def flush(self) -> str:
        """The end of the sequence: an incomplete character becomes one U+FFFD."""
        return self._emit(self._utf8.decode(b"", True))

    def _emit(self, text: str) -> str:
        if self._in_prompt_character and text:
            self._in_prompt_character = False
            return text.removeprefix("\ufffd")      # the prompt's character, which the output did not complete
        return text

    def _incomplete_character(self, prompt_ids: Sequence[int]) -> bytes:
        """The bytes at the prompt's end, at most 3, that begin a character."""
        data = b""
        for token_id in reversed(prompt_ids):
            data = self._bytes[token_id] + data
            if len(data) >= 3:
                break
        _, num_decoded = codecs.utf_8_decode(data, "replace", False)
        begun = data[num_decoded:]
        # NOTE: Python also waits for a third byte of what would be a surrogate, which is no character.
        return begun if begun[:1] != b"\xed" or len(begun) == 1 or begun[1] < 0xA0 else b""


def _unused_private_characters(values: object) -> Iterator[str]:
    taken = set(json.dumps(values, ensure_ascii=False, default=str))
    for code in range(_FIRST_PLACEHOLDER, 0x110000):
        if chr(code) not in taken:
            yield chr(code)


def _token_id(tokenizer: Tokenizer, text: str | None) -> int | None:
    return None if text is None else tokenizer.token_to_id(text)


# GGUF


def _from_gguf(file: Gguf) -> Vocab:
    tokenizer = gguf_tokenizer(file)
    ids: dict[str, int] = {}
    roles: dict[str, str] = {}
    for name, role in (("bos", "bos_token"), ("eos", "eos_token"), ("eot", "eot_token"), ("eom", "eom_token"),
                       ("unknown", "unk_token"), ("padding", "pad_token")):
        token_id = named_id(file, name)
        if token_id is not None:
            text = tokenizer.id_to_token(token_id) if token_id >= 0 else None
            if text is None:
                raise ValueError(f"{file.path}: tokenizer.ggml.{name}_token_id {token_id} is not in the vocabulary")
            ids[name], roles[role] = token_id, text
    stop_ids = {ids[name] for name in ("eos", "eot", "eom") if name in ids}
    if "eot" not in ids:
        stop_ids |= {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()
                     if token.special and token.content in END_OF_TURN_TEXTS}
    return Vocab(tokenizer, origin=str(file.path), roles=roles, stop_ids=stop_ids,
                 prefix_ids=(ids["bos"],) if "bos" in ids and adds_bos(file) else (),
                 chat_template=file.get("tokenizer.chat_template", str))


# Hugging Face layout


def _from_folder(folder: Path) -> Vocab:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder}: has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:              # the library raises bare Exception
        raise ValueError(f"{path}: cannot be read: {error}") from None
    settings = _json(folder / "tokenizer_config.json")
    config = _json(folder / "config.json")
    generation = _json(folder / "generation_config.json")
    roles = {role: text for role, value in settings.items()
             if role.endswith("_token") and (text := _token_text(value)) is not None}
    stop_ids = {token_id for role in ("eos_token", "eot_token")
                if (token_id := _token_id(tokenizer, roles.get(role))) is not None}
    for name, values in (("config.json", config), ("config.json", config.get("text_config") or {}),
                         ("generation_config.json", generation)):
        stop_ids |= _ids(values.get("eos_token_id"), f"{folder / name}: eos_token_id")
    return Vocab(tokenizer, origin=str(folder), roles=roles, stop_ids=stop_ids,
                 prefix_ids=_prefix_ids(tokenizer, settings, roles),
                 chat_template=_folder_template(folder, settings),
                 defaults=_sampling_defaults(generation, folder / "generation_config.json"))


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(value: object) -> str | None:
    """A token in tokenizer_config.json: a string, or an object with content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: object, field: str) -> set[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ValueError(f"{field}: {value!r} is not a token id or a list of them")
    return set(ids)


def _prefix_ids(tokenizer: Tokenizer, settings: dict[str, Any], roles: dict[str, str]) -> list[int]:
    """What the post-processor puts before a text; `add_bos_token` has the last word about BOS.

    What it would put after a text (an end of sequence) is left out: a prompt is there to be continued.
    """
    processor = tokenizer.post_processor
    state = {} if processor is None else json.loads(processor.__getstate__())
    prefix: list[int] = []
    for step in state.get("processors", [state]):
        if step.get("type") == "TemplateProcessing":
            for item in step["single"]:
                if "Sequence" in item:
                    break
                prefix += step["special_tokens"][item["SpecialToken"]["id"]]["ids"]
    bos_id = _token_id(tokenizer, roles.get("bos_token"))
    if bos_id is not None and settings.get("add_bos_token") is False:
        return [token_id for token_id in prefix if token_id != bos_id]
    if bos_id is not None and settings.get("add_bos_token") is True and bos_id not in prefix:
        return [bos_id, *prefix]
    return prefix


def _folder_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's: one template, or several by name, of which "default"."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: cannot be read: {error}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((entry.get("template") for entry in template
                         if isinstance(entry, dict) and entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder / 'tokenizer_config.json'}: chat_template is not a template")
    return template


def _sampling_defaults(generation: dict[str, Any], path: Path) -> dict[str, float]:
    greedy = generation.get("do_sample") is False       # said outright; transformers' silence does not mean it
    defaults: dict[str, float] = {}
    for name, (parameter, for_sampling) in _SAMPLING_DEFAULTS.items():
        value = generation.get(name)
        if value is None or (greedy and for_sampling):
            continue
        if isinstance(value, bool) or not isinstance(value, int if name in _INTEGER_DEFAULTS else int | float):
            raise ValueError(f"{path}: {name} {value!r} is not a number")
        defaults[parameter] = value
    return defaults
