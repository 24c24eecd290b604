"""Formats chosen matrix by matrix: sensitivity compared with plain autograd, the choice with all choices."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from families import FAMILIES
from small_experts import small_config

from forebay.rewriter.checkpoints import mixed_formats, quantize
from forebay.rewriter.checkpoints.matrices import find_matrices
from forebay.rewriter.checkpoints.mixed_formats import FormatCost, Mixture, solve_mixture
from forebay.rewriter.checkpoints.packed_writer import begun_settings
from forebay.rewriter.checkpoints.quantize import MIXED, Wish, quantize_model
from forebay.rewriter.checkpoints.quantize_source import open_folder_source
from forebay.rewriter.checkpoints.records import CheckpointError, parse_format
from forebay.rewriter.checkpoints.sensitivity import measure_sensitivity

IDS = torch.randint(0, 100, (2, 6), generator=torch.Generator().manual_seed(1))


def mixtral() -> transformers.MixtralConfig:
    return transformers.MixtralConfig(
        hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64)


CONFIGS = {"llama": FAMILIES["llama"], "gpt2": FAMILIES["gpt2"], "gemma2": FAMILIES["gemma2"], "mixtral": mixtral,
           "dbrx": functools.partial(small_config, "dbrx")}


def saved(folder: Path, config: transformers.PreTrainedConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():  # of biases and norms, too
        parameter.data += torch.randn_like(parameter) * 0.05
    model.save_pretrained(folder)
    return model


def token_gradients(model: torch.nn.Module, path: str) -> torch.Tensor:
    """F of a linear layer: the squared gradients by one copy of its weights for each token, added up."""
    layer = model.get_submodule(path)
    matrix = layer.weight.T if isinstance(layer, transformers.pytorch_utils.Conv1D) else layer.weight
    copies = matrix.detach().expand(IDS.numel(), -1, -1).clone().requires_grad_()
    bias = 0.0 if layer.bias is None else layer.bias.detach()
    layer.forward = lambda x: torch.einsum("tnk,tk->tn", copies, x.flatten(0, -2)).view(*x.shape[:-1], -1) + bias
    _loss(model).backward()
    del layer.forward
    return copies.grad.square().sum(0)


def _loss(model: torch.nn.Module) -> torch.Tensor:
    logits = model(input_ids=IDS, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum")


@pytest.mark.parametrize("family", CONFIGS)
def test_sensitivity_is_the_squared_gradient_of_each_token(tmp_path: Path, family: str) -> None:
    model = saved(tmp_path, CONFIGS[family]())
    source = open_folder_source(tmp_path)
    matrices = {name: m for name, m in find_matrices(source.model).items() if m.role not in ("embedding", "tied")}
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    measure_sensitivity(source, matrices, IDS, lambda name, *parts: found.update({name: parts}))
    assert found.keys() >= {name for name, matrix in matrices.items() if matrix.role != "table"}
    linear = [name for name, matrix in matrices.items() if matrix.role in ("linear", "head")]
    for name in (linear[0], linear[len(linear) // 2], linear[-1]):
        values, weights = found[name]
        parameter = model.get_parameter(name).detach()
        assert torch.equal(values, parameter.T if matrices[name].transposed else parameter)
        torch.testing.assert_close(weights, token_gradients(model, name.removesuffix(".weight")), rtol=2e-3, atol=1e-9)
    experts = [name for name, matrix in matrices.items() if matrix.role == "experts"]
    if experts:
        model.zero_grad()
        _loss(model).backward()
    for name in experts:
        gradient = model.get_parameter(name).grad
        if name.endswith(".w2"):  # [experts x inputs, outputs]
            assert torch.equal(found[name][0][:64], model.get_parameter(name).detach()[:32].T)
        torch.testing.assert_close(found[name][1], matrices[name].rows(gradient).square(), rtol=2e-3, atol=1e-9)
    assert all(p.is_meta for p in source.model.parameters())  # nothing is kept


def test_a_tied_matrix_counts_as_head_and_as_embedding(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    config.tie_word_embeddings = True
    saved(tmp_path, config)
    source = open_folder_source(tmp_path)
    matrices = {name: m for name, m in find_matrices(source.model).items() if m.role == "tied"}
    parts = []
    measure_sensitivity(source, matrices, IDS, lambda name, values, weights: parts.append((values, weights)))
    assert len(parts) == 2
    assert {tuple(values.shape) for values, _ in parts} == {
        (config.vocab_size, config.hidden_size), (IDS.unique().numel(), config.hidden_size)}


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    every = [[FormatCost(str(n), int(nbytes), float(loss)) for n, (nbytes, loss) in enumerate(
        zip(np.sort(random.integers(10, 100, 4)), -np.sort(-random.random(4) ** 4), strict=True))] for _ in range(5)]
    room = sum(own[0].nbytes for own in every) + int(random.integers(0, 120))
    best = min(sum(c.loss for c in chosen) for chosen in itertools.product(*every)
               if sum(c.nbytes for c in chosen) <= room)
    chosen = solve_mixture(every, room)
    assert len(chosen) == 5 and all(c in own for c, own in zip(chosen, every, strict=True))
    assert sum(c.nbytes for c in chosen) <= room
    assert sum(c.loss for c in chosen) <= best * (1 + 2 * mixed_formats.GAP) + 1e-9


def mixture(bits: float, text: str = "a text") -> Mixture:
    return Mixture(bits, text, lambda folder, content: IDS.flatten()[: len(content) * 2])


def test_bytes_are_kept_and_go_where_the_loss_is(tmp_path: Path) -> None:
    """A matrix whose results are multiplied by 0 takes the fewest bits, others more; all within the budget."""
    model = saved(tmp_path / "model", FAMILIES["llama"]())
    dead = "model.layers.1.mlp.gate_proj.weight"
    model.get_parameter("model.layers.1.mlp.down_proj.weight").data.zero_()
    model.save_pretrained(tmp_path / "model")
    for bits in (6.5, 8.0):
        made = quantize_model(tmp_path / "model", tmp_path / f"{bits}", Wish(MIXED, mixture=mixture(bits)))
        packed = {name: record for name, record in made.tensors.items() if record.packed is not None}
        values = sum(math.prod(record.packed.shape) for record in packed.values())
        assert 0.9 * bits < 8 * sum(record.nbytes for record in packed.values()) / values <= bits
        widths = {name: record.packed.rows.row_nbytes for name, record in packed.items()
                  if record.packed.in_features == packed[dead].packed.in_features}
        assert widths[dead] == min(widths.values()) and max(widths.values()) > 1.2 * min(widths.values())


def test_an_interrupted_run_has_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "model", FAMILIES["llama"]())
    wish = Wish(MIXED, mixture=mixture(7.0))
    first = quantize_model(tmp_path / "model", tmp_path / "out", wish)
    assert begun_settings(tmp_path / "out")["mixture"]["bits"] == 7.0
    monkeypatch.setattr(quantize, "choose_mixture", lambda *_: pytest.fail("measured again"))
    assert quantize_model(tmp_path / "model", tmp_path / "out", wish).fingerprint == first.fingerprint
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="they differ in mixture"):
        quantize_model(tmp_path / "model", tmp_path / "out", Wish(MIXED, mixture=mixture(8.0)))


@pytest.mark.parametrize(("bits", "text", "message"), [
    (3.0, "a text", "3 bits for each value are too few: the smallest formats take 5"),
    (7.0, "", r"has 0 token\(s\)"), (math.nan, "a text", "no number of bits"),
    (math.inf, "a text", "no number of bits"), (-1.0, "a text", "no number of bits"),
])
def test_refusals(tmp_path: Path, bits: float, text: str, message: str) -> None:
    saved(tmp_path / "model", FAMILIES["llama"]())
    with pytest.raises(CheckpointError, match=message):
        quantize_model(tmp_path / "model", tmp_path / "out", Wish(MIXED, mixture=mixture(bits, text)))
    with pytest.raises(CheckpointError, match="name --bits and --text"):
        quantize_model(tmp_path / "model", tmp_path / "out", Wish(MIXED))


def test_candidates_are_formats() -> None:
    assert [parse_format(name).name for name in mixed_formats.CANDIDATES] == [*mixed_formats.CANDIDATES]
