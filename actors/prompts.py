"""From what a caller asks to a prompt's token ids: rendering, encoding, cutting, and what cannot be served."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from actors.messages import ChatPrompt, Prompt
from actors.sampling_params import MAX_BAD_WORD_IDS, ParameterError, SamplingParams
from weights.vocab import Vocab


@dataclass(frozen=True, slots=True)
class PromptIds:
    """A prompt, encoded."""
    ids: list[int]
    num_truncated: int = 0                  # tokens that were cut off at its beginning


def prompt_field(prompt: Prompt) -> str:
    """What errors about it as a whole call it."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def encode_prompt(vocab: Vocab, prompt: Prompt, vocab_size: int, max_tokens: int | None = None,
                  add_special: bool = True) -> list[int]:
    """The ids. vocab_size: of the model. max_tokens: refuse what must have more, before it is encoded.

    Raises: ParameterError, ValueError.
    """
    if isinstance(prompt, ChatPrompt):
        ids = vocab.encode_chat(orjson.loads(prompt.messages_json), prompt.add_generation_prompt, max_tokens,
                                prompt.continue_final_message, template_kwargs(vocab, prompt),
                                _tools(vocab, prompt))
    elif isinstance(prompt, str):
        ids = vocab.encode(prompt, add_special, max_tokens)
    else:
        ids = list(prompt)
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ParameterError(prompt_field(prompt), f"token id {token_id} is not in the model's vocabulary of "
                                 f"{vocab_size}")
    return ids


def serving_ids(vocab: Vocab, prompt: Prompt, sampling: SamplingParams, vocab_size: int,
                max_model_len: int) -> PromptIds:
    """The ids that a sequence begins with, and room for an answer behind them.

    A prompt that is cut keeps its end, and of its beginning the tokens that begin every text of the model.

    Raises: ParameterError, ValueError.
    """
    room = 0 if sampling.max_tokens == 0 else 1
    keep = _num_to_keep(sampling, max_model_len - (sampling.max_tokens or room), max_model_len)
    ids = encode_prompt(vocab, prompt, vocab_size, max_model_len if keep is None else None)
    num_tokens = len(ids)
    if keep is not None and num_tokens > keep:
        prefix = [] if isinstance(prompt, tuple) else list(vocab.prefix_ids)
        num_kept = len(prefix) if len(prefix) < keep and ids[:len(prefix)] == prefix else 0
        ids = ids[:num_kept] + ids[num_tokens - keep + num_kept:]
    if not ids and vocab.bos_id is not None:
        ids = [vocab.bos_id]
    if not ids:
        raise ParameterError(prompt_field(prompt), "is empty, and this model has no beginning-of-text token")
    if len(ids) + room > max_model_len:
        raise ParameterError(prompt_field(prompt), f"the prompt has {len(ids)} tokens; this model's context of "
                             f"{max_model_len} leaves no room for an answer")
    return PromptIds(ids, num_tokens - len(ids) if keep is not None and num_tokens > keep else 0)


def _num_to_keep(sampling: SamplingParams, most: int, max_model_len: int) -> int | None:
    """-1 asks for as many as leave room for the answer."""
    keep = sampling.truncate_prompt_tokens
    if keep is None:
        return None
    if keep > max_model_len:
        raise ParameterError("truncate_prompt_tokens", f"{keep} is more than this model's context of {max_model_len}")
    if keep == -1 and most < 1:
        raise ParameterError("truncate_prompt_tokens", f"max_tokens {sampling.max_tokens} leaves no room for a prompt "
                             f"in this model's context of {max_model_len}")
    return most if keep == -1 else keep


def render_chat(vocab: Vocab, prompt: ChatPrompt) -> str:
    """Raises: ParameterError, ValueError."""
    return vocab.render_chat(orjson.loads(prompt.messages_json), prompt.add_generation_prompt,
                             prompt.continue_final_message, template_kwargs(vocab, prompt),
                             _tools(vocab, prompt))


def template_kwargs(vocab: Vocab, prompt: ChatPrompt) -> dict[str, Any]:
    """Raises: ParameterError for a name that is not the caller's to set."""
    kwargs: dict[str, Any] = orjson.loads(prompt.template_kwargs_json)
    if reserved := vocab.reserved_template_names & kwargs.keys():
        raise ParameterError("chat_template_kwargs", f"{min(reserved)} is not the caller's to set")
    return kwargs


def _tools(vocab: Vocab, prompt: ChatPrompt) -> list[dict[str, Any]]:
    """Raises: ParameterError where the model could not be told of them."""
    tools: list[dict[str, Any]] = orjson.loads(prompt.tools_json)
    if tools and not vocab.knows_tools:
        raise ParameterError("tools", "this model's chat template knows no tools")
    return tools


def bad_word_ids(vocab: Vocab, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """Each bad word as it is spelled inside of a text and, where that is as many other tokens, after a space; as vLLM.

    Raises: ParameterError for a word without tokens, for too many, and where no token is left.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in sampling.bad_words:
        try:
            bare, spaced = (tuple(vocab.encode(space + word.lstrip(), add_special=False)) for space in ("", " "))
        except ValueError as error:
            raise ParameterError("bad_words", str(error)) from None
        if not bare:
            raise ParameterError("bad_words", f"{word[:80]!r} has no tokens")
        found[bare] = None
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found[spaced] = None
    num_ids = sum(map(len, found))
    if num_ids > MAX_BAD_WORD_IDS:
        raise ParameterError("bad_words", f"have {num_ids} tokens together, at most {MAX_BAD_WORD_IDS}")
    allowed = sampling.allowed_token_ids
    if allowed is not None and all((token_id,) in found for token_id in allowed):
        raise ParameterError("allowed_token_ids", "are all bad words")
    return tuple(found)
