"""Traces: what a file says is what is simulated, and each fault is named with line, column and value."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyengine.errors import InvalidRequest
from pyengine.simulate.trace_file import Trace, read_trace

HEAD = "arrival_s,prompt_tokens,output_tokens"


def read(folder: Path, text: str, prefix_share: float = 0.5) -> Trace:
    path = folder / "t.csv"
    path.write_text(text, encoding="utf-8")
    return read_trace(path, prefix_share)


def test_all_columns_are_read_in_any_order_and_others_are_named(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        "priority,output_tokens,tenant,region,arrival_s,prompt_tokens,prefix_id,prefix_tokens,max_tokens\n"
        "2,5,a,north,0.25,40,sys,32,99\n"
        ",7, b ,south,0.25,20,sys,,\n"
        "\n"
        "0,1,,,1e1,10,,,\n",
    )
    first, second, third = trace.workload.requests
    assert trace.ignored_columns == ("region",)
    assert (first.arrival_ns, first.prompt_tokens, first.output_tokens) == (250_000_000, 40, 5)
    assert (first.priority, first.tenant, first.max_tokens) == (2, "a", 99)
    assert (second.priority, second.tenant, second.max_tokens) == (0, "b", None)
    assert third.arrival_ns == 10_000_000_000
    prompts = [request.prompt() for request in trace.workload.requests]
    assert prompts[0][:10] == prompts[1][:10]  # half of the second, which has no prefix_tokens
    assert len(set(prompts[0][:32])) == 1
    assert {prompts[0][32], prompts[1][10], prompts[2][0]}.isdisjoint({prompts[0][0]})
    assert len({prompts[0][32], prompts[1][10], prompts[2][0]}) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the column arrival_s is missing; it is empty"),
        ("arrival_s,prompt_tokens\n", "line 1: the column output_tokens is missing; it has arrival_s, prompt_tokens"),
        (f"{HEAD},arrival_s\n", "line 1: the column arrival_s is there twice"),
        (f"{HEAD}\n", "nothing follows line 1"),
        (f"{HEAD}\n0,1\n", "line 2: 2 cells, but line 1 names 3 columns"),
        (f"{HEAD}\n0,1,1\n-0.5,1,1\n", "line 3, column arrival_s: '-0.5' is negative"),
        (f"{HEAD}\n2,1,1\n1,1,1\n", "line 3, column arrival_s: '1' is earlier than the one before it, 2; sort"),
        (f"{HEAD}\nsoon,1,1\n", "line 2, column arrival_s: 'soon' is not a number of seconds"),
        (f"{HEAD}\nnan,1,1\n", "line 2, column arrival_s: 'nan' is not a number of seconds"),
        (f"{HEAD}\ninf,1,1\n", "line 2, column arrival_s: 'inf' is not a number of seconds"),
        (f"{HEAD}\n0,many,1\n", "line 2, column prompt_tokens: 'many' is not an integer number of tokens"),
        (f"{HEAD}\n0,1.5,1\n", "line 2, column prompt_tokens: '1.5' is not an integer number of tokens"),
        (f"{HEAD}\n0,0,1\n", "line 2, column prompt_tokens: '0' is not from 1 to"),
        (f"{HEAD}\n0,1,0\n", "line 2, column output_tokens: '0' is not from 1 to"),
        (f"{HEAD},priority\n0,1,1,high\n", "line 2, column priority: 'high' is not an integer"),
        (f"{HEAD},priority\n0,1,1,10\n", "line 2, column priority: '10' is not from 0 to 9"),
        (f"{HEAD},priority\n0,1,1,9\n1,1,1,-1\n", "line 3, column priority: '-1' is not from 0 to 9"),
        (f"{HEAD},priority\n0,1,1,1_0\n", "line 2, column priority: '1_0' is not an integer"),
        (f"{HEAD}\n0,1_0,1\n", "line 2, column prompt_tokens: '1_0' is not an integer number of tokens"),
        (f"{HEAD}\n0,\u0663,1\n", "line 2, column prompt_tokens: '\u0663' is not an integer number of tokens"),
        (f'{HEAD}\n0,"5\n",1\n', "line 3, column prompt_tokens: '5\\n' is not an integer number of tokens"),
        (f'{HEAD}\n0,1,"\n5"\n', "line 3, column output_tokens: '\\n5' is not an integer number of tokens"),
        (f"{HEAD}\n1_0.5,1,1\n", "line 2, column arrival_s: '1_0.5' is not a number of seconds"),
        (f'{HEAD}\n"1\n",1,1\n', "line 3, column arrival_s: '1\\n' is not a number of seconds"),
        (f"{HEAD}\n1e10,1,1\n", "line 2, column arrival_s: '1e10' is not a number of seconds up to 1e+09"),
        (f"{HEAD},max_tokens\n0,1,1,some\n", "line 2, column max_tokens: 'some' is not an integer"),
        (f'{HEAD},max_tokens\n0,1,1,"\n"\n', "line 3, column max_tokens: '\\n' is not an integer"),
        (f"{HEAD},prefix_tokens\n0,1,1,some\n", "line 2, column prefix_tokens: 'some' is not an integer"),
        (f"{HEAD},prefix_id,prefix_tokens\n0,1,1,,x\n", "line 2, column prefix_tokens: 'x' is not an integer"),
        (f"{HEAD},prefix_id,prefix_tokens\n0,1,1,a,0\n", "line 2, column prefix_tokens: '0' is not from 1 to"),
        (f"{HEAD}\n\n\n0,1,1\n\n1,x,1\n", "line 6, column prompt_tokens: 'x' is not"),
        (f'{HEAD},tenant\n0,1,1,"a\nb\nc"\n\n1,x,1,d\n', "line 6, column prompt_tokens: 'x' is not"),
        (f"{HEAD}\r\n\r\n0,1,1\r\n1,1\r\n", "line 4: 2 cells"),
        (f"{HEAD},prefix_id,prefix_tokens\n0,9,1,a,10\n", "column prefix_tokens: '10' is more than the prompt has, 9"),
    ],
)
def test_each_fault_names_file_line_column_and_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith("t.csv")
    assert message in str(caught.value)


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        f"{HEAD},priority,prefix_id,prefix_tokens\n 0 ,+7,\t1,0,,0\n.5,007,1,9,,\n1.,1,1,,,3\n2.5E-0,1,1,,,\n",
    )
    requests = trace.workload.requests
    assert [request.arrival_ns for request in requests] == [0, 500_000_000, 1_000_000_000, 2_500_000_000]
    assert [request.prompt_tokens for request in requests] == [7, 7, 1, 1]
    assert [request.priority for request in requests] == [0, 9, 0, 0]
    assert all(not request.prefix_keys for request in requests)


def test_each_request_has_the_line_on_which_its_row_ends(tmp_path: Path) -> None:
    text = f'{HEAD},tenant\n\n0,1,1,a\n1,1,1,"b\nb"\n\n\n2,1,1,c\n'
    assert read(tmp_path, text).lines == (3, 5, 8)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(tmp_path: Path, share: float) -> None:
    with pytest.raises(InvalidRequest, match=r"prefix_share is .*; it must be a number from 0 to 1"):
        read(tmp_path, f"{HEAD}\n0,1,1\n", share)


def test_a_file_that_is_not_there_or_not_text_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"nowhere\.csv' cannot be read: No such file"):
        read_trace(tmp_path / "nowhere.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match=r"b\.csv' is not UTF-8 text"):
        read_trace(tmp_path / "b.csv")
