"""The sampler on the device against the one on the host: the very same tokens, whatever is asked for."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from actors import sampling_params
from cuda.kernels import sampling, sampling_state
from cuda.kernels.sampling_state import pack_bits
from cuda.kernels.slot_sampling import DeviceSampling
from cuda.sampler import Sampled, Sampler, SlotSampling
from tests.cuda_emulator import build
from tests.cuda_emulator.launcher import EmulatorLauncher

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

NEUTRAL = SlotSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
    logit_bias=(), min_tokens=0, stop_ids=(), seed=1, choice=0, logprobs=None)

Floats = NDArray[np.float32]


def asked(**changes: object) -> SlotSampling:
    return dataclasses.replace(NEUTRAL, **changes)  # type: ignore[arg-type]


def emulator(order: int = 0, sanitize: str = "") -> EmulatorLauncher:
    return EmulatorLauncher(order=order, sanitize=sanitize, specs=[sampling.SPEC, sampling_state.SPEC])


class Device:
    """Like `Sampler`, with the host's arrays."""

    def __init__(self, max_num_seqs: int, vocab_size: int, launcher: EmulatorLauncher | None = None,
                 max_model_len: int = 64) -> None:
        self.launcher = launcher or emulator()
        self.sampling = DeviceSampling(self.launcher, max_num_seqs, vocab_size)
        self.start, self.end = self.sampling.start, self.sampling.end
        self.tokens = self.launcher.upload(np.full((max_num_seqs, max_model_len), -5, np.int32))

    def sample(self, logits: Floats, slots: NDArray[np.int32], positions: NDArray[np.int32],
               masks: NDArray[np.uint32] | None = None, mask_rows: NDArray[np.int32] | None = None) -> Sampled:
        self.sampling.flush()
        upload = self.launcher.upload
        sent = upload(logits)
        if masks is not None:
            self.launcher.write(self.sampling.masks[:len(masks)], masks)
        self.sampling.sample(self.tokens, sent, upload(slots), upload(positions),
                             mask_rows=None if mask_rows is None else upload(mask_rows))
        assert sent.tobytes() == logits.tobytes()           # not written to
        sampled = self.sampling.results(slots)()
        for row in np.flatnonzero(slots >= 0):
            assert self.tokens[slots[row], positions[row]] == sampled.token_ids[row]
        return sampled


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def assert_same(device: Sampled, host: Sampled) -> None:
    assert device.token_ids.tolist() == host.token_ids.tolist()
    assert device.failed == host.failed
    np.testing.assert_allclose(device.logprobs, host.logprobs, rtol=0, atol=1e-5)
    for ours, theirs in zip(device.top_logprobs, host.top_logprobs, strict=True):
        assert [token_id for token_id, _ in ours] == [token_id for token_id, _ in theirs]
        np.testing.assert_allclose([logprob for _, logprob in ours], [logprob for _, logprob in theirs], atol=1e-5)


def tokens_of(logits: Floats, samplings: Sequence[SlotSampling], launcher: EmulatorLauncher | None = None) -> list[int]:
    """One row of logits for sequences of one token each; by the device, and the host agrees."""
    num_rows = len(samplings)
    host, device = Sampler(num_rows, len(logits)), Device(num_rows, len(logits), launcher)
    for slot, parameters in enumerate(samplings):
        host.start(slot, parameters, [0], 1)
        device.start(slot, parameters, [0], 1)
    rows = np.tile(logits, (num_rows, 1))
    slots, positions = np.arange(num_rows, dtype=np.int32), np.ones(num_rows, np.int32)
    sampled = device.sample(rows, slots, positions)
    assert_same(sampled, host.sample(rows, slots, positions))
    token_ids: list[int] = sampled.token_ids.tolist()
    return token_ids


# Everything at once. NOTE: logits on a grid: where neighbours differ by less than their weights can show, the host
# takes the lower id of equal weights for top_p and the device that of equal logits.

logit = st.one_of(st.integers(-1920, 1920).map(lambda x: x / 64), st.sampled_from([0.0, 1.0, 1e4, -1e4, -math.inf]))
Row = tuple[list[float], SlotSampling, list[int], int]      # logits, parameters, known tokens, prompt tokens
VOCAB = 40


@st.composite
def rows_strategy(draw: st.DrawFn) -> Row:
    ids = st.integers(0, VOCAB - 1)
    prompt = draw(st.lists(ids, min_size=1, max_size=8))
    penalty = st.integers(-8, 8).map(lambda x: x / 4)
    parameters = SlotSampling(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.1, 0.7, 1.0, 3.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 3, 10, VOCAB, 2**63 - 1])),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])),
        presence_penalty=draw(penalty), frequency_penalty=draw(penalty),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5, 2.0])),
        logit_bias=tuple(draw(st.lists(st.tuples(ids, st.sampled_from([5.0, -100.0, 0.5])), max_size=4))),
        min_tokens=draw(st.integers(0, 12)), stop_ids=tuple(draw(st.sets(st.integers(0, VOCAB + 3), max_size=4))),
        seed=draw(st.integers(-(2**63), 2**63 - 1)), choice=draw(st.integers(0, 3)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        allowed_ids=draw(st.none() | st.lists(st.integers(0, 3) | ids, min_size=1, max_size=30).map(tuple)),
        bad_words=tuple(draw(st.lists(
            st.lists(st.integers(0, 3) | ids, min_size=1, max_size=3).map(tuple), max_size=8))))
    logits = draw(st.lists(logit, min_size=VOCAB, max_size=VOCAB))
    return logits, parameters, prompt + draw(st.lists(st.integers(0, 3) | ids, max_size=8)), len(prompt)


@settings(max_examples=120, deadline=None)
@given(st.lists(rows_strategy(), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_equals_the_host_over_several_steps(rows: list[Row], random: Random) -> None:
    """Tokens, failures, logprobs; the device counts for itself what it sampled."""
    num_slots = len(rows) + 2
    slots = random.sample(range(num_slots), len(rows))
    host, device = Sampler(num_slots, VOCAB), Device(num_slots, VOCAB, emulator(order=random.randrange(4)))
    for slot, (_, parameters, known, num_prompt) in zip(slots, rows, strict=True):
        host.start(slot, parameters, known, num_prompt)
        device.start(slot, parameters, known, num_prompt)
        device.tokens[slot, :len(known)] = known                # as the runner writes them
    first = np.array([row[0] for row in rows], np.float32)
    alive = list(range(len(rows)))
    for step in range(3):
        logits = np.roll(first[alive], step, axis=1)
        at = ints(*(slots[row] for row in alive)), ints(*(len(rows[row][2]) + step for row in alive))
        expected = host.sample(logits, *at)
        assert_same(device.sample(logits, *at), expected)
        failed = {row for row, _ in expected.failed}            # their sequences are over
        alive = [row for i, row in enumerate(alive) if i not in failed]
        if not alive:
            break


# Selection: survivors are the host's where every draw is.

@pytest.mark.parametrize("changes", [
    {}, {"top_k": 1}, {"top_k": 60}, {"top_k": 1100}, {"top_k": 3000}, {"top_k": 3999}, {"top_p": 0.3},
    {"top_p": 0.9999}, {"min_p": 0.1}, {"min_p": 1e-6}, {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
], ids=str)
@pytest.mark.parametrize("kind", ["normal", "rounded", "flat", "two values", "outliers", "masked", "tiny", "peaked"])
def test_a_large_vocabulary_gives_the_tokens_of_the_host(changes: dict[str, object], kind: str) -> None:
    random = np.random.default_rng(3)
    logits = (3 * random.standard_normal(4001)).astype(np.float32)
    if kind == "rounded":
        logits = logits.round()
    elif kind == "flat":
        logits[:] = 2.5
    elif kind == "two values":
        logits = np.where(random.random(4001) < 0.5, np.float32(1.0), np.float32(-1.0)).astype(np.float32)
    elif kind == "outliers":
        logits[[5, 4000]] = 1e4
    elif kind == "masked":
        logits[random.permutation(4001)[:3990]] = -np.inf
    elif kind == "tiny":
        logits *= np.float32(1e-3)                          # thousands of tokens in one bin of the histogram
    elif kind == "peaked":
        logits *= 20
    tokens_of(logits, [asked(temperature=0.9, seed=seed, **changes) for seed in range(8)])


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.1, 0.75])
def test_top_p_that_equal_tokens_reach_exactly_keeps_no_more(top_p: float) -> None:
    """1000 equals: the nucleus are the lowest ids, and the draw goes over them all."""
    tokens = tokens_of(np.full(1000, 3.0, np.float32), [asked(temperature=1.0, top_p=top_p, seed=i) for i in range(40)])
    assert max(tokens) < 1000 * top_p
    assert len(set(tokens)) > 20


def test_filters_keep_at_least_the_best_token() -> None:
    logits = np.array([0.0, 3.0, 3.0, 1.0], np.float32)
    for changes, expected in (({"top_p": 1e-9}, {1}), ({"top_k": 1}, {1}), ({"min_p": 1.0}, {1, 2})):
        assert set(tokens_of(logits, [asked(temperature=1.0, seed=i, **changes) for i in range(30)])) == expected


def test_draws_are_as_likely_as_they_should_be() -> None:
    """Chi-square of 3000 draws from 12 tokens, 99.99 % bound for 11 degrees of freedom."""
    logits = np.random.default_rng(5).standard_normal(12).astype(np.float32)
    launcher, drawn = emulator(), np.zeros(12)
    for part in range(10):
        samplings = [asked(temperature=0.8, seed=300 * part + i) for i in range(300)]
        drawn += np.bincount(tokens_of(logits, samplings, launcher), minlength=12)
    weights = np.exp(logits.astype(np.float64) / 0.8)
    expected = 3000 * weights / weights.sum()
    assert ((drawn - expected)**2 / expected).sum() < 37.4


# A row and its batch

def test_a_row_does_not_depend_on_batch_order_or_threads() -> None:
    random = np.random.default_rng(8)
    samplings = sampling_state.samplings_for_cases(700)
    logits = 3 * random.standard_normal((len(samplings), 700), np.float32)
    known = [random.integers(0, 700, 12).tolist() for _ in samplings]

    def run(launcher: EmulatorLauncher, rows: Sequence[int]) -> dict[int, tuple[int, bytes, object]]:
        device = Device(len(samplings), 700, launcher)
        for row in rows:
            device.start(row, samplings[row], known[row], 4)
        sampled = device.sample(np.ascontiguousarray(logits[list(rows)]), ints(*rows), np.full(len(rows), 12, np.int32))
        return {row: (int(sampled.token_ids[i]), sampled.logprobs[i].tobytes(), sampled.top_logprobs[i])
                for i, row in enumerate(rows)}

    everything = range(len(samplings))
    together = run(emulator(), everything)
    for order in (1, 2, 3):
        assert run(emulator(order), random.permutation(len(samplings)).tolist()) == together
    assert run(emulator(sanitize="race"), everything) == together
    for row in everything:
        assert run(emulator(), [row])[row] == together[row]


def test_rows_without_a_slot_change_nothing() -> None:
    device = Device(2, 50)
    device.start(1, asked(temperature=1.0, frequency_penalty=1.0), [3], 1)
    tokens = device.tokens.copy()
    logits = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    logits[0] = np.nan
    sampled = device.sample(logits, ints(-1, 1, -1), ints(-1, 1, -1))
    assert sampled.failed == ()
    tokens[1, 1] = sampled.token_ids[1]
    assert (device.tokens == tokens).all()


def test_a_slot_forgets_its_last_sequence() -> None:
    device, logits = Device(1, 3), np.array([[3.0, 2.0, 1.0]], np.float32)
    parameters = asked(frequency_penalty=2.0)
    for _ in range(2):
        device.start(0, parameters, [2], 1)
        tokens = [int(device.sample(logits, ints(0), ints(1 + step)).token_ids[0]) for step in range(3)]
        assert tokens == [0, 1, 0]
        device.end(0)
    device.start(0, parameters, [2], 1)
    device.end(0)                                           # before the device was told
    device.start(0, asked(), [2], 1)
    assert [int(device.sample(logits, ints(0), ints(1 + step)).token_ids[0]) for step in range(2)] == [0, 0]


def test_a_resumed_sequence_goes_on_as_if_undisturbed() -> None:
    logits = np.random.default_rng(0).standard_normal((6, 1, 50)).astype(np.float32)
    parameters = asked(temperature=1.0, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5,
                       min_tokens=5, stop_ids=(1, 2, 3), seed=-7)

    def run(preempted_at: int | None) -> list[int]:
        device, known, slot = Device(3, 50), [4, 4, 9], 0
        device.start(slot, parameters, known, 3)
        for step in range(6):
            if step == preempted_at:
                device.end(slot)
                slot = 2
                device.start(slot, parameters, known, 3)
            known.append(int(device.sample(logits[step], ints(slot), ints(len(known))).token_ids[0]))
        return known

    undisturbed = run(None)
    assert all(run(step) == undisturbed for step in range(6))


# Masks

def test_only_allowed_tokens_are_sampled() -> None:
    random = np.random.default_rng(2)
    logits = 3 * random.standard_normal((6, 100), np.float32)
    sets = [np.sort(random.permutation(100)[:count]) for count in (1, 7, 60)]
    allowed = np.stack([pack_bits(ids, 100) for ids in sets])
    samplings = [asked(logprobs=2), *(asked(temperature=1.0, seed=i, top_p=0.9) for i in range(5))]
    device = Device(6, 100)
    for slot, parameters in enumerate(samplings):
        device.start(slot, parameters, [0], 1)
    rows = ints(0, 1, 2, -1, 1, 0)
    sampled = device.sample(logits, np.arange(6, dtype=np.int32), np.ones(6, np.int32), allowed, rows)
    assert sampled.failed == ()
    for row, mask in enumerate(rows.tolist()):
        assert mask < 0 or sampled.token_ids[row] in sets[mask]
    free = Device(6, 100)
    for slot, parameters in enumerate(samplings):
        free.start(slot, parameters, [0], 1)
    unmasked = free.sample(logits, np.arange(6, dtype=np.int32), np.ones(6, np.int32))
    assert sampled.token_ids[3] == unmasked.token_ids[3]
    assert sampled.top_logprobs[0] == unmasked.top_logprobs[0]      # what is reported is of the raw logits

    nothing = device.sample(logits, np.arange(6, dtype=np.int32), np.full(6, 2, np.int32), np.zeros((1, 4), np.uint32),
                            ints(0, -1, 0, -1, -1, -1))
    assert nothing.failed == ((0, "every token is masked"), (2, "every token is masked"))


def test_a_bad_word_of_several_tokens_is_never_complete() -> None:
    """The device looks at its own tokens: it knows the last one before anybody has read it."""
    parameters = asked(bad_words=((2, 2), (3, 1, 2), (5,)))
    logits = np.array([[0.0, 3.0, 4.0, 1.0, 2.0, 9.0]], np.float32)
    for order in range(4):
        device, known = Device(1, 6, emulator(order)), [2]
        device.tokens[0, 0] = 2
        device.start(0, parameters, known, 1)
        for _ in range(4):
            known.append(int(device.sample(logits, ints(0), ints(len(known))).token_ids[0]))
        assert known == [2, 2, 1, 2, 1]
        device.end(0)
        device.tokens[0, :3] = 2, 3, 1
        device.start(0, parameters, [2, 3, 1], 1)
        assert device.sample(logits, ints(0), ints(3)).token_ids[0] == 1
        device.end(0)
        device.start(0, asked(), [2], 1)                        # who comes next is free of it
        assert device.sample(logits, ints(0), ints(1)).token_ids[0] == 5


def test_as_many_bad_words_as_may_be() -> None:
    random = np.random.default_rng(6)
    words = tuple(tuple(random.integers(0, 20, 4).tolist()) for _ in range(sampling_state.MAX_BAD_WORDS))
    single = tuple((token_id,) for token_id in range(20, 3000, 2))
    tokens_of(random.standard_normal(3000).astype(np.float32), [asked(bad_words=words + single, seed=1)] * 2)
    with pytest.raises(ValueError, match="bad_words: 257 with 1028 tokens, at most 256 with 1024"):
        Device(1, 3000).start(0, asked(bad_words=(*words, words[0])), [1], 1)
    assert 2 * sampling_params.MAX_BAD_WORDS <= sampling_state.MAX_BAD_WORDS, "each has two spellings"
    assert sampling_params.MAX_BAD_WORD_IDS <= sampling_state.MAX_BAD_WORD_IDS


# What is in a row

@pytest.mark.parametrize("vocab", [1, 17, 64, 1003])
def test_one_bad_entry_fails_its_row_only(vocab: int) -> None:
    random = np.random.default_rng(1)
    good = random.standard_normal((3, vocab)).astype(np.float32)
    launcher = emulator()

    def run(logits: Floats) -> Sampled:
        host, device = Sampler(3, vocab), Device(3, vocab, launcher)
        for slot in range(3):
            for sampler in (host, device):
                sampler.start(slot, asked(temperature=float(slot), logprobs=2), [0], 1)
        sampled = device.sample(logits, ints(0, 1, 2), ints(1, 1, 1))
        assert_same(sampled, host.sample(logits, ints(0, 1, 2), ints(1, 1, 1)))
        return sampled

    control = run(good)
    for bad in (np.nan, -np.nan, np.inf):
        for place in {0, vocab // 3, vocab - 1}:
            logits = good.copy()
            logits[1, place] = bad
            sampled = run(logits)
            assert [row for row, _ in sampled.failed] == [1]
            assert sampled.token_ids[[0, 2]].tolist() == control.token_ids[[0, 2]].tolist()


def test_rows_of_nothing_fail_as_on_the_host() -> None:
    only_stops = {"min_tokens": 1, "stop_ids": (0, 1)}
    for logits, changes in (((np.nan, np.inf), {}), ((-np.inf, -np.inf), {}), ((np.inf, 0.0), {}),
                            ((1.0, 2.0), only_stops), ((np.nan, 2.0), only_stops)):
        for temperature in (0.0, 1.0):
            tokens_of(np.array(logits, np.float32), [asked(temperature=temperature, logprobs=1, **changes)])


def test_a_failed_row_is_not_counted() -> None:
    device = Device(1, 3)
    device.start(0, asked(frequency_penalty=2.0), [2], 1)
    assert device.sample(np.array([[np.nan, 1.0, 0.0]], np.float32), ints(0), ints(1)).failed
    assert device.sample(np.array([[1.0, 0.0, 0.0]], np.float32), ints(0), ints(2)).token_ids[0] == 0


@pytest.mark.parametrize("changes", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 100.0},
                                     {"temperature": 1e-5}, {"repetition_penalty": 100.0}], ids=str)
def test_extreme_logits_give_the_tokens_of_the_host(changes: dict[str, object]) -> None:
    largest = float(np.finfo(np.float32).max)
    for logits in ((1e4, -1e4, 0.0, 1e4), (largest, -largest, 0.0, largest), (-largest, -np.inf), (0.0, -0.0),
                   (-0.0, 0.0, -1.0), (7.0,) * 100):
        parameters = {"temperature": 1.0, "repetition_penalty": 0.01, "logprobs": 3, **changes}
        tokens_of(np.array(logits, np.float32), [asked(seed=seed, **parameters) for seed in range(5)])


def test_many_biases_and_stop_ids() -> None:
    random = np.random.default_rng(4)
    logits = 3 * random.standard_normal(3000).astype(np.float32)
    ids = random.permutation(3000)[:sampling_state.MAX_BIASES].tolist()
    biases = tuple((token_id, float(random.integers(-100, 100))) for token_id in ids)
    tokens_of(logits, [asked(temperature=temperature, logit_bias=biases, min_tokens=5, stop_ids=tuple(range(2000)))
                       for temperature in (0.0, 20.0)])


# What cannot be

def test_what_the_device_cannot_hold_is_refused_as_on_the_host() -> None:
    device = Device(1, 10)
    for changes, known, message in (
            ({"logit_bias": ((10, 1.0),)}, [1], "logit_bias: token id 10 is not in the vocabulary of 10"),
            ({"frequency_penalty": 1.0}, [1, 12], "token_ids: token id 12 is not in the vocabulary of 10"),
            ({"allowed_ids": (10,)}, [1], "allowed_ids: token id 10 is not in the vocabulary of 10"),
            ({"bad_words": ((1, 10),)}, [1], "bad_words: token id 10 is not in the vocabulary of 10"),
            ({"logprobs": 21}, [1], "logprobs: 21, at most 20")):
        with pytest.raises(ValueError, match=message):
            device.start(0, asked(**changes), known, 1)
    device.start(0, asked(), [99], 1)                       # without a penalty nobody looks
    many = tuple((i, 1.0) for i in range(1025))
    with pytest.raises(ValueError, match="logit_bias: 1025 tokens, at most 1024"):
        Device(1, 2000).start(0, asked(logit_bias=many), [1], 1)
    with pytest.raises(ValueError, match="a vocabulary of 600000, at most 524288"):
        DeviceSampling(emulator(), 1, 600000)


def test_wrong_arrays_are_refused() -> None:
    device = Device(2, 50)
    with pytest.raises(ValueError, match="counts is uint16"):
        device.sample(np.zeros((1, 51), np.float32), ints(0), ints(1))
    with pytest.raises(ValueError, match="positions is int64"):
        device.sample(np.zeros((1, 50), np.float32), ints(0), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="come together"):
        sampling.sample(device.launcher, device.sampling._results[:1], device.sampling._logprobs[:1], device.tokens,
                        logits=np.zeros((1, 50), np.float32), slots=ints(0), positions=ints(1),
                        allowed=np.zeros((1, 2), np.uint32), **device.sampling._state)
