"""Kernels as compiled for 64-bit ARM and run by an emulator, where a cross compiler and QEMU are there."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forebay.kernels.build import compile
from forebay.kernels.build.library import Library
from forebay.kernels.build.processors import NATIVE
from forebay.kernels.cpu_support import native

# Names that gcc has for kinds of processors, and one of each that QEMU has, with no more than that.
PROCESSORS = {"armv8-a": "cortex-a57", "armv8.2-a+dotprod": "neoverse-n1"}
CXX = shutil.which("aarch64-linux-gnu-g++")
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
SOURCE = Path(__file__).with_suffix(".cpp")


def build(kind: str, cxx: str) -> Path:
    """The kernels' library for one of PROCESSORS."""
    return compile.build(replace(native.library(), flags=flags_for(kind), of_processor=False), cxx)


def flags_for(kind: str) -> tuple[str, ...]:
    """What the kernels are compiled with for another kind of processor, at -O1: a third of the time."""
    return tuple({NATIVE: f"-march={kind}", "-O3": "-O1"}.get(flag, flag) for flag in native.FLAGS)


def pack(number: int) -> bytes:
    return struct.pack("<q", number)


class Emulator:
    """An emulated process that runs calls of kernels over copies of their memory."""

    def __init__(self, kind: str) -> None:
        assert CXX is not None and QEMU is not None
        library = build(kind, CXX)
        program = library.with_name(f"emulated-{library.stem}")
        subprocess.run([CXX, "-O1", "-std=c++17", str(SOURCE), "-o", str(program), "-ldl"], check=True)
        libc = subprocess.run([CXX, "-print-file-name=libc.so.6"], check=True, capture_output=True, text=True).stdout
        root = Path(libc.strip()).resolve().parents[1]
        self._process = subprocess.Popen([QEMU, "-cpu", PROCESSORS[kind], "-L", str(root), str(program), str(library)],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, call: native.NativeCall) -> None:
        """What calling `call` does."""
        args, *kept = call.keep
        assert isinstance(args, ctypes.Structure)
        blocks = list({memory_of(each) for each in kept if each is not None})
        pointers = pointers_of(args)
        given = [pack(len(pointers))]
        for at, pointer in pointers.items():
            block = next(i for i, (address, nbytes) in enumerate(blocks) if 0 <= pointer - address < max(1, nbytes))
            given += [pack(at), pack(block), pack(pointer - blocks[block][0])]
        if call.scratch_floats:
            native.scratch(call.scratch_floats)  # as a call does, though its memory is not used
        if self.answer(call.kernel, bytes(args), call.scratch_floats, blocks, given):
            call.refused()

    def answer(self, kernel: str, args: bytes = b"", floats: int = 0, blocks: Sequence[tuple[int, int]] = (),
               pointers: Sequence[bytes] = (pack(0),)) -> int:
        """What the kernel returns, which leaves blocks (address, bytes) as it leaves its copies of them."""
        given = [f"forebay_{kernel}".encode().ljust(64, b"\0"), pack(len(args)), args, pack(floats),
                 pack(torch.get_num_threads()), pack(len(blocks))]
        for address, nbytes in blocks:
            given += [pack(nbytes), ctypes.string_at(address, nbytes)]
        stream, answers = self._process.stdin, self._process.stdout
        assert stream is not None and answers is not None
        stream.write(b"".join([*given, *pointers]))
        stream.flush()
        returned = answers.read(8)
        assert len(returned) == 8, f"{kernel} ended the emulated process"
        for address, nbytes in blocks:
            ctypes.memmove(address, answers.read(nbytes), nbytes)
        return int.from_bytes(returned, "little")


def memory_of(kept: Any) -> tuple[int, int]:
    """Address and bytes of all that a tensor, or a number of ctypes', has its memory from."""
    if isinstance(kept, torch.Tensor):
        storage = kept.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    return ctypes.addressof(kept), ctypes.sizeof(kept)


def pointers_of(args: Any) -> dict[int, int]:
    """Where in a structure pointers stand, and what they are."""
    found = {getattr(type(args), name).offset: getattr(args, name) for name, kind in args._fields_
             if kind is ctypes.c_void_p}
    return {at: pointer for at, pointer in found.items() if pointer is not None}


def take_over(kind: str) -> None:
    """Every call of a kernel in this process goes to such a processor from here on."""
    emulator, load = Emulator(kind), native.load_library

    def load_library(library: Library) -> ctypes.CDLL:
        found = load(library)
        found.forebay_integer_dot = lambda: emulator.answer("integer_dot")
        found.forebay_integer_codebooks = lambda: emulator.answer("integer_codebooks")
        return found

    native.load_library = load_library
    native.NativeCall.__call__ = lambda call: emulator.run(call)  # type: ignore[method-assign]
