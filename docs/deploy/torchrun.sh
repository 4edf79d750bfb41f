#!/bin/bash
# torchrun on machines that you start by hand, with a sidecar beside it: run this on each of them.
#   HEAD=first-machine bash torchrun.sh
# The key file (~/.config/holdfast/key.json) must be the same on all: a shared home, or a copy.
set -euo pipefail

eval "$(holdfast sidecar start --run train --host auto)"
trap "holdfast sidecar stop --run train" EXIT
torchrun --nnodes=2:4 --nproc-per-node=8 \
  --rdzv-backend=holdfast --rdzv-endpoint=$HEAD:29400 --rdzv-id=train \
  --max-restarts=100 train.py
