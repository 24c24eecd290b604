"""Answer one prompt with the packaged demo model, 540 MB as float32, in 120 MiB: python examples/generate.py"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch: spinning threads take the core the disk reader needs

from transformers import AutoTokenizer

import forebay
from forebay.rewriter.checkpoints.resolve import demo_checkpoint


def main() -> None:
    folder = demo_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    question = [{"role": "user", "content": "Where does a river begin?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with forebay.wrap(folder, {"device": "120MiB"}) as lm:
        output = lm.generate(**inputs, max_new_tokens=32, eos_token_id=tokenizer.eos_token_id)
        print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        print(lm.explain())


if __name__ == "__main__":
    try:
        main()
    except (forebay.CheckpointError, forebay.PlanError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
