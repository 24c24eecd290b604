"""The closed form ranks plans as the simulator of their Programs does: both ask what launches over caches take."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from families import llama, packed

from forebay.kernels.operators import find
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Budget, Prediction, Workload
from forebay.rewriter.ir.program import FileSlice, Launch
from forebay.rewriter.ir.schedule.batch_schedule import ALONE, BatchSchedule
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.rewriter.machine.points import AttentionPoint
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.cache_launches import cache_launches
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.planning.planner import make_plan
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.item_costs import over_tokens, work_time_s
from forebay.rewriter.switches import Switches

WORK = Workload(8, 384, 64)
WEIGHTS, CACHES = ("native", "w4g32"), ("native", "kv8", "kv4")
APART = 0.1  # simulated times that are nearer are not told apart


def fits(dtype: str, byte_s: float, flop_s: float) -> Iterator[AttentionPoint]:
    for nbytes, ratio in itertools.product((10**4, 10**5, 10**6, 10**7), (1, 4, 64, 256)):
        yield AttentionPoint(dtype, nbytes, nbytes * ratio, 2e-6 + nbytes * byte_s + nbytes * ratio * flop_s)


# Packed rows have a quarter and an eighth of the bytes, and take longer to unpack than the whole ones to read.
UNPACKING = replace(
    Machine.default(),
    attention=(*fits("float32", 1e-10, 2e-11), *fits("kv8", 6e-10, 3e-11), *fits("kv4", 3e-9, 5e-11)),
    pack_elements_per_s={"kv8": 1e9, "kv4": 3e7})
BYTES = replace(UNPACKING, attention=(*fits("float32", 4e-10, 1e-12), *fits("kv8", 4e-10, 1e-12),
                                      *fits("kv4", 4e-10, 1e-12)), pack_elements_per_s={})


@functools.cache
def model(weights: str) -> CapturedModel:
    found = capture_model(llama(4, hidden_size=128, intermediate_size=256, max_position_embeddings=1024))
    return found if weights == "native" else packed(found)


def pipeline_of(weights: str, cache: str, machine: Machine, batching: BatchSchedule = ALONE) -> Pipeline:
    lm = rewrite_captured(model(weights), Switches(), cache)
    files = {spec.name: FileSlice("weights", i << 24, spec.nbytes) for i, spec in enumerate(lm.weights.values())}
    return Pipeline(step_graphs(lm, files, WORK, "llama", batching=batching), WORK, machine, Switches())


def both(pipeline: Pipeline, cache: str) -> tuple[Prediction, Prediction]:
    """What the closed form expects of a plan that streams half of its weights, and what its Programs take."""
    options = Options(cache=cache, prefill_chunk=96)
    weights = sum(use.nbytes for use in pipeline.needs.uses)
    budget = Budget(pipeline.smallest_budget(options) + weights // 2)
    return make_plan(pipeline.needs, budget, WORK, options, "").prediction, pipeline.plan(budget, options).prediction


@pytest.mark.parametrize("machine", [UNPACKING, BYTES], ids=["unpacking binds", "bytes bind"])
@pytest.mark.parametrize("batching", [ALONE, BatchSchedule(MicroBatches(4))], ids=["alone", "micro-batches"])
def test_formats_are_ranked_as_their_programs_are(machine: Machine, batching: BatchSchedule) -> None:
    pairs = list(itertools.product(WEIGHTS, CACHES))
    found = {pair: both(pipeline_of(*pair, machine, batching), pair[1]) for pair in pairs}
    compared = 0
    for phase in ("prefill_time_s", "decode_time_s"):
        for one, other in itertools.combinations(pairs, 2):
            (a, exact), (b, rival) = ([getattr(side, phase) for side in found[pair]] for pair in (one, other))
            if abs(exact - rival) > APART * max(exact, rival):
                compared += 1
                assert (a < b) is (exact < rival), (phase, one, a, exact, other, b, rival)
    assert compared >= len(pairs), "the sample tells formats apart"


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("tokens", [1, 96])
def test_what_caches_take_is_what_the_launches_of_the_program_take(cache: str, tokens: int) -> None:
    """The closed form's launches, of a step over one token, are those of the Program of any step."""
    pipeline, times = pipeline_of("native", cache, UNPACKING), MachineEstimator(UNPACKING)
    plan = pipeline.plan(Budget(1 << 30), Options(cache=cache, prefill_chunk=96))
    program = pipeline.program(plan, tokens)

    def over_cache(item: object) -> bool:
        return isinstance(item, Launch) and (operator := find(item.op)) is not None and bool(operator.caches)

    ran = sum(work_time_s(item, times, program.seen) for item in program.launches() if over_cache(item))
    assert ran > 0 and pipeline.needs.rates.attend_s(tokens) == pytest.approx(ran, rel=1e-6)
    counted = sum(count * work_time_s(over_tokens(launch, tokens), times, program.seen)
                  for count, launch in cache_launches(pipeline.graphs.step(1)))
    assert counted == pytest.approx(pipeline.needs.rates.attend_s(tokens))
