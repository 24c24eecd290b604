"""What `benchmarks.disk_offload` compares, each in a process of its own: `python -m benchmarks.contestants NAME`.

Commands come as JSON lines on stdin, one answer per line goes to stdout; between commands the process is idle. All
contestants generate greedily from the same random prompts and are timed by the same `StepClock`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from forebay.commands.process_memory import anonymous_nbytes, disk_read_nbytes
from forebay.runtime.disk.page_cache import cached_nbytes, drop_file, resident_nbytes

MIB = 1 << 20
SAMPLE_S = 0.02
DROP_ALL = Path("/proc/sys/vm/drop_caches")
READ_NBYTES = 8 * MIB
# Plain reads to compare streaming with: (engine, chunks in flight, chunk nbytes).
ENGINES = (("direct", 2, 4 * MIB), ("uring", 4, 4 * MIB), ("uring", 4, 2 * MIB), ("buffered", 1, 4 * MIB))
GEMM_NK = (5632, 2048)
LAYER_CLASSES = ["LlamaDecoderLayer", "OPTDecoderLayer"]  # which no map of devices may split


OURS = ("forebay", "forebay-w4")  # the checkpoint as it is, and quantised to 4 bits in groups of 64


class PageCache:
    """The model's files in the page cache: how many bytes, and how to drop them."""

    def __init__(self, folders: list[str]) -> None:
        self.paths = [p for folder in folders for p in sorted(Path(folder).glob("*")) if p.suffix in (
            ".safetensors", ".dat")]
        self._fds = [os.open(p, os.O_RDONLY) for p in self.paths]
        os.pread(self._fds[0], mmap.PAGESIZE, 0)
        self._quick = cached_nbytes(self._fds[0]) > 0  # cachestat: Linux 6.5; else mincore, some 5 ms per 400 MB

    def nbytes(self) -> int:
        if self._quick:
            return sum(map(cached_nbytes, self._fds))
        return sum(map(resident_nbytes, self.paths))

    def drop(self) -> str:
        """Drop the files' pages; returns how."""
        try:
            DROP_ALL.write_text("1")
            return "drop_caches"
        except OSError:
            for path in self.paths:
                drop_file(path)
            return "fadvise"


class StepClock:
    """Times steps. Before each, outside its time, it counts the files' bytes in the page cache and, when `cold`, drops
    them if there are any."""

    def __init__(self, cache: PageCache, cold: bool) -> None:
        self.cache, self.cold = cache, cold
        self.times_s: list[float] = []
        self.tokens: list[list[int]] = []
        self.cached_peak = self.left_after_drop = 0
        self.dropped_by = "nothing was cached" if cold else "not dropped"
        self._start = 0.0

    def begin(self) -> None:
        cached = self.cache.nbytes()
        if self.times_s:
            self.cached_peak = max(self.cached_peak, cached)
        if self.cold and cached:
            self.dropped_by = self.cache.drop()
            self.left_after_drop = max(self.left_after_drop, self.cache.nbytes())
        self._start = time.perf_counter()

    def end(self, token: torch.Tensor) -> None:
        """`token` [B] is what the step chose."""
        self.times_s.append(time.perf_counter() - self._start)
        self.tokens.append(token.tolist())

    def start(self, tokens: int) -> Callable[[torch.Tensor], None]:
        """Begin the first of so many steps; what is to be called with the token of each begins the next."""
        left = tokens

        def on_token(token: torch.Tensor) -> None:
            nonlocal left
            self.end(token)
            left -= 1
            if left:
                self.begin()

        self.begin()
        return on_token


class TransformersPeer:
    """A transformers model in bf16: `disk-map` by device_map="auto", `accelerate` by load_checkpoint_and_dispatch, both
    with the memory limit and disk offload; `ram` wholly in memory."""

    def __init__(self, name: str, order: dict[str, Any]) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.folders = [order["model"]]
        make = transformers.AutoModelForCausalLM
        if name == "ram":
            self.model = make.from_pretrained(order["model"], dtype=torch.bfloat16)
            for value in self.model.parameters():  # else they are a map of the file, whose pages cannot be dropped
                value.data = value.data.clone()
        else:
            offload = str(Path(order["scratch"]) / name)
            limit = {"cpu": order["peer_budget"]}
            if name == "disk-map":
                self.model = make.from_pretrained(order["model"], dtype=torch.bfloat16, device_map="auto",
                                                  max_memory=limit, offload_folder=offload)
            else:
                import accelerate

                config = transformers.AutoConfig.from_pretrained(order["model"])
                with accelerate.init_empty_weights():
                    model = make.from_config(config, dtype=torch.bfloat16)
                places = accelerate.infer_auto_device_map(
                    model, max_memory=limit, no_split_module_classes=LAYER_CLASSES, dtype=torch.bfloat16)
                self.model = accelerate.load_checkpoint_and_dispatch(
                    model, order["model"], device_map=places, offload_folder=offload, dtype=torch.bfloat16)
            self.folders.append(offload)
        self.model.eval()

    def open(self, batch: int) -> dict[str, Any]:
        return {}

    def generate(self, ids: torch.Tensor, new_tokens: int, clock: StepClock) -> None:
        """A bare loop over the model's forward: what transformers' generate does beside it is not counted."""
        cache = None
        with torch.inference_mode():
            for _ in range(new_tokens):
                clock.begin()
                result = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                ids = result.logits[:, -1].argmax(-1, keepdim=True)
                cache = result.past_key_values
                clock.end(ids[:, 0])

    def close(self) -> None:
        gc.collect()


class Forebay:
    """`forebay.wrap` within the budget, one plan per batch; memory is given back between turns."""

    def __init__(self, order: dict[str, Any]) -> None:
        from forebay.api import wrap
        from forebay.rewriter.machine.profile import load_machine

        self.folders = [order["model"]]
        machine = load_machine(order["machine"])
        self.models = {batch: wrap(order["model"], {"device": order["budget"]}, batch=batch, prompt=order["prompt"],
                                   new_tokens=order["new"], machine=machine) for batch in order["batches"]}

    def open(self, batch: int) -> dict[str, Any]:
        self.lm = self.models[batch]
        chunk = self.lm.plan.schedule.prefill_chunk
        self.lm.session.bound(chunk)
        p = self.lm.plan
        return {"streamed_nbytes": p.prediction.streamed_nbytes, "planned_peak_nbytes": p.prediction.peak_nbytes,
                "predicted_step_s": p.prediction.decode_time_s, "slots": p.schedule.slots,
                "slot_nbytes": p.schedule.slot_nbytes, "prefill_chunk": chunk}

    def generate(self, ids: torch.Tensor, new_tokens: int, clock: StepClock) -> None:
        """Through the public `generate`; its reads bypass the page cache, so that there is nothing to drop."""
        self.lm.generate(ids, max_new_tokens=new_tokens, eos_token_id=None, on_token=clock.start(new_tokens))

    def close(self) -> None:
        self.lm.close()
        gc.collect()


class PeakWatch:
    """Samples this process's anonymous memory every 20 ms while it is entered."""

    def __enter__(self) -> PeakWatch:
        self.peak = anonymous_nbytes()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(SAMPLE_S):
            self.peak = max(self.peak, anonymous_nbytes())

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()


def run_turn(contestant: TransformersPeer | Forebay, cache: PageCache, order: dict[str, Any]) -> dict[str, Any]:
    """One turn: the page cache dropped, memory taken, an untimed warm-up of two steps (which, not cold, also leaves in
    the page cache what a contestant leaves there), then the measured answer."""
    batch, new, cold = order["batch"], order["new"], order["cold"]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, order["vocab"], (batch, order["prompt"]), generator=generator)
    clock = StepClock(cache, cold)
    cache.drop()
    with PeakWatch() as watch:
        facts = contestant.open(batch)
        contestant.generate(ids[:, :2], 2, StepClock(cache, cold))
        before = disk_read_nbytes()
        contestant.generate(ids, new, clock)
        read = disk_read_nbytes() - before
    contestant.close()
    return facts | {
        "prefill_s": clock.times_s[0], "steps_s": clock.times_s[1:], "tokens": clock.tokens, "peak": watch.peak,
        "cached_peak": clock.cached_peak, "left_after_drop": clock.left_after_drop, "dropped_by": clock.dropped_by,
        "disk_read_nbytes": read}


@contextlib.contextmanager
def _touched_buffer(nbytes: int) -> Iterator[tuple[memoryview, int]]:
    memory = mmap.mmap(-1, nbytes)
    for page in range(0, nbytes, mmap.PAGESIZE):
        memory[page] = 1
    yield memoryview(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory))


def read_rates(path: str, cache: PageCache) -> dict[str, float]:
    """Bytes per second of one cold read of the whole file, by each engine and by a bare loop of preadv."""
    from forebay.runtime.disk.reader import Read, available_kinds, open_reader

    nbytes = os.path.getsize(path)
    spans = [(at, min(READ_NBYTES, nbytes - at)) for at in range(0, nbytes, READ_NBYTES)]
    rates = {}
    with _touched_buffer(8 * READ_NBYTES) as (view, address):
        for kind, depth, chunk in ENGINES:
            if kind not in available_kinds():
                continue
            with contextlib.closing(open_reader(kind, depth, chunk)) as reader:
                cache.drop()
                landed, errors = threading.Semaphore(0), list[BaseException]()

                def on_done(error: BaseException | None, landed: threading.Semaphore = landed,
                            errors: list[BaseException] = errors) -> None:
                    errors.extend([error] if error else [])
                    landed.release()

                start = time.perf_counter()
                for i, (at, size) in enumerate(spans):
                    reader.submit(Read(path, at, size, address + i % 8 * READ_NBYTES, 0, 0, on_done))
                for _ in spans:
                    landed.acquire()
                rates[f"{kind} {depth} x {chunk / MIB:g} MiB"] = nbytes / (time.perf_counter() - start)
                if errors:
                    raise errors[0]
        cache.drop()
        fd = os.open(path, os.O_RDONLY)
        start = time.perf_counter()
        done = 0
        while done < nbytes:
            done += os.preadv(fd, [view[: 4 * MIB]], done)
        rates["plain buffered loop"] = nbytes / (time.perf_counter() - start)
        os.close(fd)
        cache.drop()
    return rates


def compute_rates(batch: int) -> dict[str, Any]:
    """Memory bandwidth by a sum over 256 MiB, and bf16 products [batch, k] x [n, k]^T on weights outside the caches,
    by every implementation there is, in seconds."""
    from forebay.kernels.products.linear import cpu as linear

    values = torch.ones(64 * MIB, dtype=torch.float32)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        values.sum()
        times.append(time.perf_counter() - start)
    n, k = GEMM_NK
    gemm = {impl: linear.measure(impl, torch.bfloat16, batch, n, k, 3)
            for impl in linear.implementations(torch.bfloat16)}
    return {"memory_bytes_per_s": values.nbytes / min(times), "gemm_s": gemm}


class DecodeWorker:
    """Answers commands for one contestant."""

    def __init__(self, name: str) -> None:
        self.name = name
        if name != "link":
            import transformers.models.llama.modeling_llama  # noqa: F401
        if name == "accelerate":
            import accelerate  # noqa: F401
        if name in OURS:
            import forebay.api  # noqa: F401
        self.baseline = anonymous_nbytes()

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        with PeakWatch() as watch:
            self.contestant = Forebay(order) if self.name in OURS else TransformersPeer(self.name, order)
            gc.collect()
        self.cache = PageCache(self.contestant.folders)
        return {"load_s": time.perf_counter() - start, "baseline": self.baseline, "load_peak": watch.peak,
                "loaded": anonymous_nbytes()}

    def turn(self, order: dict[str, Any]) -> dict[str, Any]:
        return run_turn(self.contestant, self.cache, order)

    def machine(self, order: dict[str, Any]) -> dict[str, Any]:
        from forebay.rewriter.machine.profile import save_machine
        from forebay.runtime.measure.machine import measure_machine

        save_machine(measure_machine(order["model"], quick=True), order["machine"])
        return {}

    def ceilings(self, order: dict[str, Any]) -> dict[str, Any]:
        cache = PageCache([order["model"]])
        path = max(cache.paths, key=os.path.getsize)
        return {"read": read_rates(str(path), cache), **compute_rates(order["batch"])}


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)  # libraries may print; the answers stay alone on the pipe
    os.dup2(2, 1)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_grad_enabled(False)
    worker = DecodeWorker(sys.argv[1])
    commands: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "load": worker.load, "turn": worker.turn, "machine": worker.machine, "ceilings": worker.ceilings}
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(commands[order["do"]](order)), file=out)


if __name__ == "__main__":
    main()
