"""Small agents, batches and compiled functions that tests of the agent share."""

from __future__ import annotations

import functools
import pathlib

import jax
import numpy as np

from dreamerv3 import model, training
from dreamerv3.cli.config import load_config
from embodied import Space
from embodied.envs.keys import SIGNALS
from embodied.jax.param_names import flat_params, with_flat_params

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

OBS_SPACE = {
    "vector": Space(np.float32, 3),
    "token": Space(np.int32, (), 0, 4),
    **SIGNALS,
}
ACT_SPACE = {
    "force": Space(np.float32, 2, -1, 1),
    "move": Space(np.int32, (), 0, 3),
    "reset": Space(bool),
}
BATCH, LENGTH, CONTEXT = 2, 4, 2
KEY = jax.random.key(0, impl="rbg")  # Faster to compile than the default.

GOLDEN_OBS_SPACE = {
    "image": Space(np.uint8, (64, 64, 3)),
    "vector": Space(np.float32, 7),
    "token": Space(np.int32, (), 0, 9),
    "int2d": Space(np.int32, (2, 3), 0, 4),
    **SIGNALS,
}
GOLDEN_ACT_SPACE = {
    "act_disc": Space(np.int32, (), 0, 5),
    "act_cont": Space(np.float32, 6, -1, 1),
    "reset": Space(bool),
}


def flags(**values) -> list[str]:
    return [text for key, value in values.items() for text in (f"--{key}", str(value))]


def rssm_flags(**values) -> list[str]:
    return flags(**{f"agent.dyn.rssm.{key}": value for key, value in values.items()})


@functools.cache
def agent_config(*argv: str):
    """The `agent` block with tiny networks."""
    sizes = rssm_flags(deter=16, hidden=6, stoch=3, classes=4, blocks=4)
    tiny = ["--configs", "debug", *sizes, "--agent.imag_length", "3"]
    return load_config([*tiny, *argv], {}).agent


@functools.cache
def golden_config(unimix: float = 0.0):
    sizes = rssm_flags(deter=32, hidden=12, stoch=4, classes=5, blocks=4)
    parts = {r"agent\..*\.depth": 2, r"agent\..*\.units": 16, r"agent\..*\.bins": 21}
    others = flags(**parts, **{"agent.policy.unimix": unimix})
    return load_config([*sizes, *others], {}).agent


# Options that save most of the compiler's time on the CPU.
QUICK: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # Later versions may refuse it as unknown.
    QUICK["xla_cpu_use_fusion_emitters"] = False


def quick_jit(function, **options):
    """Compiles without optimisation, which takes a quarter of the time."""

    def call(*args, **kwargs):  # Hashable, unlike modules, as `jit` requires.
        return function(*args, **kwargs)

    return jax.jit(call, compiler_options=QUICK, **options)


def compute(function, *inputs):
    """Returns NumPy arrays, compiling one program instead of one per operation."""
    return jax.device_get(quick_jit(function)(*inputs))


@functools.cache
def make_state(*argv: str, action=None, **options) -> model.State:
    """An agent with random weights, of which none are zeros or ones.

    It has the actions of ACT_SPACE, or a single one of a given space.
    """
    config = agent_config(*argv)
    spaces = (OBS_SPACE, {"action": action} if action else ACT_SPACE)
    state = jax.eval_shape(
        lambda key: model.init(key, *spaces, config, **options),
        jax.random.key(0),
    )
    return fill(state)


def fill(tree):
    """Fills a tree of shapes: weights with random values, other arrays with zeros.

    Uses NumPy, since compiling `init` for every variant takes long. `jnp.asarray`
    would too, because it compiles a program for every shape.
    """
    rng = np.random.default_rng(0)
    values = {}
    for name, leaf in flat_params(tree).items():
        value = np.zeros(leaf.shape, leaf.dtype)
        kind = name.rpartition("/")[2]
        if kind in ("kernel", "bias", "scale", "shift") and not name.startswith("opt/"):
            fan = np.prod(leaf.shape[:-1]) if kind == "kernel" else 100
            value = rng.normal(size=leaf.shape) / np.sqrt(fan) + (kind == "scale")
            value = value.astype(leaf.dtype)
        values[name] = value
    leaves = jax.device_put([values[name] for name in flat_params(tree)])
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


@functools.cache
def golden_state(tuning: model.Tuning = model.CPU) -> model.State:
    """An agent with the weights of the golden arrays."""
    state = jax.eval_shape(
        lambda key: model.init(
            *(key, GOLDEN_OBS_SPACE, GOLDEN_ACT_SPACE, golden_config()), tuning=tuning
        ),
        jax.random.key(0),
    )
    arrays = golden("modules")
    weights = {key[6:]: arrays[key] for key in arrays if key.startswith("param:")}
    return with_flat_params(fill(state), jax.device_put(weights))


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: file[key] for key in file}


def golden_inputs() -> dict[str, jax.Array]:
    arrays = golden("modules")
    return jax.device_put({k[3:]: arrays[k] for k in arrays if k.startswith("in:")})


def assert_golden(value, name: str) -> None:
    expected = golden("modules")[f"out:{name}"]
    np.testing.assert_allclose(value, expected, **TOLERANCE, err_msg=name)


def make_batch(seed: int = 0, context: int = CONTEXT, batch=BATCH, length=LENGTH):
    """A batch as the replay's stream gives it."""
    rng = np.random.default_rng(seed)
    lead = (batch, context + length)
    cell = make_state().model.dyn.cell
    data = {
        "vector": rng.normal(size=(*lead, 3)).astype(np.float32),
        "token": rng.integers(0, 4, lead).astype(np.int32),
        "force": rng.normal(size=(*lead, 2)).astype(np.float32),
        "move": rng.integers(0, 3, lead).astype(np.int32),
        "reward": rng.normal(size=lead).astype(np.float32),
        "is_first": np.zeros(lead, bool),
        "is_last": rng.random(lead) < 0.2,
        "is_terminal": rng.random(lead) < 0.2,
        "consec": np.zeros(lead, np.int32),
        "stepid": rng.integers(0, 256, (*lead, 20)).astype(np.uint8),
    }
    data["is_first"][:, 0] = True
    if context:
        data["dyn/deter"] = rng.normal(size=(batch, context, cell.deter)).astype("f4")
        shape = (batch, context, cell.stoch)
        data["dyn/stoch"] = rng.integers(0, cell.classes, shape).astype(np.uint8)
    return jax.device_put(data)


@functools.cache
def train_step():
    """One compiled training step, for batches with and without context."""
    return quick_jit(training.train_step)


def arrays(tree) -> dict[str, np.ndarray]:
    """NumPy arrays by flat name, since comparing these needs no compilation."""
    return {name: np.asarray(leaf) for name, leaf in flat_params(tree).items()}


def differing(first, second) -> set[str]:
    """Flat names of the arrays that are not the same in both trees."""
    first, second = arrays(first), arrays(second)
    return {name for name in first if np.any(first[name] != second[name])}


def module_of(name: str) -> str:
    return name.split("/")[0]
