"""A bundle, NAME.specee/: what fit learned about one GGUF. Read, checked, found and written here.

The tensors and predictors are opened by the native library; this module reads the manifest.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specee_pc import model_files
from specee_pc.errors import BundleError, BundleModelMismatch, SpeceeError
from specee_pc.gguf_header import GgufHeader, read_header

FORMAT = 1
SUFFIX = ".specee"
MANIFEST = "manifest.json"
TENSOR_FILES = ("translators.safetensors", "head.safetensors")
MAX_INT = 2**31 - 1
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class BundleModel:
    """The GGUF that a bundle was fitted on; sha256 is of the file's bytes."""

    sha256: str
    name: str
    architecture: str
    n_layer: int
    n_embd: int
    n_vocab: int


@dataclass(frozen=True)
class Probe:
    """A place to leave: layers that have run (1..n_layer-1), its predictor file and thresholds.

    A threshold above 1 means: never leave here.
    """

    layer: int
    predictor: str
    threshold_calibrated: float
    threshold_exact: float


@dataclass(frozen=True)
class Bundle:
    """A checked manifest. probes ascend; the first one is the lens layer."""

    path: Path
    model: BundleModel
    k: int
    max_pending: int
    probes: tuple[Probe, ...]
    calibration: dict[str, Any]
    tools: dict[str, Any]

    @classmethod
    def load(cls, path: Path | str) -> Bundle:
        """Read NAME.specee/manifest.json and check that the files it names are there.

        Raises BundleError with the file and the field at fault.
        """
        path = Path(path)
        if not path.is_dir():
            what = "is a file, not a bundle folder" if path.exists() else "no such bundle folder"
            raise BundleError(f"{path}: {what}")
        file = path / MANIFEST
        try:
            root = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise BundleError(f"{path}: not a bundle: {MANIFEST} is missing") from None
        except OSError as e:
            raise BundleError(f"{file}: cannot be read: {e.strerror or e}") from None
        except (ValueError, RecursionError) as e:
            raise BundleError(f"{file}: not valid JSON: {e}") from None
        bundle = _parse(path, _Fields(file, "", root))
        for name in (*TENSOR_FILES, *(probe.predictor for probe in bundle.probes)):
            if not (path / name).is_file():
                raise BundleError(f"{path}: incomplete: {name} is missing")
        return bundle

    def mismatch(self, header: GgufHeader) -> str | None:
        """Why this bundle does not fit the model, or None. The file is hashed last."""
        for field in ("architecture", "n_layer", "n_embd", "n_vocab"):
            fitted, found = getattr(self.model, field), getattr(header, field)
            if fitted != found:
                return f"{field} {fitted} in the bundle, {found} in the model"
        if self.model.sha256 != model_files.sha256_of(header.path):
            return "the model file has another content hash"
        return None

    def matches(self, model: Path) -> bool:
        """Whether it was fitted on this very GGUF. Raises ModelFileError for a bad file."""
        return self.mismatch(read_header(model)) is None

    def require(self, header: GgufHeader) -> None:
        """Raise BundleModelMismatch unless it was fitted on this very GGUF."""
        if reason := self.mismatch(header):
            raise BundleModelMismatch(
                f"{self.path}: fitted on another model ({self.model.name}): {reason}"
            )


def beside(model: Path) -> Path:
    """Where the bundle of a GGUF lies by default: MODEL.specee beside it."""
    return model.with_suffix(SUFFIX)


def find_for(header: GgufHeader) -> tuple[Bundle | None, str | None]:
    """The bundle that fits a model, and a notice worth showing.

    Looked for beside the GGUF, in the user's data folder, then among those that come with the
    package. Raises BundleError when the one beside the GGUF is corrupt; others are passed over.
    """
    notice = None
    own = beside(header.path)
    if own.is_dir():
        bundle = Bundle.load(own)
        reason = bundle.mismatch(header)
        if reason is None:
            return bundle, None
        notice = f"{own} was fitted on another model and is not used: {reason}"
    for folder in _collections():
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            try:
                bundle = Bundle.load(path)
            except BundleError:
                continue
            if bundle.mismatch(header) is None:
                return bundle, notice
    return None, notice or "no bundle was fitted on this model: see `specee-pc fit`"


def _collections() -> Iterator[Path]:
    """Folders of bundles: the user's, and those that come with the package."""
    with suppress(SpeceeError):  # a user without a home folder
        yield model_files.data_dir() / "bundles"
    package = Path(__file__).parent
    yield package / "models"
    yield package.parent / "models"  # a source checkout


def write_atomically(target: Path, files: Mapping[str, bytes | Path]) -> None:
    """Write a bundle folder in one step: nobody ever sees half of it.

    files: name -> content, or a file to copy. An existing target is replaced. Raises BundleError.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
            fresh = Path(scratch) / "new"
            fresh.mkdir()
            for name, content in files.items():
                if isinstance(content, Path):
                    shutil.copyfile(content, fresh / name)
                else:
                    (fresh / name).write_bytes(content)
            old = Path(scratch) / "old"
            if target.exists():
                os.rename(target, old)
            try:
                os.rename(fresh, target)
            except OSError:
                if old.exists():
                    os.rename(old, target)
                raise
    except OSError as e:
        raise BundleError(f"{target}: cannot be written: {e.strerror or e}") from None


class _Fields:
    """An object of the manifest with checked access; every failure names the file and the field."""

    def __init__(self, file: Path, prefix: str, value: object) -> None:
        self.file, self.prefix = file, prefix
        if not isinstance(value, dict):
            raise BundleError(f"{file}: {prefix.rstrip('.') or 'the manifest'} must be an object")
        self.value: dict[str, Any] = value

    def fail(self, name: str, what: str) -> BundleError:
        return BundleError(f"{self.file}: {self.prefix}{name} {what}")

    def get(self, name: str) -> Any:
        if name not in self.value:
            raise self.fail(name, "is missing")
        return self.value[name]

    def integer(self, name: str, low: int, high: int = MAX_INT) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(name, f"must be an integer in {low}..{high}, is {value!r:.40}")
        return value

    def threshold(self, name: str) -> float:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(name, f"must be a number, is {value!r:.40}")
        if not (math.isfinite(value) and value >= 0):
            raise self.fail(name, f"must be finite and at least 0, is {value!r:.40}")
        return float(value)

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str) or not value:
            raise self.fail(name, f"must be a text that is not empty, is {value!r:.40}")
        return value

    def object(self, name: str) -> _Fields:
        return _Fields(self.file, f"{self.prefix}{name}.", self.get(name))


def _parse(path: Path, root: _Fields) -> Bundle:
    if root.get("format") != FORMAT:
        raise root.fail(
            "format", f"is {root.get('format')!r:.40}, this version reads {FORMAT}: fit it again"
        )
    model = root.object("model")
    sha256 = model.text("sha256")
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise model.fail("sha256", f"must be 64 hex digits, is {sha256!r:.40}")
    fitted = BundleModel(
        sha256=sha256,
        name=model.text("name"),
        architecture=model.text("architecture"),
        n_layer=model.integer("n_layer", 2),
        n_embd=model.integer("n_embd", 1),
        n_vocab=model.integer("n_vocab", 1),
    )
    return Bundle(
        path=path,
        model=fitted,
        k=root.integer("k", 1, 16),
        max_pending=root.integer("max_pending", 1, 64),
        probes=_parse_probes(root, fitted.n_layer),
        calibration=root.object("calibration").value,
        tools=root.object("tools").value,
    )


def _parse_probes(root: _Fields, n_layer: int) -> tuple[Probe, ...]:
    items = root.get("probes")
    if not isinstance(items, list) or not items:
        raise root.fail("probes", "must be a list of at least one probe")
    probes: list[Probe] = []
    for i, item in enumerate(items):
        fields = _Fields(root.file, f"probes[{i}].", item)
        predictor = fields.text("predictor")
        if not _PLAIN_NAME.fullmatch(predictor):
            raise fields.fail("predictor", f"must be a plain file name, is {predictor!r:.40}")
        probe = Probe(
            layer=fields.integer("layer", 1, n_layer - 1),
            predictor=predictor,
            threshold_calibrated=fields.threshold("threshold_calibrated"),
            threshold_exact=fields.threshold("threshold_exact"),
        )
        if probes and probe.layer <= probes[-1].layer:
            raise fields.fail("layer", f"must ascend, but {probe.layer} follows {probes[-1].layer}")
        probes.append(probe)
    return tuple(probes)
