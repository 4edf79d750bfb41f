#!/bin/bash
# `holdfast run` under Slurm: one launcher per node, which reads the rest from srun's variables.
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
set -euo pipefail

# The launcher on the first node serves the coordinator. For a job that outlives any of its nodes,
# give all of them an etcd: --coordinator etcd://HOST:2379.
srun --kill-on-bad-exit=0 holdfast run --nproc 8 train.py
