"""Sequences in the rows of a session's cache: begun, continued by any number of tokens, reordered and shortened."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import TensorRef
from forebay.rewriter.ir.state import LayerStates, require_states, state_name
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.prefill import chunk_spans, chunks, image_groups, prefill
from forebay.runtime.run.room import refuse_crossing
from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import Features, counted_positions, shift_after

SCRATCH_NBYTES = 1 << 20  # at most so much of the cache is copied aside at once where rows change places


class SequenceRows:
    """The cache rows of `session` from the first prompt to the last token of a call.

    `states` are those of each layer, `parts` among how many ranks sequences are divided. A session whose steps
    give logits [B, V] can be asked for those of the last token alone, one that gives [B, S, V] for those of every
    token.
    """

    def __init__(self, session: Session, states: LayerStates, parts: int = 1) -> None:
        self.session, self.states, self.parts = session, states, parts
        self.lengths = torch.zeros(0, dtype=torch.int64)  # [n] tokens that each row holds
        self._ids: list[torch.Tensor] = []  # and which, for a cache that may have to be computed anew
        self._call = 0  # tokens of the longest row so far, some of which may have been taken back
        self._shift: torch.Tensor | None = None  # [n] from the count of tokens to rotary positions after images
        self._grown = False

    def begin(
        self, prompts: Sequence[torch.Tensor], new_tokens: int = 1, features: Features | None = None
    ) -> torch.Tensor:
        """Run prompts (each int64 [P]; for ids of -1 stand `features`) from the start; logits [n, V] after each, or
        [n, longest, V] at every token, zeros past a prompt's end. RuntimeFault where the plan has no room for them and
        `new_tokens` more."""
        refuse_crossing(self.session.plan, prompts, new_tokens, self.session.rope_switch_length)
        self.lengths, self._grown = torch.zeros(len(prompts), dtype=torch.int64), False
        lengths = torch.tensor([p.numel() for p in prompts])
        self._ids, self._call = list(prompts), int(lengths.max())
        if not self.session.every_position:
            logits = prefill(self.session, dict(enumerate(prompts)), features)
        else:
            ids = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True)
            logits = self._run(ids, ids.shape[1], features, lengths)
            logits[torch.arange(ids.shape[1]) >= lengths[:, None]] = 0
        self.lengths, self._shift = lengths, position_shift(features)
        return logits

    @property
    def room(self) -> int:
        """Tokens that the cache has room for behind the longest row."""
        return self.session.plan.workload.context - int(self.lengths.max())

    def extend(
        self, ids: torch.Tensor, keep: int = 1, features: Features | None = None
    ) -> torch.Tensor:
        """Append ids [n, S] (for those of -1 stand `features`) to the rows; logits [n, keep, V] of the last `keep`
        tokens. RuntimeFault where the cache has no room for them."""
        if ids.shape[1] > self.room:
            raise RuntimeFault(f"the cache has room for {self.room} more tokens, not for {ids.shape[1]}: plan for more "
                               "(wrap(new_tokens=…))")
        longest = int(self.lengths.max()) + ids.shape[1]
        if self.session.rope_switch_length:
            held = zip(self._ids, self.lengths.tolist(), ids, strict=True)
            self._ids = [torch.cat((old[:n], new)) for old, n, new in held]
            if self.session.crosses_rope_switch(self._call, longest):
                return self._last(self.begin(self._ids), keep)
        self._call = max(self._call, longest)
        if not self._grown:
            self.session.grow()
            self._grown = True
        if self._shift is not None:
            features = {**(features or {}), "positions": list(
                counted_positions(self.lengths + self._shift, ids.shape[1]))}
        logits = self._run(ids, keep, features)
        self.lengths = self.lengths + ids.shape[1]
        return logits

    def _last(self, logits: torch.Tensor, keep: int) -> torch.Tensor:
        """[n, keep, V] of the last tokens that the rows hold, of what `begin` returned."""
        if logits.dim() == 2:
            if keep > 1:
                raise ValueError("this session's steps give logits of one token only")
            return logits[:, None]
        return torch.stack([row[n - keep : n] for row, n in zip(logits, self.lengths.tolist(), strict=True)])

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens of every row."""
        if not 0 <= tokens <= int(self.lengths.min()):
            raise ValueError(f"crop: {tokens} is not between 0 and the {int(self.lengths.min())} tokens of a row")
        if tokens:
            require_states(self.states, "rewindable", "drafts and crop")
        self.lengths = self.lengths - tokens

    def reorder(self, index: torch.Tensor) -> None:
        """Row i takes the contents that row index[i] had."""
        index, count = index.cpu().to(torch.int64), self.lengths.numel()
        if index.shape != (count,) or int(index.min()) < 0 or int(index.max()) >= count:
            raise ValueError(f"reorder: {index.tolist()} does not name one of {count} rows for each")
        moved = (index != torch.arange(count)).nonzero()[:, 0]
        if moved.numel() == 0:
            return
        require_movable_rows(self.session.plan, self.parts)
        require_states(self.states, "reorderable", "beam search")
        if not self._grown:
            self.session.grow()
            self._grown = True
        if self.session.prefixes is not None:
            self.session.prefixes.forget(moved.tolist())
        source, plan = index[moved], self.session.plan
        used = int(self.lengths[source].max())
        batch, context = plan.workload.batch, plan.workload.context
        tensors = {state_name(tensor.name, i): tensor for i, states in enumerate(self.states) for spec in states
                   for tensor in spec.tensors}
        for b in plan.buffers_of("decode"):
            if b.kind != "cache" or not b.nbytes:
                continue
            # [B, rows, L, bytes]; what has no row for each token is one row
            grows = tensors[b.name].grows
            heads, length = (int(tensors[b.name].shape[1]), context) if grows else (1, 1)
            width = b.nbytes // (batch * heads * length)
            shape = (batch, heads, length, width)
            strides = (heads * length * width, length * width, width, 1)
            cache = self.session.device.tensor(TensorRef(b.arena, b.offset, "uint8", shape, strides, b.name))
            tokens = max(1, SCRATCH_NBYTES // (moved.numel() * heads * width))
            to, found = moved.to(cache.device), source.to(cache.device)
            for first in range(0, used if grows else 1, tokens):
                part = cache[:, :, first : min(first + tokens, used)]
                part[to] = part[found]  # the right side is a copy, so no row is read after it was written
        self.lengths = self.lengths[index]
        self._shift = None if self._shift is None else self._shift[index]
        self._ids = [self._ids[i] for i in index.tolist()]

    def _run(
        self, ids: torch.Tensor, keep: int, features: Features | None = None,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Steps over ids [n, S], of which rows have `lengths` [n] (None: S), after what the rows hold; logits
        [n, keep, V] of the last `keep`."""
        plan, (count, span) = self.session.plan, ids.shape
        batch, every = plan.workload.batch, self.session.every_position
        if keep > 1 and not every:
            raise ValueError("this session's steps give logits of one token only")
        fed, start = torch.zeros(batch, span, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
        fed[:count], start[:count] = ids, self.lengths
        # once grown, a cache that a prefill overlays lies where a chunk would compute
        sizes = (1,) if span == 1 or plan.prefill_overlays_kv_cache else plan.schedule.prefill_chunks
        spans = chunk_spans(sizes, span, plan.workload.context - int(start.max()), self.session.rewindable,
                            image_groups(features))
        real = torch.full((batch,), span)
        real[:count] = span if lengths is None else lengths
        logits = torch.empty(0)
        for chunk in chunks(spans, fed, start, real, torch.full((batch,), self._call), features=features):
            step = self.session.step(chunk.inputs)[:count]
            if not every:
                logits = step[:, None]
                continue
            logits = logits if logits.numel() else torch.zeros(count, keep, step.shape[-1], dtype=step.dtype)
            at, left = chunk.at, span - keep
            first, upper = max(at, left), min(at + chunk.inputs.tokens, span)
            if first < upper:
                logits[:, first - left : upper - left] = step[:, first - at : upper - at].cpu()
        return logits if every else logits.clone()


def position_shift(features: Features | None) -> torch.Tensor | None:
    """[n] how far rotary positions after prompts of these features are beyond the count of their tokens; None where
    they are the count."""
    if features is None or "positions" not in features:
        return None
    return torch.tensor([shift_after(row) for row in features["positions"]])


def require_movable_rows(plan: Plan, parts: int) -> None:
    """RuntimeFault where rows of the plan's cache, whose sequences are divided among `parts` ranks, cannot change
    places."""
    if plan.schedule.batching.cache.staged:
        raise RuntimeFault("rows of a cache that is staged cannot change places, as beam search asks; keep the cache "
                           "on the device (wrap(cache_tier=\"device\"))")
    if parts > 1:
        raise RuntimeFault("rows of a cache that ranks have for some sequences each cannot change places, as beam "
                           "search asks; take attention=heads in place of attention=batch")
