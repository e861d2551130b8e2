"""Starting the real command, with pipes or on a pseudo-terminal, and a tiny chat model of random weights."""

from __future__ import annotations

import codecs
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pyengine.checkpoint.source import BUILT_IN, built_in_folder
from pyengine.errors import ModelError
from pyengine.models import family_of, role_shapes, spec_from_config

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
SCRIPT = Path(sys.executable).with_name("pyengine")
COMMAND = [str(SCRIPT)] if SCRIPT.is_file() else [sys.executable, "-m", "pyengine"]
# Run in a session of its own: its terminal becomes the controlling one, so that Ctrl-C is a signal.
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
ELSEWHERE = Path(__file__).parent  # not the repository's root, where the source tree would hide the installed package
# So long that a run without a limit is still at work when a slow machine gets round to pressing Ctrl-C.
CHAT_CONTEXT = 65536
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Finished:
    """What a run of the command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Finished]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what would change colours or widths, with `changes`."""
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYENGINE_CPU_ISA")}
    return {**kept, "TERM": "xterm", **changes}


@pytest.fixture(scope="session")
def built_in() -> list[str]:
    """Options that select the built-in model: none where pyengine is installed; from the source tree, its folder."""
    try:
        built_in_folder()
    except ModelError:
        folder = REPOSITORY / "weights" / BUILT_IN
        assert (folder / "config.json").is_file(), "neither the package nor the source tree has the built-in model"
        return ["--model", str(folder)]
    return []


@pytest.fixture(scope="session")
def run() -> Run:
    """Run `pyengine ARGUMENTS` to its end with pipes for its streams."""

    def start(*arguments: str, stdin: str | bytes = b"", **changes: str) -> Finished:
        finished = subprocess.run(
            [*COMMAND, *arguments],
            cwd=ELSEWHERE,
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            env=environment(**changes),
            timeout=DEADLINE_S,
            check=False,
        )
        return Finished(finished.returncode, finished.stdout.decode(), finished.stderr.decode())

    return start


@pytest.fixture(scope="session")
def start() -> Callable[..., subprocess.Popen[bytes]]:
    """Start `pyengine ARGUMENTS` and leave its streams to the caller."""

    def popen(*arguments: str, stdout: int, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=ELSEWHERE,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            **options,
        )

    return popen


class OnTerminal:
    """`pyengine ARGUMENTS` on a pseudo-terminal of its own, of which it is the foreground process."""

    def __init__(self, *arguments: str, **changes: str) -> None:
        self.shown = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._terminal, its_side = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *COMMAND, *arguments],
            cwd=ELSEWHERE,
            env=environment(**changes),
            stdin=its_side,
            stdout=its_side,
            stderr=its_side,
            start_new_session=True,
        )
        os.close(its_side)

    def type(self, keys: str) -> None:
        """Press keys; "\\x03" is Ctrl-C and "\\x04" Ctrl-D."""
        os.write(self._terminal, keys.encode())

    def wait_for(self, text: str, *, times: int = 1) -> None:
        """Read until the screen has shown `text` so many times."""
        deadline = time.monotonic() + DEADLINE_S
        while self.shown.count(text) < times:
            assert time.monotonic() < deadline, f"{text!r} did not appear in {self.shown!r}"
            assert self._read(1.0), f"it ended without {text!r}: {self.shown!r}"

    def leave(self, keys: str) -> int:
        """Press keys until it ends, and return the exit code.

        Once may not be enough: a Ctrl-C that comes after Python's readline has written the prompt and before it waits
        for keys is noticed with the next key only.
        """
        for _ in range(30):
            try:
                self.type(keys)
            except OSError:  # macOS says so when the other side is closed
                break
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                if not self._read(0.1):
                    return self.end()
        return self.end()

    def end(self) -> int:
        """Read to the end and return the exit code."""
        deadline = time.monotonic() + DEADLINE_S
        while self._read(1.0):
            assert time.monotonic() < deadline, f"it did not end: {self.shown!r}"
        return self._process.wait(DEADLINE_S)

    def close(self) -> None:
        """End it if it still runs."""
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)

    def _read(self, seconds: float) -> bool:
        """Take what was written; False once the other side is closed."""
        if not select.select([self._terminal], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._terminal, 65536)
        except OSError:  # Linux says so when the last process of the terminal has closed it
            return False
        self.shown += self._decoder.decode(data)
        return bool(data)


@pytest.fixture
def on_terminal() -> Iterator[Callable[..., OnTerminal]]:
    """Start `pyengine ARGUMENTS` on a pseudo-terminal; it is ended with the test."""
    started: list[OnTerminal] = []

    def start(*arguments: str, **changes: str) -> OnTerminal:
        started.append(OnTerminal(*arguments, **changes))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model that has a chat template, no end token, and a token for each byte."""
    folder = tmp_path_factory.mktemp("chat-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: n for n, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(alphabet),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": CHAT_CONTEXT,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(3)
    family = family_of(config)
    shapes = role_shapes(spec_from_config(config))
    weights = {family.tensor_name(r): generator.standard_normal(s, np.float32) for r, s in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder
