"""ctypes mirrors of the arguments of the C++ kernels for packed groups (`cpu/quantize.cpp`, `quantized_*.cpp`)."""

from __future__ import annotations

import ctypes


class QuantizeArgs(ctypes.Structure):
    """Mirror of `QuantizeArgs` in quantize.cpp; x_stride in elements, the others in bytes."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "packed", "scale", "low", "unheld")),
        *((name, ctypes.c_int64) for name in ("rows", "k", "x_stride", "group")),
        *((name, ctypes.c_int64) for name in ("packed_stride", "scale_stride", "low_stride")),
        *((name, ctypes.c_int32) for name in ("bits", "scale_dtype", "dtype")),
    )


class QuantizedLinearArgs(ctypes.Structure):
    """Mirror of `QuantizedLinearArgs` in quantized_linear.cpp; rows_stride in bytes, the other strides in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "rows", "bias", "multiplier", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "x_stride", "rows_stride")),
        *((name, ctypes.c_int64) for name in ("multiplier_stride", "residual_stride", "out_stride", "group")),
        *((name, ctypes.c_int32) for name in ("bits", "scale_dtype", "x_dtype", "bias_dtype", "out_dtype")),
        *((name, ctypes.c_int32) for name in ("activation", "integer_nbytes")),
    )


class CacheAppendArgs(ctypes.Structure):
    """Mirror of `CacheAppendArgs` in quantized_cache.cpp; cache strides in bytes, the others in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache", "k", "v", "start")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "length", "rows", "k_dim", "v_dim", "group")),
        *((f"{t}_{d}", ctypes.c_int64) for t in ("k_cache", "v_cache", "k", "v") for d in ("batch", "head", "row")),
        *((name, ctypes.c_int32) for name in ("bits", "dtype")),
    )


class CacheAttentionArgs(ctypes.Structure):
    """Mirror of `CacheAttentionArgs` in quantized_cache.cpp; cache strides in bytes, the others in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k_cache", "v_cache", "start", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "queries", "length", "head_dim", "group")),
        *((f"{t}_{d}", ctypes.c_int64) for t in "qkv" for d in ("batch", "head", "row")),
        *((name, ctypes.c_int64) for name in ("out_batch", "out_row", "out_head", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("bits", "dtype")),
    )
