"""Tools in process: what the template is told of, and whom that is refused."""
from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from api.engine import ParameterError, SamplingParams
from tests.api.test_engine import MODELS, run, tiny
from tests.api.test_engine_parameters import TOKENIZER, byte_model
from tests.weights.tiny_tokenizers import CHATML, write_folder

TEMPLATE = "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }} {% endfor %}" + CHATML
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f<|im_end|>"}}]
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CHATTED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_tools_reach_the_template(tmp_path: Path) -> None:
    async def main() -> None:
        for name in ("config.json", "model.safetensors"):
            shutil.copy(MODELS / "llama" / name, tmp_path)
        folder = write_folder(tmp_path, TOKENIZER, tokenizer_config={"chat_template": TEMPLATE,
                                                                     "eos_token": "<|im_end|>"})
        async with tiny("reference", str(folder)) as engine:
            assert engine.info.knows_tools
            assert engine.info.chat_template == TEMPLATE
            assert "<|im_end|>" in engine.info.control_tokens
            assert await engine.render(HI, tools=TOOLS) == f"<tool_call>f<|im_end|> {CHATTED}"
            assert await engine.render(HI) == CHATTED
            ids = await engine.tokenize(HI, tools=TOOLS)
            answer = await engine.complete(HI, SamplingParams(max_tokens=1), tools=TOOLS)
            assert list(answer.prompt_token_ids) == ids
            assert len(ids) > len(await engine.tokenize(HI))
            end = engine.encode("<|im_end|>")[-1]
            assert ids.count(end) == 1, "what a tool spells stays text"
            for prompt in ("text", [1, 2]):
                with pytest.raises(ParameterError) as error:
                    await engine.complete(prompt, tools=TOOLS)
                assert error.value.field == "tools"

    run(main)


def test_a_template_that_knows_no_tools_is_told_of_none(tmp_path: Path) -> None:
    async def main() -> None:
        async with tiny("reference", str(byte_model(tmp_path))) as engine:
            assert not engine.info.knows_tools
            for asked in (engine.complete(HI, tools=TOOLS), engine.tokenize(HI, tools=TOOLS),
                          engine.render(HI, tools=TOOLS)):
                with pytest.raises(ParameterError, match="knows no tools") as error:
                    await asked
                assert error.value.field == "tools"

    run(main)
