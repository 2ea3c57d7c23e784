#!/bin/bash
# A run on the nodes of a Slurm job: sbatch examples/cluster/slurm.sh
# All nodes need this environment, activated, and the folder /shared.
#SBATCH --job-name=dreamerv3
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:TERM@300
set -eu
export RAY_AUTH_MODE=token  # Of the file in the home folder, which the nodes share.
ray get-auth-token --generate > /dev/null
export RAY_ADDRESS="$(hostname --ip-address | cut -d ' ' -f 1):6379"

srun --overlap --nodes 1 --ntasks 1 --nodelist "$SLURMD_NODENAME" \
    ray start --head --port 6379 --block &
until ray status > /dev/null 2>&1; do sleep 2; done
srun --overlap --nodes $((SLURM_NNODES - 1)) --ntasks $((SLURM_NNODES - 1)) \
    --exclude "$SLURMD_NODENAME" ray start --address "$RAY_ADDRESS" --block &

dreamerv3 --script ray --configs atari size50m --task atari_pong --run.envs 64 --logdir /shared/pong &
driver=$!
trap 'kill -TERM $driver' TERM  # Before the time is over: save and leave.
wait $driver || wait $driver
