"""Planning from a config alone: the plan is the one that runs, a policy is something else, refusals are by field."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selection import at_length

from forebay.commands.explore_config import explore_config, explore_text, plan_of_policy
from forebay.commands.plan_config import (
    ConfigPlan,
    PlanRequest,
    draw_frontier,
    frontier_data,
    plan_config,
    plan_data,
    plan_text,
    step_copies,
)
from forebay.rewriter.ir.plan import PlanError, plan_from_dict
from forebay.rewriter.ir.program import RETURN, UPLOAD
from forebay.rewriter.machine.presets import PresetError, load_machine_or_preset
from forebay.rewriter.machine.profile import Machine, save_machine
from forebay.rewriter.planning.objective import BudgetError, tokens_per_s
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.model_shapes import ModelError

LLAMA = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024,
         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 256,
         "dtype": "float32"}
WEIGHTS = 2 * 2048 * 256 * 4 + 4 * (256 * 256 * 3 + 3 * 256 * 1024) * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on disk, and the profile of a machine."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(**{k: v for k, v in LLAMA.items() if k not in ("model_type", "dtype")})
                     ).save_pretrained(made)
    save_machine(Machine.default(), made / "machine.json")
    return made


def request(folder: Path, **asked: Any) -> PlanRequest:
    return replace(PlanRequest(str(folder), str(folder / "machine.json"), 24, 6, batch=2), **asked)


@functools.cache
def searched(folder: Path) -> ConfigPlan:
    return plan_config(request(folder, batch=0, capacity=(("device", WEIGHTS),)))


@pytest.mark.parametrize("options", [at_length(Options()), Options(slots=3, cache="kv8")])
def test_the_plan_is_the_one_that_the_model_runs_with(folder: Path, options: Options) -> None:
    """But for whose weights they are."""
    import forebay

    budget = WEIGHTS // 2
    found = plan_config(request(folder, capacity=(("device", budget),)), options)
    model = forebay.wrap(folder, {"device": budget}, batch=2, prompt=24, new_tokens=6, machine=Machine.default(),
                         slots=options.slots, cache=options.cache)
    try:
        assert model.plan.nbytes_on("disk") > 0 and found.complete
        assert replace(found.plan, fingerprint=model.plan.fingerprint) == model.plan
        assert found.plan.fingerprint.startswith("config:") != model.plan.fingerprint.startswith("config:")
    finally:
        model.close()


def test_sequences_are_searched_and_the_frontier_drawn(folder: Path, tmp_path: Path) -> None:
    asked, found = request(folder, batch=0, capacity=(("device", WEIGHTS),)), searched(folder)
    assert found.plan.workload.batch > 1 and len(found.frontier) > 1
    assert [p[0] for p in found.frontier] == sorted(p[0] for p in found.frontier)
    assert [p[1] for p in found.frontier] == sorted(p[1] for p in found.frontier)
    data = json.loads(json.dumps(plan_data(found, asked)))
    assert data["kind"] == "plan" and plan_from_dict(data["plan"]) == found.plan
    text = plan_text(found)
    assert text.startswith("a plan, as it would run: ") and "frontier" in text
    draw_frontier({"tiny": found.frontier}, tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert json.loads((tmp_path / "f.json").read_text()) == frontier_data(found.frontier) == data["pareto"]
    with pytest.raises(PlanError, match="cannot write the picture"):
        draw_frontier({"tiny": found.frontier}, tmp_path / "f.xyz")


def test_objectives(folder: Path) -> None:
    wide = searched(folder)
    quick = plan_config(request(folder, batch=0, objective="latency", capacity=(("device", WEIGHTS),)))
    assert quick.plan.workload.batch == 1 < wide.plan.workload.batch
    fastest = quick.frontier[0]
    bounded = plan_config(request(folder, batch=0, latency_s=1.01 * fastest[0], capacity=(("device", WEIGHTS),)))
    assert bounded.plan.workload.batch < wide.plan.workload.batch
    rate = 0.5 * fastest[1]
    least = plan_config(request(folder, batch=1, objective="budget", tokens_per_s=rate))
    assert least.plan.budget.device < WEIGHTS
    for error, asked in ((BudgetError, {"latency_s": 1e-9}), (BudgetError, {"objective": "budget",
                                                                            "tokens_per_s": 1e12})):
        with pytest.raises(error, match=r"the quickest takes|no device budget reaches"):
            plan_config(request(folder, **asked))


@pytest.mark.all
@pytest.mark.parametrize("complete", [False, True])
def test_caches_beyond_the_device_lie_on_slower_tiers(monkeypatch: pytest.MonkeyPatch, complete: bool) -> None:
    """As a block of micro-batches that are planned as they would run, and where larger batches pay."""
    monkeypatch.setattr("forebay.commands.plan_config.COMPLETED_COPIES", 10**6 if complete else 0)
    asked = PlanRequest("opt-125m", "t4", 256, 16, capacity=(("device", 15 * 10**7), ("host", 3 * 10**9)))
    found = plan_config(asked)
    batching = found.plan.schedule.batching
    assert found.complete is complete and batching.cache.staged and batching.micro_batches.count > 1
    assert found.plan.prediction.peak_nbytes["device"] <= 15 * 10**7
    assert found.plan.arenas["host"] > found.plan.workload.batch * 272 * 2 * 768 * 12 * 2 / 2  # most of the cache
    alone = [size for _, _, size in found.frontier if size < found.plan.workload.batch]
    assert alone, "smaller batches are quicker"
    if not complete:
        return
    least = plan_config(replace(asked, objective="budget", tokens_per_s=1.0))
    assert not least.plan.schedule.batching.cache.staged
    little = (("device", 10**8), ("host", 4 * 10**8), ("disk", 4 * 10**8))
    with pytest.raises(PlanError, match=r"a device budget of [^;]* cannot work"):
        plan_config(replace(asked, batch=64, capacity=little))
    assert plan_config(replace(asked, batch=64, capacity=(*little[:2], ("disk", 4 * 10**9)))).plan.workload.batch >= 64


@pytest.mark.parametrize("complete", [True, False])
def test_a_share_of_the_cache_becomes_checkpoints_where_a_link_binds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, complete: bool
) -> None:
    """As the planner of a model does: by its Programs, or the closed form where a step has too many copies."""
    monkeypatch.setattr("forebay.commands.plan_config.COMPLETED_COPIES", 10**6 if complete else -1)
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "opt", "hidden_size": 2048, "word_embed_proj_dim": 2048, "num_hidden_layers": 1, "ffn_dim": 4096,
        "num_attention_heads": 16, "vocab_size": 512, "max_position_embeddings": 2048, "dtype": "float16"}))
    asked = PlanRequest(str(tmp_path), "rtx4090", 1024, 256, batch=64,
                        capacity=(("device", 3 * 10**9), ("host", 10**10)))
    options = Options(cache_tier="host", cpu_attention=False, micro_batches=8)
    found, plain = (plan_config(asked, replace(options, checkpoints=share)) for share in (None, (0, 1)))
    kept = found.plan.schedule.batching.recomputation
    assert found.complete is complete and 0 < kept.checkpoints <= kept.period
    assert not plain.plan.schedule.batching.recomputation.checkpoints
    assert tokens_per_s(found.plan) > tokens_per_s(plain.plan)


def test_a_machine_elsewhere_and_a_step_of_many_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in host memory is uploaded; a plan of many copies is made and not lowered."""
    request = PlanRequest("opt-125m", "t4", 32, 4, batch=1, capacity=(("device", 11 * 10**7),))
    found = plan_config(request, Options(slots=2))
    assert found.complete and found.plan.schedule.host_hop and "upload" in found.plan.prediction.busy_time_s
    assert found.plan.nbytes_on("host") > 10**7 and found.plan.machine.startswith("t4")
    monkeypatch.setattr("forebay.commands.plan_config.COMPLETED_COPIES", step_copies(found.plan) - 1)
    same = PlanRequest("opt-125m", "t4", 32, 4, batch=1, capacity=(("device", 11 * 10**7),))
    dry, whole = plan_config(same, Options(slots=2)), plan_config(same, Options(slots=2), complete=True)
    assert not dry.complete and "by the closed form" in plan_text(dry) and not dry.plan.gemm
    assert whole.complete and whole.plan == found.plan
    assert (dry.plan.weights, dry.plan.schedule.slots) == (whole.plan.weights, whole.plan.schedule.slots)
    assert dry.plan.prediction.decode_time_s == pytest.approx(whole.plan.prediction.decode_time_s, rel=0.5)


@pytest.mark.parametrize(("asked", "kind", "says"), [
    ({"config": "opt-1"}, ModelError, "presets are"), ({"machine": "t5"}, PresetError, "presets are"),
    ({"prompt": 0}, PlanError, "prompt"), ({"output": 0}, PlanError, "output"), ({"batch": -1}, PlanError, "batch"),
    ({"objective": "fame"}, PlanError, "objective"), ({"objective": "budget"}, PlanError, "tokens_per_s"),
    ({"latency_s": 0.0}, PlanError, "latency_s"), ({"capacity": (("device", 0),)}, PlanError, "device_nbytes"),
])
def test_bad_input_is_refused(asked: dict[str, Any], kind: type[ValueError], says: str) -> None:
    for search in (plan_config, explore_config):
        with pytest.raises(kind, match=says):
            search(replace(PlanRequest("opt-30b", "t4", batch=1), **asked))


@pytest.mark.parametrize(("asked", "says"), [
    ({"capacity": (("device", 10**5),)}, "cannot work for batch 2"), ({"prompt": 255}, "exceed the model's 256"),
    ({"capacity": (("disk", 10**6),)}, r"budget\.disk: the weights' files take"),
])
def test_what_cannot_run_is_refused(folder: Path, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plan_config(request(folder, **asked))


def test_a_preset_model_gives_a_whole_policy_that_is_no_plan(tmp_path: Path) -> None:
    found = json.loads(json.dumps(explore_config(PlanRequest("opt-175b", "t4", batch=32))))
    assert found["kind"] == "policy" and found["policy"]["block"]["sequences"] == 32 and found["machine"] == "t4"
    assert len(found["weights"]) == 96 * (2 * 6 + 2) + 3  # six products with bias and two norms a layer
    policy = found["policy"]
    assert policy["tokens_per_s"] == pytest.approx(32 * 32 / policy["latency_s"])
    for tier, nbytes in policy["peak_nbytes"].items():
        assert nbytes <= policy["capacity_nbytes"][tier]
    text = explore_text(found)
    assert "tokens/s" in text and "bound by" in text and "a policy by closed forms alone" in text
    with pytest.raises(PlanError, match="version"):
        plan_from_dict(found)


def test_frontier_of_policies_is_drawn_and_saved(tmp_path: Path) -> None:
    path = tmp_path / "frontier.png"
    found = explore_config(PlanRequest("opt-1.3b", "t4", capacity=(("device", 10**9),)), pareto=path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    points = json.loads(path.with_suffix(".json").read_text())
    assert points == found["pareto"] and len(points) > 2
    assert "frontier" in explore_text(found)


def test_a_policy_says_the_plan_that_puts_things_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = PlanRequest("opt-1.3b", "t4", batch=16, capacity=(("device", 2 * 10**9), ("host", 10**10)))
    found = explore_config(asked, checkpoints=False)
    found |= plan_of_policy(asked, found)
    chosen, shares = found["options"], found["policy"]["shares"]
    plan = plan_config(asked, Options(**chosen)).plan
    assert tokens_per_s(plan) == found["plan_tokens_per_s"] > 0
    assert chosen["batch"] == 16 == plan.workload.batch
    assert chosen["policy"][2:4] == tuple(math.floor(1000 * shares["kv"][tier] + 1e-6) / 10
                                          for tier in ("device", "host"))
    of_policy = [sum(each["nbytes"] for each in found["weights"].values() if each["tier"] == tier)
                 for tier in ("device", "host")]
    assert 0 < chosen["policy"][0] <= 100 * of_policy[0] / sum(each["nbytes"] for each in found["weights"].values())
    words = f"--batch 16 --micro-batches {chosen['micro_batches']} --policy "
    assert words + ",".join(f"{each:g}" for each in chosen["policy"]) in explore_text(found)
    monkeypatch.setattr("forebay.commands.explore_config.SCALES", [(0.0, 0.75)])
    small = plan_of_policy(replace(asked, capacity=(("device", 10**7), ("host", 10**10))), found)
    assert small["options"] == {} and "the smallest that can is" in small["refused"]
    assert f"none has shares near these: {small['refused']}" in explore_text(found | small)


@pytest.mark.all
def test_a_policy_with_checkpoints_becomes_the_faster_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the nearest simple share of them, or with K and V alone, which alone the host attends to."""
    asked = PlanRequest("opt-1.3b", "t4", batch=16, capacity=(("device", 2 * 10**9), ("host", 10**10)))
    found = explore_config(asked, checkpoints=False)
    found["policy"]["block"]["host_attention"] = False
    found["policy"]["shares"] |= {"kv": {"device": 0.3, "host": 0.2, "disk": 0.0},
                                  "checkpoint": {"device": 0.0, "host": 0.3, "disk": 0.2}}
    tried = []

    def planned(request: PlanRequest, options: Options) -> Any:
        made = plan_config(request, options)
        tried.append((options.checkpoints, options.policy, tokens_per_s(made.plan)))
        return made

    monkeypatch.setattr("forebay.commands.explore_config.plan_config", planned)
    best = plan_of_policy(asked, found)
    assert [(kept, policy[2:4]) for kept, policy, _ in tried] == [(None, (30.0, 50.0)), ((1, 2), (0.0, 80.0))]
    kept, policy, rate = max(tried, key=lambda each: each[2])
    assert (best["options"].get("checkpoints"), best["options"]["policy"]) == (kept, policy)
    assert best["plan_tokens_per_s"] == rate
    text = explore_text(found | best | {"options": best["options"] | {"checkpoints": (1, 2), "cpu_attention": False}})
    assert "--checkpoints 1,2" in text and "--no-cpu-attention" in text
    found["policy"]["block"]["host_attention"] = True
    assert "checkpoints" not in plan_of_policy(asked, found)["options"], "the host attends to keys and values"


def test_quantizing_is_never_slower() -> None:
    plain, packed = (explore_config(PlanRequest("opt-30b", "t4", batch=4), quantize=q)["policy"] for q in (False, True))
    assert packed["tokens_per_s"] > 1.5 * plain["tokens_per_s"]


@pytest.mark.parametrize(("capacity", "says"), [
    ((("device", 10**8),), "binding tier is device"),
    at_length((("host", 10**9), ("disk", 10**9)), "device.*host.*disk")])
def test_a_policy_that_fits_nowhere_names_the_tier(capacity: tuple, says: str) -> None:
    with pytest.raises(BudgetError, match=says):
        explore_config(PlanRequest("opt-30b", "t4", batch=1, capacity=capacity))


# Tokens/s that a link of 25 GB/s allows where a share of the experts is in memory, from bytes of a token in 4.5 bits:
# 1.34 GB of gpt-oss-20b, 2.01 of gpt-oss-120b, 1.02 of Qwen3-30B-A3B, 0.85 of Qwen3-Next.
@pytest.mark.parametrize(("model", "share", "bound"), [
    ("gpt-oss-20b", 0.5, 37), *(at_length(*case) for case in (
        ("gpt-oss-20b", 0.25, 25), ("gpt-oss-120b", 0.25, 17), ("gpt-oss-120b", 0.5, 25), ("qwen3-30b-a3b", 0.25, 33),
        ("qwen3-30b-a3b", 0.5, 49), ("qwen3-next-80b-a3b", 0.25, 39)))])
def test_experts_over_a_link_are_bound_by_their_bytes(model: str, share: float, bound: float) -> None:
    captured = plan_config(PlanRequest(model, "h200", 64, 16, batch=1, weights="w4g64"), Options()).captured
    tables = {name: spec for name, spec in captured.weights.items() if name.endswith("experts.table")}
    slots = round(share * next(iter(tables.values())).shape[0])
    room = int(share * sum(spec.nbytes for spec in tables.values())) + (6 << 30)
    asked = PlanRequest(model, "rtx4090", 64, 16, batch=1, weights="w4g64", capacity=(("device", room),))
    plan = plan_config(asked, Options(expert_slots=slots)).plan
    assert {w.tier for w in plan.weights if w.pool_slots} == {"host"}
    busy = plan.prediction.busy_time_s
    assert 1 / (busy.get(RETURN, 0.0) or busy[UPLOAD]) == pytest.approx(bound, rel=0.06)
    assert 0.5 * bound < 1 / plan.prediction.decode_time_s < bound


@pytest.mark.all
@pytest.mark.parametrize(("share", "tokens_per_s"), [(0.25, 3.9), (0.75, 11.8)])
def test_bounds_of_experts_are_the_arithmetic_of_their_sizes(share: float, tokens_per_s: float) -> None:
    """Qwen3-30B-A3B in 4.5 bits names 1.02 GB of experts a token: tokens/s over a disk of 3 GB/s, with all else in
    memory and so large a share of the experts, as published arithmetic has them."""
    base, slots = load_machine_or_preset("laptop-16gb"), int(128 * share)
    slow = tuple(replace(link, bandwidth_bytes_per_s=3e9) if link.src == "disk" else link for link in base.links)
    expert, rest = 3 * 2048 * 768 * 4.5 / 8, 1.6e9  # bytes of an expert; bf16 of embeddings and heads, dense layers
    room = int(48 * slots * expert * 1.01 + rest)
    asked = PlanRequest("qwen3-30b-a3b", replace(base, links=slow), 64, 16, batch=1, weights="w4g64",
                        capacity=(("device", room), ("disk", 10**12)))
    plan = plan_config(asked, Options(expert_slots=slots)).plan
    assert plan.schedule.routed.hit_rate == share
    assert all(w.tier == "device" for w in plan.weights if not w.pool_slots and not w.gather)
    assert 3e9 / plan.prediction.streamed_nbytes == pytest.approx(tokens_per_s, rel=0.02)
    assert plan.prediction.decode_time_s > plan.prediction.streamed_nbytes / 3e9
