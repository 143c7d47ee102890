"""Health through a server's life, draining, and the metrics under vLLM's names."""
from __future__ import annotations

import asyncio
import re
import threading
from typing import cast

from prometheus_client.parser import text_string_to_metric_families

from api.engine import Engine
from api.service import Service
from tests.api.fake_engine import FakeEngine
from tests.api.serving import Answer, Server


def test_life_of_a_server() -> None:
    engine = FakeEngine()
    with Server() as server:
        for path in ("/v1/models", "/metrics"):
            assert server.request("GET", path).error["code"] == "starting"
        assert server.complete(prompt="a").status == 503
        health = server.request("GET", "/health")
        assert (health.status, health.json["status"]) == (503, "starting")

        server.use(engine)
        health = server.request("GET", "/health")
        assert (health.status, health.json) == (200, {"status": "ready"})

        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(server.complete(prompt="HOLD")))
        thread.start()
        engine.wait_for(lambda: engine.states == ["running"])
        drained: list[bool] = []
        draining = threading.Thread(target=lambda: drained.append(server.run(server.service.drain(60))))
        draining.start()
        while server.request("GET", "/health").status == 200:
            pass
        for refused in (server.complete(prompt="a"), server.chat()):
            assert refused.status == 503
            assert refused.error["code"] == "stopping"
        assert server.request("GET", "/health").json["status"] == "stopping"
        engine.release()
        thread.join()
        draining.join()
        assert answers[0].json["choices"][0]["text"] == "re HOLD"
        assert drained == [True]


def test_drain_is_bounded() -> None:
    async def run() -> tuple[bool, bool]:
        busy, idle = Service(), Service()
        for service in (busy, idle):
            service.serve(cast("Engine", FakeEngine()))
        with busy.open_request():
            return await busy.drain(0.0), await idle.drain(0.0)

    assert asyncio.run(run()) == (False, True)


def test_metrics(server: Server, engine: FakeEngine) -> None:
    assert server.complete(prompt="abc", max_tokens=3).status == 200
    assert server.chat("hi", stream=True, n=2).status == 200
    assert server.complete(prompt="FAIL").status == 500
    assert server.complete(prompt="").status == 400
    assert server.complete(prompt=["BUSY", "BUSY"], n=2).status == 429
    assert server.complete(prompt="BUSY", stream=True).status == 429
    with server.post("/v1/completions", {"prompt": "HOLD"}):
        engine.wait_for(lambda: engine.states[-1] == "running")
    server.wait_until_idle()

    answer = server.request("GET", "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    text = answer.body.decode()
    samples = {(sample.name, sample.labels.get("finished_reason") or sample.labels.get("reason"),
                sample.labels.get("le")): sample.value
               for family in text_string_to_metric_families(text) for sample in family.samples}

    def value(name: str, reason: str | None = None) -> float:
        return samples[f"troupe:{name}", reason, None]

    assert value("num_requests_running") == 0
    assert value("num_requests_waiting") == 0
    assert value("kv_cache_usage_perc") == 0.25
    assert value("prompt_tokens_total") == 3 + 3 + 4, "once for all completions of a prompt, if there is a token"
    assert value("generation_tokens_total") == engine.num_output_tokens
    assert value("num_preemptions_total") == 0
    assert value("request_success_total", "length") == 1
    assert value("request_success_total", "stop") == 2
    assert value("request_success_total", "error") == 1
    assert value("request_success_total", "abort") == 1
    assert value("time_to_first_token_seconds_count") == 4
    assert value("inter_token_latency_seconds_count") == 2 + 2 * 5 + 2
    assert value("e2e_request_latency_seconds_count") == 3
    assert value("request_time_per_output_token_seconds_count") == 3
    assert value("request_prompt_tokens_sum") == 3 + 2 * 3
    assert value("request_prefill_kv_computed_tokens_sum") == 3 + 2 * 3
    assert value("prompt_tokens_cached_total") == 0
    assert value("request_generation_tokens_sum") == 3 + 2 * 6
    assert value("request_params_n_count") == 2, "once for all completions of a prompt"
    assert value("request_params_n_sum") == 1 + 2
    assert value("request_max_num_generation_tokens_sum") == 3 + 6
    assert value("request_params_max_tokens_count") == 1, "the chat did not ask for a limit"
    assert value("request_params_max_tokens_sum") == 3
    assert 'troupe:startup_time_seconds{engine="0",model_name="fake",stage="tokenizer"} 0.2' in text
    assert value("admission_rejections_total", "max_num_queued_reqs") == 2
    assert value("admission_rejections_total", "max_num_queued_tokens") == 0
    for group, num_blocks, window in ((0, 512, "None"), (1, 96, "64")):
        assert re.search(rf'troupe:cache_config_info\{{block_size="16",.*kv_group="{group}",.*'
                         rf'num_gpu_blocks="{num_blocks}",sliding_window="{window}"\}} 1.0', text)
    assert ("troupe:time_to_first_token_seconds_bucket", None, "2560.0") in samples
    assert all('engine="0"' in line and 'model_name="fake"' in line for line in text.splitlines()
               if line.startswith("troupe:"))
    assert "HOLD" not in text
