"""The sampler against a naive one, one row at a time, and against what engines of this kind got wrong."""
from __future__ import annotations

import dataclasses
import math
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cuda import philox
from cuda.host import segments
from cuda.sampler import Sampled, Sampler, SlotSampling, TopLogprobs

NEUTRAL = SlotSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
    logit_bias=(), min_tokens=0, stop_ids=(), seed=1, choice=0, logprobs=None)


def sampling(**changes: object) -> SlotSampling:
    return dataclasses.replace(NEUTRAL, **changes)  # type: ignore[arg-type]


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def sample_one(
    logits: NDArray[np.float32], parameters: SlotSampling, token_ids: list[int] | None = None, num_prompt: int = 1
) -> Sampled:
    """One row, alone, in a sampler of its own."""
    known = [0] if token_ids is None else token_ids
    sampler = Sampler(1, len(logits))
    sampler.start(0, parameters, known, num_prompt)
    return sampler.sample(logits[None], ints(0), ints(len(known)))


def token(logits: NDArray[np.float32], parameters: SlotSampling, token_ids: list[int] | None = None,
          num_prompt: int = 1) -> int:
    sampled = sample_one(logits, parameters, token_ids, num_prompt)
    assert sampled.failed == ()
    return int(sampled.token_ids[0])


# The naive sampler: plain Python, sorted lists, no shortcuts.

def naive_scores(logits: list[float], p: SlotSampling, known: list[int], num_prompt: int) -> list[float]:
    scores = list(logits)
    output = Counter(known[num_prompt:])
    for i in range(len(scores)):
        if i in known:
            scores[i] = scores[i] / p.repetition_penalty if scores[i] > 0 else scores[i] * p.repetition_penalty
        scores[i] -= p.frequency_penalty * output[i]
        if output[i]:
            scores[i] -= p.presence_penalty
    for i, bias in p.logit_bias:
        scores[i] += bias
    if len(known) - num_prompt < p.min_tokens:
        for i in p.stop_ids:
            scores[i] = -math.inf
    for i in range(len(scores)):
        following = [*known[num_prompt:], i]
        if (p.allowed_ids is not None and i not in p.allowed_ids) or any(
                len(word) <= len(following) and following[-len(word):] == list(word) for word in p.bad_words):
            scores[i] = -math.inf
    return scores


def naive_tokens(logits: list[float], p: SlotSampling, known: list[int], num_prompt: int) -> set[int]:
    """The tokens that are right: one, or several where rounding decides (top_p or the draw within 1e-9 of an edge)."""
    scores = naive_scores(logits, p, known, num_prompt)
    best = max(scores)
    if p.temperature == 0.0:
        return {scores.index(best)}
    u = float(philox.uniforms([p.seed], [p.choice], [len(known)], philox.SAMPLE)[0])
    scaled = [score / p.temperature for score in scores]
    weights = {i: math.exp(s - best / p.temperature) for i, s in enumerate(scaled)}
    right = set()
    for min_p in (p.min_p * (1 - 1e-9), p.min_p * (1 + 1e-9)) if p.min_p < 1.0 else (1.0,):
        kept = [i for i in weights if weights[i] >= min_p]
        kept.sort(key=lambda i: (-scores[i], i))
        if 0 < p.top_k < len(scores):
            kept = kept[:p.top_k]
        kept.sort(key=lambda i: (-weights[i], i))       # logits too close to differ in weight are equals to top_p
        total = sum(weights[i] for i in kept)
        for top_p in (p.top_p * (1 - 1e-9), p.top_p * (1 + 1e-9)) if p.top_p < 1.0 else (2.0,):
            nucleus, mass = [], 0.0
            for i in kept:
                nucleus.append(i)
                mass += weights[i]
                if mass >= top_p * total:
                    break
            nucleus.sort()
            for target in (u * mass * (1 - 1e-9) - 1e-300, u * mass * (1 + 1e-9)):
                below = 0.0
                for i in nucleus:
                    below += weights[i]
                    if below > target:
                        right.add(i)
                        break
    return right


logit = st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, 1.0, -1.0, 1e4, -1e4, -math.inf]))


Row = tuple[list[float], SlotSampling, list[int], int]          # logits, parameters, known tokens, prompt tokens


@st.composite
def rows_strategy(draw: st.DrawFn) -> Row:
    vocab = draw(st.integers(2, 40))
    logits = draw(st.lists(logit, min_size=vocab, max_size=vocab))
    ids = st.integers(0, vocab - 1)
    prompt = draw(st.lists(ids, min_size=1, max_size=8))
    output = draw(st.lists(ids, max_size=8))
    number = st.floats(-2, 2).map(lambda x: round(x, 3))
    parameters = SlotSampling(
        temperature=draw(st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 3, 10, 10**6, 2**63 - 1])),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])),
        presence_penalty=draw(number), frequency_penalty=draw(number),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5, 2.0])),
        logit_bias=tuple(draw(st.dictionaries(ids, st.sampled_from([5.0, -100.0, 100.0]), max_size=3)).items()),
        min_tokens=draw(st.integers(0, 8)), stop_ids=tuple(draw(st.sets(ids, max_size=3))),
        seed=draw(st.integers(-(2**63), 2**63 - 1)), choice=draw(st.integers(0, 3)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        allowed_ids=draw(st.none() | st.lists(ids, min_size=1, max_size=12).map(tuple)),
        bad_words=draw(bad_words(ids, output)))
    return logits, parameters, prompt + output, len(prompt)


@st.composite
def bad_words(draw: st.DrawFn, ids: st.SearchStrategy[int], output: list[int]) -> tuple[tuple[int, ...], ...]:
    """Often such as the output ends with, but for their last token."""
    words = draw(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3))
    ends = draw(st.lists(st.tuples(st.integers(1, 3), ids), max_size=4))
    words += [[*output[len(output) - length:], last] for length, last in ends if length <= len(output)]
    return tuple(map(tuple, words))


@settings(max_examples=300, deadline=None)
@given(rows_strategy())
def test_equals_the_naive_sampler(row: Row) -> None:
    logits, parameters, known, num_prompt = row
    sampled = sample_one(np.array(logits, dtype=np.float32), parameters, known, num_prompt)
    if max(logits) == -math.inf:
        assert sampled.failed == ((0, "logits are not finite: every one is -inf"),)
    elif max(naive_scores(logits, parameters, known, num_prompt)) == -math.inf:
        assert sampled.failed == ((0, "every token is masked"),)
    else:
        assert sampled.failed == ()
        assert int(sampled.token_ids[0]) in naive_tokens(logits, parameters, known, num_prompt)


def test_a_bad_word_of_several_tokens_is_never_complete() -> None:
    """Its tokens may come, not all of them after one another; those of the prompt do not count."""
    parameters = sampling(bad_words=((2, 2), (3, 1, 2), (5,)))
    logits = np.array([[0.0, 3.0, 4.0, 1.0, 2.0, 9.0]], np.float32)
    sampler, known = Sampler(1, 6), [2]
    sampler.start(0, parameters, known, 1)
    for _ in range(4):
        known.append(int(sampler.sample(logits, ints(0), ints(len(known))).token_ids[0]))
    assert known == [2, 2, 1, 2, 1]
    sampler.end(0)
    sampler.start(0, parameters, [2, 3, 1], 1)                  # resumed: (3, 1) is out
    assert sampler.sample(logits, ints(0), ints(3)).token_ids[0] == 1


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for changes in ({"allowed_ids": (6,)}, {"bad_words": ((1, 6),)}, {"bad_words": ((-1,),)}):
        with pytest.raises(ValueError, match="is not in the vocabulary of 6"):
            Sampler(1, 6).start(0, sampling(**changes), [0], 1)


@pytest.mark.parametrize("changes", [
    {}, {"top_k": 1}, {"top_k": 7}, {"top_k": 60}, {"top_k": 61}, {"top_k": 3000}, {"top_k": 3999}, {"top_k": 4001},
    {"top_p": 0.3}, {"top_p": 0.9}, {"top_p": 0.9999}, {"min_p": 0.1}, {"min_p": 1e-6},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
], ids=str)
@pytest.mark.parametrize("kind", ["normal", "rounded", "flat", "outliers", "masked"])
def test_large_vocabulary_equals_the_naive_sampler(changes: dict[str, object], kind: str) -> None:
    """Where the short cuts of selection are taken; 4001 is a multiple of nothing."""
    random = np.random.default_rng(3)
    logits = (3 * random.standard_normal(4001)).astype(np.float32)
    if kind == "rounded":
        logits = logits.round()                             # ties everywhere, at the threshold too
    elif kind == "flat":
        logits[:] = 2.5
    elif kind == "outliers":
        logits[[5, 4000]] = 1e4
    elif kind == "masked":
        logits[random.permutation(4001)[:3990]] = -np.inf
    for seed in range(2):
        parameters = sampling(temperature=0.9, seed=seed, **changes)
        assert token(logits, parameters) in naive_tokens(logits.tolist(), parameters, [0], 1)


# A row and its batch

@settings(max_examples=40, deadline=None)
@given(st.lists(rows_strategy(), min_size=1, max_size=6), st.randoms(use_true_random=False), st.integers(40, 300))
def test_a_row_does_not_depend_on_its_batch(rows: list[Row], random: Random, vocab: int) -> None:
    """FAULTS N03, N05: alone, among others and in any order and slot, over several steps, every result is the same."""
    logits = np.random.default_rng(vocab).standard_normal((4, len(rows), vocab)).astype(np.float32) * 5
    for index, (row_logits, *_) in enumerate(rows):
        logits[0, index, :len(row_logits)] = row_logits
    alone = [run_steps(logits[:, [index]], [row], [0]) for index, row in enumerate(rows)]
    order = list(range(len(rows)))
    random.shuffle(order)
    together = run_steps(logits[:, order], [rows[index] for index in order], order)
    for place, index in enumerate(order):
        for step in range(4):
            assert together[step][place] == alone[index][step][0]


RowResult = tuple[int, bytes, TopLogprobs, str | None]


def run_steps(logits: NDArray[np.float32], rows: list[Row], slots: list[int]) -> list[list[RowResult]]:
    sampler = Sampler(max(slots) + 1, logits.shape[2])
    for slot, (_, parameters, known, num_prompt) in zip(slots, rows, strict=True):
        sampler.start(slot, parameters, known, num_prompt)
    results = []
    for step in range(len(logits)):
        positions = ints(*(len(known) + step for _, _, known, _ in rows))
        sampled = sampler.sample(np.ascontiguousarray(logits[step]), ints(*slots), positions)
        failed = dict(sampled.failed)
        results.append([(int(sampled.token_ids[row]), sampled.logprobs[row].tobytes(), sampled.top_logprobs[row],
                         failed.get(row)) for row in range(len(rows))])
    return results


def test_a_resumed_sequence_goes_on_as_if_undisturbed() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((6, 1, 50)).astype(np.float32)
    parameters = sampling(temperature=1.0, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5,
                          min_tokens=5, stop_ids=(1, 2, 3), seed=-7)
    prompt = [4, 4, 9]

    def run(preempted_at: int | None) -> list[int]:
        sampler = Sampler(3, 50)
        known, slot = list(prompt), 0
        sampler.start(slot, parameters, known, len(prompt))
        for step in range(6):
            if step == preempted_at:
                sampler.end(slot)
                slot = 2
                sampler.start(slot, parameters, known, len(prompt))
            sampled = sampler.sample(logits[step], ints(slot), ints(len(known)))
            known.append(int(sampled.token_ids[0]))
        return known

    undisturbed = run(None)
    assert all(run(step) == undisturbed for step in range(6))


def test_a_slot_forgets_its_last_sequence() -> None:
    logits = floats(3.0, 2.0, 1.0)
    sampler = Sampler(1, 3)
    parameters = sampling(frequency_penalty=2.0)
    for _ in range(2):
        sampler.start(0, parameters, [2], 1)
        tokens = [int(sampler.sample(logits[None], ints(0), ints(1 + step)).token_ids[0]) for step in range(3)]
        assert tokens == [0, 1, 0]                          # 3, 2, 1 | 1, 2, 1 | 1, 0, 1: the lower id of equals
        sampler.end(0)


# Greedy

def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    logits[[70, 300, 999]] = 5.0
    assert token(logits, sampling()) == 70
    assert token(logits, sampling(temperature=1e-6)) == 70
    assert token(logits, sampling(logit_bias=((70, -1.0),))) == 300
    assert token(np.zeros(1000, dtype=np.float32), sampling()) == 0


def test_greedy_never_takes_a_masked_token_in_a_mixed_batch() -> None:
    """FAULTS N02."""
    logits = np.full((4, 64), -50.0, dtype=np.float32)
    logits[:, :32] = -np.inf
    logits[:, 40] = -1.0
    logits[:, 41] = -2.0
    sampler = Sampler(4, 64)
    sampler.start(0, sampling(), [3, 40], 2)
    sampler.start(1, sampling(temperature=1.0, top_k=5), [3, 40], 2)
    sampler.start(2, sampling(min_tokens=2, stop_ids=(40,), repetition_penalty=2.0), [3, 40], 2)
    sampler.start(3, sampling(logit_bias=((40, -100.0),), repetition_penalty=0.5), [3, 40], 2)
    sampled = sampler.sample(logits, ints(0, 1, 2, 3), ints(2, 2, 2, 2))
    assert sampled.failed == ()
    assert sampled.token_ids[[0, 2, 3]].tolist() == [40, 41, 41]
    assert sampled.token_ids[1] >= 32


# What is in a row

@pytest.mark.parametrize("vocab", [1, 17, 64, 1003])
def test_one_bad_entry_fails_its_row_only(vocab: int) -> None:
    """FAULTS N07: wherever the entry is; the other rows equal the control."""
    random = np.random.default_rng(1)
    good = random.standard_normal((3, vocab)).astype(np.float32)

    def run(logits: NDArray[np.float32]) -> Sampled:
        sampler = Sampler(3, vocab)
        for slot in range(3):
            sampler.start(slot, sampling(temperature=float(slot), logprobs=2), [0], 1)
        return sampler.sample(logits, ints(0, 1, 2), ints(1, 1, 1))

    control = run(good)
    assert control.failed == ()
    for bad, reason in ((np.nan, "logits are not finite: NaN"), (np.inf, "logits are not finite: +inf")):
        for place in {0, vocab // 3, vocab - 1, *random.integers(0, vocab, 8).tolist()}:
            logits = good.copy()
            logits[1, place] = bad
            sampled = run(logits)
            assert sampled.failed == ((1, reason),)
            assert sampled.token_ids[1] == 0
            assert np.isnan(sampled.logprobs[1])
            assert sampled.top_logprobs[1] == ()
            for row in (0, 2):
                assert sampled.token_ids[row] == control.token_ids[row]
                assert sampled.logprobs[row] == control.logprobs[row]
                assert sampled.top_logprobs[row] == control.top_logprobs[row]


def test_rows_of_all_nan_or_all_masked_fail() -> None:
    assert sample_one(floats(np.nan, np.nan), sampling()).failed == ((0, "logits are not finite: NaN"),)
    assert sample_one(floats(np.inf, np.nan), sampling(temperature=1.0)).failed == ((0, "logits are not finite: NaN"),)
    assert sample_one(floats(-np.inf, -np.inf), sampling(temperature=1.0)).failed == (
        (0, "logits are not finite: every one is -inf"),)
    only_stops = sampling(min_tokens=1, stop_ids=(0, 1))
    assert sample_one(floats(1.0, 2.0), only_stops).failed == ((0, "every token is masked"),)
    assert sample_one(floats(1.0, 2.0), dataclasses.replace(only_stops, temperature=1.0)).failed == (
        (0, "every token is masked"),)


def test_a_failed_row_is_not_counted() -> None:
    sampler = Sampler(1, 3)
    sampler.start(0, sampling(frequency_penalty=2.0), [2], 1)
    assert sampler.sample(floats(np.nan, 1.0, 0.0)[None], ints(0), ints(1)).failed
    assert sampler.sample(floats(1.0, 0.0, 0.0)[None], ints(0), ints(2)).token_ids[0] == 0


@pytest.mark.parametrize("changes", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 100.0},
                                     {"temperature": 1e-5}, {"repetition_penalty": 100.0}], ids=str)
def test_extreme_logits_give_a_token_and_no_warning(changes: dict[str, object]) -> None:
    largest = float(np.finfo(np.float32).max)
    for logits in (floats(1e4, -1e4, 0.0, 1e4), floats(largest, -largest, 0.0, largest), floats(-largest, -np.inf),
                   floats(1e-40, 0.0, -1e-40), floats(*[7.0] * 100)):
        parameters = sampling(**{"temperature": 1.0, "repetition_penalty": 0.01, "logprobs": 3, **changes})
        sampled = sample_one(logits, parameters, [0, 1], 1)
        assert sampled.failed == ()
        assert logits[sampled.token_ids[0]] > -np.inf


def test_nothing_to_sample() -> None:
    sampled = Sampler(1, 5).sample(np.zeros((0, 5), dtype=np.float32), ints(), ints())
    assert sampled.token_ids.shape == sampled.logprobs.shape == (0,)
    assert (sampled.top_logprobs, sampled.failed) == ((), ())


def test_logits_are_not_written_to() -> None:
    logits = np.random.default_rng(0).standard_normal((1, 100)).astype(np.float32)
    logits.flags.writeable = False
    sampler = Sampler(1, 100)
    sampler.start(0, sampling(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2, logprobs=3,
                              logit_bias=((3, 1.0),), min_tokens=3, stop_ids=(1,)), [5, 6], 1)
    assert sampler.sample(logits, ints(0), ints(2)).failed == ()


# Filters

@pytest.mark.parametrize("top_k", [-1, 0, 6, 7, 2**31 - 1, 2**63 - 1])
def test_top_k_off(top_k: int) -> None:
    """FAULTS A07."""
    logits = floats(0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    for seed in range(50):
        assert token(logits, sampling(temperature=1.0, top_k=top_k, seed=seed)) == \
            token(logits, sampling(temperature=1.0, seed=seed))


def drawn(logits: NDArray[np.float32], **changes: object) -> set[int]:
    return {token(logits, sampling(**{"temperature": 1.0, "seed": seed, **changes})) for seed in range(400)}


def test_filters_keep_at_least_the_best_token() -> None:
    logits = floats(0.0, 3.0, 3.0, 1.0)
    assert drawn(logits, top_p=1e-9) == {1}
    assert drawn(logits, top_k=1) == {1}
    assert drawn(logits, min_p=1.0) == {1, 2}


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = np.log(floats(0.125, 0.5, 0.25, 0.125))
    assert drawn(logits, top_p=0.49) == {1}
    assert drawn(logits, top_p=0.51) == {1, 2}
    assert drawn(logits, top_p=0.76) == {0, 1, 2}
    assert drawn(logits, top_p=0.88) == {0, 1, 2, 3}
    assert drawn(floats(*[0.0] * 8), top_p=0.5) == {0, 1, 2, 3}     # reached exactly by the lower ids


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 2), (0.25, 4), (1 - 2.0**-53, 5)])
def test_the_ends_of_the_draw(uniform: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest and the largest number there are, and one on an edge, never take a token of weight 0."""
    monkeypatch.setattr(philox, "uniforms", lambda *_: np.array([uniform]))
    logits = floats(-np.inf, -np.inf, 0.0, -np.inf, math.log(2.0), 0.0, -np.inf)
    for changes in ({}, {"top_k": 6}, {"top_p": 1 - 1e-15}):
        assert token(logits, sampling(temperature=1.0, **changes)) == expected


def test_temperature_comes_before_the_filters() -> None:
    logits = np.log(floats(0.6, 0.3, 0.1))
    assert drawn(logits, top_p=0.55) == {0}
    assert drawn(logits, top_p=0.55, temperature=3.0) == {0, 1}
    assert drawn(logits, min_p=0.4) == {0, 1}
    assert drawn(logits, min_p=0.4, temperature=0.5) == {0}


# Penalties, biases, masks

def test_repetition_penalty_is_of_prompt_and_output_once_per_token() -> None:
    logits = floats(4.0, 3.0, -2.0, -2.5)
    assert token(logits, sampling(repetition_penalty=1.5), [0, 0, 0], 3) == 1
    assert token(logits, sampling(repetition_penalty=1.5), [2, 0, 0, 0], 1) == 1    # 2.67 < 3
    assert token(logits, sampling(repetition_penalty=1.3), [0, 0, 0, 0], 1) == 0    # 3.08 > 3, though it occurred often
    assert token(floats(-2.0, -2.5), sampling(repetition_penalty=1.5), [0], 1) == 1  # negative ones are multiplied


def test_presence_and_frequency_penalties_are_of_the_output() -> None:
    logits = floats(2.0, 1.0)
    assert token(logits, sampling(presence_penalty=1.5), [0, 0, 0], 3) == 0
    assert token(logits, sampling(frequency_penalty=1.5), [0, 0, 0], 3) == 0
    assert token(logits, sampling(presence_penalty=1.5), [0, 0], 1) == 1
    assert token(logits, sampling(presence_penalty=0.9), [0, 0, 0, 0], 1) == 0      # once, however often it occurred
    assert token(logits, sampling(frequency_penalty=0.9), [0, 0], 1) == 0
    assert token(logits, sampling(frequency_penalty=0.9), [0, 0, 0], 1) == 1
    assert token(logits, sampling(frequency_penalty=-1.5), [0, 1], 1) == 1


@pytest.mark.parametrize("count", [16, 17, 40, 300])
def test_as_many_biases_as_one_likes(count: int) -> None:
    logits = np.zeros(400, dtype=np.float32)
    biases = tuple((i, 1.0 + (i == count - 1)) for i in range(count))
    assert token(logits, sampling(logit_bias=biases)) == count - 1


def test_bias_comes_after_the_penalties() -> None:
    logits = floats(2.0, 1.0)
    parameters = sampling(repetition_penalty=2.0, logit_bias=((1, 1.4),))
    assert token(logits, parameters, [1], 1) == 0                   # 0.5 + 1.4 = 1.9; (1 + 1.4) / 2 = 1.2
    parameters = sampling(repetition_penalty=2.0, logit_bias=((1, 1.6),))
    assert token(logits, parameters, [1], 1) == 1                   # 2.1


def test_bias_bans_and_forces() -> None:
    logits = np.random.default_rng(0).standard_normal(50).astype(np.float32) * 5
    best = int(logits.argmax())
    assert token(logits, sampling(logit_bias=((best, -100.0),))) != best
    assert drawn(logits, logit_bias=((49, 100.0),)) == {49}
    assert best not in drawn(logits, logit_bias=((best, -100.0),))


def test_min_tokens_masks_stop_ids_whatever_their_bias() -> None:
    logits = floats(9.0, 1.0, 8.0)
    parameters = sampling(min_tokens=2, stop_ids=(0, 2), logit_bias=((0, 100.0),))
    sampler = Sampler(1, 3)
    sampler.start(0, parameters, [1, 1], 2)
    assert [int(sampler.sample(logits[None], ints(0), ints(2 + step)).token_ids[0]) for step in range(3)] == [1, 1, 0]


def test_ids_at_the_vocabulary_edge() -> None:
    """FAULTS A01: the last id is accepted; a stop id that the head cannot produce needs no mask."""
    logits = floats(3.0, 2.0, 1.0)
    assert token(logits, sampling(logit_bias=((2, 5.0),))) == 2
    assert token(logits, sampling(min_tokens=2, stop_ids=(0, 2, 3, 99, -1))) == 1
    sampler = Sampler(1, 3)
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=rf"logit_bias: token id {wrong} is not in the vocabulary of 3"):
            sampler.start(0, sampling(logit_bias=((wrong, 5.0),)), [0], 1)
        with pytest.raises(ValueError, match=rf"token_ids: token id {wrong} is not in the vocabulary of 3"):
            sampler.start(0, sampling(repetition_penalty=1.1), [0, wrong], 1)
    sampler.start(0, sampling(), [0], 1)                            # a refused sequence leaves its slot free


def test_many_tokens_seen() -> None:
    """The table of seen tokens grows."""
    random = np.random.default_rng(5)
    known = random.integers(0, 500, 3000).tolist()
    logits = random.standard_normal(500).astype(np.float32)
    parameters = sampling(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.3)
    for num_prompt in (1, 1500, 3000):
        right = naive_tokens(logits.tolist(), parameters, known, num_prompt)
        assert token(logits, parameters, known, num_prompt) in right


# Logprobs

def test_logprobs_are_of_the_raw_logits() -> None:
    logits = floats(1.0, 3.0, -np.inf, 2.0, 3.0)
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    parameters = sampling(temperature=5.0, top_k=1, logit_bias=((3, 50.0),), repetition_penalty=3.0, logprobs=10)
    sampled = sample_one(logits, parameters, [1, 3], 1)
    assert sampled.token_ids.tolist() == [3]
    assert sampled.logprobs[0] == pytest.approx(expected[3], abs=1e-6)
    top = sampled.top_logprobs[0]
    assert [token_id for token_id, _ in top] == [1, 4, 3, 0]        # the lower id first; nothing masked
    assert [logprob for _, logprob in top] == pytest.approx(expected[[1, 4, 3, 0]], abs=1e-6)
    assert dict(top)[3] == sampled.logprobs[0]                      # the same number in both places


@pytest.mark.parametrize("logprobs", [None, 0, 1, 2, 3, 4, 20])
def test_logprobs_only_as_asked(logprobs: int | None) -> None:
    sampled = sample_one(floats(1.0, 3.0, 2.0), sampling(logprobs=logprobs))
    assert np.isnan(sampled.logprobs[0]) == (logprobs is None)
    assert [token_id for token_id, _ in sampled.top_logprobs[0]] == [1, 2, 0][:logprobs or 0]


def test_top_logprobs_of_equals_are_the_lower_ids() -> None:
    logits = np.random.default_rng(4).integers(0, 3, (1, 2000)).astype(np.float32)
    _, (top,) = Sampler.prompt_logprobs(logits, ints(0), 20)
    assert [token_id for token_id, _ in top] == np.flatnonzero(logits[0] == 2)[:20].tolist()
    logits[0, 1000:1005] = (4, 3, 4, 3, 4)
    _, (top,) = Sampler.prompt_logprobs(logits, ints(0), 20)
    assert [token_id for token_id, _ in top][:5] == [1000, 1002, 1004, 1001, 1003]


def test_prompt_logprobs() -> None:
    random = np.random.default_rng(2)
    logits = (random.standard_normal((5, 3001)) * 4).astype(np.float32)
    logits[3, 7] = np.nan
    targets = ints(0, 3000, 17, 2, 9)
    logprobs, top = Sampler.prompt_logprobs(logits, targets, 20)
    assert logprobs.dtype == np.float32
    for row in (0, 1, 2, 4):
        expected = logits[row].astype(np.float64)
        expected -= np.log(np.exp(expected).sum())
        assert logprobs[row] == pytest.approx(expected[targets[row]], abs=1e-5)
        ids = np.argsort(-expected, kind="stable")[:20]
        assert [token_id for token_id, _ in top[row]] == ids.tolist()
        assert [logprob for _, logprob in top[row]] == pytest.approx(expected[ids], abs=1e-5)
    assert np.isnan(logprobs[3])
    assert top[3] == ()
    assert Sampler.prompt_logprobs(logits, targets, 0)[1] == ((),) * 5


class Only:
    """A constraint that allows some tokens, and hears what is out."""

    def __init__(self, *allowed: int) -> None:
        self.allowed, self.told = allowed, list[int]()

    def fill(self, allowed: NDArray[np.uint32], num_output_tokens: int) -> None:
        allowed[:] = 0
        for token_id in self.allowed:
            allowed[token_id // 32] |= np.uint32(1 << token_id % 32)

    def advance(self, token_id: int) -> None:
        self.told.append(token_id)


def test_a_constraint_leaves_its_tokens_alone_and_hears_of_each_once() -> None:
    logits = np.random.default_rng(3).normal(size=(2, 70)).astype(np.float32)
    only, nothing = Only(3, 40, 69), Only()
    sampler, plain = Sampler(3, 70), Sampler(3, 70)
    for x, constraint in ((sampler, only), (plain, None)):
        x.start(2, sampling(temperature=1.0, logprobs=2, constraint=constraint), [5, 6, 7], 1)
        x.start(0, sampling(temperature=1.0, seed=9), [5], 1)
    assert only.told == [], "it has seen what was out"
    drawn = [x.sample(logits, ints(2, 0), ints(3, 1)) for x in (sampler, plain)]
    chosen = int(drawn[0].token_ids[0])
    assert chosen in (3, 40, 69)
    assert only.told == [chosen]
    assert drawn[0].token_ids[1] == drawn[1].token_ids[1]
    assert drawn[0].top_logprobs == drawn[1].top_logprobs, "the model's own"
    best = max((3, 40, 69), key=lambda token_id: logits[0, token_id])
    assert token(logits[0], sampling(constraint=only)) == best
    assert token(logits[0], sampling(constraint=only, allowed_ids=(3, 4))) == 3
    sampled = sample_one(logits[0], sampling(constraint=nothing))
    assert sampled.failed == ((0, "every token is masked"),)
    assert nothing.told == []


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 70, 256, 1000])
def test_a_mask_by_words_is_one_by_bits(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    words = rng.integers(0, 2**32, -(-vocab_size // 32), dtype=np.uint32)
    words[rng.random(len(words)) < 0.3] = 0
    words[rng.random(len(words)) < 0.3] = 0xFFFFFFFF
    logits = rng.normal(size=vocab_size).astype(np.float32)
    logits[::7] = np.nan
    masked = logits.copy()
    segments.mask(masked, words)
    bits = np.array([words[i // 32] >> np.uint32(i % 32) & 1 for i in range(vocab_size)], np.bool_)
    np.testing.assert_array_equal(masked, np.where(bits, logits, np.float32(-np.inf)))


def test_masks_may_be_filled_before_there_are_logits() -> None:
    """Once for each token, and not again by `sample`; a sequence that enters the slot later has its own."""
    class Counted(Only):
        asked: tuple[int, ...] = ()

        def fill(self, allowed: NDArray[np.uint32], num_output_tokens: int) -> None:
            self.asked += (num_output_tokens,)
            super().fill(allowed, num_output_tokens)

    logits = np.random.default_rng(3).normal(size=(2, 70)).astype(np.float32)
    constraint, sampler = Counted(3, 40, 69), Sampler(3, 70)
    sampler.start(0, sampling(), [5], 1)
    assert not sampler.has_constraints(ints(0))
    sampler.start(2, sampling(constraint=constraint), [5, 6, 7], 1)
    assert sampler.has_constraints(ints(0, 2))
    for position in (3, 4):
        sampler.fill_masks(ints(2, 0), ints(position, position - 2))
        sampler.fill_masks(ints(2), ints(position))
        assert sampler.sample(logits, ints(2, 0), ints(position, position - 2)).token_ids[0] in (3, 40, 69)
    assert constraint.asked == (2, 3)
    sampler.end(2)
    other = Counted(8)
    sampler.start(2, sampling(constraint=other), [5, 6, 7], 1)
    assert sampler.sample(logits[:1], ints(2), ints(3)).token_ids[0] == 8
    assert other.asked == (2,)
