#!/bin/bash
# Style, format and types of everything that is Python here. All three run; any finding fails the whole.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=.venv/gateway/bin

# mypy refuses a folder without a Python file, so only those that have one are named.
typed=()
for folder in gateway bindings shims/vllm shims/lmcache kernels bench demo tools tests; do
    if [ -n "$(find "$folder" -name '*.py' -print -quit 2>/dev/null)" ]; then
        typed+=("$folder")
    fi
done

status=0
"$bin/ruff" check . || status=1
"$bin/ruff" format --check . || status=1
"$bin/mypy" "${typed[@]}" || status=1
exit "$status"
