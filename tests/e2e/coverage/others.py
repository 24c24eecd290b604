"""Models with images, with an encoder and a decoder, or of texts: outcomes against transformers' modules in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers as T

import forebay
from forebay.embedding.embedder import Embedder
from forebay.images.open_tower import text_alone
from forebay.modules.encoder_decoder import EncoderDecoder
from forebay.rewriter.checkpoints.text_model import MULTIMODAL
from forebay.rewriter.machine.profile import Machine
from tests.e2e import test_images
from tests.e2e.coverage.outcome import EQUAL, Outcome, failed, one_line
from tests.embedding import folders, test_embedder
from tests.modules import test_encoder_decoder as both

BUDGET, ROOM = 40_000_000, 400_000
IMAGES = tuple(MULTIMODAL)
BOTH = tuple(both.CONFIGS)
TEXTS = tuple(folders.CONFIGS)


def check_images(name: str) -> Outcome:
    """Two images of other sizes in two prompts, a batch with and without images, and prompts of text alone."""
    def run(folder: Path) -> Outcome:
        whole = test_images.save(name, folder)
        asked = test_images.cases(name, whole)
        with forebay.wrap(folder, BUDGET, batch=2, prompt=24, new_tokens=8, machine=Machine.default()) as lm:
            for each, given in asked.items():
                if lm.generate(**given, **test_images.ASKED).tolist() != (
                        whole.generate(**given, **test_images.ASKED).tolist()):
                    return failed(f"other tokens: {each}")
        return EQUAL

    if not MULTIMODAL[name].images:
        return Outcome("refused", text_alone(name))
    return _in_folder(run)


def check_both(name: str) -> Outcome:
    """Greedy tokens and tokens of beams, with little memory."""
    def run(folder: Path) -> Outcome:
        whole, given = both.save(name, folder), both.inputs(name)
        lm = EncoderDecoder(folder, EncoderDecoder(folder, BUDGET).streamed.sizes.weight_nbytes + ROOM)
        for beams in (1, 3):
            asked: Any = dict(given, max_new_tokens=7, num_beams=beams)
            if lm.generate(**asked).tolist() != whole.generate(**asked).tolist():
                return failed(f"other tokens with {beams} beams")
        return EQUAL

    return _in_folder(run)


def check_texts(name: str) -> Outcome:
    """Vectors of texts of other lengths in one batch, with little memory."""
    def run(folder: Path) -> Outcome:
        model, how = folders.save(name, folder), "lasttoken" if name == "qwen3" else "mean"
        folders.save_modules(folder, {"pooling_mode": how}, normalize=False)
        lm = Embedder(folder, Embedder(folder, BUDGET).streamed.sizes.weight_nbytes + ROOM)
        tokens, texts = T.AutoTokenizer.from_pretrained(folder), test_embedder.TEXTS
        wanted = test_embedder.expected(model, tokens, texts, 16, how)
        worst = float((torch.from_numpy(lm.encode(texts)) - wanted).abs().max())
        return EQUAL if worst < 1e-5 else failed(f"differs by {worst:.2e}")

    return _in_folder(run)


def _in_folder(run: Any) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run(Path(folder))
        except Exception as error:  # a row says what was met
            return failed(f"{type(error).__name__}: {one_line(error)}")
