"""The two real models that have an alias, against the `gguf` package."""
from __future__ import annotations

import gguf
import numpy as np
import pytest

from weights.gguf import Gguf
from weights.hub import resolve
from weights.load import open_model
from weights.quant import dequantize


@pytest.mark.real_model
def test_description_of_smollm2() -> None:
    model = open_model(resolve("smollm2", print).path)
    spec = model.spec
    assert (spec.architecture, spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim,
            spec.ffn_size, spec.vocab_size) == ("llama", 30, 576, 9, 3, 64, 1536, 49152)
    assert spec.tied_head
    weights = model.weights()
    assert len(weights.layers) == 30
    assert weights.head.parts == (weights.embed,)


@pytest.mark.slow
@pytest.mark.real_model
def test_description_of_gemma3() -> None:
    spec = open_model(resolve("gemma3", print).path).spec
    assert (spec.architecture, spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim,
            spec.ffn_size, spec.vocab_size) == ("gemma3_text", 18, 640, 4, 1, 256, 2048, 262144)
    assert [layer.window for layer in spec.layers] == [512, 512, 512, 512, 512, None] * 3
    assert spec.attention_scale == 1 / 16


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_tensors_and_vocabulary_equal_the_reference(name: str) -> None:
    path = resolve(name, print).path
    opened, reference = Gguf(path), gguf.GGUFReader(path)
    tokens = reference.get_field("tokenizer.ggml.tokens")
    assert tokens is not None
    assert opened.get_strings("tokenizer.ggml.tokens") == tokens.contents()
    assert opened.keys() == [key for key in reference.fields if not key.startswith("GGUF.")]
    assert list(opened.shapes) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = opened.vector(tensor.name) if expected.ndim == 1 else dequantize(opened.weight(tensor.name))
        np.testing.assert_array_equal(found, expected, err_msg=tensor.name)
