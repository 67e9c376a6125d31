"""Compile FlashInfer's kernels without a GPU, and pack them for ``benchmarks/gpu.sh --wheels``.

    python -m benchmarks.gpu.compile_ahead FOLDER

Needs CUDA's compiler, the headers of its runtime and of cuRAND, and FlashInfer with its sources, and no GPU. The folder
gets a folder ``aot`` with the kernels that the tests and measurements of a GPU call, and FlashInfer's wheel without its
sources, which are most of its size.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import click
import torch
from kvframe_testing.grid import make_cases
from kvframe_testing.runs import make_runs

from benchmarks.gpu.cases import LatentCase, StateCase, cases
from benchmarks.gpu.steps import make_layer
from kvframe.contract.specs import LayerSpec
from kvframe.loading.plugins import load_plugins

ARCHITECTURE = "9.0a"
"""That of the H100 and the H200."""
HEAD_SIZE, DTYPE = 64, torch.bfloat16
"""The layers that FlashInfer's tests on a GPU compute."""
FORMATS = ("plain", "fp8_tensor")
SOURCES = ("flashinfer/data/cutlass/", "flashinfer/data/csrc/", "flashinfer/data/include/", "flashinfer/data/spdlog/")


@attrs.frozen(order=True)
class Kernel:
    """The properties by which FlashInfer's kernels differ.

    Attributes:
        kv_dtype: The dtype of keys and values by name; queries are of ``DTYPE``.
        head_size: The size of a head.
        has_window: Whether a query may see a window.
        has_cap: Whether scores have a soft cap.
    """

    kv_dtype: str
    head_size: int
    has_window: bool
    has_cap: bool

    @classmethod
    def of(cls, layer: LayerSpec) -> Kernel:
        """Return the kernel that serves a layer."""
        assert layer.spec is not None
        assert layer.query is not None
        assert layer.spec.mask is not None
        key = layer.spec.state_tensors()["k"]
        has_window = layer.spec.mask.causal and layer.spec.mask.window is not None
        return cls(key.dtype, layer.query.head_size, has_window, layer.query.soft_cap is not None)


def kernels() -> set[Kernel]:
    """Return the kernels that the tests and the measurements of a GPU call."""
    return {Kernel.of(layer) for layer in (*_tested_layers(), *_measured_layers())}


def _tested_layers() -> Iterator[LayerSpec]:
    from kvframe_flashinfer.backend import FlashInferBackend

    capabilities = FlashInferBackend.capabilities
    tested: Iterable[Any] = make_cases(capabilities, "cuda")
    in_runs = (run.case(layer, 0) for run in make_runs(capabilities, "cuda") for layer in run.layers)
    for case in (*tested, *in_runs):
        is_compiled = case.query.head_size == HEAD_SIZE and case.query_dtype == DTYPE
        if is_compiled and case.spec.kv_format.name in FORMATS:
            yield LayerSpec(name=case.name, spec=case.spec, query=case.query)


def _measured_layers() -> Iterator[LayerSpec]:
    registry = load_plugins().registry
    for case in cases():
        if not isinstance(case, LatentCase | StateCase) and case.format in FORMATS:
            yield make_layer(case, 16, registry)


def modules(kernel: Kernel) -> Iterator[Any]:
    """Yield FlashInfer's modules of a kernel: that of decodes, and those of prompts."""
    from flashinfer.jit import gen_batch_decode_module, gen_batch_prefill_module

    kv_dtype = getattr(torch, kernel.kv_dtype)
    options: dict[str, Any] = {
        "dtype_q": DTYPE,
        "dtype_kv": kv_dtype,
        "dtype_o": DTYPE,
        "dtype_idx": torch.int32,
        "head_dim_qk": kernel.head_size,
        "head_dim_vo": kernel.head_size,
        "pos_encoding_mode": 0,
        "use_sliding_window": kernel.has_window,
        "use_logits_soft_cap": kernel.has_cap,
    }
    yield gen_batch_decode_module(**options)
    yield gen_batch_prefill_module("fa2", **options, use_fp16_qk_reduction=False)
    if kv_dtype == DTYPE:  # fa3 takes no mixed dtypes.
        yield gen_batch_prefill_module("fa3", **options, use_fp16_qk_reduction=False)


def latent_modules() -> Iterator[Any]:
    """Yield the modules of latents."""
    from flashinfer.jit import gen_batch_mla_module

    for kind in ("fa2", "fa3"):
        yield gen_batch_mla_module(kind, DTYPE, DTYPE, DTYPE, torch.int32, 512, 64, use_profiler=False)


@contextmanager
def _driver_to_link_with() -> Iterator[None]:
    """Let the linker find an empty library of the driver's name; the driver itself is only where a GPU is."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so", "-x", "c", os.devnull]
        subprocess.run([os.environ.get("CC", "cc"), *options], check=True)
        os.environ["LIBRARY_PATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("LIBRARY_PATH")])])
        yield


def pack(folder: Path) -> Path:
    """Write FlashInfer's wheel without its sources from the installed package; return its path."""
    distribution = importlib.metadata.distribution("flashinfer-python")
    path = folder / f"flashinfer_python-{distribution.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in distribution.files or ():
            name = file.as_posix()
            is_needed = not name.startswith((*SOURCES, "..")) and "__pycache__" not in name
            if is_needed and not name.endswith(("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")):
                wheel.write(str(file.locate()), name)
        wheel.writestr(f"flashinfer_python-{distribution.version}.dist-info/RECORD", "")
    return path


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--list", "is_listing", is_flag=True, help="Name the modules, and compile nothing.")
def main(folder: Path, is_listing: bool) -> None:
    """Compile and pack the kernels, or list them."""
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", ARCHITECTURE)
    specs = {module.name: module for kernel in sorted(kernels()) for module in modules(kernel)}
    specs |= {module.name: module for module in latent_modules()}
    if is_listing:
        click.echo("\n".join(specs))
        return
    from flashinfer.jit.core import build_jit_specs

    with _driver_to_link_with():
        build_jit_specs([*specs.values()], verbose=False, skip_prebuilt=False)
    for name, module in specs.items():
        target = folder / "aot" / name / f"{name}.so"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(module.get_library_path(), target)
    num_bytes = sum(file.stat().st_size for file in [pack(folder), *folder.glob("aot/*/*.so")])
    click.echo(f"{len(specs)} modules; {num_bytes / 2**20:.0f} MiB in {folder}")


if __name__ == "__main__":
    main()
