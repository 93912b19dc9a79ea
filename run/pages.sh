#!/usr/bin/env bash
# Makes the web pages of the course in site/, and opens them in a browser:
#   run/pages.sh
#   run/pages.sh FOLDER    # makes them there, and opens nothing
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run/pages.sh, where sh is dash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run/setup.sh .github/pages/requirements.txt
site=${1:-site}
.venv/bin/python -m sphinx -q -W --keep-going -j 2 -c .github/pages . "$site"
cp "$site/README.html" "$site/index.html" # what a server shows first
echo "$site/README.html"
if [ $# = 0 ]; then
    .venv/bin/python -m webbrowser "file://$PWD/site/README.html" >/dev/null
fi
