"""config.json and GGUF metadata to ModelSpec."""
from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weights.model_files import GOLDEN_NAMES, QType, golden_as_gguf, golden_config, refusal
from weights.gguf import Gguf
from weights.rope import rope_spec
from weights.spec import LayerSpec, ModelSpec, from_gguf, from_hf_config


def spec(name: str, **changes: Any) -> ModelSpec:
    return from_hf_config(golden_config(name) | changes)


def windows(model: ModelSpec) -> list[int | None]:
    return [layer.window for layer in model.layers]


def test_llama() -> None:
    rope = rope_spec(16, 256, {"rope_theta": 10000.0})
    assert spec("llama") == ModelSpec(
        architecture="llama", hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=112, vocab_size=320,
        max_position=256, norm_eps=1e-6, layers=(LayerSpec(None, rope),) * 3, attention_scale=0.25)


def test_gemma2() -> None:
    rope = rope_spec(24, 256, {"rope_theta": 10000.0})
    assert spec("gemma2") == ModelSpec(
        architecture="gemma2", hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=24, ffn_size=112, vocab_size=320,
        max_position=256, norm_eps=1e-6, layers=(LayerSpec(12, rope), LayerSpec(None, rope), LayerSpec(12, rope)),
        attention_scale=20 ** -0.5, activation="gelu_tanh", attention_softcap=5.0, final_softcap=3.0,
        embedding_scale=8.0, post_norms=True, tied_head=True)


def test_gemma3_has_two_ropes() -> None:
    model = spec("gemma3")
    assert windows(model) == [12, 12, 12, 12, 12, None, 12]
    assert model.layers[0].rope == rope_spec(24, 256, {"rope_theta": 10_000.0})
    assert model.layers[5].rope == rope_spec(24, 256, {"rope_theta": 1_000_000.0})
    assert (model.qk_norm, model.post_norms, model.attention_softcap, model.final_softcap) == (True, True, None, None)


def test_biases_and_head_norms() -> None:
    assert (spec("qwen2").qkv_bias, spec("qwen2").o_bias, spec("qwen2").qk_norm) == (True, False, False)
    assert (spec("qwen3").qkv_bias, spec("qwen3").o_bias, spec("qwen3").qk_norm) == (False, False, True)
    biased = spec("llama", attention_bias=True)
    assert (biased.qkv_bias, biased.o_bias) == (True, True)


def test_head_dim_is_taken_from_the_configuration() -> None:
    assert spec("qwen3").head_dim == 32             # hidden_size / heads would be 16
    assert spec("llama", head_dim=32, hidden_size=96).head_dim == 32
    assert spec("llama", head_dim=None, hidden_size=96).head_dim == 24
    assert spec("qwen2").head_dim == 16


OLD_STYLE = {"rope_parameters": None, "rope_theta": 10000.0}
OLD_GEMMA3 = {"rope_theta": 1e6, "rope_local_base_freq": 10000.0}
NEW_GEMMA3 = {"rope_theta": None, "rope_local_base_freq": None, "rope_parameters": {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}


@pytest.mark.parametrize(("name", "one", "other"), [
    ("llama", {}, OLD_STYLE | {"rope_scaling": None}),
    ("llama", {}, {"rope_parameters": None}),
    ("llama-linear", {}, OLD_STYLE | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("llama-yarn", {}, {"rope_scaling": None, "rope_theta": None, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}}),
    ("llama-yarn", {}, {"original_max_position_embeddings": 32,
                        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "finetuned": True}}),
    ("gemma3", OLD_GEMMA3, NEW_GEMMA3),
    ("gemma3", OLD_GEMMA3, {"rope_theta": None, "rope_local_base_freq": None}),
    ("gemma3", {}, {"layer_types": None}),
    ("gemma3", {}, {"layer_types": None, "sliding_window_pattern": 6}),
    ("gemma2", {}, {"layer_types": None}),
    ("qwen2", {}, {"layer_types": None, "sliding_window": 4096}),
    ("llama", {}, {"layer_types": ["full_attention"] * 3}),
    ("mistral-window", {}, {"layer_types": ["sliding_attention"] * 3}),
])
def test_two_ways_to_say_the_same(name: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert spec(name, **one) == spec(name, **other)


def test_gemma3_scales_only_the_layers_without_a_window() -> None:
    model = spec("gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert model.layers[0].rope == rope_spec(24, 256, {"rope_theta": 1e4})
    assert model.layers[5].rope == rope_spec(24, 256, {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0})


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, [None] * 3),
    ({"use_sliding_window": True, "sliding_window": 8}, [None] * 3),                   # layer_types says full
    ({"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 2}, [None, None, 8]),
    ({"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 0}, [8, 8, 8]),
    ({"use_sliding_window": True, "sliding_window": 8, "layer_types": None}, [None] * 3),
    ({"use_sliding_window": True, "sliding_window": 8,
      "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, [8, None, 8]),
    ({"use_sliding_window": False, "sliding_window": 8, "layer_types": None, "max_window_layers": 0}, [None] * 3),
])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_windows_of_qwen(name: str, changes: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(spec(name, **changes)) == expected


def test_windows_of_mistral() -> None:
    assert windows(spec("mistral-window")) == [12, 12, 12]
    assert windows(spec("mistral-window", sliding_window=None)) == [None] * 3
    config = golden_config("mistral-window")
    del config["sliding_window"]
    assert windows(from_hf_config(config)) == [4096] * 3


def test_softcaps_of_gemma2_null_is_none_and_missing_the_default() -> None:
    none = spec("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (none.attention_softcap, none.final_softcap) == (None, None)
    config = golden_config("gemma2")
    del config["attn_logit_softcapping"], config["final_logit_softcapping"]
    missing = from_hf_config(config)
    assert (missing.attention_softcap, missing.final_softcap) == (50.0, 30.0)


@pytest.mark.parametrize(("name", "changes", "cause"), [
    ("llama", {"model_type": "mamba"}, "unsupported architecture: model_type 'mamba'"),
    ("llama", {"model_type": None}, "unsupported architecture"),
    ("llama", {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ("gemma3", {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, "'gemma3'"),
    ("llama", {"num_local_experts": 8}, "unsupported num_local_experts 8"),
    ("llama", {"kv_lora_rank": 512}, "unsupported kv_lora_rank 512"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "unsupported quantization_config"),
    ("llama", {"mlp_bias": True}, "unsupported mlp_bias True"),
    ("llama", {"partial_rotary_factor": 0.5}, r"unsupported partial_rotary_factor 0\.5"),
    ("llama", {"rope_interleaved": True}, "unsupported rope_interleaved"),
    ("llama", {"hidden_act": "gelu"}, "unsupported activation 'gelu'"),
    ("llama", {"hidden_act": 7}, "hidden_act must be a string"),
    ("llama", {"logits_scaling": 8.0}, "unsupported logits_scaling"),
    ("llama", {"sliding_window": 4096}, "unsupported sliding_window"),
    ("llama", {"final_logit_softcapping": 30.0}, "unsupported final_logit_softcapping"),
    ("llama", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "no sliding_window"),
    ("mistral-window", {"layer_types": ["full_attention"] * 3}, "unsupported layer_types"),
    ("mistral-window", {"attention_bias": True}, "unsupported attention_bias"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "unsupported attn_logit_softcapping"),
    ("gemma2", {"use_bidirectional_attention": True}, "unsupported use_bidirectional_attention"),
    ("gemma2", {"hidden_activation": "relu"}, "unsupported activation 'relu'"),
    ("gemma2", {"layer_types": ["full_attention"]}, "layer_types must list 3 layers"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "unsupported layer type 'chunked_attention'"),
    ("gemma2", {"layer_types": [["full_attention"]] * 3}, "unsupported layer type"),
    ("gemma3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "by layer type"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "unsupported RoPE parameter"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "unsupported rope_type 'dynamic'"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters and rope_scaling differ"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters must be an object"),
    ("gemma3", {"rope_parameters": {"sliding_attention": 1e4}}, "sliding_attention must be an object"),
    ("llama", {"hidden_size": None}, "hidden_size is missing"),
    ("llama", {"hidden_size": 64.0}, "hidden_size must be an integer"),
    ("llama", {"num_hidden_layers": 10 ** 9}, "num_hidden_layers must be an integer from 1 to 1000"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers must be"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads must be"),
    ("llama", {"num_key_value_heads": 3}, "4 query heads are not a multiple of 3"),
    ("llama", {"head_dim": 15}, "head size 15 is odd"),
    ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps must be"),
    ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps must be"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
])
def test_refused(name: str, changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        spec(name, **changes)


def test_only_llama_may_leave_the_number_of_key_value_heads_out() -> None:
    llama, mistral = golden_config("llama"), golden_config("mistral-window")
    del llama["num_key_value_heads"], mistral["num_key_value_heads"]
    assert from_hf_config(llama).num_kv_heads == 4
    assert from_hf_config(mistral | {"num_key_value_heads": None}).num_kv_heads == 4
    with pytest.raises(ValueError, match="num_key_value_heads is missing"):
        from_hf_config(mistral)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    | st.sampled_from(["yarn", "linear", "llama3", "default", "full_attention", "sliding_attention", 64, 4, 1e4]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["rope_type", "factor", "rope_theta", "full_attention", "beta_fast", "mscale", "x"]), inner,
        max_size=4), max_leaves=6)


@settings(max_examples=400, deadline=None)
@given(name=st.sampled_from(GOLDEN_NAMES), data=st.data())
def test_no_configuration_raises_anything_else(name: str, data: st.DataObject) -> None:
    config = golden_config(name)
    for field in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[field] = data.draw(JSON)
    assert refusal(lambda: from_hf_config(config)) != ""


# GGUF

def gguf_spec(name: str, path: Path, **more: Any) -> ModelSpec:
    return from_gguf(Gguf(golden_as_gguf(name, path / "model.gguf", **more)))


def float32(value: float) -> float:
    return float(np.float32(value))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_gguf_says_the_same_as_the_folder(tmp_path: Path, name: str) -> None:
    # Metadata holds float32; "mistral" is "llama" there.
    changes = {"rms_norm_eps": float32(1e-6)}
    expected = spec(name, **changes)
    found = gguf_spec(name, tmp_path)
    assert found.architecture == {"mistral": "llama"}.get(expected.architecture, expected.architecture)
    for field in ModelSpec.__dataclass_fields__:
        if field != "architecture":
            assert getattr(found, field) == getattr(expected, field), field


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_gguf_of_gemma(tmp_path: Path, name: str) -> None:
    # GGUF knows no query_pre_attn_scalar: it is the head's size, but for the 27B.
    assert gguf_spec(name, tmp_path) == spec(name, rms_norm_eps=float32(1e-6), query_pre_attn_scalar=24)


def test_gguf_of_gemma_27b_scales_queries_by_hidden_size(tmp_path: Path) -> None:
    for name, layers in (("gemma2", 46), ("gemma3", 62)):
        model = gguf_spec(name, tmp_path, more_metadata={f"{name}.block_count": layers})
        assert model.attention_scale == (64 / 4) ** -0.5


def test_gguf_pattern_and_local_rope_of_gemma3(tmp_path: Path) -> None:
    model = gguf_spec("gemma3", tmp_path, more_metadata={
        "gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.freq_base_swa": 5000.0,
        "gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0})
    assert windows(model) == [12, None, 12, None, 12, None, 12]
    assert model.layers[0].rope == rope_spec(24, 256, {"rope_theta": 5000.0})
    assert model.layers[1].rope == rope_spec(24, 256, {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0})


def test_gguf_without_a_rope_base_has_the_default(tmp_path: Path) -> None:
    path = golden_as_gguf("qwen2", tmp_path / "model.gguf")
    raw = path.read_bytes()
    assert raw.count(b"qwen2.rope.freq_base") == 1
    path.write_bytes(raw.replace(b"qwen2.rope.freq_base", b"general.x23456789012"))
    assert from_gguf(Gguf(path)).layers[0].rope == rope_spec(16, 256, {"rope_theta": 10000.0})


def test_gguf_yarn(tmp_path: Path) -> None:
    config = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    metadata = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32}
    assert gguf_spec("llama", tmp_path, more_metadata=metadata).layers[0].rope == rope_spec(16, 256, config)
    tuned = gguf_spec("llama", tmp_path, more_metadata=metadata | {
        "llama.rope.scaling.attn_factor": 0.5, "llama.rope.scaling.yarn_beta_fast": 16.0}).layers[0].rope
    expected = rope_spec(16, 256, config | {"beta_fast": 16.0})
    assert tuned is not None
    assert tuned.inv_freq == expected.inv_freq
    assert tuned.attention_factor == expected.attention_factor / 2


def test_gguf_llama3_factors_equal_the_configuration(tmp_path: Path) -> None:
    """As the converter stores them: what each wavelength is multiplied by."""
    factors = []
    for i in range(8):
        wavelength = 2 * math.pi * 10000.0 ** (i / 8)
        if wavelength < 32 / 4.0:
            factors.append(1.0)
        elif wavelength > 32 / 1.0:
            factors.append(8.0)
        else:
            smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    assert len(set(factors)) > 2
    found = gguf_spec("llama-tied-rope3", tmp_path, more_metadata={"llama.rope.freq_base": 10000.0},
                      more_tensors={"rope_freqs.weight": (np.array(factors, np.float32), QType.F32)}).layers[0].rope
    expected = spec("llama-tied-rope3", rope_theta=10000.0).layers[0].rope
    assert found is not None
    assert expected is not None
    assert found.inv_freq == pytest.approx(expected.inv_freq, rel=2e-6)


@pytest.mark.parametrize(("name", "metadata", "cause"), [
    ("llama", {"llama.expert_count": 8}, r"unsupported metadata key llama\.expert_count"),
    ("llama", {"llama.logit_scale": 2.0}, r"unsupported metadata key llama\.logit_scale"),
    ("gemma3", {"gemma3.attn_logit_softcapping": 50.0}, r"unsupported metadata key gemma3\.attn_logit"),
    ("llama", {"llama.rope.scaling.type": "longrope"}, r"unsupported llama\.rope\.scaling\.type 'longrope'"),
    ("llama", {"llama.rope.scaling.type": "linear"}, r"llama\.rope\.scaling\.factor is missing"),
    ("llama", {"llama.rope.dimension_count": 8}, r"unsupported llama\.rope\.dimension_count 8"),
    ("llama", {"llama.attention.value_length": 8}, r"unsupported llama\.attention\.value_length 8"),
    ("llama", {"llama.attention.head_count_kv": [2, 2, 1]}, "not a single int"),
    ("llama", {"llama.vocab_size": 321}, r"token_embd\.weight"),
    ("llama", {"llama.block_count": 2000}, r"llama\.block_count must be"),
    ("llama", {"llama.attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon must be"),
    ("llama", {"split.count": 3}, "split"),
])
def test_gguf_refused(tmp_path: Path, name: str, metadata: dict[str, Any], cause: str) -> None:
    with pytest.raises(ValueError, match=cause) as caught:
        gguf_spec(name, tmp_path, more_metadata=metadata)
    assert str(caught.value).startswith(f"{tmp_path / 'model.gguf'}: ")
    assert str(caught.value).count("model.gguf") == 1


@pytest.mark.parametrize("factors", [[1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + [math.inf], [1.0] * 7 + [math.nan]])
def test_gguf_bad_rope_factors_are_refused(tmp_path: Path, factors: list[float]) -> None:
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        gguf_spec("llama", tmp_path,
                  more_tensors={"rope_freqs.weight": (np.array(factors, np.float32), QType.F32)})


def test_gguf_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"model\.gguf: unsupported architecture 'mamba'"):
        from_gguf(Gguf(tmp_path / "model.gguf"))
