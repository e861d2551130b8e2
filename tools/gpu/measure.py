"""What gpu_check measures in its own process, on a GPU or, in a rehearsal, on the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyengine import Engine
from pyengine.backends.cuda_runtime import cuda_runtime, simt_runtime

from .kernels import SMALL, Ceilings, Kernels, Sizes
from .random_model import write_random_model
from .steps import Passes, overlap

BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
CONTEXTS = [128, 1024, 4096, 16384, 32768]
PROMPTS = [512, 2048, 8192]


class Measurements:
    """The parts after building and testing. `folder` gets a model with random weights."""

    def __init__(self, folder: Path, shape: str, is_rehearsal: bool, is_quick: bool) -> None:
        self.folder = folder / shape
        self.config = write_random_model(shape, self.folder)
        self.is_rehearsal, self.is_quick = is_rehearsal, is_quick
        self.device = "simt" if is_rehearsal else "cuda"
        self.runtime = simt_runtime() if is_rehearsal else cuda_runtime("cuda", 0)
        self._kernels: Kernels | None = None
        self._ceilings: Ceilings | None = None
        self._engines: dict[bool, Engine] = {}

    def ceilings(self, copy_seconds: Callable[[Any, int], float]) -> dict[str, Any]:
        sizes = SMALL if self.is_rehearsal else Sizes()
        runtime = self.runtime
        upload = uploads_of_tests(runtime.native) if self.is_rehearsal else runtime.cupy.asarray
        self._kernels = Kernels(runtime.native, upload, runtime.matmul_library, sizes)

        def copy(num_bytes: int) -> float:
            return time_of_a_host_copy(num_bytes) if self.is_rehearsal else copy_seconds(runtime.cupy, num_bytes)

        self._ceilings = self._kernels.ceilings(copy)
        return asdict(self._ceilings)

    def kernels(self) -> list[dict[str, Any]]:
        assert self._kernels is not None
        assert self._ceilings is not None
        found = self._kernels.measure(self._ceilings)
        self._kernels = None
        return found

    def engine(self, overlaps: bool) -> Engine:
        if overlaps not in self._engines:
            settings: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "kv_cache_memory": 0.4}
            if self.is_rehearsal:
                settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory": "1MiB"}
            self._engines[overlaps] = Engine(self.folder, device=self.device, overlap=overlaps, **settings)
        return self._engines[overlaps]

    def steps(self) -> dict[str, Any]:
        assert self._ceilings is not None
        passes = Passes(self.engine(True), self.config)
        batches, contexts, prompts = BATCHES, CONTEXTS, PROMPTS
        if self.is_quick:
            batches, contexts = [1, 16, 256], [1024, 16384]
        if self.is_rehearsal:
            batches, contexts, prompts = [1, 3], [20, 40], [48]
        return {
            "decode": passes.decode(batches, contexts, self._ceilings.copy_bytes_per_s),
            "prompt": passes.prompt(prompts, self._ceilings.gemm_flops_per_s),
        }

    def overlap(self, idle_share: Callable[..., dict[str, float]]) -> dict[str, Any]:
        batch, length, tokens = (3, 8, 6) if self.is_rehearsal else (64, 128, 256)
        engines = {overlaps: self.engine(overlaps) for overlaps in (False, True)}
        found = overlap(engines, list(range(2, 2 + length)), batch, tokens)
        passes = Passes(engines[True], self.config)
        found["idle_share"] = idle_share(passes, dict(found), batch, length + tokens // 2)
        return found

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines = {}


def device_of_tests() -> AbstractContextManager[Any]:
    """For a rehearsal: while it lasts, device "simt" is there."""
    from tests.simt.build import simt_module
    from tests.simt.device import simt_device

    return simt_device(simt_module())


def uploads_of_tests(native: Any) -> Callable[[Any], Any]:
    """For a rehearsal: arrays as the tests of the operations have them."""
    from tests.cuda.device_ops import Device

    upload: Callable[[Any], Any] = Device("simt-forward", native).to_device
    return upload


def time_of_a_host_copy(num_bytes: int) -> float:
    """For a rehearsal: the host's own memory."""
    source = bytearray(num_bytes)
    begin = time.perf_counter()
    bytearray(source)
    return time.perf_counter() - begin
