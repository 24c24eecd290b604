"""BestServe's Tables 3, 4 and 5: CodeLlama-34B on Ascend 910B3, from the paper's own operator tables (Appendices A and
B) and its simulators."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from benchmarks.papers.tables import Row
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.model_shapes import PRESET_MODELS, ModelShape
from forebay.rewriter.predict.roofline import Module, attaining, module_s
from forebay.rewriter.serving.collocated import collocated
from forebay.rewriter.serving.llama_tables import DISPATCH_S, EFFICIENCY, layer_modules, symbols
from forebay.rewriter.serving.phase_times import table_times
from forebay.rewriter.serving.request_level import disaggregated, pseudo_batch
from forebay.rewriter.serving.served import Served, percentile_s
from forebay.rewriter.serving.traffic import Arrival, Traffic, arrivals

MODEL, MACHINE = "codellama-34b", "ascend-910b3"
TENSOR_PARALLEL, BATCH, PROMPT, NEW = 4, 1, 2048, 63
# Table 3, milliseconds: compute per module; totals over 48 layers.
COMPUTE_MS = {"prefill": {"RMSNorm": 0.223, "Attention": 2.122, "MLP": 2.809},
              "decode": {"RMSNorm": 0.000, "Attention": 0.176, "MLP": 0.530}}
TOTAL_MS = {"prefill": 265.123, "decode": 33.573}
RATE, REQUESTS, OUTPUT = 3.5, 10_000, 64  # of Tables 4 and 5; prompts and answers as in Table 3 (section 4.1, OP2)
BOXES = 16  # of Table 4's decode instance
RUNS = 6  # of other arrivals each; the paper prints one run
# Tables 4 and 5, milliseconds: P90 and P99 of TTFT and TPOT.
PUBLISHED_MS = {"1p1d": (3650.319, 6004.805, 44.849, 44.849), "2m": (556.309, 1091.503, 4360.659, 4656.043)}
Simulation = Callable[[list[Arrival], int], Served]


def modules(model: ModelShape, phase: str) -> list[Module]:
    """One layer of Table 3."""
    tokens, context = (PROMPT, PROMPT) if phase == "prefill" else (1, PROMPT + NEW)
    return layer_modules(symbols(model.layers[0], BATCH, tokens, context, TENSOR_PARALLEL), phase,
                         PRESETS[MACHINE].interconnect_bytes_per_s)


def table_3() -> list[Row]:
    """Totals within 5 %, and each module's compute time."""
    model, found = PRESET_MODELS[MODEL], []
    times = table_times(model, PRESETS[MACHINE], TENSOR_PARALLEL)
    totals = {"prefill": times.prefill_s(BATCH, PROMPT, PROMPT), "decode": times.decode_s(BATCH, PROMPT + NEW)}
    for phase, total in totals.items():
        estimator = MachineEstimator(attaining(PRESETS[MACHINE], *EFFICIENCY[phase][:2]))
        layer = modules(model, phase)
        found.append(Row("BestServe, Table 3", f"{phase}, total of {model.n_layers} layers", "ms", TOTAL_MS[phase],
                         total * 1e3, 0.05))
        for module in (layer[0], layer[1], layer[3]):
            if COMPUTE_MS[phase][module.name]:
                found.append(Row("BestServe, Table 3", f"{phase}, {module.name}, compute", "ms",
                                 COMPUTE_MS[phase][module.name], module_s(module, estimator) * 1e3))
    return found


def simulations(*, exchange: bool = True) -> dict[str, Simulation]:
    """Table 4's and Table 5's services, by name."""
    times = table_times(PRESET_MODELS[MODEL], PRESETS[MACHINE], TENSOR_PARALLEL, exchange=exchange)
    return {"1p1d": lambda requests, seed: disaggregated(requests, (times, 1, 4), (times, 1, BOXES), seed),
            "2m": lambda requests, seed: collocated(requests, times, 2, 4, seed)}


@cache
def runs_ms(name: str, *, exchange: bool = True, runs: int = RUNS) -> tuple[tuple[float, ...], ...]:
    """P90 and P99 of TTFT and TPOT in milliseconds, [runs, 4]."""
    simulate, found = simulations(exchange=exchange)[name], []
    for seed in range(runs):
        run = simulate(arrivals(Traffic(RATE, REQUESTS, PROMPT, OUTPUT), seed), seed)
        found.append(tuple(1e3 * percentile_s(times, share)
                           for times in (run.ttft_s, run.tpot_s) for share in (90, 99)))
    return tuple(found)


def tables_4_and_5() -> list[Row]:
    """Means of `RUNS` runs with their standard deviation, also without the exchanges (docs/papers.md)."""
    found = []
    for table, name, exchange in (("4", "1p1d", True), ("4", "1p1d", False), ("5", "2m", True), ("5", "2m", False)):
        runs = np.array(runs_ms(name, exchange=exchange))
        for i, label in enumerate(("P90 TTFT", "P99 TTFT", "P90 TPOT", "P99 TPOT")):
            without = "" if exchange else ", without exchanges"
            if name == "1p1d" and not exchange and label.endswith("TPOT"):
                continue  # decode exchanges next to nothing
            found.append(Row(f"BestServe, Table {table}", f"{name}, {label}{without}", "ms", PUBLISHED_MS[name][i],
                             float(runs[:, i].mean()), 0.1, f"sd {runs[:, i].std(ddof=1):.0f}"))
    return found


def step_ms(pseudo: int) -> float:
    """A decode step of Tables 4 and 5, of so many sequences."""
    times = table_times(PRESET_MODELS[MODEL], PRESETS[MACHINE], TENSOR_PARALLEL)
    return 1e3 * times.decode_s(pseudo, PROMPT + NEW)


def listed_step_ms() -> float:
    """One of one sequence by Algorithm 1 as it is listed, both clocks started anew in every layer, over Table 3's own
    columns."""
    dispatched = done = 0.0
    for name in ("RMSNorm", "Attention", "RMSNorm", "MLP"):
        dispatched += 1e3 * DISPATCH_S[name]
        done = max(done, dispatched) + COMPUTE_MS["decode"][name]
    return PRESET_MODELS[MODEL].n_layers * done


def table_4_tpot() -> list[Row]:
    """What no reading of the listings gives, between the most that they do and what gives it."""
    printed, table = PUBLISHED_MS["1p1d"][2], "BestServe, Table 4"
    return [Row(table, "TPOT, the largest pseudo batch of 16 boxes", "ms", printed, step_ms(pseudo_batch(BOXES - 1))),
            Row(table, "TPOT, a pseudo batch of 8", "ms", printed, step_ms(8)),
            Row(table, "TPOT, clocks anew in every layer, pseudo batch 1, 64 steps over 63", "ms", printed,
                listed_step_ms() * OUTPUT / (OUTPUT - 1))]


def rows() -> list[Row]:
    return [*table_3(), *tables_4_and_5(), *table_4_tpot()]
