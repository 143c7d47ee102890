"""All kernel families: what the tests run and compile, and `tools.gpu_check` measures."""
from __future__ import annotations

from cuda.kernels import (
    block_copy,
    decode_attention,
    embed,
    gated,
    gemm,
    prefill_attention,
    prefix_lookup,
    rms_norm,
    rope_store_kv,
    sampling,
    sampling_state,
    step_rows,
    take_rows,
)
from cuda.kernels.kernel_spec import KernelSpec

KERNELS: tuple[KernelSpec, ...] = (
    embed.SPEC, rms_norm.SPEC, gemm.SPEC, gated.SPEC, rope_store_kv.SPEC, decode_attention.SPEC, prefill_attention.SPEC,
    take_rows.SPEC, sampling.SPEC, sampling_state.SPEC, step_rows.SPEC, block_copy.SPEC, prefix_lookup.SPEC)
