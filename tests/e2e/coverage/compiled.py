"""Models under `torch.compile(backend="forebay")`: results as from eager within a budget below their weights' bytes."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as T
from torch import nn
from torch.utils import _pytree as pytree

from forebay.backend import prepared_for
from forebay.rewriter.ir.plan import PlanError
from tests.e2e.coverage.outcome import EQUAL, Outcome, failed, one_line

Made = tuple[nn.Module, dict[str, Any]]  # a module and the arguments it is called with

IDS = torch.arange(24).view(2, 12) % 90 + 5
MASK = torch.tensor([[1] * 9 + [0] * 3, [1] * 12])
IMAGE = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
WIDE = torch.linspace(-1, 1, 2 * 3 * 64 * 64).view(2, 3, 64, 64)
SOUND = torch.sin(torch.arange(2 * 1600).float()).view(2, 1600)
TEXT: dict[str, Any] = dict(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                            intermediate_size=128, max_position_embeddings=64, pad_token_id=0)
VISION: dict[str, Any] = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
                              image_size=32, patch_size=8)
BETWEEN: dict[str, Any] = dict(vocab_size=100, d_model=64, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=128,
                               decoder_ffn_dim=128, encoder_attention_heads=4, decoder_attention_heads=4, num_layers=2,
                               d_ff=128, num_heads=4, d_kv=16, pad_token_id=0, decoder_start_token_id=1)
BOTH = {"input_ids": IDS, "decoder_input_ids": IDS, "use_cache": False}
AUDIO: dict[str, Any] = dict(TEXT, conv_dim=(32, 32), conv_stride=(5, 2), conv_kernel=(10, 3),
                             num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, num_feat_extract_layers=2)


def _hugging_face(kind: str, sizes: dict[str, Any], inputs: dict[str, Any]) -> Callable[[], Made]:
    def make() -> Made:
        config = T.AutoConfig.for_model(kind, **sizes)
        return T.AutoModel.from_config(config).eval(), inputs

    return make


def _layered(kind: str, image: torch.Tensor = IMAGE, **sizes: Any) -> Callable[[], Made]:
    return _hugging_face(kind, sizes, {"pixel_values": image})


def _made_by(model: str, config: str, sizes: dict[str, Any], inputs: dict[str, Any]) -> Callable[[], Made]:
    return lambda: (getattr(T, model)(getattr(T, config)(**sizes)).eval(), inputs)


def _plain(build: Callable[[], nn.Module], *inputs: torch.Tensor) -> Callable[[], Made]:
    return lambda: (build().eval(), {"": inputs})


def _text(kind: str, mask: bool = True, **more: Any) -> Callable[[], Made]:
    return _hugging_face(kind, TEXT | more, {"input_ids": IDS} | ({"attention_mask": MASK} if mask else {}))


def _image(kind: str, image: torch.Tensor = IMAGE, **more: Any) -> Callable[[], Made]:
    return _hugging_face(kind, VISION | more, {"pixel_values": image})


def _convolutions(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def _mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(96, 96), nn.GELU(), nn.LayerNorm(96))))


ROWS = torch.linspace(-1, 1, 8 * 96).view(8, 96)
SEQUENCE = torch.linspace(-1, 1, 2 * 10 * 96).view(2, 10, 96)

MODELS: dict[str, Callable[[], Made]] = {
    "BERT": _text("bert"), "RoBERTa": _text("roberta", max_position_embeddings=80), "DistilBERT": _text(
        "distilbert", dim=64, n_layers=2, n_heads=4, hidden_dim=128),
    "ALBERT": _text("albert", embedding_size=32), "ELECTRA": _text("electra", embedding_size=32),
    "MPNet": _text("mpnet", max_position_embeddings=80), "CamemBERT": _text("camembert", max_position_embeddings=80),
    "XLM-RoBERTa": _text("xlm-roberta", max_position_embeddings=80), "ConvBERT": _text("convbert", embedding_size=64),
    "DeBERTa": _text("deberta"), "DeBERTa-v2": _text("deberta-v2"), "ERNIE": _text("ernie"),
    "Nystromformer": _text("nystromformer", segment_means_seq_len=12, num_landmarks=12),
    "ModernBERT": _text("modernbert"), "SqueezeBERT": _text("squeezebert", embedding_size=64),
    "MobileBERT": _text("mobilebert", embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32),
    "I-BERT": _text("ibert", max_position_embeddings=80), "RoFormer": _text("roformer"),
    "BERT generation": _text("bert-generation"), "FNet": _text("fnet", mask=False),
    "XLNet": _hugging_face("xlnet", dict(vocab_size=100, d_model=64, n_layer=2, n_head=4, d_inner=128),
                           {"input_ids": IDS}),
    "YOSO": _text("yoso"), "MRA": _text("mra", block_per_row=1), "CANINE": _text("canine"),
    "RemBERT": _text("rembert", input_embedding_size=32), "Data2Vec text": _text("data2vec-text",
                                                                               max_position_embeddings=80),
    "CLIP text": _hugging_face("clip_text_model", TEXT, {"input_ids": IDS}),
    "T5": _hugging_face("t5", BETWEEN, BOTH), "mT5": _hugging_face("mt5", BETWEEN, BOTH),
    "BART": _hugging_face("bart", BETWEEN, BOTH), "mBART": _hugging_face("mbart", BETWEEN, BOTH),
    "Pegasus": _hugging_face("pegasus", BETWEEN, BOTH), "Marian": _hugging_face("marian", BETWEEN, BOTH),
    "M2M-100": _hugging_face("m2m_100", BETWEEN, BOTH), "Blenderbot": _hugging_face("blenderbot", BETWEEN, BOTH),
    "ViT": _image("vit"), "DeiT": _image("deit"), "BEiT": _image("beit", use_relative_position_bias=True),
    "Data2Vec vision": _image("data2vec-vision"), "DINOv2": _image("dinov2"), "ViT-MSN": _image("vit_msn"),
    "YOLOS": _image("yolos", image_size=[32, 32]), "IJEPA": _image("ijepa"),
    "CLIP vision": _image("clip_vision_model"),
    "SigLIP vision": _made_by("SiglipVisionModel", "SiglipVisionConfig", VISION, {"pixel_values": IMAGE}),
    "SigLIP text": _made_by("SiglipTextModel", "SiglipTextConfig", TEXT, {"input_ids": IDS}),
    "Swin": _layered("swin", image_size=32, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4,
                     patch_size=4),
    "Swin v2": _layered("swinv2", image_size=32, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4,
                     patch_size=4),
    "ConvNeXt": _layered("convnext", hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1]),
    "ConvNeXt v2": _layered("convnextv2", hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1]),
    "ResNet": _layered("resnet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]),
    "RegNet": _layered("regnet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8,
                       layer_type="y"),
    "BiT": _layered("bit", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_groups=4),
    "MobileNet v1": _layered("mobilenet_v1", depth_multiplier=0.25), "MobileNet v2": _layered(
        "mobilenet_v2", depth_multiplier=0.25, finegrained_output=False),
    "MobileViT": _layered("mobilevit", WIDE, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16],
                        image_size=64),
    "PoolFormer": _layered("poolformer", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]),
    "PVT": _layered("pvt", image_size=32, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
                    num_attention_heads=[1, 2, 4, 8]),
    "FocalNet": _layered("focalnet", image_size=32, embed_dim=16, hidden_sizes=[16, 32], depths=[1, 1],
                         focal_levels=[2, 2], focal_windows=[3, 3], patch_size=4),
    "Wav2Vec2": _hugging_face("wav2vec2", AUDIO, {"input_values": SOUND}),
    "HuBERT": _hugging_face("hubert", AUDIO, {"input_values": SOUND}),
    "WavLM": _hugging_face("wavlm", AUDIO, {"input_values": SOUND}),
    "GPT-2": _hugging_face("gpt2", dict(vocab_size=100, n_embd=64, n_layer=2, n_head=4),
                           {"input_ids": IDS, "use_cache": False}),
    "Llama": _hugging_face("llama", dict(TEXT, num_key_value_heads=2), {"input_ids": IDS, "use_cache": False}),
    "Mamba": _hugging_face("mamba", dict(TEXT, state_size=8), {"input_ids": IDS, "use_cache": False}),
    "MLP": _plain(_mlp, ROWS),
    "nn.TransformerEncoder": _plain(lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(96, 4, 128, batch_first=True), 2), SEQUENCE),
    "nn.TransformerDecoder": _plain(lambda: nn.TransformerDecoder(
        nn.TransformerDecoderLayer(96, 4, 128, batch_first=True), 2), SEQUENCE, SEQUENCE),
    "nn.LSTM": _plain(lambda: nn.LSTM(96, 48, 2), SEQUENCE),
    "nn.GRU": _plain(lambda: nn.GRU(96, 48, 2), SEQUENCE),
    "1-d convolutions": _plain(lambda: _convolutions(nn.Conv1d(10, 32, 3), nn.ReLU(), nn.Conv1d(32, 64, 5)), SEQUENCE),
    "transposed convolutions": _plain(
        lambda: _convolutions(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.ConvTranspose2d(32, 16, 3, 2)), IMAGE),
    "3-d convolutions": _plain(lambda: _convolutions(nn.Conv3d(3, 16, 3), nn.GroupNorm(4, 16), nn.Conv3d(16, 16, 3)),
                               WIDE.view(2, 3, 16, 16, 16)),
}


def check(name: str) -> Outcome:
    return check_made(MODELS[name])


def check_made(make: Callable[[], Made]) -> Outcome:
    """Twice, under half of the weights' bytes; where that cannot work, under what the refusal names."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        model, inputs = make()
        with torch.no_grad():
            wanted = _leaves(_call(model, inputs))
    except Exception as error:  # this table would be wrong about the model, so it says so
        return failed(f"eager cannot run it: {type(error).__name__}: {one_line(error)}")
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = _compiled(model, inputs, nbytes // 2, folder)
        except Exception as error:  # eager raised nothing
            return failed(f"{type(error).__name__}: {one_line(error)}")
        moved = bool(prepared_for(model))
    reasons = [str(w.message) for w in said if str(w.message).startswith("forebay:") and (
        "take turns in its budget" not in str(w.message))]  # graphs of one model, each within the budget
    if len(found) != len(wanted):
        return failed(f"{len(found)} results for {len(wanted)}")
    for ours, theirs in zip(found, wanted, strict=True):
        scale = max(1.0, theirs.abs().max().item()) if theirs.numel() else 1.0
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * scale, equal_nan=True):
            return failed(f"differs by {(ours - theirs).abs().max().item():.2e}")
    if moved and not reasons:
        return EQUAL
    return Outcome("refused", one_line(reasons[0])) if reasons else failed("nothing moved, and nothing was said")


def _compiled(model: nn.Module, inputs: dict[str, Any], budget: int, folder: str) -> list[torch.Tensor]:
    for _ in range(2):
        options = {"budget": {"device": budget, "disk": folder}, "strict": True}
        compiled = torch.compile(model, backend="forebay", options=options)
        try:
            with torch.no_grad():
                _call(compiled, inputs)
                return [t.clone() for t in _leaves(_call(compiled, inputs))]
        except PlanError as error:
            if "smallest that can is" not in str(error):
                raise
            budget = int(str(error).split("(")[1].split(" bytes")[0])
            torch._dynamo.reset()
        except Exception:
            break
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="forebay", options={"budget": {"device": budget, "disk": folder}})
    with torch.no_grad():
        return [t.clone() for t in _leaves(_call(compiled, inputs))]


def _call(model: Any, inputs: dict[str, Any]) -> Any:
    return model(*inputs[""]) if "" in inputs else model(**inputs)


def _leaves(value: Any) -> list[torch.Tensor]:
    if hasattr(value, "to_tuple"):
        value = value.to_tuple()
    return [leaf.double() for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
