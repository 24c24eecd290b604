"""Answer a prompt with an exported ONNX model in onnxruntime-genai: python examples/run_genai.py FOLDER "PROMPT"

The folder is what `forebay export MODEL FOLDER --format onnx` wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime_genai


def generate(folder: str | Path, prompt: Sequence[int], new_tokens: int) -> np.ndarray:
    """Greedy tokens [new_tokens] that follow a prompt, or fewer where the model ends its answer."""
    model = onnxruntime_genai.Model(str(folder))
    options = onnxruntime_genai.GeneratorParams(model)
    options.set_search_options(max_length=len(prompt) + new_tokens, do_sample=False)
    generator = onnxruntime_genai.Generator(model, options)
    generator.append_tokens(np.array([prompt], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return np.array(generator.get_sequence(0))[len(prompt) :]


def main(folder: str, text: str) -> None:
    tokenizer = onnxruntime_genai.Tokenizer(onnxruntime_genai.Model(folder))
    print(text + tokenizer.decode(generate(folder, tokenizer.encode(text).tolist(), 32)))


if __name__ == "__main__":
    main(*sys.argv[1:])
