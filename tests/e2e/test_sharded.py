"""Models on two and four ranks over gloo, which share layers or take some each: tokens, bytes, proofs, plans that go
together, and ranks that fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers as T
from budgets import attention_nbytes
from on_ranks import Nursery
from selection import ALL, at_length, covering
from small_experts import small_config

import forebay
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.ir.plan import Budget

PROMPTS = [[5, 17, 80, 33, 9, 101, 44], [7, 150, 21], [60, 61, 12, 13, 77]]
NEW = 6


def wide_llama(heads: int = 9, kv_heads: int = 3) -> T.LlamaConfig:
    """As SmolLM2: heads that ranks cannot share evenly."""
    return families.llama(2, hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8)


def deep_bigcode() -> T.GPTBigCodeConfig:
    return families.bigcode(4)


def qwen3_moe() -> T.Qwen3MoeConfig:
    """Experts that ranks cannot share evenly."""
    return T.Qwen3MoeConfig(**MIXTURE | dict(num_experts=5, head_dim=16, num_key_value_heads=2))


def deepseek_v3() -> T.DeepseekV3Config:
    """Latent attention, and shared experts beside those that ranks divide."""
    return T.DeepseekV3Config(**MIXTURE | dict(
        n_routed_experts=8, n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=32,
        kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=4))


MIXTURE: dict[str, Any] = dict(
    vocab_size=families.VOCAB, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_experts_per_tok=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
    eos_token_id=2)
def recurrent(kind: str, **sizes: Any) -> T.PreTrainedConfig:
    """A model whose layers keep states, of sizes that all families have."""
    return T.AutoConfig.for_model(
        kind, hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=256, num_attention_heads=4,
        num_key_value_heads=2, head_dim=sizes.pop("head_dim", 16), pad_token_id=0, max_position_embeddings=64, **sizes)


DEEP = {"deep llama": lambda: families.llama(4), "deep opt": lambda: families.opt(4),
        "deep gpt_neox": lambda: families.gpt_neox(4), "deep bigcode": deep_bigcode}
KINDS = {**families.FAMILIES, "bigcode": families.bigcode, "gptj": families.gptj, "cohere": families.cohere,
         "bloom": families.bloom, "uneven": wide_llama, **DEEP, "qwen3_moe": qwen3_moe, "deepseek_v3": deepseek_v3,
         "gpt_oss": lambda: small_config("gpt_oss", num_hidden_layers=2, sliding_window=6, vocab_size=families.VOCAB),
         "lfm2": lambda: recurrent("lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
         "mamba2": lambda: recurrent("mamba2", state_size=16, num_heads=8, head_dim=16, n_groups=2),
         "qwen3_next": lambda: recurrent(
             "qwen3_next", linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
             linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"], num_experts=4,
             num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32),
         "large": lambda: families.llama(2, hidden_size=256, head_dim=64, intermediate_size=512),
         "broad": lambda: families.llama(2, hidden_size=128, head_dim=32, intermediate_size=128)}


@dataclass(frozen=True)
class Case:
    """A model, how it is wrapped on each rank, and what is asked of `generate`."""

    kind: str
    wrapped: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    share: int = 420_000  # bytes of the device beside what operators take here

    @property
    def budget(self) -> Budget:
        return Budget(self.share + beside_nbytes(self.kind), 0, self.wrapped.get("disk"))


def beside_nbytes(kind: str) -> int:
    """What attention takes beyond what our kernel does with two threads (`budgets`)."""
    heads, head_dim = (9, 8) if kind == "uneven" else (4, 16)
    return max(0, attention_nbytes(len(PROMPTS), heads, 8 + NEW, head_dim, 10))


def _save(kind: str, folder: Path, **options: Any) -> None:
    torch.manual_seed(3)
    model = T.AutoModelForCausalLM.from_config(KINDS[kind]()).eval()
    for name, p in model.named_parameters():
        p.data.normal_(0, 0.3 if p.dim() > 1 else 0.1)
        if p.dim() == 1 and ("norm" in name or "ln" in name):
            p.data.add_(1.0)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def _placed(folder: Path, cases: list[Case]) -> list[Case]:
    """The cases with the folders of their models, which are made once."""
    placed = []
    for case in cases:
        kind, _, format_ = case.kind.partition("+")
        own = folder / kind
        if not own.exists():
            _save(kind, own)
        if format_:
            packed = folder / f"{kind}-{format_}"
            if not packed.exists():
                quantize_model(own, packed, Wish(format_))
            own = packed
        placed.append(Case(case.kind, {"disk": str(folder)} | case.wrapped, case.asked, str(own), case.share))
    return placed


def answers(cases: list[Case], mesh: str | None) -> list[Any]:
    """Tokens of every case on this rank, or by itself."""
    found = []
    for case in cases:
        wrapped = {name: value for name, value in case.wrapped.items() if name != "disk"}
        options = {"batch": len(PROMPTS), "prompt": 8, "new_tokens": NEW, "mesh": mesh} | wrapped
        if mesh is None:
            options.pop("mesh")
        with forebay.wrap(case.folder, case.budget, **options) as lm:
            width = max(map(len, PROMPTS))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
            out = lm.generate(ids, attention_mask=mask, max_new_tokens=NEW,
                              **({"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | case.asked))
            found.append((out.tolist(), lm.plan.prediction.streamed_nbytes, lm.plan.prediction.peak_nbytes["device"],
                          lm.plan.schedule.step_sizes))
    return found


def answers_of_ranks(nursery: Nursery, ranks: int, cases: list[Case]) -> list[list[Any]]:
    return nursery.on_ranks(ranks, answers, cases, str(ranks), traced=[
        (case.folder, case.wrapped.get("mesh", ranks)) for case in cases])


def _expected(case: Case) -> list[list[int]]:
    """transformers' own tokens, float32."""
    model = T.AutoModelForCausalLM.from_pretrained(case.folder).eval()
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None,  # type: ignore[no-any-return]
                          pad_token_id=0).tolist()


STAGES = {"mesh": {"stages": 2}}
TWO = [Case("llama"), Case("opt"), Case("gpt_neox"), Case("bigcode"), Case("uneven"), Case("gpt2"), Case("phi3"),
       Case("gptj"), Case("cohere"), Case("bloom"), Case("qwen3_moe"), Case("gpt_oss"),
       Case("deepseek_v3", {"expand_latents": True}),
       Case("qwen3_moe", {"expert_slots": 2}, share=350_000), Case("qwen3_moe", {"mesh": {"stages": 2}}),
       Case("llama", {"cache_tier": "disk", "micro_batches": 3}), Case("opt", {"batch_slots": 2}),
       Case("gemma2", share=500_000)]
FOUR = [Case("llama"), Case("gpt_neox"), Case("bigcode"), Case("uneven"), Case("opt", {"micro_batches": 3})]
TWO += [Case("llama", STAGES | {"cache_tier": "disk", "micro_batches": 3}),
        Case("gpt_neox", STAGES | {"micro_batches": 3, "order": "row"})]
WIDE = {"mesh": "tensor=2x2,layout=2d"}
FOUR += [Case(kind, WIDE, share=500_000) for kind in ("llama", "opt", "gpt_neox", "bigcode", "uneven", "gpt2")]
FOUR += [Case("llama", WIDE | {"cache_tier": "disk", "micro_batches": 3}), Case("opt", WIDE | {"batch_slots": 2})]
FOUR += [Case("bigcode", {"mesh": "stages=2,tensor=2"}), Case("deep opt", {"mesh": {"stages": 4}})]
OWN, WIDE_OWN = {"mesh": "tensor=2,attention=batch"}, {"mesh": "tensor=2x2,layout=2d,attention=batch"}
TWO += [Case(kind, OWN, share=500_000) for kind in ("llama", "bigcode", "uneven", "gpt2", "phi3")]
TWO += [Case("gpt_neox", OWN | {"micro_batches": 2}, share=500_000)]
FOUR += [Case("bigcode", {"mesh": {"tensor": 4, "attention": "batch"}}, share=500_000)]
FOUR += [Case(kind, WIDE_OWN, share=500_000) for kind in ("llama", "bigcode", "gpt_neox", "uneven")]
FOUR += [Case("opt", {"mesh": "stages=2,tensor=2,attention=batch"})]
X, XYZ = {"mesh": "tensor=2x2,layout=x"}, {"mesh": "tensor=2x2,layout=xyz"}
TWO += [Case(kind, {"mesh": "tensor=2,layout=xyz"}, share=700_000) for kind in ("llama", "bigcode", "phi3")]
FOUR += [Case(kind, XYZ, share=700_000) for kind in ("llama", "gpt_neox", "gpt2")]
FOUR += [Case(kind, X, share=700_000) for kind in ("llama", "bigcode")] + [Case("opt", X | {"micro_batches": 2})]
AHEAD_XYZ, AHEAD_X = ({"mesh": f"{each['mesh']},gather_buffers=2", "prefill_chunk": 8} for each in (XYZ, X))
TWO += [Case(kind, {"mesh": "tensor=2,layout=xyz,gather_buffers=2"}, share=700_000) for kind in ("llama", "gpt2")]
TWO += [Case("gpt_neox", {"mesh": "tensor=2,layout=xyz,gather_buffers=1", "micro_batches": 2}, share=700_000)]
FOUR += [Case("opt", AHEAD_XYZ, share=700_000), Case("bigcode", AHEAD_X, share=700_000),
         Case("llama", AHEAD_X, share=700_000)]
LOOPED, ONE = {"mesh": "tensor=2,chunks=4/2"}, {"mesh": "tensor=2,chunks=3/1"}
TWO += [Case(kind, LOOPED) for kind in ("llama", "gpt_neox", "uneven", "gpt2")]
TWO += [Case("opt", ONE | {"batch_slots": 2}), Case("bigcode", ONE | {"cache_tier": "disk", "micro_batches": 3})]
FOUR += [Case(kind, {"mesh": f"{WIDE['mesh']},chunks=2"}, share=500_000) for kind in ("llama", "gpt_neox", "uneven")]
FOUR += [Case("gpt2", {"mesh": f"{WIDE_OWN['mesh']},chunks=4/1"}, share=500_000),
         Case("opt", {"mesh": "stages=2,tensor=2,chunks=2"})]
AHEAD = {"mesh": f"{WIDE['mesh']},gather_chunks=4/2"}
FOUR += [Case(kind, AHEAD, share=500_000) for kind in ("llama", "gpt_neox", "gpt2", "bigcode")]
FOUR += [Case("opt", {"mesh": f"{WIDE_OWN['mesh']},chunks=2/1,gather_chunks=2/1"}, share=500_000),
         Case("uneven", {"mesh": f"{WIDE['mesh']},gather_chunks=3/1"}, share=500_000),
         Case("opt", {"mesh": f"{WIDE['mesh']},gather_chunks=2"})]
TWO += [Case("lfm2", share=500_000), Case("qwen3_next", STAGES | {"prefill_chunk": 4}, share=500_000)]
FOUR += [Case("lfm2", {"mesh": "stages=2,tensor=2"}, share=500_000)]
EIGHT = [Case("bigcode", {"mesh": "stages=2,tensor=2x2,layout=2d,attention=batch"})]
MORE = [Case(kind, share=500_000) for kind in (
    "qwen2", "qwen3", "mistral", "opt_projected", "llama4", "gemma2", "deepseek_v3")] if ALL else []
if MORE:
    EIGHT += [Case(kind, {"mesh": "stages=2,tensor=2x2,layout=2d"}) for kind in DEEP]
    FOUR += [Case(kind, wide, share=500_000) for wide in (WIDE, WIDE_OWN) for kind in (
        "qwen2", "qwen3", "mistral", "opt_projected", "llama4", "gemma2", "phi3")]
    WAYS: list[dict[str, Any]] = [{}, {"micro_batches": 3}, {"micro_batches": 3, "order": "row"}, {"batch_slots": 2},
                                  {"cache_tier": "disk", "micro_batches": 3}]
    TWO += [Case(kind, STAGES | way) for kind in DEEP for way in WAYS]
    FOUR += [Case(kind, {"mesh": mesh} | way) for kind in DEEP for way in WAYS
             for mesh in ("stages=4", "stages=2,tensor=2")]


LIKE_OTHERS = ("phi3", "gptj", "cohere", "gemma2", "lfm2")  # their parts are those of gpt_neox, llama and qwen3_next


def each_once(cases: list[Case]) -> list[Case]:
    """Some of the cases, in which each model comes about that has other parts, and each other option."""
    cases = [case for case in cases if case.kind not in LIKE_OTHERS]
    return [cases[i] for i in covering([(case.kind, *cell(case), repr(
        {name: value for name, value in case.wrapped.items() if name != "mesh"})) for case in cases], 1)]


def each_mesh(cases: list[Case]) -> list[Case]:
    """Some of the cases, in which each mesh comes about, and heads that ranks cannot share evenly: models and schedules
    are those of two ranks."""
    return [cases[i] for i in covering([(case.kind == "uneven", *cell(case)) for case in cases], 1)]


def cell(case: Case) -> tuple[object, ...]:
    """Of meshes each layout with either attention, stages with it and without, and each kind of chunks, whatever their
    numbers are."""
    given = case.wrapped.get("mesh", "tensor=0")
    mesh = given if isinstance(given, dict) else dict(part.split("=") for part in given.split(","))
    return ((mesh.get("layout"), mesh.get("attention"), "stages" in mesh, "tensor" in mesh),
            *(name in mesh for name in ("chunks", "gather_chunks", "gather_buffers")))


@pytest.mark.parametrize(("ranks", "cases"), [
    (2, [*TWO, *MORE] if ALL else each_once(TWO)), (4, [*FOUR, *MORE] if ALL else each_mesh(FOUR)),
    at_length(8, EIGHT)])
def test_tokens_are_those_of_transformers(folder: Path, nursery: Nursery, ranks: int, cases: list[Case]) -> None:
    placed = _placed(folder, cases)
    by_rank = answers_of_ranks(nursery, ranks, placed)
    for i, case in enumerate(placed):
        expected = _expected(case)
        for rank, found in enumerate(by_rank):
            assert found[i][0] == expected, (case, rank)
            assert found[i][2] <= case.budget.device


def test_packed_weights_and_draws_are_those_of_one_device(folder: Path, nursery: Nursery) -> None:
    two = [Case("opt+w4g32", STAGES), Case("qwen3_moe+w4g32")]
    four = [Case("gpt_neox+w8g16", {"mesh": f"{WIDE['mesh']},chunks=2/1"}), Case("opt", {"cache": "kv8"} | WIDE),
            Case("broad+w4g16", {"mesh": f"{WIDE['mesh']},gather_chunks=2"})]
    if ALL:
        two += [Case("llama+w8g32"), Case("opt+w4g32"), Case("llama+w8g32", ONE), Case("llama", {"cache": "kv8"}),
                Case("opt+w4g32", LOOPED)]
        four += [Case("gpt2+w8g16", XYZ, share=900_000), Case("llama+w4g16", WIDE), Case("opt", {"cache": "kv8"} | X)]
    for ranks, cases in ((2, _placed(folder, two)), (4, _placed(folder, four))):
        alone = answers([Case(c.kind, {n: v for n, v in c.wrapped.items() if n != "mesh"}, c.asked, c.folder, 1_100_000)
                         for c in cases], None)
        for found in answers_of_ranks(nursery, ranks, cases):
            assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in alone]
    drawn = _placed(folder, [Case("llama", asked={"do_sample": True, "temperature": 1.5})])
    one, other = answers_of_ranks(nursery, 2, drawn)
    assert one[0][0] == other[0][0]


def test_each_rank_streams_its_part_alone(folder: Path, nursery: Nursery) -> None:
    cases = _placed(folder, [Case("llama", share=330_000)])
    (alone,), halves = answers(cases, None), answers_of_ranks(nursery, 2, cases)
    assert alone[1] > 0
    for (half,) in halves:
        assert 0 < half[1] < 0.5 * alone[1]  # half of the weights, of which more stay


def test_weights_that_are_gathered_stream_as_well(folder: Path, nursery: Nursery) -> None:
    """Whole, for both kinds of steps read the same pieces, and only one multiplies by them as they lie."""
    (case,) = _placed(folder, [Case("llama", {"mesh": "tensor=2,layout=xyz", "prefill_chunk": 8}, share=455_000)])
    for (found,) in answers_of_ranks(nursery, 2, [case]):
        assert found[0] == _expected(case) and found[1] > 0 and found[3] == (1, 8)
    xyz = "tensor=2,layout=xyz"
    large = _placed(folder, [Case("large", {"mesh": f"{xyz},gather_buffers={n}", "prefill_chunk": 8}, share=share)
                             for n, share in ((0, 2_900_000), (2, 4_000_000))])
    for found in answers_of_ranks(nursery, 2, large):
        for tokens, streamed, *_ in found:
            assert tokens == _expected(large[0]) and streamed > 500_000, "parts of what is gathered stream too"


def programs(case: Case, mesh: str) -> list[Any]:
    """(collectives of each step as kind, ranks, bytes; whether the Program without any one of its Waits is proved), as
    planned with our kernels: which Waits there are depends on what streams. Ranks, whose Waits are alike, each leave
    out a share of them; `make test-all` has each leave out all."""
    from forebay.kernels.cpu_support import native
    from forebay.rewriter.ir.program import COLLECT, Launch, Program, Wait
    from forebay.rewriter.verify.program import ProgramError, verify_program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load", lambda: object())
        lm = forebay.wrap(case.folder, case.budget, batch=3, prompt=8, new_tokens=NEW, mesh=mesh)
        found = []
        for tokens in lm.plan.schedule.step_sizes:
            program = lm.steps.program(tokens)
            launches = [i for i in program.step if isinstance(i, Launch) and i.stream == COLLECT]
            proved = []
            waits = [(i, item) for i, item in enumerate(program.step) if isinstance(item, Wait)]
            for number, (i, item) in enumerate(waits):
                if ALL or number % int(os.environ["WORLD_SIZE"]) == int(os.environ["RANK"]):
                    less = Program(**{f: getattr(program, f) for f in program.__dataclass_fields__} | {
                        "step": (*program.step[:i], *program.step[i + 1 :])})
                    try:
                        verify_program(less)
                        proved.append((i, item))
                    except ProgramError:
                        pass
            found.append(([(i.op.split(".")[1], i.args[-1], i.out[0].shape, i.out[0].dtype) for i in launches], proved))
        return found


def test_of_two_dimensions_every_wait_is_needed(folder: Path, nursery: Nursery) -> None:
    """Along the wide axis numbers of norms, partial sums and features cross, along the other one sums."""
    (case,) = _placed(folder, [Case("opt", share=300_000)])
    for found in nursery.on_ranks(4, programs, case, WIDE["mesh"], traced=[(case.folder, WIDE["mesh"])]):
        for exchanged, proved in found:
            layer = ["all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_into_tensor", "all_reduce"] * 2
            assert [op for op, *_ in exchanged] == layer * 2 + ["all_gather_into_tensor"] * 3
            assert not proved, f"without {proved[:2]} a step is proved all the same"


def test_attention_over_the_batch_waits_for_what_it_reads(folder: Path, nursery: Nursery) -> None:
    (case,) = _placed(folder, [Case("opt", share=500_000)])
    for found in nursery.on_ranks(2, programs, case, OWN["mesh"], traced=[(case.folder, OWN["mesh"])]):
        for exchanged, proved in found:
            assert [op for op, *_ in exchanged] == ["all_to_all_single", "all_to_all_single", "all_reduce",
                                                    "all_reduce"] * 2 + ["all_gather_into_tensor"]
            assert exchanged[0][2][:2] == (2, 2)  # of four sequences, three of which are asked for
            assert not proved, f"without {proved[:2]} a step is proved all the same"


def test_of_sums_in_chunks_the_last_is_waited_for(folder: Path, nursery: Nursery) -> None:
    """Which are exchanged in order, so that no other wait is there; beside the product of the next, which comes before
    any wait."""
    (case,) = _placed(folder, [Case("opt", share=500_000)])
    for found in nursery.on_ranks(2, programs, case, LOOPED["mesh"], traced=[(case.folder, LOOPED["mesh"])]):
        for (exchanged, proved), chunks in zip(found, (2, 4), strict=True):
            assert [op for op, *_ in exchanged] == ["all_reduce"] * chunks * 4 + ["all_gather_into_tensor"]
            assert {shape[-1] for op, _, shape, _ in exchanged if op == "all_reduce"} == {64 // chunks}
            assert not proved, f"without {proved[:2]} a step is proved all the same"


def test_of_inputs_in_chunks_each_is_waited_for(folder: Path, nursery: Nursery) -> None:
    """By its own product, not by those before it: their exchanges are all under way then."""
    (case,) = _placed(folder, [Case("opt", share=500_000)])
    for found in nursery.on_ranks(4, programs, case, AHEAD["mesh"], traced=[(case.folder, AHEAD["mesh"])]):
        for (exchanged, proved), gathers in zip(found, (2, 4), strict=True):
            layer = ["all_gather_into_tensor", "reduce_scatter_tensor", *["all_gather_into_tensor"] * gathers,
                     "all_reduce"] * 2
            assert [op for op, *_ in exchanged] == layer * 2 + ["all_gather_into_tensor"] * 3
            assert not proved, f"without {proved[:2]} a step is proved all the same"


def job_answers(folder: str, budget: int, mesh: str, batch_slots: int) -> tuple[int, int, list[list[int]]]:
    """Prompts at once, those that enter while others run, and the answers to five, as a job has them."""
    from functools import partial

    from forebay.build_model import build_model
    from forebay.open_model import open_model
    from forebay.rewriter.ir.plan import Workload
    from forebay.rewriter.pipeline.plan_search import plan_slots
    from forebay.rewriter.planning.options import Options
    from forebay.runtime.run.request import Request
    from forebay.runtime.run.sampling import Sampling

    found: dict[int, list[int]] = {}
    with build_model(open_model(folder), Budget(budget, 0), Workload(5, 8, NEW), Options(mesh=mesh),
                     partial(plan_slots, slots=batch_slots)) as lm:
        lm.answer_all([Request(torch.tensor(ids), NEW) for ids in (*PROMPTS, *PROMPTS[:2])], Sampling(), frozenset(),
                      on_end=found.__setitem__, on_step=lambda work: None)
        return lm.plan.workload.batch, lm.plan.schedule.batching.admitted, [found[i] for i in range(5)]


def test_a_job_of_more_sequences_than_ranks_have_room_for_takes_rounds(folder: Path, nursery: Nursery) -> None:
    (case,) = _placed(folder, [Case("bigcode", share=500_000)])
    expected = [tokens[-NEW:] for tokens in _expected(case)]
    for batch, admitted, tokens in nursery.on_ranks(2, job_answers, case.folder, case.budget.device, OWN["mesh"], 2,
                                                    traced=[(case.folder, OWN["mesh"])]):
        assert (batch, admitted) == (2, 0) and tokens == [*expected, *expected[:2]]


def test_collectives_are_counted_and_every_wait_is_needed(folder: Path, nursery: Nursery) -> None:
    (case,) = _placed(folder, [Case("opt")])
    one, other = nursery.on_ranks(2, programs, case, "2", traced=[(case.folder, 2)])
    for (mine, proved), (theirs, _) in zip(one, other, strict=True):
        assert mine == theirs
        sums = [(op, group) for op, group, *_ in mine]
        assert sums == [("all_reduce", "ranks:0,1")] * 4 + [("all_gather_into_tensor", "ranks:0,1")]
        assert mine[0][2][-1] == 64 and mine[0][3] == "float32" and mine[0][2][0] in (3, 3 * mine[0][2][1])
        assert not proved, f"without {proved[:2]} a step is proved all the same"


def refusals(folder: str) -> list[str]:
    """What is said on this rank of what cannot be."""
    found = []
    rank = int(os.environ["RANK"])
    enough = 420_000 + beside_nbytes("llama")
    for budget, options in ((30_000, {}), (enough, {"mesh": "4"}), (enough, {"draft": "w4"}), (enough, {"mesh": "x"}),
                            (40_000 if rank else enough, {}), (enough, {"mesh": "tensor=2,attention=rows"}),
                            (enough, OWN | {"cache_tier": "disk"}), (enough, OWN | {"batch_slots": 2}),
                            (enough, {"mesh": "tensor=2,layout=xy"}), (enough, {"mesh": "stages=2,tensor=2,layout=x"}),
                            (enough, {"mesh": "tensor=2,chunks=3/2"}), (enough, {"mesh": "tensor=2,chunks=128"}),
                            (enough, {"mesh": "tensor=2,layout=xyz,chunks=2"}),
                            (enough, {"mesh": "tensor=2,gather_chunks=2"})):
        try:
            forebay.wrap(folder, budget, batch=3, prompt=8, new_tokens=NEW, **({"mesh": "2"} | options))
            found.append("")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    lm = forebay.wrap(folder, enough, batch=3, prompt=8, new_tokens=NEW, mesh="2")
    try:
        lm.generate(torch.tensor([[5, 6 + rank]]), max_new_tokens=2)
    except ValueError as error:
        found.append(str(error))
    with forebay.wrap(folder, 2 * enough, batch=2, prompt=8, new_tokens=NEW, **OWN) as lm:
        try:
            lm.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=3, num_beams=2, do_sample=False)
        except RuntimeError as error:
            found.append(str(error))
        prompt, said = torch.tensor([PROMPTS[1]]), ["the other rank asks for nothing"]

        def again(column: torch.Tensor) -> None:
            try:
                said.append(str(lm.generate(prompt, max_new_tokens=2)))
            except RuntimeError as error:
                said.append(str(error))

        alone = lm.generate(prompt, max_new_tokens=3)
        whole = lm.generate(prompt, max_new_tokens=3, on_token=None if rank else again)
        assert torch.equal(alone, whole) and all(
            each.startswith("generate: the model is in the middle of generate") for each in said[1:])
        assert len(said) == (1 if rank else 4)
    return found


def test_what_cannot_be_is_said_alike_on_all_ranks(folder: Path, nursery: Nursery) -> None:
    (case,) = _placed(folder, [Case("llama")])
    one, other = nursery.on_ranks(2, refusals, case.folder, traced=[(case.folder, 2)])
    assert one == other
    small, ranks, draft, shape, unequal, divided, moved, entered, axes, staged, uneven, *more = one
    many, gathers, inputs, given, beams = more
    assert "leave gather_chunks out" in inputs
    assert "of which one divides the other" in uneven and "take fewer chunks" in many and (
        "leave chunks and gather_chunks out" in gathers)
    assert "1 axis with layout=x, 2 with xy" in axes and "without stages" in staged
    assert "heads, batch" in divided and "leave cache_tier out" in moved and "leave batch_slots out" in entered
    assert "take attention=heads" in beams
    assert small.startswith("PlanError: rank 0: ") and "start as many with torchrun --nproc-per-node=4" in ranks
    assert "leave draft or mesh out" in draft and "as 4, 2x2 or stages=2,tensor=2" in shape
    assert unequal.startswith("PlanError: rank 1: ") and "different arguments" in given


def unlike(folder: str) -> list[Any]:
    """What is said of calls and models that are not alike, and what calls behind them give."""
    from forebay.runtime.comm.faults import rank_fault

    rank, ids = int(os.environ["RANK"]), torch.tensor([PROMPTS[0][:5], PROMPTS[2]])
    plain = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with forebay.wrap(folder, 2_000_000, batch=2, prompt=8, new_tokens=NEW, mesh="2") as lm:
        found, expected = [], lm.generate(ids, **plain).tolist()
        for call in ({"input_ids": ids + rank}, {"attention_mask": torch.ones_like(ids) - (ids == 5) * rank},
                     {"eos_token_id": [2, 3 + rank]}, {"generation_config": T.GenerationConfig(top_k=5 + rank)},
                     {"generator": torch.Generator().manual_seed(rank)}, {"max_new_tokens": 1000}):
            try:
                lm.generate(**({} if "input_ids" in call else {"inputs": ids}), **plain | call)
            except ValueError as error:
                found.append(str(error))
        assert rank_fault() is None
        plan = None if rank else lm.plan
        if rank:
            lm.close()
        found.append(lm.generate(ids, **plain).tolist() == expected)
    for options in ({"cache": "kv8" if rank else "native"}, {"mesh": "stages=2" if rank else "2"}, {"plan": plan}):
        try:
            forebay.wrap(folder, 2_000_000, batch=2, prompt=8, new_tokens=NEW, **({"mesh": "2"} | options))
        except ValueError as error:
            found.append(str(error))
    return found


def test_calls_that_are_not_alike_are_refused_and_harm_none_behind_them(folder: Path, nursery: Nursery) -> None:
    (case,) = _placed(folder, [Case("llama")])
    one, other = nursery.on_ranks(2, unlike, case.folder)  # each traces for itself
    assert one == other and len(one) == 10
    assert all("ranks were given different arguments" in said for said in one[:5])
    assert "exceed the model's 128 positions" in one[5] and one[6] is True
    assert all("different models, meshes or formats" in said for said in one[7:])
