"""The command on a pseudo-terminal: streaming, bars, colours, Ctrl-C, and conversations."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

CTRL_C, CTRL_D = "\x03", "\x04"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def only(character: str) -> list[str]:
    """Options that make the chat model, whose tokens are bytes in the order of their spelling, say only this letter."""
    return ["--temperature", "0", "--logit-bias", f"{ord(character) - ord('!')}=100"]


def prompt_tokens(shown: str) -> list[int]:
    return [int(count) for count in re.findall(r"prompt +(\d+) tokens", shown)]


def test_text_appears_as_it_is_made_and_ctrl_c_ends_it_without_a_trace(
    on_terminal: Callable[..., Any], chat_model: Path
) -> None:
    process = on_terminal("generate", "Once", "-m", str(chat_model), *only("a"))
    process.wait_for("aaaa")  # long before the 65,000 tokens that the context has room for
    process.type(CTRL_C)
    assert process.end() == 130
    assert process.shown.count("a") < 60_000
    assert "Traceback" not in process.shown
    assert re.search(r"aaaa(\^C)?a*\r\n$", process.shown)


def test_ctrl_c_in_a_batch_takes_the_bar_away_and_shows_the_cursor(
    on_terminal: Callable[..., Any], chat_model: Path
) -> None:
    process = on_terminal("generate", *["x"] * 8, "-m", str(chat_model), *only("a"))
    process.wait_for("0/8")
    process.type(CTRL_C)
    assert process.end() == 130
    assert process.shown.rindex(SHOW_CURSOR) > process.shown.rindex(HIDE_CURSOR)
    assert "Traceback" not in process.shown
    assert "aaaa" not in process.shown


def test_a_batch_is_written_in_order_once_the_bar_has_gone(on_terminal: Callable[..., Any], chat_model: Path) -> None:
    process = on_terminal("generate", "x", "y", "-m", str(chat_model), *only("a"), "-t", "3", NO_COLOR="1")
    assert process.end() == 0
    assert process.shown.endswith("xaaa\r\n---\r\nyaaa\r\n")
    assert process.shown.rindex(SHOW_CURSOR) > process.shown.rindex(HIDE_CURSOR)


def test_colours_are_left_out_where_the_user_wants_none(on_terminal: Callable[..., Any], chat_model: Path) -> None:
    arguments = ("generate", "x", "-m", str(chat_model), *only("a"), "-t", "3")
    coloured, plain = on_terminal(*arguments), on_terminal(*arguments, NO_COLOR="1")
    assert coloured.end() == plain.end() == 0
    assert "\x1b[2mx\x1b[0maaa\r\n" in coloured.shown
    assert plain.shown.endswith("xaaa\r\n")
    assert "\x1b" not in plain.shown


def test_a_model_cannot_drive_the_terminal(on_terminal: Callable[..., Any], chat_model: Path) -> None:
    # Byte 0x1B is spelled U+011B in byte-level vocabularies: after 188 printable ones, the 28th of those moved up.
    escape = 188 + 0x1B
    process = on_terminal("generate", "x\x1b[31m", "-m", str(chat_model), "--logit-bias", f"{escape}=100", "-t", "3")
    assert process.end() == 0
    assert "x␛[31m" in process.shown
    assert "␛␛␛" in process.shown
    assert "\x1b[31m" not in process.shown


def test_a_conversation_is_remembered_until_it_is_reset(on_terminal: Callable[..., Any], chat_model: Path) -> None:
    process = on_terminal("chat", "-m", str(chat_model), *only("a"), "-t", "5", "--stats", "--system", "Be kind.")
    start = "<|system|>Be kind."
    first = start + "<|user|>Hi<|assistant|>"
    second = first + "aaaaa<|user|>And you?<|assistant|>"
    for turn, line in enumerate(["Hi", "And you?", "/reset", "Hi"], 1):
        process.wait_for(">>> ", times=turn)
        process.type(f"{line}\n")
    process.wait_for(">>> ", times=5)
    process.type(CTRL_D)
    assert process.end() == 0
    assert prompt_tokens(process.shown) == [len(first), len(second), len(first)]
    assert process.shown.count("aaaaa\r\n") == 3


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(on_terminal: Callable[..., Any], chat_model: Path) -> None:
    process = on_terminal("chat", "-m", str(chat_model), *only("a"))
    process.wait_for(">>> ")
    process.type("Hi\n")
    process.wait_for("aaaa")
    process.type(CTRL_C)
    process.wait_for("(stopped)")
    process.wait_for(">>> ", times=2)
    process.type("/nonsense\n")
    process.wait_for("There is no command /nonsense")
    process.wait_for(">>> ", times=3)
    assert process.leave(CTRL_C) == 130
    assert "Traceback" not in process.shown


def test_ctrl_c_twice_in_a_row_leaves_a_conversation_like_once(
    on_terminal: Callable[..., Any], chat_model: Path
) -> None:
    process = on_terminal("chat", "-m", str(chat_model))
    process.wait_for(">>> ")
    assert process.leave(CTRL_C + CTRL_C) == 130
    assert "Traceback" not in process.shown
    assert "ignored" not in process.shown


def test_ctrl_c_twice_in_an_answer_leaves_without_a_trace(on_terminal: Callable[..., Any], chat_model: Path) -> None:
    process = on_terminal("chat", "-m", str(chat_model), *only("a"))
    process.wait_for(">>> ")
    process.type("Hi\n")
    process.wait_for("aaaa")
    assert process.leave(CTRL_C + CTRL_C) == 130
    assert "Traceback" not in process.shown


def test_a_first_message_that_is_too_long_is_not_blamed_on_the_conversation(
    on_terminal: Callable[..., Any], chat_model: Path
) -> None:
    options = ("-m", str(chat_model), *only("a"), "-t", "60", "--max-context", "100")
    process = on_terminal("chat", *options)
    for turn, line in enumerate(["x" * 90, "Hi", "x" * 20], 1):
        process.wait_for(">>> ", times=turn)
        process.type(f"{line}\n")
    process.wait_for(">>> ", times=4)
    process.type(CTRL_D)
    assert process.end() == 0
    alone = process.shown.index("The message alone is too long")
    together = process.shown.index("The conversation has become too long; /reset forgets it.")
    assert alone < process.shown.index("aaaa") < together


def test_quit_ends_a_conversation_well(on_terminal: Callable[..., Any], chat_model: Path) -> None:
    process = on_terminal("chat", "-m", str(chat_model))
    process.wait_for(">>> ")
    process.type("/quit\n")
    assert process.end() == 0


def test_generate_on_a_terminal_without_a_prompt_says_what_to_write(on_terminal: Callable[..., Any]) -> None:
    process = on_terminal("generate", NO_COLOR="1")
    assert process.end() == 2
    assert process.shown.startswith("pyengine: error: There is no prompt: give one, for example")
