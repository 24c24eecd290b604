"""A process that renders chats by a template, a program that came with the model: one line of JSON in, one out.

Run as a file, without the package, which would import torch. The first line of stdin gives the template, the special
tokens that it may name, and the limits; each further line the messages of a chat. A line of stdout is ["text", …] or
["error", …]. A chat that takes longer than its time ends the process.
"""

import json
import resource
import secrets
import signal
import sys
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    job = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (job["nbytes"], job["nbytes"]))

    def render(messages: Messages) -> str:
        rendered: Any = render_jinja_template(
            conversations=[messages], chat_template=job["template"], add_generation_prompt=True, **job["tokens"])
        return rendered[0][0]

    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, job["time_s"])  # no handler: SIGALRM ends the process
        try:
            answer = "text", _rendered(render, _known_roles(json.loads(line), job["template"]), job["most"])
        except MemoryError:
            answer = "error", f"it takes more than {job['nbytes'] >> 20} MiB of memory"
        except Exception as error:  # templates raise what they like
            answer = "error", f"{error}"[: job["most"]]
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


def _known_roles(messages: Messages, template: str) -> Messages:
    """The messages, with OpenAI's role `developer` as `system` if the template does not name it."""
    if "'developer'" in template or '"developer"' in template:
        return messages
    return [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]


def _rendered(render: Callable[[Messages], str], messages: Messages, most: int) -> str:
    """The text of a chat; ValueError if it is too long or lacks a message."""
    text = render(messages)
    if len(text) > most:
        raise ValueError(f"it writes {len(text)} characters, more than {most}")
    if (missing := _missing(render, messages, text)) is not None:
        raise ValueError(f"it leaves out messages[{missing}], of role {messages[missing]['role']!r:.80}; use a role "
                         "that it renders")
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
