# Sourced after .ci/docker.sh: makes sure that the Slurm cluster of slurm/cluster runs.
if [ -x .venv/bin/python ]; then
    .venv/bin/python -m invoke slurm-up
else
    slurm/cluster/cluster up
fi
