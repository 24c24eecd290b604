"""expand_latents: structure, numerics, where it must not fire, and the steps that have it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from families import captured, rewritten
from torch import Tensor, nn
from traced import count, traced
from transformers import DeepseekV3Config

from forebay.kernels.operators import ATTENTION, EXPANDED_ATTENTION
from forebay.passes.fuse.expand_latents import expand_latents
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.latent import Latent
from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.plan import PlanError, Workload
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.latents import Latents
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import Switches

aten = torch.ops.aten
RANK, ROPE, NOPE, VALUE, HEADS = 24, 8, 16, 12, 4
EXPANDED = BatchSchedule(latents=Latents(True))
WORK = Workload(2, 9, 4)
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def latent_of(up: Tensor) -> Latent:
    matrix = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
    matrix.weight = nn.Parameter(up, requires_grad=False)
    return Latent(SimpleNamespace(kv_b_proj=matrix, kv_lora_rank=RANK, qk_nope_head_dim=NOPE, v_head_dim=VALUE))


def absorbed(q: Tensor, rows: Tensor, start: Tensor, up: Tensor) -> Tensor:
    latent = latent_of(up)
    return latent.values(ATTENTION.overload(latent.absorb_keys(q), rows, rows, start, 0.2, 0, 0.0))


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, rows = torch.randn(2, HEADS, 5, NOPE + ROPE), torch.randn(2, 1, 40, RANK + ROPE)
    up = torch.randn(HEADS * (NOPE + VALUE), RANK) / RANK**0.5
    return q.to(dtype), rows.to(dtype), torch.tensor([30, 2]), up.to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
def test_what_is_around_attention_becomes_one_operator(dtype: torch.dtype, tolerance: float) -> None:
    given = inputs(dtype)
    gm = traced(absorbed, *given)
    want = gm(*given).float()
    expand_latents(gm)
    gm.recompile()
    assert count(gm, EXPANDED_ATTENTION.overload) == 1
    assert not count(gm, ATTENTION.overload) + count(gm, aten.bmm.default) + count(gm, aten.cat.default)
    assert (gm(*given).float() - want).abs().max() < tolerance * want.abs().max()


def other_matrix(q: Tensor, rows: Tensor, start: Tensor, up: Tensor) -> Tensor:
    """Values are made by another matrix than keys."""
    out = ATTENTION.overload(latent_of(up).absorb_keys(q), rows, rows, start, 0.2, 0, 0.0)
    return latent_of(up + 1).values(out)


def other_queries(q: Tensor, rows: Tensor, start: Tensor, up: Tensor) -> Tensor:
    """What is not absorbed is of other queries."""
    made = latent_of(up).absorb_keys(q)
    mixed = torch.cat((made[..., :RANK], (q + 1)[..., NOPE:]), -1)
    return latent_of(up).values(ATTENTION.overload(mixed, rows, rows, start, 0.2, 0, 0.0))


def other_halves(q: Tensor, rows: Tensor, start: Tensor, up: Tensor) -> Tensor:
    """Values are made by rows of the matrix that make keys, too."""
    latent = latent_of(up)
    sums = ATTENTION.overload(latent.absorb_keys(q), rows, rows, start, 0.2, 0, 0.0)
    latent.split -= 2
    return latent.values(sums)


def with_sinks(q: Tensor, rows: Tensor, start: Tensor, up: Tensor) -> Tensor:
    sinks = q[0, :, 0, 0].contiguous()
    made = latent_of(up).absorb_keys(q)
    return latent_of(up).values(ATTENTION.overload(made, rows, rows, start, 0.2, 0, 0.0, 0.0, 0.0, 0.0, sinks))


def own_values(q: Tensor, rows: Tensor, start: Tensor, up: Tensor) -> Tensor:
    return latent_of(up).values(ATTENTION.overload(latent_of(up).absorb_keys(q), rows, rows + 1, start, 0.2, 0, 0.0))


def sums_read_twice(q: Tensor, rows: Tensor, start: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[type-arg]
    sums = ATTENTION.overload(latent_of(up).absorb_keys(q), rows, rows, start, 0.2, 0, 0.0)
    return latent_of(up).values(sums), sums


@pytest.mark.parametrize("function", [other_matrix, other_queries, other_halves, with_sinks, own_values,
                                      sums_read_twice])
def test_other_attention_is_left_alone(function: Attend) -> None:
    gm = traced(function, *inputs())
    before = str(gm.graph)
    expand_latents(gm)
    assert str(gm.graph) == before and count(gm, ATTENTION.overload) == 1


def deepseek() -> DeepseekV3Config:
    return DeepseekV3Config(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, vocab_size=64,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=RANK, qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE, v_head_dim=VALUE, max_position_embeddings=64)


def test_steps_over_prompts_have_it_and_others_have_not() -> None:
    graphs = step_graphs(rewrite_captured(capture_model(deepseek()), Switches()), {}, WORK, "d", batching=EXPANDED)
    graphs = graphs.speculating((3,))
    assert graphs.expands
    for tokens in (1, 3, 4):
        found = {node.target for gm in graphs.step(tokens).modules() if hasattr(gm, "graph") for node in gm.graph.nodes}
        assert (EXPANDED_ATTENTION.overload in found, ATTENTION.overload in found) == (tokens == 4, tokens != 4)


def test_models_without_latents_are_refused_by_the_fields_name() -> None:
    for model in (rewritten("llama"), captured("llama")):
        assert not step_graphs(model, {}, WORK, "llama").expands
        with pytest.raises(PlanError, match=r"plan.schedule.batching.latents.expanded: no step"):
            step_graphs(model, {}, WORK, "llama", batching=EXPANDED)
