"""The element types that kernels know, and their names in CUDA C++."""
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
FP16 = np.dtype(np.float16)

# What T may be: the type of activations and dense weights.
ACTIVATION_TYPES = (BF16, FP16)

C_TYPES: dict[np.dtype[Any], str] = {
    BF16: "__nv_bfloat16",
    FP16: "__half",
    np.dtype(np.float32): "float",
    np.dtype(np.int8): "int8_t",
    np.dtype(np.uint8): "uint8_t",
    np.dtype(np.int32): "int32_t",
}
