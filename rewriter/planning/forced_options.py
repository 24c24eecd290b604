"""Options that the smallest budget depends on, in messages."""

from __future__ import annotations

from forebay.rewriter.ir.plan import Workload
from forebay.rewriter.planning.options import Options

FORCED = (
    "slots", "slot_nbytes", "policy", "weight_shares", "expert_slots", "experts_ahead", "cpu_experts", "prefill_chunk")


def forceable(options: Options) -> list[str]:
    """Names of those that a user may have given."""
    return [name for name in FORCED if not (options.chunk_of_images and name == "prefill_chunk")]


def forced(options: Options) -> str:
    """Return the given options, with their values."""
    return ", ".join(f"{name}={value}" for name in forceable(options) if (value := getattr(options, name))
                     and not (options.policy and name == "weight_shares"))


def needs_less(workload: Workload, options: Options) -> str:
    """Say which workloads would take less memory."""
    if not options.chunk_of_images:
        return "A smaller batch, shorter prompts or fewer new tokens need less"
    tokens = min(options.prefill_chunk or 1, workload.prompt)
    return (f"Tokens of an image see each other, so {tokens} tokens of each prompt are computed at once. Shorter "
            "prompts (smaller or fewer images) or a smaller batch need less")
