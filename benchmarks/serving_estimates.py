"""Predictions of `forebay serve-plan` beside those of aiconfigurator, on configurations that both can express:
`python -m benchmarks.serving_estimates --aiconfigurator COMMAND [--json FILE]`.

A batch of prompts of 2048 tokens on H100s, then 64 tokens for each, at once (`static`): seconds to the first token and
per token after it. aiconfigurator looks operators up that were measured with vLLM on these devices, and adds them; ours
are the data sheet's peaks with the shares assumed of every preset. Neither ran anything here, nothing is fitted, and no
figure of either was seen by the other. COMMAND is its script, in an environment of its own (`pip install
aiconfigurator`); 16-bit weights and caches.
"""

from __future__ import annotations

import re
import subprocess
from itertools import product
from typing import Any

from benchmarks.command import arguments, print_table, spread, write_json
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.predict.model_shapes import PRESET_MODELS
from forebay.rewriter.serving.phase_times import shape_times

PROMPT, ANSWER = 2048, 64
MODELS = {"llama-3-8b": ("meta-llama/Meta-Llama-3.1-8B", (1, 2, 4, 8)),
          "llama-3-70b": ("meta-llama/Meta-Llama-3.1-70B", (4, 8))}
BATCHES = (1, 16)
COLUMNS = ("devices", "batch", "ttft_ms", "tpot_ms", "aiconfigurator_ttft_ms", "aiconfigurator_tpot_ms")


def ours(model: str, devices: int, batch: int) -> tuple[float, float]:
    """Milliseconds to the first token and per token after it."""
    times = shape_times(PRESET_MODELS[model], PRESETS["h100"], devices)
    return (1e3 * times.prefill_s(batch, PROMPT, PROMPT), 1e3 * times.decode_s(batch, PROMPT + ANSWER / 2))


def theirs(command: str, model: str, devices: int, batch: int) -> tuple[float, float]:
    """The same of aiconfigurator, with which version of its measurements."""
    done = subprocess.run(
        [command, "cli", "estimate", "--model-path", model, "--system", "h100_sxm", "--backend", "vllm",
         "--estimate-mode", "static", "--isl", str(PROMPT), "--osl", str(ANSWER), "--batch-size", str(batch),
         "--tp-size", str(devices), "--gemm-quant-mode", "bfloat16"], capture_output=True, text=True, check=True)
    found = {name: re.search(rf"{name}:\s+([\d.]+) ms", done.stdout) for name in ("TTFT", "TPOT")}
    if not all(found.values()):
        raise RuntimeError(f"no times in what aiconfigurator said: {done.stdout[-500:]}")
    return tuple(float(match[1]) for match in found.values() if match)  # type: ignore[return-value]


def main() -> None:
    options = arguments(__doc__, aiconfigurator=("aiconfigurator", "command of its script"))
    rows: list[dict[str, Any]] = []
    for name, (known_as, sizes) in MODELS.items():
        for at in product(sizes, BATCHES):
            found = *at, *ours(name, *at), *theirs(options.aiconfigurator, known_as, *at)
            rows.append({"model": name, **dict(zip(COLUMNS, found, strict=True))})
    print_table(rows)
    for kind in ("ttft", "tpot"):
        print(f"{kind}: {spread((row[f'{kind}_ms'] / row[f'aiconfigurator_{kind}_ms'] - 1 for row in rows), '+.0%')}")
    write_json(options, {"prompt": PROMPT, "answer": ANSWER, "rows": rows})


if __name__ == "__main__":
    main()
