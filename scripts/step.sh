#!/usr/bin/env bash
# step.sh LABEL COMMAND...: runs a step quietly, says what runs once it takes longer than two seconds and again every
# ten, and prints the whole output when it fails.
set -uo pipefail
label=$1
shift
log=$(mktemp)
start=$SECONDS
"$@" >"$log" 2>&1 &
pid=$!
trap 'kill "$pid" 2>/dev/null; rm -f "$log"; exit 130' INT TERM
next=2
while kill -0 "$pid" 2>/dev/null; do
    sleep 0.1
    if ((SECONDS - start >= next)); then
        echo "... $label ($((SECONDS - start)) s)"
        next=$((next < 10 ? 10 : next + 10))
    fi
done
wait "$pid"
rc=$?
took=$((SECONDS - start))
if ((rc != 0)); then
    cat "$log"
    echo "FAILED: $label (after $took s)"
elif ((took >= 2)); then
    echo "done: $label ($took s)"
fi
rm -f "$log"
exit "$rc"
