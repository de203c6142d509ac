#!/bin/bash
# run golden
codes=()
env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/home/someone TRAINER_RUNS_DIR=/srv/runs TRAINER_DATA_DIR=/srv/data TRAINER_SHARED_HOST=1 CUDA_VISIBLE_DEVICES= NCCL_DEBUG=WARN PET_NNODES=1 PET_NPROC_PER_NODE=1 PET_NODE_RANK=0 PET_MASTER_ADDR=127.0.0.1 PET_MASTER_PORT=29500 TRAINER_RUN_ID=golden TRAINER_RUNTIME=local TRAINER_LOG_PREFIX=1 OMP_NUM_THREADS=1 /opt/venv/bin/trainer train --workload mnist --dataset digits & codes+=($!)
result=0; for code in "${codes[@]}"; do wait "$code" || result=$?; done
exit "$result"
