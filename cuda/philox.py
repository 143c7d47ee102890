"""Philox4x32-10: a random number generator without state, the same on every device.

A draw is a pure function of what it is for, so a sample does not depend on its batch, on chunking or on preemption.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3 and the known answers of
their Random123 library.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# What a draw is for. Part of the counter: two purposes at one position get independent numbers.
SAMPLE = 0

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Four random words a row. counter [R, 4], key [R, 2] -> [R, 4]"""
    # 32-bit words in 64-bit arrays: the products need all 64 bits.
    c0, c1, c2, c3 = counter.T.astype(np.uint64)
    k0, k1 = key.T.astype(np.uint64)
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product2 = c2 * _MULTIPLIERS[1]
        c0, c2 = (product2 >> _SHIFT) ^ c1 ^ k0, (product0 >> _SHIFT) ^ c3 ^ k1
        c1, c3 = product2 & _MASK, product0 & _MASK
        k0 = (k0 + _KEY_STEPS[0]) & _MASK
        k1 = (k1 + _KEY_STEPS[1]) & _MASK
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def uniforms(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], purpose: int
) -> NDArray[np.float64]:
    """One number in [0, 1) a row, a multiple of 2**-53. -> [R]

    seeds [R]: any 64-bit integers, signed or not; choices, positions [R]: at least 0.
    The seed fills the whole key; choice, position and purpose are words of the counter, so no two combinations
    share a number.
    """
    key = np.array([(seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF) for seed in seeds], dtype=np.uint32).reshape(-1, 2)
    counter = np.zeros((len(seeds), 4), dtype=np.uint32)
    counter[:, 0] = positions
    counter[:, 1] = purpose
    counter[:, 2] = choices
    words = philox4x32(counter, key).astype(np.uint64)
    bits = words[:, 0] << np.uint64(21) | words[:, 1] >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
