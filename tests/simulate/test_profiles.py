"""Device profiles: what is saved is read again, what cannot be is refused, and paper profiles say what they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyengine.errors import InvalidRequest
from pyengine.scheduler.step_time import StepFeatures
from pyengine.simulate.profiles import (
    BANDWIDTH_REACHED,
    GPUS,
    HOST_NS,
    MODEL_SIZES,
    DeviceProfile,
    built_in_profiles,
    find_profile,
)
from tests.simulate.conftest import small_profile


def test_a_saved_profile_is_read_again_and_found_by_its_path(tmp_path: Path) -> None:
    profile = replace(small_profile(), origin="measured", name="my laptop")
    assert DeviceProfile.from_json(profile.to_json()) == profile
    (tmp_path / "p.json").write_text(profile.to_json())
    assert find_profile(str(tmp_path / "p.json")) == profile
    assert profile.title == "my laptop"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "no device profile"),
        ({"version": 2}, "has version 2; this pyengine reads version 1"),
        ({"num_blocks": 0}, "num_blocks is 0; it must be an integer >= 1"),
        ({"num_blocks": True}, "num_blocks is True"),
        ({"origin": "guessed"}, "origin is 'guessed'; it must be one of measured, paper, made up"),
        ({"step_time": {"base_ns": 1}}, "it must be an object with base_ns, ns_per_prefill_token"),
        ({"colour": "red"}, "the field colour is not known"),
    ],
)
def test_what_cannot_be_a_profile_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    data = {**json.loads(small_profile().to_json()), **change}
    with pytest.raises(InvalidRequest, match=message):
        DeviceProfile.from_json(json.dumps(data), "p.json")


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan"), "5", None])
def test_a_step_time_coefficient_that_is_no_time_is_refused(value: Any) -> None:
    data = json.loads(small_profile().to_json())
    data["step_time"]["base_ns"] = value
    with pytest.raises(InvalidRequest, match=r"step_time\.base_ns is .*a number >= 0"):
        DeviceProfile.from_json(json.dumps(data))


def test_a_missing_field_and_broken_json_are_refused() -> None:
    data = json.loads(small_profile().to_json())
    del data["max_context"]
    with pytest.raises(InvalidRequest, match="the field max_context is missing"):
        DeviceProfile.from_json(json.dumps(data))
    with pytest.raises(InvalidRequest, match="is not JSON"):
        DeviceProfile.from_json("{")


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"profile is 'h300-8b'; it must be a file or one of example, .*h100-8b"):
        find_profile("h300-8b")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        find_profile(str(tmp_path / "nowhere.json"))


def test_paper_profiles_are_labelled_and_follow_the_datasheet() -> None:
    profiles = built_in_profiles()
    assert {"h200-8b", "h100-8b", "a100-8b", "l4-1b"} <= set(profiles)
    assert "l4-32b" not in profiles, "64 GB of weights do not fit into 24 GB"
    for name, profile in profiles.items():
        if name != "example":
            assert profile.origin == "paper"
            assert profile.title == f"{name} (paper profile)"
            assert profile.note.startswith("Computed, not measured")
    h100, size = GPUS["h100"], MODEL_SIZES["8b"]
    assert size.kv_bytes_per_token == 131_072
    decode_ns = profiles["h100-8b"].model().predict(StepFeatures(decode_seqs=1, kv_tokens=1000))
    read_ns = (2 * size.parameters + 1000 * 131_072) / (BANDWIDTH_REACHED * h100.bandwidth) * 1e9
    assert decode_ns == pytest.approx(read_ns + HOST_NS, rel=0.01)
    for faster, slower in (("h200-8b", "h100-8b"), ("h100-8b", "a100-8b"), ("h100-1b", "h100-8b")):
        step = StepFeatures(512, 32, 32_000, 512 * 600)
        assert profiles[faster].model().predict(step) < profiles[slower].model().predict(step)
        assert profiles[faster].num_blocks > profiles[slower].num_blocks or faster.startswith("h100-8b")
