"""Experts that are read before a router has picked: the same tokens, copies in their places, no byte more than named.
"""

from __future__ import annotations

import pytest
import torch
from small_experts import Saved, saved_once, small

from forebay.rewriter.ir.program import Copy, Launch, Rows, Span
from forebay.rewriter.ir.schedule.routed_fetch import AHEAD
from forebay.rewriter.report.explain import explain_plan
from tests.e2e.test_routed_experts import EXPERTS, NEW, prompts, tokens, watch_routing, wrapped

pytestmark = pytest.mark.filterwarnings("ignore:OpenMP threads spin")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A family's model in a folder of several files, and in memory."""
    return saved_once(tmp_path_factory, small, max_shard_size="150KB")


@pytest.mark.parametrize(("slots", "ahead"), [(1, 8), (2, 1), (4, 3), (7, 1)])
def test_same_tokens_from_experts_that_are_read_ahead(saved: Saved, slots: int, ahead: int) -> None:
    """In rounds of one expert and of two, and in rounds that are all read at once."""
    folder, model = saved("qwen3_moe")
    with wrapped(folder, slots, experts_ahead=ahead) as lm:
        for _ in range(2):
            assert torch.equal(tokens(lm, **prompts()), tokens(model, **prompts()))
        lines = explain_plan(lm.plan)
    assert f"{ahead} of each layer are read before its router has picked" in lines


def test_reads_ahead_stand_before_what_names_experts(saved: Saved) -> None:
    """Those of a layer stand after all other reads of the layer before, and before all that is computed of it; those of
    the first layer at the top. Their list is made anew after they were used."""
    folder, _ = saved("qwen3_moe")
    with wrapped(folder, 4, experts_ahead=3) as lm:
        step = lm.steps.program(1).step
    ahead = [i for i, item in enumerate(step) if isinstance(item, Copy) and item.dst == lookup_memory(item)]
    others = [i for i, item in enumerate(step) if isinstance(item, Copy) and isinstance(item.src, Rows)
              and item.src.keeps and i not in ahead]
    first = [next(i for i, item in enumerate(step) if isinstance(item, Launch) and item.layer == layer)
             for layer in range(3)]
    listed = [i for i, item in enumerate(step) if isinstance(item, Launch) and item.label.endswith("_list")]
    assert len(ahead) == len(listed) == 3 and ahead[0] < first[0]
    for layer in (1, 2):
        before = [i for i in others if step[i].layer == layer - 1]  # type: ignore[union-attr]
        assert max(before) < ahead[layer] < first[layer] and listed[layer] > ahead[layer]


def lookup_memory(copy: Copy) -> Span | None:
    """The memory of experts that are read ahead, if a copy brings any there."""
    return copy.dst if isinstance(copy.dst, Span) and copy.dst.buffer == AHEAD else None


class Pool:
    """What lies in the slots of a table, as a cache of them, from which the experts give way that were used least, of
    late. Steps name so many at most: where slots are fewer, what came some rounds ago may give way too. Experts that
    are read ahead lie elsewhere for a step."""

    def __init__(self, slots: int, most: int, ahead: int = 0) -> None:
        self.held: list[int | None] = [None] * slots
        self.at_once, self.half = most <= slots, max(1, slots // 2)
        self.rounds = min(3, most) if self.at_once else -(-most // self.half)
        self.ahead, self.listed = ahead, [0] * ahead
        self.uses: dict[int | None, int] = {None: -1} | dict.fromkeys(range(EXPERTS), 0)

    def read(self, named: set[int]) -> int:
        """Return how many experts a step reads that names these."""
        found = len(self.listed) + self.missed(named, {*self.listed}.difference(self.held))  # type: ignore[arg-type]
        others = sorted({*range(EXPERTS)}.difference(self.held), key=lambda e: (-self.uses[e], e))  # type: ignore[arg-type]
        self.listed = others[: self.ahead]
        return found

    def missed(self, named: set[int], ahead: set[int]) -> int:
        for expert in range(EXPERTS):
            self.uses[expert] += (expert in named) * (1 << 20) - self.uses[expert] // 64
        left, used = sorted(named.difference(self.held, ahead)), [i for i, e in enumerate(self.held) if e in named]  # type: ignore[arg-type]
        count = len(left)
        for number in range(1, self.rounds + 1):
            came = list[int]()
            while count - len(left) < -(-count * number // self.rounds) and (self.at_once or len(came) < self.half):
                busy = [*came, *(used if self.at_once or len(self.held) > 1 else ())]
                free = [i for i in range(len(self.held)) if i not in busy]
                if not free:
                    break
                least = min(free, key=lambda i: self.uses[self.held[i]])
                self.held[least] = left.pop(0)
                came.append(least)
            used = [*used, *came] if self.at_once else came
        assert not left
        return count


@pytest.mark.parametrize(("batch", "slots", "ahead"), [
    (1, 2, 0), (1, 5, 0), (3, 1, 0), (3, 2, 0), (3, 5, 0), (3, 6, 0), (3, 1, 3), (3, 4, 2), (3, 6, 1), (1, 5, 4)])
def test_reads_are_what_is_missing(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, batch: int, slots: int, ahead: int
) -> None:
    """Bytes equal the arithmetic from the routing, exactly; beside them a step reads rows of the embedding."""
    folder, routing = saved("qwen3_moe")[0], watch_routing(monkeypatch)
    with wrapped(folder, slots, batch, experts_ahead=ahead) as lm:
        lm.start_trace()
        tokens(lm, **prompts(batch))
        tokens(lm, **prompts(batch))
        read: dict[str, int] = {}
        for (lane, label, _), _, _, nbytes in lm.trace._kept():
            if lane == "lookup":
                read[label] = read.get(label, 0) + nbytes
        entry = next(w.nbytes for w in lm.plan.weights if w.name.endswith("table")) // EXPERTS
    known: dict[int, Pool] = {}
    missed = [known.setdefault(at, Pool(sizes.slots, sizes.named, ahead)).read(named) for at, sizes, named in routing]
    assert len(known) == 3 and len(missed) == 3 * 2 * (NEW - 1)
    fetched = {label: nbytes for label, nbytes in read.items() if label.startswith("fetch ")}
    assert sum(fetched.values()) == sum(missed) * entry and len(fetched) == 3
    there = sum(len(named) for *_, named in routing) + ahead * len(routing)
    assert 0 < sum(missed) < there  # some were there, others were not
