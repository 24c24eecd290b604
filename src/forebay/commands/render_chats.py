"""A process that renders chats by a template, a program that came with the model: one line of JSON in, one out.

Run as a file, without the package, which would import torch. The first line of stdin gives the template, the special
tokens that it may name, and the limits; each further line the messages of a chat, and what the template is told beside
them. A line of stdout is ["text", …] or ["error", …]. A chat that takes longer than its time ends the process.

A chat that a template refuses, or leaves a message out of, is tried again with system messages in front of the next one
of the user, and with neighbors of one role as one. Tools that a template has no word for are described as Hermes has
them.
"""

import datetime
import functools
import json
import re
import resource
import secrets
import signal
import sys
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]
RenderChat = Callable[[Messages, "list[Any] | None", dict[str, Any]], str]
RESERVED = {"conversations", "messages", "tools", "documents", "chat_template", "return_assistant_tokens_mask",
            "continue_final_message", "add_generation_prompt"}
SAFE_JINJA = 3, 1, 6  # those before it let templates out of the sandbox
HARDENED = re.compile(r"\b_|\*\*|\bdict\b")  # where transformers guards more than jinja2's sandbox does
REASONING = {"reasoning_content", "thinking", "reasoning"}
TOOLS = """You may call functions to help with the request. Their signatures:
<tools>
{}
</tools>
For each call return a JSON object with its name and arguments within tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


def main() -> None:
    job = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (job["nbytes"], job["nbytes"]))
    jinja = _by_jinja(job)
    by = jinja or _by_transformers(job)
    for line in sys.stdin:
        answer = _answer(job, line, by)
        if answer[0] == "error" and by is jinja:  # the template may want more; if not, transformers says what is wrong
            by = _by_transformers(job)
            answer = _answer(job, line, by)
        print(json.dumps(answer), flush=True)


def _by_jinja(job: dict[str, Any]) -> RenderChat | None:
    """Renders by jinja2 alone, set as transformers sets it, which takes half a second to load; None for templates that
    may see a difference."""
    try:
        import jinja2
        import jinja2.sandbox
    except ImportError:
        return None
    release = tuple(map(int, re.findall(r"\d+", vars(jinja2).get("__version__") or _version("jinja2"))))
    if release < SAFE_JINJA or HARDENED.search(job["template"]):
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    compiled = functools.cache(environment.from_string)  # within the first chat's limits: constants are computed

    def render(messages: Messages, tools: list[Any] | None, told: dict[str, Any]) -> str:
        if any(REASONING & message.keys() for message in messages):
            raise ValueError("transformers gives reasoning more names")
        return compiled(job["template"]).render(messages=messages, tools=tools, documents=None, **told)

    return render


def _version(name: str) -> str:
    import importlib.metadata  # an eighth of this process's time

    return importlib.metadata.version(name)


def _by_transformers(job: dict[str, Any]) -> RenderChat:
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: Messages, tools: list[Any] | None, told: dict[str, Any]) -> str:
        rendered: Any = render_jinja_template(
            conversations=[messages], tools=tools, chat_template=job["template"], **told)
        return rendered[0][0]

    return render


def _answer(job: dict[str, Any], line: str, by: RenderChat) -> tuple[str, str]:
    """The kind of a line's answer, and the text or the error."""
    signal.setitimer(signal.ITIMER_PROF, job["time_s"])  # of the processor; no handler: SIGPROF ends the process
    try:
        messages, told = json.loads(line)
        if not re.search(r"\btools\b", job["template"]):
            messages = _with_tools_as_text(messages, told.pop("tools", None))
        tools = told.pop("tools", None) or None
        more = {name: value for name, value in told.items() if name not in RESERVED}
        messages = _known_roles(messages, job["template"])
        return "text", _rendered(
            lambda chat: by(chat, tools, {"add_generation_prompt": True, **job["tokens"], **more}), messages,
            job["most"])
    except MemoryError:
        return "error", f"it takes more than {job['nbytes'] >> 20} MiB of memory"
    except Exception as error:  # templates raise what they like
        return "error", f"{error}"[: job["most"]]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _with_tools_as_text(messages: Messages, tools: list[Any] | None) -> Messages:
    """Messages in whose text are tools, calls and results."""
    text = []
    for message in messages:
        calls = "".join(f"\n<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
                        for call in message.get("tool_calls", ()))
        message = {**message, "content": (message["content"] + calls).lstrip("\n") if calls else message["content"]}
        message.pop("tool_calls", None)
        if message.pop("tool_call_id", None) is not None:
            message |= {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        text.append(message)
    if not tools:
        return text
    about = TOOLS.format("\n".join(json.dumps(tool) for tool in tools))
    if text[0]["role"] in ("system", "developer"):
        return [{**text[0], "content": f"{text[0]['content']}\n\n{about}"}, *text[1:]]
    return [{"role": "system", "content": about}, *text]


def _known_roles(messages: Messages, template: str) -> Messages:
    """The messages, with OpenAI's role `developer` as `system` if the template does not name it."""
    if "'developer'" in template or '"developer"' in template:
        return messages
    return [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]


def _rendered(render: Callable[[Messages], str], messages: Messages, most: int) -> str:
    """The text of a chat, else of the merged one; the first error where neither has one. A chat with images is rendered
    as it is."""
    if any(isinstance(message["content"], list) for message in messages):
        return _bounded(render(messages), most)
    try:
        return _complete(render, messages, most)
    except MemoryError:
        raise
    except Exception as error:
        merged = _merged(messages)
        if merged == messages:
            raise
        try:
            return _complete(render, merged, most)
        except MemoryError:
            raise
        except Exception:
            raise error from None


def _merged(messages: Messages) -> Messages:
    """Messages without system messages, whose text begins the next one, and without neighbors of one role."""
    merged: Messages = []
    held = ""
    for message in messages:
        if message["role"] in ("system", "developer"):
            held = f"{held}\n\n{message['content']}".lstrip("\n")
            continue
        if held and message["role"] == "user":
            message, held = {**message, "content": f"{held}\n\n{message['content']}"}, ""
        last = merged[-1] if merged else {}
        if last.get("role") == message["role"] in ("user", "assistant") and not (last.keys() | message.keys()) - {
                "role", "content"}:
            merged[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return [*merged, *([{"role": "user", "content": held}] if held else [])]


def _complete(render: Callable[[Messages], str], messages: Messages, most: int) -> str:
    """The text of a chat; ValueError if it is too long or lacks a message."""
    text = _bounded(render(messages), most)
    if (missing := _missing(render, messages, text)) is not None:
        raise ValueError(f"it leaves out messages[{missing}], of role {messages[missing]['role']!r:.80}; use a role "
                         "that it renders")
    return text


def _bounded(text: str, most: int) -> str:
    if len(text) > most:
        raise ValueError(f"it writes {len(text)} characters, more than {most}")
    return text


def _missing(render: Callable[[Messages], str], messages: Messages, text: str) -> int | None:
    """The number of the first message whose content is not in the rendered `text`.

    A second rendering, with digits drawn at random after each content, shows the difference between a content that is
    left out and one that is trimmed or escaped, or whose words stand in the text anyway.
    """
    marks = {number: f"{secrets.randbelow(10**24):024}" for number, message in enumerate(messages)
             if message["content"].strip()}
    marked = [message | {"content": message["content"] + marks[number]} if number in marks else message
              for number, message in enumerate(messages)]
    try:
        seen = render(marked)
    except MemoryError:
        raise
    except Exception:  # the template refuses digits: the content itself must be there
        return next((number for number in marks if messages[number]["content"].strip() not in text), None)
    return next((number for number, mark in marks.items() if mark not in seen), None)


if __name__ == "__main__":
    main()
