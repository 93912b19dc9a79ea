#!/usr/bin/env bash
# Makes the web pages of the course in site/, and opens them in a browser:
#   run/pages.sh
#   run/pages.sh FOLDER    # makes them there, and opens nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run/setup.sh .github/pages/requirements.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=${1:-site}
.venv/bin/python .github/pages/pages.py "$work/pages"
.venv/bin/python -m sphinx -q -W --keep-going -j 2 -c .github/pages -d "$work/trees" \
    -D html_extra_path="$work/pages/extra" "$work/pages" "$site"
(cd "$work/pages" && find . -name '*.md' -print0 | tar --null -T - -cf -) | tar -C "$site" -xf -
echo "$site/index.html"
if [ $# = 0 ]; then
    .venv/bin/python -m webbrowser "file://$PWD/site/index.html" >/dev/null
fi
