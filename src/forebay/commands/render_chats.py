"""A process that renders chats by a template, a program that came with the model: one line of JSON in, one out.

Run as a file, without the package, which would import torch. The first line of stdin gives the template, the special
tokens that it may name, and the limits; each further line the messages of a chat. A line of stdout is ["text", …] or
["error", …]. A chat that takes longer than its time ends the process.
"""

import json
import resource
import signal
import sys
from typing import Any


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    job = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (job["nbytes"], job["nbytes"]))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, job["time_s"])  # no handler: SIGALRM ends the process
        try:
            answer = "text", _render(render_jinja_template, job, json.loads(line))
        except MemoryError:
            answer = "error", f"it takes more than {job['nbytes'] >> 20} MiB of memory"
        except Exception as error:  # templates raise what they like
            answer = "error", f"{error}"[: job["most"]]
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


def _render(render: Any, job: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    rendered, _ = render(conversations=[messages], chat_template=job["template"], add_generation_prompt=True,
                         **job["tokens"])
    if len(rendered[0]) > job["most"]:
        raise ValueError(f"it writes {len(rendered[0])} characters, more than {job['most']}")
    return rendered[0]


if __name__ == "__main__":
    main()
