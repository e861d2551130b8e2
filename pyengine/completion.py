"""CompletionState: what one sequence has produced so far, as text, ids and log-probabilities; when it ends and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyengine.outputs import Completion, TokenLogprobs
from pyengine.sampling_params import SamplingParams
from pyengine.text import IncrementalDetokenizer, StopStringMatcher, Tokenizer


@dataclass(frozen=True, slots=True)
class EndRules:
    """Which tokens end a completion: the model's end-of-sequence ids (empty with ignore_eos) and the request's own."""

    eos_ids: frozenset[int]
    stop_ids: frozenset[int]

    @property
    def all_ids(self) -> frozenset[int]:
        """Both together."""
        return self.eos_ids | self.stop_ids


@dataclass(slots=True)
class CompletionState:
    """One growing completion. `tokenizer` is None for a model without one: the text then stays empty."""

    index: int
    params: SamplingParams
    rules: EndRules
    tokenizer: Tokenizer | None
    prompt_token_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    text_parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    _detokenizer: IncrementalDetokenizer | None = None
    _matcher: StopStringMatcher | None = None

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                self.tokenizer, self.prompt_token_ids, self.params.skip_special_tokens
            )

    def push(self, token_id: int, logprobs: TokenLogprobs | None, max_tokens: int) -> str:
        """Take the next token; sets finish_reason when it ends the completion. Returns the text that is now certain."""
        num_tokens = len(self.token_ids) + 1
        if self._ends_with(token_id):
            delta = self._flush()
        else:
            delta = self._match(self._detokenizer.push([token_id]) if self._detokenizer else "", num_tokens)
            if self.finish_reason is None and num_tokens >= max_tokens:
                self.finish_reason = "length"
                delta += self._flush()
        self.token_ids.append(token_id)
        self.text_parts.append(delta)
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs.logprob
        return delta

    def end(self, finish_reason: str) -> str:
        """End it from outside ("abort" or "error"). Returns the text that was still held back."""
        self.finish_reason = finish_reason
        delta = self._flush()
        self.text_parts.append(delta)
        return delta

    def completion(self) -> Completion:
        """What it has produced so far."""
        wants_logprobs = self.params.logprobs is not None
        return Completion(
            index=self.index,
            text="".join(self.text_parts),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs) if wants_logprobs else None,
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
        )

    def _ends_with(self, token_id: int) -> bool:
        if token_id in self.rules.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif token_id in self.rules.eos_ids:
            self.finish_reason = "stop"
        return self.finish_reason is not None

    def _match(self, text: str, num_tokens: int) -> str:
        """Stop strings apply from the token that reaches min_tokens on; text before it is not searched."""
        if not self.params.stop or num_tokens < self.params.min_tokens:
            return text
        if self._matcher is None:
            self._matcher = StopStringMatcher(tuple(self.params.stop))
        safe, matched = self._matcher.push(text)
        if matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched
        return safe

    def _flush(self) -> str:
        """The text held back so far by detokenizer and matcher; the completion has ended already."""
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.finish()
        if self._matcher is None:
            return text
        safe, matched = self._matcher.push(text)
        if matched is not None and self.finish_reason == "length":
            self.finish_reason, self.stop_reason = "stop", matched
        return safe + self._matcher.finish()
