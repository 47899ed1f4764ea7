#!/usr/bin/env bash
# Everything that a machine with Blackwell GPUs (B200, GB200 or B300; 1 to 8 of them) can tell about this tree, in one file:
# the whole GPU suite, the producer microbenchmark, and the small cases under compute-sanitizer.
#
#   scripts/verify_b200.sh [--out FILE] [--gpus N] [--only STEP,STEP] [--list]
#
# Wants the package installed (`make setup`, or pip install -e '.[dev]'), nvidia-smi and compute-sanitizer; takes about half
# an hour. Changes no setting of the machine. On a Hopper GPU the same steps run as a rehearsal with the kernels for sm_90a.
# Send back the report file, whatever the verdict is. PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" scripts/verify_device.py "$@"
