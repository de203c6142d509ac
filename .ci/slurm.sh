# Sourced after .ci/docker.sh: makes sure that the Slurm cluster of slurm/cluster runs. Its images are built with the pip
# settings and certificates of this host, which `invoke build` gives to a build, too.
if [ -x .venv/bin/python ]; then
    .venv/bin/python -c '
import os, subprocess, sys
from launch import images
with images._secrets() as secrets:
    flags = " ".join(f"--secret={secret}" for secret in secrets)
    sys.exit(subprocess.call(["slurm/cluster/cluster", "up"], env={**os.environ, "BUILD_FLAGS": flags}))
'
else
    slurm/cluster/cluster up
fi
