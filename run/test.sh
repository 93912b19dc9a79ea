#!/usr/bin/env bash
# Run the tests, four at a time: many of them wait for something. Flags go to pytest: run/test.sh -k parity
# Tests of several nodes need root and some Debian packages; where these are missing, they are skipped and say so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run/setup.sh
where=(tests)
for word in "$@"; do
    [[ $word != tests/* ]] || where=() # given: a file, or a test in it
done
exec .venv/bin/python -m pytest "${where[@]}" -n 4 --dist worksteal "$@"
