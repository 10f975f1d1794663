"""Llama: llama_cpp.Llama, with tokens that come from a specee session.

Importing this module loads the native library and llama_cpp. Nothing here loops over layers; it
keeps llama_cpp's own bookkeeping (input_ids, n_tokens: what the KV cache holds) in step with the
session's text, so that prefix reuse, saving and loading work as they do upstream.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from specee_pc import _native, options
from specee_pc.bundle import Bundle, find_for
from specee_pc.errors import (
    ComputeError,
    ContextFull,
    InvalidOption,
    ModelFileError,
    PromptTooLong,
    SpeceeError,
)
from specee_pc.events import Stats, TokenEvent
from specee_pc.gguf_header import GgufHeader, check_weights, read_header

_native.load_llama_cpp()  # before the import below, so that it takes our library

import llama_cpp  # noqa: E402
import numpy as np  # noqa: E402

Tokens = Generator[int, Sequence[int] | None, None]
_GENERATE = inspect.signature(llama_cpp.Llama.generate)
_INIT = inspect.signature(llama_cpp.Llama.__init__)


class Llama(llama_cpp.Llama):
    """llama_cpp.Llama with early exits: the same constructor and methods, and four more arguments.

    model_path: the GGUF. All other arguments of llama_cpp.Llama are passed on; verbose is False.
    mode: "exact" (the text of full depth, under any sampler), "calibrated" (an exit is final; for
        greedy tokens only, so a call with a temperature, a penalty or a grammar runs as exact) or
        "off". Mind that llama_cpp's calls default to a temperature of 0.8, chat to 0.2.
    bundle: a NAME.specee folder; "auto" looks beside the GGUF, in the user's data folder and in the
        package for one that was fitted on this GGUF; None is full depth. Where none is found, the
        model runs at full depth and `notice` says so.
    max_pending: exited tokens that may wait for their upper layers; 0 takes the bundle's value.

    Full depth also runs what needs logits in Python or another pass of its own: logits_all
    (logprobs), embedding, a draft_model, a logits_processor, logit_bias, and models whose
    architecture has no layer windows.

    Raises InvalidOption, ModelFileError, BundleError, BundleModelMismatch, OnnxError, ...: all are
    SpeceeError. Not to be used from two threads at once, as llama_cpp.Llama.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        mode: str = options.DEFAULT_MODE,
        bundle: str | os.PathLike[str] | None = "auto",
        max_pending: int = 0,
        verbose: bool = False,
        **kwargs: Any,
    ) -> None:
        path = Path(model_path)
        settings = _INIT.bind(self, str(path), verbose=verbose, **kwargs)
        settings.apply_defaults()
        options.check_mode(mode)
        options.check_int("max_pending", max_pending, 0, 64)
        self._header = _check_settings(path, settings.arguments)
        self._asked: dict[str, Any] = {"mode": mode, "bundle": bundle, "max_pending": max_pending}
        self._session: _native.Session | None = None
        self._stale = True  # the session's text is not what the KV cache holds
        self._owner: object = None  # the generation that may go on
        self.last_event: TokenEvent | None = None
        _native.clear_llama_errors()
        try:
            super().__init__(str(path), verbose=verbose, **kwargs)
        except (ValueError, RuntimeError, AssertionError) as e:
            reason = _native.llama_error() or " ".join(str(e).split()) or type(e).__name__
            raise ModelFileError(f"{path}: llama.cpp cannot load it: {reason}") from None
        if len(self.input_ids) < self._n_ctx:  # llama.cpp rounds n_ctx up, llama_cpp does not
            self.input_ids = np.zeros(self._n_ctx, dtype=np.intc)
        self._n_layer: int = llama_cpp.llama_model_n_layer(self.model)
        self.reset_stats()
        self.bundle: Bundle | None = None
        self.mode, self.notice = self._open(settings.arguments)

    # ---- what it runs as ----

    def _open(self, settings: dict[str, Any]) -> tuple[str, str | None]:
        """Find the bundle and make the session; returns the mode it runs in and a notice."""
        mode, wanted = self._asked["mode"], self._asked["bundle"]
        if settings["vocab_only"] or settings["logits_all"] or settings["embedding"]:
            return "off", None
        if settings["draft_model"] is not None:
            return "off", None
        if reason := _native.why_no_exit(self.ctx):
            return "off", None if mode == "off" else f"full depth: {reason}"
        notice = None
        if mode != "off":
            if wanted == "auto":
                self.bundle, notice = find_for(self._header)
            elif wanted is not None:
                self.bundle = Bundle.load(Path(wanted))
                self.bundle.require(self._header)
            if self.bundle is None:
                mode, notice = "off", f"full depth: {notice or 'no bundle was given'}"
            elif mode == "calibrated" and settings["lora_path"]:
                mode = "exact"
                notice = "running exact: the bundle promises nothing for the model with a LoRA"
        self._session = self._new_session(mode)
        return mode, notice

    def _new_session(self, mode: str) -> _native.Session:
        folder = self.bundle.path if self.bundle is not None and mode != "off" else None
        pending = self._asked["max_pending"]
        return _native.Session(self.ctx, mode, folder, self._header.path, pending)

    def _session_for(self, greedy: bool) -> _native.Session:
        """The session in the mode that this call runs in; a change of mode makes a new one."""
        assert self._session is not None
        mode = "exact" if self.mode == "calibrated" and not greedy else self.mode
        if self._session.mode != mode:
            self._leave_session()
            self._count(self._session)
            self._session.close()
            self.n_tokens = 0  # a new session clears the KV cache
            self._session = self._new_session(mode)
        return self._session

    def _leave_session(self) -> None:
        """Make the KV cache what full depth would have written: llama_cpp itself goes on."""
        self._owner = None
        if self._session is not None and not self._stale:
            self._stale = True
            self._session.complete()

    # ---- tokens ----

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Tokens:
        """As llama_cpp.Llama.generate. Closing it early keeps the tokens that were taken.

        Raises PromptTooLong, ContextFull, ComputeError and other SpeceeErrors.
        """
        settings = _GENERATE.bind(self, tokens, *args, **kwargs)
        settings.apply_defaults()
        asked = {k: v for k, v in settings.arguments.items() if k not in ("self", "tokens")}
        reset, stop = asked.pop("reset"), asked.pop("stopping_criteria")
        text = [*tokens] if reset else [*self._input_ids.tolist(), *tokens]
        self._check_text(text)
        if self._session is None or asked["logits_processor"]:
            self._leave_session()
            yield from self._full_depth(super().generate(tokens, *args, **kwargs), len(tokens))
        else:
            yield from self._early_exit(text, asked, stop)

    def _check_text(self, text: list[int]) -> None:
        if self.model_params.vocab_only:
            raise InvalidOption("a model loaded with vocab_only cannot generate")
        if not text:
            raise InvalidOption("the prompt has no tokens")
        if len(text) > self._n_ctx:
            raise PromptTooLong(
                f"the prompt has {len(text)} tokens, but the context holds {self._n_ctx}"
            )

    def _early_exit(self, text: list[int], settings: dict[str, Any], stop: Any) -> Tokens:
        """Tokens of the session. At a yield, input_ids holds all but the token that is yielded."""
        greedy = _is_greedy(settings)
        session = self._session_for(greedy)
        chain = self._init_sampler(**settings)
        sampler = None if greedy else chain.sampler
        self._sampler = chain
        owner = self._owner = object()
        keep = 0 if self._stale else min(self._common_prefix(text), len(text) - 1)
        try:
            self._rewind(session, keep)
            self._prefill(session, text[keep:])
            while True:
                event = self.last_event = session.next(sampler)
                # upstream too asks about the text so far, with a row of logits that it never filled
                if stop is not None and stop(self._input_ids, self.scores[0]):
                    return
                sent = yield event.token
                if self._owner is not owner:
                    raise SpeceeError("this generation was ended by another call on the model")
                if sent:
                    self._rewind(session, self.n_tokens)
                    self._check_text([*self._input_ids.tolist(), event.token, *sent])
                    self._prefill(session, [event.token, *sent])
                else:
                    if self.n_tokens >= self._n_ctx:
                        raise ContextFull(f"the context of {self._n_ctx} tokens is full")
                    self.input_ids[self.n_tokens] = event.token
                    self.n_tokens += 1
        except SpeceeError:
            if self._owner is owner:
                self._stale = True
            raise
        finally:
            if self._owner is owner:
                self._owner = None
                if not self._stale:
                    session.rewind(self.n_tokens)

    def _rewind(self, session: _native.Session, n_keep: int) -> None:
        """Forget all tokens but the first n_keep; the next token needs a prefill."""
        self._stale = True  # until the session agrees again
        self._requires_eval = True
        self.n_tokens = n_keep
        session.rewind(n_keep)
        self._stale = False

    def _prefill(self, session: _native.Session, tokens: list[int]) -> None:
        """Append tokens, a batch at a time as llama_cpp does, so that Ctrl-C need not wait."""
        for begin in range(0, len(tokens), self.n_batch):
            batch = tokens[begin : begin + self.n_batch]
            session.prompt(batch)
            self.input_ids[self.n_tokens : self.n_tokens + len(batch)] = batch
            self.n_tokens += len(batch)

    def _common_prefix(self, text: list[int]) -> int:
        n = min(self.n_tokens, len(text))
        differs = np.nonzero(self.input_ids[:n] != np.asarray(text[:n], dtype=np.intc))[0]
        return int(differs[0]) if len(differs) else n

    def _full_depth(self, tokens: Tokens, n_prompt: int) -> Tokens:
        """llama_cpp's own tokens, counted; the first one's time is the prompt's."""
        sent: Sequence[int] | None = None
        part = "t_prompt_s"
        with closing(tokens):
            while True:
                begin = time.perf_counter()
                try:
                    token = tokens.send(sent)
                except StopIteration:
                    return
                except RuntimeError as e:
                    full = "returned 1" in str(e)
                    raise (ContextFull if full else ComputeError)(str(e)) from None
                self._totals[part] += time.perf_counter() - begin
                self._totals["n_prompt"] += n_prompt if part == "t_prompt_s" else 0
                part = "t_total_s"
                self._totals["n_token"] += 1
                self._totals["n_pass"] += 1
                self._totals["n_layer_sum"] += self._n_layer
                self._histogram[self._n_layer] += 1
                self.last_event = TokenEvent(token, self._n_layer, None)
                sent = yield token

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """As upstream's, with a prompt that is too long as PromptTooLong."""
        try:
            yield from super()._create_completion(*args, **kwargs)
        except ValueError as e:
            if isinstance(e, SpeceeError) or "exceed context window" not in str(e):
                raise
            raise PromptTooLong(f"the prompt does not fit: {e}") from None

    # ---- state ----

    def reset(self) -> None:
        """Forget the text; the next call starts anew."""
        self._owner = None
        super().reset()  # type: ignore[no-untyped-call]

    def eval(self, tokens: Sequence[int]) -> None:
        """Decode tokens at full depth."""
        self._leave_session()
        super().eval(tokens)

    def save_state(self) -> llama_cpp.LlamaState:
        """As upstream's, after computing what exits left out."""
        if self._session is not None and not self._stale:
            self._session.complete()
        return super().save_state()

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """As upstream's; the next call of the session computes its prompt anew."""
        self._leave_session()
        super().load_state(state)

    def close(self) -> None:
        """Free the session, the context and the model."""
        session = getattr(self, "_session", None)
        if session is not None:
            session.close()
            self._session = None
        if hasattr(self, "_stack"):  # a failed constructor has none
            super().close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **self._asked}  # type: ignore[no-untyped-call]

    # ---- numbers ----

    @property
    def stats(self) -> Stats:
        """Counts and times since the model was loaded or reset_stats() was called."""
        totals, histogram = dict(self._totals), list(self._histogram)
        if self._session is not None:
            _add(totals, histogram, self._session, self._n_layer)
        return Stats(
            mode=self.mode,
            n_layer=self._n_layer,
            histogram=tuple(histogram),
            notice=self.notice,
            **totals,
        )

    def reset_stats(self) -> None:
        """Set all counts and times to zero."""
        self._totals: dict[str, Any] = {name: 0 for name, _ in _native.SessionStats._fields_[1:]}
        self._histogram = [0] * (self._n_layer + 1)
        if self._session is not None:
            self._session.reset_stats()

    def _count(self, session: _native.Session) -> None:
        """Take over the counts of a session that is about to be closed."""
        _add(self._totals, self._histogram, session, self._n_layer)


def _add(
    totals: dict[str, Any], histogram: list[int], session: _native.Session, n_layer: int
) -> None:
    for name, value in session.stats().items():
        totals[name] += value
    for layer, n in enumerate(session.histogram(n_layer)):
        histogram[layer] += n


def _is_greedy(settings: dict[str, Any]) -> bool:
    """Whether the sampler only takes the highest logit, which is what an exit predicts."""
    return (
        settings["temp"] == 0.0
        and settings["repeat_penalty"] == 1.0
        and settings["frequency_penalty"] == 0.0
        and settings["presence_penalty"] == 0.0
        and settings["grammar"] is None
        and not settings["logits_processor"]
    )


def _check_settings(path: Path, settings: dict[str, Any]) -> GgufHeader:
    """Refuse what would make llama.cpp abort or hang; returns the model's header."""
    for name in ("n_threads", "n_threads_batch"):
        if settings[name] is not None:
            options.check_threads(name, settings[name])
    options.check_int("n_ctx", settings["n_ctx"], 0)
    for name in ("n_batch", "n_ubatch"):
        options.check_int(name, settings[name], 1)
    header = read_header(path)
    if not settings["vocab_only"]:
        check_weights(header)
        if settings["n_gpu_layers"] == 0:
            _check_memory(header, settings)
    return header


def _check_memory(header: GgufHeader, settings: dict[str, Any]) -> None:
    """Refuse a context whose KV cache is larger than all of this machine's memory."""
    n_ctx = settings["n_ctx"]
    needed = header.kv_bytes(n_ctx or header.n_ctx_train)
    if needed is None or not hasattr(os, "sysconf"):
        return
    if settings["type_k"] is not None or settings["type_v"] is not None:
        needed //= 4  # the smallest types have 4 bits
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise InvalidOption(
            f"n_ctx {n_ctx}: its KV cache needs {needed / 2**30:.1f} GiB, "
            f"this machine has {memory / 2**30:.1f} GiB"
        )
