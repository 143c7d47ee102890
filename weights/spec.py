"""What a model is: the numbers that `cuda/model.py` needs, read from config.json or GGUF metadata.

Whatever would change the maths and is not supported is refused by name, never ignored.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weights.gguf import Gguf
from weights.rope import RopeSpec as RopeSpec
from weights.rope import rope_spec, yarn_attention_factor


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
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False                   # RMSNorm of each head of q and k before RoPE
    post_norms: bool = False                # RMSNorm of attention's and the FFN's output before the residual sum
    tied_head: bool = False                 # the head is the embedding, unless the file holds another one

    @property
    def num_layers(self) -> int:
        return len(self.layers)


# Hugging Face: model_type -> the class that config.json must name.
_HF_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
# GGUF: general.architecture -> our name (Mistral models are "llama" there).
_GGUF_ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text",
}
_GEMMA = ("gemma2", "gemma3_text")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LOCAL_ROPE_THETA = 10_000.0                # of Gemma 3's layers with a window

# Fields of config.json that change the maths in ways that are not supported: only null and the value here, which
# switches them off, may stand there.
_OFF: dict[str, Any] = {
    "quantization_config": None,
    "mlp_bias": False,
    "partial_rotary_factor": 1,
    "use_mrope": False,
    "rope_interleaved": False,
    "use_bidirectional_attention": False,
    "num_experts": 0, "num_local_experts": 0, "n_routed_experts": 0,
    "q_lora_rank": 0, "kv_lora_rank": 0,
    "no_rope_layers": None,
    "logit_scale": 1, "logits_scaling": 1, "embedding_multiplier": 1, "residual_multiplier": 1,
    "attention_multiplier": None,
}


class _Config:
    """config.json with typed look-ups. A null counts as a missing field; errors name the field."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def get(self, name: str, default: Any = None) -> Any:
        value = self.fields.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, most: int = 1 << 31) -> int:
        """An integer from 1 to `most`."""
        return _count(name, self.get(name, default), most)

    def number(self, name: str, default: float) -> float:
        return _number(name, self.get(name, default))

    def optional_number(self, name: str, default: float | None) -> float | None:
        """A number, or None for none. NOTE: here null means none, and only a missing field means `default`."""
        value = self.fields.get(name, default)
        return None if value is None else _number(name, value)

    def text(self, name: str, default: str) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a string, not {value!r}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, not {value!r}")
        return value


def _count(what: str, value: Any, most: int = 1 << 31) -> int:
    if value is None:
        raise ValueError(f"{what} is missing")
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{what} must be an integer from 1 to {most}, not {value!r}")
    return value


def _number(what: str, value: Any) -> float:
    """A finite number above 0."""
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{what} must be a number above 0, not {value!r}")
    return float(value)


def _object(what: str, value: Any) -> dict[str, Any]:
    """A JSON object; a null counts as an empty one."""
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{what} must be an object, not {value!r}")
    return value or {}


def from_hf_config(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json describes, in the style of published checkpoints or of transformers 5.

    Sizes must be given; other fields that are missing have the defaults of transformers' configuration classes.

    Raises: ValueError naming the architecture or the field that is not supported, missing or out of range.
    """
    architecture = _hf_architecture(config)
    gemma = architecture in _GEMMA
    fields = _Config(config)
    _refuse_unsupported(fields, architecture)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads", most=1 << 16)
    # Only Llama's configuration may leave it out; a null means the same everywhere.
    may_lack_kv_heads = architecture == "llama" or "num_key_value_heads" in config
    num_kv_heads = fields.integer("num_key_value_heads", num_heads if may_lack_kv_heads else None, most=1 << 16)
    head_dim = fields.integer("head_dim", 256 if gemma else 128 if architecture == "qwen3"
                              else max(1, hidden_size // num_heads), most=1 << 16)
    max_position = fields.integer("max_position_embeddings")
    attention_bias = architecture in ("llama", "qwen3", *_GEMMA) and fields.flag("attention_bias")
    activation = fields.text("hidden_activation" if gemma else "hidden_act", "gelu_pytorch_tanh" if gemma else "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"unsupported activation {activation!r} ({', '.join(_ACTIVATIONS)} are supported)")
    windows = _hf_windows(fields, architecture, fields.integer("num_hidden_layers", most=1000))
    full, sliding = _hf_ropes(fields, architecture, head_dim, max_position)
    return _checked(ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position=max_position,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        layers=tuple(LayerSpec(window, full if window is None else sliding) for window in windows),
        attention_scale=(fields.number("query_pre_attn_scalar", 256) if gemma else head_dim) ** -0.5,
        activation=_ACTIVATIONS[activation],
        attention_softcap=fields.optional_number("attn_logit_softcapping", 50.0) if architecture == "gemma2" else None,
        final_softcap=(fields.optional_number("final_logit_softcapping", 30.0 if architecture == "gemma2" else None)
                       if gemma else None),
        embedding_scale=math.sqrt(hidden_size) if gemma else 1.0,
        qkv_bias=attention_bias or architecture == "qwen2",
        o_bias=attention_bias,
        qk_norm=architecture in ("qwen3", "gemma3_text"),
        post_norms=gemma,
        tied_head=fields.flag("tie_word_embeddings", gemma),
    ))


def _hf_architecture(config: Mapping[str, Any]) -> str:
    architecture = config.get("model_type")
    classes = config.get("architectures") or []
    if not isinstance(architecture, str) or architecture not in _HF_CLASSES:
        raise ValueError(f"unsupported architecture: model_type {architecture!r}, architectures {classes!r} "
                         f"(supported model types: {', '.join(_HF_CLASSES)})")
    if classes not in ([], [_HF_CLASSES[architecture]]):
        raise ValueError(f"unsupported architectures {classes!r} for model_type {architecture!r} "
                         f"(supported: {_HF_CLASSES[architecture]})")
    return architecture


def _refuse_unsupported(fields: _Config, architecture: str) -> None:
    off = dict(_OFF)
    if architecture not in _GEMMA:
        off |= {"final_logit_softcapping": None, "query_pre_attn_scalar": None}
    if architecture != "gemma2":
        off["attn_logit_softcapping"] = None
    if architecture == "llama":
        off["sliding_window"] = None
    if architecture == "mistral":
        off["attention_bias"] = False
    for name, neutral in off.items():
        value = fields.get(name)
        if value is not None and (neutral is None or value != neutral):
            raise ValueError(f"unsupported {name} {value!r} for model_type {architecture!r}")


def _hf_windows(fields: _Config, architecture: str, num_layers: int) -> list[int | None]:
    """The attention window of each layer."""
    if architecture in _GEMMA:
        uses_window = True
    elif architecture == "mistral":
        uses_window = fields.fields.get("sliding_window", 4096) is not None
    else:
        uses_window = architecture != "llama" and fields.flag("use_sliding_window")
    window = fields.integer("sliding_window", 4096) if uses_window else None

    if architecture in ("llama", "mistral"):
        windows = [window] * num_layers
    elif architecture in ("qwen2", "qwen3"):
        first = fields.get("max_window_layers", 28)
        if type(first) is not int:
            raise ValueError(f"max_window_layers must be an integer, not {first!r}")
        windows = [window if layer >= first else None for layer in range(num_layers)]
    else:
        period = 2 if architecture == "gemma2" else fields.integer("sliding_window_pattern", 6)
        windows = _every_nth_full(window, period, num_layers)

    layer_types = fields.get("layer_types")
    if layer_types is None:
        return windows
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ValueError(f"layer_types must list {num_layers} layers")
    named = {"full_attention": None, "sliding_attention": window}
    for name in layer_types:
        if not isinstance(name, str) or name not in named:
            raise ValueError(f"unsupported layer type {name!r} in layer_types ({', '.join(named)} are supported)")
        if name == "sliding_attention" and window is None:
            raise ValueError("layer_types names sliding_attention, but the model has no sliding_window")
    if architecture in ("llama", "mistral") and [named[name] for name in layer_types] != windows:
        raise ValueError(f"unsupported layer_types for model_type {architecture!r}")
    return [named[name] for name in layer_types]


def _every_nth_full(window: int | None, period: int, num_layers: int) -> list[int | None]:
    """Gemma's pattern: period - 1 layers with a window, then one without."""
    return [window if (layer + 1) % period else None for layer in range(num_layers)]


def _hf_ropes(fields: _Config, architecture: str, head_dim: int, max_position: int) -> tuple[RopeSpec, RopeSpec]:
    """The rotation of layers without and with a window."""
    new = _object("rope_parameters", fields.get("rope_parameters"))
    old = _object("rope_scaling", fields.get("rope_scaling"))
    if new and old and new != old:
        raise ValueError("rope_parameters and rope_scaling differ")

    def rope(parameters: Mapping[str, Any], theta: float) -> RopeSpec:
        return rope_spec(head_dim, max_position, {"rope_theta": theta, **parameters})

    if architecture != "gemma3_text":
        parameters = dict(new or old)
        original = fields.get("original_max_position_embeddings")
        if original is not None:            # beside the parameters it wins over the one among them
            parameters["original_max_position_embeddings"] = original
        both = rope(parameters, fields.get("rope_theta", 10_000.0))
        return both, both
    if not new.keys() <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"rope_parameters of gemma3_text must be given by layer type, not {new!r}")
    full = _object("rope_parameters.full_attention", new.get("full_attention")) if new else old
    sliding = _object("rope_parameters.sliding_attention", new.get("sliding_attention"))
    return (rope(full, fields.get("rope_theta", 1_000_000.0)),
            rope(sliding, fields.get("rope_local_base_freq", _LOCAL_ROPE_THETA)))


# Keys that may stand under "ARCHITECTURE." in GGUF metadata. Others may change the maths, so they are refused.
_GGUF_KEYS = {
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.finetuned", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}
_GGUF_MORE_KEYS = {
    "llama": {"attention.sliding_window"},
    "gemma2": {"attention.sliding_window", "attention.sliding_window_pattern", "attn_logit_softcapping",
               "final_logit_softcapping"},
    "gemma3_text": {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa",
                    "final_logit_softcapping"},
}
# Layers of the models whose queries are scaled by hidden_size / num_heads instead of head_dim (both are the 27B):
# GGUF has no key for it, so the reader has to know, as llama.cpp does.
_GGUF_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}


def from_gguf(gguf: Gguf) -> ModelSpec:
    """The model that a GGUF file describes.

    Raises: ValueError naming the file and the architecture, metadata key or tensor that is not supported, missing or
        out of range.
    """
    try:
        return _from_gguf(gguf)
    except ValueError as error:             # what the reader itself raises names the file already
        raise error if str(error).startswith(f"{gguf.path}: ") else ValueError(f"{gguf.path}: {error}") from None


def _from_gguf(gguf: Gguf) -> ModelSpec:
    if (gguf.get("split.count", int) or 1) > 1:
        raise ValueError("one file of a split GGUF; split files are not supported")
    prefix = gguf.require("general.architecture", str)
    if prefix not in _GGUF_ARCHITECTURES:
        raise ValueError(f"unsupported architecture {prefix!r} (supported: {', '.join(_GGUF_ARCHITECTURES)})")
    architecture = _GGUF_ARCHITECTURES[prefix]
    gemma = architecture in _GEMMA
    known = _GGUF_KEYS | _GGUF_MORE_KEYS.get(architecture, set())
    for key in gguf.keys():
        if key.startswith(f"{prefix}.") and key.removeprefix(f"{prefix}.") not in known:
            raise ValueError(f"unsupported metadata key {key}")

    def integer(name: str, default: int | None = None, most: int = 1 << 31) -> int:
        value = gguf.get(f"{prefix}.{name}", int)
        return _count(f"metadata key {prefix}.{name}", default if value is None else value, most)

    def number(name: str, default: float | None = None) -> float:
        value = gguf.get(f"{prefix}.{name}", float)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"metadata key {prefix}.{name} is missing")
        return _number(f"metadata key {prefix}.{name}", value)

    hidden_size = integer("embedding_length")
    num_heads = integer("attention.head_count", most=1 << 16)
    num_layers = integer("block_count", most=1000)
    head_dim = integer("attention.key_length", max(1, hidden_size // num_heads), most=1 << 16)
    for name in ("attention.value_length", "rope.dimension_count"):
        if integer(name, head_dim) != head_dim:
            raise ValueError(f"unsupported {prefix}.{name} {integer(name)}: it differs from the head's {head_dim}")
    max_position = integer("context_length")
    embedding = gguf.shapes.get("token_embd.weight", ())
    if len(embedding) != 2 or embedding[0] != integer("vocab_size", embedding[0]):
        raise ValueError(f"tensor token_embd.weight is missing or has a bad shape {embedding}")

    windows: list[int | None] = [None] * num_layers
    if gemma:
        period = integer("attention.sliding_window_pattern", 2 if architecture == "gemma2" else 6)
        windows = _every_nth_full(integer("attention.sliding_window"), period, num_layers)
    elif f"{prefix}.attention.sliding_window" in gguf:
        windows = [integer("attention.sliding_window")] * num_layers
    full = _gguf_rope(gguf, prefix, head_dim, max_position)
    sliding = full
    if architecture == "gemma3_text":
        theta = number("rope.freq_base_swa", _LOCAL_ROPE_THETA)
        sliding = rope_spec(head_dim, max_position, {"rope_theta": theta})
    query_size = hidden_size / num_heads if num_layers == _GGUF_27B_LAYERS.get(architecture) else head_dim
    return _checked(ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=integer("attention.head_count_kv", num_heads, most=1 << 16),
        head_dim=head_dim,
        ffn_size=integer("feed_forward_length"),
        vocab_size=embedding[0],
        max_position=max_position,
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        layers=tuple(LayerSpec(window, full if window is None else sliding) for window in windows),
        attention_scale=query_size ** -0.5,
        activation="gelu_tanh" if gemma else "silu",
        attention_softcap=number("attn_logit_softcapping") if architecture == "gemma2" else None,
        final_softcap=number("final_logit_softcapping") if f"{prefix}.final_logit_softcapping" in gguf
        or architecture == "gemma2" else None,
        embedding_scale=math.sqrt(hidden_size) if gemma else 1.0,
        # Of Llama-like models some have biases, and no key says so.
        qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in gguf.shapes,
        o_bias="blk.0.attn_output.bias" in gguf.shapes,
        qk_norm=architecture in ("qwen3", "gemma3_text"),
        post_norms=gemma,
        tied_head="output.weight" not in gguf.shapes,
    ))


def _gguf_rope(gguf: Gguf, prefix: str, head_dim: int, max_position: int) -> RopeSpec:
    """The rotation of layers without a window. Raises: ValueError naming the metadata key or tensor."""
    def number(name: str) -> float | None:
        return gguf.get(f"{prefix}.rope.{name}", float)

    kind = gguf.get(f"{prefix}.rope.scaling.type", str) or "none"
    base = number("freq_base")
    parameters: dict[str, Any] = {"rope_theta": 10_000.0 if base is None else base}
    if kind in ("linear", "yarn"):
        parameters |= {"rope_type": kind, "factor": gguf.require(f"{prefix}.rope.scaling.factor", float)}
    elif kind != "none":
        raise ValueError(f"unsupported {prefix}.rope.scaling.type {kind!r} (none, linear and yarn are supported)")
    if kind == "yarn":
        factor = number("scaling.attn_factor")
        parameters |= {
            "original_max_position_embeddings": gguf.get(f"{prefix}.rope.scaling.original_context_length", int),
            "beta_fast": number("scaling.yarn_beta_fast"),
            "beta_slow": number("scaling.yarn_beta_slow"),
            "attention_factor": yarn_attention_factor(parameters["factor"]) * (1.0 if factor is None else factor),
        }
    rope = rope_spec(head_dim, max_position, parameters)
    if "rope_freqs.weight" not in gguf.shapes:
        return rope
    # Llama 3's scaling: its converter stores what each wavelength is multiplied by.
    factors = gguf.vector("rope_freqs.weight")
    if kind != "none" or factors.shape != (head_dim // 2,) or not ((factors > 0) & (factors < math.inf)).all():
        raise ValueError(f"tensor rope_freqs.weight of shape {factors.shape} beside RoPE scaling {kind!r}: "
                         f"{head_dim // 2} positive factors and no other scaling are supported")
    return RopeSpec(tuple((np.asarray(rope.inv_freq, np.float32) / factors).tolist()))


def _checked(spec: ModelSpec) -> ModelSpec:
    """The spec itself, if its numbers fit together."""
    if spec.num_heads % spec.num_kv_heads:
        raise ValueError(f"{spec.num_heads} query heads are not a multiple of {spec.num_kv_heads} key-value heads")
    if spec.head_dim % 2:
        raise ValueError(f"head size {spec.head_dim} is odd, rotary embeddings need an even one")
    return spec
