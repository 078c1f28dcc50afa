"""Compiles every shipped Triton kernel for chips that need not be here, and prints what each one takes.

    python -m ecospec_kernels.aot [--chips sm_80,gfx942] [--only expert_mlp]

Registers and spills are read from the compiled file itself: the ELF attributes of a CUDA kernel, the notes of a ROCm one.
Exit code 1 if a kernel does not compile, spills, or wants more shared memory than the chip gives one block.

A kernel is listed by `configurations(backend)` in its op's `fused.py`; an op needs no line here.
"""

from __future__ import annotations

import argparse
import os
import re
import struct
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported: an interpreted kernel cannot be compiled

from ecospec_kernels.launch import CUDA, HIP, Configuration


class Chip(NamedTuple):
    """A compilation target and the shared memory that one block may have, in bytes."""

    backend: str
    arch: int | str
    warp: int
    shared: int


# CUDA C++ Programming Guide, table of compute capabilities (maximum per block); CDNA 3 ISA guide (LDS).
CHIPS = {
    "sm_80": Chip(CUDA, 80, 32, 163 << 10),
    "sm_90": Chip(CUDA, 90, 32, 227 << 10),
    "sm_100": Chip(CUDA, 100, 32, 227 << 10),
    "gfx942": Chip(HIP, "gfx942", 64, 64 << 10),
}
_REGISTERS, _FRAME = 0x2F, 0x11  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE


class Usage(NamedTuple):
    """What one compiled kernel takes: registers per thread, bytes spilled per thread, bytes of shared memory."""

    registers: int
    spills: int
    shared: int


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the sections of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + size * i) for i in range(count)]
    start = headers[names][4]
    for name, kind, _, _, offset, length in headers:
        if kind != 8:  # SHT_NOBITS
            begin = start + name
            yield elf[begin : elf.index(b"\0", begin)].decode(), elf[offset : offset + length]


def cubin_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes on the stack) per thread of the kernel in a CUDA binary; Triton's only use of a stack is to spill."""
    registers = stack = 0
    for name, content in _sections(cubin):
        if name != ".nv.info":
            continue
        at = 0
        while at < len(content):
            form, attribute, length = struct.unpack_from("<BBH", content, at)
            at += 4
            if form == 4:  # EIFMT_SVAL: `length` bytes follow; the other forms hold their value in place
                if attribute in (_REGISTERS, _FRAME):
                    _, value = struct.unpack_from("<II", content, at)
                    registers = max(registers, value) if attribute == _REGISTERS else registers
                    stack = max(stack, value) if attribute == _FRAME else stack
                at += length
    if not registers:
        raise ValueError("no register count in the CUDA binary")
    return registers, stack


def amdgcn_usage(assembly: str) -> tuple[int, int]:
    """(registers, bytes spilled) per thread of the kernel in ROCm assembly."""

    def note(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", assembly)
        if found is None:
            raise ValueError(f"no .{name} in the assembly")
        return int(found.group(1))

    return note("vgpr_count"), 4 * (note("vgpr_spill_count") + note("sgpr_spill_count"))


def compiled(configuration: Configuration, chip: Chip) -> Usage:
    """Compile one configuration for one chip, as a launch compiles it where a model's sizes and addresses are multiples of 16.

    What changes from pass to pass a kernel names in `do_not_specialize`; what may be a view, in `do_not_specialize_on_alignment`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, types = configuration.kernel, configuration.types
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in configuration.constants]
    if missing or not types.keys() | configuration.constants.keys() <= set(kernel.arg_names):
        raise ValueError(f"{configuration.name}: arguments are {kernel.arg_names}, {missing} have no type")
    constants = {(kernel.arg_names.index(name),): value for name, value in configuration.constants.items()}
    aligned = {
        (p.num,): [["tt.divisibility", 16]]
        for p, kind in zip(kernel.params, signature.values(), strict=True)
        if (kind[0] == "*" or kind in ("i32", "i64")) and not (p.do_not_specialize or p.do_not_specialize_on_alignment)
    }  # fmt: skip
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages,
               "enable_fp_fusion": configuration.fp_fusion}  # fmt: skip
    done: Any = triton.compile(source, target=GPUTarget(*chip[:3]), options=options)
    counts = cubin_usage(done.asm["cubin"]) if chip.backend == CUDA else amdgcn_usage(done.asm["amdgcn"])
    return Usage(*counts, done.metadata.shared)


def shipped(backend: str) -> list[Configuration]:
    """The configurations of every op that has a `fused.py`."""
    ops = sorted(path.parent.name for path in Path(__file__).parent.glob("*/fused.py"))
    return [c for op in ops for c in import_module(f"ecospec_kernels.{op}.fused").configurations(backend)]


def main(arguments: list[str] | None = None) -> int:
    """Compile, print the table, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ecospec_kernels.aot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--chips", default=",".join(CHIPS), help=f"of {', '.join(CHIPS)}")
    parser.add_argument("--only", default="", help="only kernels whose name contains this")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.chips.split(",") if name not in CHIPS]
    if unknown:
        parser.error(f"--chips: {', '.join(unknown)}: known are {', '.join(CHIPS)}")
    bad = count = 0
    print(f"{'chip':8}{'kernel':58}{'warps':>6}{'stages':>7}{'registers':>10}{'spills':>7}{'shared':>8}")
    for name in chosen.chips.split(","):
        chip = CHIPS[name]
        for configuration in shipped(chip.backend):
            if chosen.only not in configuration.name:
                continue
            count += 1
            line = f"{name:8}{configuration.name:58}{configuration.num_warps:6}{configuration.num_stages:7}"
            try:
                usage = compiled(configuration, chip)
            except Exception as error:  # one line per kernel, whatever its compiler said
                bad += 1
                print(f"{line} does not compile: {str(error).splitlines()[0]}", flush=True)
                continue
            wrong = usage.spills > 0 or usage.shared > chip.shared
            bad += wrong
            print(f"{line}{usage.registers:10}{usage.spills:7}{usage.shared:8}{'  <-' * wrong}", flush=True)
    print(f"{count} kernels, {bad} that do not compile, spill, or want more shared memory than a block may have")
    return 1 if bad or not count else 0


if __name__ == "__main__":
    sys.exit(main())
