"""The page of options says what the table says, and the command line and `wrap` have what both say."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from typer.main import get_command

import forebay
from forebay.commands.app import app
from forebay.rewriter.planning.options import GROUPS, OPTIONS, Options, PlanError, make_options
from forebay.rewriter.report.options_page import options_page

ROOT = Path(__file__).parents[3]
PLANNING = ("run", "chat", "serve", "plan", "export", "calibrate")  # `eval` reads its options by itself


def test_the_page_is_the_table() -> None:
    assert (ROOT / "docs/options.md").read_text(encoding="utf-8") == options_page(), (
        "python -m forebay.rewriter.report.options_page > docs/options.md")
    assert {record.group for record in OPTIONS.values()} == {*GROUPS}


def test_the_command_line_has_pythons_names() -> None:
    taken = set()
    for name in PLANNING:
        words = {param.name: param.opts for param in get_command(app).commands[name].params}  # type: ignore[attr-defined]
        own = {option for option in words if option in OPTIONS and words[option][0].startswith("--")}
        assert own, name
        assert all(words[option] == [f"--{option.replace('_', '-')}"] for option in own), name
        taken |= own
    assert taken == {*OPTIONS}


def test_wrap_has_each_option_as_a_keyword_and_says_what_it_is() -> None:
    *_, options = (name for name, each in inspect.signature(forebay.wrap).parameters.items()
                   if each.kind is not each.KEYWORD_ONLY)
    keywords = [name for name, each in inspect.signature(forebay.wrap).parameters.items()
                if each.kind is each.KEYWORD_ONLY]
    assert options == "options" and keywords == [*OPTIONS]
    said = " ".join((forebay.wrap.__doc__ or "").split())
    assert all(f"{name} ({record.kind.words}): {record.help}" in said for name, record in OPTIONS.items())


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_refuses_what_is_no_value_of_it_by_its_name(name: str) -> None:
    record = OPTIONS[name]
    if name != "mesh":  # read with the ranks that there are
        with pytest.raises(PlanError, match=f"^{name}\\b"):
            make_options({name: object()})
    assert make_options({name: record.default}) == Options() and name not in Options().forced()


@pytest.mark.parametrize(("name", "word", "value"), [
    ("batch", "3", 3), ("typical", "200,50", (200, 50)), ("cache_shares", "0.5,0.25", (0.5, 0.25)),
    ("kv_blocks", "0.1", 0.1), ("prompt_lookup_num_tokens", "auto", "auto"), ("prompt_lookup_num_tokens", "4", 4),
    ("prompt_lookup_num_tokens", "none", None), ("slot_nbytes", "1MiB", 1 << 20), ("checkpoints", "2,3", (2, 3)),
    ("machine", "t4", None), ("draft", "w4", "w4")])
def test_a_word_of_the_command_line_means_a_value(name: str, word: str, value: object) -> None:
    found = getattr(make_options({name: OPTIONS[name].kind.parse(word)}), name)
    assert found.name == "t4" if name == "machine" else found == value


@pytest.mark.parametrize(("name", "word"), [("batch", "many"), ("batch", "-1"), ("typical", "3"),
                                            ("cache_shares", "a,b"), ("kv_blocks", "x"), ("slot_nbytes", "x"),
                                            ("cache", "kv3")])
def test_a_word_that_means_none_is_refused_as_in_python(name: str, word: str) -> None:
    with pytest.raises(PlanError, match=f"^{name}\\b"):
        make_options({name: OPTIONS[name].kind.parse(word)})
