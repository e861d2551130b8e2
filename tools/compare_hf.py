#!/usr/bin/env python3
"""Compare a model in pyengine with the same model in Hugging Face transformers, layer by layer; measures no speed.

    python tools/compare_hf.py MODEL                    # float32: are the numbers the same?
    python tools/compare_hf.py MODEL --dtype bfloat16   # is our rounding no worse than transformers'?

MODEL is whatever `pyengine.Engine` takes: a folder, a built-in name, or an id of the Hugging Face hub. Needs the
packages torch and transformers (pip install "pyengine-llm[hf-test]").

The reference is always transformers in float32. In float32 the check is the largest difference of a logit as a part of
the largest logit. In 16 bits it is the divergence KL(reference || ours) as a multiple of KL(reference || transformers
in the same 16 bits), each the mean over all positions. Exit code: 0 within the tolerance, 1 beyond it, 2 when the
comparison could not be made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine import SamplingParams
from pyengine.backends.base import StepLimits, StepTrace
from pyengine.backends.step_inputs import LogitsRow, SequenceChunk, StepInputs
from pyengine.checkpoint import resolve_model
from pyengine.errors import PyEngineError
from pyengine.loading import load_model
from pyengine.sampling_row import SamplingRow

Floats = npt.NDArray[np.float32]

LOGITS_TOLERANCE = 1e-4
KL_RATIO_TOLERANCE = 1.2
# A KL below this is rounding of the float32 reference itself; ratios of such numbers mean nothing.
KL_FLOOR = 1e-9
BLOCK_SIZE = 16
DEFAULT_TEXT = (
    "The lighthouse stood at the end of a long pier. Every evening at 6:45 its keeper climbed 213 steps, lit the lamp, "
    'and wrote one line into the log: "Clear sky, wind from the west." One night the line was different.'
)


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """What one implementation computes for T tokens.

    Attributes:
        logits: [T, vocab_size].
        residuals: [num_layers + 1, T, hidden_size], after the embedding and after each layer.
    """

    logits: Floats
    residuals: Floats


class OurModel:
    """A model loaded as the engine loads it, run step by step without the engine's loop so that its insides show.

    Args:
        model: as for Engine.
        dtype: as for Engine.
        max_tokens: most tokens of one step; longer inputs are computed in chunks, as chunked prefill does.
        max_context: as for Engine; also the longest input.
        device: as for Engine.
    """

    def __init__(
        self,
        model: str | Path,
        dtype: str = "auto",
        *,
        max_tokens: int = 512,
        max_context: int | None = None,
        device: str = "cpu",
    ) -> None:
        loaded = load_model(model, device=device, dtype=dtype, max_context=max_context, num_threads=None, progress=None)
        self.spec = loaded.spec
        self.tokenizer = loaded.tokenizer
        self._backend = loaded.backend
        self._max_tokens = max_tokens
        self._num_blocks = 0

    def forward(self, token_ids: Sequence[int]) -> Forward:
        """Logits and residual streams of every position. Raises ValueError for an input longer than the context."""
        if not 0 < len(token_ids) <= self.spec.max_context:
            raise ValueError(f"The input has {len(token_ids)} tokens; 1 to {self.spec.max_context} are possible.")
        self._reserve(-(-len(token_ids) // BLOCK_SIZE))
        count, spec = len(token_ids), self.spec
        logits = np.empty((count, spec.vocab_size), np.float32)
        residuals = np.empty((spec.num_layers + 1, count, spec.hidden_size), np.float32)
        for start in range(0, count, self._max_tokens):
            stop = min(start + self._max_tokens, count)
            part = self._step(token_ids[start:stop], start)
            logits[start:stop] = part.logits
            residuals[:, start:stop] = part.residuals
        return Forward(logits, residuals)

    def _reserve(self, num_blocks: int) -> None:
        if num_blocks > self._num_blocks:
            limits = StepLimits(self._max_tokens, 1, num_blocks * BLOCK_SIZE, BLOCK_SIZE, num_blocks)
            self._backend.start(limits)
            self._num_blocks = num_blocks

    def _step(self, token_ids: Sequence[int], start: int) -> Forward:
        count, spec = len(token_ids), self.spec
        sampling = SamplingRow(SamplingParams(temperature=0.0).with_defaults({}), 0, (), ())
        rows = [LogitsRow(i, sampling, start + i + 1) for i in range(count)]
        # Blocks in falling order: a table that was ignored would show.
        table = list(range(self._num_blocks))[::-1]
        inputs = StepInputs(BLOCK_SIZE)
        staging, result = inputs.write([SequenceChunk(token_ids, start, table)], rows)
        trace = Forward(
            np.full((count, spec.vocab_size), np.nan, np.float32),
            np.full((spec.num_layers + 1, count, spec.hidden_size), np.nan, np.float32),
        )
        self._backend.step(staging, result, StepTrace(trace.logits, trace.residuals))
        return trace

    def close(self) -> None:
        """Give the memory back."""
        self._backend.close()

    def __enter__(self) -> OurModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def load_hf(folder: Path, dtype: str, attention: str = "eager") -> Any:
    """The model of a folder in transformers, on the CPU, ready to run.

    Args:
        attention: transformers' name of its implementation; "eager" is the plain formula.
    """
    import torch
    import transformers

    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    keyword = "dtype" if release >= (4, 56) else "torch_dtype"
    settings = {keyword: getattr(torch, dtype), "attn_implementation": attention}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **settings).eval()


def hf_forward(model: Any, token_ids: Sequence[int]) -> Forward:
    """Logits and residual streams of every position, as float32, from one pass of a transformers model."""
    import torch

    streams: list[Floats] = []

    def keep(module: Any, arguments: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        streams.append(hidden.detach().float().reshape(len(token_ids), -1).numpy().copy())

    decoder = model.model
    hooks = [module.register_forward_hook(keep) for module in (decoder.embed_tokens, *decoder.layers)]
    try:
        with torch.inference_mode():
            output = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return Forward(output.logits[0].float().numpy().copy(), np.stack(streams))


def relative_difference(reference: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """max |other - reference| / max |reference|; infinite where either is not finite."""
    difference = float(np.abs(other.astype(np.float64) - reference).max() / np.abs(reference).max())
    return difference if np.isfinite(difference) else float("inf")


def mean_kl(reference: Floats, other: Floats) -> float:
    """KL(softmax(reference) || softmax(other)) in nats, mean over rows."""
    p, q = _log_softmax(reference), _log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def kl_ratio(ours: float, theirs: float) -> float:
    """How many times as far from the reference we are as they are; 0 where we are as good as exact."""
    return 0.0 if ours <= KL_FLOOR else ours / max(theirs, KL_FLOOR)


def _log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def layer_table(reference: Forward, others: dict[str, Forward]) -> list[str]:
    """Lines of a table: for each layer and each implementation, how far its residual stream is from the reference's."""
    title = f"{'':>10} {'max |x|':>11}"
    lines = [title + "".join(f" | {f'{name}: max |d|':>22} {'/ max |x|':>10} {'rms':>10}" for name in others)]
    rows = [("embedding" if n == 0 else f"layer {n - 1}", n) for n in range(len(reference.residuals))]
    for label, n in rows:
        lines.append(_table_row(label, reference.residuals[n], [other.residuals[n] for other in others.values()]))
    lines.append(_table_row("logits", reference.logits, [other.logits for other in others.values()]))
    return lines


def _table_row(label: str, reference: Floats, others: list[Floats]) -> str:
    line = f"{label:>10} {np.abs(reference).max():11.4g}"
    for other in others:
        difference = np.abs(other - reference).max()
        rms = np.sqrt(
            np.square(other - reference, dtype=np.float64).mean() / np.square(reference, dtype=np.float64).mean()
        )
        line += f" | {difference:22.3e} {relative_difference(reference, other):10.2e} {rms:10.2e}"
    return line


def agreement(reference: Floats, other: Floats) -> tuple[int, int]:
    """(positions where both find the same most likely token, positions)."""
    return int((reference.argmax(-1) == other.argmax(-1)).sum()), len(reference)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare a model in pyengine with the same model in Hugging Face transformers, layer by layer.",
        epilog="Exit code: 0 within the tolerance, 1 beyond it, 2 when the comparison could not be made.",
    )
    parser.add_argument("model", help="a folder, a built-in name, or an id of the Hugging Face hub")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--prompt", help="text to compare on (default: a short story)")
    parser.add_argument("--prompt-ids", help="token ids to compare on, separated by commas")
    parser.add_argument("--device", default="cpu", help="of ours: cpu, cuda, cuda:N (default cpu)")
    parser.add_argument("--chunk", type=_positive, default=512, help="most tokens of one step of ours (default 512)")
    parser.add_argument(
        "--tolerance",
        type=float,
        help=f"float32: largest |logit difference| as a part of the largest |logit| (default {LOGITS_TOLERANCE:g}); "
        f"16 bits: our KL as a multiple of transformers' (default {KL_RATIO_TOLERANCE:g})",
    )
    options = parser.parse_args(arguments)
    if options.prompt is not None and options.prompt_ids is not None:
        parser.error("give --prompt or --prompt-ids, not both")
    if options.tolerance is None:
        options.tolerance = LOGITS_TOLERANCE if options.dtype == "float32" else KL_RATIO_TOLERANCE
    if not 0 <= options.tolerance < float("inf"):
        parser.error(f"--tolerance is {options.tolerance}; it must be a number >= 0")
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def _token_ids(options: argparse.Namespace, ours: OurModel) -> list[int]:
    vocab_size = ours.spec.vocab_size
    if options.prompt_ids is not None:
        parts = [part.strip() for part in options.prompt_ids.split(",")]
        if not all(part.isdecimal() and int(part) < vocab_size for part in parts):
            raise ValueError(f"--prompt-ids is {options.prompt_ids!r}; give integers from 0 to {vocab_size - 1}.")
        return [int(part) for part in parts]
    if ours.tokenizer is not None:
        return ours.tokenizer.encode(options.prompt or DEFAULT_TEXT)
    if options.prompt is not None:
        raise ValueError("The model has no tokenizer.json; use --prompt-ids.")
    count = min(100, ours.spec.max_context)
    return [int(token_id) for token_id in np.random.default_rng(0).integers(0, vocab_size, count)]


def _report(options: argparse.Namespace, reference: Forward, ours: Forward, theirs: Forward | None) -> bool:
    """Print the comparison and say whether it is within the tolerance."""
    others = {"pyengine": ours} | ({} if theirs is None else {"transformers": theirs})
    print("Residual stream after each layer, against transformers in float32 (d: difference, x: reference)")
    print("\n".join(layer_table(reference, others)))
    for name, other in others.items():
        same, count = agreement(reference.logits, other.logits)
        print(f"{name}: most likely token agrees at {same} of {count} positions, ", end="")
        print(f"KL(reference || {name}) = {mean_kl(reference.logits, other.logits):.3e} nats")
    if theirs is None:
        what, value = "largest logit difference / largest logit", relative_difference(reference.logits, ours.logits)
    else:
        ratio = kl_ratio(mean_kl(reference.logits, ours.logits), mean_kl(reference.logits, theirs.logits))
        what, value = f"KL of pyengine / KL of transformers, both in {options.dtype}", ratio
    is_within = value <= options.tolerance
    print(f"{'OK' if is_within else 'BEYOND THE TOLERANCE'}: {what} = {value:.3g} (tolerance {options.tolerance:g})")
    return is_within


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit code."""
    options = _parse(arguments)
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        print(f'error: {error}. This comparison needs: pip install "pyengine-llm[hf-test]"', file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        resolved = resolve_model(options.model)
        with OurModel(resolved.folder, options.dtype, max_tokens=options.chunk, device=options.device) as model:
            token_ids = _token_ids(options, model)
            ours = model.forward(token_ids)
    except (PyEngineError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{resolved.name}: {len(token_ids)} tokens, {options.dtype}, transformers {transformers.__version__}")
    reference = hf_forward(load_hf(resolved.folder, "float32"), token_ids)
    theirs = None
    if options.dtype != "float32":
        theirs = hf_forward(load_hf(resolved.folder, options.dtype, "sdpa"), token_ids)
    return 0 if _report(options, reference, ours, theirs) else 1


if __name__ == "__main__":
    sys.exit(main())
