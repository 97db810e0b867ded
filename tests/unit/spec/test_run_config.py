"""The configuration kept in a run's folder."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.spec.run_config import HYDRA_FILE, REDACTED, differences, find_config, save_config

CONFIG = {
    "data": {"train_batch_size": 16, "files": ["a.parquet", "b.parquet"], "custom": {"path": None}},
    "actor": {"ppo_max_token_len_per_gpu": 16384, "lr": 3.0e-4, "name": "${data.train_batch_size}"},
    "critic": {"max_token_len": 7, "forward_max_token_len_per_gpu": "${.max_token_len}"},
    "ref": {"log_prob_max_token_len_per_gpu": "${oc.select:actor.ppo_max_token_len_per_gpu,16384}"},
    "trainer": {"experiment_name": "one", "default_local_dir": "runs/one", "v1": {"trainer_mode": "fuse"}},
    "fuse": {"realloc": {"schedule": {3: {"actor": {"fsdp_size": 2}}}}},
}


def test_it_reads_back_as_it_was(tmp_path: Path):
    save_config(tmp_path, OmegaConf.create(CONFIG))
    assert find_config(tmp_path) == OmegaConf.create(CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_what_yaml_has_no_word_for_is_kept_as_text(tmp_path: Path):
    save_config(tmp_path, OmegaConf.create({"data": {"path": Path("a/b"), "limit": float("inf")}}))
    assert find_config(tmp_path) == {"data": {"path": "a/b", "limit": float("inf")}}


def test_a_variable_that_is_not_set_here_stays_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SET_HERE", "yes")
    monkeypatch.delenv("UNSET_HERE", raising=False)
    paths = {"set": "${oc.env:SET_HERE}", "other": "${oc.env:UNSET_HERE,7}", "files": ["${oc.env:UNSET_HERE}/a"]}
    paths |= {"nested": "${oc.env:NEITHER,${oc.env:UNSET_HERE}}", "text": "\\${oc.env:UNSET_HERE}"}
    save_config(tmp_path, OmegaConf.create({"path": "${oc.env:UNSET_HERE}/${data.set}", "data": paths}))
    found = find_config(tmp_path)
    assert found is not None
    assert found.path == "${oc.env:UNSET_HERE}/yes"
    assert found.data.text == "${oc.env:UNSET_HERE}", "as the run's own, which has it as text"
    assert (found.data.set, found.data.other, list(found.data.files)) == ("yes", "7", ["${oc.env:UNSET_HERE}/a"])


def test_secrets_are_left_out(tmp_path: Path):
    secret = "s3cr3t"
    secrets = {
        "trainer": {"wandb_api_key": secret, "hf_token": secret, "proxy": f"http://me:{secret}@proxy:8080/x"},
        "ray_kwargs": {
            "ray_init": {"runtime_env": {"env_vars": {"WANDB": secret, "DEBUG": "1"}}, "passwords": [secret]}
        },
        "logger": {"token": f"${{oc.env:TOKEN,{secret}}}"},
        "secret": {"of": "kept: the key alone is no secret's name"},
    }
    save_config(tmp_path, OmegaConf.create({**CONFIG, **secrets}))
    assert secret not in (tmp_path / "config.yaml").read_text()
    kept = find_config(tmp_path)
    assert kept is not None
    assert kept.trainer == {"wandb_api_key": REDACTED, "hf_token": REDACTED, "proxy": f"http://{REDACTED}@proxy:8080/x"}
    assert kept.ray_kwargs.ray_init.runtime_env.env_vars == {"WANDB": REDACTED, "DEBUG": REDACTED}
    assert kept.actor == OmegaConf.create(CONFIG).actor


def test_what_hydra_left_is_read_where_the_run_kept_nothing(tmp_path: Path):
    assert find_config(tmp_path) is None
    (tmp_path / HYDRA_FILE).parent.mkdir(parents=True)
    (tmp_path / HYDRA_FILE).write_text("data: {train_batch_size: 8}")
    assert find_config(tmp_path) == {"data": {"train_batch_size": 8}}
    save_config(tmp_path, OmegaConf.create(CONFIG))
    assert find_config(tmp_path) == OmegaConf.create(CONFIG)


@pytest.mark.parametrize("content", ["[1]", "a: [", "3", "a: ${b"])
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, content: str):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(FuseError, match=r"config\.yaml: not a configuration"):
        find_config(tmp_path)


def test_differences_are_those_that_a_stock_run_and_a_fused_one_should_not_have(tmp_path: Path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    save_config(tmp_path / "one", OmegaConf.create(CONFIG))
    other = OmegaConf.merge(
        OmegaConf.create({key: value for key, value in CONFIG.items() if key != "fuse"}),
        {
            "trainer": {"experiment_name": "other", "v1": {"trainer_mode": "sync"}},
            "data": {"files": ["a.parquet"], "seed": 1},
        },
    )
    save_config(tmp_path / "other", other)
    assert differences(tmp_path / "one", tmp_path / "other") == {
        "data.files": (["a.parquet", "b.parquet"], ["a.parquet"]),
        "data.seed": (None, 1),
    }
    assert differences(tmp_path / "one", tmp_path / "one") == {}
    assert differences(tmp_path / "one", tmp_path) == {}
