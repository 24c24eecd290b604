"""The wrapped model where transformers expects one of its own: forward, loss, pipelines, attributes, likelihoods."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from forebay import open_model as opening
from forebay.api import wrap
from forebay.language_model import LanguageModel
from forebay.rewriter.capture.cache_name import CACHE_NAME, CACHE_NAMES
from forebay.rewriter.ir.plan import PlanError
from forebay.runtime.run.session import Session

TOLERANCE: dict[str, Any] = dict(rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def streamed(llama_checkpoint: Any) -> Iterator[LanguageModel]:
    with llama_checkpoint.language_model(0.6, batch=3, prompt=16, new_tokens=8) as lm:
        yield lm


def test_logits_at_every_position_and_the_loss(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    ids, mask = llama_checkpoint.ids, llama_checkpoint.mask
    labels = torch.where(mask.bool(), ids, -100)
    labels[2, 7] = -100
    ours = streamed(ids, attention_mask=mask, labels=labels)
    with torch.no_grad():
        theirs = llama_checkpoint.model(ids, attention_mask=mask, labels=labels)
    assert ours.logits.shape == theirs.logits.shape
    assert getattr(streamed(ids, use_cache=False), CACHE_NAME) is None
    torch.testing.assert_close(ours.logits[mask.bool()], theirs.logits[mask.bool()], **TOLERANCE)
    assert not ours.logits[~mask.bool()].any()
    whole = streamed(ids, labels=ids)
    torch.testing.assert_close(whole.loss, llama_checkpoint.model(ids, labels=ids).loss.detach(), **TOLERANCE)
    assert not whole.loss.requires_grad
    loss, logits = streamed(input_ids=ids, labels=ids, return_dict=False)[:2]
    assert torch.equal(loss, whole.loss) and torch.equal(logits, whole.logits)


def test_few_logits_and_right_padding(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    ids = llama_checkpoint.ids
    whole = streamed(ids).logits
    for keep in (1, 3):
        torch.testing.assert_close(streamed(ids, logits_to_keep=keep).logits, whole[:, -keep:], **TOLERANCE)
    torch.testing.assert_close(streamed(ids, logits_to_keep=torch.tensor([7, 2])).logits, whole[:, [7, 2]], **TOLERANCE)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    padded = streamed(ids, attention_mask=mask).logits
    torch.testing.assert_close(padded[0, :6], whole[0, :6], **TOLERANCE)
    torch.testing.assert_close(padded[1:], whole[1:], **TOLERANCE)
    torch.testing.assert_close(streamed(ids, attention_mask=mask, logits_to_keep=1).logits, padded[:, -1:], **TOLERANCE)


def test_a_loop_of_ones_own_over_the_cache(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    """Greedy by hand, as with any transformers model; and several tokens at once behind the cache."""
    ids, mask = llama_checkpoint.ids, llama_checkpoint.mask
    found = streamed(ids, attention_mask=mask, use_cache=True)
    tokens = ids
    for _ in range(4):
        tokens = torch.cat((tokens, found.logits[:, -1:].argmax(-1)), 1)
        mask = torch.cat((mask, torch.ones(3, 1, dtype=mask.dtype)), 1)
        found = streamed(tokens[:, -1:], attention_mask=mask, cache=getattr(found, CACHE_NAME), use_cache=True)
        assert getattr(found, CACHE_NAME).get_seq_length() == tokens.shape[1]
    assert torch.equal(tokens, llama_checkpoint.expected[:, :14])
    more = streamed(llama_checkpoint.expected[:, 14:16], past_key_values=getattr(found, CACHE_NAME))
    assert more.logits.shape[:2] == (3, 2)
    with torch.no_grad():
        whole = llama_checkpoint.model(llama_checkpoint.expected[2:, :16]).logits
    torch.testing.assert_close(more.logits[2:], whole[:, -2:], **TOLERANCE)
    with pytest.raises(ValueError, match="attention_mask must keep every token"):
        streamed(tokens[:, -1:], attention_mask=torch.ones(3, 17), past_key_values=getattr(found, CACHE_NAME))
    with pytest.raises(ValueError, match="holds 3 sequences, input_ids 1"):
        streamed(tokens[:1, -1:], past_key_values=getattr(found, CACHE_NAME))
    streamed.next_logits(ids)
    with pytest.raises(RuntimeError, match="cache was given up"):
        streamed(tokens[:, -1:], past_key_values=getattr(found, CACHE_NAME))


def test_a_cache_comes_back_unasked_with_the_room_there_is(llama_checkpoint: Any) -> None:
    """As transformers' own: a loop that asks for none but passes it on would otherwise forget the prompt."""
    ids = llama_checkpoint.ids[2:]
    with llama_checkpoint.language_model(0.6, batch=1, prompt=10, new_tokens=3) as lm:
        found = lm(ids)
        plan = lm.giving("all").plan
        for at in range(10, 12):
            token = found.logits[:, -1:].argmax(-1)
            assert torch.equal(token, llama_checkpoint.expected[2:, at : at + 1])
            found = lm(token, cache=getattr(found, CACHE_NAME))
        assert lm.giving("all").plan is plan
        room = plan.workload.context - 12
        with pytest.raises(RuntimeError, match=f"room for {room} more tokens"):
            lm(ids[:, :1].expand(1, room + 1), past_key_values=getattr(found, CACHE_NAME))


def test_the_cache_that_generate_returns_goes_on(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    ids = llama_checkpoint.ids[2:]
    options = dict(pad_token_id=0, eos_token_id=None, return_dict_in_generate=True)
    with llama_checkpoint.language_model(0.6, batch=1, prompt=10, new_tokens=12) as lm:
        first = lm.generate(ids, max_new_tokens=12, stopping_criteria=[lambda ids, scores: ids.shape[1] >= 14],
                            **options)
        second = lm.generate(first.sequences, cache=getattr(first, CACHE_NAME), max_new_tokens=4, **options)
    assert torch.equal(second.sequences, llama_checkpoint.expected[2:])


def test_a_cache_goes_by_its_former_name_too(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    """Whichever release of transformers is installed, and by any other that a release may yet give it; what is handed
    on to transformers has the name of today, so that nothing warns of the former."""
    ids, token = llama_checkpoint.ids[2:], llama_checkpoint.expected[2:, 10:11]
    options = dict(pad_token_id=0, eos_token_id=None, max_new_tokens=3, repetition_penalty=1.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        whole = streamed.generate(ids, **options)
        wanted = streamed(torch.cat((ids, token), 1)).logits[:, -1]
        for name in (*CACHE_NAMES, "another"):
            held = getattr(streamed(ids, use_cache=True), CACHE_NAME)
            torch.testing.assert_close(streamed(token, **{name: held}).logits[:, -1], wanted, rtol=1e-4, atol=1e-4)
            begun = streamed.generate(ids, **options | dict(max_new_tokens=1), return_dict_in_generate=True)
            more = {name: getattr(begun, CACHE_NAME)}
            assert torch.equal(streamed.generate(begun.sequences, **options | dict(max_new_tokens=2), **more), whole)
    given = dict.fromkeys(CACHE_NAMES, held)
    for call in (lambda: streamed(token, **given), lambda: streamed.generate(ids, **options, **given)):
        with pytest.raises(ValueError, match="cache and past_key_values: the cache is given twice"):
            call()


def test_position_ids_that_say_what_the_mask_says(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    """As transformers' own loops and scripts give them; whatever stands at padding."""
    ids, mask = llama_checkpoint.ids, llama_checkpoint.mask
    counted = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    found = streamed(ids, attention_mask=mask, position_ids=counted, use_cache=True)
    assert torch.equal(found.logits, streamed(ids, attention_mask=mask).logits)
    assert torch.equal(streamed(ids, position_ids=torch.arange(10)[None]).logits, streamed(ids).logits)
    with pytest.raises(ValueError, match="position_ids"):
        streamed(ids, attention_mask=mask, position_ids=torch.arange(10)[None])
    grown, token = torch.cat((mask, mask.new_ones(3, 1)), 1), llama_checkpoint.expected[:, 10:11]
    for given in (None, grown):
        held = getattr(streamed(ids, attention_mask=mask, use_cache=True), CACHE_NAME)
        with pytest.raises(ValueError, match="position_ids"):
            streamed(token, attention_mask=given, past_key_values=held, position_ids=counted[:, -1:] + 2)
        after = streamed(token, attention_mask=given, past_key_values=held, position_ids=counted[:, -1:] + 1)
        assert torch.equal(after.logits[:, -1].argmax(-1), llama_checkpoint.expected[:, 11])


def test_labels_and_inputs_that_cannot_be(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    ids = llama_checkpoint.ids
    with pytest.raises(ValueError, match="labels has 3 columns, the logits 10"):
        streamed(ids, labels=ids[:, :3])
    for odd in (ids, torch.arange(9)[None], torch.arange(10), torch.arange(10).expand(2, -1)):
        with pytest.raises(ValueError, match="position_ids: a step counts"):
            streamed(ids, position_ids=odd)
    with pytest.raises(ValueError, match="output_attentions: a captured step"):
        streamed(ids, output_attentions=True)
    with pytest.raises(ValueError, match="at least one token"):
        streamed()
    with pytest.raises(ValueError, match="what this model returned, not a DynamicCache"):
        streamed(ids, past_key_values=transformers.DynamicCache(), use_cache=True)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="wrap the model's folder again"):
            copied(streamed)


def test_only_one_kind_of_steps_has_memory(streamed: LanguageModel, llama_checkpoint: Any,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Generating, scoring and forward take turns within the one budget, whatever the order."""
    streamed.close()
    alive: list[Session] = []
    made, ended = Session.__init__, Session.close
    monkeypatch.setattr(Session, "__init__", lambda self, *a, **k: (made(self, *a, **k), alive.append(self))[0])
    monkeypatch.setattr(Session, "close", lambda self: (ended(self), alive.remove(self))[0])
    ids = llama_checkpoint.ids
    for use in (streamed.generate, streamed, streamed.next_logits, lambda x: streamed.token_scores(list(x)), streamed,
                streamed.generate):
        use(ids)
        assert len(alive) == 1
    streamed(ids)
    streamed.close()
    assert not alive


def test_attributes(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    assert streamed.config.model_type == "llama" and streamed.config.hidden_size == 96
    assert streamed.dtype == torch.float32 and streamed.device == torch.device("cpu")
    assert streamed.generation_config.eos_token_id == llama_checkpoint.model.generation_config.eos_token_id
    assert streamed.can_generate() and streamed.eval() is streamed
    assert streamed.name_or_path == str(llama_checkpoint.folder)
    text, have = repr(streamed), streamed.plan.workload
    for part in ("llama", "3 layers", "float32", "1.9 MiB of weights",
                 f"planned for {have.batch} of {have.prompt} + {have.new_tokens} tokens"):
        assert part in text, text


def test_pipeline() -> None:
    """Text in, text out, through transformers' own pipeline, as for a model of its own."""
    from forebay.rewriter.checkpoints.resolve import resolve_model

    folder = resolve_model("demo")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with wrap(folder, "300MB", batch=2, prompt=16, new_tokens=8) as lm:
        pipe = transformers.pipeline("text-generation", model=lm, tokenizer=tokenizer)
        texts = ["The capital of France is", "One, two, three,"]
        options = dict(max_new_tokens=6, do_sample=False, return_full_text=False, batch_size=2)
        found = [answer[0]["generated_text"] for answer in pipe(texts, **options)]
        for text, answer in zip(texts, found, strict=True):
            ids = tokenizer(text, return_tensors="pt").input_ids
            new = lm.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
            assert answer == tokenizer.decode(new, skip_special_tokens=True)


def test_loglikelihood(streamed: LanguageModel, llama_checkpoint: Any) -> None:
    whole = llama_checkpoint.expected[2].tolist()
    pairs = [(whole[:10], whole[10:]), (whole[:4], whole[4:9]), (whole[:1], whole[1:3]), (whole[:12], whole[12:13]),
             (whole[:3], whole[3:18])]
    found = streamed.loglikelihood(pairs)
    for (context, continuation), (likelihood, greedy) in zip(pairs, found, strict=True):
        with torch.no_grad():
            logits = llama_checkpoint.model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])
        assert likelihood == pytest.approx(chosen.sum().item(), abs=1e-3)
        assert greedy is (logits.argmax(-1).tolist() == continuation)
    assert [greedy for _, greedy in found][::3] == [True, True]
    with pytest.raises(ValueError, match="pair 1 needs a context and a continuation"):
        streamed.loglikelihood([([1], [2]), ([1], [])])


def test_an_emptied_module_says_so_and_its_wrapping_scores_too(llama_checkpoint: Any, tmp_path: Path) -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(llama_checkpoint.folder)
    module.generation_config.max_new_tokens = 3
    with wrap(module, {"device": llama_checkpoint.share(0.7), "disk": str(tmp_path)}) as lm:
        with pytest.raises(RuntimeError, match=r"LlamaForCausalLM was emptied by forebay\.wrap"):
            module(llama_checkpoint.ids)
        with pytest.raises(RuntimeError, match="was emptied"):
            module.generate(llama_checkpoint.ids)
        assert lm.generate(llama_checkpoint.ids).shape == (3, 13)
        with torch.no_grad():
            expected = llama_checkpoint.model(llama_checkpoint.ids).logits
        torch.testing.assert_close(lm(llama_checkpoint.ids).logits, expected, **TOLERANCE)
        assert len(lm.token_scores(list(llama_checkpoint.ids))) == 3


def test_what_scripts_call_before_they_generate(streamed: LanguageModel) -> None:
    """The model itself where that changes nothing; else one line that says what to do."""
    for same in (streamed.eval(), streamed.train(False), streamed.cpu(), streamed.float(), streamed.to("cpu"),
                 streamed.to(torch.float32), streamed.to(torch.device("cpu"), torch.float32), streamed.to(dtype=None)):
        assert same is streamed
    assert streamed.training is False
    for call in (streamed.half, streamed.bfloat16, lambda: streamed.to("cpu", torch.float16)):
        with pytest.raises(ValueError, match=r"computes in torch\.float32, as its checkpoint is stored"):
            call()
    for call in (streamed.cuda, lambda: streamed.to("cuda:0"), lambda: streamed.to(device="cuda")):
        with pytest.raises(ValueError, match="lies where its plan puts it"):
            call()
    with pytest.raises(ValueError, match="only predicts"):
        streamed.train()


@pytest.mark.parametrize(("name", "said"), [
    ("parameters", "where the plan puts them"), ("named_parameters", "where the plan puts them"),
    ("state_dict", "where the plan puts them"), ("save_pretrained", "forebay.export"), ("modules", "no module of it"),
    ("_modules", "no torch module, as Trainer"), ("generate_batch", r"wrap\(batch_slots="),
    ("requires_grad_", "only predicts"), ("lm_head", "explain"), ("of_no_model", "attribute 'of_no_model'$")])
def test_what_modules_have_and_this_has_not(streamed: LanguageModel, name: str, said: str) -> None:
    """In one line; `hasattr` says no, as transformers asks before it calls."""
    assert not hasattr(streamed, name)
    with pytest.raises(AttributeError, match=said) as caught:
        getattr(streamed, name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("option", "said"), [
    (dict(device_map="auto"), "plan says where weights lie"), (dict(torch_dtype=torch.float16), "is stored in"),
    (dict(load_in_4bit=True), "forebay quantize"), (dict(attn_implementation="sdpa"), "leave it out"),
    (dict(batches=3), "argument 'batches'; did you mean 'batch'?"), (dict(xyz=3), "argument 'xyz'$"),
    (dict(admitted=3), "argument 'admitted'")])
def test_options_of_transformers_are_answered_in_one_line(llama_checkpoint: Any, option: dict, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        wrap(llama_checkpoint.folder, "1MB", **option)


def test_a_machine_that_was_not_measured_is_told_of_once(
    llama_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opening, "_guessed", False)
    monkeypatch.setattr(opening, "kept_machine", lambda folder: None)
    for _ in range(2):
        llama_checkpoint.language_model(0.6)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "this machine was never measured, so plans go by a cautious guess of its speed; `forebay machine` measures it "
        "once"]


def test_text_in_the_place_of_tokens_is_refused_in_words(streamed: LanguageModel) -> None:
    for text in ("once upon a time", ["once", "twice"]):
        with pytest.raises(ValueError, match="is text; give what the tokenizer makes of it"):
            streamed.generate(text, max_new_tokens=2)


def test_calls_of_another_kind_keep_the_options(
    llama_checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Embeddings need more memory: where there is none for the options, the planner chooses, and says so."""
    asked: dict[str, Any] = dict(batch=2, prompt=10, new_tokens=6, cache_tier="host", checkpoints=(1, 2),
                                 prefix_cache="1MiB", prompt_lookup_num_tokens=2)

    def choices(lm: LanguageModel) -> tuple[str, bool]:
        batching = lm.plan.schedule.batching
        return batching.cache.tier, batching.recomputation.checkpoints > 0

    with llama_checkpoint.language_model(2_200_000, 1 << 20, **asked) as lm:
        every = lm.giving("all")
        assert choices(lm) == choices(every) == ("host", True) and not caplog.messages
        assert every.options.prompt_lookup_num_tokens is None and every.prefixes is None
    tight = dict(batch=2, prompt=10, new_tokens=6, weight_shares=(0.9, 0.1))
    with pytest.raises(PlanError, match="smallest that can") as refused:
        llama_checkpoint.language_model(1000, 1 << 20, **tight)
    least = int(re.findall(r"\((\d+) bytes", str(refused.value))[0])
    with llama_checkpoint.language_model(least, 1 << 20, **tight) as lm:
        caplog.clear()
        free = lm.giving("last", embeds=True).plan
        assert sum(w.nbytes for w in free.weights if w.tier == "device") < 0.9 * sum(w.nbytes for w in free.weights)
        assert [each.split(":")[0] for each in caplog.messages] == ["weight_shares"]
        assert "left to the planner for calls with images, embeddings or logits" in caplog.text
