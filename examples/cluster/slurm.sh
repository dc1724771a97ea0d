#!/bin/bash
# A training on several nodes of Slurm: sbatch examples/cluster/slurm.sh +profile=speed num_envs=512
#SBATCH --job-name=fasttrain
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
set -euo pipefail

export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(head --bytes=32 /dev/urandom | sha256sum | cut --delimiter=' ' --fields=1)}
port=$((20000 + SLURM_JOB_ID % 20000))  # two jobs may share a node
# This script runs on the first node, the head of the cluster.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts[0]}

ray start --head --node-ip-address="$head" --port="$port" --num-cpus="$SLURM_CPUS_PER_TASK"
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  others=$((SLURM_JOB_NUM_NODES - 1))
  srun --nodes="$others" --ntasks="$others" --exclude="$head" \
    ray start --address="$head:$port" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
  sleep "${START_S:-20}"
fi

# One core of the first node is left for the learner. A requeued job continues in the same folder.
actors=$((SLURM_JOB_NUM_NODES * SLURM_CPUS_PER_TASK - 1))
fasttrain "$@" cluster=ray cluster.address="$head:$port" cluster.actors="$actors" \
  hydra.run.dir="runs/$SLURM_JOB_NAME" on_existing=resume &
training=$!
trap 'kill -TERM "$training"' TERM  # before the time is over: only the training gets the signal, and saves everything
code=0
wait "$training" || code=$?
if [ "$code" -gt 128 ]; then  # the signal ended `wait`, not the training
  code=0
  wait "$training" || code=$?
fi
exit "$code"
