"""Match stored tensors: possible names, whether one is the weight that the model wants, and whether two are equal."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch

from forebay.rewriter.checkpoints.checkpoint import DTYPES, read_tensor
from forebay.rewriter.checkpoints.identity import FileState, file_state
from forebay.rewriter.checkpoints.records import CheckpointError, TensorRecord

PIECE_NBYTES = 4 << 20  # of two tensors that are compared

def spellings(name: str, prefix: str) -> tuple[str, ...]:
    """The names that a checkpoint may give to one of the model's: with the base model's prefix, and without."""
    return tuple(dict.fromkeys((name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))))


def require_fits(record: TensorRecord, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    """Raise CheckpointError unless a stored tensor has the shape and dtype of the model's weight `name`."""
    if record.opaque:
        raise CheckpointError(f"{record.path}: {record.name} has dtype {record.opaque!r}, which cannot be computed "
                              f"with; known are {', '.join(DTYPES)}")
    has_shape, has_dtype = (record.shape, record.dtype) if record.packed is None else (
        record.packed.shape, record.packed.dtype)
    if tuple(has_shape) != tuple(shape):
        raise CheckpointError(f"{record.path}: {record.name} has shape {list(has_shape)}, the model's {name} has "
                              f"{list(shape)}")
    if has_dtype != dtype:
        raise CheckpointError(f"{record.path}: {record.name} is {str(has_dtype)[6:]}, the model computes in "
                              f"{str(dtype)[6:]}; save the checkpoint in that dtype")


def require_same(record: TensorRecord, others: Iterable[TensorRecord]) -> None:
    """Raise CheckpointError unless other tensors, which are the same weight to the model, hold the same values."""
    for other in others:
        if not same_contents(record, other):
            raise CheckpointError(f"{other.path}: {record.name} and {other.name} are one weight to the model, and "
                                  "their values differ; take the wrong one out of the checkpoint")


def same_contents(one: TensorRecord, other: TensorRecord) -> bool:
    """Return whether two tensors hold the same values; both are read where nothing else tells them apart."""
    if (one.path, one.offset) == (other.path, other.offset):
        return True
    if (one.dtype, one.shape, one.packed, one.opaque) != (other.dtype, other.shape, other.packed, other.opaque):
        return False
    first, second = sorted((one, other), key=lambda record: (record.path, record.offset))
    return _same_bytes(first, second, file_state(first.path), file_state(second.path))


@functools.lru_cache(maxsize=64)
def _same_bytes(one: TensorRecord, other: TensorRecord, *states: FileState) -> bool:
    """Compare the bytes of two tensors, once while their files are in the given states."""
    return all(torch.equal(a, b) for a, b in zip(_bytes_of(one), _bytes_of(other), strict=True))


def _bytes_of(record: TensorRecord) -> Iterator[torch.Tensor]:
    for at in range(0, record.nbytes, PIECE_NBYTES):
        nbytes = min(PIECE_NBYTES, record.nbytes - at)
        yield read_tensor(record.part(at, nbytes, torch.uint8, (nbytes,)))


# Names of tensors that are no weights end so.
_FACTORS = ("scale", "scales", "zero", "zero_point", "scale_inv", "absmax", "quant_map", "SCB")


def values_dtype(records: Iterable[TensorRecord]) -> torch.dtype:
    """The dtype of most bytes that are not quantized."""
    sizes: dict[torch.dtype, int] = {}
    for record in records:
        if record.dtype.is_floating_point and record.dtype.itemsize > 1 and not record.name.endswith(_FACTORS):
            sizes[record.dtype] = sizes.get(record.dtype, 0) + record.nbytes
    return max(sizes, key=lambda d: sizes[d], default=torch.float16)
