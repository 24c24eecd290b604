"""A layer's costs in each layout: conservation, the paper's closed forms, and what grows with what."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.partition.choose import PartitionProblem, choose
from forebay.rewriter.partition.collectives import ChipMesh, mesh_of, one_way
from forebay.rewriter.partition.layouts import (
    BlockWidths,
    ChipLayout,
    PhaseWork,
    attention_cost,
    feedforward_nbytes,
    layer_cost,
    layouts,
    product_cost,
)
from forebay.rewriter.partition.published_models import PUBLISHED_SHAPES
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.model_shapes import PRESET_MODELS, LayerShape, ModelError, ModelShape, TensorShape

TPU = PRESETS["tpu-v4"]
TIMES = MachineEstimator(TPU)
PALM = PUBLISHED_SHAPES["palm-540b"].model.layers[0]
PREFILL, DECODE = PhaseWork("prefill", 64, 128, 128), PhaseWork("decode", 64, 1, 2048)


@pytest.mark.parametrize("work", [PREFILL, DECODE])
def test_every_layout_does_all_the_work_once(work: PhaseWork) -> None:
    """Products' operations over all chips are those of the layer, and weights are held once."""
    mesh = mesh_of(TPU, (4, 4, 4))
    ways = list(layouts(mesh, work))
    assert {w.feedforward for w in ways} == {"1d", "2d", "x", "xy", "xyz"}
    block = BlockWidths.of(PALM)
    rate = TPU.product_flops
    for way in ways:
        cost = layer_cost(PALM, way, mesh, work, TIMES, parallel=True)
        attended = cost.compute_s * rate  # attention has a rate of its own, so a bound from above and below
        least = 2 * work.rows * (block.elements - block.extra) / mesh.chips
        assert least <= attended * 1.0001
        assert cost.weights_nbytes * mesh.chips == pytest.approx(2 * block.elements)
        assert cost.time_s >= cost.compute_s * (1 - 1e-9)


def test_volumes_are_the_papers_closed_forms() -> None:
    """Appendix A.2: 2 B L (E / X + F / YZ) stationary; 2 E F N / n + 2 B L E / N gathered over N chips; in bytes twice
    that."""
    mesh, rows, hidden, inner = ChipMesh((4, 4, 4), (1.0, 1.0, 1.0), one_way(0.0)), 1 << 18, 16384, 65536
    stationary = feedforward_nbytes(ChipLayout("2d", (0,), (), "heads"), mesh, rows, hidden, inner)
    assert stationary == 2 * 2 * rows * (hidden / 4 + inner / 16)
    assert feedforward_nbytes(ChipLayout("1d", (), (), "heads"), mesh, rows, hidden, inner) == 2 * 2 * rows * hidden
    for gathered, chips in (((0,), 4), ((0, 1), 16), ((0, 1, 2), 64)):
        weights, activations = 2 * hidden * inner * chips / 64, 2 * rows * hidden / chips if chips < 64 else 0.0
        assert feedforward_nbytes(ChipLayout("x", (0,), gathered, "heads"), mesh, rows, hidden, inner) == 2 * (
            weights + activations)


def test_sharding_over_batch_divides_the_cache_of_one_head() -> None:
    mesh = mesh_of(TPU, (4, 4, 4))
    heads, batch = (layer_cost(PALM, ChipLayout("2d", (0,), (), how), mesh, DECODE, TIMES) for how in ("heads",
                                                                                                       "batch"))
    assert heads.cache_nbytes == 64 * batch.cache_nbytes == 64 * 2048 * 2 * 256 * 2
    grouped = PRESET_MODELS["llama-3-70b"].layers[0]  # 8 heads of K and V
    heads, batch = (layer_cost(grouped, ChipLayout("2d", (0,), (), how), mesh, DECODE, TIMES) for how in ("heads",
                                                                                                             "batch"))
    assert heads.cache_nbytes == 8 * batch.cache_nbytes


def test_more_chips_work_less_each_and_faster_links_never_slow_a_layer() -> None:
    for work in (PREFILL, DECODE):
        for name in ("1d", "2d", "xyz"):
            costs = []
            for size in (2, 4, 8):
                mesh = ChipMesh((size, size), (9e10, 9e10), one_way(0.0))
                found = (way for way in layouts(mesh, work) if (way.feedforward, way.attention) == (name, "batch"))
                costs.append(layer_cost(PALM, next(found), mesh, work, TIMES, parallel=True))
            for few, many in pairwise(costs):
                assert many.compute_s < few.compute_s and many.weights_nbytes < few.weights_nbytes
                assert many.cache_nbytes < few.cache_nbytes
        slow, fast = (ChipMesh((4, 4), (rate, rate), one_way(1e-6)) for rate in (1e10, 1e11))
        for way in layouts(slow, work):
            assert layer_cost(PALM, way, fast, work, TIMES).time_s <= layer_cost(PALM, way, slow, work, TIMES).time_s


def test_parallel_blocks_exchange_less_and_int8_reads_less() -> None:
    mesh, way = mesh_of(TPU, (4, 4, 4)), ChipLayout("2d", (0,), (), "batch")
    serial = layer_cost(PALM, way, mesh, DECODE, TIMES)
    parallel = layer_cost(PALM, way, mesh, DECODE, TIMES, parallel=True)
    small = layer_cost(PALM, way, mesh, DECODE, TIMES, parallel=True, weights="int8")
    assert len(serial.collectives) == 10 and len(parallel.collectives) == 6
    assert parallel.communication_s < serial.communication_s and small.memory_s < 0.6 * parallel.memory_s
    assert small.weights_nbytes == parallel.weights_nbytes / 2


def test_one_chip_exchanges_nothing() -> None:
    mesh = mesh_of(TPU, (1,))
    ways = list(layouts(mesh, DECODE))
    assert [w.feedforward for w in ways] == ["1d"]
    assert layer_cost(PALM, ways[0], mesh, DECODE, TIMES).communication_s == 0.0


def test_experts_are_divided_among_chips_in_one_dimension() -> None:
    """A token meets one of eight: a step over few tokens reads those that they pick, one over many reads all."""
    mlp = TensorShape("e", 8 * 64 * 32, 32, 1 / 8), TensorShape("d", 8 * 32 * 64, 64, 1 / 8)
    layer = LayerShape(1, (), mlp, 1, 2 * 64 * 64, 32, 4, 4, 8, 0, 64)
    assert BlockWidths.of(layer).active == 2 / 16 and BlockWidths.of(layer).mixture
    problem = PartitionProblem(ModelShape("m", "bfloat16", (layer,), (), 32), mesh_of(TPU, (2, 2)), TIMES, 1e9, 4, 8, 8)
    assert {way.feedforward for work in problem.phases for way in problem.layouts(work)} == {"1d"}
    assert {way.feedforward for chosen in choose(problem).layouts.values() for way in chosen} == {"1d"}
    way = ChipLayout("1d", (), (), "heads")

    def read(layer: LayerShape, rows: int) -> float:
        return product_cost(layer, way, problem.mesh, rows, TIMES).memory_s

    dense = replace(layer, mlp_flops=16 * layer.mlp_flops // 2, mlp=tuple(replace(each, share=1.0) for each in mlp))
    assert BlockWidths.of(dense).active == 1.0
    assert read(layer, 1) < 0.3 * read(dense, 1) and read(layer, 4) > 1.5 * read(layer, 1)
    weights = product_cost(layer, way, problem.mesh, 1, TIMES).weights_nbytes
    assert weights == product_cost(dense, way, problem.mesh, 1, TIMES).weights_nbytes


def test_latent_attention_has_its_heads_divided() -> None:
    """Ranks do not divide its sequences."""
    layer = replace(SQUARE, kv_heads=1, head_dim=24, latent=16, made=16)
    model, mesh = ModelShape("m", "bfloat16", (layer,), (), 64), mesh_of(TPU, (2, 2))
    problem = PartitionProblem(model, mesh, TIMES, 1e9, 64, 8, 8)
    for latent in (problem, replace(problem, model=replace(model, layers=(SQUARE, layer)))):
        assert {way.attention for work in latent.phases for way in latent.layouts(work)} == {"heads"}
    plain = replace(problem, model=replace(model, layers=(SQUARE,)))
    assert {way.attention for work in plain.phases for way in plain.layouts(work)} == {"heads", "batch"}


def test_what_is_neither_dense_nor_a_mixture_is_refused() -> None:
    layer = LayerShape(1, (), (TensorShape("e", 64 * 32, 32),), 1, 2 * 64 * 32, 32, 4, 4, 8, 0, 64)
    with pytest.raises(ModelError, match="neither plain"):
        PartitionProblem(ModelShape("m", "bfloat16", (layer,), (), 32), mesh_of(TPU, (2,)), TIMES, 1e9, 1, 8, 8)


def test_a_feedforward_is_its_products_however_they_are_written() -> None:
    """Two products and a gate; both in one, as Phi writes them; of equal sides."""
    def widths(*sides: tuple[int, int]) -> tuple[int, int, int, bool]:
        mlp = tuple(TensorShape(str(i), n * k, k) for i, (n, k) in enumerate(sides))
        found = BlockWidths.of(LayerShape(1, (), mlp, 0, 2 * sum(n * k for n, k in sides), 32, 4, 4, 8, 0, 64))
        return found.up, found.inner, found.elements - 32 * (2 * found.query + found.key_value), found.dense

    assert widths((96, 32), (32, 96), (96, 32)) == (192, 96, 3 * 96 * 32, True)
    assert widths((192, 32), (32, 96)) == (192, 96, 3 * 96 * 32, True)
    assert widths((32, 32), (32, 32), (32, 32)) == (64, 32, 3 * 32 * 32, True)
    assert widths((96, 32), (32, 96)) == (96, 96, 2 * 96 * 32, True)


def test_phases_share_products() -> None:
    """A chunk of a prompt beside steps that decode multiplies all rows at once, and attends for each."""
    mesh, way = mesh_of(PRESETS["h100"], (4,)), ChipLayout("1d", (), (), "heads")
    layer, times = PRESET_MODELS["llama-3-8b"].layers[0], MachineEstimator(PRESETS["h100"])
    for work in (PREFILL, DECODE):
        whole = layer_cost(layer, way, mesh, work, times, weights="float16")
        products = product_cost(layer, way, mesh, work.rows, times, weights="float16")
        attended = attention_cost(layer, way, mesh, work, times, "float16")
        assert whole.time_s == pytest.approx(products.time_s + attended.time_s + products.communication_s)
    both, apart = product_cost(layer, way, mesh, 16 + 512, times), [
        product_cost(layer, way, mesh, rows, times) for rows in (16, 512)]
    assert both.time_s < sum(p.time_s for p in apart) and both.communication_s < sum(p.communication_s for p in apart)


class Seconds(MachineEstimator):
    """Products of 4096 multiplications a second, whatever they read."""

    def product_s(self, dtype: str, m: float, n: int, k: int, *, nbytes: float, impl: str = "") -> float:
        return m * n * k / 4096


_MATRICES = tuple(TensorShape(name, 64 * 64, 64) for name in ("q", "k", "v", "o", "up", "down"))
SQUARE = LayerShape(1, _MATRICES[:4], _MATRICES[4:], 0, 4 * 64 * 64, 64, 4, 4, 16, 0, 64)


def test_inputs_in_chunks_are_gathered_beside_products() -> None:
    """As many bytes; a piece takes the longer of its gather and its product, and sums behind are exchanged at once.
    Worked by hand: one product of 8 rows, 64 by 64, over two chips along the wide axis, a link of 64 bytes a second."""
    layer, mesh, times = SQUARE, ChipMesh((2,), (64.0,), one_way(0.0), False), Seconds(TPU)
    product_s, gather_s = 8 * 32 * 64 / 4096, 8 * 64 * 2 / 2 / 64  # 4 s, and 8 of a gather
    whole = product_cost(layer, ChipLayout("2d", (0,), (), "heads"), mesh, 8, times)
    for gathers in (1, 2, 4):
        for chunks in (1, 2):
            way = ChipLayout("2d", (0,), (), "heads", chunks=chunks, gather_chunks=gathers)
            cost = product_cost(layer, way, mesh, 8, times)
            scattered = [each * gather_s for each in (3, 1)]  # of q, k, v and of up, whose products take 12 and 4
            beside = sum((chunks - 1) * min(made, sent) / chunks for made, sent in zip((12, 4), scattered, strict=True))
            assert cost.hidden_s == pytest.approx(2 * (gathers - 1) * min(product_s, gather_s) / gathers + beside)
            assert cost.time_s == pytest.approx(whole.time_s)
            assert cost.communication_s == pytest.approx(whole.communication_s)
            assert sum(c.what == "inner" for c in cost.collectives) == 2 * gathers
            overlap_penalty = product_cost(layer, way, replace(mesh, overlap_penalty=1.0), 8, times)
            assert overlap_penalty.hidden_s == 0
            late = product_cost(layer, way, replace(mesh, protocols=one_way(1.0)), 8, times)
            assert late.communication_s >= whole.communication_s + 2 * gathers  # each piece waits for itself


def test_sums_behind_a_gather_in_chunks_are_exchanged_at_once() -> None:
    mesh = mesh_of(TPU, (4, 4, 4))
    for gathers, outputs in ((1, 4), (2, 1)):
        cost = layer_cost(PALM, ChipLayout("2d", (0,), (), "batch", chunks=4, gather_chunks=gathers), mesh, PREFILL,
                          TIMES)
        found = [c.what for c in cost.collectives]
        assert found.count("output partial sums") == found.count("input") == 2 * outputs
        assert found.count("inner partial sums") == 8 and found.count("inner") == 2 * gathers


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("layout", [ChipLayout("1d", (), (), "heads"), ChipLayout("2d", (0,), (), "batch")])
def test_sums_in_chunks_are_exchanged_beside_products(layout: ChipLayout, parallel: bool) -> None:
    """As many bytes in more collectives; where cores make exchanges they take as long as one after the other, and each
    has a latency of its own."""
    mesh, work = mesh_of(TPU, (4, 4, 4)), PREFILL
    free = replace(mesh, protocols=one_way(0.0))
    whole = layer_cost(PALM, layout, free, work, TIMES, parallel=parallel)
    for chunks in (2, 4):
        looped = layer_cost(PALM, replace(layout, chunks=chunks), free, work, TIMES, parallel=parallel)
        moved = [[sum(c.nbytes for c in cost.collectives if c.what == what) for what in
                  dict.fromkeys(c.what for c in whole.collectives)] for cost in (whole, looped)]
        assert moved[0] == pytest.approx(moved[1])
        assert looped.communication_s == pytest.approx(whole.communication_s)
        assert looped.time_s == pytest.approx(whole.time_s - looped.hidden_s, rel=1e-6)
        assert 0 < looped.hidden_s <= (1 - 1 / chunks) * whole.communication_s
        made = layer_cost(PALM, replace(layout, chunks=chunks), replace(free, overlap_penalty=1.0), work, TIMES,
                          parallel=parallel)
        assert made.time_s == pytest.approx(whole.time_s, rel=1e-6) and made.hidden_s == 0
        slow = layer_cost(PALM, replace(layout, chunks=chunks), replace(mesh, protocols=one_way(1.0)), work, TIMES,
                          parallel=parallel)
        assert slow.communication_s > chunks / 2 * layer_cost(
            PALM, layout, replace(mesh, protocols=one_way(1.0)), work, TIMES, parallel=parallel).communication_s


def test_a_product_and_its_sums_take_the_longer_of_both_for_each_chunk() -> None:
    """Worked by hand: one product of 8 rows, 64 by 64 over two chips, whose sums cross a link of 64 bytes a second."""
    layer, mesh, times = SQUARE, ChipMesh((2,), (64.0,), one_way(0.0), False), Seconds(TPU)
    product_s, exchange_s = 8 * 64 * 32 / 4096, 2 * 8 * 64 * 2 / 2 / 64  # 4 s, and 16 of an all-reduce
    for chunks in (1, 2, 4):
        cost = product_cost(layer, ChipLayout("1d", (), (), "heads", chunks=chunks), mesh, 8, times)
        assert cost.time_s == pytest.approx((3 + 1) * product_s + 2 * product_s)  # q, k, v and up, and o and down
        assert cost.communication_s == pytest.approx(2 * exchange_s)
        assert cost.hidden_s == pytest.approx(2 * (chunks - 1) * min(product_s, exchange_s) / chunks)
