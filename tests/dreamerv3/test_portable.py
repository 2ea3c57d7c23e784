"""Policies for other runtimes act as those of `load` do, on real observations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from agent_testing import quick_jit
from dreamer_testing import QUICK
from inference_testing import save_run

import dreamerv3
from dreamerv3 import export, model
from dreamerv3.agent import Agent
from dreamerv3.cli.config import load_config
from dreamerv3.cli.factories import make_env, make_spaces
from dreamerv3.cli.logdir import prepare_logdir
from dreamerv3.policies import portable
from embodied.checkpoint import Checkpoint, CheckpointError

EXAMPLE = Path(__file__).parents[2] / "examples" / "onnx_policy.py"
STEPS = 6


def save_agent(logdir, *flags):
    """Saves an untrained agent in a logdir."""
    config = load_config(["--configs", "debug", *flags, "--logdir", str(logdir)], {})
    agent = Agent(*make_spaces(config), config, compiler=QUICK)
    prepare_logdir(config)
    Checkpoint(logdir).save({"agent": agent.save()}, {"step": 5})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The logdir of a task with images, vectors, classes, and both kinds of actions."""
    logdir = tmp_path_factory.mktemp("run")
    save_agent(logdir, "--task", "dummy_both")
    return logdir


def compare(logdir, step):
    """Checks that `step` acts as the policy of `load` does, given the same noise."""
    policy, known = (
        dreamerv3.load(logdir, platform="cpu"),
        portable.load_portable(logdir),
    )
    runner = policy._agent._runner
    draw = quick_jit(lambda seed: model.policy_noise(known.params, seed, 1))
    env = make_env(known.config, 0)
    carry = {
        key: np.zeros(x.shape, x.dtype)
        for key, x in known.inputs(1).items()
        if key.startswith("carry/")
    }
    nothing = {key: np.zeros(x.shape, x.dtype) for key, x in env.act_space.items()}
    obs = env.step({**nothing, "reset": np.bool_(True)})
    for index in range(STEPS):
        noise = draw(np.array([runner._seed, index], np.uint32))
        inputs = {f"obs/{key}": obs[key][None] for key in known.seen}
        inputs |= carry | {"noise/state": noise["state"]}
        inputs |= {f"noise/action/{key}": x for key, x in noise["action"].items()}
        found = step({key: np.asarray(value) for key, value in inputs.items()})
        expected = policy.act(obs)
        for key, value in expected.items():
            clipped = np.asarray(found[f"action/{key}"])[0]
            if value.dtype.kind == "f":
                clipped = np.clip(clipped, -1, 1)
            np.testing.assert_allclose(clipped, value, atol=1e-4, err_msg=key)
            carry[f"carry/action/{key}"] = found[f"action/{key}"]
        for key in ("deter", "stoch"):
            carry[f"carry/{key}"] = found[f"next/{key}"]
        obs = env.step({**expected, "reset": obs["is_last"]})
    env.close()


def test_stablehlo_acts_like_load_for_any_batch(run, tmp_path):
    assert export.main([str(run), str(tmp_path / "out"), "--format", "stablehlo"]) == 0
    exported = jax.export.deserialize((tmp_path / "out/policy.stablehlo").read_bytes())
    assert exported.platforms == ("cpu", "cuda", "tpu")
    call = quick_jit(exported.call)
    compare(run, call)
    known = portable.load_portable(run)
    many = {k: np.zeros(x.shape, x.dtype) for k, x in known.inputs(3).items()}
    one = call({k: x[:1] for k, x in many.items()})
    for key, value in call(many).items():
        assert value.shape[0] == 3
        np.testing.assert_allclose(value[2:], one[key], atol=1e-4)
    signature = json.loads((tmp_path / "out/policy.json").read_text())
    assert signature["inputs"]["obs/image"] == {
        "dtype": "uint8",
        "shape": ["B", 64, 64, 3],
    }


def convert(logdir, folder):
    """Writes a policy as ONNX in another process, since the package warns a lot."""
    pytest.importorskip("jax2onnx", reason="the extra onnx is not installed")
    code = (
        "import sys, logging, warnings; warnings.simplefilter('ignore'); "
        "logging.disable(); from dreamerv3.export import main; sys.exit(main())"
    )
    arguments = [logdir, folder, "--format", "onnx"]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


def compare_onnx(logdir, folder):
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "policy.onnx")
    names = [output.name for output in session.get_outputs()]

    def step(inputs):
        return dict(zip(names, session.run(names, inputs)))

    compare(logdir, step)
    known = portable.load_portable(logdir)
    many = {k: np.zeros(x.shape, x.dtype) for k, x in known.inputs(3).items()}
    assert all(len(value) == 3 for value in step(many).values())


@pytest.mark.slow
@pytest.mark.timeout(300)  # The conversion takes its time.
def test_onnx_acts_like_load_and_without_jax(tmp_path):
    save_agent(tmp_path / "run", "--task", "gym_CartPole-v1")
    convert(tmp_path / "run", tmp_path / "out")
    compare_onnx(tmp_path / "run", tmp_path / "out")
    code = (
        "import runpy, sys; sys.argv[:] = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__'); "
        "assert not {'jax', 'dreamerv3', 'embodied'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, EXAMPLE, tmp_path / "out", "CartPole-v1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("Episode 1: score ")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_onnx_takes_images_and_all_kinds_of_actions(run, tmp_path):
    convert(run, tmp_path / "out")
    compare_onnx(run, tmp_path / "out")


def test_without_the_packages_onnx_says_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    with pytest.raises(ImportError, match=r"pip install 'dreamerv3-parallel\[onnx\]'"):
        export.export(run, tmp_path / "out", format="onnx")


# The Hub.


def test_a_hub_folder_has_weights_config_card_and_video(tmp_path, capsys):
    logdir, out = tmp_path / "run", tmp_path / "out"
    save_run(logdir)
    (logdir / "eval").mkdir()
    (logdir / "eval/7-image.gif").write_bytes(b"GIF89a")
    result = {
        "step": 7,
        "episodes": 20,
        "mean_score": 12.5,
        "confidence": 0.95,
        "interval": [11.0, 14.0],
        "videos": ["eval/7-image.gif"],
    }
    (logdir / "eval/7.json").write_text(json.dumps(result))
    (logdir / "eval/3.json").write_text(json.dumps({**result, "mean_score": 1.0}))
    assert export.main([str(logdir), str(out), "--format", "hub"]) == 0
    names = {path.name for path in out.iterdir()}
    assert names == {
        *("model.safetensors", "config.json", "config.yaml", "README.md"),
        "replay.gif",
    }
    card = (out / "README.md").read_text()
    assert "value: 12.5 +/- 1.5" in card
    assert "Mean score of 20 episodes: **12.5** (95% confidence interval 11 to" in card
    assert "![An episode](replay.gif)" in card
    assert "It sees `token`, `vector` and decides on `force`, `move`." in card
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["step"]) == ("dreamerv3", 7)
    original, loaded = dreamerv3.load(logdir), dreamerv3.load(out)
    assert loaded.step == 7
    assert loaded.obs_space == original.obs_space
    assert loaded.act_space == original.act_space
    rng = np.random.default_rng(0)
    for _ in range(4):
        obs = {key: space.sample(rng) for key, space in original.obs_space.items()}
        for key, value in original.act(obs).items():
            np.testing.assert_allclose(loaded.act(obs)[key], value, rtol=1e-5)
            break
    (out / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"model\.safetensors and config\.json"):
        dreamerv3.load(out)


def test_a_card_without_evaluation_says_so(tmp_path):
    save_run(tmp_path / "run")
    export.export(tmp_path / "run", tmp_path / "out", format="hub")
    card = (tmp_path / "out/README.md").read_text()
    assert "It was not evaluated." in card
    assert "model-index" not in card
    assert "There is no video of it." in card


def test_formats_and_dtypes_are_checked(run, tmp_path):
    with pytest.raises(ValueError, match="export expected format policy or hub"):
        export.export(run, tmp_path / "out", format="torch")
    with pytest.raises(ValueError, match="expected dtype float32 for onnx"):
        export.export(run, tmp_path / "out", "bfloat16", "onnx")
