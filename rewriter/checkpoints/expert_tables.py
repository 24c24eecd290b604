"""Weights put together from a checkpoint's tensors, where they lie: none is copied or read. Most are tables of experts.

Most checkpoints have three matrices an expert, some the matrices of all experts of a layer in one tensor. transformers'
conversion mapping tells which of them are which part of the model's own parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forebay.kernels.formats.entry_part import Part
from forebay.rewriter.checkpoints.records import CheckpointError, Packed, TensorRecord
from forebay.rewriter.checkpoints.stored_tensors import require_fits, require_same, spellings
from forebay.rewriter.ir.graph import WeightSpec
from forebay.rewriter.ir.program import Band


class WeightPiece(NamedTuple):
    """The parameter that a tensor is a part of: the model's parameter, and of its rows for one expert the piece with
    this number. A parameter without experts counts as that of expert 0."""

    parameter: str
    expert: int
    number: int

    @property
    def name(self) -> str:
        """A name for it, which no parameter has."""
        return f"{self.parameter}[{self.expert}][{self.number}]"

    @staticmethod
    def of(name: str) -> WeightPiece | None:
        """The piece of that name; None for names of whole parameters."""
        found = re.fullmatch(r"(.+)\[(\d+)\]\[(\d+)\]", name)
        return None if found is None else WeightPiece(found[1], int(found[2]), int(found[3]))


def piece_names(converters: Sequence[Any]) -> Callable[[str], str]:
    """The renaming of tensors that hold a part of a parameter (`WeightPiece.name`); others keep their names.

    `converters` are transformers' `WeightConverter`s. Those count that stack one tensor an expert, and put two such
    stacks together row by row; and those that put single tensors together.
    """
    known: list[tuple[re.Pattern[str], str, int]] = []
    for each in converters:
        steps = [(type(step).__name__, getattr(step, "dim", 0)) for step in each.operations]
        joined = steps == [("Concatenate", 0)] and not any("*" in pattern for pattern in each.source_patterns)
        if len(each.target_patterns) == 1 and (joined or steps in (
                [("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])):
            for number, pattern in enumerate(each.source_patterns):
                plain = re.escape(pattern.replace("\\", "")).replace(r"\*", r"(\d+)")
                known.append((re.compile(f"{plain}$"), each.target_patterns[0].replace("\\", ""), number))

    def rename(name: str) -> str:
        for pattern, target, number in known:
            found = pattern.search(name)
            if found is not None:
                expert = int(found[1]) if found.lastindex else 0
                return WeightPiece(name[: found.start()] + target, expert, number).name
        return name

    return rename


def table_record(
    spec: WeightSpec, stored: Mapping[str, Sequence[TensorRecord]], prefix: str, folder: Path
) -> TensorRecord:
    """Return the place of a table's entries.

    Args:
        spec: The table as the model has it.
        stored: The checkpoint's tensors by the model's names, those of `piece_names` among them.
        prefix: The base model's, which names may lack or have on top.
        folder: The checkpoint's, for messages.

    Raises:
        CheckpointError: A part is missing, or has another shape or dtype.
    """
    table, bands, made_of = spec.table, [], []
    assert table is not None
    homes = [_homes(part, source, table.count, stored, prefix, folder, table.among)
             for part, source in zip(table.parts, table.sources, strict=True)]
    for expert in range(table.count):
        for home in homes:
            for record, offset, nbytes in home(expert):
                bands.append(Band(offset, 1, nbytes, ((0, nbytes),), record.path))
                made_of.append(record)
    path, entry = made_of[0].path, sum(band.row_nbytes for band in bands) // table.count
    packed = _packed_entries(spec, dict.fromkeys(made_of), entry)
    dtype, shape = (spec.dtype, spec.shape) if packed is None else (torch.uint8, (table.count, entry))
    return TensorRecord(spec.name, path, 0, table.count * entry, dtype, shape, packed, bands=tuple(bands),
                        made_of=tuple(dict.fromkeys(made_of)))


def joined_record(
    spec: WeightSpec, stored: Mapping[str, Sequence[TensorRecord]], prefix: str, folder: Path
) -> TensorRecord | None:
    """Return the place of a weight that the checkpoint has in several tensors, the rows of one after the other's; None
    where it has no such tensor. The rest is as for `table_record`."""
    if not any(WeightPiece(name, 0, 0).name in stored for name in spellings(spec.name, prefix)):
        return None
    part = Part(spec.name, 0, spec.shape, spec.dtype)
    found = _homes(part, spec.name, 1, stored, prefix, folder)(0)
    return TensorRecord(
        spec.name, found[0][0].path, 0, part.nbytes, spec.dtype, spec.shape, made_of=tuple(each for each, *_ in found),
        bands=tuple(Band(offset, 1, nbytes, ((0, nbytes),), each.path) for each, offset, nbytes in found))


def _packed_entries(spec: WeightSpec, made_of: Iterable[TensorRecord], nbytes: int) -> Packed | None:
    """Return the format of entries of so many bytes that are made of packed rows; None where they hold values as they
    are."""
    found = [record.packed for record in made_of if record.packed is not None]
    if not found:
        return None
    matrices = sum(len(part.shape) == 2 for part in spec.table.parts)  # type: ignore[union-attr]
    *ups, down = found
    if len(found) != matrices or len({(up.format, up.scale_dtype) for up in ups}) != 1:
        raise CheckpointError(f"of the matrices of {spec.name} some are packed and some are not, or the formats of "
                              "matrices read as one differ; quantize the model again, with a format for all")
    return replace(ups[0], shape=spec.shape, transposed=False, entry_nbytes=nbytes, down=down)


def table_of(spec: WeightSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A table put together from a model's parameters in memory, by the names of its `sources`."""
    assert spec.table is not None
    table = spec.table
    return torch.cat([tensors[name].detach().reshape(-1, *part.shape)[: table.count].flatten(1)
                      for part, name in zip(table.parts, table.sources, strict=True)], 1)


def _homes(
    part: Part, source: str, count: int, stored: Mapping[str, Sequence[TensorRecord]], prefix: str, folder: Path,
    among: int = 0,
) -> Callable[[int], list[tuple[TensorRecord, int, int]]]:
    """Find the bytes of a part, by expert: records, offsets in their files, and sizes. `among`: of `ExpertTable`."""
    names = spellings(source, prefix)

    def called(expert: int) -> str:
        return source if count == 1 else f"expert {expert} of {source}"

    def found(expert: int, number: int) -> list[TensorRecord]:
        keys = [WeightPiece(name, expert, number).name for name in names]
        return [record for key in keys for record in stored.get(key, ())]

    def pieces(expert: int) -> list[tuple[TensorRecord, int, int]]:
        homes: list[tuple[TensorRecord, int, int]] = []
        rows = 0
        while rows < part.shape[0]:
            same = found(expert, len(homes))
            if not same:
                raise CheckpointError(f"{folder} holds only a part of {called(expert)}")
            record = same[0]
            if not record.shape or record.shape[1:] != part.shape[1:] or not record.nbytes:
                raise CheckpointError(f"{record.path}: {record.name} has shape {list(record.shape)}, which is no part "
                                      f"of {list(part.shape)}")
            rows += record.shape[0]
            homes.append((_checked(same, record.shape, part, source), record.offset, record.nbytes))
        if rows != part.shape[0]:
            raise CheckpointError(f"{folder}: {called(expert)} has {rows} rows, not {part.shape[0]}")
        return homes

    stacked = [record for name in names for record in stored.get(name, ())]
    if stacked:
        first = stacked[0].packed or stacked[0]
        flat = len(first.shape) == len(part.shape)  # all experts' rows one after the other
        held = among if among and not flat and first.shape[0] == among else count
        shape = (count * part.shape[0], *part.shape[1:]) if flat else (held, *part.shape)
        whole = _checked(stacked, shape, part, source)
        nbytes = whole.nbytes // held
        return lambda expert: [(whole, whole.offset + expert * nbytes, nbytes)]
    if not found(0, 0):
        raise CheckpointError(f"{folder} holds no tensor for {source}: it is a checkpoint of another model")
    return pieces


def _checked(same: Sequence[TensorRecord], shape: tuple[int, ...], part: Part, source: str) -> TensorRecord:
    """The first of tensors that go by one name, once it is known to be what the parameter `source` needs of it."""
    record, *others = same
    require_same(record, others)
    require_fits(record, shape, part.dtype, source)
    return record
