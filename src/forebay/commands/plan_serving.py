"""The plan that `forebay serve` runs: how many slots, and whose turn each step is, for goals where there are any."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.language_model import LanguageModel
    from forebay.rewriter.ir.turns import StepTurns
    from forebay.rewriter.pipeline.plan_task import Planned, PlanTask
    from forebay.rewriter.planning.options import Options
    from forebay.rewriter.predict.of_programs import StepTimes

BATCH_SLOTS = (16, 8, 4, 2, 1)  # that are compared where none are named
HELD = (1, 2, 4)  # chunks before a step that decodes
PROMPT, NEW_TOKENS = 512, 256  # of a slot, where nobody says
REQUESTS = 200  # of a simulation; runs that show a queue have more
SHARE = 90.0  # of requests that are to keep the goals


@dataclass(frozen=True)
class ServingGoals:
    """Seconds that 90 % of requests may take to their first token and for each after it, for prompts and answers of so
    many tokens on average."""

    ttft_s: float
    tpot_s: float
    prompt: int
    output: int


@dataclass(frozen=True)
class ServingChoice:
    """A planned model for prompts and answers of so many tokens, whose turn its steps are, and the requests a second
    at which the goals are predicted to hold (None without goals)."""

    lm: LanguageModel
    prompt: int
    new_tokens: int
    turns: StepTurns
    rate: float | None = None


def plan_serving(
    folder: Path, budget: object, options: Options, goals: ServingGoals | None = None, images: bool = False
) -> ServingChoice:
    """Plan once, for prompts with `images` too. Without goals for the number of slots with which a sequence is
    predicted to take least time, with them for the number and the turns that keep them at the greatest rate, by
    simulation. Where weights stream, prefill steps that decode as well are compared too. PlanError where no plan fits,
    or none keeps the goals at any rate."""
    from forebay.build_model import build_model
    from forebay.commands.machine import machine_profile
    from forebay.commands.options import within_positions
    from forebay.commands.terminal import doing
    from forebay.images.open_tower import image_options
    from forebay.open_model import open_model
    from forebay.rewriter.ir.byte_sizes import parse_budget
    from forebay.rewriter.ir.plan import Workload
    from forebay.rewriter.planning.features.admission import admitted_at_once
    from forebay.runtime.disk.spill_file import require_spill_folder

    sizes = parse_budget(budget)
    require_spill_folder(sizes.disk)
    batch_slots = options.batch_slots or 1
    planned = replace(options, admitted=admitted_at_once(batch_slots), machine=machine_profile(options, folder))
    with doing("capturing the model"):
        opened = open_model(folder, embeds=images, keep=options.of_one_model)
    limit = opened[0].max_positions
    planned = within_positions(planned, limit, PROMPT, NEW_TOKENS)
    prompt, new_tokens = planned.prompt or 1, planned.new_tokens or 1
    if limit > prompt:
        new_tokens = min(new_tokens, limit - prompt)
    typical = (min(goals.prompt, prompt), min(goals.output, new_tokens)) if goals is not None else (0, 0)
    planned = image_options(planned, opened[0], prompt)
    with doing("planning"):
        lm = build_model(opened, sizes, Workload(batch_slots, prompt, new_tokens, *typical), planned,
                         partial(plan_slots_of_server, goals=goals))
    return ServingChoice(lm, prompt, new_tokens, *_turns_for(goals, lambda: step_times_of(lm)))


def step_times_of(lm: LanguageModel) -> StepTimes:
    """Return the predicted times of a plan's steps."""
    from forebay.rewriter.predict.of_programs import step_times

    return step_times(lm.plan, lm.steps.program, lm.machine)


def plan_slots_of_server(task: PlanTask, goals: ServingGoals | None) -> Planned:
    """The plan of the best number of slots, of those that `plan_serving` compares.

    Fewer are planned as long as they may pay. Where all lies in device memory, fewer free it for nothing, so the first
    that is slower ends the search. Goals are simulated with each.
    """
    from forebay.rewriter.ir.plan import PlanError
    from forebay.rewriter.planning.objective import sequence_time_s

    options = task.options
    found: list[Planned] = []
    refused = None
    for count in (options.batch_slots,) if options.batch_slots else BATCH_SLOTS:
        for alone in (True, False) if options.prompt_lookup_num_tokens is not None and count == 1 else (False,):
            try:
                found.append(_planned(task, count, alone=alone))
                break
            except PlanError as error:
                refused = error
        if goals is None and len(found) > 1 and not found[-2][1].off_device_nbytes and (
                sequence_time_s(found[-1][1]) > sequence_time_s(found[-2][1])):
            break
    if not found:
        assert refused is not None
        raise refused
    rates = [_turns_for(goals, partial(_times, planned, task))[1] or 0.0 for planned in found]
    if goals is not None and not max(rates):
        raise PlanError(_missed(found, task, goals))
    return min(zip(found, rates, strict=True), key=lambda way: (-way[1], sequence_time_s(way[0][1])))[0]


def _planned(task: PlanTask, count: int, *, alone: bool = False) -> Planned:
    """So many slots; one that is `alone` is entered by none beside it, and takes no memory for who enters."""
    from forebay.rewriter.pipeline.plan_search import plan_batch
    from forebay.rewriter.planning.features.admission import admitted_at_once

    if alone:
        return plan_batch(task.for_batch(count, admitted=None, cache_tier=task.options.cache_tier or "device"))
    return plan_batch(task.for_batch(count, admitted=admitted_at_once(count)))


def _times(planned: Planned, task: PlanTask) -> StepTimes:
    from forebay.rewriter.predict.of_programs import step_times

    pipeline, plan = planned
    return step_times(plan, partial(pipeline.program, plan), task.machine)


def _turns_for(goals: ServingGoals | None, times_of: Callable[[], StepTimes]) -> tuple[StepTurns, float | None]:
    """The turns with which a plan of such times keeps the goals at the greatest rate, and that rate."""
    from forebay.rewriter.ir.turns import DEFAULT_TURNS, SERVER_TURNS, StepTurns
    from forebay.rewriter.serving.continuous_batching import simulate_slots
    from forebay.rewriter.serving.goodput import ServiceLevel, greatest_rate
    from forebay.rewriter.serving.strategies import Simulated
    from forebay.rewriter.serving.traffic import Arrival, Traffic

    if goals is None:
        return SERVER_TURNS, None
    times, level = times_of(), ServiceLevel(goals.ttft_s, goals.tpot_s, SHARE, runs=1)
    alone = float(simulate_slots([Arrival(0.0, goals.prompt, goals.output)], times).last[0])
    traffic = Traffic(1.0, REQUESTS, goals.prompt, goals.output)
    rates = {}
    for turns in (DEFAULT_TURNS, *(StepTurns(0.0, held, overtakes=True) for held in HELD)):
        found = Simulated(lambda requests, seed, turns=turns: simulate_slots(requests, times, turns), alone)  # type: ignore[misc]
        rates[turns] = greatest_rate(found, traffic, level)[1]
    turns = max(rates, key=lambda each: rates[each])
    return turns, rates[turns]


def _missed(found: list[Planned], task: PlanTask, goals: ServingGoals) -> str:
    from forebay.rewriter.ir.durations import format_seconds
    from forebay.rewriter.serving.continuous_batching import simulate_slots
    from forebay.rewriter.serving.traffic import Arrival

    runs = [simulate_slots([Arrival(0.0, goals.prompt, goals.output)], _times(planned, task))
            for planned in found]
    ttft = min(float(run.ttft_s[0]) for run in runs)
    tpot = min((float(run.tpot_s[0]) for run in runs if len(run.tpot_s)), default=0.0)
    return (f"no plan within this budget keeps these goals: a request alone is predicted to take "
            f"{format_seconds(ttft)} to its first token and {format_seconds(tpot)} per token after it at best; larger "
            "--ttft and --tpot, or a larger --budget, may do")
