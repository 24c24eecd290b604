"""Times of batches: against the recursion they abbreviate, and how they must move with their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from forebay.kernels.attention.operations import attention_flops
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.model_shapes import PRESET_MODELS, ModelError, ModelShape
from forebay.rewriter.predict.roofline import attaining, module_s
from forebay.rewriter.serving.llama_tables import EFFICIENCY, layer_modules, symbols
from forebay.rewriter.serving.phase_times import PhaseTimes, cache_tokens, shape_times, table_times, transfer_s

LLAMA, ASCEND, H100 = PRESET_MODELS["codellama-34b"], PRESETS["ascend-910b3"], PRESETS["h100"]


@pytest.mark.parametrize(("phase", "batch", "tokens"), [("prefill", 2, 512), ("decode", 3, 1), ("decode", 200, 1)])
def test_table_times_are_algorithm_1(phase: str, batch: int, tokens: int) -> None:
    """Launch after launch, as the algorithm reads."""
    estimator = MachineEstimator(attaining(ASCEND, *EFFICIENCY[phase][:2]))
    modules = layer_modules(symbols(LLAMA.layers[0], batch, tokens, 512, 4), phase, ASCEND.interconnect_bytes_per_s)
    launched = done = 0.0
    for _ in range(LLAMA.n_layers):
        for module in modules:
            launched += module.dispatch_s
            done = max(done, launched) + module_s(module, estimator) + module.communication_s
    times = table_times(LLAMA, ASCEND, 4)
    found = times.prefill_s(batch, tokens, 512) if phase == "prefill" else times.decode_s(batch, 512)
    assert found == pytest.approx(done, rel=1e-12)


@pytest.mark.parametrize("make", [table_times, shape_times])
def test_times_move_the_right_way(make: Callable[[ModelShape, Machine, int], PhaseTimes]) -> None:
    one, four = make(LLAMA, ASCEND, 1), make(LLAMA, ASCEND, 4)
    for times in (one, four):
        assert times.prefill_s(1, 256, 256) < times.prefill_s(2, 256, 256) < times.prefill_s(2, 512, 512)
        assert times.decode_s(1, 2000) < times.decode_s(16, 2000) < times.decode_s(16, 4000)
        assert times.decode_s(16, 2000) < 16 * times.decode_s(1, 2000)  # weights are read once
        assert times.prefill_s(1, 256, 256) < times.prefill_s(1, 256, 2048)  # of a chunk, with what is before it
        assert times.mixed_s(8, 1000, 128, 128) > max(times.decode_s(8, 1000), times.prefill_s(1, 128, 128))
        assert times.mixed_s(0, 0, 128, 128) == pytest.approx(times.prefill_s(1, 128, 128))
    assert four.prefill_s(4, 2048, 2048) < one.prefill_s(4, 2048, 2048) < 4 * four.prefill_s(4, 2048, 2048)
    assert four.decode_s(64, 2048) < one.decode_s(64, 2048)


def test_shape_times_reach_no_more_than_the_machine() -> None:
    """Operations over the peak, and weights over the memory's peak, bound them from below; a fifth of either above."""
    times = shape_times(LLAMA, H100, 1)
    flops = 2 * 4096 * sum(n * k for kind in LLAMA.layers for stage in ("attention", "mlp")
                           for n, k in kind.matrices(stage)) * LLAMA.n_layers
    assert flops / H100.peak_flops < times.prefill_s(2, 2048, 2048) < 3 * flops / H100.peak_flops
    read = (LLAMA.weight_nbytes - 2 * LLAMA.head_elements) / H100.peak_memory_bytes_per_s
    assert read < times.decode_s(1, 16) < 2 * read


def test_a_prefill_is_its_parts() -> None:
    """Products, attention, two passes over live activations, an all-reduce after each stage, and the head."""
    kind, estimator, n, t = LLAMA.layers[0], MachineEstimator(H100), 512, 4
    products = sum(estimator.product_s("float16", n, rows // t, columns, nbytes=2 * rows * columns / t)
                   for stage in ("attention", "mlp") for rows, columns in kind.matrices(stage))
    attention = estimator.attention_s("float16", 2 * n * kind.kv_elements / t, attention_flops(
        1, kind.heads, n, n, kind.head_dim) / t)
    touched = estimator.touch_s(2 * 2 * n * kind.activation_elements / t)
    reduced = 2 * 2 * (t - 1) / t * 2 * n * kind.hidden / H100.interconnect_bytes_per_s
    head = estimator.product_s("float16", 1, 32000 // t, 8192, nbytes=2 * 32000 * 8192 / t)
    assert shape_times(LLAMA, H100, t).prefill_s(1, n, n) == pytest.approx(
        48 * (products + attention + touched + reduced) + head)


def test_the_cache_is_what_weights_leave() -> None:
    for t in (1, 2, 4):
        tokens = cache_tokens(LLAMA, H100, t)
        assert (tokens > 0) == (t > 0 and t * H100.tiers["device"].capacity_nbytes > LLAMA.weight_nbytes)
        used = LLAMA.weight_nbytes + LLAMA.kv_nbytes(tokens) - t * H100.tiers["device"].capacity_nbytes
        assert -LLAMA.kv_nbytes(1) < used <= 0
    assert cache_tokens(LLAMA, PRESETS["rtx4090"], 1) < 0


def test_transfers_take_the_link_there_is() -> None:
    nbytes = LLAMA.kv_nbytes(1000)
    assert transfer_s(LLAMA, H100, 2, 1000) == pytest.approx(nbytes / 2 / H100.interconnect_bytes_per_s)
    t4 = PRESETS["t4"]
    links = [t4.link("device", "host").bandwidth_bytes_per_s, t4.link("host", "device").bandwidth_bytes_per_s]
    assert transfer_s(LLAMA, t4, 1, 1000) == pytest.approx(nbytes / links[0] + nbytes / links[1])


def test_what_cannot_be_costed_is_refused() -> None:
    with pytest.raises(ModelError, match="interconnect_bytes_per_s"):
        shape_times(LLAMA, PRESETS["rtx4090"], 2)
    with pytest.raises(ModelError, match="--paper"):
        table_times(PRESET_MODELS["opt-30b"], ASCEND, 1)
    with pytest.raises(ModelError, match="peak_flops"):
        table_times(LLAMA, replace(ASCEND, peak_flops=0.0), 1)
