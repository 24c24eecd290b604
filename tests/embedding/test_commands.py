"""`forebay embed`, and the server of embeddings and scores."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers as T
from embedding.folders import save, save_modules
from embedding.test_embedder import MEAN, TEXTS
from in_thread import running
from typer.testing import CliRunner

from forebay.commands import embed
from forebay.commands.app import app
from forebay.commands.serve_texts import reads_texts
from forebay.embedding.embedder import Embedder, TextModel
from forebay.embedding.reranker import Reranker
from forebay.embedding.sentence_files import is_embedder
from forebay.serving.run_server import ServingOptions, bound_socket
from forebay.serving.text_models import TextServerRun


@contextlib.contextmanager
def serving(model: TextModel) -> Iterator[int]:
    """The port of a server of a model."""
    run, at = TextServerRun(model, ServingOptions("tiny"), 5.0), bound_socket("127.0.0.1", 0)
    port = at.getsockname()[1]
    with running(run.run, at, run.stop):
        yield port


def posted(port: int, path: str, **body: Any) -> tuple[int, Any]:
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=60)) as at:
        at.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = at.getresponse()
        return reply.status, json.loads(reply.read())


def test_encoders_alone_make_embeddings(tmp_path: Path) -> None:
    """Without files of sentence-transformers; other models do not."""
    for kind, made in (("bert", T.AutoModelForMaskedLM), ("xlm-roberta", None), ("modernbert", None)):
        save(kind, tmp_path / kind, *([made] if made else []))
        assert is_embedder(tmp_path / kind) and reads_texts(tmp_path / kind)
    theirs = T.AutoModel.from_pretrained(tmp_path / "bert").eval()
    ids = torch.tensor([[2, 5, 6, 7, 3]])
    with torch.no_grad():
        expected = theirs(ids).last_hidden_state[0].mean(0)
    assert np.allclose(Embedder(tmp_path / "bert", "8MiB").encode("w1 w2 w3"), expected, atol=1e-5)
    path = tmp_path / "bert/config.json"
    config = json.loads(path.read_text())
    for changes in ({"architectures": ["BertLMHeadModel"]}, {"architectures": ["GPT2Model"], "model_type": "gpt2"},
                    {"architectures": ["BartModel"], "model_type": "bart", "is_encoder_decoder": True},
                    {"architectures": None}, {"architectures": [5]}, {"model_type": []}):
        path.write_text(json.dumps(config | changes))
        assert not is_embedder(tmp_path / "bert"), changes


def test_the_server_answers_as_the_model_does(tmp_path: Path) -> None:
    save("bert", tmp_path)
    save_modules(tmp_path, MEAN)
    lm, texts = Embedder(tmp_path, "300kB"), [*TEXTS[:4], TEXTS[5]]
    wanted = lm.encode(texts)
    assert reads_texts(tmp_path)
    with serving(lm) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        for form in ("float", "base64"):
            found = client.embeddings.create(model="tiny", input=texts, encoding_format=form)
            rows = [np.frombuffer(base64.b64decode(each.embedding), np.float32)
                    if isinstance(each.embedding, str) else each.embedding for each in found.data]
            assert np.allclose(rows, wanted, atol=1e-6)
        assert found.usage.prompt_tokens == lm.count_tokens(texts) == sum(min(16, len(t.split()) + 2) for t in texts)
        assert len(client.embeddings.create(model="tiny", input="w1", dimensions=8).data[0].embedding) == 8
        assert [each.id for each in client.models.list()] == ["tiny"]
        for body, message in (({"input": []}, "input must be text"), ({"input": [[1, 2]]}, "input must be text"),
                              ({"input": "w1", "dimensions": 99}, "dimensions must be"),
                              ({"input": "w1", "prompt_name": "a"}, "prompt_name must be one of none")):
            status, reply = posted(port, "/v1/embeddings", **body)
            assert status == 400 and message in reply["error"]["message"]
    assert all(p.is_meta for p in lm.streamed.module.parameters())


def test_the_server_orders_documents(tmp_path: Path) -> None:
    save("bert", tmp_path, T.AutoModelForSequenceClassification, num_labels=1)
    lm = Reranker(tmp_path, "300kB")
    best = lm.rank("w1 w2", TEXTS)
    assert reads_texts(tmp_path)
    with serving(lm) as port:
        status, reply = posted(port, "/v1/rerank", query="w1 w2", documents=[TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]],
                               top_n=3)
        assert status == 200
        assert [each["index"] for each in reply["results"]] == [each["corpus_id"] for each in best[:3]]
        assert reply["results"][0]["relevance_score"] == pytest.approx(best[0]["score"], abs=1e-6)
        assert reply["results"][0]["document"] == {"text": TEXTS[best[0]["corpus_id"]]}
        assert posted(port, "/v1/rerank", documents=["w1"])[0] == 400


def test_a_job_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "model", tmp_path / "out.npy"
    folder.mkdir()
    save("bert", folder)
    save_modules(folder, MEAN)
    wanted = Embedder(folder, "300kB").encode(TEXTS)
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    command = ["embed", str(folder), "--input", str(tmp_path / "in.jsonl"), "--output", str(out), "--budget", "300kB"]
    monkeypatch.setattr(embed, "PART", 2)
    own, calls = Embedder.encode, []

    def counted(self: Embedder, part: list[str], *given: Any) -> Any:
        calls.append(len(part))
        if len(calls) == 2:
            raise OSError(5, "it breaks")
        return own(self, part, *given)

    monkeypatch.setattr(Embedder, "encode", counted)
    assert CliRunner().invoke(app, command).exit_code == 2
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0 and "2 of 6 texts are embedded already" in found.stderr, found.output
    assert calls == [2, 2, 2, 2] and np.abs(np.load(out) - wanted).max() < 1e-5
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "w1"}))
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2 and "is of other texts or of another model" in " ".join(refused.stderr.split())
    refused = CliRunner().invoke(app, ["run", str(folder), "w1", "--budget", "300kB"])
    assert refused.exit_code == 2 and "makes embeddings, not text: forebay embed" in " ".join(refused.stderr.split())
    (tmp_path / "in.jsonl").write_text(json.dumps({"texts": "w1"}))
    assert "line 1" in CliRunner().invoke(app, command).stderr
