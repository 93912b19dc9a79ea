#!/usr/bin/env bash
# Run the tests, three at a time: most of them wait for something. Flags go to pytest: run/test.sh -k parity
# Tests of several nodes need root and some Debian packages; where these are missing, they are skipped and say so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run/setup.sh
exec .venv/bin/python -m pytest tests -n 3 --dist worksteal "$@"
