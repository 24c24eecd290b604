"""Goodput and the search over strategies: against loads that are known, and the orderings of the paper's figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.predict.model_shapes import PRESET_MODELS, ModelError
from forebay.rewriter.serving import goodput
from forebay.rewriter.serving.goodput import (
    TOLERANCE,
    Goodput,
    Measured,
    Prices,
    ServiceLevel,
    find_goodput,
    greatest_rate,
    half_width,
    measure,
    ranked,
)
from forebay.rewriter.serving.offloaded import offloaded_times, streamed, with_checkpoints
from forebay.rewriter.serving.phase_times import cache_tokens, shape_times
from forebay.rewriter.serving.search import search_services
from forebay.rewriter.serving.served import Served
from forebay.rewriter.serving.strategies import ServiceWanted, Strategy, simulated, strategies
from forebay.rewriter.serving.traffic import Arrival, Traffic, TrafficError, arrivals

LLAMA, H100, RTX = PRESET_MODELS["codellama-34b"], PRESETS["h100"], PRESETS["rtx4090"]
PAPER = ServiceWanted(LLAMA, PRESETS["ascend-910b3"], Traffic(1.0, 300, 2048, 64), paper=True)
LEVEL = ServiceLevel(1.5, 0.07, runs=2)
SMALL = ServiceWanted(PRESET_MODELS["llama-3-8b"], H100, Traffic(1.0, 150, 512, 32))


def test_goodput_is_kept_and_a_little_more_is_not() -> None:
    for strategy in (Strategy(4, prefill=1, decode=1), Strategy(4, both=2)):
        found = find_goodput(strategy, PAPER, LEVEL)
        assert found.at_goodput.keeps(LEVEL) and found.at_goodput.rate == found.rate > 0.1
        beyond = measure(simulated(strategy, PAPER), PAPER.traffic, LEVEL, found.rate * (1 + 3 * TOLERANCE))
        assert not beyond.keeps(LEVEL)


def test_runs_that_cannot_change_what_is_found_are_left_out() -> None:
    """The same rate and the same measured there, by fewer runs."""
    level, made = replace(LEVEL, runs=3), Strategy(4, both=2)
    one, ran = simulated(made, PAPER), [0]

    def counted(requests: Sequence[Arrival], seed: int) -> Served:
        ran[0] += 1
        return one.simulate(requests, seed)

    found, rate = greatest_rate(replace(one, simulate=counted), PAPER.traffic, level, 2)
    fewer, ran[0] = ran[0], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(goodput, "measure", lambda *given, whole=True: measure(*given))
        assert greatest_rate(replace(one, simulate=counted), PAPER.traffic, level, 2) == (found, rate)
    assert 0 < fewer < ran[0] and ran[0] % 3 == 0 and rate > 0


def test_goodput_of_a_single_queue_lies_where_the_wait_is_the_objective() -> None:
    """Prefills one at a time, answers of one token: M/D/1, whose P90 is below the objective at half load and far above
    it at nine tenths."""
    service = replace(SMALL, traffic=Traffic(1.0, 2000, 2048, 1), prefill_batch=1)
    strategy, alone = Strategy(1, prefill=1, decode=1), shape_times(service.model, H100, 1).prefill_s(1, 2048, 2048)
    found = find_goodput(strategy, service, ServiceLevel(3 * alone, 1.0, runs=1))
    assert 0.5 / alone < found.rate < 0.9 / alone


def test_more_instances_and_lax_objectives_serve_more() -> None:
    longer = replace(SMALL, traffic=replace(SMALL.traffic, count=300))
    rates = [find_goodput(Strategy(1, both=m), longer, ServiceLevel(0.1, 0.02, runs=1)).rate for m in (1, 2, 3)]
    assert 0 < rates[0] < rates[1] < rates[2] < 4 * rates[0]  # one queue before three wastes less than three before one
    lax = find_goodput(Strategy(1, both=1), longer, ServiceLevel(0.2, 0.2, runs=1)).rate
    assert lax > rates[0]
    assert find_goodput(Strategy(1, both=1), SMALL, ServiceLevel(1e-4, 0.02, runs=1)).rate == 0


def test_either_objective_binds_and_runs_are_long_enough_to_see_a_queue_grow() -> None:
    one = Strategy(1, both=1)
    assert find_goodput(one, SMALL, ServiceLevel(0.2, 1e-4, runs=1)).rate == 0
    service = replace(SMALL, traffic=Traffic(1.0, 5, 2048, 1), prefill_batch=1)
    alone = shape_times(service.model, H100, 1).prefill_s(1, 2048, 2048)
    level = ServiceLevel(20 * alone, 1.0, runs=1)
    over = measure(simulated(Strategy(1, prefill=1, decode=1), service), service.traffic, level, 1.3 / alone)
    assert not over.keeps(level)  # five requests alone would not have waited


def test_a_rate_beyond_what_is_served_is_none_however_lax_the_objectives() -> None:
    """Decode slots bind, which the time to the first token does not show: 16 of them, 63 steps a request."""
    service, strategy = replace(SMALL, traffic=Traffic(1.0, 150, 128, 64)), Strategy(1, prefill=3, decode=1)
    served = 16 / (63 * shape_times(service.model, H100, 1).decode_s(16, 128 + 32))
    for lax in (ServiceLevel(1.0, 1e3, runs=2), ServiceLevel(1e3, 1e3, runs=2)):
        below, above = (measure(simulated(strategy, service), service.traffic, lax, share * served)
                        for share in (0.93, 1.08))
        assert above.ttft_s < lax.ttft_s and above.tpot_s < lax.tpot_s and above.grows and not above.keeps(lax)
        assert not below.grows and below.keeps(lax)


def test_a_cache_takes_its_time_from_prefill_to_decode() -> None:
    slow = replace(SMALL, machine=replace(H100, interconnect_bytes_per_s=1e8), traffic=Traffic(0.01, 3, 512, 3))
    run = simulated(Strategy(1, prefill=1, decode=1), slow).simulate(arrivals(slow.traffic, 0), 0)
    times, moved = shape_times(slow.model, H100, 1), slow.model.kv_nbytes(512) / 1e8
    assert list(run.last - run.first) == pytest.approx([moved + times.decode_s(1, 513) + times.decode_s(1, 514)] * 3)


def test_figures_7_and_9_bend_as_printed() -> None:
    """P90 TTFT rises with the rate and steeply near saturation; TPOT of decode instances of their own hardly moves,
    that of instances that prefill too does."""
    rates, traffic = (1.0, 2.0, 3.0, 3.6), replace(PAPER.traffic, count=1500)
    apart, both = ([measure(simulated(strategy, PAPER), traffic, LEVEL, rate) for rate in rates]
        for strategy in (Strategy(4, prefill=1, decode=1), Strategy(4, both=2)))
    for found in (apart, both):
        assert list(np.diff([m.ttft_s for m in found]) > 0) == [True] * 3
    assert apart[3].ttft_s - apart[2].ttft_s > 2 * (apart[2].ttft_s - apart[1].ttft_s)
    assert apart[3].tpot_s < 1.25 * apart[0].tpot_s and both[3].tpot_s > 2 * both[0].tpot_s
    assert both[3].ttft_s < apart[3].ttft_s  # two instances prefill, of which one of the other kind has


def test_the_search_ranks_and_refuses_alike_with_one_process_and_two() -> None:
    level = ServiceLevel(0.5, 0.03, runs=1)
    service = replace(SMALL, traffic=replace(SMALL.traffic, count=60))
    candidates, refused = strategies(service, 2, (1, 2, 4))
    assert [s.name for s in candidates] == ["1m tp1", "2m tp1", "1p1d tp1", "1m tp2"] and list(refused) == ["tp 4"]
    one = search_services(candidates, service, level, 1.0)
    assert one == search_services(candidates, service, level, 1.0, workers=2) and len(one[0]) == 4
    assert one[0][0].strategy.devices == 1  # the fewest that serve 1 request/s


def test_all_strategies_are_those_of_the_paper() -> None:
    found, _ = strategies(PAPER, 40, (1, 2, 4, 8), 5)
    assert len(found) == len(set(found)) == 4 * (5 + 10)
    assert all(s.devices <= 40 and s.both + s.prefill + s.decode <= 5 for s in found)


def test_rank_and_price() -> None:
    nothing = Measured(1.0, 0, 0, 0, 0)
    made = [Goodput(Strategy(t, both=m), rate, nothing, None) for t, m, rate in ((4, 1, 8.0), (1, 1, 1.0), (1, 2, 3.0))]
    assert [g.rate for g in ranked(made)] == [8.0, 3.0, 1.0]
    assert [g.rate for g in ranked(made, 2.5)] == [3.0, 8.0, 1.0]
    assert Prices(3.6).per_million(made[0], 100) == pytest.approx(4 * 3.6 / 3600 / 800 * 1e6)
    assert Prices(3.6).per_million(replace(made[0], rate=0.0), 100) == float("inf")
    away = Goodput(Strategy(offloaded=4), 0.5, nothing, None)
    assert ranked([*made, away]) == [made[0], made[2], made[1], away]
    cheap = Prices(3.6, 0.36)  # a tenth of a device, for half of what the cheapest of those serves
    assert ranked([*made, away], prices=cheap)[0] is away and ranked([*made, away], 0.4, cheap)[0] is away
    assert ranked([*made, away], 2.5, cheap)[0] is made[2]
    assert half_width([1.0, 1.0, 1.0]) == 0 and half_width([0.0, 2.0]) == pytest.approx(12.706)


def test_a_device_that_streams_reads_few_experts_by_name() -> None:
    """An eighth of the feed-forward takes part in a token; a step of many tokens streams whole layers as a dense one's
    does, and one of few reads what they name and computes after it."""
    layer = LLAMA.layers[0]
    mlp = tuple(replace(each, share=1 / 8) for each in layer.mlp)
    model = replace(LLAMA, layers=(replace(layer, mlp=mlp, mlp_flops=layer.mlp_flops // 8),))
    away, link = streamed(model, RTX, 10_000), RTX.link("host", "device")
    assert away == streamed(LLAMA, RTX, 10_000)
    times, dense = offloaded_times(model, RTX, away), offloaded_times(LLAMA, RTX, away)
    attention, experts = (layer.elements(stage) for stage in ("attention", "mlp"))
    for batch, named in ((1, 1 / 8), (2, 15 / 64)):
        read = away.nbytes * (attention + named * experts) / (attention + experts) / link.bandwidth_bytes_per_s
        waits = read + shape_times(model, RTX, 1).decode_s(batch, 512)
        assert waits < times.decode_s(batch, 512) < 1.1 * waits
    assert 0.7 * dense.decode_s(64, 512) < times.decode_s(64, 512) <= dense.decode_s(64, 512)
    assert times.prefill_s(1, 512, 512) <= dense.prefill_s(1, 512, 512)


def test_one_device_that_streams_competes_where_the_model_does_not_fit() -> None:
    service = ServiceWanted(LLAMA, RTX, Traffic(1.0, 40, 512, 4))
    found, refused = strategies(service, 4, (1, 2))
    assert {s.offloaded for s in found} >= {1, 4} and all(s.offloaded for s in found)
    assert "does not fit" in refused["tp 1"] and "interconnect" in refused["tp 2"]
    away = streamed(LLAMA, RTX, 10_000)
    assert 0.6 * LLAMA.weight_nbytes < away.nbytes < LLAMA.weight_nbytes
    times = offloaded_times(LLAMA, RTX, away)
    link = away.nbytes / RTX.link("host", "device").bandwidth_bytes_per_s
    assert link < times.decode_s(1, 512) < 1.2 * link  # the link binds
    assert times.decode_s(16, 512) < 1.2 * times.decode_s(1, 512)
    tight = search_services(found, service, ServiceLevel(1.0, 0.1, runs=1))[0]
    lax = search_services(found, service, ServiceLevel(20.0, 6.0, runs=1))[0]
    assert tight[0].rate == 0 < lax[0].rate
    assert [sorted(one.strategy.staged for one in ways) for ways in (tight, lax)] == [[False, True]] * 2


def test_a_cache_in_host_memory_keeps_the_checkpoints_that_are_fastest() -> None:
    """Of OPT, whose layer inputs are half as large as their K and V, a part. Of a Llama with 8 heads of K and V, which
    are smaller than its inputs, none."""
    model = PRESET_MODELS["opt-30b"]
    away = streamed(model, RTX, 64 * 700, staged=True)
    own = with_checkpoints(model, RTX, away, 64, 640)
    steps = {share: offloaded_times(model, RTX, replace(away, checkpoints=share)).decode_s(64, 640)
             for share in (own.checkpoints, *(i / 8 for i in range(9)))}
    assert steps[own.checkpoints] < 1.01 * min(steps.values()) < 0.95 * min(steps[0.0], steps[1.0])
    made_again_flops = 64 * 639 * model.n_layers * 2 * model.layers[0].hidden * model.layers[0].kv_elements
    made_again = made_again_flops / RTX.product_flops
    assert made_again < steps[1.0] < 1.5 * made_again
    assert with_checkpoints(LLAMA, RTX, streamed(LLAMA, RTX, 44_800, staged=True), 64, 640).checkpoints == 0
    link = RTX.link("host", "device").bandwidth_bytes_per_s
    assert steps[0.0] > (away.nbytes + model.kv_nbytes(64 * 639)) / link  # weights and caches share it


def test_what_a_device_does_not_hold_of_a_cache_the_host_does_or_nobody() -> None:
    model = PRESET_MODELS["opt-30b"]
    tokens = 256 * 700
    assert streamed(model, RTX, tokens, staged=True).nbytes <= model.weight_nbytes
    with pytest.raises(ModelError, match="--budget"):
        streamed(model, RTX, tokens)
    host = replace(RTX.tiers["host"], capacity_nbytes=model.kv_nbytes(tokens))
    small = replace(RTX, tiers=RTX.tiers | {"host": host})
    held = streamed(model, small, tokens, staged=True)
    assert held.from_host_nbytes == 0 < held.nbytes  # what is left of the weights comes from disk
    with pytest.raises(ModelError, match="host memory lacks"):
        streamed(model, small, tokens + 1, staged=True)


def test_one_device_of_another_kind_competes_by_its_price() -> None:
    service = ServiceWanted(PRESET_MODELS["opt-13b"], H100, Traffic(1.0, 30, 256, 8), offload_machine=RTX)
    found, _ = strategies(service, 1, (1,), 1)
    found = [s for s in found if s.offloaded in (0, 4)]
    level = ServiceLevel(2.0, 0.6, runs=1)
    dear, cheap = (search_services(found, service, level, prices=Prices(3.0, price))[0] for price in (3.0, 0.01))
    assert not dear[0].strategy.offloaded and cheap[0].strategy.offloaded
    assert {one.strategy: one.rate for one in dear} == {one.strategy: one.rate for one in cheap}


def test_offloading_never_streams_what_fits_nor_holds_more_than_there_is() -> None:
    model = PRESET_MODELS["llama-3-8b"]
    assert streamed(model, H100, 1000).nbytes == 0
    fits = shape_times(model, H100, 1)
    assert offloaded_times(model, H100, streamed(model, H100, 1000)).decode_s(4, 500) == fits.decode_s(4, 500)
    for budget in (8 << 30, 12 << 30):
        away = streamed(model, H100, 4096, budget)
        layer = sum(model.layers[0].elements(stage) for stage in ("attention", "mlp")) * model.itemsize
        kept = model.weight_nbytes - away.nbytes + model.kv_nbytes(4096) + 2 * layer  # with the slots they pass through
        assert kept < budget and away.from_host_nbytes == away.nbytes
    with pytest.raises(ModelError, match="--budget"):
        streamed(model, H100, 4096, 1 << 30)


@pytest.mark.parametrize("level", [ServiceLevel(0.0, 1.0), ServiceLevel(1.0, float("nan")), ServiceLevel(1, 1, 0.0),
                                   ServiceLevel(1, 1, 90, 0)])
def test_objectives_that_cannot_be_meant_are_refused(level: ServiceLevel) -> None:
    with pytest.raises(TrafficError):
        find_goodput(Strategy(1, both=1), SMALL, level)


@pytest.mark.all
def test_the_papers_search_finds_goodput_for_most() -> None:
    candidates, _ = strategies(PAPER, 40)
    found, refused = search_services(candidates, PAPER, LEVEL, workers=2)
    assert not refused and sum(one.rate > 0 for one in found) > 20


def test_memory_is_known() -> None:
    assert cache_tokens(LLAMA, H100, 1) > 0 > cache_tokens(LLAMA, RTX, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="workers elsewhere are not forked, so they know no stand-in")
def test_an_interrupt_ends_the_searches_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def found_late(strategy: Strategy, *given: object) -> Goodput:
        time.sleep(600 * (strategy.devices > 1))
        raise ModelError("found at once")

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("forebay.rewriter.serving.search.find_goodput", found_late)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        search_services([Strategy(1, both=2), Strategy(1, both=1)], SMALL, LEVEL, workers=2, told=interrupt)
    assert time.monotonic() - begun < 300
