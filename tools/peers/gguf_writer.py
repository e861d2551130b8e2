"""Writes a Hugging Face folder of a Llama-shaped model as GGUF, for peers that read nothing else; runs no model.

Weights come from the folder, so that every engine computes with the same numbers. Everything else (sizes, rope,
tokenizer) is copied from a GGUF file of the same model in another precision.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from pyengine.backends.number_formats import convert
from pyengine.checkpoint import open_checkpoint
from pyengine.checkpoint.gguf_file import gguf_tensor_name

NOT_COPIED = ("general.architecture", "general.file_type", "general.quantization_version")
PRECISIONS = {
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
}


def write_gguf(folder: Path, template: Path, dtype: str, target: Path) -> None:
    """Write `target` with the weights of `folder` in `dtype` and every other field of the GGUF file `template`.

    Matrices are stored as `dtype` ("bfloat16" or "float16"), vectors as float32. The file appears when it is complete.
    """
    tensor_type, file_type = PRECISIONS[dtype]
    partial = target.with_suffix(f".partial-{os.getpid()}")
    writer = gguf.GGUFWriter(partial, "llama")
    copy_fields(gguf.GGUFReader(template), writer)
    writer.add_file_type(file_type)
    checkpoint = open_checkpoint(folder)
    spec = checkpoint.spec
    for role in checkpoint.roles:
        tensor = checkpoint.tensor(role)
        if tensor.array.ndim == 1:
            values, raw_type = convert(tensor.array, tensor.dtype, "float32"), gguf.GGMLQuantizationType.F32
        else:
            values, raw_type = convert(tensor.array, tensor.dtype, dtype), tensor_type
        heads = {"q": spec.num_heads, "k": spec.num_kv_heads}.get(role.rpartition(".")[2])
        if heads is not None:
            values = in_gguf_rotary_order(values, heads)
        writer.add_tensor(gguf_tensor_name(role), np.ascontiguousarray(values), raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, target)


def copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    """Every field of one file into another, types kept, except those that speak of how the weights are stored."""
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in NOT_COPIED:
            continue
        kind = field.types[0]
        item_kind = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=item_kind)


def in_gguf_rotary_order(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of q or k [heads * head_dim, hidden] from HF's order to GGUF's.

    HF keeps the two rows that are rotated together half a head apart, row i and i + head_dim / 2; GGUF keeps them side
    by side, row 2 i and 2 i + 1.
    """
    halves = values.reshape(heads, 2, -1, values.shape[1])
    return halves.swapaxes(1, 2).reshape(values.shape)
