"""The random numbers: known answers, the key's parts, and that draws follow the distribution they are drawn from."""
from __future__ import annotations

import math

import numpy as np
import pytest

from cuda import philox
from cuda.sampler import Sampler, SlotSampling

KNOWN_ANSWERS = [   # counter, key, output: Random123's kat_vectors, philox4x32 10
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def test_philox_known_answers() -> None:
    """As rows of one call: a row does not depend on its neighbours."""
    counters = np.array([words(counter) for counter, _, _ in KNOWN_ANSWERS], dtype=np.uint32)
    keys = np.array([words(key) for _, key, _ in KNOWN_ANSWERS], dtype=np.uint32)
    expected = np.array([words(output) for _, _, output in KNOWN_ANSWERS], dtype=np.uint32)
    np.testing.assert_array_equal(philox.philox4x32(counters, keys), expected)
    for row in range(3):
        np.testing.assert_array_equal(philox.philox4x32(counters[row:row + 1], keys[row:row + 1])[0], expected[row])


def test_uniforms_are_53_bits_of_the_first_two_words() -> None:
    assert philox.uniforms([0], [0], [0], 0)[0] == (0x6627E8D5 << 21 | 0xE169C58D >> 11) / 2**53


def test_uniforms_are_uniform() -> None:
    numbers = philox.uniforms([7] * 64_000, [0] * 64_000, list(range(64_000)), philox.SAMPLE)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 5 / math.sqrt(12 * 64_000)
    counts = np.bincount((numbers * 64).astype(int), minlength=64)
    assert chi_square(counts, np.full(64, 1 / 64)) < chi_square_limit(63)
    lagged = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(lagged) < 5 / math.sqrt(64_000)


@pytest.mark.parametrize("seed", [0, -1, 1, 2**63 - 1, -(2**63), 2**32, 42])
def test_any_64_bit_seed_is_valid_and_reproducible(seed: int) -> None:
    """FAULTS A08."""
    first, second = philox.uniforms([seed, seed], [0, 0], [5, 5], philox.SAMPLE)
    assert first == second
    assert 0.0 <= first < 1.0


def test_every_part_of_the_key_matters() -> None:
    seeds = [0, 1, -1, 2**32, 2**33, -(2**63), 2**63 - 1]
    keys = [(seed, choice, position, purpose) for seed in seeds for choice in range(4) for position in range(8)
            for purpose in range(3)]
    numbers = {key: float(philox.uniforms([key[0]], [key[1]], [key[2]], key[3])[0]) for key in keys}
    assert len(set(numbers.values())) == len(keys)


def sampling(**changes: object) -> SlotSampling:
    values: dict[str, object] = dict(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0,
        repetition_penalty=1.0, logit_bias=(), min_tokens=0, stop_ids=(), seed=1, choice=0, logprobs=None)
    return SlotSampling(**{**values, **changes})  # type: ignore[arg-type]


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(freedom: int) -> float:
    """What chance exceeds about once in 1e6 (Wilson and Hilferty). Seeds are fixed: a test passes always or never."""
    return float(freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3)


LOGITS = np.array([0.1, 2.0, -1.0, 1.5, 0.0, 3.0, -np.inf, 2.0, -4.0, 1.0], dtype=np.float32)


@pytest.mark.parametrize(("changes", "kept"), [
    ({}, [0, 1, 2, 3, 4, 5, 7, 8, 9]),
    ({"temperature": 2.5}, [0, 1, 2, 3, 4, 5, 7, 8, 9]),
    ({"top_k": 4}, [1, 3, 5, 7]),
    ({"top_k": 2}, [1, 5]),                                 # 1 and 7 are equal: the lower id stays
    ({"top_p": 0.7}, [1, 5, 7]),                            # shares 0.45, 0.16, 0.16, 0.10: 0.61 is not enough
    ({"min_p": 0.2}, [1, 3, 5, 7]),                         # relative to the best: 1, 0.37, 0.37, 0.22 | 0.14
    ({"top_k": 4, "top_p": 0.6}, [1, 5]),                   # top_p of what top_k left: shares 0.51, 0.19, …
    ({"min_p": 0.2, "top_p": 0.6, "temperature": 1.0}, [1, 5]),
])
def test_draws_follow_the_filtered_distribution(changes: dict[str, object], kept: list[int]) -> None:
    rows, steps = 250, 40
    sampler = Sampler(rows, len(LOGITS))
    parameters = sampling(**changes)
    for slot in range(rows):
        sampler.start(slot, parameters, [0], 1)
    logits = np.tile(LOGITS, (rows, 1))
    counts = np.zeros(len(LOGITS), dtype=np.int64)
    for step in range(steps):                               # another position for every draw
        positions = np.arange(rows, dtype=np.int32) + 1 + step * rows
        sampled = sampler.sample(logits, np.arange(rows, dtype=np.int32), positions)
        counts += np.bincount(sampled.token_ids, minlength=len(LOGITS))
    assert np.flatnonzero(counts).tolist() == kept
    weights = np.exp(LOGITS[kept].astype(np.float64) / parameters.temperature)
    assert chi_square(counts[kept], weights / weights.sum()) < chi_square_limit(len(kept) - 1)


def test_choices_of_one_seed_are_independent() -> None:
    """The pairs of tokens that two choices draw at one position follow the product of their distributions."""
    rows = 4000
    sampler = Sampler(2 * rows, 4)
    for slot in range(2 * rows):
        sampler.start(slot, sampling(seed=9, choice=slot // rows), [0], 1)
    positions = np.tile(np.arange(1, rows + 1, dtype=np.int32), 2)
    sampled = sampler.sample(np.zeros((2 * rows, 4), dtype=np.float32), np.arange(2 * rows, dtype=np.int32), positions)
    pairs = sampled.token_ids[:rows] * 4 + sampled.token_ids[rows:]
    assert chi_square(np.bincount(pairs, minlength=16), np.full(16, 1 / 16)) < chi_square_limit(15)
