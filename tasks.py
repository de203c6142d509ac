"""The command line of Intermodal: `invoke --list` shows the tasks, `invoke --help TASK` their flags."""

import functools
import inspect
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from invoke.collection import Collection
from invoke.context import Context
from invoke.exceptions import Exit
from invoke.tasks import task

from launch import job as jobs
from trainer.errors import UserError


def friendly(body: Callable[..., int | None]) -> Callable[..., None]:
    """User errors become one line and exit code 2; a returned exit code becomes that of invoke."""

    @functools.wraps(body)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            code = body(*args, **kwargs)
        except UserError as error:
            raise Exit(f"error: {error}", code=2) from None
        if code:
            raise Exit(code=code)

    return wrapped


SLURM_HELP = {
    "slurm": "submit to Slurm (default: where there is sbatch)",
    "no-slurm": "run on this host even where there is sbatch",
    "check": "ask Slurm what it would do with the job, and submit nothing",
}


def run_task(runtime: str, summary: str, more_help: dict[str, str] | None = None) -> Any:
    """A task with every launcher flag: the fields of Job are the one source of their names and help."""

    def body(c: Context, j: str | None, detach: bool, dryrun: bool, **given: Any) -> int:
        from launch import submit

        more = {key: given.pop(key) for key in switches}
        where = place(**more) if more else runtime
        job = jobs.from_flags(where, given, j, words_after_dashes(sys.argv))
        dryrun = dryrun or c.config.run.dry
        return submit.submit(job, detach=detach, dryrun=dryrun, check=bool(more.get("check")))

    switches = [key.replace("-", "_") for key in more_help or {}]
    fields = jobs.flags("slurm" if runtime == "singularity" else runtime)
    repeated = [key for key, field in fields.items() if field.metadata["repeated"]]
    names: dict[str, Any] = {"j": None, **dict.fromkeys(fields), **dict.fromkeys(switches, False)}
    names |= {"detach": False, "dryrun": False, **{key: [] for key in repeated}}
    names |= {key: False for key, field in fields.items() if field.default is False}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(key, kind, default=default) for key, default in names.items()]
    body.__doc__ = summary
    wrapped = friendly(body)
    wrapped.__signature__ = inspect.Signature([inspect.Parameter("c", kind), *parameters])  # type: ignore[attr-defined]
    help = {key.replace("_", "-"): field.metadata["help"] for key, field in fields.items()} | {
        "j": "NODESxPROCESSES, short for --nodes and --nproc-per-node",
        "detach": "print the handle and return",
        "dryrun": "print what would be run, as a shell script, and run nothing",
        **(more_help or {}),
    }
    return task(name=f"{runtime}-run", iterable=repeated, help=help, auto_shortflags=False)(wrapped)


def place(slurm: bool, no_slurm: bool, check: bool) -> str:
    """The runtime of `singularity-run`: Slurm where there is Slurm, this host where not, or as the flags say."""
    if no_slurm and (slurm or check):
        raise UserError(f"--no-slurm contradicts {'--slurm' if slurm else '--check'}.", "give one of the two")
    return "slurm" if not no_slurm and (slurm or check or shutil.which("sbatch")) else "singularity"


def words_after_dashes(argv: list[str]) -> list[str]:
    """The trainer's arguments. Invoke would hand them over joined by blanks, and quoting would be lost."""
    return argv[argv.index("--") + 1 :] if "--" in argv else []


local_run = run_task("local", "Run on this host as plain processes: invoke local-run -j 1x2 -- --workload mnist")
docker_run = run_task("docker", "Run on this host in containers: invoke docker-run --nodes 2 -- --workload mnist")
singularity_run = run_task(
    "singularity",
    "Run a SIF on Slurm or on this host: invoke singularity-run -j 2x2 -- --workload mnist",
    SLURM_HELP,
)

BUILD_HELP = {
    "base": "ngc, cpu, or an image that has torch (default: ngc)",
    "os-image": "Debian image below --base cpu (default: debian:bookworm-slim)",
}


@task(help={**BUILD_HELP, "tag": "name of the image (default: intermodal:latest)"}, auto_shortflags=False)
@friendly
def build(
    c: Context, base: str = "ngc", tag: str = "intermodal:latest", os_image: str = "debian:bookworm-slim"
) -> None:
    """Build the training image: invoke build --base cpu"""
    from launch import images

    print(f"{tag} {images.build(base, tag, os_image)}")


@task(help={**BUILD_HELP, "tag": "name of the test image (default: intermodal:test)"}, auto_shortflags=False)
@friendly
def test(c: Context, base: str = "ngc", tag: str = "intermodal:test", os_image: str = "debian:bookworm-slim") -> int:
    """Run `make test` inside the image: invoke test --base cpu"""
    from launch import images, shell

    images.build(base, tag, os_image, target="test")
    return shell.code(
        [images.docker(), "run", "--rm", "--init", "--network=none", "--shm-size=1g", tag, "make", "test"]
    )


SIF_HELP = {
    "from": "IMAGE, docker-archive:FILE or oci-archive:FILE (default: intermodal:latest)",
    "out": "the SIF (default: intermodal.sif)",
    "compression": "zstd, gzip for old runtimes, lz4 or none (default: zstd)",
}


@task(help=SIF_HELP, auto_shortflags=False)
@friendly
def singularity_build(
    c: Context, from_: str = "intermodal:latest", out: str = "intermodal.sif", compression: str = "zstd"
) -> None:
    """Turn the image into a SIF: invoke singularity-build"""
    from launch import sif

    identity = sif.build(from_, Path(out), compression)
    print(f"{out} {identity.size / 1e9:.2f} GB, image {identity.image_id}, sha256 {identity.content_sha256}")


@task(help={"image": "the SIF (default: intermodal.sif)"}, auto_shortflags=False)
@friendly
def singularity_shell(c: Context, image: str = "intermodal.sif") -> int:
    """Open a shell inside the SIF"""
    from launch.runtimes import singularity

    return singularity.enter(image, ["bash"])


@task(help={"image": "SIF of the test image (default: intermodal-test.sif)"}, auto_shortflags=False)
@friendly
def singularity_test(c: Context, image: str = "intermodal-test.sif") -> int:
    """Run `make test` inside a SIF of the test image, which `invoke test` builds"""
    from launch.runtimes import singularity

    if not Path(image).exists():
        build = f"invoke singularity-build --from intermodal:test --out {image}"
        raise UserError(f"There is no SIF {image}.", f"invoke test, and {build}, where there is Docker")
    return singularity.enter(image, ["make", "test"])


@task(help={"nodes": "compute nodes (default: 2)"}, auto_shortflags=False)
@friendly
def slurm_up(c: Context, nodes: str | None = None) -> int:
    """Start a Slurm cluster in containers on this host, to try Slurm with: invoke slurm-up --nodes 3"""
    from launch import testbed

    return testbed.up(nodes)


@task(auto_shortflags=False)
@friendly
def slurm_down(c: Context) -> int:
    """Remove that cluster; its shared folder build/cluster stays"""
    from launch import testbed

    return testbed.cluster("down")


@task(auto_shortflags=False)
@friendly
def slurm_shell(c: Context) -> int:
    """Open a shell on its login node, or run a command there: invoke slurm-shell -- squeue"""
    from launch import testbed

    return testbed.cluster("sh", *words_after_dashes(sys.argv))


RUNS_HELP = {"handle": "as the run printed it, such as docker://RUN", "runs-dir": "folder of the runs (default: runs)"}


@task(help=RUNS_HELP, auto_shortflags=False)
@friendly
def status(c: Context, handle: str, runs_dir: str = "runs") -> None:
    """Tell how a run is doing: invoke status docker://RUN"""
    from launch import submit

    print(submit.status(_handle(handle), runs_dir))


@task(help={**RUNS_HELP, "follow": "go on until the run ends"}, auto_shortflags=False)
@friendly
def logs(c: Context, handle: str, runs_dir: str = "runs", follow: bool = False, f: bool = False) -> None:
    """Print the lines of a run: invoke logs -f docker://RUN"""
    from launch import submit

    for line in submit.logs(_handle(handle), runs_dir, follow=follow or f):
        print(line, flush=True)


@task(help=RUNS_HELP, auto_shortflags=False)
@friendly
def cancel(c: Context, handle: str, runs_dir: str = "runs") -> None:
    """Save and end a run, and remove what it left: invoke cancel docker://RUN"""
    from launch import submit

    print(submit.cancel(_handle(handle), runs_dir))


@task(name="list", help={"runs-dir": RUNS_HELP["runs-dir"]}, auto_shortflags=False)
@friendly
def list_runs(c: Context, runs_dir: str = "runs") -> None:
    """List the runs that were launched here"""
    from launch import submit

    print(submit.table(runs_dir))


def _handle(text: str) -> Any:
    from launch.runtimes import NAMES
    from launch.state import Handle

    return Handle.parse(text, NAMES)


ns = Collection(
    build,
    test,
    singularity_build,
    singularity_shell,
    singularity_test,
    slurm_up,
    slurm_down,
    slurm_shell,
    local_run,
    docker_run,
    singularity_run,
    status,
    logs,
    cancel,
    list_runs,
)
