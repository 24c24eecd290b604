"""A session's first step begins while resident weights are still read."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from forebay.api import wrap
from forebay.rewriter.ir.program import DISK, Copy, FileSlice, Wait
from forebay.rewriter.verify.program import ProgramError, verify_program
from forebay.runtime.devices.cpu import device as cpu
from forebay.runtime.run.loading import FirstStep, while_loading
from forebay.runtime.run.session import resident_copies

SHARES = (0.4, 1.0)  # of the weights: some stream, and all are resident


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("tokens", [1, 10])
def test_each_wait_is_needed_and_all_together_are_enough(llama_checkpoint: Any, share: float, tokens: int) -> None:
    with wrap(llama_checkpoint.folder, llama_checkpoint.share(share), batch=3, prompt=10, new_tokens=8) as lm:
        program = lm.steps.pipeline.program(lm.plan, tokens)
        load = resident_copies(lm.plan, lm.files)
    first = while_loading(program, load)
    verify_program(first)
    waits = [n for n, item in enumerate(first.step) if isinstance(item, Wait) and item.event < 0]
    assert len(load) > 2 and waits
    for n in waits if share == 1.0 else ():  # a wait for what streams, which is read later, covers what is resident
        with pytest.raises(ProgramError):
            verify_program(replace(first, step=(*first.step[:n], *first.step[n + 1 :])))


def test_weights_come_in_the_order_in_which_the_step_reads_them(llama_checkpoint: Any) -> None:
    with wrap(llama_checkpoint.folder, llama_checkpoint.share(1.0), batch=3, prompt=10, new_tokens=8) as lm:
        load = resident_copies(lm.plan, lm.files)
        first = while_loading(lm.steps.pipeline.program(lm.plan, 10), load[::-1])
    names = [item.dst.buffer for item in first.prologue if isinstance(item, Copy) and item.stream == DISK]
    assert sorted(names) == sorted(copy.dst.buffer for copy in load)
    layers = [int(name.split("layers.")[1].split(".")[0]) for name in names if "layers." in name]
    assert layers == sorted(layers) and len(set(layers)) > 1 and "layers." not in names[-1]


def test_the_first_step_begins_before_the_last_weight_has_come(
    llama_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last weight is read once the step runs: were it waited for before, the step would not."""
    running, came = threading.Event(), list[bool]()
    prepare, run = cpu.prepare_slice, FirstStep.run

    def held(reader: Any, src: FileSlice, address: int, room: tuple[int, int], done: Any) -> Any:
        call = prepare(reader, src, address, room, done)

        def late() -> None:
            came.append(running.wait(20))
            call()

        return call if src != last else threading.Thread(target=late).start

    def running_step(step: FirstStep) -> None:
        running.set()
        run(step)

    with wrap(llama_checkpoint.folder, llama_checkpoint.share(1.0), batch=3, prompt=10, new_tokens=8) as lm:
        last = next(copy.src for copy in resident_copies(lm.plan, lm.files) if "norm" in copy.dst.buffer)
        monkeypatch.setattr(cpu, "prepare_slice", held)
        monkeypatch.setattr(FirstStep, "run", running_step)
        tokens = lm.generate(llama_checkpoint.ids, attention_mask=llama_checkpoint.mask, max_new_tokens=8,
                             do_sample=False, pad_token_id=0, eos_token_id=None)
        assert came == [True] and lm.session.take_waited_s() > 0 == lm.session.take_waited_s()
    assert tokens.tolist() == llama_checkpoint.expected.tolist()


def test_a_weight_that_cannot_be_read_ends_the_call_and_not_the_model(
    llama_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = cpu.prepare_slice

    def failing(reader: Any, src: FileSlice, address: int, room: tuple[int, int], done: Any) -> Any:
        return lambda: done(OSError(5, "Input/output error")) if src == last else prepare(
            reader, src, address, room, done)()

    asked = {"attention_mask": llama_checkpoint.mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0,
             "eos_token_id": None}
    with wrap(llama_checkpoint.folder, llama_checkpoint.share(1.0), batch=3, prompt=10, new_tokens=8) as lm:
        last = resident_copies(lm.plan, lm.files)[-1].src
        with monkeypatch.context() as patched:
            patched.setattr(cpu, "prepare_slice", failing)
            with pytest.raises(OSError, match="Input/output"):
                lm.generate(llama_checkpoint.ids, **asked)
        assert lm.generate(llama_checkpoint.ids, **asked).tolist() == llama_checkpoint.expected.tolist()
