"""The angular steps of rotary position embeddings, with the scaling methods of published checkpoints.

Rounded to float32 where the reference (transformers) rounds: a frequency times a position of some ten thousands shows
the last bit.

Source: RoPE, arXiv:2104.09864 §3.4; linear scaling ("position interpolation"), arXiv:2306.15595; YaRN, arXiv:2309.00071
§3; llama3: the Llama 3.1 model card's code. Parameter names and defaults are those of config.json's `rope_parameters`
(earlier `rope_scaling`).
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of a layer, half-split ("neox") pairing: dimension i turns with i + rotary_dim / 2."""
    inv_freq: tuple[float, ...]             # rotary_dim / 2 angular steps a position, scaling already applied
    attention_factor: float = 1.0           # multiplies cos and sin (YaRN)

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


# What config.json may say about RoPE. A name that is not here might change the maths, so it is refused.
_KNOWN = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "truncate", "finetuned",
}


def rope_spec(head_dim: int, max_position: int, parameters: Mapping[str, Any]) -> RopeSpec:
    """The rotation that `parameters` describe, for heads of `head_dim` that turn whole.

    `parameters` are those of config.json, `rope_theta` among them; `rope_type` (or `type`) is default, linear, llama3
    or yarn. `max_position` stands in for an `original_max_position_embeddings` that is not given.

    Raises: ValueError naming the parameter if a type or a parameter is not supported, missing or out of range.
    """
    unknown = sorted(parameters.keys() - _KNOWN)
    if unknown:
        raise ValueError(f"unsupported RoPE parameter {unknown[0]!r}")
    if parameters.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"unsupported partial_rotary_factor {parameters['partial_rotary_factor']!r}: "
                         "only heads that rotate whole are supported")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = _positive(parameters, "rope_theta")
    if theta <= 1:
        raise ValueError(f"RoPE parameter rope_theta must be above 1, not {theta}")
    inv_freq = inverse_frequencies(theta, head_dim)
    if kind == "default":
        return _spec(inv_freq)
    if kind == "linear":
        return _spec(inv_freq / np.float32(_positive(parameters, "factor")))
    if kind == "llama3":
        return _spec(_llama3(inv_freq, max_position, parameters))
    if kind == "yarn":
        return _yarn(inv_freq, theta, max_position, parameters)
    raise ValueError(f"unsupported rope_type {kind!r} (default, linear, llama3 and yarn are supported)")


def inverse_frequencies(theta: float, head_dim: int) -> Floats:
    """theta ** (-2i / head_dim) for i < head_dim / 2."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power in float64, rounded: equal on every machine, unlike float32 powers.
    return np.float32(1) / np.power(theta, exponents.astype(np.float64)).astype(np.float32)


def _spec(inv_freq: Floats, attention_factor: float = 1.0) -> RopeSpec:
    return RopeSpec(tuple(inv_freq.tolist()), attention_factor)


def _positive(parameters: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A parameter that must be a sensible number above 0; missing or null means `default`, if there is one."""
    value = parameters.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"RoPE parameter {name} is missing")
    if type(value) not in (int, float) or not 1e-6 <= value <= 1e12:
        raise ValueError(f"RoPE parameter {name} must be a number from 1e-6 to 1e12, not {value!r}")
    return float(value)


def _llama3(inv_freq: Floats, max_position: int, parameters: Mapping[str, Any]) -> Floats:
    """Long waves are slowed down by `factor`, short ones kept, those between blended."""
    factor = _positive(parameters, "factor")
    low = _positive(parameters, "low_freq_factor")
    high = _positive(parameters, "high_freq_factor")
    if not low < high:
        raise ValueError(f"RoPE parameter low_freq_factor {low} must be below high_freq_factor {high}")
    original = _positive(parameters, "original_max_position_embeddings", max_position)
    wavelength = np.float32(2 * math.pi) / inv_freq
    blend = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * inv_freq / np.float32(factor) + blend * inv_freq
    scaled = np.where(wavelength > original / low, inv_freq / np.float32(factor), blended)
    return np.where(wavelength < original / high, inv_freq, scaled)


def _yarn(inv_freq: Floats, theta: float, max_position: int, parameters: Mapping[str, Any]) -> RopeSpec:
    """Fast dimensions are kept, slow ones interpolated by `factor`, a linear ramp between; cos and sin grow."""
    original = _positive(parameters, "original_max_position_embeddings", max_position)
    factor = _positive(parameters, "factor", max_position / original)
    beta_fast = _positive(parameters, "beta_fast", 32)
    beta_slow = _positive(parameters, "beta_slow", 1)
    head_dim = 2 * len(inv_freq)

    def dimension(rotations: float) -> float:
        """The dimension that turns so often within the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(len(inv_freq), dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    scaled = inv_freq / np.float32(factor) * ramp + inv_freq * (1 - ramp)

    if parameters.get("attention_factor") is not None:
        return _spec(scaled, _positive(parameters, "attention_factor"))
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return _spec(scaled, yarn_attention_factor(factor, _positive(parameters, "mscale"))
                     / yarn_attention_factor(factor, _positive(parameters, "mscale_all_dim")))
    return _spec(scaled, yarn_attention_factor(factor))


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies cos and sin with, for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
