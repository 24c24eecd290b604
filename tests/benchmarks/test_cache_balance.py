"""HybridServe's balance of cache and checkpoints: both lanes end together, none for grouped queries."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from benchmarks.papers.cache_balance import LayerTimes, balance_cache, fill_host, layer_times
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.model_shapes import PRESET_MODELS

R4090 = MachineEstimator(PRESETS["rtx4090"])
positive = st.floats(1e-8, 1e-5)


@settings(max_examples=examples(100), deadline=None)
@given(st.floats(0, 0.2), st.floats(0, 0.2), positive, st.floats(0.1, 0.9), positive, st.integers(0, 10**6),
       st.integers(0, 10**5))
def test_no_other_split_is_faster(
    weights_s: float, forward_s: float, kv_s: float, ratio: float, recompute_s: float, tokens: int, device: int
) -> None:
    times = LayerTimes(weights_s, forward_s, kv_s, ratio * kv_s, recompute_s, 2.0, 2.0 * ratio)
    found = balance_cache(times, tokens, device)
    assert found.kv_tokens + found.checkpoint_tokens == pytest.approx(tokens)

    def slower(kept: float) -> float:
        link = weights_s + (tokens - kept) * kv_s + kept * ratio * kv_s
        return max(link, forward_s + (kept + device) * recompute_s)

    best = min(slower(tokens * i / 64) for i in range(65))
    assert max(found.link_s, found.compute_s) <= best * (1 + 1e-9) + 1e-12


def test_grouped_queries_keep_k_and_v() -> None:
    for name in ("llama-3-8b", "codellama-34b", "qwen2.5-7b"):
        times = layer_times(PRESET_MODELS[name], R4090, 64, 2048)
        assert times.checkpoint_nbytes >= times.kv_nbytes
        assert math.isinf(balance_cache(times, 64 * 2048).nbytes_ratio)


def test_larger_models_keep_more_k_and_v() -> None:
    """Recomputing grows with the square of the width, loading with the width."""
    ratios = [balance_cache(layer_times(PRESET_MODELS[n], R4090, 128, 1984), 128 * 1984).nbytes_ratio
              for n in ("opt-6.7b", "opt-13b", "opt-30b", "opt-66b")]
    assert ratios == sorted(ratios) and ratios[0] < 1.2 < ratios[-1]


def test_all_of_host_memory_is_used_and_checkpoints_on_the_device_take_the_place_of_others() -> None:
    model = PRESET_MODELS["opt-30b"]
    times, room = layer_times(model, R4090, 128, 1984), 8 * 10**11
    found = fill_host(times, room, model.n_layers, 0.0)
    held = model.n_layers * (found.kv_tokens * found.kv_nbytes + found.checkpoint_tokens * found.checkpoint_nbytes)
    assert held == pytest.approx(room, rel=1e-6)
    assert found.link_s == pytest.approx(found.compute_s)
    assert found.nbytes_ratio == pytest.approx(2 * found.tokens_ratio)  # half as large
    assert balance_cache(times, 10**5, 10**4).checkpoint_tokens < balance_cache(times, 10**5).checkpoint_tokens
