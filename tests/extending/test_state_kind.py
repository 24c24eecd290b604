"""A kind of state from outside the package, which a step cannot take back: its spec, its operator, and no other line.

Package files that a kind inside the package touches: its class in `rewriter/ir/state.py`, its operator's folder in
`kernels/`, the operator's line in `kernels/operators.py`, and the family in `rewriter/capture/own_attention.py`: 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from extending.made_models import greedy, launched, saved
from extending.test_family import NearAttention, own_attention
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from forebay.api import wrap
from forebay.kernels import operators
from forebay.kernels.operator import Call, Operator, Tensors, each_once
from forebay.kernels.operators import register_operator
from forebay.rewriter.capture.family import FAMILIES, Family, register_family
from forebay.rewriter.capture.language_model import CaptureError, capture_model
from forebay.rewriter.capture.layer_states import counts, layer_state, starts
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.state import STATE_KINDS, KVState, StateSpec, StateTensor, register_state
from forebay.runtime.run.prefill import chunk_spans
from forebay.runtime.run.rows import SequenceRows

DECAY = 0.9


def reference(x: Tensor, state: Tensor, start: Tensor, count: Tensor) -> Tensor:
    """Running sums of x [B, S, D] that go on from `state` [B, D]. Tokens from `count` [B] on do not change it."""
    held = torch.where((start > 0)[:, None], state, 0)
    sums = []
    for t in range(x.shape[1]):
        held = torch.where((t < count)[:, None], DECAY * held + x[:, t], held)
        sums.append(held)
    state.copy_(held)
    return torch.stack(sums, 1)


@torch.library.custom_op("extending::running_sum", mutates_args=("state",))
def running_sum(x: Tensor, state: Tensor, start: Tensor, count: Tensor) -> Tensor:
    return reference(x, state, start, count)


@running_sum.register_fake
def _(x: Tensor, state: Tensor, start: Tensor, count: Tensor) -> Tensor:
    return torch.empty_like(x)


def bind_running_sum(use: Tensors) -> Call:
    (out,) = use.out
    return lambda: out.copy_(reference(*use.args))


RUNNING_SUM = Operator(torch.ops.extending.running_sum.default, reference, each_once, bind={"cpu": bind_running_sum})


@dataclass(frozen=True)
class RunningState(StateSpec):
    """One row of `width` for each sequence."""

    kind = "running"
    operators = (RUNNING_SUM.name,)
    reorderable = True

    width: int
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        return (StateTensor("sum", ("B", self.width), self.dtype),)


class RunningConfig(PreTrainedConfig):
    model_type = "running"

    def __init__(self, hidden_size: int = 64, **others: Any) -> None:
        self.hidden_size, self.num_attention_heads, self.num_hidden_layers = hidden_size, 4, 4
        self.vocab_size, self.layer_types = 199, ["full_attention"] * 4
        super().__init__(**others)


class RunningMixer(nn.Module):
    def __init__(self, config: RunningConfig) -> None:
        super().__init__()
        self.into, self.out = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(2))

    def forward(self, hidden: Tensor, **others: Any) -> Tensor:
        x = self.into(hidden)
        none = torch.zeros(len(x), dtype=torch.int64)
        return self.out(reference(x, x.new_zeros(len(x), x.shape[2]), none, none + x.shape[1]))


class RunningLayer(nn.Module):
    """Every other layer attends; the others keep a running sum."""

    def __init__(self, config: RunningConfig, number: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.mixer = NearAttention(config, number) if number % 2 else RunningMixer(config)  # type: ignore[arg-type]
        self.up, self.down = nn.Linear(config.hidden_size, 256), nn.Linear(256, config.hidden_size)

    def forward(self, hidden: Tensor, **others: Any) -> Tensor:
        hidden = hidden + self.mixer(self.norm(hidden), **others)
        return hidden + self.down(nn.functional.gelu(self.up(hidden)))


class RunningForCausalLM(PreTrainedModel, GenerationMixin):
    config_class, base_model_prefix, _no_split_modules = RunningConfig, "", ["RunningLayer"]
    _is_stateful = True

    def __init__(self, config: RunningConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(RunningLayer(config, i) for i in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, past_key_values: Any = None,
                use_cache: bool = False, return_dict: bool = True, **others: Any) -> CausalLMOutputWithPast:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, past_key_values=past_key_values)
        return CausalLMOutputWithPast(logits=self.head(hidden))


def running_mixer(module: RunningMixer) -> Callable[..., Tensor]:
    """The same by an operator that keeps the sum from step to step."""
    def forward(hidden: Tensor, **others: Any) -> Tensor:
        x = module.into(hidden)
        (state,) = layer_state(RunningState(x.shape[2], x.dtype))
        return module.out(running_sum(x, state, starts(), counts()))

    return forward


RUNNING = Family(
    "RunningForCausalLM",
    replaced={"RunningMixer": ("forward", running_mixer), "NearAttention": ("forward", own_attention)},
    layer_index="number",
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(operators, "OPERATORS", [*operators.OPERATORS])
    monkeypatch.setattr(operators, "_BY_KEY", {**operators._BY_KEY})
    AutoConfig.register("running", RunningConfig, exist_ok=True)
    AutoModelForCausalLM.register(RunningConfig, RunningForCausalLM, exist_ok=True)
    register_operator(RUNNING_SUM)
    register_state(RunningState)
    register_family(RUNNING)
    yield
    FAMILIES.pop(RUNNING.model)
    STATE_KINDS.pop(RunningState.kind)


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, Any]:
    folder, made = saved(RunningConfig(), tmp_path / "model")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3)  # so that sums show
    made.save_pretrained(folder)
    return folder, made


SHAPE = {"batch": 2, "prompt": 11, "new_tokens": 5, "prefill_chunk": 4}


def test_a_state_from_outside_is_captured_streamed_and_takes_each_token_once(model: tuple[Path, Any]) -> None:
    folder, plain = model
    captured = capture_model(plain)
    assert captured.layers == ("block_0", "block_1") * 2
    assert captured.states == ((RunningState(64, torch.float32),), (KVState(4, 16, torch.float32),)) * 2
    with wrap(folder, 1 << 30, **SHAPE) as lm:
        budget = lm.steps.pipeline.smallest_budget() + lm.captured.weight_nbytes // 4
    prompts = [torch.arange(3, 3 + n)[None] * 7 % 199 for n in (11, 6)]
    ids = torch.zeros(2, 11, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, 11 - prompt.shape[1] :], mask[row, 11 - prompt.shape[1] :] = prompt[0], 1
    with wrap(folder, budget, **SHAPE) as lm:
        assert lm.plan.prediction.streamed_nbytes and lm.plan.schedule.prefill_chunks == (4,)
        assert RUNNING_SUM.name in launched(lm.steps.program(4).step)
        for _ in range(2):  # a state that another call left is taken as empty
            found = lm.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None,
                                pad_token_id=0, return_dict_in_generate=True, output_logits=True)
            logits = torch.stack(found.logits, 1)
            for row, prompt in enumerate(prompts):
                torch.testing.assert_close(logits[row], greedy(plain, prompt, 5)[0], rtol=1e-3, atol=1e-3)


def test_rows_change_places_and_are_not_taken_back(model: tuple[Path, Any]) -> None:
    folder, plain = model
    first, second = torch.tensor([3, 9, 27, 81, 44, 7]), torch.tensor([5, 25])
    with wrap(folder, 1 << 30, **SHAPE) as lm, lm.running(2, 11, 5) as session:
        rows = SequenceRows(session, lm.captured.states)
        rows.begin([first, second])
        rows.reorder(torch.tensor([0, 0]))
        found = rows.extend(torch.tensor([[8, 6], [4, 2]]))[:, 0]
        expected = [plain(torch.cat((first, torch.tensor(new)))[None]).logits[0, -1] for new in ((8, 6), (4, 2))]
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-3, atol=1e-3)
        with pytest.raises(PlanError, match="layer 0 keeps a state of kind running, which is not rewindable"):
            rows.crop(1)


def test_drafts_are_checked_over_it(model: tuple[Path, Any]) -> None:
    folder, plain = model
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    with wrap(folder, 1 << 30, prompt=8, new_tokens=9, prompt_lookup_num_tokens=3) as lm:
        found = lm.generate(prompt, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert lm.tally.offered
    assert torch.equal(found[0, 8:], greedy(plain, prompt, 9)[0].argmax(-1))


def test_what_the_kind_cannot_do_is_refused_by_its_name(model: tuple[Path, Any]) -> None:
    with pytest.raises(PlanError, match=r"cache\.tier: layer 0 keeps a state of kind running, which is not pageable"):
        wrap(model[0], {"device": 1 << 30, "host": 1 << 30}, **SHAPE, cache_tier="host")


def test_a_layer_calls_the_operators_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningState, "operators", (RUNNING_SUM.name, "extending.another"))
    with pytest.raises(CaptureError, match=r"0 calls of extending.another where there must be 1"):
        capture_model(RunningConfig())
    with pytest.raises(ValueError, match="running is a kind of state already"):
        register_state(RunningState)


def test_no_step_is_moved_back() -> None:
    assert chunk_spans((4,), 11) == [(0, 4), (4, 4), (7, 4)]
    assert chunk_spans((4,), 11, 15, rewindable=False) == [(0, 4), (4, 4), (8, 4)]
    assert chunk_spans((4,), 11, 11, rewindable=False) == [(0, 4), (4, 4), (8, 1), (9, 1), (10, 1)]
