"""Put load on a server, or on an engine in this process, and report what vLLM's `bench serve` reports.

  python -m tools.bench --concurrency 32 --num-prompts 64 --input-len 128 --output-len 64 --ignore-eos
  python -m tools.bench --url http://127.0.0.1:8000 --request-rate 4 --input-len sharegpt --output-len sharegpt

Prompts are random token ids, so that every server gets the same prompts from the same --seed; without --seed they
differ from run to run and no prefix cache can answer them. What the figures mean: tools/bench_report.py.
"""
from __future__ import annotations

import argparse
import asyncio
import math
import random
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from actors.sampling_params import SamplingParams
from tools import bench_report, bench_workloads
from tools.bench_report import RequestRecord
from tools.bench_workloads import Request
from tools.client_args import SWITCH_INTERVAL_S, EngineFactory, reject_engine_args
from tools.engine_args import add_engine_args, engine_config, start_logging
from tools.json_report import check_report_path, write_report
from tools.openai_stream import first_model, stream_completion
from tools.sse_client import ServerError, server_root

if TYPE_CHECKING:
    from api.engine import Engine, EngineStats


class Target(Protocol):
    """What is under load."""

    async def send(self, request: Request, record: RequestRecord) -> None:
        """Run one request to its end and fill in the record. Raises: RuntimeError or ValueError where it fails."""


class ServerTarget:
    def __init__(self, root: str, model: str, temperature: float, ignore_eos: bool) -> None:
        self._root = root
        self._body: dict[str, Any] = {"model": model, "temperature": temperature}
        if ignore_eos:
            self._body["ignore_eos"] = True
        self.num_without_usage = 0          # answers whose tokens had to be counted as outputs

    async def send(self, request: Request, record: RequestRecord) -> None:
        body = self._body | {"max_tokens": request.output_len}
        if isinstance(request.prompt, str):
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = list(request.prompt)
        usage = None
        async for chunk in stream_completion(self._root, body):
            now_s = time.perf_counter()
            if chunk.has_choice:
                record.end_s = now_s
            if chunk.is_output:
                record.output_times_s.append(now_s)
            usage = chunk.usage or usage
        if usage is None:
            self.num_without_usage += 1
            record.num_input_tokens = len(request.prompt.split() if isinstance(request.prompt, str) else request.prompt)
            record.num_output_tokens = len(record.output_times_s)
        else:
            record.num_input_tokens, record.num_output_tokens = usage.num_prompt_tokens, usage.num_output_tokens


class EngineTarget:
    def __init__(self, engine: Engine, temperature: float, ignore_eos: bool) -> None:
        self._engine = engine
        self._temperature = temperature
        self._ignore_eos = ignore_eos

    async def send(self, request: Request, record: RequestRecord) -> None:
        prompt = [{"role": "user", "content": request.prompt}] if isinstance(request.prompt, str) else request.prompt
        sampling = SamplingParams(max_tokens=request.output_len, temperature=self._temperature,
                                  ignore_eos=self._ignore_eos)
        async for delta in self._engine.generate(prompt, sampling):
            record.end_s = time.perf_counter()
            if delta.token_ids:
                record.output_times_s.append(record.end_s)
            if delta.usage is not None:
                record.num_input_tokens = delta.usage.num_prompt_tokens
                record.num_output_tokens = delta.usage.num_output_tokens
            if delta.finish not in (None, "stop", "length"):
                raise RuntimeError(f"the request was {delta.finish}: {delta.error}")


async def run_load(target: Target, requests: Sequence[Request], due_s: Sequence[float], concurrency: int | None,
                   timeout_s: float, report: Callable[[int], None]) -> tuple[list[RequestRecord], float]:
    """Send each request when it is due and fewer than `concurrency` are under way; (records, seconds in all).

    A request's clock starts when it is sent, not while it waits for its turn here. `report` gets the number done.
    """
    gate: AbstractAsyncContextManager[object] = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
    records = [RequestRecord() for _ in requests]
    num_done = 0

    async def run_one(request: Request, record: RequestRecord) -> None:
        nonlocal num_done
        async with gate:
            record.start_s = time.perf_counter()
            try:
                async with asyncio.timeout(timeout_s):
                    await target.send(request, record)
            except TimeoutError:
                record.error = f"no complete answer within {timeout_s:g} s"
            except (ValueError, RuntimeError) as error:
                record.error = str(error) or type(error).__name__
        num_done += 1
        report(num_done)

    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for request, record, due in zip(requests, records, due_s, strict=True):
            if (wait_s := start_s + due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(run_one(request, record))
    return records, time.perf_counter() - start_s


class Bench:
    """One run, from checked arguments to the printed block."""

    def __init__(self, args: argparse.Namespace, command: Sequence[str]) -> None:
        """Raises: ValueError for arguments that make no sense."""
        self.args = args
        self.command = command
        self.input_len = _named("--input-len", bench_workloads.input_length, args.input_len)
        self.output_len = _named("--output-len", bench_workloads.output_length, args.output_len)
        self.vocab_range = _named("--vocab-range", bench_workloads.parse_vocab_range, args.vocab_range)
        self.goodput = bench_report.parse_goodput(args.goodput)
        for flag, value in (("--request-rate", args.request_rate), ("--burstiness", args.burstiness),
                            ("--timeout", args.timeout)):
            if not value > 0:               # refuses nan too
                raise ValueError(f"{flag}: must be greater than 0, got {value:g}")
        if math.isinf(args.burstiness):
            raise ValueError("--burstiness: must be finite")
        for flag, value, least in (("--num-prompts", args.num_prompts, 1), ("--num-warmups", args.num_warmups, 0),
                                   ("--shared-prefix", args.shared_prefix, 0), ("--concurrency", args.concurrency, 1)):
            if value is not None and value < least:
                raise ValueError(f"{flag}: must be at least {least}, got {value}")
        SamplingParams(temperature=args.temperature)
        check_report_path(args.json)
        self.seed = secrets.randbits(32) if args.seed is None else args.seed

    async def on_server(self) -> int:
        args = self.args
        root = server_root(args.url)
        model = args.model or await first_model(root)
        target = ServerTarget(root, model, args.temperature, args.ignore_eos)
        metrics = await self.measure(target, f"{root} (model {model})")
        if target.num_without_usage:
            _say(f"{target.num_without_usage} answers came without usage: their tokens are counted as streamed outputs")
        return self.finish(metrics, "openai-chat" if args.endpoint == "chat" else "openai", model, {})

    async def in_process(self, engine_factory: EngineFactory | None, default_model: str) -> int:
        from api.engine import Engine  # late: it brings the compiler, which a server's client can do without
        args = self.args
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        async with (engine_factory or Engine.start)(args.model or default_model, progress=_say,
                                                    **engine_config(args)) as engine:
            info = engine.info
            if args.endpoint == "completions" and self.vocab_range[1] > info.vocab_size:
                raise ValueError(f"--vocab-range: {args.vocab_range} ends beyond the {info.vocab_size} tokens "
                                 f"of {info.model}")
            before: list[EngineStats] = []
            metrics = await self.measure(EngineTarget(engine, args.temperature, args.ignore_eos),
                                         f"{info.model} on {info.device}", lambda: before.append(engine.stats()))
            overhead = None if metrics is None else _engine_overhead(before[0], engine.stats())
            extra = {"engine_overhead": overhead, "device": info.device, "model_path": info.model_path,
                     "startup_s": dict(info.startup_s)}
            code = self.finish(metrics, "troupe", info.model, extra)
        if overhead is not None:
            print(f"{'Engine overhead (%):':<40} {100 * overhead:<10.2f}")
        return code

    async def measure(self, target: Target, what: str, on_start: Callable[[], None] = lambda: None
                      ) -> dict[str, Any] | None:
        """Warm up, call `on_start`, run; None where every warm-up failed."""
        args = self.args
        rng = random.Random(self.seed)
        requests = bench_workloads.make_requests(
            rng, args.num_prompts + args.num_warmups, self.input_len, self.output_len, args.shared_prefix,
            self.vocab_range, as_text=args.endpoint == "chat")
        due_s = bench_workloads.arrival_times(rng, args.num_prompts, args.request_rate, args.burstiness)
        _say(f"{args.num_prompts} requests to {what}, seed {self.seed}")
        if args.num_warmups:
            warmups, _ = await run_load(target, requests[args.num_prompts:], [0.0] * args.num_warmups,
                                        args.concurrency, args.timeout, _progress("warm-up", args.num_warmups))
            if all(record.error for record in warmups):
                _say(f"every warm-up failed: {warmups[0].error}")
                return None
        on_start()
        records, duration_s = await run_load(target, requests[:args.num_prompts], due_s, args.concurrency,
                                             args.timeout, _progress("done", args.num_prompts))
        errors = [record.error for record in records if record.error]
        if errors:
            _say(f"{len(errors)} of {len(records)} requests failed, the first with: {errors[0]}")
        return bench_report.compute_metrics(records, duration_s, self.goodput) | {
            "first_error": errors[0] if errors else ""}

    def finish(self, metrics: dict[str, Any] | None, backend: str, model: str, extra: dict[str, Any]) -> int:
        """Print the block and write the JSON document; the exit code."""
        if metrics is None:
            return 1
        args = self.args
        print(bench_report.console_block(metrics, args.concurrency, args.request_rate))
        if args.json is not None:
            write_report(args.json, "bench", self.command, {
                "backend": backend, "model_id": model, "num_prompts": args.num_prompts,
                "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
                "burstiness": args.burstiness, "max_concurrency": args.concurrency, **metrics, **extra,
                "input_len": args.input_len, "output_len": args.output_len, "shared_prefix": args.shared_prefix,
                "endpoint": args.endpoint, "ignore_eos": args.ignore_eos, "temperature": args.temperature,
                "num_warmups": args.num_warmups, "seed": self.seed, "goodput": self.goodput,
            })
        return 0 if metrics["completed"] else 1


def _named(flag: str, parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _engine_overhead(before: EngineStats, after: EngineStats) -> float | None:
    """The share of the engine's busy time that is no forward pass; None where it never was busy."""
    busy_s = after.busy_s - before.busy_s
    return (busy_s - (after.forward_s - before.forward_s)) / busy_s if busy_s > 0 else None


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr)


def _progress(word: str, num_requests: int) -> Callable[[int], None]:
    """A counter on one line of the terminal; nothing where standard error is none."""
    if not sys.stderr.isatty():
        return lambda num_done: None
    return lambda num_done: print(f"\rbench: {num_done}/{num_requests} {word}", file=sys.stderr, flush=True,
                                  end="\n" if num_done == num_requests else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    load = parser.add_argument_group("load")
    load.add_argument("--url", help="a running OpenAI-compatible server; without it an engine is started here")
    load.add_argument("--endpoint", choices=("completions", "chat"), default="completions",
                      help="chat takes text alone: its prompts are common words, about a token each (default: "
                           "%(default)s)")
    load.add_argument("--concurrency", "--max-concurrency", type=int, metavar="N",
                      help="at most N requests under way, the next sent as one ends (default: no bound)")
    load.add_argument("--request-rate", type=float, default=math.inf, metavar="R",
                      help="requests per second, at random moments (default: all are due at once)")
    load.add_argument("--burstiness", type=float, default=1.0, metavar="B",
                      help="shape of the gaps under --request-rate: 1 Poisson, less burstier, more evener")
    load.add_argument("--num-prompts", type=int, default=100, metavar="N", help="requests measured (default: 100)")
    load.add_argument("--num-warmups", type=int, default=1, metavar="N",
                      help="requests before, with prompts of their own, that are not counted (default: 1)")
    load.add_argument("--timeout", type=float, default=900.0, metavar="S",
                      help="seconds after which a request has failed (default: 900)")
    work = parser.add_argument_group("workload")
    work.add_argument("--input-len", default="128", metavar="LEN",
                      help="prompt tokens: 128, 64:256 (uniform) or sharegpt (log-normal) (default: %(default)s)")
    work.add_argument("--output-len", default="64", metavar="LEN", help="likewise, tokens asked for (default: "
                      "%(default)s)")
    work.add_argument("--shared-prefix", type=int, default=0, metavar="N",
                      help="N more tokens in front of each prompt, the same for all")
    work.add_argument("--vocab-range", default="1000:30000", metavar="FIRST:END",
                      help="token ids that prompts are drawn from (default: %(default)s)")
    work.add_argument("--ignore-eos", action="store_true", help="let every answer have its full length")
    work.add_argument("--temperature", type=float, default=0.0, help="(default: 0)")
    report = parser.add_argument_group("report")
    report.add_argument("--goodput", nargs="+", default=[], metavar="KEY:MS",
                        help="limits on ttft, tpot, e2el that make a request good, e.g. ttft:500 tpot:50")
    report.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, with machine and versions")
    add_engine_args(parser)
    return parser


def run(argv: Sequence[str], engine_factory: EngineFactory | None = None) -> int:
    """The exit code: 0, 1 where no request succeeded, 2 where the arguments, the model or the server cannot be used.

    engine_factory: in place of Engine.start.
    """
    parser = _parser()
    default_model = parser.get_default("model")
    parser.set_defaults(model=None)         # a server's model is the first that it lists
    args = parser.parse_args(argv)
    try:
        bench = Bench(args, argv)
        start_logging(args)
        if args.url is not None:
            reject_engine_args(args, allowed=("model", "seed"))
            return asyncio.run(bench.on_server())
        return asyncio.run(bench.in_process(engine_factory, default_model))
    except (ValueError, OSError, ServerError) as error:
        _say(str(error))
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


def main() -> int:
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
