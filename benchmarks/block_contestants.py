"""What `benchmarks.throughput` compares, each in a process of its own.

A contestant either runs a whole answer, or
samples it: the time of a step is linear in how many tokens stand before it, so that of a step in the middle of the
answer is the mean of all, and so it is with the chunks of a prompt. What stands before a sampled step is a cache of as
many tokens that nobody computed; its bytes are really there, in memory or on the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import torch

from benchmarks.contestants import PageCache, PeakWatch, StepClock, TransformersPeer
from benchmarks.planned_bytes import moved_nbytes
from benchmarks.throughput_cells import PEERS
from forebay.commands.process_memory import anonymous_nbytes
from forebay.runtime.run.arena import return_freed_memory

MIB = 1 << 20
FILL = 0x11  # in bf16 and fp16 a small number, in packed rows code 1 of small scales; nothing is subnormal
UNLIMITED = 1 << 40
PACES = {"pace": None, "prefill_pace": 256}  # of products of so many rows (None: of those of a step)
READS_S = 0.8  # of plain reads at each pace, beside steps of a second or two; less beside the answers of --quick
RATES = ("bytes_per_s", *PACES)
Order = dict[str, Any]


class Ours:
    """Forebay on one checkpoint, planned for a cell; with `label` several plans are kept at once."""

    def __init__(self, order: Order) -> None:
        from forebay.open_model import open_model

        self.folder = order["model"]
        self.opened = open_model(self.folder)
        self.lm: Any = None  # whose turn it is
        self.models: dict[str, Any] = {}

    def plan(self, order: Order) -> dict[str, Any]:
        """Plan for a cell, with the whole budget or (`ram`) without one; what the plan is, or why there is none."""
        from forebay.rewriter.ir.plan import PlanError

        try:
            self.lm = self.models[order.get("label", "")] = self._planned(order, order["batch"])
        except PlanError as error:
            if "forced" not in order:
                raise
            return {"refused": str(error)}
        p, s = self.lm.plan, self.lm.plan.schedule
        read, written = moved_nbytes(self.lm, 1)
        return {"order": s.block.order, "micro_batches": s.block.micro_batches, "cache": s.block.cache,
                "cache_tokens": s.block.cache_tokens, "cache_slots": s.block.cache_slots, "slots": s.slots,
                "slot_nbytes": s.slot_nbytes, "prefill_chunk": s.prefill_chunk, "batch": p.workload.batch,
                "planned_read_nbytes": read, "planned_written_nbytes": written,
                "planned_peak_nbytes": p.prediction.peak_nbytes["device"], "held_nbytes": anonymous_nbytes(),
                "predicted_step_s": p.prediction.decode_time_s, "predicted_prefill_s": p.prediction.prefill_time_s}

    def _planned(self, order: Order, batch: int, **options: Any) -> Any:
        from forebay.language_model import LanguageModel
        from forebay.rewriter.ir.plan import Budget, Workload
        from forebay.rewriter.machine.profile import load_machine
        from forebay.rewriter.planning.options import Options

        budget = Budget(UNLIMITED if order["ram"] else order["budget"], disk=order["scratch"])
        share = order.get("checkpoints")
        hybrid = {} if share is None else {"checkpoints": tuple(share), "cache_tier": "disk"}
        forced = {"cache": order["cache_format"], "order": order["order"], **hybrid, **order.get("forced", {}),
                  **options}
        return LanguageModel(*self.opened, budget, Workload(batch, order["prompt"], order["new"]), Options(**forced),
                             load_machine(order["machine"]))

    def fits(self, order: Order) -> dict[str, Any]:
        """The largest batch within the budget with its cache on the device, and on any tier (at most `most`)."""
        from forebay.rewriter.ir.plan import PlanError

        def largest(most: int, **options: Any) -> int:
            low, high = 0, 1  # planned, not planned yet
            while high <= most:
                try:
                    self._planned(order, high, **options)
                except PlanError:
                    break
                low, high = high, 2 * high
            high = min(high, most + 1)
            while high - low > max(1, low // 16):
                middle = (low + high) // 2
                try:
                    self._planned(order, middle, **options)
                    low = middle
                except PlanError:
                    high = middle
            return low

        return {"device": largest(order["most"], cache_tier="device")}

    def open(self) -> None:
        """Take memory and files, and fill the cache."""
        session, self.grown = self.lm.session, False
        for tokens in {1, self.lm.plan.schedule.prefill_chunk}:
            session.bound(tokens)
        fill_cache(self.lm)

    def steps(self, order: Order, tokens: int, at: int, count: int) -> list[float]:
        """Seconds of so many steps over `tokens` tokens, the first with `at` before it; one more, untimed, goes before
        them."""
        from forebay.runtime.run.sampling import Sampling, choose
        from forebay.runtime.run.step_inputs import StepInputs

        session, w = self.lm.session, self.lm.plan.workload
        generator = torch.Generator().manual_seed(1)
        if session._blocks is not None:
            session._blocks.stand_at(at)
        times = []
        for i in range(count + 1):
            ids = torch.randint(5, order["vocab"], (w.batch, tokens), generator=generator)
            inputs = StepInputs(ids, torch.full((w.batch,), at + (i if tokens == 1 else 0)),
                                torch.full((w.batch,), tokens - 1))
            if i and tokens > 1 and session._blocks is not None:
                session._blocks.stand_at(at)
            start = time.perf_counter()
            choose(session.step(inputs), Sampling(False, 1.0, 0, 1.0), None)
            times.append(time.perf_counter() - start)
        return times[1:]

    def sample(self, order: Order) -> dict[str, Any]:
        """The middle steps of an answer, and (`prefill`) the middle chunk of the prompt."""
        prompt, new, chunk = order["prompt"], order["new"], self.lm.plan.schedule.prefill_chunk
        found: dict[str, Any] = {}
        if order["prefill"]:
            middle = (prompt - chunk) // 2 // chunk * chunk
            chunk_s = min(self.steps(order, chunk, middle, 1))
            found["prefill_s"] = -(-prompt // chunk) * chunk_s
        if not self.grown:
            self.lm.session.grow()
            self.grown = True
        count = min(order["steps"], new - 2)
        before = moved_so_far()
        found["steps_s"] = self.steps(order, 1, prompt + (new - count - 1) // 2, count)
        found["read_nbytes"], found["written_nbytes"] = (
            (b - a) / (count + 1) for a, b in zip(before, moved_so_far(), strict=True))
        return found

    def whole(self, order: Order, clock: StepClock) -> dict[str, Any]:
        """A whole answer through the public `generate`."""
        ids = prompts(order)
        self.lm.generate(ids[:, :2], max_new_tokens=2, eos_token_id=None)
        before = moved_so_far()
        self.lm.generate(ids, max_new_tokens=order["new"], eos_token_id=None, on_token=clock.start(order["new"]))
        read, written = (b - a for a, b in zip(before, moved_so_far(), strict=True))
        return {"prefill_s": clock.times_s[0], "steps_s": clock.times_s[1:], "steady_s": clock.times_s[2:],
                "tokens": clock.tokens, "answer_read_nbytes": read, "answer_written_nbytes": written}

    def turn(self, order: Order) -> dict[str, Any]:
        """A turn; with `once` memory is given back behind it."""
        self.lm = self.models[order.get("label", "")]
        with PeakWatch() as watch:
            if order["whole"]:
                found = self.whole(order, StepClock(PageCache([self.folder]), False))
            else:
                if self.lm._session is None:
                    self.open()
                found = self.sample(order)
        if order.get("once"):
            self.lm.close()
            gc.collect()
        return found | {"peak": watch.peak}

    def predicted(self, order: Order) -> dict[str, Any]:
        """The decode step and the prefill of the last turn, at the rates that were found around it: each at the pace of
        products of about as many rows, as few are bound by memory and many by arithmetic."""
        from benchmarks.prediction import at_pace
        from forebay.rewriter.predict.simulate import simulate

        p = self.lm.plan
        step, prompt = (at_pace(self.lm.machine, order["bytes_per_s"], order[pace]) for pace in PACES)
        chunk = p.schedule.prefill_chunk
        passes = -(-p.workload.prompt // chunk)
        program = self.lm._pipeline.program
        return {"predicted_step_s": simulate(program(p, 1), step).time_s,
                "predicted_prefill_s": passes * simulate(program(p, chunk), prompt, min(3, passes)).time_s}

    def close(self, label: str = "") -> None:
        """Forget a plan, and give its memory back."""
        lm = self.models.pop(label, None)
        if lm is not None:
            lm.close()
        gc.collect()


def around(before: Order, after: Order) -> Order:
    """What the machine did around a turn, from what it did before and after it."""
    return {key: (before[key] + after[key]) / 2 for key in before}


class Others:
    """A transformers model: see `contestants.TransformersPeer`."""

    def __init__(self, name: str, order: Order) -> None:
        self.peer = TransformersPeer(name, order)

    def plan(self, order: Order) -> dict[str, Any]:
        return {"batch": order["batch"]}

    def turn(self, order: Order) -> dict[str, Any]:
        """Cold: the page cache is dropped before every step, outside its time."""
        cache = PageCache(self.peer.folders)
        clock = StepClock(cache, True)
        ids = prompts(order)
        with PeakWatch() as watch:
            if order["whole"]:
                self.peer.generate(ids[:, :2], 2, StepClock(cache, True))
                self.peer.generate(ids, order["new"], clock)
                times = {"prefill_s": clock.times_s[0], "steps_s": clock.times_s[1:], "tokens": clock.tokens}
            else:
                times = {"steps_s": self._sampled(order, ids, clock)}
        gc.collect()
        return times | {"peak": watch.peak, "cached_peak": clock.cached_peak}

    def _sampled(self, order: Order, ids: torch.Tensor, clock: StepClock) -> list[float]:
        import transformers

        config, count = self.peer.model.config, min(order["steps"], order["new"] - 2)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = config.hidden_size // config.num_attention_heads
        at = order["prompt"] + (order["new"] - count - 1) // 2
        cache = transformers.DynamicCache()
        for layer in range(config.num_hidden_layers):
            side = torch.full((order["batch"], heads, at, width), 0.01, dtype=torch.bfloat16)
            cache.update(side, side.clone(), layer)
        token = ids[:, :1]
        with torch.inference_mode():
            for _ in range(count + 1):
                clock.begin()
                result = self.peer.model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
                token = result.logits[:, -1].argmax(-1, keepdim=True)
                clock.end(token[:, 0])
        return clock.times_s[1:]

    def close(self, label: str) -> None:
        gc.collect()


class LinkNow:
    """What the machine does just now: plain reads and products by the profile's engine, and plain writes."""

    def __init__(self, order: Order) -> None:
        self.order = order

    def machine(self, order: Order) -> dict[str, Any]:
        from forebay.rewriter.machine.profile import save_machine
        from forebay.runtime.measure.machine import measure_machine

        save_machine(measure_machine(order["scratch"], quick=True), order["machine"])
        return {}

    def turn(self, order: Order) -> dict[str, Any]:
        from benchmarks.prediction import Probe
        from forebay.rewriter.machine.profile import load_machine

        machine, found, rates = load_machine(order["machine"]), dict[str, Any](), list[float]()
        least_s = 0.15 if order["whole"] else READS_S
        for pace, rows in PACES.items():
            # of torch's products of many rows some take twice as long, where its threads meet on one core
            probe = Probe(Path(order["model"]), machine, "bfloat16", rows or order["rows"], "flat" if rows else "")
            with contextlib.closing(probe.reader):
                found[pace] = probe.pace()
                rates.append(probe.bytes_per_s(least_s))
        return found | {"bytes_per_s": harmonic_mean(rates),
                        "written_bytes_per_s": write_rate(order["scratch"], machine)}


def prompts(order: Order) -> torch.Tensor:
    """The same random prompts [B, T] for everyone."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(5, order["vocab"], (order["batch"], order["prompt"]), generator=generator)


def moved_so_far() -> tuple[int, int]:
    """Bytes that this process has read from and written to storage."""
    found = dict(line.split(":") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["read_bytes"]), int(found["write_bytes"])


def fill_cache(lm: Any) -> None:
    """Write every byte of the cache, on the device and in its spill file: space that was never written is read from no
    disk, and memory that was never touched from one page."""
    device = lm.session.device
    for b in lm.plan.buffers:
        if b.kind == "cache" and b.arena in device.arenas:
            device.arenas[b.arena].bytes[b.offset : b.offset + b.nbytes].fill_(FILL)
    if lm.plan.schedule.block.cache == "disk":
        file = device.spill["cache"]
        with filled_pages(8 * MIB) as block:
            for at in range(0, file.nbytes, len(block)):
                os.pwritev(file.fd, [block[: min(len(block), file.nbytes - at)]], at)


def write_rate(folder: str, machine: Any) -> float:
    """Bytes per second of plain writes to a spill file by the profile's engine."""
    from forebay.runtime.disk.chunks import Write
    from forebay.runtime.disk.reader import KINDS, open_writer
    from forebay.runtime.disk.spill_file import SpillFile
    from forebay.runtime.run.arena import Arena

    link, memory, size = machine.link("device", "disk"), Arena(64 * MIB), 4 * MIB
    memory.bytes.fill_(FILL)
    landed, errors = threading.Semaphore(0), list[BaseException]()

    def on_done(error: BaseException | None) -> None:
        errors.extend([error] if error else [])
        landed.release()

    engine = link.method if link.method in KINDS else "auto", link.depth or None, link.chunk_nbytes or None
    with contextlib.closing(SpillFile("probe", folder, memory.nbytes)) as file, contextlib.closing(
            open_writer(*engine)) as writer:
        times = []
        for _ in range(3):  # the first finds space that was only promised, which is slower to write
            start = time.perf_counter()
            for at in range(0, memory.nbytes, size):
                writer.write(file, Write(at, size, ((memory.address + at, size),), on_done))
            for _ in range(0, memory.nbytes, size):
                landed.acquire()
            times.append(time.perf_counter() - start)
    if errors:
        raise errors[0]
    return memory.nbytes / min(times[1:])


@contextlib.contextmanager
def filled_pages(nbytes: int) -> Iterator[memoryview]:
    memory = mmap.mmap(-1, nbytes)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), FILL, nbytes)
    yield memoryview(memory)


class BlockWorker:
    """Answers commands for one contestant."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.contestant: Any = None

    def load(self, order: Order) -> dict[str, Any]:
        """Take a model in the place of the last; what the process holds before it."""
        self.contestant = None
        gc.collect()
        return_freed_memory()
        baseline = anonymous_nbytes()
        self.contestant = (LinkNow(order) if self.name == "link" else Others(self.name, order) if self.name in PEERS
                           else Ours(order))
        return {"baseline": baseline}

    def answer(self, order: Order) -> dict[str, Any]:
        if order["do"] == "load":
            return self.load(order)
        if order["do"] == "close":
            self.contestant.close(order["label"])
            return {}
        return getattr(self.contestant, order["do"])(order)


def block_worker(name: str) -> Callable[[Order], dict[str, Any]]:
    return BlockWorker(name).answer


def import_libraries(names: Sequence[str]) -> None:
    """What these contestants use, so that processes forked afterwards have it."""
    import forebay.api
    import forebay.open_model
    import forebay.runtime.measure.machine  # noqa: F401

    if set(names) & set(PEERS):
        import accelerate  # noqa: F401
        import transformers.models.llama.modeling_llama
        import transformers.models.opt.modeling_opt  # noqa: F401
