"""The connection of a driver to Ray, and the nodes that it finds there. Driver."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import elements

from dreamerv3.cli.config import ConfigError
from dreamerv3.cluster.bundles import (
    EnvBundle,
    Resources,
    check_room,
    fits,
    head_resources,
    show_resources,
)
from dreamerv3.cluster.run_keys import RunKeys, digest
from embodied.envs.registry import PACKAGE

ADDRESS = "RAY_ADDRESS"
PROBE_SECONDS = 60.0  # For a node to report whether it sees the key file.
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for programs that were submitted.
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
STOP_WAIT_DEFAULT = 3.0  # Seconds.
DEFAULTS = {
    # Shows all lines, also those that differ in numbers alone, such as progress lines.
    "RAY_DEDUP_LOGS": "0",
    # Sends no usage statistics.
    "RAY_USAGE_STATS_ENABLED": "0",
}
# For a Ray that is started here, where anybody who reaches its ports could run code.
LOCAL_DEFAULTS = {
    "RAY_AUTH_MODE": "token",
    # Despite its name, this keeps Ray at the loopback address on all systems.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

log = logging.getLogger("embodied.cluster")


@contextlib.contextmanager
def connect(config: elements.Config, bundles: list[EnvBundle]) -> Iterator[Any]:
    """Connects to a cluster, or starts Ray on this machine, until the body ends.

    Args:
      config: of the run.
      bundles: env bundles, for which a Ray that is started here makes room.

    Yields:
      The module `ray`.

    Raises:
      ConfigError: Ray is missing or cannot be reached.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "script: expected Ray for --script ray, which is not installed: pip "
            f"install '{PACKAGE}[ray]'."
        )
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    address = config.ray.address or os.environ.get(ADDRESS, "")
    if "://" in address:
        raise ConfigError(
            f"ray.address: expected auto, or HOST:PORT of a cluster that this machine "
            f"belongs to, got {address!r}. From elsewhere: `ray job submit -- "
            "dreamerv3 --script ray ...`."
        )
    if not address:
        for name, value in LOCAL_DEFAULTS.items():
            os.environ.setdefault(name, value)
    import ray  # After the settings above, which Ray reads on import.

    options: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.WARNING}
    if address:
        options["address"] = address
    else:
        options |= {"address": "local", "include_dashboard": config.ray.dashboard}
        options |= local_room(config, bundles)
    sys.stdout.flush()
    try:
        context = ray.init(**options)
    except Exception as error:  # Ray has no type of its own for what can go wrong.
        where = f"at {address}" if address else "on this machine"
        raise ConfigError(
            f"ray.address: expected a Ray cluster {where}, got "
            f"{type(error).__name__}: {error}"
        ) from error
    try:
        _tell_connected(ray, context, bool(address))
        yield ray
    finally:
        ray.shutdown()


def with_absolute_paths(config: elements.Config) -> elements.Config:
    """Returns the configuration with absolute paths, which all nodes can use."""
    keys = [
        "logdir",
        *(key for key in ("run.keyfile", "run.from_checkpoint") if config.flat[key]),
    ]
    return config.update(
        {key: os.path.abspath(os.path.expanduser(config.flat[key])) for key in keys}
    )


def local_room(config: elements.Config, bundles: list[EnvBundle]) -> dict[str, Any]:
    """Returns options for a Ray on this machine that has room for the whole run.

    Ray counts cores but reserves none, so more may be declared than exist: as with
    --script parallel, the run shares what the machine has. Accelerators are those that
    Ray finds.
    """
    total: Resources = {"CPU": float(len(os.sched_getaffinity(0)))}
    needs = [head_resources(config, {}), *(bundle.resources for bundle in bundles)]
    for name in {name for need in needs for name in need} - {"GPU", "TPU"}:
        amount = sum(need.get(name, 0.0) for need in needs)
        total[name] = max(total.get(name, 0.0), amount)
    cpus = int(-(-total.pop("CPU") // 1))
    return {"num_cpus": cpus, "resources": total}


def find_nodes(ray: Any) -> dict[str, dict[str, Any]]:
    """Returns the nodes that are alive, by id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def check_nodes(
    ray: Any, config: elements.Config, keys: RunKeys, needed: Resources
) -> None:
    """Checks whether a lost head could go on elsewhere, and warns if it could not.

    Args:
      ray: the module.
      config: of the run.
      keys: of the run, whose file shows which nodes have the same logdir.
      needed: resources of the head.

    Raises:
      ConfigError: nodes that could take over from one another have different logdirs,
        or replicas are to train on this machine alone.
    """
    nodes = find_nodes(ray)
    if len(nodes) == 1 and not (config.ray.address or os.environ.get(ADDRESS)):
        if config.replicas > 1:
            raise ConfigError(
                "replicas: expected 1, or a cluster with a node for each, got "
                f"{config.replicas} and one machine. Name the cluster: --ray.address "
                "HOST:PORT. Several accelerators of one machine: --jax.train_devices."
            )
        check_room(needed, [node["Resources"] for node in nodes.values()])
        return
    able = [x for x, node in nodes.items() if fits(needed, node["Resources"])]
    seeing = _nodes_that_see(ray, keys, list(nodes)) if len(nodes) > 1 else set(nodes)
    blind = [_name(nodes[node]) for node in able if node not in seeing]
    if blind and len(able) > 1:
        raise ConfigError(
            f"logdir: expected a folder that all nodes share which can run the head, "
            f"got {config.logdir}, which {', '.join(blind)} "
            f"{'does' if len(blind) == 1 else 'do'} not see. A head that is lost could "
            "not go on there. Use a shared folder, or let --ray.head_resources name "
            "what only one node has."
        )
    shown = show_resources(needed)
    if len(able) < config.replicas:
        log.warning(
            "Nodes that can hold %s: %d of %d needed. The run waits for more nodes.",
            *(shown, len(able), config.replicas),
        )
    elif blind:
        log.warning(
            "The logdir is a folder of %s alone, the one node with %s. If that node is "
            "lost, so are its checkpoints.",
            *(blind[0], shown),
        )
    elif len(able) == config.replicas:
        names = ", ".join(_name(nodes[node]) for node in able)
        log.info(
            "Only %s can hold %s: if one is lost, the run waits for another.",
            *(names, shown),
        )


def check_job_stop(seconds: float) -> None:
    """Warns if `ray job stop` would kill this driver before the run is saved.

    Args:
      seconds: how long a save may take without progress.
    """
    wait = float(os.environ.get(STOP_WAIT, STOP_WAIT_DEFAULT))
    if JOB in os.environ and wait < seconds:
        log.warning(
            "`ray job stop` kills this run after %g s, saved or not. Submit it with "
            '--runtime-env-json \'{"env_vars": {"%s": "300"}}\'.',
            *(wait, STOP_WAIT),
        )


def _nodes_that_see(ray: Any, keys: RunKeys, nodes: list[str]) -> set[str]:
    """Returns the nodes that see the driver's key file."""
    pin = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    probe = ray.remote(num_cpus=0)(digest)
    asked = {
        probe.options(scheduling_strategy=pin(node, soft=False)).remote(keys.path): node
        for node in nodes
    }
    ready, late = ray.wait(
        list(asked), num_returns=len(asked), timeout=PROBE_SECONDS, fetch_local=True
    )
    if late:
        names = ", ".join(asked[ref][:8] for ref in late)
        log.warning("Nodes %s did not report whether they see the logdir.", names)
    found = set()
    for ref in ready:
        with contextlib.suppress(ray.exceptions.RayError):  # The node is lost by now.
            if ray.get(ref) == keys.digest:
                found.add(asked[ref])
    return found


def _name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _tell_connected(ray: Any, context: Any, joined: bool) -> None:
    nodes = find_nodes(ray).values()
    total = show_resources(ray.cluster_resources())
    did = "Connected to Ray at" if joined else "Started Ray on this machine at"
    at = ray.get_runtime_context().gcs_address
    count = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
    log.info("%s %s: %s with %s.", did, at, count, total)
    if context.dashboard_url:
        log.info("Dashboard: http://%s", context.dashboard_url)
