"""What the tests share: an isolated user, tiny models, and SmolLM2 for those marked `model`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

from specee_pc import model_files


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "model: needs SmolLM2 (specee-pc models get smollm2)")


@pytest.fixture(scope="session", autouse=True)
def _another_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs that tests start must import the installed package, not the checkout around us."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("cwd"))
    yield
    os.chdir(before)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with empty cache and data folders; returns the folder that holds both."""
    home = tmp_path / "user"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    return home


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama GGUF without a bundle."""
    return tiny.write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_bundle(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of random predictors for tiny_model."""
    return tiny.write_bundle(tmp_path_factory.mktemp("bundle") / "tiny.specee", tiny_model)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2: SPECEE_TEST_MODEL, or the user's cache, brought when it is not there."""
    if path := os.environ.get("SPECEE_TEST_MODEL"):
        return Path(path)
    return model_files.get("smollm2", print)
