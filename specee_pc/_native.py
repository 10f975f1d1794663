"""The native library: finding it, loading llama_cpp with it, and specee.h as typed Python.

This is the only file with ctypes. llama_cpp's Python layer and ours share one library, so that a
llama_context made by the one can be used by the other.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from specee_pc.errors import BY_STATUS, InternalError, LlamaCppAlreadyLoaded, NativeLibraryError
from specee_pc.events import TokenEvent

ABI_VERSION = 1
LLAMA_CPP_PYTHON = "0.3.36"  # whose struct layouts are those of the pinned llama.cpp
PATH_VARIABLE = "SPECEE_PC_LIB_PATH"  # a folder with another build of the library, for development
MODES = {"off": 0, "exact": 1, "calibrated": 2}
LOG_LEVEL_ERROR, LOG_LEVEL_CONT = 4, 5  # ggml_log_level


class SessionParams(ctypes.Structure):
    """specee_session_params"""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("mode", ctypes.c_int32),
        ("max_pending", ctypes.c_int32),
        ("bundle_dir", ctypes.c_char_p),
        ("onnxruntime_path", ctypes.c_char_p),
        ("model_path", ctypes.c_char_p),
    )


class Event(ctypes.Structure):
    """specee_event"""

    _fields_ = (("token", ctypes.c_int32), ("n_layer", ctypes.c_int32), ("p", ctypes.c_float))


class SessionStats(ctypes.Structure):
    """specee_stats"""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("n_prompt", ctypes.c_int64),
        ("n_token", ctypes.c_int64),
        ("n_exit", ctypes.c_int64),
        ("n_refuted", ctypes.c_int64),
        ("n_pass", ctypes.c_int64),
        ("n_evaluated", ctypes.c_int64),
        ("n_completed", ctypes.c_int64),
        ("n_layer_sum", ctypes.c_int64),
        ("t_prompt_s", ctypes.c_double),
        ("t_layers_s", ctypes.c_double),
        ("t_head_s", ctypes.c_double),
        ("t_probe_s", ctypes.c_double),
        ("t_draft_s", ctypes.c_double),
        ("t_completion_s", ctypes.c_double),
        ("t_sampling_s", ctypes.c_double),
        ("t_total_s", ctypes.c_double),
    )


class RecordParams(ctypes.Structure):
    """specee_record_params"""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("layers", ctypes.POINTER(ctypes.c_int32)),
        ("n_layers", ctypes.c_int32),
        ("tokens", ctypes.POINTER(ctypes.c_int32)),
        ("n_tokens", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq", ctypes.c_int32),
        ("prompt_id", ctypes.c_int32),
        ("n_predict", ctypes.c_int32),
        ("temperature", ctypes.c_float),
        ("seed", ctypes.c_uint32),
        ("path", ctypes.c_char_p),
    )


# ---- finding and loading ----


def library_dir() -> Path:
    """The folder of our library, which is also what LLAMA_CPP_LIB_PATH should name."""
    override = os.environ.get(PATH_VARIABLE)
    return Path(override).absolute() if override else Path(__file__).absolute().parent / "lib"


def stock_dir() -> Path:
    """The folder of the unpatched library: the baseline of bench."""
    return library_dir() / "stock"


def library_file(folder: Path) -> Path:
    """The library in a folder. Raises NativeLibraryError when there is none."""
    if sys.platform == "win32":
        names = ["llama.dll", "libllama.dll"]
    else:
        names = ["libllama.dylib"] if sys.platform == "darwin" else ["libllama.so"]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise NativeLibraryError(
        f"the native library is missing: no {names[0]} in {folder}; install specee-pc again"
    )


@functools.cache
def load_llama_cpp(folder: Path | None = None) -> ModuleType:
    """Import llama_cpp with the library in folder (None: ours) and return it.

    Raises NativeLibraryError; LlamaCppAlreadyLoaded when it was imported with another library.
    """
    folder = folder or library_dir()
    file = library_file(folder)
    _check_llama_cpp_version()
    if "llama_cpp" not in sys.modules:
        before = os.environ.get("LLAMA_CPP_LIB_PATH")
        os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)
        try:
            importlib.import_module("llama_cpp")
        except Exception as e:
            raise NativeLibraryError(f"{file}: cannot be loaded: {_one_line(e)}") from None
        finally:
            if before is None:
                del os.environ["LLAMA_CPP_LIB_PATH"]
            else:
                os.environ["LLAMA_CPP_LIB_PATH"] = before
    module = sys.modules["llama_cpp"]
    loaded = Path(module.llama_cpp._lib._name)
    if os.path.realpath(loaded) != os.path.realpath(file):
        raise LlamaCppAlreadyLoaded(
            f"llama_cpp was imported before with {loaded}: put `from specee_pc import Llama` "
            f"before `import llama_cpp`, or set LLAMA_CPP_LIB_PATH to what `specee-pc lib-path` "
            f"prints"
        )
    _log.install(module)
    return module


def _check_llama_cpp_version() -> None:
    try:
        version = importlib.metadata.version("llama_cpp_python")
    except importlib.metadata.PackageNotFoundError:
        raise NativeLibraryError(
            f"llama-cpp-python {LLAMA_CPP_PYTHON} is not installed: see the README's install lines"
        ) from None
    if version != LLAMA_CPP_PYTHON:
        raise NativeLibraryError(
            f"llama-cpp-python {version} is installed, but the library is built for "
            f"{LLAMA_CPP_PYTHON}: `pip install llama-cpp-python=={LLAMA_CPP_PYTHON}`"
        )


def char_buffer(size: int) -> Any:
    """Bytes that a function of llama_cpp may write into; .raw are its content."""
    return ctypes.create_string_buffer(size)


def onnxruntime_file() -> Path | None:
    """ONNX Runtime's shared library in the installed package, without importing it."""
    spec = importlib.util.find_spec("onnxruntime")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for pattern in ("libonnxruntime.so*", "libonnxruntime*.dylib", "onnxruntime.dll"):
            for file in sorted((Path(root) / "capi").glob(pattern)):
                return file
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    """Our library with specee.h declared. Raises NativeLibraryError."""
    load_llama_cpp()
    lib = ctypes.CDLL(str(library_file(library_dir())))
    session, status = ctypes.c_void_p, ctypes.c_int
    int32s = ctypes.POINTER(ctypes.c_int32)
    try:
        _declare(lib.specee_abi_version, ctypes.c_int32)
        if (abi := lib.specee_abi_version()) != ABI_VERSION:
            raise NativeLibraryError(
                f"{lib._name}: its interface has version {abi}, this package needs {ABI_VERSION}: "
                f"install specee-pc again"
            )
        _declare(lib.specee_build_info, ctypes.c_char_p)
        _declare(lib.specee_last_error, ctypes.c_char_p)
        _declare(lib.specee_can_exit, ctypes.c_int32, ctypes.c_void_p)
        params, events = ctypes.POINTER(SessionParams), ctypes.POINTER(Event)
        _declare(lib.specee_session_init, status, ctypes.c_void_p, params, ctypes.POINTER(session))
        _declare(lib.specee_session_free, None, session)
        _declare(lib.specee_session_prompt, status, session, int32s, ctypes.c_int32)
        _declare(lib.specee_session_next, status, session, ctypes.c_void_p, events)
        _declare(lib.specee_session_rewind, status, session, ctypes.c_int32)
        _declare(lib.specee_session_complete, status, session)
        _declare(lib.specee_session_n_token, ctypes.c_int32, session)
        _declare(lib.specee_session_stats, status, session, ctypes.POINTER(SessionStats))
        _declare(lib.specee_session_stats_reset, None, session)
        counts = ctypes.POINTER(ctypes.c_int64)
        _declare(lib.specee_session_histogram, status, session, counts, ctypes.c_int32)
        record = ctypes.POINTER(RecordParams)
        _declare(lib.specee_record, status, ctypes.c_void_p, record, counts)
    except AttributeError as e:
        raise NativeLibraryError(f"{lib._name}: not our library: {_one_line(e)}") from None
    return lib


def _declare(function: Any, result: Any, *arguments: Any) -> None:
    function.restype = result
    function.argtypes = list(arguments)


def _one_line(e: BaseException) -> str:
    return " ".join(str(e).split())


def _check(status: int) -> None:
    """Raise the exception of a specee_status that is not OK, with the library's reason."""
    if status != 0:
        reason = " ".join(_library().specee_last_error().decode("utf-8", "replace").split())
        raise BY_STATUS.get(status, InternalError)(reason or f"status {status} without a reason")


# ---- what llama.cpp says ----


class _ErrorLog:
    """Keeps llama.cpp's error lines, because "Failed to load model" alone does not say why."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._callback: Any = None
        self._level = 0

    def install(self, llama_cpp: ModuleType) -> None:
        logger = importlib.import_module("llama_cpp._logger")

        def on_line(level: int, text: bytes, user_data: object) -> None:
            self._level = self._level if level == LOG_LEVEL_CONT else level
            if self._level == LOG_LEVEL_ERROR and len(self.lines) < 100:
                self.lines.append(text.decode("utf-8", "replace"))
            if logger.logger.level < 40:  # verbose: logging.ERROR otherwise
                print(text.decode("utf-8", "replace"), end="", flush=True, file=sys.stderr)

        self._callback = llama_cpp.llama_log_callback(on_line)
        llama_cpp.llama_log_set(self._callback, None)

    def clear(self) -> None:
        self.lines.clear()

    def reason(self) -> str | None:
        """The first error since clear(): the later ones only say who else failed because of it."""
        lines = "".join(self.lines).splitlines()
        text = next((line.strip() for line in lines if line.strip()), None)
        if text is None:
            return None
        marker = "error loading model: "
        return text.split(marker, 1)[1] if marker in text else text


_log = _ErrorLog()


def clear_llama_errors() -> None:
    """Forget llama.cpp's error lines, before a call that may fail."""
    _log.clear()


def llama_error() -> str | None:
    """Why llama.cpp failed since clear_llama_errors(), in its own words."""
    return _log.reason()


# ---- specee.h ----


def build_info() -> dict[str, Any]:
    """llama_cpp_commit, patch_series, flags and version of our library."""
    info: dict[str, Any] = json.loads(_library().specee_build_info())
    return info


def why_no_exit(ctx: int) -> str | None:
    """Why the model behind a llama_context cannot run in layer windows; None when it can."""
    lib = _library()
    if lib.specee_can_exit(ctx):
        return None
    reason: bytes = lib.specee_last_error()
    return " ".join(reason.decode("utf-8", "replace").split()) or "no layer windows"


class Session:
    """A specee_session on a llama_context, which must outlive it."""

    def __init__(
        self, ctx: int, mode: str, bundle_dir: Path | None, model_path: Path, max_pending: int = 0
    ) -> None:
        """Raises the exception of specee_session_init: BundleError, OnnxError, ..."""
        onnxruntime = onnxruntime_file()
        params = SessionParams(
            struct_size=ctypes.sizeof(SessionParams),
            mode=MODES[mode],
            max_pending=max_pending,
            bundle_dir=os.fsencode(bundle_dir) if bundle_dir else None,
            onnxruntime_path=os.fsencode(onnxruntime) if onnxruntime else None,
            model_path=os.fsencode(model_path),
        )
        self._lib = _library()
        self._session = ctypes.c_void_p()
        _check(self._lib.specee_session_init(ctx, params, ctypes.byref(self._session)))
        self.mode = mode

    def close(self) -> None:
        """Free it; further calls are refused by the library. Closing twice does nothing."""
        if self._session:
            self._lib.specee_session_free(self._session)
            self._session = ctypes.c_void_p()

    def prompt(self, tokens: Sequence[int]) -> None:
        """Append tokens (one or more) at full depth."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        _check(self._lib.specee_session_prompt(self._session, array, len(tokens)))

    def next(self, sampler: int | None) -> TokenEvent:
        """The next verified token; sampler is a llama_sampler pointer, None is greedy."""
        event = Event()
        _check(self._lib.specee_session_next(self._session, sampler, ctypes.byref(event)))
        p = None if math.isnan(event.p) else event.p
        return TokenEvent(event.token, event.n_layer, p)

    def rewind(self, n_keep: int) -> None:
        """Keep the first n_keep tokens of the text; prompt() must come next."""
        _check(self._lib.specee_session_rewind(self._session, n_keep))

    def complete(self) -> None:
        """Compute what exits left out: the KV cache is then that of full depth."""
        _check(self._lib.specee_session_complete(self._session))

    @property
    def n_token(self) -> int:
        """Tokens of the text so far."""
        return int(self._lib.specee_session_n_token(self._session))

    def stats(self) -> dict[str, Any]:
        """The fields of specee_stats by name."""
        stats = SessionStats(struct_size=ctypes.sizeof(SessionStats))
        _check(self._lib.specee_session_stats(self._session, ctypes.byref(stats)))
        return {name: getattr(stats, name) for name, _ in SessionStats._fields_[1:]}

    def histogram(self, n_layer: int) -> tuple[int, ...]:
        """How many tokens were decided after l layers, l = 0..n_layer."""
        counts = (ctypes.c_int64 * (n_layer + 1))()
        _check(self._lib.specee_session_histogram(self._session, counts, n_layer + 1))
        return tuple(counts)

    def reset_stats(self) -> None:
        """Set all counts and times to zero."""
        self._lib.specee_session_stats_reset(self._session)


def record(
    ctx: int,
    layers: Sequence[int],
    prompts: Sequence[Sequence[int]],
    *,
    path: Path,
    n_predict: int,
    prompt_id: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
) -> int:
    """Generate from the prompts at full depth and append one row per token to path (for fit).

    layers: ascending layer counts whose states are recorded. prompts: at most the context's
    n_seq_max of them. Returns the rows appended. Clears the context's memory.
    """
    tokens = [token for prompt in prompts for token in prompt]
    params = RecordParams(
        struct_size=ctypes.sizeof(RecordParams),
        layers=(ctypes.c_int32 * len(layers))(*layers),
        n_layers=len(layers),
        tokens=(ctypes.c_int32 * len(tokens))(*tokens),
        n_tokens=(ctypes.c_int32 * len(prompts))(*map(len, prompts)),
        n_seq=len(prompts),
        prompt_id=prompt_id,
        n_predict=n_predict,
        temperature=temperature,
        seed=seed,
        path=os.fsencode(path),
    )
    n_rows = ctypes.c_int64()
    _check(_library().specee_record(ctx, params, ctypes.byref(n_rows)))
    return n_rows.value
