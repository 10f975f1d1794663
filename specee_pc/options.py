"""Every default and its validation, as frozen dataclasses that refuse impossible settings."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from specee_pc.errors import InvalidOption

MODES = ("exact", "calibrated", "off")
DEFAULT_MODE = "exact"
MAX_THREADS = 512  # GGML_MAX_N_THREADS; llama.cpp crashes above it
MAX_INT32 = 2**31 - 1


def default_threads() -> int:
    """Threads to decode with: the usable CPUs, halved from 8 up, where they are hyper-threads."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    n = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(n if n < 8 else n // 2, MAX_THREADS)


def check_int(name: str, value: object, low: int, high: int = MAX_INT32) -> None:
    """Raise InvalidOption unless value is an int in low..high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        limit = f"{low} or more" if high == MAX_INT32 else f"{low} to {high}"
        raise InvalidOption(f"{name} must be a whole number, {limit}, not {value!r}")


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise InvalidOption unless value is a number in low..high (NaN is not)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidOption(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")


def check_mode(mode: object) -> None:
    """Raise InvalidOption unless mode is one of MODES."""
    if mode not in MODES:
        raise InvalidOption(f"mode must be one of {', '.join(MODES)}, not {mode!r}")


def check_threads(name: str, value: object) -> None:
    """Raise InvalidOption unless llama.cpp can run this many threads."""
    check_int(name, value, 1, MAX_THREADS)


@dataclass(frozen=True)
class SamplingOptions:
    """How a token is picked. temperature 0 is greedy and ignores the rest but seed.

    The other defaults are llama_cpp's; seed None takes a new one each run.
    """

    temperature: float = 0.0
    top_p: float = 0.95
    top_k: int = 40
    min_p: float = 0.05
    seed: int | None = None

    def __post_init__(self) -> None:
        check_number("temp", self.temperature, 0.0, 1000.0)
        check_number("top-p", self.top_p, 0.0, 1.0)
        check_int("top-k", self.top_k, 0)
        check_number("min-p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**32 - 1)


@dataclass(frozen=True)
class ChatOptions:
    """Settings of `specee-pc chat`.

    model: a GGUF file; None takes the embedded default.
    prompt: answer this and stop; None starts the conversation.
    bundle: a NAME.specee folder; "auto" looks for one that fits the model.
    ctx: tokens of context; None takes the model's own, at most DEFAULT_CTX; 0 all of the model's.
    """

    DEFAULT_CTX = 4096

    model: Path | None = None
    prompt: str | None = None
    mode: str = DEFAULT_MODE
    bundle: str = "auto"
    stats: bool = False
    system: str | None = None
    max_tokens: int = 512
    ctx: int | None = None
    threads: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)

    def __post_init__(self) -> None:
        check_mode(self.mode)
        check_int("max-tokens", self.max_tokens, 1)
        if self.ctx is not None:
            check_int("ctx", self.ctx, 0)
        if self.threads is not None:
            check_threads("threads", self.threads)


@dataclass(frozen=True)
class BenchOptions:
    """Settings of `specee-pc bench`.

    model: a GGUF file; None takes the embedded default.
    prompts: JSON-lines files, one workload each; empty takes the prompts of the package.
    limit: prompts of each file; None takes all. json: where the report goes.
    quick: few prompts and short answers, for a first look.
    """

    model: Path | None = None
    prompts: tuple[Path, ...] = ()
    limit: int | None = None
    max_tokens: int = 128
    modes: tuple[str, ...] = ("off", "exact", "calibrated")
    threads: int | None = None
    repeats: int = 3
    json: Path | None = None
    quick: bool = False
    bundle: str = "auto"

    def __post_init__(self) -> None:
        if self.limit is not None:
            check_int("limit", self.limit, 1)
        check_int("max-tokens", self.max_tokens, 1)
        check_int("repeats", self.repeats, 1)
        if self.threads is not None:
            check_threads("threads", self.threads)
        if not self.modes or len(set(self.modes)) != len(self.modes):
            raise InvalidOption("modes must name one or more of off, exact, calibrated, each once")
        for mode in self.modes:
            check_mode(mode)


@dataclass(frozen=True)
class FitOptions:
    """Settings of `specee-pc fit`.

    out: the bundle folder; None takes MODEL.specee beside the GGUF.
    fidelity: what calibrated mode promises, a share of tokens below 1.
    prompts: JSON-lines file of calibration prompts; None takes those of the package.
    """

    model: Path
    out: Path | None = None
    threads: int | None = None
    fidelity: float = 0.99
    prompts: Path | None = None

    def __post_init__(self) -> None:
        check_number("fidelity", self.fidelity, 0.5, 0.9999)
        if self.threads is not None:
            check_threads("threads", self.threads)
