"""The list of passes: their order, phases and scopes, each with the reason for its place."""

from __future__ import annotations

from forebay.passes.checkpoint.checkpoint_kv import checkpoint_kv
from forebay.passes.fuse.expand_latents import expand_latents
from forebay.passes.fuse.fuse_layer_norm import fuse_layer_norm
from forebay.passes.fuse.fuse_residual import fuse_residual
from forebay.passes.fuse.fuse_rms_norm import fuse_rms_norm
from forebay.passes.fuse.fuse_rotary import fuse_rotary
from forebay.passes.fuse.fuse_swiglu import fuse_swiglu
from forebay.passes.fuse.see_all_tokens import see_all_tokens
from forebay.passes.lower.delegate_launches import delegate_launches
from forebay.passes.lower.hoist_gathers import hoist_gathers
from forebay.passes.lower.hoist_prefetch import hoist_prefetch
from forebay.passes.lower.join_launches import join_launches
from forebay.passes.lower.lower import lower
from forebay.passes.lower.offload_hidden import offload_hidden
from forebay.passes.lower.place_copies import place_copies
from forebay.passes.lower.share_maximum import share_maximum
from forebay.passes.place.allocate_buffers import allocate_buffers
from forebay.passes.place.insert_transfers import insert_transfers
from forebay.passes.place.order_gathers import order_gathers
from forebay.passes.place.order_products import order_products
from forebay.passes.place.select_gemm import select_gemm
from forebay.passes.place.shorten_lifetimes import shorten_lifetimes
from forebay.passes.place.specialise_blocks import specialise_blocks
from forebay.passes.quantize.choose_cache_blocks import choose_cache_blocks
from forebay.passes.quantize.quantize_cache import quantize_cache
from forebay.passes.quantize.quantize_weights import fuse_dequantize, quantize_weights
from forebay.passes.shard.shard import shard
from forebay.passes.shard.take_stage import take_stage
from forebay.rewriter.pipeline.run_passes import Pass
from forebay.rewriter.planning.features.table import feature_steps

# Every pass in the order in which they run, with its phase, what it is run on, and the reason why it stands there.
PASSES: list[Pass] = [
    # once per kind of layer, before there is a plan: what these fold, the planner never sees
    Pass(take_stage, "captured", "whole step", "first, where stages share the layers: what others do goes", asked=True),
    Pass(shard, "captured", "whole step", asked=True,
         why="where ranks share a layer, before all else: it knows torch's operators"),
    Pass(fuse_rms_norm, "captured", "each graph", "norms stand between all else: no pattern holds one", optional=True),
    Pass(fuse_layer_norm, "captured", "each graph", "beside the other norm: no pattern contains it", optional=True),
    Pass(fuse_rotary, "captured", "each graph", "queries and keys, before attention reads them", optional=True),
    Pass(fuse_swiglu, "captured", "each graph", optional=True,
         why="before fuse_residual: what it folds comes first in the product that both may end in"),
    Pass(fuse_residual, "captured", "each graph", "it takes the products that the others leave", optional=True),
    Pass(shorten_lifetimes, "captured", "each graph", optional=True,
         why="after fusing: it orders what is left; queries are made after keys and values are stored"),
    Pass(order_products, "captured", "each graph", "it may not undo what lowered the peak", optional=True),
    Pass(quantize_cache, "captured", "each graph", rounds=True, asked=True,
         why="it changes operators and no order, and is fused with nothing: behind all that fuse"),
    Pass(quantize_weights, "captured", "each graph", "the products have what they took over, and keep it", asked=True),
    Pass(fuse_dequantize, "captured", "each graph", "it folds what quantize_weights put there into its readers"),
    Pass(see_all_tokens, "captured", "whole step", asked=True,
         why="where a context has no more tokens than an indexer chooses: attention is as the others left it"),
    Pass(checkpoint_kv, "captured", "whole step", asked=True,
         why="last, where a block keeps checkpoints: what it moves is final"),
    Pass(choose_cache_blocks, "captured", "whole step", asked=True,
         why="where decode steps read some blocks of the cache: attention is as the others left it"),
    Pass(expand_latents, "captured", "each graph", asked=True,
         why="of steps over prompts: what it takes away is as the others left it"),
    # once per step size, on graphs of fixed sizes
    Pass(specialise_blocks, "planned", "whole step",
         "first: the rest see a weight's placement, which layers of one kind need not share"),
    Pass(insert_transfers, "planned", "each graph",
         "it splits matrix products into tiles, and every later pass must see the tiles"),
    Pass(order_gathers, "planned", "each graph", "after insert_transfers: fetches of gathered values go with them"),
    Pass(select_gemm, "planned", "each graph", "after tiling, because the choice depends on the tile's shape"),
    Pass(allocate_buffers, "planned", "whole step",
         "last: addresses depend on the plan's arena alone, lifetimes on the order, which is final"),
    # on the step as a list of launches, where the order of the whole step can be seen
    Pass(lower, "lowered", "whole step", "every value has its address: graphs become launches, layers laid end to end"),
    Pass(share_maximum, "lowered", "draft", "blocks are recorded for many layers: only launches are a layer's own"),
    Pass(join_launches, "lowered", "draft", optional=True,
         why="addresses say what may be one launch, and copies are hoisted for the launches that are left"),
    Pass(delegate_launches, "lowered", "draft",
         "launches stand in the order of turns: those over host memory leave the device's stream"),
    Pass(hoist_gathers, "lowered", "draft", "gathers cross the borders of layers, and what is fetched for them too"),
    Pass(feature_steps, "lowered", "draft", "what features add from outside is hoisted and proved as the rest is"),
    Pass(hoist_prefetch, "lowered", "draft", "copies cross the borders of layers", optional=True),
    Pass(offload_hidden, "lowered", "draft", "the other copies stand where they stay: a turn's items are together"),
    Pass(place_copies, "lowered", "draft", "the order of copies is final: they get their streams and events"),
]


def passes_in(name: str) -> list[Pass]:
    """The passes of a phase, in order."""
    return [each for each in PASSES if each.phase == name]


def register_pass(each: Pass, *, after: str) -> None:
    """Let a pass run behind the one named `after`, checked, dumped, compared and left out as the others are.

    Its function is given a graph and, from the phase "planned" on, the plan; of the phase "lowered" it is given the
    draft and the plan, and edits the draft or returns another.

    Raises:
        ValueError: Its name is taken, or no pass of its phase is named `after`.
    """
    names = [known.name for known in PASSES]
    if each.name in names:
        raise ValueError(f"register_pass: there is a pass {each.name} already")
    if after not in names or PASSES[names.index(after)].phase != each.phase:
        raise ValueError(f"register_pass: no pass {after!r} of phase {each.phase}; they are "
                         f"{', '.join(known.name for known in passes_in(each.phase))}")
    PASSES.insert(names.index(after) + 1, each)
