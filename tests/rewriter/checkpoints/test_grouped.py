"""Checkpoints of AWQ, GPTQ and compressed-tensors, packed here element by element by their published layouts."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st
from quantized_folders import SHAPE, change_settings, change_tensors, less_one, make, pack, quantized, settings
from safetensors.torch import load_file, save_file
from selection import at_length, examples
from small_experts import small

from forebay.api import wrap
from forebay.kernels.formats.packing import unpack_rows
from forebay.kernels.quantization.quantize.reference import dequantize_reference
from forebay.rewriter.checkpoints import resolve
from forebay.rewriter.checkpoints.grouped import grouped_tensors
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.resolve import resolve_model
from forebay.rewriter.checkpoints.rounding import closest_scale_dtype
from forebay.rewriter.checkpoints.scheme import read_scheme


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place of the test's own for conversions; compiled kernels stay where they are."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(resolve, "cache_folder", lambda: tmp_path / "cache")


CASES = [("gptq", 4, 64, True), ("gptq", 4, 128, False), ("gptq", 8, 32, True), ("gptq", 4, -1, True),
         ("awq", 4, 64, False), ("awq", 4, 128, True), ("compressed-tensors", 4, 128, True),
         ("compressed-tensors", 4, 32, False), ("compressed-tensors", 8, -1, True)]


@pytest.mark.parametrize(("method", "bits", "group", "symmetric", "dtype"), [
    case if case[-1] is torch.float16 or not case[3] else at_length(*case)
    for case in ((*each, dtype) for each in CASES for dtype in (torch.float16, torch.bfloat16))])
def test_rows_hold_the_codes(tmp_path: Path, method: str, bits: int, group: int, symmetric: bool,
                             dtype: torch.dtype) -> None:
    """To the bit, where they are symmetric; else to the rounding of a low."""
    values = make(tmp_path / "model", method, bits, group, symmetric, dtype)
    folder = resolve_model(tmp_path / "model")
    found = open_checkpoint(folder, verify=True).tensors
    assert resolve_model(tmp_path / "model") == folder and "quantization_config" not in (
        folder / "config.json").read_text()
    for name, value in values.items():
        packed = found[name].packed
        assert packed is not None and packed.bits == bits and packed.dtype == dtype
        made = read_dequantized(found[name]).double()
        if symmetric:
            assert torch.equal(made, value.to(dtype).double())
        else:
            most = 0.021 * 2**bits  # of a low, and of a value
            assert (made - value).abs().max() <= most * (2.0**-11 + (2.0**-11 if dtype == torch.float16 else 2.0**-8))
    assert found["lm_head.weight"].packed is None


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_logits_are_those_of_the_dequantized_model(tmp_path: Path, method: str) -> None:
    values = make(tmp_path / "model", method, symmetric=method != "awq")
    plain = open_checkpoint(resolve_model(tmp_path / "model", dequantize=True))
    assert all(record.packed is None for record in plain.tensors.values())
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    model.load_state_dict({name: read_dequantized(record).float() for name, record in plain.tensors.items()})
    for name, value in values.items():
        assert (model.get_parameter(name).double() - value).abs().max() <= 2.0**-10 * value.abs().max()
    ids = torch.randint(0, 64, (2, 12))
    with wrap(tmp_path / "model", "4MB", batch=2, prompt=12, new_tokens=2) as lm, torch.no_grad():
        ours, theirs = lm.next_logits(ids).float(), model(ids).logits[:, -1]
    assert (ours - theirs).norm() < 0.01 * theirs.norm()


def assert_symmetric_values(folder: Path, values: dict[str, torch.Tensor]) -> None:
    found = open_checkpoint(resolve_model(folder)).tensors
    for name, value in values.items():
        made = read_dequantized(found[name])
        assert torch.equal(made, value.to(made.dtype)), name


@pytest.mark.covering(2)
@pytest.mark.parametrize("said", [{"checkpoint_format": "gptq"}, {}, {"checkpoint_format": "gptq_v2"},
                                  {"format": "gptq_v2"}, {"sym": None}])
@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_zero_points_decide_on_the_format(tmp_path: Path, said: dict[str, Any], shifted: bool, bits: int
                                                    ) -> None:
    values = make(tmp_path / "model", "gptq", bits)
    change_settings(tmp_path / "model", **said)
    if not shifted:
        change_tensors(tmp_path / "model", lambda stored: stored.update(
            {name: t + sum(1 << at for at in range(0, 32, bits)) for name, t in stored.items() if "qzeros" in name}))
    assert_symmetric_values(tmp_path / "model", values)


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_zero_points_that_are_not_symmetric_as_said_are_refused(tmp_path: Path, method: str) -> None:
    make(tmp_path / "model", method, symmetric=False)
    config = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"] if method == "compressed-tensors" else config
    weights.update({"sym": True, "symmetric": True})
    weights.pop("symmetric" if method == "gptq" else "sym")
    change_settings(tmp_path / "model", **config)
    with pytest.raises(CheckpointError, match=r"proj\.weight, quantized by .* is symmetric by quantization_config"):
        resolve_model(tmp_path / "model")


@settings_of(max_examples=examples(60), deadline=None)
@given(st.data(), st.sampled_from([2, 3, 4, 8]), st.booleans())
def test_zero_points_from_0_on_are_read_or_refused(data: st.DataObject, bits: int, second: bool) -> None:
    """Of either format, whatever borrows the subtraction from a word made; 16 or 256 is never read."""
    said = settings("gptq", bits, 32, False) | ({"checkpoint_format": "gptq_v2"} if second else {})
    if bits in (2, 3):
        with pytest.raises(CheckpointError, match=f"gptq of {bits} bits"):
            read_scheme(said, Path("model"))
        return
    zero = torch.tensor(data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=8, max_size=8)))[None]
    stored = pack(zero, bits, 1)
    with tempfile.TemporaryDirectory() as folder:
        save_file({"a.qweight": torch.zeros(32 * bits // 32, 8, dtype=torch.int32), "a.scales": torch.ones(1, 8).half(),
                   "a.qzeros": stored if second else less_one(stored, bits), "a.g_idx": torch.zeros(32).int()},
                  Path(folder) / "model.safetensors")
        (tensor,), _ = grouped_tensors(open_checkpoint(Path(folder)), read_scheme(said, Path(folder)))
        found = torch.cat(list(tensor.contents()))
    assert torch.equal(found, -zero.t().expand(8, 32).half())


def mixed(folder: Path, method: str, wide: str = "down_proj") -> dict[str, torch.Tensor]:
    """A Llama in 4 bits and groups of 64, but for one kind of matrix, which has 8 bits and groups of 32."""
    values = make(folder, method)
    torch.manual_seed(1)

    def change(stored: dict[str, torch.Tensor]) -> None:
        for name in [name for name in values if wide in name]:
            parts, values[name] = quantized(method, 8, 32, True, *values[name].shape, torch.float16)
            stored.update({name.replace("weight", part): tensor for part, tensor in parts.items()})

    change_tensors(folder, change)
    return values


def test_dynamic_is_obeyed(tmp_path: Path) -> None:
    values = mixed(tmp_path / "model", "gptq")
    plain = "model.layers.1.self_attn.q_proj"

    def leave_out(stored: dict[str, torch.Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del stored[f"{plain}.{part}"]
        stored[f"{plain}.weight"] = values[f"{plain}.weight"].half()

    change_tensors(tmp_path / "model", leave_out)
    change_settings(tmp_path / "model", dynamic={
        "-:.*layers\\.1\\.self_attn\\.q_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 32, "desc_act": False}})
    assert_symmetric_values(tmp_path / "model", values)
    found = open_checkpoint(resolve_model(tmp_path / "model")).tensors
    formats = {name.split(".")[-2]: record.packed and record.packed.format for name, record in found.items()}
    assert formats["down_proj"] == "w8g32" and formats["up_proj"] == "w4g64" and found[f"{plain}.weight"].packed is None


@pytest.mark.parametrize("dynamic", [{".*down_proj": {"bits": 8}}, {".*down_proj": {"group_size": 32}}])
def test_a_matrix_that_dynamic_does_not_describe_is_refused(tmp_path: Path, dynamic: dict[str, Any]) -> None:
    mixed(tmp_path / "model", "gptq")
    change_settings(tmp_path / "model", dynamic=dynamic)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight, .*dynamic gives no other layout"):
        resolve_model(tmp_path / "model")


@pytest.mark.parametrize(("method", "place"), [("gptq", "quantize_config.json"),
                                               ("compressed-tensors", "compression_config")])
def test_settings_in_an_older_place_are_obeyed(tmp_path: Path, method: str, place: str) -> None:
    """AutoGPTQ's own file, and what sparseml called compressed-tensors' settings."""
    values = make(tmp_path / "model", method)
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    said = config.pop("quantization_config")
    if place == "quantize_config.json":
        del said["quant_method"]
        (tmp_path / "model" / place).write_text(json.dumps(said | {"model_name_or_path": "x", "damp_percent": 0.1}))
    else:
        config[place] = said
    path.write_text(json.dumps(config))
    assert_symmetric_values(tmp_path / "model", values)
    folder = resolve_model(tmp_path / "model")
    assert "config_groups" not in (folder / "config.json").read_text() and resolve_model(folder) == folder


def test_dynamic_may_turn_symmetry_off(tmp_path: Path) -> None:
    """Two layouts that differ in nothing that shapes show: zero points that are not the middle code are read."""
    make(tmp_path / "model", "gptq", symmetric=False)
    change_settings(tmp_path / "model", sym=True, dynamic={"+:.*": {"sym": False}})
    resolve_model(tmp_path / "model")
    change_settings(tmp_path / "model", dynamic={"+:.*": {"damp_percent": 0.05}})
    with pytest.raises(CheckpointError, match="symmetric by quantization_config"):
        resolve_model(tmp_path / "model")


def test_several_config_groups_are_obeyed(tmp_path: Path) -> None:
    values = mixed(tmp_path / "model", "compressed-tensors")
    groups = settings("compressed-tensors", 4, 64, True)["config_groups"]
    second = settings("compressed-tensors", 8, 32, True)["config_groups"]["group_0"] | {"targets": ["re:.*down_proj"]}
    with pytest.raises(CheckpointError, match=r"down_proj\.weight, quantized by compressed-tensors, is"):
        resolve_model(tmp_path / "model")
    change_settings(tmp_path / "model", config_groups=groups | {"group_1": second})
    assert_symmetric_values(tmp_path / "model", values)


@pytest.mark.parametrize(("change", "message"), [
    ({"weight_shape": torch.tensor([128, 120])}, r"but weight_shape is \[128, 120\]"),
    ({"weight_packed": torch.zeros(128, 16, dtype=torch.int64)}, "has codes of torch.int64"),
    ({"weight_scale": torch.ones(128, 3)}, r"but has scale \[128, 3\]"),
    ({"weight_zero_point": torch.zeros(128, 2, dtype=torch.int8)}, r"but has zero_point \[128, 2\]"),
    ({"weight_zero_point": None}, "lacks weight_zero_point, although it is not symmetric"),
])
def test_parts_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    make(tmp_path / "model", "compressed-tensors", symmetric=False)
    module = "model.layers.0.self_attn.o_proj"
    (part, value), = change.items()
    change_tensors(tmp_path / "model", lambda stored: stored.pop(f"{module}.{part}") if value is None else
                   stored.update({f"{module}.{part}": value}))
    with pytest.raises(CheckpointError, match=f"{module}.weight, .*{message}"):
        resolve_model(tmp_path / "model")


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_an_order_of_activations_that_is_not_stored_is_refused(tmp_path: Path, method: str) -> None:
    make(tmp_path / "model", method)
    change_tensors(tmp_path / "model", lambda stored: [stored.pop(name) for name in list(stored) if "g_idx" in name])
    resolve_model(tmp_path / "model")
    groups = settings(method, 4, 64, True).get("config_groups", {})
    for each in groups.values():
        each["weights"]["actorder"] = "group"
    change_settings(tmp_path / "model", **({"config_groups": groups} if groups else {"desc_act": True}))
    with pytest.raises(CheckpointError, match=r"order of activations \(desc_act, actorder\), but lacks g_idx"):
        resolve_model(tmp_path / "model")


@pytest.mark.parametrize(("group", "width"), [(96, 32), (160, 32), (192, 64), (256, 128)])
def test_groups_of_any_size_become_rows_that_every_device_reads(tmp_path: Path, group: int, width: int) -> None:
    parts, values = quantized("gptq", 4, group, True, 16, 2 * group, torch.float16)
    save_file({f"a.{name}": tensor for name, tensor in parts.items()}, tmp_path / "model.safetensors")
    (tensor,), _ = grouped_tensors(open_checkpoint(tmp_path), read_scheme(settings("gptq", 4, group, True), tmp_path))
    assert tensor.format() == f"w4g{width}"
    made = dequantize_reference(*unpack_rows(tensor.repacked()(0, 16), 2 * group, 4, width, torch.float16), 4, width, 1,
                                2 * group)
    assert torch.equal(made.double(), values)


def test_groups_that_do_not_lie_together_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "model", "gptq")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.g_idx"
    stored[name] = stored[name].flip(0)
    save_file(stored, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight, quantized by gptq, .*desc_act"):
        resolve_model(tmp_path / "model")


@pytest.mark.parametrize(("change", "message"), [
    ({"quant_method": "exl2"},
     "by 'exl2'; awq, gptq, auto-round, compressed-tensors, .*, torchao, mlx are read"),
    ({"quant_method": None}, "quantized by None"), ({"bits": 3}, "gptq of 3 bits"),
    ({"group_size": 48}, "gptq in groups of 48"), ({"bits": "four"}, "lacks what that needs"),
    ({"quant_method": "awq", "version": "gemv"}, "awq in version 'gemv'"),
    ({"quant_method": "awq", "bits": 8}, "awq of 8 bits"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}, "format 'marlin-24'"),
    ({"quant_method": "compressed-tensors"}, "lacks what that needs: KeyError"),
])
def test_others_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    given = settings("gptq", 4, 64, True) | change
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": given}))
    with pytest.raises(CheckpointError, match=message):
        resolve_model(tmp_path)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_parts_that_are_missing_are_named(tmp_path: Path, part: str) -> None:
    make(tmp_path / "model", "gptq")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    del stored[f"model.layers.0.mlp.up_proj.{part}"]
    save_file(stored, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj"):
        folder = resolve_model(tmp_path / "model")
        wrap(folder, "4MB")


def test_scales_of_activations_are_left_out(tmp_path: Path) -> None:
    """W4A8: words as always, and what rounds activations, keys and values at run time."""
    values = make(tmp_path / "model", "compressed-tensors")
    config = json.loads((tmp_path / "model/config.json").read_text())
    said = config["quantization_config"]
    said["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": False}
    change_settings(tmp_path / "model", **said, kv_cache_scheme={"num_bits": 8, "type": "float"})
    layer = "model.layers.0.self_attn"
    change_tensors(tmp_path / "model", lambda tensors: tensors.update({
        f"{layer}.q_proj.input_scale": torch.ones(1), f"{layer}.k_scale": torch.ones(1)}))
    found = open_checkpoint(resolve_model(tmp_path / "model")).tensors
    assert all(torch.equal(read_dequantized(found[name]), value.half()) for name, value in values.items())


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_bits_that_are_no_number_are_refused_by_name(tmp_path: Path, method: str) -> None:
    said = settings(method, 4, 64, True)
    (said["config_groups"]["group_0"]["weights"] if method == "compressed-tensors" else said).update(
        {"num_bits": float("inf"), "bits": float("inf")})
    with pytest.raises(CheckpointError, match=method):
        read_scheme(said, tmp_path)


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize("unread", ["model.layers.0.mlp.act.scales", "model.layers.1.self_attn.q_proj.bias",
                                    "model.layers.2.mlp.up_proj.weight", "a quantized matrix"])
def test_tensors_that_nobody_reads_are_refused_by_name(tmp_path: Path, method: str, unread: str) -> None:
    """AWQ stores scales of activations for GPT-NeoX, Falcon, MPT and Bloom: without them the values are others."""
    make(tmp_path / "model", method)

    def change(stored: dict[str, torch.Tensor]) -> None:
        if unread == "a quantized matrix":
            stored.update({name.replace("layers.1", "layers.2"): value.clone() for name, value in stored.items()
                           if "layers.1.mlp.up_proj" in name})
        else:
            stored[unread] = torch.ones(128)

    change_tensors(tmp_path / "model", change)
    named = "model.layers.2.mlp.up_proj.weight" if unread == "a quantized matrix" else unread
    with pytest.raises(CheckpointError, match=f"no place for {re.escape(named)}"):
        resolve_model(tmp_path / "model")


def test_tensors_that_every_loader_makes_anew_may_lie_beside(tmp_path: Path) -> None:
    make(tmp_path / "model", "awq")
    change_tensors(tmp_path / "model", lambda stored: stored.update(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}))
    with wrap(tmp_path / "model", "8MB", prompt=8, new_tokens=2) as lm:
        assert lm.next_logits(torch.tensor([[1, 2, 3]])).isfinite().all()


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_a_quantized_head_leaves_the_embedding_its_values(tmp_path: Path, method: str) -> None:
    """Whatever the config ties: codes of a head are never the embedding."""
    values = make(tmp_path / "model", method)
    parts, head = quantized(method, 4, 64, True, 64, 128, torch.float16)

    def change(stored: dict[str, torch.Tensor]) -> None:
        del stored["lm_head.weight"]
        stored.update({f"lm_head.{part}": tensor for part, tensor in parts.items()})

    change_tensors(tmp_path / "model", change)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    found = open_checkpoint(resolve_model(tmp_path / "model")).tensors
    embedding = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(read_dequantized(found["model.embed_tokens.weight"]), embedding)
    assert torch.equal(read_dequantized(found["lm_head.weight"]).double(), head.half().double())
    assert values.keys() < found.keys()
    with wrap(tmp_path / "model", "8MB", prompt=8, new_tokens=2) as lm:
        assert {"lm_head.weight", "model.embed_tokens.weight"} <= lm.captured.weights.keys()


def test_a_matrix_stored_quantized_and_plain_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "model", "gptq")
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(tmp_path / "model", lambda stored: stored.update({name: torch.ones(256, 128).half()}))
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} is stored twice, quantized and otherwise"):
        resolve_model(tmp_path / "model")


def test_biases_of_zeros_are_no_biases(tmp_path: Path) -> None:
    """AutoGPTQ stored one for each matrix, whether the model had it or not."""
    make(tmp_path / "model", "gptq")
    change_tensors(tmp_path / "model", lambda stored: stored.update(
        {f"model.layers.{i}.self_attn.q_proj.bias": torch.zeros(128).half() for i in range(2)}))
    assert not any(name.endswith("bias") for name in open_checkpoint(resolve_model(tmp_path / "model")).tensors)
    change_tensors(tmp_path / "model", lambda stored: stored["model.layers.1.self_attn.q_proj.bias"].__setitem__(7, 1))
    with pytest.raises(CheckpointError, match=r"no place for model\.layers\.1\.self_attn\.q_proj\.bias, "):
        resolve_model(tmp_path / "model")


@pytest.mark.parametrize("method", ["gptq", at_length("awq"), "compressed-tensors"])
def test_matrices_of_experts_are_one_packed_tensor(tmp_path: Path, method: str) -> None:
    """Each expert has tensors of its own; those of a layer become one, and tokens are those of the values."""
    model = small("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    stored, values = {}, {}
    for name, value in load_file(tmp_path / "model/model.safetensors").items():
        if ".experts." not in name:
            stored[name] = value
            continue
        parts, values[name] = quantized(method, 4, 32, True, *value.shape, torch.float16)
        stored |= {name.replace("weight", part): tensor for part, tensor in parts.items()}
    save_file(stored, tmp_path / "model/model.safetensors", {"format": "pt"})
    change_settings(tmp_path / "model", **settings(method, 4, 32, True))
    found = open_checkpoint(resolve_model(tmp_path / "model")).tensors
    packed = {name: record for name, record in found.items() if record.packed is not None}
    assert len(packed) == 6 and all(".experts." in name for name in packed)
    for name, record in packed.items():
        model.get_parameter(name).data = read_dequantized(record)
        for expert, own in enumerate(read_dequantized(record).double()):
            of = [f"{name.rpartition('.')[0]}.{expert}.{each}_proj.weight" for each in
                  (("gate", "up") if "gate_up" in name else ("down",))]
            assert torch.equal(own, torch.cat([values[each] for each in of]))
    ids = torch.randint(3, 128, (2, 9))
    with wrap(tmp_path / "model", "400KiB", batch=2, prompt=9, new_tokens=4) as lm:
        assert torch.equal(lm.generate(ids, max_new_tokens=4, do_sample=False),
                           model.generate(ids, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize(("scales", "lows", "dtype"), [
    ([0.01, 0.3], [1.0], torch.float16), ([2.0**-24 * 1.5, 0.0], [1.0], torch.bfloat16),
    ([1e-7, 0.01], [1.0], torch.bfloat16), ([7e4, 1.0], [1.0], torch.bfloat16), ([0.01], [7e4], torch.bfloat16),
    ([3e-5, 0.012], [1.0], torch.float16), ([-0.01], [1.0], torch.float16), ([0.0], [0.0], torch.float16)])
def test_scales_get_the_dtype_that_rounds_them_least(
    scales: list[float], lows: list[float], dtype: torch.dtype
) -> None:
    assert closest_scale_dtype(torch.tensor(scales), torch.tensor(lows)) == dtype


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_scales_in_fp32_are_rounded_to_fp16(tmp_path: Path, method: str) -> None:
    """As tools write them for a model in fp32: by 2^-11 of each, where bf16 would round by 2^-8."""
    values = make(tmp_path / "model", method, 4, 64, True, torch.float32)
    found = open_checkpoint(resolve_model(tmp_path / "model")).tensors
    for name, value in values.items():
        assert (read_dequantized(found[name]) - value).norm() <= 2.0**-11 * value.norm()
