from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from specee_pc import bundle as bundles
from specee_pc import model_files
from specee_pc.bundle import Bundle
from specee_pc.errors import BundleError, BundleModelMismatch
from specee_pc.gguf_header import read_header


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A bundle that a test may damage."""
    path = tmp_path / "copy.specee"
    shutil.copytree(tiny_bundle, path)
    return path


def test_a_bundle_is_read_and_fits_its_model_only(
    user: Path, tiny_bundle: Path, tiny_model: Path, tmp_path: Path
) -> None:
    bundle = Bundle.load(tiny_bundle)
    assert [probe.layer for probe in bundle.probes] == [2, 4]
    assert (bundle.k, bundle.max_pending, bundle.model.architecture) == (4, 3, "llama")
    assert bundle.matches(tiny_model)
    bundle.require(read_header(tiny_model))
    other = tiny.write_model(tmp_path / "other.gguf", seed=2)
    assert not bundle.matches(other)
    with pytest.raises(BundleModelMismatch, match="another content hash"):
        bundle.require(read_header(other))


def test_another_shape_is_named_without_hashing(
    copy: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(copy, lambda m: m["model"].update(n_layer=7))
    monkeypatch.setattr(model_files, "sha256_of", lambda path: pytest.fail("hashed"))
    with pytest.raises(BundleModelMismatch, match="n_layer 7 in the bundle, 6 in the model"):
        Bundle.load(copy).require(read_header(tiny_model))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.pop("format"), "format is missing"),
        (lambda m: m.update(format=2), "format is 2, this version reads 1"),
        (lambda m: m.update(k="4"), "k must be an integer in 1..16"),
        (lambda m: m.update(k=True), "k must be an integer"),
        (lambda m: m.update(max_pending=0), "max_pending must be an integer in 1..64"),
        (lambda m: m.update(model=3), "model must be an object"),
        (lambda m: m["model"].update(sha256="abc"), "model.sha256 must be 64 hex digits"),
        (lambda m: m["model"].update(architecture=""), "model.architecture must be a text"),
        (lambda m: m["model"].pop("n_vocab"), "model.n_vocab is missing"),
        (lambda m: m.update(probes=[]), "probes must be a list of at least one"),
        (lambda m: m.update(probes=[1]), r"probes\[0\] must be an object"),
        (lambda m: m["probes"][0].update(layer=6), r"probes\[0\].layer must be an integer in 1..5"),
        (lambda m: m["probes"][0].update(layer=0), r"probes\[0\].layer must be an integer in 1..5"),
        (lambda m: m["probes"].reverse(), r"probes\[1\].layer must ascend, but 2 follows 4"),
        (lambda m: m["probes"][1].update(threshold_exact=-1), "threshold_exact must be finite"),
        (lambda m: m["probes"][1].update(threshold_exact=None), "threshold_exact must be a number"),
        (
            lambda m: m["probes"][1].update(threshold_calibrated=float("nan")),
            "threshold_calibrated must be finite",
        ),
        (lambda m: m["probes"][0].update(predictor="../x.onnx"), "must be a plain file name"),
        (lambda m: m["probes"][0].update(predictor="/etc/x"), "must be a plain file name"),
        (lambda m: m["probes"][0].update(predictor="none.onnx"), "none.onnx is missing"),
        (lambda m: m.update(calibration=[]), "calibration must be an object"),
    ],
)
def test_a_wrong_manifest_names_the_field(
    copy: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    edit(copy, change)
    with pytest.raises(BundleError, match=reason) as e:
        Bundle.load(copy)
    assert str(copy) in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'"a"'])
def test_a_corrupt_manifest_is_refused(copy: Path, content: bytes) -> None:
    (copy / "manifest.json").write_bytes(content)
    with pytest.raises(BundleError, match=r"not valid JSON|must be an object"):
        Bundle.load(copy)


def test_missing_parts_are_named(copy: Path, tmp_path: Path) -> None:
    (copy / "head.safetensors").unlink()
    with pytest.raises(BundleError, match=r"incomplete: head\.safetensors is missing"):
        Bundle.load(copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(BundleError, match=r"manifest\.json is missing"):
        Bundle.load(copy)
    with pytest.raises(BundleError, match="no such bundle folder"):
        Bundle.load(tmp_path / "none.specee")
    (tmp_path / "file.specee").write_text("")
    with pytest.raises(BundleError, match="is a file"):
        Bundle.load(tmp_path / "file.specee")


def test_find_prefers_the_bundle_beside_the_model(
    user: Path, tiny_model: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    model = shutil.copy(tiny_model, tmp_path / "m.gguf")
    header = read_header(Path(model))
    found, notice = bundles.find_for(header)
    assert found is None and notice is not None and "specee-pc fit" in notice
    data = model_files.data_dir() / "bundles"
    shutil.copytree(tiny_bundle, data / "b.specee")
    (data / "a.specee").mkdir()  # a corrupt one is passed over
    assert _found(bundles.find_for(header)) == data / "b.specee"
    shutil.copytree(tiny_bundle, tmp_path / "m.specee")
    assert _found(bundles.find_for(header)) == tmp_path / "m.specee"
    edit(tmp_path / "m.specee", lambda m: m["model"].update(sha256="0" * 64))
    found, notice = bundles.find_for(header)
    assert found is not None and found.path == data / "b.specee"
    assert notice is not None and "fitted on another model" in notice
    (tmp_path / "m.specee" / "manifest.json").unlink()
    with pytest.raises(BundleError, match="not a bundle"):
        bundles.find_for(header)


def _found(result: tuple[Bundle | None, str | None]) -> Path:
    bundle, notice = result
    assert bundle is not None and notice is None
    return bundle.path


def test_write_replaces_in_one_step(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "b.specee"
    source = tmp_path / "source"
    source.write_bytes(b"copied")
    bundles.write_atomically(target, {"a": b"1", "b": source})
    assert (target / "a").read_bytes() == b"1" and (target / "b").read_bytes() == b"copied"
    bundles.write_atomically(target, {"c": b"2"})
    assert [p.name for p in target.iterdir()] == ["c"]
    with pytest.raises(BundleError, match="cannot be written"):
        bundles.write_atomically(target, {"d": tmp_path / "missing"})
    assert [p.name for p in target.iterdir()] == ["c"]  # the old one is untouched
    assert [p.name for p in target.parent.iterdir()] == ["b.specee"]  # nothing left behind
    with pytest.raises(BundleError, match="cannot be written"):
        bundles.write_atomically(source / "b.specee", {"a": b""})
