"""A server over a tiny model, in a thread of the test's process."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import torch
from budgets import attention_nbytes
from in_thread import running
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import forebay
from forebay.language_model import LanguageModel
from forebay.rewriter.machine.profile import Machine
from forebay.serving.run_server import LOOPBACK, ServerRun, Service, ServingOptions, bound_socket

WORDS = [f"w{i}" for i in range(196)]
TEMPLATE = ("{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
            "{% if add_generation_prompt %}w9{% endif %}")
PROMPT, NEW, BATCH_SLOTS = 24, 16, 3
ASK = {"prompt": "w1 w2 w3", "max_tokens": NEW, "temperature": 0}
BUDGET = 1_500_000 + max(0, attention_nbytes(BATCH_SLOTS, 4, PROMPT + NEW, 32, PROMPT))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 267 tokens: bytes, some longer ones, and the mark of reasoning's end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("{", '"'), ('"', "}"), ('"', ":"), ("Ġ", '"'), ("t", "r"), ("u", "e"), ("tr", "ue"), ("1", "2")]
    words = ["<s>", "</s>", *alphabet, *("".join(pair) for pair in merges)]
    raw = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<s>", "</s>"])
    raw.add_tokens(["</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def save_byte_model(folder: Path, template: str, **config: Any) -> None:
    """A random model over the tokens of `byte_tokenizer`, with this chat template."""
    save_llama(folder, vocab_size=320, bos_token_id=0, eos_token_id=1, pad_token_id=None, **config)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def save_llama(folder: Path, layers: int = 4, **config: Any) -> None:
    """A random Llama, of whose 2.4 MiB a third stream; of two layers it has 1.3 MiB."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 1024}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=layers,
                                 **sizes | config)).save_pretrained(folder)


def save_model(folder: Path, layers: int = 4) -> None:
    """A random Llama with a tokenizer of whole words."""
    save_llama(folder, layers, vocab_size=200, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
               pad_token_id=0)
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


@dataclass
class Running:
    """A server that runs; while `gate` is cleared, no token gets beyond its text."""

    run: ServerRun
    port: int
    gate: threading.Event
    ended: list[BaseException | None] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        """Status and body of one request."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            kind = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, body, {**kind, **headers})
            reply = connection.getresponse()
            return reply.status, reply.read()

    def complete(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        status, body = self.send("POST", "/v1/completions", json.dumps(fields).encode())
        return status, json.loads(body)


def made(
    folder: Path, *, batch_slots: int = BATCH_SLOTS, queue: int = 64, grace_s: float = 30.0, new_tokens: int = NEW,
    name: str = "tiny", planned: LanguageModel | None = None, port: int = 0, prompt: int = PROMPT,
    eos: tuple[int, ...] = (2,), budget: int = BUDGET, image_nbytes: int = 0, handoff: str = "",
    **options: Any
) -> tuple[Running, socket.socket]:
    """A server of the model in `folder` that is yet to be run, and the socket for it."""
    lm = planned or forebay.wrap(folder, budget, batch_slots=batch_slots, prompt=prompt, new_tokens=new_tokens,
                                 machine=Machine.default())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    gate, decode = threading.Event(), tokenizer.decode
    gate.set()

    def gated(*given: Any, **named: Any) -> Any:
        assert gate.wait(60)
        return decode(*given, **named)

    tokenizer.decode = gated
    chosen = ServingOptions(name, **{"hosts": frozenset(LOOPBACK), **options})
    run = ServerRun(Service(lm, tokenizer, eos, prompt, new_tokens, queue, chosen,
                            image_nbytes=image_nbytes, handoff=handoff), grace_s)
    at = bound_socket("127.0.0.1", port)
    return Running(run, at.getsockname()[1], gate), at


@contextlib.contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Running]:
    """A server of the model in `folder`, as `made` has it, in a thread; its end is waited for."""
    server, at = made(folder, **options)

    def stop() -> None:
        server.gate.set()
        server.run.stop()

    with running(lambda *given: server.ended.append(server.run.run(*given)), at, stop):
        yield server
    assert len(server.ended) == 1, "the server does not end"


def connected(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def request_bytes(body: bytes, path: str = "/v1/completions") -> bytes:
    return (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            "\r\n\r\n").encode() + body


def asked(server: Running, **fields: Any) -> socket.socket:
    """A connection on which a request was sent whose answer nobody has read."""
    at = connected(server)
    at.sendall(request_bytes(json.dumps({**ASK, **fields}).encode()))
    return at


def read_all(at: socket.socket, end: bytes | None = None) -> bytes:
    """Read until the connection is closed, or until `end` has come."""
    found = b""
    while (end is None or end not in found) and (part := at.recv(65536)):
        found += part
    return found


def wait_until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    """Return as soon as `holds`; AssertionError where it does not come to hold."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.005)


@contextlib.contextmanager
def serving_bytes(folder: Path, template: str, prompt: int, new_tokens: int) -> Iterator[Running]:
    """A server of two slots over the tokens of `byte_tokenizer`, with a chat template."""
    save_byte_model(folder, template)
    with serving(folder, prompt=prompt, new_tokens=new_tokens, eos=(1,), batch_slots=2, budget=4_000_000) as running:
        yield running
