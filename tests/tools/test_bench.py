from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.tools.scripted_engine import ScriptedEngine
from tests.tools.scripted_server import Exchange, scripted_server
from tools import bench
from tools.bench_report import RequestRecord
from tools.bench_workloads import Request


@asynccontextmanager
async def engine_of(engine: ScriptedEngine) -> AsyncIterator[Any]:
    yield engine


def in_process(engine: ScriptedEngine, *argv: str) -> int:
    return bench.run(argv, engine_factory=lambda model, progress, **config: engine_of(engine))


def figures(output: str) -> dict[str, float]:
    """The lines "label:   figure" of the block."""
    pairs = (line.rsplit(":", 1) for line in output.splitlines() if ":" in line)
    return {label: float(figure) for label, figure in pairs}


@pytest.fixture
def server() -> Iterator[Callable[[Any], str]]:
    """`server(handle)` starts a scripted server on a thread of its own and gives its URL; it ends with the test."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    stop = asyncio.Event()
    running = []

    def start(handle: Any) -> str:
        ready: asyncio.Future[str] = loop.create_future()

        async def serve() -> None:
            async with scripted_server(handle) as root:
                ready.set_result(root)
                await stop.wait()

        running.append(asyncio.run_coroutine_threadsafe(serve(), loop))

        async def address() -> str:
            return await ready

        return asyncio.run_coroutine_threadsafe(address(), loop).result(20)

    yield start
    loop.call_soon_threadsafe(stop.set)
    for future in running:
        future.result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


async def answer(exchange: Exchange, usage: bool = True) -> None:
    """As OpenAI's endpoints do: as many one-token events as were asked for."""
    if exchange.path == "/v1/models":
        exchange.answer_json(200, {"data": [{"id": "scripted"}]})
        return
    body = exchange.body
    num_input = len(body["prompt"]) if "prompt" in body else len(body["messages"][0]["content"].split())
    exchange.begin_events()
    if "messages" in body:
        exchange.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for number in range(body["max_tokens"]):
        finish = "length" if number + 1 == body["max_tokens"] else None
        content = {"delta": {"content": "a"}} if "messages" in body else {"text": "a"}
        exchange.event({"choices": [{"index": 0, **content, "finish_reason": finish}]})
    if usage:
        exchange.event({"choices": [], "usage": {"prompt_tokens": num_input + 1,
                                                 "completion_tokens": body["max_tokens"]}})
    exchange.end_events()


# --- in process


def test_in_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    engine = ScriptedEngine()
    file = tmp_path / "figures.json"
    code = in_process(engine, "--num-prompts", "5", "--num-warmups", "2", "--concurrency", "2", "--input-len", "4:6",
                      "--output-len", "3", "--shared-prefix", "2", "--seed", "7", "--ignore-eos", "--temperature",
                      "0.5", "--goodput", "ttft:1e9", "--json", str(file))
    out, err = capsys.readouterr()
    assert code == 0
    lines = figures(out)
    assert lines["Successful requests"] == 5
    assert lines["Maximum request concurrency"] == 2
    assert lines["Total generated tokens"] == 15
    assert lines["Total input tokens"] == 50        # the scripted engine's usage, not our count
    assert lines["Peak concurrent requests"] <= 2
    assert lines["Request goodput (req/s)"] == pytest.approx(lines["Request throughput (req/s)"])
    # 5 requests of 4 s with work, 3 s of it in forward passes; the warm-ups are not in it.
    assert out.splitlines()[-1] == f"{'Engine overhead (%):':<40} 25.00     "
    assert "5 requests to fake on cpu, seed 7" in err
    # The warm-ups have prompts of their own, with the prefix that all share.
    prompts = [prompt for prompt, _ in engine.requests]
    assert len(set(map(tuple, prompts))) == 7
    assert len({tuple(prompt[:2]) for prompt in prompts}) == 1
    assert all(6 <= len(prompt) <= 8 for prompt in prompts)
    for _, sampling in engine.requests:
        assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos) == (3, 0.5, True)
    document = json.loads(file.read_text())
    assert document["engine_overhead"] == 0.25
    assert document["model_id"] == "fake"
    assert document["seed"] == 7
    assert document["request_rate"] == "inf"
    assert document["max_concurrency"] == 2
    assert document["command"].startswith("python -m tools.bench --num-prompts 5 ")
    assert document["machine"]["cpus"] >= 1
    assert set(document["versions"]) == {"python", "troupe", "numpy", "numba"}
    assert {f"{statistic}_{metric}_ms" for statistic in ("mean", "median", "std", "p99")
            for metric in ("ttft", "tpot", "itl", "e2el")} <= set(document)
    assert list(tmp_path.iterdir()) == [file]


def test_the_seed_decides_the_prompts_and_without_one_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    def prompts(*argv: str) -> list[Any]:
        engine = ScriptedEngine()
        assert in_process(engine, "--num-prompts", "2", *argv) == 0
        return [prompt for prompt, _ in engine.requests]
    assert prompts("--seed", "1") == prompts("--seed", "1")
    assert prompts() != prompts()


def test_chat_in_process_sends_messages(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine()
    assert in_process(engine, "--num-prompts", "1", "--endpoint", "chat", "--input-len", "5") == 0
    message = engine.requests[0][0][0]
    assert isinstance(message, dict)
    assert message["role"] == "user"
    assert len(message["content"].split()) == 5


def test_requests_that_the_engine_fails(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(ScriptedEngine):
        def _pieces(self, prompt: Any, sampling: Any) -> list[str | None]:
            if len(self.requests) % 2:
                return ["a"]
            raise RuntimeError("out of memory")
    assert in_process(Failing(), "--num-prompts", "4", "--num-warmups", "0", "--concurrency", "1") == 0
    out, err = capsys.readouterr()
    assert figures(out)["Successful requests"] == 2
    assert figures(out)["Failed requests"] == 2
    assert "2 of 4 requests failed, the first with: out of memory" in err


def test_an_aborted_request_has_failed() -> None:
    class Aborting(ScriptedEngine):
        async def generate(self, prompt: Any, sampling: Any) -> AsyncIterator[Any]:
            from actors.messages import TextDelta
            yield TextDelta("r", finish="aborted")

    async def run() -> RequestRecord:
        target = bench.EngineTarget(Aborting(), 0.0, True)      # type: ignore[arg-type]
        (record,), _ = await bench.run_load(target, [Request((1,), 1)], [0.0], None, 9.0, lambda done: None)
        return record

    assert asyncio.run(run()).error.startswith("the request was aborted")


def test_token_ids_beyond_the_vocabulary_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(ScriptedEngine(), "--vocab-range", "0:30001") == 2
    assert "--vocab-range: 0:30001 ends beyond the 30000 tokens of fake" in capsys.readouterr().err


# --- the load


class Gated:
    """A target whose requests end when the test says so."""

    def __init__(self) -> None:
        self.num_running = 0
        self.peak = 0
        self.begun = asyncio.Semaphore(0)
        self.may_end = asyncio.Semaphore(0)

    async def send(self, request: Request, record: RequestRecord) -> None:
        self.num_running += 1
        self.peak = max(self.peak, self.num_running)
        self.begun.release()
        await self.may_end.acquire()
        self.num_running -= 1


def test_the_closed_loop_keeps_its_concurrency() -> None:
    async def run() -> None:
        target = Gated()
        reports: list[int] = []
        load = asyncio.create_task(bench.run_load(target, [Request((1,), 1)] * 7, [0.0] * 7, 3, 60.0, reports.append))
        for num_begun in range(1, 8):
            await target.begun.acquire()
            assert target.num_running <= 3
            if num_begun >= 3:
                target.may_end.release()            # so that the next may begin
        target.may_end.release()
        target.may_end.release()
        records, _ = await load
        assert target.peak == 3
        assert reports == [1, 2, 3, 4, 5, 6, 7]
        # The clock of a request starts when it is sent, not while it waits for its turn.
        assert records[6].start_s > records[0].start_s > 0

    asyncio.run(asyncio.wait_for(run(), 20))


def test_without_a_bound_all_run_at_once_and_a_request_that_takes_too_long_has_failed() -> None:
    async def run() -> None:
        target = Gated()
        records, _ = await bench.run_load(target, [Request((1,), 1)] * 5, [0.0] * 5, None, 0.01, lambda done: None)
        assert target.peak == 5
        assert {record.error for record in records} == {"no complete answer within 0.01 s"}

    asyncio.run(asyncio.wait_for(run(), 20))


def test_requests_leave_when_they_are_due() -> None:
    async def run() -> None:
        due = [0.0, 0.01, 0.02]
        target = Gated()
        target.may_end = asyncio.Semaphore(3)
        records, duration_s = await bench.run_load(target, [Request((1,), 1)] * 3, due, None, 60.0, lambda done: None)
        starts = [record.start_s - records[0].start_s for record in records]
        assert duration_s >= 0.02
        assert starts == sorted(starts)

    asyncio.run(asyncio.wait_for(run(), 20))


# --- a server


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_server(endpoint: str, server: Callable[[Any], str], capsys: pytest.CaptureFixture[str],
                  tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []

    async def handle(exchange: Exchange) -> None:
        if exchange.method == "POST":
            bodies.append(exchange.body)
        await answer(exchange)

    file = tmp_path / "figures.json"
    code = bench.run(["--url", server(handle) + "/v1", "--num-prompts", "6", "--num-warmups", "1", "--request-rate",
                      "5000", "--input-len", "10", "--output-len", "4", "--ignore-eos", "--seed", "3", "--endpoint",
                      endpoint, "--json", str(file)])
    out, err = capsys.readouterr()
    assert (code, err.count("\n")) == (0, 1)
    lines = figures(out)
    assert lines["Successful requests"] == 6
    assert lines["Request rate configured (RPS)"] == 5000
    assert lines["Total input tokens"] == 6 * 11
    assert lines["Total generated tokens"] == 6 * 4
    assert "Engine overhead" not in out
    assert len(bodies) == 7
    for body in bodies:
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("scripted", 4, 0.0)
        assert body["ignore_eos"] is True
    document = json.loads(file.read_text())
    assert document["backend"] == ("openai-chat" if endpoint == "chat" else "openai")
    assert document["model_id"] == "scripted"
    assert document["request_rate"] == 5000
    if endpoint == "completions":
        assert all(len(body["prompt"]) == 10 and all(1000 <= i < 30000 for i in body["prompt"]) for body in bodies)


def test_the_times_are_those_of_the_outputs(server: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that counts its readings, the record is exact: the role, the finish and usage are no outputs."""
    readings = iter(range(1000))
    monkeypatch.setattr("tools.bench.time.perf_counter", lambda: float(next(readings)))

    async def handle(exchange: Exchange) -> None:
        exchange.begin_events()
        for delta, finish in (({"role": "assistant", "content": ""}, None), ({"content": "a"}, None),
                              ({"content": "bc"}, None), ({}, "stop")):
            exchange.event({"choices": [{"delta": delta, "finish_reason": finish}]})
        exchange.event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}})
        exchange.end_events()

    record = RequestRecord()
    asyncio.run(bench.ServerTarget(server(handle), "m", 0.0, False).send(Request("x", 3), record))
    assert record == RequestRecord(0.0, [1.0, 2.0], 3.0, num_input_tokens=9, num_output_tokens=3)


def test_a_server_without_usage_is_counted_by_outputs_and_said_so(
        server: Callable[[Any], str], capsys: pytest.CaptureFixture[str]) -> None:
    async def handle(exchange: Exchange) -> None:
        await answer(exchange, usage=False)
    url = server(handle)
    for endpoint in ("completions", "chat"):
        assert bench.run(["--url", url, "--num-prompts", "2", "--num-warmups", "0", "--input-len", "10",
                          "--output-len", "4", "--endpoint", endpoint]) == 0
        out, err = capsys.readouterr()
        assert figures(out)["Total generated tokens"] == 8
        assert figures(out)["Total input tokens"] == 20
        assert "2 answers came without usage" in err


def test_some_requests_fail(server: Callable[[Any], str], capsys: pytest.CaptureFixture[str]) -> None:
    turns = iter(range(100))

    async def handle(exchange: Exchange) -> None:
        if next(turns) % 2:
            exchange.answer_json(500, {"error": {"message": "out of memory"}})
        else:
            await answer(exchange)
    assert bench.run(["--url", server(handle), "--model", "m", "--num-prompts", "4", "--num-warmups", "0",
                      "--concurrency", "1"]) == 0
    out, err = capsys.readouterr()
    assert figures(out)["Successful requests"] == 2
    assert figures(out)["Failed requests"] == 2
    assert "2 of 4 requests failed, the first with: HTTP 500: out of memory" in err


@pytest.mark.parametrize("warmups", ["0", "1"])
def test_all_requests_fail(warmups: str, server: Callable[[Any], str], capsys: pytest.CaptureFixture[str]) -> None:
    async def handle(exchange: Exchange) -> None:
        exchange.answer_json(404, {"error": {"message": "no model 'm'"}})
    assert bench.run(["--url", server(handle), "--model", "m", "--num-prompts", "3", "--num-warmups", warmups]) == 1
    assert "HTTP 404: no model 'm'" in capsys.readouterr().err


def test_nobody_at_the_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["--url", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("bench: cannot reach http://127.0.0.1:1")


# --- arguments


@pytest.mark.parametrize(("argv", "message"), [
    (["--input-len", "0"], "--input-len: '0' is not a length"),
    (["--output-len", "x"], "--output-len: 'x' is not a length"),
    (["--vocab-range", "7"], "--vocab-range: '7' is not a range"),
    (["--request-rate", "0"], "--request-rate: must be greater than 0, got 0"),
    (["--request-rate", "nan"], "--request-rate: must be greater than 0, got nan"),
    (["--burstiness", "-1"], "--burstiness: must be greater than 0, got -1"),
    (["--burstiness", "inf"], "--burstiness: must be finite"),
    (["--timeout", "0"], "--timeout: must be greater than 0"),
    (["--num-prompts", "0"], "--num-prompts: must be at least 1, got 0"),
    (["--num-warmups", "-1"], "--num-warmups: must be at least 0, got -1"),
    (["--concurrency", "0"], "--concurrency: must be at least 1, got 0"),
    (["--shared-prefix", "-1"], "--shared-prefix: must be at least 0, got -1"),
    (["--temperature", "-1"], "temperature: must be in [0, 100], got -1"),
    (["--goodput", "itl:5"], "--goodput: 'itl:5' is not KEY:MILLISECONDS"),
    (["--url", "localhost:8000"], "--url: 'localhost:8000' is not of the form http://HOST:PORT"),
    (["--json", "/no/such/folder/x.json"], "--json: /no/such/folder is not a directory"),
])
def test_bad_arguments_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(ScriptedEngine(), *argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"bench: {message}")
    assert err.count("\n") == 1


def test_a_figure_file_is_whole_or_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "taken"
    target.mkdir()
    assert in_process(ScriptedEngine(), "--num-prompts", "1", "--json", str(target)) == 2
    assert "Serving Benchmark Result" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [target]
