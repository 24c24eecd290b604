"""Checkpoints whose codes are places in a codebook: written here element by element."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from selection import at_length

import forebay
from forebay.kernels.formats import codebooks
from forebay.rewriter.checkpoints import resolve
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.resolve import resolve_model

IDS = torch.tensor([[5, 9, 2, 77, 31]])
NEW = 6
SHAPE = dict(vocab_size=128, hidden_size=192, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False)
Parts = tuple[dict[str, torch.Tensor], torch.Tensor]


def e4m3(code: int) -> float:
    """The number of a code, by the definition (OFP8, table 2)."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -magnitude if code & 128 else magnitude


def e2m1(code: int) -> float:
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -magnitude if code & 8 else magnitude


def test_codebooks_are_their_definitions() -> None:
    fp8 = codebooks.codebook_values("e4m3")
    assert [fp8[code].item() for code in range(256) if code & 127 != 127] == [
        e4m3(code) for code in range(256) if code & 127 != 127]
    assert codebooks.codebook_values("e2m1").tolist() == [e2m1(code) for code in range(16)]
    # bitsandbytes lists twelve times fp4's numbers, and makes nf4's of quantiles.
    twelve = [0, 0.0625, 8, 12, 4, 6, 2, 3]
    assert codebooks.codebook_values("fp4").tolist() == (torch.tensor([*twelve, *(-v for v in twelve)]) / 12).tolist()
    upper, lower = (torch.special.ndtri(torch.linspace(0.9677083, 0.5, count, dtype=torch.float64)) for count in (9, 8))
    quantiles = torch.cat([-lower, upper[:-1].flip(0)]) / upper[0]
    assert torch.allclose(codebooks.codebook_values("nf4").double(), quantiles, rtol=0, atol=2e-7)
    for book in codebooks.CODEBOOKS[1:]:
        values = codebooks.codebook_values(book)
        numbers = values[values.isfinite()]
        assert torch.equal(values[codebooks.nearest_codes(numbers, book).int()], numbers)
        x = torch.empty(2000).uniform_(-1.2, 1.2) * codebooks.largest(book)
        nearest = (x[:, None] - numbers).abs().amin(1)
        assert torch.equal((values[codebooks.nearest_codes(x, book).int()] - x).abs(), nearest), book


def fp8(n: int, k: int, block: tuple[int, int], name: str) -> Parts:
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    codes[codes & 127 == 127] = 3
    grid = -(-n // block[0]), -(-k // block[1])
    scale = torch.rand(grid) * 1e-3 + 1e-4
    numbers = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)
    each = scale.double().repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    return {"weight": codes.view(torch.float8_e4m3fn), name: scale}, numbers[codes.int()] * each


def fours(n: int, k: int, method: str) -> Parts:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    values = torch.tensor([e2m1(code) for code in range(16)], dtype=torch.float64)[codes.int()]
    made = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4}
    if method == "mxfp4":
        exponents = torch.randint(116, 122, (n, k // 32), dtype=torch.uint8)
        return made | {"weight_scale": exponents}, values * (exponents.double() - 127).exp2().repeat_interleave(32, 1)
    scale, over = (torch.rand(n, k // 16) * 40 + 1).to(torch.float8_e4m3fn), torch.tensor([900.0])
    if method == "modelopt":
        factor = torch.tensor(0.0013)
        return ({"weight": made["weight_packed"], "weight_scale": scale, "weight_scale_2": factor},
                values * (scale.float() * factor).double().repeat_interleave(16, 1))
    each = (scale.float() / over).double().repeat_interleave(16, 1)
    return made | {"weight_scale": scale, "weight_global_scale": over, "input_global_scale": over}, values * each


def mxfp8(n: int, k: int) -> Parts:
    parts, values = fp8(n, k, (n, k), "weight_scale")
    exponents = torch.randint(100, 125, (n, k // 32), dtype=torch.uint8)
    plain = values / parts["weight_scale"].double()
    return parts | {"weight_scale": exponents}, plain * (exponents.double() - 127).exp2().repeat_interleave(32, 1)


def four_bits(n: int, k: int, kind: str, double: bool) -> Parts:
    """As bitsandbytes has it: blocks of 64 in the order of the whole matrix, the first code in the high nibble."""
    codes = torch.randint(0, 16, (n * k,), dtype=torch.uint8)
    table, blocks = codebooks.codebook_values(kind), n * k // 64
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]}
    most = torch.rand(blocks) * 0.05 + 0.01
    parts = {"weight": (codes[::2] << 4 | codes[1::2]).view(-1, 1), "weight.absmax": most, "weight.quant_map": table}
    if double:
        steps, numbers = torch.rand(-(-blocks // 256)) * 0.02, torch.linspace(-1, 1, 256)
        of = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        state |= {"nested_blocksize": 256, "nested_offset": 0.03, "nested_dtype": "float32"}
        parts |= {"weight.absmax": of, "weight.nested_absmax": steps, "weight.nested_quant_map": numbers}
        most = numbers[of.long()] * steps.repeat_interleave(256)[:blocks] + 0.03
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    return parts, (table[codes.int()] * most.repeat_interleave(64)).double().view(n, k)


def compressed(format: str, bits: int, **weights: Any) -> dict[str, Any]:
    given = {"num_bits": bits, "type": "float", "symmetric": True, "dynamic": False, "observer": "minmax", **weights}
    return {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"], "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": given, "input_activations": {"num_bits": bits, "dynamic": True}}}}


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CASES: dict[str, tuple[dict[str, Any], Callable[[int, int], Parts], str]] = {
    "blocks": (BLOCKS, lambda n, k: fp8(n, k, (128, 128), "weight_scale_inv"), "fp8"),
    "small blocks": (BLOCKS | {"weight_block_size": [64, 96]}, lambda n, k: fp8(n, k, (64, 96), "weight_scale_inv"),
                     "fp8g32"),
    "rows": (compressed("float-quantized", 8, strategy="channel"), lambda n, k: fp8(n, k, (1, k), "weight_scale"),
             "fp8"),
    "one": (compressed("float-quantized", 8, strategy="tensor"), lambda n, k: fp8(n, k, (n, k), "weight_scale"), "fp8"),
    "nvfp4": (compressed("nvfp4-pack-quantized", 4, strategy="tensor_group", group_size=16),
              lambda n, k: fours(n, k, "nvfp4"), "nvfp4"),
    "mxfp4": (compressed("mxfp4-pack-quantized", 4, strategy="group", group_size=32),
              lambda n, k: fours(n, k, "mxfp4"), "mxfp4"),
    "mxfp8": (compressed("mxfp8-quantized", 8, strategy="group", group_size=32), lambda n, k: mxfp8(n, k), "fp8g32"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda n, k: fours(n, k, "modelopt"), "nvfp4"),
    "nf4": (BNB, lambda n, k: four_bits(n, k, "nf4", False), "nf4"),
    "fp4": (BNB | {"bnb_4bit_quant_type": "fp4"}, lambda n, k: four_bits(n, k, "fp4", True), "fp4"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place of the test's own for conversions; compiled kernels stay where they are."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(resolve, "cache_folder", lambda: tmp_path / "cache")


def make(folder: Path, case: str) -> dict[str, torch.Tensor]:
    """A Llama whose layers' matrices are stored so; returns their values."""
    torch.manual_seed(0)
    settings, write, _ = CASES[case]
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(folder)
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if ".layers." in name and value.dim() == 2:
            parts, values[name] = write(*value.shape)
            stored |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
        else:
            stored[name] = value
    stored = {name: tensor.clone() for name, tensor in stored.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return values


@pytest.mark.filterwarnings("ignore:.*lies in memory")
@pytest.mark.parametrize("case", ["blocks", at_length("small blocks"), at_length("rows"), at_length("one"), "nvfp4",
                                  at_length("mxfp4"), "mxfp8", at_length("modelopt"), at_length("nf4"), "fp4"])
def test_values_are_kept_and_tokens_equal_transformers(tmp_path: Path, case: str) -> None:
    values = make(tmp_path / "model", case)
    folder = resolve_model(tmp_path / "model")
    tensors = open_checkpoint(folder).tensors
    for name, expected in values.items():
        packed = tensors[name].packed
        assert packed is not None and packed.format == CASES[case][2]
        assert torch.equal(read_dequantized(tensors[name]), expected.float()), name
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    plain = {name: read_dequantized(record) for name, record in tensors.items()}
    model.load_state_dict(plain)
    expected = model.generate(IDS, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    nbytes = sum(record.nbytes for record in tensors.values())
    with forebay.wrap(folder, {"device": nbytes * 2 // 3, "disk": tmp_path}, prompt=5, new_tokens=NEW) as lm:
        assert torch.equal(lm.generate(IDS, max_new_tokens=NEW, do_sample=False, pad_token_id=0), expected)
    whole = open_checkpoint(resolve_model(tmp_path / "model", dequantize=True)).tensors
    assert all(torch.equal(read_dequantized(whole[name]), value.float()) for name, value in values.items())


@pytest.mark.parametrize("format", ["fp8", "mxfp4", "nf4"])
def test_models_are_quantized_to_them(tmp_path: Path, format: str) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    model.save_pretrained(tmp_path / "model")
    made = quantize_model(tmp_path / "model", tmp_path / "out", Wish(format))
    lost = []
    for name, value in model.state_dict().items():
        record = made.tensors[name]
        if record.packed is None:
            continue
        assert record.packed.format == format
        found, stored = read_dequantized(record), record.packed
        groups = torch.nn.functional.pad(value, (0, -value.shape[1] % stored.group_size)).unflatten(
            1, (-1, stored.group_size))
        most = groups.abs().amax(-1)
        # Of a group's largest: half a step between fp8's largest numbers, a sixth of 6 or 8, half of nf4's widest gap.
        bound = {"fp8": 0.036, "mxfp4": 0.26, "nf4": 0.153}[format]
        error = torch.nn.functional.pad((found - value).abs(), (0, -value.shape[1] % stored.group_size)).unflatten(
            1, (-1, stored.group_size)).amax(-1)
        assert bool((error <= bound * most).all())
        lost.append(float((found - value).norm() / value.norm()))
    assert len(lost) == 14 and math.fsum(lost) / 14 < {"fp8": 0.03, "mxfp4": 0.13, "nf4": 0.1}[format]


@pytest.mark.parametrize(("case", "part", "tensor", "told"), [
    ("blocks", "weight_scale_inv", None, "lacks weight_scale_inv"),
    ("blocks", "weight_scale_inv", torch.ones(7, 3), "has scales .7, 3. for blocks of"),
    ("blocks", "weight", torch.full((192, 320), math.nan).to(torch.float8_e4m3fn), "holds NaN"),
    ("rows", "weight_scale", torch.full((192, 1), math.inf), "a scale that is no finite number"),
    ("nvfp4", "weight_global_scale", torch.ones(2), "where one number is read"),
    ("mxfp4", "weight_scale", torch.full((192, 10), 255, dtype=torch.uint8), "a scale of 255"),
    ("nf4", "weight.quant_map", torch.linspace(-1, 1, 16), "another quant_map"),
    ("nf4", "weight.absmax", torch.ones(5), "5 scales for blocks of 64"),
    ("fp4", "weight.nested_absmax", torch.ones(9), "do not fit together"),
    ("fp4", "weight.nested_absmax", None, "codes of scales without nested_absmax"),
    ("fp4", "weight.absmax", torch.ones(960), "nested_absmax of scales that are no codes"),
    ("nf4", "weight.quant_state.bitsandbytes__nf4", torch.tensor([91, 93], dtype=torch.uint8), "no object")])
def test_damaged_parts_are_refused(
    tmp_path: Path, case: str, part: str, tensor: torch.Tensor | None, told: str
) -> None:
    make(tmp_path / "model", case)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.1.mlp.down_proj.{part}"
    assert tensors.pop(name) is not None
    save_file(tensors | ({} if tensor is None else {name: tensor}), file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=told):
        resolve_model(tmp_path / "model")
