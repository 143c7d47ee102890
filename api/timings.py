"""What one completion took, as its answer tells it to who asks: a `metrics` object, and a header.

Source: vLLM, "Per-request metrics"; W3C, "Server Timing".
"""
from __future__ import annotations

from dataclasses import dataclass

Times = dict[str, float | None]              # a `metrics` object


@dataclass(slots=True)
class Timings:
    """Moments, by time.monotonic(). As tokens come to the server: those that come at once have one moment."""
    arrival_s: float                        # of the request
    queued_s: float | None = None           # its prompt is encoded,
    entered_s: float | None = None          # and has its first place in a step
    first_s: float | None = None            # the first token has come,
    last_s: float | None = None             # and the last one so far
    num_tokens: int = 0

    def metrics(self) -> Times:
        """Under vLLM's names, in its units; None where it did not come to that."""
        generation_s = _span(self.first_s, self.last_s)
        inference_s = _span(self.entered_s, self.last_s)
        return {
            "time_to_first_token_ms": _ms(_span(self.entered_s, self.first_s)),     # NOTE: as there, without the queue
            "generation_time_ms": _ms(generation_s),
            "queue_time_ms": _ms(_span(self.queued_s, self.entered_s)),
            "mean_itl_ms": _ms(generation_s / (self.num_tokens - 1)) if generation_s is not None
            and self.num_tokens > 1 else None,
            "tokens_per_second": round(self.num_tokens / inference_s, 3) if inference_s else None}

    def header(self, now_s: float, is_over: bool) -> str:
        """Server-Timing: what is known by now. is_over: there is nothing to come."""
        parts = [("queue", _span(self.queued_s, self.entered_s)), ("prefill", _span(self.entered_s, self.first_s))]
        if is_over:
            parts += [("decode", _span(self.first_s, self.last_s)), ("total", now_s - self.arrival_s)]
        return ", ".join(f"{name};dur={_ms(span_s)}" for name, span_s in parts if span_s is not None)


def _span(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else max(0.0, end_s - start_s)


def _ms(span_s: float | None) -> float | None:
    return None if span_s is None else round(1000.0 * span_s, 3)
