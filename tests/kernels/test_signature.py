"""Parameter types as the C++ source says them."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cuda.kernels.kernel_spec import KernelSpec
from cuda.kernels.registry import KERNELS
from cuda.kernels.signature import Parameter, check_arguments, parse_signature, signature
from tests.cuda_emulator import build
from tests.cuda_emulator.launcher import parameter_types

TEXT = """
// template <typename T> __global__ void commented(int a) {}
__device__ float helper(float x) { return x; }
extern "C" __global__ void plain(int* out, unsigned long long const key, bool flag /* (why, not) */) {}
template <typename T, int D, bool WINDOW = false>
__global__ void __launch_bounds__(128, (D > 64 ? 1 : 2))
attend(T* __restrict__ out, const T *__restrict__ q, const uint4* __restrict__ k, const typename Stored<T>::type* v,
       T scale, float softcap) {}
template <typename T> __global__ __launch_bounds__(32) void attend_more(const void* x, int8_t* y, uint8_t z) {}
__global__ void nothing() {}
struct Pair { int a, b; };
__global__ void by_value(Pair pair) {}
"""


def types(entry: str) -> list[tuple[str, bool, np.dtype | None]]:
    return [(parameter.name, parameter.is_pointer, parameter.dtype) for parameter in parse_signature(TEXT, entry)]


def test_a_plain_kernel() -> None:
    assert types("plain") == [("out", True, np.int32), ("key", False, np.uint64), ("flag", False, np.bool_)]
    assert types("nothing") == []


@pytest.mark.parametrize(("name", "dtype"), [("__nv_bfloat16", np.dtype(ml_dtypes.bfloat16)), ("__half", np.float16)])
def test_a_template_takes_its_types_from_the_name_expression(name: str, dtype: np.dtype) -> None:
    assert types(f"attend<{name}, 128, true>") == [
        ("out", True, dtype), ("q", True, dtype), ("k", True, None), ("v", True, None), ("scale", False, dtype),
        ("softcap", False, np.float32)]
    assert types(f"attend<{name},64>") == types(f"attend<{name}, 128, true>")


def test_a_name_that_begins_with_anothers() -> None:
    assert types("attend_more<float>") == [("x", True, None), ("y", True, np.int8), ("z", False, np.uint8)]


@pytest.mark.parametrize("name", ["helper", "commented", "absent"])
def test_what_is_no_kernel_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"no kernel {name}"):
        parse_signature(TEXT, name)


def test_what_is_no_number_is_refused_by_value() -> None:
    with pytest.raises(ValueError, match="by_value: parameter Pair pair"):
        parse_signature(TEXT, "by_value")


def test_parameters_name_themselves() -> None:
    assert f"{Parameter('x', True, np.dtype(np.float32))}, {Parameter('y', True, None)}" == "x (float32*), y (any*)"


@pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_signatures_are_what_the_compiler_makes_of_the_source(spec: KernelSpec) -> None:
    one_of_each = {instance.entry.partition("<")[0]: instance.entry for instance in reversed(spec.instances)}
    for entry in one_of_each.values():
        read = [(parameter.is_pointer, parameter.dtype) for parameter in signature(spec.source, entry)]
        assert read == parameter_types(build.KERNELS_FOLDER / spec.source, entry), entry


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_every_instance_has_a_signature(spec: KernelSpec) -> None:
    for instance in spec.instances:
        parameters = signature(spec.source, instance.entry)
        assert parameters
        with pytest.raises(TypeError, match=f"takes {len(parameters)} arguments, {len(parameters) + 1} given"):
            check_arguments(spec.source, instance.entry, [None] * (len(parameters) + 1), (np.ndarray,))
