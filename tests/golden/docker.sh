#!/bin/bash
# run golden
mkdir -p /srv/runs/golden
[ "$(id -u)" != 0 ] || chown 1000:1000 /srv/runs/golden
docker network create --label intermodal.run=golden intermodal-golden >/dev/null
codes=()
docker run --rm --name golden-0 --hostname golden-0 --network intermodal-golden --user 1000:1000 --init --read-only --cap-drop=ALL --security-opt=no-new-privileges --tmpfs=/tmp:rw,exec,nosuid,mode=1777 --tmpfs=/home/trainer:rw,exec,nosuid,mode=1777 --shm-size=1073741824 --workdir=/workspace --label=intermodal.run=golden --mount=type=bind,source=/srv/runs/golden,target=/runs/golden --mount=type=bind,source=/srv/data,target=/data,readonly --env=TRAINER_RUNS_DIR=/runs --env=TRAINER_DATA_DIR=/data --env=HOME=/home/trainer --env=TRAINER_IMAGE=intermodal:latest --env=TRAINER_IMAGE_ID=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef --env=NCCL_DEBUG=WARN --env=PET_NNODES=1 --env=PET_NPROC_PER_NODE=1 --env=PET_NODE_RANK=0 --env=PET_MASTER_ADDR=golden-0 --env=PET_MASTER_PORT=29500 --env=TRAINER_RUN_ID=golden --env=TRAINER_RUNTIME=docker --env=TRAINER_LOG_PREFIX=1 --env=OMP_NUM_THREADS=1 sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef trainer train --workload mnist --dataset digits & codes+=($!)
result=0; for code in "${codes[@]}"; do wait "$code" || result=$?; done
docker network rm intermodal-golden >/dev/null
exit "$result"
