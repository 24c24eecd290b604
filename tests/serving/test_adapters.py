"""Requests and lines of jobs that name an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from e2e.test_jobs import EOS, SETTINGS, Counter
from lora_folders import merged, write_lora
from serving.served import serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from forebay.commands.jobs import AnswerFile, Ask, run_job
from forebay.commands.prompts import Prompt, read_requests, refuse_adapters
from forebay.rewriter.checkpoints.resolve import resolve_model


def test_an_adapter_is_a_model_to_clients(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    adapters = {name: write_lora(tmp_path / name, model, r".*_proj") for name in ("poems", "code")}
    ids = tokenizer("w1 w5", return_tensors="pt").input_ids
    models: dict[str, Any] = {"tiny": model} | {name: merged(model, each) for name, each in adapters.items()}
    texts = {}
    for name, each in models.items():
        with torch.no_grad():
            new = each.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        texts[name] = tokenizer.decode(new, skip_special_tokens=True)
    assert len({*texts.values()}) == 3, "an adapter changes nothing that shows"
    with serving(resolve_model(folder, adapter=adapters)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        assert [each.id for each in client.models.list().data] == ["tiny", "poems", "code"]
        assert client.models.retrieve("code").id == "code"
        for name in ("poems", "tiny", "code", "poems"):
            found = client.completions.create(model=name, prompt="w1 w5", max_tokens=5, temperature=0)
            assert (found.model, found.choices[0].text.strip()) == (name, texts[name].strip())
        with pytest.raises(openai.NotFoundError, match="this server has 'tiny', 'poems', 'code'"):
            client.completions.create(model="prose", prompt="w1", max_tokens=1)


def test_lines_of_a_job_name_adapters(tmp_path: Path) -> None:
    class Listening(Counter):
        heard: list[str]

        def answer_all(self, asked: Any, *args: Any, **options: Any) -> Any:
            self.heard = [each.adapter for each in asked]
            return super().answer_all(asked, *args, **options)

    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "a", "adapter": "code"}\n{"prompt": "b"}\n{"prompt": "c", "adapter": "prose"}\n'
        '{"prompt": "d", "adapter": "__base__"}\n{"prompt": "e", "adapter": ["code"]}\n')
    requests, _ = read_requests(tmp_path / "in.jsonl")
    known, bad = refuse_adapters([Prompt(each, (5, 9)) for each in requests], ("code", "poems"))
    assert [(each.line, each.reason) for each in bad] == [
        (3, "no adapter 'prose'"), (5, "no adapter ['code']")]
    asked, bad = refuse_adapters([Prompt(each, (5, 9)) for each in requests], ())  # the base would answer all
    assert [each.request.line for each in asked] == [2, 4] and [each.line for each in bad] == [1, 3, 5]
    assert bad[0].reason == "no adapter 'code'; --adapter NAME=FOLDER opens one by name"
    model = Listening(2)
    with AnswerFile(tmp_path / "out", SETTINGS) as output:
        run_job(model, known, output, Ask(8, (EOS,)), lambda ids: "x", adapters=("code", "poems"))
    assert model.heard == ["code", "", ""] and '"adapter": "code"' in (tmp_path / "out").read_text()
