"""Prometheus metrics, under vLLM's names with our prefix, so that dashboards made for it can be used.

Gauges and token counters are read from the engine when they are asked for; histograms are filled from the deltas that
pass through the server.
"""
from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.messages import TextDelta
from api.engine import Engine

TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
                  640, 2560)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10,
                   20, 40, 80)
REQUEST_BUCKETS_S = (0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
COUNT_BUCKETS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))


class Metrics:
    """One served model's metrics, in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        model_name = engine.info.model
        self.registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(engine))
        ProcessCollector(registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"troupe:{name}", text, ["model_name"], buckets=buckets, registry=registry)
            return family.labels(model_name)

        self.time_to_first_token_s = histogram("time_to_first_token_seconds", "Arrival to first token",
                                               TTFT_BUCKETS_S)
        self.inter_token_latency_s = histogram("inter_token_latency_seconds", "Gap between tokens of one completion",
                                               TOKEN_BUCKETS_S)
        self.time_per_output_token_s = histogram("request_time_per_output_token_seconds",
                                                 "Mean gap between the tokens of one completion", TOKEN_BUCKETS_S)
        self.e2e_latency_s = histogram("e2e_request_latency_seconds", "Arrival to last token", REQUEST_BUCKETS_S)
        self.num_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a completion", COUNT_BUCKETS)
        self.num_generation_tokens = histogram("request_generation_tokens", "Generated tokens of a completion",
                                               COUNT_BUCKETS)
        success = Counter("troupe:request_success", "Completions that ended", ["model_name", "finished_reason"],
                          registry=registry)
        self.finished = {reason: success.labels(model_name, reason) for reason in ("stop", "length", "abort", "error")}

    def text(self) -> bytes:
        return generate_latest(self.registry)


class CompletionTimer:
    """Times one completion by its deltas."""
    __slots__ = ("_arrival_s", "_ended", "_first_s", "_last_s", "_metrics", "_num_tokens")

    def __init__(self, metrics: Metrics, arrival_s: float) -> None:
        self._metrics = metrics
        self._arrival_s = arrival_s             # time.monotonic()
        self._first_s = self._last_s = 0.0
        self._num_tokens = 0
        self._ended = False

    def observe(self, delta: TextDelta) -> None:
        metrics, num_new = self._metrics, len(delta.token_ids)
        if num_new:
            now_s = time.monotonic()
            if self._num_tokens == 0:
                self._first_s = now_s
                metrics.time_to_first_token_s.observe(now_s - self._arrival_s)
            else:
                # Tokens that came in one delta share its gap.
                for _ in range(num_new):
                    metrics.inter_token_latency_s.observe((now_s - self._last_s) / num_new)
            self._last_s = now_s
            self._num_tokens += num_new
        if delta.finish is not None:
            self.end(delta.finish)
            metrics.e2e_latency_s.observe(time.monotonic() - self._arrival_s)
            metrics.num_generation_tokens.observe(self._num_tokens)
            if delta.usage is not None:
                metrics.num_prompt_tokens.observe(delta.usage.num_prompt_tokens)
            if self._num_tokens > 1:
                metrics.time_per_output_token_s.observe((self._last_s - self._first_s) / (self._num_tokens - 1))

    def end(self, reason: str) -> None:
        """Count how it ended, once: stop, length, abort or error."""
        if not self._ended:
            self._ended = True
            self._metrics.finished[reason].inc()


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats, labels = self._engine.stats(), [self._engine.info.model]
        for name, text, value in (
                ("num_requests_running", "Sequences that run", stats.num_requests_running),
                ("num_requests_waiting", "Sequences that wait", stats.num_requests_waiting),
                ("kv_cache_usage_perc", "Share of the KV blocks in use, 1 is all", stats.kv_cache_usage)):
            gauge = GaugeMetricFamily(f"troupe:{name}", text, labels=["model_name"])
            gauge.add_metric(labels, value)
            yield gauge
        for name, text, value in (
                ("prompt_tokens", "Prompt tokens computed", stats.prompt_tokens),
                ("generation_tokens", "Tokens generated", stats.generation_tokens),
                ("num_preemptions", "Sequences preempted", stats.num_preemptions),
                ("engine_steps", "Steps of the engine", stats.num_steps),
                ("engine_forward_seconds", "Time inside forward passes", stats.forward_s),
                ("engine_busy_seconds", "Time with sequences running", stats.busy_s)):
            counter = CounterMetricFamily(f"troupe:{name}", text, labels=["model_name"])
            counter.add_metric(labels, value)
            yield counter
