"""What the way in and out costs beside the model: a chat's parsing, a streamed token, /health meanwhile, a grammar.

  python -m tools.bench_door --streams 128 --tokens 128

The server runs in this process and its clients in another one. A token's times are the processor's, of the thread of
the server's event loop and of the engine's (scheduler, KV pool, tokenizer); the model's forward pass is in neither.
They are what answers of twice as many tokens take more, so that a request's own cost is not in them. "Even pace" is a
stand-in for an engine whose model computes elsewhere: where it computes on the same cores, the server finds nothing of
its own in their caches.
"""
from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import multiprocessing
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from actors.messages import ChatPrompt, TextDelta, Usage
from actors.output import OutputRouter, OutputStream
from actors.sampling_params import SamplingParams, StructuredOutputs
from tools.bench_workloads import WORDS
from tools.client_args import SWITCH_INTERVAL_S, EngineFactory
from tools.engine_args import add_engine_args, engine_config, start_logging
from tools.json_report import check_report_path, write_report

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from api.engine import Engine

CHAT_WORDS = 1900                           # about 2,000 tokens
CHAT_TURNS = 20
CHAT_REPEATS = 200
GRAMMAR_ROWS = 32
HEALTH_PERIOD_S = 0.1
PACE_S = 0.03
ENGINE_THREAD = "troupe-engine"
SENDS = 2000
ITEMS_SCHEMA = {"type": "array", "minItems": 1000, "items": {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
    "required": ["name", "count"], "additionalProperties": False}}

Figures = dict[str, Any]


def chat_body(model: str) -> bytes:
    rng = random.Random(0)
    messages = [{"role": "user" if turn % 2 == 0 else "assistant",
                 "content": " ".join(rng.choices(WORDS, k=CHAT_WORDS // CHAT_TURNS))} for turn in range(CHAT_TURNS + 1)]
    return json.dumps({"model": model, "messages": messages, "max_tokens": 100, "temperature": 0.7}).encode()


async def measure_chat(engine: Engine) -> Figures:
    """From a request's bytes to its prompt's text: parsed, validated, lowered, rendered. Tokenisation is not in it."""
    import orjson

    from actors.prompts import render_chat
    from api.openai.schemas import ChatRequest
    from api.schemas import parse
    from weights.load import open_model
    from weights.vocab import Vocab

    body, vocab = chat_body(engine.info.model), Vocab.load(open_model(Path(engine.info.model_path)))
    seconds, text = [], ""
    for _ in range(CHAT_REPEATS):
        begin_s = time.perf_counter()
        request, _ = parse(body, ChatRequest)
        messages = [message.plain() for message in request.messages]
        text = render_chat(vocab, ChatPrompt(orjson.dumps(messages)))
        seconds.append(time.perf_counter() - begin_s)
    return {"chat_bytes": len(body), "chat_tokens": len(vocab.encode(text)),
            "chat_in_ms": 1e3 * statistics.median(seconds)}


class PacedEngine:
    """Every open stream gets a token every PACE_S, by the way that an engine's tokens come."""

    def __init__(self, engine: Engine) -> None:
        self.info, self.dead = engine.info, None
        self._default_sampling = engine.default_sampling
        self._router = OutputRouter()
        self._left: dict[str, int] = {}         # tokens
        self._ids = itertools.count()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="bench-pace", daemon=True)
        self._thread.start()

    def default_sampling(self, **changes: Any) -> SamplingParams:
        return self._default_sampling(**changes)

    async def generate(self, prompt: Any, sampling: SamplingParams, *,
                       on_delta: Callable[[TextDelta], bool] | None = None, **_: Any) -> AsyncIterator[TextDelta]:
        assert sampling.max_tokens is not None, "the bench asks for a number"
        request_id = str(next(self._ids))
        stream = OutputStream(request_id, lambda request_id: None, on_delta)
        yield TextDelta(request_id, prompt_token_ids=(1,))
        self._router.open(stream)
        self._left[request_id] = sampling.max_tokens
        try:
            while True:
                delta = await stream.next()
                yield delta
                if delta.finish is not None:
                    return
        finally:
            self._left.pop(request_id, None)
            self._router.close(request_id)

    def _tick(self) -> None:
        while not self._ended.wait(PACE_S):
            deltas = []
            for request_id, left in list(self._left.items()):
                self._left[request_id] = left - 1
                if left > 1:
                    deltas.append(TextDelta(request_id, " word", (1000,)))
                elif left == 1:
                    deltas.append(TextDelta(request_id, " word", (1000,), finish="length", usage=Usage(1, 1)))
            self._router.deliver(deltas)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


async def measure_paced(engine: Engine, num_streams: int, num_tokens: int) -> Figures:
    """The door alone."""
    paced = PacedEngine(engine)
    try:
        figures = await measure_streams(cast("Engine", paced), num_streams, num_tokens)
    finally:
        paced.close()
    del figures["token_engine_cpu_us"]
    return {f"paced_{name}": value for name, value in figures.items()}


async def measure_streams(engine: Engine, num_streams: int, num_tokens: int) -> Figures:
    """`num_streams` chats at once, streamed over HTTP to another process, which asks for /health beside them."""
    short = await _stream(engine, num_streams, num_tokens)
    long = await _stream(engine, num_streams, 2 * num_tokens)
    more = num_streams * num_tokens
    return {"streams": num_streams, "tokens_per_stream": num_tokens,
            "token_server_cpu_us": 1e6 * (long["server_s"] - short["server_s"]) / more,
            "token_engine_cpu_us": 1e6 * (long["engine_s"] - short["engine_s"]) / more,
            "request_server_cpu_us": 1e6 * (2 * short["server_s"] - long["server_s"]) / num_streams,
            "send_cpu_us": _send_us(), "output_throughput": 2 * more / long["wall_s"],
            "health_ms": 1e3 * statistics.median(long["health_s"]), "health_max_ms": 1e3 * max(long["health_s"])}


async def _stream(engine: Engine, num_streams: int, num_tokens: int) -> Figures:
    import uvicorn

    from api.connections import connections
    from api.server import create_app
    from api.service import Service

    service = Service()
    service.serve(engine)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2 * num_streams)
    server = uvicorn.Server(uvicorn.Config(create_app(service), http=connections(None), log_config=None,
                                           access_log=False, lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        body = {"model": engine.info.model, "messages": [{"role": "user", "content": "Tell me a story."}],
                "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        arguments = (theirs, listener.getsockname()[1], json.dumps(body).encode(), num_streams)
        client = context.Process(target=_read_streams, args=arguments, daemon=True)
        client.start()
        try:
            theirs.close()                  # so that a client that dies is noticed
            await asyncio.to_thread(ours.recv)
            server_s, engine_s, begin_s = _cpu_s(None), _cpu_s(ENGINE_THREAD), time.perf_counter()
            ours.send("go")
            answer = await asyncio.to_thread(ours.recv)
            wall_s = time.perf_counter() - begin_s
            server_s, engine_s = _cpu_s(None) - server_s, _cpu_s(ENGINE_THREAD) - engine_s
        except EOFError:
            raise RuntimeError("the process with the clients ended early") from None
        finally:
            client.terminate()
            client.join()
    finally:
        server.should_exit = True
        await serving
    return {**answer, "wall_s": wall_s, "server_s": server_s, "engine_s": engine_s}


def _cpu_s(thread_name: str | None) -> float:
    """Processor time of a thread of this process; None: of the calling one."""
    if thread_name is None:
        return time.thread_time()
    for thread in threading.enumerate():
        if thread.name == thread_name and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return math.nan


def _send_us() -> float:
    """What the system itself takes to send an event's bytes to another socket of the machine, which is read at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as reader:
        writer, _ = listener.accept()
        with writer:
            data, seconds = b"x" * 256, []
            for _ in range(SENDS):
                begin_s = time.thread_time()
                writer.send(data)
                seconds.append(time.thread_time() - begin_s)
                reader.recv(4096)
    return 1e6 * statistics.median(seconds)


def _read_streams(pipe: Connection, port: int, body: bytes, num_streams: int) -> None:
    """The clients' process. It reads as cheaply as it can: the machine is the server's."""
    head = ("POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n")
    health = b"GET /health HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n"

    begun = asyncio.Semaphore(0)

    async def exchange(request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await reader.read(1 << 16)
        begun.release()
        answer += await reader.read(-1)
        writer.close()
        return answer

    async def ask_for_health(seconds: list[float]) -> None:
        for _ in range(num_streams):        # all have begun
            await begun.acquire()
        while True:
            begin_s = time.perf_counter()
            await exchange(health)
            seconds.append(time.perf_counter() - begin_s)
            await asyncio.sleep(HEALTH_PERIOD_S)

    async def main() -> dict[str, Any]:
        seconds: list[float] = []
        asking = asyncio.create_task(ask_for_health(seconds))
        answers = await asyncio.gather(*(exchange(head.encode() + body) for _ in range(num_streams)))
        asking.cancel()
        incomplete = [answer for answer in answers if b"data: [DONE]" not in answer]
        if incomplete:
            raise RuntimeError(f"{len(incomplete)} answers are not complete, one of them {incomplete[0][:500]!r}")
        return {"events": sum(answer.count(b"data: ") for answer in answers), "health_s": seconds}

    pipe.send("ready")
    pipe.recv()
    pipe.send(asyncio.run(main()))


async def measure_grammar(engine: Engine, num_tokens: int) -> Figures:
    """Steps of GRAMMAR_ROWS rows, free and bound by a JSON schema."""
    schema = StructuredOutputs("json", json.dumps(ITEMS_SCHEMA))

    async def one(sampling: SamplingParams) -> float:
        """Seconds a token after the first."""
        times = [time.perf_counter() async for delta in engine.generate("A list:", sampling) if delta.token_ids]
        return (times[-1] - times[0]) / (num_tokens - 1)

    async def tpot_s(form: StructuredOutputs | None) -> float:
        each = [SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=seed, ignore_eos=True,
                               structured_outputs=form) for seed in range(GRAMMAR_ROWS)]
        return statistics.median(await asyncio.gather(*map(one, each)))

    runs = [(await tpot_s(None), await tpot_s(schema)) for _ in range(3)]
    free_s, bound_s = (statistics.median(column) for column in zip(*runs, strict=True))
    return {"free_step_ms": 1e3 * free_s, "bound_step_ms": 1e3 * bound_s,
            "grammar_loss": bound_s / free_s - 1}


MEASURES: dict[str, Callable[[Engine, argparse.Namespace], Awaitable[Figures]]] = {
    "chat": lambda engine, args: measure_chat(engine),
    "paced": lambda engine, args: measure_paced(engine, args.streams, args.tokens),
    "streams": lambda engine, args: measure_streams(engine, args.streams, args.tokens),
    "grammar": lambda engine, args: measure_grammar(engine, args.tokens),
}


_TOKEN = ("a token of {{{1}streams}} streams {0}: {{{1}token_server_cpu_us:.1f}} µs of the server's thread, of which a "
          "bare send is {{{1}send_cpu_us:.1f}}{2}; a request itself {{{1}request_server_cpu_us:.0f}} µs; "
          "/health meanwhile {{{1}health_ms:.1f}} ms, at most {{{1}health_max_ms:.1f}}; "
          "{{{1}output_throughput:.0f}} tokens/s")


def report(figures: Figures) -> str:
    lines = {
        "chat_in_ms": "a chat of {chat_tokens} tokens, from bytes to its prompt's text: {chat_in_ms:.2f} ms",
        "paced_token_server_cpu_us": _TOKEN.format("at an even pace", "paced_", ""),
        "token_server_cpu_us": _TOKEN.format("beside the model", "", ", and {token_engine_cpu_us:.1f} of the engine's"),
        "grammar_loss": f"a step of {GRAMMAR_ROWS} rows: {{free_step_ms:.1f}} ms, under a JSON schema "
                        "{bound_step_ms:.1f} ({grammar_loss:+.1%})",
    }
    return "\n".join(line.format(**figures) for key, line in lines.items() if key in figures)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_door", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128, metavar="N", help="at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="of each answer (default: %(default)s)")
    parser.add_argument("--only", choices=MEASURES, nargs="+", default=list(MEASURES), help="(default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, with machine and versions")
    add_engine_args(parser)
    return parser


async def _measure(args: argparse.Namespace, engine_factory: EngineFactory | None) -> Figures:
    from api.engine import Engine

    settings = {"max_num_seqs": max(args.streams, GRAMMAR_ROWS), "max_model_len": 2048, **engine_config(args)}
    figures: Figures = {}
    async with (engine_factory or Engine.start)(args.model, **settings) as engine:
        for name in args.only:
            figures |= await MEASURES[name](engine, args)
    return figures


def run(argv: Sequence[str], engine_factory: EngineFactory | None = None) -> int:
    """The exit code: 0, or 2 where the arguments or the model cannot be used. engine_factory: in place of
    Engine.start."""
    args = _parser().parse_args(argv)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    start_logging(args)
    try:
        if args.streams < 1 or args.tokens < 2:
            raise ValueError("--streams must be at least 1 and --tokens at least 2")
        if not hasattr(time, "pthread_getcpuclockid"):
            raise ValueError("this system does not tell a thread's processor time")
        check_report_path(args.json)
        figures = asyncio.run(_measure(args, engine_factory))
    except (ValueError, OSError) as error:
        print(f"bench_door: {error}", file=sys.stderr)
        return 2
    print(report(figures))
    if args.json is not None:
        write_report(args.json, "bench_door", argv, figures)
    return 0


def main() -> int:
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
