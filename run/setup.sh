#!/usr/bin/env bash
# Makes .venv in the checkout and installs requirements.txt into it, unless this has been done.
# Other files of requirements can be named: run/setup.sh tests/requirements.txt
# It uses the first Python on PATH that is new enough. PYTHON selects another one:
#   PYTHON=/path/to/python3.12 run/quickstart.sh
# TORCH_INDEX_URL selects where PyTorch comes from, such as the index of the CPU builds:
#   TORCH_INDEX_URL=... run/quickstart.sh
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run/setup.sh, where sh is dash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

missing=()
for file in requirements.txt "$@"; do
    # What has been installed is copied into .venv, so a changed file is installed again.
    cmp -s "$file" ".venv/installed/$file" || missing+=("$file")
done
if [ ${#missing[@]} = 0 ]; then
    exit 0
fi
pythons=(python3 python3.11 python3.12 python3.13 python3.14)
[ -z "${PYTHON:-}" ] || pythons=("$PYTHON") # its path may have spaces
for python in "${pythons[@]}"; do
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
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Shows one line for each package that pip downloads. If it fails, all that it has printed is shown,
# and the reason in the last line.
run() {
    if ! "$@" 2>"$folder/errors" | tee "$folder/log" | sed -nEu "$packages" >&2; then
        cat "$folder/log" "$folder/errors" >&2
        why=$(grep -i '^error' "$folder/errors" | head -n 1 || true)
        why=${why:-$(tail -n 1 "$folder/errors")}
        echo "error: the installation failed ($why): correct the cause and run this again" >&2
        exit 1
    fi
}
packages='s/^ *(Downloading|Using cached) ([^ ]*\/)?([^-/ ]*)-([^-]*)-[^ ]*\.whl (\(.*\))$/    \3 \4 \5/p
s/^Installing collected packages.*/    ... and now they are unpacked/p'

install() {
    run .venv/bin/python -m pip install --disable-pip-version-check "$@"
}

run "$python" -m venv .venv
for file in "${missing[@]}"; do
    if [ "$file" = requirements.txt ]; then
        what="PyTorch and what the lessons need"
        if [ -n "${TORCH_INDEX_URL:-}" ]; then
            echo "Installing $what into $PWD/.venv, once. PyTorch comes from $TORCH_INDEX_URL." >&2
            grep '^torch' requirements.txt >"$folder/torch.txt"
            install -r "$folder/torch.txt" --index-url "$TORCH_INDEX_URL"
        else
            echo "Installing $what into $PWD/.venv, once. On Linux this takes about 6 GB of disk," >&2
            echo "most of it for CUDA." >&2
            command -v nvidia-smi >/dev/null ||
                echo "No NVIDIA GPU was found: installing.md has how to get a small build for CPUs." >&2
        fi
    else
        echo "Installing $file into $PWD/.venv, once." >&2
    fi
    install -r "$file"
    mkdir -p "$(dirname ".venv/installed/$file")"
    cp "$file" ".venv/installed/$file"
done
