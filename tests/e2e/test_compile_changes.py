"""torch.compile(model, backend="forebay") when something changes: weights, the aliases among inputs, what can be had of
memory and disk, a step that breaks off, the end of the model."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fresh_dynamo import fresh  # noqa: F401
from networks import Wide
from safetensors.torch import load_model, save_model
from torch import nn

from forebay import backend
from forebay.backend import prepared_for, restore
from forebay.compiled import parameter_store, step_memory
from forebay.compiled.parameter_store import map_of
from forebay.runtime.devices.cpu import device as threads
from forebay.runtime.run.executor import BoundProgram

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*lies in memory"), pytest.mark.filterwarnings("ignore:OpenMP threads spin")]


def compiled(model, folder, device="640KiB", **options):
    options = {"budget": {"device": device, "disk": str(folder)}, "strict": True, **options}
    return torch.compile(model, backend="forebay", fullgraph=True, options=options)


def close(got, expected) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether it comes true; what follows a collection is done by another thread."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def own_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("forebay-")}


def test_a_step_that_breaks_off_anywhere_does_not_spoil_the_next(tmp_path, monkeypatch):
    model, x = Wide().eval(), torch.randn(3, 64)
    before, expected, run = own_threads(), model(x), compiled(model, tmp_path)
    close(run(x), expected)
    whole = BoundProgram.run

    for at in range(0, 60, 4):
        def broken(self: BoundProgram, at: int = at) -> None:
            for call in self._step[:at]:
                call()
            raise KeyboardInterrupt

        monkeypatch.setattr(BoundProgram, "run", broken)
        with pytest.raises(KeyboardInterrupt):
            run(x)
        assert own_threads() <= before  # its memory is given back
        monkeypatch.setattr(BoundProgram, "run", whole)
        for _ in range(2):
            close(run(x), expected)


def test_an_error_in_a_step_is_raised_and_the_next_is_right(tmp_path):
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = Wide(), nn.Linear(32, 64), Wide()

        def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return self.last(self.middle(self.first(x)).index_select(0, rows))

    model, x, rows = Picking().eval(), torch.randn(4, 64), torch.tensor([1, 2])
    expected, run = model(x, rows), compiled(model, tmp_path)
    close(run(x, rows), expected)
    with pytest.raises(IndexError):
        run(x, torch.tensor([1, 77]))
    for _ in range(2):
        close(run(x, rows), expected)


class Calling(nn.Module):
    """An operator in its middle calls `back`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Wide(), nn.Linear(32, 64), Wide()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.ops.forebay_tests.call_back(self.middle(self.first(x))))


back: Callable[[], object] = lambda: None  # noqa: E731


@torch.library.custom_op("forebay_tests::call_back", mutates_args=())
def call_back(x: torch.Tensor) -> torch.Tensor:
    back()
    return x.clone()


call_back.register_fake(torch.empty_like)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("strict", [False, True])
def test_an_operator_that_calls_its_model_finds_no_memory(tmp_path, monkeypatch, strict):
    """The step that runs has all of it: what the operator calls runs eagerly, with a warning, or is refused."""
    model, x, other = Calling().eval(), torch.randn(3, 64), torch.randn(2, 64)
    expected, wanted = model(x), model(other)
    run, found = compiled(model, tmp_path, "700KiB", strict=strict), []
    close(run(x), expected)
    for inner in (lambda: run(x), lambda: run(other), lambda: restore(model)):
        def enter(inner: Callable[[], object] = inner) -> None:
            monkeypatch.setattr(__name__ + ".back", lambda: None)
            try:
                found.append(inner())
            except RuntimeError as error:
                found.append(str(error))

        monkeypatch.setattr(__name__ + ".back", enter)
        close(run(x), expected)
        close(run(x), expected)
    *ran, restored = found
    assert len(ran) == 2 and restored.startswith("restore: an operator of a step that reads these weights")
    if strict:
        assert all("an operator of a step that runs in the same budget" in each for each in ran)
    else:
        close(ran[0], expected)
        close(ran[1], wanted)
    restore(model)
    close(model(x), expected)


def test_a_disk_error_is_raised_while_it_lasts_and_restore_does_not_repeat_it(tmp_path):
    model, x = Wide().eval(), torch.randn(3, 64)
    expected, run = model(x), compiled(model, tmp_path, strict=False)
    close(run(x), expected)
    fd = map_of(model.up.weight).fd
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    os.ftruncate(fd, len(content) // 3)
    for _ in range(3):  # not eager either: it would read the same file
        with pytest.raises(OSError, match="truncated"):
            run(x)
    os.pwrite(fd, content, 0)
    close(run(x), expected)
    os.ftruncate(fd, len(content) // 3)
    with pytest.raises(OSError, match="truncated"):
        run(x)
    os.pwrite(fd, content, 0)
    restore(model)
    close(model(x), expected)
    close(run(x), expected)


class Two(nn.Module):
    def __init__(self, add: float = 0) -> None:
        super().__init__()
        self.line, self.add = nn.Linear(64, 64), add

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.add:
            x.add_(self.add)
        return self.line(x) - 2 * self.line(y)


def test_inputs_that_were_one_tensor_may_be_two_later(tmp_path):
    model, x, y = Two().eval(), torch.randn(3, 64), torch.randn(3, 64)
    run = compiled(model, tmp_path)
    for first, second in ((x, x.detach()), (x, y), (x, x.detach()), (y, x)):
        close(run(first, second), model(first, second))


def test_a_changed_input_may_share_memory_later(tmp_path):
    model, x, y = Two(add=1).eval(), torch.randn(3, 64), torch.randn(3, 64)
    run = compiled(model, tmp_path, strict=False)
    close(run(x.clone(), y), model(x.clone(), y))
    mine, twin = x.clone(), x.clone()
    with pytest.warns(RuntimeWarning, match="it changes input .*, whose memory another input shares"):
        got = run(mine, mine.view(3, 64))
    close(got, model(twin, twin.view(3, 64)))
    close(run(x.clone(), y), model(x.clone(), y))  # which was not refused with it


CHANGES = {
    "in place": lambda p: p.mul_(0.5),
    "data": lambda p: p.data.mul_(0.5),
    "numpy": lambda p: p.detach().numpy().__imul__(0.5),
    "one element": lambda p: p.data.view(-1)[-1:].fill_(30),
}


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("device", ["640KiB", "4MiB"])
def test_any_change_of_weights_is_seen(device, tells, tmp_path, monkeypatch):
    if not tells:  # as on tmpfs
        monkeypatch.setattr(parameter_store, "_tells", lambda held: False)
    with torch.inference_mode() if device == "4MiB" else torch.no_grad():  # where tensors count no versions
        model, x = Wide().eval(), torch.randn(3, 64)
        run = compiled(model, tmp_path, device)
        run(x)
        assert map_of(model.up.weight).tells == tells
        (found,) = prepared_for(model)
        for change in CHANGES.values():
            for parameter in (model.up.weight, model.down.weight, model.side.bias):
                change(parameter)
                for _ in range(2):
                    close(run(x), model(x))
        assert prepared_for(model) == [found]  # nothing was captured or planned anew


def test_resident_weights_are_read_once_while_nothing_changes(tmp_path, monkeypatch):
    model, x = Wide().eval(), torch.randn(3, 64)
    run, reloads = compiled(model, tmp_path), []
    monkeypatch.setattr(step_memory, "load_resident", lambda *_: reloads.append(1))
    for _ in range(3):
        run(x)
        model(x)  # reading changes nothing
        model.state_dict()["up.weight"].sum()
    assert map_of(model.up.weight).tells and not reloads
    model.side.bias.data.add_(1)
    for _ in range(3):
        run(x)
    assert len(reloads) == 1


def test_batch_norm_trained_by_eager_between_two_calls(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()).eval()
    x, run = 3 * torch.randn(2, 3, 8, 8), compiled(model, tmp_path)
    close(run(x), model(x))
    model.train()(x)
    model.eval()
    close(run(x), model(x))


def test_a_changed_weight_that_is_not_row_major_is_seen(tmp_path):
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 500).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight)

    model, x = Turned().eval(), torch.randn(3, 64)
    run = compiled(model, tmp_path)
    close(run(x), model(x))
    model.weight.mul_(0.5)
    for _ in range(2):
        close(run(x), model(x))


def test_two_budgets_of_one_model_both_see_a_change(tmp_path):
    model, x = Wide().eval(), torch.randn(3, 64)
    runs = [compiled(model, tmp_path), compiled(model, tmp_path, "4MiB")]
    for factor in (1.0, 0.5, 0.25):
        for parameter in model.parameters():
            parameter.data.mul_(factor)
        for run in runs:
            close(run(x), model(x))


def test_a_deleted_model_leaves_nothing(tmp_path):
    before = own_threads()
    model, x = Wide().eval(), torch.randn(3, 64)
    run = compiled(model, tmp_path)
    run(x)
    (found,) = map(weakref.ref, prepared_for(model))
    file = weakref.ref(map_of(model.up.weight).checkpoint.backing)
    assert own_threads() - before
    del model, run
    gc.collect()
    assert file() is None
    assert wait_until(lambda: own_threads() <= before)
    assert wait_until(lambda: gc.collect() >= 0 and found() is None)


def test_restore_gives_back_the_file(tmp_path):
    model, x = Wide().eval(), torch.randn(3, 64)
    expected, run = model(x), compiled(model, tmp_path)
    run(x)
    file = weakref.ref(map_of(model.up.weight).checkpoint.backing)
    restore(model)
    gc.collect()
    assert file() is None
    close(run(x), expected)


@pytest.mark.parametrize("later", ["inference mode", "no_grad"])
def test_a_model_made_in_inference_mode_still_runs_by_itself(later, tmp_path):
    with torch.inference_mode():
        model, x = Wide().eval(), torch.randn(3, 64)
        expected = model(x)
    with torch.inference_mode() if later == "inference mode" else torch.no_grad():
        run = compiled(model, tmp_path)
        close(run(x), expected)
        close(model(x), expected)
        restore(model)
        close(model(x), expected)
        close(run(x), expected)
        assert all(p.is_inference() for p in model.parameters())


def test_a_missing_folder_is_tried_again(tmp_path):
    model, x, folder = Wide().eval(), torch.randn(3, 64), tmp_path / "later"
    expected, run = model(x), compiled(model, folder, strict=False)
    with pytest.warns(RuntimeWarning, match=r"later is not a folder.*the next call tries again"):
        close(run(x), expected)
    folder.mkdir()
    close(run(x), expected)
    assert len(prepared_for(model)) == 1


def test_memory_that_cannot_be_had_is_tried_again(tmp_path, monkeypatch):
    def none_left(nbytes: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    model, x = Wide().eval(), torch.randn(3, 64)
    expected, run, before = model(x), compiled(model, tmp_path, strict=False), own_threads()
    with monkeypatch.context() as patch:
        patch.setattr(threads, "Arena", none_left)
        for _ in range(2):
            with pytest.warns(RuntimeWarning, match="Cannot allocate memory.*the next call tries again"):
                close(run(x), expected)
    assert own_threads() <= before
    close(run(x), expected)
    assert own_threads() - before and len(prepared_for(model)) == 1


def test_what_cannot_be_offloaded_is_remembered_but_not_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "REFUSED", 2)
    tried = []
    make_plan = backend.make_plan
    monkeypatch.setattr(backend, "make_plan", lambda *given: tried.append(1) or make_plan(*given))
    model = Wide().eval()
    options = {"budget": {"device": "16KiB", "disk": str(tmp_path)}}
    run = torch.compile(model, backend="forebay", dynamic=True, options=options)
    with pytest.warns(RuntimeWarning, match="cannot work"):
        for rows in (2, 2, 3, 4, 4, 2):
            run(torch.randn(rows, 64))
    assert len(tried) == 4  # 2, 3, 4, and 2 again


def test_two_models_with_one_options_object_are_told_so(tmp_path):
    options = {"budget": {"device": "640KiB", "disk": str(tmp_path)}, "strict": True}
    models, x = [Wide().eval(), Wide().eval()], torch.randn(3, 64)
    runs = [torch.compile(model, backend="forebay", options=options) for model in models]
    close(runs[0](x), models[0](x))
    with pytest.warns(RuntimeWarning, match="one `options` object, so they take turns in its budget"):
        close(runs[1](x), models[1](x))


def test_each_storage_stays_one_of_its_own(tmp_path):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)).eval(), torch.randn(3, 64)
    model[2].weight = model[0].weight
    expected = model(x)
    compiled(model, tmp_path)(x)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    save_model(model, str(tmp_path / "saved.safetensors"))
    again = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)).eval()
    again[2].weight = again[0].weight
    load_model(again, tmp_path / "saved.safetensors")
    close(again(x), expected)
