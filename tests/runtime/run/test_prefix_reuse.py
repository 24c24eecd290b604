"""Prompts that begin as earlier ones did are answered as if nothing of them were known, bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest
import torch
from families import llama
from prefixed import (
    CHUNK,
    KEPT,
    NEW,
    PROMPT,
    STATES,
    TIERS,
    VOCAB,
    Told,
    answers,
    keeping,
    opened,
    prompts_of,
    save_family,
)
from selection import at_length
from transformers import AutoModelForCausalLM

import forebay
from forebay.commands.chat import compute_ahead
from forebay.rewriter.ir.alignment import whole_pages
from forebay.rewriter.ir.turns import StepTurns
from forebay.rewriter.machine.profile import Machine
from forebay.runtime.run.cache_slots import CacheSlots
from forebay.runtime.run.next_turns import NextTurns
from forebay.runtime.run.prefix_cache import PrefixCache, block_keys
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import answer_all, answer_arriving

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]
SLOTS: dict[str, dict[str, Any]] = {
    "alone": {"batch": 1}, "one enters": {"batch_slots": 3}, "two enter": {"batch_slots": 16, "micro_batches": 2}}
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A random model of a family."""
    known: dict[str, Path] = {}

    def saved(family: str) -> Path:
        if family not in known:
            known[family] = tmp_path_factory.mktemp(family)
            save_family(family, known[family])
        return known[family]

    return saved


def check(folder: Path, seed: int, at_once: int = 1, kept: Mapping[str, Any] = KEPT["memory"], **options: Any) -> None:
    """Answers equal those without reuse, and begin after as many tokens as were computed before, by a model that is
    opened again too where they are `kept` on disk."""
    torch.manual_seed(seed)
    prompts = prompts_of(seed)
    with opened(folder, **options) as lm:
        without, known, work = answers(lm, prompts, at_once)
        assert not any(known)
    with opened(folder, **kept, **options) as lm:
        found, known, reused = answers(lm, prompts, at_once)
        tokens = lm.session.prefixes.tokens
        again = answers(lm, prompts, at_once)
    if "cache_dir" in kept:
        with opened(folder, **kept, **options) as lm:
            assert answers(lm, prompts, at_once)[:2] == again[:2]
    assert found == without == again[0]
    common = [max((shared(prompts[i], prompts[j], tokens) for j in range(i)), default=0) for i in range(len(prompts))]
    if at_once == 1:
        assert known == common and known[-1] > 0
        assert reused.prefills == work.prefills - sum(known) // CHUNK
        assert again[1] == [(len(ids) - 1) // tokens * tokens for ids in prompts]
    assert reused.cached == sum(known) and all(a <= b for a, b in zip(known, common, strict=True))


def shared(ids: torch.Tensor, other: torch.Tensor, tokens: int) -> int:
    """Tokens in whole blocks that both prompts begin with, but for the last of the first."""
    most = min(len(ids) - 1, len(other)) // tokens * tokens
    return next((n for n in range(most, 0, -tokens) if torch.equal(ids[:n], other[:n])), 0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("cache", ["native", "kv8", "kv4"])
@pytest.mark.parametrize("tier", TIERS)
def test_answers_are_those_without_reuse(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tier: str, cache: str, slots: str, kept: str
) -> None:
    if tier == "checkpoints" and cache != "native":
        pytest.skip("checkpoints stand in place of K and V in the model's format")
    monkeypatch.setenv("FOREBAY_POISON", "1")
    check(folders("llama"), 3, 2 if slots == "two enter" else 1, keeping(kept, tmp_path), **TIERS[tier], **SLOTS[slots],
          cache=cache)


@pytest.mark.parametrize(("family", "slots", "kept"), [
    at_length("gemma2", "one enters", "both"), ("lfm2", "one enters", "disk"), at_length("mamba", "alone", "both"),
    at_length("lfm2", "two enter", "memory"), at_length("qwen3_5_text", "alone", "disk"),
    at_length("qwen3_5_text", "two enter", "both"), ("deepseek_v3", "alone", "both")])
def test_states_of_every_kind_enter(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, slots: str, kept: str
) -> None:
    monkeypatch.setenv("FOREBAY_POISON", "1")
    check(folders(family), 4, 2 if slots == "two enter" else 1, keeping(kept, tmp_path), **SLOTS[slots])


@pytest.mark.parametrize(("family", "options"), [
    ("llama", TIERS["device"] | {"cache": "kv8"}), ("llama", TIERS["checkpoints"]), ("llama", TIERS["attended"]),
    ("lfm2", {}), at_length("mamba", {}), at_length("qwen3_5_text", {})], ids=str)
def test_shorter_prompts_overtake_longer_ones(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any]
) -> None:
    """Between the chunks of a long prompt they are computed in other slots; answers and what is kept are as ever."""
    monkeypatch.setenv("FOREBAY_POISON", "1")
    chance = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB, (n,), generator=chance) for n in (PROMPT, 3, 9, PROMPT - 1, 12, 2)]
    prompts.append(torch.cat((prompts[0][:9], prompts[1])))
    with opened(folders(family), batch_slots=3, **options) as lm:
        alone = answers(lm, prompts)[0]
    with opened(folders(family), batch_slots=3, prefix_cache="64MiB", **options) as lm:
        for known in (False, True):
            left, order = dict(enumerate(prompts)), list[int]()
            told: list[Told] = [[] for _ in prompts]

            def arriving(
                free: int, idle: bool, left: dict[int, torch.Tensor] = left, told: list[Told] = told
            ) -> dict[int, Request] | None:
                return {i: Request(left.pop(i), NEW, top_logprobs=2, on_logprobs=lambda each, i=i: told[i].append(
                    (each.token, each.logprob, each.top))) for i in list(left)[:free]} if left else None

            answer_arriving(lm.session, arriving, on_end=lambda *_: None, turns=StepTurns(0.0, 1, overtakes=True),
                            on_next=lambda i, token, order=order: order.append(i) is None)
            assert told == alone
            first = list(dict.fromkeys(order))
            assert known or first.index(0) > first.index(2) > first.index(1)


@pytest.mark.parametrize(("family", "tier", "cache", "kept"), [
    ("lfm2", "disk", "kv8", "memory"), *starmap(at_length, (
        ("mamba", "host", "native", "both"), ("mamba", "disk", "native", "disk"),
        ("mamba", "shared", "native", "memory"), ("lfm2", "host", "native", "disk"), ("lfm2", "shared", "kv4", "both"),
        ("qwen3_5_text", "host", "kv4", "disk"), ("qwen3_5_text", "disk", "native", "both"),
        ("qwen3_5_text", "shared", "kv8", "memory"), ("falcon_h1", "host", "kv8", "both"),
        ("falcon_h1", "disk", "kv4", "memory"), ("falcon_h1", "shared", "native", "disk")))])
def test_states_on_slower_tiers_enter(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, tier: str, cache: str, kept: str
) -> None:
    """Those of a layer alone move whole, and those of a layer with a cache stay on the device."""
    monkeypatch.setenv("FOREBAY_POISON", "1")
    check(folders(family), 6, 1, keeping(kept, tmp_path), batch=1, cache=cache, **TIERS[tier])


@pytest.mark.parametrize(("family", "options"), [
    at_length("llama", {}), at_length("llama", TIERS["disk"]), ("lfm2", TIERS["disk"]), at_length("lfm2", {}),
    at_length("qwen3_5_text", TIERS["host"]), at_length("mamba", TIERS["disk"])], ids=str)
def test_prompts_that_begin_together_enter(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any]
) -> None:
    """A job whose slots fall free together, in two micro-batches, each with states of its own; then as ever."""
    monkeypatch.setenv("FOREBAY_POISON", "1")
    chance = torch.Generator().manual_seed(7)
    system, other = (torch.randint(3, VOCAB, (n,), generator=chance) for n in (17, 13))
    prompts = [torch.cat((system if i % 3 else other, torch.randint(3, VOCAB, (3 + i,), generator=chance)))
               for i in range(10)]
    found = []
    for nbytes in (0, 1 << 20):
        with opened(folders(family), batch=4, micro_batches=2, prefix_cache=nbytes, **options) as lm:
            for _ in range(2):
                ended: dict[int, list[int]] = {}
                work = answer_all(lm.session, [Request(ids, NEW) for ids in prompts], Sampling(),
                                  on_end=ended.__setitem__)
                found.append(ended)
                assert (work.cached > 0) is (nbytes > 0)
    assert found[0] == found[1] == found[2] == found[3]


def test_chunks_are_shorter_where_that_takes_hardly_longer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(llama(2, vocab_size=VOCAB, max_position_embeddings=1024)).save_pretrained(tmp_path)
    plain, kept = (forebay.wrap(tmp_path, 1 << 25, prompt=512, new_tokens=64, machine=Machine.default(),
                                prefix_cache=nbytes).plan for nbytes in (0, 1 << 20))
    assert 64 <= kept.schedule.prefill_chunk < plain.schedule.prefill_chunk

    def answer_s(plan: Any) -> float:
        return float(plan.prediction.prefill_time_s + 63 * plan.prediction.decode_time_s)

    assert answer_s(kept) < 1.1 * answer_s(plain)


def test_steps_that_follow_the_length_of_a_call_reuse_nothing(folders: Folders, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    AutoModelForCausalLM.from_config(llama(2, vocab_size=VOCAB, max_position_embeddings=16, rope_parameters=rope)
                                     ).save_pretrained(tmp_path)
    with opened(tmp_path, prefix_cache="1MiB", batch=1) as lm:
        assert lm.session.prefixes is None and answers(lm, prompts_of(1))[2].cached == 0


def everywhere() -> Iterator[tuple[str, str, str]]:
    """Families of states, tiers and formats that go together."""
    tiers = dict.fromkeys(STATES, ("device", "host", "disk", "shared")) | {
        "llama": tuple(TIERS), "deepseek_v3": ("device",)}
    for family, of_one in tiers.items():
        for tier in of_one:
            native = family in ("mamba", "deepseek_v3") or tier == "checkpoints"
            yield from itertools.product([family], [tier], ["native"] if native else ["native", "kv8", "kv4"])


@pytest.mark.parametrize(("family", "tier", "cache", "blocks"), [
    ("llama", "device", "native", 0), ("llama", "device", "native", 2), ("lfm2", "disk", "kv8", 1),
    *(at_length("llama", "device", "native", n) for n in (1, 3, 4, 5, 6, 7, 8)),
    *(at_length(*each, i % 5) for i, each in enumerate(everywhere()))])
def test_blocks_may_be_dropped_at_any_time(
    folders: Folders, tmp_path: Path, family: str, tier: str, cache: str, blocks: int
) -> None:
    """Of a cache that holds a few blocks, in memory or on disk: sequences enter and leave while others run."""
    torch.manual_seed(blocks)
    slots = {"batch_slots": 3} if tier == "device" or family in ("llama", "deepseek_v3") else {"batch": 1}
    folder, options = folders(family), {"cache": cache, **slots, **TIERS[tier]}
    prompts, chance = prompts_of(blocks, 12), random.Random(blocks)

    def ran(lm: Any) -> dict[int, list[int]]:
        left, ended = list(range(len(prompts))), dict[int, list[int]]()

        def arriving(free: int, idle: bool) -> dict[int, Request] | None:
            came = left[: min(free, chance.choice((0, 1, 2)) if not idle else 1)]
            del left[: len(came)]
            return {i: Request(prompts[i], 1 + i % NEW) for i in came} if came or left else None

        answer_arriving(lm.session, arriving, on_next=lambda *_: True, on_end=ended.__setitem__)
        return ended

    with opened(folder, **options) as lm:
        found = ran(lm)
    with opened(folder, **options, prefix_cache=1 << 24) as lm:
        answers(lm, prompts[:1])
        each = next(iter(lm.prefixes.blocks.values())).rows.numel()
    with opened(folder, **options, prefix_cache=blocks * each + 1) as lm:
        assert ran(lm) == found
        assert len(lm.prefixes.blocks) <= blocks and lm.prefixes.nbytes == each * len(lm.prefixes.blocks)
    room = max(1, blocks) * whole_pages(each + 32)
    for _ in range(2):
        with opened(folder, **options, prefix_cache=2 * each, cache_dir=tmp_path, cache_dir_size=room) as lm:
            assert ran(lm) == found
            files = list(tmp_path.glob("*.kv"))
            assert len(files) <= max(1, blocks) and lm.prefixes.slower.nbytes <= room


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_what_answers_add_is_computed_before_the_next_prompt_comes(folders: Folders, family: str) -> None:
    """Block by block until there is something to do; what is known is then as of a prompt."""
    prompt = torch.randint(3, VOCAB, (9,), generator=torch.Generator().manual_seed(1))
    with opened(folders(family), batch=1) as lm:
        (told,), _, _ = answers(lm, [prompt])
        longer = torch.cat((prompt, torch.tensor([token for token, *_ in told]), prompt))
        expected = answers(lm, [longer])[0]
    turns, until = NextTurns(), iter([False, True, False, False, False])
    with opened(folders(family), batch=1, prefix_cache="1MiB") as lm:
        assert answers(lm, [prompt])[0] == [told]
        turns.note(longer[:13].tolist(), "")
        for known in (8, 12, 12):
            assert lm.session.prefixes.cache.count(block_keys(lm.session.prefixes.root, longer, CHUNK)) * CHUNK == known
            compute_ahead(lm, turns, lambda: next(until))
        assert not turns and answers(lm, [longer])[:2] == (expected, [12])
        turns.note(longer.tolist(), "")
        lm.prefixes.most_nbytes = lm.prefixes.nbytes  # none is kept any more
        lm.prefixes.wants = lambda keys: True
        lm.prefixes.put = lambda keys, block: False
        compute_ahead(lm, turns, lambda: False)
        assert not turns


def test_a_job_keeps_what_its_prompts_share(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that one prompt alone has are not kept, and a shared beginning is computed once, and copied once to each
    slot but for the first block, which steps of other slots overwrite while the slot is free."""
    torch.manual_seed(0)
    system = torch.randint(3, VOCAB, (16,))
    prompts = [torch.cat((system, torch.randint(3, VOCAB, (9,)))) for _ in range(6)]
    prompts.insert(3, torch.randint(3, VOCAB, (25,)))
    ended: dict[int, list[int]] = {}
    with opened(folders("llama"), batch_slots=3) as lm:
        plain = answer_all(lm.session, [Request(ids, NEW) for ids in prompts], Sampling(), on_end=ended.__setitem__)
    expected, ended = ended, {}
    written, write = list[tuple[int, int]](), CacheSlots.write
    with opened(folders("llama"), batch_slots=3, prefix_cache="1MiB") as lm, monkeypatch.context() as patch:
        patch.setattr(CacheSlots, "write", lambda self, slot, first, end, data: (
            written.append((slot, first)), write(self, slot, first, end, data)))
        work = answer_all(lm.session, [Request(ids, NEW) for ids in prompts], Sampling(), on_end=ended.__setitem__)
        assert len(lm.prefixes.blocks) == 4
    assert ended == expected and work.cached == 5 * 16 and work.prefills == plain.prefills - 5 * 4
    assert all(written.count((slot, first)) <= 1 for slot in range(3) for first in (4, 8, 12)) and len(written) < 20


@pytest.mark.parametrize("options", [{}, at_length(TIERS["disk"]), at_length({"cache": "kv4"})], ids=str)
def test_what_other_calls_write_to_a_slot_is_known(folders: Folders, options: dict[str, Any]) -> None:
    """Beams that change places, scores, longer answers and drafts come between prompts that begin alike."""
    prompts, options = prompts_of(11, 6), {"batch": 2, "prompt_lookup_num_tokens": 2, **options}
    prompts += prompts[::-1]

    def ran(lm: Any) -> list[Any]:
        found: list[Any] = []
        for i, ids in enumerate(prompts):
            beams = {"num_beams": 2} if i % 3 == 1 and "cache_tier" not in options else {}
            found.append(lm.generate(ids[None], max_new_tokens=NEW, do_sample=False, eos_token_id=None, **beams
                                     ).tolist())
            if i % 3 == 2:
                found.append(lm(ids[None, :5], use_cache=False).logits.argmax(-1).tolist())
        return found

    with opened(folders("llama"), **options) as lm:
        expected = ran(lm)
    with opened(folders("llama"), prefix_cache="1MiB", **options) as lm:
        assert ran(lm) == expected


def test_what_is_used_last_is_dropped_last_and_a_beginning_after_what_follows_it() -> None:
    cache, root = PrefixCache(5), b"model"
    ids = {name: torch.tensor(list(map(ord, name))) for name in ("abcd", "abce", "xy")}
    keys = {name: block_keys(root, each, 1) for name, each in ids.items()}
    assert keys["abcd"][:3] == keys["abce"][:3] and keys["abcd"][3] != keys["abce"][3]

    def keep(name: str) -> None:
        for i in range(1, len(name) + 1):
            cache.add(keys[name][:i], torch.zeros(1, dtype=torch.uint8), root)

    keep("abcd")
    keep("abce")
    assert cache.nbytes == 5 and len(cache.known(keys["abcd"])) == len(cache.known(keys["abce"])) == 4
    keep("xy")  # drops d, then e
    assert [len(cache.known(keys[name])) for name in ("abcd", "abce", "xy")] == [3, 3, 2] and cache.nbytes == 5
    cache.add(keys["abcd"], torch.zeros(6, dtype=torch.uint8), root)  # larger than all
    assert cache.nbytes <= 5 and len(cache.known(keys["abcd"])) == 3
    assert block_keys(b"other", ids["xy"], 1) != keys["xy"] and block_keys(root, ids["xy"], 3) == []


def test_a_chain_longer_than_the_cache_keeps_its_beginning() -> None:
    cache, root = PrefixCache(3), b""
    keys = block_keys(root, torch.arange(6), 1)
    for i in range(1, 7):
        cache.add(keys[:i], torch.zeros(1, dtype=torch.uint8), root)
    assert len(cache.known(keys)) == 3 == cache.nbytes
