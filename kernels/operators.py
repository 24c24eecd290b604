"""The list of our operators, and how to find one: by the name that a Launch has, or by the target of a node."""

from __future__ import annotations

from forebay.kernels.attention.attention.operator import ATTENTION
from forebay.kernels.attention.attention_q.operator import ATTENTION_Q
from forebay.kernels.attention.sparse_attention.operator import SPARSE_ATTENTION
from forebay.kernels.cache.activation_append_q.operator import ACTIVATION_APPEND_Q
from forebay.kernels.cache.kv_append.operator import KV_APPEND
from forebay.kernels.cache.kv_append_q.operator import KV_APPEND_Q
from forebay.kernels.formats.table import packed_format
from forebay.kernels.logits.sampling.operator import SAMPLING
from forebay.kernels.norms.layer_norm.operator import LAYER_NORM
from forebay.kernels.norms.rms_norm.operator import RMS_NORM
from forebay.kernels.operator import Operator
from forebay.kernels.positions.rotary.operator import ROTARY
from forebay.kernels.products.linear.operator import LINEAR
from forebay.kernels.products.linear_q.operator import LINEAR_Q
from forebay.kernels.quantization.dequantize_rows.operator import DEQUANTIZE_ROWS
from forebay.kernels.quantization.quantize.operator import DEQUANTIZE, QUANTIZE

OPERATORS = (
    LINEAR, LINEAR_Q,
    ATTENTION, ATTENTION_Q, SPARSE_ATTENTION,
    KV_APPEND, KV_APPEND_Q, ACTIVATION_APPEND_Q,
    RMS_NORM, LAYER_NORM, ROTARY, QUANTIZE, DEQUANTIZE, DEQUANTIZE_ROWS, SAMPLING,
)  # fmt: skip
_OF_NAME = {operator.name: operator for operator in OPERATORS}
_OF_OVERLOAD = {operator.overload: operator for operator in OPERATORS}


def find(name: str) -> Operator | None:
    """The operator that a Launch names; None for torch's own."""
    return _OF_NAME.get(name)


def of_target(target: object) -> Operator | None:
    """The operator that a node calls; None for everything else."""
    return _OF_OVERLOAD.get(target)  # type: ignore[call-overload]


def product_with(weight: str) -> Operator:
    """The product that reads weights of a dtype ("float32") or of a format of packed rows ("w4g64")."""
    return LINEAR if packed_format(weight) is None else LINEAR_Q
