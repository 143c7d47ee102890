"""Streams of OpenAI's completions and chat endpoints, read as any server of that kind writes them."""
from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from actors.messages import Usage
from tools.sse_client import ServerError, get_json, post_events


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream."""
    has_choice: bool                        # False: usage alone
    is_output: bool                         # it brings generated tokens, perhaps of a character that is not yet whole
    text: str = ""
    finish: str | None = None
    usage: Usage | None = None


async def stream_completion(root: str, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
    """Ask `root` for the completion of `body["messages"]` or `body["prompt"]`, streamed and with usage.

    Raises: ServerError, also where the stream ends without a finish_reason.
    """
    url = root + ("/v1/chat/completions" if "messages" in body else "/v1/completions")
    finished = False
    async with aclosing(post_events(url, body | {"stream": True, "stream_options": {"include_usage": True}})) as events:
        async for event in events:
            chunk = parse_chunk(event)
            finished = finished or chunk.finish is not None
            yield chunk
    if not finished:
        raise ServerError("the stream ended without a finish_reason")


def parse_chunk(event: dict[str, Any]) -> Chunk:
    """Raises: ServerError for what is no chunk of either endpoint.

    NOTE: an event that only announces the assistant's role, or only the finish, brings no token: counting it would
    make a server's first token look earlier, or its last gap shorter, than it is.
    """
    try:
        usage = _usage(event.get("usage"))
        if not event.get("choices"):
            return Chunk(has_choice=False, is_output=False, usage=usage)
        choice = event["choices"][0]
        finish = choice.get("finish_reason")
        delta = choice.get("delta")
        content = choice.get("text") if delta is None else delta.get("content")
        tokenless = bool(finish) or (delta is not None and "role" in delta)
        thought = delta is not None and any(delta.get(key) for key in ("reasoning", "reasoning_content", "tool_calls"))
        is_output = bool(content) or thought or (content == "" and not tokenless)
        return Chunk(has_choice=True, is_output=is_output, text=content or "", finish=finish, usage=usage)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise ServerError(f"the server sent an event that is no completion chunk: {str(event)[:80]}") from None


def _usage(usage: dict[str, Any] | None) -> Usage | None:
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(int(usage["prompt_tokens"]), int(usage.get("completion_tokens") or 0),
                 int(details.get("cached_tokens") or 0))


async def first_model(root: str) -> str:
    """The id of the first model that the server lists. Raises: ServerError."""
    listing = await get_json(root + "/v1/models")
    try:
        return str(listing["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ServerError(f"{root}/v1/models lists no model") from None
