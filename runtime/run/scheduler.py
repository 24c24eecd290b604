"""The one loop that generates tokens: requests take slots of a batch, their prompts run chunk by chunk, and they decode
beside each other, by one token a step or by as many as are right of a draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from forebay.rewriter.ir.schedule.speculation import REPLAY
from forebay.rewriter.ir.turns import DEFAULT_TURNS, StepTurns
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.balance import admission_order, balanced_slots
from forebay.runtime.run.decode_ahead import DecodeAhead
from forebay.runtime.run.draft_choice import DraftChoice
from forebay.runtime.run.drafts import Drafted, Drafter, PromptLookup
from forebay.runtime.run.entering_prompts import EnteringPrompts, PromptGroup
from forebay.runtime.run.prefill import prompt_chunks
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.request import OneCall, Request
from forebay.runtime.run.room import require_room
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import StepInputs, counted_positions, joined_features
from forebay.runtime.run.token_sampler import TokenSampler

OnEnd = Callable[[int, list[int]], None]  # number of a request, and its new tokens
OnStep = Callable[[WorkDone], None]
OnNext = Callable[[int, int], bool]  # number of a request, and its next token; whether more are wanted
Arriving = Callable[[int, bool], Mapping[int, Request] | None]


def answer_all(
    session: Session, requests: Sequence[Request], sampling: Sampling, eos: frozenset[int] = frozenset(), *,
    on_end: OnEnd, on_step: OnStep = lambda work: None, drafter: Drafter | None = None,
) -> WorkDone:
    """Continue every request until a token of `eos` or its most tokens; tell `on_end` of each that ends, and `on_step`
    of every step.

    Prompts of like length are admitted together, the longest first; where the session keeps prefixes, with each those
    that begin alike. Steps that check drafts, if the plan has any, check those of `drafter`, whose rows are the slots,
    else what is looked up; they must not be drawn, so that each request's draws are its own. RuntimeFault, before
    anything runs, for a request that no slot has room for. Close the session if `on_end` or `on_step` raises.
    """
    scheduler = Scheduler(session, sampling, eos, on_end, drafter=drafter or PromptLookup())
    known = session.prefixes.expect([(each.ids, each.adapter) for each in requests]) if session.prefixes else []
    scheduler.enqueue(dict(enumerate(requests)), shared=known)
    while scheduler.busy:
        scheduler.step()
        on_step(scheduler.work)
    if session.prefixes is not None:
        session.prefixes.expect(None)
    return scheduler.work


def answer_arriving(
    session: Session, arriving: Arriving, eos: frozenset[int] = frozenset(), *, on_next: OnNext, on_end: OnEnd,
    on_step: OnStep = lambda work: None, turns: StepTurns = DEFAULT_TURNS, drafter: Drafter | None = None,
    make: Callable[..., Scheduler] | None = None,
) -> WorkDone:
    """Answer like `answer_all` requests that arrive while others run, admitted in the order of arrival.

    Before every step `arriving(free, idle)` gives those that came since, by numbers that no other has, at most `free`
    of them. With `idle` nothing runs, and it may wait; None ends the loop, after those that still run. `on_next` is
    told of every token, and ends the request by returning False. `make` makes another scheduler. RuntimeFault for a
    plan of several slots that begin together, and for a request that no slot has room for.
    """
    if not session.plan.schedule.batching.admitted and session.plan.workload.batch > 1:
        raise RuntimeFault("sequences of this plan begin together; plan for continuous batching (wrap(batch_slots=…))")
    scheduler = (make or Scheduler)(session, Sampling(), eos, on_end, on_next, turns, drafter or PromptLookup())
    open_ = True
    while open_ or scheduler.busy:
        came = arriving(max(0, len(scheduler.free) - len(scheduler.waiting)), not scheduler.busy) if open_ else {}
        open_ = came is not None
        scheduler.enqueue(came or {}, as_they_come=True)
        if scheduler.busy:
            scheduler.step()
            on_step(scheduler.work)
    return scheduler.work


class Scheduler:
    """Requests in the batch slots of a session's plan, from their prompts to their last tokens.

    The plan's admission policy says when those that wait begin: as slots fall free, as many as a prefill step computes
    and beside others that decode; or all together, when every slot is free. Of `call` all begin together. Drafts are
    those of `drafter`, as far as the plan has steps that check them; without it none are checked.

    Attributes:
        waiting: Numbers of the requests without a slot, the next one last.
        entering: Those whose prompts are computed.
        running: By slot those that decode.
        requests: All of these by number; `new` has their tokens so far.
        free: The other slots.
        replay: By slot, of states that cannot take a token back, accepted tokens that they lack ahead of the last one.
        refused: The slots whose states go back to those before the last step, as it computed tokens that were refused.
        shifts: By number how far rotary positions after images of a prompt are beyond the count of its tokens.
    """

    def __init__(
        self, session: Session, sampling: Sampling, eos: frozenset[int], on_end: OnEnd,
        on_next: OnNext = lambda number, token: True, turns: StepTurns = DEFAULT_TURNS, drafter: Drafter | None = None,
        call: OneCall | None = None, work: WorkDone | None = None,
    ) -> None:
        self.session, self.sampling, self.eos, self.on_end, self.on_next = session, sampling, eos, on_end, on_next
        self.turns, self.call, self.batch = turns, call, session.plan.workload.batch
        self.admission = session.plan.schedule.batching.admission
        self.waiting: list[int] = []
        self.running: dict[int, int] = {}
        self.requests: dict[int, Request] = {}
        self.new: dict[int, list[int]] = {}
        self.free = list(range(self.batch - 1, -1, -1))
        self.entering = EnteringPrompts(turns, session.plan.schedule.prefill_chunks)
        self.held = 0  # chunks since the last step that decoded
        self.replay: dict[int, int] = {}
        self.refused: set[int] = set()
        self.shifts: dict[int, int] = {}
        self.early: dict[int, torch.Tensor] = {}  # logits [V] by row after prompts that end before the last chunk
        self.first: dict[int, int] = {}  # tokens that such logits gave
        self.sampler = TokenSampler(sampling, self.requests, self.new, call)
        checks = drafter is not None and bool(session.plan.schedule.speculative_steps)
        self.choice = DraftChoice(session.plan, drafter) if checks and drafter is not None else None
        self.ahead = None if checks else DecodeAhead.of(session, self.sampler)
        self.work = work or WorkDone()
        if self.choice is not None:
            self.choice.steps = self.work.steps

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.waiting or self.entering.groups or self.running)

    def enqueue(
        self, requests: Mapping[int, Request], as_they_come: bool = False, shared: Sequence[Sequence[bytes]] = ()
    ) -> None:
        """Let requests wait for slots: the longest first, or after those that wait already. Those that have something
        in `shared` (`PrefixReuse.expect`) come one after the other. RuntimeFault for one that no slot has room for;
        then none of them waits."""
        if names := [each.adapter for each in requests.values() if each.adapter]:
            self.session.adapter_columns(names)  # which refuses unknown ones
        for i, each in requests.items():
            require_room(self.session.plan, i, each.ids.numel(), each.new_tokens, self.session.rope_switch_length)
        self.requests.update(requests)
        self.new |= {number: [] for number in requests}
        self.work.left += sum(each.new_tokens for each in requests.values())
        if as_they_come:
            self.waiting = [*reversed(list(requests)), *self.waiting]
        else:
            self.waiting = admission_order({i: each.ids.numel() for i, each in requests.items()}, shared)

    def step(self) -> None:
        """One step: a chunk of prompts, or the next tokens of those that decode."""
        self._admit()
        if self.entering.groups and self.turns.prefills(self.held, len(self.running), self.batch):
            self._compute_chunk(self.entering.next())
            self.held += 1
        else:
            self._decode()
            self.held = 0

    # -- admission

    def _admit(self) -> None:
        """Give slots to the next requests, if enough of them are free."""
        numbers = self.entering.take(self.waiting, self._length, lambda count: self.admission.begins(
            count, len(self.free), self.batch))
        if not numbers:
            return
        admitted = dict(zip(self._slots_for(numbers), numbers, strict=True))
        self.free = [slot for slot in self.free if slot not in admitted]
        prompts = {slot: self._tokens(number) for slot, number in admitted.items()}
        most = max(self.requests[number].new_tokens for number in numbers)
        if self.call is not None and self.choice is not None and most > 1:
            self.choice.begin(prompts, most)
        length, keeps = None if self.call is None else max(map(self._call_length, numbers)), self.session.rewindable
        given = {number: make() for number in numbers if (make := self.requests[number].features) is not None}
        done = self._enter_known(prompts | {slot: given[n].keyed(prompts[slot]) for slot, n in admitted.items()
                                            if n in given and self.session.prefixes is not None}, numbers)
        self.shifts |= {number: each.position_shift for number, each in given.items()}
        features = joined_features([*map(len, prompts.values())], [*map(given.get, numbers)])
        prompts = {slot: prompts[slot].masked_fill(given[number].placed, -1) if number in given else prompts[slot]
                   for slot, number in admitted.items()}
        chunks = prompt_chunks(self.session.plan, prompts, length, features, keeps, done)
        self.entering.groups.append(PromptGroup(admitted, chunks, max(map(len, prompts.values())), done))

    def _enter_known(self, prompts: Mapping[int, torch.Tensor], numbers: Sequence[int]) -> int:
        """Copy known prefixes of prompts into slots before the rest is computed; the tokens of each."""
        adapters = {slot: self.requests[number].adapter for slot, number in zip(prompts, numbers, strict=True)}
        kept = 0 if self.session.prefixes is None else self.session.prefixes.enter(prompts, adapters)
        for number in numbers:
            self.work.cached += kept
            self.requests[number].on_cached(kept)
        return kept

    def _slots_for(self, numbers: Sequence[int]) -> list[int]:
        """Free slots for requests, such that micro-batches hold about as many tokens; those of a call whose draws go by
        rows have the slots of their numbers."""
        if self.sampler.columns or (self.call is not None and self.choice is not None and self.sampling.do_sample):
            return list(numbers)
        rows = self.session.plan.schedule.batching.sequences(self.batch, 1)
        held = [0] * (self.batch // rows)
        for slot, number in self.running.items():
            held[slot // rows] += self._length(number)
        free = self.free if self.admission.sequences else sorted(self.free)[: len(numbers)]
        return balanced_slots([self._length(number) for number in numbers], free, held, rows)

    def _tokens(self, number: int) -> torch.Tensor:
        """The prompt, and what came after it so far."""
        return torch.cat((self.requests[number].ids, torch.tensor(self.new[number], dtype=torch.int64)))

    def _length(self, number: int) -> int:
        return self.requests[number].ids.numel() + len(self.new[number])

    def _call_length(self, number: int) -> int:
        """Tokens of the call that a request belongs to, which rotary frequencies may follow."""
        return self._length(number) if self.call is None else self.call.prompt + len(self.new[number])

    # -- prefill

    def _compute_chunk(self, group: PromptGroup) -> None:
        """Compute a chunk of prompts that were admitted; after the last one they have their first tokens."""
        chunk, admitted = next(group.chunks), group.slots
        rows = dict(enumerate(admitted.values())) if self.admission.sequences else admitted
        logits = self.session.step(self._with_adapters(chunk.inputs, rows))
        if self.session.prefixes is not None:
            self.session.prefixes.keep(admitted, chunk.at, chunk.inputs.tokens)
        self.work.prefills += 1
        self.entering.computed(group, chunk)
        ends = list(chunk.ends)
        if self.sampler.columns:  # of which all rows are drawn at once
            self.early |= {row: logits[row].clone() for row in ends if not chunk.final}
            ends = list(rows) if chunk.final else []
            for row in self.early if chunk.final else ():
                logits[row] = self.early[row]
        numbers = [rows[row] for row in ends]
        self.first.update(zip(numbers, self.sampler.chosen(numbers, logits, ends), strict=True))
        if not chunk.final:
            return
        self.early.clear()
        self.running |= admitted
        self._append(admitted, {slot: [self.first.pop(number)] for slot, number in admitted.items()})
        if self.running and not self.admission.sequences:
            self.session.grow()

    def _with_adapters(self, inputs: StepInputs, rows: Mapping[int, int]) -> StepInputs:
        """`inputs` with the adapters of the requests in some rows. Rows left over of a step that admits sequences
        repeat the first."""
        names = [self.requests[rows[row]].adapter if row in rows else "" for row in range(len(inputs.start))]
        if not any(names):
            return inputs
        repeated = inputs.batch_slots is not None
        return replace(inputs, adapters=self.session.adapter_columns(
            [names[0] if repeated and row not in rows else name for row, name in enumerate(names)]))

    # -- decode

    def _decode(self) -> None:
        """A step of one token for every request that runs, or of several, all but the first of which were drafted."""
        if self.ahead is not None and (self.ahead.under_way(self.running)
                                       or self.sampler.goes_ahead(list(self.running.values()))):
            left = {number: self.requests[number].new_tokens - len(self.new[number])
                    for number in self.running.values()}
            self.work.decodes += 1
            self._append(*self.ahead.decode(self.running, left, lambda running, ahead: self._with_positions(
                self._decode_inputs(running, ahead))))
            return
        running = dict(sorted(self.running.items()))
        inputs = self._decode_inputs(running)
        size, drafts = self._drafts(inputs.start)
        if size > 1:
            inputs = self._with_drafts(inputs, size, drafts)
        logits = self.session.step(self._with_positions(inputs))
        if size > 1:
            rows = logits.view(self.batch, size, -1)
            tokens = {slot: self._accepted(slot, rows[slot], drafts[slot]) for slot in running}
        else:
            chosen = self.sampler.chosen(list(running.values()), logits, list(running))
            tokens = {slot: [token] for slot, token in zip(running, chosen, strict=True)}
        self.work.decodes += 1
        if self.choice is not None:
            self.work.drafting_s += self.choice.count(size, drafts, {slot: len(new) for slot, new in tokens.items()})
        self._append(running, tokens)

    def _decode_inputs(self, running: Mapping[int, int], ahead: int = 0) -> StepInputs:
        """The inputs of a step of one token, real in slots that are running: what it writes in those that are free, and
        after what chunks have computed of those that were admitted, is written anew before it is seen. The token is the
        last one known, or so many after it, whose ids whoever asks for them fills in."""
        ids, start, real = ([0] * self.batch for _ in range(3))
        for slot, done in self.entering.done().items():
            start[slot] = done
        for slot, number in running.items():
            known = 1 + self.replay.get(slot, 0)
            ids[slot], start[slot], real[slot] = self.new[number][-known], self._length(number) - known + ahead, 1
        starts = torch.tensor(start)
        length = starts + 1
        if self.call is not None:
            length.fill_(self.call.prompt + ahead + max(len(self.new[number]) for number in running.values()))
        return self._with_adapters(StepInputs(torch.tensor(ids)[:, None], starts, starts * 0, length,
                                              count=torch.tensor(real)), running)

    def _with_positions(self, inputs: StepInputs) -> StepInputs:
        """`inputs` with rotary positions that go on after images."""
        shift = torch.zeros_like(inputs.start)
        for slot, number in self.running.items():
            shift[slot] = self.shifts.get(number, 0)
        return replace(inputs, positions=counted_positions(inputs.start + shift, inputs.tokens)) if any(shift) else (
            inputs)

    # -- speculation

    def _drafts(self, start: torch.Tensor) -> tuple[int, dict[int, Drafted]]:
        """Tokens per sequence of the next step, and the draft of each slot, where slots hold as many as `start` [B]."""
        if self.choice is None:
            return 1, {}
        least = REPLAY if any(self.replay.values()) else 1
        return self.choice.choose(
            {slot: self._tokens(number) for slot, number in self.running.items()},
            {slot: self.requests[number].new_tokens - len(self.new[number]) for slot, number in self.running.items()},
            self.session.plan.workload.context - int(start.max()), self.replay, least)

    def _with_drafts(self, inputs: StepInputs, size: int, drafts: Mapping[int, Drafted]) -> StepInputs:
        """The inputs of a step of `size` tokens: those that are replayed, the last one, and what was drafted after it.
        """
        wide, real = torch.nn.functional.pad(inputs.input_ids, (0, size - 1)), torch.zeros_like(inputs.start)
        for slot, draft in drafts.items():
            known = self.new[self.running[slot]][-1 - self.replay.get(slot, 0) :]
            tokens = [*known, *draft.tokens][:size]
            wide[slot, : len(tokens)], real[slot] = torch.tensor(tokens, dtype=torch.int64), len(tokens)
        refused = torch.tensor([slot in self.refused for slot in range(self.batch)], dtype=torch.int64)
        return replace(inputs, input_ids=wide, count=real, refused=refused)

    def _accepted(self, slot: int, logits: torch.Tensor, draft: Drafted) -> list[int]:
        """Return the accepted tokens of a slot's draft, and one more, by logits [size, V]; none where all of the step
        are replayed ones. What is refused is written anew before it is seen, or the state goes back."""
        assert self.choice is not None
        replayed = self.replay.pop(slot, 0)
        self.refused.discard(slot)
        if replayed >= len(logits):
            self.replay[slot] = replayed - len(logits)
            return []
        logits = logits[replayed:]
        number, offered = self.running[slot], min(len(logits) - 1, len(draft.tokens))
        tokens = self.sampler.accepted(number, logits[: offered + 1], draft)
        right = len(tokens) - 1
        if right < offered and not self.session.rewindable:
            self.refused.add(slot)
            self.replay[slot] = replayed + 1 + right
        self.choice.note(slot, draft, offered, right)
        self.work.offered, self.work.accepted = self.work.offered + offered, self.work.accepted + right
        self.work.refused += right < offered
        return tokens

    # -- the end of requests

    def _append(self, slots: Mapping[int, int], tokens: Mapping[int, Sequence[int]]) -> None:
        """Append the next tokens of the requests in `slots`, up to the one that ends each; those that end leave."""
        ended = []
        for slot, number in slots.items():
            for token in tokens[slot]:
                self.work.tokens, self.work.left = self.work.tokens + 1, self.work.left - 1
                self.new[number].append(token)
                left = self.requests[number].new_tokens - len(self.new[number])
                self.sampler.taken(number, token)
                more = self.on_next(number, token)
                if token in self.eos or not left or not more:
                    self.work.left -= left
                    self.work.stopped += left > 0
                    self._leave(slot)
                    ended.append(number)
                    break
        for number in ended:
            self.work.ended += 1
            self.on_end(number, self.forget(number))
        if self.session.rope_switch_length:
            self._readmit()

    def forget(self, number: int) -> list[int]:
        """Drop a request that has no slot any more; the tokens of its answer."""
        self.sampler.forget(number)
        self.shifts.pop(number, None)
        del self.requests[number]
        return self.new.pop(number)

    def _leave(self, slot: int) -> None:
        """A slot is free."""
        del self.running[slot]
        self.free.append(slot)
        self.replay.pop(slot, None)
        self.refused.discard(slot)
        if self.choice is not None:
            self.choice.forget(slot)

    def _readmit(self) -> None:
        """Let requests whose cache is no use to their next token leave their slots, and begin anew with all tokens."""
        for slot, number in list(self.running.items()):
            length = self._call_length(number)
            if self.session.crosses_rope_switch(length - 1, length):
                self._leave(slot)
                self.waiting.append(number)
