"""From model files to `ModelWeights`: names mapped, q/k rows in half-split RoPE order, norms as they multiply.

Sharding over devices belongs here alone.
"""
from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weights.files import read_json
from weights.gguf import Gguf
from weights.quant import Dense, Linear, Weight, take_rows
from weights.safetensors import Checkpoint
from weights.spec import ModelSpec, from_gguf, from_hf_config

logger = logging.getLogger("troupe.weights")

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
    sinks: Vector | None = None             # [H]: a score of each head that joins the softmax and has no value


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    embed: Weight                           # [V, C]
    layers: tuple[LayerWeights, ...]
    norm: Vector                            # [C]
    head: Linear                            # [V, C]; a tied head holds the very object `embed`

    @property
    def nbytes(self) -> int:
        """Memory of all projections; a tied head counts once. (Norms and biases are a few kilobytes.)"""
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        parts = [self.embed, *(part for linear in (*linears, self.head) for part in linear.parts)]
        return sum(part.nbytes for part in {id(part): part for part in parts}.values())


@dataclass(frozen=True, slots=True, eq=False)
class ModelFile:
    """An opened model: read and checked as far as its description; its weights are converted when asked for."""
    path: Path
    spec: ModelSpec
    source: Gguf | Checkpoint

    @property
    def stored_bytes(self) -> int:
        """Bytes of tensor data in the file."""
        return self.source.nbytes

    def weights(self) -> ModelWeights:
        """The model's weights.

        Raises: ValueError naming the file and the tensor that is missing, unknown, of the wrong shape or damaged.
        """
        return _load(self.source, self.spec)


def open_model(path: Path) -> ModelFile:
    """The model in a GGUF file or in a folder of Hugging Face layout (config.json and safetensors).

    Raises: ValueError naming the file and what is missing, damaged or not supported.
    """
    if path.is_file():
        gguf = Gguf(path)
        return ModelFile(path, from_gguf(gguf), gguf)
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    config = path / "config.json"
    fields = read_json(config)
    try:
        spec = from_hf_config(fields)
    except ValueError as error:
        raise ValueError(f"{config}: {error}") from None
    return ModelFile(path, spec, Checkpoint(path))


# Names. A layer's tensors go by their role here: the fields of LayerWeights, with q, k, v, gate and up still apart.

_GGUF_TOP = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
_GGUF_LAYER = {
    "attn_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight", "k": "blk.{}.attn_k.weight", "v": "blk.{}.attn_v.weight",
    "q_bias": "blk.{}.attn_q.bias", "k_bias": "blk.{}.attn_k.bias", "v_bias": "blk.{}.attn_v.bias",
    "q_norm": "blk.{}.attn_q_norm.weight", "k_norm": "blk.{}.attn_k_norm.weight",
    "o": "blk.{}.attn_output.weight", "o_bias": "blk.{}.attn_output.bias",
    "attn_post_norm": "blk.{}.post_attention_norm.weight",
    "ffn_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight", "up": "blk.{}.ffn_up.weight", "down": "blk.{}.ffn_down.weight",
    "ffn_post_norm": "blk.{}.post_ffw_norm.weight",
    "sinks": "blk.{}.attn_sinks.weight",
}
_HF_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_HF_LAYER = {
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight", "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k": "model.layers.{}.self_attn.k_proj.weight", "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v": "model.layers.{}.self_attn.v_proj.weight", "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight", "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight", "o_bias": "model.layers.{}.self_attn.o_proj.bias",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight", "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
    "sinks": "model.layers.{}.self_attn.sinks",
}
# NOTE: with norms after attention and FFN, "post_attention" really is one; elsewhere it is the norm before the FFN.
_HF_POST_NORM_LAYER = _HF_LAYER | {
    "attn_post_norm": "model.layers.{}.post_attention_layernorm.weight",
    "ffn_norm": "model.layers.{}.pre_feedforward_layernorm.weight",
    "ffn_post_norm": "model.layers.{}.post_feedforward_layernorm.weight",
}


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The tensors that each layer of this model has: role -> shape."""
    hidden, ffn = spec.hidden_size, spec.ffn_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q),
        "ffn_norm": (hidden,), "gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn),
    }
    if spec.qkv_bias:
        shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if spec.o_bias:
        shapes["o_bias"] = (hidden,)
    if spec.qk_norm:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    if spec.post_norms:
        shapes |= {"attn_post_norm": (hidden,), "ffn_post_norm": (hidden,)}
    return shapes


def _load(source: Gguf | Checkpoint, spec: ModelSpec) -> ModelWeights:
    is_gguf = isinstance(source, Gguf)
    top = _GGUF_TOP if is_gguf else _HF_TOP
    layer_names = _GGUF_LAYER if is_gguf else _HF_POST_NORM_LAYER if spec.post_norms else _HF_LAYER
    layer_shapes = _layer_shapes(spec)
    if layer_names["sinks"].format(0) in source.shapes:     # no field of either format says so
        layer_shapes["sinks"] = (spec.num_heads,)
    expected = {
        top["embed"]: (spec.vocab_size, spec.hidden_size),
        top["norm"]: (spec.hidden_size,),
        **{layer_names[role].format(layer): shape
           for layer in range(spec.num_layers) for role, shape in layer_shapes.items()},
    }
    if top["head"] in source.shapes or not spec.tied_head:
        expected[top["head"]] = (spec.vocab_size, spec.hidden_size)
    _check_names(source, expected)

    # Gemma multiplies by 1 + w. Its GGUF files store the sum, its safetensors w.
    norm_shift = np.float32(1 if spec.architecture.startswith("gemma") and not is_gguf else 0)
    # NOTE: GGUF's Llama converter permutes the rows of q and k, so that pairs of neighbours rotate; others do not.
    interleaved = is_gguf and spec.architecture == "llama"

    def load_layer(layer: int) -> LayerWeights:
        weights: dict[str, Weight] = {}
        vectors: dict[str, Vector] = {}
        for role, shape in layer_shapes.items():
            name = layer_names[role].format(layer)
            if len(shape) == 2:
                weights[role] = source.weight(name)
            elif role.endswith("norm"):
                vectors[role] = source.vector(name) + norm_shift
            else:
                vectors[role] = source.vector(name)
        if interleaved:
            for role in "qk":
                rows = _half_split_rows(layer_shapes[role][0], spec.head_dim)
                weights[role] = take_rows(weights[role], rows)
                if spec.qkv_bias:
                    vectors[f"{role}_bias"] = vectors[f"{role}_bias"][rows]
        qkv_bias = np.concatenate([vectors[f"{role}_bias"] for role in "qkv"]) if spec.qkv_bias else None
        return LayerWeights(
            attn_norm=vectors["attn_norm"],
            qkv=Linear((weights["q"], weights["k"], weights["v"]), qkv_bias),
            o=Linear((weights["o"],), vectors.get("o_bias")),
            ffn_norm=vectors["ffn_norm"],
            gate_up=Linear((weights["gate"], weights["up"])),
            down=Linear((weights["down"],)),
            q_norm=vectors.get("q_norm"),
            k_norm=vectors.get("k_norm"),
            attn_post_norm=vectors.get("attn_post_norm"),
            ffn_post_norm=vectors.get("ffn_post_norm"),
            sinks=vectors.get("sinks"),
        )

    embed = source.weight(top["embed"])
    head = embed
    if top["head"] in source.shapes:
        head = source.weight(top["head"])
        if spec.tied_head and _equal(head, embed):
            head = embed
        elif spec.tied_head:
            logger.warning("%s: tie_word_embeddings is true, but %s differs from the embedding: it is used as the head",
                           source.path, top["head"])
    return ModelWeights(
        embed=embed,
        layers=tuple(load_layer(layer) for layer in range(spec.num_layers)),
        norm=source.vector(top["norm"]) + norm_shift,
        head=Linear((head,)),
    )


def _check_names(source: Gguf | Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises: ValueError naming tensors that are missing, of another shape, or not part of the model."""
    for name, shape in expected.items():
        if name not in source.shapes:
            raise ValueError(f"{source.path}: tensor {name} is missing")
        if source.shapes[name] != shape:
            raise ValueError(f"{source.path}: tensor {name} has shape {source.shapes[name]}, "
                             f"the model's description asks for {shape}")
    # Not weights: frequencies that the description has already given.
    unknown = sorted(name for name in source.shapes.keys() - expected.keys()
                     if name != "rope_freqs.weight" and not name.endswith(".rotary_emb.inv_freq"))
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ValueError(f"{source.path}: tensors that are not part of the model: {', '.join(unknown[:3])}{more}")


def _half_split_rows(num_rows: int, head_dim: int) -> NDArray[np.intp]:
    """Where to take the rows from, so that of each head the even rows come first and the odd ones after them."""
    return np.arange(num_rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _equal(one: Weight, other: Weight) -> bool:
    """Whether two weights are stored alike, value by value."""
    return (isinstance(one, Dense) and isinstance(other, Dense) and one.is_bf16 == other.is_bf16
            and np.array_equal(one.ordered(), other.ordered()))
