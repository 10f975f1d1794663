"""The model while fit records it: its chat template, its tokenizer and a context for recording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from specee_pc import _native
from specee_pc.errors import ChatTemplateError, OutOfMemory, UnsupportedModel
from specee_pc.fit.prompts import MAX_PROMPT_TOKENS, N_PARALLEL, N_PREDICT, SEED, Batch, Prompt

N_CTX = N_PARALLEL * (MAX_PROMPT_TOKENS + max(N_PREDICT.values()))


class RecordedModel:
    """A loaded model with a context of N_PARALLEL sequences."""

    def __init__(self, llm: Any, ctx: Any) -> None:
        self._llm, self._ctx = llm, ctx
        self._template = _template(llm)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """The tokens that chat would send. Without a chat template: of the last turn, as it is.

        Raises ChatTemplateError.
        """
        if self._template is None:
            return self._tokens(prompt.turns[-1], add_bos=True)
        try:
            text = self._template(messages=prompt.messages()).prompt
        except Exception as e:  # templates are programs and raise what they like
            raise ChatTemplateError(
                f"the model's chat template refuses a prompt: {' '.join(str(e).split())}"
            ) from None
        return self._tokens(text, add_bos=False)

    def _tokens(self, text: str, add_bos: bool) -> list[int]:
        tokens: list[int] = self._llm.tokenize(text.encode(), add_bos=add_bos, special=True)
        return tokens

    def record(self, batch: Batch, layers: list[int], path: Path) -> int:
        """Generate a batch at full depth and append its rows to path; returns how many.

        Raises FileAccessError, ComputeError, ...
        """
        return _native.record(
            self._ctx,
            layers,
            batch.prompts,
            path=path,
            n_predict=batch.n_predict,
            prompt_id=batch.first_id,
            temperature=batch.temperature,
            seed=SEED,
        )


def _template(llm: Any) -> Any:
    """The GGUF's chat template as llama_cpp applies it, or None."""
    text = llm.metadata.get("tokenizer.chat_template")
    if text is None:
        return None
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    pieces = [
        llm._model.token_get_text(token) if token != -1 else ""
        for token in (llm.token_eos(), llm.token_bos())
    ]
    try:
        return Jinja2ChatFormatter(template=text, eos_token=pieces[0], bos_token=pieces[1])
    except Exception as e:  # jinja2's own errors, of which there are many
        raise ChatTemplateError(
            f"the model's chat template is damaged: {' '.join(str(e).split())}"
        ) from None


@contextmanager
def open_model(path: Path, n_threads: int) -> Iterator[RecordedModel]:
    """Load a GGUF for recording and free it at the end.

    Raises ModelFileError, UnsupportedModel (no layer windows), OutOfMemory.
    """
    from specee_pc.llama import Llama

    with closing(Llama(path, mode="off", bundle=None, n_ctx=64, n_threads=n_threads)) as llm:
        if reason := _native.why_no_exit(llm.ctx):
            raise UnsupportedModel(f"{path}: {reason}")
        import llama_cpp

        params = llama_cpp.llama_context_default_params()
        params.n_ctx = N_CTX
        params.n_batch = MAX_PROMPT_TOKENS
        params.n_seq_max = N_PARALLEL
        params.n_threads = params.n_threads_batch = n_threads
        params.kv_unified = True  # layer windows need one stream of KV cells
        ctx = llama_cpp.llama_init_from_model(llm.model, params)
        if not ctx:
            raise OutOfMemory(f"{path}: no memory for a context of {N_CTX} tokens")
        try:
            yield RecordedModel(llm, ctx)
        finally:
            llama_cpp.llama_free(ctx)
