"""Which operators of ours Programs launch: all but those that are called otherwise. Whoever adds one that nothing
launches finds it here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from families import captured, packed, rewritten

from forebay.kernels.operators import OPERATORS, find
from forebay.passes.lower.launches import MULTIPLIES
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import StepGraphs, step_graphs
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.ir.program import FileSlice, Launch
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_search import plan_batch
from forebay.rewriter.pipeline.plan_task import PlanTask
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.planning.options import Options
from forebay.rewriter.switches import Switches

CALLED = {
    "forebay.quantize": "writes packed files",
    "forebay.dequantize": "reads packed files, and what a cache of rows holds",
    "forebay.sampling": "draws a token from the logits that a step gave",
}


def experts() -> CapturedModel:
    """A model whose layers choose among experts."""
    return capture_model(transformers.Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, pad_token_id=0))


LATENT: dict[str, Any] = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, first_k_dense_replace=2,
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=12, head_dim=8, pad_token_id=0)


def latent() -> Iterator[CapturedModel]:
    """Models whose layers keep latents, and the keys of an indexer."""
    yield capture_model(transformers.DeepseekV3Config(**LATENT))
    yield capture_model(transformers.CONFIG_MAPPING["deepseek_v32"](
        **LATENT, index_topk=4, index_head_dim=16, index_n_heads=2))


def recurrent() -> Iterator[CapturedModel]:
    """Models whose layers keep states of each kind."""
    sizes = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, pad_token_id=0)
    yield capture_model(transformers.MambaConfig(state_size=8, **sizes))
    yield capture_model(transformers.Mamba2Config(
        state_size=16, num_heads=8, head_dim=16, n_groups=2, **sizes))
    yield capture_model(transformers.RwkvConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2))


def launched(model: CapturedModel, options: Options | None = None, nbytes: int = 1 << 28) -> set[str]:
    """Names of our operators in the Programs of a plan's steps."""
    files = {spec.name: FileSlice("weights", i << 24, spec.nbytes) for i, spec in enumerate(model.weights.values())}

    def graphs_of(work: Workload, batching: BatchSchedule) -> StepGraphs:
        return step_graphs(model, files, work, "model", batching=batching)

    pipeline, plan = plan_batch(PlanTask(graphs_of, Budget(nbytes, 1 << 24), Workload(2, 9, 4), options or Options(),
                                         Machine.default(), Switches()))
    programs = [pipeline.program(plan, tokens) for tokens in plan.schedule.step_sizes]
    items = [item for program in programs for item in (*program.prologue, *program.step)]
    return {item.op for item in items if isinstance(item, Launch) and find(item.op) is not None}


def test_every_operator_is_launched_by_some_program() -> None:
    staged = Options(cache_tier="host", cache_tokens=4, micro_batches=2, checkpoints=(1, 1), checkpoint_format="act8")
    rows = rewrite_captured(packed(captured("llama"), embedding=True), Switches(), "kv8")
    chosen = Options(kv_blocks=0.5, cache_tier="disk", cache_tokens=8)
    plain, indexed = latent()
    found = launched(rewritten("llama")) | launched(rewritten("gpt2"), staged) | launched(rows) | (
        launched(rewritten("opt"), chosen)) | launched(rewrite_captured(experts(), Switches())) | (
            launched(rewrite_captured(experts(), Switches()), Options(expert_slots=2), 450_000)) | (
                launched(rewrite_captured(plain, Switches()), Options(expand_latents=True))) | (
                    launched(rewrite_captured(indexed, Switches())))
    found = found.union(*(launched(rewrite_captured(model, Switches()), Options(prompt_lookup_num_tokens=1))
                          for model in recurrent()))
    ours = {operator.name for operator in OPERATORS}
    unused, both = ours - found - CALLED.keys(), found & CALLED.keys()
    assert found | CALLED.keys() == ours and not both, (unused, both)
    assert all(operator.bind for operator in OPERATORS if operator.name in found)


def test_operations_of_torch_are_counted_by_name() -> None:
    """Torch's table of counts is loaded only for an operator of such a name; other operators have none."""
    from torch.utils.flop_counter import flop_registry

    counted = {str(packet) for packet in flop_registry if isinstance(packet, torch._ops.OpOverloadPacket)}
    assert len(counted) > 10 and all(MULTIPLIES.search(name) for name in counted)
    assert not any(MULTIPLIES.search(name) for name in ("mul", "gather", "embedding", "argmax", "softmax"))
