"""What was measured per mode and workload, summed up as the rows of bench's report."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specee_pc.bench.output import Output
from specee_pc.bench.quality import Fidelity, Words, count_words
from specee_pc.errors import FileAccessError, SpeceeError
from specee_pc.model_files import write_file_atomically

FORMAT = 1
STEADY = 0.10  # a spread of stock's speed above this makes ratios doubtful
TIMED_PARTS = ("layers", "head", "probe", "draft", "completion", "sampling")


@dataclass(frozen=True)
class Spread:
    """The range of a measured quantity."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of one or more values."""
        ordered = sorted(values)
        return cls(ordered[0], statistics.median(ordered), ordered[-1])

    @property
    def width(self) -> float:
        """(max - min) / median."""
        return (self.max - self.min) / self.median


@dataclass(frozen=True)
class Pair:
    """A prompt of n_prompt tokens in one repeat, answered by stock and by a candidate."""

    prompt: int
    repeat: int
    n_prompt: int
    stock: Output
    candidate: Output


@dataclass
class Measured:
    """All that was measured of one mode on one workload; for stock, each pair is its own twice."""

    mode: str
    workload: str
    draft: str | None = None
    pairs: list[Pair] = field(default_factory=list)
    fidelity: Fidelity = field(default_factory=lambda: Fidelity(0, 0))
    peak_rss_bytes: int = 0

    def row(self) -> dict[str, Any]:
        """One item of the report's "runs".

        Tokens and words are counted in the first repeat; the others say the same. Raises
        SpeceeError when no pair has a speed, because all answers ended with their first token.
        """
        speeds = [
            (stock, candidate)
            for pair in self.pairs
            if (stock := pair.stock.decode_tok_s) and (candidate := pair.candidate.decode_tok_s)
        ]
        if not speeds:
            raise SpeceeError(
                f"{self.workload}: every answer ended with its first token: nothing to time"
            )
        first = [pair.candidate for pair in self.pairs if pair.repeat == 0]
        words = sum((count_words(output.text) for output in first), Words(0, 0))
        prefill = (pair.n_prompt / max(pair.candidate.prefill_s, 1e-9) for pair in self.pairs)
        return {
            "mode": self.mode,
            "draft": self.draft,
            "workload": self.workload,
            "n_prompts": len(first),
            "n_tokens": sum(len(output.tokens) for output in first),
            "decode_tok_s": asdict(Spread.of(candidate for _, candidate in speeds)),
            "prefill_tok_s": asdict(Spread.of(prefill)),
            "speedup": asdict(Spread.of(candidate / stock for stock, candidate in speeds)),
            "fidelity": self.fidelity.share,
            "identical_outputs": len(first) - len(self._different()),
            "duplicate_rate": words.duplicate_rate,
            **inside([pair.candidate for pair in self.pairs], self.mode),
            "peak_rss_bytes": self.peak_rss_bytes,
        }

    def _different(self) -> set[int]:
        """Prompts with a repeat whose output is not stock's."""
        return {p.prompt for p in self.pairs if p.candidate.tokens != p.stock.tokens}

    def unsteady_prompts(self) -> list[int]:
        """Prompts whose output differs between repeats, which greedy decoding never does."""
        first = {p.prompt: p.candidate.tokens for p in self.pairs if p.repeat == 0}
        return sorted({p.prompt for p in self.pairs if p.candidate.tokens != first[p.prompt]})

    def unsteadiness(self) -> float:
        """How much the speed of the same work varied: the median width of the spreads.

        Between the repeats of each prompt; with one repeat, between the prompts.
        """
        groups: dict[int, list[float]] = {}
        repeated = any(pair.repeat > 0 for pair in self.pairs)
        for pair in self.pairs:
            if speed := pair.candidate.decode_tok_s:
                groups.setdefault(pair.prompt if repeated else 0, []).append(speed)
        return statistics.median(Spread.of(speeds).width for speeds in groups.values())


def inside(outputs: list[Output], mode: str) -> dict[str, Any]:
    """What a session says about the decoding of outputs; all None for stock, which says nothing."""
    told = [output for output in outputs if output.stats]
    if not told:
        names = "mean_layers exit_histogram tokens_per_pass draft_acceptance time_share"
        return dict.fromkeys(names.split())

    def total(name: str) -> Any:
        return sum(output.stats[name] for output in told)

    decoded = total("n_token") - len(told)  # the first token of each is the prompt's
    provisional = total("n_exit") + total("n_refuted") if mode == "exact" else 0
    seconds = {part: total(f"t_{part}_s") for part in TIMED_PARTS}
    all_s = sum(output.decode_s for output in told)
    seconds["other"] = max(0.0, all_s - sum(seconds.values()))
    return {
        "mean_layers": total("n_layer_sum") / total("n_token"),
        "exit_histogram": [
            sum(counts) for counts in zip(*(o.histogram for o in told), strict=True)
        ],
        "tokens_per_pass": decoded / total("n_pass") if total("n_pass") else None,
        "draft_acceptance": total("n_exit") / provisional if provisional else None,
        "time_share": seconds,
    }


def check_writable(path: Path) -> None:
    """Raise FileAccessError now if the report could not be written there after the runs."""
    if path.exists() and not path.is_file():
        raise FileAccessError(f"{path}: is not a regular file")
    try:
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError("it is read-only")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as e:
        raise FileAccessError(f"{path}: cannot be written: {e.strerror or e}") from None


def write(path: Path, report: dict[str, Any]) -> None:
    """Write the report in one step. Raises FileAccessError."""
    try:
        text = json.dumps(report, indent=2, allow_nan=False)
        write_file_atomically(path, text.encode() + b"\n")
    except OSError as e:
        raise FileAccessError(f"{path}: cannot be written: {e.strerror or e}") from None
