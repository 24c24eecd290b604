"""Who may import whom, no circles, nothing too long, tests where the sources are: docs/architecture.md's rules, read
off the files."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("rewriter", "passes", "kernels", "runtime")
MOST_LINES, MOST_IN_FUNCTION, MOST_PARAMETERS = 400, 60, 9
# What each part may import of ours; None: everything. The longest prefix that fits a file counts.
MAY_IMPORT: dict[str, tuple[str, ...] | None] = {
    "forebay": None,
    "forebay.rewriter": ("forebay.rewriter", "forebay.kernels", "forebay.runtime.devices"),
    "forebay.rewriter.ir": ("forebay.rewriter.ir", "forebay.kernels.formats", "forebay.kernels.operator",
                            "forebay.kernels.operators"),
    "forebay.rewriter.pipeline": None,
    "forebay.serving": ("forebay.serving", "forebay.language_model", "forebay.drafting", "forebay.structured_output",
                        "forebay.commands.prompts", "forebay.images.chats", "forebay.images.parts",
                        "forebay.embedding", "forebay.commands.chat_template", "forebay.commands.process_memory",
                        "forebay.commands.terminal", "forebay.rewriter.ir", "forebay.runtime.run",
                        "forebay.session_file"),
    "forebay.rewriter.policy": ("forebay.rewriter.policy", "forebay.rewriter.predict", "forebay.rewriter.machine",
                                "forebay.rewriter.ir", "forebay.rewriter.planning.objective", "forebay.kernels"),
    "forebay.rewriter.serving": ("forebay.rewriter.serving", "forebay.rewriter.predict", "forebay.rewriter.machine",
                                 "forebay.rewriter.ir", "forebay.rewriter.partition"),
    "forebay.rewriter.partition": ("forebay.rewriter.partition", "forebay.rewriter.predict", "forebay.rewriter.machine",
                                   "forebay.rewriter.ir.byte_sizes", "forebay.rewriter.ir.program"),
    "forebay.passes": ("forebay.passes", "forebay.rewriter.ir", "forebay.kernels.operator", "forebay.kernels.operators",
                       "forebay.kernels.formats", "forebay.kernels.build"),
    "forebay.kernels": ("forebay.kernels",),
    "forebay.runtime": ("forebay.runtime", "forebay.kernels", "forebay.rewriter.ir", "forebay.rewriter.machine",
                        "forebay.rewriter.switches"),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef
WHY_LONG = re.compile(r"^\s*Long: \S+ \S+", re.MULTILINE)  # a line of the docstring of what is longer, with the reason


def sources() -> dict[str, Path]:
    """Every module of the package by name; the parts lie at the top of the repository."""
    inner = [p for part in PARTS for p in (ROOT / part).rglob("*.py")]
    public = ROOT / "src/forebay"
    face = [p for p in public.rglob("*.py") if p.relative_to(public).parts[0] not in PARTS]
    found = {}
    for path in (*inner, *face):
        parts = path.relative_to(public if path in face else ROOT).with_suffix("").parts
        found[".".join(("forebay", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


SOURCES = sources()


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules of ours that a tree imports, anywhere in it; a relative import is none that can be told."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level + (node.module or "")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "forebay":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in SOURCES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "forebay")


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def test_every_part_imports_only_what_it_may() -> None:
    broken = []
    for name, path in SOURCES.items():
        rule = max((p for p in MAY_IMPORT if within(name, (p,))), key=len)
        allowed = MAY_IMPORT[rule]
        if allowed is not None:
            broken += [f"{name} imports {other}" for other in imports(ast.parse(path.read_text()))
                       if not within(other, allowed)]
    assert len(SOURCES) > 150 and not broken, "\n".join(broken)


# Rooms that are read for themselves: only commands, benchmarks and each other may enter.
WINGS = ("forebay.rewriter.policy", "forebay.rewriter.serving", "forebay.rewriter.partition")
CORE = ("forebay.rewriter", "forebay.passes", "forebay.kernels", "forebay.runtime")


def test_the_core_imports_no_analytic_wing() -> None:
    entered = [f"{name} imports {other}" for name, path in SOURCES.items()
               if within(name, CORE) and not within(name, WINGS)
               for other in imports(ast.parse(path.read_text())) if within(other, WINGS)]
    assert all(any(within(name, (wing,)) for name in SOURCES) for wing in WINGS) and not entered
    assert all((ROOT / wing.removeprefix("forebay.").replace(".", "/") / "README.md").is_file() for wing in WINGS)


def test_modules_are_imported_by_statements() -> None:
    """Not by a string, which no rule sees; but for the public face, whose names are looked up when they are asked for
    (`src/forebay/__init__.py`), records of operators and devices, which their folders are searched for, and the kernels
    of an operator for GPUs, which stand beside its record."""
    called = [name for name, path in SOURCES.items() for node in ast.walk(ast.parse(path.read_text()))
              if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).split(".")[-1] in (
                  "import_module", "__import__", "exec")]
    assert set(called) == {"forebay", *FOUND_BY}


FOUND_BY = {"forebay.kernels.operators": r"forebay\.kernels\.\w+\.\w+\.operator",  # and the modules that they find
            "forebay.kernels.define": r"forebay\.kernels\.\w+\.\w+\.gpu",
            "forebay.runtime.devices.kinds": r"forebay\.runtime\.devices\.\w+\.kind"}


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports within functions and those that only a type checker sees count too."""
    graph = nx.DiGraph([(name, other) for name, path in SOURCES.items()
                        for other in imports(ast.parse(path.read_text())) if other in SOURCES])
    graph.add_edges_from((finder, name) for finder, found in FOUND_BY.items() for name in SOURCES
                         if re.fullmatch(found, name))
    assert graph.number_of_edges() > 500
    assert [c for c in nx.strongly_connected_components(graph) if len(c) > 1] == []


def names_of_types(tree: ast.Module) -> Iterator[str]:
    """Classes, at the top of a module or within, and the module's aliases of types."""
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (t.id for t in targets if isinstance(t, ast.Name) and re.fullmatch(r"_?[A-Z][a-z]\w*", t.id))


def test_a_name_means_one_type() -> None:
    """Classes and aliases of the package, public or not, and the benchmarks' classes."""
    found = [(name.lstrip("_"), module) for module, path in SOURCES.items()
             for name in set(names_of_types(ast.parse(path.read_text())))]
    found += [(node.name, str(path.relative_to(ROOT))) for path in (ROOT / "benchmarks").rglob("*.py")
              for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    homes: dict[str, list[str]] = {}
    for name, module in found:
        homes.setdefault(name, []).append(module)
    assert len(found) > 400 and not {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_fx_is_no_business_of_the_runtime() -> None:
    for name, path in SOURCES.items():
        if within(name, ("forebay.runtime",)):
            assert not [n for n in ast.walk(ast.parse(path.read_text())) if (isinstance(n, ast.ImportFrom)
                        and (n.module or "").startswith("torch.fx")) or (isinstance(n, ast.ImportFrom)
                        and n.module == "torch" and any(a.name == "fx" for a in n.names))], name


def says_why(node: ast.Module | Function) -> bool:
    return WHY_LONG.search(ast.get_docstring(node) or "") is not None


def test_kinds_of_devices_are_named_by_their_records() -> None:
    named = [name for name, path in SOURCES.items() for _ in re.findall(r'"(?:cuda|cpu)"', path.read_text())
             if not within(name, ("forebay.kernels", "forebay.runtime.devices"))]
    assert 0 < len(named) <= 5, named


def test_what_is_long_says_why() -> None:
    """Files and functions; what is not long gives no reason. (A kernel that Triton compiles is one function; a file of
    tests may be longer, as it is a list.)"""
    long, needless = [], []
    others = [path for folder in ("benchmarks", "examples", "tests") for path in (ROOT / folder).rglob("*.py")]
    for path in (*SOURCES.values(), *others):
        name, tree = path.relative_to(ROOT), ast.parse(path.read_text())
        listed = name.parts[0] == "tests" and name.name.startswith("test_")
        kinds = [(str(name), tree, len(path.read_text().splitlines()) > MOST_LINES and not listed)]
        for node in ast.walk(tree):
            if isinstance(node, Function) and "triton.jit" not in map(ast.unparse, node.decorator_list):
                lines = (node.end_lineno or 0) - node.lineno
                kinds.append((f"{name}: {node.name}", node, lines >= MOST_IN_FUNCTION))
        long += [what for what, node, is_long in kinds if is_long and not says_why(node)]
        needless += [what for what, node, is_long in kinds if not is_long and says_why(node)]
    assert not long, f"cut in two, or say why in a line of the docstring, 'Long: …': {long}"
    assert not needless, f"no longer long: {needless}"


def test_what_travels_together_is_a_record() -> None:
    """No function of a kernel takes more than nine parameters, but for operators' schemas, which are torch's, and for
    what Triton compiles, whose arguments are the launch."""
    wide, seen = [], 0
    for name, path in SOURCES.items():
        text = path.read_text()
        schemas = re.findall(r"define_operator\(\s*(\w+),", text)
        for node in ast.walk(ast.parse(text)) if within(name, ("forebay.kernels",)) else ():
            given = " ".join(map(ast.unparse, node.decorator_list)) if isinstance(node, Function) else "jit"
            if isinstance(node, Function) and node.name not in schemas and not re.search(
                    r"\bjit\b|custom_op|register_(kernel|fake)", given):
                seen += 1
                count = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
                wide += [f"{name}.{node.name}: {count}"] if count > MOST_PARAMETERS else []
    assert seen > 300 and not wide, wide


OF_THE_WHOLE = ("e2e", "extending", "faults")  # folders of tests that mirror no folder of sources


def test_tests_lie_as_their_sources_do() -> None:
    here = ROOT / "tests"
    files = [path.relative_to(here) for path in here.rglob("test_*.py")]
    inner = [path for path in files if len(path.parts) > 1 and path.parts[0] not in OF_THE_WHOLE]
    roots = {path: ROOT if path.parts[0] in (*PARTS, "benchmarks") else ROOT / "src/forebay" for path in inner}
    strays = [str(path) for path, root in roots.items() if not (root / path.parent).is_dir()]
    assert len(inner) > 100 and not strays


# Pages held to `WIDTH` with their tables; of others a row of a table may be longer, as it cannot be wrapped.
WIDTH, NARROW = 120, ("docs/architecture.md", "CONTRIBUTING.md")


def test_durations_are_of_files_that_exist() -> None:
    """Else a file that was given another name begins with those that nobody measured."""
    from selection import read_durations

    seconds = read_durations()
    assert seconds and not [name for name in seconds if not (ROOT / "tests" / name).is_file()]


def test_durations_of_files_that_did_not_run_whole_are_kept(tmp_path: Path) -> None:
    from selection import Durations, refuse_parts

    kept = tmp_path / "durations.json"
    for exitstatus, expected in ((2, 5.0), (1, 1.5)):
        kept.write_text(json.dumps({"test_pages.py": 5.0, "test_house.py": 7.0, "test_readme.py": 9.0, "gone.py": 1.0}))
        durations = Durations(kept)
        for file, seconds, failed in (("test_pages.py", 1.0, False), ("test_pages.py", 0.5, False),
                                      ("test_house.py", 3.0, True)):
            durations.pytest_runtest_logreport(
                SimpleNamespace(nodeid=f"tests/{file}::test_x", duration=seconds, failed=failed))  # type: ignore[arg-type]
        durations.pytest_sessionfinish(exitstatus)
        found = json.loads(kept.read_text())
        assert found["test_pages.py"] == expected and (found["test_house.py"], found["test_readme.py"]) == (7.0, 9.0)
    assert "gone.py" not in found
    whole = {"markexpr": "not all", "keyword": "", "lf": False}
    refuse_parts(SimpleNamespace(**whole), ["tests/e2e"])
    for changed, args in (({"markexpr": ""}, []), ({"keyword": "x"}, []), ({"lf": True}, []), ({}, ["a.py::test_b"])):
        with pytest.raises(pytest.UsageError, match="whole files"):
            refuse_parts(SimpleNamespace(**whole | changed), args)


def test_every_kind_of_test_has_tests() -> None:
    from selection import KIND_OF_PATH, KINDS, TESTS, kind_of

    assert not [name for name in KIND_OF_PATH if not (TESTS / name).exists()]
    kinds = {kind_of(path) for path in TESTS.rglob("test_*.py")}
    assert kinds == KINDS.keys() - {"all"}
    assert kind_of(TESTS / "runtime/run/test_batch_slots.py") == "e2e" and kind_of(TESTS / "test_house.py") == "static"


def test_what_make_test_leaves_out_is_listed() -> None:
    """Each test that only make test-all runs has a row, which says what make test has in its place."""
    page = (ROOT / "docs/testing.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\S+::\w+)` \| \S+", page, re.MULTILINE))
    marked = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "pytest.mark.all" in map(ast.unparse, node.decorator_list):
                marked.add(f"{path.relative_to(ROOT / 'tests')}::{node.name}")
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                assert "mark.all" not in ast.unparse(node.value), f"{path}: mark each test, so that the page names it"
    assert len(marked) > 20 and listed == marked


def test_a_covering_sample_has_every_pair() -> None:
    from selection import covering, without

    choices = ("abcd", "xyz", (1, 2), (True, False))
    every = list(itertools.product(*choices))
    sample = [every[i] for i in covering(every, 2)]
    assert len(sample) < len(every) / 3
    for (i, some), (k, others) in itertools.combinations(enumerate(choices), 2):
        assert {(cell[i], cell[k]) for cell in sample} == set(itertools.product(some, others))
    few = [every[i] for i in covering(every, 1)]
    assert [{cell[i] for cell in few} for i in range(4)] == [set(some) for some in choices] and len(few) == 4
    assert sum(case in every for case in without(every, sample)) == len(every) - len(sample)
    for left in (["a case that is none of all"], every, []):
        with pytest.raises(AssertionError):
            without(every, left)


def test_pages_are_wrapped() -> None:
    pages = [page for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "passes/README.md")
             if page.name != "coverage.md"]  # which a benchmark writes
    wide = [f"{page.relative_to(ROOT)}:{i}" for page in pages
            for i, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
            if len(line) > WIDTH and (str(page.relative_to(ROOT)) in NARROW or not line.startswith("|"))]
    assert len(pages) > 8 and not wide


# Who imports transformers within a function all the same: a process of its own, and what `capture_model` calls.
IN_TURN = ("forebay.commands.render_chats", "forebay.rewriter.capture.own_attention",
           "forebay.rewriter.capture.recurrent_families", "forebay.rewriter.capture.language_model")


def test_transformers_is_loaded_by_one_thread_at_a_time() -> None:
    """Its modules take each other's place while they are loaded. Modules that import it at their top are imported by
    such functions."""
    alone, seen = [], 0
    for name, path in SOURCES.items():
        tree = ast.parse(path.read_text())
        for function in [node for node in ast.walk(tree) if isinstance(node, Function)]:
            held = [inner for node in ast.walk(function) if isinstance(node, ast.With)
                    and any(ast.unparse(item.context_expr) == "ONE_THREAD" for item in node.items)
                    for inner in ast.walk(node)]
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
                    seen += 1
                    taken = "one_thread" in map(ast.unparse, function.decorator_list) or node in held
                    alone += [] if taken or name in IN_TURN else [f"{name}:{node.lineno}"]
    assert seen > 15 and not alone, alone


# Who opens files for reading by itself, and why that is safe; all others use `forebay.rewriter.ir.files`.
READ_BY_THEMSELVES = {
    "forebay.rewriter.ir.files": "the one place",
    **dict.fromkeys(("forebay.rewriter.checkpoints.checkpoint", "forebay.rewriter.checkpoints.identity",
                     "forebay.rewriter.checkpoints.gguf_tensors", "forebay.rewriter.checkpoints.gguf_values",
                     "forebay.exported.source",
                     "forebay.runtime.disk.open_file", "forebay.runtime.disk.page_cache"),
                    "weights, whose header was read there before"),
    "forebay.commands.plain_tokenizer": "the folder is looked through first",
    **dict.fromkeys(("forebay.rewriter.checkpoints.packed", "forebay.rewriter.checkpoints.resolve",
                     "forebay.rewriter.checkpoints.conversions", "forebay.kernels.build.cache_folder",
                     "forebay.drafts_seen"), "the user's own cache folder"),
    **dict.fromkeys(("forebay.rewriter.checkpoints.module_weights", "forebay.kernels.build.process_limits",
                     "forebay.kernels.build.processors",
                     "forebay.runtime.measure.neighbours", "forebay.runtime.measure.kept",
                     "forebay.runtime.comm.loops", "forebay.commands.process_memory"), "files of the kernel"),
    **dict.fromkeys(("forebay.rewriter.checkpoints.packed_writer", "forebay.runtime.disk.spill_file",
                     "forebay.runtime.disk.temporary", "forebay.commands.jobs", "forebay.kernels.build.for_wheel"),
                    "what it writes itself"),
    "forebay.rewriter.checkpoints.named_errors": "a file in memory, of its own",
    "forebay.commands.papers": "the page that `make papers` writes",
    **dict.fromkeys(("forebay.kernels.products.linear.selection", "forebay.serving.web_page",
                     "forebay.kernels.build.library", "forebay.kernels.build.prebuilt"), "installed with the package"),
}


def test_files_of_others_are_opened_in_one_place() -> None:
    """There a pipe, a device and a socket are refused. Opened to be written does not count."""
    found = set()
    for name, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            mode = "".join(str(each.value) for each in [*node.args[1:2], *(k.value for k in node.keywords if k.arg
                           == "mode")] if isinstance(each, ast.Constant))
            if called.split(".")[-1] in ("read_text", "read_bytes", "from_file", "fromfile", "memmap") or (
                    called in ("open", "io.open", "os.open") and not set(mode) & set("wax")
                    and not any(word in ast.unparse(node) for word in ("WRONLY", "devnull", "(draft, "))):
                found.add(name)
    assert found == set(READ_BY_THEMSELVES)


def test_cores_and_memory_are_asked_for_in_one_place() -> None:
    """There a container's limits count. `neighbours` wants to know which cores they are, and not how many."""
    asking = set()
    for name, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if (isinstance(node, ast.Attribute) and node.attr in ("cpu_count", "process_cpu_count", "sched_getaffinity",
                                                                  "virtual_memory")) or (
                    isinstance(node, ast.Constant) and isinstance(node.value, str)
                    and node.value.startswith(("MemAvailable", "MemFree", "MemTotal", "SC_AVPHYS", "SC_PHYS",
                                               "SC_NPROCESSORS"))):
                asking.add(name)
    assert asking == {"forebay.kernels.build.process_limits", "forebay.runtime.measure.neighbours"}


# Who reads the environment: the cache folder, the compiler, the switches, how threads wait, what torchrun says; the
# command line sets it.
READ_ENVIRONMENT = {"forebay.kernels.build.cache_folder", "forebay.kernels.build.compile", "forebay.rewriter.switches",
                    "forebay.runtime.devices.cpu.device", "forebay.runtime.comm.launched", "forebay.commands.cli"}


def test_what_exists_once_exists_once() -> None:
    """The cache folder, the page, the alignment of buffers, and who reads the environment."""
    reads, homes, pages = set(), [], []
    for name, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                reads.add(name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("~/"):
                homes.append(name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                pages += [(name, target.id) for target in targets if isinstance(target, ast.Name)
                          and re.fullmatch(r"_?(PAGE|PAGE_\w+|ALIGNMENT)", target.id)]
    assert reads == READ_ENVIRONMENT and homes == ["forebay.kernels.build.cache_folder"]
    assert sorted(pages) == [("forebay.rewriter.ir.alignment", "ALIGNMENT"),
                             ("forebay.rewriter.ir.alignment", "PAGE_NBYTES")], pages
