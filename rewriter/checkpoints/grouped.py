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
    fp8, bitsandbytes   `coded.py`, and compressed-tensors' floats; bitsandbytes in 8 bits and bitnet `integers.py`
    hqq, torchao        `affine.py`

Layouts: AutoGPTQ's QuantLinear, AutoAWQ's WQLinear_GEMM, compressed_tensors' pack_to_int32. Order of activations
(groups of inputs that do not lie together) is refused: rows have groups of neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from forebay.kernels.formats import packing
from forebay.rewriter.checkpoints import known_settings
from forebay.rewriter.checkpoints.affine import affine_tensors
from forebay.rewriter.checkpoints.checkpoint import Checkpoint, read_tensor
from forebay.rewriter.checkpoints.coded import CodedTensor, coded_tensors
from forebay.rewriter.checkpoints.integers import integer_tensors
from forebay.rewriter.checkpoints.known_settings import unknown_compressed, unknown_setting
from forebay.rewriter.checkpoints.mxfp4 import Mxfp4Tensor, mxfp4_tensors
from forebay.rewriter.checkpoints.records import CheckpointError, TensorRecord
from forebay.rewriter.checkpoints.rounding import closest_scale_dtype
from forebay.rewriter.checkpoints.scheme import (
    BITNET,
    FLOATS,
    HQQ,
    INT8,
    TORCHAO,
    Scheme,
    compressed_floats,
    not_read,
    read_bitnet,
    read_bitsandbytes,
    read_fp8,
    read_hqq,
    read_torchao,
    refused,
)
from forebay.rewriter.checkpoints.stored_tensors import values_dtype
from forebay.rewriter.checkpoints.word_codes import GroupLayout, awq_columns, gptq_zeros, unpack
from forebay.rewriter.ir.files import read_input, write_text

GPTQ_FILE = "quantize_config.json"  # of AutoGPTQ, from before config.json had its settings
METHODS = ("awq", "gptq", "compressed-tensors", "mxfp4", "fp8", "bitsandbytes", "bitnet", HQQ, TORCHAO)
WIDEST = 128  # values of a group where one scale serves a longer run
PIECE_NBYTES = 4 << 20
# codes uint8 [N, K], scales [N, g], zero points int32 [N, g]
GroupParts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def quantization_settings(folder: Path) -> Mapping[str, Any] | None:
    """Read the settings of quantized weights from config.json, or from a separate file next to it; None without any.
    Whoever reads the config tells if it is damaged."""
    try:
        config = json.loads(read_input(folder / "config.json"))
        found = config.get("quantization_config") or config.get("compression_config")
        if not found and (folder / GPTQ_FILE).is_file():
            found = {"quant_method": "gptq"} | json.loads(read_input(folder / GPTQ_FILE))
    except (OSError, ValueError, TypeError, RecursionError, AttributeError):
        return None
    if found and not isinstance(found, dict):
        raise CheckpointError(f"{folder / 'config.json'}: quantization_config must be an object, found "
                              f"{type(found).__name__}")
    return found or None


def without_quantization(path: Path) -> None:
    """Take from a config.json what it says of quantized weights, and the file of its own that may do so."""
    path.with_name(GPTQ_FILE).unlink(missing_ok=True)
    config = json.loads(read_input(path))
    if [name for name in ("quantization_config", "compression_config") if config.pop(name, None) is not None]:
        write_text(path, json.dumps(config, indent=2) + "\n")


def read_scheme(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """The scheme of a checkpoint; CheckpointError, naming method and detail, for one that rows cannot hold."""
    method = settings.get("quant_method")
    readers = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "mxfp4": _mxfp4,
               "fp8": read_fp8, "bitsandbytes": read_bitsandbytes, "bitnet": read_bitnet,
               HQQ: read_hqq, TORCHAO: read_torchao}
    if not isinstance(method, str) or method not in readers:
        raise refused(folder, f"{method!r}; {', '.join(METHODS)} are read")
    try:
        return _checked(readers[method](settings, folder), folder)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:  # the last: int(Infinity)
        raise refused(folder, f"{method}, but quantization_config lacks what that needs: {error!r}") from error


def _gptq(settings: Mapping[str, Any], folder: Path) -> Scheme:
    said = {str(settings[key]).lower() for key in ("checkpoint_format", "format") if settings.get(key)}
    if len(said) > 1 or not said <= {"gptq", "gptq_v2"}:
        raise refused(folder, f"gptq in checkpoint_format {' and '.join(map(repr, sorted(said)))}; gptq or gptq_v2 is "
                               "read")
    layout = GroupLayout(int(settings["bits"]), max(0, int(settings["group_size"])), _flag(settings, "sym"))
    return _with_overrides(Scheme("gptq", (layout,), 0 if said == {"gptq_v2"} else 1, bool(settings.get("desc_act"))),
                           settings, folder)


def _awq(settings: Mapping[str, Any], folder: Path) -> Scheme:
    for key in ("version", "format"):
        if str(settings.get(key) or "gemm").lower() != "gemm":
            raise refused(folder, f"awq in {key} {settings[key]!r}; gemm is read")
    if settings.get("backend") == "llm-awq":
        raise refused(folder, "awq for the backend 'llm-awq', whose layout differs; version gemm is read")
    layout = GroupLayout(int(settings["bits"]), max(0, int(settings["group_size"])))
    return _with_overrides(Scheme("awq", (layout,)), settings, folder)


def _with_overrides(scheme: Scheme, settings: Mapping[str, Any], folder: Path) -> Scheme:
    """`scheme` with the layouts that `dynamic` gives single modules. Its patterns are not matched: a matrix's shapes
    tell which layout it has, and the plain weight of a module that it leaves out ("-:") is read as such."""
    odd = unknown_setting(settings, known_settings.GPTQ if scheme.method == "gptq" else known_settings.AWQ)
    typical, ordered = scheme.layouts[0], scheme.ordered
    layouts = [typical]
    for pattern, given in (settings.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            continue
        odd = odd or unknown_setting(given, known_settings.OVERRIDE, f"dynamic[{pattern!r}].")
        bits, group = int(given.get("bits", typical.bits)), max(0, int(given.get("group_size", typical.group)))
        layouts.append(GroupLayout(bits, group, _flag(given, "sym", typical.symmetric)))
        ordered = ordered or bool(given.get("desc_act"))
    if odd:
        raise not_read(folder, scheme.method, odd)
    return scheme._replace(layouts=tuple(layouts), ordered=ordered)


def _compressed(settings: Mapping[str, Any], folder: Path) -> Scheme:
    if settings["format"] in FLOATS:
        return compressed_floats(settings, folder)
    if settings["format"] != "pack-quantized":
        raise refused(folder, f"compressed-tensors in format {settings['format']!r}; pack-quantized, "
                               f"{', '.join(FLOATS)} are read")
    layouts, ordered = [], False
    for group in settings["config_groups"].values():
        weights = group["weights"]
        if group.get("input_activations") is not None:
            raise refused(folder, "compressed-tensors with activations quantized too; weights alone are read")
        if weights.get("type", "int") != "int" or weights["strategy"] not in ("group", "channel"):
            raise refused(folder, f"compressed-tensors of type {weights.get('type')!r} by {weights['strategy']!r}; "
                                   "int by group or channel is read")
        size = int(weights.get("group_size") or 0) if weights["strategy"] == "group" else 0
        layouts.append(GroupLayout(int(weights["num_bits"]), size, _flag(weights, "symmetric", True)))
        ordered = ordered or weights.get("actorder") in (True, "group", "dynamic")
    odd = unknown_compressed(settings)
    if odd:
        raise not_read(folder, "compressed-tensors", odd)
    if not layouts:
        raise refused(folder, "compressed-tensors, but config_groups is empty")
    return Scheme("compressed-tensors", tuple(layouts), ordered=ordered)


def _mxfp4(settings: Mapping[str, Any], folder: Path) -> Scheme:
    odd = unknown_setting(settings, known_settings.MXFP4)
    if odd:
        raise not_read(folder, "mxfp4", odd)
    return Scheme("mxfp4", ())


def _flag(settings: Mapping[str, Any], key: str, default: bool | None = None) -> bool | None:
    found = settings.get(key)
    if found is not None and not isinstance(found, bool):
        raise ValueError(f"{key} must be true or false, found {found!r}")
    return default if found is None else found


def _checked(scheme: Scheme, folder: Path) -> Scheme:
    for bits, group, _ in scheme.layouts:
        if bits not in ((4,) if scheme.method == "awq" else (4, 8)):
            raise refused(folder, f"{scheme.method} of {bits} bits; 4 bits are read, and 8 but for awq")
        if group % 32:
            raise refused(folder, f"{scheme.method} in groups of {group}; multiples of 32 are read")
    return scheme


def grouped_tensors(
    checkpoint: Checkpoint, scheme: Scheme
) -> tuple[Sequence[GroupedTensor | Mxfp4Tensor | CodedTensor], set[str]]:
    """The quantized matrices of a checkpoint, each under its weight's name, and the names of what they consist of."""
    dtype, stored, folder = values_dtype(checkpoint.tensors.values()), checkpoint.tensors, checkpoint.folder
    if scheme.method == "mxfp4":
        return mxfp4_tensors(stored, dtype, folder)
    if scheme.coded in (HQQ, TORCHAO):
        return affine_tensors(checkpoint, scheme, dtype)
    if scheme.coded in (INT8, BITNET):
        return integer_tensors(stored, scheme.coded, scheme.divides, dtype, folder)
    if scheme.coded:
        return coded_tensors(stored, scheme.coded, scheme.block, dtype, folder)
    main = PARTS[scheme.method][0]
    found, parts = [], set[str]()
    for name in stored:
        module, _, last = name.rpartition(".")
        if last != main:
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
