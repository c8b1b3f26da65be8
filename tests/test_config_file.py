"""YAML, overrides and their types, the way back to YAML, and what it takes to check a config."""

import subprocess
import sys

import pytest

from olmo_jax.config.messages import known_keys
from olmo_jax.config.records import Config
from olmo_jax.config_file import load, to_yaml, typed
from olmo_jax.errors import UserError
from olmo_jax.plan.summary import summary

SOURCES = "data.sources=[{path: tokens}]"


def message(path, *overrides: str) -> str:
    with pytest.raises(UserError) as raised:
        load(path, overrides)
    return str(raised.value)


@pytest.fixture
def file(tmp_path):
    def write(text: str | bytes):
        path = tmp_path / "config.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optim.lr=3e-4", 3e-4),
        ("optim.lr=1e-3", 1e-3),
        ("optim.lr=1", 1.0),
        ("optim.eps=.5E-8", 0.5e-8),
        ("train.steps=1e4", 10_000),
        ("train.steps=010", 10),
        ("model.windows.pattern=[4,-1]", (4, -1)),
        ("optim.betas=[0.9, 0.99]", (0.9, 0.99)),
        ("optim.max_grad_norm=null", None),
        ("model.tie_embeddings=true", True),
        ("model.embedding_scale=2.5", 2.5),
        ("model.embedding_scale=sqrt_d_model", "sqrt_d_model"),
        ("run_dir=2024-01-01", "2024-01-01"),
        ("run_dir=no", "no"),
        ("run_dir=a=b", "a=b"),
        (" optim.lr = 2 ", 2.0),
    ],
)
def test_override_is_typed_by_its_key(override, value):
    config = load(None, [SOURCES, override])
    for name in override.partition("=")[0].strip().split("."):
        config = getattr(config, name)
    assert config == value
    assert type(config) is type(value)


def test_override_wins_over_the_file_and_the_last_one_over_all(file):
    path = file("seed: 1\nmodel: {num_layers: 3, d_model: 64}\ndata: {sources: [{path: a}]}\n")
    config = load(path, ["model.num_layers=5", "model.num_layers=6"])
    assert (config.seed, config.model.num_layers, config.model.d_model) == (1, 6, 64)


def test_number_in_a_file_is_a_number(file):
    path = file("optim: {lr: 3e-4}\ndata: {sources: [{path: a, weight: 1e1}]}\n")
    assert load(path).optim.lr == 3e-4
    assert load(path).data.sources[0].weight == 10.0


def test_merge_key_of_yaml(file):
    path = file("data: {sources: [&s {path: a, weight: 2.0}, {<<: *s, path: b}]}\n")
    assert [(s.path, s.weight) for s in load(path).data.sources] == [("a", 2.0), ("b", 2.0)]


PATHS = """
run_dir: ~/x
data: {sources: [{path: ~/tokens, label_mask: "~/mask.npy"}]}
checkpoint: {init_from: ~/old}
"""


def test_a_path_in_the_home_folder_is_written_out(file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load(file(PATHS))
    assert config.run_dir == "/home/me/x"
    assert config.data.sources[0].path == "/home/me/tokens"
    assert config.data.sources[0].label_mask == "/home/me/mask.npy"
    assert config.checkpoint.init_from == "/home/me/old"
    # Nothing but the whole name of a folder, in front, is a home.
    assert load(None, [SOURCES, "run_dir=./~/a~"]).run_dir == "./~/a~"
    again = load(file(PATHS), ["run_dir=~/y", "data.sources=[{path: ~/a}, {path: ~root/b}]"])
    assert (again.run_dir, again.checkpoint.init_from) == ("/home/me/y", "/home/me/old")
    assert [source.path for source in again.data.sources] == ["/home/me/a", "/root/b"]


@pytest.mark.parametrize("key", ["run_dir", "checkpoint.init_from"])
def test_the_home_of_nobody_is_refused(key):
    assert message(None, SOURCES, f"{key}=~no-such-user/x") == (
        f"{key}=~no-such-user/x names the home folder of a user that does not exist here; write "
        "the whole path, or ./ before a name that starts with ~"
    )


def test_each_home_of_nobody_is_listed():
    source = "data.sources=[{path: ~no-such-user/x, label_mask: ~no-such-user/y}]"
    for key in ("path=~no-such-user/x", "label_mask=~no-such-user/y"):
        assert f"data.sources.0.{key} names the home folder of a user" in message(None, source)


def test_empty_file_is_all_defaults(file):
    assert typed(file("# nothing\n")) == Config()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.windows.pattern=[4,-1]", "optim.lr=3e-4", "optim.eps=1e-20", "seed=2147483647"],
        ["optim.schedule.kind=composable", "optim.schedule.stages=[{duration: 3, end: 1.0}]"],
        ["run_dir='1e4'", "data.sources=[{path: 'yes', weight: 3}, {path: '1:30'}]"],
    ],
)
def test_yaml_reads_back_to_the_same_config(file, overrides):
    config = load(None, [SOURCES, *overrides])
    assert load(file(to_yaml(config))) == config


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("seed: 1\nmodel: [4,\n", ["config.yaml, line 3", "not YAML"]),
        ("seed: 1\n\nseed: 2\n", ["line 3", "the key seed", "line 1", "keep one"]),
        ("model:\n  top_k: 1\n  top_k: 2\n", ["line 3", "top_k"]),
        ("seed: !!python/object:os.system 1\n", ["line 1"]),
        ("- a\n- b\n", ["[a, b]", "mapping", "key: value"]),
        (b"seed: \xff\n", ["UTF-8", "byte 6"]),
        ("mesh: {expert: two}\n", ["mesh.expert=two", "not a whole number", "write an integer"]),
        (
            "mesh:\n",
            ["mesh=null", "mapping", "data, fsdp, expert, sequence and platform"],
        ),
        ("model: {num_layer: 3}\n", ["model.num_layer=3", "model.num_layers"]),
    ],
)
def test_bad_file_is_named_with_its_line(file, text, fragments):
    text = message(file(text))
    assert all(fragment in text for fragment in fragments), text


def test_missing_file_and_folder(tmp_path):
    assert "missing.yaml cannot be read (No such file" in message(tmp_path / "missing.yaml")
    assert "cannot be read (Is a directory)" in message(tmp_path)


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("model.num_layers", ["'model.num_layers'", "no '='", "section.key=value"]),
        ("=3", ["'=3'", "empty key"]),
        ("model..top_k=3", ["'model..top_k=3'", "empty key"]),
        ("optim.max_grad_norm=", ["no value", "optim.max_grad_norm=null"]),
        ("model.windows.pattern=[4,", ["model.windows.pattern=[4,", "not YAML"]),
        ("model.num_layers.x=3", ["model.num_layers.x=3", "is a value", "model.num_layers=..."]),
        ("data.sources.0.path=a", ["data.sources.0.path=a", "data.sources=..."]),
        ("model=3", ["model=3", "write a mapping"]),
        ("modle.num_layers=3", ["modle.num_layers=3 is", "nearest known key is model"]),
    ],
)
def test_bad_override_is_quoted(override, fragments):
    text = message(None, SOURCES, override)
    assert all(fragment in text for fragment in fragments), text


def test_all_wrong_values_are_listed_together(file):
    text = message(file("model: {num_layers: 0, depth: 3}\noptim: {lr: -1}\nseed: x\n"))
    assert text.splitlines()[0] == "4 faults in the config:"
    for line, key in zip(
        text.splitlines()[1:],
        ["seed=x", "model.num_layers=0", "model.depth=3", "optim.lr=-1"],
        strict=True,
    ):
        assert line.startswith(f"  - {key} "), text


STRANGE = ["0", "-1", "-2", "1.5", "true", "text", "[]", "[1]", "[a]", "{a: 1}", "null", ".nan"]
STRANGE += ["1e308", "-1e308", "9" * 400, "1e400", "[1e308]", "[[1]]", "{1: 1}", "65536", "1000"]
STRANGE += ["2147483647", "9223372036854775807", r'"\ud800"', r'"\0"', r'{"\ud800": 1}']
STRANGE += ["&a [*a]", "&a {a: *a}", "[&a [x], *a]", "!!bool 3", "!!int x", "!!int [1]", "!!map 3"]
STRANGE += ["!!seq {a: 1}", "!!float a", "!!set {a}", "!!binary aGk=", "{? [a] : 1}"]


@pytest.mark.parametrize("key", list(known_keys()))
def test_any_value_of_any_key_gives_a_config_or_a_message(key):
    for value in STRANGE:
        try:
            summary(load(None, [SOURCES, f"{key}={value}"]))
        except UserError as error:
            assert key.rpartition(".")[2] in str(error)  # noqa: PT017
            assert "; " in str(error) or "not YAML" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("value", "fragments"),
    [
        ("&a [*a]", ["line 1, column 1", "more than 16", "holds itself by an alias", "write it"]),
        ("[" * 20 + "]" * 20, ["column 17", "more than 16 lists and mappings"]),
        ("[" * 2000, ["hundreds of lists", "may have 16", "write fewer"]),
        ("!!bool 3", ["3 has the tag !!bool and is no such value", "drop the tag"]),
        ("!!int [1]", ["a list has the tag !!int", "drop the tag"]),
        ("!!map 3", ["3 has the tag !!map and is no mapping", "drop the tag"]),
        ("!!set {a}", ["the tag !!set is none of !!bool, !!int", "drop the tag"]),
        ("{? [a] : 1}", ["a key is a list", "write `key: value`"]),
    ],
)
def test_yaml_that_no_config_needs_is_refused_with_what_to_write(value, fragments):
    text = message(None, SOURCES, f"train.steps={value}")
    assert all(fragment in text for fragment in fragments), text


@pytest.mark.parametrize(
    ("value", "steps"), [("!!int 300", 300), ("! 300", 300), ('!!int "300"', 300)]
)
def test_a_tag_that_suits_its_text_is_read(value, steps):
    assert load(None, [SOURCES, f"train.steps={value}"]).train.steps == steps


CHECK = """
import sys
from olmo_jax.config_file import load
from olmo_jax.rules import without_effect
import olmo_jax.mesh.axes
without_effect(load(None, sys.argv[1:]))
others = {name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(*(name for name in others if not name.startswith("_")))
"""


def test_a_check_imports_no_jax_and_little_else():
    """The time of a check is that of its imports, and jax is many times all of these."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK, SOURCES], check=True, capture_output=True, text=True
    )
    allowed = {"annotated_types", "cython_runtime", "jaxtyping", "numpy", "olmo_jax", "pydantic"}
    allowed |= {"pydantic_core", "typing_extensions", "typing_inspection", "yaml"}
    assert set(done.stdout.split()) <= allowed
