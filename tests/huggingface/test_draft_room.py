"""Drafts of transformers' loop where the cache, or the model's positions, have no room for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import forebay
from forebay.language_model import LanguageModel
from forebay.rewriter.capture.cache_name import CACHE_NAME
from forebay.runtime.run.session import Session

POSITIONS, PROMPT, VOCAB = 24, 7, 199


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    found = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        intermediate_size=96, max_position_embeddings=POSITIONS, bos_token_id=1, eos_token_id=2,
        pad_token_id=0)).eval()
    for parameter in found.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.2)
    found.lm_head.weight.data[0] = 0  # padding is never the likeliest
    return found


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("positions")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def streamed(folder: Path) -> Iterator[LanguageModel]:
    """Planned for no more than the prompts and answers below."""
    with forebay.wrap(folder, "8MiB", prompt=PROMPT, new_tokens=POSITIONS - PROMPT) as lm:
        yield lm


def prompts() -> list[torch.Tensor]:
    """Two that repeat themselves, so that drafts are found at once and to the end, and one that does not."""
    draws = torch.Generator().manual_seed(5)
    return [torch.randint(3, most, (1, PROMPT), generator=draws) for most in (5, 7, VOCAB)]


GREEDY: dict[str, Any] = dict(eos_token_id=None, pad_token_id=0)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {}, "drawn": dict(do_sample=True), "drawn from all": dict(do_sample=True, top_k=0, temperature=1.5),
    "penalty": dict(repetition_penalty=0.4), "few choices": dict(bad_words_ids=[[i] for i in range(6, VOCAB)]),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [1, 3, 30])
def test_drafts_end_where_the_answer_does(streamed: LanguageModel, model: Any, way: str, tokens: int) -> None:
    """Answers up to the model's last position: the same tokens, draws and scores as without a limit."""
    for ids in prompts():
        for new_tokens in (1, 2, 5, POSITIONS - PROMPT):
            given = dict(max_new_tokens=new_tokens, prompt_lookup_num_tokens=tokens, return_dict_in_generate=True,
                         output_logits=True, output_scores=True, **GREEDY, **WAYS[way])
            found = []
            for generate in (streamed.generate, model.generate):
                torch.manual_seed(3)
                found.append(generate(ids, **given))
            assert torch.equal(found[0].sequences, found[1].sequences), (ids, new_tokens)
            for ours, theirs in zip((*found[0].logits, *found[0].scores), (*found[1].logits, *found[1].scores),
                                    strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
            assert getattr(found[0], CACHE_NAME).get_seq_length() == PROMPT + new_tokens - 1


def test_drafts_do_not_make_a_plan_for_each_call(folder: Path) -> None:
    """Of the plan that has room for the first drafts as part of the prompt, at most one is made."""
    with forebay.wrap(folder, "8MiB", prompt=PROMPT, new_tokens=9) as lm:
        kept = []
        for ids in prompts():
            lm.generate(ids, max_new_tokens=9, prompt_lookup_num_tokens=3, **GREEDY)
            kept.append(lm.giving("all").plan)
        assert all(plan is kept[0] for plan in kept)
        assert lm.plan.workload.context == kept[0].workload.context


def test_the_cache_of_a_drafted_answer_goes_on(streamed: LanguageModel, model: Any) -> None:
    """It holds the answer and nothing of the drafts, and has the room that the plan has."""
    for ids in prompts():
        begun = streamed.generate(ids, max_new_tokens=4, prompt_lookup_num_tokens=5, return_dict_in_generate=True,
                                  **GREEDY)
        wanted = model.generate(ids, max_new_tokens=9, **GREEDY)
        found = streamed.generate(begun.sequences, attention_mask=torch.ones_like(begun.sequences), max_new_tokens=5,
                                  return_dict_in_generate=True, cache=getattr(begun, CACHE_NAME), **GREEDY)
        assert torch.equal(found.sequences, wanted) and getattr(found, CACHE_NAME) is getattr(begun, CACHE_NAME)
        after = streamed(wanted[:, -1:], cache=getattr(found, CACHE_NAME)).logits
        torch.testing.assert_close(after[:, -1], model(wanted).logits[:, -1], rtol=1e-3, atol=1e-3)


def test_an_answer_without_a_cache_reaches_the_last_position(streamed: LanguageModel, model: Any) -> None:
    """The whole sequence is a prompt each time, and its last token is in none."""
    ids, given = prompts()[2], dict(max_new_tokens=POSITIONS - PROMPT, use_cache=False, **GREEDY)
    assert torch.equal(streamed.generate(ids, **given), model.generate(ids, **given))


def test_padding_does_not_count_as_room(streamed: LanguageModel, model: Any) -> None:
    for ids in prompts():
        given = dict(attention_mask=torch.tensor([[0] * 5 + [1] * PROMPT]), max_new_tokens=POSITIONS - PROMPT,
                     **GREEDY)
        padded = torch.nn.functional.pad(ids, (5, 0))
        assert torch.equal(streamed.generate(padded, prompt_lookup_num_tokens=6, **given),
                           model.generate(padded, **given))


def test_an_assistant_with_fewer_positions_stops_drafting(
    streamed: LanguageModel, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same weights, so that what it drafts is right."""
    config = transformers.LlamaConfig(**{**model.config.to_dict(), "max_position_embeddings": 12})
    small = transformers.LlamaForCausalLM(config).eval()
    small.load_state_dict(model.state_dict())
    small.save_pretrained(tmp_path)
    steps: list[Session] = []
    passed = Session.step
    monkeypatch.setattr(Session, "step", lambda self, inputs: steps.append(self) or passed(self, inputs))
    with forebay.wrap(tmp_path, "8MiB", prompt=PROMPT, new_tokens=5) as helper:
        helper.generation_config.assistant_confidence_threshold = 0.0  # by itself it would stop drafts
        for ids in prompts():
            given = dict(max_new_tokens=POSITIONS - PROMPT, **GREEDY)
            wanted = model.generate(ids, **given)
            steps.clear()
            assert torch.equal(streamed.generate(ids, assistant_model=helper, **given), wanted)
            assert sum(session is not helper._session for session in steps) < POSITIONS - PROMPT - 2


def test_beams_over_a_staged_cache_are_refused_before_a_step(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, steps = prompts()[2], []
    passed = Session.step
    monkeypatch.setattr(Session, "step", lambda self, inputs: steps.append(1) or passed(self, inputs))
    budget: dict[str, Any] = {"device": "8MiB", "host": "8MiB"}
    with forebay.wrap(folder, budget, batch=3, prompt=PROMPT, new_tokens=6, cache_tier="host") as lm:
        given = dict(max_new_tokens=6, num_beams=3, **GREEDY)
        for more in ({}, dict(do_sample=True), dict(num_return_sequences=3)):
            with pytest.raises(RuntimeError, match=r"a cache that is staged .*\(wrap\(cache_tier=\"device\"\)"):
                lm.generate(ids, **given, **more)
        assert not steps and lm.plan.schedule.batching.cache.staged
        wanted = model.generate(ids, **given)
        assert torch.equal(lm.generate(ids, use_cache=False, **given), wanted)  # nothing changes slots
        alone = dict(max_new_tokens=6, **GREEDY)
        assert torch.equal(lm.generate(ids, **alone), model.generate(ids, **alone))
