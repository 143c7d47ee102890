"""Talk to a model in the terminal.

  python -m tools.chat "Why is the sky blue?"      one answer on standard output
  python -m tools.chat                             a conversation; /help lists its commands
  python -m tools.chat < questions.txt             each line is one turn of a conversation

Exit code: 0, 1 where a question was not answered, 2 where the arguments, the model or the server cannot be used, 130
after Ctrl-C. The text of answers alone goes to standard output; all else goes to standard error.
"""
from __future__ import annotations

import argparse
import asyncio
import gc
import io
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import Any, TextIO

from actors.messages import Usage
from actors.sampling_params import SamplingParams
from tools.chat_backends import (
    AnswerError,
    Backend,
    BackendLost,
    ContextFull,
    EngineBackend,
    Messages,
    NoChatTemplate,
    ServerBackend,
    StartError,
)
from tools.chat_screen import Answer, MarkdownAnswer, OutputLost, PlainAnswer, clean, typing_waits
from tools.client_args import SWITCH_INTERVAL_S, EngineFactory, reject_engine_args
from tools.engine_args import add_engine_args, engine_config, start_logging
from tools.openai_stream import first_model
from tools.sse_client import ServerError, server_root

SLOW_START_S = 2.0                          # from here on a start-up is worth a line even in a script
HELP = """\
  /system TEXT   set the system prompt (without TEXT: take it away)
  /reset         forget the conversation; the system prompt stays
  /stats         what this conversation and the engine have done
  /help          this list
  /exit          leave; so does Ctrl-D
Ctrl-C stops an answer, or clears the line. Alt-Enter begins a new line; pasted lines stay together.
A text that begins with a slash and one word: put a space before it."""


class Outcome(Enum):
    DONE = "done"
    STOPPED = "stopped"                     # by Ctrl-C
    FAILED = "failed"
    LOST = "lost"                           # and there will be no other answer


@dataclass(slots=True)
class Reply:
    """An answer as far as it has come."""
    start_s: float
    text: str = ""
    first_s: float | None = None            # when its first tokens came
    last_s: float = 0.0
    num_outputs: int = 0
    finish: str | None = None
    usage: Usage | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_outputs if self.usage is None else self.usage.num_output_tokens

    def summary(self) -> str:
        if self.first_s is None:
            return "no tokens"
        parts = [f"TTFT {self.first_s - self.start_s:.2f} s", f"{self.num_tokens} tokens"]
        if self.num_tokens > 1 and self.last_s > self.first_s:
            parts.append(f"{(self.num_tokens - 1) / (self.last_s - self.first_s):.1f} tokens/s")
        return ", ".join(parts)


class Chat:
    """A conversation: the messages so far, and how the next one is answered."""

    def __init__(self, backend: Backend, open_answer: Callable[[], Answer], system: str, raw: bool,
                 max_tokens: int | None, show_stats: bool, interactive: bool) -> None:
        self.backend = backend
        self.open_answer = open_answer
        self.system = system
        self.raw = raw                      # complete text where the model does not answer messages
        self.max_tokens = max_tokens
        self.show_stats = show_stats
        self.interactive = interactive
        self.history: Messages = []
        self.num_answers = 0
        self.num_tokens = 0
        self.last_usage: Usage | None = None

    async def ask(self, question: str) -> Outcome:
        """Stream one answer. Ctrl-C stops it, in a conversation; a partial answer stays in the conversation."""
        message = {"role": "user", "content": question.strip()}
        reply = Reply(start_s=time.perf_counter())
        stream = asyncio.create_task(self._answer(message, question, reply))
        loop = asyncio.get_running_loop()
        with _on_interrupt(lambda *_: loop.call_soon_threadsafe(stream.cancel)):
            await asyncio.wait([stream])
        if stream.cancelled():
            outcome = Outcome.STOPPED
        elif isinstance(error := stream.exception(), AnswerError):
            _note(str(error))
            if isinstance(error, ContextFull) and self.history:
                _note("the question is not kept; /reset forgets the conversation and makes room")
            return Outcome.LOST if isinstance(error, BackendLost) else Outcome.FAILED
        elif error is not None:
            raise error
        else:
            outcome = Outcome.DONE
        self._remember(message, reply, outcome)
        return outcome

    async def _answer(self, message: dict[str, str], text: str, reply: Reply) -> None:
        """Answer `message`, or complete `text`. Raises: AnswerError."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        if self.backend.has_chat_template:
            try:
                await self._stream([*system, *self.history, message], reply)
                return
            except NoChatTemplate:          # a server says so only now
                if not self.raw:
                    raise BackendLost(_needs_raw(self.backend)) from None
        if system:
            raise AnswerError(_has_no_system(self.backend))
        await self._stream(text, reply)

    async def _stream(self, prompt: str | Messages, reply: Reply) -> None:
        with self.open_answer() as answer:
            async with aclosing(self.backend.answer(prompt)) as chunks:
                async for chunk in chunks:
                    if chunk.is_output:
                        reply.last_s = time.perf_counter()
                        reply.first_s = reply.first_s or reply.last_s
                        reply.num_outputs += 1
                    reply.text += chunk.text
                    reply.finish = chunk.finish or reply.finish
                    reply.usage = chunk.usage or reply.usage
                    answer.write(chunk.text)

    def _remember(self, message: dict[str, str], reply: Reply, outcome: Outcome) -> None:
        self.num_answers += 1
        self.num_tokens += reply.num_tokens
        self.last_usage = reply.usage
        if reply.text or outcome is Outcome.DONE:
            self.history += [message, {"role": "assistant", "content": clean(reply.text)}]
        if outcome is Outcome.STOPPED and self.interactive:
            _note("stopped; what came so far stays in the conversation" if reply.text else
                  "stopped before the answer began; the question is not kept")
        elif reply.finish == "length":
            _note(self._why_cut_off(reply.usage))
        if self.show_stats:
            _note(reply.summary())

    def _why_cut_off(self, usage: Usage | None) -> str:
        size = self.backend.context_tokens
        if size and usage and usage.num_prompt_tokens + usage.num_output_tokens >= size:
            return (f"the answer was cut off: the model's context of {size} tokens is full"
                    + ("; /reset makes room" if self.interactive else ""))
        if self.max_tokens is not None:
            return f"the answer was cut off after --max-tokens {self.max_tokens}"
        return "the answer was cut off at the model's or the server's own limit; --max-tokens sets another"

    def command(self, name: str, argument: str) -> bool:
        """Carry out `/name argument`; whether the conversation goes on."""
        if name == "exit":
            return False
        if name == "help":
            print(HELP, file=sys.stderr)
        elif name == "reset":
            self.history.clear()
            self.last_usage = None
            _note("the conversation is forgotten")
        elif name == "system" and not self.backend.has_chat_template:
            _note(f"{self.backend.name} completes text: it has no place for a system prompt")
        elif name == "system":
            self.system = argument
            _note("the system prompt is set" if argument else "there is no system prompt now")
        elif name == "stats":
            for line in self._statistics():
                _note(line)
        else:
            _note(f"unknown command /{name}; /help lists them, and a space before the slash sends it as text")
        return True

    def _statistics(self) -> list[str]:
        lines = [f"model {self.backend.name}, {self.num_answers} answers, {self.num_tokens} tokens generated"]
        if self.last_usage is not None:
            used = self.last_usage.num_prompt_tokens + self.last_usage.num_output_tokens
            size = self.backend.context_tokens
            lines.append(f"the conversation takes {used} tokens" + (f" of the context's {size}" if size else ""))
        return [*lines, *self.backend.statistics()]

    async def handle(self, line: str) -> Outcome | None:
        """One line of input: a question, or a command. None: the conversation is over."""
        line = clean(line)
        if match := re.fullmatch(r"/([a-z]+)(?:\s+(.*))?\s*", line, re.DOTALL):
            return Outcome.DONE if self.command(match[1], (match[2] or "").strip()) else None
        if not line.strip():
            return Outcome.DONE
        return await self.ask(line.rstrip("\r\n"))


async def converse(chat: Chat) -> int:
    """The conversation in a terminal; the exit code."""
    from tools.chat_prompt import make_prompt, open_history
    history, notice = open_history()
    if notice:
        _note(notice)
    prompt = make_prompt(history)
    while True:
        try:
            outcome = await chat.handle(await prompt.prompt_async("> "))
        except EOFError:
            return 0
        except KeyboardInterrupt:
            _note("Ctrl-D or /exit leaves")
            continue
        if outcome is None:
            return 0
        if outcome is Outcome.LOST:
            return 1
        print(flush=True)


async def answer_lines(chat: Chat) -> int:
    """Each line of standard input is one turn; the exit code."""
    code = 0
    while True:
        # NOTE: asyncio's own handler would wait for this call to come back, which may be never.
        with _on_interrupt(signal.default_int_handler):
            try:
                line = sys.stdin.readline()
            except OSError as error:
                _note(f"standard input cannot be read: {error.strerror or error}")
                return 1
        if not line:
            return code
        outcome = await chat.handle(line)
        if outcome is Outcome.STOPPED:
            raise KeyboardInterrupt
        if outcome is None or outcome is Outcome.LOST:
            return 0 if outcome is None and code == 0 else 1
        if outcome is Outcome.FAILED:
            code = 1


async def answer_once(chat: Chat, question: str) -> int:
    outcome = await chat.ask(clean(question))
    if outcome is Outcome.STOPPED:
        raise KeyboardInterrupt
    return 0 if outcome is Outcome.DONE else 1


@contextmanager
def _on_interrupt(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """What Ctrl-C does inside the block."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _note(line: str) -> None:
    with suppress(OSError):                 # answers are what matters
        print(f"({line})", file=sys.stderr, flush=True)


def _needs_raw(backend: Backend) -> str:
    return (f"{backend.name} has no chat template: it completes text and does not answer questions. --raw completes "
            f"each input as it is; --model chooses another model")


def _has_no_system(backend: Backend) -> str:
    return f"{backend.name} has no chat template, and so no place for a system prompt"


@asynccontextmanager
async def _open_backend(args: argparse.Namespace, given: dict[str, Any], engine_factory: EngineFactory | None,
                        default_model: str, interactive: bool) -> AsyncIterator[Backend]:
    """Raises: StartError."""
    if args.url is not None:
        try:
            root = server_root(args.url)
            backend = ServerBackend(root, args.model or await first_model(root), given)
        except (ValueError, ServerError) as error:
            raise StartError(str(error)) from None
        if interactive:
            _note(f"{backend.name} at {root}; /help lists the commands")
        yield backend
        return
    gc.disable()                            # what a start makes stays: to look for garbage would take a tenth of it
    from api.engine import Engine, EngineDead  # late: it brings the compiler, which --help and --url do without
    model = args.model or default_model
    start_s = time.monotonic()
    slow = asyncio.get_running_loop().call_later(SLOW_START_S, _note, f"loading {model}")
    if sys.stderr.isatty():
        slow.cancel()
        _note(f"loading {model}")

    def progress(line: str) -> None:
        if time.monotonic() - start_s > SLOW_START_S:
            _note(line)

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    async with AsyncExitStack() as stack:
        try:
            engine = await stack.enter_async_context((engine_factory or Engine.start)(
                model, progress=progress, **engine_config(args)))
        except (ValueError, OSError, EngineDead) as error:
            raise StartError(str(error)) from None
        finally:
            slow.cancel()
            gc.enable()
        info = engine.info
        if interactive:
            _note(f"{info.model} on {info.device} ({info.device_reason}), weights {info.weight_bytes / 2**20:.0f} MiB "
                  f"in memory, {info.file_bytes / 2**20:.0f} MiB in the file, context {info.max_model_len} tokens, "
                  f"ready in {time.monotonic() - start_s:.1f} s; /help lists the commands")
        yield EngineBackend(engine, given)


async def chat_with_model(args: argparse.Namespace, given: dict[str, Any], engine_factory: EngineFactory | None,
                          default_model: str) -> int:
    interactive = args.question is None and sys.stdin.isatty() and sys.stdout.isatty()
    async with _open_backend(args, given, engine_factory, default_model, interactive) as backend:
        if not backend.has_chat_template and not args.raw:
            raise StartError(_needs_raw(backend))
        if not backend.has_chat_template and args.system:
            raise StartError(f"--system: {_has_no_system(backend)}")
        chat = Chat(backend, _answer_opener(args.raw, interactive), clean(args.system), args.raw, args.max_tokens,
                    show_stats=interactive or args.stats or sys.stderr.isatty(), interactive=interactive)
        if args.question is not None:
            return await answer_once(chat, args.question)
        if not interactive:
            return await answer_lines(chat)
        # Between an answer and the prompt Ctrl-C, perhaps pressed twice, must not end the conversation.
        with typing_waits(), _on_interrupt(lambda *_: None):
            return await converse(chat)


def _answer_opener(raw: bool, interactive: bool) -> Callable[[], Answer]:
    if raw or not interactive:
        return lambda: PlainAnswer(sys.stdout)
    from rich.console import Console
    console = Console(highlight=False)
    if console.is_dumb_terminal:
        return lambda: PlainAnswer(sys.stdout)
    return lambda: MarkdownAnswer(console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="chat", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", help="answered once; without it a conversation begins")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the model's own, or 0)")
    parser.add_argument("--max-tokens", type=int, metavar="N", 
                        help="of each answer (default: the model's own limit, or what the context holds)")
    parser.add_argument("--raw", action="store_true",
                        help="show text as it comes, without Markdown; a model without a chat template, which is "
                             "refused otherwise, then completes each input as plain text")
    parser.add_argument("--stats", action="store_true",
                        help="print TTFT and tokens/s after each answer even where standard error is no terminal")
    parser.add_argument("--url", help="talk to this OpenAI-compatible server instead of an engine of our own")
    add_engine_args(parser)
    return parser


def run(argv: Sequence[str], engine_factory: EngineFactory | None = None) -> int:
    """The exit code. `engine_factory`: in place of Engine.start."""
    parser = _parser()
    default_model = parser.get_default("model")
    parser.set_defaults(model=None)         # a server's model is the first that it lists
    args = parser.parse_args(argv)
    if not _mend_streams():
        return _fail("standard output is closed", 1)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.encoding == "ascii":
        sys.stdin.reconfigure(encoding="utf-8")         # an ASCII locale says nothing about what is piped in
    given = {name: value for name in ("temperature", "max_tokens", "seed")
             if (value := getattr(args, name)) is not None}
    try:
        SamplingParams(**given)
        if args.url is not None:
            reject_engine_args(args, allowed=("model", "seed"))
    except ValueError as error:
        return _fail(str(error))
    start_logging(args)
    try:
        code = asyncio.run(chat_with_model(args, given, engine_factory, default_model))
        sys.stdout.flush()
        return code
    except StartError as error:
        return _fail(str(error))
    except BrokenPipeError:                 # the reader, such as head, has seen enough
        _discard(sys.stdout)
        return 0
    except OutputLost as error:
        _discard(sys.stdout)
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130


def _mend_streams() -> bool:
    """Python has None for standard streams that are closed: nothing comes in, and notes go nowhere.

    Whether there is a place for answers.
    """
    # NOTE: in this order; else what is opened for one of them would take the number, and so the role, of another.
    sys.stdin = sys.stdin or open(os.devnull)
    has_output = sys.stdout is not None
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    return has_output


def _discard(stream: TextIO) -> None:
    """What is still in its buffer, and would fail again when Python flushes it at the end, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fail(line: str, code: int = 2) -> int:
    print(f"chat: {line}", file=sys.stderr)
    return code


def main() -> int:
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
