"""What bench shows: moving progress and notes on standard error, tables on standard output."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from specee_pc.chat_ui import escape

Row = dict[str, Any]

PLAIN_WIDTH = 160  # of tables that go into a file or a pipe
REFRESH_PER_SECOND = 2.0  # drawing takes time from the CPUs that are measured
PLAIN_LINE_EVERY_S = 2.0


class Screen:
    """Progress as a bar on a terminal, as lines elsewhere; a context that ends the bar."""

    def __init__(self) -> None:
        self._err = Console(stderr=True, markup=False, highlight=False)
        self._moving = self._err.is_terminal
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._err,
            refresh_per_second=REFRESH_PER_SECOND,
            transient=True,
            disable=not self._moving,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._done, self._total = 0, 0
        self._last_line_s = 0.0

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def expect(self, steps: int) -> None:
        """How many steps there will be."""
        self._total = steps
        self._progress.update(self._task, total=steps)

    def doing(self, what: str) -> None:
        """What the step under way is."""
        self._progress.update(self._task, description=escape(what))
        now = time.monotonic()
        if not self._moving and now - self._last_line_s >= PLAIN_LINE_EVERY_S:
            self._last_line_s = now
            count = f"{self._done}/{self._total} " if self._total else ""
            self.note(f"{count}{what}")

    def done(self) -> None:
        """A step is done."""
        self._done += 1
        self._progress.advance(self._task)

    def note(self, line: str) -> None:
        """A line that stays."""
        self._err.print(escape(line), soft_wrap=True)


def show(rows: list[Row], n_layer: int) -> None:
    """The two tables of a report's runs."""
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else PLAIN_WIDTH, markup=False, highlight=False)
    console.print(main_table(rows, n_layer))
    if any(row["time_share"] for row in rows):
        console.print(time_table(rows))


def main_table(rows: list[Row], n_layer: int) -> Table:
    """Speed and quality of each mode on each workload."""
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("workload", overflow="fold")
    table.add_column("mode", no_wrap=True)
    for name in ("decode tok/s", "speed-up (min-max)", "fidelity", "identical", "duplicates"):
        table.add_column(name, justify="right")
    table.add_column(f"mean layers of {n_layer}", justify="right")
    table.add_column("peak RSS", justify="right")
    for row in rows:
        ratio = row["speedup"]
        speed = f"{ratio['median']:.2f}x ({ratio['min']:.2f}-{ratio['max']:.2f})"
        table.add_row(
            Text(escape(row["workload"])),
            row["mode"],
            f"{row['decode_tok_s']['median']:.1f}",
            "1 (baseline)" if row["mode"] == "stock" else speed,
            "-" if row["fidelity"] is None else f"{row['fidelity']:.4f}",
            f"{row['identical_outputs']}/{row['n_prompts']}",
            f"{row['duplicate_rate']:.2%}",
            "-" if row["mean_layers"] is None else f"{row['mean_layers']:.1f}",
            f"{row['peak_rss_bytes'] / 2**20:.0f} MiB" if row["peak_rss_bytes"] else "-",
        )
    return table


def time_table(rows: list[Row]) -> Table:
    """Where the time of decoding went, as shares of it."""
    table = Table(box=SIMPLE, pad_edge=False, title="decoding time", title_justify="left")
    table.add_column("workload", overflow="fold")
    table.add_column("mode", no_wrap=True)
    timed = [row for row in rows if row["time_share"]]
    for name in timed[0]["time_share"]:
        table.add_column(name, justify="right")
    for row in timed:
        seconds = row["time_share"]
        whole = sum(seconds.values()) or 1.0
        shares = (f"{value / whole:.1%}" for value in seconds.values())
        table.add_row(Text(escape(row["workload"])), row["mode"], *shares)
    return table
