"""Unused, the patch changes nothing: the patched library's logits are stock's, bit by bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from specee_pc import _native

N_PROMPT, N_STEP = 700, 64


def hashes(folder: Path, model: Path, threads: int) -> list[str]:
    """A line per decode: the greedy token and a hash of the logits."""
    program = Path(__file__).with_name("logits_of.py")
    command = [sys.executable, program, folder, model, N_PROMPT, N_STEP, threads]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def check(model: Path, threads: int) -> None:
    stock = hashes(_native.stock_dir(), model, threads)
    assert len(stock) == N_STEP + 1
    assert len(set(stock)) > N_STEP // 2, "the model repeats itself: nothing is compared"
    assert hashes(_native.library_dir(), model, threads) == stock


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_random_model(tmp_path: Path, arch: str) -> None:
    check(tiny.write_model(tmp_path / f"{arch}.gguf", arch=arch), threads=1)


@pytest.mark.model
def test_smollm2(smollm2: Path) -> None:
    check(smollm2, threads=2)
