from __future__ import annotations

import math
import random
import statistics

import pytest

from tools.bench_workloads import (
    WORDS,
    arrival_times,
    input_length,
    make_requests,
    output_length,
    parse_length,
    parse_vocab_range,
)


def test_fixed_and_uniform_lengths() -> None:
    rng = random.Random(1)
    assert {input_length("128")(rng) for _ in range(50)} == {128}
    assert {output_length("3:5")(rng) for _ in range(200)} == {3, 4, 5}


@pytest.mark.parametrize("text", ["", "0", "-1", "5:3", "0:4", "1.5", "a", "1:2:3", " 4", "4\n", "9" * 12, "ShareGPT"])
def test_bad_lengths(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length"):
        input_length(text)


def test_sharegpt_is_log_normal_with_the_given_mean_and_within_bounds() -> None:
    rng = random.Random(7)
    wide = parse_length("sharegpt", sharegpt=(220.0, 1.1), low=1, high=10**9)
    lengths = [wide(rng) for _ in range(20_000)]
    assert statistics.mean(lengths) == pytest.approx(220, rel=0.05)
    # The logarithm of a log-normal is normal: here with mean ln(220) - 1.1²/2 and deviation 1.1.
    logs = [math.log(length) for length in lengths]
    assert statistics.mean(logs) == pytest.approx(math.log(220) - 0.605, abs=0.05)
    assert statistics.stdev(logs) == pytest.approx(1.1, rel=0.05)
    bounded = [input_length("sharegpt")(rng) for _ in range(5000)]
    assert min(bounded) >= 4
    assert max(bounded) == 1024


@pytest.mark.parametrize("text", ["", "5", "5:5", "6:5", "-1:5", "a:b", "1:2:3"])
def test_bad_vocab_ranges(text: str) -> None:
    with pytest.raises(ValueError, match="range of token ids"):
        parse_vocab_range(text)


def test_prompts_share_what_they_should_and_nothing_else() -> None:
    requests = make_requests(random.Random(3), 20, input_length("10:30"), output_length("5"), 50, (100, 5000), False)
    prompts = [request.prompt for request in requests]
    assert len(requests) == 20
    assert {request.output_len for request in requests} == {5}
    assert all(isinstance(prompt, tuple) and 60 <= len(prompt) <= 80 for prompt in prompts)
    assert all(100 <= token_id < 5000 for prompt in prompts for token_id in prompt if isinstance(token_id, int))
    assert len({prompt[:50] for prompt in prompts}) == 1
    assert len({prompt[50:54] for prompt in prompts}) == 20


def test_the_same_seed_gives_the_same_requests_and_another_gives_others() -> None:
    def make(seed: int, as_text: bool) -> object:
        return make_requests(random.Random(seed), 4, input_length("sharegpt"), output_length("sharegpt"), 3,
                             parse_vocab_range("1000:30000"), as_text)
    assert make(1, False) == make(1, False)
    assert make(1, False) != make(2, False)
    assert make(1, True) == make(1, True)


def test_text_prompts_have_a_word_a_token() -> None:
    request, = make_requests(random.Random(3), 1, input_length("12"), output_length("5"), 4, (0, 1), True)
    assert isinstance(request.prompt, str)
    words = request.prompt.split(" ")
    assert len(words) == 16
    assert set(words) <= set(WORDS)
    assert len(set(WORDS)) == len(WORDS)


def test_all_at_once() -> None:
    assert arrival_times(random.Random(1), 3, math.inf, 1.0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_offer_the_rate_with_gamma_gaps(burstiness: float, variation: float) -> None:
    times = arrival_times(random.Random(5), 20_000, 50.0, burstiness)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400.0)            # 20,000 requests at 50 a second, exactly
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    # A gamma variable of shape k has deviation / mean = 1 / sqrt(k).
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.05)
