"""Images with prompts, to folders of multimodal models: tokens are those of transformers, which has all in memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from multimodal import CONFIGS, TEXT, save
from selection import ALL

import forebay
from forebay.build_model import build_model
from forebay.images import prompts as image_prompts
from forebay.images.modalities import IMAGES
from forebay.images.open_tower import image_options
from forebay.images.tower import ImageTower
from forebay.open_model import open_model
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.text_model import MULTIMODAL
from forebay.rewriter.ir.plan import Budget, PlanError, Workload
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.options import Options
from forebay.runtime.run.prefill import chunk_spans
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]

ASKED: Any = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
KINDS = tuple(kind for kind, each in MULTIMODAL.items() if each.images)
SHOWN = KINDS if ALL else ("gemma3", "qwen3_vl", "smolvlm")
IMAGE = 150  # id of the token for images


def pixels(kind: str, model: Any) -> list[tuple[dict[str, torch.Tensor], int]]:
    """Two images as the processor of a kind gives each, of other sizes where the kind has any; and their tokens."""
    vision, draw = model.config.vision_config, torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    if kind.startswith("qwen"):
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        grids = [torch.tensor([[1, 4, 4]]), torch.tensor([[1, 8, 4]])]
        found = [dict(pixel_values=drawn(int(grid.prod()), width), image_grid_thw=grid) for grid in grids]
    elif kind == "mistral3":
        found = [dict(pixel_values=drawn(1, 3, 56, 56), image_sizes=torch.tensor([size])) for size in ((56, 56),
                                                                                                       (28, 56))]
    elif kind in ("llava_next", "llava_onevision"):
        found = [dict(pixel_values=drawn(1, 3, 3, 28, 28), image_sizes=torch.tensor([size])) for size in ((28, 28),
                                                                                                          (28, 50))]
    elif kind == "gemma4":
        grids = [torch.cartesian_prod(torch.arange(4), torch.arange(rows)) for rows in (4, 2)]
        found = [dict(pixel_values=drawn(1, 16, 48), image_position_ids=torch.nn.functional.pad(
            grid, (0, 0, 0, 16 - len(grid)), value=-1)[None]) for grid in grids]
    elif kind == "llama4":
        found = [dict(pixel_values=drawn(1, 3, 56, 56)) for _ in range(2)]
    elif kind in ("smolvlm", "idefics3"):
        found = [dict(pixel_values=drawn(1, 1, 3, 28, 28)) for _ in range(2)]
    elif kind == "lfm2_vl":
        found = [dict(pixel_values=drawn(1, 4, 3 * 14 * 14), spatial_shapes=torch.tensor([[2, 2]]),
                      pixel_attention_mask=torch.ones(1, 4, dtype=torch.int64)) for _ in range(2)]
    else:
        found = [dict(pixel_values=drawn(1, 3, 28, 28)) for _ in range(2)]
    base = model.base_model
    with torch.no_grad():
        made = [base.get_image_features(**each) for each in found]
        made = [each.last_hidden_state if kind == "llama4" else each.pooler_output for each in made]
    return [(each, sum(part.reshape(-1, part.shape[-1]).shape[0] for part in parts))
            for each, parts in zip(found, made, strict=True)]


def batch(kind: str, rows: list[list[int]], images: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """What a processor gives for rows of ids, padded on the left, and images, joined."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    asked = dict(input_ids=ids, attention_mask=(ids > 0).long())
    if images:
        asked |= {name: torch.cat([each[name] for each in images]) for name in images[0]}
        if kind.startswith("qwen") or kind == "gemma4":
            asked["mm_token_type_ids"] = (ids == IMAGE).int()
        if kind in ("gemma3", "paligemma"):
            asked["token_type_ids"] = (ids == IMAGE).long() * (kind == "gemma3")
    return asked


def cases(kind: str, model: Any) -> dict[str, dict[str, Any]]:
    (one, n), (other, m) = pixels(kind, model)
    first, second, text = [3, 4, 5, *[IMAGE] * n, 9, 7], [6, *[IMAGE] * m, 8, 8, 8, 2], [11, 12, 13]
    both = [5, *[IMAGE] * n, 4, *[IMAGE] * m, 3]
    if kind in ("smolvlm", "idefics3"):  # whose images have a row of prompts each
        return {"two": batch(kind, [first, second], [one, other]), "text": batch(kind, [text, first[:2]], []),
                "one": batch(kind, [first], [one])}
    return {"two": batch(kind, [first, second], [one, other]), "text": batch(kind, [text, first[:2]], []),
            "one with text": batch(kind, [text, second], [other]), "both in one": batch(kind, [both], [one, other])}


@pytest.mark.parametrize("kind", SHOWN)
def test_tokens_with_images(kind: str, tmp_path: Path) -> None:
    whole = save(kind, tmp_path)
    tight = "40MB" if kind == "cohere2_vision" else "1500kB" if MULTIMODAL[kind].groups else "700kB"
    budgets = ("4MB", tight) if ALL and tight != "40MB" else (tight,)
    asked = cases(kind, whole)
    expected = {name: whole.generate(**each, **ASKED).tolist() for name, each in asked.items()}
    blind = {name: each for name, each in asked["two"].items() if name in ("input_ids", "attention_mask")}
    assert whole.generate(**blind, **ASKED).tolist() != expected["two"], "images must matter"
    for budget in budgets:
        with forebay.wrap(tmp_path, budget, batch=2, prompt=24, new_tokens=8, machine=Machine.default()) as lm:
            for name, each in asked.items():
                assert lm.generate(**each, **ASKED).tolist() == expected[name], (budget, name)
            assert 0 < lm.tower.peak_nbytes <= lm.plan.budget.device
            assert "of a vision tower, read once per batch of images" in lm.explain()


@pytest.mark.parametrize("kind", SHOWN if ALL else ("gemma3", "qwen3_vl"))
def test_slots_take_prompts_with_images(kind: str, tmp_path: Path) -> None:
    """Requests with and without images enter slots while others decode, of which one runs out before the other."""
    whole = save(kind, tmp_path)
    asked = cases(kind, whole)
    # A text by itself is causal in PaliGemma, but not in a batch with images.
    other = "both in one" if MULTIMODAL[kind].whole else "one with text" if "one with text" in asked else "one"
    calls = [asked["text"], asked[other], asked["two"]]
    prompts, requests, expected = [], [], []
    opened = open_model(tmp_path, embeds=True)
    options = image_options(Options(admitted=1, machine=Machine.default()), opened[0], 24)
    with build_model(opened, Budget(4_000_000), Workload(2, 24, 8), options) as lm:
        for call in calls:
            ids, mask = call["input_ids"], call["attention_mask"].bool()
            expected += [row[ids.shape[1]:] for row in whole.generate(**call, **ASKED).tolist()]
            prompts += [row[keep] for row, keep in zip(ids, mask, strict=True)]
        images = iter([each for call in calls for each in images_of(kind, call)])
        for i, ids in enumerate(prompts):
            given = {}
            if count := runs_of(ids):
                parts = [next(images) for _ in range(count)]
                given = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
            features = partial(image_prompts.prompt_features, lm, ids.tolist(), given, 40_000_000) if given else None
            requests.append(Request(ids, 6 - i % 2, features=features))
        found: dict[int, list[int]] = {}
        lm.answer_all(requests, Sampling(), frozenset(), on_end=found.__setitem__, on_step=lambda work: None)
    assert [found[i] for i in range(len(requests))] == [row[: 6 - i % 2] for i, row in enumerate(expected)]


def runs_of(ids: torch.Tensor) -> int:
    """How many images a prompt has, which are apart from each other."""
    there = torch.nn.functional.pad((ids == IMAGE).int(), (1, 0))
    return int((there.diff() > 0).sum())


def images_of(kind: str, call: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """What a processor gave of each image of a call."""
    given = {name: value for name, value in call.items() if name not in (
        "input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")}
    if "image_grid_thw" not in given:
        count = len(given.get("pixel_values", ()))
        return [{name: value[i : i + 1] for name, value in given.items()} for i in range(count)]
    sizes = given["image_grid_thw"].prod(1).tolist()
    return [dict(pixel_values=part, image_grid_thw=grid[None]) for part, grid in zip(
        given["pixel_values"].split(sizes), given["image_grid_thw"], strict=True)]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "aya_vision"])
def test_beams_and_a_module_in_memory(kind: str, tmp_path: Path) -> None:
    """Beams copy rows and change their places, with what they know of positions. Their scores follow from logits, which
    Aya's head, other than Cohere2's, leaves as they are."""
    whole = save(kind, tmp_path)
    asked = cases(kind, whole)["one with text"] | ASKED | {"num_beams": 3}
    expected = whole.generate(**asked)
    with forebay.wrap(whole, "4MB", batch=6, prompt=24, new_tokens=8, machine=Machine.default()) as lm:
        assert lm.generate(**asked).tolist() == expected.tolist()


def test_steps_hold_images_whose_tokens_see_each_other() -> None:
    """A step that breaks off within an image is followed by one that begins with it; rows are at other tokens."""
    assert chunk_spans((8,), 12, groups={(1, 5), (6, 10)}) == [(0, 8), (4, 8)]
    assert chunk_spans((6,), 14, groups={(3, 7)}) == [(0, 6), (3, 6), (8, 6)]
    assert chunk_spans((6,), 14, groups={(3, 7), (2, 5)}) == [(0, 6), (3, 6), (8, 6)]
    assert chunk_spans((5,), 9, groups={(3, 7), (2, 4)}) == [(0, 5), (3, 5), (4, 5)]
    with pytest.raises(PlanError, match="prefill_chunk: an image's tokens see each other, and steps of 3 tokens"):
        chunk_spans((3,), 9, groups={(1, 5)})


def test_a_tower_holds_a_layer_at_a_time(tmp_path: Path) -> None:
    """Of eight layers one is in memory, where there is room the next one too, and nothing stays; a budget without room
    for the images is refused."""
    plain = CONFIGS["internvl"]
    whole = save("internvl", tmp_path, plain | {"vision_config": plain["vision_config"] | {
        "num_hidden_layers": 8, "intermediate_size": 1024}})
    tower = ImageTower(whole.config, open_checkpoint(tmp_path), torch.float32)
    given = cases("internvl", whole)["two"]
    with torch.no_grad():
        wanted = whole.model.get_image_features(given["pixel_values"]).pooler_output
    assert torch.equal(tower.features(given, 1 << 20)[IMAGES][0], wanted.reshape(-1, wanted.shape[-1]))
    plan, roomy, least = tower.plan, tower.peak_nbytes, tower.least_nbytes
    tower.features(given, plan.weight_nbytes + plan.layer_nbytes)  # without room for the next layer
    peak = tower.peak_nbytes
    assert least == peak < roomy <= peak + plan.layer_nbytes
    layers = whole.model.vision_tower.encoder.layer
    assert plan.layers == 8 and plan.layer_nbytes == sum(p.nbytes for p in layers[0].parameters())
    assert plan.weight_nbytes + given["pixel_values"].nbytes // 2 < peak < plan.weight_nbytes * 1.5 < plan.nbytes / 2
    assert all(p.is_meta for p in tower.base.parameters())
    tower.features({"pixel_values": given["pixel_values"][:1]}, 1 << 20)
    single = tower.least_nbytes
    for budget, message in ((plan.weight_nbytes - 1, "the vision tower needs"), (single - 1, "these inputs need more")):
        with pytest.raises(PlanError, match=message):
            tower.features(given, budget)
        assert all(p.is_meta for p in tower.base.parameters())
    tower.features(given, peak)
    parts = tower.features(given, peak - 1)[IMAGES][0]
    assert tower.least_nbytes < peak
    torch.testing.assert_close(parts, wanted.reshape(-1, wanted.shape[-1]))


@pytest.mark.parametrize("kind", ["qwen3_vl", "smolvlm"])
def test_images_run_in_parts(kind: str, tmp_path: Path) -> None:
    """Images of other sizes, of which the budget has no room for all at a time; what fills up rows is left out."""
    whole = save(kind, tmp_path)
    (one, _), (other, _) = pixels(kind, whole)
    given = {name: torch.cat([value, other[name], value]) for name, value in one.items()}
    if kind == "smolvlm":
        rows = given["pixel_values"][:, 0]
        given = {"pixel_values": torch.stack([rows[:2], torch.stack([torch.zeros_like(rows[2]), rows[2]])]),
                 "pixel_attention_mask": torch.ones(2, 2, *rows.shape[2:], dtype=torch.int64)}
    tower = ImageTower(whole.config, open_checkpoint(tmp_path), torch.float32)
    together = tower.features(given, 1 << 24)[IMAGES]
    most = tower.least_nbytes
    parts = tower.features(given, most - 1)[IMAGES]
    assert tower.least_nbytes < most and (kind == "smolvlm" or together[1].numel())
    for found, wanted in zip(parts, together, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.all
def test_a_budget_for_no_whole_prompt_names_what_can_be_changed(tmp_path: Path) -> None:
    """Images ask for steps over whole prompts, which is no option of the user; one that is given is named as ever."""
    whole = save("paligemma", tmp_path)
    asked: dict[str, Any] = dict(batch=2, prompt=24, new_tokens=8, machine=Machine.default())
    message = (r"smallest that can is .* 24 tokens of each prompt are computed at once. Shorter prompts "
               r"\(smaller or fewer images\) or a smaller batch")
    with forebay.wrap(tmp_path, "700kB", **asked) as lm, pytest.raises(PlanError, match=message) as refused:
        lm.generate(**cases("paligemma", whole)["two"], **ASKED)
    assert "prefill_chunk" not in str(refused.value)
    with pytest.raises(PlanError, match="prefill_chunk=24 cannot work within a device budget"):
        forebay.wrap(tmp_path, "200kB", prefill_chunk=24, **asked)


def test_what_cannot_be_taken_is_refused_in_a_line(tmp_path: Path) -> None:
    whole = save("qwen2_5_vl", tmp_path / "qwen")
    asked = cases("qwen2_5_vl", whole)["two"]
    with forebay.wrap(tmp_path / "qwen", "4MB", batch=2, prompt=24, new_tokens=8, machine=Machine.default()) as lm:
        with pytest.raises(ValueError, match=r"the prompts have 10 tokens for images \(id 150\), and the images make"):
            lm.generate(**asked | {"input_ids": asked["input_ids"].masked_fill(
                (asked["input_ids"] == IMAGE).cumsum(1) == 1, 9)}, **ASKED)
        with pytest.raises(ValueError, match="this model needs image_grid_thw too"):
            lm.generate(asked["input_ids"], pixel_values=asked["pixel_values"], **ASKED)
        with pytest.raises(ValueError, match="images or inputs_embeds, not both"):
            lm.generate(inputs_embeds=torch.zeros(1, 2, 64), pixel_values=asked["pixel_values"], **ASKED)
    T.LlamaForCausalLM(T.LlamaConfig(**TEXT)).save_pretrained(tmp_path / "llama")
    with forebay.wrap(tmp_path / "llama", "4MB", prompt=8, new_tokens=8, machine=Machine.default()) as lm, (
            pytest.raises(ValueError, match="a model of type 'llama' takes text alone here; images are taken by")):
        lm.generate(torch.tensor([[3, 4]]), pixel_values=torch.zeros(1, 3, 28, 28), **ASKED)


def test_an_image_longer_than_a_window_is_refused() -> None:
    placed, mask = torch.tensor([[False, *[True] * 5, False]]), torch.ones(1, 7, dtype=torch.int64)
    until = image_prompts._ends(placed, mask)
    assert until.tolist() == [[1, 6, 6, 6, 6, 6, 7]]
    image_prompts._require_within(until, mask, 5)
    image_prompts._require_within(until, mask, None)
    with pytest.raises(ValueError, match="an image of 5 tokens is longer than the model's window of 4"):
        image_prompts._require_within(until, mask, 4)


def test_arguments_without_pixels_are_left_to_others() -> None:
    zeros = torch.zeros(1, 3, dtype=torch.int64)
    options = {"mm_token_type_ids": zeros, "token_type_ids": zeros, "image_sizes": [[1, 1]], "pixel_values": None}
    assert image_prompts.take_image_inputs(options) == {}
    assert set(options) == {"token_type_ids", "image_sizes", "pixel_values"}
    with pytest.raises(ValueError, match="input_audio_embeds: audio is not taken; give text, images or videos"):
        image_prompts.take_image_inputs({"input_audio_embeds": zeros})
    with pytest.raises(ValueError, match="image_pixel_values: images of this kind of model are not taken"):
        image_prompts.take_image_inputs({"image_pixel_values": zeros})
    marked = {"mm_token_type_ids": zeros + 1}
    assert image_prompts.take_image_inputs(marked) == {} and marked, "tokens of images without images"
