"""How well a model predicts a text (perplexity), and how far two settings of it are apart (compare).

  python -m tools.eval perplexity TEXT --kv-dtype int8
  python -m tools.eval compare TEXT --kv-dtype int8 --against "--kv-dtype float32"

Perplexity is what llama.cpp's llama-perplexity calls so: the text in windows of --ctx-size tokens that do not overlap,
the first token of each replaced by the beginning-of-text token where the model has one; e to the mean negative
log-probability of the tokens in the second half of each. It asks an engine for prompt log-probabilities. Control tokens
that the text spells are control tokens.

compare runs both settings side by side and looks at all logits of the same tokens: the Kullback-Leibler divergence of
this setting from the other, in nats, how often both have the same likeliest token, and how far the log-probability of
the token that did come next is off.
"""
from __future__ import annotations

import argparse
import asyncio
import copy
import shlex
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from actors.sampling_params import SamplingParams
from tools.client_args import EngineFactory, reject_engine_args
from tools.engine_args import add_engine_args, engine_config, start_logging
from tools.eval_perplexity import LEAST_WINDOW, Perplexity, scored_positions, text_windows
from tools.json_report import check_report_path, write_report

if TYPE_CHECKING:
    from api.engine import Engine
    from tools.eval_compare import Comparison

# What may change a logit, and how fast it comes.
COMPARED = ("model", "device", "dtype", "kv_dtype", "host_math", "threads")
PROMPT_LOGPROBS = SamplingParams(max_tokens=0, prompt_logprobs=0)


async def perplexity(args: argparse.Namespace, engine_factory: EngineFactory | None) -> dict[str, Any]:
    """Prints the running value after each window, then the last one with its error; the figures."""
    from api.engine import Engine  # late: it brings the compiler, which wrong arguments can do without
    text = _read(args.file)
    async with (engine_factory or Engine.start)(args.model, progress=_say, **engine_config(args)) as engine:
        info = engine.info
        if args.ctx_size > info.max_model_len:
            raise ValueError(f"--ctx-size: {args.ctx_size} is more than the context of {info.max_model_len} tokens")
        token_ids, prefix_ids = engine.encode(text), engine.encode("")
        windows = text_windows(token_ids, prefix_ids, args.ctx_size)[:args.chunks]
        _say(f"{len(token_ids)} tokens, {len(windows)} windows of {args.ctx_size}; {info.model} on {info.device}, "
             f"KV cache {info.kv_dtype}")
        # As many at once as the cache holds: one that is preempted would be computed again.
        at_once = max(1, min(info.max_num_seqs, info.kv_capacity_tokens // args.ctx_size))
        figure = Perplexity()
        begin_s = time.perf_counter()
        async for losses in window_losses(engine, windows, at_once):
            figure.add(losses)
            print(f"[{figure.num_scored // len(losses)}]{figure.value:.4f},", end="", flush=True)
        elapsed_s = time.perf_counter() - begin_s
        print(f"\nFinal estimate: PPL = {figure.value:.4f} +/- {figure.error:.5f}")
        return {"model_id": info.model, "device": info.device, "kv_dtype": info.kv_dtype, "num_tokens": len(token_ids),
                "num_windows": len(windows), "num_scored": figure.num_scored, "perplexity": figure.value,
                "perplexity_error": figure.error, "duration": elapsed_s}


async def window_losses(engine: Engine, windows: Sequence[Sequence[int]], at_once: int) -> AsyncIterator[list[float]]:
    """Negative log-probabilities of each window's scored tokens, in the windows' order."""
    gate = asyncio.Semaphore(at_once)

    async def losses(window: Sequence[int]) -> list[float]:
        async with gate:
            completion = await engine.complete(window, PROMPT_LOGPROBS)
        return [-completion.prompt_logprobs[position].logprob for position in scored_positions(len(window))]

    tasks = [asyncio.create_task(losses(window)) for window in windows]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the figures, and gives them back."""
    reason = "changes no logit, so that there is nothing to compare"
    reject_engine_args(args, (*COMPARED, "log_level"), reason)
    other = _against(args)
    reject_engine_args(other, (*COMPARED, "log_level"), f"in --against {reason}")
    text = _read(args.file)
    from actors.system import EngineConfig
    from tools import eval_compare
    configs = [EngineConfig(model=side.model, **engine_config(side)) for side in (args, other)]
    models: list[eval_compare.WindowModel] = []
    try:
        for config in configs:
            models.append(eval_compare.WindowModel(config, args.ctx_size, _say))
        token_ids, prefix_ids = (_same(models, part) for part in (text, ""))
        windows = text_windows(token_ids, prefix_ids, args.ctx_size)[:args.chunks]
        _say(f"{len(token_ids)} tokens, {len(windows)} windows of {args.ctx_size}")
        for index, comparison in enumerate(eval_compare.compare(models[0], models[1], windows), 1):
            print(f"[{index}]{comparison.this.value:.4f}/{comparison.against.value:.4f},", end="", flush=True)
    finally:
        for model in models:
            model.close()
    figures = _figures(comparison)
    print()
    for label, key, form in ROWS:
        print(f"{label + ':':<40} {figures[key]:{form}}")
    return {"model_id": args.model, "settings": engine_config(args), "against": engine_config(other),
            "against_model_id": other.model, "num_tokens": len(token_ids), "num_windows": len(windows), **figures}


ROWS = (                                    # (label, figure, format)
    ("Perplexity", "perplexity", ".4f"),
    ("  standard error", "perplexity_error", ".4f"),
    ("Perplexity of the other", "against_perplexity", ".4f"),
    ("  standard error", "against_perplexity_error", ".4f"),
    ("Change of perplexity (%)", "perplexity_change", "+.3f"),
    ("Mean KL divergence (nats)", "mean_kl", ".6f"),
    ("Largest KL divergence (nats)", "max_kl", ".6f"),
    ("Same top token (%)", "same_top", ".2f"),
    ("Mean |logprob error|", "mean_logprob_error", ".5f"),
    ("Largest |logprob error|", "max_logprob_error", ".5f"),
)


def _figures(comparison: Comparison) -> dict[str, float]:
    this, against = comparison.this, comparison.against
    return {
        "num_scored": this.num_scored,
        "perplexity": this.value, "perplexity_error": this.error,
        "against_perplexity": against.value, "against_perplexity_error": against.error,
        "perplexity_change": 100 * (this.value / against.value - 1),
        "mean_kl": sum(comparison.divergences) / this.num_scored, "max_kl": max(comparison.divergences),
        "same_top": 100 * comparison.num_same_top / this.num_scored,
        "mean_logprob_error": sum(comparison.errors) / this.num_scored, "max_logprob_error": max(comparison.errors),
    }


def _same(models: Sequence[Any], text: str) -> list[int]:
    """The text's ids. Raises: ValueError where two models disagree about them."""
    ids, other_ids = (model.vocab.encode(text) for model in models)
    if ids != other_ids or models[0].vocab_size != models[1].vocab_size:
        raise ValueError("--against: a model with another vocabulary, whose logits belong to other tokens")
    return list(ids)


class _AgainstParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"--against: {message}")


def _against(args: argparse.Namespace) -> argparse.Namespace:
    """The flags of this side with those of --against in their place. Raises: ValueError."""
    parser = _AgainstParser(add_help=False)
    add_engine_args(parser)
    try:
        words = shlex.split(args.against)
    except ValueError as error:             # a quotation without end
        raise ValueError(f"--against: {error}") from None
    return parser.parse_args(words, copy.copy(args))


def _against_joined(argv: Sequence[str]) -> list[str]:
    """NOTE: argparse takes a word such as --kv-dtype=int8 for a flag, even where it is the word of --against."""
    words = list(argv)
    if "--against" in words[:-1]:
        index = words.index("--against")
        words[index:index + 2] = [f"--against={words[index + 1]}"]
    return words


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _say(line: str) -> None:
    print(f"eval: {line}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eval", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("perplexity", "of a text under a model"), ("compare", "two settings over a text")):
        command = commands.add_parser(name, help=text)
        command.add_argument("file", type=Path, metavar="TEXT", help="a file of plain text in UTF-8")
        command.add_argument("-c", "--ctx-size", type=int, default=512, metavar="N",
                             help="tokens of a window (default: %(default)s)")
        command.add_argument("--chunks", type=int, metavar="N", help="of the windows only the first N")
        command.add_argument("--json", type=Path, metavar="FILE",
                             help="write the figures there, with machine and versions")
        if name == "compare":
            command.add_argument("--against", default="--kv-dtype float32", metavar="FLAGS",
                                 help="the other setting: what differs from the flags given here, in one word "
                                      "(default: %(default)r)")
        add_engine_args(command)
    return parser


def run(argv: Sequence[str], engine_factory: EngineFactory | None = None) -> int:
    """The exit code: 0, 1 where the engine failed, 2 where the arguments, the text or the model cannot be used.

    engine_factory: in place of Engine.start.
    """
    args = _parser().parse_args(_against_joined(argv))
    try:
        if args.ctx_size < LEAST_WINDOW:
            raise ValueError(f"--ctx-size: must be at least {LEAST_WINDOW}, got {args.ctx_size}")
        if args.chunks is not None and args.chunks < 1:
            raise ValueError(f"--chunks: must be at least 1, got {args.chunks}")
        check_report_path(args.json)
        start_logging(args)
        figures = asyncio.run(perplexity(args, engine_factory)) if args.command == "perplexity" else compare(args)
        if args.json is not None:
            write_report(args.json, "eval", argv, {"file": str(args.file), "ctx_size": args.ctx_size, **figures})
        return 0
    except (ValueError, OSError) as error:
        _say(str(error))
        return 2
    except RuntimeError as error:           # RequestFailed, EngineDead
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


def main() -> int:
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
