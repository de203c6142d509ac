"""What is to be run: one frozen value, checked once, the source of every launcher flag, JSON both ways."""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainer.errors import UserError

Pairs = tuple[tuple[str, str], ...]

# The launcher says these to the trainer; said behind its back, it would look for the run elsewhere.
LAUNCHERS_OWN = {"run-id": "--name", "runs-dir": "--runs-dir", "data-dir": "--data-dir"}


@dataclasses.dataclass(frozen=True)
class Mount:
    """A folder of the host inside the container."""

    source: str
    target: str
    read_only: bool = False


def option(
    help: str, parse: Callable[[str], Any], default: Any = None, *, repeated: bool = False, only: str = ""
) -> Any:
    """A field that is a flag: its help, how its text becomes a value (ValueError on bad text), and the one runtime that
    has it, if not all do.
    """
    factory: dict[str, Any] = {"default_factory": tuple} if repeated else {"default": default}
    metadata = {"help": help, "parse": parse, "repeated": repeated, "only": only}
    return dataclasses.field(**factory, metadata=metadata)


def whole(text: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text) or int(text) < 1:
        raise ValueError("a whole number above 0")
    return int(text)


def count(text: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text):
        raise ValueError("a whole number")
    return int(text)


def whole_or_auto(text: str) -> int | None:
    return None if text == "auto" else whole(text)


def count_or_auto(text: str) -> int | None:
    return None if text == "auto" else count(text)


def amount(text: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", text) or float(text) <= 0:
        raise ValueError("a number above 0")
    return float(text)


def port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1024 <= int(text) <= 65535:
        raise ValueError("a port from 1024 to 65535")
    return int(text)


def name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", text):
        raise ValueError("a name of at most 52 small letters, digits and dashes")
    return text


def folder(text: str) -> str:
    if not text or "\0" in text or "\n" in text:
        raise ValueError("a folder")
    return text


def image(text: str) -> str:
    if not text.endswith(".sif") and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", text):
        raise ValueError("an image reference or a SIF (FILE.sif)")
    return folder(text)


def word(text: str) -> str:
    """A word of Slurm's language: it stands in a directive as it is."""
    if not re.fullmatch(r"[A-Za-z0-9_.,:=+@%/&|()\[\]*!-]+", text):
        raise ValueError("one word of Slurm's")
    return text


def sbatch_option(text: str) -> str:
    if not re.fullmatch(r"--[a-z][a-z0-9-]*(=[^\n\0\"\\]*)?", text):
        raise ValueError("an option of sbatch in its long form, --NAME or --NAME=VALUE")
    return text


def variable(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) or "\0" in value:
        raise ValueError("KEY=VALUE")
    return key, value


def mount(text: str) -> Mount:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source or not target.startswith("/") or mode not in ("", "ro", "rw") or "," in text or "\n" in text:
        raise ValueError("SRC:/DST or SRC:/DST:ro, without commas")
    return Mount(source, target, mode == "ro")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A command for `trainer`, the nodes it runs on, and what each of them gets."""

    command: tuple[str, ...]
    runtime: str = ""
    nodes: int = option("nodes, each with its own agent (default: 1)", whole, 1)
    nproc_per_node: int | None = option("processes a node; auto: one a GPU, else one (default: auto)", whole_or_auto)
    image: str | None = option("image to run (default: intermodal:latest; a SIF: intermodal.sif)", image)
    env: Pairs = option("KEY=VALUE for all processes; may be repeated", variable, repeated=True)
    mount: tuple[Mount, ...] = option("SRC:/DST[:ro] folder of the host; may be repeated", mount, repeated=True)
    cpus: float | None = option("CPUs of each node", amount)
    memory_gb: float | None = option("memory of each node", amount)
    gpus_per_node: int | None = option("GPUs of each node; auto: all, shared out (default: auto)", count_or_auto)
    shm_gb: float | None = option("size of /dev/shm on each node (default: 1)", amount)
    time_limit_min: float | None = option("save and stop after this time", amount)
    name: str | None = option("name of the run and its folder (default: time and workload)", name)
    runs_dir: str = option("folder for results (default: runs)", folder, "runs")
    data_dir: str = option("folder of data sets (default: data)", folder, "data")
    master_port: int | None = option("port of the head's agent (default: chosen by the runtime)", port)
    partition: str | None = option("partition to wait in", word, only="slurm")
    account: str | None = option("account to charge", word, only="slurm")
    qos: str | None = option("quality of service", word, only="slurm")
    constraint: str | None = option("features that nodes must have", word, only="slurm")
    exclude: str | None = option("nodes not to use, such as c1,c[3-4]", word, only="slurm")
    reservation: str | None = option("reservation to run in", word, only="slurm")
    gres: str | None = option("generic resources of each node, such as gpu:a100:2", word, only="slurm")
    sbatch: tuple[str, ...] = option(
        "--OPTION=VALUE for sbatch; may be repeated", sbatch_option, repeated=True, only="slurm"
    )
    data_stage: bool = option("copy the data sets to each node's own disk first", bool, False, only="slurm")
    signal_s: int | None = option(
        "how long before the end of its time the job is told to save (default: 120)", whole, only="slurm"
    )
    max_restarts: int = option("starts anew after a failure from outside (default: 3)", count, 3, only="slurm")
    # Found out by the runtime's prepare(), never given by hand.
    gpus: tuple[tuple[str, ...], ...] = ()
    image_id: str | None = None
    sif_sha256: str | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise UserError("Nothing to run.", "give the trainer's arguments after --, such as: -- --workload mnist")
        if any("\0" in word for word in self.command):
            raise UserError("An argument holds a zero byte.", "leave it out")
        self._refuse_what_the_launcher_says()
        targets = ["/" + os.path.normpath(mount.target).lstrip("/") for mount in self.mount]
        for target in targets:
            if targets.count(target) > 1 or target in ("/", "/runs", "/data", "/tmp", "/dev/shm"):
                raise UserError(f"--mount cannot put a folder at {target}.", "another DST; --runs-dir and --data-dir")

    def _refuse_what_the_launcher_says(self) -> None:
        variables = {key for key, _ in self.env}
        for name, flag in LAUNCHERS_OWN.items():
            if any(word == f"--{name}" or word.startswith(f"--{name}=") for word in self.command):
                raise UserError(f"--{name} after the -- contradicts the launcher.", f"{flag} before the --")
            if (variable := "TRAINER_" + name.upper().replace("-", "_")) in variables:
                raise UserError(f"--env {variable} contradicts the launcher.", flag)

    def only(self, runtime: str) -> dict[str, Any]:
        """Flags that no other runtime has, with their values, where they were given."""
        fields = [field for field in flags().values() if field.metadata["only"] == runtime]
        given = {
            field.name: getattr(self, field.name) for field in fields if getattr(self, field.name) != field.default
        }
        return {"--" + name.replace("_", "-"): value for name, value in given.items() if value != ()}

    @property
    def run_id(self) -> str:
        assert self.name is not None, "prepare() names the run"
        return self.name

    @property
    def processes(self) -> int:
        """Processes on each node; needs a prepared job if nproc_per_node is auto."""
        return self.nproc_per_node or max(len(self.gpus[0]) if self.gpus else 0, 1)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Job":
        told = json.loads(text)
        told["command"] = tuple(told["command"])
        told["env"] = tuple((key, value) for key, value in told["env"])
        told["mount"] = tuple(Mount(**mount) for mount in told["mount"])
        told["gpus"] = tuple(tuple(gpus) for gpus in told["gpus"])
        told["sbatch"] = tuple(told["sbatch"])
        return cls(**told)


def flags(runtime: str = "") -> dict[str, "dataclasses.Field[Any]"]:
    """The fields that are flags, by name: all, or those that a runtime has."""
    fields = {field.name: field for field in dataclasses.fields(Job) if "parse" in field.metadata}
    return {name: field for name, field in fields.items() if not runtime or field.metadata["only"] in ("", runtime)}


def from_flags(runtime: str, given: Mapping[str, Any], layout: str | None, arguments: Iterable[str]) -> Job:
    """A Job from flag texts (None: not given), `-j NxM`, and the words after `--`. Raises UserError."""
    values = {key: _parse(key, text) for key, text in given.items() if text not in (None, [], (), False)}
    if layout is not None:
        values |= _layout(layout, given)
    for key in ("runs_dir", "data_dir"):
        values[key] = _absolute(values.get(key, flags()[key].default))
    mounts = (dataclasses.replace(mount, source=_absolute(mount.source)) for mount in values.get("mount", ()))
    values["mount"] = tuple(mounts)
    return Job(command=trainer_command(tuple(arguments)), runtime=runtime, **values)


def trainer_command(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The words after `trainer`: an option first means the verb `train`."""
    if not arguments or arguments[0].startswith("-"):
        return ("train", *arguments)
    return arguments


def _parse(key: str, text: Any) -> Any:
    field = flags()[key]
    parse = field.metadata["parse"]
    try:
        return tuple(parse(item) for item in text) if field.metadata["repeated"] else parse(str(text))
    except ValueError as error:
        flag = "--" + key.replace("_", "-")
        raise UserError(f"{flag} {text!r} is not {error}.", f"invoke --help shows what {flag} takes") from None


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _layout(text: str, given: Mapping[str, Any]) -> dict[str, int]:
    match = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", text)
    if not match or 0 in (layout := [int(number) for number in match.groups()]):
        raise UserError(f"-j {text!r} is not NODESxPROCESSES.", "-j 2x4 for two nodes of four processes each")
    values = dict(zip(("nodes", "nproc_per_node"), layout, strict=True))
    for key, value in values.items():
        if given.get(key) not in (None, str(value)):
            raise UserError(f"-j {text} contradicts --{key.replace('_', '-')} {given[key]}.", "give one of the two")
    return values
