#!/usr/bin/env bash
# Makes .venv in the checkout and installs requirements.txt into it, unless this has been done.
# It uses the first Python on PATH that is new enough. PYTHON selects another one:
#   PYTHON=/path/to/python3.12 run/quickstart.sh
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
    advice="install one, or name it: PYTHON=/path/to/python3.12 $0"
    echo "error: no Python 3.11 or newer was found: $advice" >&2
    exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install_all() {
    "$python" -m venv .venv &&
        .venv/bin/python -m pip install -q --disable-pip-version-check -r requirements.txt
}
echo "Installing about 6 GB into $PWD/.venv, once. This takes a few minutes." >&2
if ! install_all >"$log" 2>&1; then
    why=$(grep -i '^error' "$log" | head -n 1 || true)
    why=${why:-$(tail -n 1 "$log")}
    echo "error: the installation failed ($why): correct the cause and run this again" >&2
    exit 1
fi
cp requirements.txt .venv/installed.txt
