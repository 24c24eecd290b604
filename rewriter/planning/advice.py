"""What binds the decode step of a plan that runs, and what would move it: figured from the plan's own prediction."""

from __future__ import annotations

from forebay.kernels.formats.table import SMALL_WEIGHTS, packed_format, weight_format
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import COMPUTE, DISK, UPLOAD, dtype_itemsize
from forebay.rewriter.predict.estimator import side_by_side_s

PACK = f"{SMALL_WEIGHTS.name} weights (forebay quantize)"
PACKED_BITS = 16 * SMALL_WEIGHTS.ratio(4096, 2)
WORTH = 1.05  # what moves less is not said


def advise(plan: Plan) -> list[str]:
    """Lines like 'a link twice as fast would give 1.8x', the largest gain first; empty without a prediction.

    Each alternative is costed with everything else as it is: computation and copies side by side, copies in proportion
    to the bytes that would stream. 4-bit weights are taken to compute no faster.
    """
    p = plan.prediction
    if not p.decode_time_s:
        return []
    compute, stream = p.busy_time_s.get(COMPUTE, 0.0), max(p.busy_time_s.get(s, 0.0) for s in (DISK, UPLOAD))
    if not p.streamed_nbytes:
        return ["compute-bound: nothing streams; more sequences at once would give more tokens per second"]
    now = side_by_side_s(compute, stream, 1.0, 1.0)
    found = []
    ratio = _packed_ratio(plan)
    if ratio < 1:
        resident = sum(w.nbytes for w in plan.weights if w.tier == "device" or w.gather)
        whole = resident + p.streamed_nbytes
        left = max(0.0, whole * ratio - resident) / p.streamed_nbytes
        found.append((now / side_by_side_s(compute, stream * left, 1.0, 1.0), PACK))
    found.append((now / compute if compute else 1.0,
                  f"a device budget of {format_nbytes(plan.budget.device + p.streamed_nbytes)}, in which all stays,"))
    found.append((now / side_by_side_s(compute, stream / 2, 1.0, 1.0), "a link twice as fast"))
    if stream > compute:  # sequences share the weights that stream
        found.append((min(2.0, stream / compute) if compute else 2.0, "twice the sequences at once"))
    bound = "compute" if compute >= stream else "disk" if p.busy_time_s.get(DISK, 0.0) == stream else "link"
    busy = [100 * min(1.0, t / p.decode_time_s) for t in (stream, compute)]
    first = f"{bound}-bound: copies are busy {busy[0]:.0f} % of the step, computation {busy[1]:.0f} %"
    return [first] + [f"{what} would give {gain:.1f}x" for gain, what in sorted(found, reverse=True) if gain >= WORTH]


def _packed_ratio(plan: Plan) -> float:
    """Bytes of 4-bit weights over those of the plan's; 1 where they are packed already, or not known."""
    formats = {w.format for w in plan.weights if w.tier != "device"}
    if any(weight_format(f).bits for f in formats):
        return 1.0
    bits = [8 * dtype_itemsize(c.dtype) for c in plan.gemm if packed_format(c.dtype) is None]
    return PACKED_BITS / max(bits) if bits else 1.0
