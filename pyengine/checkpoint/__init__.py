"""Where a model's weights come from: folders, safetensors files, names; gives tensors by role, computes nothing."""

from __future__ import annotations

from pyengine.checkpoint.folder import Checkpoint, TensorView, open_checkpoint
from pyengine.checkpoint.generation import GenerationDefaults, eos_token_ids, generation_defaults
from pyengine.checkpoint.source import ResolvedModel, resolve_model

__all__ = [
    "Checkpoint",
    "GenerationDefaults",
    "ResolvedModel",
    "TensorView",
    "eos_token_ids",
    "generation_defaults",
    "open_checkpoint",
    "resolve_model",
]
