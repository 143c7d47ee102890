"""FAULTS K09, K11: keys are a chain of SHA-256 over all that makes blocks equal, so equal keys mean equal blocks."""
from __future__ import annotations

import itertools
import struct
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.policy.block_keys import block_keys, root_key
from actors.policy.kv_group import BLOCK_SIZE


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 32, 47, 160])
def test_a_key_is_the_hash_of_parent_and_ids(num_tokens: int) -> None:
    token_ids = [7919 * i % 150_000 for i in range(num_tokens)]
    parent = root_key(model="m", adapter="", salt="", scope="")
    keys = block_keys(parent, token_ids)
    assert len(keys) == num_tokens // BLOCK_SIZE
    for i, key in enumerate(keys):
        parent = sha256(parent + struct.pack("<16i", *token_ids[16 * i:16 * i + 16])).digest()[:16]
        assert key == parent


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=100), cut=st.integers(0, 6))
def test_keys_can_be_made_in_parts(token_ids: list[int], cut: int) -> None:
    root = b"r" * 16
    whole = block_keys(root, token_ids)
    first = block_keys(root, token_ids[:cut * BLOCK_SIZE])
    rest = block_keys(first[-1] if first else root, token_ids[cut * BLOCK_SIZE:])
    assert first + rest == whole


def test_a_key_names_everything_before_it() -> None:
    root = b"r" * 16
    token_ids = list(range(64))
    keys = block_keys(root, token_ids)
    for position in range(64):
        other = block_keys(root, [*token_ids[:position], 9999, *token_ids[position + 1:]])
        assert [a == b for a, b in zip(keys, other, strict=True)] == [i < position // 16 for i in range(4)]
    assert set(block_keys(b"s" * 16, token_ids)).isdisjoint(keys)


def test_no_two_sets_of_fields_have_the_same_root() -> None:
    """Whatever the fields say, and wherever in them it stands."""
    texts = ["", "a", "b", "ab", "abc", "bc", "c", "\0", "salt", "\ud800", "é"]
    fields = list(itertools.product(texts, repeat=4))
    roots = {root_key(model=model, adapter=adapter, salt=salt, scope=scope) for model, adapter, salt, scope in fields}
    assert len(roots) == len(fields)
    assert {len(root) for root in roots} == {16}
