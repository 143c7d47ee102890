"""What the sampler keeps of a slot on the device: the arrays, and how a sequence gets into them."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Case, Instance, KernelSpec, launch
from cuda.launcher import DeviceArray, Launcher
from cuda.ops import Ints
from cuda.sampler import SlotSampling

THREADS = 256
MAX_BIASES = 1024                           # of a sequence
MAX_TOP = 20                                # tokens whose logprobs can be reported beside the chosen one's
MAX_BAD_WORDS = 256                         # of several tokens, every spelling
MAX_BAD_WORD_IDS = 1024                     # tokens of them all
BAD_WORD_INTS = 1 + MAX_BAD_WORDS + MAX_BAD_WORD_IDS
MAX_COUNT = 0xFFFF                          # a token's frequency penalty grows no more after so many times

PENALIZED, REPEATS, BIASED, STOPS, GREEDY, FORBIDS = 1, 2, 4, 8, 16, 32
PROMPT_BITS, BIAS_BITS, STOP_BITS, NUM_BITS = range(4)

# Parameters of sampling.cu.
PARAMETERS = np.dtype([
    ("temperature", "<f8"), ("top_p", "<f8"), ("min_p", "<f8"), ("repetition", "<f8"), ("frequency", "<f8"),
    ("presence", "<f8"), ("seed", "<u8"), ("choice", "<i4"), ("top_k", "<i4"), ("num_top", "<i4"), ("flags", "<i4"),
    ("num_prompt_tokens", "<i4"), ("min_tokens", "<i4"), ("num_biases", "<i4"), ("num_bad_words", "<i4"),
    ("unused", "<i4", 2)])
PARAMETER_WORDS = PARAMETERS.itemsize // 4

Arrays = dict[str, NDArray[Any]]


def state_shapes(num_slots: int, vocab_size: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and type of every array of the state."""
    return {
        "parameters": ((num_slots, PARAMETER_WORDS), np.uint32),            # PARAMETERS
        "counts": ((num_slots, vocab_size), np.uint16),                     # how often each token is out
        "bits": ((num_slots, NUM_BITS, num_words(vocab_size)), np.uint32),  # of tokens: prompt, with a bias, stop ids
        "bias_ids": ((num_slots, MAX_BIASES), np.int32),                    # ascending
        "biases": ((num_slots, MAX_BIASES), np.float64),
        "forbidden": ((num_slots, num_words(vocab_size)), np.uint32),       # bits of tokens, for ever or for now
        "bad_words": ((num_slots, BAD_WORD_INTS), np.int32),                # places of words of several ids, then these
    }


def num_words(vocab_size: int) -> int:
    """uint32 words with a bit for every token."""
    return -(-vocab_size // 32)


def pack_bits(token_ids: NDArray[Any], vocab_size: int) -> NDArray[np.uint32]:
    """A bit for each token, bit i % 32 of word i / 32. -> [V / 32]"""
    flags = np.zeros(num_words(vocab_size) * 32, np.uint8)
    flags[token_ids] = 1
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def start_slots(launcher: Launcher, parameters: DeviceArray, counts: DeviceArray, bits: DeviceArray,
                bias_ids: DeviceArray, biases: DeviceArray, forbidden: DeviceArray, bad_words: DeviceArray,
                records: DeviceArray, num_records: int) -> None:
    """Sequences enter their slots. The state as in `state_shapes`; records int32: what `join_records` has made.

    Raises: ValueError naming shapes or types.
    """
    num_slots, vocab_size = counts.shape
    state = {"parameters": parameters, "counts": counts, "bits": bits, "bias_ids": bias_ids, "biases": biases,
             "forbidden": forbidden, "bad_words": bad_words}
    for name, (shape, dtype) in state_shapes(num_slots, vocab_size).items():
        array = state[name]
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, not {np.dtype(dtype)}{list(shape)}")
    if records.dtype != np.int32 or records.shape[0] < num_records:
        raise ValueError(f"records are {records.dtype}{list(records.shape)}, not int32 of {num_records} and more")
    launch(launcher, "sampling_state.cu", "start_slots", (num_records,), THREADS,
           (parameters, counts, bits, bias_ids, biases, forbidden, bad_words, records, np.int32(vocab_size),
            np.int32(MAX_BIASES), np.int32(BAD_WORD_INTS)))


def make_record(slot: int, sampling: SlotSampling, token_ids: Sequence[int], num_prompt_tokens: int,
                vocab_size: int) -> Ints:
    """What `start_slots` is told of a sequence, whose known tokens are token_ids.

    Raises: ValueError for an id in logit_bias, allowed_ids, bad_words or (with a penalty) token_ids outside the
    vocabulary, and for more biases, bad words or logprobs than the kernel holds.
    """
    repeats = sampling.repetition_penalty != 1.0
    penalized = repeats or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    biases: dict[int, float] = {}
    for token_id, bias in sampling.logit_bias:
        biases[token_id] = biases.get(token_id, 0.0) + bias
    bias_ids = np.array(sorted(biases), np.int64)
    _check_vocab("logit_bias", bias_ids, vocab_size)
    if len(biases) > MAX_BIASES:
        raise ValueError(f"logit_bias: {len(biases)} tokens, at most {MAX_BIASES}")
    if sampling.logprobs is not None and sampling.logprobs > MAX_TOP:
        raise ValueError(f"logprobs: {sampling.logprobs}, at most {MAX_TOP}")
    forbidden, words = _forbidden(sampling, vocab_size)
    # A stop id outside the vocabulary can never be sampled: there is nothing to mask.
    stop_ids = np.array([stop_id for stop_id in sampling.stop_ids if 0 <= stop_id < vocab_size], np.int32)
    prompt_bits, counted = np.zeros(0, np.uint32), np.zeros((0, 2), np.int32)
    if penalized:
        known = np.asarray(token_ids, np.int64)
        _check_vocab("token_ids", known, vocab_size)
        output = Counter(known[num_prompt_tokens:].tolist())
        counted = np.array([(token_id, min(count, MAX_COUNT)) for token_id, count in sorted(output.items())],
                           np.int32).reshape(-1, 2)
        if repeats:                                             # the others do not look at the prompt
            prompt_bits = pack_bits(known[:num_prompt_tokens], vocab_size)

    parameters = np.zeros(1, PARAMETERS)
    for name, value in (
            ("temperature", sampling.temperature), ("top_p", sampling.top_p), ("min_p", sampling.min_p),
            ("repetition", sampling.repetition_penalty), ("frequency", sampling.frequency_penalty),
            ("presence", sampling.presence_penalty), ("seed", sampling.seed & 0xFFFFFFFFFFFFFFFF),
            ("choice", sampling.choice), ("top_k", sampling.top_k if 0 < sampling.top_k < vocab_size else 0),
            ("num_top", -1 if sampling.logprobs is None else sampling.logprobs),
            ("flags", PENALIZED * penalized | REPEATS * repeats | BIASED * bool(biases) | STOPS * bool(len(stop_ids))
             | GREEDY * sampling.greedy | FORBIDS * bool(len(forbidden) or words)),
            ("num_prompt_tokens", num_prompt_tokens), ("min_tokens", sampling.min_tokens),
            ("num_biases", len(biases)), ("num_bad_words", len(words))):
        parameters[name] = value
    bad_words = _laid_out(words)
    header = [slot, len(prompt_bits), len(counted) if penalized else -1, len(biases), len(stop_ids), len(forbidden),
              len(bad_words)]
    values = np.array([biases[token_id] for token_id in bias_ids.tolist()], np.float64)
    return np.concatenate([np.array(header, np.int32), parameters.view(np.int32), prompt_bits.view(np.int32),
                           counted.reshape(-1), bias_ids.astype(np.int32), values.view(np.int32), stop_ids,
                           forbidden.view(np.int32), bad_words])


def _forbidden(sampling: SlotSampling, vocab_size: int) -> tuple[NDArray[np.uint32], list[tuple[int, ...]]]:
    """Bits of the tokens that are never sampled, none where every one may be; and the bad words of several tokens,
    less those whose last one is never sampled anyway.

    NOTE: so the last token of a word is none of the bits: the kernel may clear it.
    """
    flags = np.zeros(vocab_size, np.bool_)
    if sampling.allowed_ids is not None:
        allowed = np.array(sampling.allowed_ids, np.int64)
        _check_vocab("allowed_ids", allowed, vocab_size)
        flags[:] = True
        flags[allowed] = False
    for word in sampling.bad_words:
        _check_vocab("bad_words", np.array(word, np.int64), vocab_size)
        if len(word) == 1:
            flags[word[0]] = True
    words = [word for word in sampling.bad_words if len(word) > 1 and not flags[word[-1]]]
    num_ids = sum(map(len, words))
    if len(words) > MAX_BAD_WORDS or num_ids > MAX_BAD_WORD_IDS:
        raise ValueError(f"bad_words: {len(words)} with {num_ids} tokens, at most {MAX_BAD_WORDS} with "
                         f"{MAX_BAD_WORD_IDS}")
    bits = pack_bits(np.flatnonzero(flags), vocab_size) if flags.any() else np.zeros(0, np.uint32)
    return bits, words


def _laid_out(words: Sequence[tuple[int, ...]]) -> Ints:
    """Where each begins and the last one ends, then their ids. Nothing of no words."""
    if not words:
        return np.zeros(0, np.int32)
    places = np.cumsum([len(words) + 1, *map(len, words)])
    return np.concatenate([places, *words]).astype(np.int32)


def join_records(records: Sequence[Ints]) -> Ints:
    """Records of one launch: their places, then the records."""
    places = np.cumsum([len(records), *(len(record) for record in records[:-1])])
    return np.concatenate([places.astype(np.int32), *records])


def _check_vocab(field: str, ids: NDArray[np.int64], vocab_size: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"{field}: token id {outside[0]} is not in the vocabulary of {vocab_size}")


# ---- Specification and cases

def empty_state(num_slots: int, vocab_size: int) -> Arrays:
    return {name: np.zeros(shape, dtype) for name, (shape, dtype) in state_shapes(num_slots, vocab_size).items()}


def enter(state: Arrays, record: Ints) -> None:
    """What `start_slots` does with one record."""
    vocab_size = state["counts"].shape[1]
    slot, num_prompt_words, num_counts, num_biases, num_stops, num_forbidden, num_bad_words = record[:7].tolist()
    sizes = [PARAMETER_WORDS, num_prompt_words, 2 * max(num_counts, 0), num_biases, 2 * num_biases, num_stops,
             num_forbidden, num_bad_words]
    parameters, prompt_bits, counted, bias_ids, biases, stop_ids, forbidden, bad_words = np.split(
        record[7:7 + sum(sizes)], np.cumsum(sizes)[:-1])
    state["parameters"][slot] = parameters.view(np.uint32)
    bits = state["bits"][slot]
    bits[PROMPT_BITS] = 0
    bits[PROMPT_BITS, :num_prompt_words] = prompt_bits.view(np.uint32)
    bits[BIAS_BITS], bits[STOP_BITS] = pack_bits(bias_ids, vocab_size), pack_bits(stop_ids, vocab_size)
    if num_counts >= 0:
        state["counts"][slot] = 0
        state["counts"][slot, counted[::2]] = counted[1::2]
    state["forbidden"][slot] = 0
    state["forbidden"][slot, :num_forbidden] = forbidden.view(np.uint32)
    state["bad_words"][slot, :num_bad_words] = bad_words
    state["bias_ids"][slot, :num_biases], state["biases"][slot, :num_biases] = bias_ids, biases.view(np.float64)


def _reference(records: Ints, num_records: int, **state: NDArray[Any]) -> Arrays:
    for place in records[:num_records]:
        enter(state, records[place:])
    return state


def samplings_for_cases(vocab_size: int) -> list[SlotSampling]:
    """Every feature alone, and together."""
    neutral: dict[str, Any] = {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "logit_bias": (), "min_tokens": 0, "stop_ids": (), "seed": 1, "choice": 0,
        "logprobs": None}
    changes: list[dict[str, Any]] = [
        {}, {"logprobs": 3}, {"temperature": 1.0, "seed": -5}, {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 0}, {"temperature": 2.0, "min_p": 0.2},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": -0.2, "logprobs": 20},
        {"logit_bias": ((0, 3.0), (vocab_size - 1, 4.0), (vocab_size // 2, -100.0)), "temperature": 1.0, "choice": 2},
        {"min_tokens": 1000, "stop_ids": tuple(range(0, vocab_size, 2))},
        {"min_tokens": 1, "stop_ids": (0, vocab_size)},
        {"temperature": 1.1, "top_k": 40, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 0.8, "logprobs": 5,
         "frequency_penalty": 0.1, "min_tokens": 1000, "stop_ids": (1, 2), "logit_bias": ((3, 1.0), (3, 0.5))},
        {"allowed_ids": tuple(range(1, vocab_size, 3)), "temperature": 1.0, "logprobs": 2},
        {"bad_words": ((0,), (vocab_size - 1,), (5, 0), (4, 5), (6, 5, 4), (5, 5)), "temperature": 1.0},
        {"allowed_ids": (2, 3, 4, 5), "bad_words": tuple((i, 3) for i in range(2, 6)), "frequency_penalty": 0.5}]
    return [SlotSampling(**{**neutral, **change}) for change in changes]


def records_for_cases(random: np.random.Generator, samplings: Sequence[SlotSampling], vocab_size: int) -> list[Ints]:
    return [make_record(slot, sampling, random.integers(0, vocab_size, 20).tolist(), 8, vocab_size)
            for slot, sampling in enumerate(samplings)]


def _case(vocab_size: int, large: bool = False) -> Case:
    def make(random: np.random.Generator) -> dict[str, Any]:
        samplings = samplings_for_cases(vocab_size)
        state = {name: random.integers(0, 200, array.shape).astype(array.dtype)
                 for name, array in empty_state(len(samplings), vocab_size).items()}
        records = records_for_cases(random, samplings, vocab_size)[::2]
        return {**state, "records": join_records(records), "num_records": len(records)}

    return Case(f"vocabulary of {vocab_size}", make, large)


SPEC = KernelSpec(
    name="sampling_state",
    source="sampling_state.cu",
    instances=(Instance("start_slots", THREADS, 48),),
    run=start_slots,
    reference=_reference,
    outputs=("parameters", "counts", "bits", "bias_ids", "biases", "forbidden", "bad_words"),
    in_place=("parameters", "counts", "bits", "bias_ids", "biases", "forbidden", "bad_words"),
    cases=(_case(41), _case(1000), _case(128256, large=True)),
)
