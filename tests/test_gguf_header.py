from __future__ import annotations

import struct
from pathlib import Path

import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specee_pc.errors import ModelFileError
from specee_pc.gguf_header import check_weights, read_header


def test_a_model_says_what_it_is(tiny_model: Path) -> None:
    header = read_header(tiny_model)
    assert (header.architecture, header.name, header.n_layer) == ("llama", "tiny", tiny.N_LAYER)
    assert (header.n_embd, header.n_vocab, header.n_ctx_train) == (tiny.N_EMBD, tiny.N_VOCAB, 1024)
    assert header.size == tiny_model.stat().st_size
    assert header.has_chat_template and header.n_shards == 1
    assert header.tensors[0] == "token_embd.weight" and len(header.tensors) == 3 + 9 * tiny.N_LAYER
    check_weights(header)
    # f16 keys and values of 2 heads of 16, in 6 layers
    assert header.kv_bytes(100) == 6 * 100 * 2 * (16 + 16) * 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 a zip file", "not a GGUF file"),
        (b"GG", "not a GGUF file"),
        (b"GGUF\x03", "truncated"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (b"GGUF" + struct.pack("<I", 3) + bytes(4), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "keys"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 77), "unknown value type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 9, 5), "array of unknown type 9"),
    ],
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=reason) as e:
        read_header(path)
    assert str(path) in str(e.value) and "\n" not in str(e.value)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such model file"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="is a folder"):
        read_header(tmp_path)
    with pytest.raises(ModelFileError, match="not a usable path"):
        read_header(Path("a\0b"))


def test_missing_tensor_data_is_counted(tiny_model: Path, tmp_path: Path) -> None:
    whole = tiny_model.read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(whole[:-100])
    with pytest.raises(ModelFileError, match=rf"needs {len(whole)} bytes, has {len(whole) - 100}"):
        read_header(path)


def test_a_vocabulary_alone_has_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with pytest.raises(ModelFileError, match="vocabulary but no weights"):
        check_weights(read_header(path))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_damage_escapes_as_another_error(
    tiny_model: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(tiny_model.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(8, 20_000))
        content[at : at + 8] = data.draw(st.binary(min_size=1, max_size=8))
    end = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[:end])
    try:
        header = read_header(path)
        assert isinstance(header.name, str) and header.n_layer is not None
    except ModelFileError as e:
        assert len(str(e)) < 1000
