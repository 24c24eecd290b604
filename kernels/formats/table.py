"""The formats that numbers are kept in: bits of a code, elements that share a scale and a low, and bytes of a row.

| format | of | codes | groups | a row (layout in `packing`) |
|---|---|---|---|---|
| native | weights, caches | none: values as they are | - | size * itemsize |
| w4gN, w8gN; w8 is w8g128 | weights [N, K] | 4 or 8 bits | N along K, N even | padded to 16 bytes |
| w4gNs, w8gNs: symmetric | the same, 0 the middle code | 4 or 8 bits | the same, no lows | padded to 16 bytes |
| fp8, mxfp4, nvfp4, nf4, fp4, fp8gN ... | weights, by codebook | 8, 4 bits | 128, 32, 16, 64, 64; N | the same |
| iq1, iq2, iq3, iq1g16 ...: symmetric | weights of GGUF files, by codebook | 4 bits | 32; N | the same, no lows |
| kv8, kv4 | caches, rotated rows of one position and head | 8 or 4 bits | by the size of the head | to 4 bytes |
| act8 | hidden states kept in place of K and V | 8 bits | 64 | padded to 16 bytes |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forebay.kernels.formats import row_sizes


@dataclass(frozen=True)
class Format:
    """How rows of numbers are kept; group_size 0: no groups (native), or what `CacheFormat` says."""

    name: str
    bits: int = 0
    group_size: int = 0
    symmetric: bool = False
    codebook: str = ""  # by which codes are numbers, one of `codebooks.CODEBOOKS`

    def row_nbytes(self, size: int, itemsize: int) -> int:
        """Bytes of a row of `size` elements, whose values as they are take itemsize bytes each."""
        if not self.bits:
            return size * itemsize
        return row_sizes.row_nbytes(size, self.bits, self.group_size, symmetric=self.symmetric)

    def ratio(self, size: int, itemsize: int) -> float:
        """Bytes of a row of `size` elements over those of its values as they are."""
        return self.row_nbytes(size, itemsize) / (size * itemsize)


@dataclass(frozen=True, kw_only=True)
class CacheFormat(Format):
    """A cache of packed rows, uint8, one for each position of each KV head. All that asks about it asks here; the
    devices that it can be on are those that both operators have kernels for.

    Attributes:
        append: The name of the operator that writes rows of new tokens, as `forebay::kv_append` writes values.
        attend: The name of the operator that attends over rows, as `forebay::attention` does over values.
        row: Bytes of the row of `head_dim` elements, a multiple of `row_sizes.CACHE_ALIGN`.
        error: At most this share of normal values is lost: the norm of what a stored row differs by, over its norm.
        arguments: What both operators are given behind the arguments of those for values, by name, for a `head_dim`.
    """

    append: str
    attend: str
    row: Callable[[int], int]
    error: float
    arguments: Callable[[int], Mapping[str, int]] = lambda head_dim: {}

    def row_nbytes(self, size: int, itemsize: int) -> int:
        return self.row(size)

    @property
    def operators(self) -> tuple[str, ...]:
        """Names of the operators over such rows."""
        return self.append, self.attend


def _rotated(bits: int, error: float) -> CacheFormat:
    """Rotated rows, codes in groups by the size of the head (`kernels/cache/kv_append_q/operator.py`)."""
    return CacheFormat(
        f"kv{bits}", bits=bits, append="forebay.kv_append_q", attend="forebay.attention_q",
        row=lambda head_dim: row_sizes.cache_row_nbytes(head_dim, bits), error=error,
        arguments=lambda head_dim: {"bits": bits, "group": row_sizes.cache_group_size(head_dim, bits)})


NATIVE = Format("native")
WEIGHT_FORMATS = {
    f.name: f
    for f in (
        NATIVE,
        Format("w4g32", 4, 32),
        Format("w4g64", 4, 64),
        Format("w4g128", 4, 128),
        Format("w8", 8, 128),
        Format("fp8", 8, 128, codebook="e4m3"),
        Format("mxfp4", 4, 32, True, "e2m1"),
        Format("nvfp4", 4, 16, codebook="e2m1"),
        Format("nf4", 4, 64, codebook="nf4"),
        Format("fp4", 4, 64, codebook="fp4"),
        Format("iq1", 4, 32, True, "iq1"),
        Format("iq2", 4, 32, True, "iq2"),
        Format("iq3", 4, 32, True, "iq3"),
    )
}
CACHE_FORMATS: dict[str, Format] = {f.name: f for f in (NATIVE, _rotated(8, 0.006), _rotated(4, 0.08))}
ACT8 = Format("act8", 8, 64)
ACTIVATION_FORMATS = {ACT8.name: ACT8}
CHECKPOINT_FORMATS = {f.name: f for f in (NATIVE, ACT8)}
# What is advised and tried where bytes bind, and the rows of packed weights by which a machine is measured: those of
# other group sizes are timed as the nearest of these, symmetric ones as those with lows.
SMALL_WEIGHTS, SMALL_CACHE = WEIGHT_FORMATS["w4g64"], CACHE_FORMATS["kv4"]
TIMED_WEIGHTS = ("w4g32", "w4g64", "w8g32", "w8g128")


def packed_caches() -> dict[str, CacheFormat]:
    """The formats of caches but for values as they are, by name."""
    return {name: f for name, f in CACHE_FORMATS.items() if isinstance(f, CacheFormat)}


def cache_choices() -> str:
    """The formats of caches as a sentence lists them, each with what it loses."""
    packed = [f"{name} (values differ by at most {100 * f.error:.2g} %)" for name, f in packed_caches().items()]
    return ", ".join((NATIVE.name, *packed[:-1])) + "".join(f" or {last}" for last in packed[-1:])


def weight_format(name: str) -> Format:
    """The format of a weight: one of WEIGHT_FORMATS, or of another even group size, as in w4g48 and w8g32, or
    symmetric, as in w4g32s. Products read only some of these packed: see `row_sizes.product_refusal`.

    ValueError for other names.
    """
    found = WEIGHT_FORMATS.get(name)
    if found is not None:
        return found
    parts = re.fullmatch(r"(w4|w8|fp8|nf4|fp4|iq[123])g([1-9]\d{0,5})(s?)", name)
    if parts is None or int(parts[2]) % 2 or (parts[3] and parts[1][0] != "w"):
        raise ValueError(f"no weight format {name!r}; there are {', '.join(WEIGHT_FORMATS)} and, for groups of 16 "
                         "or of other multiples of 32, names like w8g32, or symmetric w8g32s")
    like = WEIGHT_FORMATS.get(parts[1])
    if like is not None and like.codebook:
        return Format(name, like.bits, int(parts[2]), like.symmetric, like.codebook)
    return Format(name, int(parts[1][-1]), int(parts[2]), bool(parts[3]))


def weight_name(bits: int, group_size: int, symmetric: bool = False, codebook: str = "") -> str:
    """The name of the weight format of such rows."""
    for known in WEIGHT_FORMATS.values() if codebook else ():
        if (known.codebook, known.symmetric) == (codebook, symmetric):
            return known.name if known.group_size == group_size else f"{known.name}g{group_size}"
    return f"w{bits}g{group_size}{'s' if symmetric else ''}"


def symmetric_name(name: str) -> str:
    """The name of the symmetric format of as many bits and elements in a group; native of native."""
    found = weight_format(name)
    plain = found.bits and not found.codebook
    return weight_name(found.bits, found.group_size, True) if plain else name


def packed_format(weight: str) -> Format | None:
    """The format of packed rows that a product's weight is named by ("w4g64"); None where it is named by its dtype."""
    return weight_format(weight) if re.match(r"(w|mxfp|nvfp|nf|fp|iq)\d", weight) else None


def cache_format(name: str) -> Format:
    """One of CACHE_FORMATS; ValueError for other names."""
    return _among(CACHE_FORMATS, name, "cache")


def checkpoint_format(name: str) -> Format:
    """One of CHECKPOINT_FORMATS; ValueError for other names."""
    return _among(CHECKPOINT_FORMATS, name, "checkpoint")


def _among(formats: Mapping[str, Format], name: str, of: str) -> Format:
    if name not in formats:
        raise ValueError(f"no {of} format {name!r}; there are {', '.join(formats)}")
    return formats[name]
