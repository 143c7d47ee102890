"""/metrics as a client reads it, of a whole engine on a tiny model: every count and time is known exactly.

The device stands still where a test says so, and the scheduler's clock shows what the test sets: nothing is left to how
fast things go.
"""
from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from api.engine import Engine
from tests.api.fake_engine import FakeEngine
from tests.api.serving import TIMEOUT_S, Answer, Server
from tests.api.test_engine import BLOCK_BYTES, tiny

GREEDY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
PROMPT = list(range(5, 45))


class Gate:
    """In the device's way, before it samples."""

    def __init__(self, engine: Engine) -> None:
        self._arrived, self._is_open = threading.Event(), threading.Event()
        self._runner = engine._system.runner
        self._runner.on_logits = self._wait

    def _wait(self, *_: object) -> None:
        self._arrived.set()
        assert self._is_open.wait(TIMEOUT_S), "the test opens it"

    def wait_for_step(self) -> None:
        assert self._arrived.wait(TIMEOUT_S), "a step comes"

    def open(self) -> None:
        self._runner.on_logits = None
        self._is_open.set()


class Bench:
    """A server with a tiny engine behind it, used from a thread of its own."""

    def __init__(self, server: Server, engine: Engine) -> None:
        self.server = server
        self.engine = engine
        self.now_s = 0.0
        self._threads: list[threading.Thread] = []
        self.answers: list[Answer] = []
        engine._system.scheduler.policy.clock = lambda: self.now_s

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        return self.server.request("POST", "/v1/completions", {"prompt": prompt, **GREEDY, **fields})

    def begin(self, prompt: Any, **fields: Any) -> None:
        """Beside what follows."""
        self._threads.append(threading.Thread(target=lambda: self.answers.append(self.complete(prompt, **fields))))
        self._threads[-1].start()

    def join(self) -> None:
        """All that was begun has its answer, and the engine is idle."""
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        assert all(answer.status == 200 for answer in self.answers)
        self.until(lambda value: value("num_requests_running") == value("num_requests_waiting") == 0)

    def scrape(self) -> Callable[..., float]:
        """value(name, label=…): of the only sample with this name and these labels."""
        answer = self.server.request("GET", "/metrics")
        assert answer.status == 200
        samples = [sample for family in text_string_to_metric_families(answer.body.decode())
                   for sample in family.samples]

        def value(name: str, **labels: str) -> float:
            (found,) = [sample.value for sample in samples
                        if sample.name == f"troupe:{name}" and labels.items() <= sample.labels.items()]
            return found

        return value

    def until(self, happened: Callable[[Callable[..., float]], bool]) -> None:
        for _ in range(10_000):
            if happened(self.scrape()):
                return
        raise AssertionError("it did not happen")


def of_requests(value: Callable[..., float], time: str) -> tuple[float, float]:
    """(count, sum) of one of the times of requests"""
    return value(f"request_{time}_time_seconds_count"), value(f"request_{time}_time_seconds_sum")


def run(server: Server, test: Callable[[Bench], None], device: str = "reference", model: str = "llama",
        **config: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), tiny(device, model, **config) as engine:
            server.use(cast("FakeEngine", engine))
            await asyncio.to_thread(test, Bench(server, engine))
            await asyncio.to_thread(server.wait_until_idle)

    asyncio.run(main())


def test_prompts_and_what_is_found_of_them(server: Server) -> None:
    def test(bench: Bench) -> None:
        def tokens() -> tuple[float, ...]:
            value = bench.scrape()
            return (value("prompt_tokens_total"), value("prompt_tokens_cached_total"),
                    value("prefix_cache_queries_total"), value("prefix_cache_hits_total"),
                    value("engine_prefill_tokens_total"), value("generation_tokens_total"))

        assert tokens() == (0, 0, 0, 0, 0, 0)
        bench.complete(PROMPT)
        assert tokens() == (40, 0, 40, 0, 40, 4)
        bench.complete(PROMPT)
        assert tokens() == (80, 39, 80, 39, 41, 8), "all but the last token is found, and counts as a prompt's"
        bench.complete([PROMPT, PROMPT[:20]])
        assert tokens() == (140, 39 + 39 + 19, 140, 39 + 39 + 19, 43, 16), "each prompt of a list"
        bench.complete(PROMPT, max_tokens=0, echo=True, logprobs=0)
        assert tokens()[:4] == (180, 97, 180, 97), "its logprobs must be computed"

        value = bench.scrape()
        assert value("request_prompt_tokens_count") == 5
        assert value("request_prompt_tokens_sum") == 180
        assert value("request_prefill_kv_computed_tokens_sum") == 180 - 97

    run(server, test)


def test_prompts_count_alike_however_their_tokens_are_told(server: Server) -> None:
    def test(bench: Bench) -> None:
        bench.complete(PROMPT)
        for number, fields in enumerate(({"stop": ["no such text"]}, {"logprobs": 2}, {"stream": True}), 2):
            assert bench.complete(PROMPT, **fields).status == 200
            value = bench.scrape()
            assert value("prompt_tokens_total") == 40 * number
            assert value("prompt_tokens_cached_total") == value("prefix_cache_hits_total") == 39 * (number - 1)

    run(server, test)


def test_a_prompt_of_several_completions_is_one_prompt(server: Server) -> None:
    def test(bench: Bench) -> None:
        bench.complete(PROMPT, n=3)
        value = bench.scrape()
        assert value("prompt_tokens_total") == 40
        assert value("prompt_tokens_cached_total") == 0, "somebody computed it"
        assert value("prefix_cache_queries_total") == 3 * 40
        assert 2 * 32 <= value("prefix_cache_hits_total") <= 2 * 39, "the other two found its blocks"
        assert value("generation_tokens_total") == 12
        assert value("request_success_total", finished_reason="length") == 3
        assert of_requests(value, "queue")[0] == of_requests(value, "inference")[0] == 3
        bench.complete(PROMPT, n=3)
        value = bench.scrape()
        assert value("prompt_tokens_total") == 80
        assert value("prompt_tokens_cached_total") == 39

    run(server, test)


def test_without_a_prefix_cache_nothing_is_looked_for(server: Server) -> None:
    def test(bench: Bench) -> None:
        for _ in range(2):
            bench.complete(PROMPT)
        value = bench.scrape()
        assert value("prefix_cache_queries_total") == value("prefix_cache_hits_total") == 0
        assert value("prompt_tokens_total") == value("engine_prefill_tokens_total") == 80

    run(server, test, enable_prefix_caching=False)


def test_the_tokens_of_steps(server: Server) -> None:
    def test(bench: Bench) -> None:
        bench.complete(PROMPT)                  # 32, then 8, then three times 1
        value = bench.scrape()
        assert value("iteration_tokens_total_count") == value("engine_steps_total") == 5
        assert value("iteration_tokens_total_sum") == 43
        assert [value("iteration_tokens_total_bucket", le=le) for le in ("1.0", "8.0", "16.0", "32.0", "+Inf")] == [
            3, 4, 4, 5, 5]

    run(server, test, max_num_batched_tokens=32)


def test_the_times_of_one_that_runs_and_one_that_waits(server: Server) -> None:
    def test(bench: Bench) -> None:
        gate = Gate(bench.engine)
        bench.begin(PROMPT)
        gate.wait_for_step()
        bench.now_s = 3.0
        bench.begin(PROMPT[:20])
        bench.until(lambda value: value("num_requests_waiting") == 1)
        value = bench.scrape()                  # while one runs and one waits
        assert value("num_requests_running") == 1
        assert value("kv_cache_usage_perc") == 3 / bench.engine.info.kv_groups[0].num_blocks
        assert of_requests(value, "queue") == (1, 0), "the one that runs was not queued"
        for time in ("prefill", "decode", "inference"):
            assert of_requests(value, time) == (0, 0)
        assert value("prefix_cache_queries_total") == 40
        assert value("prompt_tokens_total") == value("request_prompt_tokens_count") == 0, "it has no token yet"

        bench.now_s = 7.0
        gate.open()
        bench.join()
        value = bench.scrape()
        assert of_requests(value, "queue") == (2, 0 + 4), "the second came at 3 and entered at 7"
        assert value("request_queue_time_seconds_bucket", le="2.5") == 1
        assert value("request_queue_time_seconds_bucket", le="5.0") == 2
        assert of_requests(value, "prefill") == (2, 7 + 0), "the first entered at 0 and had its token at 7"
        assert of_requests(value, "decode") == (2, 0)
        assert of_requests(value, "inference") == (2, 7)
        assert value("request_num_preemptions_count") == 2
        assert value("request_num_preemptions_sum") == 0
        assert value("e2e_request_latency_seconds_count") == 2

    run(server, test, max_num_seqs=1)


def test_a_preemption(server: Server) -> None:
    """Who matters more takes the only slot; the other one goes on after it."""
    def test(bench: Bench) -> None:
        gate = Gate(bench.engine)
        bench.begin(PROMPT, priority=1)
        gate.wait_for_step()
        bench.begin(PROMPT[:20], priority=0)
        bench.until(lambda value: value("num_requests_waiting") == 1)
        assert bench.scrape()("num_preemptions_total") == 0
        gate.open()
        bench.join()
        value = bench.scrape()
        assert value("num_preemptions_total") == 1
        assert value("request_num_preemptions_count") == 2
        assert value("request_num_preemptions_sum") == 1
        assert value("request_num_preemptions_bucket", le="0.0") == 1
        assert value("request_num_preemptions_bucket", le="1.0") == 2
        assert value("prompt_tokens_total") == 60
        assert value("prefix_cache_queries_total") == 60, "who comes back is not counted again"
        assert value("prefix_cache_hits_total") == 19
        assert value("generation_tokens_total") == 8
        assert value("request_success_total", finished_reason="length") == 2
        assert of_requests(value, "queue")[0] == of_requests(value, "prefill")[0] == 2

    run(server, test, max_num_seqs=1, scheduling_policy="priority")


def test_aborts(server: Server) -> None:
    """One while it runs and one while it waits: their clients go."""
    def test(bench: Bench) -> None:
        gate = Gate(bench.engine)
        body = {"prompt": PROMPT, **GREEDY, "stream": True}
        runs = server.post("/v1/completions", body)
        gate.wait_for_step()
        waits = server.post("/v1/completions", body)
        bench.until(lambda value: value("num_requests_waiting") == 1)
        runs.close()
        waits.close()
        bench.until(lambda value: value("num_requests_running") == value("num_requests_waiting") == 0)
        gate.open()
        server.wait_until_idle()
        value = bench.scrape()
        assert value("request_success_total", finished_reason="abort") == 2
        assert value("request_success_total", finished_reason="length") == 0
        assert of_requests(value, "queue") == (1, 0), "the other one never ran"
        assert value("request_num_preemptions_count") == 1
        for time in ("prefill", "decode", "inference"):
            assert of_requests(value, time) == (0, 0)
        assert value("prompt_tokens_total") == value("generation_tokens_total") == 0
        assert value("e2e_request_latency_seconds_count") == value("time_to_first_token_seconds_count") == 0
        bench.complete(PROMPT)
        value = bench.scrape()
        assert value("prompt_tokens_total") == 40
        assert of_requests(value, "inference")[0] == 1

    run(server, test, max_num_seqs=1)


def test_refusals_by_their_reason(server: Server) -> None:
    def test(bench: Bench) -> None:
        def rejections() -> list[float]:
            value = bench.scrape()
            return [value("admission_rejections_total", reason=reason)
                    for reason in ("max_num_queued_reqs", "max_num_queued_tokens")]

        gate = Gate(bench.engine)
        bench.begin(PROMPT)
        gate.wait_for_step()
        bench.begin(PROMPT)
        bench.until(lambda value: value("num_requests_waiting") == 1)
        assert rejections() == [0, 0]
        assert bench.complete(PROMPT[:30]).status == 429
        assert rejections() == [0, 1]
        bench.begin(PROMPT[:10])
        bench.until(lambda value: value("num_requests_waiting") == 2)
        assert bench.complete(PROMPT[:1]).status == 429
        assert rejections() == [1, 1]
        assert bench.complete(PROMPT[:1], n=2, stream=True).status == 429
        assert rejections() == [2, 1], "requests, not their completions"
        assert bench.complete([5000]).status == 400
        gate.open()
        bench.join()
        assert rejections() == [2, 1]
        value = bench.scrape()
        assert value("request_success_total", finished_reason="length") == 3
        assert value("prompt_tokens_total") == 90
        assert of_requests(value, "queue")[0] == 3, "who is refused was not queued"
        for reason in ("abort", "error", "stop"):
            assert value("request_success_total", finished_reason=reason) == 0

    run(server, test, max_num_seqs=1, max_queued_requests=2, max_queued_tokens=60)


def test_blocks_of_each_kv_group(server: Server) -> None:
    def test(bench: Bench) -> None:
        value, groups = bench.scrape(), bench.engine._system.pool.pool.groups
        assert len(groups) == 2
        full, windowed = groups
        assert full.window is None
        assert windowed.window is not None
        assert full.num_blocks != windowed.num_blocks
        for number, group in enumerate(groups):
            assert value("cache_config_info", kv_group=str(number), num_gpu_blocks=str(group.num_blocks),
                         num_cpu_blocks="0", block_size="16", sliding_window=str(group.window), cache_dtype="float32",
                         kv_cache_memory_bytes=str(bench.engine.info.kv_bytes)) == 1

    run(server, test, model="gemma3", kv_cache_memory=1 << 21)


def test_blocks_of_one_group_and_the_tier(server: Server) -> None:
    def test(bench: Bench) -> None:
        assert bench.scrape()("cache_config_info", num_gpu_blocks="100", num_cpu_blocks="7", sliding_window="None") == 1

    run(server, test, kv_cache_memory=100 * BLOCK_BYTES, kv_tier_memory=7 * BLOCK_BYTES)
