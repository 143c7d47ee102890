"""Names of KV blocks by what they hold: a chain of hashes, so that equal keys mean equal tokens from the first one on.

    key of block i = SHA-256(key of block i - 1 ‖ the block's ids)[:16],   before block 0 stands a root

The hash is cryptographic: nobody can make a prompt whose keys are those of another one. What must not share blocks
differs in its root.
"""
from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

from actors.policy.kv_group import BLOCK_SIZE

KEY_BYTES = 16
_BLOCK_BYTES = 4 * BLOCK_SIZE               # ids are hashed as int32, little-endian


def root_key(*, model: str, adapter: str, salt: str, scope: str) -> bytes:
    """What comes before the first block. Fields carry their name and lengths: no two sets of values read alike."""
    digest = sha256()
    for name, value in (("model", model), ("adapter", adapter), ("salt", salt), ("scope", scope)):
        for text in (name.encode(), value.encode("utf-8", "surrogatepass")):
            digest.update(len(text).to_bytes(8, "little"))
            digest.update(text)
    return digest.digest()[:KEY_BYTES]


def block_keys(parent: bytes, token_ids: Sequence[int]) -> tuple[bytes, ...]:
    """Keys of the blocks that `token_ids` fill; `parent` is the key of the block before them, or the root."""
    packed = struct.pack(f"<{len(token_ids)}i", *token_ids)
    keys = []
    for start in range(0, len(packed) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        parent = sha256(parent + packed[start:start + _BLOCK_BYTES]).digest()[:KEY_BYTES]
        keys.append(parent)
    return tuple(keys)
