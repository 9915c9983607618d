"""Compiles a Triton kernel for an NVIDIA GPU on a machine without one, and reads the compiled code.

Uses Triton's compiler and the two NVIDIA tools in its wheel. Compiles exactly what a launch with
the same values would: types, divisibility and constants are derived from them as Triton's own
launcher derives them. Needs a process in which kernels are not interpreted.

    values = {"x_ptr": torch.bfloat16, "size": 4096, "BLOCK": 128}
    code = compile_for(HOPPER, kernel, values, num_warps=4)
    assert code.stack_bytes == 0
    assert code.ptx_count("cp.async.cg") > 0
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU: its compute capability times 10, and what one program may take of its memory.

    shared_bytes   `shared_memory_per_block_optin`: a multiprocessor's shared memory less 1 KB
    """

    capability: int
    shared_bytes: int

    def __str__(self) -> str:
        return f"sm_{self.capability}"


AMPERE = Gpu(80, 163 * 1024)  # A100
RTX_30 = Gpu(86, 99 * 1024)  # and A10, A40
RTX_40 = Gpu(89, 99 * 1024)  # and L4, L40S
HOPPER = Gpu(90, 227 * 1024)  # H100, H200
BLACKWELL = Gpu(100, 227 * 1024)  # B200
RTX_50 = Gpu(120, 99 * 1024)
GPUS = (AMPERE, RTX_30, RTX_40, HOPPER, BLACKWELL, RTX_50)

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_TYPES = {
    torch.bool: "i1",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclass(frozen=True)
class GpuCode:
    """A compiled kernel.

    shared_bytes   shared memory of one program, static and dynamic
    """

    ptx: str
    cubin: bytes
    shared_bytes: int

    @cached_property
    def ptx_mnemonics(self) -> Counter[str]:
        """Full PTX mnemonics, `ld.global.v4.b32` say, and how often each stands in the text."""
        pattern = r"^\s*(?:\{\s*)?(?:@!?%p\d+\s+)?([a-z][\w.:]*)[\s;]"
        return Counter(re.findall(pattern, self.ptx, re.MULTILINE))

    @cached_property
    def sass_mnemonics(self) -> Counter[str]:
        """Full SASS mnemonics, `HGMMA.64x64x16.F32.BF16` say, and how often each occurs."""
        pattern = r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)"
        return Counter(re.findall(pattern, self._run("cuobjdump", "-sass")))

    def ptx_count(self, prefix: str) -> int:
        """Count the PTX instructions whose mnemonic is `prefix` or goes on from it with a dot."""
        return _count(self.ptx_mnemonics, prefix)

    def sass_count(self, prefix: str) -> int:
        """Count the SASS instructions whose mnemonic is `prefix` or goes on from it with a dot."""
        return _count(self.sass_mnemonics, prefix)

    @property
    def registers(self) -> int:
        """Registers of one thread."""
        return self._resources["REG"]

    @property
    def stack_bytes(self) -> int:
        """Local memory of one thread, where spilled registers go: with none, nothing spills."""
        return self._resources["STACK"]

    @property
    def spills(self) -> int:
        """Instructions that store a register to local memory or load it back.

        Slow: all of the code is disassembled for them.
        """
        return self.sass_count("STL") + self.sass_count("LDL")

    @cached_property
    def _resources(self) -> dict[str, int]:
        text = self._run("cuobjdump", "-res-usage")
        return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}

    def _run(self, tool: str, option: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [str(_TOOLS / tool), option, file.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_for(gpu: Gpu, kernel: Any, values: Mapping[str, object], **options: object) -> GpuCode:
    """Compile a `@triton.jit` kernel for a kind of GPU.

    values    one per parameter of the kernel: what a launch would pass. A tensor, or its dtype for
              an aligned one, becomes a pointer; None a constant
    options   num_warps, num_stages and so on
    """
    signature: dict[str, str] = {}
    constants: dict[str, object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    assert set(values) == set(kernel.arg_names), set(values) ^ set(kernel.arg_names)
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or _is_one(value, parameter):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = _type_of(value)
        if _is_divisible(value) and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", gpu.capability, 32)
    compiled = triton.compile(source, target=target, options=dict(options))
    return GpuCode(compiled.asm["ptx"], compiled.asm["cubin"], compiled.metadata.shared)


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, torch.dtype):
        return "*" + _TYPES[value]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int), value
    if isinstance(value, bool):
        return "i1"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_one(value: object, parameter: Any) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and value == 1 and not parameter.do_not_specialize


def _is_divisible(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type == "meta" or value.data_ptr() % 16 == 0
    if isinstance(value, torch.dtype):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0


def _count(mnemonics: Counter[str], prefix: str) -> int:
    return sum(
        number
        for name, number in mnemonics.items()
        if name == prefix or name.startswith(prefix + ".")
    )
