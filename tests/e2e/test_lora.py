"""Models with LoRA adapters give the tokens of the merged model, and of PEFT where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from e2e.agreement import assert_same_tokens
from families import FAMILIES
from lora_folders import merged, write_lora
from selection import at_length, without
from small_experts import small

from forebay.api import wrap
from forebay.exported.export import export
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling

ATTENTION = r".*\.self_attn\.[qkvo]_proj"
# By family: which modules are changed, and how.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", ATTENTION + r"|.*\.mlp\.\w+_proj", {}),
    "llama patterns": ("llama", r".*_proj", dict(rank_pattern={"q_proj": 7, "mlp.up_proj": 2},
                                                 alpha_pattern={"1.self_attn.v_proj": 9}, use_rslora=True)),
    "llama one layer": ("llama", r".*\.[qv]_proj", dict(layers_to_transform=[1], lora_bias=True)),
    "llama saved": ("llama", r".*\.q_proj|lm_head", dict(modules_to_save=["embed_tokens", "model.norm"])),
    "llama dora": ("llama", r".*_proj", dict(use_dora=True)),
    "gpt2": ("gpt2", r".*\.(c_attn|c_fc|c_proj)", dict(fan_in_fan_out=True)),
    "gpt2 dora": ("gpt2", r".*\.(c_attn|c_proj)", dict(use_dora=True, bias="all", fan_in_fan_out=True)),
    "gpt2 embedded": ("gpt2", r"transformer\.wte|.*\.c_fc", {}),
    "qwen3": ("qwen3", r"model\.embed_tokens|" + ATTENTION + r"|lm_head", {}),
    "qwen2 dora": ("qwen2", ATTENTION, dict(use_dora=True, bias="all")),
    "mixtral": ("mixtral", ATTENTION, {}),
}
PROMPT, NEW = 7, 8
IDS = torch.randint(3, 120, (3, PROMPT), generator=torch.Generator().manual_seed(1))


def saved_model(name: str, folder: Path) -> Any:
    torch.manual_seed(3)
    model = small(name) if name == "mixtral" else transformers.AutoModelForCausalLM.from_config(
        FAMILIES[name](2)).eval()
    model.save_pretrained(folder)
    return model


def answers(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0,
                                             eos_token_id=None)
    return found


@pytest.mark.parametrize(("case", "share"), without(
    [(case, share) for case in CASES for share in (0.3, 1.0)],
    [(case, share) for i, case in enumerate(CASES) for share in (0.3, 1.0) if (i % 3 == 0) == (share == 0.3)]))
def test_tokens_equal_the_merged_model(tmp_path: Path, case: str, share: float) -> None:
    name, modules, settings = CASES[case]
    model = saved_model(name, tmp_path / "base")
    adapter = write_lora(tmp_path / "adapter", model, modules, tmp_path / "base", **settings)
    reference = merged(model, adapter)
    expected = answers(reference)
    assert not torch.equal(expected, answers(model)), "the adapter changes nothing that shows"
    nbytes = sum(p.nbytes for p in model.parameters())
    with wrap(tmp_path / "base", int(nbytes * share) + (1 << 20), adapter=adapter, batch=3, prompt=PROMPT,
              new_tokens=NEW) as lm:
        ours = lm.generate(IDS, max_new_tokens=NEW, eos_token_id=None)
        assert_same_tokens(ours, expected, torch.ones_like(IDS), reference, lm.next_logits)


@pytest.mark.parametrize("format", ["w4g32", at_length("fp8g32")])
def test_a_packed_base_stays_packed(tmp_path: Path, format: str) -> None:
    """With DoRA, whose factors need the values of packed rows. A draft is a copy of the base."""
    model = saved_model("llama", tmp_path / "base")
    adapter = write_lora(tmp_path / "adapter", model, r".*_proj", use_dora=True)
    folder = quantize_model(tmp_path / "base", tmp_path / "packed", Wish(format)).folder
    stored = open_checkpoint(folder).tensors
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read_dequantized(stored[name]))
    reference = merged(model, adapter)
    with wrap(folder, 1 << 20, adapter=adapter, batch=3, prompt=PROMPT, new_tokens=NEW) as lm:
        assert {spec.stored.name for spec in lm.captured.weights.values() if spec.stored} == {format}
        ours = lm.generate(IDS, max_new_tokens=NEW, eos_token_id=None)
        assert_same_tokens(ours, answers(reference), torch.ones_like(IDS), reference, lm.next_logits)


def test_the_folder_of_an_adapter_is_a_model(tmp_path: Path) -> None:
    """Its base is the folder that it names; a bundle of it holds both."""
    model = saved_model("llama", tmp_path / "base")
    adapter = write_lora(tmp_path / "adapter", model, r".*\.[qv]_proj", tmp_path / "base")
    reference = merged(model, adapter)
    bundle = export(adapter, tmp_path / "bundle", budget="8MB", prompt=PROMPT, new_tokens=NEW)
    for folder in (adapter, bundle):
        with wrap(folder, 8 << 20, batch=3, prompt=PROMPT, new_tokens=NEW) as lm:
            assert_same_tokens(lm.generate(IDS, max_new_tokens=NEW, eos_token_id=None), answers(reference),
                               torch.ones_like(IDS), reference, lm.next_logits)
    with pytest.raises(CheckpointError, match="is a model with an adapter; quantize its base"):
        quantize_model(lm_folder(adapter), tmp_path / "q", Wish("w8g32"))
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=rf"adapter of {tmp_path}/base: no model at .*; name the base as"):
        wrap(adapter, 8 << 20)
    with pytest.raises(CheckpointError, match="takes no adapter, because it is a bundle"):
        wrap(bundle, 8 << 20, adapter=adapter)


def lm_folder(adapter: Path) -> Path:
    from forebay.rewriter.checkpoints.resolve import resolve_model

    return resolve_model(adapter)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path], dict[str, Any]]:
    """A base, two adapters by name, and models in memory with each merged; "" is the base."""
    folder = tmp_path_factory.mktemp("several")
    model = saved_model("llama", folder / "base")
    found = {"first": write_lora(folder / "a", model, r".*\.[qv]_proj|lm_head", rank_pattern={"v_proj": 6}),
             "second": write_lora(folder / "b", model, r".*_proj|model\.embed_tokens", r=3, layers_to_transform=[1])}
    return folder / "base", found, {"": model} | {name: merged(model, each) for name, each in found.items()}


@pytest.mark.parametrize("share", [0.3, at_length(1.0)])
def test_each_prompt_has_its_adapter(several: tuple[Path, dict[str, Path], dict[str, Any]], share: float) -> None:
    base, adapters, models = several
    nbytes = sum(p.nbytes for p in models[""].parameters())
    names = ["second", "__base__", "first"]
    expected = torch.cat([answers(models[name.replace("__base__", "")], IDS[i : i + 1])
                          for i, name in enumerate(names)])
    with wrap(base, int(nbytes * share) + (1 << 20), adapter=adapters, batch=3, prompt=PROMPT, new_tokens=NEW) as lm:
        found = lm.generate(IDS, max_new_tokens=NEW, eos_token_id=None, adapter_names=names)
        assert torch.equal(found, expected)
        assert torch.equal(lm.generate(IDS, max_new_tokens=NEW, eos_token_id=None), answers(models[""]))
        with pytest.raises(ValueError, match="adapter_names, one for each prompt"):
            lm.generate(IDS, max_new_tokens=NEW, adapter_names=["first"])
        with pytest.raises(Exception, match="no adapter 'third'; there are first, second"):
            lm.generate(IDS[:1], max_new_tokens=NEW, adapter_names=["third"])


def test_requests_with_adapters_take_slots_as_they_fall_free(
    several: tuple[Path, dict[str, Path], dict[str, Any]],
) -> None:
    base, adapters, models = several
    names = ["", "first", "second", "second", "", "first", "first"]
    prompts = [torch.randint(3, 120, (3 + 2 * i % 7,), generator=torch.Generator().manual_seed(i)) for i in range(7)]
    found: dict[int, list[int]] = {}
    with wrap(base, 8 << 20, adapter=adapters, batch_slots=3, prompt=PROMPT, new_tokens=NEW) as lm:
        lm.answer_all([Request(ids, NEW - i % 3, adapter=name) for i, (ids, name) in enumerate(
            zip(prompts, names, strict=True))], Sampling(), frozenset(), on_end=found.__setitem__,
            on_step=lambda work: None)
    for i, (ids, name) in enumerate(zip(prompts, names, strict=True)):
        assert found[i] == answers(models[name], ids[None])[0, len(ids) : len(ids) + NEW - i % 3].tolist(), (i, name)


def test_prompts_are_known_to_their_own_adapter_alone(
    several: tuple[Path, dict[str, Path], dict[str, Any]], tmp_path: Path
) -> None:
    base, adapters, models = several
    names = ["__base__", "first", "__base__", "first", "second"]

    def answered(adapters: dict[str, Path], names: list[str]) -> list[int]:
        """The tokens of each prompt that were known; its answer is that of the model with its adapter."""
        known = []
        with wrap(base, 8 << 20, adapter=adapters, prompt=PROMPT, new_tokens=NEW, prefill_chunk=2, prefix_cache=0,
                  cache_dir=tmp_path) as lm:
            for name in names:
                found = lm.generate(IDS[:1], max_new_tokens=NEW, eos_token_id=None, adapter_names=[name])
                assert torch.equal(found, answers(models[name.replace("__base__", "")], IDS[:1]))
                known.append(lm.tally.cached)
        return known

    most = (IDS.shape[1] - 1) // 2 * 2
    assert answered(adapters, names) == [0, 0, most, most, 0]
    models = models | {"first": models["second"]}  # of another adapter nothing is known by the name of the first
    assert answered(adapters | {"first": adapters["second"]}, ["first"]) == [0]


def test_adapters_that_do_more_than_add_matrices_serve_alone(tmp_path: Path) -> None:
    model = saved_model("llama", tmp_path / "base")
    adapter = write_lora(tmp_path / "adapter", model, r".*\.q_proj", use_dora=True)
    with pytest.raises(CheckpointError, match=r"adapter 'a' changes .* it serves alone"):
        wrap(tmp_path / "base", 8 << 20, adapter={"a": adapter})


# -- PEFT itself


@pytest.mark.peer
@pytest.mark.parametrize("case", without(CASES, [case for case in CASES if case not in (
    "llama saved", "gpt2 dora")]))
def test_logits_are_those_of_peft(tmp_path: Path, case: str) -> None:
    """Of the folder, and of the model in memory, as PEFT computes and saves it."""
    peft = pytest.importorskip("peft")
    name, modules, settings = CASES[case]
    model = saved_model(name, tmp_path / "base")
    adapter = write_lora(tmp_path / "adapter", model, modules, tmp_path / "base", **settings)
    theirs = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
    with torch.no_grad():
        expected = theirs(IDS).logits[:, -1]
    theirs.save_pretrained(tmp_path / "again")
    for place in (adapter, tmp_path / "again"):
        with wrap(tmp_path / "base", 8 << 20, adapter=place, batch=3, prompt=PROMPT, new_tokens=2) as lm:
            torch.testing.assert_close(lm.next_logits(IDS), expected, rtol=1e-4, atol=1e-5)
    with wrap(theirs, 8 << 20, batch=3, prompt=PROMPT, new_tokens=2) as lm:
        torch.testing.assert_close(lm.next_logits(IDS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.peer
def test_a_merged_adapter_in_memory_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = saved_model("llama", tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(model, str(write_lora(tmp_path / "adapter", model, r".*\.q_proj")))
    theirs.merge_adapter()
    with pytest.raises(CheckpointError, match=r"is merged; give what model\.merge_and_unload"):
        wrap(theirs, 8 << 20)


def test_settings_of_an_adapter_are_known_or_refused_by_name(tmp_path: Path) -> None:
    model = saved_model("llama", tmp_path / "base")
    for i, (changes, message) in enumerate([
        ({"use_qalora": True}, "use_qalora = True"), ({"init_lora_weights": "pissa"}, "changes weights of the base"),
        ({"peft_type": "IA3"}, "peft_type IA3"), ({"r": 0}, "no rank and alpha"), ({"r": 5}, "another rank"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices")]):
        adapter = write_lora(tmp_path / f"adapter{i}", model, r".*\.q_proj")
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        with pytest.raises(CheckpointError, match=message):
            wrap(tmp_path / "base", 8 << 20, adapter=adapter)
    with pytest.raises(CheckpointError, match=r"holds no adapter, which is a folder with adapter_config\.json"):
        wrap(tmp_path / "base", 8 << 20, adapter=tmp_path / "base")


def test_what_an_adapter_names_must_be_in_the_base(tmp_path: Path) -> None:
    base, other = saved_model("llama", tmp_path / "base"), saved_model("gpt2", tmp_path / "other")
    del base
    adapter = write_lora(tmp_path / "adapter", other, r".*\.c_attn")
    with pytest.raises(CheckpointError, match=r"has no transformer\.h\.0\.attn\.c_attn\.weight: the adapter is one of"):
        wrap(tmp_path / "base", 8 << 20, adapter=adapter)
    experts = saved_model("mixtral", tmp_path / "experts")
    adapter = write_lora(tmp_path / "of_experts", experts, r".*\.q_proj")
    from safetensors.torch import load_file, save_file

    file = adapter / "adapter_model.safetensors"
    save_file({name.replace("self_attn.q_proj", "mlp.experts.0.w1"): each for name, each in load_file(file).items()},
              file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="it changes experts"):
        wrap(tmp_path / "experts", 8 << 20, adapter=adapter)
