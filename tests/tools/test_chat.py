"""tools.chat without a terminal: one question, pipes, odd locales, a server."""
from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tools.scripted_engine import scripted_factory
from tests.tools.scripted_server import Exchange, scripted_server
from tools.chat import run

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
PROGRAM = [sys.executable, "-m", "tests.tools.scripted_engine"]


def environment(**changes: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))},
            "PYTHONPATH": str(ROOT), **changes}


def chat(*argv: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
    """(exit code, standard output, standard error) over the scripted engine, in this process."""
    buffers = [io.BytesIO(content) for content in (stdin, b"", b"")]
    streams = [io.TextIOWrapper(buffer, encoding="utf-8") for buffer in buffers]
    with pytest.MonkeyPatch.context() as patch:
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            patch.setattr(sys, name, stream)
        code = run(argv, engine_factory=scripted_factory)
        assert gc.isenabled()               # whatever became of the start
        for stream in streams[1:]:
            stream.flush()
    out, err = buffers[1].getvalue(), buffers[2].getvalue()
    assert b"Traceback" not in err
    return code, out, err.decode()


def chat_program(*argv: str | bytes, stdin: bytes = b"", **env: str) -> tuple[int, bytes, str]:
    """The same in a process of its own."""
    done = subprocess.run([*PROGRAM, *argv], input=stdin, capture_output=True, timeout=TIMEOUT_S, cwd=ROOT,
                          env=environment(**env))
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done.returncode, done.stdout, done.stderr.decode()


# --- one question


def test_one_question() -> None:
    assert chat("hi there") == chat_program("hi there") == (0, b"you said: hi there \n", "")


def test_one_question_with_all_settings() -> None:
    argv = ("--temperature", "0", "--max-tokens", "7", "--seed", "5", "--system", "be brief")
    assert chat(*argv, "sampling")[1] == b"temperature=0.0 max_tokens=7 seed=5\n"
    assert json.loads(chat(*argv, "messages")[1]) == [{"role": "system", "content": "be brief"},
                                                      {"role": "user", "content": "messages"}]


def test_the_models_own_sampling_holds_where_nothing_is_said() -> None:
    assert chat("sampling")[1] == b"temperature=0.25 max_tokens=None seed=None\n"


def test_markdown_stays_as_it_is_where_standard_output_is_no_terminal() -> None:
    assert chat("markdown")[1].startswith(b"# Title\n\nSome **bold** text.")


def test_figures_on_request() -> None:
    code, out, err = chat("--stats", "hi there")
    assert (code, out) == (0, b"you said: hi there \n")
    assert err.startswith("(TTFT ")
    assert ", 4 tokens, " in err
    assert err.endswith(" tokens/s)\n")


@pytest.mark.parametrize(("question", "code", "message"), [
    ("full", 1, "(messages: the prompt has 2000 tokens; this model's context of 1000 leaves no room)\n"),
    ("fail", 1, "(the logits are not finite)\n"),
    ("dead", 1, "(the device is gone)\n"),
    ("fill", 0, "(the answer was cut off: the model's context of 1000 tokens is full)\n"),
])
def test_what_goes_wrong_is_one_line(question: str, code: int, message: str) -> None:
    assert chat(question)[::2] == (code, message)


def test_an_answer_cut_by_max_tokens_says_so() -> None:
    assert chat("--max-tokens", "3", "a b c")[2] == ""
    assert chat("--max-tokens", "5", "a b c")[2] == "(the answer was cut off after --max-tokens 5)\n"


@pytest.mark.parametrize(("argv", "message"), [
    (["--model", "missing", "x"], "chat: model 'missing' is not a folder"),
    (["--temperature", "-1", "x"], "chat: temperature: must be in [0, 100], got -1"),
    (["--temperature", "nan", "x"], "chat: temperature: must be a finite number, got nan"),
    (["--max-tokens", "0", "x"], "chat: max_tokens: must be at least 1"),
    (["--url", "localhost:8000", "x"], "chat: --url: 'localhost:8000' is not of the form http://HOST:PORT"),
    (["--url", "http://127.0.0.1:1", "x"], "chat: cannot reach http://127.0.0.1:1"),
    (["--model", "base", "x"], "chat: fake has no chat template"),
    (["--model", "base", "--raw", "--system", "s", "x"], "chat: --system: fake has no chat template"),
])
def test_nobody_to_talk_to_is_one_line(argv: list[str], message: str) -> None:
    code, out, err = chat(*argv)
    assert (code, out) == (2, b"")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_a_base_model_completes_text_with_raw() -> None:
    code, out, err = chat("--model", "base", "--raw", stdin=b"x y\n/system s\n z\n")
    assert (code, out) == (0, b"you said: x y \nyou said: z \n")
    assert err == "(fake completes text: it has no place for a system prompt)\n"


# --- pipes


def test_each_piped_line_is_one_turn_of_a_conversation() -> None:
    code, out, err = chat(stdin=b"one\r\n\n  \ntwo\nmessages")
    assert (code, err) == (0, "")
    *answers, messages = out.decode().splitlines()
    assert answers == ["you said: one ", "you said: two "]
    assert [message["content"] for message in json.loads(messages)] == [
        "one", "you said: one ", "two", "you said: two ", "messages"]


def test_an_empty_standard_input_ends_at_once() -> None:
    assert chat_program() == (0, b"", "")


def test_commands_in_a_pipe() -> None:
    code, out, err = chat(stdin=b"one\n/reset\n/system be brief\nmessages\n/system\n/reset\nmessages\n/what\n/stats\n"
                                b"/etc/passwd\n/exit\nnever\n")
    first, second, third = out.decode().splitlines()[1:]
    assert json.loads(first) == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "messages"}]
    assert json.loads(second) == [{"role": "user", "content": "messages"}]
    assert third == "you said: /etc/passwd "
    assert code == 0
    assert "unknown command /what" in err
    assert "model fake, 3 answers, 5 tokens generated" in err
    assert "the conversation takes 11 tokens of the context's 1000" in err
    assert "engine overhead: 25.0 %" in err


def test_a_failed_turn_is_not_kept_and_shows_in_the_exit_code() -> None:
    code, out, err = chat(stdin=b"one\nfail\nfull\nmessages\n")
    assert code == 1
    assert len(json.loads(out.splitlines()[-1])) == 3
    assert "the logits are not finite" in err
    assert "/reset forgets the conversation" in err


def test_a_dead_engine_ends_the_conversation() -> None:
    assert chat(stdin=b"dead\nnever\n") == (1, b"", "(the device is gone)\n")


def test_a_reader_that_leaves_early() -> None:
    program = subprocess.Popen([*PROGRAM, "lines 20000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
                               env=environment())
    assert program.stdout is not None
    assert program.stderr is not None
    with program.stdout, program.stderr:
        assert program.stdout.readline() == b"line 0\n"
        program.stdout.close()
        err = program.stderr.read()
    assert (program.wait(TIMEOUT_S), err) == (0, b"")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of this kind are POSIX's")
@pytest.mark.parametrize("stdin", [None, b"hang abc\nnever\n"])
def test_an_interrupt_ends_a_program_that_has_no_prompt(stdin: bytes | None, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    program = subprocess.Popen([*PROGRAM, *([] if stdin else ["hang abc"])], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
                               env=environment(SCRIPTED_ENGINE_REPORT=str(report)))
    assert program.stdin is not None
    assert program.stdout is not None
    if stdin:
        program.stdin.write(stdin)
        program.stdin.flush()
    assert program.stdout.read(3) == b"abc"
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=TIMEOUT_S)
    assert (program.returncode, out, err) == (130, b"\n", b"")
    # The request was ended and the engine stopped.
    assert json.loads(report.read_text()) == {"num_left": 1, "questions": ["hang abc"]}


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell closes the streams")
@pytest.mark.parametrize(("redirections", "code", "out", "err"), [
    ("hello <&-", 0, "you said: hello \n", ""),
    ("<&-", 0, "", ""),
    ("hello >&-", 1, "", "chat: standard output is closed\n"),
    ("<&- >&-", 1, "", "chat: standard output is closed\n"),
    ("--stats hello 2>&-", 0, "you said: hello \n", ""),
    ("hello <&- >&- 2>&-", 1, "", ""),
    ("0>/dev/null", 1, "", "(standard input cannot be read: Bad file descriptor)\n"),
])
def test_standard_streams_that_are_closed(redirections: str, code: int, out: str, err: str) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -m tests.tools.scripted_engine {redirections}', sys.executable],
        capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT, env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        for argv, stdin in ((["hello"], ""), ([], "one\ntwo\n")):
            done = subprocess.run([*PROGRAM, *argv], input=stdin, stdout=full, stderr=subprocess.PIPE, text=True,
                                  timeout=TIMEOUT_S, cwd=ROOT, env=environment())
            assert (done.returncode, done.stderr) == (1, "chat: standard output: No space left on device\n")
        done = subprocess.run([*PROGRAM, "--stats", "hello"], stdout=subprocess.PIPE, stderr=full, text=True,
                              timeout=TIMEOUT_S, cwd=ROOT, env=environment())
        assert done.stdout == "you said: hello \n"


# --- locales and characters


@pytest.mark.parametrize("env", [
    {"LC_ALL": "C"},
    {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii:strict"},
])
def test_any_locale(env: dict[str, str]) -> None:
    """Text comes in as UTF-8 whatever the locale; what it cannot show is replaced."""
    utf8 = len(env) == 1                    # Python itself then turns to UTF-8
    expected = "you said: 日本 é \n".encode() if utf8 else b"you said: ?? ? \n"
    assert chat_program("日本 é".encode(), stdin=b"", **env) == (0, expected, "")
    assert chat_program(stdin="日本 é\n".encode(), **env) == (0, expected, "")


def test_bytes_that_are_no_text() -> None:
    assert chat_program(b"a\xffb")[1] == "you said: a\ufffdb \n".encode()
    assert chat(stdin=b"a\xffb\n")[1] == "you said: a\ufffdb \n".encode()


def test_lone_surrogates_of_a_model() -> None:
    assert chat("surrogate")[:2] == (0, b"a?b?c\n")
    code, out, _ = chat(stdin=b"surrogate\nmessages\n")
    assert code == 0
    assert json.loads(out.splitlines()[1])[1]["content"] == "a\ufffdb\ufffdc"


# --- a server


def ask_server(handle: Callable[[Exchange], Any], *argv: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
    async def ask() -> tuple[int, bytes, str]:
        async with scripted_server(handle) as root:
            program = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tools.chat", "--url", root, *argv, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment())
            out, err = await program.communicate(stdin)
            assert b"Traceback" not in err, err.decode()
            assert program.returncode is not None
            return program.returncode, out, err.decode()
    return asyncio.run(asyncio.wait_for(ask(), TIMEOUT_S))


async def say_hello(exchange: Exchange) -> None:
    if exchange.path == "/v1/models":
        exchange.answer_json(200, {"data": [{"id": "theirs"}]})
        return
    exchange.begin_events()
    exchange.event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    for word in ("hel", "lo"):
        exchange.event({"choices": [{"delta": {"content": word}, "finish_reason": None}]})
    exchange.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    exchange.event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})
    exchange.end_events()


def test_a_conversation_with_a_server() -> None:
    bodies: list[dict[str, Any]] = []

    async def handle(exchange: Exchange) -> None:
        if exchange.method == "POST":
            bodies.append(exchange.body)
        await say_hello(exchange)

    code, out, err = ask_server(handle, "--temperature", "0.5", "--seed", "3", "--system", "s", "--stats",
                                stdin="hi \n日本\n/stats\n".encode())
    assert (code, out) == (0, b"hello\nhello\n")
    assert err.count(", 2 tokens, ") == 2
    assert "(server: http://127.0.0.1:" in err
    settings = {"model": "theirs", "temperature": 0.5, "seed": 3, "stream": True,
                "stream_options": {"include_usage": True}}
    system, first = {"role": "system", "content": "s"}, {"role": "user", "content": "hi"}
    assert bodies == [{**settings, "messages": [system, first]},
                      {**settings, "messages": [system, first, {"role": "assistant", "content": "hello"},
                                                {"role": "user", "content": "日本"}]}]


@pytest.mark.parametrize(("status", "error", "hint"), [
    (404, {"message": "no model 'm'"}, False),
    (400, {"message": "this model's maximum context length is 8 tokens"}, True),
    (400, {"message": "too long", "code": "context_length_exceeded"}, True),
    (500, {"message": "context lost"}, False),
])
def test_refusals_of_a_server(status: int, error: dict[str, str], hint: bool) -> None:
    turns = iter(range(10))

    async def handle(exchange: Exchange) -> None:
        if next(turns) == 0:
            await say_hello(exchange)
        else:
            exchange.answer_json(status, {"error": error})

    code, out, err = ask_server(handle, "--model", "m", stdin=b"one\ntwo\n")
    assert (code, out) == (1, b"hello\n")
    assert err.startswith(f"(HTTP {status}: {error['message']})\n")
    assert ("/reset" in err) is hint


async def complete_text(exchange: Exchange) -> None:
    """A server of a base model."""
    if exchange.path == "/v1/chat/completions":
        exchange.answer_json(400, {"error": {"message": "messages: this model has no chat template"}})
        return
    exchange.begin_events()
    for text in (" and", " on"):
        exchange.event({"choices": [{"text": text, "finish_reason": None}]})
    exchange.event({"choices": [{"text": "", "finish_reason": "length"}]})
    exchange.event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})
    exchange.end_events()


def test_a_server_of_a_base_model_completes_text_with_raw() -> None:
    requests: list[tuple[str, Any]] = []

    async def handle(exchange: Exchange) -> None:
        requests.append((exchange.path, exchange.body.get("prompt")))
        assert exchange.body["stream"] is True
        await complete_text(exchange)

    code, out, err = ask_server(handle, "--model", "m", "--raw", stdin=b" once \n/system s\ntwice\n")
    assert (code, out) == (0, b" and on\n and on\n")
    cut = "(the answer was cut off at the model's or the server's own limit; --max-tokens sets another)\n"
    assert err == f"{cut}(m completes text: it has no place for a system prompt)\n{cut}"
    # It is asked for an answer once, and the text stays as it was typed.
    assert requests == [("/v1/chat/completions", None), ("/v1/completions", " once "), ("/v1/completions", "twice")]


@pytest.mark.parametrize(("argv", "message"), [
    ([], "(m has no chat template: it completes text and does not answer questions. --raw completes each input as it "
         "is; --model chooses another model)\n"),
    (["--raw", "--system", "s"], "(m has no chat template, and so no place for a system prompt)\n"),
])
def test_a_server_of_a_base_model_answers_no_questions(argv: list[str], message: str) -> None:
    assert ask_server(complete_text, "--model", "m", *argv, "hi") == (1, b"", message)


def test_an_engine_flag_has_no_meaning_for_a_server() -> None:
    code, out, err = ask_server(say_hello, "--device", "cpu", "hi")
    assert (code, out, err) == (2, b"", "chat: --device is a setting of the engine and cannot be used with --url\n")


def test_a_server_that_breaks_off() -> None:
    async def handle(exchange: Exchange) -> None:
        exchange.begin_events()
        exchange.event({"choices": [{"delta": {"content": "hel"}, "finish_reason": None}]})

    code, out, err = ask_server(handle, "--model", "m", "hi")
    assert (code, out) == (1, b"hel\n")
    assert err == "(the server closed the connection before the answer was complete)\n"


def test_help_needs_no_engine() -> None:
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "tools.chat", "--help"], capture_output=True,
                          timeout=TIMEOUT_S, cwd=ROOT, env=environment(), check=True)
    assert b"--raw" in done.stdout
    for heavy in (b"numba", b"numpy", b"rich", b"prompt_toolkit"):
        assert b" " + heavy + b"\n" not in done.stderr
