"""What a model is: the numbers that `cuda/model.py` needs, read from config.json or GGUF metadata."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of a layer, half-split ("neox") pairing: dimension i turns with i + rotary_dim / 2."""
    inv_freq: tuple[float, ...]             # rotary_dim / 2 angular steps a position, scaling already applied
    attention_factor: float = 1.0           # multiplies cos and sin (YaRN)

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs from layer to layer."""
    window: int | None                      # query i sees keys j with 0 <= i - j < window; None sees all
    rope: RopeSpec | None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One transformer. Everything that an architecture decides is a value here, not a branch in the model."""
    architecture: str                       # "llama", "mistral", "qwen2", "gemma3_text", …
    hidden_size: int                        # C
    num_heads: int                          # H
    num_kv_heads: int                       # G
    head_dim: int                           # D
    ffn_size: int                           # F
    vocab_size: int                         # V
    max_position: int                       # the context the model was trained for
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    attention_scale: float                  # usually 1 / sqrt(D)
    activation: str = "silu"                # of the gate: "silu" or "gelu_tanh"
    attention_softcap: float | None = None  # cap * tanh(score / cap), before the mask
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    qk_norm: bool = False                   # RMSNorm of each head of q and k before RoPE
    post_norms: bool = False                # RMSNorm of attention's and the FFN's output before the residual sum
    tied_head: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)
