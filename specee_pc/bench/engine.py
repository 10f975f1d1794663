"""What a worker computes with: a model in one library, decoded greedily and timed.

Both engines make their model and context by the same code, so that only the way of decoding
differs. Times are wall seconds of the decoding alone: prompts come as tokens, texts are made after.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from specee_pc import _native
from specee_pc.bench.output import Output
from specee_pc.bench.quality import Judgement
from specee_pc.errors import (
    ChatTemplateError,
    ComputeError,
    InvalidOption,
    ModelFileError,
    OutOfMemory,
)


class Model:
    """A GGUF in the loaded library, at its defaults, with a context of one sequence on the CPU."""

    def __init__(self, llama_cpp: ModuleType, path: Path, threads: int) -> None:
        """Raises ModelFileError with llama.cpp's reason."""
        self.lib, self._path, self._threads = llama_cpp, path, threads
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        _native.clear_llama_errors()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            reason = _native.llama_error() or "no reason given"
            raise ModelFileError(f"{path}: llama.cpp cannot load it: {reason}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_layer: int = llama_cpp.llama_model_n_layer(self._model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.ctx: Any = None

    def open(self, n_ctx: int) -> None:
        """Make the context, once. Raises OutOfMemory with llama.cpp's reason."""
        params = self.lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_threads = params.n_threads_batch = self._threads
        params.no_perf = True
        _native.clear_llama_errors()
        self.ctx = self.lib.llama_init_from_model(self._model, params)
        if not self.ctx:
            reason = _native.llama_error() or "no reason given"
            raise OutOfMemory(f"a context of {n_ctx} tokens cannot be made: {reason}")
        self.memory = self.lib.llama_get_memory(self.ctx)
        if not self.memory:
            raise InvalidOption(f"{self._path}: the model has no KV cache: it cannot generate")
        self.n_batch: int = self.lib.llama_n_batch(self.ctx)

    def settings(self) -> dict[str, Any]:
        """What the context was made with, for the report."""
        params = self.lib.llama_context_default_params()
        system: bytes = self.lib.llama_print_system_info()
        flash = {-1: "auto", 0: "off", 1: "on"}
        return {
            "n_ctx": self.lib.llama_n_ctx(self.ctx),
            "n_batch": self.n_batch,
            "n_ubatch": self.lib.llama_n_ubatch(self.ctx),
            "flash_attention": flash.get(params.flash_attn_type, str(params.flash_attn_type)),
            "system_info": " ".join(system.decode("utf-8", "replace").split()),
        }

    # ---- text and tokens ----

    def prompt_tokens(self, text: str) -> list[int]:
        """The tokens of a user's message in the model's chat template, as chat renders it.

        Without a template: of the plain text. Raises ChatTemplateError.
        """
        template: bytes | None = self.lib.llama_model_chat_template(self._model, None)
        if template is None:
            return self._tokenize(text, add_special=True)
        return self._tokenize(self._render(template.decode(), text), add_special=False)

    def _render(self, template: str, text: str) -> str:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        bos, eos = (
            self.lib.llama_vocab_get_text(self._vocab, token).decode() if token >= 0 else ""
            for token in (
                self.lib.llama_vocab_bos(self._vocab),
                self.lib.llama_vocab_eos(self._vocab),
            )
        )
        try:
            formatter = Jinja2ChatFormatter(template, eos_token=eos, bos_token=bos)
            rendered: str = formatter(messages=[{"role": "user", "content": text}]).prompt
        except Exception as e:  # a template is a program from elsewhere
            reason = " ".join(str(e).split())
            raise ChatTemplateError(f"the model's chat template fails: {reason}") from None
        return rendered

    def _tokenize(self, text: str, add_special: bool) -> list[int]:
        raw = text.encode()
        size = len(raw) + 16
        while True:
            tokens = (self.lib.llama_token * size)()
            n = self.lib.llama_tokenize(self._vocab, raw, len(raw), tokens, size, add_special, True)
            if n >= 0:
                return list(tokens[:n])
            size = -n

    def text(self, tokens: Sequence[int]) -> str:
        """What the tokens say; tokens that end a generation say nothing."""
        pieces = (self._piece(token) for token in tokens if not self.ends(token))
        return b"".join(pieces).decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = _native.char_buffer(size)
            n = self.lib.llama_token_to_piece(self._vocab, token, buffer, size, 0, True)
            if n >= 0:
                piece: bytes = buffer.raw[:n]
                return piece
            size = -n

    def ends(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return bool(self.lib.llama_vocab_is_eog(self._vocab, token))


class StockEngine:
    """The plain loop over llama_decode that early exits are measured against.

    Picking the argmax of the logits in place costs less than llama.cpp's own sampler chain does.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.notice: str | None = None
        self._one = (model.lib.llama_token * 1)()
        self._one_batch = model.lib.llama_batch_get_one(self._one, 1)
        self._prompt: list[int] = []  # what the KV cache holds: a prompt, computed in batches,
        self._steps: list[int] = []  # and tokens after it, computed one by one

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Output:
        """Greedy tokens until one ends the text, at most max_tokens (one or more)."""
        begin = time.perf_counter()
        tokens = [int(self._prefill(prompt).argmax())]
        first = time.perf_counter()
        while len(tokens) < max_tokens and not self.model.ends(tokens[-1]):
            tokens.append(int(self._step(tokens[-1]).argmax()))
        end = time.perf_counter()
        return Output(tuple(tokens), self.model.text(tokens), first - begin, end - first)

    def judge(self, prompt: Sequence[int], emitted: Sequence[int], start: int) -> Judgement:
        """What full depth picks at each position of emitted[start:], given the emitted prefix.

        The prompt is computed in batches and everything after it token by token, as generate()
        does, so that a near tie falls as it does there.
        """
        if start == len(emitted):
            return Judgement((), math.nan, math.nan)
        if start == 0:
            logits = self._prefill(prompt)
        else:
            self._return_to(prompt, emitted[: start - 1])
            logits = self._step(emitted[start - 1])
        top1, other = float(logits.max()), float(logits[emitted[start]])
        greedy = [int(logits.argmax())]
        for token in emitted[start:-1]:
            greedy.append(int(self._step(token).argmax()))
        return Judgement(tuple(greedy), top1, other)

    def _prefill(self, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
        """Compute a prompt anew; returns the logits [n_vocab] after it, valid until the next."""
        lib, n_batch = self.model.lib, self.model.n_batch
        lib.llama_memory_clear(self.model.memory, False)
        self._prompt, self._steps = [], []
        tokens = (lib.llama_token * len(prompt))(*prompt)
        for begin in range(0, len(prompt), n_batch):
            part = (lib.llama_token * min(n_batch, len(prompt) - begin))(
                *tokens[begin : begin + n_batch]
            )
            logits = self._decode(lib.llama_batch_get_one(part, len(part)))
        self._prompt = list(prompt)
        return logits

    def _step(self, token: int) -> npt.NDArray[np.float32]:
        """Compute one more token; returns the logits [n_vocab] after it, valid until the next."""
        self._one[0] = token
        logits = self._decode(self._one_batch)
        self._steps.append(token)
        return logits

    def _decode(self, batch: Any) -> npt.NDArray[np.float32]:
        status = self.model.lib.llama_decode(self.model.ctx, batch)
        if status != 0:
            raise ComputeError(f"stock llama.cpp could not decode (status {status})")
        logits = self.model.lib.llama_get_logits_ith(self.model.ctx, -1)
        return np.ctypeslib.as_array(logits, shape=(self.model.n_vocab,))

    def _return_to(self, prompt: Sequence[int], steps: Sequence[int]) -> None:
        """Make the KV cache hold the prompt and these steps, keeping what it can of its content."""
        keep = 0
        if self._prompt == list(prompt):
            both = zip(self._steps, steps, strict=False)
            keep = next((i for i, (a, b) in enumerate(both) if a != b), len(steps))
            keep = min(keep, len(self._steps))
        if self._prompt != list(prompt) or not self._forget_from(len(prompt) + keep):
            self._prefill(prompt)
            keep = 0
        self._steps = self._steps[:keep]
        for token in steps[keep:]:
            self._step(token)

    def _forget_from(self, position: int) -> bool:
        """Remove the KV from a position on; False when this memory cannot or lost earlier KV."""
        lib, memory = self.model.lib, self.model.memory
        removed = lib.llama_memory_seq_rm(memory, 0, position, -1)
        return bool(removed) and lib.llama_memory_seq_pos_min(memory, 0) == 0


class SessionEngine:
    """Decoding through a specee session of the patched library."""

    def __init__(self, model: Model, mode: str, bundle: Path | None, path: Path) -> None:
        """bundle: None runs at full depth. Raises the exceptions of _native.Session."""
        self.model = model
        self.notice: str | None = None
        reason = _native.why_no_exit(model.ctx)
        if mode != "off" and reason is not None:
            self.notice = f"{mode} runs at full depth: {reason}"
        if bundle is None or reason is not None:
            mode = "off"
        folder = bundle if mode != "off" else None
        self.exits = mode != "off"
        self._session = _native.Session(model.ctx, mode, folder, path)

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Output:
        """Greedy tokens until one ends the text, at most max_tokens (one or more)."""
        session = self._session
        session.rewind(0)
        session.reset_stats()
        begin = time.perf_counter()
        session.prompt(prompt)
        tokens = [session.next(None).token]
        first = time.perf_counter()
        while len(tokens) < max_tokens and not self.model.ends(tokens[-1]):
            tokens.append(session.next(None).token)
        session.complete()  # timed: work put off to a later token is part of the price
        end = time.perf_counter()
        return Output(
            tuple(tokens),
            self.model.text(tokens),
            first - begin,
            end - first,
            session.stats(),
            session.histogram(self.model.n_layer),
        )
