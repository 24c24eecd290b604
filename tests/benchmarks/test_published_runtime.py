"""What other systems' runtimes do, one thing at a time: relays, staging, synchronisation, streams."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.papers.published_runtime import UNPINNED, Runtime, Unpinned, running
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.policy.block_costs import BlockCosts, BlockShape
from forebay.rewriter.policy.policy_search import Problem
from forebay.rewriter.policy.shares import INDEX, shares
from forebay.rewriter.predict.model_shapes import PRESET_MODELS

MODEL, T4, RATES = PRESET_MODELS["opt-30b"], PRESETS["t4"], UNPINNED["t4"]
UP, DOWN = (T4.link(*ends).bandwidth_bytes_per_s for ends in (("host", "device"), ("device", "host")))
S, N_OUT, H1, H2, LAYERS = 512, 32, 7168, 28672, 48
WEIGHTS = 8 * H1 * H1 + 4 * H1 * H2
X = shares((0.2, 0.5, 0.3), (0.1, 0.6, 0.3), (0.4, 0.35, 0.25))


def costs(block: BlockShape, runtime: Runtime, rates: Unpinned = RATES) -> BlockCosts:
    return Problem(MODEL, T4, S, N_OUT, runs=running(runtime, rates)).costs(block)


def test_a_runtime_that_does_nothing_otherwise_is_ours() -> None:
    block = BlockShape(8, 2, weight_format="w4g64")
    assert costs(block, Runtime()).busy_s(X) == Problem(MODEL, T4, S, N_OUT).costs(block).busy_s(X)


@pytest.mark.parametrize("name", UNPINNED)
def test_rates_without_pinning_have_sources_and_do_not_exceed_the_link(name: str) -> None:
    rates, link = UNPINNED[name], PRESETS[name].link("host", "device").bandwidth_bytes_per_s
    assert set(rates.sources) == {"pageable_bytes_per_s", "packed_pageable_bytes_per_s", "dequantize_bytes_per_s"}
    assert all(rates.sources.values())
    assert 0 < rates.pageable_bytes_per_s <= link and 0 < rates.packed_pageable_bytes_per_s <= link


@pytest.mark.parametrize(("fused", "memory"), [(True, 0.0), (False, 2.0 * 2 * H1 * H2)])
def test_codes_that_are_expanded_before_use_take_time_and_memory(fused: bool, memory: float) -> None:
    block = BlockShape(8, 2, weight_format="w4g64")
    fused_costs, found = (costs(block, Runtime("step", fused=f)) for f in (True, fused))
    assert found.nbytes(X)["device"] - fused_costs.nbytes(X)["device"] == pytest.approx(memory, rel=2e-3)
    assert (found.time_s(X) > fused_costs.time_s(X)) == (not fused)


def test_flexgens_cache_has_groups_of_its_own() -> None:
    plain, packed = (costs(BlockShape(8, 2, cache_format=f), Runtime("step")).memory["host"] for f in ("native", "kv4"))
    i = INDEX["kv", "host"]
    assert packed[i] / plain[i] == pytest.approx(4.5 / 16)


def test_serial_is_slower_than_steps_and_steps_than_blocks() -> None:
    block = BlockShape(48, 3, host_attention=True)
    times = [costs(block, Runtime(overlap)).time_s(X)  # type: ignore[arg-type]
             for overlap in ("block", "step", "none")]
    assert times == sorted(times) and times[0] < times[2]


def test_unpinned_cache_does_not_overlap() -> None:
    on_host = shares((1, 0, 0), (0, 1, 0), (1, 0, 0))
    block = BlockShape(8, 2)
    pinned, relayed = (costs(block, Runtime("step", pinned_cache=p))
                       for p in (True, False))
    assert relayed.time_s(on_host, "decode") > pinned.time_s(on_host, "decode")
    assert relayed.busy_s(on_host)["host_to_device"] < pinned.busy_s(on_host)["host_to_device"]


def test_a_relay_of_packed_codes_has_a_rate_of_its_own() -> None:
    on_host = shares((1, 0, 0), (0, 1, 0), (1, 0, 0))
    block = BlockShape(8, 2, cache_format="kv4")
    runtime = Runtime("step", pinned_cache=False)
    quicker = replace(RATES, packed_pageable_bytes_per_s=2 * RATES.packed_pageable_bytes_per_s)
    slow, fast = (costs(block, runtime, rates) for rates in (RATES, quicker))
    stored = 4 * 16 * (S + N_OUT / 2) * H1 * LAYERS * (N_OUT - 1) * 4.5 / 16
    saved = slow.busy_s(on_host)["compute"] - fast.busy_s(on_host)["compute"]
    assert saved * 2 * RATES.packed_pageable_bytes_per_s == pytest.approx(stored, rel=1e-6)
    native = [costs(BlockShape(8, 2), runtime, rates).time_s(on_host) for rates in (RATES, quicker)]
    assert native[0] == native[1]


def test_relayed_weights_hold_up_the_thread_that_launches() -> None:
    weights_only = shares((0, 1, 0), (1, 0, 0), (1, 0, 0))
    pinned, relayed = (costs(BlockShape(8, 4), Runtime("step", host_weights=how))  # type: ignore[arg-type]
                       for how in ("pinned", "relayed"))
    assert relayed.time_s(weights_only) > pinned.time_s(weights_only)
    moved = relayed.busy_s(weights_only)["compute"] - pinned.busy_s(weights_only)["compute"]
    stage = 4 * H1 * H1 * 2 / RATES.pageable_bytes_per_s  # the very first load comes on top
    assert moved == pytest.approx(WEIGHTS * LAYERS * N_OUT / RATES.pageable_bytes_per_s + stage, rel=2e-3)


def test_activations_on_the_compute_stream_are_paid_in_full() -> None:
    on_host = shares((1, 0, 0), (1, 0, 0), (0, 1, 0))
    beside, within = (costs(BlockShape(8, 2), Runtime("step", activation_stream=own))
                      for own in (True, False))
    moved = 2 * 16 * (S + N_OUT - 1) * H1 * 2 * LAYERS  # two stages
    copied = moved / UP + moved / DOWN
    assert within.busy_s(on_host)["compute"] - beside.busy_s(on_host)["compute"] == pytest.approx(copied)
    assert within.time_s(on_host) > beside.time_s(on_host)


def test_staged_weights_lie_between_pinned_and_pageable() -> None:
    weights_only = shares((0, 1, 0), (1, 0, 0), (1, 0, 0))
    pinned, staged, pageable = (
        costs(BlockShape(1), Runtime(host_weights=how)).time_s(weights_only)  # type: ignore[arg-type]
        for how in ("pinned", "staged", "pageable"))
    assert pinned < staged < pageable
