"""The identity of a prompt's KV cache besides the prompt's tokens: the model, the release, and the steps."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

import torch

from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.identity import states_checksum
from forebay.rewriter.ir.plan import Plan
from forebay.version import package_version


@dataclass(frozen=True)
class PrefixIdentity:
    """Digests and names; a cache is of use where all are equal.

    Attributes:
        model: The checkpoint's fingerprint.
        files: Its files, as they were last written.
        release: Of Forebay, and of torch.
        weights: The formats of its weights.
        cache: The format of the KV cache, and of checkpoints.
        steps: What rounding depends on: sizes of prefill steps, matmuls, tiles, and how a cache is divided.
    """

    model: str
    files: str
    release: str
    weights: str
    cache: str
    steps: str

    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).digest()


def identity_of(plan: Plan, checkpoint: Checkpoint) -> PrefixIdentity:
    """The identity of what a plan's steps compute of prompts."""
    batching, made = plan.schedule.batching, plan.schedule.batching.recomputation
    rows = plan.schedule.prefill_chunk * batching.sequences(plan.workload.batch, plan.schedule.prefill_chunk)
    steps = (plan.schedule.prefill_chunk, rows, sorted(map(repr, plan.gemm)), batching.micro_batches.count,
             batching.cache.block_tokens, batching.cache.stays_on_host, made, batching.latents, repr(plan.score_ranges),
             [(w.name, w.tile_rows) for w in plan.weights], plan.machine, torch.backends.cpu.get_cpu_capability())
    return PrefixIdentity(
        checkpoint.fingerprint, states_checksum(checkpoint.states), f"{package_version()}, torch {torch.__version__}",
        _digest([(w.name, w.format) for w in plan.weights]), f"{plan.cache_format}, {made.format}", _digest(steps))


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
