"""What bench measures, checked before anything is loaded: model, prompts, bundle, two libraries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specee_pc import _native, model_files, options
from specee_pc.bench import machine, prompts, report
from specee_pc.bench.table import Screen
from specee_pc.bundle import Bundle, find_for
from specee_pc.errors import NativeLibraryError
from specee_pc.gguf_header import GgufHeader, check_weights, read_header

STOCK = "stock"
BUILD_INFO = "build_info.json"
SAME_BUILD = ("llama_cpp_commit", "flags", "cpu_features", "compiler")


@dataclass(frozen=True)
class Subject:
    """What is measured, checked: options, model, prompts, bundle, and the two builds."""

    bench: options.BenchOptions
    header: GgufHeader
    threads: int
    workloads: tuple[prompts.Workload, ...]
    bundle: Bundle | None
    builds: dict[str, dict[str, Any]]
    notices: tuple[str, ...]
    warnings: tuple[str, ...]


def prepare(bench: options.BenchOptions, screen: Screen) -> Subject:
    """Check everything that can be checked without a worker."""
    screen.doing("reading the model and the prompts")
    if bench.json is not None:
        report.check_writable(bench.json)
    workloads = prompts.read_workloads(bench.prompts or (prompts.default_file(),), bench.limit)
    header = read_header(model_files.resolve(bench.model))
    check_weights(header)
    builds = {
        STOCK: read_build_info(_native.stock_dir()),
        "patched": read_build_info(_native.library_dir()),
    }
    check_same_build(builds[STOCK], builds["patched"])
    bundle, notices = None, []
    if exiting := [mode for mode in bench.modes if mode != "off"]:
        bundle, notice = find_bundle(bench.bundle, header)
        if bundle is None:
            notices.append(f"at full depth: {', '.join(exiting)}: {notice}")
        elif notice:
            notices.append(notice)
    if not header.has_chat_template:
        notices.append("the model has no chat template: each prompt is plainly continued")
    screen.doing("watching the machine")
    return Subject(
        bench,
        header,
        bench.threads or options.default_threads(),
        workloads,
        bundle,
        builds,
        tuple(notices),
        tuple(machine_warnings(header, 1 + len(bench.modes))),
    )


def read_build_info(folder: Path) -> dict[str, Any]:
    """What the library in a folder was built from. Raises NativeLibraryError."""
    _native.library_file(folder)
    try:
        info = json.loads((folder / BUILD_INFO).read_bytes())
    except FileNotFoundError:
        raise NativeLibraryError(f"{folder}: {BUILD_INFO} is missing beside the library") from None
    except (OSError, ValueError) as e:
        raise NativeLibraryError(f"{folder / BUILD_INFO}: cannot be read: {e}") from None
    missing = [name for name in SAME_BUILD if not isinstance(info, dict) or name not in info]
    if missing:
        raise NativeLibraryError(f"{folder / BUILD_INFO}: {missing[0]} is missing")
    return dict(info)


def check_same_build(stock: dict[str, Any], patched: dict[str, Any]) -> None:
    """Raise NativeLibraryError unless the patches are the only difference of the libraries."""
    for name in SAME_BUILD:
        if stock[name] != patched.get(name):
            raise NativeLibraryError(
                f"the libraries cannot be compared: {name} is {stock[name]!r} in the stock one and "
                f"{patched.get(name)!r} in the patched one; build both again"
            )


def find_bundle(wanted: str, header: GgufHeader) -> tuple[Bundle | None, str | None]:
    """The bundle that the user means, and a notice. Raises BundleError, BundleModelMismatch."""
    if wanted == "auto":
        return find_for(header)
    bundle = Bundle.load(Path(wanted))
    bundle.require(header)
    return bundle, None


def machine_warnings(header: GgufHeader, n_workers: int) -> Iterator[str]:
    """Lines about a machine that is busy now, or whose memory is short."""
    load = machine.load_before()
    if load is not None and (line := load.warning(len(machine.usable_cpus()), "before the start")):
        yield line
    free = machine.available_bytes()
    if free is not None and header.size * n_workers > free:
        yield (
            f"memory may be short: {n_workers} processes load {header.size / 2**30:.1f} GiB each, "
            f"{free / 2**30:.1f} GiB are free; fewer --modes need less"
        )
