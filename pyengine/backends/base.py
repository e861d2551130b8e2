"""Backend: the small interface that the engine drives a device through. Implementations: cpu.py and cuda.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyengine.backends.step_inputs import IntArray


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Upper bounds that size every buffer once.

    Attributes:
        max_tokens: tokens in one step. max_seqs: sequences in one step. max_context: tokens of one sequence.
        block_size: tokens in one KV block. num_blocks: blocks of the pool.
    """

    max_tokens: int
    max_seqs: int
    max_context: int
    block_size: int
    num_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class StepTrace:
    """Float32 host arrays that a step fills, for comparison with other implementations.

    Attributes:
        logits: [R, vocab_size] raw logits of each row, before sampling changes them.
        residuals: [num_layers + 1, T, hidden_size] residual stream after the embedding and after each layer, or None.
            It needs a step with one row of logits for each token, in the order of the tokens.
    """

    logits: npt.NDArray[np.float32]
    residuals: npt.NDArray[np.float32] | None = None


Progress = Callable[[float], None]  # called with the fraction done, 0 to 1

# So many launches may be waiting for their results at a time: one that runs, and the next behind it.
MAX_PENDING = 2


class Pending(Protocol):
    """A step that was launched."""

    def wait(self) -> IntArray:
        """Wait until the step is done; its result (see StepInputs.read), on the host and the caller's own.

        Raises what went wrong on the device. Waiting twice gives the same array.
        """


class Backend(Protocol):
    """Weights, KV pool and the native step of one device. Made with the weights loaded; `start` allocates the rest."""

    @property
    def description(self) -> str:
        """The device in words, for example "cpu avx512bf16, 2 threads"."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether the device runs a pass by itself after `launch` returned, so that it pays to launch the next one."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take on the device."""

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block over all layers."""

    def free_memory(self) -> int:
        """Bytes that are free for KV pool and workspaces."""

    def auto_kv_bytes(self, free: int) -> int:
        """Bytes of the KV pool where the user leaves it to us; `free` is what weights and workspaces leave."""

    def workspace_bytes(self, limits: StepLimits) -> int:
        """Bytes that `start` allocates besides the KV pool of `limits.num_blocks` blocks."""

    def start(self, limits: StepLimits) -> None:
        """Allocate the KV pool and all workspaces; from here on nothing is allocated on the device."""

    def launch(self, staging: IntArray, num_result_words: int, *, uses_previous: bool) -> Pending:
        """Begin one pass over what `staging` describes; `staging` may be written anew when this returns.

        Passes are run in the order of their launches, one after the other, and at most MAX_PENDING may not have been
        waited for. So the next step can be launched before the ids of the last one are on the host: with
        `uses_previous`, the token id -1 - r stands for what row r of the launch (or step) before this one drew.

        Args:
            num_result_words: 32-bit words of the result, as StepInputs.write laid it out.

        Raises ValueError for a step that does not fit what was started; then nothing was done, and what `uses_previous`
        refers to is what it was. Raises RuntimeError when too many are pending.
        """

    def step(self, staging: IntArray, result: IntArray, trace: StepTrace | None = None) -> None:
        """Run one pass over what `staging` describes (see StepInputs) and write `result`, and `trace` if one is given.

        As `launch` without `uses_previous`, and the wait for it. Raises ValueError for a step, a result or a trace that
        does not fit what was started.
        """

    def close(self) -> None:
        """Give everything back. Closing twice is harmless."""
