"""Weights that torch.compile hands to no backend: the first call says which, and why; `strict` raises."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.backend import forebay_backend
from forebay.rewriter.capture.compiled_module import OffloadError

X = torch.linspace(-1, 1, 2 * 5 * 24).view(2, 5, 24)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Also shows that the watch outlives torch._dynamo.reset(), which drops all callbacks."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield


class Disabled(nn.Linear):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class First(nn.Module):
    """Of what the inner module returns, the first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Linear(24, 24), nn.LSTM(24, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, _ = self.lstm(torch.relu(self.embed(x)))
        return self.head(found)


def _options(folder: Path, **more: Any) -> dict[str, Any]:
    return {"budget": {"device": "256KiB", "disk": str(folder)}, **more}


def _said(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in said if "of weights stay in memory" in str(w.message)]


MODULES = {
    "LSTM": (lambda: First(nn.LSTM(24, 24)), "inner is of type LSTM"),
    "GRU": (lambda: First(nn.GRU(24, 24, 2)), "inner is of type GRU"),
    "RNN": (lambda: First(nn.RNN(24, 24)), "inner is of type RNN"),
    "disabled forward": (lambda: nn.Sequential(nn.Linear(24, 24), Disabled(24, 24)), "1 is marked by torch.compiler"),
    "disabled module": (lambda: nn.Sequential(torch.compiler.disable(nn.Linear(24, 24))), "0 is marked by torch.comp"),
    "disabled root": (lambda: Disabled(24, 24), "the module is marked by torch.compiler.disable"),
    "script": (lambda: nn.Sequential(nn.ReLU(), torch.jit.trace(nn.Linear(24, 24), X)), "1 is TorchScript"),
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_first_call_says_so_once(kind: str, tmp_path: Path) -> None:
    make, reason = MODULES[kind]
    module = make()
    run = torch.compile(module, backend="forebay", options=_options(tmp_path))
    found: list[torch.Tensor] = []
    said = _said(lambda: found.append(run(X)))
    assert len(said) == 1 and reason in said[0] and "outside the budget" in said[0]
    assert torch.equal(found[0], module(X))
    assert not _said(lambda: run(X)) and not _said(lambda: run(torch.cat((X, X), 1))), "once is enough"
    assert not forebay.is_offloaded(module)
    kept = forebay.offload_report(module).kept
    assert any(why.startswith(reason.split(" is ")[1]) for why in kept.values())


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_strict_raises(kind: str, tmp_path: Path) -> None:
    make, reason = MODULES[kind]
    run = torch.compile(make(), backend="forebay", options=_options(tmp_path, strict=True))
    with pytest.raises(OffloadError, match=reason):
        run(X)


def test_all_that_is_left_is_counted(tmp_path: Path) -> None:
    """What Dynamo hands over beside the LSTM moves; the bytes that are named are those that did not."""
    module = Tagger()
    said = _said(lambda: torch.compile(module, backend="forebay", options=_options(tmp_path))(X))
    left = sum(p.numel() * 4 for name, p in module.named_parameters() if name in forebay.offload_report(module).kept)
    assert left >= sum(p.numel() * 4 for p in module.lstm.parameters())
    assert f"{left / 1024:.1f} KiB" in said[0] and "lstm is of type LSTM" in said[0]


def test_a_module_compiled_in_place(tmp_path: Path) -> None:
    module = First(nn.LSTM(24, 24))
    module.compile(backend="forebay", options=_options(tmp_path))
    assert "LSTM" in _said(lambda: module(X))[0]


def test_a_function_that_names_a_module(tmp_path: Path) -> None:
    module = First(nn.LSTM(24, 24))
    run = torch.compile(lambda x: module(x) + 1, backend="forebay", options=_options(tmp_path))
    assert "LSTM" in _said(lambda: run(X))[0]


def test_the_backend_as_a_partial(tmp_path: Path) -> None:
    bound = functools.partial(forebay_backend, options=_options(tmp_path, strict=True))
    with pytest.raises(OffloadError, match="LSTM"):
        torch.compile(First(nn.LSTM(24, 24)), backend=bound)(X)


def test_while_an_exception_is_handled(tmp_path: Path) -> None:
    """The caller's own exception is not taken for a failure of the call; a failing call is left to fail."""
    run = torch.compile(First(nn.LSTM(24, 24)), backend="forebay", options=_options(tmp_path))
    try:
        raise KeyError
    except KeyError:
        assert len(_said(lambda: run(X))) == 1
    with pytest.raises(RuntimeError, match=r"size|dimension"):
        torch.compile(First(nn.LSTM(24, 24)), backend="forebay", options=_options(tmp_path, strict=True))(X[..., :3])


def test_recurrent_modules_stream_where_dynamo_takes_them(tmp_path: Path) -> None:
    """What the warning advises works: nothing is said, all moves, results are eager's."""
    module = Tagger()
    wanted = module(X)
    run = torch.compile(module, backend="forebay", options=_options(tmp_path, strict=True))
    found: list[torch.Tensor] = []
    with torch._dynamo.config.patch(allow_rnn=True):
        assert not _said(lambda: found.extend((run(X), run(X))))
    assert forebay.is_offloaded(module)
    assert all(torch.allclose(ours, wanted, rtol=1e-5, atol=1e-6) for ours in found)


def test_nothing_is_said_of_others(tmp_path: Path) -> None:
    """Of another backend's modules, of one that is handed over, and of one that is handed over in part at first."""
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(24, 24), nn.Linear(24, 24)

        def forward(self, x: torch.Tensor, second: bool = False) -> torch.Tensor:
            return self.b(x) if second else self.a(x)

    assert not _said(lambda: torch.compile(First(nn.LSTM(24, 24)), backend="eager")(X))
    either = torch.compile(Either(), backend="forebay", options=_options(tmp_path, strict=True))
    assert not _said(lambda: (either(X), either(X, True)))
    assert not _said(lambda: torch.compile(nn.ReLU(), backend="forebay", options=_options(tmp_path, strict=True))(X))
