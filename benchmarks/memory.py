"""Peak memory of a step: planned, measured, and that of eager and Inductor: `python -m benchmarks.memory`.

Beside weights and cache, which all have alike (transformers' StaticCache, fp32, only the last position's logits): what
a prefill in one pass and a decode step take. Ours is measured twice over: the bytes of the arena that a step writes
beside weights and cache, and the peak of what torch's allocator gives out meanwhile. Eager and Inductor: the peak of
what the allocator gives out, from torch's profiler.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.language_model import LanguageModel
from forebay.open_model import open_model
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.options import Options
from forebay.rewriter.report.explain import lasting, phases

PATTERN = 0xA5
SHAPES: dict[str, dict[str, Any]] = {
    "llama": dict(hidden_size=512, intermediate_size=1792, num_hidden_layers=4, num_attention_heads=8,
                  num_key_value_heads=2, vocab_size=4096),
    "qwen2": dict(hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
                  num_key_value_heads=8, vocab_size=4096),
}


@dataclass(frozen=True)
class Peak:
    """Bytes of one step beside weights and cache; `resident` is those of weights, constants and cache."""

    model: str
    step: str
    resident: int
    planned: int
    measured: int
    eager: int
    inductor: int | None

    @property
    def error(self) -> float:
        """Of everything together, as the plan says it and as it was measured."""
        return (self.resident + self.measured) / (self.resident + self.planned) - 1


def allocated(call: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator holds at once for `call`, above those before it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        result = call()
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del result
    return peak


def ours(lm: LanguageModel, tokens: int) -> tuple[int, int, int]:
    """Bytes of one step: resident; planned beside them; measured beside them."""
    plan, workload = lm.plan, lm.plan.workload
    session = lm.session
    bound = session.bound(tokens)
    phase = "decode" if tokens == 1 else "prefill"
    top = plan.arenas["device"]
    floor = max(b.offset + b.nbytes for b in lasting(plan, "device", phase))
    height = top - min(b.offset for b in phases(plan)[phase])
    memory = session.device.arenas["device"].bytes  # type: ignore[attr-defined]
    memory[floor:].fill_(PATTERN)
    start = 0 if tokens > 1 else workload.prompt
    inputs = {"input_ids": torch.full((workload.batch, tokens), 7), "start": torch.full((workload.batch,), start),
              "last": torch.full((workload.batch,), tokens - 1)}
    transient = allocated(lambda: session.step(inputs))
    touched = int((memory[floor:] != PATTERN).nonzero()[0]) + floor
    return floor, height + bound.program.workspace_nbytes(), top - touched + transient


def torchs(model: Any, tokens: int, workload: Workload, compiled: bool) -> int:
    """Peak bytes of one forward pass of transformers' model beside weights and cache."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=workload.context)
    ids = torch.full((workload.batch, workload.prompt), 7)
    with torch.inference_mode():
        model(ids, past_key_values=cache, logits_to_keep=1)  # makes the cache, and fills it for a decode step
        if tokens > 1:
            cache.reset()
        run = torch.compile(model, dynamic=False) if compiled else model
        given = ids if tokens > 1 else ids[:, :1]

        def step() -> object:
            return run(given, past_key_values=cache, logits_to_keep=1)

        for _ in range(2 if compiled else 0):
            step()
            if tokens > 1:
                cache.reset()
        return allocated(step)


def compare(
    name: str, folder: Path | str, workload: Workload, inductor: bool, machine: Machine | None = None
) -> list[Peak]:
    """Prefill and decode of one model, everything resident; planned for `machine`, this one unless told."""
    from transformers import AutoModelForCausalLM

    captured, checkpoint, files = open_model(folder, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=captured.dtype).eval()
    found = []
    with LanguageModel(captured, checkpoint, files, Budget(16 << 30), workload,
                       Options(prefill_chunk=workload.prompt), machine=machine) as lm:
        assert all(w.tier == "device" for w in lm.plan.weights)
        for tokens in (workload.prompt, 1):
            resident, planned, measured = ours(lm, tokens)
            eager = torchs(model, tokens, workload, False)
            compiled = torchs(model, tokens, workload, True) if inductor else None
            step = "decode" if tokens == 1 else "prefill"
            found.append(Peak(name, step, resident, planned, measured, eager, compiled))
    return found


def random_model(kind: str, folder: Path) -> Path:
    """A checkpoint with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPES[kind])).save_pretrained(folder)
    return folder


def show(peaks: list[Peak]) -> None:
    print(f"{'KiB':10} {'step':8} {'resident':>10} {'planned':>9} {'measured':>9} {'error':>7} {'eager':>9} "
          f"{'ours/eager':>10} {'inductor':>9} {'ours/inductor':>13}")
    for p in peaks:
        other = "" if p.inductor is None else f" {p.inductor / 1024:9.0f} {p.measured / p.inductor:13.2f}"
        print(f"{p.model:10} {p.step:8} {p.resident / 1024:10.0f} {p.planned / 1024:9.0f} {p.measured / 1024:9.0f} "
              f"{p.error:+7.2%} {p.eager / 1024:9.0f} {p.measured / p.eager:10.2f}{other}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["demo", *SHAPES], help="demo, llama, qwen2")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--no-inductor", action="store_true", help="leave out the minutes that it compiles")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    workload = Workload(options.batch, options.prompt, options.new)
    peaks: list[Peak] = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            where: Path | str = random_model(name, Path(folder)) if name in SHAPES else name
            peaks += compare(name, where, workload, not options.no_inductor)
    show(peaks)
    if options.json:
        rows = [{**asdict(p), "error": p.error} for p in peaks]
        options.json.write_text(json.dumps({"workload": asdict(workload), "nbytes": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
