#!/usr/bin/env bash
# Make .venv in the checkout and install requirements.txt into it, unless that has been done already.
# Another Python than the first fitting one on PATH: PYTHON=/path/to/python3.12 run/quickstart.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if cmp -s requirements.txt .venv/installed.txt; then
    exit 0
fi
for python in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        break
    fi
    python=
done
if [ -z "$python" ]; then
    echo "error: no Python 3.11 or newer found: install one, or name it: PYTHON=/path/to/python3.12 $0" >&2
    exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "Installing into $PWD/.venv, about 6 GB, which takes a few minutes once." >&2
if ! { "$python" -m venv .venv && .venv/bin/python -m pip install -q --disable-pip-version-check -r requirements.txt; } \
    >"$log" 2>&1; then
    why=$(grep -i '^error' "$log" | head -n 1 || true)
    echo "error: the installation failed (${why:-$(tail -n 1 "$log")}): mend it and run this again" >&2
    exit 1
fi
cp requirements.txt .venv/installed.txt
