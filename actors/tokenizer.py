"""The tokenizer actor: it owns text. Encodes prompts in worker threads, decodes tokens, finds stop strings."""
from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from actors.constraints import check_thought, new_reader
from actors.grammars import Grammars
from actors.mailbox import Mailbox
from actors.messages import (
    Abort,
    ChatPrompt,
    Generate,
    NewSequence,
    NewTokens,
    SequenceTokens,
    TextDelta,
    TokenLogprob,
    TopLogprobs,
    Usage,
)
from actors.policy.block_keys import block_keys, root_key
from actors.policy.scheduler import SchedulerMessage
from actors.policy.stop_strings import StopStrings
from actors.policy.thought_reader import ThoughtReader
from actors.prompts import bad_word_ids, prompt_field, serving_ids
from actors.sampling_params import ParameterError
from weights.vocab import Detokenizer, Vocab

log = logging.getLogger("troupe.tokenizer")

NAN = float("nan")
ENCODING_THREADS = 2


@dataclass(slots=True)
class _Text:
    """A request whose prompt is encoded: its text so far, on this side of the scheduler."""
    sequence: NewSequence
    detokenizer: Detokenizer
    stop_strings: StopStrings
    prompt_num_chars: tuple[int, ...]       # that each prompt token completes; () where nobody asks
    num_truncated_tokens: int
    num_output_tokens: int = 0
    cached: tuple[int, str] = (0, "")       # tokens found in the prefix cache, and why no more
    queued_entered_s: tuple[float, float] | None = None     # as in `TextDelta`
    thought: ThoughtReader | None = None    # until it is over
    num_reasoning_tokens: int = 0           # so far


@dataclass(frozen=True, slots=True)
class CacheNames:
    """What tells KV blocks of equal tokens apart."""
    model: str
    by_tenant: bool                         # tenants share no blocks

    def root(self, generate: Generate) -> bytes:
        return root_key(model=self.model, adapter="", salt=generate.cache_salt,
                        scope=generate.tenant if self.by_tenant else "")


class Tokenizer:
    """Runs on the engine's loop. `deliver` takes a step's deltas to the callers."""

    def __init__(self, vocab: Vocab, vocab_size: int, max_model_len: int, scheduler: Mailbox[SchedulerMessage],
                 deliver: Callable[[Sequence[TextDelta]], None], seed: int | None = None,
                 cache: CacheNames | None = None, grammars: Grammars | None = None) -> None:
        """seed: where the seeds of requests without one come from; None: the system's randomness. cache: how KV blocks
        are named; None: they are not, and only children of one parent find them. grammars: where those that are
        compiled lie for the executor to find."""
        self.vocab = vocab
        self.vocab_size = vocab_size        # of the model: a tokenizer may have more ids than the embedding has rows
        self.max_model_len = max_model_len
        self.scheduler = scheduler
        self.deliver = deliver
        self.cache = cache
        self.grammars = grammars or Grammars(vocab, vocab_size)
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        self.inbox: Mailbox[Generate | Abort | NewTokens] = Mailbox()
        self._encoding: dict[str, asyncio.Task[None]] = {}
        self._texts: dict[str, _Text] = {}
        self._pool = ThreadPoolExecutor(ENCODING_THREADS, thread_name_prefix="troupe-encode")

    async def run(self) -> None:
        try:
            while True:
                for message in await self.inbox.drain():
                    if isinstance(message, NewTokens):
                        self.deliver(self._decode_all(message))
                    elif isinstance(message, Generate):
                        self._encoding[message.request_id] = asyncio.create_task(self._admit(message))
                    else:
                        self._abort(message)
        finally:
            for task in self._encoding.values():
                task.cancel()
            self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def num_open(self) -> int:
        return len(self._encoding) + len(self._texts)

    async def _admit(self, generate: Generate) -> None:
        """Encode off the loop and pass the sequence on; a prompt that cannot be served is answered here."""
        request_id = generate.request_id
        try:
            text = await asyncio.get_running_loop().run_in_executor(self._pool, self._encode, generate)
        except ValueError as error:
            field_name = error.field if isinstance(error, ParameterError) else prompt_field(generate.prompt)
            self.deliver([TextDelta(request_id, finish="rejected", error=str(error), error_field=field_name)])
        except Exception:
            log.exception("encoding of request %s failed", request_id)
            self.deliver([TextDelta(request_id, finish="failed", error="the prompt could not be encoded")])
        else:
            self._texts[request_id] = text
            self.scheduler.send(text.sequence)
        finally:
            # NOTE: an abort may have taken the entry away and cancelled this task meanwhile.
            self._encoding.pop(request_id, None)

    def _encode(self, generate: Generate) -> _Text:
        """In a worker thread. Raises: ValueError."""
        sampling, vocab = generate.sampling, self.vocab
        sampling.check_vocab(self.vocab_size)
        if sampling.structured_outputs is not None:
            self.grammars.check(sampling.structured_outputs)
        prompt = serving_ids(vocab, generate.prompt, sampling, self.vocab_size, self.max_model_len)
        ids, room = prompt.ids, self.max_model_len - len(prompt.ids)
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        # A stop string that is itself a control token has no text to be found in: it stops by its id.
        special_stops = {stop: token_id for stop in sampling.stop if (token_id := vocab.special_id(stop)) is not None}
        # A grammar ends by it whatever was asked for: the executor masks it while there is another way on.
        ignores_eos = sampling.ignore_eos and sampling.structured_outputs is None
        stop_ids = dict.fromkeys((*(() if ignores_eos else sorted(vocab.stop_ids)),
                                  *sampling.stop_token_ids, *special_stops.values()))
        root = self._root(generate)
        sequence = NewSequence(
            request_id=generate.request_id, token_ids=tuple(ids), sampling=sampling, max_tokens=max_tokens,
            stop_ids=tuple(stop_ids), seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            choice=generate.choice, arrival_s=generate.arrival_s, root=root,
            keys=block_keys(root, ids) if root else (), priority=generate.priority,
            tenant=generate.tenant, user=generate.user, parent_id=generate.parent_id,
            num_children=generate.num_children, bad_word_ids=bad_word_ids(vocab, sampling))
        check_thought(vocab, self.vocab_size, sampling, sequence.bad_word_ids)
        return _Text(sequence, Detokenizer(vocab, ids, sampling.skip_special_tokens), StopStrings(sampling.stop),
                     () if sampling.prompt_logprobs is None else self._prompt_num_chars(generate, ids),
                     prompt.num_truncated,
                     thought=None if sampling.thought is None else new_reader(vocab, sampling.thought, ids))

    def _root(self, generate: Generate) -> bytes:
        """What the keys of its KV blocks begin from; b"": it has none, and nobody finds them."""
        if self.cache is not None:
            return self.cache.root(generate)
        if generate.num_children > 1:           # nothing is kept for others, but choices share their prompt
            return root_key(model="", adapter="", salt=generate.parent_id, scope="children")
        return b""

    def _prompt_num_chars(self, generate: Generate, ids: list[int]) -> tuple[int, ...]:
        """Characters that each token completes of the prompt as its caller reads it; of what we put before it, none."""
        prompt = generate.prompt
        if isinstance(prompt, ChatPrompt):
            num_added = 0
        else:
            given = self.vocab.encode(prompt, add_special=False) if isinstance(prompt, str) else prompt
            num_added = max(0, len(ids) - len(given))       # none where it was cut
        detokenizer = Detokenizer(self.vocab, (), skip_special_tokens=False)
        return (0,) * num_added + tuple(len(detokenizer.push((token_id,))) for token_id in ids[num_added:])

    def _abort(self, abort: Abort) -> None:
        task = self._encoding.pop(abort.request_id, None)
        if task is not None:
            task.cancel()
            self.deliver([TextDelta(abort.request_id, finish="aborted")])
        elif abort.request_id in self._texts:
            self.scheduler.send(abort)          # its answer, a row with finish "aborted", ends the request here

    def _decode_all(self, message: NewTokens) -> list[TextDelta]:
        deltas: list[TextDelta | None] = [self._first_delta(request_id) for request_id in message.accepted]
        for request_id, num_cached_tokens, cache_miss, queued_s, entered_s in message.entered:
            if (text := self._texts.get(request_id)) is not None:
                text.cached = num_cached_tokens, cache_miss
                text.queued_entered_s = queued_s, entered_s
        for request_id, token_id in zip(message.request_ids, message.token_ids, strict=True):
            state = self._texts.get(request_id)
            if state is not None and not state.stop_strings.stops:      # most of them
                state.num_output_tokens += 1
                is_first = state.num_output_tokens == 1
                if state.thought is not None:
                    self._read_thought(state, token_id)
                deltas.append(TextDelta(request_id, state.detokenizer.push((token_id,)), (token_id,),
                                        num_cached_tokens=state.cached[0] if is_first else None,
                                        queued_entered_s=state.queued_entered_s if is_first else None))
            else:
                deltas.append(self._decode(SequenceTokens(request_id, (token_id,))))
        deltas += map(self._decode, message.rows)
        return [delta for delta in deltas if delta is not None]

    def _first_delta(self, request_id: str) -> TextDelta:
        """Of a request that is in the scheduler's queue."""
        state = self._texts[request_id]
        # Nothing precedes the prompt's first token: it has no log-probability.
        first = () if state.sequence.sampling.prompt_logprobs is None else ((0, NAN, ()),)
        return TextDelta(request_id, prompt_token_ids=state.sequence.token_ids,
                         prompt_logprobs=self._prompt_logprobs(state, first),
                         num_truncated_tokens=state.num_truncated_tokens)

    def _decode(self, row: SequenceTokens) -> TextDelta | None:
        state = self._texts.get(row.request_id)
        if state is None:
            return None                         # ended here by a stop string; the scheduler did not know yet
        sampling = state.sequence.sampling
        token_ids, finish, stop_reason = row.token_ids, row.finish, self._stop_reason(state, row)
        texts, num_chars, cut = [], [], False
        is_first = state.num_output_tokens == 0 and len(token_ids) > 0
        for index, token_id in enumerate(token_ids):
            state.num_output_tokens += 1
            if finish == "stop" and index == len(token_ids) - 1:
                text = self._stop_text(state, token_id, stop_reason) if sampling.include_stop_str_in_output else ""
                num_chars.append(len(text))     # else the stop token itself is no text
                texts.append(text)
                break
            if state.thought is not None:
                self._read_thought(state, token_id)
            text = state.detokenizer.push((token_id,))
            num_chars.append(len(text))
            shown, stop = self._hold_back(state, text)
            texts.append(shown)
            if stop is not None:
                finish, stop_reason, token_ids = "stop", stop, token_ids[:index + 1]
                cut = True
                self.scheduler.send(Abort(row.request_id, "stop"))
                break
        if finish is not None and not cut:
            tail, stop = self._hold_back(state, state.detokenizer.flush())
            texts.append(tail)
            if stop is None:
                texts.append(state.stop_strings.flush())
            else:
                finish, stop_reason = "stop", stop
        if finish is not None:
            del self._texts[row.request_id]
        return TextDelta(
            request_id=row.request_id, text="".join(texts), token_ids=token_ids,
            logprobs=() if sampling.logprobs is None else tuple(
                self._token_logprob(token_id, logprob, top, length) for token_id, logprob, top, length
                in zip(token_ids, row.logprobs, row.top_logprobs, num_chars, strict=False)),
            prompt_logprobs=self._prompt_logprobs(state, row.prompt_logprobs), finish=finish, stop_reason=stop_reason,
            error=row.error,
            error_field=row.error_field or ("prompt" if finish == "rejected" else ""),
            usage=None if finish is None else Usage(
                len(state.sequence.token_ids), state.num_output_tokens, *state.cached,
                num_reasoning_tokens=state.num_reasoning_tokens),
            retry_after_s=row.retry_after_s, num_cached_tokens=state.cached[0] if is_first else None,
            queued_entered_s=state.queued_entered_s if is_first or finish is not None else None, pooled=row.pooled)

    def _read_thought(self, state: _Text, token_id: int) -> None:
        reader = state.thought
        assert reader is not None, "it is not over"
        reader.push(self.vocab.token_bytes(token_id))
        state.num_reasoning_tokens = reader.num_tokens
        if reader.place in ("behind", "none"):
            state.thought = None

    def _hold_back(self, state: _Text, text: str) -> tuple[str, str | None]:
        """What of `text` can be shown already, and the stop string that it completes."""
        sampling = state.sequence.sampling
        if state.num_output_tokens <= sampling.min_tokens:
            return state.stop_strings.flush() + text, None      # stop strings count only after min_tokens
        shown, stop = state.stop_strings.push(text)
        if stop is not None and sampling.include_stop_str_in_output:
            shown += stop
        return shown, stop

    def _stop_text(self, state: _Text, token_id: int, stop_reason: str | int | None) -> str:
        """What the text ends with where the stop token belongs to it: what was held back, and the token's own text."""
        held = state.stop_strings.flush()
        if isinstance(stop_reason, str):        # the caller spelled it: it is shown though control tokens are not
            return held + state.detokenizer.flush() + stop_reason
        return held + state.detokenizer.push((token_id,))

    def _stop_reason(self, state: _Text, row: SequenceTokens) -> str | int | None:
        """What a caller's own stop ended it by: the control token's string, or the id; None for end of sequence."""
        if row.finish != "stop":
            return None
        sampling, stop_id = state.sequence.sampling, row.token_ids[-1]
        for stop in sampling.stop:
            if self.vocab.special_id(stop) == stop_id:
                return stop
        return stop_id if stop_id in sampling.stop_token_ids else None

    def _prompt_logprobs(self, state: _Text,
                         logprobs: Sequence[tuple[int, float, TopLogprobs]]) -> tuple[TokenLogprob, ...]:
        ids = state.sequence.token_ids
        return tuple(self._token_logprob(ids[position], logprob, top, state.prompt_num_chars[position])
                     for position, logprob, top in logprobs)

    def _token_logprob(self, token_id: int, logprob: float, top: TopLogprobs, num_chars: int) -> TokenLogprob:
        vocab = self.vocab
        others = tuple(TokenLogprob(i, vocab.token_text(i), vocab.token_bytes(i), p) for i, p in top)
        return TokenLogprob(token_id, vocab.token_text(token_id), vocab.token_bytes(token_id), logprob, others,
                            num_chars)
