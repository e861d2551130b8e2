"""One engine in its own interpreter, driven by lines of JSON; it measures and judges nothing but its own wall time.

`PYTHON worker.py ENGINE` reads requests from standard input and answers each with one line on standard output. Only the
standard library and the engine itself are needed, so that every engine can live in an environment of its own.

    {"do": "load", ...Setup}                      {"seconds": import and load, "version": text}
    {"do": "prefill", "prompt": ids}              {"seconds": until the first token, "tokens": [id]}
    {"do": "decode", "prompts": [ids, ...],       {"seconds": of N steps of all sequences, prefill left out,
     "steps": N}                                   "tokens": ids of the first sequence, its first token included}
    {"do": "resources"}                           {"peak_bytes": n, "installed_bytes": n}

An answer {"error": text, "missing": module or null} stands for a failure; `missing` names what is not installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Sequences that are admitted first make a few tokens while the prompts of the last ones are still computed.
HEAD_START = 64
NOT_COUNTED = ("pip", "setuptools", "_distutils_hack", "distutils-precedence.pth", "__pycache__")


@dataclass(frozen=True)
class Setup:
    """What to load. `context` is the most tokens of one sequence; a GGUF file may be None where nobody reads it."""

    folder: str
    gguf_bfloat16: str | None
    gguf_float16: str | None
    threads: int
    max_seqs: int
    context: int
    device: str = "cpu"


class PyEngine:
    """pyengine: requests are submitted together, one pass at a time is timed."""

    def load(self, setup: Setup) -> str:
        import pyengine

        self._pyengine = pyengine
        self._engine = pyengine.Engine(
            setup.folder,
            device=setup.device,
            dtype="bfloat16",
            num_threads=setup.threads,
            max_num_seqs=setup.max_seqs,
            max_context=setup.context,
        )
        return version_of("pyengine-llm")

    def prefill(self, prompt: list[int]) -> tuple[float, list[int]]:
        begin = time.perf_counter()
        tokens = self._start([prompt], max_tokens=1)
        return time.perf_counter() - begin, tokens[0]

    def decode(self, prompts: list[list[int]], steps: int) -> tuple[float, list[int]]:
        tokens = self._start(prompts, max_tokens=steps + HEAD_START)
        before = [len(made) for made in tokens]
        begin = time.perf_counter()
        for _ in range(steps):
            self._step(tokens)
        seconds = time.perf_counter() - begin
        if [len(made) for made in tokens] != [count + steps for count in before]:
            raise RuntimeError(f"a step did not make a token for each of the {len(prompts)} sequences")
        for request_id in self._numbers:
            self._engine.abort(request_id)
        while self._engine.has_unfinished:
            self._engine.step()
        return seconds, tokens[0][: steps + 1]

    def _start(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Submit all and step until each has its first token."""
        params = self._pyengine.SamplingParams(
            temperature=0, repetition_penalty=1.0, max_tokens=max_tokens, ignore_eos=True
        )
        self._numbers = {self._engine.submit(prompt, params): n for n, prompt in enumerate(prompts)}
        tokens: list[list[int]] = [[] for _ in prompts]
        while not all(tokens):
            self._step(tokens)
        return tokens

    def _step(self, tokens: list[list[int]]) -> None:
        for event in self._engine.step():
            if event.error is not None:
                raise event.error
            tokens[self._numbers[event.request_id]] += event.token_ids


class Transformers:
    """Hugging Face transformers on torch: `generate` with one clock reading after each token."""

    def load(self, setup: Setup) -> str:
        import torch
        import transformers

        torch.set_num_threads(setup.threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        name_of_dtype = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
        model = transformers.AutoModelForCausalLM.from_pretrained(setup.folder, **{name_of_dtype: torch.bfloat16})
        model.to(setup.device).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        self._torch, self._model = torch, model
        return f"{transformers.__version__}, torch {torch.__version__}"

    def prefill(self, prompt: list[int]) -> tuple[float, list[int]]:
        begin = time.perf_counter()
        times, tokens = self._generate([prompt], 1)
        return times[0] - begin, tokens

    def decode(self, prompts: list[list[int]], steps: int) -> tuple[float, list[int]]:
        times, tokens = self._generate(prompts, steps + 1)
        return times[steps] - times[0], tokens

    def _generate(self, prompts: list[list[int]], count: int) -> tuple[list[float], list[int]]:
        """Clock readings after each token, and the first sequence's tokens."""
        torch, times = self._torch, []

        def take_time(ids: Any, scores: Any, **unused: Any) -> Any:
            if ids.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        ids = torch.tensor(prompts, device=self._model.device)
        with torch.inference_mode():
            made = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                use_cache=True,
                max_new_tokens=count,
                stopping_criteria=[take_time],
            )
        if len(times) != count:
            raise RuntimeError(f"generate made {len(times)} tokens, {count} were asked for")
        return times, made[0, ids.shape[1] :].tolist()


class LlamaCpp:
    """llama.cpp through the functions that llama-cpp-python wraps: one llama_decode a step for all sequences."""

    def load(self, setup: Setup) -> str:
        import ctypes

        import llama_cpp
        import numpy as np

        self._api, self._np = llama_cpp, np
        if setup.gguf_bfloat16 is None:
            raise RuntimeError("no GGUF file for this model")
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            setup.gguf_bfloat16.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"{setup.gguf_bfloat16} could not be loaded")
        self._threads, self._context = setup.threads, None
        self._use_context(num_seqs=1, length=setup.context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)
        return f"{llama_cpp.__version__}; {llama_cpp.llama_print_system_info().decode()}"

    def prefill(self, prompt: list[int]) -> tuple[float, list[int]]:
        self._use_context(num_seqs=1, length=len(prompt) + 1)
        begin = time.perf_counter()
        tokens = self._start([prompt])
        return time.perf_counter() - begin, tokens

    def decode(self, prompts: list[list[int]], steps: int) -> tuple[float, list[int]]:
        self._use_context(num_seqs=len(prompts), length=len(prompts[0]) + steps)
        tokens = self._start(prompts)
        first = [tokens[0]]
        begin = time.perf_counter()
        for step in range(steps):
            self._run([(token, len(prompts[s]) + step, s, True) for s, token in enumerate(tokens)])
            tokens = [self._most_likely(s) for s in range(len(prompts))]
            first.append(tokens[0])
        return time.perf_counter() - begin, first

    def _use_context(self, num_seqs: int, length: int) -> None:
        """An empty cache for so many sequences of this length: it is fastest and smallest with no room to spare."""
        if self._context:
            self._api.llama_free(self._context)
        params = self._api.llama_context_default_params()
        params.n_ctx = num_seqs * length
        params.n_seq_max = num_seqs
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = self._threads
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"no context for {num_seqs} sequences could be made")

    def _start(self, prompts: list[list[int]]) -> list[int]:
        """The first token of each sequence, from an empty cache."""
        tokens = []
        for s, prompt in enumerate(prompts):
            last = len(prompt) - 1
            self._run([(token, position, s, position == last) for position, token in enumerate(prompt)])
            tokens.append(self._most_likely(last))
        return tokens

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """One pass over (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wants_logits) in enumerate(entries):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wants_logits
        status = self._api.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode failed with status {status}")

    def _most_likely(self, index: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, index)
        return int(self._np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


class OpenVino:
    """OpenVINO GenAI's continuous batching on a GGUF file in float16, which it computes in bfloat16."""

    def load(self, setup: Setup) -> str:
        import numpy as np
        import openvino
        import openvino_genai

        if setup.gguf_float16 is None:
            raise RuntimeError("no GGUF file for this model")
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 1024
        scheduler.max_num_seqs = setup.max_seqs
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 1  # GB
        properties = {
            "INFERENCE_NUM_THREADS": setup.threads,
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
        }
        self._numpy, self._openvino, self._genai = np, openvino, openvino_genai
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(setup.gguf_float16, scheduler, "CPU", properties)
        self._next_id = 0
        return str(openvino_genai.__version__)

    def prefill(self, prompt: list[int]) -> tuple[float, list[int]]:
        begin = time.perf_counter()
        tokens = self._start([prompt], max_tokens=1)
        return time.perf_counter() - begin, tokens[0]

    def decode(self, prompts: list[list[int]], steps: int) -> tuple[float, list[int]]:
        tokens = self._start(prompts, max_tokens=steps + HEAD_START)
        before = [len(made) for made in tokens]
        begin = time.perf_counter()
        for _ in range(steps):
            self._step(tokens)
        seconds = time.perf_counter() - begin
        if [len(made) for made in tokens] != [count + steps for count in before]:
            raise RuntimeError(f"a step did not make a token for each of the {len(prompts)} sequences")
        for handle in self._handles:
            handle.stop()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return seconds, tokens[0][: steps + 1]

    def _start(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Add all requests and step until each has its first token."""
        config = self._genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        self._handles = []
        for prompt in prompts:
            ids = self._openvino.Tensor(self._numpy.array([prompt], self._numpy.int64))
            self._handles.append(self._pipeline.add_request(self._next_id, ids, config))
            self._next_id += 1
        tokens: list[list[int]] = [[] for _ in prompts]
        while not all(tokens):
            self._step(tokens)
        return tokens

    def _step(self, tokens: list[list[int]]) -> None:
        self._pipeline.step()
        for handle, made in zip(self._handles, tokens, strict=True):
            if handle.can_read():
                for output in handle.read().values():
                    made += output.generated_ids


class _Whole:
    """An engine that is asked for whole answers: a step's time is the difference of two lengths."""

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        raise NotImplementedError

    def prefill(self, prompt: list[int]) -> tuple[float, list[int]]:
        begin = time.perf_counter()
        tokens = self.generate([prompt], 1)[0]
        return time.perf_counter() - begin, tokens

    def decode(self, prompts: list[list[int]], steps: int) -> tuple[float, list[int]]:
        begin = time.perf_counter()
        self.generate(prompts, 1)
        first = time.perf_counter()
        tokens = self.generate(prompts, steps + 1)
        return (time.perf_counter() - first) - (first - begin), tokens[0]


class Vllm(_Whole):
    """vLLM on a GPU, offline."""

    def load(self, setup: Setup) -> str:
        import vllm

        self._vllm = vllm
        self._llm = vllm.LLM(
            setup.folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_num_seqs=setup.max_seqs,
            max_model_len=setup.context,
            gpu_memory_utilization=0.4,
            enable_prefix_caching=False,
        )
        return str(vllm.__version__)

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        params = self._vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class SGLang(_Whole):
    """SGLang on a GPU, offline."""

    def load(self, setup: Setup) -> str:
        import sglang

        self._engine = sglang.Engine(
            model_path=setup.folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_running_requests=setup.max_seqs,
            context_length=setup.context,
            mem_fraction_static=0.4,
            disable_radix_cache=True,
        )
        return str(sglang.__version__)

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        return [output["output_ids"] for output in self._engine.generate(input_ids=prompts, sampling_params=params)]


ENGINES: dict[str, Any] = {
    "pyengine": PyEngine,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "vllm": Vllm,
    "sglang": SGLang,
}


def version_of(distribution: str) -> str:
    """Version of an installed distribution; "from its sources" if it runs without being installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "from its sources"


def peak_bytes() -> int:
    """Most memory this process ever had resident, pages of mapped files included."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux: there ru_maxrss, in bytes, starts anew with this program
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def installed_bytes(site: Path) -> int:
    """Bytes of everything installed into a site-packages folder, pip and setuptools left out."""
    total = 0
    for entry in site.iterdir():
        if entry.name in NOT_COUNTED or entry.name.startswith(("pip-", "setuptools-")):
            continue
        files = [entry] if entry.is_file() else (file for file in entry.rglob("*") if file.is_file())
        total += sum(file.lstat().st_size for file in files)
    return total


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out one request of the protocol above."""
    what = request.pop("do")
    if what == "load":
        begin = time.perf_counter()
        version = engine.load(Setup(**request))
        return {"seconds": time.perf_counter() - begin, "version": version}
    if what == "resources":
        site = Path(sysconfig.get_paths()["purelib"])
        return {"peak_bytes": peak_bytes(), "installed_bytes": installed_bytes(site)}
    seconds, tokens = {"prefill": engine.prefill, "decode": engine.decode}[what](**request)
    return {"seconds": seconds, "tokens": tokens}


def main() -> int:
    """Serve requests until standard input ends."""
    # Answers have a channel of their own: what an engine prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = ENGINES[sys.argv[1]]()
    for line in sys.stdin:
        try:
            result = answer(engine, json.loads(line))
        except ModuleNotFoundError as error:
            result = {"error": str(error), "missing": error.name}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}", "missing": None}
        print(json.dumps(result), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
