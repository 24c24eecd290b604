"""Sequences in the rows of a session's cache: begun, continued by any number of tokens, reordered and shortened."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import TensorRef
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.generation import embedded, prefill, refuse_crossing
from forebay.runtime.run.session import Session

SCRATCH_NBYTES = 1 << 20  # at most so much of the cache is copied aside at once where rows change places


class SequenceRows:
    """The cache rows of `session` from the first prompt to the last token of a call.

    `heads` are the KV heads of each layer, `parts` among how many ranks sequences are divided. A session whose steps
    give logits [B, V] can be asked for those of the last token alone, one that gives [B, S, V] for those of every
    token.
    """

    def __init__(self, session: Session, heads: Sequence[int], parts: int = 1) -> None:
        self.session, self.heads, self.parts = session, tuple(heads), parts
        self.lengths = torch.zeros(0, dtype=torch.int64)  # [n] tokens that each row holds
        self._ids: list[torch.Tensor] = []  # and which, for a cache that may have to be computed anew
        self._call = 0  # tokens of the longest row so far, some of which may have been taken back
        self._grown = False

    def begin(
        self, prompts: Sequence[torch.Tensor], new_tokens: int = 1, embeds: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Run prompts (each int64 [P]; for ids of -1 stand `embeds`, each [P, H]) from the start; logits [n, V] after
        each, or [n, longest, V] at every token, zeros past a prompt's end. RuntimeFault where the plan has no room for
        them and `new_tokens` more."""
        plan = self.session.plan
        refuse_crossing(plan, prompts, new_tokens, self.session.renewed_at)
        self.lengths, self._grown = torch.zeros(len(prompts), dtype=torch.int64), False
        lengths = torch.tensor([p.numel() for p in prompts])
        self._ids, self._call = list(prompts), int(lengths.max())
        if not self.session.every_position:
            padded = torch.ones(plan.workload.batch, dtype=torch.int64)
            padded[: len(prompts)] = lengths
            logits = prefill(self.session, prompts, padded, embeds)[: len(prompts)].clone()
        else:
            ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
            for row, prompt in zip(ids, prompts, strict=True):
                row[: prompt.numel()] = prompt
            logits = self._run(ids, ids.shape[1], embeds)
            logits[torch.arange(ids.shape[1]) >= lengths[:, None]] = 0
        self.lengths = lengths
        return logits

    @property
    def room(self) -> int:
        """Tokens that the cache has room for behind the longest row."""
        return self.session.plan.workload.context - int(self.lengths.max())

    def extend(
        self, ids: torch.Tensor, keep: int = 1, embeds: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Append ids [n, S] (for those of -1 stand `embeds`, each [S, H]) to the rows; logits [n, keep, V] of the last
        `keep` tokens. RuntimeFault where the cache has no room for them."""
        if ids.shape[1] > self.room:
            raise RuntimeFault(f"the cache has room for {self.room} more tokens, not for {ids.shape[1]}: plan for more "
                               "(wrap(new_tokens=…))")
        longest = int(self.lengths.max()) + ids.shape[1]
        if self.session.renewed_at:
            held = zip(self._ids, self.lengths.tolist(), ids, strict=True)
            self._ids = [torch.cat((old[:n], new)) for old, n, new in held]
            if self.session.renews(self._call, longest):
                return self._last(self.begin(self._ids), keep)
        self._call = max(self._call, longest)
        if not self._grown:
            self.session.grow()
            self._grown = True
        logits = self._run(ids, keep, embeds)
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
        if not self._grown:
            self.session.grow()
            self._grown = True
        source, plan = index[moved], self.session.plan
        used = int(self.lengths[source].max())
        batch, context = plan.workload.batch, plan.workload.context
        for b in plan.buffers_of("decode"):
            if b.kind != "cache" or not b.nbytes:
                continue
            heads = self.heads[int(b.name.rpartition("_")[2])]
            width = b.nbytes // (batch * heads * context)
            shape = (batch, heads, context, width)
            strides = (heads * context * width, context * width, width, 1)
            cache = self.session.device.tensor(TensorRef(b.arena, b.offset, "uint8", shape, strides, b.name))
            tokens = max(1, SCRATCH_NBYTES // (moved.numel() * heads * width))
            to, found = moved.to(cache.device), source.to(cache.device)
            for first in range(0, used, tokens):
                part = cache[:, :, first : min(first + tokens, used)]
                part[to] = part[found]  # the right side is a copy, so no row is read after it was written
        self.lengths = self.lengths[index]
        self._ids = [self._ids[i] for i in index.tolist()]

    def _run(self, ids: torch.Tensor, keep: int, embeds: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """Steps over ids [n, S] behind what the rows hold; logits [n, keep, V] of the last `keep`."""
        plan, (count, span) = self.session.plan, ids.shape
        batch, context = plan.workload.batch, plan.workload.context
        if keep > 1 and not self.session.every_position:
            raise ValueError("this session's steps give logits of one token only")
        fed = torch.zeros(batch, span, dtype=torch.int64)
        fed[:count] = ids
        call = torch.full((batch,), self._call)
        start = torch.zeros(batch, dtype=torch.int64)
        start[:count] = self.lengths
        chunk = self._chunk(span, context - int(start.max()))
        fed = torch.nn.functional.pad(fed, (0, max(0, chunk - span)))  # overwritten later
        end = fed.shape[1]
        logits: torch.Tensor | None = None
        for at in (*range(0, end - chunk, chunk), end - chunk):
            last = min(max(span - 1 - at, 0), chunk - 1)
            found = self.session.step({"input_ids": fed[:, at : at + chunk], "start": start + at,
                                       "last": torch.full((batch,), last), "length": call,
                                       **embedded(embeds, batch, at, chunk)})
            if found.dim() == 2:
                logits = found[:count, None].clone() if at == end - chunk else None
                continue
            first = max(at, span - keep)
            upper = min(at + chunk, span)
            if logits is None:
                logits = torch.zeros(count, keep, found.shape[-1], dtype=found.dtype)
            if first < upper:
                logits[:, first - span + keep : upper - span + keep] = found[:count, first - at : upper - at].cpu()
        assert logits is not None
        return logits

    def _chunk(self, span: int, room: int) -> int:
        """Tokens of each step over `span` tokens behind which the cache has room for `room` in all: of the sizes that
        are planned the smallest that holds them, or, where that is too long, the largest below."""
        plan = self.session.plan
        if span == 1 or plan.lends:  # grown, the cache lies where a chunk would compute
            return 1
        chunk = plan.schedule.chunk_for(span)
        return chunk if chunk <= max(span, room) else max(c for c in (*plan.schedule.prefill_chunks, 1) if c <= span)


def require_movable_rows(plan: Plan, parts: int) -> None:
    """RuntimeFault where rows of the plan's cache, whose sequences are divided among `parts` ranks, cannot change
    places."""
    if plan.schedule.block.staged:
        raise RuntimeFault("rows of a cache that is staged cannot change places, as beam search asks; keep the cache "
                           "on the device (wrap(cache_tier=\"device\"))")
    if parts > 1:
        raise RuntimeFault("rows of a cache that ranks have for some sequences each cannot change places, as beam "
                           "search asks; take attention=heads in place of attention=batch")
