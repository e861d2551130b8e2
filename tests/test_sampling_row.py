"""SamplingRow: what the native step reads of one sequence."""

from __future__ import annotations

import math

from pyengine.sampling_params import SamplingParams
from pyengine.sampling_row import SamplingRow


def row(**params: object) -> SamplingRow:
    return SamplingRow(SamplingParams(**params).with_defaults({}), 0, [5, 6, 5], [1, 9])  # type: ignore[arg-type]


def test_an_end_that_is_forbidden_is_listed_once_whatever_its_bias() -> None:
    biased = row(temperature=0.0, min_tokens=2, logit_bias={9: 100.0, 4: -1.0})
    ids, values = biased.bias
    assert sorted(ids) == [1, 4, 9]
    assert dict(zip(ids, values, strict=True)) == {1: -math.inf, 4: -1.0, 9: -math.inf}
    biased.append(4)
    assert biased.bias == (ids, values)
    biased.append(4)
    assert dict(zip(*biased.bias, strict=True)) == {9: 100.0, 4: -1.0}


def test_what_the_next_draw_depends_on() -> None:
    assert not row(temperature=1.0).depends_on_output
    assert row(temperature=1.0, presence_penalty=0.5).depends_on_output
    minimum = row(temperature=1.0, min_tokens=1)
    assert minimum.depends_on_output
    minimum.append(4)
    assert not minimum.depends_on_output


def test_penalised_tokens_are_listed_once_with_how_often_they_were_made() -> None:
    penalised = row(temperature=1.0, repetition_penalty=1.2)
    for token_id in (7, 5, 7):
        penalised.append(token_id)
    assert penalised.penalty_ids == [5, 6, 7]
    assert penalised.penalty_counts == [1, 0, 2]
