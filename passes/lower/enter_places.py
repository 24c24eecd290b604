"""A prefill of some sequences alone: a layer's cache of their places is staged, so that the others keep theirs.

A step's input `places` names the places, in the batch that decodes. For a cache on the device their rows are taken into
the buffer `entering` before new tokens are appended, and put back behind attention: [entering, Hkv, prompt, D] of K,
then of V. Rows of equal place must be of equal contents.
"""

from __future__ import annotations

import itertools

import torch
from torch import fx

from forebay.passes.lower.addresses import Address
from forebay.rewriter.ir.alignment import aligned
from forebay.rewriter.ir.cache_layout import ENTERING, PLACES
from forebay.rewriter.ir.draft import Draft
from forebay.rewriter.ir.graph import META
from forebay.rewriter.ir.operator_names import called
from forebay.rewriter.ir.plan import BufferPlacement, Plan
from forebay.rewriter.ir.program import COMPUTE, Launch, Release, Span, TensorRef, dtype_itemsize, span_of
from forebay.rewriter.ir.state import StateInput, state_name


def take(source: TensorRef, index: TensorRef, target: TensorRef, reads: Span, label: str, layer: int) -> Launch:
    """A launch that fills `target` with the named rows of `source`, whose memory is `reads`."""
    return Launch(COMPUTE, str(torch.ops.aten.index_select.out), (), {"self": source, "dim": 0, "index": index},
                  (target,), (reads, span_of(index)), (span_of(target),), label, layer)


def put(source: TensorRef, index: TensorRef, target: TensorRef, writes: Span, label: str, layer: int) -> Launch:
    """A launch that writes `source` over the named rows of `target`, whose memory is `writes`."""
    return Launch(COMPUTE, called(torch.ops.aten.index_copy_.default), (target, 0, index, source), {}, (),
                  (writes, span_of(index), span_of(source)), (writes,), label, layer)


def name_places(draft: Draft, plan: Plan) -> TensorRef:
    """The input that names places, which is declared in `draft`."""
    b = next(b for b in plan.buffers if b.name == PLACES)
    ref = draft.inputs[PLACES] = TensorRef(
        b.arena, b.offset, "int64", (plan.schedule.batching.admitted,), (1,), PLACES)
    draft.resident[PLACES] = span_of(ref)
    return ref


class PlaceStaging:
    """Puts the launches that take rows of a cache on the device, and put them back, into the draft of a prefill."""

    def __init__(self, draft: Draft, plan: Plan, step: fx.GraphModule) -> None:
        self.draft, self.batch = draft, plan.workload.batch
        self.buffers: dict[str, BufferPlacement] = {b.name: b for b in plan.buffers}
        self.places = name_places(draft, plan)
        self.staged: dict[int, dict[str, torch.Tensor]] = {}  # by layer and tensor
        for node in step.graph.find_nodes(op="placeholder"):
            mark = node.meta.get(META)
            if isinstance(mark, StateInput):
                self.staged.setdefault(mark.layer, {})[mark.tensor] = node.meta["val"]

    def offset(self, mark: StateInput) -> int:
        """Where a tensor of a layer's states begins in what is staged."""
        values = self.staged[mark.layer]
        before = itertools.takewhile(lambda name: name != mark.tensor, values)
        return sum(aligned(values[name].numel() * values[name].element_size()) for name in before)

    def bring(self, layer: int, micro_batch: int) -> Address:
        """Take the rows of the places; where they lie then."""
        for name in self.staged[layer]:
            cache, memory, staged = self._refs(layer, name)
            self.draft.items.append(take(cache, self.places, staged, memory, f"layer{layer}_take_{name}", layer))
        b = self.buffers[ENTERING]
        return b.arena, b.offset, self._contents(layer)

    def keep(self, layer: int, micro_batch: int, place: Address) -> None:
        """Put the rows back to their places."""
        for name in self.staged[layer]:
            cache, memory, staged = self._refs(layer, name)
            self.draft.items += [put(staged, self.places, cache, memory, f"layer{layer}_put_{name}", layer),
                                 Release(COMPUTE, span_of(staged))]

    @staticmethod
    def _contents(layer: int) -> str:
        return f"{ENTERING}:{layer}"

    def _refs(self, layer: int, name: str) -> tuple[TensorRef, Span, TensorRef]:
        """The prompts' part of the whole cache, the memory of all of it, and what is staged."""
        value = self.staged[layer][name]
        dtype, (rows, heads, tokens, width) = str(value.dtype)[6:], value.shape
        whole, b = self.buffers[state_name(name, layer)], self.buffers[ENTERING]
        length = whole.nbytes // (self.batch * heads * width * dtype_itemsize(dtype))
        strides = heads * length * width, length * width, width, 1
        cache = TensorRef(whole.arena, whole.offset, dtype, (self.batch, heads, tokens, width), strides, whole.name)
        at = b.offset + self.offset(StateInput(layer, name))
        staged = TensorRef(b.arena, at, dtype, (rows, heads, tokens, width),
                           (heads * tokens * width, tokens * width, width, 1), self._contents(layer))
        return cache, Span(whole.arena, whole.offset, whole.nbytes, whole.name), staged
