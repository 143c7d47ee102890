"""One request inside the scheduler."""
from __future__ import annotations

from dataclasses import dataclass, field

from actors.messages import Grant, Lookup, NewSequence, Release, StartedSequence, Usage, Want
from actors.policy.block_keys import block_keys
from actors.policy.kv_group import BLOCK_SIZE


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and its three counters: tokens known, planned, computed.

        0            num_computed_tokens      num_planned_tokens        num_known_tokens
        |── KV reported ──|── in steps in flight ──|── may be planned ──|

    There are no phases: prefill, chunks, prefix hits and recomputation after preemption are all "known but not yet
    planned". While results are in flight a decoding sequence runs ahead: planned passes known by one token a step,
    because the tokens between are known to the device already.
    """
    request: NewSequence
    max_tokens: int                         # cut to what the context holds
    number: int                             # counts arrivals
    rank: int = field(default=0, init=False)        # of policy priority, while it runs: the highest yields first
    request_id: str = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_known_tokens: int = field(init=False)
    num_final_tokens: int = field(init=False)   # ever computed; the answer's last token is not: nothing follows from it
    stop_ids: frozenset[int] = field(init=False)
    is_plain: bool = field(init=False)      # tokens are all that it gets until its end
    output_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0            # since it entered its slot, as the next three
    num_planned_tokens: int = 0
    num_reserved_tokens: int = 0            # what its blocks hold
    num_started_tokens: int = 0             # known when it entered: planned in chunks, what follows one by one
    num_found_tokens: int = 0               # of them in the prefix cache
    num_told_blocks: int = 0                # leading blocks whose keys the KV pool has
    depends: tuple[int, ...] = ()           # steps that fill what it found: if one fails, so does it
    keys: list[bytes] = field(default_factory=list)     # of its leading full blocks, as far as they were needed
    num_cached_tokens: int = 0              # found in the prefix cache when it first entered
    cache_miss: str = ""                    # why no more was, as in `Usage`
    num_hinted_blocks: int = -1             # that the device found of it when it arrived; -1: it has not said
    num_prompt_logprobs: int = 0            # prompt positions below have been delivered
    slot: int = -1                          # -1: waiting
    last_step_id: int = -1                  # set when preempted: it resumes once this step has reported
    num_preemptions: int = 0
    queued_s: float = 0.0                   # by the scheduler's clock: when it arrived,
    entered_s: float = 0.0                  # first got a slot,
    prefilled_s: float = 0.0                # and had its first token
    has_started: bool = False               # once
    is_alive: bool = True
    _first_want: Want | None = None         # while it waits

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.num_prompt_tokens = self.num_known_tokens = len(self.request.token_ids)
        self.num_final_tokens = self.num_prompt_tokens + max(self.max_tokens, 1) - 1
        self.stop_ids = frozenset(self.request.stop_ids)
        self.is_plain = self.request.sampling.logprobs is None and self.request.sampling.prompt_logprobs is None
        self.keys = list(self.request.keys)

    def start(self, slot: int, grant: Grant) -> None:
        """Enter `slot`, with the first `num_cached_tokens` of `grant` already in its blocks."""
        num_found = grant.num_cached_tokens
        assert self.slot < 0, f"{self.request_id} is in slot {self.slot} already"
        assert num_found < self.num_known_tokens, "a sequence needs a token to compute"
        if not self.has_started:            # what it finds of its own after preemption is no hit
            self.has_started = True
            self.num_cached_tokens, self.cache_miss = num_found, grant.cache_miss
        self.slot = slot
        self.depends = grant.depends
        self.num_started_tokens = self.num_known_tokens
        self.num_planned_tokens = self.num_computed_tokens = self.num_found_tokens = num_found
        self.num_told_blocks = len(self.keys)
        self._first_want = None

    def stop(self) -> int:
        """Leave the slot and forget what was computed. Returns the slot."""
        assert self.slot >= 0, f"{self.request_id} is in no slot"
        slot, self.slot = self.slot, -1
        self.num_planned_tokens = self.num_computed_tokens = self.num_reserved_tokens = self.num_started_tokens = 0
        self.num_found_tokens = self.num_told_blocks = 0
        return slot

    # What the KV pool is told

    def first_want(self) -> Want:
        """To enter, with all that is known. The same until more becomes known."""
        want = self._first_want
        if want is None or want.end != self.num_known_tokens:
            num_known, root = self.num_known_tokens, self.request.root
            if root:
                self._make_keys(num_known)
                want = Want(self.request_id, 0, num_known, root, tuple(self.keys), self.known_ids(0, num_known),
                            self._max_cached_tokens())
            else:
                want = Want(self.request_id, 0, num_known)
            self._first_want = want
        return want

    def lookup(self) -> Lookup | None:
        """To ask the device, for as many blocks as the pool looks for; None if there are none."""
        want = self.first_want()
        num_blocks = min(len(want.keys), want.max_cached_tokens // BLOCK_SIZE)
        if not num_blocks:
            return None
        return self.request_id, want.root, want.keys[:num_blocks], want.token_ids[:num_blocks * BLOCK_SIZE]

    def next_want(self, start: int, end: int) -> Want:
        """Of a running one, with the blocks that its answer has filled since it last told some."""
        if self.request.root and self.num_known_tokens // BLOCK_SIZE > self.num_told_blocks:
            first, self.num_told_blocks = self.num_told_blocks, self.num_known_tokens // BLOCK_SIZE
            self._make_keys(self.num_known_tokens)
            return Want(self.request_id, start, end, keys=tuple(self.keys[first:self.num_told_blocks]),
                        token_ids=self.known_ids(first * BLOCK_SIZE, self.num_told_blocks * BLOCK_SIZE))
        return Want(self.request_id, start, end)

    def release(self, has_failed: bool) -> Release:
        """Of all its blocks, with what reported steps have filled and was not told."""
        num_computed, first = self.num_computed_tokens, self.num_told_blocks
        # What it found was told by others; and whether a copied block is filled only a reported step of its own says.
        has_news = num_computed > max(first * BLOCK_SIZE, self.num_found_tokens)
        if has_failed or not self.request.root or not has_news:
            return Release(self.request_id, has_failed=has_failed)
        self._make_keys(num_computed)
        return Release(self.request_id, tuple(self.keys[first:num_computed // BLOCK_SIZE]),
                       self.known_ids(first * BLOCK_SIZE, num_computed))

    def known_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens [start, end)."""
        prompt_ids, num_prompt = self.request.token_ids, self.num_prompt_tokens
        if end <= num_prompt:
            return prompt_ids[start:end]
        return prompt_ids[start:] + tuple(self.output_ids[max(0, start - num_prompt):end - num_prompt])

    def _make_keys(self, num_tokens: int) -> None:
        """`keys` of all blocks that the first `num_tokens` fill."""
        start, end = len(self.keys) * BLOCK_SIZE, num_tokens // BLOCK_SIZE * BLOCK_SIZE
        if end > start:
            parent = self.keys[-1] if self.keys else self.request.root
            self.keys += block_keys(parent, self.known_ids(start, end))

    def _max_cached_tokens(self) -> int:
        """The last token must be computed: what follows it is asked for. So must the prompt from where its logprobs
        are still to come, and all of it where its hidden states are summed up."""
        if self.request.sampling.pooling == "mean":
            return 0
        if self.request.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens:
            return max(0, self.num_prompt_logprobs - 1)
        return self.num_known_tokens - 1

    # What others are told

    def describe(self, block_ids: tuple[tuple[int, ...], ...]) -> StartedSequence:
        """What the executor must know."""
        request = self.request
        return StartedSequence(self.slot, request.request_id, self.known_ids(0, self.num_known_tokens),
                               self.num_prompt_tokens, request.sampling, request.stop_ids, request.seed,
                               request.choice, block_ids, request.bad_word_ids)

    def usage(self) -> Usage:
        return Usage(self.num_prompt_tokens, len(self.output_ids), self.num_cached_tokens, self.cache_miss)
