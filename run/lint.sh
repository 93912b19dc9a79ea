#!/usr/bin/env bash
# Checks without running the lessons: Python's style, the pages, the shell scripts and the workflow
# of CI.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run/lint.sh, where sh is dash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run/setup.sh tests/all.txt
if ! command -v shellcheck >/dev/null; then
    echo "error: shellcheck is missing: sudo apt-get install shellcheck" >&2
    exit 1
fi
scripts=$(grep -l '^#!.*bash' .ci/run run/*)
set -x
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
.venv/bin/python tests/develop/lint_pages.py
.venv/bin/python -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*
# SC2016: some scripts hold commands for another shell, in single quotes.
# shellcheck disable=SC2086 # a word for each script; their names have no spaces
shellcheck --exclude SC2016 $scripts
