"""From logits to tokens on the device, as cuda/sampler.py does it. `DeviceSampling` of slot_sampling.py keeps the
state."""
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda.kernels.kernel_spec import Case, Instance, KernelSpec, launch
from cuda.kernels.sampling_state import (
    BAD_WORD_INTS,
    BIASED,
    FORBIDS,
    GREEDY,
    MAX_BIASES,
    MAX_TOP,
    PARAMETERS,
    PENALIZED,
    PROMPT_BITS,
    REPEATS,
    STOP_BITS,
    STOPS,
    Arrays,
    empty_state,
    enter,
    num_words,
    records_for_cases,
    samplings_for_cases,
    state_shapes,
)
from cuda.launcher import DeviceArray, Launcher
from cuda.ops import Ints
from cuda.sampler import Sampler, SlotSampling

MAX_THREADS = 512
MAX_VOCAB = 1 << 19
RESULT_INTS = 4 + MAX_TOP
RESULT_FLOATS = 1 + MAX_TOP

# Why a row has no token, by its status; the first: it has one.
REASONS = ("", "logits are not finite: NaN", "logits are not finite: +inf", "logits are not finite: every one is -inf",
           "every token is masked")


def sample(launcher: Launcher, results: DeviceArray, logprobs: DeviceArray, tokens: DeviceArray, counts: DeviceArray,
           forbidden: DeviceArray, logits: DeviceArray, slots: DeviceArray, positions: DeviceArray,
           parameters: DeviceArray, bits: DeviceArray, bias_ids: DeviceArray, biases: DeviceArray,
           bad_words: DeviceArray, allowed: DeviceArray | None = None,
           allowed_rows: DeviceArray | None = None) -> None:
    """A token a row of logits float32 [R, V]; of a row whose slot is below 0 nothing is read or written.

    Written: results int32 [R, 24] (token id; status, an index into REASONS; length of the list of best tokens, -1
    where nothing is reported; 0; the list's ids); logprobs float32 [R, 21] (of the token, of the list; 0 where not
    asked for); tokens int32 [slots, W] at (slot, position), 0 for a failed row; counts of a penalized sequence, and
    what is forbidden of one with bad words.
    Read: slots, positions int32 [R], no slot twice; the state of `sampling_state`, those two belonging to it; allowed
    uint32 [masks, V / 32] (see `pack_bits`) and allowed_rows int32 [R]: the row's mask, below 0 where every token is
    allowed.

    Raises: ValueError naming shapes or types.
    """
    num_rows, vocab_size = logits.shape
    num_slots, tokens_width = tokens.shape
    wanted: dict[str, tuple[tuple[int, ...], Any]] = {
        "results": ((num_rows, RESULT_INTS), np.int32), "logprobs": ((num_rows, RESULT_FLOATS), np.float32),
        "tokens": ((num_slots, tokens_width), np.int32), "logits": ((num_rows, vocab_size), np.float32),
        "slots": ((num_rows,), np.int32), "positions": ((num_rows,), np.int32),
        **state_shapes(num_slots, vocab_size)}
    arrays = {"results": results, "logprobs": logprobs, "tokens": tokens, "counts": counts, "logits": logits,
              "slots": slots, "positions": positions, "parameters": parameters, "bits": bits, "bias_ids": bias_ids,
              "biases": biases, "forbidden": forbidden, "bad_words": bad_words}
    if (allowed is None) != (allowed_rows is None):
        raise ValueError("allowed and allowed_rows come together")
    if allowed is not None:
        arrays["allowed"], arrays["allowed_rows"] = allowed, allowed_rows
        wanted["allowed"] = ((allowed.shape[0], num_words(vocab_size)), np.uint32)
        wanted["allowed_rows"] = ((num_rows,), np.int32)
    for name, array in arrays.items():
        shape, dtype = wanted[name]
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, not {np.dtype(dtype)}{list(shape)}")
    if vocab_size > MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab_size}, at most {MAX_VOCAB}")
    threads = MAX_THREADS if vocab_size > 8192 else 256 if vocab_size > 512 else 64
    launch(launcher, "sampling.cu", "sample", (num_rows,), threads,
           (results, logprobs, tokens, counts, forbidden, logits, slots, positions, parameters, bits, bias_ids, biases,
            bad_words, allowed, allowed_rows, np.int32(vocab_size), np.int32(tokens_width), np.int32(MAX_BIASES),
            np.int32(BAD_WORD_INTS)))


# ---- Specification and cases

def _ids(bits: NDArray[np.uint32], vocab_size: int) -> list[int]:
    """The tokens whose bits are set."""
    flags = np.unpackbits(bits.astype("<u4").view(np.uint8), bitorder="little")[:vocab_size]
    ids: list[int] = np.flatnonzero(flags).tolist()
    return ids


def _sample_row(logits: NDArray[np.float32], position: int, state: Arrays, slot: int,
                allowed: NDArray[np.uint32] | None) -> tuple[Ints, NDArray[np.float32], bool]:
    """Results and logprobs of one row by cuda/sampler.py, and whether its token counts."""
    parameters, bits, vocab_size = state["parameters"][slot].view(PARAMETERS)[0], state["bits"][slot], len(logits)
    flags, num_top = int(parameters["flags"]), int(parameters["num_top"])
    masked: set[int] = set()
    if flags & STOPS and position - parameters["num_prompt_tokens"] < parameters["min_tokens"]:
        masked |= set(_ids(bits[STOP_BITS], vocab_size))
    if allowed is not None:
        masked |= set(range(vocab_size)) - set(_ids(allowed, vocab_size))
    _forbid_last_tokens(state, parameters, slot, position)
    if flags & FORBIDS:
        masked |= set(_ids(state["forbidden"][slot], vocab_size))
    num_biases = int(parameters["num_biases"]) if flags & BIASED else 0
    sampling = SlotSampling(
        temperature=0.0 if flags & GREEDY else float(parameters["temperature"]), top_k=int(parameters["top_k"]),
        top_p=float(parameters["top_p"]), min_p=float(parameters["min_p"]),
        presence_penalty=float(parameters["presence"]), frequency_penalty=float(parameters["frequency"]),
        repetition_penalty=float(parameters["repetition"]),
        logit_bias=tuple(zip(state["bias_ids"][slot, :num_biases].tolist(),
                             state["biases"][slot, :num_biases].tolist(), strict=True)),
        min_tokens=2**31, stop_ids=tuple(masked), seed=int(parameters["seed"]), choice=int(parameters["choice"]),
        logprobs=None if num_top < 0 else num_top)
    prompt = _ids(bits[PROMPT_BITS], vocab_size) if flags & REPEATS else []
    output = np.repeat(np.arange(vocab_size), state["counts"][slot]).tolist() if flags & PENALIZED else []
    sampler = Sampler(1, vocab_size)
    sampler.start(0, sampling, prompt + output, len(prompt))
    sampled = sampler.sample(logits[None], np.zeros(1, np.int32), np.array([position], np.int32))
    result, logprobs = np.zeros(RESULT_INTS, np.int32), np.zeros(RESULT_FLOATS, np.float32)
    result[0] = sampled.token_ids[0]
    if sampled.failed:
        result[1:3] = REASONS.index(sampled.failed[0][1]), -1
        return result, logprobs, False
    result[2] = -1 if num_top < 0 else len(sampled.top_logprobs[0])
    if num_top >= 0:
        logprobs[0] = sampled.logprobs[0]
    for place, (token_id, logprob) in enumerate(sampled.top_logprobs[0]):
        result[4 + place], logprobs[1 + place] = token_id, logprob
    return result, logprobs, bool(flags & PENALIZED)


def _forbid_last_tokens(state: Arrays, parameters: Any, slot: int, position: int) -> None:
    forbidden, words = state["forbidden"][slot], state["bad_words"][slot].tolist()
    places = words[:parameters["num_bad_words"] + 1]
    known = state["tokens"][slot, parameters["num_prompt_tokens"]:position].tolist()
    held = [words[begin:end] for begin, end in zip(places, places[1:], strict=False)]
    for *_, last in held:
        forbidden[last // 32] &= ~np.uint32(1 << last % 32)
    for *first, last in held:
        if known[max(0, len(known) - len(first)):] == first:
            forbidden[last // 32] |= np.uint32(1 << last % 32)


def _reference(allowed: NDArray[np.uint32] | None = None, allowed_rows: Ints | None = None,
               **arrays: NDArray[Any]) -> Arrays:
    for row, (slot, position) in enumerate(zip(arrays["slots"].tolist(), arrays["positions"].tolist(), strict=True)):
        if slot < 0:
            continue
        mask = None
        if allowed is not None and allowed_rows is not None and allowed_rows[row] >= 0:
            mask = allowed[allowed_rows[row]]
        result, logprobs, counts = _sample_row(arrays["logits"][row], position, arrays, slot, mask)
        arrays["results"][row], arrays["logprobs"][row] = result, logprobs
        arrays["tokens"][slot, position] = result[0]
        arrays["counts"][slot, result[0]] += counts
    return arrays


def _case(vocab_size: int, kind: str = "normal", masks: int = 0, large: bool = False) -> Case:
    def make(random: np.random.Generator) -> dict[str, Any]:
        samplings = samplings_for_cases(vocab_size)
        num_slots = len(samplings)
        state = empty_state(num_slots, vocab_size)
        for record in records_for_cases(random, samplings, vocab_size):
            enter(state, record)
        slots = random.permutation(num_slots).astype(np.int32)
        slots[3] = -1                                       # as in a step that is padded
        logits = 3 * random.standard_normal((num_slots, vocab_size), np.float32)
        if kind == "rounded":
            logits = logits.round()                         # many equals
        elif kind == "close":                               # one histogram bin holds nearly all, some are equals
            logits = (-4 + 1e-4 * random.standard_normal(logits.shape)).astype(np.float32)
            logits[:, ::3], logits[:, 5] = logits[:, :1], 0.0
        elif kind == "faults":
            logits[0, vocab_size // 3], logits[1, -1], logits[2], logits[4, 1:] = np.nan, np.inf, -np.inf, -np.inf
        case: dict[str, Any] = {
            "results": np.full((num_slots, RESULT_INTS), 77, np.int32),
            "logprobs": np.full((num_slots, RESULT_FLOATS), 7.0, np.float32),
            "tokens": random.integers(0, vocab_size, (num_slots, 30)).astype(np.int32), **state, "logits": logits,
            "slots": slots, "positions": np.where(slots < 0, -1, random.integers(20, 30, num_slots)).astype(np.int32)}
        if masks:
            case["allowed"] = random.integers(0, 1 << 32, (masks, num_words(vocab_size)), np.uint32)
            case["allowed_rows"] = random.integers(-1, masks, num_slots).astype(np.int32)
        return case

    return Case(f"{kind} logits of {vocab_size}{' with masks' if masks else ''}", make, large)


SPEC = KernelSpec(
    name="sampling",
    source="sampling.cu",
    instances=(Instance("sample", MAX_THREADS, 128, 34 * 1024),),
    run=sample,
    reference=_reference,
    outputs=("results", "logprobs", "tokens", "counts", "forbidden"),
    in_place=("results", "logprobs", "tokens", "counts", "forbidden"),  # of a row without a slot they stay as they are
    cases=(
        _case(33), _case(100, "rounded"), _case(500, "faults"), _case(1003, masks=3), _case(2600, "rounded"),
        _case(2400, "close"), _case(128256, large=True), _case(151936, "rounded", masks=4, large=True),
    ),
    tolerance=2e-6,                         # of logprobs; token ids below 2^18 are equal where they keep to it
)
