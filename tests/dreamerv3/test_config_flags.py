"""Flags, the finished configuration, its file in the logdir, and the help."""

import math
import re
import string

import elements
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamerv3.cli.config import (
    ConfigError,
    flatten,
    load_config,
    make_args,
    merge,
    read_blocks,
    read_config,
    to_arguments,
)
from dreamerv3.cli.help_pages import help_text
from dreamerv3.cli.logdir import prepare_logdir
from dreamerv3.cli.schema import CONFIGS, read_keys
from embodied.envs import registry

DEFAULTS = merge([]).flat
# Of arguments of environments.
VALUES = [2, 2.5, True, math.inf, -math.inf]
VALUES += ["2", "x", "'x'", "1e3", "", "a b", "'\U0001f600"]


class TestFlags:
    @pytest.mark.parametrize(
        ("argv", "key", "value"),
        [
            (["--run.envs", "8"], "run.envs", 8),
            (["--run.envs=8"], "run.envs", 8),
            (["--run.steps", "1e6"], "run.steps", 1_000_000),
            (["--run.steps", "1e18"], "run.steps", 10**18),
            (["--run.actor_batch", "-3"], "run.actor_batch", -3),
            (["--run.train_ratio", "512"], "run.train_ratio", 512.0),
            (["--run.log_every", "-1"], "run.log_every", -1.0),
            (["--run.debug", "False"], "run.debug", False),
            (["--run.debug", "true"], "run.debug", True),
            (["--suite.at_once", "3"], "suite.at_once", 3),
            (["--suite.tasks", "a_b", "c"], "suite.tasks", ("a_b", "c")),
            (["--replay.bytes", "1e9"], "replay.bytes", 10**9),
            (["--replay.bytes", "5", "--replay.bytes", "auto"], "replay.bytes", "auto"),
            (["--replay.prio.initial", "2"], "replay.prio.initial", 2.0),
            (
                ["--replay.prio.initial=1", "--replay.prio.initial=inf"],
                "replay.prio.initial",
                math.inf,
            ),
            (["--env.dmc.size", "80", "64"], "env.dmc.size", (80, 64)),
            (["--env.dmc.size", "80,64"], "env.dmc.size", (80, 64)),
            (["--logger.outputs", "terminal"], "logger.outputs", ("terminal",)),
            (
                ["--logger.outputs", "jsonl", "--logger.outputs+", "terminal"],
                "logger.outputs",
                ("jsonl", "terminal"),
            ),
            (
                ["--ray.head_resources", "CPU=2", "GPU=1"],
                "ray.head_resources",
                ("CPU=2", "GPU=1"),
            ),
            (["--method=--odd=name"], "method", "--odd=name"),
            (["--logger.user="], "logger.user", ""),
            (["--clock_port", "5000"], "clock_port", "5000"),
        ],
    )
    def test_are_converted_to_the_type_of_the_key(self, argv, key, value):
        values = merge(argv)
        assert values.problems == []
        assert values.flat[key] == value
        assert type(values.flat[key]) is type(value)

    def test_patterns_set_all_keys_that_they_match(self):
        flat = merge([r"--.*\.units", "64"]).flat
        changed = {key for key in flat if flat[key] != DEFAULTS[key]}
        assert changed == {key for key in flat if key.endswith(".units")}
        assert len(changed) == 6

    @pytest.mark.parametrize("pattern", [r"run\.env.?", r"(run)?.envs", r".*un\.envs"])
    def test_patterns_match_whole_keys_and_nothing_longer(self, pattern):
        flat = merge([f"--{pattern}", "8"]).flat
        changed = {key for key in flat if flat[key] != DEFAULTS[key]}
        assert changed == {"run.envs"}

    def test_a_pattern_that_is_only_a_prefix_matches_nothing(self):
        values = merge([r"--run\.(steps|enva?)", "8"])
        assert values.flat["run.envs"] == 16
        assert values.flat["run.env_offset"] == 0
        with pytest.raises(ConfigError, match="matches no key as a whole"):
            load_config([r"--(run)\.eval", "8"])

    def test_the_later_flag_wins(self):
        argv = [r"--.*\.units", "64", "--agent.value.units", "32"]
        flat = merge(argv).flat
        assert (flat["agent.value.units"], flat["agent.policy.units"]) == (32, 64)

    @pytest.mark.parametrize(
        ("argv", "value"),
        [
            (["--env.gym.kwargs.g", "9", "--env.gym.kwargs.g", "x"], "x"),
            ([r"--env.gym.kwargs.g", "9", r"--env\.gym\.kw.*", "10"], 10),
            (["--env.gym.kwargs.g", "'2'"], "2"),
            (["--env.gym.kwargs.g", "2"], 2),
            (["--env.gym.kwargs.g", "it's"], "it's"),
        ],
    )
    def test_arguments_of_environments_can_be_set_again(self, argv, value):
        values = merge(argv)
        assert values.problems == []
        assert values.flat["env.gym.kwargs.g"] == value

    @pytest.mark.parametrize("value", VALUES)
    def test_arguments_of_environments_keep_their_type(self, value, tmp_path):
        flags = to_arguments({"env.gym.kwargs.g": value, "logdir": tmp_path / "run"})
        config = load_config(flags)
        assert config.env.gym.kwargs == {"g": value}
        assert type(config.env.gym.kwargs["g"]) is type(value)
        prepare_logdir(config)
        again = load_config(["--configs", str(tmp_path / "run/config.yaml")])
        assert again.env.gym.kwargs == {"g": value}

    def test_a_scale_is_one_number(self):
        (problem,) = merge(["--agent.loss_scales.own", "1", "2"]).problems
        assert "expected a number of at least 0" in problem

    def test_scales_of_own_losses_can_be_set_again(self):
        argv = ["--agent.loss_scales.own", "1", "--agent.loss_scales.own", "0.5"]
        assert merge(argv).flat["agent.loss_scales.own"] == 0.5


class TestConfig:
    def test_is_an_elements_config_with_all_keys(self):
        config = load_config([])
        assert isinstance(config, elements.Config)
        assert config.flat.keys() == DEFAULTS.keys()

    def test_reads_the_arguments_of_the_process_by_default(self, monkeypatch):
        monkeypatch.setattr("sys.argv", ["dreamerv3", "--seed", "7"])
        assert load_config().seed == 7

    def test_fills_in_the_logdir(self, monkeypatch):
        monkeypatch.setenv("HOME", "/home/someone")
        config = load_config([])
        assert re.fullmatch(r"/home/someone/logdir/\d{8}T\d{6}", config.logdir)

    def test_job_completion_index_sets_the_replica(self):
        environ = {"JOB_COMPLETION_INDEX": "2"}
        assert load_config(["--replicas", "4"], environ).replica == 2
        assert load_config(["--replicas", "4"], {}).replica == 0

    def test_env_hosts_are_not_replicas(self):
        argv = ["--run.actor_addr", "localhost:5000", "--script"]
        environ = {"JOB_COMPLETION_INDEX": "19"}
        assert load_config([*argv, "parallel_env"], environ).replica == 19
        assert load_config([*argv, "parallel_envs"], environ).replica == 19

    def test_args_hold_the_run_block_and_the_keys_beside_it(self):
        config = load_config(["--run.envs", "3", "--batch_size", "5"])
        args = make_args(config)
        assert isinstance(args, elements.Config)
        assert set(args) - set(config.run) == {
            "replica",
            "replicas",
            "logdir",
            "batch_size",
            "batch_length",
            "report_length",
            "consec_train",
            "consec_report",
            "replay_context",
            "errfile",
            "ipv6",
            "clock_addr",
            "clock_port",
        }
        assert set(config.run) <= set(args)
        assert (args.envs, args.batch_size) == (3, 5)
        assert args.usage.psutil is True
        assert args.logdir == config.logdir


class TestLogdir:
    def argv(self, tmp_path, *argv):
        return load_config(["--logdir", str(tmp_path / "run"), *argv])

    def test_gets_the_configuration(self, tmp_path):
        config = self.argv(tmp_path, "--seed", "3")
        logdir = prepare_logdir(config)
        assert {path.name for path in logdir.iterdir()} == {"config.yaml", ".lock"}
        assert read_config(logdir / "config.yaml") == config

    def test_is_continued_by_the_same_task(self, tmp_path):
        prepare_logdir(self.argv(tmp_path))
        config = self.argv(tmp_path, "--run.steps", "5")
        logdir = prepare_logdir(config)
        assert read_config(logdir / "config.yaml").run.steps == 5

    def test_of_another_task_is_refused_and_left_alone(self, tmp_path):
        logdir = prepare_logdir(self.argv(tmp_path))
        before = (logdir / "config.yaml").read_bytes()
        with pytest.raises(ConfigError) as caught:
            prepare_logdir(self.argv(tmp_path, "--task", "dummy_cont"))
        for word in (str(logdir), "'dummy_disc'", "'dummy_cont'", "another --logdir"):
            assert word in str(caught.value)
        assert (logdir / "config.yaml").read_bytes() == before

    @pytest.mark.parametrize(
        "argv",
        [
            ["--script", "parallel_envs", "--run.actor_addr", "localhost:5000"],
            ["--script", "parallel_env", "--run.actor_addr", "localhost:5000"],
            ["--replica", "1", "--replicas", "2"],
        ],
    )
    def test_is_not_written_by_secondary_hosts(self, tmp_path, argv):
        logdir = prepare_logdir(self.argv(tmp_path))
        before = (logdir / "config.yaml").read_bytes()
        prepare_logdir(self.argv(tmp_path, *argv))
        assert (logdir / "config.yaml").read_bytes() == before

    @pytest.mark.parametrize("content", ["a: [1", "seed: 3", "task: a\n1: 2"])
    def test_with_a_damaged_configuration_is_explained(self, tmp_path, content):
        (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(ConfigError, match=r"program: .*[^.]\. Restore or delete"):
            read_config(tmp_path / "config.yaml")

    def test_that_cannot_be_written_is_refused(self, tmp_path):
        (tmp_path / "run").write_text("a file")
        with pytest.raises(ConfigError, match=r"can be written.*Choose another"):
            prepare_logdir(self.argv(tmp_path))

    @pytest.mark.parametrize(
        "content",
        [
            b"run: {steps: 5",
            b"",
            b"just text",
            b"- a list",
            b"seed: 5\n",
            b"task: [dummy_disc]\n",
            b"task: dummy_disc\nrun: []\n",
            b"task: dummy_disc\nseed: !!python/object:os.system {}\n",
            b"\x00\xff\xfe",
        ],
    )
    def test_with_a_damaged_configuration_is_refused(self, tmp_path, content):
        config = self.argv(tmp_path)
        path = prepare_logdir(config) / "config.yaml"
        path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            prepare_logdir(config)
        assert str(path) in str(caught.value)
        assert "Restore or delete it" in str(caught.value)
        assert path.read_bytes() == content


class TestHelp:
    def test_explains_every_key_and_group(self):
        keys = read_keys().values()
        assert {key.name for key in keys if key.default} == set(DEFAULTS)
        for key in keys:
            assert re.fullmatch(r"[A-Z][^\[]{4,}\.", key.explanation), key

    def test_shows_every_key_with_default_explanation_and_what_is_allowed(self):
        text = " ".join(help_text(["all"]).split())
        for key in read_keys().values():
            if not key.default:
                continue
            allowed = f" [{key.rule.allowed}]" if key.rule else ""
            explanation = f"{key.explanation}{allowed}"
            assert f"--{key.name} {key.default} {explanation}" in text
        for block in set(read_blocks()) - {"defaults"}:
            assert re.search(rf"\b{block}\b", text)
        for suite in registry.SUITES.values():
            assert f"{suite.name}: {suite.doc}" in text

    def test_the_first_page_has_the_flags_that_people_use(self):
        lines = help_text().splitlines()
        flags = [line.split()[0] for line in lines if line.startswith("  --")]
        assert len(flags) == len(set(flags)) == 20
        assert {"--task", "--logdir", "--run.envs", "--run.steps"} <= set(flags)
        assert len(lines) <= 90 and max(map(len, lines)) <= 88
        for word in ("--help all", "eval_only", "agent", "size12m", "gym: Any id"):
            assert any(word in line for line in lines)

    @pytest.mark.parametrize(
        ("topics", "there", "missing"),
        [
            (["run"], ["--run.envs 16", "--run.usage.gc"], ["--agent.", "--task"]),
            (["agent.opt"], ["--agent.opt.lr", "[more than 0]"], ["--agent.dyn"]),
            (["run.envs"], ["--run.envs 16"], ["--run.envs_per_worker"]),
            (["jax", "replay"], ["--jax.jit", "--replay.size"], ["--run."]),
        ],
    )
    def test_groups_and_keys_have_pages(self, topics, there, missing):
        text = help_text(topics)
        assert all(word in text for word in there)
        assert not any(word in text for word in missing)

    def test_other_pages_are_refused(self):
        with pytest.raises(ConfigError, match=r"--help agnet.*run, .*mean agent\?"):
            help_text(["agnet"])

    def test_fits_the_width(self):
        lines = help_text(["all"]).splitlines()
        explanations = [line for line in lines if line.startswith(" " * 6)]
        assert 60 < max(map(len, explanations)) <= 88

    def test_the_file_fits_a_screen(self):
        lines = CONFIGS.read_text().splitlines()
        assert max(map(len, lines)) <= 88


# Keys whose values depend on one another; their combinations are tested elsewhere.
TOGETHER = re.compile(
    r"task|script|replicas?|batch_.*|.*consec_.*|report_length|replay_context"
    r"|replay\.(size|fracs.*)|run\.(envs|eval_envs|actor_batch|remote_.*|.*_addr)"
    r"|jax\..*|env\..*|agent\.opt\.(schedule|warmup|anneal)|.*\.(deter|blocks|bspace)"
    r"|.*\.(depth|mults|minstd|maxstd|perclo|perchi)|logdir"
)
FREE = [key for key in DEFAULTS if not TOGETHER.fullmatch(key)]
# Characters with a meaning in YAML or on the command line, and unforeseen ones.
CHARACTERS = "aZ09 ._-+:;#'\"`{}[]()<>|%&*!?,\\/=~$^@é\u00a0\u2028\ufeff☃😀"


def valid_values(key, default):
    rule = read_keys()[key].rule
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, int):
        found = st.integers(-(10**12), 10**12) | st.integers(0, 9)
    elif isinstance(default, float):
        found = st.floats(allow_nan=False, allow_infinity=False) | st.floats(0, 1)
    elif key == "suite.tasks":
        return st.sampled_from([("all",), ("dummy_disc", "bsuite_mnist/0")])
    elif key in ("plot.runs", "view.folders"):
        return st.sampled_from([("none",), ("one run", "runs/*")])
    elif key in ("ray.head_resources", "ray.env_resources"):
        return st.sampled_from([("auto",), ("CPU=2", "GPU=1"), ("my.tpu:v4=0.5",)])
    elif isinstance(default, tuple):
        return st.lists(st.sampled_from(rule.names), min_size=1, unique=True).map(tuple)
    elif rule and rule.names:
        return st.sampled_from(rule.names)
    elif rule and rule.word:
        found = st.just("auto") | st.integers(1, 10**12)
    elif key in ("clock_port", "run.from_checkpoint_regex", "logger.filter"):
        found = st.text(string.digits, max_size=4)
    else:
        found = st.text(CHARACTERS, max_size=30)
    return found.filter(rule.accepts) if rule else found


@pytest.mark.parametrize("key", FREE)
def test_every_free_key_has_values_to_try(key):
    valid_values(key, DEFAULTS[key]).validate()


@st.composite
def overrides(draw):
    chosen = draw(st.lists(st.sampled_from(FREE), unique=True, max_size=8))
    return {key: draw(valid_values(key, DEFAULTS[key])) for key in chosen}


def as_flag(key, value):
    if isinstance(value, tuple):
        return [f"--{key}", *value]
    return [f"--{key}={value}"]


@pytest.mark.parametrize(
    "examples", [15, pytest.param(500, marks=pytest.mark.slow)], ids=str
)
def test_flags_to_config_to_file_and_back(tmp_path, examples):
    @settings(max_examples=examples)
    @given(overrides())
    def check(overrides):
        argv = [part for item in overrides.items() for part in as_flag(*item)]
        config = load_config([*argv, "--logdir", str(tmp_path)])
        assert config.flat == {**DEFAULTS, **overrides, "logdir": str(tmp_path)}
        prepare_logdir(config)
        loaded = read_config(tmp_path / "config.yaml")
        assert loaded == config
        for key, value in config.flat.items():
            assert type(loaded.flat[key]) is type(value)

    check()


def test_flatten_escapes_dots_only_in_patterns():
    nested = {"a": {"b": {"c": [1, 2]}}, r".*\.d": {"e": 3}}
    assert flatten(nested) == {"a.b.c": (1, 2), r".*\.d\.e": 3}
