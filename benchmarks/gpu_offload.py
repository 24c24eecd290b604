"""Offloading on a GPU: correctness first, then throughput beside the link's ceiling. Runs from a bare checkout:

    PYTHONPATH=src python -m benchmarks.gpu_offload

Writes JSON to $OUT (or benchmarks/results/) and prints a short table. Needs torch with CUDA and transformers.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

STARTED = time.monotonic()
LIMIT_S = 480.0


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


def save_model(folder: Path, dtype: torch.dtype, **shape: int) -> Path:
    """A random-weight Llama of this shape as a safetensors checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**shape, tie_word_embeddings=False, max_position_embeddings=4096)  # type: ignore[arg-type]
    config.dtype = dtype
    with torch.device("cuda"):
        torch.set_default_dtype(dtype)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder


def check_tokens(machine: Any, folder: Path) -> list[dict[str, Any]]:
    """Greedy tokens under budgets that stream from disk and from host memory, against transformers on the GPU."""
    from transformers import LlamaForCausalLM

    from forebay.model import wrap

    save_model(folder, torch.float32, hidden_size=256, num_hidden_layers=4, num_attention_heads=8,
               num_key_value_heads=2, intermediate_size=704, vocab_size=2048)
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    ids = torch.randint(3, 2048, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference.generate(ids.cuda(), max_new_tokens=24, do_sample=False, pad_token_id=0,
                                      eos_token_id=None).cpu()
    nbytes = sum(p.numel() * 4 for p in reference.parameters())
    rows = []
    for share, host in ((2.0, 0), (0.5, 0), (0.5, nbytes), (0.3, nbytes // 2)):
        for slots in (1, 2, 3):
            budget: dict[str, Any] = {"device": int(nbytes * share), **({"host": host + (8 << 20)} if host else {})}
            with wrap(folder, budget, batch=3, prompt=12, new_tokens=24, machine=machine, slots=slots) as lm:
                ours = lm.generate(ids, max_new_tokens=24, pad_token_id=0)
                rows.append({"share": share, "host": host, "slots": slots, "same": bool(torch.equal(ours, expected)),
                             "streamed": lm.plan.prediction.streamed_nbytes})
            say(f"budget {share:.0%}, host {host >> 20} MiB, {slots} slots: same tokens {rows[-1]['same']}")
    return rows


def measure_throughput(machine: Any, folder: Path) -> list[dict[str, Any]]:
    """Decode tokens/s of a model of some gigabytes under a small device budget, from host memory and from disk."""
    from forebay.model import wrap

    save_model(folder, torch.bfloat16, hidden_size=4096, num_hidden_layers=8, num_attention_heads=32,
               num_key_value_heads=8, intermediate_size=14336, vocab_size=32000)
    nbytes = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    say(f"model of {nbytes / 1e9:.2f} GB written")
    rows = []
    for source, host in (("host", nbytes + (1 << 30)), ("disk", 0)):
        for batch in (1, 8, 32):
            if time.monotonic() - STARTED > LIMIT_S:
                say("out of time; the rest is left out")
                return rows
            budget: dict[str, Any] = {"device": "1500MB", **({"host": host} if host else {})}
            with wrap(folder, budget, batch=batch, prompt=64, new_tokens=12, machine=machine) as lm:
                ids = torch.randint(3, 31000, (batch, 64))
                lm.generate(ids, max_new_tokens=3)
                times: list[float] = []
                torch.cuda.reset_peak_memory_stats()
                lm.generate(ids, max_new_tokens=12, on_token=lambda _, times=times: times.append(time.perf_counter()))
                steps = [b - a for a, b in itertools.pairwise(times)]
                step = statistics.median(steps)
                moved = sum(w.nbytes for w in lm.plan.weights if w.tier != "device" and not w.gather)
                link = machine.link("host", "device") if host else machine.link("disk", "host")
                rows.append({
                    "source": source, "batch": batch, "step_s": step, "tokens_per_s": batch / step,
                    "moved_nbytes": moved, "bytes_per_s": moved / step, "link_bytes_per_s": link.bandwidth_bytes_per_s,
                    "predicted_step_s": lm.plan.prediction.decode_time_s,
                    "peak_nbytes": torch.cuda.max_memory_allocated(), "plan_nbytes": lm.plan.prediction.peak_nbytes,
                    "spread_s": [min(steps), max(steps)]})
            r = rows[-1]
            say(f"from {source}, batch {batch}: {r['tokens_per_s']:.1f} tokens/s, {r['bytes_per_s'] / 1e9:.1f} GB/s of "
                f"the link's {r['link_bytes_per_s'] / 1e9:.1f}, peak {r['peak_nbytes'] >> 20} MiB")
    return rows


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu_offload: torch finds no GPU here")
    from forebay.runtime.measure import measure_machine

    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                              "date": datetime.date.today().isoformat()}
    folder = Path(os.environ.get("OUT") or "benchmarks/results")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{result['gpu'].replace(' ', '-')}-offload-{result['date']}.json"
    with tempfile.TemporaryDirectory() as scratch:
        machine = measure_machine(scratch, quick=True)
        result["links"] = [f"{x.src}->{x.dst} {x.method} {x.bandwidth_bytes_per_s / 1e9:.2f} GB/s"
                           for x in machine.links]
        say("; ".join(result["links"]))
        for name, part in (("tokens", check_tokens), ("throughput", measure_throughput)):
            try:
                result[name] = part(machine, Path(scratch) / name)
            except Exception as error:  # keep what was measured before
                result[name] = f"{type(error).__name__}: {error}"
                say(result[name])
            target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(f"written to {target}")


if __name__ == "__main__":
    main()
