"""Plans edited by hand are refused by the field that does not fit the model, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny

from forebay.kernels.formats import row_sizes
from forebay.language_model import LanguageModel
from forebay.open_model import open_model
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Prediction, Workload, plan_from_dict
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.check_plan import check_prediction
from forebay.rewriter.planning.options import Options
from forebay.rewriter.switches import Switches

Opened = Callable[[dict[str, Any] | None], LanguageModel]


@pytest.fixture(scope="module")
def opened(llama_checkpoint: Any) -> Opened:
    """A LanguageModel by a plan given as JSON, or by one of its own."""
    parts, budget = open_model(llama_checkpoint.folder), Budget(llama_checkpoint.share(0.75))

    def make(plan: dict[str, Any] | None) -> LanguageModel:
        return LanguageModel(*parts, budget, Workload(1, 8, 4), Options(), Machine.default(),
                             None if plan is None else plan_from_dict(plan))

    return make


@pytest.fixture(scope="module")
def saved(opened: Opened) -> str:
    return opened(None).plan.to_json()


def _weight(plan: dict[str, Any], streamed: bool) -> dict[str, Any]:
    return next(w for w in plan["weights"] if (w["tier"] == "disk") == streamed and not w["gather"])


def _rename(plan: dict[str, Any]) -> None:
    _weight(plan, True)["name"] = "other.weight"


def _remove(plan: dict[str, Any]) -> None:
    plan["weights"].remove(_weight(plan, True))


def _resize(plan: dict[str, Any]) -> None:
    _weight(plan, True)["nbytes"] += 64


def _reformat(plan: dict[str, Any]) -> None:
    _weight(plan, True)["format"] = "w4g64"


def _move_to_host(plan: dict[str, Any]) -> None:
    _weight(plan, True)["tier"] = "host"


def _move_to_device(plan: dict[str, Any]) -> None:
    _weight(plan, True).update(tier="device", tile_rows=0)


def _gather(plan: dict[str, Any]) -> None:
    _weight(plan, True)["gather"] = True


def _enlarge_tiles(plan: dict[str, Any]) -> None:
    plan["schedule"]["slot_nbytes"] = 64


def _more_slots(plan: dict[str, Any]) -> None:
    plan["schedule"]["slots"] = 10**9


def _no_buffers(plan: dict[str, Any]) -> None:
    plan["buffers"] = []


def _no_cache(plan: dict[str, Any]) -> None:
    plan["buffers"] = [b for b in plan["buffers"] if b["kind"] != "cache"]


def _no_arena(plan: dict[str, Any]) -> None:
    plan["arenas"] = {}


@pytest.mark.parametrize(("edit", "message"), [
    (_rename, "name: the model has no weight other.weight"), (_remove, "is missing"),
    (_resize, "nbytes: .* bytes in format native"), (_reformat, "format: .* in format w4g64, but the model's"),
    (_move_to_host, "tier: .* is to lie on the host, and plan.buffers has none"),
    (_move_to_device, "tier: .* is to lie on the device, and plan.buffers has none"),
    (_gather, "gather: .* not read by row"),
    (_enlarge_tiles, "slot_nbytes: the largest piece that streams is .* the plan says 64"),
    (_more_slots, "schedule.slots: 1000000000 slots need as many buffers"),
    (_no_buffers, "plan.buffers has none of that name"), (_no_cache, "needs a cache buffer"),
    (_no_arena, "arenas.device: there is none"),
])
def test_edited_plans_are_refused_by_field(opened: Opened, saved: str, edit: Callable[[dict[str, Any]], None],
                                           message: str) -> None:
    plan = json.loads(saved)
    edit(plan)
    with pytest.raises(PlanError, match=message) as caught:
        opened(plan)
    assert str(caught.value).startswith("plan.")


def test_a_plan_as_it_was_saved_is_taken(opened: Opened, saved: str) -> None:
    assert opened(json.loads(saved)).plan.to_json() == saved


@pytest.mark.parametrize("field", ["speculative_times_s", "speculative_busy_s"])
def test_a_prediction_has_a_time_for_each_kind_of_step_and_the_programs_own(field: str) -> None:
    found = Prediction(decode_time_s=1.0, speculative_times_s=(1.1, 1.2), speculative_busy_s=(0.1, 0.2))
    check_prediction(found, found, same_machine=True)
    for wrong in ((), (1.1,), (1.1, 1.2, 1.3)):
        with pytest.raises(PlanError, match=rf"prediction\.{field}: the plan has {len(wrong)}, its schedule 2"):
            check_prediction(replace(found, **{field: wrong}), found, same_machine=True)
    with pytest.raises(PlanError, match=rf"prediction\.{field}\[1\]"):
        check_prediction(replace(found, **{field: (getattr(found, field)[0], 9.0)}), found, same_machine=True)
    check_prediction(replace(found, **{field: ()}), found, same_machine=False)


@pytest.mark.parametrize(("kind", "dtype", "width", "advice"), [
    ("NVIDIA H200", torch.float32, 256, ""), ("NVIDIA H200", torch.float32, 320, "--dtype bfloat16"),
    ("NVIDIA H200", torch.bfloat16, 640, ""), ("NVIDIA H200", torch.float16, 644, "Hide the GPU"),
    ("cpu", torch.float32, 320, "")])
@pytest.mark.parametrize("bits", [0, 8])
def test_rows_that_no_kernel_of_a_gpu_attends_to_are_refused_before_a_plan(
    bits: int, kind: str, dtype: torch.dtype, width: int, advice: str, tmp_path: Path
) -> None:
    """What planning refuses is what binding would: the limit is one function's."""
    group, row = row_sizes.cache_group_size(width, 8), row_sizes.cache_row_nbytes(width, 8)
    cache = torch.zeros(1, 1, 8, row, dtype=torch.uint8) if bits else torch.zeros(1, 1, 8, width, dtype=dtype)
    attend = torch.ops.forebay.attention_q if bits else torch.ops.forebay.attention
    scores = (1.0, 0, 0.0, *((bits, group) if bits else ()))
    inputs = {"q": torch.zeros(1, 2, 1, width, dtype=dtype), "k": cache, "v": cache,
              "start": torch.zeros(1, dtype=torch.int64)}  # fmt: skip
    model = tiny(tmp_path, lambda g, n: (g.call_function(attend.default, (*map(n.get, inputs), *scores)),), inputs,
                 {"w": torch.zeros(1)})
    machine = replace(Machine.default(), device_kind=kind)

    def planned() -> Plan:
        return Pipeline(model.source(), Workload(1, 1, 1), machine, Switches()).plan(Budget(1 << 27))

    if not advice:
        assert planned().arenas
        return
    with pytest.raises(PlanError, match=f"^cache: .* in {str(dtype)[6:]}, in any format; .* have {width}.*{advice}"):
        planned()
