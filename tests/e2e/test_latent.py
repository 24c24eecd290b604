"""Latent attention: the tokens of transformers from one row for each token, at any budget."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import ALL, at_length
from small_experts import Saved, random_model, saved_once

import forebay
from forebay.calibrate_experts import calibrate_experts
from forebay.kernels.cache.kv_append_q import reference as kv_append_q
from forebay.kernels.formats import row_sizes
from forebay.kernels.operators import ATTENTION, EXPANDED_ATTENTION
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.program import Launch
from forebay.rewriter.ir.state import LatentState
from forebay.rewriter.machine.profile import Machine

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]
RANK, ROPE, PROMPT, NEW = 32, 8, 7, 6
COMPUTES = replace(Machine.default(), attention_flops=1e9, product_flops=1e9)  # bound by operations
SMALL: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2, vocab_size=128,
    num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
    max_position_embeddings=64, first_k_dense_replace=1, n_shared_experts=1, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, q_lora_rank=32, kv_lora_rank=RANK, qk_nope_head_dim=16, qk_rope_head_dim=ROPE, v_head_dim=12,
    tie_word_embeddings=False)  # fmt: skip


MORE: dict[str, dict[str, Any]] = {  # sizes beside SMALL
    "longcat_flash": dict(num_hidden_layers=4, ffn_hidden_size=96, expert_ffn_hidden_size=32, moe_topk=3,
                          zero_expert_num=3, head_dim=ROPE),
    "hy_v4": dict(index_topk=PROMPT + NEW, index_head_dim=16, index_n_heads=2),
    "deepseek_v32": dict(index_topk=PROMPT + NEW, index_head_dim=16, index_n_heads=2),
    "glm_moe_dsa": dict(index_topk=PROMPT + NEW, index_head_dim=16, index_n_heads=2, indexer_types=["full", "shared"])}


def small(family: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import CONFIG_MAPPING

    return random_model(CONFIG_MAPPING[family](**SMALL | MORE.get(family, {})), dtype)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A family's model in a folder and in memory."""
    return saved_once(tmp_path_factory, small)


def tokens(model: Any, **options: Any) -> torch.Tensor:
    """What a model makes of three prompts of unequal length."""
    ids = torch.randint(3, 128, (3, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3], mask[2, :1] = 0, 0
    found: torch.Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)
    return found


def opened(folder: Path, device: int, **options: Any) -> Any:
    return forebay.wrap(folder, {"device": device, "disk": folder}, batch=3, prompt=PROMPT, new_tokens=NEW, **options)


def smallest(folder: Path) -> int:
    with pytest.raises(PlanError, match="the smallest that can is") as refused:
        opened(folder, 1000)
    return int(re.search(r"\((\d+) bytes", str(refused.value))[1])  # type: ignore[index]


@pytest.mark.parametrize("family", ["deepseek_v3", at_length("deepseek_v2"), at_length("minicpm3"), at_length("youtu"),
                                    at_length("glm4_moe_lite"), at_length("axk1"), at_length("longcat_flash"),
                                    "deepseek_v32", at_length("glm_moe_dsa")])
def test_same_tokens_as_transformers_at_any_budget(saved: Saved, family: str) -> None:
    folder, model = saved(family)
    want, least = tokens(model), smallest(folder)
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    for budget in (least, *([(least + nbytes) // 2] if ALL else []), 4 * nbytes):
        lm = opened(folder, budget)
        assert torch.equal(tokens(lm), want), budget
        assert (lm.plan.prediction.streamed_nbytes > 0) == (budget < nbytes)
        rows = {b.name: b.nbytes for b in lm.plan.buffers if b.name.startswith("cache_")}
        kept = ("latent", "latent1") if family == "longcat_flash" else ("latent",)  # attention twice a layer
        assert rows == {f"cache_{name}_{i}": 3 * (PROMPT + NEW) * (RANK + ROPE) * 4 for name in kept for i in range(2)}
        lm.close()


def test_picks_of_experts_without_weights_read_nothing(saved: Saved, tmp_path: Path) -> None:
    """Of 11 choices 8 have weights: of its two picks a token reads 2 * 8/11 experts, less those that pools have."""
    folder, model = saved("longcat_flash")
    lm = opened(folder, (1 << 20) + (16 << 10), expert_slots=4)
    assert torch.equal(tokens(lm), tokens(model))
    named, entry = 8 * (1 - (1 - 2 / 11) ** 3), 3 * 64 * 32 * 4
    assert lm.plan.schedule.routed.hit_rate == 0.5
    assert lm.plan.prediction.streamed_nbytes == lm.steps.program(1).moved_nbytes() == round(2 * named * 0.5 * entry)
    lm.close()
    packed = quantize_model(folder, tmp_path / "packed", Wish("w8g32"))  # the first matrices have rows for all 11
    same = small("longcat_flash")
    same.load_state_dict({name: read_dequantized(record) for name, record in packed.tensors.items()})
    with opened(tmp_path / "packed", 1 << 20, expert_slots=4) as lm:
        assert torch.equal(tokens(lm), tokens(same))
    found = calibrate_experts(folder, [torch.arange(3, 40)], {"device": 1 << 20, "disk": folder})
    assert {len(each.counts) for each in found.experts} == {8}
    assert all(0 < sum(each.counts) < 2 * 37 and each.hits[-1] == 1 for each in found.experts)


def test_a_row_for_each_token_is_all_that_is_kept() -> None:
    captured = capture_model(small("deepseek_v3").config, dtype=torch.bfloat16)
    assert captured.states == ((LatentState(RANK + ROPE, torch.bfloat16),),) * 2


@pytest.mark.parametrize("options", [{"prefill_chunk": 2}, {"prompt_lookup_num_tokens": 3}, {"batch_slots": 2}],
                         ids=lambda options: " ".join(options))
def test_it_composes(saved: Saved, options: dict[str, Any]) -> None:
    folder, model = saved("minicpm3")
    lm = opened(folder, 1 << 20, **options)
    assert torch.equal(tokens(lm), tokens(model))
    lm.close()


@pytest.mark.parametrize("family", ["deepseek_v3", at_length("minicpm3"), at_length("longcat_flash")])
@pytest.mark.parametrize("options", [
    {}, {"prefill_chunk": 3}, at_length({"prefill_chunk": 2}), {"micro_batches": 3, "order": "zigzag"},
    at_length({"micro_batches": 3, "order": "row"}), {"batch_slots": 2, "prompt_lookup_num_tokens": 3}],
    ids=lambda options: " ".join(options))
def test_prompts_attend_to_keys_and_values_made_of_latents(
    saved: Saved, family: str, options: dict[str, Any]
) -> None:
    folder, model = saved(family)
    want = tokens(model)
    for expand in (True, False):
        lm = opened(folder, 2 << 20, expand_latents=expand, **options)
        assert torch.equal(tokens(lm), want)
        assert lm.plan.schedule.batching.latents.expanded is expand
        assert ("keys and values made of latents" in lm.explain()) is expand
        for steps in lm.plan.schedule.step_sizes:
            called = {item.op for item in lm.steps.program(steps).step if isinstance(item, Launch)}
            prompt = lm.plan.schedule.batching.is_prefill(steps)
            assert (EXPANDED_ATTENTION.name in called) is (expand and prompt), steps
            assert (ATTENTION.name in called) is not (expand and prompt), steps
        if not options:
            again = opened(folder, 2 << 20, plan=lm.plan)
            assert torch.equal(tokens(again), want) and again.plan == lm.plan
            again.close()
        lm.close()


def test_the_planner_expands_where_many_queries_meet_a_row(saved: Saved) -> None:
    """Of a long prompt in short chunks each expands all rows before it anew; one chunk expands each row once."""
    folder, _ = saved("deepseek_v3")
    made = {}
    for chunk, expand in itertools.product((2, 48), (None, True, False)):
        lm = forebay.wrap(folder, "8MiB", prompt=48, new_tokens=2, prefill_chunk=chunk, expand_latents=expand,
                          machine=COMPUTES)
        made[chunk, expand] = lm.plan.schedule.batching.latents.expanded, lm.plan.prediction.prefill_time_s
        lm.close()
    assert made[2, None] == made[2, False] and made[2, True][1] > made[2, False][1]
    assert made[48, None] == made[48, True] and made[48, True][1] < made[48, False][1]


def test_models_without_latents_have_none_to_expand(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    random_model(LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                             vocab_size=64), torch.float32).save_pretrained(tmp_path)
    with pytest.raises(PlanError, match="expand_latents: no layer of this model keeps latents"):
        forebay.wrap(tmp_path, "8MiB", expand_latents=True)
    forebay.wrap(tmp_path, "8MiB", expand_latents=False).close()


def test_attention_with_sinks_over_latents_expands_none(saved: Saved) -> None:
    """Hy 4: no operator expands keys and values for it, so the planner does not try that."""
    folder, model = saved("hy_v4")
    lm = opened(folder, 1 << 20)
    assert not lm.plan.schedule.batching.latents.expanded and torch.equal(tokens(lm), tokens(model))
    lm.close()
    with pytest.raises(PlanError, match="expand_latents: no layer of this model keeps latents that steps could"):
        opened(folder, 1 << 20, expand_latents=True)


def test_beams_change_places(saved: Saved) -> None:
    folder, model = saved("minicpm3")
    lm = forebay.wrap(folder, "1MiB", batch=6, prompt=PROMPT, new_tokens=NEW)
    assert torch.equal(tokens(lm, num_beams=2), tokens(model, num_beams=2))
    lm.close()


@pytest.mark.all
def test_packed_weights_and_a_bundle(saved: Saved, tmp_path: Path) -> None:
    folder, _ = saved("minicpm3")
    packed = quantize_model(folder, tmp_path / "packed", Wish("w4g32", (("*kv_b_proj*", "w8g32"),)))
    model = small("minicpm3")
    model.load_state_dict({name: read_dequantized(record) for name, record in packed.tensors.items()})
    want = tokens(model)
    forebay.export(tmp_path / "packed", tmp_path / "bundle", "bundle", budget="1MiB")
    for source, expand in itertools.product((tmp_path / "packed", tmp_path / "bundle"), (False, True)):
        lm = forebay.wrap(source, {"device": "2MiB", "disk": tmp_path}, batch=3, prompt=PROMPT, new_tokens=NEW,
                          expand_latents=expand)
        assert torch.equal(tokens(lm), want), source
        lm.close()
    with opened(tmp_path / "bundle", 2 << 20, cache="kv8") as lm:
        assert torch.equal(tokens(lm), tokens(rounded(model, 8)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, at_length(torch.float16)])
def test_narrow_dtypes_stay_near(tmp_path: Path, dtype: torch.dtype) -> None:
    model = small("minicpm3", dtype)
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, 128, (3, PROMPT))
    lm = opened(tmp_path, 1 << 20)
    with torch.no_grad():
        want = model(ids).logits[:, -1].float()
    assert (lm.next_logits(ids).float() - want).norm() < 0.03 * want.norm()
    lm.close()


DISK: dict[str, Any] = {"cache_tier": "disk", "cache_tokens": 4, "micro_batches": 3}
HOST = DISK | {"cache_tier": "host"}


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3", "longcat_flash"])
@pytest.mark.parametrize("options", [
    DISK, HOST, DISK | {"cache_shares": (0.34, 0.34)}, DISK | {"order": "row"},
    HOST | {"micro_batches": 1}, DISK | {"batch_slots": 2},
    DISK | {"prompt_lookup_num_tokens": 3}, {"policy": (50, 0, 40, 30, 100, 0)}], ids=str)
@pytest.mark.parametrize("expand", [True, False])
def test_rows_lie_on_tiers(saved: Saved, family: str, options: dict[str, Any], expand: bool) -> None:
    folder, model = saved(family)
    want = tokens(model)
    lm = forebay.wrap(folder, {"device": "2MiB", "host": "2MiB", "disk": folder}, batch=3, prompt=PROMPT,
                      new_tokens=NEW, prefill_chunk=3, expand_latents=expand, **options)
    assert torch.equal(tokens(lm), want)
    assert lm.plan.schedule.batching.cache.staged and lm.plan.schedule.batching.latents.expanded is expand
    rows = (2 if family == "longcat_flash" else 1) * (RANK + ROPE) * 4
    homes = [b for b in lm.plan.buffers if b.name.startswith("cache_0_")]
    blocks = lm.plan.schedule.batching.cache_blocks(PROMPT + NEW)
    tokens_of = lm.plan.schedule.batching.cache.block_tokens
    each = -(-tokens_of * rows // PAGE_NBYTES) * PAGE_NBYTES  # a block is whole pages
    assert sum(b.nbytes for b in homes) == lm.plan.workload.batch * blocks * each
    lm.close()


def rounded(model: Any, bits: int) -> Any:
    """`model`, whose attention reads what packed rows of its latents stand for."""
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            vars(module)["expand_kv"] = _with_rounded_rows(module.expand_kv, bits)
    return model


def _with_rounded_rows(expand: Any, bits: int) -> Any:
    def expand_kv(latent: torch.Tensor, rotated: torch.Tensor) -> Any:
        rows = torch.cat((latent, rotated), -1)
        group = row_sizes.cache_group_size(rows.shape[-1], bits)
        read = kv_append_q.unpack(kv_append_q.pack(rows, bits, group), rows.shape[-1], bits, group, rows.dtype)
        return expand(*read.split((latent.shape[-1], rotated.shape[-1]), -1))

    return expand_kv


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3", "longcat_flash"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 2}, DISK, HOST, {"batch_slots": 2},
                                     DISK | {"prompt_lookup_num_tokens": 3}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("expand", [True, False])
def test_packed_rows_give_the_tokens_of_what_they_stand_for(
    saved: Saved, family: str, bits: int, options: dict[str, Any], expand: bool
) -> None:
    (folder, _), beams = saved(family), options.get("num_beams", 1)
    want = tokens(rounded(small(family), bits), num_beams=beams)
    lm = forebay.wrap(folder, {"device": "2MiB", "host": "2MiB", "disk": folder}, batch=3 * beams, prompt=PROMPT,
                      new_tokens=NEW, cache=f"kv{bits}", expand_latents=expand,
                      **{k: v for k, v in options.items() if k != "num_beams"})
    assert lm.plan.cache_format == f"kv{bits}" and lm.plan.schedule.batching.latents.expanded is expand
    assert torch.equal(tokens(lm, num_beams=beams), want)
    if not options:
        rows = 3 * (PROMPT + NEW) * row_sizes.cache_row_nbytes(RANK + ROPE, bits)
        assert max(b.nbytes for b in lm.plan.buffers if b.name.startswith("cache_latent")) == rows
    lm.close()


def test_what_rows_cannot_do_is_refused_by_name(saved: Saved) -> None:
    folder, _ = saved("minicpm3")
    with pytest.raises(PlanError, match=r"^cpu_attention or .* this model keeps latents"):
        forebay.wrap(folder, {"device": "1MiB", "host": "1MiB", "disk": folder}, batch=3, prompt=PROMPT,
                     new_tokens=NEW, cpu_attention=True, **HOST)
