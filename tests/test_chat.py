from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from click.testing import CliRunner, Result

from specee_pc import Llama, chat, cli, options
from specee_pc.chat import Conversation
from specee_pc.chat_ui import Screen
from specee_pc.errors import ChatTemplateError, PromptTooLong

LIMITS: dict[str, Any] = {"max_tokens": 12, "ctx": 256, "threads": 1}


@pytest.fixture(scope="module")
def llm(tiny_model: Path, tiny_bundle: Path) -> Iterator[Llama]:
    llm = Llama(tiny_model, bundle=tiny_bundle, n_ctx=256, n_threads=1, n_threads_batch=1)
    yield llm
    llm.close()


def run(*arguments: object, **settings: Any) -> Result:
    limits = ["--max-tokens", "12", "--threads", "1"]
    return CliRunner().invoke(cli.main, ["chat", *map(str, arguments), *limits], **settings)


def test_one_answer(user: Path, tiny_model: Path, tiny_bundle: Path) -> None:
    plain = run(tiny_model, "-p", "hello", "--bundle", tiny_bundle)
    assert plain.exit_code == 0, plain.stderr
    assert plain.stdout.endswith("\n") and plain.stderr == ""
    stats = run(tiny_model, "-p", "hello", "--bundle", tiny_bundle, "--stats")
    assert stats.stdout == plain.stdout
    assert "12 tokens" in stats.stderr and "mean layers" in stats.stderr
    assert "exits: " in stats.stderr and "time: layers" in stats.stderr
    off = run(tiny_model, "-p", "hello", "--mode", "off")
    assert (off.stdout, off.stderr) == (plain.stdout, "")
    piped = run(tiny_model, "--bundle", tiny_bundle, input="hello")
    assert piped.stdout == plain.stdout
    system = run(tiny_model, "-p", "hello", "--bundle", tiny_bundle, "--system", "be brief")
    assert system.exit_code == 0 and system.stdout != plain.stdout
    seeded = [
        run(tiny_model, "-p", "hello", "--mode", "off", "--temp", "1", "--seed", seed).stdout
        for seed in (1, 1, 2)
    ]
    assert seeded[0] == seeded[1] != seeded[2]


def test_notices_go_to_stderr(user: Path, tiny_model: Path, tmp_path: Path) -> None:
    result = run(tiny_model, "-p", "hello")
    assert result.exit_code == 0 and result.stdout
    assert result.stderr.startswith("note: full depth: no bundle")
    base = tiny.write_model(tmp_path / "base.gguf", template=None)
    result = run(base, "-p", "hello", "--mode", "off", "--system", "be brief")
    assert result.exit_code == 0 and result.stdout
    assert "has no chat template" in result.stderr and "--system" in result.stderr


def test_bad_input_is_one_line(user: Path, tiny_model: Path, tmp_path: Path) -> None:
    cases: list[tuple[list[object], str]] = [
        ([tiny_model, "-p", "x" * 3000, "--mode", "off"], "does not fit"),
        ([tiny_model, "-p", "x", "--bundle", tmp_path], "not a bundle"),
        ([tmp_path, "-p", "x"], "is a folder"),
    ]
    for arguments, reason in cases:
        result = run(*arguments)
        assert result.exit_code == 1 and reason in result.stderr, result.stderr
        assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    assert "the prompt is empty" in run(tiny_model, input="").stderr
    assert "is not text" in run(tiny_model, input=b"\xff\xfe\xff").stderr


def conversation(llm: Llama, **settings: Any) -> Conversation:
    return Conversation(llm, options.ChatOptions(**{**LIMITS, **settings}))


def test_turns_stay_in_the_conversation(llm: Llama) -> None:
    talk = conversation(llm, system="be brief")
    first = "".join(talk.answer("one"))
    llm.reset_stats()
    second = "".join(talk.answer("two"))
    assert [m["role"] for m in talk.messages] == ["system", *["user", "assistant"] * 2]
    assert talk.messages[2]["content"] == first and talk.messages[4]["content"] == second
    text = tiny_template(talk.messages[:4])
    assert llm.stats.n_prompt < len(llm.tokenize(text.encode(), special=True))  # reuse
    talk.clear()
    assert [m["role"] for m in talk.messages] == ["system"]


def tiny_template(messages: list[dict[str, str]]) -> str:
    return "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>"


def test_a_stopped_answer_is_kept_and_the_session_goes_on(llm: Llama) -> None:
    talk = conversation(llm, max_tokens=100)
    pieces = talk.answer("one")
    shown = next(pieces) + next(pieces)
    pieces.close()
    assert talk.messages[-1] == {"role": "assistant", "content": shown}
    assert "".join(talk.answer("two"))
    fresh = conversation(llm, max_tokens=100)
    fresh.messages = talk.messages[:2]
    llm.reset()
    assert "".join(fresh.answer("two")) == talk.messages[-1]["content"]


def test_a_conversation_that_no_longer_fits(llm: Llama) -> None:
    talk = conversation(llm)
    "".join(talk.answer("one"))
    with pytest.raises(PromptTooLong):
        list(talk.answer("x" * 500))
    assert len(talk.messages) == 2 and talk.messages[0]["content"] == "one"
    assert "".join(talk.answer("two"))


def test_a_template_that_refuses(llm: Llama) -> None:
    talk = conversation(llm)
    talk.messages = [{"role": "forbidden", "content": ""}]
    with pytest.raises(ChatTemplateError, match="refuses the conversation: no such role"):
        list(talk.answer("one"))
    assert len(talk.messages) == 1


def test_the_conversation_at_a_terminal(
    llm: Llama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = conversation(llm)

    def stop(_: str) -> Iterator[str]:
        yield "begun"
        raise KeyboardInterrupt

    lines: list[Callable[[], str]] = [
        lambda: "hello",
        lambda: "",
        lambda: "/nonsense",
        lambda: "x" * 500,
        interrupted,
        lambda: "/clear",
        lambda: (monkeypatch.setattr(talk, "answer", stop), "go")[1],
        lambda: "/quit",
    ]
    monkeypatch.setattr("builtins.input", lambda prompt: lines.pop(0)())
    chat._converse(talk, Screen(), True)
    assert lines == [] and talk.messages == []
    out, err = capsys.readouterr()
    assert out.endswith("begun\n") and "(stopped)" in err
    assert "unknown command /nonsense" in err and "error: the prompt does not fit" in err
    assert err.count("12 tokens") == 1  # one answer with figures


def interrupted() -> str:
    raise KeyboardInterrupt


def test_end_of_input_leaves(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    chat._converse(conversation(llm), Screen(io.StringIO(), io.StringIO()), False)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_one_answer_with_130(tiny_model: Path, user: Path) -> None:
    command = [sys.executable, "-m", "specee_pc.cli", "chat", str(tiny_model), "-p", "hello"]
    command += ["--mode", "off", "--ctx", "0", "--max-tokens", "1000000", "--temp", "2"]
    command += ["--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    guard = threading.Timer(60, process.kill)
    guard.start()
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    error = process.stderr.read()
    assert process.wait() == 130, error
    assert error.strip() == b""
    guard.cancel()


@pytest.mark.model
def test_smollm2_answers(smollm2: Path) -> None:
    command = [sys.executable, "-m", "specee_pc.cli", "chat", str(smollm2), "--stats"]
    command += ["-p", "Name three large cities in Europe.", "--max-tokens", "32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5 and "tok/s" in done.stderr
    assert "note:" not in done.stderr  # its bundle comes with the package
