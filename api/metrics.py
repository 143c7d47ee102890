"""Prometheus metrics, under vLLM's names with our prefix, so that dashboards made for it can be used.

What the scheduler knows is read from the engine when it is asked for: gauges, token counters, and how long completions
were queued and computed. The rest is of the deltas that pass through the server, as its clients see them.

NOTE: `prompt_tokens` counts a prompt once, `prefix_cache_queries` and `request_prompt_tokens` once for each completion.
"""
from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.messages import TextDelta, Usage
from actors.policy.kv_group import BLOCK_SIZE
from actors.policy.stats import REQUEST_BUCKETS_S, Histogram
from api.timings import Timings

if TYPE_CHECKING:
    from api.engine import Engine, EngineStats

TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                  40.0, 80.0, 160.0, 640.0, 2560.0)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
                   10.0, 20.0, 40.0, 80.0)
CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
COUNT_BUCKETS = tuple(float(mantissa * 10**exponent) for exponent in range(6) for mantissa in (1, 2, 5))

LABELS = ["model_name", "engine"]
ENGINE = "0"                                    # vLLM numbers the engines behind a server; here is one
REJECTIONS = {"max_queued_requests": "max_num_queued_reqs", "max_queued_tokens": "max_num_queued_tokens"}  # vLLM's


def _histogram(bounds: tuple[float, ...]) -> Histogram:
    histogram: Histogram = field(default_factory=lambda: Histogram(bounds))
    return histogram


@dataclass(slots=True)
class Counts:
    """What a server's clients saw. Filled in its event loop."""
    time_to_first_token_s: Histogram = _histogram(TTFT_BUCKETS_S)
    inter_token_latency_s: Histogram = _histogram(TOKEN_BUCKETS_S)
    time_per_output_token_s: Histogram = _histogram(TOKEN_BUCKETS_S)
    e2e_latency_s: Histogram = _histogram(REQUEST_BUCKETS_S)
    num_prompt_tokens: Histogram = _histogram(COUNT_BUCKETS)
    num_generation_tokens: Histogram = _histogram(COUNT_BUCKETS)
    num_computed_prompt_tokens: Histogram = _histogram(COUNT_BUCKETS)
    max_tokens: Histogram = _histogram(COUNT_BUCKETS)
    num_choices: Histogram = _histogram(CHOICE_BUCKETS)
    longest: Histogram = _histogram(COUNT_BUCKETS)
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    num_finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))
    num_rejected: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REJECTIONS, 0))  # by setting

    def add(self, other: Counts) -> None:
        """What the clients of another server saw."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, Histogram):
                mine.add(theirs)
            elif isinstance(mine, dict):
                for key, count in theirs.items():
                    mine[key] += count
            else:
                setattr(self, name, mine + theirs)


class Metrics(Collector):
    """One served model's metrics, in a registry of their own."""

    def __init__(self, engine: Engine, counts: Counts | None = None) -> None:
        self._engine = engine
        self._counts = counts or Counts()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield from self._histograms(stats)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        info = self._engine.info
        for name, text, value in (
                ("num_requests_running", "Sequences that run", stats.num_requests_running),
                ("num_requests_waiting", "Sequences that wait", stats.num_requests_waiting),
                ("kv_cache_usage_perc", "Share of the KV blocks in use, 1 is all", stats.kv_cache_usage)):
            gauge = GaugeMetricFamily(f"troupe:{name}", text, labels=LABELS)
            gauge.add_metric([info.model, ENGINE], value)
            yield gauge
        cache = GaugeMetricFamily("troupe:cache_config_info",
                                  "The KV cache, in labels: a line for each group of layers, the bytes are of all",
                                  labels=[*LABELS, "block_size", "kv_group", "num_gpu_blocks", "num_cpu_blocks",
                                          "sliding_window", "cache_dtype", "kv_cache_memory_bytes"])
        for number, group in enumerate(info.kv_groups):
            cache.add_metric([info.model, ENGINE, str(BLOCK_SIZE), str(number), str(group.num_blocks),
                              str(group.num_tier_blocks), str(group.window), info.kv_dtype, str(info.kv_bytes)], 1)
        yield cache
        startup = GaugeMetricFamily("troupe:startup_time_seconds", "Stages of the start, of which some overlap",
                                    labels=[*LABELS, "stage"])
        for stage, elapsed_s in info.startup_s:
            startup.add_metric([info.model, ENGINE, stage], elapsed_s)
        yield startup

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        model_name, counts = self._engine.info.model, self._counts
        for name, text, value in (
                ("prompt_tokens", "Tokens of prompts that got a first token, computed or cached", counts.prompt_tokens),
                ("prompt_tokens_cached", "Of these, what every completion of the prompt found in the prefix cache",
                 counts.cached_prompt_tokens),
                ("generation_tokens", "Tokens generated", stats.generation_tokens),
                ("prefix_cache_queries", "Prompt tokens of sequences that entered, looked for in the prefix cache",
                 stats.prefix_cache_queries),
                ("prefix_cache_hits", "Of these, found there", stats.prefix_cache_hits),
                ("num_preemptions", "Sequences preempted", stats.num_preemptions),
                ("engine_steps", "Steps of the engine", stats.num_steps),
                ("engine_prefill_tokens", "Tokens computed in chunks: prompts, and again what was preempted",
                 stats.prompt_tokens),
                ("engine_forward_seconds", "Time inside forward passes", stats.forward_s),
                ("engine_busy_seconds", "Time with sequences running", stats.busy_s),
                *self._device_counts(stats)):
            counter = CounterMetricFamily(f"troupe:{name}", text, labels=LABELS)
            counter.add_metric([model_name, ENGINE], value)
            yield counter
        success = CounterMetricFamily("troupe:request_success", "Completions by how they ended",
                                      labels=[*LABELS, "finished_reason"])
        for reason, count in counts.num_finished.items():
            success.add_metric([model_name, ENGINE, reason], count)
        yield success
        rejections = CounterMetricFamily("troupe:admission_rejections", "Requests answered with 429, by the limit",
                                         labels=[*LABELS, "reason"])
        for limit, count in counts.num_rejected.items():
            rejections.add_metric([model_name, ENGINE, REJECTIONS[limit]], count)
        yield rejections

    def _device_counts(self, stats: EngineStats) -> Iterator[tuple[str, str, int]]:
        if self._engine.info.device.startswith("cuda"):
            yield ("device_prefix_lookups", "Sequences that entered, looked up in the device's table of KV blocks too",
                   stats.device_prefix_lookups)
            yield ("device_prefix_lookups_agreeing", "Of these, where it had as many blocks as were found then",
                   stats.device_prefix_lookups_agreeing)

    def _histograms(self, stats: EngineStats) -> Iterator[Metric]:
        engine, counts, model_name = stats.histograms, self._counts, self._engine.info.model
        for name, text, histogram in (
                ("time_to_first_token_seconds", "Arrival to first token", counts.time_to_first_token_s),
                ("inter_token_latency_seconds", "Gaps between a completion's tokens", counts.inter_token_latency_s),
                ("request_time_per_output_token_seconds", "Mean gap between the tokens of a completion",
                 counts.time_per_output_token_s),
                ("e2e_request_latency_seconds", "Arrival to last token", counts.e2e_latency_s),
                ("request_queue_time_seconds", "Encoded prompt to its first place in a step", engine.queue_s),
                ("request_prefill_time_seconds", "First place in a step to first token", engine.prefill_s),
                ("request_decode_time_seconds", "First to last token", engine.decode_s),
                ("request_inference_time_seconds", "First place in a step to last token", engine.inference_s),
                ("request_num_preemptions", "How often a completion that ended had been preempted",
                 engine.num_preemptions),
                ("iteration_tokens_total", "Tokens of a step", engine.step_tokens),
                ("request_prompt_tokens", "Prompt tokens of a completion", counts.num_prompt_tokens),
                ("request_prefill_kv_computed_tokens", "Prompt tokens of a completion that no cache had",
                 counts.num_computed_prompt_tokens),
                ("request_generation_tokens", "Generated tokens of a completion", counts.num_generation_tokens),
                ("request_max_num_generation_tokens", "Generated tokens of the longest completion of a prompt",
                 counts.longest),
                ("request_params_n", "Completions asked for of a prompt", counts.num_choices),
                ("request_params_max_tokens", "max_tokens, where a request or a default sets it", counts.max_tokens)):
            family = HistogramMetricFamily(f"troupe:{name}", text, labels=LABELS)
            family.add_metric([model_name, ENGINE], _buckets(histogram), histogram.total)
            yield family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """(upper bound, values up to it)"""
    names, sums = (*map(str, histogram.bounds), "+Inf"), accumulate(histogram.counts)
    return [(name, float(num)) for name, num in zip(names, sums, strict=True)]


class PromptMeter:
    """What the completions of one prompt have in common."""
    __slots__ = ("_longest", "_counts", "_num_cached", "_num_choices", "_num_left", "_num_waiting")

    def __init__(self, counts: Counts, num_choices: int) -> None:
        self._counts = counts
        self._num_choices = self._num_left = self._num_waiting = num_choices
        self._num_cached: int | None = None     # what each completion that began has found, at the least
        self._longest = 0

    def begin(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """One of them has its first token."""
        if self._num_cached is None:
            self._counts.prompt_tokens += num_prompt_tokens
            self._num_cached = num_cached_tokens
        self._num_cached = min(self._num_cached, num_cached_tokens)
        self._wait_no_more()

    def end_without_token(self) -> None:
        """One of them will have none."""
        self._wait_no_more()

    def _wait_no_more(self) -> None:
        # NOTE: who computes the prompt and who finds it computed is no matter of their order here.
        self._num_waiting -= 1
        if self._num_waiting == 0 and self._num_cached is not None:
            self._counts.cached_prompt_tokens += self._num_cached

    def finish(self, num_tokens: int) -> None:
        """One of them has all its tokens."""
        self._longest = max(self._longest, num_tokens)
        self._num_left -= 1
        if self._num_left == 0:
            self._counts.num_choices.observe(self._num_choices)
            self._counts.longest.observe(self._longest)


class CompletionTimer:
    """Times one completion by its deltas, of which the first, that it is admitted, has no token."""
    __slots__ = ("_ended", "_has_begun", "_max_tokens", "_counts", "_num_prompt_tokens", "_prompt", "timings")

    def __init__(self, counts: Counts, prompt: PromptMeter, arrival_s: float, max_tokens: int | None) -> None:
        self._counts = counts
        self._prompt = prompt
        self._max_tokens = max_tokens
        self.timings = Timings(arrival_s)       # time.monotonic()
        self._num_prompt_tokens = 0
        self._has_begun = self._ended = False

    def observe(self, delta: TextDelta) -> None:
        counts, timings, num_new, now_s = self._counts, self.timings, len(delta.token_ids), time.monotonic()
        if delta.prompt_token_ids:
            self._num_prompt_tokens = len(delta.prompt_token_ids)
        if delta.queued_entered_s is not None:
            timings.queued_s, timings.entered_s = delta.queued_entered_s
        if num_new:
            if timings.last_s is None:
                timings.first_s = now_s
                self._begin(delta.num_cached_tokens or 0)
                counts.time_to_first_token_s.observe(now_s - timings.arrival_s)
            else:
                # Tokens that came in one delta share its gap.
                counts.inter_token_latency_s.observe((now_s - timings.last_s) / num_new, num_new)
            timings.last_s = now_s
            timings.num_tokens += num_new
        if delta.finish is not None:
            if not self._has_begun and delta.usage is not None:     # logprobs of the prompt were all that it asked for
                self._begin(delta.usage.num_cached_tokens)
            self.end(delta.finish)
            self._finish(delta.usage, now_s)

    def _begin(self, num_cached_tokens: int) -> None:
        self._has_begun = True
        self._prompt.begin(self._num_prompt_tokens, num_cached_tokens)

    def _finish(self, usage: Usage | None, now_s: float) -> None:
        counts, timings = self._counts, self.timings
        counts.e2e_latency_s.observe(now_s - timings.arrival_s)
        counts.num_generation_tokens.observe(timings.num_tokens)
        self._prompt.finish(timings.num_tokens)
        if timings.num_tokens > 1 and timings.first_s is not None and timings.last_s is not None:
            gaps_s = timings.last_s - timings.first_s
            counts.time_per_output_token_s.observe(gaps_s / (timings.num_tokens - 1))
        if self._max_tokens is not None:
            counts.max_tokens.observe(self._max_tokens)
        if usage is not None:
            counts.num_prompt_tokens.observe(usage.num_prompt_tokens)
            counts.num_computed_prompt_tokens.observe(usage.num_prompt_tokens - usage.num_cached_tokens)

    def end(self, reason: str | None) -> None:
        """Count how it ended, once: stop, length, abort or error; None: it was refused."""
        if self._ended:
            return
        self._ended = True
        if not self._has_begun:
            self._prompt.end_without_token()
        if reason is not None:
            self._counts.num_finished[reason] += 1
