"""A careful look at a GGUF's header before llama.cpp opens the file.

Damaged and hostile files end in a ModelFileError that says what was needed and what was found;
nothing here trusts a length before it is compared with the file's size.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from specee_pc.errors import ModelFileError

MAGIC = b"GGUF"
MAX_KEYS = 1 << 16  # far above any real model; bounds the work on a hostile file
MAX_TENSORS = 1 << 20
MAX_ITEMS = 1 << 24
MAX_TEXT = 1 << 24
MAX_DIMS = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q"}
_SCALARS |= {11: "<q", 12: "<d"}

Value = int | float | bool | str


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF says about itself.

    metadata: its scalars and texts; lengths: how many items each of its arrays has.
    tensors: names in file order. size: bytes of the file.
    """

    path: Path
    size: int
    metadata: dict[str, Value]
    lengths: dict[str, int]
    tensors: tuple[str, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def name(self) -> str:
        return str(self.metadata.get("general.name", self.path.stem))

    @property
    def n_layer(self) -> int:
        return self._number("block_count")

    @property
    def n_embd(self) -> int:
        return self._number("embedding_length")

    @property
    def n_ctx_train(self) -> int:
        return self._number("context_length")

    @property
    def n_vocab(self) -> int:
        return self.lengths.get("tokenizer.ggml.tokens", 0) or self._number("vocab_size")

    @property
    def n_shards(self) -> int:
        count = self.metadata.get("split.count", 1)
        return count if isinstance(count, int) else 1

    @property
    def has_chat_template(self) -> bool:
        return "tokenizer.chat_template" in self.metadata

    def kv_bytes(self, n_ctx: int) -> int | None:
        """Bytes of an f16 KV cache of n_ctx tokens; None where the header does not tell.

        It does not for models some of whose layers keep less: sliding windows and state spaces.
        """
        if any(key.endswith(".sliding_window") or ".ssm." in key for key in self.metadata):
            return None
        n_head, n_head_kv = (
            self._number("attention.head_count"),
            self._number("attention.head_count_kv"),
        )
        if n_head < 1 or self.n_layer < 1:
            return None
        head = self.n_embd // n_head
        per_head = (self._number("attention.key_length") or head) + (
            self._number("attention.value_length") or head
        )
        return self.n_layer * n_ctx * (n_head_kv or n_head) * per_head * 2

    def _number(self, key: str) -> int:
        value = self.metadata.get(f"{self.architecture}.{key}", 0)
        return value if isinstance(value, int) else 0


class _Reader:
    """Reads little-endian values one after the other; a read past the end is a ModelFileError."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.pos = path, data, len(data), 0

    def skip(self, n_bytes: int) -> int:
        """Step over n_bytes and return where they began."""
        begin = self.pos
        if n_bytes > self.size - begin:
            raise ModelFileError(
                f"{self.path}: truncated: the header goes on at byte {begin} with {n_bytes} more, "
                f"but the file has {self.size}"
            )
        self.pos = begin + n_bytes
        return begin

    def number(self, code: str) -> int:
        value: int = struct.unpack_from(code, self.data, self.skip(struct.calcsize(code)))[0]
        return value

    def count(self, what: str, limit: int) -> int:
        value = self.number("<Q")
        if value > limit:
            raise ModelFileError(f"{self.path}: damaged header: {value} {what}, more than {limit}")
        return value

    def text(self) -> str:
        length = self.count("bytes in a text", MAX_TEXT)
        begin = self.skip(length)
        return self.data[begin : begin + length].decode("utf-8", errors="replace")

    def scalar(self, kind: int) -> Value:
        if kind == _STRING:
            return self.text()
        code = _SCALARS.get(kind)
        if code is None:
            raise ModelFileError(f"{self.path}: damaged header: unknown value type {kind}")
        value = self.number(code)
        return bool(value) if kind == _BOOL else value

    def skip_array(self) -> int:
        """Step over an array and return its length."""
        kind, length = self.number("<I"), self.count("items in an array", MAX_ITEMS)
        if kind == _STRING:
            for _ in range(length):
                self.skip(self.count("bytes in a text", MAX_TEXT))
        elif kind in _SCALARS:
            self.skip(length * struct.calcsize(_SCALARS[kind]))
        else:
            raise ModelFileError(f"{self.path}: damaged header: array of unknown type {kind}")
        return length


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF: keys, tensor list, and that all tensor data is there.

    Raises ModelFileError: missing, a folder, unreadable, empty, no GGUF, damaged, truncated.
    """
    try:
        if path.is_dir():
            raise ModelFileError(f"{path}: is a folder, not a GGUF file")
        with path.open("rb") as file:
            start = file.read(8)
            _check_start(path, start)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Reader(path, data))
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such model file") from None
    except OSError as e:
        raise ModelFileError(f"{path}: cannot be read: {e.strerror or e}") from None
    except ValueError as e:
        if isinstance(e, ModelFileError):
            raise
        raise ModelFileError(f"{str(path)!r}: not a usable path: {e}") from None  # a NUL in it


def check_weights(header: GgufHeader) -> None:
    """Raise ModelFileError for a GGUF that has a vocabulary but no weights."""
    if not header.tensors and header.n_shards <= 1:
        raise ModelFileError(
            f"{header.path}: holds a vocabulary but no weights (0 tensors), so it cannot generate"
        )


def _check_start(path: Path, start: bytes) -> None:
    if not start:
        raise ModelFileError(f"{path}: is empty")
    if start[:4] != MAGIC:
        raise ModelFileError(f"{path}: not a GGUF file (it starts with {start[:4]!r})")
    if len(start) < 8:
        raise ModelFileError(f"{path}: truncated: a GGUF header needs 24 bytes, has {len(start)}")
    version = struct.unpack_from("<I", start, 4)[0]
    if version not in (2, 3):
        order = " (big-endian?)" if version & 0xFFFF == 0 else ""
        raise ModelFileError(f"{path}: GGUF version {version}{order}; versions 2 and 3 are known")


def _parse(reader: _Reader) -> GgufHeader:
    reader.skip(8)
    n_tensors = reader.count("tensors", MAX_TENSORS)
    n_keys = reader.count("keys", MAX_KEYS)
    metadata: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    for _ in range(n_keys):
        key, kind = reader.text(), reader.number("<I")
        if kind == _ARRAY:
            lengths[key] = reader.skip_array()
        else:
            metadata[key] = reader.scalar(kind)
    tensors = [_read_tensor(reader) for _ in range(n_tensors)]
    if tensors:
        _check_data(reader, metadata, tensors)
    names = tuple(name for name, _ in tensors)
    return GgufHeader(reader.path, reader.size, metadata, lengths, names)


def _read_tensor(reader: _Reader) -> tuple[str, int]:
    """A tensor's name and the offset of its end within the data; 0 for a type we do not know."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name, n_dims = reader.text(), reader.number("<I")
    if n_dims > MAX_DIMS:
        raise ModelFileError(f"{reader.path}: damaged header: tensor {name!r} has {n_dims} dims")
    n_items = 1
    for _ in range(n_dims):
        n_items *= reader.number("<Q")
    kind, offset = reader.number("<I"), reader.number("<Q")
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (KeyError, ValueError):
        return name, 0  # newer than this gguf package; llama.cpp will judge
    return name, offset + n_items // block * block_bytes


def _check_data(
    reader: _Reader, metadata: dict[str, Value], tensors: list[tuple[str, int]]
) -> None:
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1 or align > 1 << 20:
        raise ModelFileError(f"{reader.path}: damaged header: alignment {align!r}")
    begin = -(-reader.pos // align) * align
    needed = begin + max(end for _, end in tensors)
    if needed > reader.size:
        raise ModelFileError(f"{reader.path}: truncated: needs {needed} bytes, has {reader.size}")
