from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.messages import TokenLogprob, Usage
from actors.sampling_params import SamplingParams
from api.engine import Completion, RequestFailed
from tests.tools.scripted_engine import ScriptedEngine
from tools import eval as eval_tool
from tools.eval_compare import Comparison
from tools.eval_perplexity import Perplexity, scored_positions, text_windows

MODELS = Path(__file__).parent.parent / "golden" / "models"
LLAMA = ("--model", str(MODELS / "llama"), "--threads", "1")
BOS = 1


class WordEngine:
    """Words w0, w1, … are tokens; a token's log-probability is -id / 100, whatever stands before it."""

    def __init__(self, prefix_ids: Sequence[int] = (BOS,), capacity: int = 4000, fails: bool = False) -> None:
        self.info = dataclasses.replace(ScriptedEngine().info, max_num_seqs=8, kv_capacity_tokens=capacity)
        self.prefix_ids = list(prefix_ids)
        self.fails = fails
        self.prompts: list[list[int]] = []
        self.running = self.most_running = 0

    def encode(self, text: str) -> list[int]:
        return [*self.prefix_ids, *(int(word[1:]) for word in text.split())]

    async def complete(self, prompt: Sequence[int], sampling: SamplingParams) -> Completion:
        assert (sampling.max_tokens, sampling.prompt_logprobs) == (0, 0)
        self.prompts.append(list(prompt))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(10 - len(self.prompts) % 10):        # later ones are done earlier
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        if self.fails:
            raise RequestFailed("the logits are not finite")
        logprobs = tuple(TokenLogprob(token_id, "", b"", -token_id / 100 if position else math.nan)
                         for position, token_id in enumerate(prompt))
        return Completion("", (), "length", None, Usage(len(prompt), 0), (), logprobs, tuple(prompt))


def evaluate(engine: WordEngine, *argv: str) -> int:
    @asynccontextmanager
    async def factory(model: str, progress: Any, **config: Any) -> AsyncIterator[Any]:
        yield engine

    return eval_tool.run(argv, engine_factory=factory)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """100 words: w3, w4, …"""
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{i}" for i in range(3, 103)))
    return path


@pytest.mark.parametrize("prefix_ids", [(), (BOS,)])
def test_windows_and_what_is_scored_are_llama_cpps(prefix_ids: Sequence[int], text: Path, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    engine = WordEngine(prefix_ids)
    assert evaluate(engine, "perplexity", str(text), "-c", "30", "--json", str(tmp_path / "out.json")) == 0
    ids = [*prefix_ids, *range(3, 103)]
    windows = [ids[start:start + 30] for start in (0, 30, 60)]          # what is left over is dropped
    expected = [[BOS, *window[1:]] if prefix_ids else window for window in windows]
    assert sorted(engine.prompts) == sorted(expected)

    losses = np.concatenate([np.array(window[16:]) / 100 for window in windows])     # tokens 16 .. 29 of each
    perplexity = np.exp(losses.mean())
    error = perplexity * losses.std() / np.sqrt(len(losses) - 1)
    output = capsys.readouterr()
    running = [np.exp(losses[:14 * n].mean()) for n in (1, 2, 3)]
    assert output.out == ("".join(f"[{n}]{value:.4f}," for n, value in enumerate(running, 1))
                          + f"\nFinal estimate: PPL = {perplexity:.4f} +/- {error:.5f}\n")
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["perplexity"] == pytest.approx(perplexity)
    assert document["perplexity_error"] == pytest.approx(error)
    assert (document["num_windows"], document["num_scored"], document["num_tokens"]) == (3, 42, len(ids))
    assert document["command"].startswith("python -m tools.eval perplexity ")


def test_windows_run_together_as_far_as_the_cache_holds_them(text: Path) -> None:
    for capacity, most in ((4000, 8), (49, 4), (9, 1)):
        engine = WordEngine((), capacity)
        assert evaluate(engine, "perplexity", str(text), "-c", "10") == 0
        assert (len(engine.prompts), engine.most_running) == (10, most)


def test_chunks_cuts_the_text(text: Path) -> None:
    engine = WordEngine(())
    assert evaluate(engine, "perplexity", str(text), "-c", "10", "--chunks", "2") == 0
    assert engine.prompts == [list(range(3, 13)), list(range(13, 23))]


@pytest.mark.parametrize(("argv", "message"), [
    (["-c", "3"], "--ctx-size: must be at least 4, got 3"),
    (["-c", "101"], "the text has 100 tokens, a window 101 (--ctx-size)"),
    (["-c", "1001"], "--ctx-size: 1001 is more than the context of 1000 tokens"),
    (["--chunks", "0"], "--chunks: must be at least 1, got 0"),
    (["--json", "/no/such/folder/x.json"], "--json: /no/such/folder is not a directory"),
])
def test_arguments_that_cannot_be_used(argv: list[str], message: str, text: Path,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(WordEngine(()), "perplexity", str(text), *argv) == 2
    assert capsys.readouterr() == ("", f"eval: {message}\n")


def test_files_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"abc\xff")
    assert evaluate(WordEngine(), "perplexity", str(path)) == 2
    assert capsys.readouterr().err == f"eval: {path} is not UTF-8 text: invalid start byte at byte 3\n"
    assert evaluate(WordEngine(), "perplexity", str(tmp_path / "missing")) == 2
    assert "missing" in capsys.readouterr().err
    path.write_bytes(b"")
    assert evaluate(WordEngine(()), "perplexity", str(path)) == 2
    assert "the text has 0 tokens" in capsys.readouterr().err


def test_a_fault_of_the_engine(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = WordEngine(fails=True)
    assert evaluate(engine, "perplexity", str(text), "-c", "10") == 1
    assert capsys.readouterr().err.splitlines()[-1] == "eval: the logits are not finite"
    assert engine.running == 0


def test_windows_of_odd_sizes() -> None:
    assert text_windows(range(9), (), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(scored_positions(4)) == [3]
    assert list(scored_positions(5)) == [3, 4]
    assert len(scored_positions(512)) == 255


def test_perplexity_of_one_and_of_hopeless_tokens() -> None:
    figure = Perplexity()
    figure.add([2.0])
    assert (figure.value, figure.error) == (math.exp(2), 0.0)
    figure.add([1e6])
    assert figure.value == math.inf


def test_comparison_is_the_textbooks() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, 7, 5))
    this, against = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    next_ids = rng.integers(0, 5, 7)
    comparison = Comparison()
    comparison.add(this[:4], against[:4], next_ids[:4])
    comparison.add(this[4:], against[4:], next_ids[4:])
    for row in range(7):
        kl = sum(math.exp(p) * (p - q) for p, q in zip(against[row], this[row], strict=True))
        assert comparison.divergences[row] == pytest.approx(kl)
        assert comparison.errors[row] == pytest.approx(abs(this[row, next_ids[row]] - against[row, next_ids[row]]))
    assert comparison.num_same_top == sum(this[row].argmax() == against[row].argmax() for row in range(7))
    assert comparison.this.num_scored == comparison.against.num_scored == 7


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A text of 200 tokens of the tiny models."""
    path = tmp_path / "words.txt"
    path.write_text(" ".join(f"w{i}" for i in np.random.default_rng(0).integers(3, 320, 200)))
    return path


def report(tmp_path: Path, *argv: str) -> dict[str, Any]:
    path = tmp_path / "report.json"
    assert eval_tool.run([*argv, "--json", str(path)]) == 0
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_both_tools_say_the_same_perplexity(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (str(words), "-c", "48", *LLAMA)
    engine = {dtype: report(tmp_path, "perplexity", *common, "--kv-dtype", dtype, "--max-num-batched-tokens", "64")
              for dtype in ("float32", "int8")}
    capsys.readouterr()
    pair = report(tmp_path, "compare", *common, "--kv-dtype", "int8")
    assert (engine["int8"]["kv_dtype"], engine["int8"]["num_windows"], pair["num_windows"]) == ("int8", 4, 4)
    # The engine's log-probabilities are float32.
    assert pair["perplexity"] == pytest.approx(engine["int8"]["perplexity"], rel=1e-5)
    assert pair["against_perplexity"] == pytest.approx(engine["float32"]["perplexity"], rel=1e-5)
    assert 0 < pair["mean_kl"] <= pair["max_kl"] < 0.1
    assert 0 < pair["mean_logprob_error"] <= pair["max_logprob_error"] < 0.5
    assert 50 < pair["same_top"] <= 100
    assert (pair["settings"]["kv_dtype"], pair["against"]["kv_dtype"]) == ("int8", "float32")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[1]")
    assert lines[1].split() == ["Perplexity:", f"{pair['perplexity']:.4f}"]
    assert len(lines) == 11


@pytest.mark.parametrize("against", ["", "--threads 2", "--threads=2", "--host-math exact"])
def test_a_setting_is_not_apart_from_itself(against: str, words: Path, tmp_path: Path) -> None:
    same = report(tmp_path, "compare", str(words), "-c", "64", "--model", str(MODELS / "gemma3"), "--threads", "1",
                  "--kv-dtype", "bf16", "--against", against)
    assert (same["mean_kl"], same["max_kl"], same["max_logprob_error"], same["same_top"]) == (0, 0, 0, 100)
    assert same["perplexity_change"] == 0


def test_windows_longer_than_a_pass(words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many passes a window, of which the first have no row that is scored."""
    argv = ("compare", str(words), "-c", "100", *LLAMA, "--kv-dtype", "int8")
    whole = report(tmp_path, *argv)
    monkeypatch.setattr("tools.eval_compare.STEP_TOKENS", 7)
    monkeypatch.setattr("tools.eval_compare.LOGITS_ROWS", 5)
    chunked = report(tmp_path, *argv)
    for figure in ("mean_kl", "perplexity", "max_logprob_error", "num_scored", "same_top"):
        assert chunked[figure] == pytest.approx(whole[figure], rel=1e-12)


@pytest.mark.parametrize(("argv", "message"), [
    (["--seed", "3"], "--seed changes no logit, so that there is nothing to compare"),
    (["--against", "--seed 3"], "--seed in --against changes no logit, so that there is nothing to compare"),
    (["--against", "--nope"], "--against: unrecognized arguments: --nope"),
    (["--against", "--kv-dtype int4"], "--against: argument --kv-dtype: invalid choice: 'int4'"),
    (["--against", "'"], "--against: No closing quotation"),
    (["--against", "--device cuda"], "device cuda: "),
    (["--against", "--model /no/such/model"], "/no/such/model"),
    (["-c", "257"], "--ctx-size: 257 is more than the 256 positions"),
    (["-c", "256"], "the text has 200 tokens, a window 256"),
    (["--device", "cuda"], "--device cuda: compare runs on cpu; perplexity runs on cuda too"),
])
def test_comparisons_that_cannot_be_made(argv: list[str], message: str, words: Path,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    assert eval_tool.run(["compare", str(words), "-c", "32", *LLAMA, *argv]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err.splitlines()[-1]
    assert "Traceback" not in output.err


def test_models_of_different_vocabularies(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    shutil.copytree(MODELS / "llama", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["w5"], ids["w6"] = ids["w6"], ids["w5"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    words.write_text("w5 " * 40)
    assert eval_tool.run(["compare", str(words), "-c", "32", *LLAMA, "--against", f"--model '{other}'"]) == 2
    assert capsys.readouterr().err.endswith(
        "eval: --against: a model with another vocabulary, whose logits belong to other tokens\n")
