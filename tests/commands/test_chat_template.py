"""Chats are rendered as transformers renders them, and a template that never ends, or takes all memory, is left."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import ClassVar

import pytest
from selection import at_length
from serving.served import save_model
from typer.testing import CliRunner

from forebay.commands import chat_template, render_chats
from forebay.commands.app import app
from forebay.commands.chat_template import ChatTemplate, TemplateError
from forebay.commands.prompts import BadLine, PromptLine, encode

CHAT = [{"role": "user", "content": "hé\n\"llo\" <b>"}, {"role": "assistant", "content": "fine"}]
CHATML = ("{%- for m in messages %}{{ bos_token if loop.first }}<|{{ m.role }}|>{{ m['content'] | trim }}"
          "{{ m | tojson }}{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")


class Tokenizer:
    special_tokens_map: ClassVar = {"bos_token": "<s>", "eos_token": "</s>"}

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def get_chat_template(self) -> str:
        return self.chat_template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TIME_S", 0.3)


def test_chats_are_rendered_as_by_transformers() -> None:
    from tokenizers import Tokenizer as Raw
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    raw = Raw(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")
    for template in (CHATML, {"default": CHATML, "tool_use": "x"}):
        tokenizer.chat_template = template  # type: ignore[assignment]
        with ChatTemplate(tokenizer) as rendered:
            for _ in range(2):
                assert rendered.render(CHAT) == tokenizer.apply_chat_template(CHAT, tokenize=False,
                                                                              add_generation_prompt=True)


NAMED = ("{%- set ns = namespace(last=none) %}{% for m in messages -%}\n  {% if m.role == 'user' %}\n"
         "{% set ns.last = m %}{% endif %}{% if loop.index > 9 %}{% break %}{% endif %}\n{% endfor %}"
         "{{ ns.last | tojson(indent=2) }}{{ tools | tojson }}{{ strftime_now('%Y') }}{{ documents is none }}"
         "{{ enable_thinking }}{{ 'é<b>' | tojson }}")


@pytest.mark.parametrize(("template", "more", "alone"), [
    (CHATML, {}, True), (NAMED, {}, True), (CHATML, {"reasoning_content": "deep"}, False),
    ("{{ messages[0]._x }}", {}, False), ("{{ dict(a=1) }}", {}, False),
    ("{% generation %}{{ messages[0].content }}{% endgeneration %}", {}, False)])
def test_templates_need_transformers_only_where_it_may_give_something_else(
    template: str, more: dict[str, str], alone: bool
) -> None:
    job = {"template": template}
    given: tuple = [CHAT[0] | more, CHAT[1]], [{"type": "function"}], {"enable_thinking": False, "bos_token": "<s>"}
    jinja, text = render_chats._by_jinja(job), None
    if jinja is not None:
        with contextlib.suppress(Exception):
            text = jinja(*given)
    assert text == (render_chats._by_transformers(job)(*given) if alone else None)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" * 3


@pytest.mark.parametrize("template", [
    ENDLESS, at_length("{{ range(99999) | map('string') | map('length') | list | sum * 0 }}" + ENDLESS),
    at_length("{% for a in range(9999) %}{{ 'x' * (a * 99999) }}{% endfor %}")])
def test_a_template_that_does_not_end_is_left(quick: None, template: str) -> None:
    bad_first = "{% if messages[0].content == 'slow' %}" + template + "{% endif %}<{{ messages[0].content }}>"
    with ChatTemplate(Tokenizer(bad_first)) as rendered:
        with pytest.raises(TemplateError, match=r"does not end within 0.3 s|more than"):
            rendered.render([{"role": "user", "content": "slow"}])
        assert rendered.render([{"role": "user", "content": "quick"}]) == "<quick>"  # the others are answered


def test_no_more_are_tried_after_some_that_did_not_end(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TIME_S", 0.1)
    asked = [PromptLine(i, i, messages=CHAT) for i in range(1, 50)]
    prompts, bad = encode(asked, Tokenizer(ENDLESS), chat=True, vocab_size=999)
    assert not prompts and len(bad) == 49
    assert bad[0] == BadLine(1, "the chat template refuses these messages: it does not end within 0.1 s")
    assert "3 others did not end" in bad[3].reason and "3 others did not end" in bad[48].reason


@pytest.mark.parametrize(("template", "part"), [
    ("{{ 'x' * 40000000 }}", "writes 40000000 characters"), ("{{ 'x' * 10000000000 }}", "MiB of memory"),
    ("{{ raise_exception('no robots') }}", "no robots"), ("{{ unknown.field }}", "undefined"),
    ("{% for %}", "Expected an expression|unexpected"), ("{{ ''.__class__.__mro__ }}", "unsafe|undefined"),
    ("{{ 1 // 0 }}", "division"), ("{{ messages.append(1) }}", "unsafe"), ("{" * 300, "."),
])
def test_what_a_template_may_not_do_is_said_in_one_line(template: str, part: str) -> None:
    with ChatTemplate(Tokenizer(template)) as rendered:
        with pytest.raises(TemplateError, match=part) as caught:
            rendered.render(CHAT)
        assert "\n" not in str(caught.value)


SYSTEM_AND_USER = ("{% for m in messages %}{% if m.role in ['system', 'user'] %}[{{ m.role }}]{{ m.content }}"
                   "{% endif %}{% endfor %}[assistant]")
SYSTEM_FIRST = ("{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('late') }}"
                "{% endif %}{% endif %}{{ m.role }}:{{ m.content | trim }};{% endfor %}")


def chat(*said: str) -> list[dict[str, str]]:
    """Messages given as "role: content"."""
    return [dict(zip(("role", "content"), each.split(": "), strict=True)) for each in said]


@pytest.mark.parametrize(("template", "messages", "number"), [
    (SYSTEM_AND_USER, chat("User: hi"), 0), (SYSTEM_AND_USER, chat("user: hi", "tool: 3"), 1),
    (SYSTEM_AND_USER, chat("tool: user", "user: hi"), 0),  # the word stands in the text anyway
    (SYSTEM_AND_USER, chat("tool: same", "user: same"), 0),
    (SYSTEM_FIRST.replace("{{ m.content | trim }}", "{{ m.content[:4] }}"), chat("user: be brief"), 0),
    ("{{ messages[-1].content }}", chat("user: one", "assistant: two", "user: three"), 0),
    ("{{ messages[0].content }}{% if messages[0].content != 'hi' %}{{ raise_exception('no') }}{% endif %}",
     chat("user: hi", "user: ho"), 1),
])
def test_a_message_that_the_template_leaves_out_is_refused(
    template: str, messages: list[dict[str, str]], number: int
) -> None:
    with ChatTemplate(Tokenizer(template)) as rendered, pytest.raises(
            TemplateError, match=rf"leaves out messages\[{number}\], of role '{messages[number]['role']}'"):
        rendered.render(messages)


def test_contents_that_the_template_changes_are_not_missing() -> None:
    """Trimmed, escaped, in another order, upper case, without the reasoning before an answer, or empty."""
    template = ("{% set rest = messages[1:] if messages[0].role == 'system' else messages %}{% for m in rest %}"
                "{% if m.role == 'tool' %}{{ m.content | tojson }}{% elif m.role == 'assistant' %}"
                "{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content | upper | trim }}{% endif %}|"
                "{% endfor %}{{ messages[0].content if rest | length < messages | length }}")
    messages = chat("system: be brief", "user:  hi ", 'tool: a "b"\n', "assistant: <think>no</think> yes",
                    "assistant: ")
    with ChatTemplate(Tokenizer(template)) as rendered:
        assert rendered.render(messages) == 'HI|"a \\"b\\"\\n"|yes||be brief'


@pytest.mark.parametrize(("template", "text"), [
    (SYSTEM_AND_USER, "[system]be brief[user]hi[assistant]"), (SYSTEM_FIRST, "system:be brief;user:hi;"),
    (SYSTEM_FIRST + "for developers", "system:be brief;user:hi;for developers"),
    (SYSTEM_FIRST + "{% if messages[0].role == 'developer' %}!{% endif %}", "developer:be brief;user:hi;!"),
    (SYSTEM_FIRST + '{% if messages[0].role == "developer" %}!{% endif %}', "developer:be brief;user:hi;!"),
])
def test_the_role_developer_is_system_where_the_template_does_not_name_it(template: str, text: str) -> None:
    with ChatTemplate(Tokenizer(template)) as rendered:
        assert rendered.render(chat("developer: be brief", "user: hi")) == text


def test_nothing_is_left_running() -> None:
    rendered = ChatTemplate(Tokenizer(CHATML))
    rendered.render(CHAT)
    process = rendered._process
    assert isinstance(process, subprocess.Popen) and Path(f"/proc/{process.pid}").exists()
    rendered.close()
    assert process.poll() is not None
    rendered.close()


@pytest.mark.parametrize("command", [["run", "MODEL", "hi", "--chat"], ["chat", "MODEL"]])
def test_every_command_renders_within_the_limits(tmp_path: Path, command: list[str]) -> None:
    save_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ '%1000000000d' % 1 }}")
    given = [str(tmp_path) if word == "MODEL" else word for word in command]
    found = CliRunner().invoke(app, [*given, "--budget", "9MB", "--new-tokens", "4"], input="hi\n")
    assert found.exit_code == 2 and "it takes more than 1024 MiB of memory" in " ".join(found.stderr.split())
