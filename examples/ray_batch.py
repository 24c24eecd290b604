"""The same job on the machines of a Ray cluster, as a stage of Ray Data (pip install 'forebay[ray]'):
python examples/ray_batch.py MODEL PROMPTS.jsonl ANSWERS.jsonl --workers 2 --budget 120MiB

A line of PROMPTS is {"id": …, "prompt": …} or has "messages", one of ANSWERS {"id": …, "text": …}. Each worker has the
whole model within a budget of its own; MODEL is a path that all machines have. Answers are written as they come, and
those that are there are not made again: started anew, on as many workers as there are then, the job goes on where it
stopped. Answers follow the order in which they end.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Answering:
    """A worker: prompts in, answers out, a batch at a time."""

    def __init__(self, model: str, budget: str, batch: int, new_tokens: int) -> None:
        from transformers import AutoTokenizer

        import forebay

        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left", local_files_only=True,
                                                       trust_remote_code=False)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model = forebay.wrap(model, budget, batch=batch, new_tokens=new_tokens)
        self.new_tokens = new_tokens

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        ids = [self.tokens(json.loads(question)) for question in rows["question"]]
        given = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        made = self.model.generate(given.input_ids, attention_mask=given.attention_mask, do_sample=False,
                                   max_new_tokens=self.new_tokens, pad_token_id=self.tokenizer.pad_token_id)
        texts = self.tokenizer.batch_decode(made[:, given.input_ids.shape[1] :], skip_special_tokens=True)
        return {"id": rows["id"], "text": texts}

    def tokens(self, question: dict[str, Any]) -> list[int]:
        """Token ids of a prompt, or of messages in the model's chat template."""
        if "prompt" in question:
            return list(self.tokenizer(question["prompt"]).input_ids)
        text = self.tokenizer.apply_chat_template(question["messages"], tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)


def answers(asked: list[dict[str, str]], workers: int, batch: int, *given: Any) -> Iterator[dict[str, str]]:
    """Each answer when its batch is done."""
    import ray

    ray.init(ignore_reinit_error=True)
    cores = min(1.0, ray.cluster_resources()["CPU"] / workers)  # of a worker; else as many start as there are cores
    pool = ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1)  # the first there takes one batch
    stage = ray.data.from_items(asked).map_batches(
        Answering, fn_constructor_args=given, batch_size=batch, num_cpus=cores, compute=pool)
    for row in stage.iter_rows():
        yield {"id": str(row["id"]), "text": str(row["text"])}


def answered(path: Path) -> set[str]:
    """The ids that have answers; what a crash left of a line is cut off."""
    if not path.exists():
        return set()
    whole = path.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    with path.open("r+b") as file:
        file.truncate(len(whole))
    return {json.loads(line)["id"] for line in whole.splitlines()}


def main(model: str, prompts: str, output: str, workers: int, budget: str, batch: int, new_tokens: int) -> None:
    lines = Path(prompts).read_text(encoding="utf-8").splitlines()
    asked = [{"id": str(json.loads(line).get("id", i)), "question": line}
             for i, line in enumerate(filter(str.strip, lines), 1)]
    done = answered(Path(output))
    left = [entry for entry in asked if entry["id"] not in done]
    print(f"{len(asked) - len(left)} of {len(asked)} prompts are answered already")
    if not left:
        return
    with Path(output).open("a", encoding="utf-8") as file:
        for answer in answers(left, workers, batch, str(Path(model).resolve()), budget, batch, new_tokens):
            file.write(json.dumps(answer) + "\n")
            file.flush()
            print(f"{answer['id']}: {answer['text']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "prompts", "answers"):
        parser.add_argument(name)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--budget", default="120MiB", help="of each worker")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    told = parser.parse_args()
    try:
        main(told.model, told.prompts, told.answers, told.workers, told.budget, told.batch, told.max_new_tokens)
    except ImportError as error:
        parser.exit(2, f"error: {error}; pip install 'forebay[ray]'\n")
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
