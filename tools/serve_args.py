"""The server's own flags: where it listens, who may ask, how long he may take."""
from __future__ import annotations

import argparse
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from tools.engine_args import add_engine_args

if TYPE_CHECKING:
    from api.service import DoorConfig


def serve_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve", description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=_port, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--served-model-name", nargs="+", metavar="NAME",
                        help="what requests may call the model; replies say the first (default: the model's own name)")
    parser.add_argument("--shutdown-timeout", type=_seconds, default=30.0, metavar="SECONDS",
                        help="for running requests to finish after a signal; a second one ends at once (default: 30)")
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="(default: text)")
    door = parser.add_argument_group("door")
    door.add_argument("--api-key", action="append", default=[], metavar="KEY",
                      help="ask for this key, or another one given, on every path but /health; may be repeated. Others "
                           "on this machine can read it in the list of processes: --api-key-file keeps it from them")
    door.add_argument("--api-key-file", type=Path, metavar="FILE",
                      help="likewise, one key a line; # begins a comment")
    door.add_argument("--allow-origin", action="append", default=[], type=_origin, metavar="ORIGIN",
                      help="let web pages from there ask (CORS), e.g. https://example.org, or * for all; may be "
                           "repeated")
    door.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="serve HTTPS: the certificate and its chain")
    door.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="its key, where the certificate's file has none")
    door.add_argument("--request-timeout", type=_seconds, default=0.0, metavar="SECONDS",
                      help="for a whole answer (default: 0, no limit)")
    door.add_argument("--idle-timeout", type=_seconds, default=60.0, metavar="SECONDS",
                      help="for a client that sends its request slowly or does not take its answer; 0: no limit "
                           "(default: 60)")
    door.add_argument("--sse-keep-alive-interval", type=_seconds, default=15.0, metavar="SECONDS",
                      help="a stream has a comment where nothing else came for so long; 0: never (default: 15)")
    door.add_argument("--strict", action="store_true",
                      help="refuse requests with unknown fields (default: name them in a Warning header)")
    door.add_argument("--enable-per-request-metrics", action="store_true",
                      help="answers tell how long they took (default: those of requests with return_metrics)")
    add_answer_args(parser)
    add_engine_args(parser)
    parser.set_defaults(log_level="info")
    return parser


def add_answer_args(parser: argparse.ArgumentParser) -> None:
    # NOTE: `api.answers.formats` imports nothing that is slow.
    from api.answers.formats import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS

    answers = parser.add_argument_group("answers")
    answers.add_argument("--tool-call-parser", choices=(AUTO, NONE, *TOOL_PARSERS), default=AUTO, metavar="NAME",
                         help=f"how the model writes tool calls: {', '.join(TOOL_PARSERS)}; none leaves them in the "
                              "text (default: auto, by the chat template)")
    answers.add_argument("--reasoning-parser", choices=(AUTO, NONE, *REASONING_PARSERS), default=AUTO, metavar="NAME",
                         help=f"what stands round its thoughts: {', '.join(REASONING_PARSERS)}; none leaves them in "
                              "the text (default: auto, by the chat template)")


def door_config(args: argparse.Namespace) -> DoorConfig:
    """Raises: ValueError, OSError."""
    from api.guard import ApiKeys, read_keys
    from api.service import DoorConfig

    keys = list(args.api_key)
    if args.api_key_file is not None:
        try:
            in_file = read_keys(args.api_key_file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise ValueError(f"{args.api_key_file}: is not UTF-8 text") from None
        if not in_file:                     # NOTE: else the door would stand open
            raise ValueError(f"{args.api_key_file}: has no API key")
        keys += in_file
    return DoorConfig(ApiKeys(keys), tuple(args.allow_origin), args.request_timeout or None, args.idle_timeout or None,
                      args.sse_keep_alive_interval or None, args.strict, args.tool_call_parser, args.reasoning_parser,
                      args.enable_per_request_metrics)


def others_may_read(path: Path) -> bool:
    """Whether the file's mode lets other users of the machine read it."""
    return os.name == "posix" and bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def check_tls(args: argparse.Namespace) -> None:
    """NOTE: uvicorn reads the files when it starts, and then asks at the terminal for the password of a key.

    Raises: ValueError, OSError.
    """
    if args.ssl_certfile is None:
        if args.ssl_keyfile is not None:
            raise ValueError("--ssl-keyfile needs --ssl-certfile")
        return
    import ssl

    def no_password() -> str:
        raise ValueError("the key is encrypted: decrypt it first")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(args.ssl_certfile, args.ssl_keyfile, no_password)
    except ssl.SSLError as error:
        raise ValueError(f"--ssl-certfile and --ssl-keyfile: no certificate with its key "
                         f"({error.reason or 'not PEM'})") from None


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text[:6]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535; 0 takes a free one)")
    return int(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def _origin(text: str) -> str:
    """As browsers send it: with a path or a slash at the end it would never match."""
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[a-z0-9.-]+(:[0-9]{1,5})?|[a-z][a-z0-9+.-]*://\[[0-9a-f:]+\]"
                                        r"(:[0-9]{1,5})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an origin such as https://example.org:8443, or *")
    return text
