"""The list of our operators, and how to find one: by the name that a Launch has, or by the target of a node.

Each folder below `kernels/` with an `operator.py` holds records, and all of them are found: a new operator is a folder.
What lies elsewhere is added by `register_operator`. Those that others ask for by name are imported here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import torch

from forebay.kernels.attention.attention.operator import ATTENTION as ATTENTION
from forebay.kernels.attention.attention_q.operator import ATTENTION_Q as ATTENTION_Q
from forebay.kernels.attention.choose_blocks.operator import CHOOSE_BLOCKS as CHOOSE_BLOCKS
from forebay.kernels.attention.choose_tokens.operator import CHOOSE_TOKENS as CHOOSE_TOKENS
from forebay.kernels.attention.expanded_attention.operator import EXPANDED_ATTENTION as EXPANDED_ATTENTION
from forebay.kernels.cache.activation_append_q.operator import ACTIVATION_APPEND_Q as ACTIVATION_APPEND_Q
from forebay.kernels.cache.kv_append.operator import KV_APPEND as KV_APPEND
from forebay.kernels.cache.mean_keys.operator import MEAN_KEYS as MEAN_KEYS
from forebay.kernels.formats.row_sizes import CACHE_ALIGN
from forebay.kernels.formats.table import CACHE_FORMATS, CacheFormat, packed_format
from forebay.kernels.logits.sampling.operator import SAMPLING as SAMPLING
from forebay.kernels.norms.layer_norm.operator import LAYER_NORM as LAYER_NORM
from forebay.kernels.norms.rms_norm.operator import RMS_NORM as RMS_NORM
from forebay.kernels.operator import Operator
from forebay.kernels.positions.rotary.operator import ROTARY as ROTARY
from forebay.kernels.products.expert_slots.operator import ASSIGN_SLOTS as ASSIGN_SLOTS
from forebay.kernels.products.experts.operator import EXPERTS as EXPERTS
from forebay.kernels.products.linear.operator import LINEAR
from forebay.kernels.products.linear_q.operator import LINEAR_Q
from forebay.kernels.quantization.dequantize_rows.operator import DEQUANTIZE_ROWS as DEQUANTIZE_ROWS
from forebay.kernels.recurrences.keep_state.operator import KEEP_STATE as KEEP_STATE
from forebay.kernels.recurrences.linear_recurrence.operator import LINEAR_RECURRENCE as LINEAR_RECURRENCE
from forebay.kernels.recurrences.selective_scan.operator import SELECTIVE_SCAN as SELECTIVE_SCAN
from forebay.kernels.recurrences.short_conv.operator import SHORT_CONV as SHORT_CONV
from forebay.kernels.recurrences.wkv.operator import WKV as WKV

OPERATORS: list[Operator] = []
_BY_KEY: dict[object, Operator] = {}  # by the name of each, and by its overload


def register_operator(operator: Operator) -> Operator:
    """Add the record of an operator, which has been defined with `torch.library`; returns it.

    Raises:
        ValueError: An operator of this name has a record already.
    """
    if operator.name in _BY_KEY:
        raise ValueError(f"register_operator: {operator.name} has a record already; take a name of your own")
    OPERATORS.append(operator)
    _BY_KEY[operator.name] = _BY_KEY[operator.overload] = operator
    return operator


def register_cache_format(stored: CacheFormat) -> CacheFormat:
    """Add a format of caches, whose operators have records; returns it.

    Raises:
        ValueError: The name is taken, an operator has no record, or rows are not aligned.
    """
    if stored.name in CACHE_FORMATS:
        raise ValueError(f"register_cache_format: there is a cache format {stored.name} already")
    for name in filter(None, stored.operators):
        if find(name) is None:
            raise ValueError(f"register_cache_format: {stored.name} names the operator {name}, which has no record; "
                             "register_operator gives it one")
    if stored.row(64) % CACHE_ALIGN:
        raise ValueError(f"register_cache_format: a row of {stored.name} takes {stored.row(64)} bytes for 64 elements; "
                         f"pad rows to {CACHE_ALIGN} bytes")
    CACHE_FORMATS[stored.name] = stored
    return stored


def find(name: str) -> Operator | None:
    """The operator that a Launch names; None for torch's own."""
    return _BY_KEY.get(name)


def of_target(target: object) -> Operator | None:
    """The operator that a node calls; None for everything else."""
    return _BY_KEY.get(target) if isinstance(target, torch._ops.OpOverload) else None


def product_with(weight: str) -> Operator:
    """The product that reads weights of a dtype ("float32") or of a format of packed rows ("w4g64")."""
    return LINEAR if packed_format(weight) is None else LINEAR_Q


def _of_folders() -> Iterator[Operator]:
    """The records of all folders, each from the module that makes it."""
    here = Path(__file__).parent
    for path in sorted(here.glob("*/*/operator.py")):
        module = importlib.import_module(".".join((__name__.rpartition(".")[0], *path.relative_to(here).parent.parts,
                                                   path.stem)))
        yield from {id(v): v for v in vars(module).values() if isinstance(v, Operator)}.values()


for _operator in _of_folders():
    if _operator.name not in _BY_KEY:  # modules name records of others too
        register_operator(_operator)
