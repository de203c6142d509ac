#!/bin/bash
# run golden
mkdir -p /srv/runs/golden /tmp/intermodal-1000-golden-0/home /tmp/intermodal-1000-golden-0/tmp
codes=()
(cd / && exec env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/home/someone APPTAINERENV_TRAINER_RUNS_DIR=/runs APPTAINERENV_TRAINER_DATA_DIR=/data APPTAINERENV_TRAINER_IMAGE=/srv/intermodal.sif APPTAINERENV_TRAINER_IMAGE_ID=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef APPTAINERENV_TRAINER_SIF_SHA256=89ab89ab89ab89ab89ab89ab89ab89ab89ab89ab89ab89ab89ab89ab89ab89ab APPTAINERENV_TRAINER_SHARED_HOST=1 APPTAINERENV_NCCL_DEBUG=WARN APPTAINERENV_PET_NNODES=1 APPTAINERENV_PET_NPROC_PER_NODE=1 APPTAINERENV_PET_NODE_RANK=0 APPTAINERENV_PET_MASTER_ADDR=127.0.0.1 APPTAINERENV_PET_MASTER_PORT=29500 APPTAINERENV_TRAINER_RUN_ID=golden APPTAINERENV_TRAINER_RUNTIME=singularity APPTAINERENV_TRAINER_LOG_PREFIX=1 APPTAINERENV_OMP_NUM_THREADS=1 /usr/bin/apptainer --quiet exec --cleanenv --no-eval --no-home --home=/home/trainer --pwd=/workspace --mount=type=bind,source=/srv/runs/golden,destination=/runs/golden --mount=type=bind,source=/tmp/intermodal-1000-golden-0/home,destination=/home/trainer --mount=type=bind,source=/tmp/intermodal-1000-golden-0/tmp,destination=/tmp --mount=type=bind,source=/srv/data,destination=/data,ro /srv/intermodal.sif trainer train --workload mnist --dataset digits) & codes+=($!)
result=0; for code in "${codes[@]}"; do wait "$code" || result=$?; done
rm -rf /tmp/intermodal-1000-golden-0
exit "$result"
