"""Adds and kills nodes of a Ray cluster on this machine, by lines on its input.

    add {"num_cpus": 2, "resources": {"head": 1}}
    kill 1

Each line is answered by a line. This is a program of its own, so that Ray stays out of
the process of the tests, and all nodes end when its input ends.
"""

import json
import sys

from ray.cluster_utils import Cluster

ATTEMPTS = 4  # A node gives up if its helpers start slowly, as on a busy machine.


def main():
    cluster, nodes = Cluster(), []
    try:
        for line in sys.stdin:
            word, _, rest = line.partition(" ")
            if word == "add":
                options = {"node_ip_address": "127.0.0.1", "include_dashboard": False}
                nodes.append(add_node(cluster, {**options, **json.loads(rest)}))
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


def add_node(cluster, options, attempts=ATTEMPTS):
    try:
        return cluster.add_node(**options)
    except Exception:  # Ray has no exception type for this.
        if attempts == 1:
            raise
    return add_node(cluster, options, attempts - 1)


def raylet(node):
    (info,) = node.all_processes["raylet"]
    return info.process.pid


if __name__ == "__main__":
    main()
