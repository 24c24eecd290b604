"""A device from outside the package: its record and its opener, and no other line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from forebay.rewriter.ir.program import Item, Launch
from forebay.rewriter.machine.profile import Machine
from forebay.runtime.devices import kinds
from forebay.runtime.devices.cpu.device import ThreadDevice
from forebay.runtime.devices.device import Call
from forebay.runtime.devices.kinds import HOST, kind_of, register_device
from forebay.runtime.devices.opening import Opening


class CountingDevice(ThreadDevice):
    """Computes as a CPU does, and counts the launches that it was given."""

    launches = 0

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening.reader, lookups=opening.lookups, loads=opening.loads, spill=opening.spill)

    def bind(self, item: Item, launch: Call | None) -> Call | None:
        CountingDevice.launches += isinstance(item, Launch)
        return super().bind(item, launch)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(kinds, "KINDS", [*kinds.KINDS])
    kind = replace(HOST, name="counting", title="counter", covers=lambda name: name == "counter 9000",
                   here=lambda: None, opener=CountingDevice)
    register_device(kind)
    return replace(Machine.default(), device_kind="counter 9000")


def test_a_device_from_outside_plans_and_runs_a_model(llama_checkpoint: Any, machine: Machine) -> None:
    from forebay.api import wrap

    assert kind_of("counter 9000").name == "counting" and kind_of("counter 8000").name == "accelerator"
    before = CountingDevice.launches
    with wrap(llama_checkpoint.folder, llama_checkpoint.share(0.5), batch=3, prompt=10, new_tokens=8,
              machine=machine) as lm:
        tokens = lm.generate(llama_checkpoint.ids, attention_mask=llama_checkpoint.mask, max_new_tokens=8,
                             do_sample=False, pad_token_id=0, eos_token_id=None)
        assert isinstance(lm.session.device, CountingDevice)
    assert tokens.tolist() == llama_checkpoint.expected.tolist()
    assert CountingDevice.launches > before


def test_a_compiled_module_runs_beside_a_device_with_kernels_of_its_own(machine: Machine) -> None:
    register_device(replace(HOST, name="other", kernels="other", covers=lambda name: name == "other 1"))
    layer = torch.nn.Linear(64, 64).eval()
    x = torch.randn(2, 64)
    with torch.no_grad():
        expected = layer(x)
        fast = torch.compile(layer, backend="forebay", options={"budget": {"device": "1MB"}, "strict": True})
        torch.testing.assert_close(fast(x), expected)


def test_the_null_device_walks_a_step_and_computes_nothing(llama_checkpoint: Any) -> None:
    from forebay.api import wrap

    machine = replace(Machine.default(), device_kind="null")
    with wrap(llama_checkpoint.folder, llama_checkpoint.share(0.5), batch=3, prompt=10, new_tokens=8,
              machine=machine) as lm:
        tokens = lm.generate(llama_checkpoint.ids, attention_mask=llama_checkpoint.mask, max_new_tokens=8,
                             do_sample=False, pad_token_id=0, eos_token_id=None)
    assert not tokens[:, llama_checkpoint.ids.shape[1]:].any(), "logits that nobody wrote are zero"
