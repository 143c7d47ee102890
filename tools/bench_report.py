"""What a benchmark says: pure arithmetic over time stamps, vLLM's console block, and the JSON document.

Definitions (vLLM's; other tools use the same names for other things, so never compare by name):
  an output   one streamed event that brings generated tokens; several tokens in one event are one output
  TTFT        from sending a request to its first output
  ITL         the gap between two outputs of a request that follow each other
  E2EL        from sending a request to its last event that brings a choice, the finish included
  TPOT        (E2EL - TTFT) / (output tokens - 1) of a request; none for a single token, which goodput counts as 0
  goodput     requests that kept every --goodput limit, per second
Percentiles interpolate linearly, as numpy does. Failed requests count nowhere but under "failed".
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

METRICS = (                                 # (key, short name, heading)
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request; times in seconds of one clock."""
    start_s: float = 0.0
    output_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""                         # empty: it succeeded

    @property
    def ttft_s(self) -> float:
        """An answer that ended without any output has its end as its first output."""
        return (self.output_times_s[0] if self.output_times_s else self.end_s) - self.start_s

    @property
    def e2el_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def itls_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.output_times_s)]

    @property
    def tpot_s(self) -> float | None:
        if self.num_output_tokens <= 1:
            return None
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1)


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """`["ttft:500", "tpot:50"]` as milliseconds by metric. Raises: ValueError."""
    parsed = {}
    for limit in limits:
        key, _, value = limit.partition(":")
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = -1.0
        if key not in ("ttft", "tpot", "e2el") or not (math.isfinite(limit_ms) and limit_ms >= 0):
            raise ValueError(f"--goodput: {limit!r} is not KEY:MILLISECONDS with KEY one of ttft, tpot, e2el")
        parsed[key] = limit_ms
    return parsed


def compute_metrics(records: Sequence[RequestRecord], duration_s: float,
                    limits_ms: Mapping[str, float]) -> dict[str, Any]:
    """vLLM's result keys over all requests of a run. `limits_ms`: goodput's, by metric."""
    done = [record for record in records if not record.error]
    total_input = sum(record.num_input_tokens for record in done)
    total_output = sum(record.num_output_tokens for record in done)
    metrics: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": sum(is_good(record, limits_ms) for record in done) / duration_s if limits_ms else None,
        "output_throughput": total_output / duration_s,
        "total_token_throughput": (total_input + total_output) / duration_s,
        "max_output_tokens_per_s": peak_outputs_per_s(done),
        "max_concurrent_requests": peak_concurrency(done),
        "rtfx": 0.0,                        # seconds of audio per second: a key of vLLM's, there is no audio here
    }
    samples = {
        "ttft": [record.ttft_s for record in done],
        "tpot": [record.tpot_s for record in done if record.tpot_s is not None],
        "itl": [gap_s for record in done for gap_s in record.itls_s],
        "e2el": [record.e2el_s for record in done],
    }
    for key, _, _ in METRICS:
        values_ms = np.array(samples[key] or [0.0]) * 1000.0        # vLLM's figure for no sample is 0 too
        metrics[f"mean_{key}_ms"] = float(np.mean(values_ms))
        metrics[f"median_{key}_ms"] = float(np.median(values_ms))
        metrics[f"std_{key}_ms"] = float(np.std(values_ms))
        metrics[f"p99_{key}_ms"] = float(np.percentile(values_ms, 99))
    return metrics


def is_good(record: RequestRecord, limits_ms: Mapping[str, float]) -> bool:
    """Whether a request kept every limit."""
    values_s = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return all(values_s[key] * 1000.0 <= limit_ms for key, limit_ms in limits_ms.items())


def peak_outputs_per_s(done: Sequence[RequestRecord]) -> float:
    """The most outputs in one of the seconds counted from the first request's start."""
    if not done:
        return 0.0
    start_s = min(record.start_s for record in done)
    seconds = [int(time_s - start_s) for record in done for time_s in record.output_times_s]
    return float(np.bincount(seconds).max()) if seconds else 0.0


def peak_concurrency(done: Sequence[RequestRecord]) -> int:
    """The most requests under way at one moment; one that ends as another starts does not overlap it."""
    changes = sorted([(record.start_s, 1) for record in done] + [(record.end_s, -1) for record in done])
    peak = running = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


def console_block(metrics: Mapping[str, Any], concurrency: int | None, request_rate: float) -> str:
    """The block that `vllm bench serve` prints, character for character, so that scripts which parse it work here."""
    lines = [" Serving Benchmark Result ".center(50, "=")]

    def count(label: str, value: int) -> None:
        lines.append(f"{label:<40} {value:<10}")

    def number(label: str, value: float) -> None:
        lines.append(f"{label:<40} {value:<10.2f}")

    count("Successful requests:", metrics["completed"])
    count("Failed requests:", metrics["failed"])
    if concurrency is not None:
        count("Maximum request concurrency:", concurrency)
    if math.isfinite(request_rate):
        number("Request rate configured (RPS):", request_rate)
    number("Benchmark duration (s):", metrics["duration"])
    count("Total input tokens:", metrics["total_input_tokens"])
    count("Total generated tokens:", metrics["total_output_tokens"])
    number("Request throughput (req/s):", metrics["request_throughput"])
    if metrics["request_goodput"] is not None:
        number("Request goodput (req/s):", metrics["request_goodput"])
    number("Output token throughput (tok/s):", metrics["output_throughput"])
    number("Peak output token throughput (tok/s):", metrics["max_output_tokens_per_s"])
    number("Peak concurrent requests:", metrics["max_concurrent_requests"])
    number("Total token throughput (tok/s):", metrics["total_token_throughput"])
    for key, name, heading in METRICS:
        lines.append(heading.center(50, "-"))
        number(f"Mean {name} (ms):", metrics[f"mean_{key}_ms"])
        number(f"Median {name} (ms):", metrics[f"median_{key}_ms"])
        number(f"P99 {name} (ms):", metrics[f"p99_{key}_ms"])
    lines.append("=" * 50)
    return "\n".join(lines)
