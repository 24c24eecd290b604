"""`generate` with the arguments of transformers' own, held to what transformers does with the same weights."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from selection import at_length
from transformers import LogitsProcessor, LogitsProcessorList, MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList

from forebay.api import wrap
from forebay.call_turns import ModelCall
from forebay.huggingface import causal_lm
from forebay.language_model import LanguageModel
from forebay.model_planner import ModelPlanner
from forebay.rewriter.capture.cache_name import CACHE_NAME
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.session import Session

NEW = 7


@pytest.fixture(scope="module")
def streamed(llama_checkpoint: Any) -> Iterator[LanguageModel]:
    """Half of the weights stream; a batch for beams."""
    with llama_checkpoint.language_model(0.6, batch=12, prompt=10, new_tokens=NEW) as lm:
        yield lm


class NeverTwice(LogitsProcessor):
    """Every token that a row holds is forbidden, those of the prompt and its padding too."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids, float("-inf"))


class AtLength(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def both(lm: LanguageModel, checkpoint: Any, rows: slice = slice(None), **options: Any) -> tuple[Any, Any]:
    """What we and what transformers give for the same call under the same seed."""
    found = []
    for generate in (lm.generate, checkpoint.model.generate):
        torch.manual_seed(11)
        found.append(generate(checkpoint.ids[rows], attention_mask=checkpoint.mask[rows],
                              **dict(max_new_tokens=NEW, pad_token_id=0, eos_token_id=None) | options))
    return found[0], found[1]


SCENARIOS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": dict(do_sample=True, temperature=0.7, top_k=20, top_p=0.9),
    "sampling with every default": dict(do_sample=True),
    "sampling from all": dict(do_sample=True, top_k=None),
    "repetition penalty": dict(repetition_penalty=1.8),
    "no repeated bigram": dict(no_repeat_ngram_size=2),
    "min_new_tokens": dict(min_new_tokens=5, eos_token_id=list(range(3, 700))),
    "eos and padding": dict(eos_token_id=list(range(3, 500))),
    "max_length": dict(max_length=15, max_new_tokens=None),
    "typical": dict(do_sample=True, typical_p=0.5),
    "min_p": dict(do_sample=True, min_p=0.2),
    "epsilon": dict(do_sample=True, epsilon_cutoff=0.002),
    "bad words": dict(bad_words_ids=[[i] for i in range(3, 500)]),
    "suppressed": dict(suppress_tokens=list(range(400))),
    "sequence bias": dict(sequence_bias=[[[5], 9.0], [[6], 8.0]]),
    "forced eos": dict(forced_eos_token_id=9, eos_token_id=9),
    "beams": dict(num_beams=4),
    "beams, all returned": dict(num_beams=3, num_return_sequences=3, length_penalty=0.3),
    "beams that end early": dict(num_beams=3, eos_token_id=list(range(3, 300)), early_stopping=True),
    "beam sampling": dict(num_beams=3, do_sample=True, temperature=1.3),
    "several samples": dict(do_sample=True, num_return_sequences=4),
    "processors": dict(logits_processor=LogitsProcessorList([NeverTwice()])),
    "stopping criteria": dict(stopping_criteria=StoppingCriteriaList([AtLength(13)])),
    "plenty of time": dict(stopping_criteria=StoppingCriteriaList([MaxTimeCriteria(600)])),
    "allowed tokens": dict(prefix_allowed_tokens_fn=lambda row, ids: [5, 6, 7 + row]),
    "without a cache": dict(use_cache=False, repetition_penalty=1.2),
    "chunked prefill": dict(prefill_chunk_size=3, repetition_penalty=1.2),
    "a static cache": dict(cache_implementation="static", repetition_penalty=1.2),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_tokens_as_transformers(streamed: LanguageModel, llama_checkpoint: Any, name: str) -> None:
    ours, theirs = both(streamed, llama_checkpoint, **SCENARIOS[name])
    assert torch.equal(ours, theirs)
    if name not in ("greedy", "max_length", "plenty of time", "without a cache", "chunked prefill", "a static cache"):
        assert not torch.equal(theirs, both(streamed, llama_checkpoint)[0]), "the scenario asks for nothing"


def test_what_the_runtimes_own_loop_serves_does_not_go_through_transformers(
    streamed: LanguageModel, llama_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    own = causal_lm.generate_as_planned
    monkeypatch.setattr(causal_lm, "generate_as_planned", lambda *a, **k: calls.append(1) or own(*a, **k))
    served = ["greedy", "sampling", "sampling with every default", "sampling from all", "eos and padding", "max_length"]
    for count, name in enumerate(served):
        both(streamed, llama_checkpoint, **SCENARIOS[name])
        assert len(calls) == count + 1, name
    both(streamed, llama_checkpoint, **SCENARIOS["beams"])
    assert len(calls) == len(served)


@pytest.mark.parametrize("options", [dict(num_beams=3), dict(do_sample=True)])
def test_scores_and_logits_are_transformers(streamed: LanguageModel, llama_checkpoint: Any, options: dict) -> None:
    ours, theirs = both(streamed, llama_checkpoint, return_dict_in_generate=True, output_scores=True,
                        output_logits=True, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(ours.scores) == len(theirs.scores) == len(ours.logits) == NEW
    for a, b in zip((*ours.scores, *ours.logits), (*theirs.scores, *theirs.logits), strict=True):
        assert torch.equal(a.isinf(), b.isinf())
        torch.testing.assert_close(a[~a.isinf()], b[~b.isinf()], rtol=1e-4, atol=1e-4)
    if "num_beams" in options:
        torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-4, atol=1e-4)
        assert torch.equal(ours.beam_indices, theirs.beam_indices)


@pytest.mark.parametrize("cache", ["native", "kv8"])
def test_beams_move_every_part_of_a_row(llama_checkpoint: Any, cache: str) -> None:
    """Two prompts whose beams cross: a cache that was not reordered, or only in part, gives other tokens."""
    options = dict(num_beams=6, num_return_sequences=6, repetition_penalty=1.1)
    with llama_checkpoint.language_model(0.6, batch=18, prompt=10, new_tokens=NEW, cache=cache) as lm:
        if cache == "native":
            ours, theirs = both(lm, llama_checkpoint, **options)
            assert torch.equal(ours, theirs)
        else:
            cached, _ = both(lm, llama_checkpoint, **options)
            anew, _ = both(lm, llama_checkpoint, use_cache=False, **options)
            assert (cached == anew).float().mean() > 0.9  # rows of the cache are rounded where the other's are not


def test_a_lent_cache_is_reordered_after_it_has_grown(llama_checkpoint: Any) -> None:
    """A plan whose prefill borrows from the cache: rows move only once the cache has its full length."""
    with llama_checkpoint.language_model(0.9, batch=9, prompt=10, new_tokens=8, prefill_chunk=10) as lm:
        assert lm.plan.prefill_overlays_kv_cache
        ours, theirs = both(lm, llama_checkpoint, num_beams=3)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("options", [dict(prompt_lookup_num_tokens=3), dict(prompt_lookup_num_tokens=8, do_sample=True),
                                     dict(prompt_lookup_num_tokens=3, repetition_penalty=1.3)])
def test_prompt_lookup(streamed: LanguageModel, llama_checkpoint: Any, options: dict) -> None:
    """A prompt that repeats itself, so that candidates are found; some are right and some are cropped."""
    part = llama_checkpoint.expected[2:3, 6:]
    ids = part.repeat(1, 3)
    found = []
    for generate in (streamed.generate, llama_checkpoint.model.generate):
        torch.manual_seed(3)
        found.append(generate(ids, max_new_tokens=14, pad_token_id=0, eos_token_id=None, **options))
    assert torch.equal(*found)


def test_an_assistant_model_saves_steps(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    """The model is its own assistant, so all candidates are right and a few passes give all tokens."""
    steps = []
    lm = streamed.giving("all")
    llama_checkpoint.model.generation_config.num_assistant_tokens = 5
    llama_checkpoint.model.generation_config.assistant_confidence_threshold = 0.0  # by itself it would stop candidates
    passed = type(lm.session).step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(lm.session), "step", lambda self, inputs: steps.append(1) or passed(self, inputs))
        ours = streamed.generate(llama_checkpoint.ids[2:], max_new_tokens=12, pad_token_id=0, eos_token_id=None,
                                 assistant_model=llama_checkpoint.model)
    theirs = llama_checkpoint.model.generate(llama_checkpoint.ids[2:], max_new_tokens=12, pad_token_id=0,
                                             eos_token_id=None)
    assert torch.equal(ours, theirs)
    assert len(steps) < 8


@pytest.mark.parametrize("options", [dict(), dict(do_sample=True, temperature=0.8),
                                     at_length(dict(repetition_penalty=1.3))])
def test_a_wrapped_assistant_drafts(streamed: LanguageModel, llama_checkpoint: Any, options: dict) -> None:
    """With a cache of its own, for a wrapped model and for one of transformers'. Its weights are the model's, so most
    of what it drafts is right; some is not, and is taken back."""
    found = []
    with llama_checkpoint.language_model(0.5, batch=1, prompt=4, new_tokens=2) as draft:
        draft.generation_config.num_assistant_tokens = 4
        llama_checkpoint.model.generation_config.num_assistant_tokens = 4
        for model, helper in ((streamed, draft), (llama_checkpoint.model, draft), (streamed, llama_checkpoint.model),
                              (llama_checkpoint.model, llama_checkpoint.model)):
            helper.generation_config.assistant_confidence_threshold = 0.0  # scikit-learn, where it is, would change it
            torch.manual_seed(6)
            found.append(model.generate(llama_checkpoint.ids[2:], max_new_tokens=20, pad_token_id=0, eos_token_id=None,
                                        assistant_model=helper, **options))
    for other in found[1:]:
        assert torch.equal(found[0], other)


def test_an_assistants_cache_serves_all_its_drafts(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    """Planned once, for all that the model may ask; each draft begins where the last one's cache ends."""
    with llama_checkpoint.language_model(0.5, batch=1, prompt=4, new_tokens=2) as draft:
        draft.generation_config.num_assistant_tokens = 3
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        plans, steps = [], []
        prepared, passed = ModelPlanner.planned, Session.step
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelPlanner, "planned", lambda self, *a: plans.append(self) or prepared(self, *a))
            patch.setattr(Session, "step", lambda self, inputs: steps.append((self, inputs)) or passed(self, inputs))
            streamed.generate(llama_checkpoint.ids[2:], max_new_tokens=12, pad_token_id=0, eos_token_id=None,
                              assistant_model=draft)
        drafted = [inputs.tokens for session, inputs in steps if session is draft.session]
        assert plans.count(draft.planner) == 1
        assert drafted[0] >= 10 and len(drafted) > 4 and max(drafted[1:]) <= 3


def test_who_cannot_assist_is_told_why(
    streamed: LanguageModel, llama_checkpoint: Any, tied_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="cannot assist itself"):
        streamed.generate(llama_checkpoint.ids[2:], max_new_tokens=3, assistant_model=streamed)
    with tied_checkpoint.language_model(2.0) as other:
        monkeypatch.setattr(other.captured, "vocab_size", 700)  # what is captured is shared
        with pytest.raises(ValueError, match="drafts greedily alone"):
            streamed.generate(llama_checkpoint.ids[2:], max_new_tokens=3, assistant_model=other, do_sample=True)


def test_going_on_beyond_the_room_of_a_cache(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    """The prompt and what followed it are given whole, so they can be computed again under a plan with more room."""
    options = dict(pad_token_id=0, eos_token_id=None, return_dict_in_generate=True)
    ids, mask = llama_checkpoint.ids, llama_checkpoint.mask
    with llama_checkpoint.language_model(0.6, batch=3, prompt=10, new_tokens=3) as lm:
        begun = lm.generate(ids, attention_mask=mask, max_new_tokens=3, **options)
        grown = torch.cat((mask, mask.new_ones(3, 3)), 1)
        found = lm.generate(begun.sequences, attention_mask=grown, past_key_values=getattr(begun, CACHE_NAME),
                            max_new_tokens=NEW - 3, **options)
        assert torch.equal(found.sequences, llama_checkpoint.expected[:, : 10 + NEW])
        assert getattr(found, CACHE_NAME) is getattr(begun, CACHE_NAME)
        lm.generate(ids[:1])  # its memory is another's now, so it is begun anew too
        grown = torch.cat((mask, mask.new_ones(3, NEW)), 1)
        again = lm.generate(found.sequences, attention_mask=grown, past_key_values=getattr(found, CACHE_NAME),
                            max_new_tokens=1, **options)
        assert torch.equal(again.sequences, llama_checkpoint.expected)
        with pytest.raises(RuntimeFault, match="room for"):
            lm.generate(again.sequences[:, -1:], attention_mask=torch.cat((grown, mask.new_ones(3, 1)), 1),
                        past_key_values=getattr(found, CACHE_NAME), max_new_tokens=60, **options)


def test_new_tokens_alone_are_not_taken_for_the_whole(llama_checkpoint: Any) -> None:
    """More of them than the cache has seen, and it was given up: they are no prompt to begin anew with."""
    options = dict(pad_token_id=0, eos_token_id=None, return_dict_in_generate=True)
    ids, ones = llama_checkpoint.ids[2:], llama_checkpoint.mask.new_ones
    with llama_checkpoint.language_model(0.6, batch=1, prompt=10, new_tokens=20) as lm:
        held = getattr(lm.generate(ids[:, :4], max_new_tokens=1, **options), CACHE_NAME)
        lm.generate(ids)
        with pytest.raises(RuntimeError, match="given up"):
            lm.generate(ids[:, 4:], attention_mask=ones(1, 10), max_new_tokens=1, past_key_values=held, **options)


def test_the_folders_own_generation_config(llama_checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama_checkpoint.folder, folder)
    config = transformers.GenerationConfig(do_sample=True, temperature=0.6, top_p=0.8, repetition_penalty=1.5,
                                           max_new_tokens=5, eos_token_id=2, pad_token_id=0)
    config.save_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with wrap(folder, llama_checkpoint.share(0.7), batch=3, prompt=10, new_tokens=8) as lm:
        for options in ({}, dict(do_sample=False), dict(repetition_penalty=1.0),
                        dict(generation_config=transformers.GenerationConfig(top_k=5, max_new_tokens=4))):
            found = []
            for generate in (lm.generate, theirs.generate):
                torch.manual_seed(2)
                found.append(generate(llama_checkpoint.ids, attention_mask=llama_checkpoint.mask, **options))
            assert torch.equal(*found)


def test_a_generation_config_that_is_none_is_named(llama_checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama_checkpoint.folder, folder)
    (folder / "generation_config.json").write_text('{"max_new_tokens": -4}')
    with (wrap(folder, 2 * llama_checkpoint.nbytes) as lm,
          pytest.raises(CheckpointError, match=r"generation_config\.json is no generation config")):
        lm.generate(llama_checkpoint.ids)


# -- prompts as they come


@pytest.mark.parametrize("options", [{}, dict(num_beams=2), dict(do_sample=True, num_return_sequences=2, min_p=0.1)])
def test_padding_on_either_side(streamed: LanguageModel, llama_checkpoint: Any, options: dict) -> None:
    """Prompts come back as they were given, and what follows them is the same."""
    ids, mask = llama_checkpoint.ids, llama_checkpoint.mask
    moved = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    right = torch.tensor([row + [0] * (10 - len(row)) for row in moved])
    ones = torch.tensor([[1] * len(row) + [0] * (10 - len(row)) for row in moved])
    middle, inner = right.roll(1, 1), ones.roll(1, 1)
    middle[2], inner[2] = right[2], ones[2]  # this row has no padding
    left = torch.where(mask.bool(), ids, 0)
    found = []
    for given, keep in ((left, mask), (right, ones), (middle, inner)):
        torch.manual_seed(5)
        got = streamed.generate(given, attention_mask=keep, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None,
                                **options)
        assert torch.equal(got[:, :10], given.repeat_interleave(len(got) // 3, 0))
        found.append(got[:, 10:])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert torch.equal(streamed.next_logits(left, mask), streamed.next_logits(right, ones))


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [{}, dict(num_beams=2), dict(repetition_penalty=1.4), dict(eos_token_id=5)])
@pytest.mark.parametrize("told", [False, True])
def test_padding_within_and_padding_that_its_token_tells(
    streamed: LanguageModel, llama_checkpoint: Any, options: dict, told: bool
) -> None:
    """Without a mask what is the pad token does not count, unless it ends sequences too; wherever it stands."""
    ids = torch.where(llama_checkpoint.mask.bool(), llama_checkpoint.ids, 2)
    ids[0, 6], ids[2, 2:4] = 2, 2
    given = dict(max_new_tokens=NEW, eos_token_id=None, pad_token_id=2) | options
    more = dict(attention_mask=(ids != 2).long()) if told else {}
    ours, theirs = (generate(ids, **given, **more) for generate in (streamed.generate, llama_checkpoint.model.generate))
    assert torch.equal(ours, theirs)
    counted = streamed.generate(ids, attention_mask=torch.ones_like(ids), **given)
    assert not torch.equal(counted, ours)
    if not told:
        assert torch.equal(streamed.generate(ids, **given | dict(pad_token_id=2, eos_token_id=2)),
                           llama_checkpoint.model.generate(ids, **given | dict(pad_token_id=2, eos_token_id=2)))
        with pytest.raises(ValueError, match="row 1 has no token that counts"):
            streamed.generate([[5, 6], [2, 2]], **given)


def test_lists_and_a_tokenizers_whole_output(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    plain = dict(max_new_tokens=NEW, pad_token_id=0, eos_token_id=None)
    ids, mask = llama_checkpoint.ids, llama_checkpoint.mask
    expected = streamed.generate(ids, attention_mask=mask, **plain)
    whole = transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids})
    assert torch.equal(streamed.generate(whole, **plain), expected)
    assert torch.equal(streamed.generate(**whole, **plain), expected)
    rows = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    assert torch.equal(streamed.generate(rows, **plain)[:, 10:], expected[:, 10:])
    assert torch.equal(streamed.generate(rows[0], **plain)[:, len(rows[0]) :], expected[:1, 10:])
    with pytest.raises(ValueError, match="attention_mask is given twice"):
        streamed.generate(whole, attention_mask=mask)


def test_token_types_that_mean_something_are_refused(tied_checkpoint: Any) -> None:
    """GPT-2 adds their embeddings, which would be dropped without a word."""
    with (tied_checkpoint.language_model(2.0) as lm, pytest.raises(ValueError, match="token_type_ids")):
        lm.generate(tied_checkpoint.ids, token_type_ids=torch.zeros_like(tied_checkpoint.ids))


# -- streams and refusals


def test_streamers_see_what_transformers_shows_them(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    class Listener(transformers.generation.BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen.append(value.tolist())

        def end(self) -> None:
            self.seen.append("end")

    listeners = Listener(), Listener()
    for listener, generate in zip(listeners, (streamed.generate, llama_checkpoint.model.generate), strict=True):
        generate(llama_checkpoint.ids[2:], max_new_tokens=NEW, pad_token_id=0, eos_token_id=None, streamer=listener)
    assert listeners[0].seen == listeners[1].seen
    columns: list[torch.Tensor] = []
    got = streamed.generate(llama_checkpoint.ids, attention_mask=llama_checkpoint.mask, max_new_tokens=NEW,
                            eos_token_id=None, repetition_penalty=1.3, on_token=columns.append)
    assert torch.equal(torch.stack(columns, 1), got[:, 10:])


def test_a_generator_draws_in_place_of_torchs_own(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    found = []
    for options in (dict(min_p=0.01), dict(min_p=0.01), dict()):
        before = torch.get_rng_state()
        found.append(streamed.generate(llama_checkpoint.ids, attention_mask=llama_checkpoint.mask, do_sample=True,
                                       max_new_tokens=NEW, generator=torch.Generator().manual_seed(4), **options))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[0], found[1])


def test_an_exception_of_the_callers_leaves_a_model_that_works(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == 12:
                raise KeyError("mine")
            return scores

    with pytest.raises(KeyError, match="mine"):
        streamed.generate(llama_checkpoint.ids, logits_processor=LogitsProcessorList([Broken()]))
    ours, theirs = both(streamed, llama_checkpoint)
    assert torch.equal(ours, theirs)


def test_stop_strings_and_healed_prompts() -> None:
    with wrap("demo", "300MB", prompt=16, new_tokens=24) as lm:
        tokenizer = transformers.AutoTokenizer.from_pretrained(lm.checkpoint.folder)
        asked = tokenizer("One, two, three, four,", return_tensors="pt")
        free = tokenizer.decode(lm.generate(**asked, max_new_tokens=24)[0])
        word = free.split()[8]
        stopped = lm.generate(**asked, max_new_tokens=24, stop_strings=[word], tokenizer=tokenizer)[0]
        asked = tokenizer("The link is <a href=\"http:", return_tensors="pt")
        healed = lm.generate(**asked, max_new_tokens=2, token_healing=True, tokenizer=tokenizer)
        healing = causal_lm.StreamedCausalLM(lm, ModelCall("heal_tokens"))
        wanted = healing.heal_tokens(asked.input_ids.clone(), tokenizer)
    assert tokenizer.decode(stopped) == free[: free.index(word) + len(word)] != free
    assert torch.equal(healed[:, : wanted.shape[1]], wanted) and not torch.equal(wanted, asked.input_ids)


@pytest.mark.parametrize(("options", "message"), [
    (dict(output_attentions=True, return_dict_in_generate=True), "output_attentions cannot be had"),
    (dict(guidance_scale=1.5), "guidance_scale needs a second cache"),
    (dict(past_key_values=transformers.DynamicCache()), "past_key_values must be what this model returned, not a Dyn"),
    (dict(cache=transformers.DynamicCache()), "cache must be what this model returned, not a DynamicCache"),
    (dict(past_key_values=((),)), "past_key_values must be what this model returned, not a tuple"),
    (dict(streamer=transformers.TextStreamer(None), on_token=print), "not both"),  # type: ignore[arg-type]
    (dict(num_beams=2, streamer=transformers.TextStreamer(None)), "beam search"),  # type: ignore[arg-type]
    (dict(custom_generate="some/repository"), "never run"), (dict(trust_remote_code=True), "never run"),
    (dict(penalty_alpha=0.6, top_k=4), "contrastive search .* is never run"),
    (dict(dola_layers="low"), "DoLa .* is never run"),
    (dict(num_beams=4, num_beam_groups=2, diversity_penalty=0.5), "group beam search .* is never run"),
    (dict(num_beams=2, force_words_ids=[[7]]), "constrained beam search .* is never run"),
    (dict(assistant_early_exit=1), "assistant_early_exit drafts with parts"),
    (dict(use_mtp=True), "use_mtp drafts with parts"), (dict(speculation_type="dflash"), "speculation_type drafts"),
])
def test_what_cannot_be_is_refused(streamed: LanguageModel, llama_checkpoint: Any, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        streamed.generate(llama_checkpoint.ids, max_new_tokens=3, **options)


def test_a_generator_for_each_prompt_draws_for_it_alone(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    """Through transformers' loop as through ours: another batch, the same answer; and greedy needs no draws."""
    ids, mask = llama_checkpoint.ids, llama_checkpoint.mask
    for more in (dict(), dict(repetition_penalty=1.2)):
        options = dict(max_new_tokens=NEW, do_sample=True, temperature=2.0, eos_token_id=None, pad_token_id=0) | more
        draws = [torch.Generator().manual_seed(7 + i) for i in range(3)]
        whole = streamed.generate(ids, attention_mask=mask, generator=draws, **options)
        alone = streamed.generate(ids[1:2], attention_mask=mask[1:2], generator=[torch.Generator().manual_seed(8)],
                                  **options)
        assert torch.equal(alone[0], whole[1])
    plain, _ = both(streamed, llama_checkpoint, repetition_penalty=1.2)
    assert torch.equal(both(streamed, llama_checkpoint)[0], llama_checkpoint.expected[:, : 10 + NEW])
    got = streamed.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None,
                            repetition_penalty=1.2, generator=draws)
    assert torch.equal(got, plain)


def test_without_a_prompt_the_first_token_begins(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    """That of the call, else of its config, else of the model; an empty prompt is still refused."""
    named = transformers.GenerationConfig(bos_token_id=7, eos_token_id=None)
    for options, first in ((dict(), 1), (dict(bos_token_id=5), 5), (dict(generation_config=named), 7),
                           (dict(generation_config=named, bos_token_id=5, repetition_penalty=1.2), 5),
                           (dict(num_beams=2, eos_token_id=None), 1)):
        ours, theirs = (generate(max_new_tokens=4, pad_token_id=0, **options)
                        for generate in (streamed.generate, llama_checkpoint.model.generate))
        assert torch.equal(ours, theirs) and ours[0, 0] == first
    with pytest.raises(ValueError, match="at least one token"):
        streamed.generate([])


@pytest.mark.parametrize("rows", [slice(2, 3), slice(None)])
def test_going_on_from_a_cache_with_new_tokens_alone(
    streamed: LanguageModel, llama_checkpoint: Any, rows: slice
) -> None:
    """The mask covers what the cache has seen too; the whole sequence may be given instead."""
    options = dict(pad_token_id=0, eos_token_id=None, return_dict_in_generate=True)
    ids, mask = llama_checkpoint.ids[rows], llama_checkpoint.mask[rows]
    wanted = llama_checkpoint.expected[rows, : 10 + NEW]
    grown = torch.cat((mask, mask.new_ones(len(ids), 3)), 1)
    for whole in (False, True):
        begun = streamed.generate(ids, attention_mask=mask, max_new_tokens=3, **options)
        given = begun.sequences if whole else begun.sequences[:, -1:]
        found = streamed.generate(given, attention_mask=grown, past_key_values=getattr(begun, CACHE_NAME),
                                  max_new_tokens=NEW - 3, **options)
        assert torch.equal(found.sequences[:, 10 if whole else 0 :], wanted[:, 10 if whole else 12 :])
    with pytest.raises(ValueError, match="cannot be copied"):
        copy.deepcopy(getattr(found, CACHE_NAME))
    with pytest.raises(ValueError, match="attention_mask has shape"):
        streamed.generate(given[:, -1:], attention_mask=grown, max_new_tokens=1)


def test_a_loop_of_the_callers_returns_what_it_will(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    def loop(model: Any, input_ids: torch.Tensor, stopping_criteria: Any, **rest: Any) -> str:
        return f"{input_ids.shape[1]} to {stopping_criteria[0].max_length}"

    assert streamed.generate(llama_checkpoint.ids, max_new_tokens=3, custom_generate=loop) == "10 to 13"


@pytest.mark.parametrize("options", [dict(), dict(num_beams=3, num_return_sequences=2)])
def test_scores_of_the_chosen_tokens(streamed: LanguageModel, llama_checkpoint: Any, options: dict) -> None:
    ours, theirs = both(streamed, llama_checkpoint, return_dict_in_generate=True, output_scores=True, **options)
    found = [model.compute_transition_scores(one.sequences, one.scores, getattr(one, "beam_indices", None), True)
             for model, one in ((streamed, ours), (llama_checkpoint.model, theirs))]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
