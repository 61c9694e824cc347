#!/usr/bin/env bash
# Trains on every host of a Cloud TPU slice. Run it where gcloud is set up:
#
#   TPU_NAME=pod ZONE=us-east5-a launch/tpu_slice.sh --config=configs/vit.py:l16 --workdir=DIR [...]
#
# Every host has the same checkout with its .venv in ~/vit_jax (make .venv/installed, then
# .venv/bin/pip install -e '.[tpu]'). DIR and the data are on a file system that all hosts mount, for
# example Filestore. The hosts find each other without an address. The same command again continues.
set -euo pipefail
: "${TPU_NAME:?name of the TPU slice}" "${ZONE:?its zone}"
[[ $# -gt 0 ]] || { echo "usage: TPU_NAME=... ZONE=... $0 --config=... --workdir=..." >&2; exit 2; }

# exec, so that the signal of a preemption reaches Python; quoted, because a remote shell reads it.
gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" --worker=all \
  --command="cd ~/vit_jax && exec .venv/bin/python -m vit_jax.main $(printf '%q ' "$@")"
