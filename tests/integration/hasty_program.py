"""The command line, where waits of fixed length are short.

In the launching process and in that of the agent; others wait as ever.
"""

import sys

from dreamerv3 import main
from dreamerv3.cli import scripts
from embodied.rpc import server
from embodied.run.parallel import agent, owners, wiring

made = scripts.make_agent


def hasten():
    wiring.FIRST_NOTE = 0.5  # Until it is said who waits for whom.
    owners.NOTE_SECONDS = 3.0  # Until it is said who is away,
    server.CLIENT_TIMEOUT = 2.0  # which is who was silent for so long.
    agent.GRACE = 3.0  # For roles that do not answer to SIGTERM.


def make_agent(*args):
    hasten()
    return made(*args)


scripts.make_agent = make_agent
hasten()
sys.exit(main.main(sys.argv[1:]))
