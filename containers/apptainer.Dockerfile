# Apptainer for hosts that have Docker only: turns an image into a SIF, and is what the test cluster runs on.
#   docker build --file containers/apptainer.Dockerfile --tag intermodal-apptainer [--build-arg OS_IMAGE=…] .
# No Debian release has apptainer, sid does: the image's own package source is pointed at sid.
ARG OS_IMAGE=debian:bookworm-slim
FROM ${OS_IMAGE}

RUN set -eu; cd /etc/apt; find . -name '*.list' -o -name '*.sources' | while read -r file; do \
        sed -i -E -e '/^deb.*(-security|-updates|-backports) /d' \
            -e 's/^(deb(-src)? +(\[[^]]*\] +)?[^ ]+ +)[^ ]+/\1sid/' \
            -e 's/^Suites:.*-security.*/Enabled: no\n&/; s/^(Suites:) *[a-z]+( .*)?$/\1 sid/' "$file"; \
    done; \
    apt-get update -o Acquire::Check-Valid-Until=false; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends -o Dpkg::Options::=--force-unsafe-io \
        apptainer squashfs-tools squashfuse ca-certificates; \
    rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log

ARG OS_IMAGE
LABEL org.opencontainers.image.base.name=${OS_IMAGE}
