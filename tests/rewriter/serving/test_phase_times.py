"""Times of batches: against the recursion they abbreviate, and how they must move with their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.partition.collectives import NVLINK, mesh_of
from forebay.rewriter.partition.layouts import ChipLayout, PhaseWork, attention_cost, layer_cost, outside_cost
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.model_shapes import PRESET_MODELS, LayerShape, ModelError, ModelShape, TensorShape
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
    """Products of q, k and v and of gate and up together, each over its weight and its rows; attention, two passes over
    live activations, an all-reduce after each stage (of both halves t - 1 steps), and the head on what is gathered."""
    kind, estimator, n, t = LLAMA.layers[0], MachineEstimator(H100), 512, 4

    def product_s(m: int, rows: int, columns: int, moved: int) -> float:
        return estimator.product_s("float16", m, rows, columns, nbytes=2 * (rows * columns + moved))

    def link_s(nbytes: float) -> float:
        wire_s = (t - 1) / t * nbytes / H100.interconnect_bytes_per_s
        return min(way.begin_s + (t - 1) * way.step_s + wire_s / way.rate_share for way in NVLINK)

    sides = [(8192 + 2 * 1024) // t, 8192, 8192, 8192 // t, 2 * 22016 // t, 8192, 8192, 22016 // t]
    products = sum(product_s(n, rows, columns, n * (rows + columns)) for rows, columns in zip(
        sides[::2], sides[1::2], strict=True))
    seen = n - (n - 1) / 2
    attention = estimator.attention_s("float16", 2 * n * kind.kv_elements / t, 4 * n * seen * 8192 / t)
    touched = estimator.touch_s(2 * 2 * n * kind.activation_elements / t)
    head = product_s(1, 32000 // t, 8192, 0) + link_s(2 * 8192)
    assert shape_times(LLAMA, H100, t).prefill_s(1, n, n) == pytest.approx(
        48 * (products + attention + touched + 4 * link_s(2 * n * 8192)) + head)


@pytest.mark.parametrize(("devices", "machine"), [(1, "h100"), (4, "h100"), (16, "h100"), (4, "tpu-v4")])
def test_an_instance_costs_what_a_partition_does(devices: int, machine: str) -> None:
    """The layers of `forebay partition` in its 1D layout, attention over heads, and what lies outside them."""
    chip, model = PRESETS[machine], PRESET_MODELS["llama-3-8b"]
    times, mesh = MachineEstimator(chip), mesh_of(chip, (devices,))
    for work in (PhaseWork("prefill", 2, 512, 512), PhaseWork("decode", 16, 1, 700)):
        outside = outside_cost(model, mesh, work.batch, times, "float16").time_s
        priced = sum(kind.count * (
            layer_cost(kind, ChipLayout("1d", (), (), "heads"), mesh, work, times, weights="float16").time_s
            + times.touch_s(2 * work.rows * kind.activation_elements * 2 / devices)) for kind in model.layers)
        own = shape_times(model, chip, devices)
        found = own.prefill_s(2, 512, 512) if work.name == "prefill" else own.decode_s(16, 700)
        assert found == pytest.approx(max(priced + outside, 0.0))


def test_heads_that_several_devices_need_lie_on_each() -> None:
    """8 heads of K and V on 16 devices are held twice, so that caches grow by less than devices do."""
    model = replace(LLAMA, layers=tuple(replace(kind, kv_heads=8) for kind in LLAMA.layers))
    eight, sixteen = (cache_tokens(model, H100, t) for t in (8, 16))
    own = H100.tiers["device"].capacity_nbytes - model.weight_nbytes / 16
    assert sixteen == pytest.approx(own / (2 * 48 * 2 * 128), abs=2) and sixteen < 1.2 * eight
    assert cache_tokens(LLAMA, H100, 4, 8192) < cache_tokens(LLAMA, H100, 4)


def test_experts_are_priced_by_what_a_token_takes_part_in() -> None:
    """A layer of 8 experts of which a token meets 2: a quarter of their operations, and the bytes of those that some
    token meets."""
    def layer(experts: int) -> LayerShape:
        mlp = (TensorShape("in", 8 * 8192 * 4096, 4096, experts / 8),
               TensorShape("out", 8 * 4096 * 4096 * 2, 8192, experts / 8))
        return replace(PRESET_MODELS["llama-3-8b"].layers[0], mlp=mlp, mlp_flops=experts * 2 * 2 * 8192 * 4096)

    some, every = (shape_times(replace(PRESET_MODELS["llama-3-8b"], layers=(layer(e),)), H100, 1) for e in (2, 8))
    assert some.prefill_s(8, 1024, 1024) < 0.5 * every.prefill_s(8, 1024, 1024)
    assert some.decode_s(1, 16) < 0.5 * every.decode_s(1, 16)
    assert some.decode_s(32, 16) == pytest.approx(every.decode_s(32, 16), rel=0.02)


def test_the_cache_is_what_weights_leave() -> None:
    for t in (1, 2, 4):
        tokens = cache_tokens(LLAMA, H100, t)
        assert (tokens > 0) == (t > 0 and t * H100.tiers["device"].capacity_nbytes > LLAMA.weight_nbytes)
        used = LLAMA.weight_nbytes + LLAMA.kv_nbytes(tokens) - t * H100.tiers["device"].capacity_nbytes
        assert -t * LLAMA.kv_nbytes(1) < used <= 0
    assert cache_tokens(LLAMA, PRESETS["rtx4090"], 1) < 0


@pytest.mark.parametrize("devices", [1, 4])
def test_states_take_their_room_and_are_read_and_written(devices: int) -> None:
    """Of two kinds of layers one keeps states in place of K and V: of each sequence, whatever its length."""
    attending, state = replace(LLAMA.layers[0], count=24), 1 << 20
    recurring = replace(attending, kv_heads=0, head_dim=0, heads=1, state_nbytes=state)
    model, plain = (replace(LLAMA, layers=(attending, layer)) for layer in (recurring, replace(recurring,
                                                                                             state_nbytes=0)))
    assert model.state_nbytes == 24 * state and model.kv_nbytes(7) == LLAMA.kv_nbytes(7) // 2
    mesh, times, work = mesh_of(H100, (devices,)), MachineEstimator(H100), PhaseWork("decode", 16, 1, 700)
    costs = [attention_cost(layer, ChipLayout("1d", (), (), "heads"), mesh, work, times, "float16")
             for layer in (recurring, attending)]
    assert costs[0].state_nbytes == 16 * state / devices and not costs[0].cache_nbytes and not costs[1].state_nbytes
    assert costs[0].time_s == costs[0].memory_s == pytest.approx(times.touch_s(2 * 16 * state / devices))
    found, without = (shape_times(each, H100, devices).decode_s(16, 700) for each in (model, plain))
    assert found > without
    few, many = (cache_tokens(model, H100, devices, sequences=n) for n in (1, 101))
    assert few - many == pytest.approx(100 * model.state_nbytes / model.kv_nbytes(1), abs=2)
    with pytest.raises(ModelError, match="tables are of Llama's layers"):
        table_times(replace(model, layers=(replace(attending, state_nbytes=state),)), ASCEND, devices)
    alone = replace(model, layers=(recurring,))  # any length fits
    assert cache_tokens(alone, H100, devices) > 1 << 30 and cache_tokens(alone, H100, devices, sequences=10**6) == 0
    moved = transfer_s(model, H100, devices, 100) - transfer_s(plain, H100, devices, 100)
    assert moved == pytest.approx(24 * state / devices / H100.interconnect_bytes_per_s)


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
