"""Step graphs of a captured model at fixed sizes, as the pipeline takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from forebay.rewriter.capture.concretise import concretise, inline_blocks, representative_layers
from forebay.rewriter.capture.every_position import every_position, gives_every_position
from forebay.rewriter.capture.save_states import save_states
from forebay.rewriter.garbage import no_collection
from forebay.rewriter.ir.cache_layout import BEGUN, CHECKPOINTED, RESTORED, checkpoint_tokens, staged_tensors
from forebay.rewriter.ir.gathers import gathers_weight
from forebay.rewriter.ir.graph import META, CapturedModel, WeightInput
from forebay.rewriter.ir.indexers import least_chosen
from forebay.rewriter.ir.plan import PlanError, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.ir.schedule.batch_schedule import ALONE, BatchSchedule
from forebay.rewriter.ir.schedule.speculation import REPLAY, Speculation
from forebay.rewriter.ir.state import (
    LatentState,
    LentKVState,
    format_of_rows,
    kv_states,
    require_states,
    state_name,
)

StepGraph = Callable[[int], fx.GraphModule]  # tokens per sequence in one step -> a fresh graph of concrete sizes

_META = torch.device("meta")
ONE_TOKEN = ("plan.schedule.batching.speculation.steps: this model's step gives logits of one token only, so none can "
             "check drafted tokens; leave them out")


@dataclass
class StepGraphs:
    """The step graphs of a model, whatever captured it, and where what they read is kept.

    `step(tokens)` builds a new concrete graph, flat or with block calls, for steps of that many tokens per sequence;
    `sample(tokens)`, if it has block calls, a flat one of a few of its layers, and for each layer the one there that it
    is like. `files` tells where the weights lie on disk; `constants` are small tensors that always stay in memory.
    `prefill(tokens)`, if the cache may grow, is `step(tokens)` with a cache of the workload's prompt alone. All graphs
    are those of one micro-batch of `block`, as a step over so many tokens sees it. Its speculative steps give logits of
    every token, all others of one; `speculate`, if the model's can, gives the step graphs of
    which other steps do. `dtype` is that of hidden states, where weights are packed; `pageable` and `rewindable` tell
    whether all states of layers are; `latents` whether some are latents, over which a host does not attend, and
    `expands` whether steps can make keys and values of them. `words` counts the logits from which a token is drawn.
    """

    fingerprint: str
    step: StepGraph
    files: Mapping[str, FileSlice]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    host_hop: bool = False
    weight_tier: str = "disk"
    sample: Callable[[int], tuple[fx.GraphModule, dict[int, int]]] | None = None
    prefill: StepGraph | None = None
    batching: BatchSchedule = ALONE
    cache_format: str = "native"
    activations: str = "native"
    gathers: bool = False  # steps over several tokens exchange weights, others do not
    # by tokens of a block of K and V, and format, those of a block of checkpoints; 0: there are none
    checkpoint_tokens: Callable[[int, str], int] = lambda cache_tokens, kept: 0
    speculate: Callable[[tuple[int, ...]], StepGraphs] | None = None
    dtype: str = "bfloat16"
    pageable: bool = True
    rewindable: bool = True
    latents: bool = False
    expands: bool = False
    words: int = 0

    def speculating(self, sizes: tuple[int, ...]) -> StepGraphs:
        """The step graphs with steps of these sizes, if any, that give logits of every token. PlanError where the model
        has no such steps."""
        if sizes == self.batching.speculation.steps:
            return self
        if self.speculate is None:
            raise PlanError(ONE_TOKEN)
        return replace(self.speculate(sizes), batching=replace(self.batching, speculation=Speculation(sizes)),
                       fingerprint=self.fingerprint)


@no_collection()
def step_graphs(
    captured: CapturedModel, files: Mapping[str, FileSlice], workload: Workload, fingerprint: str, *,
    host_hop: bool = False, batching: BatchSchedule = ALONE
) -> StepGraphs:
    """The step graphs of `captured` for the batch and context of `workload`, whose batch `block` divides; those over
    its `speculative_steps` give logits of every token. PlanError for such steps, and for checkpoints, of a model that
    cannot have any."""
    captured = plain = _of_context(captured, workload.context)
    _refuse_features(captured, batching)
    if batching.gathering.buffers and not _gathers(captured):
        raise PlanError("plan.schedule.batching.gathering.buffers: no step of this model gathers weights as they are "
                        "kept")
    if batching.recomputation.checkpoints:
        captured = _checkpointed(captured, batching.recomputation.format)
    captured, decoding = _choosing(captured, batching)
    prompts = _prompts(captured, batching)
    weights = _weight_inputs(captured)
    every = _checking(captured) if batching.speculation.steps else None

    def inputs_of(tokens: int, cached: int | None = None) -> dict[str, torch.Tensor]:
        each = replace(workload, batch=batching.sequences(workload.batch, tokens))
        if batching.admitted and batching.is_prefill(tokens) and batching.cache.tier == "device":
            # of the rows that are staged, whose last chunk may end behind its prompt where it cannot be moved back
            cached = workload.prompt if captured.rewindable else None
        of = decoding if tokens == 1 else every if every and tokens in batching.speculation.steps else captured
        return step_inputs(of, each, tokens, cached, weights, batching)

    def graph_of(tokens: int) -> fx.GraphModule:
        if tokens == 1:
            return decoding.step
        return every.step if every is not None and tokens in batching.speculation.steps else prompts.step

    def step(tokens: int, cached: int | None = None) -> fx.GraphModule:
        return concretise(graph_of(tokens), inputs_of(tokens, cached))

    few_of = functools.cache(representative_layers)

    def sample(tokens: int) -> tuple[fx.GraphModule, dict[int, int]]:
        short, representatives = few_of(graph_of(tokens))
        inputs = inputs_of(tokens)
        few = {node.name for node in short.graph.find_nodes(op="placeholder")}
        return inline_blocks(concretise(short, {name: inputs[name] for name in few & inputs.keys()})), representatives

    def speculate(sizes: tuple[int, ...]) -> StepGraphs:
        return step_graphs(plain, files, workload, fingerprint, host_hop=host_hop,
                           batching=replace(batching, speculation=Speculation(sizes)))

    return StepGraphs(fingerprint, step, files, captured.constants, host_hop, sample=sample,
                      prefill=None if batching.cache.staged or batching.admitted or any(
                          spec.sequence_nbytes for states in captured.states for spec in states)
                      else lambda tokens: step(tokens, workload.prompt),
                      cache_format=format_of_rows(captured.states),
                      batching=batching,
                      pageable=all(spec.pageable for states in captured.states for spec in states),
                      rewindable=captured.rewindable, latents=_keeps_latents(captured),
                      expands=_expands(captured), words=0 if captured.gives == "scores" else captured.vocab_size,
                      activations=captured.rounded_to, dtype=str(captured.dtype)[6:],
                      gathers=captured.prefill is not None,
                      speculate=speculate if gives_every_position(captured) else None,
                      checkpoint_tokens=lambda n, kept: checkpoint_tokens(_checkpointed(plain, kept).states, n))


def _checking(captured: CapturedModel) -> CapturedModel:
    """`captured` for steps that check drafts. PlanError where it can have none."""
    every = every_position(captured)
    if every is None:
        raise PlanError(ONE_TOKEN)
    return save_states(every)


def _refuse_features(captured: CapturedModel, batching: BatchSchedule) -> None:
    """PlanError for what the states of a layer cannot do."""
    if batching.cache.staged:
        require_states(captured.states, "pageable", "cache_tier, policy or plan.schedule.batching.cache.tier")
        for name, field, value in (("batch_slots", "admission.sequences", batching.admitted),
                                   ("cpu_attention", "cache.cpu_attention", batching.cache.cpu_attention)):
            if value and not (captured.rewindable and all(
                    spec.in_blocks for states in captured.states for spec in states)):
                raise PlanError(f"{name} or plan.schedule.batching.{field}: the cache lies on the tier "
                                f"{batching.cache.tier}, from where some states move in no blocks; leave {name} out, "
                                "or name no slower tier by cache_tier or policy")
    if batching.cache.cpu_attention and _keeps_latents(captured):
        raise PlanError("cpu_attention or plan.schedule.batching.cache.cpu_attention: a host attends over keys and "
                        "values, and this model keeps latents; leave it out")
    if batching.admitted:
        require_states(captured.states, "reorderable", "batch_slots or plan.schedule.batching.admission.sequences")
        if any(isinstance(spec, LentKVState) for states in captured.states for spec in states):
            raise PlanError("batch_slots or plan.schedule.batching.admission.sequences: several layers read the keys "
                            "and values of one, and copies for sequences that are admitted are made layer by layer; "
                            "leave it out")
    sizes = batching.speculation.steps
    if sizes and REPLAY not in sizes and not captured.rewindable:
        raise PlanError(f"plan.schedule.batching.speculation.steps: states of this model cannot take a token back, and "
                        f"{sizes} have none over {REPLAY} tokens, which replays them at the end of the context; add it")
    if batching.recomputation.checkpoints:
        kv_states(captured.states, "plan.schedule.batching.recomputation.checkpoints")


def _gathers(captured: CapturedModel) -> bool:
    """Return whether a rank gathers weights, as they are kept, for steps over several tokens."""
    blocks = captured.prefill.blocks().values() if captured.prefill is not None else ()
    return any(gathers_weight(node) for block in blocks for node in block.graph.nodes)


def _checkpointed(captured: CapturedModel, kept: str) -> CapturedModel:
    """`captured` with checkpoints in the format `kept` beside its cache."""
    if captured.choices is None:
        raise PlanError("checkpoints: graphs are given them once they are rewritten")
    return captured.choices.checkpointed(kept)


def _choosing(captured: CapturedModel, batching: BatchSchedule) -> tuple[CapturedModel, CapturedModel]:
    """`captured` for steps over prompts, and for those over one token, which may read a share of the cache's blocks."""
    if batching.sparsity.blocks == 1:
        return captured, captured
    if captured.choices is None or captured.prefill is not None:
        raise PlanError("kv_blocks: graphs that are not rewritten, or differ for prompts on several ranks, choose no "
                        "blocks; leave it out")
    tokens = batching.cache.block_tokens
    return captured.choices.choosing(1.0, tokens), captured.choices.choosing(batching.sparsity.blocks, tokens)


def _keeps_latents(captured: CapturedModel) -> bool:
    return any(isinstance(spec, LatentState) for states in captured.states for spec in states)


def _expands(captured: CapturedModel) -> bool:
    """Return whether steps of `captured` can make keys and values of latents."""
    return captured.choices is not None and captured.prefill is None and _keeps_latents(captured) and not (
        least_chosen(captured.step)) and captured.choices.expanded() is not None


def _of_context(captured: CapturedModel, context: int) -> CapturedModel:
    """`captured` for contexts of so many tokens: an indexer goes that would choose all of them."""
    if captured.choices is None or captured.prefill is not None or context > least_chosen(captured.step):
        return captured
    return captured.choices.seeing_all()


def _prompts(captured: CapturedModel, batching: BatchSchedule) -> CapturedModel:
    """`captured` for steps over prompts."""
    if not batching.latents.expanded:
        return captured if captured.prefill is None else captured.prefill
    expanded = captured.choices.expanded() if captured.choices is not None and _expands(captured) else None
    if expanded is None:
        raise PlanError("plan.schedule.batching.latents.expanded: no step of this model can make keys and values of "
                        "latents; leave it out")
    return expanded


def step_inputs(
    captured: CapturedModel, workload: Workload, tokens: int, cached: int | None = None,
    weights: Mapping[str, torch.Tensor] | None = None, batching: BatchSchedule = ALONE
) -> dict[str, torch.Tensor]:
    """Meta tensors for every placeholder of the step graph, by name; the cache holds `cached` tokens per sequence, all
    of the context by default. `weights`, if they were made before, are those of the weights and constants. A cache that
    `block` stages is token-major, K and V beside each other, in whole blocks that are whole pages."""
    batch, context = workload.batch, workload.context if cached is None else cached
    own = own_sequences(captured, batch, batching)
    inputs = {"input_ids": _meta((batch, tokens)), "start": _meta((batch,)), "last": _meta((batch,))}
    named = {node.name for node in captured.step.graph.find_nodes(op="placeholder")}
    inputs |= {name: _meta((batch,)) for name in ("length", "count", "refused") if name in named}
    if "adapters" in named:
        inputs["adapters"] = _meta((batch, max(end for _, end in captured.adapters.values())), captured.dtype)
    if captured.embeds:
        inputs["inputs_embeds"] = _meta((batch, tokens, captured.embeds), captured.dtype)
    if captured.position_rows:
        inputs["positions"] = _meta((batch, tokens, captured.position_rows))
    if captured.image_groups:
        inputs["until"] = _meta((batch, tokens))
    if captured.deepstack:
        inputs["deepstack"] = _meta((batch, tokens, captured.deepstack * captured.embeds), captured.dtype)
    for i, states in enumerate(captured.states):
        kept = staged_tensors(states, batch, context, batching) if batching.cache.staged else {
            tensor.name: _meta(tensor.sized(own, context), tensor.dtype) for spec in states for tensor in spec.tensors}
        inputs |= {state_name(name, i): value for name, value in kept.items()}
    if BEGUN in named:
        inputs[BEGUN] = _meta((batch,))
    if batching.recomputation.checkpoints:
        inputs[RESTORED] = _meta((batch, 1, batching.checkpoint_blocks(context) * batching.recomputation.block_tokens))
        inputs[CHECKPOINTED] = _meta((batch, tokens))
    inputs.update(_weight_inputs(captured) if weights is None else weights)
    return inputs


def own_sequences(captured: CapturedModel, batch: int, batching: BatchSchedule) -> int:
    """Sequences of a step over `batch` of them whose caches this rank has. PlanError where ranks would not have as many
    each, or where a block's caches move or its sequences enter: whose they are changes then."""
    parts = captured.cache_parts
    if parts == 1:
        return batch
    if batching.cache.staged or batching.admitted:
        raise PlanError("mesh: with attention=batch each rank keeps the caches of its own sequences on the device, and "
                        "all begin together; leave cache_tier and batch_slots out, or take attention=heads")
    if batch % parts:
        raise PlanError(f"mesh: {batch} sequences at a time cannot be shared by {parts} ranks with attention=batch; "
                        f"take a multiple of {parts}")
    return batch // parts


def _weight_inputs(captured: CapturedModel) -> dict[str, torch.Tensor]:
    """Meta tensors for the weights and constants of the step graph, by the placeholder's name."""
    inputs = {}
    for node in captured.step.graph.find_nodes(op="placeholder"):
        mark = node.meta.get(META)
        if not isinstance(mark, WeightInput):
            continue
        known, value = captured.weights.get(mark.name), captured.constants.get(mark.name)
        if known is not None and known.stored is not None:
            inputs[str(node.target)] = _meta((known.stored.out_features, known.stored.row_nbytes), torch.uint8)
        elif known is not None:
            inputs[str(node.target)] = _meta(known.shape, known.dtype)
        elif value is not None:
            inputs[str(node.target)] = _meta(value.shape, value.dtype)
    return inputs


def _meta(shape: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)
