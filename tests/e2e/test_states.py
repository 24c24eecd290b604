"""Recurrent and hybrid models: the tokens of a full forward at any budget and in any chunks, for sequences of unequal
length; what states of such layers cannot do is refused by name."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from packaging.version import Version
from safetensors.torch import load_file, save_file
from selection import at_length
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import forebay
from forebay.exported.errors import ExportError
from forebay.rewriter.capture.language_model import CaptureError, capture_model
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.turns import StepTurns
from forebay.runtime.run import draft_choice
from forebay.runtime.run.drafts import Drafted
from forebay.runtime.run.generation import Stop, generate_tokens
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import answer_arriving

pytestmark = [pytest.mark.skipif(Version(T.__version__) < Version("5.23"), reason="mixers are written in another way"),
              pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]
COMMON: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, vocab_size=128, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=2, mamba_d_conv=4, mamba_expand=2)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
             layer_types=["linear_attention", "full_attention", "linear_attention"])
KIMI = EXPERTS | dict(
    n_routed_experts=4, n_group=1, topk_group=1, num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=1, linear_head_dim=16, linear_num_heads=4,
    layer_types=["linear_attention", "full_attention", "linear_attention"])
# name -> (model type, sizes beside COMMON)
FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": dict(layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
    "qwen3_next": DELTA | EXPERTS | dict(shared_expert_intermediate_size=32),
    "granitemoehybrid": MAMBA2 | EXPERTS | dict(layer_types=["mamba", "attention", "mamba"],
                                                shared_intermediate_size=64),
    "mamba": dict(state_size=8),
    "lfm2_moe": EXPERTS | dict(layer_types=["conv", "full_attention", "conv"], num_dense_layers=1),
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS | dict(shared_expert_intermediate_size=32),
    "mamba2": dict(state_size=16, num_heads=8, head_dim=16, n_groups=2),
    "falcon_mamba": dict(state_size=8),
    "jamba": EXPERTS | dict(use_mamba_kernels=False, attn_layer_period=3, attn_layer_offset=1, mamba_d_state=8),
    "bamba": MAMBA2 | dict(attn_layer_indices=[1]),
    "falcon_h1": MAMBA2 | dict(mamba_d_ssm=128),
    "nemotron_h": dict(layers_block_type=["mamba", "mlp", "attention", "mamba"], mamba_num_heads=8, mamba_head_dim=16,
                       ssm_state_size=16, n_groups=2, num_hidden_layers=4),
    "zamba": dict(layers_block_type=["mamba", "hybrid"] * 2, num_hidden_layers=4, n_mamba_heads=2, mamba_d_state=8,
                  use_mamba_kernels=False),
    "zamba2": dict(layers_block_type=["mamba", "hybrid"] * 2, num_hidden_layers=4, num_mem_blocks=1, n_mamba_heads=8,
                   mamba_headdim=16, mamba_d_state=16, mamba_ngroups=2),
    "recurrent_gemma": dict(lru_width=64, attention_window_size=16),
    "olmo_hybrid": DELTA,
    "kimi_linear": KIMI,
    "bailing_hybrid": KIMI,
    "rwkv": dict(attention_hidden_size=96, context_length=64, rescale_every=2),
    "zaya": dict(layer_types=["hybrid", "hybrid_sliding", "hybrid"], sliding_window=4, num_experts=4,
                 num_experts_per_tok=1, moe_intermediate_size=32, router_hidden_size=16, attention_bias=True),
    "minimax": EXPERTS | dict(layer_types=["linear_attention", "full_attention", "linear_attention"], block_size=4),
}  # fmt: skip
DEFAULT = ("lfm2", "qwen3_next", "mamba", "olmo_hybrid")  # whose convolution is stored in three tensors
PROMPT, NEW = 11, 5
LENGTHS = (11, 6, 1)
SHAPE = {"prompt": PROMPT, "new_tokens": NEW}


def small(family: str, dtype: torch.dtype = torch.float32, **others: Any) -> Any:
    """A model with random weights, large enough that states show."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **others})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.normal_(0, 0.12)
    return model.to(dtype)


def greedy(model: Any, prompt: Tensor, new: int = NEW) -> Tensor:
    """By forwards of all tokens: transformers' own second chunk is wrong of Mamba."""
    ids = prompt
    with torch.no_grad():
        for _ in range(new):
            ids = torch.cat((ids, model(ids[None], use_cache=False).logits[0, -1:].argmax(-1)))
    return ids[len(prompt) :]


Saved = Callable[[str], tuple[Path, Any, Tensor, Tensor, Tensor]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A family's model in a folder and in memory, three prompts on the left filled up, and what follows each."""
    known: dict[str, tuple[Path, Any, Tensor, Tensor, Tensor]] = {}

    def save(family: str) -> tuple[Path, Any, Tensor, Tensor, Tensor]:
        if family not in known:
            folder, model = tmp_path_factory.mktemp(family), small(family)
            model.save_pretrained(folder, max_shard_size="200KB")
            ids = torch.randint(3, 128, (len(LENGTHS), PROMPT), generator=torch.Generator().manual_seed(1))
            mask = (torch.arange(PROMPT) >= PROMPT - torch.tensor(LENGTHS)[:, None]).long()
            want = torch.stack([greedy(model, row[PROMPT - n :]) for row, n in zip(ids, LENGTHS, strict=True)])
            known[family] = folder, model, ids, mask, want
        return known[family]

    return save


def tokens(lm: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    found: Tensor = lm.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None,
                                pad_token_id=0, **options)
    return found[:, PROMPT:]


def smallest(folder: Path, **options: Any) -> int:
    with pytest.raises(PlanError, match="the smallest that can is") as refused:
        forebay.wrap(folder, {"device": 1000, "disk": folder}, **SHAPE, **options)
    return int(re.search(r"\((\d+) bytes", str(refused.value))[1])  # type: ignore[index]


@pytest.mark.parametrize("family", [name if name in DEFAULT else at_length(name) for name in FAMILIES])
def test_tokens_are_those_of_a_full_forward(saved: Saved, family: str) -> None:
    folder, model, ids, mask, want = saved(family)
    least, nbytes = smallest(folder, batch=3, prefill_chunk=4), sum(p.nbytes for p in model.parameters())
    for budget in (least, least + nbytes // 3):
        lm = forebay.wrap(folder, {"device": budget, "disk": folder}, batch=3, prefill_chunk=4, **SHAPE)
        for _ in range(2):  # what another call left in a state is nobody's
            assert torch.equal(tokens(lm, ids, mask), want), budget
        assert lm.plan.prediction.streamed_nbytes
        lm.close()


def test_a_model_that_transformers_has_rescaled_is_refused(saved: Saved) -> None:
    with pytest.raises(CaptureError, match="transformers has rescaled its weights in memory"):
        capture_model(saved("rwkv")[1])


@pytest.mark.parametrize(("what", "message"), [
    ("missing", r"holds only a part of model\.layers\.0\..*conv1d\.weight"), ("shape", "which is no part of")])
def test_parts_of_a_convolution_are_all_there(saved: Saved, tmp_path: Path, what: str, message: str) -> None:
    _, model, *_ = saved("olmo_hybrid")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.linear_attn.v_conv1d.weight"
    part = weights.pop(name)
    weights |= {} if what == "missing" else {name: part[:, :, 1:].contiguous()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        forebay.wrap(tmp_path, 1 << 30, **SHAPE)


@pytest.mark.parametrize("chunk", [1, at_length(2), at_length(3), at_length(8), None])
@pytest.mark.parametrize("family", ["mamba2", at_length("qwen3_next"), at_length("lfm2")])
def test_logits_in_chunks_of_any_size(saved: Saved, family: str, chunk: int | None) -> None:
    """Of a step over all tokens, and of one token more: within rounding of a full forward."""
    folder, model, ids, _, _ = saved(family)
    with forebay.wrap(folder, 1 << 30, batch=3, prefill_chunk=chunk, **SHAPE) as lm, torch.no_grad():
        begun = lm(ids[:, :-1])
        torch.testing.assert_close(begun.logits, model(ids[:, :-1], use_cache=False).logits, rtol=1e-4, atol=1e-4)
        more = lm(ids[:, -1:], past_key_values=begun.past_key_values).logits[:, -1]
        torch.testing.assert_close(more, model(ids, use_cache=False).logits[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "options"), [
    ("lfm2", {"micro_batches": 3}), ("lfm2", {"cache": "kv8"}), ("mamba2", {"batch_slots": 3, "prefill_chunk": 2}),
    at_length("lfm2", {"batch_slots": 2, "prefill_chunk": 4}),
    at_length("mamba", {"batch_slots": 2, "prefill_chunk": 4}),
    at_length("qwen3_next", {"batch_slots": 2, "micro_batches": 2})], ids=str)
def test_it_composes(saved: Saved, family: str, options: dict[str, Any]) -> None:
    """Where sequences enter slots and leave them, a new one finds the state of the last, and those that decode keep
    theirs while others' prompts are computed."""
    folder, _, ids, mask, want = saved(family)
    sizes = {} if "batch_slots" in options else {"batch": 3}
    with forebay.wrap(folder, {"device": 4 << 20, "disk": folder}, **sizes, **SHAPE, **options) as lm:
        order = torch.tensor([2, 0, 1, 1, 2, 0, 2]) if "batch_slots" in options else torch.arange(3)
        assert torch.equal(tokens(lm, ids[order], mask[order]), want[order])


@pytest.mark.parametrize("family", ["mamba2", at_length("lfm2"), at_length("mamba"), at_length("qwen3_next")])
def test_sequences_arrive_while_others_decode(saved: Saved, family: str) -> None:
    """Steps that decode, between the chunks of a prompt, leave the states of its slot and of free ones as they are."""
    folder, _, ids, _, want = saved(family)
    waiting = {i: Request(ids[i % 3, PROMPT - LENGTHS[i % 3] :], NEW) for i in (1, 0, 3, 2, 4, 6)}
    expected = {i: want[i % 3].tolist() for i in waiting}
    found: dict[int, list[int]] = {}

    def arriving(free: int, idle: bool) -> dict[int, Request] | None:
        return {i: waiting.pop(i) for i in [*waiting][:1] if free} if waiting else None

    with forebay.wrap(folder, 1 << 30, batch_slots=3, prefill_chunk=2, **SHAPE) as lm, lm.running(
            1, PROMPT, NEW, continuous=True) as session:
        answer_arriving(session, arriving, on_next=lambda *_: True, on_end=found.__setitem__, turns=StepTurns(0.0, 1))
    assert found == expected


class HalfRight:
    """Drafts what is known to follow, of which some tokens are wrong."""

    token_time_s, prefill_s, chance = 0.0, 0.0, 0.5

    def __init__(self, known: list[list[int]]) -> None:
        self.known, self.draw = known, random.Random(3)

    def draft(self, held: Mapping[int, Tensor], most: Mapping[int, int], least: float = 0.0) -> dict[int, Drafted]:
        found = {}
        for row, tokens in held.items():
            whole = next(known for known in self.known if known[: len(tokens)] == tokens.tolist())
            next_ones = whole[len(tokens) : len(tokens) + most[row]]
            found[row] = Drafted(tuple(t if self.draw.random() < 0.6 else (t + 1) % 128 for t in next_ones))
        return found

    def note(self, draft: Drafted, offered: int, right: int) -> None:
        pass


@pytest.mark.parametrize(("family", "options"), [
    ("lfm2", {"batch": 3}), ("mamba2", {"batch_slots": 2}),
    *(at_length(family, options) for family in ("qwen3_next", "mamba", "falcon_h1", "nemotron_h", "recurrent_gemma")
      for options in ({"batch": 3}, {"batch": 3, "micro_batches": 3}, {"batch_slots": 2}))], ids=str)
def test_drafts_change_no_token(saved: Saved, family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
                                ) -> None:
    """With steps of any sizes: states go back where a token was refused, and tokens are replayed in one pass or two."""
    new, draw = 20, random.Random(5)
    monkeypatch.setattr(draft_choice, "best_size", lambda drafts, seen, times_s, replay=None: draw.choice([*times_s]))
    monkeypatch.setattr(draft_choice.SpeculationBudget, "allow", lambda *_: True)
    folder, _, ids, _, want = saved(family)
    prompts = [row[PROMPT - n :] for row, n in zip(ids, LENGTHS, strict=True)]
    with forebay.wrap(folder, {"device": 4 << 20, "disk": folder}, prompt=PROMPT, new_tokens=new, prefill_chunk=5,
                      prompt_lookup_num_tokens=5, **options) as lm:
        assert lm.plan.schedule.speculative_steps == (6, 3, 2)
        with lm.running(3, PROMPT, new, continuous="batch_slots" in options) as session:
            plain = generate_tokens(session, prompts, Sampling(), Stop(new))
            assert torch.equal(plain[:, :NEW], want)
            known = [[*prompt.tolist(), *tokens] for prompt, tokens in zip(prompts, plain.tolist(), strict=True)]
            for _ in range(2):
                tally = WorkDone()
                found = generate_tokens(session, prompts, Sampling(), Stop(new), None, None, HalfRight(known), tally)
                assert torch.equal(found, plain)
                assert tally.accepted > 3 and tally.refused > 3 and {2, 3, 6} <= tally.steps.keys()


@pytest.mark.parametrize("slots", ["batch", "batch_slots"])
def test_short_prompts_have_drafts_too(saved: Saved, slots: str) -> None:
    """Steps over two tokens, which replay accepted ones, are planned as well as those that compute a prompt of two."""
    folder, model, ids, _, _ = saved("lfm2")
    prompts, sizes = ids[:2, :2], {"prompt": 2, "new_tokens": 9}
    with forebay.wrap(folder, 4 << 20, prompt_lookup_num_tokens=5, **{slots: 2}, **sizes) as lm:
        assert lm.plan.schedule.speculative_steps[-1] == 2
        found = lm.generate(prompts, max_new_tokens=9, do_sample=False, eos_token_id=None)
    assert torch.equal(found[:, 2:], torch.stack([greedy(model, row, 9) for row in prompts]))


@pytest.mark.parametrize(("family", "tier"), [
    ("lfm2", "disk"), ("mamba2", "host"), *(at_length(family, tier) for tier in ("disk", "host") for family in (
        "qwen3_next", "mamba", "falcon_h1", "nemotron_h", "granitemoehybrid"))])
def test_states_lie_on_slower_tiers(saved: Saved, family: str, tier: str) -> None:
    """They come for a turn and go whole, beside blocks of other layers' caches, at any budget."""
    folder, model, ids, mask, want = saved(family)
    way = {"batch": 3, "micro_batches": 3, "cache_tier": tier, "prefill_chunk": 4}
    host = {"host": 1 << 22} if tier == "host" else {}
    with pytest.raises(PlanError, match="the smallest that can is") as refused:
        forebay.wrap(folder, {"device": 1000, "disk": folder, **host}, **SHAPE, **way)
    least = int(re.search(r"\((\d+) bytes", str(refused.value))[1])  # type: ignore[index]
    for budget in (least, least + sum(p.nbytes for p in model.parameters()) // 2):
        with forebay.wrap(folder, {"device": budget, "disk": folder, **host}, **SHAPE, **way) as lm:
            for _ in range(2):
                assert torch.equal(tokens(lm, ids, mask), want), budget
            homes = {b.arena for b in lm.plan.buffers if b.kind == "cache" and b.name.startswith("cache_0_")}
            assert homes == {"cache" if tier == "disk" else "host"} or family == "falcon_h1"


def test_drafts_are_checked_over_states_on_the_disk(saved: Saved) -> None:
    folder, _, ids, mask, want = saved("lfm2")
    with forebay.wrap(folder, {"device": 1 << 21, "disk": folder}, batch=3, micro_batches=3, cache_tier="disk",
                      prompt_lookup_num_tokens=3, **SHAPE) as lm:
        assert torch.equal(tokens(lm, ids, mask), want)


def test_states_are_told_apart_from_the_cache(saved: Saved) -> None:
    """They take as much however long the context is."""
    told = {}
    for prompt in (PROMPT, 2 * PROMPT):
        with forebay.wrap(saved("qwen3_next")[0], "4MiB", prompt=prompt, new_tokens=PROMPT) as lm:
            told[prompt] = re.search(r"([\d.]+ KiB) of states and ([\d.]+ KiB) of cache", lm.explain())
    short, long = told[PROMPT], told[2 * PROMPT]
    assert short and long and short[1] == long[1]
    assert float(long[2].split()[0]) > 1.4 * float(short[2].split()[0])


def test_a_last_chunk_needs_room(saved: Saved) -> None:
    with pytest.raises(PlanError, match=r"prefill_chunk: chunks of \(8,\) tokens end past the 12 of prompt and answer"):
        forebay.wrap(saved("lfm2")[0], 1 << 30, prompt=11, new_tokens=1, batch_slots=2, prefill_chunk=8)


def test_beams_take_over_states(saved: Saved) -> None:
    folder, model, ids, mask, _ = saved("lfm2")
    with forebay.wrap(folder, 1 << 30, batch=3, **SHAPE) as lm:
        found = tokens(lm, ids[:1], mask[:1], num_beams=3)
        assert torch.equal(found, tokens(model, ids[:1], mask[:1], num_beams=3))
        assert not torch.equal(found, tokens(model, ids[:1], mask[:1]))  # beams change slots here


def test_a_bundle_keeps_states(saved: Saved, tmp_path: Path) -> None:
    folder, _, ids, mask, want = saved("mamba2")
    forebay.export(folder, tmp_path / "bundle", "bundle", budget={"device": 1 << 30, "disk": tmp_path})
    with forebay.wrap(tmp_path / "bundle", 1 << 30, batch=3, **SHAPE) as lm:
        assert torch.equal(tokens(lm, ids, mask), want)


def test_bf16_stays_near(tmp_path: Path) -> None:
    model = small("lfm2", torch.bfloat16)
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, 128, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    with forebay.wrap(tmp_path, 1 << 30, batch=2, prefill_chunk=4, **SHAPE) as lm, torch.no_grad():
        want = model(ids, use_cache=False).logits[:, -1].float()
        assert (lm.next_logits(ids).float() - want).norm() < 0.03 * want.norm()


@pytest.mark.parametrize(("options", "message"), [
    ({"cache_tier": "disk", "batch_slots": 8}, "^batch_slots or .*sequences: the cache lies on the tier disk, "
     "from where some states .* leave batch_slots out"),
    ({"policy": (100, 0, 0, 100, 100, 0), "batch_slots": 8}, "^batch_slots or .* tier host, .* cache_tier or policy"),
    ({"cache_tier": "host", "cpu_attention": True}, "^cpu_attention or .*: the cache lies on the tier host"),
    ({"prefill_chunk": 2, "prompt_lookup_num_tokens": 3}, "^prompt_lookup_num_tokens: .* another prefill_chunk"),
    ({"draft": "itself"}, "draft: layer 0 keeps a state of kind convolution, which is not rewindable"),
    ({"checkpoints": True}, "checkpoints")], ids=str)  # fmt: skip
def test_what_states_cannot_do_is_refused_by_name(saved: Saved, options: dict[str, Any], message: str) -> None:
    folder = saved("lfm2")[0]
    if "draft" in options:
        options = {"draft": folder}
    with pytest.raises(PlanError, match=message):
        forebay.wrap(folder, {"device": 1 << 30, "host": 1 << 20, "disk": folder}, **SHAPE, **options)


def test_a_family_with_states_may_have_attention_alone(saved: Saved, tmp_path: Path) -> None:
    model, (*_, ids, mask, _) = small("qwen3_next", layer_types=["full_attention"] * 3), saved("qwen3_next")
    model.save_pretrained(tmp_path)
    with forebay.wrap(tmp_path, 1 << 30, batch=3, **SHAPE) as lm:
        found = tokens(lm, ids, mask)
    want = [greedy(model, row[PROMPT - n :]) for row, n in zip(ids, LENGTHS, strict=True)]
    assert torch.equal(found, torch.stack(want))


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_others_cannot_keep_states(saved: Saved, tmp_path: Path, format: Any) -> None:
    with pytest.raises(ExportError, match=f"an export as {format}: layer 0 keeps a state of kind convolution"):
        forebay.export(saved("lfm2")[0], tmp_path / "out", format)


@pytest.mark.parametrize(("kind", "sizes", "said"), [
    ("deepseek_v4", {}, "attend to a window of tokens and to compressed ones before it by one softmax"),
    ("mamba", {"hidden_act": "gelu"}, "its short convolution ends in gelu, where silu is all that is implemented")])
def test_mixers_of_other_kinds_are_refused(kind: str, sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture_model(AutoConfig.for_model(kind, **COMMON, **sizes))
