"""Encoder-decoders within a budget: tokens are those of transformers, which has all in memory."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from selection import ALL
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import forebay
from forebay.commands.app import app
from forebay.modules.encoder_decoder import EncoderDecoder, encoder_decoder_class
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.plan import PlanError

SIZES: dict[str, Any] = dict(
    vocab_size=100, d_model=64, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_position_embeddings=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None)
OF_T5: dict[str, Any] = dict(vocab_size=100, d_model=64, d_kv=16, d_ff=256, num_layers=3, num_heads=4, pad_token_id=0,
                             eos_token_id=2, decoder_start_token_id=0)
CONFIGS = {
    "t5": lambda: T.T5Config(**OF_T5), "mt5": lambda: T.MT5Config(**OF_T5), "bart": lambda: T.BartConfig(**SIZES),
    "mbart": lambda: T.MBartConfig(**SIZES), "marian": lambda: T.MarianConfig(**SIZES | {
        "decoder_vocab_size": 100}), "pegasus": lambda: T.PegasusConfig(**SIZES),
    "m2m_100": lambda: T.M2M100Config(**SIZES), "blenderbot": lambda: T.BlenderbotConfig(**SIZES),
    "whisper": lambda: T.WhisperConfig(**SIZES | {"num_mel_bins": 8, "max_source_positions": 16,
                                                  "max_target_positions": 32, "suppress_tokens": None,
                                                  "begin_suppress_tokens": None})}


def save(kind: str, folder: Path) -> Any:
    """A model with weights that matter, which is returned."""
    torch.manual_seed(0)
    auto = T.AutoModelForSpeechSeq2Seq if kind == "whisper" else T.AutoModelForSeq2SeqLM
    model = auto.from_config(CONFIGS[kind]()).eval()
    for name, p in model.named_parameters():
        if p.dim() > 1 and "embed_positions" not in name:
            p.data.normal_(0, 0.3)
    model.generation_config.max_length = None
    model.save_pretrained(folder)
    return auto.from_pretrained(folder).eval()


def inputs(kind: str) -> dict[str, torch.Tensor]:
    """Two inputs, of other lengths where the model takes such."""
    if kind == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))}
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 0, 0, 0]])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@pytest.mark.parametrize("kind", tuple(CONFIGS) if ALL else ("t5", "whisper"))
def test_tokens(kind: str, tmp_path: Path) -> None:
    """Greedy, by beams and drawn, with little memory and with enough for all layers."""
    whole, given = save(kind, tmp_path), inputs(kind)
    asked: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}]

    def answers(model: Any) -> list[list[list[int]]]:
        torch.manual_seed(3)
        return [model.generate(**given, max_new_tokens=7, **each).tolist() for each in asked]

    expected = answers(whole)
    assert expected[0] != expected[1] or expected[0] != expected[2]
    for budget in (EncoderDecoder(tmp_path, "1MB").streamed.sizes.weight_nbytes + 400_000, 8_000_000):
        lm = EncoderDecoder(tmp_path, budget)
        assert answers(lm) == expected
        assert lm.streamed.peak_nbytes <= budget and all(p.is_meta for p in lm.streamed.module.parameters())
    with pytest.raises(PlanError, match=r"needs .* for weights at a time"):
        EncoderDecoder(tmp_path, 1000).generate(**given)
    with torch.no_grad():
        decoded = torch.ones(2, 3, dtype=torch.int64)
        wanted = whole(**given, decoder_input_ids=decoded).logits
    assert torch.allclose(lm(**given, decoder_input_ids=decoded).logits, wanted, atol=1e-5)


def test_forebay_run_prints_what_is_said(tmp_path: Path) -> None:
    """A recording's words by the folder's own feature extractor; other files are refused in a line."""
    whole = save("whisper", tmp_path)
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = T.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w3", pad_token="w0", eos_token="w2")
    tokens.save_pretrained(tmp_path)
    extractor = T.WhisperFeatureExtractor(feature_size=8, chunk_length=1, n_fft=400, hop_length=500)
    extractor.save_pretrained(tmp_path)
    sound = (np.sin(np.arange(16000) / 9) * 9000).astype("<i2")
    for name, rate in (("said.wav", 16000), ("slow.wav", 8000)):
        with wave.open(str(tmp_path / name), "wb") as file:
            file.setparams((2, 2, rate, 0, "NONE", ""))
            file.writeframes(np.stack([sound, sound], 1).tobytes())
    given = extractor(sound.astype(np.float32) / 32768, sampling_rate=16000, return_tensors="pt")
    wanted = tokens.decode(whole.generate(**given, max_new_tokens=5, do_sample=False)[0], skip_special_tokens=True)
    command = ["run", str(tmp_path), "--budget", "4MB", "--new-tokens", "5"]
    found = CliRunner().invoke(app, [*command, str(tmp_path / "said.wav")])
    assert found.exit_code == 0 and found.stdout.strip() == wanted.strip() != "", found.output
    (tmp_path / "no.wav").write_bytes(b"RIFF")
    for name, message in (("slow.wav", "8000 samples a second of 16 bits"), ("no.wav", "is no WAV file"),
                          ("none.wav", "cannot read the recording")):
        refused = CliRunner().invoke(app, [*command, str(tmp_path / name)])
        assert refused.exit_code == 2 and message in " ".join(refused.stderr.split()), refused.output


def test_wrap_gives_one_for_its_folder(tmp_path: Path) -> None:
    whole, given = save("t5", tmp_path), inputs("t5")
    lm = forebay.wrap(tmp_path, "4MB")
    assert lm.generate(**given, max_new_tokens=4).tolist() == whole.generate(**given, max_new_tokens=4).tolist()
    with pytest.raises(PlanError, match="takes a budget alone"):
        forebay.wrap(tmp_path, "4MB", batch=2)


def test_other_folders_are_none(tmp_path: Path) -> None:
    T.LlamaForCausalLM(T.LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2)).save_pretrained(tmp_path)
    assert encoder_decoder_class(tmp_path) is None
    with pytest.raises(CheckpointError, match="holds no model with an encoder and a decoder"):
        EncoderDecoder(tmp_path, "1MB")
