"""`python -m tools.serve` as a process: ports, start-up, signals, exit codes."""
from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.serving import TIMEOUT_S, Answer, request
from tests.weights.tiny_tokenizers import CHATML, byte_level, write_folder

ROOT = Path(__file__).parents[2]
TINY_MODEL = ROOT / "tests" / "golden" / "models" / "llama"

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to send to another process")


class Served:
    """A running server process and what it has written."""

    def __init__(self, process: subprocess.Popen[str], listening: str) -> None:
        self.process = process
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._over = False
        assert process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(process.stderr,))
        self._reader.start()
        self.port = int(re.findall(rf"{re.escape(listening)}:(\d+)", self.wait_for("listening on"))[0])

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait_for(self, text: str) -> str:
        """The first line that has `text`."""
        def found() -> list[str]:
            return [line for line in self.lines if text in line]

        with self._changed:
            self._changed.wait_for(lambda: found() or self._over, TIMEOUT_S)
            assert found(), f"no {text!r} in {self.lines}"
            return found()[0]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def command(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def exit_code(self) -> int:
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        assert not any("Traceback" in line for line in self.lines), self.lines
        return code

    def request(self, method: str, path: str, body: object = None) -> Answer:
        return request(self.port, method, path, body)

    def complete(self, **fields: object) -> Answer:
        return self.request("POST", "/v1/completions", fields)

    def metrics(self) -> dict[str, float]:
        """The samples with no labels but the model's and the engine's."""
        families = text_string_to_metric_families(self.request("GET", "/metrics").body.decode())
        return {sample.name.removeprefix("troupe:"): sample.value for family in families for sample in family.samples
                if sample.labels.keys() == {"model_name", "engine"}}

    def num_requests(self) -> tuple[float, float]:
        """(running, waiting)"""
        metrics = self.metrics()
        return metrics["num_requests_running"], metrics["num_requests_waiting"]


@contextmanager
def serving(*args: str, module: str = "tests.api.serve_fake",
            listening: str = "http://127.0.0.1") -> Iterator[Served]:
    process = subprocess.Popen([sys.executable, "-m", module, "--port", "0", *args], cwd=ROOT, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        try:
            served = Served(process, listening)
            yield served
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", served.port))
        finally:
            process.kill()


class Requests:
    """Requests under way at the same time."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._threads: list[threading.Thread] = []
        self._answers: dict[int, Answer] = {}

    def start(self, **fields: object) -> None:
        number = len(self._threads)

        def ask() -> None:
            self._answers[number] = self._served.complete(**fields)

        thread = threading.Thread(target=ask)
        self._threads.append(thread)
        thread.start()

    def answers(self) -> list[Answer]:
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        return [self._answers[number] for number in range(len(self._threads))]

    def wait_until_open(self, running: int, waiting: int) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while self._served.num_requests() != (running, waiting):
            assert time.monotonic() < deadline_s, "the requests arrive"


@pytest.mark.parametrize("place", ["busy", "192.0.2.1", "no such host"])
def test_port_or_host_that_cannot_be_had(place: str) -> None:
    """FAULTS O03: told before anything heavy is imported, so before any weight is read."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        host, port = ("127.0.0.1", other.getsockname()[1]) if place == "busy" else (place, 8000)
        program = ("import sys, tools.serve\n"
                   f"code = tools.serve.run(['--host', {host!r}, '--port', '{port}'])\n"
                   "heavy = {'numpy', 'numba', 'api.engine', 'uvicorn', 'starlette'} & set(sys.modules)\n"
                   "assert not heavy, heavy\n"
                   "sys.exit(code)\n")
        result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True,
                                timeout=TIMEOUT_S)
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.fullmatch(rf"serve: cannot listen on {host} port {port}: .+\n", result.stderr)


@pytest.mark.parametrize("args", [["--port", "65536"], ["--port", "x"], ["--port", "-1"], ["--shutdown-timeout", "-1"],
                                  ["--shutdown-timeout", "nan"], ["--device", "tpu"], ["--nothing"]])
def test_bad_arguments(args: list[str]) -> None:
    result = subprocess.run([sys.executable, "-m", "tools.serve", *args], cwd=ROOT, capture_output=True, text=True,
                            timeout=TIMEOUT_S)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_loading_ends_at_once(number: int) -> None:
    """FAULTS O05; until it is ready the server says so."""
    with serving("--model", "never") as served:
        served.wait_for("loading for ever")
        health = served.request("GET", "/health")
        assert (health.status, health.json["status"]) == (503, "starting")
        assert served.complete(prompt="a").status == 503
        served.signal(number)
        assert served.exit_code() == 128 + number


def test_model_that_cannot_be_loaded() -> None:
    with serving("--model", "bad") as served:
        assert served.exit_code() == 1
        assert served.lines[-1] == "serve: the model is bad, and this is a second line"


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_lets_running_requests_finish(number: int) -> None:
    """FAULTS O05."""
    with serving() as served:
        served.wait_for("ready after")
        requests = Requests(served)
        for prompt in ("HOLD 1", "HOLD 2", "HOLD 3", "HOLD 4", "HOLD 5", "HOLD 6"):
            requests.start(prompt=prompt, stream=True)
        requests.wait_until_open(running=4, waiting=2)
        served.signal(number)
        served.wait_for("stopping: 6 requests are open")
        refused = served.complete(prompt="new")
        assert (refused.status, refused.error["code"]) == (503, "stopping")
        served.command("release")
        for answer in requests.answers():
            assert answer.status == 200
            assert answer.events[-1] == "[DONE]"
        assert served.exit_code() == 0
        assert not any("/v1/" in line for line in served.lines), "requests are not logged at info"


@posix
def test_requests_that_outlast_the_timeout_end_with_an_error() -> None:
    with serving("--shutdown-timeout", "0") as served:
        served.wait_for("ready after")
        requests = Requests(served)
        requests.start(prompt="ENDLESS", stream=True)
        requests.start(prompt="HOLD", stream=True)
        requests.wait_until_open(running=2, waiting=0)
        served.signal(signal.SIGTERM)
        stream, never_begun = requests.answers()
        told = json.loads(stream.events[-1])["error"]
        assert (told["code"], told["message"]) == ("stopping", "The server is shutting down.")
        assert never_begun.status == 503
        assert never_begun.error == told
        assert served.exit_code() == 0


@posix
def test_second_signal_ends_at_once() -> None:
    with serving() as served:
        served.wait_for("ready after")
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            body = b'{"prompt": "ENDLESS", "stream": true}'
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
                               + str(len(body)).encode() + b"\r\n\r\n" + body)
            assert connection.recv(1024)
            served.signal(signal.SIGTERM)
            served.wait_for("stopping: 1 requests are open")
            served.signal(signal.SIGTERM)
            assert served.exit_code() == 128 + signal.SIGTERM


def test_engine_that_dies_ends_the_server() -> None:
    with serving() as served:
        served.wait_for("ready after")
        answer = served.complete(prompt="DIE")
        assert answer.status == 503
        assert served.exit_code() == 1
        assert served.lines[-1] == "serve: the engine ended: the device fell off"


@posix
def test_logs() -> None:
    """Start-up says what is served and on what; JSON lines where asked; prompts in none of them."""
    with serving("--log-format", "json", "--log-level", "debug", "--served-model-name", "a", "b", "--seed", "3",
                 "--kv-cache-memory", "2G") as served:
        served.wait_for("ready after")
        assert served.complete(prompt="confidential").status == 200
        assert served.complete(prompt="confidential FAIL").status == 500
        assert served.complete(prompt="confidential", top_k=0.5).status == 400
        served.signal(signal.SIGTERM)
        assert served.exit_code() == 0
    entries = [json.loads(line) for line in served.lines]
    assert all(set(entry) == {"time", "level", "logger", "message"} for entry in entries)
    messages = [entry["message"] for entry in entries]
    assert "settings ['kv_cache_memory', 'seed', 'served_model_name']" in messages
    assert "device cpu: asked" in messages
    assert "weights: 2.0 MiB in memory, 1.0 MiB in the file" in messages
    assert any(message.startswith("a step computes at most 512 tokens: ") for message in messages)
    assert "stop tokens: 256 '<eos>'" in messages
    assert "KV cache: 8192 tokens in 1 MiB of float32, enough for 2.8 sequences of the full 4096 tokens" in messages
    assert any("POST /v1/completions" in message for message in messages), "requests are logged at debug"
    assert not any("confidential" in message for message in messages)


def byte_level_model(folder: Path) -> Path:
    """The tiny model with bytes for tokens."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY_MODEL / name, folder)
    return write_folder(folder, byte_level(), tokenizer_config={"chat_template": CHATML})


def streamed(answer: Answer) -> str:
    choices = [json.loads(event)["choices"][0] for event in answer.events[:-1]]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


@posix
def test_tiny_model(tmp_path: Path) -> None:
    """The real engine behind the real door."""
    with serving("--model", str(byte_level_model(tmp_path)), "--device", "cpu", "--kv-cache-memory", "4M",
                 "--max-model-len", "256", "--served-model-name", "tiny", module="tools.serve") as served:
        served.wait_for("ready after")
        assert served.request("GET", "/health").status == 200
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, "temperature": 0,
                "logprobs": 2}
        whole = served.complete(**body).json
        assert whole["usage"]["completion_tokens"] == 8
        assert len(whole["choices"][0]["logprobs"]["tokens"]) == 8
        assert streamed(served.complete(**body, stream=True)) == whole["choices"][0]["text"]
        echo = served.complete(model="tiny", prompt=[5, 6, 7], max_tokens=0, echo=True, logprobs=0).json["choices"][0]
        assert echo["logprobs"]["token_logprobs"][0] is None
        assert len(echo["logprobs"]["token_logprobs"]) == 3
        num_cut = 0
        for seed in range(10):              # FAULTS S05: bytes that are no text, and ends inside of a character
            bytes_of_euro = {str(token_id): 100 for token_id in byte_level().encode("\u20ac").ids}
            wild = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 7, "temperature": 2,
                    "seed": seed, "logit_bias": bytes_of_euro}
            chat = served.request("POST", "/v1/chat/completions", {**wild, "logprobs": True}).json["choices"][0]
            text = chat["message"]["content"]
            raw = bytes(byte for token in chat["logprobs"]["content"] for byte in token["bytes"])
            assert len(raw) == 7
            assert text == raw.decode(errors="replace")
            assert chat["finish_reason"] == "length"
            assert streamed(served.request("POST", "/v1/chat/completions", {**wild, "stream": True})) == text
            text = served.complete(**wild).json["choices"][0]["text"]
            assert streamed(served.complete(**wild, logprobs=3, stream=True)) == text
            num_cut += raw.endswith((b"\xe2", b"\xe2\x82"))
        assert num_cut > 2
        bad_prompts: list[object] = [[10**6], [], [[]], "", [""]]      # it has no beginning of text to start from
        for prompt in bad_prompts:
            assert served.complete(prompt=prompt).status == 400
        metrics = served.metrics()
        assert metrics["generation_tokens_total"] == 2 * 8 + 10 * 4 * 7
        assert metrics["num_requests_running"] == 0
        served.signal(signal.SIGTERM)
        assert served.exit_code() == 0
    assert any(re.search(r"weights: \d+\.\d\d s", line) for line in served.lines)
