"""What torch.compile's backend does not take: said once, remembered, reported, and as eager does it."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from fresh_dynamo import fresh  # noqa: F401
from torch import nn

import forebay
import forebay.backend as backend

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*lies in memory"), pytest.mark.filterwarnings("ignore:OpenMP threads spin"),
    pytest.mark.filterwarnings("ignore:.*CSR"), pytest.mark.filterwarnings("ignore:.*nested")]
SAID = "forebay: this graph is not offloaded"


def options(folder, nbytes: int = 1 << 20, **more: object) -> dict:
    return {"budget": {"device": nbytes, "disk": str(folder)}, **more}


class After(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(40, 40), function

    def forward(self, x):
        return self.function(self.linear(x))


def test_a_refusal_that_will_not_change_is_captured_once(tmp_path, monkeypatch) -> None:
    calls = []
    real = backend.capture_module
    monkeypatch.setattr(backend, "capture_module", lambda *args: calls.append(0) or real(*args))
    module = After(lambda y: torch.fft.fft(y).conj().real)
    run = torch.compile(module, backend="forebay", options=options(tmp_path))
    x = torch.randn(3, 40)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(run(x), module(x))
    assert len(calls) == 1 and sum(str(w.message).startswith(SAID) for w in said) == 1


def test_any_error_of_the_pipeline_is_remembered_unless_it_may_pass(tmp_path, monkeypatch) -> None:
    for error, tries in ((ValueError("zip() argument 2 is shorter"), 1), (OSError(28, "No space left"), 3),
                         (RuntimeError("can't allocate memory: you tried to allocate 9 bytes"), 3)):
        torch._dynamo.reset()
        calls = []

        def fails(*args: object, error: Exception = error, calls: list = calls) -> None:
            calls.append(0)
            raise error

        monkeypatch.setattr(backend, "capture_module", fails)
        module = After(torch.relu)
        run = torch.compile(module, backend="forebay", options=options(tmp_path))
        with pytest.warns(RuntimeWarning, match=SAID):
            for _ in range(3):
                run(torch.randn(3, 40))
        assert len(calls) == tries, error


@pytest.mark.parametrize("make", [
    lambda: torch.eye(40).to_sparse_csr(),
    lambda: torch.nested.nested_tensor([torch.randn(2, 40), torch.randn(3, 40)], layout=torch.jagged),
], ids=["CSR", "jagged"])
def test_inputs_without_plain_data_fall_back(make, tmp_path) -> None:
    """Dynamo keeps most such inputs to itself; a graph that is handed one runs as it is."""
    linear, x = nn.Linear(40, 40), make()
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("x", "weight")]
    graph.output((graph.call_function(torch.matmul, tuple(inputs)),))
    gm = torch.fx.GraphModule({}, graph)
    given = backend.parse_options(options(tmp_path))
    offloaded = backend.OffloadedGraph(gm, {1: "weight"}, given, backend.Memory(given))
    with pytest.warns(RuntimeWarning, match="input 0 is a .* without plain strided data"):
        (found,) = offloaded(x, linear.weight)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="forebay")
        offloaded(x, linear.weight)
    wanted = x @ linear.weight
    wanted, found = (t.values() if t.is_nested else t for t in (wanted, found))
    assert torch.equal(found, wanted)


def test_what_dynamo_leaves_to_python_is_in_the_report(tmp_path) -> None:
    """LSTMs and what is disabled are never handed over: they do not move, and the report says why."""
    class Kept(nn.Linear):
        @torch.compiler.disable
        def forward(self, x):
            return super().forward(x)

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.head = nn.Linear(40, 40), nn.LSTM(40, 40), nn.Linear(40, 40)
            self.disabled = Kept(40, 40)

        def forward(self, x):
            return self.head(self.disabled(self.lstm(torch.relu(self.embed(x)))[0]))

    module = Tagger()
    assert not forebay.is_offloaded(module)
    run = torch.compile(module, backend="forebay", options=options(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(torch.randn(5, 40))
    report = forebay.offload_report(module)
    assert not forebay.is_offloaded(module)
    assert {name for name, _ in module.lstm.named_parameters("lstm")} <= set(report.kept)
    assert {"disabled.weight", "disabled.bias"} <= set(report.kept)
    assert "of type LSTM, which torch.compile leaves to Python" in str(report) and "not moved: " in str(report)


def test_an_operator_that_checks_for_errors_is_refused_in_words(tmp_path) -> None:
    """The trace has inputs that the call has not: this was `zip() argument 2 is shorter`."""
    module, x = After(lambda y: torch.linalg.lu_factor(y)[0]), torch.randn(40, 40)
    run = torch.compile(module, backend="forebay", options=options(tmp_path))
    with pytest.warns(RuntimeWarning, match=f"{SAID}.*effects other than their results"):
        assert torch.equal(run(x), module(x))


def test_bags_of_embeddings_run_eagerly(tmp_path) -> None:
    """Their meta kernel gives sizes that no memory can be planned by: the first call ended in a RuntimeError."""
    module, x = nn.EmbeddingBag(40, 8), torch.arange(48).view(6, 8) % 40
    run = torch.compile(module, backend="forebay", options=options(tmp_path))
    with pytest.warns(RuntimeWarning, match=f"{SAID}.*embedding_bag.* has results of other sizes"):
        assert torch.equal(run(x), module(x))


def test_the_report_has_the_reason_of_a_refusal(tmp_path) -> None:
    module = After(lambda y: torch.fft.fft(y).conj().real)
    with pytest.warns(RuntimeWarning, match="conjugation"):
        torch.compile(module, backend="forebay", options=options(tmp_path))(torch.randn(3, 40))
    report = forebay.offload_report(module)
    assert not report.moved and all("conjugation" in reason for reason in report.kept.values())


def test_a_whole_module_is_offloaded(tmp_path) -> None:
    module = After(torch.relu)
    torch.compile(module, backend="forebay", options=options(tmp_path))(torch.randn(3, 40))
    assert forebay.is_offloaded(module) and not forebay.offload_report(module).kept


def test_first_calls_from_several_threads(tmp_path) -> None:
    """Capture and Dynamo patch the same things while they trace."""
    modules = [After(f) for f in (torch.relu, torch.tanh, torch.sigmoid, torch.sin)]
    runs = [torch.compile(m, backend="forebay", options=options(tmp_path, strict=True)) for m in modules]
    x, found, failed = torch.randn(3, 40), {}, []
    wanted = [m(x) for m in modules]
    together = threading.Barrier(len(runs))

    def call(i: int) -> None:
        try:
            with torch.no_grad():
                together.wait()
                found[i] = runs[i](x)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert all(torch.allclose(found[i], w, atol=1e-6) for i, w in enumerate(wanted))


def test_capture_holds_the_lock_of_dynamo(tmp_path, monkeypatch) -> None:
    real = backend.capture_module
    held = []

    def capture(*args):
        thread = threading.Thread(target=lambda: held.append(not backend.compile_lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        return real(*args)

    monkeypatch.setattr(backend, "capture_module", capture)
    torch.compile(After(torch.relu), backend="forebay", options=options(tmp_path))(torch.randn(3, 40))
    assert held == [True]


def test_a_mode_is_answered() -> None:
    run = torch.compile(After(torch.relu), backend="forebay", mode="max-autotune")
    with pytest.raises(Exception, match="mode='max-autotune' is for torch's own compiler"):
        run(torch.randn(3, 40))


def test_replacing_a_parameter_does_not_blame_the_options(tmp_path) -> None:
    module = After(torch.relu)
    run, x = torch.compile(module, backend="forebay", options=options(tmp_path)), torch.randn(3, 40)
    run(x)
    old = module.linear.weight
    module.linear.weight = nn.Parameter(torch.randn(40, 40))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="forebay")
        assert torch.allclose(run(x), torch.relu(x @ module.linear.weight.T + module.linear.bias), atol=1e-5)
    assert old.shape == (40, 40)


@pytest.mark.parametrize("norm", [torch.native_batch_norm, torch._native_batch_norm_legit])
def test_statistics_that_only_meta_tensors_have_run_eagerly(norm, tmp_path) -> None:
    """A CPU gives empty ones where it does not train: the first call ended in a RuntimeError about sizes."""
    mean, variance = torch.rand(40), torch.rand(40) + 0.5
    module, x = After(lambda y: norm(y, None, None, mean, variance, False, 0.1, 1e-5)), torch.randn(5, 40)
    run = torch.compile(module, backend="forebay", options=options(tmp_path))
    with pytest.warns(RuntimeWarning, match=f"{SAID}.*batch_norm.* has results of other sizes"):
        found = run(x)
    assert all(map(torch.equal, found, module(x)))


def test_making_a_plan_draws_none_of_the_run_s_numbers(tmp_path) -> None:
    """Under one seed the first call gives what eager gives, and leaves the generator where eager does."""
    module, x = After(lambda y: nn.functional.fractional_max_pool2d(
        y.view(-1, 1, 8, 5), 2, output_size=(3, 2))), torch.randn(3, 40)
    run = torch.compile(module, backend="forebay", options=options(tmp_path, strict=True))
    results = []
    for call in (module, run, run):
        torch.manual_seed(1)
        results.append((call(x), torch.rand(4)))
    assert all(torch.allclose(found, results[0][0]) and torch.equal(after, results[0][1]) for found, after in results)


def test_an_operator_that_gives_a_list_is_refused_in_words(tmp_path) -> None:
    """The edges of histogramdd: this was `'list' object has no attribute 'dtype'`."""
    module, x = After(lambda y: torch.histogramdd(y[:, :2], [3, 3]).hist), torch.randn(9, 40)
    run = torch.compile(module, backend="forebay", options=options(tmp_path))
    with pytest.warns(RuntimeWarning, match=f"{SAID}.*a list of tensors"):
        assert torch.equal(run(x), module(x))
