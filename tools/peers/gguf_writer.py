"""Writes a Hugging Face folder of a Llama-shaped model as GGUF, for peers that read nothing else; runs no model.

Weights come from the folder, so that every engine computes with the same numbers. Everything else (sizes, rope,
tokenizer) is copied from a GGUF file of the same model in another precision.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.checkpoint.gguf_file import gguf_tensor_name
from pyengine.checkpoint.source import Checkpoint, open_checkpoint
from pyengine.models.spec import role_shapes

REWRITTEN_FIELDS = ("general.architecture", "general.file_type", "general.quantization_version")
