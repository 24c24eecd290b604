"""The plan as text and as a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forebay.commands.pictures import draw_memory
from forebay.rewriter.ir.plan import (
    BufferPlacement,
    Limits,
    Plan,
    PlanError,
    Prediction,
    Schedule,
    WeightPlacement,
    Workload,
)
from forebay.rewriter.predict.simulate import CORES
from forebay.rewriter.report.explain import (
    OUTSIDE,
    LayerRow,
    explain_plan,
    kind_nbytes,
    layer_numbers,
    layer_rows,
    memory_timeline,
    peak_nbytes,
    summarise_plan,
    table_cells,
)

KIB, MIB = 1 << 10, 1 << 20


def _plan() -> Plan:
    weights = (
        WeightPlacement("model.embed_tokens.weight", "disk", 8 * MIB, gather=True),
        WeightPlacement("model.layers.0.mlp.weight", "device", 3 * MIB),
        WeightPlacement("model.layers.0.norm.weight", "device", 2 * KIB),
        WeightPlacement("model.layers.1.mlp.weight", "disk", 3 * MIB, tile_rows=100),
        WeightPlacement("model.layers.1.norm.weight", "host", 2 * KIB),
        WeightPlacement("lm_head.weight", "disk", 8 * MIB, tile_rows=50),
    )
    at = 3 * MIB + 4 * KIB
    buffers = (
        BufferPlacement("model.layers.0.mlp.weight", "weight", "device", 0, 3 * MIB),
        BufferPlacement("model.layers.0.norm.weight", "weight", "device", 3 * MIB, 2 * KIB),
        BufferPlacement("slot0", "slot", "device", at, MIB),
        BufferPlacement("cache_k_0", "cache", "device", at + MIB, MIB),
        BufferPlacement("a", "activation", "device", at + 2 * MIB, 64 * KIB, "decode", 0, 3),
        BufferPlacement("b", "activation", "device", at + 2 * MIB + 64 * KIB, 64 * KIB, "decode", 2, 5),
        BufferPlacement("c", "activation", "device", at + 2 * MIB, 32 * KIB, "decode", 4, 9),
        BufferPlacement("d", "activation", "device", at + 2 * MIB, 128 * KIB, "prefill", 0, 9),
    )
    return Plan(
        "abc123", "bench", Limits(6 * MIB), Workload(2, 64, 16),
        Schedule(slots=1, slot_nbytes=MIB, lead=1, prefill_chunks=(32,)), weights,
        arenas={"device": at + 2 * MIB + 128 * KIB}, buffers=buffers,
        prediction=Prediction(0.5, 0.05, {"compute": 0.01, "disk": 0.05}, 11 * MIB, {"device": 6 * MIB}, "disk"))


def test_every_weight_byte_stands_in_one_row_and_one_column() -> None:
    plan = _plan()
    rows = layer_rows(plan)
    assert [r.title for r in rows] == ["0", "1", "model.embed_tokens.weight", "lm_head.weight"]
    assert sum(r.weights for r in rows) == len(plan.weights)
    assert sum(r.resident for r in rows) == plan.nbytes_on("device") == 3 * MIB + 2 * KIB
    for r in rows:
        assert r.resident + r.from_host + r.from_disk + r.by_row == r.nbytes
    assert rows[1].from_disk == 3 * MIB and rows[1].from_host == 2 * KIB
    assert rows[2].by_row == 8 * MIB and rows[2].from_disk == 0


@pytest.mark.parametrize(("name", "layer"), [
    ("model.layers.17.self_attn.q_proj.weight", 17), ("transformer.h.3.mlp.c_fc.weight", 3),
    ("lm_head.weight", OUTSIDE), ("model.norm2.weight", OUTSIDE), ("0.weight", 0), ("block.1.sub.2.weight", 1)])
def test_layer_number_is_the_first_in_the_name(name: str, layer: int) -> None:
    assert layer_numbers([name]) == {name: layer}


def test_text_says_what_the_plan_says() -> None:
    text = explain_plan(_plan())
    for part in ("abc123", "bench", "6.0 MiB", "batch 2", "80 cache positions", "1 staging slot of 1.0 MiB",
                 "chunks of 32 tokens, 2 passes", "11.0 MiB stream per decode step", "lm_head.weight", "from host",
                 "bottleneck is disk", "50 ms per decode step", "40 tokens/s"):
        assert part in text, part
    total = next(line for line in text.splitlines() if line.startswith("total"))
    assert "22.0 MiB" in total and "3.0 MiB" in total
    assert max(map(len, text.splitlines())) <= 140


def test_a_step_that_the_cores_bind_says_so() -> None:
    plan = _plan()
    bound = replace(plan, prediction=replace(plan.prediction, bottleneck=CORES))
    assert "the bottleneck is the cores, which compute and bear a share" in explain_plan(bound)


def test_summary_has_no_row_per_layer() -> None:
    plan = _plan()
    assert "lm_head.weight" not in summarise_plan(plan) and "device arena" in summarise_plan(plan)


def test_copies_appear_only_when_the_rows_are_known() -> None:
    header = next(line for line in explain_plan(_plan()).splitlines() if line.startswith("layer"))
    assert "resident" in header and "copies" not in header


def test_shared_memory_counts_once() -> None:
    plan = _plan()
    assert kind_nbytes(plan, "device")["activation"] == 128 * KIB
    inputs = BufferPlacement("ids", "io", "device", 5 * MIB + 4 * KIB, 64, "decode", 0, 9)
    both = kind_nbytes(replace(plan, buffers=(*plan.buffers, inputs)), "device")
    assert both["activation"] == 128 * KIB and "io" not in both and sum(both.values()) <= plan.arenas["device"]
    decode = [b for b in plan.buffers if b.phase == "decode"]
    assert peak_nbytes(decode) == 128 * KIB  # steps 2 and 3 hold a and b
    assert sum(b.nbytes for b in decode) == 160 * KIB


def _lending() -> Plan:
    """The prefill keeps half the cache, and its activations lie over the other half."""
    plan, at = _plan(), 4 * MIB + 4 * KIB
    cache = next(b for b in plan.buffers if b.kind == "cache")
    rest = [b for b in plan.buffers if b.kind != "cache" and b.phase != "prefill"]
    return replace(plan, buffers=(
        *rest, replace(cache, nbytes=512 * KIB, phase="prefill"), replace(cache, phase="decode"),
        BufferPlacement("d", "activation", "device", at + 512 * KIB, 640 * KIB, "prefill", 0, 9)))


def test_lent_cache_is_shown_in_both_its_lengths(tmp_path: Path) -> None:
    plan = _lending()
    assert "80 cache positions per sequence, 1.0 MiB of cache" in explain_plan(plan)
    kinds = kind_nbytes(plan, "device")
    assert (kinds["cache"], kinds["activation"]) == (MIB, 128 * KIB) == tuple(
        kind_nbytes(_plan(), "device")[kind] for kind in ("cache", "activation"))
    assert sum(kinds.values()) <= plan.arenas["device"]
    text = summarise_plan(plan)
    assert "decode     cache below byte 5,246,976, activations above byte 5,246,976: room for 80 tokens" in text
    assert "prefill    cache below byte 4,722,688, activations above byte 4,722,688: 512.0 KiB of activations" in text
    lines = memory_timeline(plan).splitlines()
    assert sum("K cache: 1, 512.0 KiB during prefill" in line for line in lines) == 1
    assert sum(line.endswith("K cache: 1, 1.0 MiB") for line in lines) == 1
    assert not any("K" in line.split("|")[1] for line in lines if "|" in line), "cache neither comes nor goes"
    draw_memory(plan, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 5000


def test_timeline_draws_buffers_where_they_live() -> None:
    lines = memory_timeline(_plan()).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("decode"))
    picture = [line.split("|")[1] for line in lines[start + 1 : start + 17]]
    assert picture[-1] == "a" * 10  # lowest addresses: a in steps 0-3, c in steps 4-9
    assert picture[0] == "..aaaa...."  # highest: b in steps 2-5
    assert picture[7] == "..aaaa...." and picture[8] == "aaaa......"
    assert any(line.endswith("W weight: 2, 3.0 MiB") for line in lines)
    assert "prefill: 1 buffers over 10 steps" in "\n".join(lines)


def test_picture_shows_the_kinds_in_their_colours(tmp_path: Path) -> None:
    from matplotlib.image import imread

    from forebay.commands.pictures import COLOURS

    path = tmp_path / "memory.png"
    draw_memory(_plan(), path)
    pixels = (imread(path)[:, :, :3] * 255).round().astype(int)
    assert pixels.shape[0] >= 600 and pixels.shape[1] >= 1200
    for kind in ("weight", "slot", "cache", "activation"):
        red, green, blue = (int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5))
        hits = (abs(pixels - [red, green, blue]).sum(-1) <= 3).sum()
        assert hits > 500, kind


def test_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no buffer in the device arena"):
        draw_memory(replace(_plan(), buffers=()), tmp_path / "memory.png")
    with pytest.raises(PlanError, match="cannot write the picture"):
        draw_memory(_plan(), tmp_path / "memory.nonsense")


def test_layers_that_differ_in_their_number_alone_are_one_row() -> None:
    rows = [LayerRow(title, 2, 10, 4, 0, 6, 0, 1, ("native",)) for title in ("0", "1", "2")]
    rows += [replace(rows[0], title="3", resident=10, from_disk=0), replace(rows[0], title="4"),
             LayerRow("norm", 1, 10, 10, 0, 0, 0, 0, ("native",)), LayerRow("head", 1, 10, 10, 0, 0, 0, 0, ("native",))]
    titles = [line[0] for line in table_cells(rows, brief=False)]
    assert titles == ["layer", "0-2 x3", "3", "4", "norm", "head", "total"]


def test_a_brief_table_has_ranges_for_layers_of_one_size() -> None:
    rows = [LayerRow(str(i), 2, 4 * MIB, kept * KIB, 0, 4 * MIB - kept * KIB, 0, i, ("native",))
            for i, kept in enumerate((1, 512, 3072, 3072))]
    rows += [replace(rows[0], title="4", nbytes=5 * MIB), replace(rows[0], title="norm", nbytes=5 * MIB)]
    titles, *lines, totals = table_cells(rows, brief=True)
    assert [line[0] for line in lines] == ["0-3 x4", "4", "norm"]
    shown = dict(zip(titles, lines[0], strict=True))
    assert (shown["bytes"], shown["resident"], shown["from disk"]) == ("4.0 MiB", "1.0 KiB..3.0 MiB", "1.0..4.0 MiB")
    assert shown["copies"] == "0..3" and totals == table_cells(rows, brief=False)[-1]


def test_the_answer_comes_first_and_advice_with_it() -> None:
    lines = explain_plan(_plan(), advice=["disk-bound: more"]).splitlines()
    assert lines[0].startswith(("expected", "advice")) and "advice      disk-bound: more" in lines[:4]
