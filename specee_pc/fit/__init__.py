"""`specee-pc fit`: a bundle for a GGUF from the model's own generations. torch stays in here."""

from __future__ import annotations

import importlib.util

from specee_pc.errors import SpeceeError
from specee_pc.options import FitOptions


def run_fit(options: FitOptions) -> None:
    """Record, fit and write the bundle. A second run resumes a stopped recording.

    Raises SpeceeError: no torch, a model that fit cannot handle, bad prompts, an unwritable folder.
    """
    for package in ("torch", "onnx"):
        if importlib.util.find_spec(package) is None:
            raise SpeceeError(f"fit needs {package}: pip install 'specee-pc[fit]'")
    from specee_pc.fit.run import fit

    fit(options)
