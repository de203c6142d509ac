#!/bin/sh
# Writes the lock files of this folder from pyproject.toml: hashes for every Python from 3.10 on, all in agreement.
set -eu
cd "$(dirname "$0")/.."
compile() { uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --no-header \
    --no-emit-index-url pyproject.toml "$@"; }
compile --extra torch --extra host --extra dev --output-file containers/host.lock
# Only what an image with torch lacks: what tensorboardX itself needs is in NGC, and in the CPU base by torch.lock.
compile --constraint containers/host.lock --output-file containers/extras.lock --no-emit-package numpy \
    --no-emit-package filelock --no-emit-package packaging --no-emit-package protobuf
compile --constraint containers/host.lock --extra torch --output-file containers/torch.lock
# Test tools on top of the image: what the base or extras.lock already brought stays.
compile --constraint containers/host.lock --extra host --extra dev --output-file containers/test.lock \
    --no-emit-package numpy --no-emit-package filelock --no-emit-package packaging --no-emit-package protobuf \
    --no-emit-package tensorboardx --no-emit-package typing-extensions --no-emit-package tomli \
    --no-emit-package setuptools
# What runs `invoke slurm-run` on a login node: the launcher alone, nothing of the trainer.
compile --constraint containers/host.lock --extra host --output-file containers/launcher.lock \
    --no-emit-package numpy --no-emit-package filelock --no-emit-package packaging --no-emit-package protobuf \
    --no-emit-package tensorboardx --no-emit-package typing-extensions --no-emit-package tomli \
    --no-emit-package setuptools
