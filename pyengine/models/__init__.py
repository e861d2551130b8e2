"""Model families: config.json -> DecoderSpec, and tensor names -> roles. The registry; no weights are touched here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyengine.errors import ModelError
from pyengine.models import llama, mistral, qwen2, qwen3
from pyengine.models.family import Family
from pyengine.models.spec import DecoderSpec, RopeSpec, role_shapes

FAMILIES: tuple[Family, ...] = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)

__all__ = ["FAMILIES", "DecoderSpec", "Family", "RopeSpec", "family_of", "role_shapes", "spec_from_config"]


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a config.json names by `architectures[0]`, else by `model_type`. Raises ModelError if unknown."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    known = ", ".join(family.architecture for family in FAMILIES)
    if architectures is None or architectures == []:
        matches = [family for family in FAMILIES if family.name == model_type]
        if not matches:
            types = ", ".join(family.name for family in FAMILIES)
            raise ModelError(
                f"config.json names no architecture, and its model_type is {model_type!r}; "
                f"handled are the types {types} ({known})."
            )
        return matches[0]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise ModelError(f"config.json: architectures is {architectures!r}; it must be a list with one of {known}.")
    matches = [family for family in FAMILIES if family.architecture == architectures[0]]
    if not matches:
        raise ModelError(f"The architecture {architectures[0]!r} is not handled; handled are {known}.")
    family = matches[0]
    if model_type is not None and model_type != family.name:
        raise ModelError(
            f"config.json: model_type is {model_type!r}, but the architecture {family.architecture} "
            f"belongs to {family.name!r}; it is not clear which model this is."
        )
    return family


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """What the model computes, from a whole config.json. Raises ModelError for anything that is not handled."""
    return family_of(config).spec_from_config(config)
