#!/usr/bin/env bash
# Runs tests, four at a time, because many of them wait:
#   run/test.sh                # the quick ones, in a few minutes
#   run/test.sh --all          # all of them
#   run/test.sh -k parity      # flags are passed to pytest, which then selects from all tests
# The tests of several nodes need root and some Debian packages. Without these they are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run/setup.sh tests/requirements.txt .github/pages/requirements.txt
where=yes
for word in "$@"; do
    # A file of tests was given, or a test in it.
    [[ $word != tests/* && $word != .github/pages* ]] || where=
done
case ${1-} in
    "") set -- -m quick ;;
    --all) shift ;;
esac
[ -z "$where" ] || set -- tests .github/pages "$@"
exec .venv/bin/python -m pytest -n 4 --dist worksteal "$@"
