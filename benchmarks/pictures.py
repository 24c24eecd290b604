"""The pictures of README.md and docs/measured.md, from benchmarks/results: `python -m benchmarks.pictures`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
# Okabe and Ito's palette, which color-blind readers can tell apart; Forebay is always blue, its 4-bit weights green.
FOREBAY, FOREBAY_W4, PEERS, LIMIT = "#0072B2", "#009E73", ("#E69F00", "#999999", "#CC79A7"), "#000000"

OURS, MAPPED = ("Forebay", FOREBAY), ("llama.cpp, file mapped", PEERS[0])
NAMES = {"llama3-8b": "Llama-3-8B", "qwen3-14b": "Qwen3-14B", "qwen3-32b": "Qwen3-32B"}


def _load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _axes(width: float = 6.4, height: float = 3.4) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _bars(title: str, groups: dict[str, Any], series: dict[Any, tuple[str, str]], heights: dict[Any, float], *,
          width: float = 6.4, unit: str = "decode, tokens/s", room: float = 1.0, **legend: Any) -> tuple[Figure, Any]:
    """Bars side by side in each group, each with its number above; one that is missing is left out.

    Args:
        groups: By what stands below each its key in `heights`, whose keys are pairs (series, group).
        series: By key the label and the color.
        room: How many times as high as the highest bar.
    """
    figure, axes = _axes(width)
    thick = 0.8 / len(series)
    for number, (name, (label, color)) in enumerate(series.items()):
        at = [group + (number - (len(series) - 1) / 2) * thick for group in range(len(groups))]
        found = [heights.get((name, key), 0.0) for key in groups.values()]
        bars = axes.bar(at, found, thick * 0.92, color=color, label=label)
        axes.bar_label(bars, [f"{height:.3g}" if height else "" for height in found], fontsize=9)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, **legend)
    if room > 1:
        axes.set_ylim(0, room * max(heights[name, key] for name in series for key in groups.values()))
    return figure, axes


def draw_large() -> Figure:
    """Decode throughput against the budget, for models of several GB and peers under the same kernel-held limit."""
    turns = [turn for turn in _load("large-zen4-2core-2026-11-29.json")["turns"]
             if (turn["batch"], turn["prompt"]) == (1, 64) and "steps_s" in turn]
    speeds: dict[tuple[str, str], list[float]] = {}
    groups: dict[str, str] = {}
    for turn in sorted(turns, key=lambda turn: turn["weights_nbytes"]):
        group = f"{NAMES[turn['model']]}\n{turn['weights_nbytes'] / 1e9:.1f} GB in {turn['budget_gb']} GB"
        speeds.setdefault((turn["name"], groups.setdefault(group, group)), []).append(1 / fmean(turn["steps_s"]))
    return _bars("Random weights in Q4_0, memory capped by the kernel, two CPU cores and an NVMe disk", groups,
                 {"forebay": OURS, "llama.cpp": MAPPED}, {key: median(found) for key, found in speeds.items()},
                 width=8.0, loc="upper right")[0]


def draw_budgets() -> Figure:
    """Decode throughput against the budget, for us and the peers that keep it."""
    recorded = _load("gguf-offload-Q8_0-zen4-2core-2026-11-26.json")
    speeds = {(row["name"], row["share"]): median(1 / turn["time_s"] for turn in row["turns"])
              for row in recorded["rows"]}
    budgets = {f"{round(row['budget'] / 1e6)} MB, {row['share']:.0%} of the file": row["share"]
               for row in recorded["rows"]}
    return _bars(f"Qwen3-shaped model, Q8_0, {recorded['nbytes'] / 1e9:.2f} GB, on two CPU cores and an NVMe disk",
                 budgets, {"forebay": OURS, "llama.cpp": MAPPED, "neurostream": ("neurostream", PEERS[1])}, speeds,
                 loc="upper left")[0]


def draw_equal_budget() -> Figure:
    """Decode throughput within one budget, for us and the peers with as many sequences as fit it."""
    recorded = _load("throughput-large-zen4-2core-2026-11-26.json")["models"][0]
    speeds: dict[tuple[str, str], float] = {}
    for turn in recorded["turns"]:
        sequences, prompt = (int(part) for part in turn["cell"].split(" + ")[0].split(" x "))
        peer = turn["name"] in ("disk-map", "accelerate")
        batch = recorded["fits"][f"{prompt}+32"] if peer else sequences
        speeds[turn["name"], f"{sequences} x {prompt}"] = batch / fmean(turn["steps_s"])
    series = {"forebay w4+kv4 zigzag": ("Forebay, 4-bit weights and cache", FOREBAY_W4),
              "forebay bf16 zigzag": ("Forebay, bf16", FOREBAY),
              "disk-map": ("transformers, disk offload", PEERS[0]), "accelerate": ("Accelerate", PEERS[1])}
    return _bars("Llama of 1.77 GB within 400 MB: sequences x prompt", {f"{cell} tokens": cell for _, cell in speeds},
                 series, speeds, room=1.45, loc="upper left", bbox_to_anchor=(0.3, 1.0))[0]


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
        measured = [median(time for visit in cell["visits"] for time in visit["times_s"]) for cell in chosen]
        predicted = [median(visit["predicted_s"] for visit in cell["visits"]) for cell in chosen]
        axes.scatter(measured, predicted, s=22, color=color, label=label)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured step, s", ylabel="predicted step, s")
    axes.set_title("30 cells: five budgets, three batches, two models", fontsize=10)
    axes.legend(frameon=False)
    return figure


def draw_speculation() -> Figure:
    """How many times as fast drafts make greedy decoding, by text and budget."""
    table = _load("speculative-ahead-zen4-2core-2026-11-26.json")["table"]
    gains = {(row["who"], f"{row['share']:.0%},\n{row['text']}"): row["gain"] for row in table}
    series = {"lookup": ("prompt lookup", PEERS[0]), "w4": ("4-bit copy drafts", FOREBAY_W4),
              "w8": ("8-bit copy drafts", FOREBAY)}
    figure, axes = _bars("SmolLM2-135M, float32, batch 1: share of the weights' bytes, kind of text",
                         {cell: cell for _, cell in gains}, series, gains, width=8.0, unit="times plain decoding",
                         room=1.2, ncols=3, loc="upper left")
    axes.axhline(1, color=LIMIT, linewidth=0.8)
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
