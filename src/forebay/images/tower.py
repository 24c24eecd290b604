"""The vision tower and projector of a multimodal model: transformers' own modules, whose layers are read from the
model's files one at a time as they are called, within the budget. Each weight is used once for a batch of images, so
that nothing is gained by keeping any."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forebay.images.modalities import MODALITIES, Modality, TowerFeatures
from forebay.modules.streamed_module import StreamedModule, missing_weights, stored_records
from forebay.rewriter.capture.language_model import fill_constants
from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.match_weights import checkpoint_names, model_class
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.text_model import MULTIMODAL
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.one_thread import one_thread

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Inputs whose default is of no use.
NEEDED = ("image_grid_thw", "image_position_ids", "video_grid_thw", "video_position_ids", "num_frames_per_video")
GRIDS = ("image_grid_thw", "video_grid_thw")
OF_AUDIO = ("audio_tower", "embed_audio")


class ImageTower:
    """The tower of one model; `features` runs it.

    Attributes:
        plan: Its memory.
        base: The model without its language model.
    """

    def __init__(self, config: PreTrainedConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self.base = _without_text(config, dtype)
        records = stored_records(self.base, checkpoint, "model", checkpoint_names(config)[1], "model")
        if missing := missing_weights(self.base, records):
            raise CheckpointError(f"{checkpoint.folder} has no model.{missing[0]} that can be computed with, so images "
                                  "cannot be taken: give the folder that the model was published in")
        self._streamed = StreamedModule(self.base, records, dtype, "the vision tower")
        self.plan = self._streamed.sizes

    @property
    def peak_nbytes(self) -> int:
        """Bytes of weights and activations in the last run."""
        return self._streamed.peak_nbytes

    @property
    def least_nbytes(self) -> int:
        """The same without layers that were read ahead: a budget that is enough for these images."""
        return self._streamed.least_nbytes

    @property
    def summary(self) -> str:
        """Return the tower's memory as a line of a plan."""
        plan = self.plan
        return (f"{format_nbytes(plan.nbytes)} of a vision tower, read once per batch of images before the prefill; "
                f"{format_nbytes(plan.weight_nbytes)} at a time ({plan.layers} layers in turn), and activations")

    def features(self, given: Mapping[str, torch.Tensor], budget_nbytes: int) -> dict[Modality, TowerFeatures]:
        """Run the tower over images and videos.

        Args:
            given: As transformers' processor makes them.
            budget_nbytes: For weights and activations together.

        Returns:
            By each modality that is given, in their order, embeddings [N, H] of all its tokens, and features
            [N, layers H] that are added after the first layers.

        Raises:
            ValueError: A part of what the processor makes is missing, or the model takes no videos.
            PlanError: The budget has no room for the weights, or for the activations of so many images.
        """
        asked = {each: self._inputs(each, given) for each in MODALITIES if each.pixels in given}
        with self._streamed.running(budget_nbytes):
            return {each: self._features(each, inputs) for each, inputs in asked.items()}

    def _inputs(self, modality: Modality, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Arguments of the base model's method for a modality."""
        method = getattr(self.base, modality.method, None)
        if method is None:
            raise ValueError(f"{modality.name}: a model of type {self.config.model_type!r} takes no {modality.pixels}; "
                             "give frames as images")
        taken = inspect.signature(method).parameters
        for name, parameter in taken.items():
            optional = parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD
            if name not in given and (not optional or name in NEEDED):
                raise ValueError(f"{modality.pixels}: this model needs {name} too: give all that the processor makes")
        values = {name: torch.as_tensor(given[name]) for name in taken if name in given}
        return {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in values.items()}

    def _features(self, modality: Modality, inputs: Mapping[str, torch.Tensor]) -> TowerFeatures:
        """Compute all images together, or some at a time where the budget has no room for more."""
        inputs = _without_padding(modality, inputs)
        found, borders = list[TowerFeatures](), _borders(modality, inputs)
        begin, count = 0, len(borders[modality.pixels]) - 1
        at_a_time = count
        while begin < count:
            end = min(count, begin + at_a_time)
            some = {name: value[borders[name][begin] : borders[name][end]] for name, value in inputs.items()}
            try:
                found.append(self._features_of(modality, some))
                begin = end
                continue
            except PlanError:
                if at_a_time <= 1:
                    raise
            self._streamed.forget_call()
            at_a_time = (at_a_time + 1) // 2
        embeds, added = zip(*found, strict=True)
        return torch.cat(embeds), torch.cat(added)

    def _features_of(self, modality: Modality, inputs: Mapping[str, torch.Tensor]) -> TowerFeatures:
        try:
            found: Any = getattr(self.base, modality.method)(**inputs)
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:  # of transformers' code
            raise ValueError(f"{modality.pixels}: the model cannot compute them, give what its own processor makes: "
                             f"{' '.join(str(error).split())[:120]}") from error
        embeds, *added = (_rows(each) for each in (
            self._embeddings(found), *(getattr(found, "deepstack_features", None) or ())))
        return embeds, torch.cat(added, 1) if added else embeds[:, :0]

    def _embeddings(self, found: Any) -> Any:
        """Embeddings of images, of which `get_image_features` may leave the projector to the model."""
        projector = MULTIMODAL[self.config.model_type].projector
        return self.base.get_submodule(projector)(_rows(found.last_hidden_state)) if projector else found.pooler_output


def _without_padding(modality: Modality, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Images by themselves, where rows [prompts, images, …] were filled up with images of zeros (Idefics3)."""
    pixels = inputs[modality.pixels]
    if "pixel_attention_mask" not in inputs or pixels.dim() != 5:
        return inputs
    real = pixels.flatten(2).any(2).flatten()
    if not real.any():
        return inputs
    apart = {name: value.flatten(0, 1)[:, None] for name, value in inputs.items()}
    return apart if real.all() else {name: value[real] for name, value in apart.items()}


def _borders(modality: Modality, inputs: Mapping[str, torch.Tensor]) -> dict[str, Sequence[int]]:
    """By each input where the rows of one image end and those of the next begin; all are one image where they cannot
    be told apart."""
    rows = {name: value.shape[0] if value.dim() else 0 for name, value in inputs.items()}
    pixels, grids = rows[modality.pixels], next((inputs[name] for name in GRIDS if name in inputs), None)
    images = pixels if grids is None else grids.shape[0]
    of_pixels = range(images + 1) if grids is None else [0, *grids.prod(-1).cumsum(0).tolist()]
    others = {count for name, count in rows.items() if name != modality.pixels}
    if others - {images} or of_pixels[-1] != pixels or "batch_num_images" in inputs:
        return {name: [0, count] for name, count in rows.items()}
    return {name: of_pixels if name == modality.pixels else range(images + 1) for name in rows}


@one_thread
def _without_text(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """The base model of a multimodal one on the meta device, without its language model."""
    from transformers import initialization

    with torch.device("meta"), initialization.no_init_weights():
        whole: Any = model_class(config)._from_config(copy.deepcopy(config), dtype=dtype)
    base = whole.base_model
    others = (MULTIMODAL[config.model_type].text.removeprefix("model.").partition(".")[0], *OF_AUDIO)
    for name in others:
        if getattr(base, name, None) is not None:
            setattr(base, name, nn.Module())
    fill_constants(base)
    return base.eval()


def _rows(features: Any) -> torch.Tensor:
    """[N, H] of the features of all images, which are one tensor or one for each."""
    parts = [features] if isinstance(features, torch.Tensor) else list(features)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
