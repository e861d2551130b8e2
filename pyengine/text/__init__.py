"""The text layer: text to token ids and back; it knows nothing of requests, batches or models.

`ChatTemplate` is resolved on first use, so that importing this package loads neither jinja2 nor tokenizers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyengine.text.detokenizer import IncrementalDetokenizer
from pyengine.text.stop_strings import StopStringMatcher
from pyengine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pyengine.text.chat_template import ChatTemplate

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "StopStringMatcher", "Tokenizer"]


def __getattr__(name: str) -> Any:
    if name == "ChatTemplate":
        from pyengine.text.chat_template import ChatTemplate

        return ChatTemplate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
