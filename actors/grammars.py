"""Grammars that answers follow: compiled once, bounded in time and size, and a matcher for each sequence.

llguidance does the matching: a grammar becomes a lexer and an Earley parser, a step's mask is one walk of the
vocabulary's trie. It is imported by the first request that has a grammar.
"""
from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from actors.call_grammar import call_grammar
from actors.sampling_params import ParameterError, StructuredOutputs
from weights.vocab import Vocab

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

log = logging.getLogger("troupe.grammars")

T = TypeVar("T")

MAX_CACHED = 32                             # grammars
MAX_CACHED_CHARS = 1 << 22                  # of their texts together
MAX_DIGITS = 40                             # of a number in JSON, in a row, where the schema lets it end
MAX_WHITESPACE = 32                         # characters between two parts of JSON
MAX_LEXER_STATES = 30_000                   # of a grammar, which all that follow it share; some 2 KB each
MAX_RENEWALS = 2                            # of one answer's matcher
STACK_BYTES = 1 << 26                       # definitions that refer to one another take some 5 KB each
MAX_SHOWN_CHARS = 300


class Grammars:
    """Of one model. Methods may be called from any thread, at the same time."""

    def __init__(self, vocab: Vocab, vocab_size: int) -> None:
        """vocab_size: of the model, V."""
        self.vocab, self.vocab_size = vocab, vocab_size
        self._eos_ids = sorted(token_id for token_id in vocab.stop_ids if token_id < vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._limits: LLParserLimits | None = None
        self._digits: NDArray[np.uint32] | None = None
        self._compiled: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()  # nothing consumed; oldest use first
        self._num_chars = 0
        self._lock = threading.Lock()               # of the above
        self._compiling = threading.Lock()          # equal ones that come together are compiled once

    def check(self, wanted: StructuredOutputs) -> None:
        """Compiles it, unless that has been done. Raises: ParameterError where it cannot be followed."""
        with self._compiling:
            if self._find(wanted) is None:
                self._compile_anew(wanted)

    def matcher(self, wanted: StructuredOutputs, stop_ids: Sequence[int], min_tokens: int, ignore_eos: bool,
                output_ids: Sequence[int]) -> Matcher:
        """For a sequence whose output so far is output_ids. For one thread alone. stop_ids: end its answer.

        Raises: ParameterError.
        """
        # What is not there any more waited while many others came.
        compiled = self._find(wanted) or self._compile_anew(wanted)
        return Matcher(compiled, partial(self._renewed, wanted), self.vocab.token_bytes,
                       self._digits if wanted.kind in ("json", "calls") else None, min_tokens, self.bits(stop_ids),
                       self.bits(self._eos_ids) if ignore_eos else None, output_ids)

    def _find(self, wanted: StructuredOutputs) -> LLMatcher | None:
        with self._lock:
            if wanted not in self._compiled:
                return None
            self._compiled.move_to_end(wanted)
            return self._compiled[wanted]

    def _renewed(self, wanted: StructuredOutputs, used_up: LLMatcher) -> LLMatcher:
        """Another one than `used_up`: copies share their lexer's states, which are bounded and never forgotten.

        Raises: ParameterError.
        """
        compiled = self._find(wanted)
        return self._compile_anew(wanted) if compiled is None or compiled is used_up else compiled

    def _compile_anew(self, wanted: StructuredOutputs) -> LLMatcher:
        compiled = self._compile(wanted)
        self._keep(wanted, compiled)
        return compiled

    def _keep(self, wanted: StructuredOutputs, compiled: LLMatcher) -> None:
        with self._lock:
            if wanted not in self._compiled:
                self._num_chars += len(wanted.text)
            self._compiled[wanted] = compiled
            while len(self._compiled) > MAX_CACHED or (self._num_chars > MAX_CACHED_CHARS and len(self._compiled) > 1):
                dropped, _ = self._compiled.popitem(last=False)
                self._num_chars -= len(dropped.text)

    def _compile(self, wanted: StructuredOutputs) -> LLMatcher:
        """Its first mask is computed too: what is too complex for that is refused. Raises: ParameterError."""
        if not self._eos_ids:
            raise ParameterError(wanted.name, "this model has no end-of-sequence token to end an answer with")
        try:
            grammar = _grammar(wanted)
        except ValueError as error:
            raise ParameterError(wanted.name, _shown(str(error))) from None

        def compile_it() -> LLMatcher:
            from llguidance import LLMatcher
            matcher = LLMatcher(self._llguidance_tokenizer(), grammar, log_level=0, limits=self._limits)
            if not matcher.is_error():
                matcher.compute_bitmask()
            return matcher

        matcher = _with_large_stack(compile_it)
        if matcher.is_error():
            raise ParameterError(wanted.name, f"cannot be followed: {_shown(matcher.get_error())}")
        return matcher

    def _llguidance_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                from llguidance import LLParserLimits, LLTokenizer
                table = _TokenTable(self.vocab, self.vocab_size, self._eos_ids)
                self._limits = LLParserLimits(verbose_errors=False, max_grammar_size=100_000,
                                              max_lexer_states=MAX_LEXER_STATES)
                self._digits = self.bits([token_id for token_id, token in enumerate(table.tokens)
                                           if token[:1].isdigit() and token_id not in table.special_token_ids])
                self._tokenizer = LLTokenizer(cast(Any, table), n_vocab=self.vocab_size, eos_token=self._eos_ids)
                table.greedy = self._tokenizer.greedy_tokenize
            return self._tokenizer

    def bits(self, token_ids: Iterable[int]) -> NDArray[np.uint32]:
        """A mask [V / 32] of these tokens; those that the model does not have are left out."""
        flags = np.zeros(-(-self.vocab_size // 32) * 32, np.uint8)
        flags[[token_id for token_id in token_ids if token_id < self.vocab_size]] = 1
        return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


class Matcher:
    """Where one answer is in its grammar. See `cuda.sampler.Constraint`; used by one thread."""

    def __init__(self, compiled: LLMatcher, renew: Callable[[LLMatcher], LLMatcher],
                 token_bytes: Callable[[int], bytes], digits: NDArray[np.uint32] | None, min_tokens: int,
                 stops: NDArray[np.uint32], ends: NDArray[np.uint32] | None, output_ids: Sequence[int]) -> None:
        """compiled: of which this is a copy; renew: makes another one. digits, stops, ends [V / 32]: tokens that begin
        with a digit, in JSON; that end an answer; that are not to end it. Those of the last two are masked while there
        is another way on: stops until min_tokens are out."""
        self._compiled, self._renew, self._num_renewals = compiled, renew, 0
        self._matcher, self._token_bytes = compiled.deep_copy(), token_bytes
        self._token_ids: list[int] = []             # consumed
        self._digits, self._stops, self._ends, self._min_tokens = digits, stops, ends, min_tokens
        self._in_string = self._after_backslash = False
        self._num_digits = 0                        # that the JSON ends with
        self._has_failed = False
        for token_id in output_ids:
            self.advance(token_id)

    def fill(self, allowed: NDArray[np.uint32], num_output_tokens: int) -> None:
        """allowed [V / 32], contiguous: the tokens that may come next; none where the grammar cannot be followed."""
        while not self._has_failed:
            self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
            if not self._matcher.is_error():
                break
            self._start_over()
        if self._has_failed:
            # NOTE: a matcher that has failed would allow the end of the answer.
            allowed[:] = 0
            return
        if self._digits is not None and self._num_digits >= MAX_DIGITS:
            forbid(allowed, self._digits)
        if num_output_tokens < self._min_tokens:
            forbid(allowed, self._stops)
        if self._ends is not None:
            forbid(allowed, self._ends)

    def advance(self, token_id: int) -> None:
        """token_id is out."""
        if self._has_failed or self._matcher.is_stopped():      # a row that was launched before its end was known
            return
        self._token_ids.append(token_id)
        self._matcher.consume_token(token_id)
        while self._matcher.is_error() and not self._has_failed:
            self._start_over()
        if self._digits is not None:
            self._count_digits(self._token_bytes(token_id))

    def _start_over(self) -> None:
        """By a grammar that is not used up, to where this one was. What else is wrong will be so again."""
        error = self._matcher.get_error()
        if self._num_renewals < MAX_RENEWALS:
            self._num_renewals += 1
            try:
                self._compiled = self._renew(self._compiled)
            except Exception as failed:             # memory, say
                error = f"{type(failed).__name__} while it was compiled anew"
            else:
                self._matcher = self._compiled.deep_copy()
                self._matcher.consume_tokens(self._token_ids)
                return
        self._has_failed = True
        log.warning("a grammar can be followed no further: %s", _shown(error))

    def _count_digits(self, text: bytes) -> None:
        """Outside of strings."""
        for byte in text:
            if self._in_string:
                if self._after_backslash:
                    self._after_backslash = False
                elif byte == ord("\\"):
                    self._after_backslash = True
                elif byte == ord('"'):
                    self._in_string = False
            else:
                self._num_digits = self._num_digits + 1 if ord("0") <= byte <= ord("9") else 0
                self._in_string = byte == ord('"')


def forbid(allowed: NDArray[np.uint32], tokens: NDArray[np.uint32]) -> None:
    """Unless nothing else is allowed."""
    rest = allowed & ~tokens
    if rest.any():
        allowed[:] = rest


class _TokenTable:
    """The vocabulary as llguidance takes it."""
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocab: Vocab, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocab = vocab
        self.eos_token_id = eos_ids[0]
        num_tokens = min(vocab.size, vocab_size)
        self.special_token_ids = sorted(token_id for token_id in vocab.special_ids.union(eos_ids)
                                        if token_id < num_tokens)
        self.tokens = [vocab.token_bytes(token_id) for token_id in range(num_tokens)]
        self.tokens += [b""] * (vocab_size - num_tokens)
        self._special_ids = frozenset(self.special_token_ids)
        self.greedy: Callable[[str], list[int]]     # the longest token first; llguidance has it

    def __call__(self, text: str) -> list[int]:
        """How the model is used to seeing a text that a grammar leaves no choice about: such tokens are forced.

        NOTE: they must spell exactly the text, without the space that some tokenizers put before one (behind a line
        break they do not) and without control tokens; else the matcher stumbles over them.
        """
        for before in ("", "\n"):
            ids = self._encode(before + text)
            data = b"".join([self.tokens[token_id] for token_id in ids])
            num_dropped, num_before = 0, len(data) - len(text.encode())
            while num_before > 0:
                num_before -= len(self.tokens[ids[num_dropped]])
                num_dropped += 1
            if num_before == 0 and data.endswith(text.encode()):
                return ids[num_dropped:]
        return self.greedy(text)

    def _encode(self, text: str) -> list[int]:
        """Nothing where that cannot be."""
        try:
            ids = self._vocab.encode(text, add_special=False)
        except ValueError:
            return []
        return [] if any(token_id >= len(self.tokens) or token_id in self._special_ids for token_id in ids) else ids


def _grammar(wanted: StructuredOutputs) -> str:
    """As llguidance takes it. Raises: ValueError."""
    from llguidance import LLMatcher, grammar_from
    if wanted.kind in ("json", "calls"):
        options: JsonCompileOptions = {
            "item_separator": ",", "key_separator": ":", "coerce_one_of": False, "lenient": False}
        if wanted.any_whitespace:
            options["whitespace_pattern"] = rf"[ \t\n\r]{{0,{MAX_WHITESPACE}}}"
        else:
            options["whitespace_flexible"] = False
        if wanted.kind == "calls":
            return LLMatcher.grammar_from_lark(call_grammar(wanted.text, options))
        return LLMatcher.grammar_from_json_schema(wanted.text, overrides=options)
    if wanted.kind == "regex":
        return LLMatcher.grammar_from_regex(wanted.text)
    if wanted.kind == "choice":
        choices = map(json.dumps, json.loads(wanted.text))
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
    return grammar_from("grammar", wanted.text)


def _with_large_stack(work: Callable[[], T]) -> T:
    """What `work` returns or raises. The compiler recurses, and an overflow would end the process."""
    outcome: list[T] = []
    fault: list[Exception] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:              # a panic is no Exception, and ends the request alone too
            fault.append(error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=run, name="troupe-grammar", daemon=True)
    # The size is the process's: whoever starts a thread meanwhile gets a large stack too, which costs nothing unused.
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if fault:
        raise fault[0]
    return outcome[0]


_stack_size = threading.Lock()


def _shown(error: str) -> str:
    """The first line, which says what is wrong; those after it show the grammar."""
    return error.strip().split("\n")[0][:MAX_SHOWN_CHARS]
