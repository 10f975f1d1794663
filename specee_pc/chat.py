"""`specee-pc chat`: one answer, or a conversation that reuses the KV cache from turn to turn."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specee_pc import model_files, options
from specee_pc.chat_ui import HELP, Screen, format_stats
from specee_pc.errors import ChatTemplateError, InvalidOption, PromptTooLong, SpeceeError
from specee_pc.gguf_header import read_header

if TYPE_CHECKING:
    from specee_pc.llama import Llama


def run_chat(chat: options.ChatOptions) -> None:
    """Answer the prompt, standard input, or a user at the terminal."""
    screen = Screen()
    prompt = chat.prompt
    interactive = prompt is None and sys.stdin.isatty()
    if prompt is None and not interactive:
        prompt = _read_stdin()
    if prompt is not None and not prompt.strip():
        raise InvalidOption("the prompt is empty")
    with closing(_load(chat)) as llm:
        if llm.notice:
            screen.note(f"note: {llm.notice}")
        conversation = Conversation(llm, chat)
        if conversation.is_plain:
            screen.note("note: the model has no chat template: each prompt is plainly continued")
            if chat.system:
                screen.note("note: --system needs a chat template and is not used")
        if prompt is not None:
            _answer(conversation, prompt, screen, chat.stats)
        else:
            _converse(conversation, screen, chat.stats)


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as e:
        raise InvalidOption(f"standard input is not text: {e}") from None


def _load(chat: options.ChatOptions) -> Llama:
    path = model_files.resolve(chat.model)
    n_ctx = chat.ctx
    if n_ctx is None:
        limit = options.ChatOptions.DEFAULT_CTX
        n_ctx = min(read_header(path).n_ctx_train or limit, limit)
    threads = chat.threads or options.default_threads()
    from specee_pc.llama import Llama

    seed = chat.sampling.seed
    return Llama(
        path,
        mode=chat.mode,
        bundle=chat.bundle if chat.bundle == "auto" else Path(chat.bundle),
        n_ctx=n_ctx,
        n_threads=threads,
        n_threads_batch=threads,
        seed=int.from_bytes(os.urandom(4), "little") if seed is None else seed,
    )


class Conversation:
    """The turns so far, and how the next answer is made from them."""

    def __init__(self, llm: Llama, chat: options.ChatOptions) -> None:
        self.llm, self._chat = llm, chat
        self.is_plain = not any(k.startswith("tokenizer.chat_template") for k in llm.metadata)
        self.messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Forget all turns, but not the system message."""
        system = self._chat.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def answer(self, prompt: str) -> Generator[str, None, None]:
        """Pieces of the answer. Whatever was shown stays in the conversation, also when stopped.

        Raises PromptTooLong when the conversation no longer fits; the prompt is then forgotten.
        """
        self.messages.append({"role": "user", "content": prompt})
        pieces: list[str] = []
        try:
            for chunk in self._chunks(prompt):
                choice = chunk["choices"][0]
                piece = choice["text"] if self.is_plain else choice["delta"].get("content")
                if piece:
                    pieces.append(piece)
                    yield piece
        except SpeceeError:
            if not pieces:
                self.messages.pop()
                raise
            self._keep(pieces)
            raise
        except BaseException:  # Ctrl-C, or the caller closed us
            self._keep(pieces)
            raise
        self._keep(pieces)

    def _keep(self, pieces: list[str]) -> None:
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _chunks(self, prompt: str) -> Iterator[Any]:
        s = self._chat.sampling
        settings: dict[str, Any] = {
            "max_tokens": self._chat.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "stream": True,
        }
        if self.is_plain:
            return iter(self.llm.create_completion(prompt, **settings))
        import jinja2

        messages: Any = self.messages
        try:
            return iter(self.llm.create_chat_completion(messages, **settings))
        except (jinja2.TemplateError, TypeError, ValueError) as e:
            if isinstance(e, SpeceeError):
                raise
            reason = " ".join(str(e).split())
            raise ChatTemplateError(
                f"the model's chat template refuses the conversation: {reason}"
            ) from None


def _answer(conversation: Conversation, prompt: str, screen: Screen, stats: bool) -> None:
    conversation.llm.reset_stats()
    try:
        with closing(conversation.answer(prompt)) as pieces:
            for piece in pieces:
                screen.text(piece)
    finally:
        screen.end_answer()
    if stats:
        for line in format_stats(conversation.llm.stats):
            screen.note(line)


def _converse(conversation: Conversation, screen: Screen, stats: bool) -> None:
    with suppress(ImportError):  # line editing, where Python has it
        import readline  # noqa: F401
    screen.note(HELP)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            screen.note("")
            return
        except KeyboardInterrupt:
            screen.note("")
            continue
        if line == "/quit":
            return
        if line == "/clear":
            conversation.clear()
        elif line.startswith("/"):
            screen.note(f"unknown command {line}: {HELP}")
        elif line:
            try:
                _answer(conversation, line, screen, stats)
            except KeyboardInterrupt:
                screen.note("(stopped)")
            except PromptTooLong as e:
                screen.note(f"error: {e}; /clear starts anew")
            except SpeceeError as e:
                screen.note(f"error: {e}")
