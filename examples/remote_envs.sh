#!/bin/sh
# Environments in a second program, as on another machine: agent, replay and logger run
# in one, and two env hosts join it. Everything is on loopback here; on real machines,
# replace the host in the addresses and copy the key file (mode 0600) to each of them.
#
#   examples/remote_envs.sh LOGDIR [flags for all programs]
set -eu
logdir=${1:?"usage: $0 LOGDIR [flags]"}
shift
python=${PYTHON:-python}
mkdir -p "$logdir"

keys=$logdir/run.keys
[ -e "$keys" ] || "$python" -c "
import sys
from embodied.rpc import Keys
Keys.generate().save(sys.argv[1])" "$keys"
set -- --run.keyfile "$keys" --run.eval_envs 0 "$@"
for role in actor replay logger; do
    port=$("$python" -c "from embodied.rpc import free_port; print(free_port())")
    set -- "--run.${role}_addr" "localhost:$port" "$@"
done

"$python" -m dreamerv3.main --script parallel_envs --logdir "$logdir/envs-0" \
    "$@" --run.envs 2 --run.env_offset 0 &
first=$!
"$python" -m dreamerv3.main --script parallel_envs --logdir "$logdir/envs-1" \
    "$@" --run.envs 2 --run.env_offset 2 &
second=$!
trap 'kill $first $second 2>/dev/null || true' EXIT

"$python" -m dreamerv3.main --script parallel --logdir "$logdir/run" "$@" \
    --run.remote_envs True --run.envs 4
wait $first $second # They end with the run.
echo "Both env hosts have ended with the run."
