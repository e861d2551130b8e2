"""Backend: the small interface that the engine drives a device through. Implementations: cpu.py (cuda.py follows)."""

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


class Backend(Protocol):
    """Weights, KV pool and the native step of one device. Made with the weights loaded; `start` allocates the rest."""

    @property
    def description(self) -> str:
        """The device in words, for example "cpu avx512bf16, 2 threads"."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take on the device."""

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block over all layers."""

    def free_memory(self) -> int:
        """Bytes that are free for KV pool and workspaces."""

    def workspace_bytes(self, limits: StepLimits) -> int:
        """Bytes that a step needs besides weights and KV pool."""

    def start(self, limits: StepLimits) -> None:
        """Allocate the KV pool and all workspaces; from here on nothing is allocated on the device."""

    def step(self, staging: IntArray, result: IntArray, trace: StepTrace | None = None) -> None:
        """Run one pass over what `staging` describes (see StepInputs) and write `result`, and `trace` if one is given.

        Raises ValueError for a step or a trace that does not fit what was started.
        """

    def close(self) -> None:
        """Give everything back. Closing twice is harmless."""
