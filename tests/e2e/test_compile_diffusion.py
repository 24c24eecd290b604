"""Diffusion models through torch.compile: streamed, with eager's results, one capture for all steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.coverage import diffusion
from fresh_dynamo import fresh  # noqa: F401
from selection import without
from torch import nn

from forebay.backend import is_offloaded, prepared_for
from forebay.rewriter.ir.plan import PlanError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*lies in memory"), pytest.mark.filterwarnings("ignore:OpenMP threads spin")]


class Cropped(nn.Module):
    """Positions of a large grid, of which an image has those in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.randn(1, 24, 24, 32))
        self.first, self.last = nn.Linear(32, 600), nn.Linear(600, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x + self.positions[:, 5:13, 7:15])))


@pytest.mark.filterwarnings("error:forebay")
def test_a_part_of_a_table_is_read(tmp_path: Path) -> None:
    """The rest of what is read from the file has no reader."""
    model, x = Cropped().eval(), torch.randn(1, 8, 8, 32)
    expected = model(x)
    with pytest.raises(PlanError) as refused:
        torch.compile(model, backend="forebay", options={"budget": "1KiB", "strict": True})(x)
    smallest = int(str(refused.value).split("(")[1].split(" bytes")[0])
    torch._dynamo.reset()
    options = {"budget": {"device": smallest, "disk": str(tmp_path)}, "strict": True}
    run = torch.compile(model, backend="forebay", options=options)
    for _ in range(2):
        torch.testing.assert_close(run(x), expected)
    (prepared,) = prepared_for(model)
    assert prepared.program.streamed_nbytes() >= model.positions.nbytes


@pytest.mark.parametrize("name", without(diffusion.MODELS, ("DiT", "Sana")))
def test_models_of_diffusers(name: str) -> None:
    pytest.importorskip("diffusers")
    found = diffusion.check(name)
    assert found.result == "equal", found


def test_a_pipeline_takes_turns_in_one_budget(tmp_path: Path) -> None:
    """Two images by all parts of a pipeline of diffusers: one graph for each, whose arenas are within the budget."""
    pytest.importorskip("diffusers")
    pipe = _pipeline(tmp_path)
    asked: dict[str, Any] = dict(num_inference_steps=3, output_type="np", guidance_scale=2.0, height=16, width=16,
                                 use_resolution_binning=False, clean_caption=False, max_sequence_length=16)

    def image(seed: int) -> Any:
        return torch.from_numpy(pipe("w1 w2", generator=torch.Generator().manual_seed(seed), **asked).images)

    expected = [image(seed) for seed in (0, 1)]
    assert not torch.allclose(*expected, atol=1e-3), "noise must matter"
    parts = [pipe.text_encoder, pipe.transformer, pipe.vae.decoder]
    budget = 1_500_000
    assert all(sum(p.nbytes for p in part.parameters()) > budget for part in parts)
    options = {"budget": {"device": budget, "disk": str(tmp_path)}, "strict": True}
    for part in parts:
        part.compile(backend="forebay", options=options)
    with pytest.warns(RuntimeWarning, match="take turns in its budget"):
        for seed in (0, 1):
            torch.testing.assert_close(image(seed), expected[seed], rtol=1e-3, atol=1e-4)
    for part in parts:
        (prepared,) = prepared_for(part)  # for all steps and both images
        assert is_offloaded(part) and sum(prepared.program.arenas.values()) <= budget


def _pipeline(folder: Path) -> Any:
    """A tiny PixArt: T5, a transformer and a VAE."""
    import diffusers
    import transformers
    from filmed import word_tokenizer

    tokenizer = word_tokenizer([f"w{i}" for i in range(20)])
    text = transformers.T5EncoderModel(transformers.T5Config(
        vocab_size=100, d_model=64, d_kv=16, d_ff=1024, num_layers=4, num_heads=4)).eval()
    transformer = diffusers.PixArtTransformer2DModel(**diffusion.ADALN | dict(
        attention_head_dim=16, num_layers=6, caption_channels=64, cross_attention_dim=64, norm_type="ada_norm_single",
        norm_elementwise_affine=False, use_additional_conditions=False)).eval()
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8).eval()
    pipe = diffusers.PixArtAlphaPipeline(
        tokenizer=tokenizer, text_encoder=text, transformer=transformer, vae=vae,
        scheduler=diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe
