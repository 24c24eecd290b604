"""The table of options: one record for each thing that a user may ask of a plan.

`Options` is that table: its fields are the keywords of `wrap`, the options of the command line (with dashes), those of
torch.compile's backend, and docs/options.md. A record says which values there are, and what a plan that is replayed has
in the option's place. `register_option` adds one from outside the package.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, Literal

from forebay.kernels.formats.table import cache_choices
from forebay.rewriter.ir.plan import Plan, PlanError, Workload
from forebay.rewriter.ir.score_range import ScoreRange
from forebay.rewriter.planning.option_kinds import (
    ADAPTERS,
    CACHE_FORMAT,
    CHECKPOINT_FORMAT,
    COUNT,
    FLAG,
    FOLDER,
    MACHINE,
    MODEL,
    NBYTES,
    NBYTES_OR_NONE,
    PATH,
    PLAN,
    POLICY,
    RANKS,
    SHARE,
    SHARES,
    SIZE,
    SIZE_OR_AUTO,
    OptionKind,
    one_of,
    pair,
)
from forebay.rewriter.planning.policy import placed_by

if TYPE_CHECKING:
    import torch

    from forebay.rewriter.machine.profile import Machine

Activations = Literal["native", "bf16", "int8"]  # that packed weights meet: as they are, or rounded
MeshShape = str | int | Sequence[int] | Mapping[str, int | str | Sequence[int]]
MemoryTier = Literal["device", "host", "disk"]

GROUPS = ("Batch", "Weights", "KV cache", "Hidden states", "Speculation", "Model and machine")
BATCH, WEIGHTS, CACHE, HIDDEN, SPECULATION, SOURCE = GROUPS
PLANNER = "the planner's choice"
TIER = one_of("device", "host", "disk")


@dataclass(frozen=True)
class OptionRecord:
    """A record of the table.

    kind: the values that it takes.
    help: its meaning and unit, as a phrase; the default of most is None, which leaves the choice to the planner.
    group: the heading that it stands under.
    default: its value where nobody names one, which asks for nothing.
    otherwise: what happens then, in words, where None is not the planner's choice.
    answers: whether answers differ by more than rounding; a job's settings hold it.
    planned: what a plan has in its place, None for nothing; a replayed plan must equal the request.
    as_planned: the request in the same terms, None where every plan will do.
    """

    kind: OptionKind
    help: str
    group: str = WEIGHTS
    default: Any = None
    otherwise: str = ""
    answers: bool = False
    planned: Callable[[Plan], object] = lambda plan: None
    as_planned: Callable[[Any, Plan], object] = lambda value, plan: value

    @property
    def said_default(self) -> str:
        """The default in words; "" for an option that is off."""
        if self.default is None or self.default is False:
            return self.otherwise
        return str(self.default)


def option(kind: OptionKind, help: str, group: str, **more: Any) -> dict[str, OptionRecord]:
    """Make the metadata of a field of `Options`: its record, but for name and default, which the field has."""
    return {"option": OptionRecord(kind, help, group, **more)}


def activations_of(plan: Plan) -> Activations:
    """Return how packed weights meet activations in a plan: as one of its products rounds them, if one does."""
    chosen = {choice.impl for choice in plan.gemm}
    return "int8" if "int8" in chosen else "bf16" if "bf16" in chosen else "native"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a plan. An invalid value raises PlanError with the option's name.

    Those who plan are given the same record, and sizes of the call in a `Workload`: it changes from call to call."""

    batch: int | None = field(default=None, metadata=option(
        SIZE, "Sequences computed at once", BATCH, otherwise="1", planned=lambda plan: plan.workload.batch))
    prompt: int | None = field(default=None, metadata=option(
        SIZE, "Longest prompt, in tokens", BATCH, otherwise="128, or half of the model's positions"))
    new_tokens: int | None = field(default=None, metadata=option(
        SIZE, "Longest answer, in tokens", BATCH, otherwise="128"))
    typical: tuple[int, int] | None = field(default=None, metadata=option(
        pair("tokens of a prompt and of an answer", 1), "Tokens of a typical prompt and answer, for predicted "
        "times", BATCH))
    batch_slots: int | None = field(default=None, metadata=option(
        SIZE, "Sequences computed at once, with continuous batching", BATCH,
        planned=lambda plan: plan.workload.batch if plan.schedule.batching.admitted else (
            "sequences that begin together")))
    micro_batches: int | None = field(default=None, metadata=option(
        SIZE, "Parts of the batch that are computed one after the other", BATCH, otherwise=PLANNER,
        planned=lambda plan: plan.schedule.batching.micro_batches.count,
        as_planned=lambda value, plan: min(value, plan.workload.batch)))
    order: Literal["row", "zigzag"] = field(default="zigzag", metadata=option(
        one_of("row", "zigzag"), "Order of micro-batches: zigzag runs all through a layer before the next, and "
        "reads weights once; row runs each through all layers", BATCH,
        planned=lambda plan: plan.schedule.batching.micro_batches.order))

    slots: int | None = field(default=None, metadata=option(
        SIZE, "Staging buffers for streamed weights", WEIGHTS, otherwise=PLANNER,
        planned=lambda plan: plan.schedule.slots or None))
    slot_nbytes: int | None = field(default=None, metadata=option(
        NBYTES, "Size of a staging buffer for weights, in bytes", WEIGHTS, otherwise=PLANNER,
        planned=lambda plan: plan.schedule.slot_nbytes,
        as_planned=lambda value, plan: min(value, plan.schedule.slot_nbytes)))  # the largest piece may fill no slot
    lead: int | None = field(default=None, metadata=option(
        SIZE, "Copies of weights that are issued ahead", WEIGHTS, otherwise=PLANNER,
        planned=lambda plan: plan.schedule.lead if plan.schedule.slots else None))
    weight_shares: tuple[float, float] | None = field(default=None, metadata=option(
        SHARES, "Shares of the weights on the device and in host memory; the rest streams from disk", WEIGHTS,
        otherwise=PLANNER, planned=lambda plan: "places of its own"))
    policy: tuple[float, ...] | None = field(default=None, metadata=option(
        POLICY, "FlexGen's policy: two percentages (device, host memory) each for weights, KV cache and hidden "
        "states; the rest is on disk. In place of weight_shares, cache_shares and hidden_shares", WEIGHTS,
        otherwise=PLANNER, planned=lambda plan: "places of its own"))
    expert_slots: int | None = field(default=None, metadata=option(
        COUNT, "Experts of each layer that stay in memory; decode steps read the missing ones (0: tables stream whole)",
        WEIGHTS, otherwise=PLANNER, planned=lambda plan: max(w.pool_slots for w in plan.weights)))
    experts_ahead: int | None = field(default=None, metadata=option(
        COUNT, "Experts of each layer that decode steps read before its router has picked (0: none); not on a GPU",
        WEIGHTS, otherwise=PLANNER, planned=lambda plan: plan.schedule.routed.ahead))
    cpu_experts: int | None = field(default=None, metadata=option(
        COUNT, "Layers whose experts the CPU computes in decode steps, from host memory, instead of the GPU (0: "
        "none)", WEIGHTS, otherwise=PLANNER, planned=lambda plan: sum(w.on_host for w in plan.weights)))
    prefill_chunk: int | None = field(default=None, metadata=option(
        SIZE, "Tokens of a prompt that a step computes", WEIGHTS, otherwise=PLANNER,
        planned=lambda plan: plan.schedule.prefill_chunk,
        as_planned=lambda value, plan: min(value, plan.workload.prompt)))
    activations: Activations = field(default="native", metadata=option(
        one_of("native", "bf16", "int8"), "Activations of packed matmuls: native, or rounded to bf16 or int8. "
        "Rounding is faster on some CPUs and less accurate (`forebay eval` measures it)", WEIGHTS, answers=True,
        planned=lambda plan: activations_of(plan) if plan.gemm else None))

    cache: str = field(default="native", metadata=option(
        CACHE_FORMAT, f"Format of the KV cache: {cache_choices()}", CACHE, answers=True,
        planned=lambda plan: plan.cache_format))
    cache_tier: MemoryTier | None = field(default=None, metadata=option(
        TIER, "Memory that holds the KV cache", CACHE, otherwise=PLANNER,
        planned=lambda plan: plan.schedule.batching.cache.tier))
    cache_shares: tuple[float, float] | None = field(default=None, metadata=option(
        SHARES, "Shares of the KV cache on the device and in host memory; the rest is on the cache tier", CACHE))
    cache_tokens: int | None = field(default=None, metadata=option(
        SIZE, "Tokens of a block in which the KV cache moves between tiers", CACHE, otherwise=PLANNER,
        planned=lambda plan: plan.schedule.batching.cache.block_tokens or None))
    cache_slots: int = field(default=3, metadata=option(
        SIZE, "Staging buffers for caches on slower tiers", CACHE,
        planned=lambda plan: plan.schedule.batching.cache.slots or None))
    cpu_attention: bool | None = field(default=None, metadata=option(
        FLAG, "Decode attention on the CPU, where the KV cache lies in host memory", CACHE, otherwise=PLANNER,
        planned=lambda plan: plan.schedule.batching.cache.cpu_attention))
    checkpoints: tuple[int, int] | None = field(default=None, metadata=option(
        pair("A stretches of tokens of every B"), "Activation checkpoints: A,B recomputes keys "
        "and values in A of every B stretches of tokens (0,1: none)", CACHE,
        planned=lambda plan: (plan.schedule.batching.recomputation.checkpoints,
                              plan.schedule.batching.recomputation.period),
        as_planned=lambda value, plan: value if value[0] else (0, 0)))
    checkpoint_format: str = field(default="native", metadata=option(
        CHECKPOINT_FORMAT, "Format of activation checkpoints: native or act8", CACHE, answers=True))
    kv_blocks: float = field(default=1.0, metadata=option(
        SHARE, "Share of a KV cache's blocks that decode steps read, where it lies on a slower tier (1: all)", CACHE,
        answers=True, planned=lambda plan: plan.schedule.batching.sparsity.blocks))
    expand_latents: bool | None = field(default=None, metadata=option(
        FLAG, "Prompts attend to keys and values made of latents (latent attention)", CACHE, otherwise=PLANNER,
        planned=lambda plan: plan.schedule.batching.latents.expanded))
    prefix_cache: int | str | None = field(default=None, metadata=option(
        NBYTES_OR_NONE, "Memory outside the budget for the KV cache of prompts, which later prompts may share", CACHE,
        otherwise="0; 256MiB for jobs whose prompts begin alike"))
    cache_dir: str | os.PathLike[str] | None = field(default=None, metadata=option(
        FOLDER, "Folder that keeps the KV cache of prompts for later prompts and runs", CACHE, otherwise="none"))
    cache_dir_size: int | str | None = field(default=None, metadata=option(
        NBYTES, "Largest size of the folder of `cache_dir`", CACHE, otherwise="8GiB"))
    calibration: str | os.PathLike[str] | None = field(default=None, metadata=option(
        PATH, "File of `forebay calibrate`: attention scores, for a shared softmax maximum on a GPU, or routing of "
        "experts (`--experts`)", CACHE))

    hidden_tier: MemoryTier | None = field(default=None, metadata=option(
        TIER, "Memory that holds hidden states of a prefill's micro-batches", HIDDEN, otherwise=PLANNER,
        planned=lambda plan: plan.schedule.batching.hidden.tier))
    hidden_shares: tuple[float, float] | None = field(default=None, metadata=option(
        SHARES, "Shares of the hidden states on the device and in host memory; the rest is on the hidden tier", HIDDEN))

    prompt_lookup_num_tokens: int | Literal["auto"] | None = field(default=None, metadata=option(
        SIZE_OR_AUTO, "Most tokens of prompt lookup that a step checks (auto: as many as pay). Answers "
        "stay the same", SPECULATION,
        planned=lambda plan: None if plan.schedule.speculative_steps else "no step that checks drafts",
        as_planned=lambda value, plan: None if value == "auto" else value))
    draft: str | os.PathLike[str] | None = field(default=None, metadata=option(
        MODEL, "Model that drafts within the budget: a smaller one, or a format for a copy in fewer bits (w4; auto: w8 "
        "or w4)", SPECULATION))

    adapter: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None = field(default=None, metadata=option(
        ADAPTERS, "LoRA adapter on top of the model, a folder as PEFT saves it; or several by name, one for each "
        "request", SOURCE, otherwise="none"))
    dequantize: bool = field(default=False, metadata=option(
        FLAG, "Quantized weights of a GGUF file expanded to float32", SOURCE))
    machine: Machine | str | os.PathLike[str] | None = field(default=None, metadata=option(
        MACHINE, "Machine to plan for: a profile, or a preset such as t4", SOURCE, otherwise="this machine"))
    plan: Plan | str | os.PathLike[str] | None = field(default=None, metadata=option(
        PLAN, "Saved plan to replay", SOURCE))
    mesh: MeshShape | None = field(default=None, metadata=option(
        RANKS, "Layout over the processes of torchrun: 4, stages=2, or stages=2,tensor=2. In two dimensions "
        "tensor=2x2,layout=2d; with layout x, xy or xyz prompts gather weights. With attention=batch attention is "
        "divided by sequences. With chunks=4 or gather_chunks=4 exchanges overlap with matmuls in parts (4/1: not for "
        "one token)", SOURCE))

    # What follows from these, a model and its ranks. Users do not name it.
    admitted: int | None = None  # sequences of a prefill step; None: all at once
    rounds: bool = False  # sequences of a job that has more than there is room for begin together all the same
    chunk_of_images: bool = False  # `prefill_chunk` is what images ask for, and not the user
    gather_buffers: int | None = None  # memory for weights that ranks gather ahead, in times of those read at once
    score_ranges: tuple[ScoreRange, ...] = ()  # what `forebay calibrate` measured
    expert_hits: tuple[float, ...] = ()  # the same: of pools (`hits_within`)
    registered: Mapping[str, Any] = field(default_factory=dict)  # values of options from outside the package

    def __post_init__(self) -> None:
        for name, record in OPTIONS.items():
            inside, value = name not in self.registered, getattr(self, name)
            if value is None and record.default is None:
                continue
            taken = record.kind.take(name, value)
            if wrong := record.kind.wrong(taken):
                raise PlanError(name + wrong)
            if taken is not value and inside:
                object.__setattr__(self, name, taken)
        for name, value in placed_by(self.policy).items():
            if getattr(self, name) not in (None, value):
                raise PlanError(f"policy: it says where things lie; leave out {name}")
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """The value of an option from outside the package."""
        if name in OPTIONS and name not in type(self).__dataclass_fields__:
            return self.registered.get(name, OPTIONS[name].default)
        raise AttributeError(f"Options has no {name!r}{nearest(name, OPTIONS)}", name=name, obj=self)

    def forced(self) -> list[str]:
        """Names of the options that ask for something."""
        return [name for name, record in OPTIONS.items() if getattr(self, name) != record.default]

    @property
    def keeps_prompts(self) -> bool:
        """Whether the KV cache of prompts is kept."""
        return bool(self.prefix_cache) or self.cache_dir is not None

    @property
    def of_one_model(self) -> bool:
        """Whether one process runs the model, by itself."""
        return self.mesh is None and self.draft is None

    def as_planned(self, plan: Plan) -> Options:
        """The same with the choices of `plan` that change the values of attention."""
        return replace(self, cache=plan.cache_format, kv_blocks=plan.schedule.batching.sparsity.blocks,
                       checkpoint_format=plan.schedule.batching.recomputation.format, score_ranges=plan.score_ranges,
                       expert_hits=plan.schedule.routed.measured,
                       activations=activations_of(plan) if plan.gemm else self.activations)


OPTIONS: dict[str, OptionRecord] = {
    each.name: replace(each.metadata["option"], default=each.default) for each in fields(Options) if each.metadata}


def register_option(name: str, record: OptionRecord) -> None:
    """Add an option from outside the package: `wrap` and the command line then take it, and who plans reads it as
    `options.name`. ValueError for a name that there is."""
    known = Options.__dataclass_fields__.keys() | OPTIONS.keys()
    if name in known or not name.isidentifier() or iskeyword(name):
        raise ValueError(f"an option cannot be registered as {name!r}")
    OPTIONS[name] = record


def make_options(given: Mapping[str, Any], base: Options | None = None) -> Options:
    """The options of these names and values, all of which are in the table, and otherwise as in `base`."""
    base, own = base or Options(), Options.__dataclass_fields__
    outside = {name: value for name, value in given.items() if name not in own}
    return replace(base, registered={**base.registered, **outside},
                   **{name: value for name, value in given.items() if name in own})


def nearest(name: str, known: Collection[str]) -> str:
    """The known name that was meant, as the end of a message; "" where none is near."""
    meant = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {meant[0]!r}?" if meant else ""


def told_activations(activations: Activations, dtype: torch.dtype) -> Activations:
    """Return the activations for a job's settings: rounding to bf16 changes nothing in a model that computes in
    bf16."""
    return "native" if activations == "bf16" and str(dtype) == "torch.bfloat16" else activations


def check_choices(workload: Workload, options: Options, replayed: Plan | None = None) -> None:
    """PlanError, under the option's name, for options that do not go together, or not with what there is: typical
    lengths beyond the longest, more copies ahead than there are slots, a format of checkpoints that none are to be kept
    in, anything that a plan beside it has otherwise."""
    require_sizes(batch=workload.batch, prompt=workload.prompt, new_tokens=workload.new_tokens)
    for name, longest in (("prompt", workload.prompt), ("new_tokens", workload.new_tokens)):
        if (typical := getattr(workload, f"typical_{name}")) > longest:
            raise PlanError(f"typical: {typical} tokens are more than the longest has ({name}={longest})")
    why = "cache_tier device" if options.cache_tier == "device" else (
        "checkpoints (0, …)" if options.checkpoints is not None and not options.checkpoints[0] else "")
    if why and options.checkpoint_format != "native":
        raise PlanError(f"checkpoint_format {options.checkpoint_format}: with {why} none are kept; leave one out")
    _check_kv_blocks(options)
    if replayed is not None:
        _check_replayed(options, replayed)
    _check_hidden(options)
    if sum(options.weight_shares or ()) > 1:
        raise PlanError(f"weight_shares: {options.weight_shares} must be shares of one whole")
    if options.lead and options.slots and options.lead > options.slots:
        raise PlanError(f"lead {options.lead} needs as many slots; {options.slots} were asked for")


def _check_replayed(options: Options, plan: Plan) -> None:
    """PlanError for an option that the plan does not keep: it runs as it is. A default asks for nothing."""
    if options.score_ranges or options.calibration is not None:
        raise PlanError("the plan says what ranges of scores it takes; leave calibration out, or plan anew with it")
    asked = {name: (getattr(options, name), OPTIONS[name]) for name in options.forced()}
    kept = {name: (record.as_planned(value, plan), record.planned(plan)) for name, (value, record) in asked.items()}
    if options.gather_buffers is not None:
        kept["gather_buffers"] = options.gather_buffers, plan.schedule.batching.gathering.buffers
    for name, (wanted, has) in kept.items():
        if wanted is not None and has is not None and wanted != has:
            raise PlanError(f"{name}: the plan has {has}, {wanted} is asked for; leave it out, or plan anew")


def _check_kv_blocks(options: Options) -> None:
    """PlanError for what does not go with decode steps that read some blocks of the cache."""
    if options.kv_blocks == 1:
        return
    if options.prefill_chunk == 1:
        raise PlanError("kv_blocks: a step over 1 token reads few blocks, a prompt's read all; give a prefill_chunk of "
                        "at least 2, or leave it out")
    for name, why, given in (
            ("cache_tier", "the device's cache is read whole", options.cache_tier == "device"),
            ("cache", "keys of packed rows have no means", options.cache != "native"),
            ("cache_shares", "blocks are chosen of all layers", (options.cache_shares or (0,))[0] > 0),
            ("cpu_attention", "the CPU attends to all of the cache", options.cpu_attention),
            ("checkpoints", "they are read whole", (options.checkpoints or (0,))[0] > 0),
            ("batch_slots", "all sequences begin together", options.admitted),
            ("prefix_cache", "a kept prompt has no means of keys", options.keeps_prompts),
            ("calibration", "it is for a GPU, which reads all blocks", options.score_ranges),
            ("prompt_lookup_num_tokens", "steps that check drafts read all blocks",
             options.prompt_lookup_num_tokens not in (None, "auto")),
            ("draft", "steps that check drafts read all blocks", options.draft is not None),
            ("mesh", "ranks read all blocks", options.mesh is not None)):
        if given:
            raise PlanError(f"kv_blocks: {why}; leave {name} out, or kv_blocks")


def _check_hidden(options: Options) -> None:
    if options.hidden_shares is not None and options.hidden_tier in (None, "device"):
        raise PlanError("hidden_shares: they are of hidden states that leave the device; give a hidden_tier too")
    if sum(options.hidden_shares or ()) > 1:
        raise PlanError(f"hidden_shares: {options.hidden_shares} must be shares of one whole")
    if options.hidden_tier in (None, "device"):
        return
    for name, forced in (("order='row'", options.order == "row"), ("batch_slots", options.admitted)):
        if forced:
            raise PlanError(f"hidden_tier {options.hidden_tier}: with {name} nothing waits between the turns of "
                            "micro-batches in a layer; leave one of both out")


def require_sizes(**sizes: object) -> None:
    """PlanError, naming the first that is neither None nor a whole number of at least 1."""
    for name, value in sizes.items():
        if value is not None and (wrong := SIZE.wrong(value)):
            raise PlanError(name + wrong)
