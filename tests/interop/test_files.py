"""Folders of safetensors: whole, in shards, in half precision, and broken ones."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from olmo_jax.errors import UserError
from olmo_jax.interop.files import CONFIG, INDEX, WEIGHTS, read_config, read_tensors, write

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)}


def _shards(folder, places):
    for name, file in places.items():
        save_file({name: TENSORS[name]}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def test_shards_are_read_as_one(tmp_path):
    _shards(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    tensors = read_tensors(tmp_path)
    assert {k: v.tolist() for k, v in tensors.items()} == {
        k: v.tolist() for k, v in TENSORS.items()
    }


def test_bfloat16_stays_bfloat16(tmp_path):
    write(tmp_path, {}, {"a": TENSORS["a"].astype(ml_dtypes.bfloat16)})
    tensor = read_tensors(tmp_path)["a"]
    assert tensor.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(tensor.astype(np.float32), TENSORS["a"])


def test_a_folder_without_its_files_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json; name a folder"):
        read_config(tmp_path)
    with pytest.raises(UserError, match=r"neither model\.safetensors nor .*index\.json"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds list"),
        ("9" * 9999, "is not JSON"),
        ("[" * 99_999, "is not JSON"),
    ],
    ids=len,
)
def test_a_config_that_is_no_object_is_refused(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=words):
        read_config(tmp_path)


def test_a_lost_shard_is_named(tmp_path):
    _shards(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(UserError, match=r"2\.safetensors is named by .* bring all shards"):
        read_tensors(tmp_path)


def test_a_shard_of_another_model_is_named(tmp_path):
    _shards(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    save_file({"c": TENSORS["b"]}, tmp_path / "2.safetensors")
    with pytest.raises(UserError, match=r"2\.safetensors does not hold b"):
        read_tensors(tmp_path)


def test_an_index_without_a_map_is_refused(tmp_path):
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(UserError, match="has no weight_map"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("file", ["../1.safetensors", "/etc/1.safetensors", "..", ""])
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path, file):
    (tmp_path / "hf").mkdir()
    save_file(TENSORS, tmp_path / "1.safetensors")
    (tmp_path / "hf" / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(UserError, match=r"places a in '.*', which is no file of its folder"):
        read_tensors(tmp_path / "hf")


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_what_is_written_may_be_read_by_whom_the_umask_lets(tmp_path, mask):
    before = os.umask(mask)
    try:
        write(tmp_path, {}, TENSORS)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys((CONFIG, WEIGHTS), 0o666 & ~mask)


def test_a_truncated_file_is_refused(tmp_path):
    save_file(TENSORS, tmp_path / WEIGHTS)
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[:-3])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read: .*again"):
        read_tensors(tmp_path)
