"""Sequences enter and leave the places of a plan between steps: none waits for the slowest of its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.turns import USUAL_TURNS, StepTurns
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.acceptance import accepted
from forebay.runtime.run.balance import balanced_places
from forebay.runtime.run.draft_choice import DraftChoice
from forebay.runtime.run.drafts import Drafted, Drafter, PromptLookup
from forebay.runtime.run.generation import with_renewal
from forebay.runtime.run.prefill import PrefillChunk, prompt_chunks
from forebay.runtime.run.sampling import Sampling, choose, most_likely
from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import StepInputs


@dataclass(frozen=True)
class Request:
    """A prompt int64 [P], P >= 1, to be continued by at most `new_tokens`; its draws, if any are made, are those of its
    own generator, which `generator` makes when it enters, so that they depend on nothing beside it. A `sampling` is its
    own in place of that of all."""

    ids: torch.Tensor
    new_tokens: int
    generator: Callable[[], torch.Generator] | None = None  # made then: one is 5 KB, and a job has thousands
    sampling: Sampling | None = None


@dataclass
class WorkDone:
    """What was done so far: steps that computed prompts, steps that decoded, tokens chosen, sequences that ended, and
    those of them that stopped before they had their most tokens; how many tokens the others may still take; how many
    drafted tokens were checked, and of them stood, and of the others were refused where all before them stood; and
    steps that checked drafts, or might have, by their tokens per sequence. `drafting_s` is that of a `Tally`."""

    prefills: int = 0
    decodes: int = 0
    tokens: int = 0
    ended: int = 0
    stopped: int = 0
    left: int = 0
    offered: int = 0
    accepted: int = 0
    refused: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    drafting_s: float = 0.0


OnEnd = Callable[[int, list[int]], None]  # number of a sequence, and its new tokens
OnStep = Callable[[WorkDone], None]
OnNext = Callable[[int, int], bool]  # number of a sequence, and its next token; whether more are wanted
Arriving = Callable[[int, bool], Mapping[int, Request] | None]


def fits(plan: Plan, prompt: int, new_tokens: int, renewed_at: int = 0) -> bool:
    """Whether a place of `plan` has room for a prompt of so many tokens and an answer."""
    w = plan.workload  # the last token is never appended
    prompt, new_tokens = with_renewal(prompt, new_tokens, renewed_at)
    return prompt + new_tokens - 1 <= w.context and (prompt <= w.prompt or not (plan.lends or entering(plan)))


def entering(plan: Plan) -> int:
    """Sequences that enter places of `plan` while others decode; 0 where they all begin together."""
    return plan.schedule.batching.admitted


def answer_all(
    session: Session, asked: Sequence[Request], sampling: Sampling, eos: frozenset[int] = frozenset(), *,
    on_end: OnEnd, on_step: OnStep = lambda work: None, drafter: Drafter | None = None,
) -> WorkDone:
    """Continue every sequence until a token of `eos` or its most tokens; `on_end` is told of each when it ends,
    `on_step` of every step.

    Prompts of like length enter together, the longest first. Their prefill takes `StepTurns` with the decoding of the
    others. Where the plan computes all sequences of a
    prefill at once, they begin together, as many as there are places, when the last ones have ended. Steps that check
    drafts, if the plan has any, check those of `drafter`, whose rows are the places, else what is looked up; they must
    not be drawn, so that each sequence's draws are its own.
    RuntimeFault, before anything runs, for a sequence that no place has room for. If `on_end` or `on_step` raises, the
    session is to be closed.
    """
    loop = _Loop(session, sampling, eos, on_end, drafter=drafter)
    loop.line_up(dict(enumerate(asked)))
    while loop.busy:
        loop.turn()
        on_step(loop.work)
    return loop.work


def answer_arriving(
    session: Session, arriving: Arriving, eos: frozenset[int] = frozenset(), *, on_next: OnNext, on_end: OnEnd,
    on_step: OnStep = lambda work: None, turns: StepTurns = USUAL_TURNS, drafter: Drafter | None = None,
) -> WorkDone:
    """As `answer_all`, for sequences that arrive while others run; they enter in the order in which they come.

    Before every step `arriving(free, idle)` gives those that came since, by numbers that no other has, at most `free`
    of them. With `idle` nothing runs, and it may wait; None ends the loop, behind those that still run. `on_next` is
    told of every token as it is chosen and ends the sequence, whose place is free then, by returning False.
    RuntimeFault for a plan of several places whose sequences begin together, and for a sequence that no place has room
    for.
    """
    if not entering(session.plan) and session.plan.workload.batch > 1:
        raise RuntimeFault("sequences of this plan begin together; plan for places that they enter (wrap(places=…))")
    loop = _Loop(session, Sampling(), eos, on_end, on_next, turns, drafter)
    open_ = True
    while open_ or loop.busy:
        came = arriving(max(0, len(loop.free) - len(loop.waiting)), not loop.busy) if open_ else {}
        open_ = came is not None
        loop.line_up(came or {}, behind=True)
        if loop.busy:
            loop.turn()
            on_step(loop.work)
    return loop.work


class _Loop:
    """Who stands in which place: `waiting` sequences by number, the next last; `entered` the places and numbers of
    those whose `prefill` is under way; `running` the number by place; `asked` all of these by number."""

    def __init__(
        self, session: Session, sampling: Sampling, eos: frozenset[int], on_end: OnEnd,
        on_next: OnNext = lambda number, token: True, turns: StepTurns = USUAL_TURNS, drafter: Drafter | None = None,
    ) -> None:
        self.turns = turns
        self.session, self.sampling, self.eos, self.on_end, self.on_next = session, sampling, eos, on_end, on_next
        self.asked: dict[int, Request] = {}
        self.batch, self.entering = session.plan.workload.batch, entering(session.plan)
        self.waiting: list[int] = []
        self.held = 0  # chunks since the last step that decoded
        self.free = list(range(self.batch - 1, -1, -1))
        self.running: dict[int, int] = {}
        self.entered: list[tuple[int, int]] = []
        self.prefill: Iterator[PrefillChunk] | None = None
        self.done = 0  # tokens that it has computed of each row
        self.new: dict[int, list[int]] = {}
        self.generators: dict[int, torch.Generator] = {}
        self.first: dict[int, int] = {}  # tokens of those whose prompts ended before those that they entered with
        self.last = torch.zeros(self.batch, dtype=torch.int64)
        self.choice = DraftChoice(session.plan, drafter or PromptLookup())
        self.work = WorkDone(sizes=self.choice.steps)

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.waiting or self.prefill is not None or self.running)

    def line_up(self, asked: Mapping[int, Request], behind: bool = False) -> None:
        """Let sequences wait for places: the longest first, or `behind` those that wait already, as they came.
        RuntimeFault for one that no place has room for; then none of them waits."""
        for i, each in asked.items():
            if not fits(self.session.plan, each.ids.numel(), each.new_tokens, self.session.renewed_at):
                w = self.session.plan.workload
                raise RuntimeFault(f"sequence {i} of {each.ids.numel()} tokens with {each.new_tokens} new ones does "
                                   f"not fit the plan's places, which are of {w.prompt} with {w.new_tokens}; plan for "
                                   "more (LanguageModel.reserve)")
        self.asked.update(asked)
        self.work.left += sum(each.new_tokens for each in asked.values())
        if behind:
            self.waiting = [*reversed(list(asked)), *self.waiting]
            return
        self.waiting = sorted(asked, key=lambda i: (asked[i].ids.numel(), -i))

    def turn(self) -> None:
        """One step: of those that enter, or of those that decode."""
        self.begin()
        if self.prefill is not None and self.turns.prefills(self.held, len(self.running), self.batch):
            self.advance()
            self.held += 1
        else:
            self.decode()
            self.held = 0

    def begin(self) -> None:
        """Let the next sequences enter, if there are places for as many as a prefill step computes."""
        most = min(self.entering or self.batch, len(self.waiting))
        if self.prefill is not None or not most or len(self.free) < (most if self.entering else self.batch):
            return
        numbers = [self.waiting.pop() for _ in range(most)]
        self.entered = list(zip(self._places_for(numbers), numbers, strict=True))
        taken = {place for place, _ in self.entered}
        self.free = [place for place in self.free if place not in taken]
        self.done = 0
        self.prefill = prompt_chunks(self.session.plan, {place: self._tokens(number) for place, number in self.entered})

    def _places_for(self, numbers: Sequence[int]) -> list[int]:
        """Free places for sequences, such that micro-batches hold about as many tokens."""
        rows = self.session.plan.schedule.batching.sequences(self.batch, 1)
        held = [0] * (self.batch // rows)
        for place, number in self.running.items():
            held[place // rows] += self._length(number)
        free = self.free if self.entering else sorted(self.free)[: len(numbers)]
        return balanced_places([self._length(number) for number in numbers], free, held, rows)

    def _tokens(self, number: int) -> torch.Tensor:
        """The prompt, and what came behind it so far."""
        return torch.cat((self.asked[number].ids, torch.tensor(self.new.get(number, []), dtype=torch.int64)))

    def _length(self, number: int) -> int:
        return self.asked[number].ids.numel() + len(self.new.get(number, []))

    def advance(self) -> None:
        """Compute a chunk of those that enter; behind the last chunk they have their first tokens."""
        assert self.prefill is not None
        chunk = next(self.prefill)
        self._begun(chunk.ends, self.session.step(chunk.inputs))
        self.done = chunk.at + chunk.inputs.tokens
        self.work.prefills += 1
        if not chunk.final:
            return
        entered, self.entered, self.prefill = self.entered, [], None
        for place, number in entered:
            self.running[place] = number
            self.new.setdefault(number, [])
        self._take(entered, [[self.first.pop(number)] for _, number in entered])
        if self.running and not self.entering:
            self.session.grow()

    def decode(self) -> None:
        """A step of one token for every sequence that runs, or of several, all but the first of which were drafted."""
        inputs = self._next_inputs()
        size, drafts = self._drafts(inputs.start) if self.session.plan.schedule.speculative_steps else (1, {})
        if size > 1:
            self._check(inputs, size, drafts)
            return
        logits = self.session.step(inputs)
        if drafts:
            self.choice.count(1, drafts, dict.fromkeys(self.running, 1))
        self._decoded(sorted(self.running.items()), logits)

    def _drafts(self, start: torch.Tensor) -> tuple[int, dict[int, Drafted]]:
        """Tokens per sequence of the next step, and the draft of each place, where places hold as many as `start` [B].
        """
        return self.choice.choose(
            {place: self._tokens(number) for place, number in self.running.items()},
            {place: self.asked[number].new_tokens - len(self.new[number]) for place, number in self.running.items()},
            self.session.plan.workload.context - int(start.max()))

    def _next_inputs(self) -> StepInputs:
        """The inputs of a step of one token: what it writes in places that are free, and behind what chunks have
        computed of those that enter, is written anew before it is seen."""
        ids, start = [0] * self.batch, [0] * self.batch
        for place, _ in self.entered:
            start[place] = self.done
        for place, number in self.running.items():
            new = self.new[number]
            ids[place], start[place] = new[-1], self.asked[number].ids.numel() + len(new) - 1
        starts = torch.tensor(start)
        return StepInputs(torch.tensor(ids)[:, None], starts, self.last, starts + 1)

    def _decoded(self, rows: Sequence[tuple[int, int]], logits: torch.Tensor) -> None:
        """Give the sequences in `rows` (place, number), which a step of one token computed, their next tokens."""
        self.work.decodes += 1
        tokens = self._chosen([number for _, number in rows], logits, [place for place, _ in rows])
        self._take(rows, [[token] for token in tokens])

    def _check(self, inputs: StepInputs, size: int, drafts: Mapping[int, Drafted]) -> None:
        """A step over `size` tokens of each sequence that runs; they get as many as are right of their drafts, and one
        more. What is refused, and what free places write, is written anew before it is seen."""
        rows, ids = sorted(self.running.items()), torch.zeros(self.batch, size, dtype=torch.int64)
        ids[:, 0] = inputs.input_ids[:, 0]
        for place, _ in rows:
            drafted = drafts[place].tokens[: size - 1]
            ids[place, 1 : 1 + len(drafted)] = torch.tensor(drafted, dtype=torch.int64)
        logits = self.session.step(replace(inputs, input_ids=ids, length=inputs.start + size)).view(
            self.batch, size, -1)
        given: dict[int, list[int]] = {}
        for place, number in rows:
            draft, sampling = drafts[place], self.asked[number].sampling or self.sampling
            offered = min(size - 1, len(draft.tokens))
            draws = [self._generator(number)] if sampling.do_sample else None
            given[place] = accepted(logits[place, : offered + 1], draft, sampling, draws)
            right = len(given[place]) - 1
            self.choice.note(place, draft, offered, right)
            self.work.offered, self.work.accepted = self.work.offered + offered, self.work.accepted + right
            self.work.refused += right < offered
        self.work.decodes += 1
        self.work.drafting_s += self.choice.count(
            size, drafts, {place: len(found) for place, found in given.items()})
        self._take(rows, [*given.values()])

    def _begun(self, ends: Sequence[int], logits: torch.Tensor) -> None:
        """Choose the first tokens of those that entered and whose prompts have ended, by rows of the step."""
        at = dict(enumerate(number for _, number in self.entered)) if self.entering else dict(self.entered)
        numbers = [at[row] for row in ends]
        self.first.update(zip(numbers, self._chosen(numbers, logits, ends), strict=True))

    def _chosen(self, numbers: Sequence[int], logits: torch.Tensor, at: Sequence[int]) -> list[int]:
        """The next tokens of sequences, whose logits are those rows of [B, V]."""
        wanted = [self.asked[number].sampling or self.sampling for number in numbers]
        found = [0] * len(wanted)
        for sampling in dict.fromkeys(wanted):
            mine = [i for i, each in enumerate(wanted) if each == sampling]
            tokens = self._drawn(sampling, [numbers[i] for i in mine], logits, [at[i] for i in mine])
            for i, token in zip(mine, tokens, strict=True):
                found[i] = token
        return found

    def _drawn(
        self, sampling: Sampling, numbers: Sequence[int], logits: torch.Tensor, at: Sequence[int]
    ) -> list[int]:
        """The next tokens of sequences that share a `sampling`."""
        if not sampling.do_sample:
            tokens = most_likely(logits).tolist()
            return [tokens[row] for row in at]
        drawn = [self._generator(number) for number in numbers]
        if logits.is_cpu:  # without a copy of their rows, which no plan counts
            return [int(choose(logits[row : row + 1], sampling, [g])) for row, g in zip(at, drawn, strict=True)]
        return choose(logits[torch.tensor(at).to(logits.device)], sampling, drawn).tolist()

    def _generator(self, number: int) -> torch.Generator:
        """What draws a sequence's tokens, from when it is first asked for."""
        if number not in self.generators:
            make = self.asked[number].generator
            self.generators[number] = torch.default_generator if make is None else make()
        return self.generators[number]

    def _take(self, rows: Sequence[tuple[int, int]], tokens: Sequence[Sequence[int]]) -> None:
        """Append the next tokens of the sequences in `rows` (place, number), up to the one that ends each; those that
        end leave their places."""
        ended = []
        for (place, number), found in zip(rows, tokens, strict=True):
            for token in found:
                self.work.tokens += 1
                self.new[number].append(token)
                left = self.asked[number].new_tokens - len(self.new[number])
                self.work.left -= 1
                more = self.on_next(number, token)
                if token in self.eos or not left or not more:
                    self.work.left -= left
                    self.work.stopped += left > 0
                    self._leave(place)
                    ended.append(number)
                    break
        for number in ended:
            self.work.ended += 1
            self.generators.pop(number, None)
            del self.asked[number]
            self.on_end(number, self.new.pop(number))
        self._renew()

    def _leave(self, place: int) -> None:
        """A place is free."""
        del self.running[place]
        self.free.append(place)
        self.choice.forget(place)

    def _renew(self) -> None:
        """Let sequences whose cache is no use to their next token leave, and enter anew with all their tokens."""
        if not self.session.renewed_at:
            return
        for place, number in list(self.running.items()):
            length = self._length(number)
            if self.session.renews(length - 1, length):
                self._leave(place)
                self.waiting.append(number)
