"""Bundles, resources and keys of runs on clusters."""

import os
import pathlib
import time

import pytest

from dreamerv3.cli.config import ConfigError, load_config
from dreamerv3.cli.logdir import claim, preserve_config, wait_until_free
from dreamerv3.cluster import bundle_actor, ray_session
from dreamerv3.cluster.bundle_actor import BundleActor, Outcome, free_ports
from dreamerv3.cluster.bundles import (
    actor_options,
    check_room,
    head_resources,
    make_env_bundles,
    show_resources,
)
from dreamerv3.cluster.run_keys import (
    digest,
    make_keys,
    private_keyfile,
    remove_keyfiles,
)
from embodied.rpc import AuthError, Keys
from embodied.workers import Process


def load(*argv):
    return load_config(["--script", "ray", *map(str, argv)])


class TestEnvBundles:
    @pytest.mark.parametrize(
        ("envs", "eval_envs", "most", "expected"),
        [
            (4, 0, 2, [(0, 2, 0), (2, 2, 0)]),
            (5, 0, 2, [(0, 2, 0), (2, 2, 0), (4, 1, 0)]),
            (16, 4, 8, [(0, 6, 1), (7, 5, 1), (13, 5, 2)]),
            (1, 4, 2, [(0, 1, 4)]),  # Every bundle has one that trains.
            (3, 1, 100, [(0, 3, 1)]),
        ],
    )
    def test_hold_all_environments_once(self, envs, eval_envs, most, expected):
        flags = ["--run.envs", envs, "--run.eval_envs", eval_envs]
        bundles = make_env_bundles(load(*flags, "--ray.envs_per_bundle", most))
        assert [(x.offset, x.envs, x.eval_envs) for x in bundles] == expected
        ids = [x.offset + i for x in bundles for i in range(x.envs + x.eval_envs)]
        assert ids == list(range(envs + eval_envs))

    def test_need_a_core_for_each(self):
        (bundle,) = make_env_bundles(load("--run.envs", 3, "--run.eval_envs", 1))
        assert bundle.resources == {"CPU": 4.0}
        assert bundle.name == "envs 0 to 3"

    def test_need_what_is_set(self):
        flags = ["--run.envs", 2, "--run.eval_envs", 0]
        (bundle,) = make_env_bundles(
            load(*flags, "--ray.env_resources", "CPU=.5", "g=2")
        )
        assert bundle.resources == {"CPU": 1.0, "g": 4.0}

    def test_one_has_the_name_of_one(self):
        (bundle,) = make_env_bundles(load("--run.envs", 1, "--run.eval_envs", 0))
        assert bundle.name == "env 0"


class TestHead:
    @pytest.mark.parametrize(
        ("flags", "cluster", "expected"),
        [
            ([], {"CPU": 9.0}, {"CPU": 3.0}),
            ([], {"CPU": 9.0, "GPU": 4.0}, {"CPU": 3.0, "GPU": 1.0}),
            (["--jax.platform", "cpu"], {"GPU": 4.0}, {"CPU": 3.0}),
            (["--jax.platform", "cuda"], {}, {"CPU": 3.0, "GPU": 1.0}),
            (["--jax.platform", "tpu"], {"GPU": 1.0}, {"CPU": 3.0, "TPU": 1.0}),
            (["--random_agent", "True"], {"GPU": 4.0}, {"CPU": 3.0}),
            (["--jax.train_devices", "1", "2"], {"GPU": 8.0}, {"CPU": 3, "GPU": 3}),
            (["--ray.head_resources", "head=1"], {"GPU": 8.0}, {"head": 1.0}),
        ],
    )
    def test_needs_the_accelerators_of_the_run(self, flags, cluster, expected):
        assert head_resources(load(*flags), cluster) == expected

    def test_options_of_an_actor(self):
        assert actor_options({"CPU": 3.0, "GPU": 1.0, "head": 1.0}) == {
            "num_cpus": 3.0,
            "num_gpus": 1.0,
            "resources": {"head": 1.0},
        }

    def test_room(self):
        nodes = [{"CPU": 2.0, "memory": 1e9, "node:10.0.0.1": 1.0}, {"GPU": 1.0}]
        check_room({"CPU": 2.0}, nodes)
        with pytest.raises(ConfigError) as info:
            check_room({"CPU": 1.0, "GPU": 1.0}, nodes)
        shown = str(info.value)
        assert "CPU=1 GPU=1" in shown and "got nodes with CPU=2; GPU=1." in shown

    def test_resources_are_shown_as_they_are_typed(self):
        assert show_resources({"b": 0.5, "CPU": 2.0}) == "CPU=2 b=0.5"
        assert show_resources({}) == "nothing"

    def test_a_ray_of_this_machine_has_room_for_the_run(self):
        config = load("--run.envs", 300, "--ray.head_resources", "head=1", "CPU=2")
        room = ray_session.local_room(config, make_env_bundles(config))
        assert room == {"num_cpus": 306, "resources": {"head": 1.0}}


@pytest.mark.parametrize("value", ["CPU", "=1", "CPU=one", "CPU=-1", "auto CPU=1"])
def test_resources_have_names_and_amounts(value):
    with pytest.raises(ConfigError, match=r"ray.head_resources: expected auto, or "):
        load("--ray.head_resources", *value.split())


class TestKeys:
    def test_lie_in_the_logdir_while_the_run_runs(self, tmp_path):
        with make_keys(tmp_path, "", False, {}) as keys:
            path = pathlib.Path(keys.path)
            assert path.parent == tmp_path
            assert path.stat().st_mode & 0o777 == 0o600
            assert keys.digest == digest(path) != ""
            assert keys.keys == Keys.load(path)
            assert keys.keys.server_secret not in repr(keys)
        assert not path.exists()

    def test_of_the_user_are_used_and_stay(self, tmp_path):
        Keys.generate().save(tmp_path / "mine.json")
        with make_keys(tmp_path, str(tmp_path / "mine.json"), False, {}) as keys:
            assert keys.path == str(tmp_path / "mine.json")
        assert (tmp_path / "mine.json").exists()

    @pytest.mark.parametrize(
        ("trusted", "environ", "sent"),
        [
            (False, {}, False),
            (True, {}, True),
            (False, {"RAY_USE_TLS": "1"}, True),
            (False, {"RAY_USE_TLS": "0"}, False),
        ],
    )
    def test_are_sent_only_where_nobody_can_read_them(
        self, tmp_path, trusted, environ, sent
    ):
        with make_keys(tmp_path, "", trusted, environ) as keys:
            assert keys.for_node(True, "node", "logdir") is None
            if sent:
                assert keys.for_node(False, "node", "logdir") == keys.keys
            else:
                with pytest.raises(
                    ConfigError, match=r"RAY_USE_TLS=1.*trusted_network"
                ):
                    keys.for_node(False, "node", "logdir")

    def test_that_were_sent_leave_no_file(self, tmp_path):
        keys = Keys.generate()
        with private_keyfile(keys, "elsewhere") as path:
            assert Keys.load(path) == keys
            with Process(check_keys, path, keys) as process:
                assert process.join(30)
            assert process.error is None
        with pytest.raises(AuthError):
            Keys.load(path)
        with private_keyfile(None, "shared.json") as path:
            assert path == "shared.json"

    def test_of_runs_that_were_killed_are_removed(self, tmp_path):
        (tmp_path / "other.json").touch()
        with make_keys(tmp_path, "", False, {}) as keys:
            remove_keyfiles(tmp_path)
            assert not os.path.exists(keys.path)
        assert (tmp_path / "other.json").exists()

    def test_that_are_missing_have_no_digest(self, tmp_path):
        assert digest(tmp_path / "none") == ""


def check_keys(path, keys):
    assert Keys.load(path) == keys


class TestActor:
    """The actor without Ray: the tests call its methods themselves."""

    def run(self, tmp_path, program, number=1, actor=None):
        actor = actor or BundleActor("some")
        return actor.run(
            number, program, load("--logdir", tmp_path), {"keyfile": "none"}, None
        )

    def test_passes_on_the_end_of_a_program(self, tmp_path, capfd):
        assert self.run(tmp_path, succeed) == Outcome(0)
        assert self.run(tmp_path, refuse) == Outcome(2, ("not like this",))
        outcome = self.run(tmp_path, crash)
        assert outcome.code == 1
        assert "ZeroDivisionError" in outcome.problems[0]
        assert self.run(tmp_path, kill).code == -9
        # The program prints to the actor's stderr, which Ray collects.
        assert "dreamerv3: not like this" in capfd.readouterr().err

    def test_a_stop_reaches_also_what_comes_after_it(self, tmp_path):
        actor = BundleActor("some")
        actor.stop(1)
        assert self.run(tmp_path, succeed, 1, actor) == Outcome(-15)
        assert self.run(tmp_path, succeed, 2, actor) == Outcome(0)

    def test_has_the_name_of_its_bundle(self):
        assert repr(BundleActor("envs 0 to 7")) == "envs 0 to 7"

    def test_tells_what_its_program_uses(self, tmp_path, monkeypatch):
        told, gauges = [], [Gauge("cores"), Gauge("memory")]
        for gauge in gauges:
            gauge.told = told
        monkeypatch.setattr(bundle_actor, "METRICS_SECONDS", 0.1)
        monkeypatch.setattr(bundle_actor, "_make_gauges", lambda: gauges)
        assert self.run(tmp_path, wait) == Outcome(0)
        names = {(name, tags["bundle"]) for name, _, tags in told}
        assert names == {("cores", "some"), ("memory", "some")}
        assert max(value for name, value, _ in told if name == "memory") > 1e6

    def test_ports_are_different_and_free(self):
        ports = free_ports("127.0.0.1", 3)
        assert len(set(ports)) == 3


class Gauge:
    """A fake of Ray's gauge."""

    def __init__(self, name):
        self.name = name

    def set(self, value, tags):
        self.told.append((self.name, value, tags))


def wait(config, host):
    time.sleep(1.0)  # Long enough to be measured.


def succeed(config, host):
    pass


def refuse(config, host):
    raise ConfigError("not like this")


def crash(config, host):
    return 1 / 0


def kill(config, host):
    os.kill(os.getpid(), 9)


def test_a_job_that_would_not_be_saved_is_told_so(caplog):
    caplog.set_level("WARNING", "embodied.cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ray_session.JOB, raising=False)
        ray_session.check_job_stop(60.0)
        assert caplog.text == ""
        patch.setenv(ray_session.JOB, "{}")
        patch.setenv(ray_session.STOP_WAIT, "300")
        ray_session.check_job_stop(60.0)
        assert caplog.text == ""
        patch.delenv(ray_session.STOP_WAIT)
        ray_session.check_job_stop(60.0)
    assert "kills this run after 3 s" in caplog.text
    assert ray_session.STOP_WAIT in caplog.text


def test_a_new_head_waits_for_the_lock_of_the_old_one(tmp_path):
    wait_until_free(tmp_path, 0.0)  # No run has used this folder.
    with preserve_config(str(tmp_path)):
        claim(tmp_path)
        waits = Process(wait_until_free, tmp_path, 60.0, name="waits", start=True)
        leaves = Process(wait_until_free, tmp_path, 0.1, name="gives up", start=True)
        try:
            assert leaves.join(60)
            assert waits.running, "the folder is in use"
        except BaseException:
            waits.kill()
            raise
    assert waits.join(60)
    for process in (waits, leaves):
        assert process.exitcode == 0 and process.error is None


def test_ray_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'dreamerv3-parallel\[ray\]'"):
        with ray_session.connect(load("--logdir", tmp_path), []):
            pass


@pytest.mark.usefixtures("ray_installed")
def test_a_driver_belongs_to_the_cluster(tmp_path):
    config = load("--logdir", tmp_path, "--ray.address", "ray://10.0.0.1:10001")
    with pytest.raises(ConfigError, match=r"got 'ray://.*ray job submit"):
        with ray_session.connect(config, []):
            pass
