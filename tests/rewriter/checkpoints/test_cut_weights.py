"""A rank's part of a stored weight: which bytes it is, and what they mean."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.kernels.formats.packing import pack_codes, pack_rows, unpack_rows
from forebay.kernels.formats.table import weight_name
from forebay.kernels.quantization.quantize.reference import dequantize_reference
from forebay.rewriter.checkpoints.cut_weights import cut_file, cut_spec
from forebay.rewriter.ir.graph import RowFormat, WeightSpec
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.ir.share import Ranges, ranges


def taken(data: bytes, file: FileSlice) -> bytes:
    """The bytes that a slice stands for, by the letter of its definition."""
    if not file.bands:
        return data[file.offset : file.offset + file.nbytes]
    found = b"".join(data[at : at + nbytes] for band in file.bands for row in range(band.count)
                     for at, nbytes in ((file.offset + band.offset + row * band.stride + piece, nbytes)
                                        for piece, nbytes in band.pieces))
    assert len(found) == file.nbytes
    return found


def some(size: int, unit: int = 1) -> st.SearchStrategy[Ranges]:
    """Some ranges of an axis, in whole units, not all empty."""
    units = -(-size // unit)
    return st.sets(st.integers(0, units - 1), min_size=1).map(
        lambda found: ranges((u * unit, min(size, (u + 1) * unit)) for u in found))


def index(held: Ranges) -> torch.Tensor:
    return torch.tensor([i for a, b in held for i in range(a, b)])


@settings(deadline=None)
@given(st.data())
def test_parts_of_a_plain_weight(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
    value = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
    raw, before = value.numpy().tobytes(), data.draw(st.integers(0, 40))
    spec = WeightSpec("w", shape, torch.float32)
    rows, columns = (data.draw(st.none() | some(n)) for n in shape)
    cut = tuple((dim, held) for dim, held in enumerate((rows, columns)) if held is not None)
    file = cut_file(spec, cut, FileSlice("f", before, len(raw)))
    want = value if rows is None else value[index(rows)]
    want = want if columns is None else want[:, index(columns)]
    assert taken(b"x" * before + raw, file) == want.contiguous().numpy().tobytes()
    part = cut_spec(spec, cut, "w")
    assert part.shape == tuple(want.shape) and part.nbytes == file.nbytes
    row = file.nbytes // want.shape[0]
    first = data.draw(st.integers(0, want.shape[0]))
    last = data.draw(st.integers(first, want.shape[0]))
    some_rows = file.part(first * row, (last - first) * row)
    assert taken(b"x" * before + raw, some_rows) == want[first:last].contiguous().numpy().tobytes()


@settings(deadline=None)
@given(st.data(), st.sampled_from((4, 8)), st.booleans(), st.booleans())
def test_parts_of_packed_rows_mean_the_same_values(
    data: st.DataObject, bits: int, turned: bool, symmetric: bool
) -> None:
    group, outs, ins = 32, data.draw(st.integers(1, 5)), data.draw(st.integers(33, 200))
    groups = -(-ins // group)
    codes = torch.randint(0, 2**bits, (outs, groups * group), dtype=torch.uint8)
    scale = torch.randn(outs, groups).half()
    low = scale * -(1 << bits - 1) if symmetric else torch.randn(outs, groups).half()
    raw = pack_rows(pack_codes(codes, bits), scale, None if symmetric else low)
    values = (codes.view(outs, groups, group) * scale[..., None].float() + low[..., None].float()).flatten(1)[:, :ins]
    shape = (ins, outs) if turned else (outs, ins)
    spec = WeightSpec("w", shape, torch.float32, stored=RowFormat(
        weight_name(bits, group, symmetric), bits, group, torch.float16, ins, outs, raw.shape[1], torch.float32,
        turned, symmetric))
    rows, columns = data.draw(st.none() | some(outs)), data.draw(st.none() | some(ins, group))
    sides = ((1, rows), (0, columns)) if turned else ((0, rows), (1, columns))
    cut = tuple((dim, held) for dim, held in sides if held is not None)
    part, file = cut_spec(spec, cut, "w"), cut_file(spec, cut, FileSlice("f", 0, raw.numel()))
    stored = part.stored
    assert stored is not None and file.nbytes == part.nbytes
    own = torch.frombuffer(bytearray(taken(raw.numpy().tobytes(), file)), dtype=torch.uint8).view(
        stored.out_features, stored.row_nbytes)
    parts = unpack_rows(own, stored.in_features, bits, group, torch.float16, symmetric)
    found = dequantize_reference(*parts, bits, group, 1, stored.in_features)
    want = values if rows is None else values[index(rows)]
    want = want if columns is None else want[:, index(columns)]
    assert torch.equal(found, want)
