"""Pictures of a simulated service: how its times are distributed, and how they rise with the load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.rewriter.serving.served import Served, percentile_s

if TYPE_CHECKING:
    from forebay.rewriter.serving.goodput import Measured, ServiceLevel

COLOURS = {"TTFT": "#D55E00", "TPOT": "#0072B2", "share": "#009E73", "99": "#56B4E9", "objective": "#CC79A7"}


def draw_distributions(run: Served, level: ServiceLevel, title: str, path: Path) -> None:
    """Histograms of TTFT and TPOT with the objective's percentile, P99 and the objective (BestServe, Figures 6, 8)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a screen
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    parts = (("TTFT", run.ttft_s, level.ttft_s), ("TPOT", run.tpot_s, level.tpot_s))
    for axis, (name, times, objective) in zip(figure.subplots(1, 2), parts, strict=True):
        if len(times):
            axis.hist(1e3 * times, bins=60, color=COLOURS[name])
        for label, at, colour in ((f"P{level.share:g}", percentile_s(times, level.share), "share"),
                                  ("P99", percentile_s(times, 99), "99"), ("objective", objective, "objective")):
            axis.axvline(1e3 * at, color=COLOURS[colour], linestyle="--", label=f"{label} {1e3 * at:.4g} ms")
        axis.set(xlabel=f"{name}, ms", ylabel="requests")
        axis.legend()
    figure.savefig(path, dpi=120)


def draw_against_rate(points: Sequence[Measured], level: ServiceLevel, title: str, path: Path) -> None:
    """The objective's percentile of TTFT and TPOT over the rate, each with its objective (BestServe, Figures 7, 9)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    right = left.twinx()
    rates = [p.rate for p in points]
    for axis, name, values, widths, objective in (
            (left, "TTFT", [p.ttft_s for p in points], [p.ttft_ci_s for p in points], level.ttft_s),
            (right, "TPOT", [p.tpot_s for p in points], [p.tpot_ci_s for p in points], level.tpot_s)):
        axis.errorbar(rates, [1e3 * v for v in values], [1e3 * w for w in widths], color=COLOURS[name], marker="o")
        axis.axhline(1e3 * objective, color=COLOURS[name], linestyle="--", linewidth=0.8)
        axis.set_ylabel(f"P{level.share:g} {name}, ms (dashed: objective)", color=COLOURS[name])
        axis.set_ylim(0, 1e3 * max(2 * objective, min(max(values), 4 * objective)))
    left.set(xlabel="requests/s", title=title)
    figure.savefig(path, dpi=120)
