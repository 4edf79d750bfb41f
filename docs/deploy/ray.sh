#!/bin/bash
# `holdfast ray submit` on a machine of a Ray cluster: begins with two nodes, grows to four.
set -euo pipefail

holdfast ray submit --nodes 2:4 --nproc 8 --cpus 16 --gpus 8 train.py
