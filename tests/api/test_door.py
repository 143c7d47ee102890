"""The HTTP door with the real engine behind it, on a tiny model: what a scripted engine cannot show."""
from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from api.engine import Engine, ParameterError, SamplingParams
from tests.api.fake_engine import FakeEngine
from tests.api.serving import Server
from tests.weights.tiny_tokenizers import CHATML_TOKENS, byte_level, sentencepiece, write_folder

LLAMA = Path(__file__).parents[1] / "golden" / "models" / "llama"
FORCED: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "stream": False}


def with_tokenizer(folder: Path, name: str) -> Path:
    """The tiny model under another tokenizer. Texts of the SentencePiece one begin with a BOS."""
    for file in ("config.json", "model.safetensors"):
        shutil.copy(LLAMA / file, folder)
    if name == "byte_level":
        return write_folder(folder, byte_level())
    return write_folder(folder, sentencepiece(), tokenizer_config={"bos_token": "<s>", "add_bos_token": True})


@asynccontextmanager
async def door(server: Server, model: Path, **config: Any) -> AsyncIterator[Engine]:
    settings: dict[str, Any] = {"kv_cache_memory": 1 << 20, "max_num_seqs": 4, **config}
    async with Engine.start(str(model), device="reference", served_model_name=("fake",), **settings) as engine:
        server.use(cast("FakeEngine", engine))
        yield engine


def serve(server: Server, model: Path, ask: Callable[[], None], **config: Any) -> None:
    """Run `ask`, which sends requests, in a thread while the engine lives in this one's loop."""
    async def main() -> None:
        async with asyncio.timeout(60), door(server, model, **config):
            await asyncio.to_thread(ask)

    asyncio.run(main())


def spans(choice: dict[str, Any]) -> list[str]:
    """The text from each token's offset to the next one's."""
    offsets = choice["logprobs"]["text_offset"]
    return [choice["text"][start:end] for start, end in zip(offsets, [*offsets[1:], None], strict=True)]


@pytest.mark.parametrize("prompt_as", [str, list])
def test_text_offsets_index_the_returned_text(server: Server, tmp_path: Path, prompt_as: type) -> None:
    """A BOS that was put before the prompt, and the space that SentencePiece does, are not in it."""
    tokenizer = sentencepiece()
    text = "hi \u00e9\u20ac hi"
    tokens = ["\u2581hi", "\u2581", "\u00e9", "<0xE2>", "<0x82>", "<0xAC>", "\u2581hi"]
    ids = [tokenizer.token_to_id(token) for token in tokens]
    space = {str(tokenizer.token_to_id("\u2581")): 100}
    prompt = text if prompt_as is str else ids
    prompt_spans = ["hi", " ", "\u00e9", "", "", "\u20ac", " hi"]
    if prompt_as is str:
        prompt_spans.insert(0, "")

    def ask() -> None:
        for echo in (True, False):
            choice = server.complete(prompt=prompt, echo=echo, logprobs=0, max_tokens=2, logit_bias=space,
                                     **FORCED).json["choices"][0]
            assert choice["text"] == (text if echo else "") + "  "
            assert spans(choice) == (prompt_spans if echo else []) + [" ", " "]

    serve(server, with_tokenizer(tmp_path, "sentencepiece"), ask)


def test_control_tokens_in_the_answer_move_no_offset_unless_they_are_shown(server: Server, tmp_path: Path) -> None:
    tokenizer = byte_level()
    control = CHATML_TOKENS[1]
    biases = {str(tokenizer.token_to_id(token)): 100 for token in (control, "e")}

    def ask() -> None:
        for skip in (True, False):
            choice = server.complete(prompt=f"h{control}", echo=True, logprobs=1, max_tokens=9, logit_bias=biases,
                                     skip_special_tokens=skip, temperature=2, seed=1).json["choices"][0]
            tokens = choice["logprobs"]["tokens"]
            assert set(tokens[2:]) == {control, "e"}
            assert spans(choice) == ["h", control, *("" if skip and token == control else token
                                                     for token in tokens[2:])]

    serve(server, with_tokenizer(tmp_path, "byte_level"), ask)


def test_an_empty_prompt_has_one_rule(server: Server, tmp_path: Path) -> None:
    """FAULTS A03: from the beginning of text, where a model has one, through every door."""
    empty: list[Any] = ["", [""], [], [[]]]

    def text(prompt: Any, **fields: Any) -> str:
        answer = server.complete(prompt=prompt, max_tokens=4, **FORCED | fields)
        assert answer.status == 200, answer.body
        return str(answer.json["choices"][0]["text"])

    def ask() -> None:
        bos = text([1])
        assert [text(prompt) for prompt in empty] == [bos] * 4
        assert [text(prompt, echo=True, logprobs=1) for prompt in empty] == [bos] * 4

    serve(server, LLAMA, ask)

    async def main() -> None:
        async with door(server, with_tokenizer(tmp_path, "byte_level")) as engine:
            for prompt in (empty[0], empty[2]):
                with pytest.raises(ParameterError, match="^prompt: is empty"):
                    await engine.complete(prompt)
            for prompt, field in zip(empty, ["prompt", "prompt[0]", "prompt", "prompt[0]"], strict=True):
                answer = await asyncio.to_thread(partial(server.complete, prompt=prompt))
                assert answer.status == 400
                assert answer.error["param"] == field

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_prompt_of_many_is_a_400_that_names_it(server: Server, stream: bool) -> None:
    """While one sequence runs at a time and others wait: what decides is the encoding, not the queue."""
    def ask() -> None:
        for bad, message in (([99_999], "token id 99999"), ([5] * 256, "has 256 tokens")):
            prompts = [[5], [6], [7], bad, [8]]
            answer = server.complete(prompt=prompts, max_tokens=200, **FORCED | {"stream": stream})
            assert answer.status == 400
            assert answer.error["param"] == "prompt[3]"
            assert answer.error["message"].startswith("prompt[3]: ")
            assert message in answer.error["message"]

    serve(server, LLAMA, ask, max_num_seqs=1, max_model_len=256)


def test_the_first_delta_says_that_a_request_is_admitted(server: Server) -> None:
    """It does not wait for the request's turn."""
    async def main() -> None:
        async with door(server, LLAMA, max_num_seqs=1) as engine:
            running = engine.generate([5], SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
            while not (await anext(running)).token_ids:
                pass
            queued = engine.generate([6, 7], SamplingParams(max_tokens=2, prompt_logprobs=0))
            first = await anext(queued)
            assert (first.prompt_token_ids, first.token_ids, first.text, first.finish) == ((6, 7), (), "", None)
            assert engine.stats().num_requests_waiting == 1

    asyncio.run(main())
