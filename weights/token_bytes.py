"""What each token adds to a text, as bytes: a tokenizer's decoder taken apart into a table."""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """token id -> bytes, computed when first asked for: a vocabulary of 262,144 costs nothing at start-up."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        value = self[token_id] = self._compute(token_id)
        return value


class TokenDecoder:
    """The decoders that work token by token: byte level, SentencePiece with byte fallback, and none at all.

    strip_start: the first token of a text loses a leading space.
    """

    def __init__(self, state: Any, origin: str) -> None:
        """`state` is the decoder as tokenizer.json has it. Raises: ValueError for another kind."""
        self._byte_level = self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self._before = " " if state is None else ""         # without a decoder tokens are words, joined by spaces
        self.strip_start = state is None
        steps = [] if state is None else state["decoders"] if state["type"] == "Sequence" else [state]
        fused = False
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    self._byte_level = True
                case {"type": "ByteFallback"}:
                    self._byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(old) == 1:
                    self._replacements.append((old, new))
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if fused:
                    self.strip_start = True
                case _:
                    raise ValueError(f"{origin}: tokenizer decoder {json.dumps(step)} is not supported")

    @property
    def covers_bytes(self) -> bool:
        """Whether the vocabulary can spell any text, so that nothing is an unknown word."""
        return self._byte_level or self._byte_fallback

    def bytes_of(self, token: str) -> bytes:
        """What the token adds to a text that has begun."""
        if self._byte_level:
            try:
                return bytes([_BYTE_OF_LETTER[letter] for letter in token])
            except KeyError:
                return token.encode()       # an added token, as it is written
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return (self._before + token).encode()


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: a printable letter for each byte, the byte's own where that is printable."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(own))
    return {chr(byte): byte for byte in own} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()
