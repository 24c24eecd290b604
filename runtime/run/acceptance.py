"""Which drafted tokens stand, and how many to draft: exact whatever was drafted, fast where drafts are good."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from operator import mul

import torch

from forebay.kernels.operator import HOST_MEMORY
from forebay.runtime.run.drafts import MODEL, Drafted, alike
from forebay.runtime.run.sampling import Sampling, choose, most_likely, probabilities

EMA_DECAY = 0.9  # of what was seen of drafts of a kind remains with each further one
PRIOR_TOKENS = 2.0  # tokens, accepted and refused, that a kind of drafts begins with
PRIOR = PRIOR_TOKENS / 2, PRIOR_TOKENS / 2
BIN_EDGES = (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)  # bounds of the chances that a model gives its drafted tokens
BIN_PRIOR = 4.0  # tokens, accepted and refused, that those between two bounds begin with
EXPLORATION_BUDGET = 0.03  # of an answer's time may go to drafts of which it is not known that they pay


Draws = torch.Generator | Sequence[torch.Generator] | None  # of one sequence, as `choose` takes them


def accepted(logits: torch.Tensor, draft: Drafted, sampling: Sampling, draws: Draws) -> list[int]:
    """The next tokens of a sequence, at least one, by the logits [N + 1, V] behind its last token and behind each of
    the N drafted ones that were computed.

    Greedy, these are the most likely ones, as far as the draft has them, and the one behind. Drawn, each token has the
    distribution of `sampling`, given those before: a draft that was not drawn meets the very tokens that would be drawn
    without it, one draw each; one that was drawn is taken or replaced by rejection sampling (Leviathan et al. 2023,
    algorithm 1)."""
    tokens = draft.tokens[: len(logits) - 1]
    if not sampling.do_sample:
        best = most_likely(logits).tolist()
        return best[: alike(tokens, best) + 1]
    own = draws[0] if isinstance(draws, Sequence) else draws
    if draft.chances is not None:
        where = HOST_MEMORY if own is None else own.device
        target, drafted = (chances.to(where) for chances in (probabilities(logits, sampling).double(), draft.chances))
        return without_refused(target, drafted, tokens, own)
    found: list[int] = []
    for i in range(len(tokens) + 1):
        found += choose(logits[i : i + 1], sampling, draws).tolist()
        if found[i:] != list(tokens[i : i + 1]):
            break
    return found


def without_refused(
    target: torch.Tensor, drafted: torch.Tensor, tokens: Sequence[int], generator: torch.Generator | None
) -> list[int]:
    """Drafted tokens until one is refused, and one more: drawn from what the target [N + 1, V] gives beyond the draft
    [N, V] where one was refused, else from the target behind the last."""
    for i, token in enumerate(tokens):
        uniform = torch.rand((), generator=generator, dtype=torch.float64, device=target.device)
        if bool(uniform * drafted[i, token] >= target[i, token]):
            beyond = (target[i] - drafted[i]).clamp(min=0)
            if not beyond.any():  # both are alike to rounding
                beyond = target[i]
            return [*tokens[:i], int(torch.multinomial(beyond, 1, generator=generator))]
    return [*tokens, int(torch.multinomial(target[len(tokens)], 1, generator=generator))]


class Acceptance:
    """How often drafted tokens of one sequence were right of late, by the kind of draft; a model's begin with `chance`,
    what is looked up with even odds."""

    def __init__(self, chance: float = 0.5) -> None:
        self._seen = {MODEL: (PRIOR_TOKENS * chance, PRIOR_TOKENS * (1 - chance))}

    def note(self, draft: Drafted, offered: int, right: int) -> None:
        """Record that the first `right` of a draft's first `offered` tokens were accepted."""
        if offered:
            good, bad = self._seen.get(draft.kind, PRIOR)
            self._seen[draft.kind] = EMA_DECAY * good + right, EMA_DECAY * bad + (right < offered)

    def chance(self, kind: int) -> float:
        """Return the chance that a token of such a draft is accepted where all before it are."""
        good, bad = self._seen.get(kind, PRIOR)
        return good / (good + bad)

    def expected(self, draft: Drafted, offered: int) -> float:
        """Tokens that a step is expected to give with so many of the draft's: each stands with its own chance, or where
        the draft knows none with one for all, if all before it do (Leviathan et al., equation 1)."""
        offered = min(offered, len(draft.tokens))
        if draft.stands:
            return 1 + sum(accumulate(draft.stands[:offered], mul))
        return _expected(self.chance(draft.kind), offered)


class DraftCalibration:
    """How often drafted tokens stood where all before them did, by the chance that the model that drafted them gave
    them. They begin with a power of it, the lower the more of all tokens are expected to stand, `expected`: the square
    root where that are 79 % or fewer (SmolLM2's 4-bit copy, greedy, nine texts of 96 tokens: given 0.2 to 0.35, 52 %
    stood, 0.35 to 0.5 75, 0.5 to 0.65 86)."""

    def __init__(self, expected: float = 0.79) -> None:
        power = 0.5 * math.log(min(max(expected, 0.79), 0.99)) / math.log(0.79)
        self._good = [BIN_PRIOR * ((low + high) / 2) ** power for low, high in pairwise(BIN_EDGES)]
        self._all = [BIN_PRIOR] * len(self._good)

    def note(self, given: Sequence[float], right: int) -> None:
        """Record that the first `right` of checked tokens with these chances were accepted."""
        for i, chance in enumerate(given[: right + 1]):
            at = _between(chance)
            self._good[at] += i < right
            self._all[at] += 1

    def chance(self, given: float) -> float:
        """Return the measured chance of acceptance for a token that its draft gave such a chance."""
        at = _between(given)
        return self._good[at] / self._all[at]


def _between(given: float) -> int:
    return min(bisect_right(BIN_EDGES, given), len(BIN_EDGES) - 1) - 1


class SpeculationBudget:
    """Allows drafts as long as they lose little time compared with decoding one by one.

    Times are predicted ones, so that a seed's draws repeat. Drafts that are expected to pay are allowed until they have
    lost a step's time and `EXPLORATION_BUDGET` of the time so far, net of what others gained. Drafts that are not
    expected to pay are tried for no more than `EXPLORATION_BUDGET` of the time so far.
    """

    def __init__(self, step_s: float) -> None:
        self.step_s, self.spent_s, self.lost_s, self.tried_s = step_s, 0.0, 0.0, 0.0

    def note(self, time_s: float, tokens: float, tried: bool) -> None:
        """A pass and its drafts took so long and gave so many tokens per sequence."""
        lost_s = time_s - tokens * self.step_s
        self.spent_s, self.lost_s = self.spent_s + time_s, self.lost_s + lost_s
        if tried:
            self.tried_s = max(0.0, self.tried_s + lost_s)

    def allow(self, cost_s: float, tried: bool) -> bool:
        """Return whether `cost_s` may be lost."""
        free_s = EXPLORATION_BUDGET * self.spent_s
        return self.lost_s + cost_s <= self.step_s + free_s and (not tried or self.tried_s + cost_s <= free_s)


def best_size(
    drafts: Mapping[int, Drafted], seen: Mapping[int, Acceptance], times_s: Mapping[int, float],
    replay: Mapping[int, int] | None = None,
) -> int:
    """Tokens per sequence of the step that is expected to give the most tokens per second, by the drafts of the
    sequences that go on; `times_s` are of the steps that may run. Ahead of its draft a sequence has one token, and
    those that it is to `replay`; a step that holds no more than some of these gives none. None that holds more than the
    longest draft where a smaller one holds that, whatever their times."""
    known = {row: 1 + (replay or {}).get(row, 0) for row in drafts}
    longest = max((known[row] + len(draft.tokens) for row, draft in drafts.items()), default=1)
    enough = min((size for size in times_s if size >= longest), default=max(times_s))

    def rate(size: int) -> float:
        return sum(seen[row].expected(draft, size - known[row]) for row, draft in drafts.items()
                   if size >= known[row]) / times_s[size]

    sizes = sorted(size for size in times_s if size <= enough)
    return max(sizes, key=rate) if any(map(rate, sizes)) else sizes[-1]


def best_rate(chance: float, times_s: Mapping[int, float], token_time_s: float = 0.0) -> float:
    """Tokens per second of the best of the steps in `times_s`, all of whose drafted tokens, each of which takes
    `token_time_s`, stand with `chance`."""
    return max(_expected(chance, size - 1) / (time_s + (size - 1) * token_time_s) for size, time_s in times_s.items())


def _expected(chance: float, offered: int) -> float:
    """Leviathan et al., equation 1, as a sum."""
    return sum(chance**i for i in range(offered + 1))
