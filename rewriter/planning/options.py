"""What a user asks of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import UnionType
from typing import Literal

import torch

from forebay.rewriter.ir.block import Block
from forebay.rewriter.ir.plan import Plan, PlanError, Workload
from forebay.rewriter.ir.score_range import ScoreRange

Activations = Literal["native", "bf16", "int8"]  # that packed weights meet: as they are, or rounded

HIDDEN_SLOTS = 3  # regions for hidden states: one is computed in, one is stored, one is loaded


@dataclass(frozen=True, kw_only=True)
class Options:
    """Choices the user forces; None leaves them to the planner. `cache_shares` are those of the caches, one for each
    layer and micro-batch, that stay on the device and in host memory, where `cache_tier` takes the others; with
    a `cache_tier` alone none does. So are `hidden_shares` of the micro-batches' hidden states beside `hidden_tier`."""

    slots: int | None = None
    slot_nbytes: int | None = None
    lead: int | None = None
    prefill_chunk: int | None = None
    cache: str = "native"
    micro_batches: int | None = None
    order: Literal["row", "zigzag"] = "zigzag"
    cache_tier: Literal["device", "host", "disk"] | None = None
    cache_shares: tuple[float, float] | None = None
    cpu_attention: bool | None = None  # whether decode steps attend over caches in host memory there
    cache_tokens: int | None = None
    cache_slots: int = 3
    checkpoints: tuple[int, int] | None = None  # of so many stretches of a staged cache of every so many; (0, 1): none
    checkpoint_format: str = "native"
    hidden_tier: Literal["device", "host", "disk"] | None = None
    hidden_shares: tuple[float, float] | None = None
    entering: int | None = None  # sequences of a prefill step; None: all at once
    rounds: bool = False  # sequences of a job that has more than there is room for begin together all the same
    prompt_lookup_num_tokens: int | Literal["auto"] | None = None  # that a step checks; None: none
    sparse_values: float = 1.0  # share of a sequence's tokens whose values decode steps read
    gather_buffers: int | None = None  # memory for weights that ranks gather ahead, in times of those read at once
    score_ranges: tuple[ScoreRange, ...] = ()  # what `forebay calibrate` measured
    activations: Activations = "native"

    def as_planned(self, plan: Plan) -> Options:
        """The same beside a plan: what it says of the values that attention has is so in plans that follow it."""
        return replace(self, cache=plan.cache_format, sparse_values=plan.schedule.block.sparse_values,
                       activations=activations_of(plan) if plan.gemm else self.activations)

    def output_agnostic(self) -> Options:
        """What is wished whatever steps give."""
        return Options(cache=self.cache, score_ranges=self.score_ranges, sparse_values=self.sparse_values,
                      activations=self.activations)

    def block(self, batch: int) -> Block:
        """The block for `batch` sequences with their cache on the device; no micro-batch is empty."""
        return self.with_hidden(Block(
            min(self.micro_batches or 1, batch), self.order, entering=min(self.entering or 0, batch),
            sparse_values=self.sparse_values, gather_buffers=self.gather_buffers or 0))

    def with_hidden(self, block: Block) -> Block:
        """The block with hidden states of its micro-batches on the tiers that are wished; of one they stay."""
        if self.hidden_tier in (None, "device") or block.micro_batches == 1:
            return block
        device, host = (int(share * block.micro_batches) for share in self.hidden_shares or (0.0, 0.0))
        host = 0 if self.hidden_tier == "host" else host
        slots = max(1, min(HIDDEN_SLOTS, block.micro_batches - device - 1))
        return replace(block, hidden=self.hidden_tier, hidden_slots=slots, hidden_device=device, hidden_host=host)


def usual_lengths(usual: tuple[int, int] | None) -> tuple[int, int]:
    """Tokens of a usual prompt and answer, (0, 0) for None. PlanError, under the name that `wrap` has for them, for
    what is no pair of sizes."""
    if usual is None:
        return 0, 0
    if not _is_pair(usual, int) or min(usual) < 1:
        raise PlanError(f"usual must be two whole numbers of at least 1, tokens of a prompt and of an answer, found "
                        f"{usual!r}")
    return usual[0], usual[1]


def activations_of(plan: Plan) -> Activations:
    """How packed weights meet activations in a plan: as one of its products rounds them, if one does."""
    chosen = {choice.impl for choice in plan.gemm}
    return "int8" if "int8" in chosen else "bf16" if "bf16" in chosen else "native"


def told_activations(activations: str, dtype: torch.dtype) -> str:
    """As settings tell them: rounding to bf16 is nothing to a model that computes in it."""
    return "native" if activations == "bf16" and dtype == torch.bfloat16 else activations


def check_choices(workload: Workload, options: Options, replayed: Plan | None = None) -> None:
    """PlanError, under the name that `wrap` has for it, for a choice that is none: sizes that are no whole numbers of
    at least 1, shares that are none, another word than those there are, more copies ahead than there are slots, a
    format of checkpoints that none are to be kept in, anything that a plan beside it has otherwise."""
    lookup = options.prompt_lookup_num_tokens
    require_sizes(batch=workload.batch, prompt=workload.prompt, new_tokens=workload.new_tokens, slots=options.slots,
                  slot_nbytes=options.slot_nbytes, lead=options.lead, prefill_chunk=options.prefill_chunk,
                  micro_batches=options.micro_batches, places=options.entering,
                  prompt_lookup_num_tokens=None if lookup == "auto" else lookup)
    for name, longest in (("prompt", workload.prompt), ("new_tokens", workload.new_tokens)):
        if (usual := getattr(workload, f"usual_{name}")) > longest:
            raise PlanError(f"usual: {usual} tokens are more than the longest has ({name}={longest})")
    for name, value, known in (("order", options.order, ("row", "zigzag")),
                               ("cache_tier", options.cache_tier, (None, "device", "host", "disk")),
                               ("hidden_tier", options.hidden_tier, (None, "device", "host", "disk")),
                               ("cpu_attention", options.cpu_attention, (None, False, True))):
        if value not in known:
            raise PlanError(f"{name} must be one of {', '.join(map(repr, known))}, found {value!r}")
    if options.checkpoints is not None and not _is_pair(options.checkpoints, int):
        raise PlanError(f"checkpoints must be two whole numbers, so many stretches of tokens of every so many, found "
                        f"{options.checkpoints!r}")
    why = "cache_tier device" if options.cache_tier == "device" else (
        "checkpoints (0, …)" if options.checkpoints is not None and not options.checkpoints[0] else "")
    if why and options.checkpoint_format != "native":
        raise PlanError(f"checkpoint_format {options.checkpoint_format}: with {why} none are kept; leave one out")
    _check_sparse_values(options)
    if replayed is not None:
        _check_replayed(options, replayed)
    for name, shares in (("cache_shares", options.cache_shares), ("hidden_shares", options.hidden_shares)):
        if shares is not None and not (_is_pair(shares, int | float) and all(0 <= share <= 1 for share in shares)):
            raise PlanError(f"{name} must be two numbers from 0 to 1, found {shares!r}")
    _check_hidden(options)
    if options.lead and options.slots and options.lead > options.slots:
        raise PlanError(f"lead {options.lead} needs as many slots; {options.slots} were asked for")


def _check_replayed(options: Options, plan: Plan) -> None:
    """PlanError for a wish that the plan does not keep: it runs as it is. What is as by default is no wish."""
    if options.score_ranges:
        raise PlanError("the plan says what ranges of scores it takes; leave calibration out, or plan anew with it")
    s, block = plan.schedule, plan.schedule.block
    planned: dict[str, tuple[object, object]] = {
        "cache": (None if options.cache == "native" else options.cache, plan.cache_format),
        "micro_batches": (options.micro_batches and min(options.micro_batches, plan.workload.batch),
                          block.micro_batches),
        "order": (None if options.order == "zigzag" else options.order, block.order),
        "cache_tier": (options.cache_tier, block.cache), "cpu_attention": (options.cpu_attention, block.cpu_attention),
        "prefill_chunk": (options.prefill_chunk and min(options.prefill_chunk, plan.workload.prompt), s.prefill_chunk),
        "checkpoints": (options.checkpoints and (options.checkpoints if options.checkpoints[0] else (0, 0)),
                        (block.checkpoints, block.checkpoint_period)),
        "hidden_tier": (options.hidden_tier, block.hidden),
        "gather_buffers": (options.gather_buffers, block.gather_buffers),
        "activations": (None if options.activations == "native" or not plan.gemm else options.activations,
                        activations_of(plan)),
        "sparse_values": (None if options.sparse_values == 1 else options.sparse_values, block.sparse_values)}
    if s.slots:
        planned |= {"slots": (options.slots, s.slots), "lead": (options.lead, s.lead)}
    for name, (wished, found) in planned.items():
        if wished is not None and wished != found:
            raise PlanError(f"{name}: the plan has {found}, {wished} is asked for; leave it out, or plan anew")
    if options.slot_nbytes is not None and s.slot_nbytes > options.slot_nbytes:  # the largest piece fills no slot
        raise PlanError(f"slot_nbytes: pieces of the plan have up to {s.slot_nbytes} bytes, {options.slot_nbytes} are "
                        "asked for; leave it out, or plan anew")
    if options.entering and not block.entering:
        raise PlanError("places: sequences of the plan begin together; leave it out, or plan anew")
    if isinstance(options.prompt_lookup_num_tokens, int) and not s.speculative_steps:
        raise PlanError("prompt_lookup_num_tokens: no step of the plan checks what is drafted; leave it out, or plan "
                        "anew")


def _check_sparse_values(options: Options) -> None:
    share = options.sparse_values
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise PlanError(f"sparse_values must be a number above 0 and at most 1, a share of tokens, found {share!r}")
    if share < 1 and options.prefill_chunk == 1:
        raise PlanError("sparse_values: a step over 1 token reads few values, a prompt's read all; give a "
                        "prefill_chunk of at least 2, or leave it out")
    if share < 1 and options.score_ranges:
        raise PlanError("sparse_values: the host attends, calibration is for a GPU that does; leave one of them out")
    if share < 1 and options.prompt_lookup_num_tokens not in (None, "auto"):
        raise PlanError("sparse_values: steps that check drafts read all values, so their tokens would be others; "
                        "leave prompt_lookup_num_tokens out")


def _check_hidden(options: Options) -> None:
    if options.hidden_shares is not None and options.hidden_tier in (None, "device"):
        raise PlanError("hidden_shares: they are of hidden states that leave the device; give a hidden_tier too")
    if sum(options.hidden_shares or ()) > 1:
        raise PlanError(f"hidden_shares: {options.hidden_shares} must be shares of one whole")
    if options.hidden_tier in (None, "device"):
        return
    for name, forced in (("order='row'", options.order == "row"), ("places", options.entering)):
        if forced:
            raise PlanError(f"hidden_tier {options.hidden_tier}: with {name} nothing waits between the turns of "
                            "micro-batches in a layer; leave one of both out")


def require_sizes(**sizes: object) -> None:
    """PlanError, naming the first that is neither None nor a whole number of at least 1."""
    for name, value in sizes.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise PlanError(f"{name} must be a whole number, found {value!r}")
        if value is not None and value < 1:
            raise PlanError(f"{name} must be at least 1, found {value}")


def _is_pair(value: object, kind: type | UnionType) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(
        isinstance(part, kind) and not isinstance(part, bool) for part in value)
