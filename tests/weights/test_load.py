"""Whole models: logits against the goldens by a plain NumPy forward pass, GGUF against folder, and what is refused."""
from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.weights.model_files import (
    GOLDEN_MODELS,
    GOLDEN_NAMES,
    QType,
    golden_as_gguf,
    golden_config,
    read_folder,
    write_folder,
    write_gguf,
)
from weights.load import LayerWeights, ModelWeights, open_model
from weights.quant import Blocks, Dense, Linear, dequantize
from weights.rope import RopeSpec
from weights.spec import ModelSpec

Doubles = NDArray[np.float64]


# A forward pass without this project's own: float64, one whole sequence, written for reading.

def rms_norm(x: Doubles, weight: NDArray[np.float32], eps: float) -> Doubles:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight)


def linear(x: Doubles, weight: Linear) -> Doubles:
    y = x @ np.concatenate([dequantize(part) for part in weight.parts]).astype(np.float64).T
    return np.asarray(y if weight.bias is None else y + weight.bias)


def rotate(heads: Doubles, rope: RopeSpec | None) -> Doubles:
    """heads [T, H, D]"""
    assert rope is not None
    angles = np.arange(len(heads))[:, None, None] * np.array(rope.inv_freq)
    first, second = np.split(heads, 2, axis=-1)
    cos, sin = np.cos(angles) * rope.attention_factor, np.sin(angles) * rope.attention_factor
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def cap(x: Doubles, limit: float | None) -> Doubles:
    return x if limit is None else limit * np.tanh(x / limit)


def attention(spec: ModelSpec, weights: LayerWeights, index: int, x: Doubles) -> Doubles:
    size, layer = spec.head_dim, spec.layers[index]
    heads = linear(x, weights.qkv).reshape(len(x), -1, size)
    q, k, v = np.split(heads, [spec.num_heads, spec.num_heads + spec.num_kv_heads], axis=1)
    if weights.q_norm is not None and weights.k_norm is not None:
        q, k = rms_norm(q, weights.q_norm, spec.norm_eps), rms_norm(k, weights.k_norm, spec.norm_eps)
    q, k = rotate(q, layer.rope), rotate(k, layer.rope)
    k, v = (np.repeat(part, spec.num_heads // spec.num_kv_heads, axis=1) for part in (k, v))
    scores = cap(np.einsum("ihd,jhd->hij", q, k) * spec.attention_scale, spec.attention_softcap)
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    visible = (distance >= 0) & (distance < (layer.window or len(x)))
    scores = np.where(visible, scores, -np.inf)
    shares = np.exp(scores)                 # of models whose scores are small
    sinks = 0.0 if weights.sinks is None else np.exp(weights.sinks.astype(np.float64))[:, None, None]
    shares /= shares.sum(-1, keepdims=True) + sinks
    return linear(np.einsum("hij,jhd->ihd", shares, v).reshape(len(x), -1), weights.o)


def logits(spec: ModelSpec, weights: ModelWeights, ids: NDArray[np.int32]) -> Doubles:
    x = dequantize(weights.embed)[ids].astype(np.float64) * spec.embedding_scale
    for index, layer in enumerate(weights.layers):
        branch = attention(spec, layer, index, rms_norm(x, layer.attn_norm, spec.norm_eps))
        x = x + (branch if layer.attn_post_norm is None else rms_norm(branch, layer.attn_post_norm, spec.norm_eps))
        gate, up = np.split(linear(rms_norm(x, layer.ffn_norm, spec.norm_eps), layer.gate_up), 2, axis=-1)
        if spec.activation == "silu":
            gate = gate / (1 + np.exp(-gate))
        else:
            gate = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate ** 3)))
        branch = linear(gate * up, layer.down)
        x = x + (branch if layer.ffn_post_norm is None else rms_norm(branch, layer.ffn_post_norm, spec.norm_eps))
    return cap(linear(rms_norm(x, weights.norm, spec.norm_eps), weights.head), spec.final_softcap)


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_logits_equal_the_goldens(name: str) -> None:
    model = open_model(GOLDEN_MODELS / name)
    with np.load(GOLDEN_MODELS / name / "golden.npz") as golden:
        ids, expected = golden["input_ids"][0], golden["logits"][0]
    found = logits(model.spec, model.weights(), ids)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


# GGUF against the folder

def arrays(weights: ModelWeights) -> dict[str, NDArray[np.float32]]:
    """Every number of a model, dequantised."""
    found: dict[str, NDArray[np.float32]] = {"embed": dequantize(weights.embed), "norm": weights.norm}
    places: list[tuple[str, Any]] = [("head", weights.head)]
    for index, layer in enumerate(weights.layers):
        places += [(f"{index}.{field}", getattr(layer, field)) for field in LayerWeights.__dataclass_fields__]
    for place, value in places:
        if isinstance(value, Linear):
            found |= {f"{place}.{part}": dequantize(weight) for part, weight in enumerate(value.parts)}
            if value.bias is not None:
                found[f"{place}.bias"] = value.bias
        elif value is not None:
            found[place] = value
    return found


def assert_same(one: ModelWeights, other: ModelWeights) -> None:
    first, second = arrays(one), arrays(other)
    assert first.keys() == second.keys()
    for place, numbers in first.items():
        assert numbers.dtype == np.float32, place
        np.testing.assert_array_equal(numbers, second[place], err_msg=place)


@pytest.mark.parametrize("name", ["llama", "llama-tied-rope3", "mistral-window", "qwen2", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("kind", [QType.F32, QType.BF16])
def test_gguf_holds_the_weights_of_the_folder(tmp_path: Path, name: str, kind: QType) -> None:
    folder = open_model(GOLDEN_MODELS / name)
    file = open_model(golden_as_gguf(name, tmp_path / "model.gguf", kind))
    assert_same(file.weights(), folder.weights())


def test_quantised_rows_are_put_back_in_order_too(tmp_path: Path) -> None:
    """K is 64, so rows can be permuted after quantising as well as before."""
    weights = open_model(golden_as_gguf("llama", tmp_path / "model.gguf", QType.Q4_1)).weights()
    original = read_folder(GOLDEN_MODELS / "llama")
    for part, letter in zip(weights.layers[1].qkv.parts, "qkv", strict=True):
        assert isinstance(part, Blocks)
        rows = original[f"model.layers.1.self_attn.{letter}_proj.weight"]
        np.testing.assert_array_equal(dequantize(part), gguf.quants.dequantize(
            gguf.quants.quantize(rows, QType.Q4_1), QType.Q4_1))


def test_biases_of_a_llama_gguf_are_put_back_in_order(tmp_path: Path) -> None:
    biases = {letter: np.arange(rows, dtype=np.float32) for letter, rows in (("q", 64), ("k", 32), ("v", 32))}
    config = golden_config("llama") | {"attention_bias": True}
    tensors = read_folder(GOLDEN_MODELS / "llama")
    permuted: dict[str, tuple[NDArray[np.float32], QType]] = {}
    for layer in range(3):
        for letter, bias in biases.items():
            tensors[f"model.layers.{layer}.self_attn.{letter}_proj.bias"] = bias
            stored = bias if letter == "v" else bias.reshape(-1, 2, 8).swapaxes(1, 2).reshape(-1)
            permuted[f"blk.{layer}.attn_{letter}.bias"] = (stored, QType.F32)
        tensors[f"model.layers.{layer}.self_attn.o_proj.bias"] = np.ones(64, np.float32)
        permuted[f"blk.{layer}.attn_output.bias"] = (np.ones(64, np.float32), QType.F32)
    folder = open_model(write_folder(tmp_path / "folder", config, tensors))
    file = open_model(golden_as_gguf("llama", tmp_path / "model.gguf", more_tensors=permuted))
    assert_same(file.weights(), folder.weights())


def test_stored_bytes(tmp_path: Path) -> None:
    size = sum(data.size for data in read_folder(GOLDEN_MODELS / "llama").values())
    assert open_model(GOLDEN_MODELS / "llama").stored_bytes == 2 * size
    assert open_model(golden_as_gguf("llama", tmp_path / "model.gguf")).stored_bytes == 4 * size


# Attention sinks: no model of the goldens has any.

SINKS = np.array([0.5, -3.0, 2.25, 0.0], np.float32)


def gguf_sinks(*layers: int, sinks: NDArray[np.float32] = SINKS) -> dict[str, tuple[NDArray[np.float32], QType]]:
    return {f"blk.{layer}.attn_sinks.weight": (sinks + layer, QType.F32) for layer in layers}


def folder_sinks(*layers: int, sinks: NDArray[np.float32] = SINKS) -> dict[str, NDArray[np.float32]]:
    return {f"model.layers.{layer}.self_attn.sinks": sinks + layer for layer in layers}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_sinks_of_a_folder_and_of_a_gguf(tmp_path: Path, name: str) -> None:
    num_layers = golden_config(name)["num_hidden_layers"]
    folder = open_model(folder_of(tmp_path, name, add=folder_sinks(*range(num_layers)))).weights()
    file = open_model(golden_as_gguf(name, tmp_path / "model.gguf", more_tensors=gguf_sinks(*range(num_layers))))
    assert_same(file.weights(), folder)
    for index, layer in enumerate(folder.layers):
        assert layer.sinks is not None
        assert layer.sinks.dtype == np.float32
        np.testing.assert_array_equal(layer.sinks, SINKS + index)
    assert all(layer.sinks is None for layer in open_model(GOLDEN_MODELS / name).weights().layers)


@pytest.mark.parametrize(("layers", "sinks", "cause"), [
    ((0, 2), SINKS, "{} is missing"), ((1,), SINKS, "tensors that are not part of the model: {}"),
    ((0, 1, 2), SINKS[:3], r"has shape \(3,\), .* \(4,\)"), ((0, 1, 2), SINKS[None], r"has shape \(1, 4\), .* \(4,\)"),
])
def test_sinks_that_do_not_fit_are_named(tmp_path: Path, layers: tuple[int, ...], sinks: NDArray[np.float32],
                                         cause: str) -> None:
    folder = folder_of(tmp_path, "llama", add=folder_sinks(*layers, sinks=sinks))
    with pytest.raises(ValueError, match=cause.format(r"model\.layers\.1\.self_attn\.sinks")):
        open_model(folder).weights()
    file = golden_as_gguf("llama", tmp_path / "model.gguf", more_tensors=gguf_sinks(*layers, sinks=sinks))
    with pytest.raises(ValueError, match=cause.format(r"blk\.1\.attn_sinks\.weight")):
        open_model(file).weights()


def test_sinks_do_not_make_an_unsupported_architecture_a_supported_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama", add=folder_sinks(0, 1, 2), model_type="gpt_oss",
                       architectures=["GptOssForCausalLM"])
    with pytest.raises(ValueError, match=r"config\.json: unsupported architecture: model_type 'gpt_oss'"):
        open_model(folder)
    path = write_gguf(tmp_path / "model.gguf", "gpt-oss", {"gpt-oss.embedding_length": 64}, dict(gguf_sinks(0)))
    with pytest.raises(ValueError, match=r"model\.gguf: unsupported architecture 'gpt-oss'"):
        open_model(path)


# Tied heads

def test_a_gguf_without_output_uses_the_embedding(tmp_path: Path) -> None:
    model = open_model(golden_as_gguf("qwen2", tmp_path / "model.gguf"))
    weights = model.weights()
    assert model.spec.tied_head
    assert weights.head.parts == (weights.embed,)


def test_a_gguf_with_output_uses_it(tmp_path: Path) -> None:
    model = open_model(golden_as_gguf("llama", tmp_path / "model.gguf"))
    weights = model.weights()
    assert not model.spec.tied_head
    assert not np.array_equal(dequantize(weights.head.parts[0]), dequantize(weights.embed))


def folder_of(tmp_path: Path, name: str, drop: str = "", add: dict[str, NDArray[np.float32]] | None = None,
              **changes: Any) -> Path:
    """A golden model written anew, with changes."""
    tensors = {key: data for key, data in read_folder(GOLDEN_MODELS / name).items() if key != drop}
    return write_folder(tmp_path / "folder", golden_config(name) | changes, tensors | (add or {}))


def test_tied_without_lm_head_uses_the_embedding(tmp_path: Path) -> None:
    weights = open_model(folder_of(tmp_path, "llama", drop="lm_head.weight", tie_word_embeddings=True)).weights()
    assert weights.head.parts == (weights.embed,)


def test_untied_without_lm_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor lm_head\.weight is missing"):
        open_model(folder_of(tmp_path, "llama", drop="lm_head.weight")).weights()


def test_tied_with_an_equal_lm_head_uses_the_embedding(tmp_path: Path) -> None:
    embed = read_folder(GOLDEN_MODELS / "qwen2")["model.embed_tokens.weight"]
    weights = open_model(folder_of(tmp_path, "qwen2", add={"lm_head.weight": embed})).weights()
    assert weights.head.parts == (weights.embed,)


def test_tied_with_another_lm_head_uses_that_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rule of transformers 5: two different tensors are not tied, whatever the configuration says."""
    with caplog.at_level(logging.WARNING, "troupe.weights"):
        weights = open_model(folder_of(tmp_path, "llama", tie_word_embeddings=True)).weights()
    (head,) = weights.head.parts
    assert isinstance(head, Dense)
    np.testing.assert_array_equal(head.data, read_folder(GOLDEN_MODELS / "llama")["lm_head.weight"])
    assert "lm_head.weight differs from the embedding" in caplog.text


# Refusals

NORM = "model.layers.1.input_layernorm.weight"
ONES = np.ones(64, np.float32)


@pytest.mark.parametrize(("name", "options", "cause"), [
    ("llama", {"drop": NORM}, f"tensor {NORM} is missing"),
    ("llama", {"add": {NORM: np.ones(63, np.float32)}}, rf"tensor {NORM} has shape \(63,\), .* \(64,\)"),
    ("llama", {"intermediate_size": 111}, r"mlp\.gate_proj\.weight has shape \(112, 64\)"),
    ("llama", {"vocab_size": 321}, r"embed_tokens\.weight has shape \(320, 64\)"),
    ("llama", {"head_dim": 32}, r"self_attn\.q_proj\.weight has shape \(64, 64\), .* \(128, 64\)"),
    ("llama", {"num_hidden_layers": 4}, r"tensor model\.layers\.3\..* is missing"),
    ("llama", {"num_hidden_layers": 2}, r"not part of the model: model\.layers\.2\.[^,]+, [^,]+, [^,]+ and 6 more"),
    ("llama", {"add": {"model.layers.0.self_attn.q_proj.bias": ONES}}, r"not part of the model: .*q_proj\.bias$"),
    ("qwen2", {"drop": "model.layers.0.self_attn.k_proj.bias"}, r"k_proj\.bias is missing"),
    ("qwen3", {"drop": "model.layers.2.self_attn.q_norm.weight"}, r"q_norm\.weight is missing"),
    ("gemma2", {"drop": "model.layers.0.pre_feedforward_layernorm.weight"}, "pre_feedforward_layernorm"),
])
def test_tensors_that_do_not_fit_the_description_are_named(tmp_path: Path, name: str, options: dict[str, Any],
                                                          cause: str) -> None:
    with pytest.raises(ValueError, match=cause) as caught:
        open_model(folder_of(tmp_path, name, **options)).weights()
    assert str(tmp_path) in str(caught.value)


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    path = folder_of(tmp_path, "llama", add={"model.layers.0.self_attn.rotary_emb.inv_freq": ONES[:8],
                                            "model.rotary_emb.inv_freq": ONES[:8]})
    assert_same(open_model(path).weights(), open_model(GOLDEN_MODELS / "llama").weights())


def test_rope_factors_of_a_gguf_are_not_unknown(tmp_path: Path) -> None:
    path = golden_as_gguf("llama", tmp_path / "model.gguf",
                          more_tensors={"rope_freqs.weight": (np.full(8, 2.0, np.float32), QType.F32)})
    assert_same(open_model(path).weights(), open_model(GOLDEN_MODELS / "llama").weights())


def test_unknown_tensors_of_a_gguf_are_named(tmp_path: Path) -> None:
    path = golden_as_gguf("llama", tmp_path / "model.gguf", more_tensors={"blk.0.attn_q.scale": (ONES, QType.F32)})
    with pytest.raises(ValueError, match=r"not part of the model: blk\.0\.attn_q\.scale"):
        open_model(path).weights()


def test_a_gguf_without_an_embedding_is_refused(tmp_path: Path) -> None:
    metadata = {f"llama.{key}": 64 for key in ("embedding_length", "context_length", "feed_forward_length")}
    path = write_gguf(tmp_path / "model.gguf", "llama", metadata | {
        "llama.block_count": 1, "llama.attention.head_count": 4, "llama.attention.layer_norm_rms_epsilon": 1e-5}, {})
    with pytest.raises(ValueError, match=r"model\.gguf: tensor token_embd\.weight is missing"):
        open_model(path)


def test_a_folder_that_does_not_open(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        open_model(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        open_model(tmp_path)
    folder = folder_of(tmp_path, "llama", model_type="mamba", architectures=None)
    with pytest.raises(ValueError, match=r"config\.json: unsupported architecture: model_type 'mamba'"):
        open_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: bad JSON"):
        open_model(folder)
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ValueError, match=r"config\.json: 1073741824 bytes"):
        open_model(folder)
    (folder / "config.json").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"config\.json: not UTF-8"):
        open_model(folder)
