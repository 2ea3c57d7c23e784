"""Runs a command on a Ray cluster of three nodes on this machine, which ends with it.

    python examples/cluster/three_nodes.py dreamerv3 --script ray \\
        --ray.head_resources head=1 --configs demo --logdir logdir/cluster

This shows on one machine what happens on several: kill one of the raylet processes, and
watch the run go on. The second and the third node can run the head.
"""

import os
import secrets
import signal
import subprocess
import sys

# Read by Ray when it is imported. The cluster has a token of its own, and listens at
# the loopback address alone.
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

from ray.cluster_utils import Cluster

CORES = 32  # Declared by two nodes each; in fact, all share those of this machine.


def main(command):
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    cluster = Cluster()
    try:
        for resources in ({}, {"head": 1}, {"head": 1}):
            cluster.add_node(
                node_ip_address="127.0.0.1",
                num_cpus=CORES if resources else 0,
                resources=resources,
            )
        print(f"Three nodes at {cluster.address}: {cluster.webui_url}", flush=True)
        program = subprocess.Popen(
            command, env={**os.environ, "RAY_ADDRESS": cluster.address}
        )
        # The command decides what a signal means, and this program ends with it.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: program.terminate())
        return program.wait()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
