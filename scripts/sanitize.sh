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

cases=(
    'tests/gpu/test_mega_routed.py::test_token_counts[0]'
    'tests/gpu/test_mega_routed.py::test_token_counts[9]'
    'tests/gpu/test_mega_routed.py::test_token_counts[129]'
    'tests/gpu/test_mega_routed.py::test_routings[duplicates-5]'
    'tests/gpu/test_mega_routed.py::test_widths[5-(1152, 128)]'
    'tests/gpu/test_mega_shared.py::test_dense[7-65]'
    'tests/gpu/test_mega_shared.py::test_dense[129-128]'
    'tests/gpu/test_mega_shared.py::test_published[40-100-rs-situ]'
    'tests/gpu/test_mega_shared.py::test_published[40-100-sp_rs-situ]'
    'tests/gpu/test_mega_shared.py::test_odd_widths[4-20-sp_rs-situ]'
    'tests/gpu/test_mega_ranks.py::test_equal_ranks[8-2]'
    'tests/gpu/test_mega_ranks.py::test_uneven_ranks[2-tokens0]'
)
[ $# -gt 0 ] || set -- "${cases[@]}"
exec "$sanitizer" --tool "$tool" --error-exitcode 9 --kernel-regex kernel_substring=mega --print-limit 20 \
    "$python" -m pytest -q -p no:cacheprovider "$@"
