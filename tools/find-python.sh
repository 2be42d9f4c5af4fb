#!/bin/sh
# Print the first Python 3.11 or 3.12 that runs and can make virtual environments.
# $PYTHON, when set, is the only candidate. A command that exists need not run (version managers install
# stand-ins that only print an error), so each candidate is tried.
set -eu

candidates=${PYTHON:-python3.11 python3.12 python3 /usr/bin/python3.11 /usr/bin/python3.12}
tried=
without_venv=
for candidate in $candidates; do
    found=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null) || continue
    version=${found%% *}
    case $version in
        3.11 | 3.12) ;;
        *) tried="$tried $candidate($version)"; continue ;;
    esac
    if ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
        without_venv=${without_venv:-$version}
        continue
    fi
    echo "${found#* }"
    exit 0
done

{
    if [ -n "$without_venv" ]; then
        echo "kvgate: Python $without_venv is here, but its venv or ensurepip module is not."
        echo "        On Debian: apt-get install python$without_venv-venv"
    else
        echo "kvgate: no Python 3.11 or 3.12 that runs. Looked for: $candidates."
        [ -z "$tried" ] || echo "        Found, but not supported:$tried"
        echo "        Install one (Debian: apt-get install python3.11 python3.11-venv) or name one: make PYTHON=/path/to/python3.11"
    fi
} >&2
exit 1
