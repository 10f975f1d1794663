"""SpecEE for PCs: speculative early exiting on llama.cpp.

    from specee_pc import Llama

    llm = Llama("model.gguf", mode="exact")  # otherwise as llama_cpp.Llama
    llm.create_chat_completion([{"role": "user", "content": "Hello"}])
    print(llm.stats.tokens_per_second, llm.stats.mean_layers)

Importing this package is cheap; the native library and llama_cpp are loaded with Llama.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specee_pc.errors import SpeceeError
from specee_pc.events import Stats, TokenEvent

if TYPE_CHECKING:
    from specee_pc.llama import Llama

__version__ = "0.1.0"
__all__ = ["Llama", "SpeceeError", "Stats", "TokenEvent", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Llama":
        from specee_pc.llama import Llama

        return Llama
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
