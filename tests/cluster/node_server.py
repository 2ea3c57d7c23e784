"""Nodes of a Ray cluster on this machine, which a test adds and kills by lines.

    add {"num_cpus": 2, "resources": {"head": 1}}
    kill 1

Each is answered by a line. A program of its own, so that Ray stays out of the process
of the tests and everything ends with the end of its input.
"""

import functools
import json
import sys
import time

from ray._private import services
from ray.cluster_utils import Cluster

START_SECONDS = 150.0  # Ray itself gives a node 30, which a busy machine may need.


def main():
    services.get_node = functools.partial(get_node, services.get_node)
    cluster, nodes = Cluster(), []
    try:
        for line in sys.stdin:
            word, _, rest = line.partition(" ")
            if word == "add":
                options = {"node_ip_address": "127.0.0.1", "include_dashboard": False}
                nodes.append(cluster.add_node(**{**options, **json.loads(rest)}))
                answer = {
                    "address": cluster.address,
                    "dashboard": cluster.webui_url,
                    "raylet": raylet(nodes[-1]),
                }
            else:
                cluster.remove_node(nodes[int(rest)], allow_graceful=False)
                answer = {}
            print(f"ANSWER {json.dumps(answer)}", flush=True)
    finally:
        cluster.shutdown()


def get_node(ask, *arguments):
    """Asks for a node that is starting until it is there."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return ask(*arguments)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def raylet(node):
    (info,) = node.all_processes["raylet"]
    return info.process.pid


if __name__ == "__main__":
    main()
