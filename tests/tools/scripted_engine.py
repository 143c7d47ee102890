"""An engine without a model for the tools' tests: what it answers is written in the question.

Run as a program it is `tools.chat` over that engine: python -m tests.tools.scripted_engine ARGS. When it stops it
writes what it saw to the file that SCRIPTED_ENGINE_REPORT names.
"""
from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from actors.messages import TextDelta, Usage
from actors.sampling_params import ParameterError, SamplingParams
from api.engine import EngineDead, EngineInfo, EngineStats, PromptInput, RequestFailed

CONTEXT = 1000


class ScriptedEngine:
    def __init__(self, has_chat_template: bool = True) -> None:
        self.info = EngineInfo(
            model="fake", model_names=("fake",), model_path="/fake", architecture="fake", vocab_size=30000,
            max_model_len=CONTEXT, kv_capacity_tokens=4000, kv_bytes=1, kv_dtype="float32", file_bytes=1 << 20,
            weight_bytes=2 << 20, max_num_seqs=8, max_num_batched_tokens=512, device="cpu",
            device_reason="there is nothing else", stop_token_ids=(2,), stop_tokens=("</s>",),
            has_chat_template=has_chat_template, default_sampling={"temperature": 0.25}, startup_s=(("weights", 0.1),))
        self.requests: list[tuple[PromptInput, SamplingParams]] = []
        self.num_left = 0                   # requests whose caller left before their end

    def default_sampling(self, **changes: Any) -> SamplingParams:
        return SamplingParams(**{**self.info.default_sampling, **changes})

    def stats(self) -> EngineStats:
        num = len(self.requests)
        return EngineStats(0, 0, 0.5, 0, 10 * num, 20 * num, 21 * num, forward_s=3.0 * num, busy_s=4.0 * num)

    async def generate(self, prompt: PromptInput, sampling: SamplingParams) -> AsyncIterator[TextDelta]:
        self.requests.append((prompt, sampling))
        finished = False
        try:
            num_tokens = 0
            for piece in self._pieces(prompt, sampling):
                if piece is None:
                    await asyncio.Event().wait()        # never: until the caller leaves
                    continue
                num_tokens += 1
                yield TextDelta("r", text=piece, token_ids=(7,))
                await asyncio.sleep(0)
            full = self.question(prompt) == "fill"
            finished = True
            yield TextDelta("r", finish="length" if full or num_tokens == sampling.max_tokens else "stop",
                            usage=Usage(CONTEXT - num_tokens if full else 10, num_tokens))
        finally:
            if not finished:
                self.num_left += 1

    def question(self, prompt: PromptInput) -> str:
        if isinstance(prompt, str):
            return prompt
        last = prompt[-1]
        return str(last["content"]) if isinstance(last, dict) else "ids"

    def _pieces(self, prompt: PromptInput, sampling: SamplingParams) -> Sequence[str | None]:
        word, _, rest = self.question(prompt).partition(" ")
        if word == "ids":
            return ["a"] * (sampling.max_tokens or 1)
        if word == "messages":
            return [json.dumps(prompt, ensure_ascii=False)]
        if word == "sampling":
            return [f"temperature={sampling.temperature} max_tokens={sampling.max_tokens} seed={sampling.seed}"]
        if word == "silent":
            print("[silent]", file=sys.stderr, flush=True)
            return [None]
        if word == "hang":
            return [*rest, None]
        if word == "lines":
            return [f"line {number}\n\n" for number in range(int(rest))]
        if word == "surrogate":
            return ["a\ud800b\udcffc"]
        if word == "control":
            return ["\x1b[2Jred\x07 \x9b31mdone"]
        if word == "markdown":
            return list("# Title\n\nSome **bold** text.\n\n- one\n- two\n\n```python\nx = 1\n```\n")
        if word == "full":
            raise ParameterError("messages", "the prompt has 2000 tokens; this model's context of 1000 leaves no room")
        if word == "fail":
            raise RequestFailed("the logits are not finite")
        if word == "dead":
            raise EngineDead("the device is gone")
        return [piece + " " for piece in f"you said: {word} {rest}".split()]


@asynccontextmanager
async def scripted_factory(model: str, progress: Any = None, **config: Any) -> AsyncIterator[Any]:
    if model == "missing":
        raise ValueError("model 'missing' is not a folder, a file, an alias or a repository")
    engine = ScriptedEngine(has_chat_template=model != "base")
    try:
        yield engine
    finally:
        if "SCRIPTED_ENGINE_REPORT" in os.environ:
            Path(os.environ["SCRIPTED_ENGINE_REPORT"]).write_text(json.dumps({
                "num_left": engine.num_left, "questions": [engine.question(prompt) for prompt, _ in engine.requests]}))


if __name__ == "__main__":
    from tools.chat import run
    sys.exit(run(sys.argv[1:], engine_factory=scripted_factory))
