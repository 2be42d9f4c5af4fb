#!/bin/sh
# Find a Python, then build the environments named on the command line with it.
set -eu
here=$(dirname "$0")
python=$("$here/find-python.sh")
exec "$python" "$here/setup_env.py" "$@"
