"""Mixtures of experts whose weights are packed: tokens of transformers on what rows stand for, at any budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from prompted_experts import NEW, PROMPT, prompts, smallest, tokens
from safetensors.torch import load_file, save_file
from selection import at_length
from small_experts import small

import forebay
from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.match_weights import checkpoint_names
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.records import CheckpointError

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]
MIXED = Wish("w4g32", (("*.down_proj*", "w8g32s"), ("*.1.*.experts.*", "w8g32")))
# Per-expert tensors; those of a layer in one tensor; a dense layer and shared experts beside, two formats in a table.
CASES = [("qwen3_moe", Wish("w4g32")), at_length("granitemoe", Wish("w8g32", rounding="symmetric")),
         ("glm4_moe", MIXED),
         at_length("dbrx", Wish("w4g32")), at_length("jetmoe", Wish("w8g32")),
         at_length("llama4_text", MIXED), at_length("mixtral", Wish("w4g32", rounding="mse")),
         at_length("qwen2_moe", MIXED), at_length("gpt_oss", Wish("w4g32")), at_length("olmoe", Wish("w8g32")),
         at_length("hunyuan_v1_moe", Wish("w4g32s")),
         at_length("ernie4_5_moe", Wish("w4g32", (("*experts*", "native"),)))]


Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A family's model in a folder of several files."""
    known: dict[str, Path] = {}

    def save(family: str) -> Path:
        if family not in known:
            known[family] = tmp_path_factory.mktemp(family)
            small(family).save_pretrained(known[family], max_shard_size="150KB")
        return known[family]

    return save


def unpacked(family: str, packed: Checkpoint) -> torch.nn.Module:
    """The model of transformers with the values that a packed checkpoint stands for."""
    model = small(family)
    _, rename = checkpoint_names(model.config)
    values = {rename(name): read_dequantized(record) for name, record in packed.tensors.items()}
    stacked = {name: value for name, value in values.items() if "[" not in name}
    shapes = {name: each.shape for name, each in model.state_dict().items()}
    left = model.load_state_dict({name: value.view(shapes[name]) for name, value in stacked.items()}, strict=False)
    assert not left.missing_keys and not left.unexpected_keys, left
    return model


@pytest.mark.parametrize(("family", "wish"), CASES)
def test_same_tokens_as_unpacked_weights_at_any_budget(saved: Saved, tmp_path: Path, family: str, wish: Wish) -> None:
    packed = quantize_model(saved(family), tmp_path / "packed", wish, shard_nbytes=50_000)
    ids, mask = prompts()
    want = tokens(unpacked(family, packed), ids, mask)
    least, seen = smallest(tmp_path / "packed"), set()
    for budget in (least, 3 * least // 2, 64 << 20):
        lm = forebay.wrap(tmp_path / "packed", {"device": budget, "disk": tmp_path}, batch=3, prompt=PROMPT,
                          new_tokens=NEW)
        assert torch.equal(tokens(lm, ids, mask), want), budget
        tables = [w for w in lm.plan.weights if w.name.endswith(".table")]
        seen.add(tables[0].tile_rows if tables[0].tier == "disk" else -1)
        lm.close()
    assert len(seen) > 1 and -1 in seen


def test_routers_stay_and_experts_shrink(saved: Saved, tmp_path: Path) -> None:
    for family, router, packed_ones in (("granitemoe", "router.layer.weight", 6), ("qwen3_moe", "mlp.gate.weight", 6),
                                        ("dbrx", "router.layer.weight", 9), ("jetmoe", "mlp.router.layer.weight", 12)):
        packed = quantize_model(saved(family), tmp_path / family, Wish("w4g32"))
        kept = {name: record for name, record in packed.tensors.items() if name.endswith(router)}
        assert len(kept) == 3 and all(record.packed is None for record in kept.values())
        shapes = [record.packed.shape for record in packed.tensors.values() if record.packed is not None]
        assert sum(len(shape) == 3 for shape in shapes) == packed_ones


def test_matrices_of_one_product_have_one_format(tmp_path: Path) -> None:
    model = small("dbrx")
    model.transformer.blocks[1].ffn.experts.mlp.v1.data[3, 4] = 1e5  # which scales in fp16 cannot hold
    model.save_pretrained(tmp_path / "model")
    packed = quantize_model(tmp_path / "model", tmp_path / "w8", Wish("w8g32"))
    for layer, dtype in ((0, torch.float16), (1, torch.bfloat16)):
        own = [packed.tensors[f"transformer.blocks.{layer}.ffn.experts.mlp.{name}"] for name in ("w1", "v1", "w2")]
        assert [each.packed.scale_dtype for each in own] == [dtype, dtype, torch.float16]
        for each in own:
            values = model.get_parameter(each.name).detach()
            assert (read_dequantized(each).view(values.shape) - values).norm() < 0.006 * values.norm()
    forebay.wrap(tmp_path / "w8").close()
    with pytest.raises(CheckpointError, match="name one format for both"):
        quantize_model(tmp_path / "model", tmp_path / "w4", Wish("w4g32", (("*.w1", "w8g32"),)))


def test_a_bundle_and_options(saved: Saved, tmp_path: Path) -> None:
    packed = quantize_model(saved("granitemoe"), tmp_path / "packed", MIXED)
    ids, mask = prompts()
    want = tokens(unpacked("granitemoe", packed), ids, mask)
    budget = {"device": smallest(tmp_path / "packed") + 50_000, "disk": tmp_path}
    forebay.export(tmp_path / "packed", tmp_path / "bundle", "bundle", budget=budget)
    for folder, options in ((tmp_path / "bundle", {}), (tmp_path / "packed", {"prefill_chunk": 2, "cache": "kv8"})):
        lm = forebay.wrap(folder, budget, batch=3, prompt=PROMPT, new_tokens=NEW, **options)
        assert torch.equal(tokens(lm, ids, mask), want), options
        lm.close()


@pytest.mark.parametrize(("what", "message"), [
    ("missing", "expert 3 of .*has no tensor"), ("shape", "where the model has"), ("more", "is of expert 8"),
    ("dtype", "other experts are"), ("nan", "holds NaN")])
def test_odd_checkpoints_are_refused(tmp_path: Path, what: str, message: str) -> None:
    small("qwen3_moe").save_pretrained(tmp_path / "odd")
    weights = load_file(tmp_path / "odd/model.safetensors")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    match what:
        case "missing":
            del weights[name]
        case "shape":
            weights[name] = weights[name][:, 1:].contiguous()
        case "more":
            weights[name.replace(".3.", ".8.")] = weights[name].clone()
        case "dtype":
            weights[name] = weights[name].half()
        case "nan":
            weights[name][0, 0] = torch.nan
    save_file(weights, tmp_path / "odd/model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        quantize_model(tmp_path / "odd", tmp_path / "w4", Wish("w4g32"))


def test_half_packed_experts_are_refused(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="name a format for both"):
        quantize_model(saved("qwen3_moe"), tmp_path / "w4", Wish("w4g32", (("*.experts.down_proj", "native"),)))
