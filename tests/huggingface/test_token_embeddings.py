"""Embeddings in place of token ids: what gives them, and what `generate` and forward make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import gpt2, llama
from selection import at_length

from forebay.api import wrap
from forebay.exported.export import export
from forebay.language_model import LanguageModel
from forebay.rewriter.capture.cache_name import CACHE_NAME
from forebay.rewriter.capture.language_model import CaptureError, capture_model
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model

NEW = 7
TOLERANCE: dict[str, Any] = dict(rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def streamed(llama_checkpoint: Any) -> Iterator[LanguageModel]:
    """Half of the weights stream, in chunks of a prompt, and the embedding is read by row."""
    with llama_checkpoint.language_model(0.6, batch=6, prompt=10, new_tokens=NEW, prefill_chunk=4) as lm:
        yield lm


def near(checkpoint: Any) -> torch.Tensor:
    """Embeddings that no token has."""
    looked_up = checkpoint.model.get_input_embeddings()(checkpoint.ids).detach()
    return looked_up + 0.3 * looked_up.std() * torch.randn(looked_up.shape, generator=torch.Generator().manual_seed(2))


def both(lm: LanguageModel, checkpoint: Any, embeds: torch.Tensor, **options: Any) -> tuple[Any, Any]:
    found = []
    for generate in (lm.generate, checkpoint.model.generate):
        torch.manual_seed(11)
        found.append(generate(inputs_embeds=embeds, attention_mask=checkpoint.mask,
                              **dict(max_new_tokens=NEW, pad_token_id=0, eos_token_id=None) | options))
    return found[0], found[1]


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [dict(), dict(num_beams=2), dict(do_sample=True, num_return_sequences=2),
                                     dict(repetition_penalty=1.5), dict(use_cache=False),
                                     dict(max_length=14, max_new_tokens=None)])
@pytest.mark.parametrize("named", [False, True])
def test_same_tokens_as_transformers(
    streamed: LanguageModel, llama_checkpoint: Any, options: dict, named: bool
) -> None:
    """With ids beside them these are what is returned and penalised; without, new tokens alone."""
    more = dict(input_ids=llama_checkpoint.ids) if named else {}
    ours, theirs = both(streamed, llama_checkpoint, near(llama_checkpoint), **options, **more)
    assert torch.equal(ours, theirs) and ours.shape[1] == theirs.shape[1]
    plan = streamed.giving("last", embeds=True).plan
    assert next(w.tier for w in plan.weights if "embed" in w.name) == "disk"
    if not options:
        typical = streamed.generate(llama_checkpoint.ids, attention_mask=llama_checkpoint.mask, max_new_tokens=NEW,
                                  pad_token_id=0, eos_token_id=None)
        assert not torch.equal(ours[:, -NEW:], typical[:, -NEW:]), "ids were computed, not embeddings"


def test_forward_its_cache_and_right_padding(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    embeds, mask = near(llama_checkpoint), llama_checkpoint.mask
    found = streamed(inputs_embeds=embeds, attention_mask=mask, use_cache=True)
    token = torch.tensor([[5], [6], [7]])
    grown = torch.cat((mask, mask.new_ones(3, 1)), 1)
    after = streamed(token, attention_mask=grown, past_key_values=getattr(found, CACHE_NAME)).logits
    with torch.no_grad():
        theirs = llama_checkpoint.model(inputs_embeds=embeds, attention_mask=mask, use_cache=True)
        wanted = llama_checkpoint.model(token, attention_mask=grown, **{CACHE_NAME: getattr(theirs, CACHE_NAME)}).logits
    torch.testing.assert_close(found.logits[mask.bool()], theirs.logits[mask.bool()], **TOLERANCE)
    torch.testing.assert_close(after, wanted, **TOLERANCE)
    right = torch.stack([row.roll(int(n), 0) for row, n in zip(embeds, mask.sum(1), strict=True)])
    options = dict(max_new_tokens=NEW, pad_token_id=0, eos_token_id=None)
    turned = streamed.generate(inputs_embeds=right, attention_mask=mask.flip(1), **options)
    assert torch.equal(turned, streamed.generate(inputs_embeds=embeds, attention_mask=mask, **options))


@pytest.mark.parametrize("family", [at_length("llama"), at_length("dynamic rope"), "gpt2", "gemma3", at_length("opt")])
def test_rows_are_the_modules_own(family: str, tmp_path: Path) -> None:
    """Whatever the module computes of a row (Gemma3 scales it, OPT's is narrower than the hidden state), from a folder
    or, for some, from memory; a tied table too."""
    make: dict[str, Callable[[], Any]] = {
        "llama": lambda: llama(2, vocab_size=250),
        "dynamic rope": lambda: llama(2, vocab_size=250, max_position_embeddings=16, rope_parameters=dict(
            rope_theta=10000.0, rope_type="dynamic", factor=2.0)),
        "gpt2": lambda: gpt2(2, vocab_size=250),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, intermediate_size=96, max_position_embeddings=64),
        "opt": lambda: transformers.OPTConfig(
            vocab_size=300, hidden_size=64, word_embed_proj_dim=32, num_hidden_layers=2, num_attention_heads=4,
            ffn_dim=96, max_position_embeddings=64)}
    model = transformers.AutoModelForCausalLM.from_config(make[family]()).eval()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 3, 5, 249], [1, 249, 7, 8]])
    wanted = model.get_input_embeddings()(ids).detach()
    options = dict(max_new_tokens=4, pad_token_id=0, eos_token_id=None)
    tokens = model.generate(ids, **options)
    for given in (tmp_path, model) if family in ("llama", "gpt2") else (tmp_path,):
        with wrap(given, "8MB", batch=2, prompt=4, new_tokens=4) as lm:
            table = lm.get_input_embeddings()
            assert torch.equal(table(ids), wanted) and torch.equal(table(ids[0, 1]), wanted[0, 1])
            assert (table.num_embeddings, table.embedding_dim) == (model.config.vocab_size, wanted.shape[2])
            assert torch.equal(lm.generate(ids, inputs_embeds=wanted, **options), tokens)
            for odd in (torch.tensor([model.config.vocab_size]), torch.tensor([-1]), torch.ones(2)):
                with pytest.raises(ValueError, match="token ids must be whole numbers"):
                    table(odd)


def test_packed_rows(llama_checkpoint: Any, tmp_path: Path) -> None:
    """Dequantized by the row, to what the whole table means; a step looks up the same."""
    quantize_model(llama_checkpoint.folder, tmp_path / "packed", Wish("w8g32", embeddings=True))
    with wrap(tmp_path / "packed", "4MB", batch=3, prompt=10, new_tokens=NEW) as lm:
        found = lm.get_input_embeddings()(llama_checkpoint.ids)
        exact = llama_checkpoint.model.get_input_embeddings()(llama_checkpoint.ids)
        assert lm.captured.weights["model.embed_tokens.weight"].stored is not None
        assert 0 < (found - exact).abs().max() < 0.02 * exact.abs().max()
        options = dict(attention_mask=llama_checkpoint.mask, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None)
        assert torch.equal(lm.generate(llama_checkpoint.ids, **options),
                           lm.generate(llama_checkpoint.ids, inputs_embeds=found, **options))


def test_what_cannot_be_is_refused(streamed: LanguageModel, llama_checkpoint: Any, tmp_path: Path) -> None:
    ids, embeds = llama_checkpoint.ids, near(llama_checkpoint)
    for options, message in ((dict(inputs_embeds=embeds[0]), "must be floats"),
                             (dict(inputs_embeds=ids), "must be floats"),
                             (dict(inputs_embeds=embeds[:, :0]), "must be floats"),
                             (dict(inputs_embeds=embeds, input_ids=ids[:, 1:]), r"input_ids \[3, 9\]"),
                             (dict(inputs_embeds=embeds[..., 1:]), "has width 95, the model's embeddings 96")):
        with pytest.raises(ValueError, match=message):
            streamed.generate(max_new_tokens=3, **options)
    with pytest.raises(ValueError, match="not both"):
        streamed(ids, inputs_embeds=embeds)
    held = getattr(streamed(ids, use_cache=True), CACHE_NAME)
    with pytest.raises(ValueError, match="this cache was begun with ids"):
        streamed(inputs_embeds=embeds[:, :1], past_key_values=held)
    export(llama_checkpoint.folder, tmp_path / "bundle")
    with (wrap(tmp_path / "bundle", "4MB") as bundle, pytest.raises(ValueError, match="is a bundle")):
        bundle.generate(inputs_embeds=embeds, max_new_tokens=2)


@pytest.mark.parametrize("start", ["embeds", "ids", "given up"])
def test_embeddings_behind_a_cache(llama_checkpoint: Any, start: str) -> None:
    """Given whole, of which those that follow are computed; all, where the cache was made by steps that take none."""
    embeds, mask, table = near(llama_checkpoint), llama_checkpoint.mask, llama_checkpoint.model.get_input_embeddings()
    if start == "ids":
        embeds = table(llama_checkpoint.ids).detach()
    options = dict(pad_token_id=0, eos_token_id=None)
    with llama_checkpoint.language_model(0.6, batch=3, prompt=10, new_tokens=NEW) as lm:
        first = dict(input_ids=llama_checkpoint.ids) if start == "ids" else dict(inputs_embeds=embeds)
        begun = lm.generate(**first, attention_mask=mask, max_new_tokens=3, return_dict_in_generate=True, **options)
        if start == "given up":
            lm.generate(llama_checkpoint.ids, max_new_tokens=1)
        new = begun.sequences[:, -3:]
        rest = lm.generate(inputs_embeds=torch.cat((embeds, table(new).detach()), 1), max_new_tokens=NEW - 3,
                           attention_mask=torch.cat((mask, mask.new_ones(3, 3)), 1),
                           past_key_values=getattr(begun, CACHE_NAME), **options)
        wanted = llama_checkpoint.model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=NEW,
                                                 **options)
        assert torch.equal(torch.cat((new, rest), 1), wanted)
        if start == "embeds":
            held = getattr(lm(inputs_embeds=embeds[:, :6], attention_mask=mask[:, :6].clamp(min=1)), CACHE_NAME)
            after = lm(inputs_embeds=embeds[:, 6:9], past_key_values=held).logits
            with torch.no_grad():
                whole = llama_checkpoint.model(inputs_embeds=embeds[:, :9]).logits
            torch.testing.assert_close(after, whole[:, 6:], **TOLERANCE)


def test_a_cache_begun_with_embeddings_is_not_begun_anew_from_ids(llama_checkpoint: Any) -> None:
    """Where it has no more room the ids beside them are not what it was made of."""
    options = dict(attention_mask=llama_checkpoint.mask, pad_token_id=0, eos_token_id=None)
    with llama_checkpoint.language_model(0.6, batch=3, prompt=10, new_tokens=3) as lm:
        begun = lm.generate(llama_checkpoint.ids, inputs_embeds=near(llama_checkpoint), max_new_tokens=3,
                            return_dict_in_generate=True, **options)
        options["attention_mask"] = torch.cat((llama_checkpoint.mask, llama_checkpoint.mask.new_ones(3, 3)), 1)
        with pytest.raises(RuntimeError, match="room for"):
            lm.generate(begun.sequences, past_key_values=getattr(begun, CACHE_NAME), max_new_tokens=20, **options)


def test_a_model_that_computes_a_cache_anew_takes_ids_alone() -> None:
    short, long = [1.0] * 8, [2.0] * 8
    config = transformers.Phi3Config(
        vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=64, original_max_position_embeddings=16, pad_token_id=0,
        rope_scaling={"rope_type": "longrope", "short_factor": short, "long_factor": long})
    assert capture_model(config).rope_switch_length == 16
    with pytest.raises(CaptureError, match="ids are needed, not embeddings"):
        capture_model(config, embeds=True)
