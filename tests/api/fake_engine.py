"""An engine with the surface of `api.engine.Engine` and a script instead of a model. A token is a byte of UTF-8.

It answers "<prompt>" with "re <prompt>", cut at max_tokens. Words in a prompt ask for more:
HOLD waits before its first token until `release()`; FAIL fails after three tokens; ENDLESS never ends by itself;
BYTES answers with the three bytes of one character, a token each; REFUSE is refused, after `release()`.
Where `says` is set that is its answer. A pooled state is 3, 4, 0 and the prompt's number of tokens.
"""
from __future__ import annotations

import asyncio
import codecs
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from actors.messages import Finish, TextDelta, TokenLogprob, Usage
from actors.policy.kv_group import Group
from api.engine import (
    EngineBusy,
    EngineDead,
    EngineInfo,
    EngineStats,
    ParameterError,
    PromptInput,
    RequestFailed,
    SamplingParams,
)

VOCAB_SIZE = 258
EOS, SPECIAL = 256, 257
MAX_MODEL_LEN = 4096

INFO = EngineInfo(
    model="fake", model_names=("fake", "fake-alias"), model_path="/models/fake.gguf", architecture="fake",
    vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, kv_capacity_tokens=8192, kv_bytes=1 << 20, kv_dtype="float32",
    file_bytes=1 << 20, weight_bytes=2 << 20, max_num_seqs=4, max_num_batched_tokens=512, device="cpu",
    device_reason="asked", stop_token_ids=(EOS,), stop_tokens=("<eos>",), has_chat_template=True,
    default_sampling={"temperature": 0.5}, startup_s=(("weights", 0.1), ("tokenizer", 0.2)),
    kv_groups=(Group(512), Group(96, window=64)), num_full_requests=2.75, hidden_size=4)


@dataclass
class Call:
    """One generation that was asked for."""
    prompt: PromptInput
    sampling: SamplingParams
    choice: int
    state: str = "waiting"                      # waiting, running, finished, aborted
    num_deltas: int = 0
    template: tuple[bool, bool, Mapping[str, Any]] = (True, False, {})
    asker: dict[str, Any] = field(default_factory=dict)
    tools: Sequence[dict[str, Any]] = ()


@dataclass
class Recorder:
    """What happened in the server's thread, for a test in another one."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def note(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def wait_for(self, happened: Callable[[], bool], timeout_s: float = 20.0) -> None:
        with self.changed:
            assert self.changed.wait_for(happened, timeout_s), "it did not happen in time"


class FakeEngine(Recorder):
    """Used in one event loop; `release`, `kill` and `wait_for` may be called from any thread."""

    def __init__(self, info: EngineInfo = INFO, token_size: int = 1) -> None:
        super().__init__()
        self.info = info
        self.calls: list[Call] = []
        self.says: str | None = None
        self.num_prompt_tokens = self.num_output_tokens = 0
        self._token_size = token_size           # characters that an ENDLESS token has
        self._dead: BaseException | None = None
        self._released = False
        self._holding: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._slots: asyncio.Semaphore | None = None

    @classmethod
    @asynccontextmanager
    async def start(cls, model: str = "smollm2", progress: Callable[[str], None] | None = None,
                    **config: Any) -> AsyncIterator[FakeEngine]:
        yield cls()

    async def generate(self, prompt: PromptInput, sampling: SamplingParams | None = None, *, choice: int = 0,
                       add_generation_prompt: bool = True, continue_final_message: bool = False,
                       chat_template_kwargs: Mapping[str, Any] | None = None, tools: Sequence[dict[str, Any]] = (),
                       on_delta: Callable[[TextDelta], bool] | None = None, **asker: Any) -> AsyncIterator[TextDelta]:
        sampling = sampling or self.default_sampling()
        template = (add_generation_prompt, continue_final_message, chat_template_kwargs or {})
        call = Call(prompt, sampling, choice, template=template, asker=asker, tools=tools)
        self.calls.append(call)
        self.note()
        try:
            self._check_alive()
            text, ids = self._encode(prompt, sampling)
            if "BUSY" in text:
                raise EngineBusy("7 requests are queued, this would add 1, at most 7 may be", 2.5,
                                 "max_queued_requests")
            if "REFUSE" in text:
                await self._hold()
                raise ParameterError("prompt", "is refused")
            yield TextDelta("r", prompt_token_ids=ids)
            if self._slots is None:
                self._slots = asyncio.Semaphore(self.info.max_num_seqs)
            async with self._slots:
                call.state = "running"
                self.num_prompt_tokens += len(ids)
                self.note()
                if "HOLD" in text:
                    await self._hold()
                async with aclosing(self._answer(text, ids, sampling)) as deltas:
                    async for delta in deltas:
                        self._check_alive()
                        call.num_deltas += 1
                        self.num_output_tokens += len(delta.token_ids)
                        if delta.finish is not None:
                            call.state = "finished"
                        self.note()
                        if on_delta is None or delta.finish is not None or not on_delta(delta):
                            yield delta
        finally:
            if call.state != "finished":
                call.state = "aborted"
            self.note()

    def default_sampling(self, **changes: Any) -> SamplingParams:
        return SamplingParams(**{**self.info.default_sampling, **changes})

    async def tokenize(self, prompt: PromptInput, *, add_special_tokens: bool = True,
                       **template: Any) -> list[int]:
        """NOTE: the beginning of every text is EOS here."""
        if prompt == "":
            return []
        return [EOS, *self._encode(prompt, self.default_sampling())[1]] if add_special_tokens and isinstance(
            prompt, str) else list(self._encode(prompt, self.default_sampling())[1])

    async def render(self, messages: Sequence[dict[str, Any]], **template: Any) -> str:
        return f"{self._encode(messages, self.default_sampling())[0]} {template}"

    def token_name(self, token_id: int) -> str:
        return f"<{token_id}>"

    @property
    def token_roles(self) -> dict[str, str]:
        return {"eos_token": "<eos>"}

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_id for token_id in token_ids if token_id < 256).decode("utf-8", "replace")

    def stats(self) -> EngineStats:
        states = [call.state for call in self.calls]
        return EngineStats(
            num_requests_running=states.count("running"), num_requests_waiting=states.count("waiting"),
            kv_cache_usage=0.25, num_preemptions=0, prompt_tokens=self.num_prompt_tokens,
            generation_tokens=self.num_output_tokens, num_steps=1, forward_s=0.5, busy_s=0.75)

    @property
    def dead(self) -> BaseException | None:
        return self._dead

    @property
    def states(self) -> list[str]:
        return [call.state for call in self.calls]

    def release(self) -> None:
        """Let all go on that hold, now and later."""
        self._released = True
        for loop, event in self._holding:
            loop.call_soon_threadsafe(event.set)

    def kill(self, cause: str = "OSError: /dev/secret went away") -> None:
        self._dead = RuntimeError(cause)
        self.release()

    async def _hold(self) -> None:
        event = asyncio.Event()
        self._holding.append((asyncio.get_running_loop(), event))
        if not self._released:
            await event.wait()
        self._check_alive()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(str(self._dead))

    def _encode(self, prompt: PromptInput, sampling: SamplingParams) -> tuple[str, tuple[int, ...]]:
        sampling.check_vocab(self.info.vocab_size)
        if isinstance(prompt, str):
            text, ids = prompt, tuple(prompt.encode())
        elif prompt and all(isinstance(item, dict) for item in prompt):
            messages: Sequence[Any] = prompt
            if any(message["role"] == "refused" for message in messages):
                raise ParameterError("messages", "the template says: roles must alternate")
            text = "|".join(str(message["content"]) for message in messages)
            ids = (SPECIAL, *text.encode())
        else:
            ids = tuple(item for item in prompt if isinstance(item, int))
            if any(token_id >= self.info.vocab_size for token_id in ids):
                raise ParameterError("prompt", f"token id {max(ids)} is not in the vocabulary")
            text = self.decode(ids)
        if not ids:
            raise ParameterError("prompt", "is empty")
        if len(ids) >= self.info.max_model_len:
            raise ParameterError("prompt", f"has {len(ids)} tokens, the context is {self.info.max_model_len}")
        return text, ids

    async def _answer(self, text: str, ids: tuple[int, ...],
                      sampling: SamplingParams) -> AsyncGenerator[TextDelta, None]:
        num_top = sampling.prompt_logprobs
        scores = () if num_top is None else (
            _logprob(ids[0], float("nan"), 0), *(_logprob(token_id, -1.0, num_top) for token_id in ids[1:]))
        if sampling.max_tokens == 0:
            pooled = (3.0, 4.0, 0.0, float(len(ids)))[:self.info.hidden_size] if sampling.pooling else ()
            yield TextDelta("r", finish="length", usage=Usage(len(ids), 0), prompt_logprobs=scores, pooled=pooled)
            return
        if scores:
            yield TextDelta("r", prompt_logprobs=scores)
        if "ENDLESS" in text:
            while True:
                yield TextDelta("r", "x" * self._token_size, (120,))
                await asyncio.sleep(0)
        said = f"re {text}" if self.says is None else self.says
        answer = "\u20ac".encode() if "BYTES" in text else said.encode()
        room = min(self.info.max_model_len - len(ids), sampling.max_tokens or self.info.max_model_len)
        ends = room > len(answer)
        tokens = (*answer, EOS) if ends else tuple(answer[:room])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for number, token_id in enumerate(tokens, 1):
            if "FAIL" in text and number == 4:
                raise RequestFailed("ZeroDivisionError in /secret/model.py")
            last = number == len(tokens)
            shown = decoder.decode(b"" if token_id == EOS else bytes([token_id]), final=last)
            finish: Finish | None = ("stop" if ends else "length") if last else None
            yield TextDelta(
                "r", shown, (token_id,),
                logprobs=() if sampling.logprobs is None else (_logprob(token_id, -0.5, sampling.logprobs),),
                finish=finish, usage=Usage(len(ids), number) if last else None)
            await asyncio.sleep(0)


def _logprob(token_id: int, logprob: float, num_top: int) -> TokenLogprob:
    def token(value: int, log: float) -> TokenLogprob:
        raw = bytes([value]) if value < 256 else (b"<eos>", b"<special>")[value - 256]
        return TokenLogprob(value, raw.decode("utf-8", "replace"), raw, log)

    chosen = token(token_id, logprob)
    top = tuple(token((token_id + step) % 128, logprob - step if step else logprob) for step in range(num_top))
    num_chars = 1 if token_id < 0xC0 else 0     # of a character's bytes the last one; all in the tests have two
    return TokenLogprob(chosen.token_id, chosen.text, chosen.raw, chosen.logprob, top, num_chars)
