"""What a benchmark sends, and when: lengths, prompts and arrival times drawn from one seed. Nothing here waits."""
from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Prompt: TypeAlias = tuple[int, ...] | str   # token ids, or the text of a chat message
Length: TypeAlias = Callable[[random.Random], int]

# Words that common vocabularies hold as one token each, for prompts that must be text.
WORDS = ("time year people way day man thing woman life child world school state family student group country problem "
         "hand part place case week company system program question work government number night point home water "
         "room mother area money story fact month lot right study book eye job word business issue side kind head "
         "house service friend father power hour game line end member law car city name team minute idea body").split()


@dataclass(frozen=True, slots=True)
class Request:
    prompt: Prompt
    output_len: int                         # tokens asked for


def parse_length(text: str, sharegpt: tuple[float, float], low: int, high: int) -> Length:
    """`128`, `64:256` (uniform, both ends included) or `sharegpt` (log-normal with mean and sigma, within low..high).

    Raises: ValueError for anything else.
    """
    if text == "sharegpt":
        mean, sigma = sharegpt
        mu = math.log(mean) - sigma * sigma / 2                     # so that the mean is `mean`
        return lambda rng: min(max(round(rng.lognormvariate(mu, sigma)), low), high)
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if match is None:
        raise ValueError(f"{text!r} is not a length: give 128, 64:256 or sharegpt")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last:
        raise ValueError(f"{text!r} is not a length: 1 <= first <= last does not hold")
    return lambda rng: rng.randint(first, last)


def input_length(text: str) -> Length:
    """ShareGPT's first turns have about 220 prompt tokens; the bounds are those of vLLM's filter."""
    return parse_length(text, sharegpt=(220.0, 1.1), low=4, high=1024)


def output_length(text: str) -> Length:
    """ShareGPT's first answers have about 190 tokens."""
    return parse_length(text, sharegpt=(190.0, 0.9), low=4, high=1024)


def parse_vocab_range(text: str) -> tuple[int, int]:
    """`1000:30000` as (1000, 30000): ids are drawn from the first up to, not including, the second.

    Raises: ValueError.
    """
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise ValueError(f"{text!r} is not a range of token ids: give FIRST:END")
    return int(match[1]), int(match[2])


def make_requests(rng: random.Random, num_requests: int, input_len: Length, output_len: Length, shared_prefix: int,
                  vocab_range: tuple[int, int], as_text: bool) -> list[Request]:
    """`shared_prefix` tokens that all prompts begin with, then `input_len` of each request's own.

    Token ids, so that every server gets the same prompt whatever its tokenizer; with `as_text` words instead of
    tokens, for endpoints that take only text.
    """
    def draw(num_tokens: int) -> list[str] | list[int]:
        if as_text:
            return rng.choices(WORDS, k=num_tokens)
        return [rng.randrange(*vocab_range) for _ in range(num_tokens)]

    prefix = draw(shared_prefix)
    requests = []
    for _ in range(num_requests):
        tokens = [*prefix, *draw(input_len(rng))]
        prompt: Prompt = " ".join(map(str, tokens)) if as_text else tuple(map(int, tokens))
        requests.append(Request(prompt, output_len(rng)))
    return requests


def arrival_times(rng: random.Random, num_requests: int, request_rate: float, burstiness: float) -> list[float]:
    """Seconds after the start at which each request is due, the first gap included.

    The gaps are gamma distributed with mean 1/rate: burstiness 1 is a Poisson process, less is burstier, more is more
    even. They are scaled so that the last request is due at num_requests/rate exactly and runs of different seeds offer
    the same load, as vLLM does. An infinite rate: all at once.
    """
    if math.isinf(request_rate):
        return [0.0] * num_requests
    due_s = 0.0
    times = []
    for _ in range(num_requests):
        due_s += rng.gammavariate(burstiness, 1.0 / (request_rate * burstiness))
        times.append(due_s)
    scale = num_requests / request_rate / due_s if due_s > 0 else 1.0
    return [time_s * scale for time_s in times]
