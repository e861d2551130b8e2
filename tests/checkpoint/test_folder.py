"""Opening a model folder: what the hub holds loads, and every fault is named before a weight is read."""

from __future__ import annotations

import gc
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pyengine.checkpoint import open_checkpoint
from pyengine.checkpoint.safetensors_files import write_safetensors
from pyengine.errors import InvalidRequest, ModelError
from pyengine.models import FAMILIES, role_shapes

EMBEDDING, HEAD, Q = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        open_checkpoint(folder)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("architecture", [family.architecture for family in FAMILIES])
def test_every_role_of_a_family_gives_its_tensor(
    architecture: str, tiny_config: Any, tiny_arrays: Any, write_folder: Any
) -> None:
    config = tiny_config(architecture)
    arrays = tiny_arrays(config)
    with open_checkpoint(write_folder(config, arrays)) as checkpoint:
        assert checkpoint.roles == tuple(role_shapes(checkpoint.spec))
        assert checkpoint.num_bytes == sum(array.nbytes for array in arrays.values())
        for role, shape in role_shapes(checkpoint.spec).items():
            view = checkpoint.tensor(role)
            assert (view.shape, view.dtype) == (shape, "float32")
        np.testing.assert_array_equal(checkpoint.tensor("layers.0.q").array, arrays[Q])
        np.testing.assert_array_equal(checkpoint.tensor("embedding").array, arrays[EMBEDDING])
        with pytest.raises(KeyError):
            checkpoint.tensor("layers.2.q")


def test_shards_are_one_checkpoint(tiny_config: Any, tiny_arrays: Any, write_folder: Any) -> None:
    arrays = tiny_arrays(tiny_config())
    names = list(arrays)
    shards = [{name: arrays[name] for name in names[start::3]} for start in range(3)]
    checkpoint = open_checkpoint(write_folder(tiny_config(), *shards))
    np.testing.assert_array_equal(
        checkpoint.tensor("layers.1.down").array, arrays["model.layers.1.mlp.down_proj.weight"]
    )
    np.testing.assert_array_equal(checkpoint.tensor("head").array, arrays[HEAD])


def test_a_tensor_in_two_shards_is_taken_from_the_one_the_index_names(
    tiny_config: Any, tiny_arrays: Any, write_folder: Any
) -> None:
    arrays = tiny_arrays(tiny_config())
    folder = write_folder(tiny_config(), {Q: arrays[Q]}, {**arrays, Q: arrays[Q] + 1})
    for shard, expected in ((1, arrays[Q]), (2, arrays[Q] + 1)):
        rewrite_index(
            folder, lambda index, n=shard: index["weight_map"].update({Q: f"model-{n:05}-of-00002.safetensors"})
        )
        np.testing.assert_array_equal(open_checkpoint(folder).tensor("layers.0.q").array, expected)


def test_norms_may_be_stored_in_another_precision_than_the_rest(
    tiny_config: Any, tiny_arrays: Any, write_folder: Any
) -> None:
    arrays = {name: a if "norm" in name else a.astype(np.float16) for name, a in tiny_arrays(tiny_config()).items()}
    checkpoint = open_checkpoint(write_folder(tiny_config(), arrays))
    assert checkpoint.tensor("final_norm").dtype == "float32"
    assert checkpoint.tensor("layers.0.gate").dtype == "float16"


def test_without_a_dtype_in_the_config_the_stored_one_counts(
    tiny_config: Any, tiny_arrays: Any, write_folder: Any
) -> None:
    arrays = {name: a.astype(np.float16) for name, a in tiny_arrays(tiny_config()).items()}
    assert open_checkpoint(write_folder(tiny_config(), arrays)).spec.dtype == "float16"
    assert open_checkpoint(write_folder(tiny_config(dtype="bfloat16"), arrays)).spec.dtype == "bfloat16"


def test_bfloat16_comes_as_its_bits(tiny_config: Any, tiny_arrays: Any, write_folder: Any) -> None:
    config = tiny_config()
    bits = {name: (a.view(np.uint32) >> 16).astype(np.uint16) for name, a in tiny_arrays(config).items()}
    folder = write_folder(config, {"x": np.zeros(1, np.float32)})
    write_safetensors(folder / "model.safetensors", {n: ("BF16", a.shape) for n, a in bits.items()}, bits.items())
    checkpoint = open_checkpoint(folder)
    view = checkpoint.tensor("layers.0.q")
    assert (view.dtype, view.array.dtype) == ("bfloat16", np.uint16)
    np.testing.assert_array_equal(view.array, bits[Q])
    assert checkpoint.spec.dtype == "bfloat16"


@pytest.mark.parametrize("stored", ["embedding only", "both alike", "head only"])
def test_a_tied_head_needs_one_of_the_two_tensors(
    stored: str, tiny_config: Any, tiny_arrays: Any, write_folder: Any
) -> None:
    config = tiny_config(tie_word_embeddings=True)
    arrays = tiny_arrays(config)
    values = arrays[EMBEDDING]
    if stored != "embedding only":
        arrays[HEAD] = values.copy()
    if stored == "head only":
        del arrays[EMBEDDING]
    checkpoint = open_checkpoint(write_folder(config, arrays))
    assert checkpoint.spec.tied_head
    assert "head" not in checkpoint.roles
    np.testing.assert_array_equal(checkpoint.tensor("embedding").array, values)


def test_a_head_that_differs_is_used_though_the_config_ties_it(
    tiny_config: Any, tiny_arrays: Any, write_folder: Any
) -> None:
    config = tiny_config(tie_word_embeddings=True)
    arrays = tiny_arrays(config)
    arrays[HEAD] = arrays[EMBEDDING] + 1
    checkpoint = open_checkpoint(write_folder(config, arrays))
    assert not checkpoint.spec.tied_head
    np.testing.assert_array_equal(checkpoint.tensor("head").array, arrays[HEAD])


def test_computed_buffers_of_old_exports_are_ignored(tiny_config: Any, tiny_arrays: Any, write_folder: Any) -> None:
    arrays = tiny_arrays(tiny_config())
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    assert open_checkpoint(write_folder(tiny_config(), arrays)).spec.num_layers == 2


def test_arrays_outlive_a_closed_checkpoint(tiny_config: Any, tiny_arrays: Any, write_folder: Any) -> None:
    arrays = tiny_arrays(tiny_config())
    checkpoint = open_checkpoint(write_folder(tiny_config(), arrays))
    view = checkpoint.tensor("layers.0.q")
    view.release()
    checkpoint.close()
    del checkpoint
    gc.collect()
    np.testing.assert_array_equal(view.array, arrays[Q])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_released_tensors_leave_the_resident_memory(tmp_path: Path, tiny_config: Any, write_folder: Any) -> None:
    config = tiny_config(vocab_size=400_000, tie_word_embeddings=True)  # 25.6 MB of embedding

    def mapped_bytes() -> int:
        found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
        return int(found.split()[1]) * 1024

    family = FAMILIES[0]
    spec = family.spec_from_config(config)
    arrays = {family.tensor_name(role): np.ones(shape, np.float32) for role, shape in role_shapes(spec).items()}
    checkpoint = open_checkpoint(write_folder(config, arrays))
    before = mapped_bytes()
    view = checkpoint.tensor("embedding")
    assert view.array.sum() == view.array.size
    assert mapped_bytes() - before > 20_000_000
    view.release()
    assert mapped_bytes() - before < 5_000_000


@pytest.mark.parametrize("allowed", [1, 64, 128])
def test_a_context_can_be_served_as_far_as_the_rope_stretches(
    allowed: int, tiny_config: Any, tiny_arrays: Any, write_folder: Any
) -> None:
    config = tiny_config(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert open_checkpoint(write_folder(config, tiny_arrays(config))).served_context(allowed) == allowed


@pytest.mark.parametrize("wrong", [0, -1, 65, 1.5, True, "64"])
def test_a_context_beyond_the_model_is_an_invalid_request(
    wrong: Any, tiny_config: Any, tiny_arrays: Any, write_folder: Any
) -> None:
    checkpoint = open_checkpoint(write_folder(tiny_config(), tiny_arrays(tiny_config())))
    with pytest.raises(InvalidRequest, match=r"max_context .* 1 to 64") as caught:
        checkpoint.served_context(wrong)
    assert (caught.value.field, caught.value.value, caught.value.limit) == ("max_context", wrong, 64)


def test_what_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "absent", "not a folder")


@pytest.mark.parametrize(
    ("file", "word"), [("adapter_config.json", "adapter"), ("a.gguf", "GGUF"), ("b.txt", "tokenizer.json")]
)
def test_a_folder_without_config_says_what_it_may_be(tmp_path: Path, file: str, word: str) -> None:
    (tmp_path / file).write_text("{}")
    refused(tmp_path, "config.json is missing", word)


@pytest.mark.parametrize("content", ["", "{", "[1]", "nul", "\x00"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_broken_json_is_refused_naming_the_file(
    content: str, file: str, tiny_config: Any, tiny_arrays: Any, write_folder: Any
) -> None:
    folder = write_folder(tiny_config(), tiny_arrays(tiny_config()))
    (folder / file).write_text(content)
    refused(folder, file, "JSON")


def test_a_missing_shard_is_named(tiny_config: Any, tiny_arrays: Any, write_folder: Any) -> None:
    arrays = tiny_arrays(tiny_config())
    names = list(arrays)
    folder = write_folder(tiny_config(), {n: arrays[n] for n in names[::2]}, {n: arrays[n] for n in names[1::2]})
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "lacks model-00002-of-00002.safetensors")


def rewrite_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(change(index) or index))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index["weight_map"].update(extra="model-00001-of-00002.safetensors"), ["extra", "not in"]),
        (lambda index: index["weight_map"].update({Q: "../other.safetensors"}), ["../other.safetensors", Q]),
        (lambda index: index["weight_map"].update({Q: "..\\other.safetensors"}), ["other.safetensors", Q]),
        (lambda index: index["weight_map"].update({Q: 3}), ["3", Q]),
        (lambda index: index.update(weight_map=[]), ["weight_map", "[]"]),
        (lambda index: index.pop("weight_map") and None, ["weight_map", "None"]),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    change: Any, words: list[str], tiny_config: Any, tiny_arrays: Any, write_folder: Any
) -> None:
    arrays = tiny_arrays(tiny_config())
    names = list(arrays)
    folder = write_folder(tiny_config(), {n: arrays[n] for n in names[::2]}, {n: arrays[n] for n in names[1::2]})
    rewrite_index(folder, change)
    refused(folder, "index.json", *words)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], ["neither model.safetensors nor"]),
        (["pytorch_model.bin"], ["pytorch_model.bin", "pickled", "torch", "convert"]),
        (["consolidated.00.pth"], ["pickled"]),
        (["consolidated.safetensors"], ["consolidated.safetensors", "another layout"]),
    ],
)
def test_a_folder_without_our_weights_says_what_it_holds(
    files: list[str], words: list[str], tmp_path: Path, tiny_config: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    refused(tmp_path, *words)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_link_to_nothing_is_called_that(name: str, tiny_config: Any, tiny_arrays: Any, write_folder: Any) -> None:
    folder = write_folder(tiny_config(), tiny_arrays(tiny_config()))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../gone")
    refused(folder, f"{folder / name} is a link to nothing: ../gone does not exist")


@pytest.mark.parametrize(("name", "word"), [(Q, "missing"), (HEAD, "not tied"), (EMBEDDING, "missing")])
def test_a_missing_tensor_is_named(name: str, word: str, tiny_config: Any, tiny_arrays: Any, write_folder: Any) -> None:
    arrays = tiny_arrays(tiny_config())
    del arrays[name]
    refused(write_folder(tiny_config(), arrays), name, word)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "model.other.weight"]
)
def test_a_tensor_that_would_be_left_out_is_refused(
    name: str, tiny_config: Any, tiny_arrays: Any, write_folder: Any
) -> None:
    arrays = tiny_arrays(tiny_config())
    arrays[name] = np.zeros(16, np.float32)
    refused(write_folder(tiny_config(), arrays), name, "half right")


@pytest.mark.parametrize("dtype", [np.int8, np.float64, np.int32, np.bool_, np.uint8])
def test_a_dtype_that_is_not_of_weights_is_refused(
    dtype: Any, tiny_config: Any, tiny_arrays: Any, write_folder: Any
) -> None:
    arrays = tiny_arrays(tiny_config())
    arrays[Q] = arrays[Q].astype(dtype)
    refused(write_folder(tiny_config(), arrays), "model.safetensors", Q, "dtype", "F32, F16, BF16")


@pytest.mark.parametrize("shape", [(16, 15), (15, 16), (256,), (16, 16, 1), (0, 16)])
def test_a_shape_that_the_config_does_not_give_is_refused(
    shape: tuple[int, ...], tiny_config: Any, tiny_arrays: Any, write_folder: Any
) -> None:
    arrays = tiny_arrays(tiny_config())
    arrays[Q] = np.zeros(shape, np.float32)
    refused(write_folder(tiny_config(), arrays), "model.safetensors", Q, str(list(shape)), "[16, 16]")


def test_a_truncated_file_is_refused_when_opened(tiny_config: Any, tiny_arrays: Any, write_folder: Any) -> None:
    folder = write_folder(tiny_config(), tiny_arrays(tiny_config()))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(folder, "model.safetensors", "truncated")


def test_a_truncated_shard_is_refused_when_opened(tiny_config: Any, tiny_arrays: Any, write_folder: Any) -> None:
    arrays = tiny_arrays(tiny_config())
    names = list(arrays)
    folder = write_folder(tiny_config(), {n: arrays[n] for n in names[::2]}, {n: arrays[n] for n in names[1::2]})
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(struct.pack("<Q", 2**40) + path.read_bytes()[8:])
    refused(folder, "model-00001-of-00002.safetensors", "claims")


def test_an_unknown_architecture_is_refused_before_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["FooForCausalLM"]}))
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    refused(tmp_path, "FooForCausalLM", "LlamaForCausalLM")
