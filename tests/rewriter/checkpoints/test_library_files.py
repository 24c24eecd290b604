"""Files that other libraries write, where they are installed: each value is the library's own."""

from __future__ import annotations

from pathlib import Path

import library_files
import pytest
import torch
import transformers
from selection import at_length

from forebay.api import wrap
from forebay.rewriter.checkpoints import resolve
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.resolve import resolve_model

SHAPE = dict(vocab_size=128, hidden_size=192, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=64)
IDS = torch.tensor([[5, 9, 2, 77, 31]])
# Of the largest scale: rounded once to fp16; a library that gives values in bf16 rounds them itself.
BOUNDS = {"bitsandbytes": 2.0**-11, "torchao": 2.0**-10, "hqq": 2.0**-9, "transformers": 2.0**-11, "w8a8": 2.0**-11,
          "nvfp4": 2.0**-8, "mlx": 2.0**-9, "auto_round": 2.0**-9}
LEAST_NBYTES = 320 << 10  # of a device budget


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(resolve, "cache_folder", lambda: tmp_path / "cache")


@pytest.mark.peer
@pytest.mark.parametrize("kind", [kind if kind in ("fp8 blocks", "nf4 double", "bitnet") else at_length(kind)
                                  for kind in library_files.KINDS])
def test_values_are_the_librarys_and_the_model_streams(tmp_path: Path, kind: str) -> None:
    library, write = library_files.KINDS[kind]
    pytest.importorskip(library)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(tmp_path / "plain")
    model = write(tmp_path / "plain", tmp_path / "model")
    folder = resolve_model(tmp_path / "model")
    stored = open_checkpoint(folder).tensors
    bound = BOUNDS.get(kind, BOUNDS.get(library, 0.0))
    for name, module in library_files.matrices(model).items():
        record, value = stored[f"{name}.weight"], module.weight.detach().float()
        assert record.packed is not None
        assert (read_dequantized(record) - value).norm() <= bound * value.norm(), name
    nbytes = sum(record.nbytes for record in stored.values())
    with torch.no_grad():
        expected = model(IDS).logits[:, -1]
    with wrap(folder, {"device": max(nbytes * 2 // 3, LEAST_NBYTES), "disk": tmp_path}, prompt=5, new_tokens=2) as lm:
        assert lm.plan.prediction.streamed_nbytes > 0
        assert (lm.next_logits(IDS) - expected).norm() < 0.01 * expected.norm()
