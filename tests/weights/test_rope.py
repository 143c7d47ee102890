"""RoPE scaling against plain loops over the published formulas."""
from __future__ import annotations

import math
from typing import Any

import pytest

from weights.rope import RopeSpec, rope_spec

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


def plain(theta: float, head_dim: int) -> list[float]:
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def close(rope: RopeSpec, expected: list[float]) -> bool:
    # As in the reference the exponents are float32; at large bases that shows in the seventh digit.
    return list(rope.inv_freq) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("head_dim", [2, 64, 80, 256])
@pytest.mark.parametrize("theta", [10_000, 500_000.0, 1e6])
def test_default(head_dim: int, theta: float) -> None:
    rope = rope_spec(head_dim, 8192, {"rope_theta": theta})
    assert close(rope, plain(theta, head_dim))
    assert rope.rotary_dim == head_dim
    assert rope.attention_factor == 1.0


def test_linear() -> None:
    rope = rope_spec(64, 8192, {"rope_theta": 1e4, "type": "linear", "factor": 8})
    assert close(rope, [step / 8 for step in plain(1e4, 64)])


def test_llama3() -> None:
    expected = []
    for step in plain(500000.0, 128):
        turns = 8192 * step / (2 * math.pi)         # within the original context
        if turns > 4.0:
            expected.append(step)
        elif turns < 1.0:
            expected.append(step / 8.0)
        else:
            smooth = (turns - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * step / 8.0 + smooth * step)
    assert close(rope_spec(128, 131072, LLAMA3), expected)


def yarn(head_dim: int, theta: float, factor: float, original: int, fast: int, slow: int, whole: bool) -> list[float]:
    def dimension(turns: float) -> float:
        return head_dim / 2 * math.log(original / (turns * 2 * math.pi), theta)

    low, high = dimension(fast), dimension(slow)
    low, high = (math.floor(low), math.ceil(high)) if whole else (low, high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = []
    for i, step in enumerate(plain(theta, head_dim)):
        share = min(max((i - low) / (high - low), 0), 1)
        steps.append(step / factor * share + step * (1 - share))
    return steps


def test_yarn() -> None:
    rope = rope_spec(128, 32768, YARN)
    assert close(rope, yarn(128, 1e6, 4.0, 32768, 32, 1, True))
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_with_everything_said() -> None:
    rope = rope_spec(64, 131072, {"rope_type": "yarn", "rope_theta": 150000.0, "factor": None, "beta_fast": 16,
                                  "beta_slow": 2, "truncate": False, "original_max_position_embeddings": 4096,
                                  "mscale": 0.707, "mscale_all_dim": 1.4})
    assert close(rope, yarn(64, 150000.0, 32.0, 4096, 16, 2, False))
    assert rope.attention_factor == pytest.approx((0.0707 * math.log(32) + 1) / (0.14 * math.log(32) + 1))


def test_yarn_takes_a_given_attention_factor() -> None:
    assert rope_spec(128, 32768, YARN | {"attention_factor": 1.25}).attention_factor == 1.25


def test_the_original_context_defaults_to_the_whole_one() -> None:
    short = {name: value for name, value in YARN.items() if name != "original_max_position_embeddings"}
    assert rope_spec(128, 32768, short) == rope_spec(128, 32768, YARN)


@pytest.mark.parametrize(("parameters", "cause"), [
    ({"rope_type": "dynamic", "factor": 2.0}, "unsupported rope_type 'dynamic'"),
    ({"type": "longrope"}, "unsupported rope_type 'longrope'"),
    ({"rope_type": ["yarn"]}, "unsupported rope_type"),
    ({"mrope_section": [16, 24, 24]}, "unsupported RoPE parameter 'mrope_section'"),
    ({"partial_rotary_factor": 0.5}, r"unsupported partial_rotary_factor 0\.5"),
    ({"rope_theta": None}, "rope_theta is missing"),
    ({"rope_theta": 0}, "rope_theta must be"),
    ({"rope_theta": 1}, "rope_theta must be above 1"),
    ({"rope_theta": "10000"}, "rope_theta must be"),
    ({"rope_theta": True}, "rope_theta must be"),
    ({"rope_theta": math.inf}, "rope_theta must be"),
    ({"rope_theta": math.nan}, "rope_theta must be"),
    ({"rope_type": "linear"}, "factor is missing"),
    ({"rope_type": "linear", "factor": -1}, "factor must be"),
    (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor"),
    (LLAMA3 | {"high_freq_factor": None}, "high_freq_factor is missing"),
    (YARN | {"beta_fast": 0}, "beta_fast must be"),
])
def test_refused(parameters: dict[str, Any], cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        rope_spec(64, 4096, {"rope_theta": 1e4} | parameters)
