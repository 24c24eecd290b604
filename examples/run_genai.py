"""Answer a prompt with an exported ONNX model in onnxruntime-genai: python examples/run_genai.py FOLDER "PROMPT"

The folder is what `forebay export MODEL FOLDER --format onnx` wrote.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime_genai


def loaded(folder: Path) -> onnxruntime_genai.Model:
    """The model of a folder; ValueError for one that onnxruntime-genai cannot run."""
    if not (folder / "genai_config.json").is_file():
        raise ValueError(f"{folder} holds no genai_config.json: write one with forebay export MODEL OUT --format onnx")
    return onnxruntime_genai.Model(str(folder))


def generate(folder: str | Path, prompt: Sequence[int], new_tokens: int) -> np.ndarray:
    """Greedy tokens [new_tokens] that follow a prompt, or fewer where the model ends its answer."""
    if not len(prompt):
        raise ValueError("a prompt has no token: give it at least one")
    model = loaded(Path(folder))
    options = onnxruntime_genai.GeneratorParams(model)
    options.set_search_options(max_length=len(prompt) + new_tokens, do_sample=False)
    generator = onnxruntime_genai.Generator(model, options)
    generator.append_tokens(np.array([prompt], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return np.array(generator.get_sequence(0))[len(prompt) :]


def main(folder: str, text: str) -> None:
    tokenizer = onnxruntime_genai.Tokenizer(loaded(Path(folder)))
    print(text + tokenizer.decode(generate(folder, tokenizer.encode(text).tolist(), 32)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("prompt")
    asked = parser.parse_args()
    try:
        main(asked.folder, asked.prompt)
    except (ValueError, RuntimeError) as error:  # the latter is all that onnxruntime-genai raises
        parser.exit(2, f"error: {error}\n")
