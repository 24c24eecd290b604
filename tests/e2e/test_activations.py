"""Packed weights that meet activations rounded to bf16 or to 8 bits: only where that is wished, or of bf16 the model
computes in it, and the plan says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import families
import pytest
import torch
import transformers
from selection import at_length
from typer.testing import CliRunner

import forebay
from forebay.commands.app import app
from forebay.kernels.cpu_support import native
from forebay.kernels.products.linear_q.cpu import implementations
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.ir.plan import PlanError, load_plan
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.planning.options import activations_of, told_activations
from forebay.rewriter.switches import Switches

pytestmark = [pytest.mark.usefixtures("private_cache"),
              pytest.mark.skipif("int8" not in implementations(4), reason="no products of 8-bit activations here")]
SHAPE = {"batch": 2, "prompt": 40, "new_tokens": 4}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(families.llama()).save_pretrained(folder / "native")
    found = {"native": folder / "native"}
    for name in ("w4g32", "w8"):
        quantize_model(folder / "native", folder / name, Wish(name))
        found[name] = folder / name
    return found


def prompts(tokens: int = 40) -> torch.Tensor:
    return torch.randint(3, families.VOCAB, (2, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("format", ("w4g32", "w8"))
@pytest.mark.parametrize("tokens", (1, 40))
def test_logits_differ_by_the_rounding_alone(packed: dict[str, Path], format: str, tokens: int) -> None:
    """By less than 2 %, and by something: one token and many take different code."""
    if "int8" not in implementations(int(format[1])):
        pytest.skip("8-bit codes meet 8-bit activations with VNNI alone")
    found = {}
    for kind in ("native", "int8"):
        with forebay.wrap(packed[format], 1 << 30, activations=kind, **SHAPE) as lm:  # type: ignore[arg-type]
            found[kind] = lm.next_logits(prompts(tokens)).float()
            chosen = {c.impl for c in lm.plan.gemm if c.dtype.startswith(format[:2])}
            assert chosen == {"int8"} if kind == "int8" else "int8" not in chosen
    error = (found["int8"] - found["native"]).norm() / (found["native"] - found["native"].mean()).norm()
    assert 1e-5 < error < 0.02


@pytest.mark.skipif("bf16" not in implementations(4), reason="no products of bf16 here")
@pytest.mark.parametrize("format", ["w4g32", at_length("w8")])
def test_many_rows_in_bf16(packed: dict[str, Path], tmp_path: Path, format: str) -> None:
    """Where it is wished, or the model computes in bf16 anyway; logits differ by some tenths of a percent."""
    found = {}
    for kind in ("native", "bf16"):
        with forebay.wrap(packed[format], 1 << 30, activations=kind, **SHAPE) as lm:  # type: ignore[arg-type]
            found[kind] = lm.next_logits(prompts()).float()
            few, many = ({c.impl for c in lm.plan.gemm if c.dtype.startswith(format[:2]) and (c.m > 6) is large}
                         for large in (False, True))
            assert many == {"bf16"} if kind == "bf16" else "bf16" not in many
            assert "bf16" not in few and few
    error = (found["bf16"] - found["native"]).norm() / (found["native"] - found["native"].mean()).norm()
    assert 1e-5 < error < 0.01
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(families.llama()).bfloat16().save_pretrained(tmp_path / "native")
    quantize_model(tmp_path / "native", tmp_path / "packed", Wish(format))
    with forebay.wrap(tmp_path / "packed", 1 << 30, **SHAPE) as lm:
        impls = {c.impl for c in lm.plan.gemm if c.m > 6 and c.dtype.startswith(format[:2])}
        assert impls == {"bf16"} and torch.isfinite(lm.next_logits(prompts()).float()).all()
        # A job that goes on with this plan is the one that was begun without.
        assert told_activations(activations_of(lm.plan), lm.captured.dtype) == "native"
    assert told_activations("bf16", torch.float32) == "bf16" and told_activations("int8", torch.bfloat16) == "int8"


def test_a_saved_plan_rounds_as_it_says(packed: dict[str, Path], tmp_path: Path) -> None:
    """Also where it is made anew for longer prompts; a plan without cannot be told to."""
    with forebay.wrap(packed["w4g32"], 1 << 30, activations="int8", **SHAPE) as lm:
        expected = lm.next_logits(prompts()).clone()
        lm.plan.save(tmp_path / "rounds.json")
    plan = load_plan(tmp_path / "rounds.json")
    with forebay.wrap(packed["w4g32"], 1 << 30, plan=plan) as lm:
        assert torch.equal(lm.next_logits(prompts()), expected)
        lm.generate(prompts(80), max_new_tokens=4)
        assert lm.plan.workload.prompt >= 80 and any(c.impl == "int8" for c in lm.plan.gemm)
    exact = replace(plan, gemm=tuple(replace(c, impl="flat" if c.impl == "int8" else c.impl) for c in plan.gemm))
    with pytest.raises(PlanError, match="activations: the plan has native, int8 is asked for"):
        forebay.wrap(packed["w4g32"], 1 << 30, plan=exact, activations="int8")


def test_what_cannot_round_is_refused(packed: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="no weight of the model is packed; quantize it"):
        forebay.wrap(packed["native"], 1 << 30, activations="int8", **SHAPE)
    with pytest.raises(PlanError, match="activations must be one of 'native', 'bf16', 'int8', found 'int4'"):
        forebay.wrap(packed["w4g32"], 1 << 30, activations="int4", **SHAPE)  # type: ignore[arg-type]
    with forebay.wrap(packed["w4g32"], 1 << 30, **SHAPE) as lm:
        monkeypatch.setattr(native, "load", lambda: None)
        with pytest.raises(PlanError, match=r"no matmul of w4g32 takes them here; that needs a C\+\+ compiler"):
            rewrite_captured(lm.captured, Switches(), activations="int8")


def test_commands_take_it(packed: dict[str, Path]) -> None:
    shape = ["--budget", "device=8MB", "--prompt", "9", "--new-tokens", "4", "--json"]
    for kind in ("native", "int8"):
        result = CliRunner().invoke(app, ["plan", str(packed["w4g32"]), *shape, "--activations", kind])
        assert result.exit_code == 0, result.output
        impls = {c["impl"] for c in json.loads(result.stdout)["gemm"] if c["dtype"] == "w4g32"}
        assert (impls == {"int8"}) is (kind == "int8")
    refused = CliRunner().invoke(app, ["plan", str(packed["native"]), *shape, "--activations", "int8"])
    assert refused.exit_code == 2 and "no weight of the model is packed" in refused.output
