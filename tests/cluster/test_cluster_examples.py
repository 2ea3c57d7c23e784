"""The example files for clusters parse, and hold the command that is tested."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from ruamel.yaml import YAML

from dreamerv3.cli.config import load_config
from dreamerv3.cluster.bundles import make_env_bundles

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
COMMAND = re.compile(r"dreamerv3 --script ray (?:[^\n&`\\]|\\\n)*")


def example_command(text):
    """The command of an example, as a list."""
    (found,) = COMMAND.findall(text)
    return shlex.split(found)


def read(name):
    return (FOLDER / name).read_text()


def test_all_have_the_command_of_the_document():
    documented = COMMAND.findall((ROOT / "docs" / "parallel.md").read_text())
    expected = [shlex.split(command) for command in documented]
    names = sorted(path.name for path in FOLDER.iterdir() if path.suffix != ".py")
    assert names == ["kuberay.yaml", "skypilot.yaml", "slurm.sh"]
    for name in names:
        assert example_command(read(name)) in expected, name


@pytest.mark.parametrize("name", ["kuberay.yaml", "skypilot.yaml", "slurm.sh"])
def test_the_command_is_understood(name):
    config = load_config(example_command(read(name))[1:])
    assert config.script == "ray"
    assert len(make_env_bundles(config)) > 1


def test_the_slurm_script_is_bash():
    done = subprocess.run(["bash", "-n", FOLDER / "slurm.sh"], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_kuberay_job_has_what_the_run_needs():
    job = YAML(typ="safe").load(read("kuberay.yaml"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    variables = YAML(typ="safe").load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    assert float(variables["RAY_JOB_STOP_WAIT_TIME_S"]) > 60
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        (mount,) = container["volumeMounts"]
        config = load_config(shlex.split(job["spec"]["entrypoint"])[1:])
        assert config.logdir.startswith(f"{mount['mountPath']}/")


def test_the_skypilot_file_runs_it_once():
    task = YAML(typ="safe").load(read("skypilot.yaml"))
    assert task["num_nodes"] == 3
    done = subprocess.run(["bash", "-n"], input=task["run"], text=True)
    assert done.returncode == 0
    assert 'if [ "$SKYPILOT_NODE_RANK" = 0 ]' in task["run"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_installed")
def test_three_nodes_on_one_machine_as_documented(tmp_path):
    document = (ROOT / "docs" / "parallel.md").read_text()
    (line,) = re.findall(
        r"^python (examples/cluster/three_nodes.py .*)$", document, re.M
    )
    script, program, *flags = shlex.split(line)
    assert program == "dreamerv3"
    # The same command, made shorter to save time.
    flags += ["--logdir", str(tmp_path / "run"), "--random_agent", "True"]
    flags += ["--run.steps", "500", "--run.log_every", "1"]
    command = [sys.executable, str(ROOT / script), sys.executable, "-m"]
    done = subprocess.run(
        [*command, "dreamerv3.main", *flags],
        capture_output=True,
        text=True,
        timeout=500,
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert "Three nodes at 127.0.0.1:" in shown
    assert "Finished after" in shown
    assert (tmp_path / "run" / "ckpt" / "manifest.json").exists()
