"""Traces: workloads read from CSV files, each fault named with file, line, column and value."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pyengine.config import MAX_PRIORITY
from pyengine.errors import InvalidRequest
from pyengine.simulate.lengths import MAX_TOKENS
from pyengine.simulate.workload import SimRequest, Workload, prompt_segments
from pyengine.simulate.written_numbers import read_integer, read_number

REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
OPTIONAL = ("tenant", "priority", "prefix_id", "prefix_tokens", "max_tokens")
MAX_ARRIVAL_S = 1e9
_BLANKS = " \t"


class _Reader(Protocol):
    """What csv.reader returns: rows, and how many lines of the file they took so far."""

    @property
    def line_num(self) -> int: ...

    def __iter__(self) -> Iterator[list[str]]: ...

    def __next__(self) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file as a workload.

    Attributes:
        ignored_columns: those that a simulation has no use for.
        lines: of each request, the line of the file on which its row ends.
    """

    workload: Workload
    ignored_columns: tuple[str, ...]
    lines: tuple[int, ...]


def read_trace(path: str | Path, prefix_share: float = 0.5) -> Trace:
    """Read a CSV file with a line of names and the columns of REQUIRED, and those of OPTIONAL that it has.

    `prefix_id` names a prefix: prompts with the same one begin with the same `prefix_tokens` tokens; where there is no
    such column or its cell is empty, with `prefix_share` times their own length (so two share that of the shorter
    one). An empty cell of an optional column is as if it were not there.
    Raises InvalidRequest for what it cannot read, with the line, the column and the value. The line is that of the
    file, as an editor counts them; of a row with quoted line breaks, its last. Numbers are checked in all columns
    named above, even where a row has no use for them.
    """
    if not 0 <= prefix_share <= 1:
        raise InvalidRequest(
            f"prefix_share is {prefix_share!r}; it must be a number from 0 to 1.",
            field="prefix_share",
            value=prefix_share,
            limit=1,
        )
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _read(path.name, csv.reader(file), prefix_share)
    except OSError as error:
        raise InvalidRequest(
            f"The trace {str(path)!r} cannot be read: {error.strerror or error}.", field="trace", value=str(path)
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"The trace {str(path)!r} is not UTF-8 text: byte {error.start}.", field="trace", value=str(path)
        ) from error
    except csv.Error as error:
        raise InvalidRequest(f"The trace {str(path)!r} is not CSV: {error}.", field="trace", value=str(path)) from error


def _read(name: str, rows: _Reader, prefix_share: float) -> Trace:
    columns = [column.strip() for column in next(rows, [])]
    missing = [column for column in REQUIRED if column not in columns]
    if missing:
        has = f"it has {', '.join(columns)}" if any(columns) else "it is empty"
        raise InvalidRequest(
            f"{name}, line 1: the column {missing[0]} is missing; {has}. A trace needs {', '.join(REQUIRED)}, and may "
            f"have {', '.join(OPTIONAL)}.",
            field=missing[0],
        )
    twice = [column for column in columns if columns.count(column) > 1]
    if twice:
        raise InvalidRequest(f"{name}, line 1: the column {twice[0]} is there twice.", field=twice[0])
    prefixes: dict[str, int] = {}
    requests: list[SimRequest] = []
    lines: list[int] = []
    for cells in rows:
        if not cells:
            continue
        if len(cells) != len(columns):
            raise InvalidRequest(
                f"{name}, line {rows.line_num}: {len(cells)} cells, but line 1 names {len(columns)} columns.",
                field="trace",
                value=cells,
            )
        cells = [cell.strip(_BLANKS) for cell in cells]
        row = _Row(name, rows.line_num, dict(zip(columns, cells, strict=True)))
        lines.append(row.line)
        requests.append(_request(row, len(requests), prefixes, prefix_share))
        if len(requests) > 1 and requests[-1].arrival_ns < requests[-2].arrival_ns:
            raise row.error(
                "arrival_s", f"earlier than the one before it, {requests[-2].arrival_ns / 1e9:g}; sort the trace"
            )
    if not requests:
        raise InvalidRequest(f"{name} has no request: nothing follows line 1.", field="trace")
    ignored = tuple(column for column in columns if column not in REQUIRED + OPTIONAL)
    return Trace(Workload(name, tuple(requests)), ignored, tuple(lines))


def _request(row: _Row, number: int, prefixes: dict[str, int], prefix_share: float) -> SimRequest:
    prompt_tokens = row.tokens("prompt_tokens")
    prefix_id = row.text("prefix_id")
    shared = 0
    # Without a prefix they say nothing: 0 is as good as an empty cell.
    given = row.optional_tokens("prefix_tokens", least=1 if prefix_id else 0)
    if prefix_id:
        if given is not None and given > prompt_tokens:
            raise row.error("prefix_tokens", f"more than the prompt has, {prompt_tokens}")
        shared = math.floor(prefix_share * prompt_tokens) if given is None else given
    prefix = prefixes.setdefault(prefix_id, len(prefixes)) if prefix_id else None
    segments, keys = prompt_segments(number, prompt_tokens, prefix, shared)
    return SimRequest(
        row.arrival_ns(),
        prompt_tokens,
        row.tokens("output_tokens"),
        segments,
        keys,
        max_tokens=row.optional_tokens("max_tokens"),
        tenant=row.text("tenant"),
        priority=row.priority(),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """One line's cells by column, and where it stands."""

    file: str
    line: int
    cells: dict[str, str]

    def error(self, column: str, why: str) -> InvalidRequest:
        """What is wrong with the cell of `column`."""
        value = self.cells[column]
        return InvalidRequest(
            f"{self.file}, line {self.line}, column {column}: {value!r} is {why}.", field=column, value=value
        )

    def text(self, column: str) -> str:
        return self.cells.get(column, "").strip()

    def arrival_ns(self) -> int:
        try:
            seconds = read_number(self.cells["arrival_s"])
        except ValueError as error:
            raise self.error("arrival_s", "not a number of seconds") from error
        if seconds > MAX_ARRIVAL_S:
            raise self.error("arrival_s", f"not a number of seconds up to {MAX_ARRIVAL_S:g}")
        if seconds < 0:
            raise self.error("arrival_s", "negative")
        return round(seconds * 1e9)

    def tokens(self, column: str, least: int = 1) -> int:
        return self.integer(column, least, MAX_TOKENS, "not an integer number of tokens")

    def optional_tokens(self, column: str, least: int = 1) -> int | None:
        return self.tokens(column, least) if self.cells.get(column) else None

    def priority(self) -> int:
        return self.integer("priority", 0, MAX_PRIORITY, "not an integer") if self.cells.get("priority") else 0

    def integer(self, column: str, least: int, most: int, otherwise: str) -> int:
        """The number in the cell of `column`; `otherwise` is what it is if it is none."""
        try:
            number = read_integer(self.cells[column])
        except ValueError as error:
            raise self.error(column, otherwise) from error
        if not least <= number <= most:
            raise self.error(column, f"not from {least} to {most:,}")
        return number
