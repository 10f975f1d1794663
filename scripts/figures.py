"""Writes the table of README.md from the JSON reports: `figures.py [--check] REPORT.json...`.

Without reports: those in docs/reports. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->"
HEAD = (
    "| Model | Workload | Mode | Decode tok/s | Speed-up (min - max) | Fidelity | Identical "
    "| Duplicates | Mean layers |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
)


def rows(report: dict[str, Any]) -> str:
    """The table's lines of one report."""
    model = report["model"]
    lines = []
    for run in report["runs"]:
        speed, layers = run["speedup"], run["mean_layers"]
        cells = [
            f"{Path(model['path_name']).stem} (`{model['sha256'][:8]}`)",
            run["workload"],
            run["mode"],
            f"{run['decode_tok_s']['median']:.1f}",
            "1"
            if run["mode"] == "stock"
            else f"{speed['median']:.2f}x ({speed['min']:.2f} - {speed['max']:.2f})",
            "-" if run["fidelity"] is None else f"{run['fidelity']:.4f}",
            f"{run['identical_outputs']}/{run['n_prompts']}",
            f"{run['duplicate_rate']:.2%}",
            "-" if layers is None else f"{layers:.1f} of {model['n_layer']}",
        ]
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true", help="only say whether the table is right")
    arguments = parser.parse_args()
    files = arguments.reports or sorted((ROOT / "docs" / "reports").glob("*.json"))
    table = HEAD + "".join(rows(json.loads(file.read_bytes())) for file in files)
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    fresh = before + BEGIN + "\n" + table + "\n" + END + after
    if arguments.check and fresh != text:
        sys.exit("error: README.md's table is not that of docs/reports: run scripts/figures.py")
    if not arguments.check:
        readme.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
