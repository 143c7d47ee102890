"""Prometheus metrics, under vLLM's names with our prefix, so that dashboards made for it can be used.

Gauges and token counters are read from the engine when they are asked for; histograms are filled from the deltas that
pass through the server. What neither tells has no metric here: when a sequence left the queue (so vLLM's queue, prefill
and inference times), how often it was preempted, how many tokens each step had.
"""
from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.messages import TextDelta, Usage
from actors.policy.kv_group import BLOCK_SIZE
from api.engine import Engine

TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                  40.0, 80.0, 160.0, 640.0, 2560.0)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
                   10.0, 20.0, 40.0, 80.0)
REQUEST_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                     480.0, 960.0, 1920.0, 7680.0)
CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
COUNT_BUCKETS = tuple(float(mantissa * 10**exponent) for exponent in range(6) for mantissa in (1, 2, 5))

LABELS = ["model_name", "engine"]
ENGINE = "0"                                    # vLLM numbers the engines behind a server; here is one


class Histogram:
    """Filled and read in the server's event loop alone: no lock, so that a token costs a tenth of a microsecond."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)      # the last one is past all bounds
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, model_name: str) -> HistogramMetricFamily:
        buckets, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family = HistogramMetricFamily(f"troupe:{self.name}", self._text, labels=LABELS)
        family.add_metric([model_name, ENGINE], buckets, self._sum)
        return family


class Metrics(Collector):
    """One served model's metrics, in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.time_to_first_token_s = Histogram("time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS_S)
        self.inter_token_latency_s = Histogram("inter_token_latency_seconds", "Gaps between a completion's tokens",
                                               TOKEN_BUCKETS_S)
        self.time_per_output_token_s = Histogram("request_time_per_output_token_seconds",
                                                 "Mean gap between the tokens of a completion", TOKEN_BUCKETS_S)
        self.e2e_latency_s = Histogram("e2e_request_latency_seconds", "Arrival to last token", REQUEST_BUCKETS_S)
        self.decode_s = Histogram("request_decode_time_seconds", "First to last token", REQUEST_BUCKETS_S)
        self.num_prompt_tokens = Histogram("request_prompt_tokens", "Prompt tokens of a completion", COUNT_BUCKETS)
        self.num_generation_tokens = Histogram("request_generation_tokens", "Generated tokens of a completion",
                                               COUNT_BUCKETS)
        self.num_computed_prompt_tokens = Histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a completion that no cache had", COUNT_BUCKETS)
        self.max_tokens = Histogram("request_params_max_tokens", "max_tokens, where a request or a default sets it",
                                    COUNT_BUCKETS)
        self.num_choices = Histogram("request_params_n", "Completions asked for of a prompt", CHOICE_BUCKETS)
        self.longest = Histogram("request_max_num_generation_tokens",
                                 "Generated tokens of the longest completion of a prompt", COUNT_BUCKETS)
        self.num_cached_prompt_tokens = 0
        self.num_finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats, info = self._engine.stats(), self._engine.info
        for name, text, value in (
                ("num_requests_running", "Sequences that run", stats.num_requests_running),
                ("num_requests_waiting", "Sequences that wait", stats.num_requests_waiting),
                ("kv_cache_usage_perc", "Share of the KV blocks in use, 1 is all", stats.kv_cache_usage)):
            gauge = GaugeMetricFamily(f"troupe:{name}", text, labels=LABELS)
            gauge.add_metric([info.model, ENGINE], value)
            yield gauge
        cache = GaugeMetricFamily("troupe:cache_config_info", "The KV cache, in labels",
                                  labels=[*LABELS, "block_size", "num_gpu_blocks", "kv_cache_memory_bytes"])
        cache.add_metric([info.model, ENGINE, str(BLOCK_SIZE), str(info.kv_capacity_tokens // BLOCK_SIZE),
                          str(info.kv_bytes)], 1)
        yield cache
        startup = GaugeMetricFamily("troupe:startup_time_seconds", "Stages of the start, of which some overlap",
                                    labels=[*LABELS, "stage"])
        for stage, elapsed_s in info.startup_s:
            startup.add_metric([info.model, ENGINE, stage], elapsed_s)
        yield startup
        for name, text, value in (
                ("prompt_tokens", "Prompt tokens computed", stats.prompt_tokens),
                ("prompt_tokens_cached", "Prompt tokens of ended completions that a cache had",
                 self.num_cached_prompt_tokens),
                ("generation_tokens", "Tokens generated", stats.generation_tokens),
                ("num_preemptions", "Sequences preempted", stats.num_preemptions),
                ("engine_steps", "Steps of the engine", stats.num_steps),
                ("engine_forward_seconds", "Time inside forward passes", stats.forward_s),
                ("engine_busy_seconds", "Time with sequences running", stats.busy_s)):
            counter = CounterMetricFamily(f"troupe:{name}", text, labels=LABELS)
            counter.add_metric([info.model, ENGINE], value)
            yield counter
        success = CounterMetricFamily("troupe:request_success", "Completions by how they ended",
                                      labels=[*LABELS, "finished_reason"])
        for reason, count in self.num_finished.items():
            success.add_metric([info.model, ENGINE, reason], count)
        yield success
        for histogram in (self.time_to_first_token_s, self.inter_token_latency_s, self.time_per_output_token_s,
                          self.e2e_latency_s, self.decode_s, self.num_prompt_tokens, self.num_computed_prompt_tokens,
                          self.num_generation_tokens, self.longest, self.num_choices, self.max_tokens):
            yield histogram.family(info.model)


class PromptMeter:
    """What the completions of one prompt have in common."""
    __slots__ = ("_longest", "_metrics", "_num_choices", "_num_left")

    def __init__(self, metrics: Metrics, num_choices: int) -> None:
        self._metrics = metrics
        self._num_choices = self._num_left = num_choices
        self._longest = 0

    def finish(self, num_tokens: int) -> None:
        """One of them has all its tokens."""
        self._longest = max(self._longest, num_tokens)
        self._num_left -= 1
        if self._num_left == 0:
            self._metrics.num_choices.observe(self._num_choices)
            self._metrics.longest.observe(self._longest)


class CompletionTimer:
    """Times one completion by its deltas, of which the first, that it is admitted, has no token."""
    __slots__ = ("_arrival_s", "_ended", "_first_s", "_last_s", "_max_tokens", "_metrics", "_num_tokens", "_prompt")

    def __init__(self, metrics: Metrics, prompt: PromptMeter, arrival_s: float, max_tokens: int | None) -> None:
        self._metrics = metrics
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._arrival_s = arrival_s             # time.monotonic()
        self._first_s = self._last_s = 0.0
        self._num_tokens = 0
        self._ended = False

    def observe(self, delta: TextDelta) -> None:
        metrics, num_new, now_s = self._metrics, len(delta.token_ids), time.monotonic()
        if num_new:
            if self._num_tokens == 0:
                self._first_s = now_s
                metrics.time_to_first_token_s.observe(now_s - self._arrival_s)
            else:
                # Tokens that came in one delta share its gap.
                metrics.inter_token_latency_s.observe((now_s - self._last_s) / num_new, num_new)
            self._last_s = now_s
            self._num_tokens += num_new
        if delta.finish is not None:
            self.end(delta.finish)
            self._finish(delta.usage, now_s)

    def _finish(self, usage: Usage | None, now_s: float) -> None:
        metrics, decode_s = self._metrics, self._last_s - self._first_s
        metrics.e2e_latency_s.observe(now_s - self._arrival_s)
        metrics.decode_s.observe(decode_s)
        metrics.num_generation_tokens.observe(self._num_tokens)
        self._prompt.finish(self._num_tokens)
        if self._num_tokens > 1:
            metrics.time_per_output_token_s.observe(decode_s / (self._num_tokens - 1))
        if self._max_tokens is not None:
            metrics.max_tokens.observe(self._max_tokens)
        if usage is not None:
            metrics.num_prompt_tokens.observe(usage.num_prompt_tokens)
            metrics.num_computed_prompt_tokens.observe(usage.num_prompt_tokens - usage.num_cached_tokens)
            metrics.num_cached_prompt_tokens += usage.num_cached_tokens

    def end(self, reason: str) -> None:
        """Count how it ended, once: stop, length, abort or error."""
        if not self._ended:
            self._ended = True
            self._metrics.num_finished[reason] += 1
