"""The block cost model against FlexGen's Appendix A.3, term by term, and its overlap rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.predict.block_costs import INDEX, Block, N, Piece, Runtime, block_costs, shares
from forebay.rewriter.predict.model_shapes import PRESET_MODELS

MODEL, T4 = PRESET_MODELS["opt-30b"], PRESETS["t4"]
S, N_OUT, H1, H2, LAYERS = 512, 32, 7168, 28672, 48
WEIGHTS = 8 * H1 * H1 + 4 * H1 * H2
X = shares((0.2, 0.5, 0.3), (0.1, 0.6, 0.3), (0.4, 0.35, 0.25))


def layer_piece(phase: str, block: Block, **kwargs: object) -> Piece:
    costs = block_costs(MODEL, T4, block, S, N_OUT, runtime=Runtime(**kwargs))  # type: ignore[arg-type]
    count = LAYERS * (1 if phase == "prefill" else N_OUT - 1)
    found = [p for p in costs.pieces if (p.phase, p.count) == (phase, count)]
    assert len(found) == 1
    return found[0]


def seconds(piece: Piece, lane: str) -> float:
    return float(piece.lanes[lane] @ X)


def test_decode_lanes_are_those_of_the_paper() -> None:
    piece = layer_piece("decode", Block(48, 3, host_attention=True))
    bls, cached = 144, 4 * 144 * (S + N_OUT / 2) * H1
    assert seconds(piece, "disk_read") * T4.disk_read_bytes_per_s == pytest.approx(
        0.3 * WEIGHTS + 0.3 * cached + 2 * 0.25 * 2 * bls * H1, rel=2e-3)  # two stages move activations
    assert seconds(piece, "host_to_device") * T4.host_to_device_bytes_per_s == pytest.approx(
        0.8 * WEIGHTS + 2 * 0.6 * 2 * bls * H1, rel=2e-3)
    host_part = 0.9 * cached / T4.host_attention_bytes_per_s
    device_part = 0.1 * cached / T4.attention_bytes_per_s
    products = 3 * max(48 * WEIGHTS / T4.gemm_flops, WEIGHTS / T4.memory_bytes_per_s)
    assert seconds(piece, "compute") == pytest.approx(host_part + device_part + products, rel=2e-3)


def test_prefill_lanes_are_those_of_the_paper() -> None:
    piece = layer_piece("prefill", Block(48, 3, host_attention=True))
    bls = 144
    compute = bls * S * (8 * H1**2 + 4 * H1 * H2) / T4.gemm_flops + 4 * bls * S * S * H1 / T4.attention_flops
    assert seconds(piece, "compute") == pytest.approx(compute, rel=1e-6)
    assert seconds(piece, "disk_write") * T4.disk_write_bytes_per_s == pytest.approx(
        4 * 0.3 * bls * (S + 1) * H1 + 2 * 0.25 * 2 * S * H1 * bls, rel=1e-6)


def test_without_host_attention_the_cache_comes_to_the_device() -> None:
    with_host = layer_piece("decode", Block(48, 3, host_attention=True))
    without = layer_piece("decode", Block(48, 3))
    moved = seconds(without, "host_to_device") - seconds(with_host, "host_to_device")
    assert moved * T4.host_to_device_bytes_per_s == pytest.approx(0.9 * 4 * 144 * (S + N_OUT / 2) * H1, rel=1e-6)


def test_home_memory_is_that_of_the_paper() -> None:
    memory = block_costs(MODEL, T4, Block(48, 3), S, N_OUT).memory
    cache = 4 * (S + N_OUT) * H1 * 144 * LAYERS
    outside = 2 * sum(t.elements for t in MODEL.outside)
    inside = MODEL.weight_nbytes - outside
    assert float(memory["disk"] @ X) == pytest.approx(0.3 * (inside + outside + cache) + 0.25 * 2 * S * H1 * 144)


def test_serial_is_slower_than_steps_and_steps_than_blocks() -> None:
    block = Block(48, 3, host_attention=True)
    times = [block_costs(MODEL, T4, block, S, N_OUT, runtime=Runtime(overlap)).time_s(X)  # type: ignore[arg-type]
             for overlap in ("block", "step", "none")]
    assert times == sorted(times) and times[0] < times[2]


def test_unpinned_cache_does_not_overlap() -> None:
    on_host = shares((1, 0, 0), (0, 1, 0), (1, 0, 0))
    block = Block(8, 2)
    pinned, relayed = (block_costs(MODEL, T4, block, S, N_OUT, runtime=Runtime("step", pinned_cache=p))
                       for p in (True, False))
    assert relayed.time_s(on_host, "decode") > pinned.time_s(on_host, "decode")
    assert relayed.busy_s(on_host)["host_to_device"] < pinned.busy_s(on_host)["host_to_device"]


def test_a_relay_of_packed_codes_has_a_rate_of_its_own() -> None:
    on_host = shares((1, 0, 0), (0, 1, 0), (1, 0, 0))
    block = Block(8, 2, cache_format="kv4")
    runtime = Runtime("step", pinned_cache=False)
    quicker = replace(T4, packed_pageable_bytes_per_s=2 * T4.packed_pageable_bytes_per_s)
    slow, fast = (block_costs(MODEL, rates, block, S, N_OUT, runtime=runtime) for rates in (T4, quicker))
    stored = 4 * 16 * (S + N_OUT / 2) * H1 * LAYERS * (N_OUT - 1) * 4.5 / 16
    saved = slow.busy_s(on_host)["compute"] - fast.busy_s(on_host)["compute"]
    assert saved * 2 * T4.packed_pageable_bytes_per_s == pytest.approx(stored, rel=1e-6)
    native = [block_costs(MODEL, rates, Block(8, 2), S, N_OUT, runtime=runtime).time_s(on_host)
              for rates in (T4, quicker)]
    assert native[0] == native[1]


def test_relayed_weights_hold_up_the_thread_that_launches() -> None:
    weights_only = shares((0, 1, 0), (1, 0, 0), (1, 0, 0))
    pinned, relayed = (block_costs(MODEL, T4, Block(8, 4), S, N_OUT, runtime=Runtime("step", host_weights=how))  # type: ignore[arg-type]
                       for how in ("pinned", "relayed"))
    assert relayed.time_s(weights_only) > pinned.time_s(weights_only)
    moved = relayed.busy_s(weights_only)["compute"] - pinned.busy_s(weights_only)["compute"]
    stage = 4 * H1 * H1 * 2 / T4.pageable_bytes_per_s  # the very first load comes on top
    assert moved == pytest.approx(WEIGHTS * LAYERS * N_OUT / T4.pageable_bytes_per_s + stage, rel=2e-3)


def test_activations_on_the_compute_stream_are_paid_in_full() -> None:
    on_host = shares((1, 0, 0), (1, 0, 0), (0, 1, 0))
    beside, within = (block_costs(MODEL, T4, Block(8, 2), S, N_OUT, runtime=Runtime("step", activation_stream=own))
                      for own in (True, False))
    moved = 2 * 16 * (S + N_OUT - 1) * H1 * 2 * LAYERS  # two stages
    copied = moved / T4.host_to_device_bytes_per_s + moved / T4.device_to_host_bytes_per_s
    assert within.busy_s(on_host)["compute"] - beside.busy_s(on_host)["compute"] == pytest.approx(copied)
    assert within.time_s(on_host) > beside.time_s(on_host)


def test_decode_sees_the_context_it_is_given() -> None:
    half, first = (block_costs(MODEL, T4, Block(8), S, N_OUT, context=c) for c in (None, S + 1))
    assert half.time_s(X, "prefill") == first.time_s(X, "prefill")
    assert half.time_s(X, "decode") > first.time_s(X, "decode")
    assert half.nbytes(X) == first.nbytes(X)


def test_staged_weights_lie_between_pinned_and_pageable() -> None:
    weights_only = shares((0, 1, 0), (1, 0, 0), (1, 0, 0))
    pinned, staged, pageable = (
        block_costs(MODEL, T4, Block(1), S, N_OUT, runtime=Runtime(host_weights=how)).time_s(weights_only)  # type: ignore[arg-type]
        for how in ("pinned", "staged", "pageable"))
    assert pinned < staged < pageable


def test_rows_load_weights_for_every_micro_batch() -> None:
    streamed = shares((0, 1, 0), (1, 0, 0), (1, 0, 0))
    zigzag = block_costs(MODEL, T4, Block(1, 4), S, N_OUT).time_s(streamed, "decode")
    row = block_costs(MODEL, T4, Block(1, 4, "row"), S, N_OUT).time_s(streamed, "decode")
    assert row == pytest.approx(4 * zigzag, rel=0.2)


def test_diagonal_stores_less_cache() -> None:
    zigzag, diagonal = (block_costs(MODEL, T4, Block(4, 4, order), 64, 256) for order in ("zigzag", "diagonal"))  # type: ignore[arg-type]
    i = INDEX["kv", "host"]
    # A.2.1: bls2 / bls1 = (2 s + 2 n) / (2 s + n) + O(1 / n)
    assert zigzag.memory["host"][i] / diagonal.memory["host"][i] == pytest.approx((128 + 512) / (128 + 256), rel=0.01)


@pytest.mark.parametrize(("formats", "lane", "ratio"), [
    ({"weight_format": "w4g64"}, "attention", 4.5 / 16), ({"cache_format": "kv4"}, "kv", 4.5 / 16)])
def test_formats_shrink_what_moves(formats: dict[str, str], lane: str, ratio: float) -> None:
    plain, packed = (layer_piece("decode", replace(Block(8, 2), **f)) for f in ({}, formats))  # type: ignore[arg-type]
    i = INDEX[lane, "host"]
    assert packed.lanes["host_to_device"][i] / plain.lanes["host_to_device"][i] == pytest.approx(ratio)


def test_checkpoints_move_half_of_kv_and_compute() -> None:
    piece = layer_piece("decode", Block(8, 2))
    moved = piece.lanes["host_to_device"]
    assert moved[INDEX["checkpoint", "host"]] == pytest.approx(moved[INDEX["kv", "host"]] / 2)
    tokens = 16 * (S + N_OUT / 2)
    extra = piece.lanes["compute"][INDEX["checkpoint", "host"]] - piece.lanes["compute"][INDEX["kv", "host"]]
    assert extra == pytest.approx(tokens * 4 * H1 * H1 / T4.gemm_flops)


def test_windows_bound_cache_and_attention() -> None:
    layer = replace(MODEL.layers[0], window=100)
    windowed = replace(MODEL, layers=(layer,))
    full, short = (block_costs(m, T4, Block(4), S, N_OUT) for m in (MODEL, windowed))
    i = INDEX["kv", "disk"]
    assert short.memory["disk"][i] / full.memory["disk"][i] == pytest.approx(100 / (S + N_OUT))
    assert np.all(np.isfinite(short.memory["device"])) and len(X) == N + 1
