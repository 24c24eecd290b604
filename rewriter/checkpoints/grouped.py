"""Safetensors checkpoints of AWQ, GPTQ and compressed-tensors: codes in groups along the inputs, as rows of `packing`.

A matrix [N, K] of theirs has codes q, and a scale s and a zero point z for each row and group: (q - z) s, which as
code, scale and low is q s - z s. Codes and scales are kept. -z s is exact for symmetric ones, whose z is half of the
codes' range; else it is rounded to fp16, by 2^-11 of it: 1/128 of s at most for codes of 4 bits.

    gptq                qweight int32 [K / p, N]: p = 32 / bits codes along K; qzeros int32 [g, N / p] along N, with 1
                        subtracted from each (not in format gptq_v2) of a word at once, so that a zero of 0 borrows from
                        its neighbour; scales [g, N]; g_idx [K]: the group of each input
    awq (gemm)          qweight int32 [K, N / 8], qzeros int32 [g, N / 8]: eight columns of a word stand in the order
                        0, 2, 4, 6, 1, 3, 5, 7; scales [g, N]
    compressed-tensors  weight_packed int32 [N, K / p] along K, of codes made positive; weight_scale [N, g];
    (pack-quantized)    weight_zero_point int32 [N / p, g] along N, where not symmetric; weight_shape [2]

    mxfp4               `mxfp4.py`
    floats              `coded.py`, of all tools, and bitsandbytes in 4 bits
    int8                `integers.py`, of all tools, and bitnet
    hqq, torchao        `affine.py`; mlx `mlx.py`

Layouts: AutoGPTQ's QuantLinear, AutoAWQ's WQLinear_GEMM, compressed_tensors' pack_to_int32. Order of activations
(groups of inputs that do not lie together) is refused: rows have groups of neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from forebay.kernels.formats import packing
from forebay.rewriter.checkpoints.affine import affine_tensors
from forebay.rewriter.checkpoints.checkpoint import Checkpoint, read_tensor
from forebay.rewriter.checkpoints.coded import CodedTensor, coded_tensors
from forebay.rewriter.checkpoints.integers import integer_tensors
from forebay.rewriter.checkpoints.mlx import mlx_tensors
from forebay.rewriter.checkpoints.mxfp4 import Mxfp4Tensor, mxfp4_tensors
from forebay.rewriter.checkpoints.records import CheckpointError, TensorRecord, log_once
from forebay.rewriter.checkpoints.rounding import closest_scale_dtype
from forebay.rewriter.checkpoints.scheme import BITNET, BNB4, HQQ, INT8, MLX, STORED, TORCHAO, Scheme
from forebay.rewriter.checkpoints.stored_tensors import values_dtype
from forebay.rewriter.checkpoints.word_codes import GroupLayout, awq_columns, gptq_zeros, unpack

# Last parts of the names of what rounds activations, keys and values at run time.
ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale",
               "output_scale", "k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point")
WIDEST = 128  # values of a group where one scale serves a longer run
PIECE_NBYTES = 4 << 20
# codes uint8 [N, K], scales [N, g], zero points int32 [N, g]
GroupParts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def grouped_tensors(
    checkpoint: Checkpoint, scheme: Scheme
) -> tuple[Sequence[GroupedTensor | Mxfp4Tensor | CodedTensor], set[str]]:
    """The quantized matrices of a checkpoint, each under its weight's name, and the names of what they consist of."""
    dtype, stored, folder = values_dtype(checkpoint.tensors.values()), checkpoint.tensors, checkpoint.folder
    if scheme.method == "mxfp4":
        return mxfp4_tensors(stored, dtype, folder)
    if scheme.coded in (HQQ, TORCHAO):
        return affine_tensors(checkpoint, scheme, dtype)
    if scheme.coded == MLX:
        return mlx_tensors(stored, scheme.settings, dtype, folder)
    found: list[GroupedTensor | CodedTensor] = []
    parts = {name for name in stored if name.rpartition(".")[2] in ACTIVATIONS}
    if parts:
        log_once(f"{folder}: scales of activations and of the KV cache are left out: activations keep the model's "
                 "dtype")
    made: list[tuple[Sequence[GroupedTensor | CodedTensor], set[str]]] = []
    if scheme.coded in (INT8, BITNET, STORED):
        made.append(integer_tensors(stored, scheme.coded, scheme.divides, dtype, folder))
    if scheme.coded in (BNB4, STORED):
        made.append(coded_tensors(stored, scheme.coded == BNB4, scheme.block, dtype, folder))
    if scheme.layouts:
        made.append(_word_tensors(stored, scheme, dtype, folder))
    for matrices, taken in made:
        found += matrices
        parts |= taken
    return found, parts


def _word_tensors(
    stored: Mapping[str, TensorRecord], scheme: Scheme, dtype: torch.dtype, folder: Path
) -> tuple[list[GroupedTensor], set[str]]:
    main = PARTS[scheme.method][0]
    found, parts = [], set[str]()
    for name, codes in stored.items():
        module, _, last = name.rpartition(".")
        if last != main or (scheme.coded == STORED and codes.dtype != torch.int32):
            continue
        own = {part: record for part in PARTS[scheme.method] if (record := stored.get(f"{module}.{part}"))}
        parts |= {record.name for record in own.values()}
        found.append(GroupedTensor(f"{module}.weight", dtype, scheme, own, folder))
    return found, parts


PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"), "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
}


@dataclass(frozen=True)
class GroupedTensor:
    """A quantized matrix, whose parts are read when its contents are asked for, and held together."""

    name: str
    dtype: torch.dtype
    scheme: Scheme
    records: Mapping[str, TensorRecord]
    folder: Path

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]; CheckpointError for parts that are missing or do not fit together."""
        return self._size(self._layout)

    @cached_property
    def _layout(self) -> GroupLayout:
        """The first layout of the scheme that the shapes of the parts fit."""
        layouts = self.scheme.layouts
        main, *parts = PARTS[self.scheme.method]
        needed = parts[:1] if self.scheme.method == "compressed-tensors" else parts[:2]
        for part in needed:
            if part not in self.records:
                raise self._wrong(f"lacks {part}")
        codes = self.records[main]
        if len(codes.shape) != 2 or codes.dtype != torch.int32:
            raise self._wrong(f"has codes of {codes.dtype} {list(codes.shape)}, where int32 of two dimensions are read")
        misfits = {layout: self._misfit(layout) for layout in layouts}
        fitting = [layout for layout, misfit in misfits.items() if not misfit]
        if not fitting:
            where = "config_groups" if self.scheme.method == "compressed-tensors" else "dynamic"
            rest = f"; {where} gives no other layout that fits" if len(layouts) > 1 else ""
            raise self._wrong(misfits[layouts[0]] + rest)
        alike = len({layout.symmetric for layout in fitting}) == 1
        return fitting[0] if alike else fitting[0]._replace(symmetric=None)

    def _size(self, layout: GroupLayout) -> tuple[int, int]:
        rows, columns = self.records[PARTS[self.scheme.method][0]].shape
        per_word = 32 // layout.bits
        return {"gptq": (columns, rows * per_word), "awq": (columns * per_word, rows),
                "compressed-tensors": (rows, columns * per_word)}[self.scheme.method]

    def _misfit(self, layout: GroupLayout) -> str:
        """The first thing about the parts that differs from such a layout; "" where all fits."""
        n, k = self._size(layout)
        groups, words = k // layout.group if layout.group else 1, -(-n * layout.bits // 32)
        what = f"is [{n}, {k}] of {layout.bits} bits"
        expected: dict[str, tuple[int, ...]] = {"scales": (groups, n), "qzeros": (groups, words)}
        if self.scheme.method == "compressed-tensors":
            expected = {"weight_scale": (n, groups), "weight_zero_point": (words, groups), "weight_shape": (2,)}
        for part, shape in expected.items():
            record = self.records.get(part)
            if k % max(32, layout.group) or (record is not None and record.shape != shape):
                found = "" if record is None else f" {list(record.shape)}"
                return f"{what}, but has {part.removeprefix('weight_')}{found} for groups of {layout.group or k}"
        shape_record = self.records.get("weight_shape")
        if shape_record is None and len({each.bits for each in self.scheme.layouts}) > 1 and "weight_scale" in expected:
            return "lacks weight_shape, which tells its bits"
        if shape_record is not None and read_tensor(shape_record).tolist() != [n, k]:
            return f"{what}, but weight_shape is {read_tensor(shape_record).tolist()}"
        return self._zeros_misfit(layout)

    def _zeros_misfit(self, layout: GroupLayout) -> str:
        if self.scheme.method != "compressed-tensors":
            return ""
        stored = "weight_zero_point" in self.records
        if layout.symmetric is False and not stored:
            return "lacks weight_zero_point, although it is not symmetric"
        if layout.symmetric and stored and any(each.symmetric is False for each in self.scheme.layouts):
            return "has weight_zero_point, although it is symmetric"
        return ""

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.folder}: {self.name}, quantized by {self.scheme.method}, {what}")

    @property
    def _group(self) -> int:
        """Values that share a scale in the rows: a size that products take on every device."""
        whole = self._layout.group or self.shape[1]
        return next(g for g in (WIDEST, 64, 32) if whole % g == 0)

    def check(self) -> None:
        """Raise CheckpointError for what can be told without the codes: parts, layout, and the order of groups."""
        order = self.records.get("g_idx", self.records.get("weight_g_idx"))
        self._refuse_order(None if order is None else read_tensor(order), self.shape[1])

    def format(self) -> str:
        return f"w{self._layout.bits}g{self._group}"

    def nearest(self) -> str:
        return ""

    @property
    def scale_dtype(self) -> torch.dtype:
        _, scale, zero = self._parts
        return closest_scale_dtype(scale, zero * scale.float())

    def contents(self) -> Iterator[torch.Tensor]:
        n, k = self.shape
        step = max(1, PIECE_NBYTES // (4 * k))
        rows = self.rows(False)
        return (rows(begin, min(n, begin + step)).to(self.dtype) for begin in range(0, n, step))

    def rows(self, transposed: bool) -> Callable[[int, int], torch.Tensor]:
        codes, scale, zero = self._parts
        if transposed:
            raise self._wrong("is a matrix that the model has transposed, which is not read")

        def values(lower: int, upper: int) -> torch.Tensor:
            each = codes.shape[1] // scale.shape[1]
            wide = [part[lower:upper].float().repeat_interleave(each, 1) for part in (scale, zero)]
            return (codes[lower:upper].float() - wide[1]) * wide[0]

        return values

    def repacked(self, scale_dtype: torch.dtype | None = None) -> Callable[[int, int], torch.Tensor]:
        codes, scale, zero = self._parts
        dtype = scale_dtype or closest_scale_dtype(scale, zero * scale.float())
        times = self.shape[1] // scale.shape[1] // self._group

        def rows(lower: int, upper: int) -> torch.Tensor:
            s = scale[lower:upper].to(dtype).repeat_interleave(times, 1)
            low = (-zero[lower:upper].repeat_interleave(times, 1) * s.float()).to(dtype)
            return packing.pack_rows(packing.pack_codes(codes[lower:upper], self._layout.bits), s, low)

        return rows

    @property
    def _parts(self) -> GroupParts:
        """All of it; a byte for each code."""
        n, k = self.shape
        read = {part: read_tensor(record) for part, record in self.records.items()}
        method, bits = self.scheme.method, self._layout.bits
        middle = 1 << (bits - 1)
        self._refuse_order(read.get("g_idx", read.get("weight_g_idx")), k)
        if method == "awq":
            codes, zero = (awq_columns(read[part]) for part in ("qweight", "qzeros"))
            return codes.t().contiguous(), read["scales"].t(), zero.t().int()
        if method == "gptq":
            found = gptq_zeros(read["qzeros"], n, self._layout, self.scheme.zero_offset)
            if found is None:
                raise self._wrong(f"is symmetric by quantization_config (sym), but its zero points are neither all "
                                  f"{middle} nor all {middle - 1}: sym or the file is wrong; quantize it again")
            return unpack(read["qweight"], bits, 0).t().contiguous(), read["scales"].t(), found.t().int()
        codes, scale = unpack(read["weight_packed"], bits, 1), read["weight_scale"]
        if "weight_zero_point" in read:
            zero = unpack(read["weight_zero_point"], bits, 0)[:n].int()
            if self._layout.symmetric and not bool((zero == middle).all()):
                raise self._wrong("is symmetric by quantization_config, but its zero points are not the middle code")
            return codes, scale, zero
        return codes, scale, torch.full(scale.shape, middle, dtype=torch.int32)

    def _refuse_order(self, order: torch.Tensor | None, k: int) -> None:
        if order is None and self.scheme.ordered and k > (self._layout.group or k):
            raise self._wrong("was quantized in the order of activations (desc_act, actorder), but lacks g_idx, which "
                              "tells that order; quantize without it")
        if order is not None and order.numel() and bool((order < 0).all()):
            return  # compressed-tensors writes -1 where there is none
        if order is not None and not torch.equal(order.long(), torch.arange(k) // (self._layout.group or k)):
            raise self._wrong("has groups of inputs that do not lie together (desc_act, actorder), which rows cannot "
                              "hold; quantize without it")
