"""Real Programs of every schedule with one fault each: the proof refuses what the slow oracle refuses, and what both
accept is shown to be harmless, or to be of a kind that names cannot show.

A mutant that both accept is *equivalent* where every read finds the writes that it finds in the sound Program, step by
step: then only who waits for whom has changed, and each order that remains possible is safe. What else survives must be
a write over contents of the same name (in place, or where the last value of a chain lies) left out, done twice, at
another time or to another part of the same buffer, or a read of another part of the same contents: contents keep their
name through it, and only results tell (`docs/architecture.md`, section 8).

FOREBAY_TEST_ALL=1 (`make test-all`) tries 400 faults of each Program instead of 12; FOREBAY_TEST_SEED draws others.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from budgets import operators_nbytes
from carried import Carried
from families import llama
from selection import ALL
from small_experts import small

from forebay import wrap
from forebay.backend import prepared_for
from forebay.language_model import LanguageModel
from forebay.open_model import open_model
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.ir.program import (
    DISK,
    DOWNLOAD,
    LOAD,
    LOOKUP,
    UPLOAD,
    WRITE,
    Copy,
    Item,
    Launch,
    Program,
    Record,
    Release,
    Rows,
    Span,
    TensorRef,
    Wait,
    place_of,
)
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.options import Options
from forebay.rewriter.verify.items import ItemFault, check_items
from forebay.rewriter.verify.program import ProgramError, verify_program
from forebay.runtime.devices.cuda.memory import least_workspace_nbytes
from tests.rewriter.verify import oracle

COUNT = 400 if ALL else 12
SEED = int(os.environ.get("FOREBAY_TEST_SEED", "0"))
DISK_CACHE = {"cache_tier": "disk", "cache_tokens": 4, "micro_batches": 2, "prefill_chunk": 4}
SCHEDULES: dict[str, dict[str, Any]] = {
    "streamed": {"cache_tier": "device"},
    "row": {"cache_tier": "device", "micro_batches": 2, "order": "row"},
    "zigzag": {"cache_tier": "device", "micro_batches": 2, "order": "zigzag"},
    "cache on disk": DISK_CACHE,
    "cache on disk, row": DISK_CACHE | {"order": "row", "cache_slots": 2},
    "cache on disk, kv8": DISK_CACHE | {"cache": "kv8", "cache_tokens": 64},
    "cache on disk, kv4": DISK_CACHE | {"cache": "kv4", "cache_tokens": 64},
    "cache in shares": DISK_CACHE | {"cache_shares": (0.25, 0.5)},
    "attended on the host": DISK_CACHE | {"cache_tier": "host", "cpu_attention": True},
    "hidden on disk": {"cache_tier": "device", "micro_batches": 4, "hidden_tier": "disk"},
    "entering": DISK_CACHE | {"admitted": 1, "cache_shares": (0.0, 0.5), "cpu_attention": True},
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mutated")
    config = llama(2, hidden_size=64, intermediate_size=160, vocab_size=200, tie_word_embeddings=False)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return open_model(folder)


def programs_of(schedule: str, opened: tuple, folder: Path) -> list[Program]:
    """The Programs of a schedule: of decoding and, for models, of prefill."""
    if schedule == "module":
        return [_module_program(folder)]
    if schedule == "experts by name":
        small("qwen3_moe").save_pretrained(folder)
        budget = {"device": 900_000, "host": 0, "disk": folder}
        gpu = replace(Machine.default(), device_kind="NVIDIA H200")
        on_gpu = {"device": 650_000 + least_workspace_nbytes(), "host": 400_000, "disk": folder}  # some on disk
        return [wrap(folder, given, batch=3, prompt=7, new_tokens=6, expert_slots=2,  # three rounds
                     machine=machine).steps.program(1) for given, machine in ((budget, None), (on_gpu, gpu))]
    if schedule.startswith("carried"):
        return [Carried(tier="host" if "host" in schedule else "disk", hop="hop" in schedule).program()]
    nbytes = sum(w.nbytes for w in opened[0].weights.values())
    host = 1 << 22 if {"cache_shares", "cpu_attention"} & {*SCHEDULES[schedule]} else 0
    share = {"streamed": 1.0, "row": 1.0, "zigzag": 1.4}.get(schedule, 1.6)
    workload, options = Workload(2, 8, 8), Options(**SCHEDULES[schedule])
    budget = Budget(int(share * nbytes) + operators_nbytes(opened, workload, options, host), host, str(folder))
    lm = LanguageModel(*opened, budget, workload, options)
    chunk = lm.plan.schedule.prefill_chunk
    return [lm.steps.program(tokens) for tokens in {1, chunk}]


def _module_program(folder: Path) -> Program:
    torch._dynamo.reset()
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    call = torch.compile(module, backend="forebay", options={"budget": {"device": 60_000, "disk": str(folder)}})
    with torch.no_grad():
        call(torch.randn(2, 64))
    (prepared,) = prepared_for(module)
    return prepared.program


# -- faults: each takes an item and gives what stands in its place, or None where it does not suit

def dropped(kind: Callable[[Item], bool]) -> Callable[[list[Item], int, random.Random], bool]:
    def drop(items: list[Item], i: int, rng: random.Random) -> bool:
        if not kind(items[i]):
            return False
        del items[i]
        return True

    return drop


def swapped(items: list[Item], i: int, rng: random.Random) -> bool:
    if i + 1 == len(items):
        return False
    items[i], items[i + 1] = items[i + 1], items[i]
    return True


def elsewhere(items: list[Item], i: int, rng: random.Random) -> bool:
    items.insert(rng.randrange(len(items)), items.pop(i))
    return True


def twice(items: list[Item], i: int, rng: random.Random) -> bool:
    items.insert(rng.randrange(len(items) + 1), items[i])
    return True


def other_event(items: list[Item], i: int, rng: random.Random) -> bool:
    item, events = items[i], sorted({k.event for k in items if isinstance(k, Record)})
    if not isinstance(item, Wait | Record):
        return False
    items[i] = replace(item, event=rng.choice(events))
    return True


def shifted(items: list[Item], i: int, rng: random.Random) -> bool:
    """Every place of an item that lies in one of its buffers, by whole pages or lines of cache."""
    item, by = items[i], rng.choice((-4096, -64, 64, 4096))
    return _rewritten(items, i, rng, lambda place: replace(place, offset=place.offset + by), item)


def shrunk(items: list[Item], i: int, rng: random.Random) -> bool:
    item = items[i]
    if not isinstance(item, Release):
        return False
    items[i] = replace(item, span=replace(item.span, nbytes=item.span.nbytes // 2))
    return True


def renamed(items: list[Item], i: int, rng: random.Random) -> bool:
    """One of its buffers is taken for another's contents."""
    names = sorted({s.buffer for k in items for s in _spans(k)})
    other = rng.choice(names)
    return _rewritten(items, i, rng, lambda place: replace(place, buffer=other), items[i])


def other_stream(items: list[Item], i: int, rng: random.Random) -> bool:
    item = items[i]
    streams = {DISK: LOOKUP, LOOKUP: DISK, LOAD: DISK, UPLOAD: DOWNLOAD, DOWNLOAD: UPLOAD, WRITE: LOAD}
    if item.stream not in streams:
        return False
    items[i] = replace(item, stream=streams[item.stream])
    return True


def _spans(item: Item) -> list[Span]:
    if isinstance(item, Launch):
        return [*item.reads, *item.writes]
    if isinstance(item, Release):
        return [item.span]
    return [p for p in map(place_of, (item.src, item.dst)) if isinstance(p, Span)] if isinstance(item, Copy) else []


def _rewritten(items: list[Item], i: int, rng: random.Random, change: Callable[[Any], Any], item: Item) -> bool:
    """Spans and tensors of one buffer of an item, changed alike."""
    spans = _spans(item)
    if not spans:
        return False
    buffer = rng.choice(spans).buffer

    def new(value: Any) -> Any:
        if isinstance(value, Span | TensorRef):
            return change(value) if value.buffer == buffer else value
        if isinstance(value, Rows):
            return replace(value, table=new(value.table), index=new(value.index), count=new(value.count))
        if isinstance(value, tuple | list):
            return type(value)(map(new, value))
        return {k: new(v) for k, v in value.items()} if isinstance(value, dict) else value

    if isinstance(item, Launch):
        items[i] = replace(item, args=new(item.args), kwargs=new(item.kwargs), out=new(item.out), reads=new(item.reads),
                           writes=new(item.writes))
    elif isinstance(item, Copy):
        items[i] = replace(item, src=new(item.src), dst=new(item.dst))
    else:
        assert isinstance(item, Release)
        items[i] = replace(item, span=new(item.span))
    return True


def _outward(item: Item) -> bool:
    return isinstance(item, Copy) and item.stream in (DOWNLOAD, WRITE)


def _kept(item: Item) -> bool:
    """Whether a copy brings some of what is kept, as experts into their pool."""
    return isinstance(item, Copy) and isinstance(item.src, Rows) and item.src.keeps


FAULTS = {
    "a wait dropped": dropped(lambda item: isinstance(item, Wait)),
    "a record dropped": dropped(lambda item: isinstance(item, Record)),
    "a release dropped": dropped(lambda item: isinstance(item, Release)),
    "a load dropped": dropped(lambda item: isinstance(item, Copy) and not _outward(item)),
    "a store dropped": dropped(_outward),
    "a launch dropped": dropped(lambda item: isinstance(item, Launch)),
    "neighbours swapped": swapped, "an item moved": elsewhere, "an item repeated": twice,
    "another event": other_event, "an address shifted": shifted, "a release shrunk": shrunk,
    "a buffer renamed": renamed, "another stream": other_stream,
}

# Those that leave every name where it was, made at what writes in place.
IN_PLACE = ("a launch dropped", "a load dropped", "a store dropped", "an item repeated", "an item moved",
            "neighbours swapped")


def mutant(program: Program, rng: random.Random) -> tuple[str, Item, Program]:
    """The name of a fault, the item it is made at, and the Program with it."""
    while True:
        name = rng.choice(sorted(FAULTS))
        part = "prologue" if program.prologue and rng.random() < 0.1 else "step"
        items: list[Item] = list(getattr(program, part))
        i = rng.randrange(len(items))
        item = items[i]
        if FAULTS[name](items, i, rng) and items != list(getattr(program, part)):
            return name, item, replace(program, **{part: tuple(items)})


def refused(judge: Callable[[Program], object], refusal: type[Exception], program: Program) -> str:
    try:
        judge(program)
    except refusal as error:
        return str(error) or "refused"
    return ""


def updated(program: Program, updates: set[str]) -> set[str]:
    """The contents that launches of these labels update."""
    return {span.buffer for item in program.step if isinstance(item, Launch) and item.label in updates
            for span in item.writes}


def changes_in_place(item: Item, updates: set[str], contents: set[str]) -> bool:
    """Whether what an item writes has its name before and after: only results tell whether it ran, and how often.
    `updates`: labels of those that do in the sound Program; `contents`: what they update, which whoever wrote it first
    may write again behind them."""
    if not isinstance(item, Launch):
        return _outward(item) or _kept(item)
    return item.label in updates or any(span.buffer in contents for span in item.writes)


@pytest.mark.parametrize("schedule", [
    *SCHEDULES, "experts by name", "module", "carried", "carried, host", "carried, hop"])
def test_the_proof_refuses_what_the_oracle_refuses(schedule: str, opened: tuple, tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    survivors: Counter[str] = Counter()
    programs = programs_of(schedule, opened, tmp_path)
    for number, program in enumerate(programs):
        verify_program(program)
        sound, updates = oracle.flow(program), oracle.updates(program)
        contents = updated(program, updates)
        rng = random.Random(f"{SEED} {schedule} {number}")
        for _ in range(-(-COUNT // len(programs))):
            name, item, wrong = mutant(program, rng)
            ours = refused(verify_program, ProgramError, wrong)
            flow: list[Any] = []
            theirs = refused(lambda p: flow.append(oracle.flow(p)), oracle.Refused, wrong)  # noqa: B023
            told = f"{schedule}, program {number}, seed {SEED}: {name} at {item}\n{ours}\n{theirs}"
            assert ours or not theirs, f"the proof accepts what the oracle refuses: {told}"
            assert theirs or not ours or refused(check_items, ItemFault, wrong), f"refused without a reason: {told}"
            if ours:
                found["refused"] += 1
            elif flow[0] == sound:
                found["equivalent"] += 1
            else:
                found["unseen"] += 1
                survivors[f"{name}: {item.stream} {getattr(item, 'op', type(item).__name__)}"] += 1
                assert name == "an address shifted" or (  # each read finds the contents that it names, at another place
                    changes_in_place(item, updates, contents) and name in IN_PLACE), told
    total = sum(found.values())
    print(f"\n{schedule}: {total} faults, {found['refused']} refused, {found['equivalent']} without effect, "
          f"{found['unseen']} in place: {found['refused'] / (total - found['equivalent']):.1%} of those that have an "
          f"effect are refused; seed {SEED}; {dict(survivors)}")
    assert found["refused"] >= 0.7 * (total - found["equivalent"])
