"""Prompt files: JSON lines of {"turns": [...]}; the first turn is what the model is asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specee_pc.errors import SpeceeError

DEFAULT_FILE = "bench_prompts.jsonl"


class PromptFileError(SpeceeError):
    """A prompt file that cannot be read or has a bad line: which one, and why."""


@dataclass(frozen=True)
class Prompt:
    """What the user asks; where is FILE:LINE, for messages."""

    text: str
    where: str


@dataclass(frozen=True)
class Workload:
    """The prompts of one file, named by its stem. sha256 is of the file's bytes."""

    name: str
    file: str
    sha256: str
    prompts: tuple[Prompt, ...]


def default_file() -> Path:
    """The prompts that come with the package. Raises PromptFileError when they are missing."""
    package = Path(__file__).parent.parent
    for folder in (package / "models", package.parent / "models"):  # a wheel, a source checkout
        if (folder / DEFAULT_FILE).is_file():
            return folder / DEFAULT_FILE
    raise PromptFileError(
        f"{package / 'models' / DEFAULT_FILE}: missing: give --prompts FILE.jsonl"
    )


def read_workloads(files: Sequence[Path], limit: int | None) -> tuple[Workload, ...]:
    """One workload per file, in the order given; limit: prompts of each file, None takes all.

    Every line of a file is checked, also those past the limit. Raises PromptFileError.
    """
    workloads = tuple(read_workload(path, limit) for path in files)
    names = [workload.name for workload in workloads]
    for name in names:
        if names.count(name) > 1:
            raise PromptFileError(f"two prompt files are named {name}: their results would mix")
    return workloads


def read_workload(path: Path, limit: int | None) -> Workload:
    """The workload of one file. Blank lines are skipped. Raises PromptFileError."""
    try:
        content = path.read_bytes()
    except OSError as e:
        raise PromptFileError(f"{path}: cannot be read: {e.strerror or e}") from None
    prompts = []
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            text = _first_turn(f"{path}:{number}", line)
            prompts.append(Prompt(text, f"{path.name}:{number}"))
    if not prompts:
        raise PromptFileError(f"{path}: holds no prompts")
    digest = hashlib.sha256(content).hexdigest()
    return Workload(path.stem, path.name, digest, tuple(prompts[:limit]))


def _first_turn(where: str, line: bytes) -> str:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise PromptFileError(f"{where}: not valid JSON: {e}") from None
    turns = item.get("turns") if isinstance(item, dict) else None
    if not isinstance(turns, list) or not turns:
        raise PromptFileError(f'{where}: needs {{"turns": ["...", ...]}}')
    if not isinstance(turns[0], str) or not turns[0].strip():
        raise PromptFileError(f"{where}: the first turn must be a text that is not empty")
    try:
        turns[0].encode()
    except UnicodeEncodeError:
        raise PromptFileError(f"{where}: the first turn has half of a surrogate pair") from None
    return turns[0]
