"""The pictures of README.md and docs/measured.md, from benchmarks/results: `python -m benchmarks.pictures`."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
# Okabe and Ito's palette, which color-blind readers can tell apart; Forebay is always blue, its 4-bit weights green.
FOREBAY, FOREBAY_W4, PEERS, LIMIT = "#0072B2", "#009E73", ("#E69F00", "#999999", "#CC79A7"), "#000000"

NAMES = {"llama3-8b": "Llama-3-8B", "qwen3-14b": "Qwen3-14B", "qwen3-32b": "Qwen3-32B"}


def _load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _axes(width: float = 6.4, height: float = 3.4) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _grouped_bars(axes: Any, groups: list[str], series: dict[str, tuple[str, list[float]]]) -> None:
    """Bars side by side in each group, each with its number above; a figure of 0 is left out."""
    width = 0.8 / len(series)
    for number, (label, (color, heights)) in enumerate(series.items()):
        at = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        bars = axes.bar(at, heights, width * 0.92, color=color, label=label)
        axes.bar_label(bars, [f"{height:.3g}" if height else "" for height in heights], fontsize=9)
    axes.set_xticks(range(len(groups)), groups)


def draw_large() -> Figure:
    """Decode throughput against the budget, for models of several GB and peers under the same kernel-held limit."""
    speeds: dict[tuple[str, str], list[float]] = {}
    sizes: dict[str, float] = {}
    for turn in _load("large-zen4-2core-2026-11-29.json")["turns"]:
        if (turn["batch"], turn["prompt"]) == (1, 64) and "steps_s" in turn:
            group = f"{NAMES[turn['model']]}\n{turn['weights_nbytes'] / 1e9:.1f} GB in {turn['budget_gb']} GB"
            speeds.setdefault((turn["name"], group), []).append(1 / statistics.mean(turn["steps_s"]))
            sizes[group] = turn["weights_nbytes"]
    groups = sorted(sizes, key=lambda group: sizes[group])
    figure, axes = _axes(8.0)
    _grouped_bars(axes, groups, {label: (color, [statistics.median(speeds.get((name, group), [0])) for group in groups])
                                 for name, label, color in (("forebay", "Forebay", FOREBAY),
                                                            ("llama.cpp", "llama.cpp, file mapped", PEERS[0]))})
    axes.set_ylabel("decode, tokens/s")
    axes.set_title("Random weights in Q4_0, memory capped by the kernel, two CPU cores and an NVMe disk", fontsize=10)
    axes.legend(frameon=False, loc="upper right")
    return figure


def draw_budgets() -> Figure:
    """Decode throughput against the budget, for us and the peers that keep it."""
    recorded = _load("gguf-offload-Q8_0-zen4-2core-2026-11-26.json")
    speeds = {(row["name"], row["share"]): statistics.median(1 / turn["time_s"] for turn in row["turns"])
              for row in recorded["rows"]}
    budgets = {row["share"]: round(row["budget"] / 1e6) for row in recorded["rows"]}
    names = {"forebay": ("Forebay", FOREBAY), "llama.cpp": ("llama.cpp, file mapped", PEERS[0]),
             "neurostream": ("neurostream", PEERS[1])}
    figure, axes = _axes()
    _grouped_bars(axes, [f"{nbytes} MB, {share:.0%} of the file" for share, nbytes in budgets.items()],
                  {label: (color, [speeds[name, share] for share in budgets])
                   for name, (label, color) in names.items()})
    axes.set_ylabel("decode, tokens/s")
    axes.set_title(f"Qwen3-shaped model, Q8_0, {recorded['nbytes'] / 1e9:.2f} GB, on two CPU cores and an NVMe disk",
                   fontsize=10)
    axes.legend(frameon=False, loc="upper left")
    return figure


def draw_equal_budget() -> Figure:
    """Decode throughput within one budget, for us and the peers with as many sequences as fit it."""
    recorded = _load("throughput-large-zen4-2core-2026-11-26.json")["models"][0]
    speeds: dict[tuple[str, str], float] = {}
    for turn in recorded["turns"]:
        sequences, prompt = (int(part) for part in turn["cell"].split(" + ")[0].split(" x "))
        peer = turn["name"] in ("disk-map", "accelerate")
        batch = recorded["fits"][f"{prompt}+32"] if peer else sequences
        speeds[turn["name"], f"{sequences} x {prompt}"] = batch / statistics.mean(turn["steps_s"])
    cells = list(dict.fromkeys(cell for _, cell in speeds))
    names = {"forebay w4+kv4 zigzag": ("Forebay, 4-bit weights and cache", FOREBAY_W4),
             "forebay bf16 zigzag": ("Forebay, bf16", FOREBAY),
             "disk-map": ("transformers, disk offload", PEERS[0]), "accelerate": ("Accelerate", PEERS[1])}
    figure, axes = _axes()
    _grouped_bars(axes, [f"{cell} tokens" for cell in cells],
                  {label: (color, [speeds[name, cell] for cell in cells]) for name, (label, color) in names.items()})
    axes.set_ylabel("decode, tokens/s")
    axes.set_title("Llama of 1.77 GB within 400 MB: sequences x prompt", fontsize=10)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.3, 1.0))
    axes.set_ylim(0, 1.45 * max(speeds[name, cell] for name in names for cell in cells))
    return figure


def draw_predictions() -> Figure:
    """Predicted decode steps against measured ones, with the band of 15 %."""
    figure, axes = _axes(5.2, 4.2)
    ends = (0.01, 2.0)
    axes.fill_between(ends, [0.85 * end for end in ends], [1.15 * end for end in ends], color="#dddddd",
                      label="within 15 %")
    cells = _load("prediction-zen4-2core-2026-11-26.json")
    for small, label, color in ((True, "SmolLM2-135M, float32", FOREBAY),
                                (False, "Llama of 1.77 GB, bf16", PEERS[0])):
        chosen = [cell for cell in cells if (cell["model"] == "smollm2") == small]
        measured = [statistics.median(time for visit in cell["visits"] for time in visit["times_s"]) for cell in chosen]
        predicted = [statistics.median(visit["predicted_s"] for visit in cell["visits"]) for cell in chosen]
        axes.scatter(measured, predicted, s=22, color=color, label=label)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured step, s", ylabel="predicted step, s")
    axes.set_title("30 cells: five budgets, three batches, two models", fontsize=10)
    axes.legend(frameon=False)
    return figure


def draw_speculation() -> Figure:
    """How many times as fast drafts make greedy decoding, by text and budget."""
    table = _load("speculative-ahead-zen4-2core-2026-11-26.json")["table"]
    gains = {(row["who"], f"{row['share']:.0%}, text {row['text']}"): row["gain"] for row in table}
    cells = list(dict.fromkeys(cell for _, cell in gains))
    names = {"lookup": ("prompt lookup", PEERS[0]), "w4": ("4-bit copy drafts", FOREBAY_W4),
             "w8": ("8-bit copy drafts", FOREBAY)}
    figure, axes = _axes(8.0)
    _grouped_bars(axes, [cell.replace(", text ", ",\n") for cell in cells],
                  {label: (color, [gains[name, cell] for cell in cells]) for name, (label, color) in names.items()})
    axes.axhline(1, color=LIMIT, linewidth=0.8)
    axes.set_ylabel("times plain decoding")
    axes.set_title("SmolLM2-135M, float32, batch 1: share of the weights' bytes, kind of text", fontsize=10)
    axes.legend(frameon=False, ncols=3, loc="upper left")
    axes.set_ylim(0, 1.2 * max(gains.values()))
    return figure


PICTURES = {"large": draw_large, "budgets": draw_budgets, "equal-budget": draw_equal_budget,
            "predictions": draw_predictions, "speculation": draw_speculation}


def main() -> None:
    """Write every picture into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/pictures", help="folder of the pictures")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        draw().savefig(out / f"{name}.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
