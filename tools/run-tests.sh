#!/bin/bash
# Run the tests in the two environments, one after the other. Usage: run-tests.sh fast|full
# Everything outside tests/vllm runs in .venv/gateway, tests/vllm in .venv/vllm. Both always run; the status is
# non-zero if any test failed or an environment had no test at all.
set -uo pipefail
cd "$(dirname "$0")/.."

marks=()
case ${1:-} in
    fast) marks=(-m "not slow") ;;
    full) ;;
    *) echo "usage: $0 fast|full" >&2; exit 2 ;;
esac
read -ra more <<<"${PYTEST_ARGS:-}"

status=0
echo "== gateway environment"
.venv/gateway/bin/python -m pytest tests --ignore=tests/vllm "${marks[@]}" "${more[@]}" || status=1
echo "== vllm environment"
.venv/vllm/bin/python -m pytest tests/vllm "${marks[@]}" "${more[@]}" || status=1

if [ "$status" -eq 0 ]; then
    echo "== all passed in both environments"
else
    echo "== something failed: see the pytest summaries above" >&2
fi
exit "$status"
