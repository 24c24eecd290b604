"""The block cost model against FlexGen's Appendix A.3, term by term."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.policy.block_costs import BlockCosts, BlockShape, Piece
from forebay.rewriter.policy.policy_search import Problem
from forebay.rewriter.policy.shares import INDEX, N, shares
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.model_shapes import PRESET_MODELS, ModelShape, decoder_shape

MODEL, T4 = PRESET_MODELS["opt-30b"], PRESETS["t4"]
GEMM, ATTEND, READ = T4.product_flops, T4.attention_flops, T4.tiers["device"].bandwidth_bytes_per_s
UP, DOWN, DISK, WRITE = (T4.link(*ends).bandwidth_bytes_per_s for ends in (
    ("host", "device"), ("device", "host"), ("disk", "host"), ("host", "disk")))
S, N_OUT, H1, H2, LAYERS = 512, 32, 7168, 28672, 48
WEIGHTS = 8 * H1 * H1 + 4 * H1 * H2
X = shares((0.2, 0.5, 0.3), (0.1, 0.6, 0.3), (0.4, 0.35, 0.25))


def costs(block: BlockShape, prompt: int = S, new_tokens: int = N_OUT, model: ModelShape = MODEL, context: float = 0.0
          ) -> BlockCosts:
    return Problem(model, T4, prompt, new_tokens).costs(block, context)


def layer_piece(phase: str, block: BlockShape) -> Piece:
    count = LAYERS * (1 if phase == "prefill" else N_OUT - 1)
    found = [p for p in costs(block).pieces if (p.phase, p.count) == (phase, count)]
    assert len(found) == 1
    return found[0]


def seconds(piece: Piece, lane: str) -> float:
    return float(piece.lanes[lane] @ X)


def test_decode_lanes_are_those_of_the_paper() -> None:
    piece = layer_piece("decode", BlockShape(48, 3, host_attention=True))
    bls, cached = 144, 4 * 144 * (S + N_OUT / 2) * H1
    assert seconds(piece, "disk_read") * DISK == pytest.approx(
        0.3 * WEIGHTS + 0.3 * cached + 2 * 0.25 * 2 * bls * H1, rel=2e-3)  # two stages move activations
    assert seconds(piece, "host_to_device") * UP == pytest.approx(
        0.8 * WEIGHTS + 2 * 0.6 * 2 * bls * H1, rel=2e-3)
    host_part = 0.9 * cached / T4.host_attention_bytes_per_s
    device_part = 0.1 * cached / T4.attention_bytes_per_s
    products = 3 * max(48 * WEIGHTS / GEMM, WEIGHTS / READ)
    assert seconds(piece, "compute") == pytest.approx(host_part + device_part + products, rel=2e-3)


def test_prefill_lanes_are_those_of_the_paper() -> None:
    piece = layer_piece("prefill", BlockShape(48, 3, host_attention=True))
    bls = 144
    compute = bls * S * (8 * H1**2 + 4 * H1 * H2) / GEMM + 2 * bls * S * (S + 1) * H1 / ATTEND
    assert seconds(piece, "compute") == pytest.approx(compute, rel=1e-6)
    assert seconds(piece, "disk_write") * WRITE == pytest.approx(
        4 * 0.3 * bls * (S + 1) * H1 + 2 * 0.25 * 2 * S * H1 * bls, rel=1e-6)


def test_without_host_attention_the_cache_comes_to_the_device() -> None:
    with_host = layer_piece("decode", BlockShape(48, 3, host_attention=True))
    without = layer_piece("decode", BlockShape(48, 3))
    moved = seconds(without, "host_to_device") - seconds(with_host, "host_to_device")
    assert moved * UP == pytest.approx(0.9 * 4 * 144 * (S + N_OUT / 2) * H1, rel=1e-6)


def test_home_memory_is_that_of_the_paper() -> None:
    memory = costs(BlockShape(48, 3)).memory
    cache = 4 * (S + N_OUT) * H1 * 144 * LAYERS
    outside = 2 * sum(t.elements for t in MODEL.outside)
    inside = MODEL.weight_nbytes - outside
    assert float(memory["disk"] @ X) == pytest.approx(0.3 * (inside + outside + cache) + 0.25 * 2 * S * H1 * 144)


def test_decode_sees_the_context_it_is_given() -> None:
    half, first = (costs(BlockShape(8), context=c) for c in (0.0, S + 1))
    assert half.time_s(X, "prefill") == first.time_s(X, "prefill")
    assert half.time_s(X, "decode") > first.time_s(X, "decode")
    assert half.nbytes(X) == first.nbytes(X)


def test_rows_load_weights_for_every_micro_batch() -> None:
    streamed = shares((0, 1, 0), (1, 0, 0), (1, 0, 0))
    zigzag = costs(BlockShape(1, 4)).time_s(streamed, "decode")
    row = costs(BlockShape(1, 4, "row")).time_s(streamed, "decode")
    assert row == pytest.approx(4 * zigzag, rel=0.2)


def test_diagonal_stores_less_cache() -> None:
    zigzag, diagonal = (costs(BlockShape(4, 4, order), 64, 256) for order in ("zigzag", "diagonal"))  # type: ignore[arg-type]
    i = INDEX["kv", "host"]
    # A.2.1: bls2 / bls1 = (2 s + 2 n) / (2 s + n) + O(1 / n)
    assert zigzag.memory["host"][i] / diagonal.memory["host"][i] == pytest.approx((128 + 512) / (128 + 256), rel=0.01)


@pytest.mark.parametrize(("formats", "lane", "ratio"), [
    ({"weight_format": "w4g64"}, "attention", 4.5 / 16), ({"cache_format": "kv4"}, "kv", 5.0 / 16)])
def test_formats_shrink_what_moves(formats: dict[str, str], lane: str, ratio: float) -> None:
    plain, packed = (layer_piece("decode", replace(BlockShape(8, 2), **f)) for f in ({}, formats))  # type: ignore[arg-type]
    i = INDEX[lane, "host"]
    assert packed.lanes["host_to_device"][i] / plain.lanes["host_to_device"][i] == pytest.approx(ratio)


def test_checkpoints_move_half_of_kv_and_compute() -> None:
    piece = layer_piece("decode", BlockShape(8, 2))
    moved = piece.lanes["host_to_device"]
    assert moved[INDEX["checkpoint", "host"]] == pytest.approx(moved[INDEX["kv", "host"]] / 2)
    tokens = 16 * (S + N_OUT / 2)
    extra = piece.lanes["compute"][INDEX["checkpoint", "host"]] - piece.lanes["compute"][INDEX["kv", "host"]]
    assert extra == pytest.approx(tokens * 4 * H1 * H1 / GEMM)


def test_windows_bound_cache_and_attention() -> None:
    layer = replace(MODEL.layers[0], window=100)
    windowed = replace(MODEL, layers=(layer,))
    full, short = (costs(BlockShape(4), model=m) for m in (MODEL, windowed))
    i = INDEX["kv", "disk"]
    assert short.memory["disk"][i] / full.memory["disk"][i] == pytest.approx(100 / (S + N_OUT))
    assert np.all(np.isfinite(short.memory["device"])) and len(X) == N + 1


class HalfSpeed(MachineEstimator):
    """Products take twice as long as the machine's."""

    def product_s(self, dtype: str, m: float, n: int, k: int, *, nbytes: float, impl: str = "") -> float:
        return 2 * super().product_s(dtype, m, n, k, nbytes=nbytes, impl=impl)


def test_another_estimator_takes_the_machines_place() -> None:
    problem = Problem(MODEL, T4, S, N_OUT)
    own, other = (p.costs(BlockShape(4)).busy_s(X) for p in (problem, replace(problem, times=HalfSpeed(T4))))
    assert own["compute"] < other["compute"] < 2 * own["compute"]
    assert {lane: s for lane, s in own.items() if lane != "compute"} == {
        lane: s for lane, s in other.items() if lane != "compute"}


def test_what_was_measured_of_a_machine_is_used() -> None:
    """On a CPU reads from disk land on the device, and products go as measured, not at a rate."""
    machine = Machine.default()
    shape = decoder_shape("small", layers=4, hidden=2048, intermediate=5632, heads=16, kv_heads=16, vocab=1000,
                          gated=True, dtype="bfloat16")
    lanes = next(p for p in Problem(shape, machine, 64, 8).costs(BlockShape(1)).pieces if p.phase == "decode").lanes
    on_disk = shares((0, 0, 1), (1, 0, 0), (1, 0, 0))
    assert float(lanes["host_to_device"] @ on_disk) == 0 < float(lanes["disk_read"] @ on_disk)
    products = sum(machine.gemm_time_s("aten", "bfloat16", 1, n, k) for n, k in (
        *[(2048, 2048)] * 4, (5632, 2048), (5632, 2048), (2048, 5632)))
    cached = 68 * 2 * 2048 * 2 / machine.attention_bytes_per_s
    assert float(lanes["compute"] @ on_disk) == pytest.approx(products + cached, rel=1e-6)
