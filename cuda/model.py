"""The transformer, once, over the `Ops` contract. Architectures differ in `ModelSpec`'s values and absent weights."""
from __future__ import annotations

from collections.abc import Sequence

from cuda.ops import Array, Batch, Ints, KVGroupSpec, Ops
from weights.load import ModelWeights
from weights.spec import ModelSpec


class Transformer:
    """A decoder-only transformer with pre-norms (and Gemma's post-norms), RoPE, grouped queries and a gated FFN.

    Source: Vaswani et al. 2017; Su et al. 2021 (RoPE); Shazeer 2020 (gated FFN); Ainslie et al. 2023 (GQA).
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, ops: Ops, groups: Sequence[KVGroupSpec]) -> None:
        """`weights` as `ops.prepare` returned them."""
        self.spec, self.weights, self.ops = spec, weights, ops
        self.group_of_layer = {layer: (group_index, position)
                               for group_index, group in enumerate(groups)
                               for position, layer in enumerate(group.layers)}

    def forward(self, batch: Batch, caches: Sequence[Array], rows: Ints) -> Array:
        """Runs the step's tokens, fills their KV, and returns the final normed hidden state of `rows`. -> [R, C]"""
        spec, ops = self.spec, self.ops
        x = ops.embed(batch.token_ids, self.weights.embed, spec.embedding_scale)                    # [T, C]
        block_output = None                                                                        # joins x at a norm
        for index, (layer, weights) in enumerate(zip(spec.layers, self.weights.layers, strict=True)):
            group, layer_in_group = self.group_of_layer[index]

            h = ops.rms_norm(x, weights.attn_norm, spec.norm_eps, add=block_output)                 # [T, C]
            qkv = ops.linear(h, weights.qkv)                                                        # [T, (H + 2G) D]
            ops.rope(qkv, batch.positions, layer.rope, weights.q_norm, weights.k_norm, spec.norm_eps)
            ops.store_kv(qkv, caches[group], layer_in_group, batch.slot_mapping[group])
            attended = ops.attend(qkv, caches[group], layer_in_group, batch.block_tables[group],
                                  spec.attention_scale, layer.window, spec.attention_softcap,
                                  weights.sinks)                                                    # [T, H D]
            block_output = ops.all_reduce(ops.linear(attended, weights.o))                          # [T, C]
            if weights.attn_post_norm is not None:
                block_output = ops.rms_norm(block_output, weights.attn_post_norm, spec.norm_eps)

            h = ops.rms_norm(x, weights.ffn_norm, spec.norm_eps, add=block_output)
            gated = ops.gated(ops.linear(h, weights.gate_up), spec.activation)                      # [T, F]
            block_output = ops.all_reduce(ops.linear(gated, weights.down))                          # [T, C]
            if weights.ffn_post_norm is not None:
                block_output = ops.rms_norm(block_output, weights.ffn_post_norm, spec.norm_eps)

        assert block_output is not None, "a model has at least one layer"
        return ops.rms_norm(ops.take_rows(x, rows), self.weights.norm, spec.norm_eps,
                            add=ops.take_rows(block_output, rows))                                  # [R, C]

    def logits(self, hidden: Array) -> Array:
        """[R, C] -> [R, V]; valid until the next call."""
        return self.ops.logits(hidden, self.weights.head, self.spec.final_softcap)
