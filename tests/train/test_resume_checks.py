"""What may differ when a run resumes, and how its metrics are cut back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath

from olmo_jax.checkpoint import (
    Position,
    Saved,
    refuse_edited,
    refuse_other_tokenizer,
    refuse_start,
    tokenizer_of,
)
from olmo_jax.config import Config
from olmo_jax.config.records import RouterConfig
from olmo_jax.errors import UserError
from olmo_jax.interop import huggingface
from olmo_jax.rules import resume_policy
from olmo_jax.train import resume_checks
from olmo_jax.train.evaluate import other_rows
from olmo_jax.train.metrics import Truncated, truncate
from tests.cases import weights_of
from tests.checkpoint.states import small
from tests.data.folders import counting, open_folders, write_folder

BEFORE = Config.model_validate({"data": {"sources": [{"path": "tokens"}]}})
FACTS = {"data": "a" * 64, "tokenizer": "b" * 64}


def saved(config: Config = BEFORE) -> Saved:
    """Return what a checkpoint of a run with this config says."""
    return Saved(
        position=Position(120, 960, 245_760),
        seed=config.seed,
        config=config.model_dump(mode="json"),
        facts=FACTS,
        leaves={},
        written="2026-01-01T00:00:00+00:00",
        folder=epath.Path("runs/x/checkpoints/step_120"),
    )


def now(**sections: Any) -> Config:
    """Return the config with some keys changed."""
    tree = BEFORE.model_dump(mode="json")
    for name, change in sections.items():
        tree[name] = {**tree[name], **change} if isinstance(change, dict) else change
    return Config.model_validate(tree)


def test_every_key_has_a_rule_and_every_rule_a_key() -> None:
    keys = resume_policy.compared_keys()
    assert all(resume_policy.policy_of(key).why for key in keys)
    # A section stands for its keys only where they all are of one kind; these are named one by one.
    assert {
        key for key in keys if key.startswith(("train.", "data."))
    } <= resume_policy.POLICIES.keys()
    for name in resume_policy.POLICIES:
        assert any(key == name or key.startswith(f"{name}.") for key in keys), name


def test_the_page_has_the_rule_of_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text(encoding="utf-8")
    words = {
        "may": "yes",
        "never": "no",
        "seed": "with `--allow-change seed`",
        "data": "with `--allow-change data`",
        "content": "yes, if they hold the same",
    }
    for name, rule in resume_policy.POLICIES.items():
        assert f"| `{name}` | {words[rule.verdict]} | {rule.why} |\n" in page


MAY = [
    {"mesh": {"data": 4}},
    {"parallel": {"method": "fsdp", "capacity_factor": 2.0}},
    {"optim": {"lr": 1.0, "skip_window": 7, "schedule": {"kind": "wsd"}}},
    {"train": {"steps": 9, "global_batch": 16, "microbatch": 2, "recompute": "block"}},
    {"train": {"eval_every": 3, "step_timeout_s": 5.0, "max_bad_steps": 3}},
    {"checkpoint": {"every": 5, "keep": 9, "init_from": "elsewhere"}},
    {"run_dir": "runs/moved"},
    {"data": {"threads": 4, "sources": [{"path": "moved/tokens"}]}},
]


@pytest.mark.parametrize("sections", MAY, ids=lambda sections: "-".join(sections))
def test_what_changes_how_a_run_is_computed_may_change(sections: dict[str, Any]) -> None:
    resume_checks.refuse_config(saved(), now(**sections), ())


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"d_model": 64}}, "model.d_model=64, and .* has model.d_model=128; .*run_dir"),
        ({"model": {"router": {"top_groups": 2}}}, "model.router.top_groups=2, and .*=null"),
        ({"train": {"z_loss_weight": 1.0}}, "train.z_loss_weight=1.0, .*=0.0001; .* minimised"),
    ],
)
def test_what_the_weights_were_trained_for_may_not_change_at_all(
    sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        resume_checks.refuse_config(saved(), now(**sections), resume_policy.ALLOWABLE)


@pytest.mark.parametrize(
    ("sections", "flag"),
    [
        ({"seed": 1}, "seed"),
        ({"train": {"sequence_length": 64}}, "data"),
        ({"data": {"eval_fraction": 0.5}}, "data"),
        ({"data": {"document_attention": False}}, "data"),
    ],
)
def test_what_decides_the_data_may_change_with_its_flag_only(
    sections: dict[str, Any], flag: str
) -> None:
    others = [name for name in resume_policy.ALLOWABLE if name != flag]
    with pytest.raises(UserError, match=f"allow it with --allow-change {flag}"):
        resume_checks.refuse_config(saved(), now(**sections), others)
    resume_checks.refuse_config(saved(), now(**sections), [flag])


def test_all_refused_keys_are_in_one_message() -> None:
    with pytest.raises(UserError, match=r"2 faults(.|\n)*seed=3(.|\n)*model.top_k=1"):
        resume_checks.refuse_config(saved(), now(seed=3, model={"top_k": 1}), ())


@pytest.mark.parametrize("name", ["data", "tokenizer"])
def test_other_data_and_another_tokenizer_each_have_a_flag(name: str) -> None:
    other = {**FACTS, name: "c" * 64}
    with pytest.raises(UserError, match=rf"data.sources .*--allow-change {name} \(runs/x"):
        resume_checks.refuse_facts(saved(), other, ())
    assert resume_checks.refuse_facts(saved(), other, [name]) == [
        f"{name} {FACTS[name][:12]} -> {'c' * 12}"
    ]
    assert resume_checks.refuse_facts(saved(), FACTS, ()) == []


def test_data_is_known_by_its_tokens_and_shares_not_by_its_folder(tmp_path: Path) -> None:
    def data(*arguments: Any, **keywords: Any) -> str:
        return resume_checks.facts_of(open_folders(*arguments, **keywords))["data"]

    a, moved = counting(tmp_path / "a", 20, 4), counting(tmp_path / "moved", 20, 4)
    other, b = counting(tmp_path / "other", 20, 4, first=2), counting(tmp_path / "b", 9, 4, first=7)
    # The seed and the length of a row have keys, and rules, of their own.
    assert data(a) == data(moved) == data(a, seed=3, length=8)
    assert data(a) != data(other)
    assert data(a, b, weights=[1.0, 2.0]) != data(a, b, weights=[2.0, 1.0])


def test_a_label_mask_is_part_of_the_data(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", [[1, 2, 3, 4, 5, 6, 7]])
    facts = set()
    for name, wanted in (("all", 8), ("some", 4)):
        np.save(tmp_path / f"{name}.npy", np.arange(8) < wanted)
        corpus = open_folders(folder, label_mask=str(tmp_path / f"{name}.npy"))
        facts.add(resume_checks.facts_of(corpus)["data"])
    facts.add(resume_checks.facts_of(open_folders(folder))["data"])
    assert len(facts) == 3


def test_what_changed_is_said_line_by_line() -> None:
    config = now(mesh={"data": 4}, optim={"lr": 0.5}, checkpoint={"init_from": "old"})
    assert list(resume_checks.said(saved(), config, ["data a -> b"])) == [
        "resuming from runs/x/checkpoints/step_120: 120 steps, 960 sequences, 245,760 tokens",
        "changed: mesh.data 1 -> 4",
        "changed: optim.lr 0.001 -> 0.5",
        "changed: checkpoint.init_from null -> old",
        "changed: data a -> b",
        "checkpoint.init_from=old is not read: the run has a checkpoint of its own",
    ]


@pytest.mark.parametrize(
    ("before", "kept", "after", "unseen", "words"),
    [
        (0.2, None, 0.2, 0.2, ""),
        (0.2, None, 0.1, 0.1, ""),
        (0.1, None, 0.2, 0.1, "about 50% of them"),
        (0.0, None, 0.1, 0.0, "about 100% of them"),
        (0.2, "0.05", 0.2, 0.05, "about 75% of them"),
    ],
)
def test_documents_that_any_part_of_a_run_was_trained_on_are_said(
    before: float, kept: str | None, after: float, unseen: float, words: str
) -> None:
    earlier = saved(now(data={"eval_fraction": before}))
    if kept is not None:
        earlier = replace(earlier, facts={**FACTS, resume_checks.HELD_OUT: kept})
    config = now(data={"eval_fraction": after})
    assert resume_checks.never_seen(config, earlier) == unseen
    said = [line for line in resume_checks.said(earlier, config, []) if "trained on" in line]
    assert len(said) == bool(words)
    assert all(words in line for line in said)


def test_an_evaluation_says_what_of_its_rows_is_another_and_nothing_else() -> None:
    config = now(
        data={"document_attention": False, "eval_fraction": 0.5},
        train={"sequence_length": 64, "global_batch": 4},
        mesh={"data": 2},
    )
    assert other_rows(saved(), BEFORE) == []
    assert other_rows(saved(), config) == [
        "data.document_attention true -> false",
        f"train.sequence_length {BEFORE.train.sequence_length} -> 64",
    ]


def test_tokens_of_another_tokenizer_are_never_evaluated() -> None:
    there = tokenizer_of(saved())
    assert refuse_other_tokenizer("runs/x", there, FACTS) == []
    with pytest.raises(UserError, match=r"were trained with bbbbbbbbbbbb; .*json there$"):
        refuse_other_tokenizer("runs/x", there, {"tokenizer": "c" * 64})
    assert refuse_other_tokenizer("runs/x", set(), {"tokenizer": "c" * 64}) == []


def test_what_lies_around_a_copy_of_a_checkpoint_is_not_its_run(tmp_path: Path) -> None:
    for name in ("backup", "checkpoints"):
        folder = tmp_path / name / "step_120"
        folder.mkdir(parents=True)
        (tmp_path / "config.yaml").write_text("model: {num_layers: 7}")
        found = replace(saved(), folder=epath.Path(folder))
        if name == "backup":
            refuse_edited(found)
        else:
            with pytest.raises(UserError, match=r"config.yaml has model.num_layers=7"):
                refuse_edited(found)


@pytest.mark.parametrize(
    ("scope", "sections", "words"),
    [
        ("instance", {"train": {"microbatch": 2}, "mesh": {"data": 2, "sequence": 2}}, ""),
        ("microbatch", {"train": {"microbatch": 2}}, "train.microbatch 1 -> 2"),
        ("microbatch", {"mesh": {"sequence": 2}}, "mesh.sequence 1 -> 2"),
        ("microbatch", {"mesh": {"data": 2}}, ""),
        ("global", {"train": {"microbatch": 4}}, "train.microbatch 1 -> 4"),
        ("global", {"mesh": {"data": 2, "expert": 2}}, "mesh.data 1 -> 2 and mesh.expert 1 -> 2"),
        ("global", {"mesh": {"sequence": 2, "pipeline": 2}}, ""),
        ("global", {"train": {"global_batch": 64, "recompute": "block"}}, ""),
    ],
)
def test_a_balance_loss_over_other_tokens_is_said(
    scope: str, sections: dict[str, Any], words: str
) -> None:
    router = {"router": {"balance_scope": scope}}
    said = [
        line
        for line in resume_checks.said(saved(now(model=router)), now(model=router, **sections), [])
        if "balance" in line
    ]
    assert len(said) == bool(words)
    assert not words or (words in said[0] and f"balance_scope={scope}" in said[0])
    silent = {"router": {"balance_scope": scope, "balance_weight": 0.0}}
    assert not list(resume_policy.other_balance(saved().config, now(model=silent, **sections)))


def test_a_key_that_an_older_checkpoint_lacks_had_its_default() -> None:
    older = saved().config
    del older["train"]["recompute"], older["checkpoint"]
    found = resume_policy.changes(older, now(checkpoint={"every": 5}))
    assert [str(change) for change in found] == ["checkpoint.every 1000 -> 5"]


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in steps)


@pytest.mark.parametrize(
    ("content", "step", "left", "cut"),
    [
        (lines(1, 2, 3), 3, lines(1, 2, 3), Truncated(0, 0)),
        (lines(1, 2, 3, 4, 5), 3, lines(1, 2, 3), Truncated(2, 0)),
        (lines(1, 2, 3) + '{"step": 4, "lo', 3, lines(1, 2, 3), Truncated(0, 1)),
        (lines(1, 2, 3, 4)[:-1], 4, lines(1, 2, 3, 4), Truncated(0, 0)),
        (lines(1, 2) + '{"st' + lines(3), 3, lines(1, 2), Truncated(0, 1, ((3, 3),))),
        (lines(3, 5, 8), 7, lines(3, 5), Truncated(1, 0, ((1, 2), (4, 4), (6, 7)))),
        (lines(1, 2, 3), 0, "", Truncated(3, 0)),
        ("", 0, "", Truncated(0, 0)),
    ],
)
def test_each_step_is_left_once_up_to_the_restored_one(
    tmp_path: Path, content: str, step: int, left: str, cut: Truncated
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    assert truncate(path, step) == cut
    assert path.read_text() == left
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_without_metrics_there_is_nothing_to_cut(tmp_path: Path) -> None:
    assert truncate(tmp_path / "metrics.jsonl", 0) == Truncated(0, 0)
    assert truncate(tmp_path / "metrics.jsonl", 3) == Truncated(0, 0, ((1, 3),))


def test_whoever_is_killed_while_cutting_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2, 3))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        truncate(path, 1)
    assert path.read_text() == lines(1, 2, 3)


def test_a_hugging_face_folder_is_refused_by_its_config_alone(tmp_path: Path, program_of) -> None:
    def starting(init_moments: bool = False, **model: Any) -> Any:
        config = small(**{"router": RouterConfig(), **model})
        start = {"init_from": str(tmp_path), "init_moments": init_moments}
        checkpoint = config.checkpoint.model_copy(update=start)
        return program_of(config.model_copy(update={"checkpoint": checkpoint}))

    program = starting()
    huggingface.save(tmp_path, program.config.model, weights_of(program))
    (tmp_path / "model.safetensors").unlink()
    refuse_start(program)
    # A bias of zeros is made for a router that has one.
    refuse_start(starting(router=RouterConfig(bias_gamma=0.01)))
    with pytest.raises(UserError, match=r"as \[.*, the model as \[.*write model"):
        refuse_start(starting(expert_hidden=8))
    with pytest.raises(UserError, match="these hold no moments"):
        refuse_start(starting(init_moments=True))
