#!/bin/bash
# torchrun under Slurm with a sidecar per node: processes restart, memory stays.
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=B:TERM@60
set -euo pipefail

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD

# The key file in the home directory (~/.config/holdfast/key.json) is made by the first that
# needs it and read by all. --host auto: nodes reach each other's sidecars.
srun --kill-on-bad-exit=0 bash -c '
  eval "$(holdfast sidecar start --host auto)"
  trap "holdfast sidecar stop --host auto" EXIT
  torchrun --nnodes=3:4 --nproc-per-node=8 \
    --rdzv-backend=holdfast --rdzv-endpoint=$HEAD:29400 --rdzv-id=$SLURM_JOB_ID \
    --max-restarts=100 train.py
'
