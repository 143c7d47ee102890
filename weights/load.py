"""From model files to `ModelWeights`: names mapped, q/k rows in half-split RoPE order, norms as they multiply.

Sharding over devices belongs here alone.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weights.quant import Linear, Weight

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One transformer block. Norm weights are stored as they multiply (Gemma's 1 + w is already added)."""
    attn_norm: Vector                       # [C]
    qkv: Linear                             # [(H + 2G) D, C]: q, k, v stacked
    o: Linear                               # [C, H D]
    ffn_norm: Vector                        # [C]
    gate_up: Linear                         # [2F, C]: gate, up stacked
    down: Linear                            # [C, F]
    q_norm: Vector | None = None            # [D]
    k_norm: Vector | None = None            # [D]
    attn_post_norm: Vector | None = None    # [C]
    ffn_post_norm: Vector | None = None     # [C]


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    embed: Weight                           # [V, C]
    layers: tuple[LayerWeights, ...]
    norm: Vector                            # [C]
    head: Linear                            # [V, C]; a tied head holds the very object `embed`
