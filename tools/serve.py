"""Serve a model over HTTP to clients of OpenAI and Anthropic; GET /openapi.json describes every route.

  python -m tools.serve --model smollm2 --port 8000

The port is bound before the model is read; until it is ready, /health answers 503. SIGTERM or SIGINT: new requests get
503 and running ones finish, for at most --shutdown-timeout seconds; a second signal ends at once.

Exit code: 0 after a signal, 1 where the port or the model cannot be used or the engine ended, 2 for bad arguments,
128 + N where signal N ended it at once.
"""
from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from tools.client_args import SWITCH_INTERVAL_S, EngineFactory
from tools.engine_args import engine_config, start_logging
from tools.serve_args import check_tls, door_config, others_may_read, serve_parser

# NOTE: nothing that reads or computes a model is imported before the port is bound: a port that is in use is told at
# once. So `api` and uvicorn come inside functions.
if TYPE_CHECKING:
    from api.engine import Engine, EngineInfo
    from api.service import Service

log = logging.getLogger("troupe.serve")

BACKLOG = 2048
ENGINE_CHECK_S = 0.5                        # how often the engine's life is looked at
KEEP_ALIVE_S = 65                           # longer than most clients keep an idle connection: they close it first
CLOSE_TIMEOUT_S = 5                         # for answers that are complete to reach their readers


class Signals:
    """The first signal asks to stop, if there is something to finish; before that, or asked again, it ends at once."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def install(self) -> None:
        for name in ("SIGINT", "SIGTERM", "SIGBREAK"):
            if hasattr(signal, name):       # SIGBREAK is Windows'
                signal.signal(getattr(signal, name), self._handle)

    def expect_stop(self) -> None:
        """From now on the first signal sets `stop`, in the running loop."""
        self._loop = asyncio.get_running_loop()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._loop is None:
            # NOTE: no clean-up: loading cannot be interrupted, nor an engine that did not stop when asked.
            os._exit(128 + number)
        self._loop.call_soon_threadsafe(self.stop.set)
        self._loop = None


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": self.formatTime(record), "level": record.levelname, "logger": record.name,
                 "message": record.getMessage()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, on IPv4 where the host has both. Raises: OSError."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":              # elsewhere the option would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


async def serve(args: argparse.Namespace, listener: socket.socket, signals: Signals,
                engine_factory: EngineFactory | None) -> int:
    """The exit code."""
    # Imports take a good part of a second; the socket answers to the system meanwhile.
    import uvicorn

    from api.connections import connections
    from api.engine import Engine
    from api.server import create_app
    from api.service import Service

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield                           # signals are ours

    try:
        door = door_config(args)
    except (ValueError, OSError) as error:
        _say(str(error))
        return 1
    _log_door(args, len(door.keys))
    service = Service(door)
    server = Server(uvicorn.Config(create_app(service), http=connections(door.idle_timeout_s), log_config=None,
                                   access_log=args.log_level == "debug", lifespan="off",
                                   timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
                                   backlog=BACKLOG, ssl_certfile=args.ssl_certfile, ssl_keyfile=args.ssl_keyfile))
    answering = asyncio.create_task(server.serve(sockets=[listener]))
    begin_s = time.monotonic()
    settings = engine_config(args)
    if args.served_model_name:
        settings["served_model_name"] = tuple(args.served_model_name)
    try:
        async with (engine_factory or Engine.start)(args.model, progress=log.info, **settings) as engine:
            gc.enable()
            signals.expect_stop()
            service.serve(engine)
            _log_answers(service)
            _log_start(engine.info, time.monotonic() - begin_s)
            await _until_asked_or_dead(engine, signals.stop)
            if engine.dead is not None:
                _say(f"the engine ended: {engine.dead}")
                return 1
            log.info("stopping: %d requests are open", service.num_open)
            if not await service.drain(args.shutdown_timeout):
                log.warning("%d requests did not finish within %g s", service.num_open, args.shutdown_timeout)
    except (ValueError, OSError) as error:
        _say(str(error))
        return 1
    finally:
        # The engine is over: requests that were still open end with an error of their own.
        server.should_exit = True
        await answering
    return 0


async def _until_asked_or_dead(engine: Engine, stop: asyncio.Event) -> None:
    while engine.dead is None and not stop.is_set():
        try:
            async with asyncio.timeout(ENGINE_CHECK_S):
                await stop.wait()
        except TimeoutError:
            pass


def _log_door(args: argparse.Namespace, num_keys: int) -> None:
    if num_keys:
        log.info("%d API keys: every path but /health asks for one", num_keys)
    elif args.host not in ("127.0.0.1", "::1", "localhost"):
        log.warning("no API key is asked for: whoever reaches %s can use this server (--api-key-file)", args.host)
    if args.api_key_file is not None and others_may_read(args.api_key_file):
        log.warning("%s can be read by other users of this machine: chmod 600 it", args.api_key_file)


def _log_answers(service: Service) -> None:
    answers = service.answers
    log.info("answers: tool calls %s, thoughts %s",
             f"as {answers.tools.name}" if answers.tools else "are left in the text",
             f"as {answers.reasoning.name}" if answers.reasoning else "are left in the text")


def _log_start(info: EngineInfo, elapsed_s: float) -> None:
    log.info("model %s (%s) from %s", ", ".join(info.model_names), info.architecture, info.model_path)
    log.info("device %s: %s", info.device, info.device_reason)
    log.info("weights: %.1f MiB in memory, %.1f MiB in the file", info.weight_bytes / 2**20, info.file_bytes / 2**20)
    log.info("stop tokens: %s", ", ".join(
        f"{token_id} {token!r}" for token_id, token in zip(info.stop_token_ids, info.stop_tokens, strict=True)))
    log.info("KV cache: %d tokens in %.0f MiB of %s, enough for %.1f sequences of the full %d tokens",
             info.kv_capacity_tokens, info.kv_bytes / 2**20, info.kv_dtype, info.num_full_requests, info.max_model_len)
    log.info("a step computes at most %d tokens: a running answer waits for its next token no longer than such a step "
             "takes", info.max_num_batched_tokens)
    log.info("ready after %.2f s", elapsed_s)


def _say(line: str) -> None:
    print(f"serve: {' '.join(line.split())}", file=sys.stderr)


def run(argv: Sequence[str], engine_factory: EngineFactory | None = None) -> int:
    """The exit code. `engine_factory`: in place of Engine.start."""
    args = serve_parser(__doc__).parse_args(argv)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    start_logging(args)
    if args.log_level == "debug":
        logging.getLogger("uvicorn").setLevel(logging.INFO)     # a line a request, without its body
    if args.log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
    signals = Signals()
    signals.install()
    try:
        check_tls(args)
    except (ValueError, OSError) as error:
        _say(str(error))
        return 1
    try:
        listener = listen(args.host, args.port)
    except OSError as error:
        _say(f"cannot listen on {args.host} port {args.port}: {error.strerror or error}")
        return 1
    host, port = listener.getsockname()[:2]
    log.info("listening on %s://%s:%d; loading %s", "http" if args.ssl_certfile is None else "https",
             f"[{host}]" if ":" in host else host, port, args.model)
    gc.disable()                            # what a start makes stays: to look for garbage would take a tenth of it
    try:
        return asyncio.run(serve(args, listener, signals, engine_factory))
    finally:
        gc.enable()


def main() -> int:
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
