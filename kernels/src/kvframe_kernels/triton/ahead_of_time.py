"""Compiles launches for a GPU that need not exist, and reads the resources that they take.

A launch's tensors may be ``meta`` tensors. Only their dtypes and the launch's numbers decide what is compiled, as in a
real launch. Under ``TRITON_INTERPRET=1`` nothing can be compiled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvframe_kernels.triton.launch import Launch

HOPPER = 90
"""Compute capability 9.0."""

MAX_SHARED_BYTES = {90: 227 * 1024}
"""The most shared memory of one program, by compute capability (CUDA programming guide, table of capabilities)."""

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
_ALIGNED = 16


@dataclass(frozen=True)
class Resources:
    """The resources of one program of a compiled launch.

    Attributes:
        registers: Registers of a thread.
        shared_bytes: Shared memory.
        stack_bytes: Local memory of a thread, mostly registers that were spilled to device memory.
        num_warps: Its warps.
        cubin: The compiled program.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    num_warps: int
    cubin: bytes

    @cached_property
    def assembly(self) -> str:
        """The device's instructions, as text."""
        return _read(self.cubin, "-sass")

    def count(self, instruction: str) -> int:
        """Return the number of instructions that begin with ``instruction`` (``"HGMMA"``)."""
        return len(re.findall(rf"\b{re.escape(instruction)}", self.assembly))


def compile_launch(launch: Launch, capability: int = HOPPER) -> Resources:
    """Return the resources of a launch on a GPU; raise Triton's own error if it does not compile.

    Args:
        launch: The launch; nothing is run.
        capability: The GPU's compute capability, times ten.
    """
    compiled = triton.compile(
        _source(launch),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )
    usage = _read(compiled.asm["cubin"], "--dump-resource-usage")
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK"))
    return Resources(
        registers=registers,
        shared_bytes=compiled.metadata.shared,
        stack_bytes=stack,
        num_warps=launch.num_warps,
        cubin=compiled.asm["cubin"],
    )


def _source(launch: Launch) -> Any:
    """Return the kernel, specialised for these arguments as ``triton.jit`` does it in a launch."""
    signature, constants, hints = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments.get(parameter.name, parameter.default)
        kind = "constexpr"
        if not parameter.is_constexpr and value is not None:
            kind = _kind(value)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % _ALIGNED == 0):
            hints[(index,)] = [["tt.divisibility", _ALIGNED]]
    return ASTSource(launch.kernel, signature, constants, hints)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value == 1:
        return "constexpr"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _read(cubin: bytes, option: str) -> str:
    """Return the output of Triton's copy of cuobjdump for a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        return subprocess.run([tool, option, file.name], check=True, capture_output=True, text=True).stdout
