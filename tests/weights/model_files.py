"""Model files for tests: GGUF written through the `gguf` package, safetensors through its own library."""
from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors import deserialize
from safetensors.numpy import save_file

GOLDEN_MODELS = Path(__file__).parents[1] / "golden" / "models"
GOLDEN_NAMES = ["llama", "llama-tied-rope3", "llama-linear", "llama-yarn", "mistral-window", "qwen2", "qwen3", "gemma2",
                "gemma3"]
QType = gguf.GGMLQuantizationType

# Metadata that a GGUF reader needs and its key under "ARCHITECTURE."; the rest of config.json is written by hand below.
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "head_dim": "attention.key_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
_PLAIN_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(path: Path, architecture: str, metadata: Mapping[str, Any],
               tensors: Mapping[str, tuple[NDArray[Any], QType]]) -> Path:
    """A GGUF file. Integers become uint32, floats float32. Quantised tensors are given as bytes [N, row bytes]."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_folder(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor of a golden model (bf16) as float32, through the safetensors library."""
    read: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = deserialize
    return {name: (np.frombuffer(entry["data"], "<u2").astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
            for name, entry in read((folder / "model.safetensors").read_bytes())}


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]],
                 file: str = "model.safetensors") -> Path:
    """A Hugging Face folder of float32 tensors; further calls with other file names add shards."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / file)
    return folder


def refusal(action: Callable[[], object]) -> str | None:
    """The text of the ValueError that `action` ends with, if any. Other exceptions pass."""
    try:
        action()
    except ValueError as error:
        return str(error)
    return None


def golden_config(name: str) -> dict[str, Any]:
    return dict(json.loads((GOLDEN_MODELS / name / "config.json").read_text()))


def golden_as_gguf(name: str, path: Path, kind: QType = QType.F32, more_metadata: Mapping[str, Any] | None = None,
                   more_tensors: Mapping[str, tuple[NDArray[Any], QType]] | None = None) -> Path:
    """A golden model as its GGUF converter would write it: q and k of Llama permuted, Gemma's norms with the 1 added.

    `kind` is the type of the matrices whose rows its block divides.
    """
    config = golden_config(name)
    architecture = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    gemma = architecture.startswith("gemma")
    names = _NAMES | (_GEMMA_NORMS if gemma else _PLAIN_NORMS)
    metadata = {f"{architecture}.{key}": config[field] for field, key in _KEYS.items() if config.get(field) is not None}
    rope = config.get("rope_parameters") or {}
    metadata[f"{architecture}.rope.freq_base"] = float(config.get("rope_theta") or rope["rope_theta"])
    if config.get("sliding_window") is not None:
        metadata[f"{architecture}.attention.sliding_window"] = config["sliding_window"]
    if "head_dim" in config:
        metadata[f"{architecture}.attention.value_length"] = config["head_dim"]

    tensors: dict[str, tuple[NDArray[Any], QType]] = {}
    for hf_name, data in read_folder(GOLDEN_MODELS / name).items():
        gguf_name = hf_name
        for old, new in names.items():
            gguf_name = gguf_name.replace(old, new)
        if architecture == "llama" and ("q_proj" in hf_name or "k_proj" in hf_name):
            heads = config["num_attention_heads" if "q_proj" in hf_name else "num_key_value_heads"]
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        if gemma and "norm" in hf_name:
            data = data + 1
        as_kind = kind if data.ndim == 2 and data.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else QType.F32
        tensors[gguf_name] = (gguf.quants.quantize(np.ascontiguousarray(data), as_kind), as_kind)
    return write_gguf(path, architecture, metadata | dict(more_metadata or {}), tensors | dict(more_tensors or {}))
