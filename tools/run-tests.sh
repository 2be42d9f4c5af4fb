#!/bin/bash
# Run the tests in the two environments, at the same time where there are two cores. Usage: run-tests.sh fast|full
# Everything outside tests/vllm runs in .venv/gateway, tests/vllm in .venv/vllm; what the latter prints comes last. Both always run;
# the status is non-zero if any test failed or an environment had no test at all.
set -uo pipefail
cd "$(dirname "$0")/.."

marks=()
case ${1:-} in
    fast) marks=(-m "not slow") ;;
    full) ;;
    *) echo "usage: $0 fast|full" >&2; exit 2 ;;
esac
read -ra more <<<"${PYTEST_ARGS:-}"

in_gateway=(.venv/gateway/bin/python -m pytest tests --ignore=tests/vllm "${marks[@]}" "${more[@]}")
in_vllm=(.venv/vllm/bin/python -m pytest tests/vllm "${marks[@]}" "${more[@]}")

status=0
beside=
if [ "$(nproc)" -ge 2 ]; then
    output=$(mktemp)
    echo "== vllm environment: runs meanwhile, its output follows below"
    "${in_vllm[@]}" >"$output" 2>&1 &
    beside=$!
    # Neither a Ctrl-C nor a kill leaves it running.
    trap 'kill "$beside" 2>/dev/null; rm -f "$output"' EXIT
fi
echo "== gateway environment"
"${in_gateway[@]}" || status=1
echo "== vllm environment"
if [ -n "$beside" ]; then
    wait "$beside" || status=1
    cat "$output"
else
    "${in_vllm[@]}" || status=1
fi

if [ "$status" -eq 0 ]; then
    echo "== all passed in both environments"
else
    echo "== something failed: see the pytest summaries above" >&2
fi
exit "$status"
