"""The recording: hidden states of generated tokens, kept in OUT.work/ so that fit can resume.

recording.bin holds the rows of specee_record (specee.h); recording.json says what they belong to
and how many bytes of them are whole. A batch counts once recording.json says so: what a killed run
left behind it is cut off.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from specee_pc.errors import FileAccessError, SpeceeError
from specee_pc.fit.prompts import SEED, Batch, Part
from specee_pc.model_files import write_file_atomically

FORMAT = 1
RESERVE_BYTES = 64 << 20  # of disk space, beside the rows

RecordBatch = Callable[[Batch, list[int], Path], int]


def layers_to_record(n_layer: int) -> list[int]:
    """Layer counts whose states are recorded: from 45 % of the depth, all of them above 60 %."""
    low, dense = math.ceil(0.45 * n_layer), 0.6 * n_layer
    inner = range(max(low, 1), n_layer)
    return [n for n in inner if n >= dense or (n_layer - n) % 2 == 0] + [n_layer]


@dataclass(frozen=True)
class Key:
    """What a recording belongs to; rows of another key are of no use."""

    model_sha256: str
    n_embd: int
    layers: tuple[int, ...]
    plan_sha256: str
    format: int = FORMAT

    @classmethod
    def of(cls, model_sha256: str, n_embd: int, layers: Sequence[int], plan: list[Batch]) -> Key:
        text = json.dumps([SEED, [asdict(batch) for batch in plan]])
        return cls(model_sha256, n_embd, tuple(layers), hashlib.sha256(text.encode()).hexdigest())

    @property
    def row_type(self) -> np.dtype[np.void]:
        """The layout of specee_record's rows."""
        fields = [("prompt_id", "<i4"), ("pos", "<i4"), ("token", "<i4"), ("argmax", "<i4")]
        states = ("states", "<f2", (len(self.layers), self.n_embd))
        return np.dtype([*fields, ("top1", "<f4"), ("top2", "<f4"), states])

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "layers": list(self.layers)}


class Recording:
    """A work folder that grows batch by batch."""

    def __init__(self, folder: Path, key: Key, say: Callable[[str], None]) -> None:
        """Open or make the folder; what it holds is kept when it belongs to key.

        say gets one line when earlier rows are resumed or dropped. Raises FileAccessError.
        """
        self.folder, self.key = folder, key
        self.rows_file, self.state_file = folder / "recording.bin", folder / "recording.json"
        self.done: list[int] = []  # first_id of each whole batch
        self.n_bytes = 0
        self.seconds = 0.0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            reason = self._resume()
            if reason and self.rows_file.exists():
                say(f"{folder}: {reason}, recording anew")
            elif self.done:
                say(f"{folder}: resuming, {self.n_rows} tokens are recorded")
            with self.rows_file.open("ab") as file:
                file.truncate(self.n_bytes)
            self._save()
        except OSError as e:
            raise FileAccessError(f"{folder}: cannot be written: {e.strerror or e}") from None

    @property
    def n_rows(self) -> int:
        return self.n_bytes // self.key.row_type.itemsize

    def _resume(self) -> str | None:
        """Take over what an earlier run recorded; returns why nothing can be, or None."""
        try:
            state = json.loads(self.state_file.read_bytes())
            key, done = state["key"], [int(i) for i in state["done"]]
            n_bytes, seconds = int(state["n_bytes"]), float(state["seconds"])
        except FileNotFoundError:
            return "its recording.json is missing"
        except (ValueError, KeyError, TypeError):
            return "its recording.json is damaged"
        mine = self.key.as_json()
        if not isinstance(key, dict) or key != mine:
            theirs = key if isinstance(key, dict) else {}
            names = {"model_sha256": "model", "layers": "layer list", "plan_sha256": "prompts"}
            changed = [text for name, text in names.items() if theirs.get(name) != mine[name]]
            return f"it is of another {' and '.join(changed) or 'version'}"
        size = self.rows_file.stat().st_size if self.rows_file.exists() else 0
        if not 0 <= n_bytes <= size or n_bytes % self.key.row_type.itemsize:
            return f"it has {size} bytes of rows where {n_bytes} were recorded"
        self.done, self.n_bytes, self.seconds = done, n_bytes, seconds
        return None

    def _save(self) -> None:
        state = {
            "key": self.key.as_json(),
            "done": self.done,
            "n_bytes": self.n_bytes,
            "seconds": round(self.seconds, 3),
        }
        write_file_atomically(self.state_file, json.dumps(state).encode())

    def check_space(self, plan: Sequence[Batch]) -> None:
        """Raise SpeceeError when the disk cannot hold the batches that are still missing."""
        missing = [b for b in plan if b.first_id not in self.done]
        rows = sum(len(b.prompts) * b.n_predict for b in missing)
        needed = rows * self.key.row_type.itemsize + RESERVE_BYTES
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise SpeceeError(
                f"{self.folder}: the recording may need {needed / 1e9:.2f} GB, "
                f"{free / 1e9:.2f} GB are free"
            )

    def run(self, plan: Sequence[Batch], record: RecordBatch, step: Callable[[int], None]) -> None:
        """Record the batches that are missing; step gets the prompts of each one when it is done.

        record appends a batch's rows to a file and returns how many. Raises what it raises.
        """
        row_bytes = self.key.row_type.itemsize
        for batch in plan:
            if batch.first_id not in self.done:
                begin = time.perf_counter()
                n_rows = record(batch, list(self.key.layers), self.rows_file)
                size = self.rows_file.stat().st_size
                if size != self.n_bytes + n_rows * row_bytes:
                    raise FileAccessError(
                        f"{self.rows_file}: has {size} bytes, "
                        f"expected {self.n_bytes + n_rows * row_bytes}; is the disk full?"
                    )
                self.n_bytes = size
                self.done.append(batch.first_id)
                self.seconds += time.perf_counter() - begin
                self._save()
            step(len(batch.prompts))

    def load(self, plan: Sequence[Batch]) -> Rows:
        """The recorded rows, memory-mapped. Raises SpeceeError when there are none."""
        if not self.n_bytes:
            raise SpeceeError(f"{self.folder}: the model ended every answer at once: no tokens")
        rows: npt.NDArray[np.void] = np.memmap(
            self.rows_file, dtype=self.key.row_type, mode="r", shape=(self.n_rows,)
        )
        return Rows(rows, self.key.layers, plan)


class Rows:
    """Recorded tokens, n of them.

    prompt, part, argmax: [n] int64; argmax is what full depth says next, part a Part's value.
    token: [n] the input tokens. texts: the tokens of each prompt, by prompt id.
    """

    def __init__(
        self, rows: npt.NDArray[np.void], layers: Sequence[int], plan: Sequence[Batch]
    ) -> None:
        self._rows, self.layers = rows, list(layers)
        self.prompt = self._column("prompt_id")
        self.token, self.argmax = self._column("token"), self._column("argmax")
        parts = torch.zeros(max(b.first_id + len(b.prompts) for b in plan), dtype=torch.int64)
        greedy = torch.zeros_like(parts, dtype=torch.bool)
        self.texts: dict[int, tuple[int, ...]] = {}
        for batch in plan:
            self.texts.update(enumerate(batch.prompts, batch.first_id))
            ids = slice(batch.first_id, batch.first_id + len(batch.prompts))
            parts[ids] = int(batch.part)
            greedy[ids] = batch.temperature == 0
        self.part, self.greedy = parts[self.prompt], greedy[self.prompt]

    def __len__(self) -> int:
        return len(self._rows)

    def _column(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self._rows[name].astype(np.int64))

    def text_of(self, rows: torch.Tensor) -> torch.Tensor:
        """All that is written around some rows: their input tokens and their prompts' tokens."""
        prompts = [t for i in torch.unique(self.prompt[rows]).tolist() for t in self.texts[i]]
        return torch.cat([self.token[rows], torch.tensor(prompts, dtype=torch.int64)])

    def of(self, part: Part) -> torch.Tensor:
        """Indices of the rows of a part."""
        return torch.nonzero(self.part == int(part)).flatten()

    def states(self, layer: int) -> torch.Tensor:
        """[n, n_embd] f32: the states after a layer; what overflowed f16 is clipped."""
        column = np.ascontiguousarray(self._rows["states"][:, self.layers.index(layer)])
        return torch.from_numpy(
            np.nan_to_num(column.astype(np.float32), posinf=65504, neginf=-65504)
        )
