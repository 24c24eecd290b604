"""Speeds of decoding that were measured on this machine, kept in the cache folder and shown by later plans."""

from __future__ import annotations

import contextlib
import datetime
import json
from typing import TYPE_CHECKING

from forebay.kernels.build.cache_folder import cache_folder, locked
from forebay.rewriter.ir.files import read_input_text, write_text

if TYPE_CHECKING:
    from forebay.rewriter.ir.plan import Plan

LEAST = 8  # tokens that a figure rests on
MOST = 256  # plans that are remembered, the latest
FILE = "decode-speeds.json"
UNSEEN = "no run of this model, budget and batch was timed here yet"


def note_speed(plan: Plan, tokens: int, time_s: float) -> None:
    """Keep how long a plan took to decode so many tokens, in seconds. Where nothing can be written, none is kept."""
    if tokens < LEAST or time_s <= 0:
        return
    with contextlib.suppress(OSError), locked("decode-speeds.lock"):
        found = _kept()
        found.pop(key := _key(plan), None)
        found[key] = {"tokens_per_s": tokens / time_s, "tokens": tokens, "date": datetime.date.today().isoformat()}
        write_text(cache_folder() / FILE, json.dumps(dict(list(found.items())[-MOST:]), indent=1) + "\n")


def seen_line(plan: Plan) -> str | None:
    """Return how fast the same model, budget, batch and cache format decoded when they last ran here, if they did."""
    seen = _kept().get(_key(plan))
    if seen is None:
        return None
    return (f"measured    {seen['tokens_per_s']:.3g} tokens/s of decoding here on {seen['date']}, the mean of "
            f"{seen['tokens']} tokens, drafts included")


def _key(plan: Plan) -> str:
    return json.dumps([plan.fingerprint, plan.budget.device, plan.budget.host, plan.workload.batch, plan.cache_format])


def _kept() -> dict[str, dict]:
    """Figures by plan, in the order in which they were kept; none where the file is missing or not ours."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(read_input_text(cache_folder() / FILE))
        if isinstance(found, dict):
            return {key: seen for key, seen in found.items() if isinstance(seen, dict)
                    and isinstance(seen.get("tokens_per_s"), float) and {"tokens", "date"} <= set(seen)}
    return {}
