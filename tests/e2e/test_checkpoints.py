"""Caches that keep, for a share of the tokens, what K and V are made of: tokens equal transformers', and what moves is
as many bytes as both kinds of blocks have."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.block_case import Case
from late import make_late
from selection import ALL, at_length

from forebay.commands.process_memory import anonymous_nbytes
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.program import Wait
from forebay.rewriter.verify.program import ProgramError, verify_program
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import answer_all

DISK = {"cache_tier": "disk", "cache_tokens": 4, "prefill_chunk": 10, "micro_batches": 2}
SHARES = [(1, 1), (1, 2), (2, 3), (1, 3)]
WAYS: list[dict[str, Any]] = [
    {}, {"order": "row"}, {"cache_tier": "host"}, {"cache_slots": 1}, {"admitted": 2}, {"prefill_chunk": 37},
    {"cache_tokens": 8, "micro_batches": 5}, {"cache_tier": "disk", "cache_shares": (0.0, 0.5)}]
SAMPLE = [("opt", (1, 1), 0), ("opt", (2, 3), 4), ("llama", (1, 2), 1), ("gemma2", (1, 2), 5), ("llama", (2, 3), 2),
          ("llama", (1, 2), 6), ("opt", (1, 3), 7), ("gpt2", (2, 3), 3)]  # every way and family


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Prompts of 27 to 37 tokens, so that sequences have blocks of both kinds."""
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name), 37, 9))


@pytest.mark.parametrize(("name", "share", "way"), list(itertools.product(
    ["opt", "gpt2", "gemma2", "llama"], SHARES, range(len(WAYS)))) if ALL else SAMPLE)
def test_tokens_equal_transformers(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str, share: tuple[int, int], way: int
) -> None:
    """Twice, as the second answer finds the first one's blocks."""
    monkeypatch.setenv("FOREBAY_POISON", "1")
    case = cases(name)
    with case.language_model(12.0, **DISK | {"checkpoints": share} | WAYS[way]) as lm:
        batching = lm.plan.schedule.batching
        assert (batching.recomputation.checkpoints, batching.recomputation.period) == share
        case.check(lm)
        case.check(lm)


def test_tables_whose_rates_are_expanded_to_all_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.17 makes Llama's: what has a line for each sequence has one for all rows of the checkpoints."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    def tables(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rates = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        angles = (rates @ position_ids[:, None, :].float()).transpose(1, 2)
        both = torch.cat((angles, angles), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", tables)
    case = Case("llama", tmp_path, 37, 9)
    with case.language_model(12.0, **DISK | {"checkpoints": (1, 2)}) as lm:
        assert lm.plan.schedule.batching.recomputation.checkpoints
        case.check(lm)


@pytest.mark.all
@pytest.mark.parametrize("way", [0, 1, 2, 4])
@pytest.mark.parametrize("share", SHARES)
def test_real_weights_whose_heads_share_keys(tmp_path: Path, share: tuple[int, int], way: int) -> None:
    """Of SmolLM2, for which checkpoints are no smaller than keys and values: kept all the same, as was wished."""
    case = Case("smollm2", tmp_path, 37, 9)
    with case.language_model(1.5, **DISK | {"cache_tokens": 8, "checkpoints": share} | WAYS[way]) as lm:
        assert lm.plan.schedule.batching.recomputation.checkpoints
        case.check(lm)
        case.check(lm)


@pytest.mark.parametrize(("name", "share", "way"), list(itertools.product(
    ["opt", "gpt2", "gemma2", "llama"], SHARES, range(len(WAYS)))) if ALL else [
        ("opt", (1, 2), 0), ("llama", (1, 1), 4)])
def test_checkpoints_in_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, share: tuple[int, int], way: int
) -> None:
    """Logits behind prompts that come in pieces, each over K and V that are made of packed rows, are off by their
    rounding and no more; and blocks hold the checkpoints of more tokens."""
    monkeypatch.setenv("FOREBAY_POISON", "1")
    case, tokens, errors = Case(name, tmp_path, 100, 4), [], []  # three stretches of 32 tokens
    with torch.no_grad():
        wanted = torch.stack([case.model(ids[mask.bool()][None]).logits[0, -1]
                              for ids, mask in zip(case.ids, case.mask, strict=True)])
    for kept in ("native", "act8"):
        with case.language_model(12.0, **DISK | {"checkpoints": share, "checkpoint_format": kept} | WAYS[way]) as lm:
            assert lm.plan.schedule.batching.recomputation.format == kept
            tokens.append(lm.plan.schedule.batching.recomputation.block_tokens)
            found = [lm.next_logits(case.ids, case.mask) for _ in range(2)]
            assert torch.equal(*found), "the second time it finds the blocks of the first"
            errors.append(((found[0] - wanted).abs().max() / wanted.abs().max()).item())
    assert errors[0] < 1e-5 < errors[1] < 0.01
    assert tokens[1] >= 2 * tokens[0]


@pytest.mark.parametrize(("cache", "kept"), [("kv8", "native"), ("kv4", "act8")])
def test_beside_packed_keys_and_values(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, cache: str, kept: str
) -> None:
    """What is made again is packed as it was at first: tokens and logits are those of such a cache alone, but for the
    rounding of what is kept."""
    monkeypatch.setenv("FOREBAY_POISON", "1")
    case = cases("opt")
    with case.language_model(12.0, cache=cache, prefill_chunk=10) as lm:
        wanted, logits = case.answer(lm), lm.next_logits(case.ids, case.mask)
    with case.language_model(
            12.0, **DISK | {"checkpoints": (1, 1), "checkpoint_format": kept, "cache": cache}) as lm:
        assert lm.plan.schedule.batching.recomputation.checkpoints
        found = [lm.next_logits(case.ids, case.mask) for _ in range(2)]
        assert torch.equal(*found)
        error = ((found[0] - logits).abs().max() / logits.abs().max()).item()
        if kept == "native":
            assert error < 1e-4 and torch.equal(case.answer(lm), wanted)
        else:
            assert 1e-5 < error < 0.05


@pytest.mark.parametrize("share", [at_length((1, 1)), (1, 2)])
def test_copies_that_overtake_each_other(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, share: tuple[int, int]
) -> None:
    make_late(monkeypatch)
    monkeypatch.setenv("FOREBAY_POISON", "1")
    with cases("opt").language_model(12.0, **DISK | {"checkpoints": share}) as lm:
        cases("opt").check(lm)


def test_without_any_one_wait_the_program_is_refused(cases: Callable[[str], Case]) -> None:
    with cases("opt").language_model(12.0, **DISK | {"checkpoints": (1, 2)}) as lm:
        program = lm.steps.program(1)
        waits = [i for i, item in enumerate(program.step) if isinstance(item, Wait)]
        for i in waits:
            with pytest.raises(ProgramError):
                verify_program(replace(program, step=(*program.step[:i], *program.step[i + 1 :])))


@pytest.mark.parametrize("share", [at_length((1, 1)), (1, 2), at_length((2, 3))])
def test_bytes_are_those_of_both_kinds_of_blocks(cases: Callable[[str], Case], share: tuple[int, int]) -> None:
    """In every decode step: of the tokens before it the blocks of K and V and of checkpoints that got full, and a store
    where one does."""
    case, marks = cases("opt"), list[Counter[tuple[str, str]]]()
    with case.language_model(12.0, **DISK | {"cache_tier": "host", "checkpoints": share, "prefill_chunk": 37}) as lm:
        assert not any(w.tier != "device" for w in lm.plan.weights), "what moves are caches alone"
        lm.start_trace()

        def note(column: object) -> None:
            lm.session.device.finish()
            assert lm.trace is not None
            marks.append(Counter(lm.trace.link_nbytes()))

        case.answer(lm, on_token=note)
        batching, layers = lm.plan.schedule.batching, len(case.opened[0].states)
        context = lm.plan.workload.context
        home = next(b for b in lm.plan.buffers if b.name == "cache_0_host")
        nbytes = home.nbytes // lm.plan.workload.batch // batching.kept_blocks(context)
        lengths = case.mask.sum(1).tolist()  # free slots stand at 0, where nothing moves
        longest = max(lengths)
        for step, (one, other) in enumerate(itertools.pairwise(marks)):
            expected: Counter[tuple[str, str]] = Counter()
            for length in lengths:
                start = length + step
                for tokens, kept in ((batching.cache.block_tokens, False), (batching.recomputation.block_tokens, True)):
                    full = [n for n in range(-(-context // tokens)) if batching.recomputation.keeps(
                        n * tokens // batching.stretch) is kept]
                    tail = longest // tokens if step == 0 else start // tokens
                    loaded = sum((n + 1) * tokens <= start or (n * tokens < start and n != tail) for n in full)
                    stored = sum((n + 1) * tokens == start + 1 for n in full)
                    expected["host", "device"] += layers * nbytes * loaded
                    expected["device", "host"] += layers * nbytes * stored
            assert other - one == +expected, f"step {step}"


def test_a_checkpoint_is_half_of_keys_and_values(cases: Callable[[str], Case]) -> None:
    """Of OPT, whose heads do not share keys: with blocks of which none is padded."""
    sizes = {}
    for share in ((0, 1), (1, 1)):
        with cases("opt").language_model(12.0, **DISK | {"cache_tokens": 32, "checkpoints": share}) as lm:
            batching = lm.plan.schedule.batching
            sizes[share] = sum(b.nbytes for b in lm.plan.buffers if b.arena == "cache") // batching.kept_blocks(
                lm.plan.workload.context) * (
                1 / batching.recomputation.block_tokens if batching.recomputation.checkpoints else 1 / 32)
    assert sizes[1, 1] == pytest.approx(sizes[0, 1] / 2)


@pytest.mark.parametrize("kept", ["native", "act8"] if ALL else ["act8"])
def test_nothing_stays_of_sequences_that_left(cases: Callable[[str], Case], kept: str) -> None:
    """Over thousands of them that enter slots and leave: no more memory or open files at each look. What grows once,
    as what the allocator keeps for the tests before, does not stay of sequences."""
    case, count = cases("opt"), 10_000 if ALL else 450
    chance = random.Random(0)
    asked = [Request(torch.randint(3, 97, (chance.randint(1, 37),)), chance.randint(1, 9)) for _ in range(count)]
    held, files, ended = list[int](), list[int](), list[int]()

    def on_end(number: int, new: list[int]) -> None:
        ended.append(number)
        if len(ended) % (count // 5) == 0:
            gc.collect()  # what waits for the collector does not stay
            held.append(anonymous_nbytes())
            files.append(len(os.listdir("/proc/self/fd")))

    options = DISK | {"checkpoints": (1, 2), "checkpoint_format": kept, "admitted": 2}
    with case.language_model(12.0, **options) as lm:
        answer_all(lm.session, asked, Sampling(), on_end=on_end)
    assert sorted(ended) == list(range(count))
    assert len(held) == 5 and min(b - a for a, b in itertools.pairwise(held)) < 256 << 10
    assert len(set(files)) == 1


def test_what_cannot_be_is_refused(cases: Callable[[str], Case]) -> None:
    case = cases("opt")
    for options, said in (
            ({"checkpoints": (2, 1)}, "checkpoints: 2 of 1"), ({"checkpoints": (1, 0)}, "checkpoints: 1 of 0"),
            ({"checkpoints": (1, 2), "cache_tier": "host", "cpu_attention": True}, "leave out one of both"),
            ({"checkpoints": (1, 2), "cache_shares": (0.5, 0.0)}, "cache.on_device"),
            ({"checkpoints": (0, 1), "checkpoint_format": "act8"}, r"act8: with checkpoints \(0, …\) none are kept"),
            ({"cache_tier": "device", "checkpoint_format": "act8"}, "act8: with cache_tier device none are kept")):
        with pytest.raises(PlanError, match=said):
            case.language_model(12.0, **DISK | options)
