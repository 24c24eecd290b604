"""Models whose rotary frequencies follow the length of the call: shorter, longer, and on the way across.

The suite runs the model that gives up its cache at the change with all, the others, which do not, with some of each;
FOREBAY_TEST_ALL=1 (`make test-all`) runs all with all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from budgets import operators_nbytes
from families import VOCAB, llama, phi3
from opened import open_rewritten
from selection import ALL, without

from forebay.api import wrap
from forebay.language_model import LanguageModel
from forebay.rewriter.capture.cache_name import CACHE_NAME
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.options import Options
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import answer_all

ORIGINAL, NEW = 24, 9
LONGROPE = dict(rope_theta=10000.0, rope_type="longrope", short_factor=[1.0] * 8, long_factor=[9.0] * 8,
                original_max_position_embeddings=ORIGINAL)
CONFIGS = {
    "longrope": lambda: phi3(original_max_position_embeddings=ORIGINAL, rope_parameters=LONGROPE),
    "dynamic": lambda: llama(2, max_position_embeddings=ORIGINAL, rope_parameters=dict(
        rope_theta=10000.0, rope_type="dynamic", factor=8.0)),
    # A Llama's cache stays what it was where its frequencies change over: only Phi3's `generate` gives it up.
    "longrope, kept": lambda: llama(2, max_position_embeddings=96, rope_parameters=LONGROPE | dict(factor=4.0)),
}
BATCHES = {"shorter": (9, 4), "one of two longer": (5, 30), "longer": (40, 33), "across": (20, 20),
           "one of two across": (7, 20), "across at the first token": (24, 11), "across at the last": (17, 3)}


def with_some(*lists: Sequence[Any]) -> list[tuple[str, Any]]:
    """The first of CONFIGS with everything in the lists, each other with one list of them."""
    every = list(itertools.chain(*lists))
    chosen = dict(zip(list(CONFIGS)[1:], itertools.cycle(lists)))
    return [(name, each) for name in CONFIGS for each in (every if ALL else chosen.get(name, every))]


class Case:
    def __init__(self, name: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.config, self.folder = CONFIGS[name](), folder
        self.model = transformers.AutoModelForCausalLM.from_config(self.config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        self.model.save_pretrained(folder)
        self.opened = open_rewritten(folder)

    def fresh(self) -> Any:
        """The model without what calls before have left in its frequencies."""
        made = transformers.AutoModelForCausalLM.from_config(self.config, attn_implementation="eager").eval()
        made.load_state_dict(self.model.state_dict())
        return made

    def streamed(self, lengths: Sequence[int], new: int = NEW, **options: Any) -> LanguageModel:
        work = Workload(options.pop("rows", len(lengths)), max(lengths), new)
        wanted = Options(**dict(prefill_chunk=8) | options)
        budget = Budget(900_000 + operators_nbytes(self.opened, work, wanted))
        return LanguageModel(*self.opened, budget, work, wanted, Machine.default())

    def alone(self, prompt: torch.Tensor, new: int = NEW) -> list[int]:
        return self.fresh().generate(prompt[None], max_new_tokens=new, do_sample=False, eos_token_id=None,
                                     pad_token_id=0)[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            made[name] = Case(name, tmp_path_factory.mktemp("lengths"))
        return made[name]

    return case


def prompts_of(lengths: Sequence[int]) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, VOCAB, (n,), generator=drawn) for n in lengths]


def padded(prompts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.int64), torch.zeros(len(prompts), width, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :], mask[i, width - len(prompt) :] = prompt, 1
    return dict(input_ids=ids, attention_mask=mask)


GREEDY: dict[str, Any] = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)


@pytest.mark.parametrize(("name", "batch"), with_some(
    ["shorter", "longer", "across", "across at the last"],
    ["one of two longer", "one of two across", "across at the first token"]))
def test_generate_gives_the_tokens_of_transformers(cases: Callable[[str], Case], name: str, batch: str) -> None:
    case, lengths = cases(name), BATCHES[batch]
    given = padded(prompts_of(lengths))
    expected = case.fresh().generate(**given, **GREEDY)
    with case.streamed(lengths) as lm:
        assert torch.equal(lm.generate(**given, **GREEDY), expected)
        through_mixin = lm.generate(**given, **GREEDY, return_dict_in_generate=True, output_scores=True)
        assert torch.equal(through_mixin.sequences, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_beams_cross_with_their_rows(cases: Callable[[str], Case], name: str) -> None:
    case = cases(name)
    given = padded(prompts_of((20, 13)))
    expected = case.fresh().generate(**given, **GREEDY, num_beams=3)
    with case.streamed((20, 13), rows=6) as lm:
        assert torch.equal(lm.generate(**given, **GREEDY, num_beams=3), expected)


def test_the_frequencies_show_in_the_answers(cases: Callable[[str], Case]) -> None:
    """What the tests above would not see if these answers were alike."""
    for name in CONFIGS:
        case, prompt = cases(name), prompts_of((40,))[0]
        plain = case.fresh()
        for module in plain.modules():
            if "rope_type" in vars(module):
                module.rope_type = "default"
        with torch.no_grad():
            unlike = (plain(prompt[None]).logits - case.fresh()(prompt[None]).logits).abs().max()
        assert unlike > 0.1


@pytest.mark.parametrize(("name", "more"), with_some(
    [{"micro_batches": 2, "cache_tier": "disk", "cache_tokens": 4}], [{"micro_batches": 3, "order": "row"}]))
def test_blocks_of_micro_batches_cross(cases: Callable[[str], Case], name: str, more: dict[str, Any]) -> None:
    case, lengths = cases(name), (20, 6, 17, 11)
    given = padded(prompts_of(lengths))
    with case.streamed(lengths, **more) as lm:
        assert torch.equal(lm.generate(**given, **GREEDY), case.fresh().generate(**given, **GREEDY))


@pytest.mark.parametrize(("name", "more"), with_some(
    [{"admitted": 2}], [{}, {"admitted": 2, "micro_batches": 2, "cache_tier": "disk", "cache_tokens": 4}]))
def test_sequences_that_enter_and_leave_follow_their_own_length(
    cases: Callable[[str], Case], name: str, more: dict[str, Any]
) -> None:
    case, lengths = cases(name), (20, 6, 30, 17, 24, 1, 22)
    prompts, found = prompts_of(lengths), {}
    with case.streamed((30,), rows=3, **more) as lm:
        work = answer_all(lm.session, [Request(prompt, NEW) for prompt in prompts], Sampling(),
                          on_end=lambda number, tokens: found.update({number: tokens}))
    assert work.ended == len(lengths) and work.tokens == NEW * len(lengths)
    assert [found[i] for i in range(len(lengths))] == [case.alone(prompt) for prompt in prompts]


@pytest.mark.parametrize("name", without(CONFIGS, ("dynamic", "longrope, kept")))
def test_forward_and_scores_are_those_of_the_whole_length(cases: Callable[[str], Case], name: str) -> None:
    """Scores, which come from steps of another plan, after all forwards."""
    case = cases(name)
    prompts = [prompts_of((length,))[0] for length in (40, 9, ORIGINAL, ORIGINAL + 1)]
    with case.streamed((40,)) as lm, torch.no_grad():
        expected = [case.fresh()(prompt[None]).logits for prompt in prompts]
        for prompt, logits in zip(prompts, expected, strict=True):
            torch.testing.assert_close(lm(prompt[None]).logits, logits, rtol=1e-3, atol=1e-4)
        for prompt, logits in zip(prompts, expected, strict=True):
            scores = lm.token_scores([torch.cat((prompt, torch.tensor([7]))), torch.tensor([5, 6])])[0]
            known = logits[0].log_softmax(-1).gather(1, torch.cat((prompt[1:], torch.tensor([7])))[:, None])[:, 0]
            torch.testing.assert_close(scores[:, 0], known, rtol=1e-3, atol=1e-4)


def test_a_cache_that_is_continued_by_hand_begins_anew(cases: Callable[[str], Case]) -> None:
    """With several tokens at once, and from what has been taken back."""
    case, prompt = cases("longrope"), prompts_of((35,))[0]
    with case.streamed((40,)) as lm, torch.no_grad():
        held = getattr(lm(prompt[None, :20], use_cache=True), CACHE_NAME)
        for upper in (22, 27, 30):
            found = lm(prompt[None, held.get_seq_length() : upper], past_key_values=held).logits
            expected = case.fresh()(prompt[None, :upper]).logits[:, -found.shape[1] :]
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        held.crop(-10)
        found = lm(prompt[None, 20:23], past_key_values=held).logits
        torch.testing.assert_close(found, case.fresh()(prompt[None, :23]).logits[:, -3:], rtol=1e-3, atol=1e-4)


def test_a_plan_without_room_to_begin_anew_is_not_run(cases: Callable[[str], Case]) -> None:
    case = cases("longrope")
    with case.streamed((20,), new=3, admitted=1, rows=2) as lm:
        assert lm.plan.workload.prompt == 20  # too few tokens to cross
        with pytest.raises(RuntimeFault, match="does not fit the plan's slots"):
            answer_all(lm.session, [Request(prompts_of((20,))[0], NEW)], Sampling(), on_end=lambda n, t: None)
        lm.reserve(2, 20, NEW)
        assert (lm.plan.workload.prompt, lm.plan.workload.context) == (ORIGINAL + 1, 20 + NEW)


def test_wrap_of_a_module_beyond_its_original_length(cases: Callable[[str], Case]) -> None:
    case = cases("dynamic")
    given = padded(prompts_of((30,)))
    expected = case.fresh().generate(**given, **GREEDY)
    device = 700_000 + operators_nbytes(case.opened, Workload(1, 128, 128))
    with wrap(case.fresh(), {"device": device}, machine=Machine.default()) as lm:
        assert torch.equal(lm.generate(**given, **GREEDY), expected)
        assert lm.captured.max_positions == 0
