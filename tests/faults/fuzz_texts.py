"""What stands beside a model's weights, as formats to spoil: tokenizers, chat templates, settings of quantized weights,
configs alone, notes in the cache folder."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lora_folders import write_lora
from quantized_folders import quantized, settings
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from forebay.calibration import Calibration, LayerRouting, LayerScores, calibrated
from forebay.commands import render_chats
from forebay.commands.chat_template import MOST_CHARACTERS
from forebay.commands.evaluate import _read_texts
from forebay.commands.plain_tokenizer import plain_tokenizer
from forebay.commands.prompts import PromptLine, encode, load_tokenizer
from forebay.commands.terminal import JobError
from forebay.huggingface.served import asks_nothing_more
from forebay.kernels.build.cache_folder import cache_folder
from forebay.rewriter.checkpoints.config import read_config
from forebay.rewriter.checkpoints.conversions import list_conversions
from forebay.rewriter.checkpoints.grouped import grouped_tensors
from forebay.rewriter.checkpoints.lora import read_lora
from forebay.rewriter.checkpoints.lora_tensors import lora_tensors
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.resolve import MODELS, SOURCE
from forebay.rewriter.checkpoints.scheme import quantization_settings, read_scheme
from forebay.rewriter.ir.score_range import check_ranges
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.model_shapes import ModelError, load_config, shape_from_config
from tests.faults.spoil import Format, Header
from tests.rewriter.checkpoints.test_affine import HQQ, TORCHAO, hqq, whole
from tests.rewriter.checkpoints.test_coded import BLOCKS, BNB, CASES, compressed, four_bits, fours, fp8
from tests.rewriter.checkpoints.test_grouped import CASES as WORDS
from tests.rewriter.checkpoints.test_integers import BITNET, INT8, int8, stored, ternary, w8a8
from tests.rewriter.checkpoints.test_known_settings import QUARK
from tests.rewriter.checkpoints.test_mlx import CASES as MLX

CODED = ("fp8", "bitsandbytes", "int8", "bitnet", "nvfp4", "packed mxfp4", "hqq", "torchao", "mxfp8", "w8a8",
         "modelopt", "mlx", "mlx mxfp4", "quark")

TEMPLATE = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m.content | trim }}{% if not loop.last %}\n{% endif %}"
            "{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ bos_token }}{% endif %}")
CHAT = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b"}]


def _tokenizer(folder: Path) -> None:
    letters = {token: i for i, token in enumerate(["<s>", "</s>", *"abĠ", "ab", "Ġa"])}
    raw = Tokenizer(models.BPE(letters, [("a", "b"), ("Ġ", "a")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", model_max_length=64)
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    if (alone := folder / "chat_template.jinja").exists():
        alone.unlink()  # it stands in the settings, with all else
        noted = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(noted | {"chat_template": TEMPLATE}))


def _tokenize(folder: Path) -> None:
    """As a job and as `forebay run MODEL "PROMPT"` do; a prompt that is refused is no error."""
    plain = plain_tokenizer(folder)
    if plain is not None:
        with contextlib.suppress(Exception):  # said by transformers' tokenizer below
            plain("ab a")
    tokenizer = load_tokenizer(folder)
    prompts, bad = encode([PromptLine(1, 1, "ab a")], tokenizer, chat=False, vocab_size=8)
    for prompt in prompts:
        tokenizer.decode(list(prompt.ids), skip_special_tokens=True)
    if bad:
        raise JobError(bad[0].reason)


def tokenizer(folder: Path) -> Format:
    _tokenizer(folder)
    return Format(folder / "tokenizer.json", lambda: _tokenize(folder))


def tokenizer_settings(folder: Path) -> Format:
    _tokenizer(folder)
    return Format(folder / "tokenizer_config.json", lambda: _tokenize(folder))


def chat_template(folder: Path) -> Format:
    """Rendered by what renders it in a process of its own, but in this one, under a test's limits in place of its."""
    path = folder / "chat_template.jinja"
    path.write_text(TEMPLATE)

    def read() -> None:
        job = {"template": path.read_bytes().decode("latin-1"), "tokens": {"bos_token": "<s>"}, "time_s": 0,
               "nbytes": 0, "most": MOST_CHARACTERS}
        told = io.StringIO()
        asked = io.StringIO(f"{json.dumps(job)}\n{json.dumps([CHAT, {}])}\n")
        with (mock.patch.object(sys, "stdin", asked), mock.patch.object(render_chats.resource, "setrlimit"),
              mock.patch.object(render_chats.signal, "setitimer"), contextlib.redirect_stdout(told)):
            render_chats.main()
        kind, text = json.loads(told.getvalue())
        if kind == "error":
            raise JobError(text[:500])

    return Format(path, read)


def grouped(method: str, folder: Path) -> Format:
    """A matrix of another quantizer, its settings and the header of its tensors."""
    like = "gptq" if method == "auto-round" else method
    _, bits, group, symmetric = next(case for case in WORDS if case[0] == like)
    parts, _ = quantized(like, bits, group, symmetric, 8, 128, torch.float16)
    save_file({f"layer.{name}": value for name, value in parts.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "quantization_config": settings(method, bits, group, symmetric)}))

    return Format(folder / "config.json", lambda: _read_matrices(folder))


def mxfp4(folder: Path) -> Format:
    """The file of a layer's experts in MXFP4."""
    drawn = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 4, 2, 16), generator=drawn, dtype=torch.uint8)
    save_file({"experts.up_blocks": blocks, "experts.up_scales": blocks[..., 0].clone() // 2,
               "experts.up_bias": torch.zeros(2, 4, dtype=torch.bfloat16)}, folder / "model.safetensors")
    scheme = read_scheme({"quant_method": "mxfp4"}, folder)

    def read() -> None:
        for tensor in grouped_tensors(open_checkpoint(folder), scheme)[0]:
            experts, _, outputs = tensor.shape
            tensor.rows(True)(0, experts * outputs)
            tensor.repacked()(0, experts * outputs)

    return Format(folder / "model.safetensors", read)


def _read_matrices(folder: Path, repacked: bool = False) -> None:
    """Read the packed matrices of a folder, and write them as rows of ours too where asked."""
    found = quantization_settings(folder)
    if found is None:
        raise JobError("it has no settings of quantized weights")
    for tensor in grouped_tensors(open_checkpoint(folder), read_scheme(found, folder))[0]:
        if tensor.format():
            tensor.rows(False)(0, tensor.shape[0])
            if repacked:
                tensor.repacked()(0, tensor.shape[0])


def _parts_of(method: str) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """The tensors of a matrix [8, 128], what the file's metadata says of it, and the settings of the config."""
    if method == "hqq":
        return (*hqq(8, 128, 4, 64)[:2], HQQ)
    if method == "torchao":
        return (*whole(8, 128, 32, True, "int4")[:2], TORCHAO)
    if method == "w8a8":
        return (*stored(8, 128, 2, True)[:2], w8a8(False))
    if method.startswith("mlx"):
        said, made, _ = MLX["mxfp4" if method == "mlx mxfp4" else "3 bits"]
        return (*made(8, 128)[:2], said)
    if method in ("mxfp8", "modelopt"):
        return CASES[method][1](8, 128)[0], {}, CASES[method][0]
    made = {"fp8": lambda: fp8(8, 128, (128, 128), "weight_scale_inv"), "int8": lambda: int8(8, 128),
            "bitsandbytes": lambda: four_bits(8, 128, "nf4", True), "bitnet": lambda: ternary(8, 128, True),
            "nvfp4": lambda: fours(8, 128, "nvfp4"), "packed mxfp4": lambda: fours(8, 128, "mxfp4"),
            "quark": lambda: fours(8, 128, "mxfp4")}
    said = {"fp8": BLOCKS, "int8": INT8, "bitsandbytes": BNB, "bitnet": BITNET,
            "nvfp4": compressed("nvfp4-pack-quantized", 4, strategy="tensor_group", group_size=16),
            "packed mxfp4": compressed("mxfp4-pack-quantized", 4, strategy="group", group_size=32), "quark": QUARK}
    return made[method]()[0], {}, said[method]


def coded(method: str, folder: Path, header: bool = False, config: bool = False) -> Format:
    """The file of a matrix that a library packed: any of its bytes, the names and shapes of its parts, or what the
    config says of them."""
    torch.manual_seed(0)
    parts, about, said = _parts_of(method)
    held = {f"layer.{name}": part.clone() for name, part in parts.items()}
    save_file(held | {"norm": torch.zeros(4, dtype=torch.bfloat16)}, folder / "model.safetensors",
              {"layer.weight": json.dumps(about)} if about else None)
    key = "quantization" if method.startswith("mlx") else "quantization_config"
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", key: said}))

    made = Header if header else Format
    spoiled = folder / ("config.json" if config else "model.safetensors")
    return made(spoiled, lambda: _read_matrices(folder, repacked=True))


def adapter(folder: Path, header: bool = False, config: bool = False) -> Format:
    """An adapter's file or its settings, with a base that they fit."""
    from families import llama

    torch.manual_seed(0)
    (base := folder / "base").mkdir()
    model = AutoModelForCausalLM.from_config(llama(1))
    model.save_pretrained(base)
    own = write_lora(folder / "adapter", model, r".*\.[qv]_proj|lm_head", base, use_dora=True,
                     rank_pattern={"v_proj": 2}, modules_to_save=["model.norm"])
    checkpoint, base_config = open_checkpoint(base), read_config(base)

    def read() -> None:
        for tensor in lora_tensors(read_lora(own), checkpoint, base_config):
            assert tuple(tensor.read().shape) == tensor.shape

    tensors = own / "adapter_model.safetensors"
    save_file(load_file(tensors), tensors)  # without metadata
    return (Header if header else Format)(own / "adapter_config.json" if config else tensors, read)


def config_alone(folder: Path) -> Format:
    """A config without weights, of which `forebay plan --config` takes the sizes."""
    from families import llama

    llama(1).save_pretrained(folder)

    def read() -> None:
        try:
            shape_from_config(load_config(str(folder))[1])
        except ModelError as error:  # as the command tells it
            raise JobError(str(error)) from error

    return Format(folder / "config.json", read)


def served(folder: Path) -> Format:
    """A generation config as it is read without transformers."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "use_cache": True, "top_k": 5}))

    def read() -> None:
        if not asks_nothing_more(folder):
            raise JobError("it asks for more")

    return Format(folder / "generation_config.json", read)


def conversion(folder: Path) -> Format:
    """What a converted model was made from, as `forebay models` reads it."""
    made = cache_folder() / MODELS / "m-0123456789ab"
    made.mkdir(parents=True, exist_ok=True)
    (made / SOURCE).write_text(json.dumps({"path": str(folder / "m.gguf"), "state": [5, 1, 2, 3]}))

    def read() -> None:
        (found,) = list_conversions()
        if found.source is None:
            raise JobError("it does not say of what it was made")

    return Format(made / SOURCE, read)


def texts(folder: Path) -> Format:
    """Lines to predict, as `forebay eval --words` reads them."""
    (folder / "words.jsonl").write_text("".join(json.dumps({"text": f"one two {i}"}) + "\n" for i in range(3)))
    return Format(folder / "words.jsonl", lambda: _read_texts(folder / "words.jsonl"))


def calibration(folder: Path) -> Format:
    path, dtypes = folder / "calibration.json", (torch.float32, torch.float16)
    layers = tuple(LayerScores(i, 9, -2.5, 3.0, 1.5) for i in range(2))
    Calibration("f", 1, 2, layers, (LayerRouting(0, (3, 1), (0.5, 0.9)),)).save(path)
    return Format(path, lambda: [check_ranges(
        calibrated(Options(calibration=path), "f", dtype).score_ranges) for dtype in dtypes])
