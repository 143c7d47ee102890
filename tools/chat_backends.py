"""Who answers in a chat: an engine in this process, or a running server. Both give the same chunks and errors."""
from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from actors.sampling_params import ParameterError
from tools.openai_stream import Chunk, stream_completion
from tools.sse_client import ServerError

if TYPE_CHECKING:
    from api.engine import Engine

# Where neither the user nor the model says: greedy, the same answer each time. At 1.0, the API's default, and even at
# 0.2 the default model wanders off: it names Paris as France's capital in 134 of 200 answers, greedy it does.
CHAT_TEMPERATURE = 0.0

Messages: TypeAlias = list[dict[str, str]]


class StartError(Exception):
    """There is nobody to talk to; str() is one line for the user."""


class AnswerError(Exception):
    """There is no answer, or no whole one; str() is one line for the user."""


class ContextFull(AnswerError):
    """The conversation is longer than the model's context."""


class NoChatTemplate(AnswerError):
    """The model completes text: it was asked to answer messages."""


class BackendLost(AnswerError):
    """Nothing will be answered any more."""


class Backend(Protocol):
    name: str                               # of the model
    context_tokens: int | None              # prompt and answer together; None: not known
    has_chat_template: bool

    def answer(self, prompt: str | Messages) -> AsyncGenerator[Chunk, None]:
        """Stream the answer to a conversation, or the continuation of a text. Raises: AnswerError."""

    def statistics(self) -> list[str]:
        """Lines for the user about what the engine has done."""


class EngineBackend:
    def __init__(self, engine: Engine, given: dict[str, Any]) -> None:
        """`given`: the fields of SamplingParams that the user chose; the model's own defaults fill in the rest."""
        self._engine = engine
        silent = {} if "temperature" in engine.info.default_sampling else {"temperature": CHAT_TEMPERATURE}
        self._sampling = engine.default_sampling(**{**silent, **given})
        self.name = engine.info.model
        self.context_tokens: int | None = engine.info.max_model_len
        self.has_chat_template = engine.info.has_chat_template

    async def answer(self, prompt: str | Messages) -> AsyncGenerator[Chunk, None]:
        from api.engine import EngineDead, RequestFailed
        try:
            async for delta in self._engine.generate(prompt, self._sampling):
                if delta.finish not in (None, "stop", "length"):
                    raise AnswerError(delta.error or f"the request was {delta.finish}")
                yield Chunk(has_choice=True, is_output=bool(delta.token_ids), text=delta.text, finish=delta.finish,
                            usage=delta.usage)
        except ParameterError as error:
            raise _refused(str(error)) from None
        except RequestFailed as error:
            raise AnswerError(str(error)) from None
        except EngineDead as error:
            raise BackendLost(str(error)) from None

    def statistics(self) -> list[str]:
        stats = self._engine.stats()
        lines = [f"engine: {stats.prompt_tokens} prompt tokens computed, {stats.generation_tokens} generated, "
                 f"in {stats.num_steps} steps",
                 f"KV cache: {100 * stats.kv_cache_usage:.0f} % of {self._engine.info.kv_capacity_tokens} tokens used"]
        if stats.busy_s > 0:
            lines.append(f"engine overhead: {100 * (stats.busy_s - stats.forward_s) / stats.busy_s:.1f} % of the time "
                         f"with work")
        return lines


class ServerBackend:
    def __init__(self, root: str, model: str, given: dict[str, Any]) -> None:
        """`given`: request fields that the user chose; the server's defaults hold for the rest."""
        self._root = root
        self._body = {"model": model} | given
        self.name = model
        self.context_tokens: int | None = None
        self.has_chat_template = True       # until the server says that it has none

    async def answer(self, prompt: str | Messages) -> AsyncGenerator[Chunk, None]:
        body = self._body | ({"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt})
        try:
            async with aclosing(stream_completion(self._root, body)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except ServerError as error:
            if error.status == 400 and "messages" in body and "chat template" in str(error).lower():
                self.has_chat_template = False
                raise NoChatTemplate(str(error)) from None
            if error.code == "context_length_exceeded":
                raise ContextFull(str(error)) from None
            raise _refused(str(error)) if error.status == 400 else AnswerError(str(error)) from None

    def statistics(self) -> list[str]:
        return [f"server: {self._root}"]


def _refused(message: str) -> AnswerError:
    """NOTE: servers agree on no error code for a full context, but all of them name the context in the text."""
    return ContextFull(message) if "context" in message.lower() else AnswerError(message)
