"""What moves between the tiers of a block, counted by the trace of a run: in every decode step, on every link and in
both directions, the weights that the plan streams and the cache blocks that exist or got full, and nothing else."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from e2e.block_case import ATTENDED, COUNT, DISK, HOST, SHARED, Case
from selection import at_length

from forebay.language_model import LanguageModel
from forebay.rewriter.ir.program import LOOKUP, Copy, Program, Rows, copy_nbytes, tier_of
from forebay.runtime.run.balance import balanced_slots

Links = Counter[tuple[str, str]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name)))


def of_weights(lm: LanguageModel, program: Program) -> Links:
    """A step's weights: those that the plan has on slower tiers, and one row of each table for every sequence."""
    found: Links = Counter()
    for w in lm.plan.weights:
        if w.tier != "device" and (w.tile_rows or not w.gather):
            found[w.tier, "device"] += w.nbytes * lm.plan.schedule.batching.micro_batches.fetches
    assert sum(found.values()) == lm.plan.prediction.streamed_nbytes > 0
    for item in program.step:
        if isinstance(item, Copy) and isinstance(item.src, Rows) and item.stream == LOOKUP:
            each = lm.plan.workload.batch // lm.plan.schedule.batching.micro_batches.count
            found[tier_of(item.src), "device"] += each * (
                item.src.row_nbytes)
    return found


def of_caches(lm: LanguageModel, layers: int, starts: list[int], begun: list[bool]) -> Links:
    """A step's cache blocks: those below each start are loaded, with the one it stands in where that has `begun` and
    is not in the tail, and one that gets full is stored."""
    plan, batching = lm.plan, lm.plan.schedule.batching
    each, tokens = plan.workload.batch // batching.micro_batches.count, batching.cache.block_tokens
    found: Links = Counter()
    for layer, homes in enumerate(batching.cache_homes(layers)):
        for k, home in enumerate(homes):
            if home == "device" or (home == "host" and batching.cache.cpu_attention):
                continue
            memory = next(b for b in plan.buffers if b.name == f"cache_{layer}_{home}")
            block_nbytes = memory.nbytes // homes.count(home) // each // batching.cache_blocks(plan.workload.context)
            for start, there in zip(starts[k * each :][:each], begun[k * each :][:each], strict=True):
                found[home, "device"] += block_nbytes * (start // tokens + (there and start % tokens > 0))
                found["device", home] += block_nbytes * ((start + 1) % tokens == 0)
    return found


def of_attention(lm: LanguageModel, layers: int, heads: int, kv_heads: int, width: int) -> Links:
    """What crosses where the host attends: queries, new keys and values, and results, of one token each; and where the
    sequence stands (int64), once to append and once to attend."""
    batching = lm.plan.schedule.batching
    each = lm.plan.workload.batch // batching.micro_batches.count
    there = batching.cache.cpu_attention * sum(
        home == "host" for homes in batching.cache_homes(layers) for home in homes)
    return Links({("device", "host"): there * each * ((heads + 2 * kv_heads) * width * 4 + 2 * 8),
                  ("host", "device"): there * each * heads * width * 4})


@pytest.mark.parametrize(("order", "micro_batches", "more"), [
    ("zigzag", 3, DISK), at_length("row", 2, DISK), at_length("zigzag", 2, HOST), ("row", 5, HOST),
    at_length("zigzag", 3, SHARED), ("row", 2, SHARED), at_length("zigzag", 3, ATTENDED),
    ("zigzag", 2, SHARED | {"cpu_attention": True})])
def test_bytes_on_every_link_are_the_plans(
    cases: Callable[[str], Case], order: str, micro_batches: int, more: dict[str, Any]
) -> None:
    case, marks = cases("llama"), list[Links]()
    with case.language_model(1.0, order=order, micro_batches=micro_batches, **more) as lm:
        lm.start_trace()

        def note(column: object) -> None:
            lm.session.device.finish()  # so that a step's copies are those issued since the step before
            assert lm.trace is not None
            marks.append(Counter(lm.trace.link_nbytes()))

        case.answer(lm, on_token=note)
        program, layers = lm.steps.program(1), len(case.opened[0].states)
        config = case.model.config
        fixed = of_weights(lm, program) + of_attention(
            lm, layers, config.num_attention_heads, config.num_key_value_heads,
            config.hidden_size // config.num_attention_heads)
        given, batch = case.mask.sum(1).tolist(), lm.plan.workload.batch
        lengths = [0] * batch  # a free slot stands at 0
        for place, length in zip(balanced_slots(given, range(COUNT), [0] * micro_batches, batch // micro_batches),
                                 given, strict=True):
            lengths[place] = length
        chunk_end = max(lengths)
        for step, (one, other) in enumerate(itertools.pairwise(marks)):
            starts = [length + step if length else 0 for length in lengths]
            tokens = lm.plan.schedule.batching.cache.block_tokens
            begun = [step == 0 < start and start // tokens != chunk_end // tokens for start in starts]
            expected = fixed + of_caches(lm, layers, starts, begun)
            assert +(other - one) == +expected, f"step {step}"
        most = Counter(program.link_nbytes())
        assert all(n <= most[link] for link, n in (marks[-1] - marks[-2]).items())
        assert {(tier_of(i.src), tier_of(i.dst)) for i in program.step if isinstance(i, Copy) and copy_nbytes(i)} >= {
            *(marks[-1] - marks[0])}
