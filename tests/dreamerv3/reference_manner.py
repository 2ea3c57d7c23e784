"""A training script as users of the reference write it: factories and a loop.

python reference_manner.py train LOGDIR        # Or parallel.
"""

import functools
import importlib
import pathlib
import sys

import elements
import ruamel.yaml

import dreamerv3
import embodied

CONFIGS = pathlib.Path(dreamerv3.__file__).parent / "configs.yaml"
bind = functools.partial


def main(script, logdir):
    blocks = ruamel.yaml.YAML(typ="safe").load(CONFIGS.read_text())
    config = elements.Config(blocks["defaults"])
    config = config.update(blocks["debug"])
    config = config.update(
        {
            "logdir": logdir,
            "task": "gym_CartPole-v1",
            "batch_size": 2,
            "batch_length": 4,
            "report_length": 4,
            "agent.imag_length": 3,
            "run.steps": 200,
            "run.envs": 2,
            "run.eval_envs": 1,
            "run.report_every": 0.0,
            "run.log_every": 1.0,
        }
    )
    elements.Path(logdir).mkdir()
    args = elements.Config(
        **config.run,
        replica=config.replica,
        replicas=config.replicas,
        logdir=config.logdir,
        batch_size=config.batch_size,
        batch_length=config.batch_length,
        report_length=config.report_length,
        consec_train=config.consec_train,
        consec_report=config.consec_report,
        replay_context=config.replay_context,
    )
    if script == "train":
        embodied.run.train(
            bind(make_agent, config),
            bind(make_replay, config, "replay"),
            bind(make_env, config),
            bind(make_stream, config),
            bind(make_logger, config),
            args,
        )
    else:
        embodied.run.parallel.combined(
            bind(make_agent, config),
            bind(make_replay, config, "replay"),
            bind(make_replay, config, "eval_replay", "eval"),
            bind(make_env, config),
            bind(make_env, config),
            bind(make_stream, config),
            bind(make_logger, config),
            args,
        )


def make_agent(config):
    env = make_env(config, 0)
    obs_space = {k: v for k, v in env.obs_space.items() if not k.startswith("log/")}
    act_space = {k: v for k, v in env.act_space.items() if k != "reset"}
    env.close()
    return dreamerv3.Agent(
        obs_space,
        act_space,
        elements.Config(
            **config.agent,
            logdir=config.logdir,
            seed=config.seed,
            jax=config.jax,
            batch_size=config.batch_size,
            batch_length=config.batch_length,
            replay_context=config.replay_context,
            report_length=config.report_length,
            replica=config.replica,
            replicas=config.replicas,
        ),
    )


def make_replay(config, folder, mode="train"):
    length = config.batch_length if mode == "train" else config.report_length
    capacity = config.replay.size if mode == "train" else config.replay.size / 10
    selector = None
    if mode == "train":
        selector = embodied.replay.selectors.Mixture(
            {"uniform": embodied.selectors.Uniform()}, {"uniform": 1.0}
        )
    return embodied.replay.Replay(
        length=length + config.replay_context,
        capacity=int(capacity),
        directory=elements.Path(config.logdir) / folder,
        online=config.replay.online,
        chunksize=config.replay.chunksize,
        selector=selector,
    )


def make_env(config, index, **overrides):
    suite, task = config.task.split("_", 1)
    ctor = {
        "dummy": "embodied.envs.dummy:Dummy",
        "gym": "embodied.envs.from_gym:FromGym",
    }
    module, name = ctor[suite].split(":")
    kwargs = {**config.env.get(suite, {}), **overrides}
    env = getattr(importlib.import_module(module), name)(task, **kwargs)
    for name, space in env.act_space.items():
        if not space.discrete:
            env = embodied.wrappers.NormalizeAction(env, name)
    env = embodied.wrappers.UnifyDtypes(env)
    env = embodied.wrappers.CheckSpaces(env)
    for name, space in env.act_space.items():
        if not space.discrete:
            env = embodied.wrappers.ClipAction(env, name)
    return env


def make_stream(config, replay, mode):
    stream = embodied.streams.Stateless(bind(replay.sample, config.batch_size, mode))
    return embodied.streams.Consec(
        stream,
        length=config.batch_length if mode == "train" else config.report_length,
        consec=config.consec_train if mode == "train" else config.consec_report,
        prefix=config.replay_context,
        strict=(mode == "train"),
        contiguous=True,
    )


def make_logger(config):
    logdir = elements.Path(config.logdir)
    return elements.Logger(
        elements.Counter(),
        [
            elements.logger.TerminalOutput(config.logger.filter, "Agent"),
            elements.logger.JSONLOutput(logdir, "metrics.jsonl"),
            elements.logger.JSONLOutput(logdir, "scores.jsonl", "episode/score"),
        ],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
