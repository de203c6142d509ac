"""What is in the image, and what is not."""

import json
import os
from typing import Any

from tests.integration.conftest import OS_IMAGE, docker, invoke


def inside(image: str, script: str) -> list[str]:
    return list(docker("run", "--rm", "--network=none", image, "sh", "-c", script))


def test_a_second_build_changes_nothing(image: str) -> None:
    before = docker("image", "inspect", "--format", "{{.Id}}", image)
    again = invoke("build", "--base", "cpu", "--os-image", OS_IMAGE, "--tag", image)
    assert again.returncode == 0
    assert again.stdout.splitlines()[-1] == f"{image} {before[0]}"


def test_there_is_no_compiler_no_sudo_and_no_package_cache(image: str) -> None:
    assert inside(image, "for tool in gcc cc g++ make sudo; do command -v $tool; done; true") == []
    caches = "/var/lib/apt/lists /var/cache/apt/archives /root/.cache"
    assert inside(image, f"find {caches} -type f ! -name lock 2>/dev/null; true") == []


def test_it_runs_as_nobody_and_starts_with_compiled_bytecode(image: str) -> None:
    assert inside(image, "id -u; pwd; command -v trainer")[:2] == ["65534", "/workspace"]
    code = "import trainer.loop as m; b = open(m.__cached__, 'rb').read(8); print(int.from_bytes(b[4:], 'little'))"
    assert inside(image, f'python3 -c "{code}"') == ["1"], "flags 1: a hash that is never checked (PEP 552)"


def test_the_labels_tell_revision_and_base(image: str) -> None:
    labels: dict[str, Any] = json.loads(docker("image", "inspect", "--format", "{{json .Config.Labels}}", image)[0])
    assert labels["org.opencontainers.image.base.name"] == "intermodal-base:cpu"
    assert labels["org.opencontainers.image.base.digest"].startswith("sha256:")
    assert len(labels["org.opencontainers.image.revision"]) == 40


def test_no_setting_or_certificate_of_the_host_is_stored(image: str) -> None:
    history = "\n".join(docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image))
    variables = "\n".join(docker("image", "inspect", "--format", "{{json .Config.Env}}", image))
    for name in ("PIP_CERT", "SSL_CERT_FILE", "HTTP_PROXY", "HTTPS_PROXY", "PIP_INDEX_URL"):
        if value := os.environ.get(name):
            assert f"{name}={value}" not in history + variables
    assert inside(image, "find /run/secrets /etc/pip.conf -type f 2>/dev/null; true") == []


def test_a_base_without_torch_is_refused_with_a_hint(image: str) -> None:
    done = invoke("build", "--base", OS_IMAGE, "--tag", "intermodal:impossible")
    assert done.returncode == 2
    assert "HINT: --base cpu --os-image IMAGE" in done.stdout + done.stderr


def test_the_hermetic_tests_pass_inside(image: str) -> None:
    done = invoke("test", "--base", "cpu", "--os-image", OS_IMAGE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
