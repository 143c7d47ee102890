"""What the scheduler counts and times: plain numbers and histograms that another thread may read."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field

from actors.policy.kv_group import BLOCK_SIZE
from actors.policy.sequence import Sequence

# vLLM's, so that its dashboards show the same.
REQUEST_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                     480.0, 960.0, 1920.0, 7680.0)
STEP_BUCKETS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
PREEMPTION_BUCKETS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


class Histogram:
    """Values counted by upper bounds. Filled by one thread, without a lock: a value takes under a microsecond."""
    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Numbers[float]) -> None:
        self.bounds = bounds                    # ascending; a value equal to one is below it
        self.total = 0.0                        # of all values
        self._counts = [0] * (len(bounds) + 1)  # the last one is past all bounds

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def counts(self) -> tuple[int, ...]:
        """Values between a bound and the one before it; those past all bounds come last."""
        return tuple(self._counts)

    @property
    def num_values(self) -> int:
        return sum(self._counts)

    def copy(self) -> Histogram:
        """As it is now."""
        return Histogram.of(self.bounds, self._counts, self.total)

    @staticmethod
    def of(bounds: Numbers[float], counts: Numbers[int], total: float) -> Histogram:
        """One that says so."""
        assert len(counts) == len(bounds) + 1, "the last one is past all bounds"
        histogram = Histogram(bounds)
        histogram._counts, histogram.total = list(counts), total
        return histogram

    def add(self, other: Histogram) -> None:
        """The values of another one with the same bounds."""
        assert tuple(self.bounds) == tuple(other.bounds), "they count the same"
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self.total += other.total


def _seconds() -> Histogram:
    return Histogram(REQUEST_BUCKETS_S)


@dataclass(slots=True)
class Histograms:
    """A completion is queued until it first gets a slot; its prefill ends with its first token.

    Preemption ends neither: what is computed again belongs to the part that it happened in. The times of decoding and
    of both together are those of completions with a natural end, not of aborted and failed ones.
    """
    queue_s: Histogram = field(default_factory=_seconds)
    prefill_s: Histogram = field(default_factory=_seconds)
    decode_s: Histogram = field(default_factory=_seconds)
    inference_s: Histogram = field(default_factory=_seconds)        # prefill and decoding
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS))
    num_preemptions: Histogram = field(default_factory=lambda: Histogram(PREEMPTION_BUCKETS))   # of all that ended

    def copy(self) -> Histograms:
        """As they are now."""
        return Histograms(self.queue_s.copy(), self.prefill_s.copy(), self.decode_s.copy(), self.inference_s.copy(),
                          self.step_tokens.copy(), self.num_preemptions.copy())


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start and gauges of now."""
    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0                  # planned in chunks: prompts, and what is recomputed after preemption
    prefix_cache_queries: int = 0           # tokens of sequences that entered, where they were looked for
    prefix_cache_hits: int = 0              # of these, found in the prefix cache
    device_prefix_lookups: int = 0          # sequences that entered and that the device's table was asked about
    device_prefix_lookups_agreeing: int = 0     # of these, where it had as many full blocks as the KV pool found then
    generation_tokens: int = 0
    num_steps: int = 0                      # reported
    step_s: float = 0.0                     # in forward passes and sampling
    histograms: Histograms = field(default_factory=Histograms)

    # What happens to a sequence. now_s: the scheduler's clock.

    def enter(self, sequence: Sequence, num_cached_tokens: int, now_s: float) -> None:
        """It gets a slot for the first time, with so many of its tokens found in the prefix cache."""
        sequence.entered_s = now_s
        self.histograms.queue_s.observe(now_s - sequence.queued_s)
        if sequence.request.root:               # else they were not looked for
            self.prefix_cache_queries += sequence.num_known_tokens
            self.prefix_cache_hits += num_cached_tokens
        if sequence.num_hinted_blocks >= 0:
            self._compare(sequence.num_hinted_blocks, num_cached_tokens)

    def take_hint(self, sequence: Sequence, num_blocks: int) -> None:
        """The device's table had so many blocks of its beginning when it arrived. It may have entered meanwhile."""
        sequence.num_hinted_blocks = num_blocks
        if sequence.has_started:
            self._compare(num_blocks, sequence.num_cached_tokens)

    def _compare(self, num_blocks: int, num_cached_tokens: int) -> None:
        self.device_prefix_lookups += 1
        self.device_prefix_lookups_agreeing += num_blocks == num_cached_tokens // BLOCK_SIZE

    def end_prefill(self, sequence: Sequence, now_s: float) -> None:
        """It has its first token, or all that it was to compute."""
        sequence.prefilled_s = now_s
        self.histograms.prefill_s.observe(now_s - sequence.entered_s)

    def preempt(self, sequence: Sequence) -> None:
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def end(self, sequence: Sequence, is_complete: bool, now_s: float) -> None:
        """It is over; is_complete: by a natural end."""
        if not sequence.has_started:
            return
        histograms = self.histograms
        histograms.num_preemptions.observe(sequence.num_preemptions)
        if is_complete:
            histograms.decode_s.observe(now_s - sequence.prefilled_s)
            histograms.inference_s.observe(now_s - sequence.entered_s)
