"""How a checkpoint's matrices are quantized, as its config says it, and that of formats with a codebook (`coded`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from forebay.rewriter.checkpoints import known_settings
from forebay.rewriter.checkpoints.known_settings import unknown_compressed, unknown_setting
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.word_codes import GroupLayout

INT8, BITNET = "int8", "bitnet"  # what `integers.py` reads, in `Scheme.coded`
HQQ, TORCHAO = "hqq", "torchao"  # what `affine.py` reads
# Formats of compressed-tensors that have codebooks, and what `coded.py` calls them.
FLOATS = {"float-quantized": "fp8", "nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}


class Scheme(NamedTuple):
    """How a checkpoint's matrices are quantized.

    Attributes:
        method: One of METHODS.
        layouts: The layout of most matrices, then those of single ones. The shapes of a matrix's tensors tell which it
            has.
        zero_offset: The number to be added to each stored zero point.
        ordered: Whether groups were made in the order of activations, so that the group of each input must be stored.
        coded: What `coded.py` calls it; "" for others.
        block: Rows and columns of a block that has a scale of its own, of fp8.
        divides: Whether scales divide, of bitnet.
        settings: What the config says of all matrices, of hqq.
    """

    method: str
    layouts: tuple[GroupLayout, ...]
    zero_offset: int = 0
    ordered: bool = False
    coded: str = ""
    block: tuple[int, int] = (128, 128)
    divides: bool = False
    settings: Mapping[str, Any] = {}


def refused(folder: Path, what: str) -> CheckpointError:
    """The error for weights quantized by something that is not read."""
    return CheckpointError(f"{folder / 'config.json'} says that weights are quantized by {what}. Quantize the model it "
                           "was made from, with `forebay quantize`")


def not_read(folder: Path, method: str, setting: str) -> CheckpointError:
    """The error for a setting that is not known."""
    return refused(folder, f"{method} with {setting}, which this release does not know or apply")


def compressed_floats(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """compressed-tensors of floats. Activations keep the model's dtype, whatever is said of them."""
    odd, block, coded = unknown_compressed(settings, True), (128, 128), FLOATS[settings["format"]]
    bits, groups = 8 if coded == "fp8" else 4, settings["config_groups"].values()
    for weights in (group["weights"] for group in groups):
        if (weights.get("type"), weights.get("num_bits")) != ("float", bits) or weights.get("symmetric") is False:
            raise refused(folder, f"compressed-tensors in format {settings['format']!r} of "
                                  f"{weights.get('num_bits')!r} bits of type {weights.get('type')!r}; symmetric floats "
                                  f"of {bits} bits are read")
        if weights.get("block_structure"):
            block = _block(weights["block_structure"], folder)
    if odd:
        raise not_read(folder, "compressed-tensors", odd)
    return Scheme("compressed-tensors", (), coded=coded, block=block)


def read_fp8(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """DeepSeek's and Qwen's fp8."""
    odd = unknown_setting(settings, known_settings.FP8)
    if odd:
        raise not_read(folder, "fp8", odd)
    return Scheme("fp8", (), coded="fp8", block=_block(settings.get("weight_block_size") or (128, 128), folder))


def read_bitsandbytes(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """bitsandbytes in 4 or 8 bits."""
    odd = unknown_setting(settings, known_settings.BITSANDBYTES)
    if odd:
        raise not_read(folder, "bitsandbytes", odd)
    return Scheme("bitsandbytes", (), coded=INT8 if settings.get("load_in_8bit") else "bitsandbytes")


def read_bitnet(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """BitNet's packed ternary weights."""
    odd = unknown_setting(settings, known_settings.BITNET)
    if odd:
        raise not_read(folder, "bitnet", odd)
    return Scheme("bitnet", (), coded=BITNET, divides=settings.get("linear_class") != "autobitlinear")


def read_hqq(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """HQQ. Each matrix says its own bits and groups; the config has those of matrices that do not."""
    given = settings.get("quant_config") or {}
    own = given.get("weight_quant_params") or {}
    odd = (unknown_setting(settings, known_settings.HQQ) or unknown_setting(given, known_settings.HQQ_PARTS)
           or unknown_setting(own, known_settings.HQQ_WEIGHTS))
    if odd:
        raise not_read(folder, HQQ, odd)
    said = {name: int(own[name]) for name in ("nbits", "axis") if own.get(name) is not None}
    return Scheme(HQQ, (), coded=HQQ, settings=said)


def read_torchao(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """torchao. The files' metadata describes each matrix."""
    odd = unknown_setting(settings, known_settings.TORCHAO)
    if odd:
        raise not_read(folder, TORCHAO, odd)
    return Scheme(TORCHAO, (), coded=TORCHAO)


def _block(given: Any, folder: Path) -> tuple[int, int]:
    rows, columns = given
    if not all(type(size) is int and size > 0 for size in (rows, columns)) or columns % 32:
        raise refused(folder, f"fp8 in blocks of {given!r}; those of a multiple of 32 columns are read")
    return rows, columns
