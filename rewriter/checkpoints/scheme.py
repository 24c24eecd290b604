"""How a checkpoint's matrices are quantized, as its config says it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from forebay.rewriter.checkpoints import known_settings
from forebay.rewriter.checkpoints.known_settings import unknown_compressed, unknown_setting
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.word_codes import GroupLayout
from forebay.rewriter.ir.files import read_input, write_text

# What reads the matrices of a scheme, in `Scheme.coded`; "" for codes in words of 32 bits (`grouped.py`).
STORED = "stored"  # `coded.py`: the dtypes of codes and scales say what they are
BNB4 = "bitsandbytes"  # the same module
INT8, BITNET = "int8", "bitnet"  # `integers.py`
HQQ, TORCHAO = "hqq", "torchao"  # `affine.py`
MLX = "mlx"  # `mlx.py`
# Files of their own, from before config.json had their settings, and the method that each names.
OWN_FILES = {"quantize_config.json": "gptq", "hf_quant_config.json": "modelopt"}
KEYS, MLX_KEY = ("quantization_config", "compression_config"), "quantization"  # of a config.json
# Of compressed-tensors' formats that are no words of 32 bits, type and bits of weights.
FORMATS: Mapping[str, tuple[tuple[str, tuple[int, ...]], ...]] = {
    "float-quantized": (("float", (8,)),), "mxfp8-quantized": (("float", (8,)),),
    "nvfp4-pack-quantized": (("float", (4,)),), "mxfp4-pack-quantized": (("float", (4,)),),
    "int-quantized": (("int", (2, 3, 4, 5, 6, 7, 8)),),
    "naive-quantized": (("float", (8,)), ("int", (2, 3, 4, 5, 6, 7, 8))),
}
WORDS, SEVERAL = "pack-quantized", "mixed-precision"
MODELOPT_WEIGHTS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8", "W8A16")
QUARK_WEIGHTS = ("fp8_e4m3", "fp4", "int8")
AUTO_ROUND_WORDS = ("auto_gptq", "gptq", "auto_awq", "awq")


class Scheme(NamedTuple):
    """How a checkpoint's matrices are quantized.

    Attributes:
        method: One of METHODS.
        layouts: The layout of most matrices, then those of single ones. The shapes of a matrix's tensors tell which it
            has.
        zero_offset: The number to be added to each stored zero point.
        ordered: Whether groups were made in the order of activations, so that the group of each input must be stored.
        coded: What reads codes that are not in words of 32 bits.
        block: Rows and columns of a block that has a scale of its own, of fp8.
        divides: Whether scales divide, of bitnet.
        settings: What the config says of all matrices, of hqq, and of single ones too, of mlx.
    """

    method: str
    layouts: tuple[GroupLayout, ...] = ()
    zero_offset: int = 0
    ordered: bool = False
    coded: str = ""
    block: tuple[int, int] = (128, 128)
    divides: bool = False
    settings: Mapping[str, Any] = {}


def quantization_settings(folder: Path) -> Mapping[str, Any] | None:
    """Read the settings of quantized weights from config.json, or from a separate file next to it; None without any.
    Whoever reads the config tells if it is damaged."""
    try:
        config = json.loads(read_input(folder / "config.json"))
        found = config.get(MLX_KEY)
        if isinstance(found, dict):  # mlx says it twice, both times without its name
            found = {**found, "quant_method": MLX} if found else None
        found = found or next((config[key] for key in KEYS if config.get(key)), None)
        for name, method in OWN_FILES.items():
            if not found and (folder / name).is_file():
                found = {"quant_method": method} | json.loads(read_input(folder / name))
    except (OSError, ValueError, TypeError, RecursionError, AttributeError):
        return None
    if found and not isinstance(found, dict):
        raise CheckpointError(f"{folder / 'config.json'}: quantization_config must be an object, found "
                              f"{type(found).__name__}")
    return found or None


def without_quantization(path: Path) -> None:
    """Take from a config.json what it says of quantized weights, and the files of their own that may do so."""
    for name in OWN_FILES:
        path.with_name(name).unlink(missing_ok=True)
    config = json.loads(read_input(path))
    if [name for name in (*KEYS, MLX_KEY) if config.pop(name, None) is not None]:
        write_text(path, json.dumps(config, indent=2) + "\n")


def read_scheme(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """The scheme of a checkpoint; CheckpointError, naming method and detail, for one that rows cannot hold."""
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise refused(folder, f"{method!r}; {', '.join(METHODS)} are read")
    try:
        return _checked(READERS[method](settings, folder), folder)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:  # the last: int(Infinity)
        raise refused(folder, f"{method}, but quantization_config lacks what that needs: {error!r}") from error


def refused(folder: Path, what: str) -> CheckpointError:
    """The error for weights quantized by something that is not read."""
    return CheckpointError(f"{folder / 'config.json'} says that weights are quantized by {what}. Quantize the model it "
                           "was made from, with `forebay quantize`")


def _known(
    settings: Mapping[str, Any], known: known_settings.Known, folder: Path, method: str, where: str = ""
) -> None:
    """CheckpointError for a setting that is not known."""
    _refuse_odd(unknown_setting(settings, known, where), folder, method)


def _refuse_odd(odd: str, folder: Path, method: str) -> None:
    if odd:
        raise refused(folder, f"{method} with {odd}, which this release does not know or apply")


def _gptq(settings: Mapping[str, Any], folder: Path) -> Scheme:
    said = {str(settings[key]).lower() for key in ("checkpoint_format", "format") if settings.get(key)}
    if len(said) > 1 or not said <= {"gptq", "gptq_v2"}:
        raise refused(folder, f"gptq in checkpoint_format {' and '.join(map(repr, sorted(said)))}; gptq or gptq_v2 is "
                               "read")
    _known(settings, known_settings.GPTQ, folder, "gptq")
    scheme = Scheme("gptq", (_group_layout(settings),), 0 if said == {"gptq_v2"} else 1, bool(settings.get("desc_act")))
    return _with_overrides(scheme, settings.get("dynamic") or {}, folder)


def _awq(settings: Mapping[str, Any], folder: Path) -> Scheme:
    for key in ("version", "format"):
        if str(settings.get(key) or "gemm").lower() != "gemm":
            raise refused(folder, f"awq in {key} {settings[key]!r}; gemm is read")
    if settings.get("backend") == "llm-awq":
        raise refused(folder, "awq for the backend 'llm-awq', whose layout differs; version gemm is read")
    _known(settings, known_settings.AWQ, folder, "awq")
    layout = GroupLayout(int(settings["bits"]), max(0, int(settings["group_size"])))
    return _with_overrides(Scheme("awq", (layout,)), settings.get("dynamic") or {}, folder)


def _auto_round(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """AutoRound's own format: words of GPTQ or AWQ. `extra_config` has settings of single modules."""
    packing = str(settings.get("packing_format") or "auto_round:auto_gptq").removeprefix("auto_round:")
    if packing not in AUTO_ROUND_WORDS:
        raise refused(folder, f"auto-round in packing_format {settings['packing_format']!r}; auto_gptq and auto_awq "
                              "are read")
    _known(settings, known_settings.AUTO_ROUND, folder, "auto-round")
    single = {name: given for name, given in (settings.get("extra_config") or {}).items()
              if int(given.get("bits") or settings["bits"]) <= 8}  # others have plain weights
    layout = _group_layout(settings)
    if packing.endswith("awq"):
        return _with_overrides(Scheme("awq", (layout._replace(symmetric=None),)), single, folder, "extra_config")
    return _with_overrides(Scheme("gptq", (layout,), 1), single, folder, "extra_config")


def _group_layout(settings: Mapping[str, Any]) -> GroupLayout:
    return GroupLayout(int(settings["bits"]), max(0, int(settings["group_size"])), _flag(settings, "sym"))


def _with_overrides(scheme: Scheme, single: Mapping[str, Any], folder: Path, where: str = "dynamic") -> Scheme:
    """`scheme` with the layouts of single modules. Patterns are not matched: a matrix's shapes tell which layout it
    has, and the plain weight of a module that is left out ("-:") is read as such."""
    typical, ordered = scheme.layouts[0], scheme.ordered
    layouts = [typical]
    for pattern, given in single.items():
        if pattern.startswith("-:"):
            continue
        _known(given, known_settings.OVERRIDE, folder, scheme.method, f"{where}[{pattern!r}].")
        bits, group = (int(usual if given.get(name) is None else given[name])
                       for name, usual in (("bits", typical.bits), ("group_size", typical.group)))
        layouts.append(GroupLayout(bits, max(0, group), _flag(given, "sym", typical.symmetric)))
        ordered = ordered or bool(given.get("desc_act"))
    return scheme._replace(layouts=tuple(dict.fromkeys(layouts)), ordered=ordered)


def _compressed(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """compressed-tensors, whose groups may be in several formats. Activations keep the model's dtype, whatever is said
    of them."""
    layouts, ordered, block, stored = list[GroupLayout](), False, (128, 128), False
    typical, groups = settings["format"], settings["config_groups"].values()
    formats = [group.get("format") or typical for group in groups]
    for format in [*formats, *([] if typical == SEVERAL else [typical])]:
        if format not in FORMATS and format != WORDS:
            raise refused(folder, f"compressed-tensors in format {format!r}; {WORDS}, {', '.join(FORMATS)} are read")
    for format, weights in zip(formats, (group["weights"] for group in groups), strict=True):
        if format in FORMATS:
            _check_stored(format, weights, folder)
            stored, given = True, weights.get("block_structure")
            block = _block(given, folder) if given else block
            continue
        if weights.get("type", "int") != "int" or weights["strategy"] not in ("group", "channel"):
            raise refused(folder, f"compressed-tensors of type {weights.get('type')!r} by {weights['strategy']!r}; "
                                   "int by group or channel is read")
        size = int(weights.get("group_size") or 0) if weights["strategy"] == "group" else 0
        layouts.append(GroupLayout(int(weights["num_bits"]), size, _flag(weights, "symmetric", True)))
        ordered = ordered or weights.get("actorder") in (True, "group", "dynamic")
    _refuse_odd(unknown_compressed(settings, stored), folder, "compressed-tensors")
    if not layouts and not stored:
        raise refused(folder, "compressed-tensors, but config_groups is empty")
    return Scheme("compressed-tensors", tuple(layouts), ordered=ordered, coded=STORED if stored else "", block=block)


def _check_stored(format: str, weights: Mapping[str, Any], folder: Path) -> None:
    kind, bits = weights.get("type"), weights.get("num_bits")
    fits = any(kind == name and bits in widths for name, widths in FORMATS[format])
    if not fits or (kind == "float" and weights.get("symmetric") is False):
        read = " or ".join(f"symmetric floats of {widths[0]} bits" if name == "float" else "int of 2 to 8 bits"
                           for name, widths in FORMATS[format])
        raise refused(folder, f"compressed-tensors in format {format!r} of {bits!r} bits of type {kind!r}; {read} are "
                              "read")


def _mxfp4(settings: Mapping[str, Any], folder: Path) -> Scheme:
    _known(settings, known_settings.MXFP4, folder, "mxfp4")
    return Scheme("mxfp4")


def _fp8(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """DeepSeek's and Qwen's fp8."""
    _known(settings, known_settings.FP8, folder, "fp8")
    return Scheme("fp8", coded=STORED, block=_block(settings.get("weight_block_size") or (128, 128), folder))


def _fbgemm(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """fp8 with a scale for each row."""
    _known(settings, known_settings.FBGEMM, folder, "fbgemm_fp8")
    return Scheme("fbgemm_fp8", coded=STORED)


def _modelopt(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """NVIDIA's ModelOpt, from config.json or hf_quant_config.json."""
    said = settings.get("quantization", settings)
    asked = [said["quant_algo"]]
    if asked == ["MIXED_PRECISION"]:
        asked = [each["quant_algo"] for each in said["quantized_layers"].values()]
    for name in asked:
        if name not in MODELOPT_WEIGHTS:
            raise refused(folder, f"modelopt with quant_algo {name!r}; {', '.join(MODELOPT_WEIGHTS)} are read")
    _known(said, known_settings.MODELOPT, folder, "modelopt")
    return Scheme("modelopt", coded=STORED)


def _quark(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """AMD's Quark: fp8, MXFP4 and int8."""
    _known(settings, known_settings.QUARK, folder, "quark")
    groups = [settings["global_quant_config"]]
    for key in ("layer_quant_config", "layer_type_quant_config"):
        groups += (settings.get(key) or {}).values()
    if any(group.get("bias") for group in groups):
        raise refused(folder, "quark with quantized biases, which are not read")
    for weights in (group["weight"] for group in groups if group.get("weight")):
        dtype, size, format = (weights.get(key) for key in ("dtype", "group_size", "scale_format"))
        if dtype not in QUARK_WEIGHTS or (dtype == "fp4" and (size, format) != (32, "e8m0")):
            raise refused(folder, f"quark with weights of {dtype!r} in groups of {size!r} with scales of {format!r}; "
                                  "fp8_e4m3, int8, and fp4 in groups of 32 with scales of e8m0 are read")
    return Scheme("quark", coded=STORED)


def _bitsandbytes(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """bitsandbytes in 4 or 8 bits."""
    _known(settings, known_settings.BITSANDBYTES, folder, "bitsandbytes")
    return Scheme("bitsandbytes", coded=INT8 if settings.get("load_in_8bit") else BNB4)


def _bitnet(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """BitNet's packed ternary weights."""
    _known(settings, known_settings.BITNET, folder, "bitnet")
    return Scheme("bitnet", coded=BITNET, divides=settings.get("linear_class") != "autobitlinear")


def _hqq(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """HQQ. Each matrix says its own bits and groups; the config has those of matrices that do not."""
    given = settings.get("quant_config") or {}
    own = given.get("weight_quant_params") or {}
    for said, known in ((settings, known_settings.HQQ), (given, known_settings.HQQ_PARTS),
                        (own, known_settings.HQQ_WEIGHTS)):
        _known(said, known, folder, HQQ)
    said = {name: int(own[name]) for name in ("nbits", "axis") if own.get(name) is not None}
    return Scheme(HQQ, coded=HQQ, settings=said)


def _torchao(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """torchao. The files' metadata describes each matrix."""
    _known(settings, known_settings.TORCHAO, folder, TORCHAO)
    return Scheme(TORCHAO, coded=TORCHAO)


def _mlx(settings: Mapping[str, Any], folder: Path) -> Scheme:
    """mlx. A key that is no setting is a module, with settings of its own or false."""
    _known({key: value for key, value in settings.items() if not isinstance(value, dict)}, known_settings.MLX, folder,
           MLX)
    for name, given in settings.items():
        if isinstance(given, dict):
            _known(given, known_settings.MLX, folder, MLX, f"{name}.")
    return Scheme(MLX, coded=MLX, settings={key: value for key, value in settings.items() if value})


READERS = {"awq": _awq, "gptq": _gptq, "auto-round": _auto_round, "compressed-tensors": _compressed, "mxfp4": _mxfp4,
           "fp8": _fp8, "fbgemm_fp8": _fbgemm, "modelopt": _modelopt, "quark": _quark, "bitsandbytes": _bitsandbytes,
           "bitnet": _bitnet, HQQ: _hqq, TORCHAO: _torchao, MLX: _mlx}
METHODS = tuple(READERS)


def _flag(settings: Mapping[str, Any], key: str, default: bool | None = None) -> bool | None:
    found = settings.get(key)
    if found is not None and not isinstance(found, bool):
        raise ValueError(f"{key} must be true or false, found {found!r}")
    return default if found is None else found


def _checked(scheme: Scheme, folder: Path) -> Scheme:
    for bits, group, _ in scheme.layouts:
        if bits not in ((4,) if scheme.method == "awq" else (4, 8)):
            raise refused(folder, f"{scheme.method} of {bits} bits; 4 bits are read, and 8 but for awq")
        if group % 32:
            raise refused(folder, f"{scheme.method} in groups of {group}; multiples of 32 are read")
    return scheme


def _block(given: Any, folder: Path) -> tuple[int, int]:
    rows, columns = given
    if not all(type(size) is int and size > 0 for size in (rows, columns)) or columns % 32:
        raise refused(folder, f"fp8 in blocks of {given!r}; those of a multiple of 32 columns are read")
    return rows, columns
