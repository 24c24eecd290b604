"""Calibration: scores seen through the streaming runtime are those of the model, and the ranges chosen hold them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from budgets import operators_nbytes
from selection import at_length

from forebay.api import wrap
from forebay.calibrate import calibrate, score_extremes
from forebay.calibration import Calibration, LayerScores, calibrated
from forebay.rewriter.ir.plan import PlanError, Workload
from forebay.rewriter.ir.score_range import ScoreRange
from forebay.rewriter.planning.options import Options


def _ranges(path: Path, fingerprint: str, dtype: torch.dtype) -> tuple[ScoreRange, ...]:
    return calibrated(Options(calibration=path), fingerprint, dtype).score_ranges


def scores_of(model: Any, prompts: list[torch.Tensor]) -> dict[int, tuple[float, float]]:
    """Layer -> (least, largest) visible score, by transformers' own attention with its inputs noted."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: dict[int, tuple[float, float]] = {}

    def noting(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = query.double() @ keys.double().mT * kwargs["scaling"]
        seen = scores[..., torch.ones(scores.shape[-2:], dtype=torch.bool).tril()]
        old = found.get(module.layer_idx, (math.inf, -math.inf))
        found[module.layer_idx] = min(old[0], seen.min().item()), max(old[1], seen.max().item())
        return sdpa_attention_forward(module, query, key, *args, **kwargs)

    AttentionInterface.register("noting", noting)
    before = model.config._attn_implementation
    model.set_attn_implementation("noting")
    try:
        with torch.no_grad():
            for prompt in prompts:
                model(prompt[None])
    finally:
        model.set_attn_implementation(before)
    return found


@pytest.mark.parametrize("batch", [at_length(1), 2])
def test_extremes_are_those_of_the_model(llama_checkpoint: Any, tmp_path: Path, batch: int) -> None:
    """Prompts of unequal length, padding not counted, weights streamed from disk."""
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 997, (n,), generator=generator) for n in (21, 5, 9)]
    budget = {"device": llama_checkpoint.share(0.75), "disk": str(tmp_path)}
    found = calibrate(llama_checkpoint.folder, prompts, budget, batch=batch)
    expected = scores_of(llama_checkpoint.model, prompts)
    assert [s.layer for s in found.layers] == sorted(expected) and found.tokens == 35
    heads = llama_checkpoint.model.config.num_attention_heads
    for seen in found.layers:
        least, largest = expected[seen.layer]
        assert seen.rows >= 35 * heads
        assert math.isclose(seen.least, least, rel_tol=1e-4, abs_tol=1e-5)
        assert math.isclose(seen.largest, largest, rel_tol=1e-4, abs_tol=1e-5)
        assert seen.least <= seen.least_maximum <= seen.largest
    path = tmp_path / "calibration.json"
    found.save(path)
    assert Calibration.load(path) == found


def test_window_and_softcap_and_shares() -> None:
    q = torch.ones(1, 1, 1, 1)
    k = torch.arange(600.0).view(1, 1, 600, 1)
    start, length = torch.tensor([599]), torch.tensor([600])
    assert score_extremes(q, k, start, length, 1.0, 0, 0.0) == (1, 0.0, 599.0, 255.0)
    assert score_extremes(q, k, start, length, 1.0, 100, 0.0) == (1, 500.0, 599.0, 511.0)
    rows, _, largest, _ = score_extremes(q, k, start, length, 1.0, 0, 5.0)
    assert rows == 1 and math.isclose(largest, 5.0, abs_tol=1e-6)
    assert score_extremes(q, k, start, torch.tensor([0]), 1.0, 0, 0.0)[0] == 0, "an idle row"


def test_ranges_hold_what_was_seen_and_wide_layers_take_the_safe_path() -> None:
    for dtype, spread in ((torch.float16, 14.0), (torch.bfloat16, 100.0)):
        seen = LayerScores(0, 10, -200.0, 7.0, 7.0 - spread)
        phi, low, high = seen.softmax_range(dtype)
        assert phi + low < seen.least_maximum - 2.0 and seen.largest + 2.0 <= phi + high
        wide = LayerScores(0, 10, -200.0, 7.0, 7.0 - spread - 20.0)
        assert wide.softmax_range(dtype) == (0.0, 0.0, 0.0)
    assert LayerScores(0, 1, -1.0, math.inf, 1.0).softmax_range(torch.bfloat16) == (0.0, 0.0, 0.0)


def test_bad_input_is_refused(llama_checkpoint: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        calibrate(llama_checkpoint.folder, [], 1 << 20)
    (tmp_path / "x.json").write_text('{"layers": [{}]}')
    with pytest.raises(PlanError, match="not a calibration"):
        Calibration.load(tmp_path / "x.json")


LAYER: dict[str, Any] = {"layer": 0, "rows": 3, "least": -2.0, "largest": 3.0, "least_maximum": 1.0}


@pytest.mark.parametrize(("layers", "reason"), [
    ("abc", r"calibration\.layers: expected a list"), ([7], r"layers\[0\]: expected an object"),
    ([LAYER | {"largest": "x"}], r"largest: expected float"), ([LAYER | {"largest": 10**400}], r"largest: .* bits"),
    ([LAYER | {"least_maximum": None}], r"least_maximum: expected float"), ([LAYER | {"layer": "0"}], "expected int"),
    ([LAYER | {"layer": True}], "expected int"), ([LAYER | {"layer": 0.5}], "expected int"),
    ([LAYER | {"layer": -1}], r"layers\[0\]\.layer: -1 is below 0"),
    ([LAYER, LAYER], r"layers\[1\]\.layer: 0 is .* has come before"),
    ([LAYER | {"largest": -5.0}], r"least_maximum: 1\.0 is above the largest score of -5\.0")])  # fmt: skip
def test_a_spoiled_calibration_is_an_error_of_one_line(layers: Any, reason: str, tmp_path: Path) -> None:
    """PlanError is what the commands tell in one line; the field is named."""
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"fingerprint": "f", "prompts": 1, "tokens": 2, "layers": [LAYER]}))
    assert [r.layer for r in _ranges(path, "f", torch.float32)] == [0]
    assert _ranges(path, "f", torch.float64) == (), "no kernel shares a maximum there"
    path.write_text(json.dumps({"fingerprint": "f", "prompts": 1, "tokens": 2, "layers": layers}))
    with pytest.raises(PlanError, match=rf"c\.json is not a calibration: .*{reason}"):
        _ranges(path, "f", torch.float32)


def test_the_cache_stays_where_its_launches_are_looked_at(llama_checkpoint: Any) -> None:
    """A budget for which a cache on disk would do: 24 prompts of 120 tokens take 3.3 MB of cache."""
    prompts = [torch.full((120,), 5)] * 24
    budget = 2_500_000 + operators_nbytes(llama_checkpoint.opened, Workload(1, 120, 1), Options(prefill_chunk=8))
    with pytest.raises(PlanError, match="cannot work for batch 24"):
        calibrate(llama_checkpoint.folder, prompts, budget, batch=24)
    with llama_checkpoint.language_model(budget, batch=24, prompt=120, new_tokens=1) as lm:
        assert lm.plan.schedule.batching.cache.tier == "disk"


def test_the_command(llama_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typer = pytest.importorskip("typer")
    from typer.testing import CliRunner

    import forebay.commands.prompts
    from forebay.commands.calibrate import calibrate_command

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(c) % 900 for c in text]}

    monkeypatch.setattr(forebay.commands.prompts, "load_tokenizer", lambda folder: tokenizer)
    app = typer.Typer()
    app.command()(calibrate_command)
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": "one two three"}\n')
    arguments = [str(llama_checkpoint.folder), "--prompts", str(prompts), "--output", str(output), "--tokens", "7"]
    result = CliRunner().invoke(app, [*arguments, "--budget", f"device={llama_checkpoint.share(1.0)}"])
    assert result.exit_code == 0, result.output
    assert "phi" in result.output and Calibration.load(output).tokens == 7
    result = CliRunner().invoke(app, [*arguments, "--budget", "device=1MiB", "--dtype", "fp8"])
    assert result.exit_code == 2


def test_a_plan_takes_the_ranges_that_were_measured(llama_checkpoint: Any, tmp_path: Path) -> None:
    """They stand in the plan, which says so; answers on the CPU are the same; another model's are refused."""
    prompt = torch.arange(3, 12)[None]
    budget = {"device": llama_checkpoint.share(1.0), "disk": str(tmp_path)}
    found = calibrate(llama_checkpoint.folder, [prompt[0]], budget)
    found.save(tmp_path / "ranges.json")
    with wrap(llama_checkpoint.folder, budget, prompt=9, new_tokens=4, calibration=tmp_path / "ranges.json") as lm:
        assert [r.layer for r in lm.plan.score_ranges] == [s.layer for s in found.layers]
        assert f"share a maximum in layers 0-{len(found.layers) - 1}" in lm.explain()
        answer = lm.generate(prompt, max_new_tokens=4, do_sample=False)
    with wrap(llama_checkpoint.folder, budget, prompt=9, new_tokens=4) as lm:
        assert lm.plan.score_ranges == () and "share a maximum" not in lm.explain()
        assert torch.equal(lm.generate(prompt, max_new_tokens=4, do_sample=False), answer)
        plan = lm.plan
    with pytest.raises(PlanError, match="the plan says what ranges of scores it takes; leave calibration out"):
        wrap(llama_checkpoint.folder, budget, plan=plan, calibration=tmp_path / "ranges.json")
    replace(found, fingerprint="another").save(tmp_path / "other.json")
    with pytest.raises(PlanError, match=r"measured of another model .*run forebay calibrate on this one"):
        wrap(llama_checkpoint.folder, budget, calibration=tmp_path / "other.json")
    wide = replace(found.layers[0], largest=found.layers[0].least_maximum + 200)
    replace(found, layers=(wide, *found.layers[1:])).save(tmp_path / "wide.json")
    ranges = _ranges(tmp_path / "wide.json", found.fingerprint, torch.float32)
    assert [r.layer for r in ranges] == [s.layer for s in found.layers[1:]], "a layer too wide is synchronised"
