#!/usr/bin/env bash
# The fused kernel's small cases under compute-sanitizer; exits with its verdict.
#
#   scripts/sanitize.sh [memcheck|racecheck|synccheck|initcheck] [pytest arguments]
#
# The cases run once without the tool, which compiles their kernels, then under it. Only the fused kernel is instrumented,
# and its waits and the tests get limits that suit a kernel many times slower. SANITIZE_LIMIT_S bounds the instrumented run.
set -uo pipefail
cd "$(dirname "$0")/.."
tool=${1:-memcheck}
shift || true
python=${PYTHON:-python3}
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
limit=${SANITIZE_LIMIT_S:-600}
command -v "$sanitizer" >/dev/null || { echo "compute-sanitizer: wanted on PATH or in COMPUTE_SANITIZER, found none" >&2; exit 2; }

[ $# -gt 0 ] || set -- tests/gpu/test_mega_small.py
pytest=("$python" -m pytest -q -x -p no:cacheprovider --timeout-method=signal --timeout=$((limit / 2)) "$@")
export DGK3_TIMEOUT_S=$((limit / 4 + 1))
# Loading all of torch's kernels under the tool takes longer than the tests.
export CUDA_MODULE_LOADING=LAZY

echo "== without the tool"
"${pytest[@]}" || { echo "$tool: not run, the cases fail without it"; exit 1; }
echo "== $tool"
timeout -s INT -k 10 "$limit" "$sanitizer" --tool "$tool" --error-exitcode 9 --kernel-name kernel_substring=mega \
    --print-limit 20 "${pytest[@]}"
code=$?
case $code in
0) echo "$tool: clean" ;;
9) echo "$tool: errors, above" ;;
124 | 137) echo "$tool: no verdict within $limit s" ;;
*) echo "$tool: no verdict, exit code $code" ;;
esac
exit $code
