"""Calibration prompts: read from JSON lines, split by prompt, and cut into batches to record."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from specee_pc.errors import InvalidOption

FILE_NAME = "calibration_prompts.jsonl"
MIN_PROMPTS = 40  # below it the held-out parts hold a handful of prompts each
MAX_PROMPT_TOKENS = 512  # longer prompts are left out: their prefill would take most of the time
N_PARALLEL = 8
TEMPERATURE = 0.7
SEED = 20250801


class Part(IntEnum):
    """What the tokens of a prompt are used for; no prompt is in two parts."""

    TRAIN = 0  # translators and predictors
    VALIDATION = 1  # rank, ridge, early stopping, choice of layers
    CALIBRATION = 2  # thresholds
    TEST = 3  # the reported figures, nothing else


SHARES = {Part.TRAIN: 0.53, Part.VALIDATION: 0.12, Part.CALIBRATION: 0.20, Part.TEST: 0.15}
# Thresholds are for answers of some length, so the prompts that set and check them run longer.
N_PREDICT = {Part.TRAIN: 34, Part.VALIDATION: 32, Part.CALIBRATION: 56, Part.TEST: 40}


@dataclass(frozen=True)
class Prompt:
    """A conversation that the model goes on with. replies are the answers between the turns."""

    turns: tuple[str, ...]
    replies: tuple[str, ...]

    def messages(self) -> list[dict[str, str]]:
        """Chat messages up to the last turn that every earlier answer is known for."""
        messages = [{"role": "user", "content": self.turns[0]}]
        for reply, turn in zip(self.replies, self.turns[1:], strict=False):
            messages.append({"role": "assistant", "content": reply})
            messages.append({"role": "user", "content": turn})
        return messages


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded in parallel by one call; first_id is the id of the first one."""

    part: Part
    first_id: int
    prompts: tuple[tuple[int, ...], ...]
    n_predict: int
    temperature: float


def default_file() -> Path:
    """The prompts that come with the package, installed or in a source checkout."""
    package = Path(__file__).parent.parent
    for folder in (package / "models", package.parent / "models"):
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
    raise InvalidOption(f"{FILE_NAME} is not installed: name a file with --prompts")


def read_prompts(path: Path) -> list[Prompt]:
    """Read {"turns": [...], "reference": [...]} lines; reference is optional.

    Raises InvalidOption with the line at fault, or when there are fewer than MIN_PROMPTS.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise InvalidOption(f"{path}: cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise InvalidOption(f"{path}: not UTF-8 text") from None
    prompts = [_parse(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if len(prompts) < MIN_PROMPTS:
        raise InvalidOption(f"{path}: {len(prompts)} prompts, fit needs {MIN_PROMPTS} or more")
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        item = json.loads(line)
    except ValueError as e:
        raise InvalidOption(f"{where}: not JSON: {e}") from None
    turns = item.get("turns") if isinstance(item, dict) else None
    if not _is_texts(turns) or not turns:
        raise InvalidOption(f'{where}: needs "turns", a list of texts that are not empty')
    replies = item.get("reference", [])
    return Prompt(tuple(turns), tuple(replies) if _is_texts(replies) else ())


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(t, str) and t.strip() for t in value)


def plan_batches(
    prompts: Sequence[Prompt], tokenize: Callable[[Prompt], list[int]]
) -> tuple[list[Batch], int]:
    """Split by prompt and cut into batches; also returns how many prompts were too long.

    The split is random but fixed. Every second batch of the training and validation parts is
    sampled, so that they see more than greedy text; the others are greedy as calibrated mode is.
    Raises InvalidOption when too few prompts are left.
    """
    texts = [tuple(tokenize(prompt)) for prompt in prompts]
    kept = [text for text in texts if 0 < len(text) <= MAX_PROMPT_TOKENS]
    if len(kept) < MIN_PROMPTS:
        raise InvalidOption(
            f"{len(kept)} of {len(texts)} prompts have 1 to {MAX_PROMPT_TOKENS} tokens, "
            f"fit needs {MIN_PROMPTS} or more"
        )
    random.Random(SEED).shuffle(kept)
    batches: list[Batch] = []
    begin = 0
    for part, share in SHARES.items():
        end = len(kept) if part is Part.TEST else begin + round(share * len(kept))
        for i, first in enumerate(range(begin, end, N_PARALLEL)):
            sampled = part in (Part.TRAIN, Part.VALIDATION) and i % 2 == 1
            batches.append(
                Batch(
                    part=part,
                    first_id=first,
                    prompts=tuple(kept[first : min(first + N_PARALLEL, end)]),
                    n_predict=N_PREDICT[part],
                    temperature=TEMPERATURE if sampled else 0.0,
                )
            )
        begin = end
    return batches, len(texts) - len(kept)
