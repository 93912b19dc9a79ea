#!/usr/bin/env bash
# Runs tests, four at a time, because many of them wait:
#   run/test.sh                # the quick ones, in a few minutes
#   run/test.sh --all          # all of them; installs what these need
#   run/test.sh -k parity      # flags are passed to pytest, which then selects from all tests
# The tests of several nodes need root and some Debian packages. Without these they are skipped.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run/test.sh, where sh is dash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ $# = 0 ]; then
    run/setup.sh tests/requirements.txt
    # shellcheck disable=SC2046 # a word for each file; the others would import more than is there
    set -- -m quick $(grep -l pytest.mark.quick tests/test_*.py)
else
    run/setup.sh tests/all.txt .github/pages/requirements.txt
    [ "$1" != --all ] || shift
    case "$*" in
        *tests/* | *.github/*) ;; # a file of tests was given, or a test in it
        *) set -- .github/pages tests "$@" ;; # the longest first
    esac
fi
exec .venv/bin/python -m pytest -n 4 --dist worksteal "$@"
