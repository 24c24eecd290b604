"""A cache format from outside the package: how rows are packed and unpacked, and no other line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from extending.fp8_rows import pack, register_fp8, unpack
from extending.made_models import SHAPE, greedy, prompts, saved, streamed
from families import llama
from torch import Tensor
from transformers.cache_utils import DynamicCache
from typer.testing import CliRunner

import forebay
from forebay.commands.app import app
from forebay.kernels import operators
from forebay.kernels.cache.rows_by_torch import cache_format_by_torch
from forebay.kernels.formats.table import CACHE_FORMATS, CacheFormat, packed_caches
from forebay.kernels.operators import register_cache_format
from forebay.rewriter.ir.plan import PlanError


@pytest.fixture(scope="module")
def fp8() -> Iterator[CacheFormat]:
    known, by_key = [*operators.OPERATORS], {**operators._BY_KEY}
    yield register_fp8()
    operators.OPERATORS[:] = known
    del CACHE_FORMATS["fp8"]
    operators._BY_KEY.clear()
    operators._BY_KEY.update(by_key)


class RoundedCache(DynamicCache):
    """transformers' cache, whose keys and values are rounded as rows round them."""

    def update(self, k: Tensor, v: Tensor, *others: object, **more: object) -> tuple[Tensor, Tensor]:
        return super().update(*(unpack(pack(x), x.shape[-1], x.dtype) for x in (k, v)), *others, **more)


def test_a_cache_format_from_outside_is_planned_and_attended_over(tmp_path: Path, fp8: CacheFormat) -> None:
    folder, model = saved(llama(), tmp_path / "model")
    ids = prompts()
    found, launches = streamed(folder, ids, cache="fp8")
    assert {fp8.append, fp8.attend} <= launches and "forebay.attention" not in launches
    with torch.no_grad():
        cache, step, expected = RoundedCache(), ids, []
        for _ in range(4):
            expected.append(model(step, past_key_values=cache, use_cache=True).logits[:, -1])
            step = expected[-1].argmax(-1, keepdim=True)
    torch.testing.assert_close(found, torch.stack(expected, 1), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, greedy(model, ids), rtol=1e-4, atol=1e-5), "the cache is rounded"


def test_its_bytes_are_planned_and_its_plan_is_kept(tmp_path: Path, fp8: CacheFormat) -> None:
    folder, _ = saved(llama(), tmp_path / "model")
    sizes = {}
    for cache in ("native", "fp8"):
        with forebay.wrap(folder, "8MB", **SHAPE, cache=cache) as lm:
            sizes[cache] = sum(lm.steps.pipeline.needs.cache.values())
            expected = lm.next_logits(prompts(), torch.ones(2, 9, dtype=torch.int64)).clone()
            lm.plan.save(tmp_path / "plan.json")
    assert sizes["fp8"] / sizes["native"] == fp8.ratio(16, 4) == (16 + 4) / (16 * 4)
    with forebay.wrap(folder, "8MB", plan=forebay.rewriter.ir.plan.load_plan(tmp_path / "plan.json")) as lm:
        assert torch.equal(lm.next_logits(prompts(), torch.ones(2, 9, dtype=torch.int64)), expected)


@pytest.mark.parametrize("options", [
    {"cache_tier": "disk"}, {"micro_batches": 2}, {"cache_tier": "disk", "checkpoints": (1, 2)}])
def test_schedules_that_move_caches_move_its_rows(tmp_path: Path, fp8: CacheFormat, options: dict) -> None:
    folder, _ = saved(llama(num_key_value_heads=4), tmp_path / "model")
    answers = []
    for more in ({}, options):
        with forebay.wrap(folder, "8MB", **SHAPE, cache="fp8", **more) as lm:
            answers.append(lm.generate(prompts(), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0))
    assert torch.equal(*answers)


@pytest.mark.parametrize(("changed", "said"), [
    ({"pack": lambda x: pack(x)[..., :-4]}, r"pack of fp9 makes torch.uint8 \[2, 3, 8, 64\] of .* says uint8 .* 68"),
    ({"unpack": lambda rows, head_dim, dtype: unpack(rows, head_dim, torch.float64)},
     "unpack of fp9 makes torch.float64"),
    ({"error": 0.01}, r"rows of fp9 lose 0\.02\d+ of random values; `error` says at most 0\.01"),
    ({"name": "two words"}, "the name 'two words' must be letters"),
    ({"unpack": lambda rows, head_dim, dtype: torch.full((*rows.shape[:-1], head_dim), torch.nan, dtype=dtype)},
     "rows of fp9 lose nan"),
])
def test_functions_that_do_not_do_what_is_said_are_refused_at_once(changed: dict, said: str) -> None:
    known = {"name": "fp9", "row": lambda head_dim: head_dim + 4, "error": 0.03, "pack": pack, "unpack": unpack}
    with pytest.raises(ValueError, match=said):
        cache_format_by_torch(**{**known, **changed})
    assert "fp9" not in CACHE_FORMATS


def test_commands_of_a_script_that_registers_know_it(tmp_path: Path, fp8: CacheFormat) -> None:
    folder, _ = saved(llama(), tmp_path / "model")
    planned = CliRunner().invoke(app, ["plan", str(folder), "--cache", "fp8", "--budget", "8MB"])
    assert planned.exit_code == 0 and "fp8, on the device" in planned.output, planned.output


@pytest.mark.parametrize(("changed", "said"), [
    ({}, "there is a cache format fp8 already"),
    ({"name": "fp9", "attend": "extending.unknown"}, "fp9 names the operator extending.unknown, which has no record"),
    ({"name": "fp9", "row": lambda head_dim: head_dim + 1}, "a row of fp9 takes 65 bytes for 64 elements; pad rows"),
])
def test_a_record_that_cannot_be_is_refused(fp8: CacheFormat, changed: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        register_cache_format(replace(packed_caches()["fp8"], **changed))


def test_a_device_without_its_kernels_is_refused_before_anything_is_planned(tmp_path: Path, fp8: CacheFormat) -> None:
    from forebay.rewriter.planning.check_plan import refuse_cache
    from forebay.runtime.devices.kinds import HOST

    refuse_cache("fp8", HOST)
    with pytest.raises(PlanError, match=r"cache: fp8 has no kernel for a .* \(forebay_rows.append_fp8\)"):
        refuse_cache("fp8", replace(HOST, kernels="cuda"))
