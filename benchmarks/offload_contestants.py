"""Who takes part in `benchmarks.offload`, each in a process of its own.

A contestant either runs a whole answer, or samples it: the time of a step is linear in how many tokens stand before it,
so that of a step in the middle of the answer is the mean of all, and so it is with the chunks of a prompt. What stands
before a sampled step is a cache of as many tokens that nobody computed; its bytes are really there, in memory or on the
disk.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import torch

from benchmarks.page_cache import PageCache, PeakWatch, StepClock
from benchmarks.planned_bytes import moved_nbytes
from benchmarks.probes import Probe, at_pace, fill_cache, moved_so_far, write_rate
from forebay.commands.process_memory import anonymous_nbytes
from forebay.runtime.run.arena import return_freed_memory

UNLIMITED = 1 << 40
PACES = {"pace": None, "prefill_pace": 256}  # of products of so many rows (None: of those of a step)
READS_S = 0.8  # of plain reads at each pace, beside steps of a second or two; less beside whole answers
RATES = ("bytes_per_s", *PACES)
OFFLOADED = ("disk-map", "accelerate")
IN_RAM = "transformers in RAM"
PEERS = (*OFFLOADED, IN_RAM)
LAYER_CLASSES = ["LlamaDecoderLayer", "OPTDecoderLayer"]  # which no map of devices may split
Order = dict[str, Any]


@dataclass(frozen=True)
class Contestant:
    """One of ours: the weights as they are (`bf16`) or `w4`, the format of its cache, the order of its block.

    `ram` has no budget. With `checkpoints` they are kept of such a share of the tokens (0/1: of none) instead of the
    planner's, all on the disk. `share` in percent: the budget is so much of the weights beside the smallest plan.
    """

    weights: str = "bf16"
    cache_format: str = "native"
    order: str = "zigzag"
    ram: bool = False
    checkpoints: tuple[int, int] | None = None
    share: int | None = None

    @property
    def formats(self) -> str:
        return self.weights + ("" if self.cache_format == "native" else f"+{self.cache_format}")

    @property
    def name(self) -> str:
        if self.share is not None:
            return f"forebay within {self.share} %"
        kept = "" if self.checkpoints is None else " checkpoints {}/{}".format(*self.checkpoints)
        return f"ram {self.formats}" if self.ram else f"forebay {self.formats} {self.order}{kept}"


def _by_name(contestants: Iterable[Contestant]) -> dict[str, Contestant]:
    return {one.name: one for one in contestants}


FORMATS = (("bf16", "native"), ("w4", "native"), ("w4", "kv4"))
BLOCKS = _by_name((*(Contestant(w, cache, order) for w, cache in FORMATS for order in ("zigzag", "row")),
                   *(Contestant(w, cache, ram=True) for w, cache in FORMATS)))
CHECKPOINTS = _by_name(Contestant(checkpoints=share) for share in ((0, 1), (1, 4), (1, 2), (1, 1)))
SHARES = _by_name(Contestant(share=share) for share in (100, 75, 50, 30, 15))
FOREBAY = BLOCKS | CHECKPOINTS | SHARES


class ForebayInCells:
    """Forebay on one checkpoint, planned for a cell; with `label` several plans are kept at once."""

    def __init__(self, name: str, order: Order) -> None:
        from forebay.open_model import open_model

        self.folder = order["model"]
        self.opened = open_model(self.folder)
        self.lm: Any = None  # whose turn it is
        self.models: dict[str, Any] = {}

    def plan(self, order: Order) -> Order:
        """Plan for a cell, within the budget or (`ram`) without one; what the plan is, or why there is none."""
        from forebay.rewriter.ir.plan import PlanError

        try:
            self.lm = self.models[order.get("label", "")] = self._planned(order, order["batch"])
        except PlanError as error:
            if "forced" not in order:
                raise
            return {"refused": str(error)}
        p, s = self.lm.plan, self.lm.plan.schedule
        read, written = moved_nbytes(self.lm, 1)
        return {"order": s.batching.micro_batches.order, "micro_batches": s.batching.micro_batches.count,
                "cache": s.batching.cache.tier,
                "cache_tokens": s.batching.cache.block_tokens, "cache_slots": s.batching.cache.slots, "slots": s.slots,
                "slot_nbytes": s.slot_nbytes, "lead": s.lead, "prefill_chunk": s.prefill_chunk,
                "batch": p.workload.batch, "budget": p.budget.device, "planned_read_nbytes": read,
                "planned_written_nbytes": written, "planned_peak_nbytes": p.prediction.peak_nbytes["device"],
                "held_nbytes": anonymous_nbytes(), "planned_step_s": p.prediction.decode_time_s,
                "planned_prefill_s": p.prediction.prefill_time_s, "bottleneck": p.prediction.bottleneck}

    def _planned(self, order: Order, batch: int, **options: Any) -> Any:
        from forebay.language_model import LanguageModel
        from forebay.rewriter.ir.plan import Budget, Workload
        from forebay.rewriter.machine.profile import load_machine
        from forebay.rewriter.planning.options import Options

        share, kept = order.get("share"), order.get("checkpoints")
        if kept is not None:
            options |= {"checkpoints": tuple(kept), "cache_tier": "disk"}
        forced = {"cache": order["cache_format"], "order": order["order"], **order.get("forced", {}), **options}

        def within(device: int) -> Any:
            return LanguageModel(*self.opened, Budget(device, disk=order["scratch"]),
                                 Workload(batch, order["prompt"], order["new"]), Options(**forced),
                                 load_machine(order["machine"]))

        if share is not None:
            whole = within(UNLIMITED)
            weights = sum(weight.nbytes for weight in whole.plan.weights)
            return within(whole.steps.pipeline.smallest_budget() + weights * share // 100)
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
        ids = prompts(order)
        self.lm.session.bound(self.lm.plan.schedule.prefill_chunk)
        self.lm.generate(ids[:, :2], max_new_tokens=2, eos_token_id=None)
        clock, before = StepClock(PageCache([self.folder])), moved_so_far()
        self.lm.generate(ids, max_new_tokens=order["new"], eos_token_id=None, on_token=clock.start(order["new"]))
        read, written = (b - a for a, b in zip(before, moved_so_far(), strict=True))
        return whole_answer(clock) | {"answer_read_nbytes": read, "answer_written_nbytes": written}

    def turn(self, order: Order) -> Order:
        """A turn; with `once` memory is given back after it."""
        self.lm = self.models[order.get("label", "")]
        with PeakWatch() as watch:
            found = self.whole(order) if order["whole"] else self.sample(order)
        if order.get("once"):
            self.lm.close()
            gc.collect()
        return found | {"peak": watch.peak}

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

    def close(self, label: str = "") -> None:
        """Forget a plan, and give its memory back."""
        if (lm := self.models.pop(label, None)) is not None:
            lm.close()
        gc.collect()


class TransformersPeer:
    """A transformers model in bf16: `disk-map` by device_map="auto", `accelerate` by load_checkpoint_and_dispatch, both
    with the memory limit and disk offload; or wholly in memory. The page cache is dropped before every step."""

    def __init__(self, name: str, order: Order) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        make, folder = transformers.AutoModelForCausalLM, order["model"]
        self.folders = [folder]
        if name == IN_RAM:
            self.model = make.from_pretrained(folder, dtype=torch.bfloat16)
            for value in self.model.parameters():  # else they are a map of the file, whose pages cannot be dropped
                value.data = value.data.clone()
        else:
            offload, limit = str(Path(order["scratch"]) / f"{name}-offload"), {"cpu": order["budget"]}
            if name == "disk-map":
                self.model = make.from_pretrained(folder, dtype=torch.bfloat16, device_map="auto", max_memory=limit,
                                                  offload_folder=offload)
            else:
                import accelerate

                config = transformers.AutoConfig.from_pretrained(folder)
                with accelerate.init_empty_weights():
                    model = make.from_config(config, dtype=torch.bfloat16)
                places = accelerate.infer_auto_device_map(
                    model, max_memory=limit, no_split_module_classes=LAYER_CLASSES, dtype=torch.bfloat16)
                self.model = accelerate.load_checkpoint_and_dispatch(
                    model, folder, device_map=places, offload_folder=offload, dtype=torch.bfloat16)
            self.folders.append(offload)
        self.model.eval()

    def plan(self, order: Order) -> Order:
        return {"batch": order["batch"]}

    def turn(self, order: Order) -> Order:
        ids, cache = prompts(order), PageCache(self.folders)
        clock = StepClock(cache)
        with PeakWatch() as watch, torch.inference_mode(), contextlib.closing(cache):
            if order["whole"]:
                cache.drop()
                self.generate(ids[:, :2], 2, StepClock(cache))  # what it leaves in the page cache is there from now on
                self.generate(ids, order["new"], clock)
                times = whole_answer(clock)
            else:
                count = min(order["steps"], order["new"] - 2)
                at = order["prompt"] + (order["new"] - count - 1) // 2
                self.generate(ids[:, :1], count + 1, clock, self.made_cache(order["batch"], at))
                times = {"steps_s": clock.times_s[1:], "cached_peak": clock.cached_peak}
        gc.collect()
        return times | {"peak": watch.peak}

    def generate(self, ids: torch.Tensor, new_tokens: int, clock: StepClock, cache: Any = None) -> None:
        """A bare loop over the model's forward: what transformers' generate does beside it is not counted."""
        for _ in range(new_tokens):
            clock.begin()
            result = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = result.logits[:, -1].argmax(-1, keepdim=True)
            cache = result.past_key_values
            clock.end(ids[:, 0])

    def made_cache(self, batch: int, tokens: int) -> Any:
        import transformers

        config = self.model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        cache = transformers.DynamicCache()
        for layer in range(config.num_hidden_layers):
            side = torch.full((batch, heads, tokens, config.hidden_size // config.num_attention_heads), 0.01,
                              dtype=torch.bfloat16)
            cache.update(side, side.clone(), layer)
        return cache

    def close(self, label: str) -> None:
        gc.collect()


class LinkNow:
    """What the machine does just now: plain reads and products by the profile's engine, and plain writes."""

    def __init__(self, name: str, order: Order) -> None:
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
            probe = Probe(Path(order["model"]), machine, order["dtype"], rows or order["rows"], flat if rows else "")
            with contextlib.closing(probe.reader):
                found[pace] = probe.pace()
                rates.append(probe.bytes_per_s(0.15 if order["whole"] else READS_S))
        return found | {"bytes_per_s": harmonic_mean(rates),
                        "written_bytes_per_s": write_rate(order["scratch"], machine)}


def whole_answer(clock: StepClock) -> Order:
    return {"prefill_s": clock.times_s[0], "steps_s": clock.times_s[1:], "steady_s": clock.times_s[2:],
            "tokens": clock.tokens, "cached_peak": clock.cached_peak, "left_after_drop": clock.left_after_drop}


def around(before: Order, after: Order) -> Order:
    """What the machine did around a turn, from what it did before and after it."""
    return {key: (before[key] + after[key]) / 2 for key in before}


def prompts(order: Order) -> torch.Tensor:
    """The same random prompts [B, T] for everyone."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(5, order["vocab"], (order["batch"], order["prompt"]), generator=generator)


def settings(name: str) -> Order:
    """What a contestant is planned with."""
    return asdict(FOREBAY.get(name, Contestant()))


def worker(name: str) -> Callable[[Order], Order]:
    """Answers commands for one contestant; `load` takes a model in the place of the last."""
    make = LinkNow if name == "link" else TransformersPeer if name in PEERS else ForebayInCells
    held: list[Any] = []

    def answer(order: Order) -> Order:
        if order["do"] != "load":
            return getattr(held[0], order["do"])(order) if order["do"] != "close" else held[0].close(order["label"])
        held.clear()
        gc.collect()
        return_freed_memory()
        baseline = anonymous_nbytes()
        held.append(make(name, order))
        return {"baseline": baseline}

    return answer


def import_libraries(names: Iterable[str]) -> None:
    """What these contestants use, so that processes forked afterwards have it."""
    import forebay.api
    import forebay.runtime.measure.machine  # noqa: F401

    if set(names) & set(PEERS):
        import accelerate  # noqa: F401
        import transformers.models.llama.modeling_llama
        import transformers.models.opt.modeling_opt  # noqa: F401
