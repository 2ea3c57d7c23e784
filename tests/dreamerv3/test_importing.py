"""Checkpoints of the reference: found, read without running code, and converted."""

import os
import pickle
import shutil

import agent_testing as testing
import jax
import numpy as np
import pytest

from dreamerv3.cli.config import load_config, read_config
from dreamerv3.main import main, make_agent
from dreamerv3.policies.reference import find_reference, read_reference, translate
from embodied.checkpoint import CheckpointError
from embodied.jax.param_names import with_flat_params
from embodied.run.saving import load_agent, read_agent

EXAMPLE = testing.GOLDEN / "reference_checkpoint"
SIZES = testing.rssm_flags(deter=32, hidden=12, stoch=4, classes=5, blocks=4)
SIZES += testing.flags(
    **{r"agent\..*\.depth": 2, r"agent\..*\.units": 16, r"agent\..*\.bins": 21}
)
FLAGS = ["--task", "inference_testing:GoldenTask", "--run.envs", "1", *SIZES]


def example():
    """The parameters of the example, as the reference itself would read them."""
    (path,) = EXAMPLE.glob("*/agent.pkl")
    return pickle.loads(path.read_bytes())["params"]


def write_reference(folder, params, counters=None, name="20250101T000000", step=None):
    """Writes a folder as the reference does."""
    inside = folder / name
    inside.mkdir(parents=True, exist_ok=True)
    content = {"params": params, "counters": counters or {}}
    (inside / "agent.pkl").write_bytes(pickle.dumps(content))
    if step is not None:
        (inside / "step.pkl").write_bytes(pickle.dumps(step))
    (inside / "done").touch()
    (folder / "latest").write_text(name)
    return folder


def run(source, logdir, *argv):
    script = ["--script", "import_checkpoint", "--run.from_checkpoint", str(source)]
    return main([*FLAGS, *script, "--logdir", str(logdir), *argv])


def trained():
    """The example's parameters with golden weights and a trained optimiser's state."""
    rng = np.random.default_rng(0)
    params = example()
    for name, value in params.items():
        if name.startswith("opt/state/") and value.ndim:
            params[name] = rng.normal(size=value.shape).astype(value.dtype)
        elif name.startswith("opt/"):
            params[name] = np.array(70, np.int32)
    weights = testing.golden("modules")
    params |= {k[6:]: v for k, v in weights.items() if k.startswith("param:")}
    params["retnorm/hi/value"] = np.array(2.5, np.float32)
    params["slowval_count/value"] = np.array(70, np.int32)
    return params


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A converted checkpoint: the reference's parameters, and the new logdir."""
    folder = tmp_path_factory.mktemp("imported")
    params = trained()
    counters = {"updates": 70, "batches": 71, "actions": 72}
    write_reference(folder / "reference", params, counters, step=1234)
    assert run(folder / "reference", folder / "run") == 0
    return params, folder / "run"


def test_all_arrays_have_the_same_values_under_our_names(imported):
    params, logdir = imported
    data = read_agent(logdir).data
    expected = {k: v for k, v in params.items() if not k.startswith("opt/")}
    assert data["params"].keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(data["params"][name], value, err_msg=name)
    opt = data["opt"]
    weights = [name for name in expected if f"opt/state/1/1/{name}" in params]
    assert len(weights) == 118
    for name in weights:
        square, momentum = params[f"opt/state/1/1/{name}"], f"opt/state/2/1/{name}"
        np.testing.assert_array_equal(opt[f"square/{name}"], square)
        np.testing.assert_array_equal(opt[f"momentum/{name}"], params[momentum])
    assert opt["step/value"] == 70
    assert opt["nonfinite/value"] == 0
    assert len(opt) == 2 * 118 + 2


def test_step_and_counters_are_those_of_the_run(imported):
    saved = read_agent(imported[1])
    assert saved.step == 1234
    assert saved.data["counters"] == {"updates": 70, "policy_calls": 72}


def test_networks_compute_what_the_reference_computed(imported):
    params = read_agent(imported[1]).data["params"]
    networks = testing.golden_state().model
    names = testing.flat_params(networks)
    weights = {name: params[name] for name in names}
    networks = with_flat_params(jax.tree.map(np.zeros_like, networks), weights)

    def compute(networks, inputs, feat):
        return {
            "tokens": networks.enc(inputs),
            "reward_pred": networks.rew(feat).pred(),
            "value_pred": networks.val(feat).pred(),
            "policy_cont_mean": networks.pol(feat)["act_cont"].mean,
        }

    feat = testing.golden("modules")["out:feat"]
    found = testing.quick_jit(compute)(networks, testing.golden_inputs(), feat)
    for name, value in found.items():
        testing.assert_golden(value, name)


def test_its_policy_acts_as_in_the_reference_without_mixing(imported):
    assert read_config(imported[1] / "config.yaml").agent.policy.unimix == 0


def test_training_can_start_from_it_and_continue_it(imported):
    _, logdir = imported
    config = load_config([*FLAGS, "--jax.platform", "cpu", "--logdir", str(logdir)])
    assert read_config(logdir / "config.yaml").task == config.task
    agent = make_agent(config)
    assert load_agent(agent, logdir, ".*") == 1234
    saved = read_agent(logdir).data
    agent.load(saved)  # Strict, as a resumed run loads it.
    found = agent.save()
    for part in ("params", "opt"):
        for name, value in saved[part].items():
            np.testing.assert_array_equal(found[part][name], value, err_msg=name)


def test_the_report_says_what_was_and_was_not_imported(tmp_path, capsys):
    params = {**example(), "other/kernel": np.zeros(3, np.float32)}
    params["opt/state/9/mystery"] = np.zeros(2, np.float32)
    write_reference(tmp_path / "reference", params, {"batches": 1})
    assert run(tmp_path / "reference", tmp_path / "run") == 0
    shown = capsys.readouterr().out
    assert "Imported 369 arrays of" in shown and "agent.pkl, step 0." in shown
    assert "started anew: opt/nonfinite/value." in shown
    left_out = "counters/batches, opt/state/9/mystery, other/kernel"
    assert f"Not imported: {left_out}." in shown
    assert f"--run.from_checkpoint {tmp_path / 'run'}" in shown
    before = sorted((tmp_path / "run").rglob("*"))
    assert run(tmp_path / "reference", tmp_path / "run") == 1
    assert "checkpoints would be overwritten" in capsys.readouterr().err
    assert sorted((tmp_path / "run").rglob("*")) == before


def test_shapes_and_names_that_do_not_fit_are_named(tmp_path, capsys):
    params = example()
    params["enc/mlp0/kernel"] = np.zeros((41, 16), np.float32)
    del params["pol/mlp/linear0/bias"]
    write_reference(tmp_path / "reference", params)
    assert run(tmp_path / "reference", tmp_path / "run") == 1
    message = capsys.readouterr().err
    assert "enc/mlp0/kernel (expected (40, 16), got (41, 16))" in message
    assert "Missing: pol/mlp/linear0/bias." in message
    assert "--configs" in message and "Traceback" not in message
    assert not (tmp_path / "run").exists()
    regex = ["--run.from_checkpoint_regex", "(?!enc/|pol/|opt/)"]
    assert run(tmp_path / "reference", tmp_path / "run", *regex) == 0
    found = read_agent(tmp_path / "run").data
    params = example()
    np.testing.assert_array_equal(
        found["params"]["dyn/obs0/kernel"], params["dyn/obs0/kernel"]
    )
    assert not np.array_equal(
        found["params"]["enc/cnn0/kernel"], params["enc/cnn0/kernel"]
    )
    assert "started anew: enc/cnn0/bias" in capsys.readouterr().out


def test_malicious_checkpoints_are_refused(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    params = {**example(), "enc/extra": Evil()}
    write_reference(tmp_path / "reference", params)
    assert run(tmp_path / "reference", tmp_path / "run") == 1
    message = capsys.readouterr().err
    assert "agent.pkl" in message and "system. Nothing was run" in message
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "run").exists()
    write_reference(tmp_path / "reference", example(), step=Evil())
    assert run(tmp_path / "reference", tmp_path / "run") == 1
    assert not (tmp_path / "executed").exists()


def test_the_example_is_read_as_the_reference_reads_it():
    found = read_reference(EXAMPLE)
    expected = example()
    assert found.params.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found.params[name], value, strict=True)
    assert found.counters == {"updates": 0, "batches": 0, "actions": 0}
    assert found.step is None


class TestFolders:
    @pytest.mark.parametrize("place", ["", "ckpt", "ckpt/agent", "agent"])
    def test_it_is_found_in_logdirs_and_folders(self, tmp_path, place):
        write_reference(tmp_path / place, {"a": np.zeros(1)}, name="20250102T000000")
        write_reference(tmp_path / place, {"a": np.ones(1)}, name="20250101T000000")
        # The checkpoint that `latest` names, although the other is newer.
        assert find_reference(tmp_path).name == "20250101T000000"
        assert read_reference(find_reference(tmp_path)).params["a"] == 1

    @pytest.mark.parametrize(
        "latest", ["", "2025", "../20250101T000000", "/", "..", "x" * 999, "\0"]
    )
    def test_a_torn_latest_is_not_trusted(self, tmp_path, latest):
        for name in ("20250101T000000", "20250102T000000", "20250103T000000"):
            write_reference(tmp_path / "run", {"a": np.zeros(1)}, name=name)
        write_reference(tmp_path, {"a": np.zeros(1)})
        (tmp_path / "run/20250103T000000/done").unlink()
        (tmp_path / "run/latest").write_text(latest)
        assert find_reference(tmp_path / "run").name == "20250102T000000"

    def test_what_is_none_is_named(self, tmp_path):
        (tmp_path / "file").touch()
        (tmp_path / "folder/20250101T000000").mkdir(parents=True)
        for name, words in (
            ("nowhere", "which does not exist"),
            ("file", "which is a file"),
            ("folder", "with a file latest .* which has none"),
        ):
            with pytest.raises(CheckpointError, match=f"{name}.*|{words}") as caught:
                find_reference(tmp_path / name)
            assert "run.from_checkpoint: expected a checkpoint" in str(caught.value)

    def test_a_missing_folder_fails_the_program(self, tmp_path, capsys):
        assert run(tmp_path / "nowhere", tmp_path / "run") == 1
        assert "which does not exist" in capsys.readouterr().err
        assert main(["--script", "import_checkpoint"]) == 2
        assert "run.from_checkpoint" in capsys.readouterr().err

    def test_truncated_files_are_named(self, tmp_path):
        shutil.copytree(EXAMPLE, tmp_path / "copy")
        (path,) = (tmp_path / "copy").glob("*/agent.pkl")
        path.write_bytes(path.read_bytes()[:200_000])
        with pytest.raises(CheckpointError, match=r"agent.pkl: Expected a whole"):
            read_reference(tmp_path / "copy")

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ([1, 2], "'params', arrays by name"),
            ({"other": 1}, "a dict of other"),
            ({"params": {}}, "a dict of params"),
            ({"params": {"a": 1}}, "arrays by name"),
            ({"params": {"a": np.zeros(1)}, "counters": {"b": "c"}}, "'counters'"),
            ({"params": {"a": np.zeros(1)}, "counters": 3}, "'counters'"),
            ({"params": {"a": np.full(1, np.nan)}}, "finite numbers.* such as a"),
        ],
    )
    def test_other_contents_are_named(self, tmp_path, content, words):
        (tmp_path / "agent.pkl").write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointError, match=words):
            read_reference(tmp_path)

    def test_a_step_that_is_none_is_refused(self, tmp_path):
        write_reference(tmp_path, {"a": np.zeros(1)}, step="many")
        with pytest.raises(CheckpointError, match=r"step.pkl: expected the number"):
            read_reference(tmp_path)


class TestNames:
    def test_the_first_average_is_of_squares_wherever_it_is_in_the_chain(self):
        zeros = np.zeros(2)
        params = {
            "opt/state/0/1/enc/a": zeros,
            "opt/state/12/1/enc/a": zeros + 1,
            "opt/state/0/0": np.array(5),
            "opt/state/12/0": np.array(5),
        }
        arrays, unused = translate(params)
        assert sorted(arrays) == [
            "opt/momentum/enc/a",
            "opt/square/enc/a",
            "opt/step/value",
        ]
        assert arrays["opt/square/enc/a"] is zeros
        assert arrays["opt/step/value"] == 5
        assert unused == []

    def test_counts_that_differ_are_reported(self, caplog):
        params = {"opt/state/1/0": np.array(5), "opt/step/value": np.array(6)}
        arrays, _ = translate(params)
        assert arrays["opt/step/value"] == 5
        assert "opt/state/1/0 5, opt/step/value 6" in caplog.text

    def test_without_an_optimiser_nothing_is_made_up(self):
        arrays, unused = translate({"enc/a": np.zeros(1)})
        assert (list(arrays), unused) == (["enc/a"], [])


def test_random_agents_cannot_be_imported(tmp_path, capsys):
    assert run(EXAMPLE, tmp_path / "run", "--random_agent", "True") == 2
    assert "random_agent: expected False" in capsys.readouterr().err
