"""Policies: what a user writes becomes settings of the scheduler, or an error that says what there is."""

from __future__ import annotations

import pytest

from pyengine.errors import InvalidRequest
from pyengine.simulate.policies import PRESETS, Policy, parse_policies, setting_types

BASE = {"num_blocks": 100, "max_context": 500}


def test_presets_settings_and_names_can_be_mixed() -> None:
    policies = parse_policies(
        "fifo  tight:best-fit,num_blocks=7;max_queue=none,watermark=0.5,prefix_caching=False oracle"
    )
    assert [policy.name for policy in policies] == [
        "fifo",
        "tight",
        "max_queue=none,watermark=0.5,prefix_caching=False",
        "oracle",
    ]
    assert policies[1].config(BASE).num_blocks == 7
    assert policies[1].config(BASE).packing == "best_fit"
    third = policies[2].config(BASE)
    assert (third.max_queue, third.watermark, third.prefix_caching) == (None, 0.5, False)
    assert [policy.knows_lengths for policy in policies] == [False, False, False, True]


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_one_that_the_scheduler_has(name: str) -> None:
    (policy,) = parse_policies(name)
    config = policy.config(BASE)
    for key, value in PRESETS[name].items():
        assert key == "lengths" or getattr(config, key) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" ; ", "no policy to simulate"),
        ("fif", "policies has 'fif'; it must be one of static, fifo"),
        ("fifo fifo", "The policy fifo is there twice"),
        ("fifo,static", "preset static behind a comma; policies are separated by spaces"),
        ("colour=red", "policies sets 'colour'; the settings are .*capacity_quantile"),
        ("max_num_seqs=few", "max_num_seqs is 'few'; it must be of type int"),
        ("prefix_caching=maybe", "prefix_caching is 'maybe'; it must be of type bool"),
        ("lengths=guessed", "lengths is 'guessed'; it must be one of declared, known"),
    ],
)
def test_what_cannot_be_a_policy_is_refused_with_what_can(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_policies(text)


def test_a_value_that_the_scheduler_refuses_is_reported_with_the_policy() -> None:
    with pytest.raises(InvalidRequest, match="Policy mine: order is 'random'; it must be one of 'fifo'") as caught:
        Policy("mine", {"order": "random"}).config(BASE)
    assert caught.value.field == "order"


def test_every_setting_of_the_scheduler_has_a_type_that_can_be_written() -> None:
    for name, kinds in setting_types().items():
        assert set(kinds) <= {int, float, str, bool, type(None)}, name
