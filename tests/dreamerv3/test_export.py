"""Exported policies, which hold only what acting needs."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from inference_testing import save_run

import dreamerv3
from dreamerv3.export import DTYPES, export, main
from embodied.checkpoint import Checkpoint, CheckpointError
from embodied.run.saving import read_agent

KEPT = Path(__file__).parents[2] / "docs/results/boxing_policy"


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    """The logdir of a run."""
    folder = tmp_path_factory.mktemp("run")
    save_run(folder)
    return folder


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def actions(policy):
    rng = np.random.default_rng(1)
    observations = [
        {"vector": rng.normal(size=3).astype(np.float32), "token": rng.integers(0, 4)}
        for _ in range(5)
    ]
    return [policy.act(obs) for obs in observations]


def test_an_exported_policy_acts_the_same(logdir, tmp_path):
    export(logdir, tmp_path / "policy")
    whole, exported = dreamerv3.load(logdir), dreamerv3.load(tmp_path / "policy")
    assert exported.step == whole.step == 7
    for one, other in zip(actions(whole), actions(exported)):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_has_only_what_acting_needs(logdir, tmp_path, dtype):
    written = export(logdir, tmp_path / "policy", dtype)
    data = read_agent(tmp_path / "policy").data
    assert {name.split("/")[0] for name in data["params"]} == {"enc", "dyn", "pol"}
    assert not [name for name in data["params"] if "prior" in name]
    assert set(data) == {"params", "spaces"}
    dtypes = {str(x.dtype) for x in data["params"].values() if x.ndim > 1}
    assert dtypes == {dtype}
    assert written == sum(x.nbytes for x in data["params"].values())
    assert size(tmp_path / "policy") < size(logdir) / 3


def test_in_bfloat16_weights_are_those_that_accelerators_compute_with(logdir, tmp_path):
    export(logdir, tmp_path / "policy", "bfloat16")
    whole = read_agent(logdir).data["params"]
    for name, found in read_agent(tmp_path / "policy").data["params"].items():
        expected = np.asarray(whole[name]).astype(found.dtype)
        np.testing.assert_array_equal(found, expected)
    assert len(actions(dreamerv3.load(tmp_path / "policy"))) == 5
    with pytest.raises(ValueError, match="float32 or bfloat16, got 'int8'"):
        export(logdir, tmp_path / "other", "int8")


def test_the_command_says_where_it_is_and_what_is_wrong(logdir, tmp_path, capsys):
    target = tmp_path / "policy"
    assert main([str(logdir), str(target)]) == 0
    assert f"The policy is in {target}, " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([str(logdir), str(target)])
    assert ended.value.code == 1
    assert f"expected an empty folder, got {target}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nowhere"), str(tmp_path / "other")])
    assert "nowhere, which does not exist" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_random_agents_have_nothing_to_export(tmp_path):
    save_run(tmp_path / "run")
    config = tmp_path / "run/config.yaml"
    text = config.read_text()
    assert "random_agent: false" in text
    config.write_text(text.replace("random_agent: false", "random_agent: true"))
    with pytest.raises(CheckpointError, match="an agent with weights"):
        export(tmp_path / "run", tmp_path / "policy")


def test_a_checkpoint_without_the_weights_is_refused(logdir, tmp_path):
    data = read_agent(logdir).data
    params = {k: x for k, x in data["params"].items() if not k.startswith("pol/")}
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_bytes((logdir / "config.yaml").read_bytes())
    Checkpoint(run).save({"agent": {**data, "params": params}}, {"step": 1})
    with pytest.raises(CheckpointError, match=r"does not fit.*Missing: pol/"):
        export(run, tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


def test_importing_it_imports_no_jax():
    code = "import sys, dreamerv3.export; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_policy_that_is_kept_among_the_results_can_be_used():
    policy = dreamerv3.load(KEPT, batch=2)
    images = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    action = policy.act({"image": images})["action"]
    assert policy.step == 100_017
    assert action.shape == (2,)
    assert (action >= 0).all()
    assert (action < 18).all()
