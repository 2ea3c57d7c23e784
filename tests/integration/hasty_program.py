"""The command line with shorter fixed waits.

They are shorter in the launcher and in the agent process, and unchanged in others.
"""

import sys

from dreamerv3 import main
from dreamerv3.cli import scripts
from embodied.rpc import server
from embodied.run.parallel import agent, owners, wiring

made = scripts.make_agent


def hasten():
    wiring.FIRST_NOTE = 0.5  # Until a role logs which role it waits for.
    owners.NOTE_SECONDS = 3.0  # Until an absence is reported.
    server.CLIENT_TIMEOUT = 2.0  # Of silence, until a client counts as gone.
    agent.GRACE = 3.0  # For roles that do not end on SIGTERM.


def make_agent(*args):
    hasten()
    return made(*args)


scripts.make_agent = make_agent
hasten()
sys.exit(main.main(sys.argv[1:]))
