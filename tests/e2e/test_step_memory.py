"""What a lowered step takes, measured, beside the plan and beside eager.

Counted beside weights and cache, which all have alike: of ours the bytes of the arena that a step writes and the peak
of what torch's allocator gives out meanwhile; of transformers' model, over its StaticCache, that peak alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from allocated import peak_allocated
from budgets import WITH_KERNELS
from selection import without

from forebay.language_model import LanguageModel
from forebay.open_model import open_model
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.options import Options
from forebay.rewriter.report.explain import lasting, phases
from forebay.runtime.run.step_inputs import StepInputs

PATTERN = 0xA5
SHAPES: dict[str, dict[str, Any]] = {
    "llama": dict(hidden_size=512, intermediate_size=1792, num_hidden_layers=4, num_attention_heads=8,
                  num_key_value_heads=2, vocab_size=4096),
    "qwen2": dict(hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
                  num_key_value_heads=8, vocab_size=4096),
}
WORK = Workload(2, 64, 8)


def ours(lm: LanguageModel, tokens: int) -> tuple[int, int, int]:
    """Bytes of one step: resident; planned beside them; measured beside them."""
    plan, workload = lm.plan, lm.plan.workload
    session = lm.session
    bound = session.bound(tokens)
    phase = "decode" if tokens == 1 else "prefill"
    top = plan.arenas["device"]
    floor = max(b.offset + b.nbytes for b in lasting(plan, "device", phase))
    height = top - min(b.offset for b in phases(plan)[phase])
    memory = session.device.arenas["device"].bytes  # type: ignore[attr-defined]
    memory[floor:].fill_(PATTERN)
    start = 0 if tokens > 1 else workload.prompt
    inputs = StepInputs(torch.full((workload.batch, tokens), 7), torch.full((workload.batch,), start),
                        torch.full((workload.batch,), tokens - 1))
    transient = peak_allocated(lambda: session.step(inputs))
    touched = int((memory[floor:] != PATTERN).nonzero()[0]) + floor
    return floor, height + bound.program.workspace_nbytes(), top - touched + transient


def eager(model: Any, tokens: int) -> int:
    """Peak bytes of one forward pass of transformers' model."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=WORK.context)
    ids = torch.full((WORK.batch, WORK.prompt), 7)
    with torch.inference_mode():
        model(ids, past_key_values=cache, logits_to_keep=1)  # makes the cache, and fills it for a decode step
        if tokens > 1:
            cache.reset()
        given = ids if tokens > 1 else ids[:, :1]
        return peak_allocated(lambda: model(given, past_key_values=cache, logits_to_keep=1))


def test_allocations_are_counted_at_their_peak() -> None:
    def call() -> torch.Tensor:
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(5000, dtype=torch.uint8)
        del a
        return b.clone()

    assert peak_allocated(call) == 10_000
    assert peak_allocated(lambda: None) == 0


@WITH_KERNELS
@pytest.mark.parametrize("kind", without(SHAPES, ("qwen2",)))
def test_measured_peak_is_the_planned_one_and_below_eager(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **SHAPES[kind]))
    made.save_pretrained(tmp_path)
    captured, checkpoint, files = open_model(tmp_path)
    # not for the profile that lies about, if one does
    with LanguageModel(captured, checkpoint, files, Budget(16 << 30), WORK, Options(prefill_chunk=WORK.prompt),
                       machine=Machine.default()) as lm:
        assert all(w.tier == "device" for w in lm.plan.weights)
        for tokens, of_planned, of_eager in ((WORK.prompt, 0.99, 0.8), (1, 0.0, 1.0)):
            resident, planned, measured = ours(lm, tokens)
            assert abs((resident + measured) / (resident + planned) - 1) <= 0.01
            assert 0 < measured <= planned and measured >= of_planned * planned
            assert measured <= of_eager * eager(made.eval(), tokens)
