#!/usr/bin/env bash
# Run the tests. Flags go to pytest: run/test.sh -k parity
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run/setup.sh
exec .venv/bin/python -m pytest tests "$@"
