"""Models of diffusers under `torch.compile(backend="forebay")`, small and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.e2e.coverage import compiled
from tests.e2e.coverage.outcome import Outcome

Made = tuple[nn.Module, dict[str, Any]]
TIMES = torch.tensor([5.0, 5.0])


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _model(kind: str, sizes: dict[str, Any], part: str = "", **inputs: Any) -> Callable[[], Made]:
    """A model of a class of diffusers, or a part of one, and what it is called with."""
    def make() -> Made:
        import diffusers

        torch.manual_seed(0)
        whole = getattr(diffusers, kind)(**sizes).eval()
        for p in whole.parameters():
            if p.dim() > 1:
                p.data.normal_(0, p.shape[-1] ** -0.5 if p.dim() == 2 else 0.1)
        return whole.get_submodule(part), inputs

    return make


GRID = torch.cat([torch.zeros(64, 1), torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0))], 1)
HEADS: dict[str, Any] = dict(num_attention_heads=4, attention_head_dim=8, in_channels=4)
ADALN: dict[str, Any] = dict(
    HEADS, sample_size=8, num_layers=4, patch_size=2, out_channels=8, attention_bias=True,
    activation_fn="gelu-approximate", num_embeds_ada_norm=1000)
JOINT: dict[str, Any] = dict(HEADS, sample_size=32, caption_projection_dim=32, joint_attention_dim=32, out_channels=4)
IMAGE, TEXT = drawn(2, 4, 16, 16), drawn(2, 20, 32)

MODELS: dict[str, Callable[[], Made]] = {
    "DiT": _model("DiTTransformer2DModel", ADALN | {"norm_type": "ada_norm_zero", "norm_elementwise_affine": False},
                  hidden_states=drawn(2, 4, 8, 8), timestep=TIMES.long(), class_labels=torch.tensor([1, 2])),
    "Stable Diffusion 3": _model(
        "SD3Transformer2DModel", JOINT | {"patch_size": 1, "num_layers": 4, "pooled_projection_dim": 64,
                                          "pos_embed_max_size": 96},
        hidden_states=IMAGE, encoder_hidden_states=TEXT, pooled_projections=drawn(2, 64), timestep=TIMES),
    "Flux": _model(
        "FluxTransformer2DModel", dict(
            patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8]),
        hidden_states=drawn(1, 64, 4), encoder_hidden_states=drawn(1, 12, 32), pooled_projections=drawn(1, 32),
        timestep=torch.tensor([0.5]), img_ids=GRID, txt_ids=torch.zeros(12, 3)),
    "Wan": _model(
        "WanTransformer3DModel", dict(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
            text_dim=16, freq_dim=256, ffn_dim=32, num_layers=4, rope_max_seq_len=32),
        hidden_states=drawn(1, 4, 2, 16, 16), encoder_hidden_states=drawn(1, 12, 16), timestep=torch.tensor([7])),
    "PixArt": _model(
        "PixArtTransformer2DModel", ADALN | {
            "caption_channels": 16, "cross_attention_dim": 32, "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False, "norm_eps": 1e-6, "use_additional_conditions": False},
        hidden_states=drawn(2, 4, 8, 8), encoder_hidden_states=drawn(2, 8, 16), timestep=TIMES.long(),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
    "Sana": _model(
        "SanaTransformer2DModel", HEADS | {
            "patch_size": 1, "out_channels": 4, "num_layers": 4, "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 8, "cross_attention_dim": 32, "caption_channels": 16, "sample_size": 16},
        hidden_states=IMAGE, encoder_hidden_states=drawn(2, 8, 16), timestep=TIMES.long()),
    "AuraFlow": _model(
        "AuraFlowTransformer2DModel", JOINT | {
            "patch_size": 2, "num_mmdit_layers": 2, "num_single_dit_layers": 2, "pos_embed_max_size": 256},
        hidden_states=IMAGE, encoder_hidden_states=TEXT, timestep=TIMES / 10),
    "Lumina 2": _model(
        "Lumina2Transformer2DModel", dict(
            sample_size=16, patch_size=2, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1,
            num_attention_heads=3, num_kv_heads=1, multiple_of=2, axes_dim_rope=[4, 2, 2], cap_feat_dim=8),
        hidden_states=IMAGE, encoder_hidden_states=drawn(2, 16, 8), timestep=TIMES / 10,
        encoder_attention_mask=torch.ones(2, 16, dtype=torch.bool)),
    "CogVideoX": _model(
        "CogVideoXTransformer3DModel", dict(
            num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=2,
            text_embed_dim=8, num_layers=4, sample_width=8, sample_height=8, sample_frames=8, patch_size=2,
            max_text_seq_length=8),
        hidden_states=drawn(2, 1, 4, 8, 8), encoder_hidden_states=drawn(2, 8, 8), timestep=TIMES.long()),
    "HunyuanVideo": _model(
        "HunyuanVideoTransformer3DModel", dict(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
            num_single_layers=1, num_refiner_layers=1, patch_size=1, patch_size_t=1, text_embed_dim=16,
            pooled_projection_dim=8, rope_axes_dim=(2, 4, 4)),
        hidden_states=drawn(1, 4, 1, 16, 16), timestep=torch.tensor([5.0]), encoder_hidden_states=drawn(1, 12, 16),
        pooled_projections=drawn(1, 8), encoder_attention_mask=torch.ones(1, 12), guidance=torch.tensor([6000.0])),
    "Stable Diffusion's UNet": _model(
        "UNet2DConditionModel", dict(
            block_out_channels=(32, 64), norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32, attention_head_dim=8,
            layers_per_block=1, sample_size=16),
        sample=IMAGE, timestep=torch.tensor(5), encoder_hidden_states=TEXT),
    "Stable Diffusion's VAE": _model(
        "AutoencoderKL", dict(
            block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8), "decoder", sample=IMAGE),
    "Sana's VAE": _model(
        "AutoencoderDC", dict(
            latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
            downsample_block_type="conv", upsample_block_type="interpolate"), "decoder", hidden_states=IMAGE[:1]),
    "Wan's VAE": _model(
        "AutoencoderKLWan", dict(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                                 temperal_downsample=[False, True, True]), "decoder", x=drawn(1, 16, 1, 8, 8)),
}


def check(name: str) -> Outcome:
    """As for other compiled models; ModuleNotFoundError without diffusers."""
    import diffusers  # noqa: F401

    return compiled.check_made(MODELS[name])
