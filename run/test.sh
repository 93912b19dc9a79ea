#!/usr/bin/env bash
# Runs the tests, four at a time, because many of them wait. Flags are passed to pytest:
#   run/test.sh -k parity
# The tests of several nodes need root and some Debian packages. Without these they are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run/setup.sh tests/requirements.txt
where=(tests)
for word in "$@"; do
    [[ $word != tests/* ]] || where=() # a file of tests was given, or a test in it
done
exec .venv/bin/python -m pytest "${where[@]}" -n 4 --dist worksteal "$@"
