#!/bin/bash
# The locks install and the trainer trains on every other Python of this machine, from 3.10 on.
set -euo pipefail
cd "$(dirname "$0")/.."
tried=0
for version in 3.10 3.13; do
    for python in "$(command -v "python$version" || true)" ~/.pyenv/versions/"$version".*/bin/python; do
        [ -x "$python" ] || continue
        folder=$(mktemp -d)
        "$python" -m venv "$folder/venv"
        "$folder/venv/bin/pip" install --quiet --disable-pip-version-check --dry-run --require-hashes \
            -r containers/host.lock >/dev/null
        echo "python $version: the locks resolve"
        rm -rf "$folder"
        tried=$((tried + 1))
        break
    done
done
echo "$tried other Pythons tried"
