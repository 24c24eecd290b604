"""The passes that come before there is a plan: they rewrite captured graphs, once per kind of layer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from forebay.kernels.formats.table import CacheFormat, checkpoint_format
from forebay.kernels.formats.table import cache_format as format_of
from forebay.kernels.operators import EXPANDED_ATTENTION
from forebay.passes.checkpoint.checkpoint_kv import CannotCheckpoint, checkpoint_kv
from forebay.passes.fuse.expand_latents import expand_latents
from forebay.passes.fuse.see_all_tokens import see_all_tokens
from forebay.passes.quantize.choose_cache_blocks import CannotChoose, choose_cache_blocks
from forebay.rewriter.capture.stored_sizes import fill_values
from forebay.rewriter.garbage import no_collection
from forebay.rewriter.ir.graph import META, CapturedModel, RowFormat, WeightInput, block_graphs, copy_node
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.state import (
    CheckpointState,
    IndexState,
    KeyMeansState,
    KVState,
    LatentState,
    StateSpec,
    kv_states,
    unpackable,
)
from forebay.rewriter.pipeline.pass_list import PASSES, passes_in
from forebay.rewriter.pipeline.run_passes import Stage, check_switches
from forebay.rewriter.planning.best_product import rounding_names
from forebay.rewriter.switches import SwitchError, Switches


@no_collection()
def rewrite_captured(
    captured: CapturedModel, switches: Switches, cache_format: str = "native", activations: str = "native"
) -> CapturedModel:
    """`captured` with the block passes run on copies of its graphs; weights that are stored as packed rows are read as
    such, and the KV cache is kept in `cache_format`. Packed weights may meet `activations` rounded
    to bf16 or to 8 bits (int8). Of graphs on which they have run, with a native cache, only the cache is left to do.
    PlanError where a format cannot be had."""
    if captured.prefill is not None:
        decode, prefill = (rewrite_captured(each, switches, cache_format, activations)
                           for each in (replace(captured, prefill=None), captured.prefill))
        return replace(decode, prefill=replace(prefill, choices=None))
    check_switches(PASSES, switches)
    _check_activations(captured, activations)
    captured = replace(captured, activations=activations)
    if captured.rewritten:
        _refuse_switches(switches)
        if cache_format == "native":
            return _with_choices(captured, switches)
        _fill(captured)
    step = with_blocks(captured)
    done = captured.rewritten
    captured = replace(captured, step=step, rewritten=True, choices=None)
    formats = {} if done else {name: spec.stored for name, spec in captured.weights.items() if spec.stored is not None}
    stored = {"": formats}
    if formats:
        captured, of_blocks = _blocks_by_format(captured, formats)
        stored |= of_blocks
    given: dict[str, Callable[[str], tuple]] = {}
    if cache_format != "native":
        kept = _format_of_cache(cache_format)
        if why := unpackable(captured.states):
            raise PlanError(f"cache: {cache_format} {why}; keep it native")
        captured = replace(captured, states=tuple(
            tuple(_packed(spec, kept) for spec in states)
            for states in captured.states))
        given["quantize_cache"] = lambda _: (kept,)
    if formats:
        given["quantize_weights"] = lambda graph: (stored[graph],)
    stage = Stage(step, switches, "captured", formats)
    for each in passes_in("captured"):
        if each.name in given or (not each.asked and not done):
            stage.run(each, given.get(each.name, lambda _: ()))
        else:
            stage.stop(each)
    return _with_choices(captured, switches)


def _check_activations(captured: CapturedModel, activations: str) -> None:
    """PlanError for a format of activations that no product of the model takes here."""
    stored = {spec.stored.name for spec in captured.weights.values() if spec.stored is not None}
    if activations == "native" or any(rounding_names(name, activations) for name in stored):
        return
    if not stored:
        raise PlanError(f"activations {activations}: no weight of the model is packed; quantize it (`forebay "
                        "quantize`), or leave activations out")
    needs = ("AVX-512 with VNNI and bf16 instructions" if activations == "bf16" else
             "AVX2 or ARM (for codes of 8 bits AVX-512 with VNNI) and groups of 32 or more")
    raise PlanError(f"activations {activations}: no matmul of {', '.join(sorted(stored))} takes them here; that needs "
                    f"a C++ compiler, {needs}; leave activations out")


@dataclass(frozen=True)
class _MadeOnce:
    """Rewritten variants of `captured`, each made once, when a block needs it."""

    captured: CapturedModel
    switches: Switches
    made: dict[object, Any] = field(default_factory=dict)

    def checkpointed(self, kept: str) -> CapturedModel:
        """With checkpoints in the format `kept` beside K and V."""
        return self._once(_checkpointed, kept)

    def choosing(self, share: float, block_tokens: int) -> CapturedModel:
        """For steps that read such a share of the cache's blocks, of so many tokens; with 1 for those over prompts."""
        return self._once(_choosing, (share, block_tokens))

    def expanded(self) -> CapturedModel | None:
        """For steps that make keys and values of latents; None where no attention reads latents as it must."""
        return self._once(_expanded, None)

    def seeing_all(self) -> CapturedModel:
        """For contexts with no more tokens than an indexer chooses."""
        return self._once(seeing_all, None)

    def _once(self, make: Callable[..., Any], how: object) -> Any:
        if (make, how) not in self.made:
            self.made[make, how] = make(self.captured, self.switches, how)
        return self.made[make, how]


def _with_choices(captured: CapturedModel, switches: Switches) -> CapturedModel:
    """`captured`, which is rewritten, with what a block may still ask of its graphs."""
    known = captured.choices
    plain = replace(captured, choices=None)
    if isinstance(known, _MadeOnce) and known.switches == switches and all(
            map(operator.is_, vars(known.captured).values(), vars(plain).values())):
        return captured
    return replace(captured, choices=_MadeOnce(plain, switches))


def _choosing(captured: CapturedModel, switches: Switches, how: tuple[float, int]) -> CapturedModel:
    """`captured`, which is rewritten, for steps that read such a share of the cache's blocks, of so many tokens. What
    FOREBAY_BISECT compares is left: the others are not to be read. PlanError where some layer cannot."""
    _fill(captured)
    step = with_blocks(captured)
    stage = Stage(step, replace(switches, bisect=False), "choosing", {})
    try:
        specs = kv_states(captured.states, "kv_blocks")
        stage.run(next(each for each in PASSES if each.run is choose_cache_blocks), lambda _: how)
    except CannotChoose as error:
        raise PlanError(f"kv_blocks: {error}; leave it out") from error
    return replace(captured, step=step, states=tuple(
        (*states, KeyMeansState(kv.kv_heads, kv.head_dim, kv.dtype))
        for states, kv in zip(captured.states, specs, strict=True)))


def _expanded(captured: CapturedModel, switches: Switches, how: None) -> CapturedModel | None:
    """`captured`, which is rewritten, for steps that make keys and values of latents; None where it has none, or its
    attention reads them in another way (Hy 4 has sinks)."""
    _fill(captured)
    step = with_blocks(captured)
    Stage(step, switches, "expanded", {}).run(next(each for each in PASSES if each.run is expand_latents), lambda _: ())
    targets = [node.target for graph in (step, *block_graphs(step).values()) for node in graph.graph.nodes]
    kept = any(isinstance(spec, LatentState) for states in captured.states for spec in states)
    return replace(captured, step=step) if kept and EXPANDED_ATTENTION.overload in targets else None


def seeing_all(captured: CapturedModel, switches: Switches, how: None = None) -> CapturedModel:
    """`captured` without its indexers, for contexts with no more tokens than they choose."""
    _fill(captured)
    step = with_blocks(captured)
    Stage(step, switches, "seeing_all", {}).run(next(each for each in PASSES if each.run is see_all_tokens),
                                                lambda _: ())
    read = {mark.name for node in step.graph.find_nodes(op="placeholder")
            if isinstance(mark := node.meta.get(META), WeightInput)}
    found = replace(
        captured, step=step, weights={name: spec for name, spec in captured.weights.items() if name in read},
        layer_weights=tuple({inner: name for inner, name in weights.items() if name in read}
                            for weights in captured.layer_weights),
        states=tuple(tuple(spec for spec in states if not isinstance(spec, IndexState))
                     for states in captured.states))
    return _with_choices(found, switches) if captured.rewritten else found


def _checkpointed(captured: CapturedModel, switches: Switches, kept: str) -> CapturedModel:
    """`captured`, which is rewritten, with checkpoints in the format `kept` beside K and V. PlanError where it has no
    room for them."""
    try:
        stored = checkpoint_format(kept)
    except ValueError as error:
        raise PlanError(f"checkpoint_format: {error}") from error
    _fill(captured)
    step = with_blocks(captured)
    stage = Stage(step, switches, "checkpointed", {})
    try:
        stage.run(next(each for each in PASSES if each.run is checkpoint_kv), lambda _: (stored,))
    except CannotCheckpoint as error:
        raise PlanError(f"checkpoints: {error}; leave them out") from error
    specs = step.meta[CheckpointState.kind]
    return _with_choices(replace(captured, step=step, states=tuple(
        (*states, specs[i]) for i, states in enumerate(captured.states))), switches)


def _fill(captured: CapturedModel) -> None:
    """Give nodes of graphs that were read from a file their values."""
    if "val" not in captured.step.graph.find_nodes(op="placeholder")[0].meta:
        fill_values(captured)


def with_blocks(captured: CapturedModel) -> fx.GraphModule:
    """A copy of the step graph, and of its blocks."""
    step = _copied(captured.step)
    for name, block in captured.blocks().items():
        step.set_submodule(name, _copied(block))
    return step


def _refuse_switches(switches: Switches) -> None:
    """SwitchError for a switch about passes that ran before the graphs were written."""
    done = {each.name for each in passes_in("captured")}
    named = [name for name in (*switches.skip, switches.stop_after) if name in done]
    if named:
        raise SwitchError(f"{named[0]} ran when these graphs were exported: leave it out of FOREBAY_SKIP and "
                          "FOREBAY_STOP_AFTER, or run the model from its checkpoint")


def _format_of_cache(name: str) -> CacheFormat:
    try:
        kept = format_of(name)
    except ValueError as error:
        raise PlanError(f"cache: {error}") from error
    assert isinstance(kept, CacheFormat)
    return kept


def _packed(spec: StateSpec, kept: CacheFormat) -> StateSpec:
    """A layer's state, whose rows are packed where it is a cache: head_dim or width counts their bytes."""
    if isinstance(spec, LatentState):
        return replace(spec, width=kept.row_nbytes(spec.width, spec.dtype.itemsize), dtype=torch.uint8,
                       format=kept.name)
    if isinstance(spec, KVState):
        return replace(spec, head_dim=kept.row_nbytes(spec.head_dim, spec.dtype.itemsize), dtype=torch.uint8,
                       format=kept.name)
    return spec


def _blocks_by_format(
    captured: CapturedModel, formats: Mapping[str, RowFormat]
) -> tuple[CapturedModel, dict[str, dict[str, RowFormat]]]:
    """`captured`, in which layers of one kind whose weights are stored otherwise have a block graph of their own, and
    for each block the formats of its weights by their names within it."""
    step, layers = captured.step, []
    made: dict[tuple, str] = {}
    found: dict[str, dict[str, RowFormat]] = {}
    for call, weights in zip(step.graph.find_nodes(op="call_module"), captured.layer_weights, strict=True):
        stored = {inner: formats[name] for inner, name in weights.items() if name in formats}
        key = (str(call.target), tuple(sorted(stored.items())))
        if key not in made:
            same = sum(known == key[0] for known, _ in made)
            made[key] = f"{key[0]}_q{same}" if same else key[0]
            if same:
                step.set_submodule(made[key], _copied(step.get_submodule(key[0])))  # type: ignore[arg-type]
            found[made[key]] = stored
        call.target = made[key]
        layers.append(made[key])
    return replace(captured, layers=tuple(layers)), found


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        env[node] = copy_node(graph, node, env)
    return _LazyGraphModule(gm, graph)  # its Python is written only if somebody calls or prints it
