"""The nine messages. Frozen, picklable, of plain values only: what crosses an actor's boundary can cross a process.

 caller ──Generate, Abort──▶ Tokenizer ──NewSequence, Abort──▶ Scheduler ──Reserve──▶ KV pool
   ◀──TextDelta─────────────    ▲                               ▲   │    ◀──Reserved──
                                └────────── NewTokens ──────────┘   └──StepPlan──▶ Executor
                                       (one message a step)         ◀──StepResult──

A *request* (outside) is a *sequence* inside. A sequence has three counters: tokens known, computed, planned.
A *position* is a token's index in its sequence, prompt included.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from actors.sampling_params import SamplingParams

Finish: TypeAlias = Literal["stop", "length", "rejected", "failed", "aborted"]
TopLogprobs: TypeAlias = tuple[tuple[int, float], ...]          # (token id, logprob), best first

# (block, its key, the key before it, its ids): a full block that can be found from now on; without keys and ids: one
# that cannot be found any more.
IndexChange: TypeAlias = tuple[int, bytes, bytes, tuple[int, ...]]
# (request id, the key before its first block, keys of full blocks, their ids)
Lookup: TypeAlias = tuple[str, bytes, tuple[bytes, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages as OpenAI's API has them, as one JSON text (so that the message stays plain)."""
    messages_json: bytes
    add_generation_prompt: bool = True
    continue_final_message: bool = False    # the prompt ends with the last message's content
    template_kwargs_json: bytes = b"{}"     # what else the template is given
    tools_json: bytes = b"[]"               # as OpenAI's API has them


Prompt: TypeAlias = str | tuple[int, ...] | ChatPrompt


@dataclass(frozen=True, slots=True)
class Generate:
    """A caller asks for one completion."""
    request_id: str                         # unique inside the engine
    prompt: Prompt
    sampling: SamplingParams
    choice: int = 0                         # index among the completions of one prompt; part of the random key
    arrival_s: float = 0.0                  # time.monotonic()
    priority: int = 0                       # lower comes first
    user: str = ""                          # the tenant's own name for whom he asks
    cache_salt: str = ""                    # requests of different salts share no KV blocks
    tenant: str = ""                        # who asks as the door knows it: an API key's name
    parent_id: str = ""                     # of what it is a part of, where that has several; unique for ever
    num_children: int = 1                   # parts: they are let into the queue together or not at all


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request wherever it is. Travels the same road as `Generate`."""
    request_id: str
    reason: Literal["aborted", "stop"]      # gone or cancelled caller; stop string found by the tokenizer


@dataclass(frozen=True, slots=True)
class NewSequence:
    """An encoded request enters the scheduler."""
    request_id: str
    token_ids: tuple[int, ...]              # the prompt
    sampling: SamplingParams
    max_tokens: int                         # resolved against the context length, >= 0 (0: prompt logprobs only)
    stop_ids: tuple[int, ...]               # end-of-sequence ids (unless ignored) and the caller's stop_token_ids
    seed: int                               # the caller's, or drawn by the tokenizer actor
    choice: int
    arrival_s: float
    root: bytes = b""                       # what the keys of its blocks begin from; b"": they are not cached
    keys: tuple[bytes, ...] = ()            # of the blocks that the prompt fills
    priority: int = 0                       # lower comes first
    tenant: str = ""                        # whom its share is counted for,
    user: str = ""                          # and among his users, whom of these
    parent_id: str = ""                     # as in `Generate`, as the next one
    num_children: int = 1
    bad_word_ids: tuple[tuple[int, ...], ...] = ()      # tokens that must not follow one another in the answer


@dataclass(frozen=True, slots=True)
class Want:
    """Sequence `request_id` would like tokens [start, end) planned.

    A new sequence tells the root and all keys and ids that it knows, a running one those of the blocks that its answer
    has filled since it last told some, so that others find them.
    """
    request_id: str
    start: int
    end: int
    root: bytes = b""
    keys: tuple[bytes, ...] = ()            # of the full blocks that follow those told before
    token_ids: tuple[int, ...] = ()         # from the first of these blocks on
    max_cached_tokens: int = 0              # of a new one: at most so many may come from the cache


@dataclass(frozen=True, slots=True)
class Release:
    """A sequence gives all its blocks back, and tells what of them it has not told yet: tokens of reported steps."""
    request_id: str
    keys: tuple[bytes, ...] = ()            # as in `Want`
    token_ids: tuple[int, ...] = ()
    has_failed: bool = False                # its logits were not finite: nothing that it holds may be found again


@dataclass(frozen=True, slots=True)
class Reserve:
    """One a step, or two where the first answer makes sequences yield, from the scheduler to the KV pool.

    What failed is forgotten first, then releases are applied, then wants are granted in order.
    """
    step_id: int
    releases: tuple[Release, ...]
    token_budget: int
    wants: tuple[Want, ...]                 # priority order: running ones that prefill or need a block, then new ones
    reported_step_id: int = -1              # the steps up to it have reported
    failed_steps: tuple[int, ...] = ()      # what they filled is void
    forgotten: tuple[tuple[bytes, ...], ...] = ()   # keys of sequences whose logits were not finite
    num_in_order: int | None = None         # those behind go by the longest cached prefix; None: all as given
    num_slots: int | None = None            # so many new ones may enter; None: all
    yielding: tuple[str, ...] = ()          # who would give slot and blocks to the first new one, in this order


@dataclass(frozen=True, slots=True)
class Grant:
    """Blocks for tokens [start, start + num_new_tokens); a new sequence starts at its num_cached_tokens."""
    request_id: str
    num_cached_tokens: int
    num_new_tokens: int
    new_block_ids: tuple[tuple[int, ...], ...]   # per KV group, appended to the tables; 0 where no row looks any more
    depends: tuple[int, ...] = ()           # steps in flight that fill what it found: if one fails, so does it
    cache_miss: str = ""                    # why it found no more; see `Usage`


@dataclass(frozen=True, slots=True)
class Reserved:
    """The pool's answer. Block moves go into the step's plan, which says in which order they run."""
    step_id: int
    grants: tuple[Grant, ...]
    starved: tuple[str, ...]                # wanted, budget was there, no block was
    copies: tuple[tuple[int, int, int], ...] = ()    # (group, source block, destination block)
    tier_out: tuple[tuple[int, int, int], ...] = ()  # (group, block, slot of the host tier)
    tier_in: tuple[tuple[int, int, int], ...] = ()   # (group, slot of the host tier, block)
    poisoned: tuple[tuple[int, int], ...] = ()       # (group, block), for debugging
    num_yielding: int = 0                   # so many of those asked for must; 0: none, or not even all would do
    index_changes: tuple[IndexChange, ...] = ()      # of one group since the last answer, up to where this one grants


@dataclass(frozen=True, slots=True)
class StartedSequence:
    """What the executor must know of a sequence that enters a slot (new, or back after preemption)."""
    slot: int
    request_id: str
    token_ids: tuple[int, ...]              # all tokens known
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]               # masked until min_tokens are out
    seed: int
    choice: int
    block_ids: tuple[tuple[int, ...], ...]  # per KV group
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Only what changed. Plans run in the order sent.

    The executor applies: ended, started, new_blocks, tier_out, copies, poisoned, tier_in, rows. So what leaves the
    device and what is copied is read before any block of it is written.

    Where the device keeps a table of findable blocks too, a plan brings what changed in the pool's index, in this
    order (of a block the last change counts), up to where the pool granted this step; then come the look-ups.

    Rows of the step: every chunk, and one token for each *decoding* slot that is not resting. A slot decodes once a
    chunk has reached the end of its known tokens; its next input is the token sampled last, which never leaves the
    device. The last row of a chunk that reaches the end of the known tokens samples a token.
    """
    step_id: int
    ended: tuple[int, ...] = ()             # slots whose sequence is over or preempted
    started: tuple[StartedSequence, ...] = ()
    new_blocks: tuple[tuple[int, int, tuple[int, ...]], ...] = ()    # (slot, group, block ids)
    tier_out: tuple[tuple[int, int, int], ...] = ()                 # (group, block, slot of the host tier)
    copies: tuple[tuple[int, int, int], ...] = ()                   # (group, source, destination)
    poisoned: tuple[tuple[int, int], ...] = ()                      # (group, block): what is read of it must show
    tier_in: tuple[tuple[int, int, int], ...] = ()                  # (group, slot of the host tier, block)
    chunks: tuple[tuple[int, int, int], ...] = ()                   # (slot, from, to): known tokens to compute
    resting: tuple[int, ...] = ()           # decoding slots that sit this step out
    num_tokens: int = 0                     # rows of the step, for the executor's own check
    index_changes: tuple[IndexChange, ...] = ()     # blocks of earlier plans
    lookups: tuple[Lookup, ...] = ()        # of who arrived since the last plan


@dataclass(frozen=True, slots=True)
class StepResult:
    """Columns, one entry a sampled token: slots[i] got token_ids[i] at positions[i]."""
    step_id: int
    slots: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()        # of the sampled tokens; nan where not asked for
    top_logprobs: tuple[TopLogprobs, ...] = ()
    # Prompt logprobs, where asked for: columns of (slot, position, logprob of the token there, best alternatives).
    prompt_slots: tuple[int, ...] = ()
    prompt_positions: tuple[int, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    prompt_top_logprobs: tuple[TopLogprobs, ...] = ()
    failed: tuple[tuple[int, str], ...] = ()    # (slot, reason): rows without a usable result, e.g. logits not finite
    elapsed_s: float = 0.0                  # forward pass and sampling
    # Hints: (request id, leading blocks that the device's table had) for each look-up; none where the step failed.
    prefix_hints: tuple[tuple[str, int], ...] = ()
    error: str = ""                         # the whole step failed; the engine goes on
    pooled: tuple[tuple[int, tuple[float, ...]], ...] = ()  # (slot, its whole prompt's pooled hidden state)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request took.

    cache_miss says why no more of its prompt was found in the prefix cache, for debugging: "" (all of it that could be
    was), "short" (shorter than a block), "diverged:N" (nobody has computed block N of this prompt), "evicted" (block N
    was there a while ago), "root" (it is there under another salt, tenant or adapter), "off" (it was not looked for).
    NOTE: "root" tells one tenant of another's prompt: show it only to who debugs the engine.
    """
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    cache_miss: str = ""
    num_reasoning_tokens: int = 0           # of the output, in its thought, where `SamplingParams.thought` tells of one


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """What one sequence got in a step."""
    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[tuple[int, float, TopLogprobs], ...] = ()     # (position, logprob, best alternatives)
    pooled: tuple[float, ...] = ()          # with finish, where asked for: the prompt's hidden state
    finish: Finish | None = None
    error: str = ""                         # for rejected and failed
    error_field: str = ""                   # of rejected: the parameter (if not the prompt), or the queue's limit
    usage: Usage | None = None              # with finish
    retry_after_s: float | None = None      # rejected because the queue is full


@dataclass(frozen=True, slots=True)
class NewTokens:
    """One a step, to the tokenizer, for all sequences that got something.

    Columns for the many that got a plain token, then rows for those of which there is more to say.
    """
    step_id: int
    accepted: tuple[str, ...] = ()          # request ids that are in the queue now
    # (request id, tokens found in the cache, why no more: see `Usage`, when it was queued, when it entered)
    entered: tuple[tuple[str, int, str, float, float], ...] = ()
    request_ids: tuple[str, ...] = ()       # request_ids[i] got token_ids[i]; several entries of one are in order
    token_ids: tuple[int, ...] = ()
    rows: tuple[SequenceTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its text, as replies show it."""
    token_id: int
    text: str                               # U+FFFD where the token alone is no complete character
    raw: bytes                              # the token's own bytes
    logprob: float                          # nan where there is none (a prompt's first token)
    top: tuple[TokenLogprob, ...] = ()
    num_chars: int = 0                      # of the text, that it completes; 0 for a control token that is left out


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a caller receives; deltas that he has not read yet are merged.

    The first says that the request is admitted: it has the prompt's ids, and neither text nor tokens.
    """
    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()  # in the first delta
    pooled: tuple[float, ...] = ()          # in the last delta, where asked for: the prompt's hidden state [C]
    finish: Finish | None = None            # set exactly once, in the last delta
    stop_reason: str | int | None = None    # the stop string or stop id that ended it (None: end of sequence)
    error: str = ""                         # for rejected and failed
    error_field: str = ""                   # the parameter that the error is about, or the queue's limit
    usage: Usage | None = None
    retry_after_s: float | None = None      # rejected because the queue is full: try again after this
    num_cached_tokens: int | None = None    # with the first token: so much of the prompt the prefix cache had
    num_truncated_tokens: int = 0           # in the first delta: of the prompt, cut off because the caller allowed it
    # With the first token, and the end: when it was in the queue and when it left it, by the engine's time.monotonic().
    queued_entered_s: tuple[float, float] | None = None


Message: TypeAlias = Generate | Abort | NewSequence | Reserve | Reserved | StepPlan | StepResult | NewTokens | TextDelta
