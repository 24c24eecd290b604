"""genai_config.json: what onnxruntime-genai wants to know of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.exported.onnx_file import MODEL
from forebay.rewriter.checkpoints.config import read_eos
from forebay.rewriter.checkpoints.packed_writer import write_json
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.state import kv_states

# Model types that onnxruntime-genai knows and runs as decoders alone; others are run as "llama", which says no more.
KNOWN = ("gemma", "gemma2", "granite", "llama", "mistral", "nemotron", "olmo", "phi", "phi3", "qwen2", "qwen3",
         "smollm3")
CONTEXT = 2048  # tokens, of a model that names no limit


def write_genai_config(folder: Path, captured: CapturedModel, config: Any) -> None:
    """Write genai_config.json into a folder that holds the model, in the dialect "microsoft", and its config."""
    text = config.get_text_config(decoder=True)
    ends = list(read_eos(folder))
    first, spec = getattr(text, "bos_token_id", None), kv_states(captured.states, "onnx")[0]
    context = captured.max_positions or CONTEXT
    pad = getattr(text, "pad_token_id", None)
    write_json(folder / "genai_config.json", {
        "model": {
            "type": captured.model_type if captured.model_type in KNOWN else "llama",
            "bos_token_id": first if first is not None else 0,
            "eos_token_id": ends if len(ends) != 1 else ends[0],
            "pad_token_id": pad if pad is not None else ends[0] if ends else 0,
            "context_length": context, "vocab_size": captured.vocab_size,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": MODEL, "head_size": spec.head_dim, "hidden_size": text.hidden_size,
                "num_attention_heads": text.num_attention_heads, "num_hidden_layers": len(captured.layers),
                "num_key_value_heads": spec.kv_heads,
                "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask",
                           "position_ids": "position_ids", "past_key_names": "past_key_values.%d.key",
                           "past_value_names": "past_key_values.%d.value"},
                "outputs": {"logits": "logits", "present_key_names": "present.%d.key",
                            "present_value_names": "present.%d.value"}}},
        "search": {"do_sample": False, "max_length": context, "min_length": 0, "num_beams": 1, "top_k": 1, "top_p": 1.0,
                   "temperature": 1.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "diversity_penalty": 0.0,
                   "no_repeat_ngram_size": 0, "num_return_sequences": 1, "early_stopping": True,
                   "past_present_share_buffer": True}})
