"""Who takes part in `benchmarks.offload`: `CONTESTANTS` says what each opens, and how. Each has a process of its own.

A contestant either runs a whole answer, or samples it: the time of a step is linear in how many tokens stand before it,
so that of a step in the middle of the answer is the mean of all, and so it is with the chunks of a prompt. What stands
before a sampled step is a cache of as many tokens that nobody computed; its bytes are really there, in memory or on the
disk.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import torch

from benchmarks import peers
from benchmarks.isolated import IsolatedWorker, serve
from benchmarks.page_cache import PageCache, StepClock
from benchmarks.probes import Probe, at_pace, fill_cache, moved_nbytes, moved_so_far, write_rate
from benchmarks.sources import expert_hits
from forebay.commands.process_memory import MemoryWatch, anonymous_nbytes
from forebay.kernels.formats.slot_state import ITEMSIZE
from forebay.kernels.operators import ASSIGN_SLOTS
from forebay.rewriter.ir.program import COMPUTE, Launch
from forebay.runtime.disk.page_cache import drop_file

UNLIMITED = 1 << 40
PACES = {"pace": None, "prefill_pace": 256}  # of matmuls of so many rows (None: the rows of a step)
BUSY = {"pace": "planned_busy", "prefill_pace": "planned_prefill_busy"}  # shares of time in which a plan computes
READS_S = 0.8  # of plain reads at each pace, between steps of a second or two; less between whole answers
RATES = ("bytes_per_s", *PACES)
OFFLOADED = ("disk-map", "accelerate")
IN_RAM = "transformers in RAM"
LIBGOMP_SPINS = "300000"  # its default, with which llama.cpp is several times faster than without spinning
MOST_FILLING = 100  # answers that fill pools: routers may leave some experts out
ROOM = 150 << 20  # above a budget, in the kernel's limit
GROUPS = Path("/sys/fs/cgroup")
Order = dict[str, Any]


@dataclass(frozen=True)
class Contestant:
    """An engine, what it opens (a name of `benchmarks.sources`), and the options that Forebay is planned with.

    `ram` has no budget. `share` in percent: the budget is the smallest plan's, and so much of the weights.
    """

    name: str
    engine: str = "forebay"
    source: str = "bf16"
    options: Mapping[str, Any] = field(default_factory=dict)
    ram: bool = False
    share: int | None = None

    @property
    def formats(self) -> str:
        kept = self.options.get("cache", "native")
        return self.source + ("" if kept == "native" else f"+{kept}")


def _by_name(contestants: Iterable[Contestant]) -> dict[str, Contestant]:
    return {one.name: one for one in contestants}


def _block(weights: str, cache: str, order: str, ram: bool = False) -> Contestant:
    """Weights as they are (`bf16`) or `w4`, the format of the cache, the order of the block."""
    formats = weights + ("" if cache == "native" else f"+{cache}")
    return Contestant(f"ram {formats}" if ram else f"forebay {formats} {order}", "forebay", weights,
                      {"cache": cache, "order": order}, ram)


FORMATS = (("bf16", "native"), ("w4", "native"), ("w4", "kv4"))
BLOCKS = _by_name((*(_block(*formats, order) for formats in FORMATS for order in ("zigzag", "row")),
                   *(_block(*formats, "zigzag", ram=True) for formats in FORMATS)))
SHARES = _by_name(Contestant(f"forebay within {share} %", share=share) for share in (100, 75, 50, 30, 15))
EXPERTS = _by_name((Contestant("pools", options={"calibration": "answers"}),
                    Contestant("all experts", options={"expert_slots": 0})))
PEERS = _by_name((*(Contestant(name, name, "copy") for name in OFFLOADED), Contestant(IN_RAM, "ram", "copy", ram=True)))
INT8 = {"activations": "int8"}
# On GGUF files: a peer's options are its precision.
GGUF = _by_name((
    *(Contestant(f"forebay {kept}{' int8' if how else ''}", "forebay", source, how, True)
      for kept, source in (("packed", "packed"), ("in bf16", "half")) for how in ({}, INT8)),
    *(Contestant(name, engine, source, {"precision": precision} if precision else {}, True)
      for name, engine, source, precision in (
          ("llama.cpp in RAM", "llama.cpp", "gguf", ""), ("openvino", "openvino", "gguf", ""),
          ("openvino bf16", "openvino", "gguf", "bf16"))),
    Contestant("forebay", source="packed"), Contestant("neurostream", "neurostream", "gguf"),
    Contestant("llama.cpp", "llama.cpp", "gguf")))
LONG = _by_name((
    _block("w4", "kv8", "zigzag"),
    Contestant("forebay w4 cache on disk", "forebay", "w4", {"cache_tier": "disk"}),
    *(Contestant(f"forebay w4 {share:.0%} of the blocks", "forebay", "w4", {"cache_tier": "disk", "kv_blocks": share})
      for share in (0.05, 0.1))))
# KV caches on the disk. Some stretches of tokens in each period are activation checkpoints instead.
CHECKPOINTS = _by_name(Contestant(f"forebay checkpoints {some}/{period}", options={
    "cache_tier": "disk", "checkpoints": (some, period)}) for some, period in ((0, 1), (1, 4), (1, 2), (1, 1)))
CONTESTANTS = BLOCKS | SHARES | EXPERTS | PEERS | GGUF | LONG | CHECKPOINTS


def empty_slots(lm: Any) -> int:
    """Return how many slots of an open model's pools hold no expert yet."""
    memory = lm.session.device.arenas["device"].bytes
    states = [(item.args[1].offset, item.args[3]) for item in lm.steps.program(1).step
              if isinstance(item, Launch) and item.op == ASSIGN_SLOTS.name]
    return sum(int((memory[at : at + slots * ITEMSIZE].view(torch.int64) == 0).sum()) for at, slots in states)


class Forebay:
    """Forebay on one checkpoint, planned for a cell; by `label` several plans are kept at once."""

    def __init__(self, order: Order) -> None:
        from forebay.open_model import open_model

        self.folder = order["path"]
        self.opened = open_model(self.folder)
        self.lm: Any = None  # whose turn it is
        self.models: dict[str, Any] = {}

    def plan(self, order: Order) -> Order:
        """Plan for a cell, within the budget or (`ram`) without one; what the plan is, or why there is none."""
        from forebay.rewriter.ir.plan import PlanError

        try:
            self.lm = self.models[order["label"]] = self._planned(order, order["batch"])
        except PlanError as error:
            return {"refused": str(error)}
        p, s, batching = self.lm.plan, self.lm.plan.schedule, self.lm.plan.schedule.batching
        read, written = moved_nbytes(self.lm)
        return {"order": batching.micro_batches.order, "micro_batches": batching.micro_batches.count,
                "cache": batching.cache.tier, "cache_tokens": batching.cache.block_tokens,
                "cache_slots": batching.cache.slots, "slots": s.slots, "slot_nbytes": s.slot_nbytes, "lead": s.lead,
                "prefill_chunk": s.prefill_chunk, "batch": p.workload.batch, "budget": p.budget.device,
                "planned_read_nbytes": read, "planned_written_nbytes": written, "held_nbytes": anonymous_nbytes(),
                "pool_slots": max(w.pool_slots for w in p.weights), "expected_hits": s.routed.hit_rate,
                "planned_peak_nbytes": p.prediction.peak_nbytes["device"], "bottleneck": p.prediction.bottleneck,
                "planned_step_s": p.prediction.decode_time_s, "planned_prefill_s": p.prediction.prefill_time_s,
                BUSY["pace"]: p.prediction.busy_time_s.get(COMPUTE, 0.0) / p.prediction.decode_time_s,
                BUSY["prefill_pace"]: p.prediction.prefill_busy_s / p.prediction.prefill_time_s}

    def _planned(self, order: Order, batch: int, **more: Any) -> Any:
        from forebay.language_model import LanguageModel
        from forebay.rewriter.ir.plan import Budget, Workload
        from forebay.rewriter.machine.profile import load_machine
        from forebay.rewriter.planning.options import Options

        options = order["options"] | more
        if "calibration" in options:
            options["expert_hits"] = expert_hits(Path(self.folder), order["budget"])
            del options["calibration"]

        def within(device: int) -> Any:
            return LanguageModel(*self.opened, Budget(device, disk=order["scratch"]),
                                 Workload(batch, order["prompt"], order["new"]), Options(**options),
                                 load_machine(order["machine"]))

        if order["share"] is not None:
            whole = within(UNLIMITED)
            weights = sum(weight.nbytes for weight in whole.plan.weights)
            return within(whole.steps.pipeline.smallest_budget() + weights * order["share"] // 100)
        return within(UNLIMITED if order["ram"] else order["budget"])

    def fits(self, order: Order) -> Order:
        """The largest batch within the budget with its cache on the device (at most `most`)."""
        from forebay.rewriter.ir.plan import PlanError

        def planned(batch: int) -> bool:
            with contextlib.suppress(PlanError):
                self._planned(order, batch, cache_tier="device")
                return True
            return False

        low, high = 0, 1  # planned, not planned yet
        while high <= order["most"] and planned(high):
            low, high = high, 2 * high
        high = min(high, order["most"] + 1)
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            low, high = (middle, high) if planned(middle) else (low, middle)
        return {"device": low}

    def steps(self, order: Order, tokens: int, at: int, count: int) -> list[float]:
        """Seconds of so many steps over `tokens` tokens, the first with `at` before it; one more, untimed, goes before
        them."""
        from forebay.runtime.run.sampling import Sampling, choose
        from forebay.runtime.run.step_inputs import StepInputs

        session, w = self.lm.session, self.lm.plan.workload
        generator = torch.Generator().manual_seed(1)
        if session.blocks is not None:
            session.blocks.stand_at(at)
        times = []
        for i in range(count + 1):
            ids = torch.randint(5, order["vocab"], (w.batch, tokens), generator=generator)
            inputs = StepInputs(ids, torch.full((w.batch,), at + (i if tokens == 1 else 0)),
                                torch.full((w.batch,), tokens - 1))
            if i and tokens > 1 and session.blocks is not None:
                session.blocks.stand_at(at)
            start = time.perf_counter()
            choose(session.step(inputs), Sampling(False, 1.0, 0, 1.0), None)
            times.append(time.perf_counter() - start)
        return times[1:]

    def sample(self, order: Order) -> Order:
        """The middle steps of an answer, and (`prefill`) the middle chunk of the prompt."""
        prompt, new, chunk = order["prompt"], order["new"], self.lm.plan.schedule.prefill_chunk
        if new_session := self.lm._session is None:
            for tokens in {1, chunk}:
                self.lm.session.bound(tokens)
            fill_cache(self.lm)
        found: Order = {}
        if order["prefill"]:
            middle = (prompt - chunk) // 2 // chunk * chunk
            found["prefill_s"] = -(-prompt // chunk) * min(self.steps(order, chunk, middle, 1))
        if new_session:
            self.lm.session.grow()
        count = min(order["steps"], new - 2)
        before = moved_so_far()
        found["steps_s"] = self.steps(order, 1, prompt + (new - count - 1) // 2, count)
        found["read_nbytes"], found["written_nbytes"] = (
            (b - a) / (count + 1) for a, b in zip(before, moved_so_far(), strict=True))
        return found

    def whole(self, order: Order) -> Order:
        """A whole answer through the public `generate`; its reads go past the page cache."""
        ids = peers.prompts(order)
        self.lm.session.bound(self.lm.plan.schedule.prefill_chunk)
        self.lm.generate(ids[:, :2], max_new_tokens=2, eos_token_id=None)
        how = {"do_sample": True, "top_k": 0} if order.get("draw") else {}
        filling = self.fill_pools(ids, order["new"], how) if order.get("warm") else None
        clock, before = StepClock(PageCache([self.folder])), moved_so_far()
        self.lm.generate(ids, max_new_tokens=order["new"], eos_token_id=None, on_token=clock.start(order["new"]), **how)
        read, written = (b - a for a, b in zip(before, moved_so_far(), strict=True))
        return peers.whole_answer(clock) | {"answer_read_nbytes": read, "answer_written_nbytes": written,
                                           "read_nbytes": read / order["new"], "filling": filling}

    def fill_pools(self, ids: torch.Tensor, new: int, how: Mapping[str, Any]) -> Order:
        """Answer until an expert lies in every slot, as reads into memory that nobody touched take longer; the tokens
        that this takes, and their seconds."""
        began, answers = time.perf_counter(), 0
        while empty_slots(self.lm) and answers < MOST_FILLING:
            self.lm.generate(ids, max_new_tokens=new, eos_token_id=None, **how)
            answers += 1
        return {"tokens": answers * new, "seconds": time.perf_counter() - began, "empty_slots": empty_slots(self.lm)}

    def turn(self, order: Order) -> Order:
        self.lm = self.models[order["label"]]
        return self.whole(order) if order["whole"] else self.sample(order)

    def rest(self, order: Order) -> Order:
        """Give the memory of the last turn back."""
        self.lm.close()
        gc.collect()
        return {}

    def predicted(self, order: Order) -> Order:
        """The decode step and the prefill of the last turn, at the rates that were found around it: each at the pace of
        products of about as many rows, as few are bound by memory and many by arithmetic."""
        from forebay.rewriter.predict.simulate import simulate

        p = self.lm.plan
        step, prompt = (at_pace(self.lm.machine, order["bytes_per_s"], order[pace]) for pace in PACES)
        chunk = p.schedule.prefill_chunk
        passes = -(-p.workload.prompt // chunk)
        program = self.lm.steps.program
        return {"predicted_step_s": simulate(program(1), step).time_s,
                "predicted_prefill_s": passes * simulate(program(chunk), prompt, min(3, passes)).time_s}

    def close(self, order: Order | None = None) -> Order:
        """Forget the plan of a label, and give its memory back."""
        if (lm := self.models.pop((order or {"label": ""})["label"], None)) is not None:
            lm.close()
        gc.collect()
        return {}


class LinkNow:
    """What the machine does just now: plain reads and products by the profile's engine, and plain writes."""

    def __init__(self, order: Order) -> None:
        pass

    def machine(self, order: Order) -> Order:
        from forebay.rewriter.machine.profile import save_machine
        from forebay.runtime.measure.machine import measure_machine

        save_machine(measure_machine(order["scratch"], quick=True), order["machine"])
        return {}

    def turn(self, order: Order) -> Order:
        from forebay.rewriter.machine.profile import load_machine

        machine, found, rates = load_machine(order["machine"]), Order(), list[float]()
        # of torch's products of many rows some take twice as long, where its threads meet on one core
        flat = "flat" if any((p.impl, p.dtype) == ("flat", order["dtype"]) for p in machine.gemm) else ""
        for pace, rows in PACES.items():
            probe = Probe(Path(order["folder"]), machine, order["dtype"], rows or order["rows"], flat if rows else "")
            with contextlib.closing(probe.reader):
                found[pace] = probe.pace(order.get(BUSY[pace], 1.0))
                rates.append(probe.bytes_per_s(0.15 if order["whole"] else READS_S))
        return found | {"bytes_per_s": harmonic_mean(rates),
                        "written_bytes_per_s": write_rate(order["scratch"], machine)}


def started(one: str, threads: int) -> IsolatedWorker:
    """The process of a contestant, of `link`, or of who is asked for what `fits`."""
    engine = CONTESTANTS[one].engine if one in CONTESTANTS else "forebay" if one == "fits" else one
    spins = LIBGOMP_SPINS if engine == "llama.cpp" else "0"
    return IsolatedWorker([sys.executable, "-m", "benchmarks.contestants", engine], env={
        **os.environ, "GOMP_SPINCOUNT": spins, "OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1"})


def answer(engine: str, held: list[Any], order: Order) -> Order:
    """What a process answers to an order: `load`, after which it is limited, comes first; peers are made when a turn
    needs them, and each once."""
    if order["do"] == "load":
        peers.import_library(engine)
        empty, baseline = peers.resident("VmRSS"), anonymous_nbytes()
        capped = order["capped"] and not order["ram"]
        limited = capped and enter_limit(order["budget"] + ROOM)
        kind = {"forebay": Forebay, "link": LinkNow}.get(engine) or functools.partial(peers.PeerEngine, engine)
        held[:] = [kind(order), empty]
        return {"baseline": baseline, "limited": limited}
    if order["do"] != "turn" or engine == "link":
        return getattr(held[0], order["do"])(order)
    if order["capped"] and not order["ram"] and Path(order["path"]).is_file():
        os.sync()
        drop_file(order["path"])  # pages that are there already are nobody's who maps them
    if isinstance(held[0], peers.PeerEngine):
        held[0].ready(order)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    with MemoryWatch(()) as watch:
        found = held[0].turn(order)
    return found | {"peak": watch.peak, "resident_nbytes": peers.resident("VmHWM") - held[1]}


def enter_limit(nbytes: int) -> bool:
    """From now on this process may take `nbytes` more than it has, pages of files included.

    Pages are dropped, and where that is not enough the process is killed. False where groups cannot be made here.
    """
    first = (GROUPS / "cgroup.controllers").exists()
    folder = (GROUPS if first else GROUPS / "memory") / f"forebay-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.max" if first else "memory.limit_in_bytes")).write_text(str(nbytes))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        return False
    return True


def group_peak(pid: int) -> int:
    """Most bytes that the control group of a process held, pages of files included; 0 outside of one."""
    for path in (GROUPS / f"forebay-{pid}/memory.peak", GROUPS / f"memory/forebay-{pid}/memory.max_usage_in_bytes"):
        if path.exists():
            return int(path.read_text())
    return 0


def remove_limits() -> None:
    """Take away the groups of processes that have ended."""
    for folder in (*GROUPS.glob("forebay-*"), *(GROUPS / "memory").glob("forebay-*")):
        if not (folder / "cgroup.procs").read_text():
            folder.rmdir()


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_grad_enabled(False)
    serve(functools.partial(answer, sys.argv[1], []), stalled_s=3600.0)


if __name__ == "__main__":
    main()
