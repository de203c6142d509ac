# Sourced: makes sure that a Docker engine with BuildKit answers and that debian:bookworm-slim exists without a registry.
if ! command -v dockerd >/dev/null || ! command -v debootstrap >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq docker.io debootstrap >/dev/null
fi
if ! docker info >/dev/null 2>&1; then
    nohup dockerd >/tmp/dockerd.log 2>&1 &
    for _ in $(seq 60); do docker info >/dev/null 2>&1 && break; sleep 1; done
    docker info >/dev/null
fi
# A docker program that can build with BuildKit; the first on PATH may lack buildx.
for candidate in docker /usr/bin/docker; do
    version=$("$candidate" version --format '{{.Client.Version}}' 2>/dev/null) || continue
    if [ "${version%%.*}" -lt 23 ] || "$candidate" buildx version >/dev/null 2>&1; then
        export DOCKER=$candidate
        break
    fi
done
if ! docker image inspect debian:bookworm-slim >/dev/null 2>&1; then
    root=$(mktemp -d)
    debootstrap --variant=minbase bookworm "$root" >/tmp/debootstrap.log
    tar -C "$root" -c . | docker import - debian:bookworm-slim
    rm -rf "$root"
fi
