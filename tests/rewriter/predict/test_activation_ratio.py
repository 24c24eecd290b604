"""The balance of cache and checkpoints: both lanes end together, none for grouped queries."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.predict.activation_ratio import LayerTimes, Line, balance_cache, fill_host, fit_line, layer_times
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
    times = LayerTimes(weights_s, forward_s, Line(kv_s), Line(ratio * kv_s), Line(recompute_s), 2.0, 2.0 * ratio)
    found = balance_cache(times, tokens, device_tokens=device)
    assert found.kv_tokens + found.checkpoint_tokens == pytest.approx(tokens)

    def slower(kept: float) -> float:
        link = weights_s + (tokens - kept) * kv_s + kept * ratio * kv_s
        return max(link, forward_s + (kept + device) * recompute_s)

    best = min(slower(tokens * i / 64) for i in range(65))
    assert max(found.link_s, found.compute_s) <= best * (1 + 1e-9) + 1e-12


def test_grouped_queries_keep_k_and_v() -> None:
    for name in ("llama-3-8b", "codellama-34b", "qwen2.5-7b"):
        times = layer_times(PRESET_MODELS[name], R4090, batch=64, context=2048)
        assert times.checkpoint_nbytes >= times.kv_nbytes
        found = balance_cache(times, 64 * 2048)
        assert found.share == 0
        assert math.isinf(found.kv_to_checkpoint_nbytes) and math.isinf(found.kv_to_checkpoint_tokens)


def test_larger_models_keep_more_k_and_v() -> None:
    """Recomputing grows with the square of the width, loading with the width."""
    ratios = [balance_cache(layer_times(PRESET_MODELS[n], R4090, batch=128, context=1984), 128 * 1984)
              .kv_to_checkpoint_nbytes for n in ("opt-6.7b", "opt-13b", "opt-30b", "opt-66b")]
    assert ratios == sorted(ratios) and ratios[0] < 1.2 < ratios[-1]


def test_fill_host_uses_all_of_it() -> None:
    model = PRESET_MODELS["opt-30b"]
    times = layer_times(model, R4090, batch=128, context=1984)
    room = 8 * 10**11
    found = fill_host(times, room, model.n_layers)
    held = model.n_layers * (found.kv_tokens * found.kv_nbytes + found.checkpoint_tokens * found.checkpoint_nbytes)
    assert held == pytest.approx(room, rel=1e-6)
    assert found.link_s == pytest.approx(found.compute_s)
    assert found.kv_to_checkpoint_nbytes == pytest.approx(2 * found.kv_to_checkpoint_tokens)  # half as large


def test_checkpoints_on_the_device_take_the_place_of_others() -> None:
    times = layer_times(PRESET_MODELS["opt-30b"], R4090, batch=128, context=1984)
    without, with_some = (balance_cache(times, 10**5, device_tokens=n) for n in (0, 10**4))
    assert with_some.checkpoint_tokens < without.checkpoint_tokens


def test_fit_line_recovers_a_line_and_says_how_well() -> None:
    exact = fit_line([(n, 2e-3 + 3e-6 * n) for n in (100, 1000, 5000)])
    assert (exact.base_s, exact.token_s, exact.r2) == pytest.approx((2e-3, 3e-6, 1.0))
    assert fit_line([(1, 1.0), (2, 3.0), (3, 2.0)]).r2 < 0.5
    with pytest.raises(ValueError, match="two numbers"):
        fit_line([(1, 1.0), (1, 2.0)])
    with pytest.raises(ValueError, match="not be negative"):
        balance_cache(layer_times(PRESET_MODELS["opt-30b"], R4090, batch=1, context=1), -1)
