"""A model planned for a GPU and run by the GPU's launchers, on the CPU under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("triton")

from families import llama
from selection import at_length
from small_experts import random_model

from forebay.kernels import operators
from forebay.kernels.attention.costs import gpu_workspace_nbytes
from forebay.kernels.operator import Tensors
from forebay.language_model import LanguageModel
from forebay.open_model import open_model
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.ir.program import Launch
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.options import Options
from forebay.runtime.devices.cuda.memory import least_workspace_nbytes
from forebay.runtime.devices.open_device import open_device
from forebay.runtime.run import bind, executor

OURS = {"forebay.linear", "forebay.attention", "forebay.kv_append", "forebay.rms_norm"}  # appends turn keys


class GpuOfThreads:
    """Stands in for the machine's GPU: threads move the bytes, and launches are bound as for CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bound: set[tuple[str, str]] = set()
        monkeypatch.setattr("forebay.language_model.open_device",
                            lambda machine, *rest: open_device(Machine.default(), *rest))
        monkeypatch.setattr(executor, "bind_launch", self.bind_launch)

    def bind_launch(self, launch: Any, tensor: Any) -> Any:
        args = bind._tensors(launch.args, tensor)
        kwargs = {name: bind._tensors(value, tensor) for name, value in launch.kwargs.items()}
        operator = operators.find(launch.op)
        if operator is None:
            return bind.bind_launch(launch, tensor)
        self.bound.add((launch.op, launch.impl))
        use = Tensors(args, kwargs, tuple(tensor(ref) for ref in launch.out), launch.impl)
        return bind.bind_operator(operator, launch, use, "cuda")


def test_a_half_precision_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = llama(2, hidden_size=64, intermediate_size=256, vocab_size=211, tie_word_embeddings=False)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    reference.half().save_pretrained(tmp_path)
    reference.float()
    machine = replace(Machine.default(), device_kind="NVIDIA H200")
    gpu = GpuOfThreads(monkeypatch)
    prompt = torch.randint(3, 211, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    nbytes = sum(p.numel() * 2 for p in reference.parameters())
    workload = Workload(2, 6, 3)
    budget = Budget(4 * nbytes + least_workspace_nbytes(), 4 * nbytes)
    with LanguageModel(*open_model(tmp_path), budget, workload, Options(), machine) as lm:
        assert {choice.impl.split("_")[0] for choice in lm.plan.gemm} <= {"gemv", "flat", "large"}
        found = lm.generate(prompt, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None)
        launched = [item.op for item in lm.steps.program(1).step if isinstance(item, Launch) and item.layer == 0]
    assert {op for op, _ in gpu.bound} == OURS and len(launched) == 8
    assert all("_s" in impl for op, impl in gpu.bound if op == "forebay.linear")
    seen = torch.cat((mask, torch.ones(2, 3, dtype=mask.dtype)), 1)
    with torch.no_grad():
        logits = reference(input_ids=found[:, :-1], attention_mask=seen[:, :-1]).logits[:, 5:].float()
    chosen = logits.gather(2, found[:, 6:, None])[..., 0]
    # The token of fp16 is the reference's, or so near its best that rounding decides.
    assert (logits.amax(-1) - chosen).max() <= 5e-3 * logits.abs().max()


@pytest.mark.all
def test_packed_weights_of_an_fp32_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are dequantized for torch's product, in memory that is counted, and give the logits of the CPU's kernels."""
    torch.manual_seed(0)
    config = llama(2, hidden_size=64, intermediate_size=96, vocab_size=211, tie_word_embeddings=False)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "float")
    quantize_model(tmp_path / "float", tmp_path / "w4", Wish("w4g32"))
    prompt = torch.randint(3, 211, (2, 6), generator=torch.Generator().manual_seed(1))
    opened, budget, workload = open_model(tmp_path / "w4"), Budget(1 << 26, 1 << 24), Workload(2, 6, 4)
    found = {}
    for kind in ("cpu", "NVIDIA H200"):
        gpu = GpuOfThreads(monkeypatch) if kind != "cpu" else None
        with LanguageModel(*opened, budget, workload, Options(), replace(Machine.default(), device_kind=kind)) as lm:
            tokens = lm.generate(prompt, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
            found[kind] = lm.next_logits(tokens).double()
            program = lm.steps.program(1)
    assert gpu is not None and ("forebay.linear_q", "aten") in gpu.bound
    products = [i for i in program.step if isinstance(i, Launch) and i.op == "forebay.linear_q"]
    assert products and all(dict(i.held)["scratch"] >= 4 * i.out[0].shape[-1] * i.args[0].shape[-1] and
                            "cuBLAS" in dict(i.held) for i in products)
    assert (found["NVIDIA H200"] - found["cpu"]).norm() < 1e-4 * found["cpu"].norm()


@pytest.mark.all
def test_weights_of_fp8_are_multiplied_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are those of the CPU's kernels, to what fp16 rounds, and plans count the memory of x in another order."""
    torch.manual_seed(0)
    config = llama(2, hidden_size=128, intermediate_size=256, vocab_size=211, tie_word_embeddings=False)
    transformers.AutoModelForCausalLM.from_config(config).half().save_pretrained(tmp_path / "half")
    quantize_model(tmp_path / "half", tmp_path / "fp8", Wish("fp8"))
    prompt = torch.randint(3, 211, (2, 6), generator=torch.Generator().manual_seed(1))
    opened, found = open_model(tmp_path / "fp8"), {}
    for kind in ("cpu", "NVIDIA H200"):
        gpu = GpuOfThreads(monkeypatch) if kind != "cpu" else None
        machine = replace(Machine.default(), device_kind=kind)
        with LanguageModel(*opened, Budget(1 << 26, 1 << 24), Workload(2, 6, 2), Options(), machine) as lm:
            found[kind] = lm.next_logits(prompt).double()
    assert gpu is not None
    assert {impl.split("_")[0] for op, impl in gpu.bound if op == "forebay.linear_q"} == {"raw"}
    assert (found["NVIDIA H200"] - found["cpu"]).norm() < 5e-3 * found["cpu"].norm()


@pytest.mark.all
def test_a_quantized_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are those of the CPU's kernels over such a cache, and the plan counts the shares of a decode step."""
    torch.manual_seed(0)
    config = llama(2, hidden_size=64, intermediate_size=96, vocab_size=211, tie_word_embeddings=False)
    transformers.AutoModelForCausalLM.from_config(config).half().save_pretrained(tmp_path)
    prompt = torch.randint(3, 211, (2, 6), generator=torch.Generator().manual_seed(1))
    opened, budget, workload = open_model(tmp_path), Budget(1 << 26, 1 << 24), Workload(2, 6, 300)
    found = {}
    for kind in ("cpu", "NVIDIA H200"):
        machine = replace(Machine.default(), device_kind=kind)
        gpu = GpuOfThreads(monkeypatch) if kind != "cpu" else None
        with LanguageModel(*opened, budget, workload, Options(cache="kv4"), machine) as lm:
            tokens = lm.generate(prompt, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
            found[kind] = lm.next_logits(tokens).double()
            program = lm.steps.program(1)
    assert gpu is not None and {"forebay.attention_q", "forebay.kv_append_q"} <= {op for op, _ in gpu.bound}
    assert not {"forebay.attention", "forebay.kv_append"} & {op for op, _ in gpu.bound}
    assert (found["NVIDIA H200"] - found["cpu"]).norm() < 1e-2 * found["cpu"].norm()
    attention = [i for i in program.step if isinstance(i, Launch) and i.op == "forebay.attention_q"]
    (shares,) = {gpu_workspace_nbytes(i, *i.args[7:9]) for i in attention}
    assert shares > gpu_workspace_nbytes(Tensors((torch.empty(2, 4, 2, 16), prompt), {}, ()))
    assert all(dict(i.held)["scratch"] >= shares for i in attention)


# Whole models of other layers, each with the operators that no other test of this file binds.
KINDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "qwen3_5_text": (
        dict(linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
             layer_types=["linear_attention", "full_attention"]),
        {"forebay.short_conv", "forebay.linear_recurrence"}),
    "deepseek_v3": (
        dict(moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
             first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
             v_head_dim=16, head_dim=8, num_key_value_heads=2),
        {"forebay.attention", "forebay.experts"}),
    "mamba": (dict(state_size=4), {"forebay.short_conv", "forebay.selective_scan"}),
    "gpt_oss": (dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=3), {"forebay.experts"}),
}  # fmt: skip


def small(family: str, sizes: dict[str, Any]) -> Any:
    """A model of two layers at random."""
    return random_model(transformers.AutoConfig.for_model(
        family, hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=64, num_attention_heads=2,
        pad_token_id=0, max_position_embeddings=64, **dict(num_key_value_heads=1, head_dim=16) | sizes))


@pytest.mark.parametrize("family", ["qwen3_5_text", at_length("gpt_oss"), at_length("deepseek_v3"), at_length("mamba")])
def test_layers_of_other_kinds(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of unequal length and a decode step give the logits of the CPU's kernels; tables of experts stream."""
    sizes, operators_of_it = KINDS[family]
    model = small(family, sizes)
    model.save_pretrained(tmp_path)
    tight = sum(p.numel() * 3 for p in model.parameters()) + least_workspace_nbytes()  # of 4 bytes each
    prompt = torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    opened, found = open_model(tmp_path), {}
    for kind, device_nbytes in (("cpu", 1 << 26), ("NVIDIA H200", tight)):
        gpu = GpuOfThreads(monkeypatch) if kind != "cpu" else None
        machine = replace(Machine.default(), device_kind=kind)
        with LanguageModel(*opened, Budget(device_nbytes, 1 << 24), Workload(2, 5, 3), Options(), machine) as lm:
            streams = {w.name for w in lm.plan.weights if w.tier != "device"}
            found[kind] = lm.generate(
                prompt, attention_mask=mask, max_new_tokens=2, do_sample=False, output_logits=True,
                return_dict_in_generate=True, eos_token_id=None, pad_token_id=0)
    assert family != "gpt_oss" or any(name.endswith("experts.table") for name in streams)
    assert gpu is not None and operators_of_it <= {op for op, _ in gpu.bound}
    assert torch.equal(found["cpu"].sequences, found["NVIDIA H200"].sequences)
    for want, got in zip(found["cpu"].logits, found["NVIDIA H200"].logits, strict=True):
        assert (got - want).double().norm() < 1e-4 * want.double().norm()


@pytest.mark.parametrize(("cache", "expand"), [("kv8", True), at_length("kv4", False), at_length("native", True)])
def test_latents(cache: str, expand: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows of latents, and prompts that expand them, give the logits of the CPU's kernels."""
    small("deepseek_v3", KINDS["deepseek_v3"][0]).save_pretrained(tmp_path)
    prompt = torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    opened, found = open_model(tmp_path), {}
    for kind in ("cpu", "NVIDIA H200"):
        gpu = GpuOfThreads(monkeypatch) if kind != "cpu" else None
        machine, options = replace(Machine.default(), device_kind=kind), Options(cache=cache, expand_latents=expand)
        with LanguageModel(*opened, Budget(1 << 26, 1 << 24), Workload(2, 5, 3), options, machine) as lm:
            found[kind] = lm.next_logits(torch.cat((prompt, prompt[:, :1]), 1)).double()
            lm.generate(prompt, max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)
    bound = {op for op, _ in gpu.bound} if gpu is not None else set()
    assert "forebay.experts" in bound and ("forebay.expanded_attention" in bound) is expand
    assert {"forebay.kv_append", "forebay.attention"} <= bound or cache != "native"
    assert {"forebay.kv_append_q", "forebay.attention_q"} <= bound or cache == "native"
    assert (found["NVIDIA H200"] - found["cpu"]).norm() < (1e-4 if cache == "native" else 1e-2) * found["cpu"].norm()
