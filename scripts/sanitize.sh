#!/usr/bin/env bash
# The fused kernel's small cases under compute-sanitizer; exits with its verdict.
#
#   scripts/sanitize.sh [memcheck|racecheck|synccheck|initcheck] [pytest arguments]
#
# Only the fused kernel is instrumented. Kernels that the cache lacks are compiled first.
set -euo pipefail
cd "$(dirname "$0")/.."
tool=${1:-memcheck}
shift || true
python=${PYTHON:-python3}
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
command -v "$sanitizer" >/dev/null || { echo "compute-sanitizer: wanted on PATH or in COMPUTE_SANITIZER, found none" >&2; exit 2; }

[ $# -gt 0 ] || set -- tests/gpu/test_mega_small.py
exec "$sanitizer" --tool "$tool" --error-exitcode 9 --kernel-regex kernel_substring=mega --print-limit 20 \
    "$python" -m pytest -q -p no:cacheprovider "$@"
