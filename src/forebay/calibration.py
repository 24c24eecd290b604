"""Results of `forebay calibrate`, and the ranges of scores that a plan takes from them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from forebay.kernels.attention.scoring import HELD
from forebay.rewriter.ir.files import read_input, write_text
from forebay.rewriter.ir.from_json import from_json
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.score_range import ScoreRange
from forebay.rewriter.planning.options import Options

MARGIN = 2.0  # nats kept free above the largest score seen and below the least maximum seen


@dataclass(frozen=True)
class LayerScores:
    """Extremes of the scores of one layer: of all, and the least of the maxima of a row's shares; `rows` were seen."""

    layer: int
    rows: int
    least: float
    largest: float
    least_maximum: float

    def softmax_range(self, dtype: torch.dtype) -> tuple[float, float, float]:
        """(phi, low, high) for weights of dtype; low = high = 0 where the range is wider than exp holds, or no kernel
        shares a maximum in dtype."""
        low, high = HELD.get(dtype, (0.0, 0.0))
        if not (math.isfinite(self.largest) and math.isfinite(self.least_maximum)):
            return 0.0, 0.0, 0.0
        if self.largest - self.least_maximum + 2 * MARGIN > high - low:
            return 0.0, 0.0, 0.0
        # As far below the upper bound as above the lower one: either side may be exceeded by other prompts.
        slack = (high - low - (self.largest - self.least_maximum)) / 2
        return self.largest + slack - high, low, high


@dataclass(frozen=True)
class LayerRouting:
    """The picks of one layer's router: of each expert how many tokens, and the `hits` of pools, for one sequence
    (`hits_within`)."""

    layer: int
    counts: tuple[int, ...]
    hits: tuple[float, ...]


@dataclass(frozen=True)
class Calibration:
    """The result of `forebay calibrate` for one model, by its checkpoint's fingerprint: scores, or routing of
    experts."""

    fingerprint: str
    prompts: int
    tokens: int
    layers: tuple[LayerScores, ...] = ()
    experts: tuple[LayerRouting, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write as JSON, whole or not at all."""
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Read what `save` wrote; PlanError if it is something else, OSError if it cannot be read."""
        try:
            data = json.loads(read_input(path))
            found: Calibration = from_json(Calibration, data, "calibration")
            known: set[int] = set()
            for i, seen in enumerate(found.layers):
                where = f"calibration.layers[{i}]"
                if seen.layer < 0 or seen.layer in known:
                    raise ValueError(f"{where}.layer: {seen.layer} is below 0 or has come before")
                if seen.least_maximum > seen.largest:
                    raise ValueError(f"{where}.least_maximum: {seen.least_maximum} is above the largest score of "
                                     f"{seen.largest}")
                known.add(seen.layer)
            for i, routing in enumerate(found.experts):
                hits = [0.0, *routing.hits, 1.0]
                if not routing.hits or hits != sorted(hits) or len(routing.hits) != len(found.experts[0].hits):
                    raise ValueError(f"calibration.experts[{i}].hits: {list(routing.hits)} must be ascending shares, "
                                     "as many as of the other layers")
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{path} is not a calibration: {error}") from error
        return found

    @property
    def expert_hits(self) -> tuple[float, ...]:
        """The hits of pools of all layers (`hits_within`); none where no experts were looked at."""
        return tuple(sum(each) / len(each) for each in zip(*(routing.hits for routing in self.experts), strict=True))

    def table(self, dtype: torch.dtype) -> str:
        """One line per layer: the scores seen, and the range chosen for dtype; or how even routers pick, and the hits
        of pools."""
        return self._experts_table() if self.experts else self._scores_table(dtype)

    def _experts_table(self) -> str:
        shares = [f"{100 * (i + 1) / len(self.expert_hits):6.0f} %" for i in range(len(self.expert_hits))]
        lines = ["       picks of the         hits of pools for this share of the experts",
                 "layer  busiest eighth" + "".join(shares)]
        for routing in self.experts:
            busiest = sorted(routing.counts)[-max(1, len(routing.counts) // 8) :]
            lines.append(f"{routing.layer:5}  {100 * sum(busiest) / max(1, sum(routing.counts)):12.0f} %"
                         + "".join(f"{100 * hits:6.0f} %" for hits in routing.hits))
        return "\n".join([*lines, f"{'all':>5}{'':16}" + "".join(f"{100 * hits:6.0f} %" for hits in self.expert_hits)])

    def _scores_table(self, dtype: torch.dtype) -> str:
        lines = ["layer      rows     scores seen     least maximum   softmax"]
        for seen in self.layers:
            phi, low, high = seen.softmax_range(dtype)
            chosen = f"phi {phi:.2f}, {low:.0f} < x - phi < {high:.0f}" if high > low else "synchronised: too wide"
            lines.append(f"{seen.layer:5} {seen.rows:9}   {seen.least:7.2f} … {seen.largest:6.2f}   "
                         f"{seen.least_maximum:11.2f}   {chosen}")  # fmt: skip
        return "\n".join(lines)


def calibrated(options: Options, fingerprint: str, dtype: torch.dtype) -> Options:
    """The options with what the file of their `calibration` says of a model: the ranges of the layers that can share a
    maximum in dtype, and the hits of pools of experts. Without a file they are as they were. PlanError where it is no
    calibration, or was measured of another model than that of this fingerprint."""
    if options.calibration is None:
        return options
    found = Calibration.load(Path(options.calibration))
    if found.fingerprint != fingerprint:
        raise PlanError(f"{options.calibration} was measured of another model (fingerprint {found.fingerprint}, this "
                        f"one is {fingerprint}); run forebay calibrate on this one")
    ranges = (ScoreRange(seen.layer, *seen.softmax_range(dtype)) for seen in found.layers)
    return replace(options, score_ranges=options.score_ranges or tuple(r for r in ranges if r.high > r.low),
                   expert_hits=options.expert_hits or found.expert_hits)
