"""Safetensors checkpoints of AWQ, GPTQ and compressed-tensors: codes in groups along the inputs, as rows of `packing`.

A matrix [N, K] of theirs has codes q, and a scale s and a zero point z for each row and group: (q - z) s, which as
code, scale and low is q s - z s. Codes and scales are kept. -z s is exact for symmetric ones, whose z is half of the
codes' range; else it is rounded to fp16, by 2^-11 of it: 1/128 of s at most for codes of 4 bits.

    gptq                qweight int32 [K / p, N]: p = 32 / bits codes along K; qzeros int32 [g, N / p] along N, each
                        less by 1 (not in format gptq_v2); scales [g, N]; g_idx [K]: the group of each input
    awq (gemm)          qweight int32 [K, N / 8], qzeros int32 [g, N / 8]: eight columns of a word stand in the order
                        0, 2, 4, 6, 1, 3, 5, 7; scales [g, N]
    compressed-tensors  weight_packed int32 [N, K / p] along K, of codes made positive; weight_scale [N, g];
    (pack-quantized)    weight_zero_point int32 [N / p, g] along N, where not symmetric; weight_shape [2]

Layouts: AutoGPTQ's QuantLinear, AutoAWQ's WQLinear_GEMM, compressed_tensors' pack_to_int32. Order of activations
(groups of inputs that do not lie together) is refused: rows have groups of neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forebay.kernels.formats import packing
from forebay.rewriter.checkpoints.checkpoint import Checkpoint, CheckpointError, TensorRecord, read_tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
METHODS = ("awq", "gptq", "compressed-tensors")
WIDEST = 128  # values of a group where one scale serves a longer run
PIECE_NBYTES = 4 << 20
# codes uint8 [N, K], scales [N, g], zero points int32 [N, g]
GroupParts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Scheme(NamedTuple):
    """How a checkpoint's matrices are quantised; group 0: a scale for each row."""

    method: str
    bits: int
    group: int
    zero_offset: int = 0  # to be added to what is stored as a zero point


def quantization_settings(folder: Path) -> Mapping[str, Any] | None:
    """What config.json says of quantised weights, or None; whoever reads the config tells if it is damaged."""
    try:
        found = json.loads((folder / "config.json").read_bytes()).get("quantization_config")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    return found if isinstance(found, dict) else None


def without_quantization(path: Path) -> None:
    """Take from a config.json what it says of quantised weights, if it does."""
    config = json.loads(path.read_bytes())
    if config.pop("quantization_config", None) is not None:
        path.write_text(json.dumps(config, indent=2) + "\n")


def read_scheme(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """The scheme of a checkpoint; CheckpointError, naming method and detail, for one that rows cannot hold."""
    method = settings.get("quant_method")
    try:
        if method == "gptq":
            return _checked(Scheme(method, int(settings["bits"]), max(0, int(settings["group_size"])),
                                   0 if settings.get("checkpoint_format") == "gptq_v2" else 1), folder)
        if method == "awq":
            if settings.get("version", "gemm").lower() != "gemm":
                raise _refused(folder, f"awq in version {settings['version']!r}; gemm is read")
            return _checked(Scheme(method, int(settings["bits"]), max(0, int(settings["group_size"]))), folder)
        if method == "compressed-tensors":
            return _checked(_compressed(settings, folder), folder)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:  # the last: int(Infinity)
        if isinstance(error, CheckpointError):
            raise
        raise _refused(folder, f"{method}, but quantization_config lacks what that needs: {error!r}") from error
    raise _refused(folder, f"{method!r}; {', '.join(METHODS)} are read")


def _compressed(settings: Mapping[str, Any], folder: Path) -> Scheme:
    if settings["format"] != "pack-quantized":
        raise _refused(folder, f"compressed-tensors in format {settings['format']!r}; pack-quantized is read")
    (group,) = settings["config_groups"].values() if len(settings["config_groups"]) == 1 else ({},)
    if not group:
        raise _refused(folder, "compressed-tensors with several groups of settings; one is read")
    weights = group["weights"]
    if group.get("input_activations") is not None:
        raise _refused(folder, "compressed-tensors with activations quantised too; weights alone are read")
    if weights.get("type", "int") != "int" or weights["strategy"] not in ("group", "channel"):
        raise _refused(folder, f"compressed-tensors of type {weights.get('type')!r} by {weights['strategy']!r}; int by "
                               "group or channel is read")
    return Scheme("compressed-tensors", int(weights["num_bits"]), int(weights.get("group_size") or 0)
                  if weights["strategy"] == "group" else 0)


def _checked(scheme: Scheme, folder: Path) -> Scheme:
    if scheme.bits not in ((4,) if scheme.method == "awq" else (4, 8)):
        raise _refused(folder, f"{scheme.method} of {scheme.bits} bits; 4 bits are read, and 8 but for awq")
    if scheme.group % 32:
        raise _refused(folder, f"{scheme.method} in groups of {scheme.group}; multiples of 32 are read")
    return scheme


def _refused(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{folder / 'config.json'} says that weights are quantised by {what}. Quantise the model it "
                           "was made from, with `forebay quantize`")


def grouped_tensors(checkpoint: Checkpoint, scheme: Scheme) -> tuple[list[GroupedTensor], set[str]]:
    """The quantised matrices of a checkpoint, each under its weight's name, and the names of what they consist of."""
    main = "weight_packed" if scheme.method == "compressed-tensors" else "qweight"
    found, parts = [], set()
    dtype = _values_dtype(checkpoint)
    for name in checkpoint.tensors:
        module, _, last = name.rpartition(".")
        if last != main:
            continue
        own = {part: record for part in PARTS[scheme.method] if (record := checkpoint.tensors.get(f"{module}.{part}"))}
        parts |= {record.name for record in own.values()}
        found.append(GroupedTensor(f"{module}.weight", dtype, scheme, own, checkpoint.folder))
    return found, parts


PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"), "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
}


def _values_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that most bytes of what is not quantised have."""
    sizes: dict[torch.dtype, int] = {}
    for name, record in checkpoint.tensors.items():
        if record.dtype.is_floating_point and not name.endswith("scale") and not name.endswith("scales"):
            sizes[record.dtype] = sizes.get(record.dtype, 0) + record.nbytes
    return max(sizes, key=lambda d: sizes[d], default=torch.float16)


@dataclass(frozen=True)
class GroupedTensor:
    """A quantised matrix, whose parts are read when its contents are asked for, and held together."""

    name: str
    dtype: torch.dtype
    scheme: Scheme
    records: Mapping[str, TensorRecord]
    folder: Path

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """[N, K]; CheckpointError for parts that are missing or do not fit together."""
        scheme, missing = self.scheme, [p for p in PARTS[self.scheme.method][:3] if p not in self.records]
        if [part for part in missing if part != "weight_zero_point"]:
            raise self._wrong(f"lacks {missing[0]}")
        per_word = 32 // scheme.bits
        sizes = self.records[PARTS[scheme.method][0]].shape
        if len(sizes) != 2:
            raise self._wrong(f"has codes of shape {list(sizes)}")
        n, k = {"gptq": (sizes[1], sizes[0] * per_word), "awq": (sizes[1] * per_word, sizes[0]),
                "compressed-tensors": (sizes[0], sizes[1] * per_word)}[scheme.method]
        groups = k // scheme.group if scheme.group else 1
        scales = (n, groups) if scheme.method == "compressed-tensors" else (groups, n)
        found = self.records[PARTS[scheme.method][2 if scheme.method != "compressed-tensors" else 1]].shape
        if k % max(32, scheme.group) or found != scales:
            raise self._wrong(f"is [{n}, {k}], but has scales {list(found)} for groups of {scheme.group or k}")
        return n, k

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.folder}: {self.name}, quantised by {self.scheme.method}, {what}")

    @property
    def _group(self) -> int:
        """Values that share a scale in the rows."""
        whole = self.scheme.group or self.shape[1]
        return next(g for g in (WIDEST, 64, 32) if whole % g == 0) if whole > WIDEST else whole

    def format(self) -> str:
        return f"w{self.scheme.bits}g{self._group}"

    def nearest(self) -> str:
        return ""

    @property
    def scale_dtype(self) -> torch.dtype:
        """fp16 where it holds every scale; else bf16, as such scales are of bf16."""
        return _scale_dtype(*self._parts[1:])

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

    def repacked(self) -> Callable[[int, int], torch.Tensor]:
        codes, scale, zero = self._parts
        dtype, times = _scale_dtype(scale, zero), self.shape[1] // scale.shape[1] // self._group

        def rows(lower: int, upper: int) -> torch.Tensor:
            s = scale[lower:upper].to(dtype).repeat_interleave(times, 1)
            low = (-zero[lower:upper].repeat_interleave(times, 1) * s.float()).to(dtype)
            return packing.pack_rows(packing.pack_codes(codes[lower:upper], self.scheme.bits), s, low)

        return rows

    @property
    def _parts(self) -> GroupParts:
        """All of it; a byte for each code."""
        n, k = self.shape
        read = {part: read_tensor(record) for part, record in self.records.items()}
        method, bits = self.scheme.method, self.scheme.bits
        self._refuse_order(read.get("g_idx", read.get("weight_g_idx")), k)
        if method == "awq":
            codes, zero = (_columns(read[part]) for part in ("qweight", "qzeros"))
            return codes.t().contiguous(), read["scales"].t(), zero.t().int()
        if method == "gptq":
            zero = _unpack(read["qzeros"], bits, 1).t().int() + self.scheme.zero_offset
            return _unpack(read["qweight"], bits, 0).t().contiguous(), read["scales"].t(), zero
        codes, scale = _unpack(read["weight_packed"], bits, 1), read["weight_scale"]
        if "weight_zero_point" in read:
            return codes, scale, _unpack(read["weight_zero_point"], bits, 0)[:n].int()
        return codes, scale, torch.full(scale.shape, 1 << (bits - 1), dtype=torch.int32)

    def _refuse_order(self, order: torch.Tensor | None, k: int) -> None:
        if order is not None and order.numel() and bool((order < 0).all()):
            return  # compressed-tensors writes -1 where there is none
        if order is not None and not torch.equal(order.long(), torch.arange(k) // (self.scheme.group or k)):
            raise self._wrong("has groups of inputs that do not lie together (desc_act, actorder), which rows cannot "
                              "hold; quantise without it")


def _scale_dtype(scale: torch.Tensor, zero: torch.Tensor) -> torch.dtype:
    held = bool((scale.half().float() == scale.float()).all() and (zero * scale.float()).abs().max() <= 65504)
    return torch.float16 if held else torch.bfloat16


def _unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Codes uint8 of int32 words, first in the lowest bits, along `dim` of two."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32).view(-1, *[1] * (2 - dim - 1))
    codes = (words.unsqueeze(dim + 1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(dim, dim + 1)


def _columns(words: torch.Tensor) -> torch.Tensor:
    """AWQ's columns [R, 8 C] of words [R, C]."""
    stored = _unpack(words, 4, 1).unflatten(1, (-1, 8))
    out = torch.empty_like(stored)
    out[..., list(AWQ_ORDER)] = stored
    return out.flatten(1)
