"""The typed settings of loops and roles."""

import argparse
import dataclasses
import pickle

import elements
import pytest

from dreamerv3.cli.config import load_config, make_args
from embodied.run.settings import RunSettings

ARGS = make_args(load_config(["--logdir", "logdir"], {}))
# Keys that programs written for earlier versions do not have.
OURS = {
    *("errfile", "ipv6", "clock_addr", "clock_port", "from_checkpoint_regex"),
    *("transport", "link", "insecure", "keyfile", "envs_per_worker", "env_offset"),
    *("actor_timeout", "env_timeout", "stall_timeout", "restarts", "keep", "view"),
    *("max_nonfinite", "render", "stop_timeout", "replica_timeout"),
}


@pytest.mark.parametrize(
    "args",
    [
        ARGS,
        elements.Config(ARGS),
        dict(ARGS),
        argparse.Namespace(**ARGS),
        RunSettings.from_args(ARGS),
    ],
    ids=lambda args: type(args).__name__,
)
def test_they_are_taken_from_anything_with_the_names(args):
    settings = RunSettings.from_args(args)
    for name, value in ARGS.items():
        found = getattr(settings, name)
        assert found == value and not isinstance(found, elements.Config), name


def test_they_have_exactly_the_names_that_the_command_line_gives():
    names = {field.name for field in dataclasses.fields(RunSettings)}
    assert names == set(ARGS)


def test_keys_of_ours_have_the_defaults_of_the_configuration():
    settings = RunSettings.from_args({k: v for k, v in ARGS.items() if k not in OURS})
    assert settings == RunSettings.from_args(ARGS)


@pytest.mark.parametrize("name", sorted(set(ARGS) - OURS))
def test_a_key_that_is_missing_is_named(name):
    args = {key: value for key, value in ARGS.items() if key != name}
    with pytest.raises(ValueError, match=rf"args expected .* without {name}\."):
        RunSettings.from_args(args)


def test_further_keys_are_ignored():
    settings = RunSettings.from_args({**ARGS, "something": 1})
    assert not hasattr(settings, "something")


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("steps", 1e10, 10**10),
        ("duration", 5, 5.0),
        ("clock_port", 5000, "5000"),
        ("debug", 1, True),
    ],
)
def test_values_get_their_types(name, given, expected):
    value = getattr(RunSettings.from_args({**ARGS, name: given}), name)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("envs", 1.5, "a whole number"),
        ("envs", "many", "a whole number"),
        ("steps", float("inf"), "a whole number"),
        ("train_ratio", None, "a number"),
        ("debug", "yes", "True or False"),
        ("usage", 5, "a mapping"),
    ],
)
def test_values_of_other_types_are_refused(name, value, word):
    with pytest.raises(ValueError, match=rf"args\.{name}: expected {word}, got"):
        RunSettings.from_args({**ARGS, name: value})


def test_they_do_not_change_and_can_be_sent():
    settings = RunSettings.from_args(ARGS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.envs = 3
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert dataclasses.replace(settings, envs=3).envs == 3
