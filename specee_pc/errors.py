"""The exceptions of specee_pc: every foreseen failure is a SpeceeError whose message is one line.

Where llama_cpp raises a built-in exception for the same mistake, ours also derives from it, so that
code written for llama_cpp.Llama keeps catching it.
"""

from __future__ import annotations


class SpeceeError(Exception):
    """Base of all; its text is one line for the user, without a traceback."""


class InvalidOption(SpeceeError, ValueError):
    """A setting that cannot work: what was given and what is allowed."""


class ModelFileError(SpeceeError, ValueError):
    """The model file is missing, empty, truncated, no GGUF, or llama.cpp cannot load it."""


class PromptTooLong(SpeceeError, ValueError):
    """The prompt does not fit the context window."""


class ChatTemplateError(SpeceeError):
    """The model's chat template refuses the messages."""


class DownloadError(SpeceeError):
    """A model could not be brought."""


class NativeLibraryError(SpeceeError, ImportError):
    """The native library is missing, damaged or of another version."""


class LlamaCppAlreadyLoaded(NativeLibraryError):
    """llama_cpp was imported before with another library than ours."""


class NativeError(SpeceeError):
    """A call of libspecee failed; the subclasses are its status codes."""


class BundleError(NativeError):
    """The bundle is missing, incomplete or corrupt."""


class BundleModelMismatch(BundleError):
    """The bundle was fitted on another model."""


class OnnxError(NativeError):
    """ONNX Runtime is missing or refuses a predictor."""


class UnsupportedModel(NativeError):
    """The architecture or the memory of the model has no layer windows."""


class ContextFull(NativeError, RuntimeError):
    """No free KV slot is left."""


class ComputeError(NativeError, RuntimeError):
    """The backend failed."""


class OutOfMemory(NativeError, MemoryError):
    """The native library could not allocate."""


class FileAccessError(NativeError, OSError):
    """A file could not be read or written."""


class InternalError(NativeError):
    """A fault of libspecee itself."""


# specee_status of specee.h -> exception; a code that is not listed is an InternalError.
BY_STATUS: dict[int, type[SpeceeError]] = {
    1: InvalidOption,
    2: BundleError,
    3: BundleModelMismatch,
    4: OnnxError,
    5: UnsupportedModel,
    6: ContextFull,
    7: ComputeError,
    8: OutOfMemory,
    9: FileAccessError,
    10: InternalError,
}
