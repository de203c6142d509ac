"""One frozen dataclass is the source of every flag, file key and environment name of `trainer train`.

Layers, weakest first: default < config file < environment < flag. Each field's help stands beside it.
OMP_NUM_THREADS, which torchrun, clusters and our launchers set unasked, counts as a default.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer import contract
from trainer.errors import UserError, unknown_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NODE_SETTINGS = ("data_dir", "download", "run_id", "runs_dir")  # a node may have its own
DATASETS = ("digits", "drawn-digits", "mnist", "fashion-mnist")
WORKLOADS = ("mnist",)


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    shapes_result: bool = False,
) -> Any:
    """A field with its help. `shapes_result`: another value gives other weights, so a resume refuses it."""
    metadata = {
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "shapes_result": shapes_result,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides what `trainer train` does. Values are checked on construction."""

    workload: str = option("mnist", "what is trained", choices=WORKLOADS, shapes_result=True)
    dataset: str = option("digits", "data to train on", choices=DATASETS, shapes_result=True)
    data_dir: str = option("data", "folder of the data sets")
    download: bool = option(False, "fetch a missing data set, once per node")
    epochs: int = option(20, "passes over the training split", minimum=1)
    max_steps: int | None = option(None, "stop after this many optimizer steps", minimum=1)
    batch_size: int = option(64, "global batch size, shared among all ranks", minimum=1, shapes_result=True)
    eval_batch_size: int = option(1000, "samples of a validation batch on each rank", minimum=1)
    optimizer: str = option("adamw", "optimizer", choices=("adamw", "sgd"), shapes_result=True)
    lr: float = option(1e-3, "(peak) learning rate", minimum=0, shapes_result=True)
    momentum: float = option(0.9, "momentum of SGD", minimum=0, shapes_result=True)
    weight_decay: float = option(0.01, "weight decay", minimum=0, shapes_result=True)
    schedule: str = option(
        "constant",
        "learning rate over the run",
        choices=("constant", "cosine", "one-cycle", "step"),
        shapes_result=True,
    )
    step_epochs: int = option(5, "epochs between the drops of --schedule step", minimum=1, shapes_result=True)
    step_gamma: float = option(0.1, "factor of each drop of --schedule step", minimum=0, shapes_result=True)
    precision: str = option("fp32", "arithmetic of the model", choices=("fp32", "bf16"), shapes_result=True)
    seed: int = option(1, "seed of weights, data order and dropout", minimum=0, shapes_result=True)
    deterministic: bool = option(True, "use deterministic kernels where there is a choice", shapes_result=True)
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"), shapes_result=True)
    threads: int = option(
        1,
        "CPU threads of each process; other values give other bits",
        minimum=1,
        shapes_result=True,
    )
    val_every: int | None = option(None, "steps between validations (default: every epoch)", minimum=1)
    log_every: int = option(10, "steps between two lines of metrics", minimum=1)
    checkpoint_every: int | None = option(None, "steps between checkpoints (default: every epoch)", minimum=1)
    keep_checkpoints: int = option(3, "newest checkpoints to keep", minimum=1)
    resume: str = option("never", "auto: go on from the newest valid checkpoint", choices=("never", "auto"))
    run_id: str | None = option(None, "name of the run's folder (default: made from time and workload)")
    runs_dir: str = option("runs", "folder that holds the runs")
    timeout_s: int = option(600, "longest wait in a collective operation", minimum=1)
    rendezvous_timeout_s: int = option(600, "longest wait for all nodes to arrive", minimum=1)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_value(field, getattr(self, field.name))
        if self.run_id is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}", self.run_id):
            raise UserError(f"--run-id {self.run_id!r} is not a folder name.", "use letters, digits and dashes")

    def hash(self) -> str:
        """SHA-256 of what shapes the result, the same on every runtime and in every layout."""
        shaping = {name: getattr(self, name) for name in shaping_fields()}
        return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A configuration and, for each field, the layer its value came from."""

    config: TrainConfig
    sources: Mapping[str, str]

    def table(self) -> str:
        """The lines that `--show-config` prints."""
        values = dataclasses.asdict(self.config)
        return "\n".join(f"{name:22} {values[name]!s:20} {self.sources[name]}" for name in values)


def fields() -> dict[str, "dataclasses.Field[Any]"]:
    return {field.name: field for field in dataclasses.fields(TrainConfig)}


def shaping_fields() -> list[str]:
    return [name for name, field in fields().items() if field.metadata["shapes_result"]]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(field: "dataclasses.Field[Any]") -> str:
    """The environment name of a field."""
    return "TRAINER_" + field.name.upper()


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str], file: str | None = None) -> Resolved:
    """Lay defaults, file, environment and flags over each other.

    Raises UserError for an unknown name or a value of the wrong type or range, naming the layer.
    """
    ambient = environ.get("OMP_NUM_THREADS")
    layers = {
        "default": {name: field.default for name, field in fields().items()},
        "OMP_NUM_THREADS": {"threads": parse("threads", ambient, "OMP_NUM_THREADS")} if ambient else {},
        f"file {file}": read_file(file) if file else {},
        "environment": read_environment(environ),
        "flag": {name: parse(name, value, flag(name)) for name, value in flags.items()},
    }
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in layers.items():
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    return Resolved(TrainConfig(**values), sources)


def read_file(path: str) -> dict[str, Any]:
    """Values of a TOML file whose keys are the field names."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Cannot read --config {path}: {error.strerror}.", "give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} is not TOML: {error}.", "one `key = value` a line") from None
    for key in content:
        if key.replace("-", "_") not in fields():
            raise unknown_name(f"key of {path}", key, fields(), "the key")
    return {
        key.replace("-", "_"): parse(key.replace("-", "_"), value, f"{path}: {key}") for key, value in content.items()
    }


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Values of the environment names of all fields; an unknown TRAINER_ name is refused."""
    names = {variable(field): name for name, field in fields().items()}
    for key in environ:
        if key.startswith("TRAINER_") and key not in names and key not in contract.TABLE:
            raise unknown_name("environment variable", key, [*names, *contract.TABLE], "the name")
    return {name: parse(name, environ[key], key) for key, name in names.items() if key in environ}


def parse(name: str, value: Any, where: str) -> Any:
    """One raw value as the field's type. Raises UserError naming the place it was given at."""
    kind, optional = _kind(name)
    if optional and value in ("none", None):
        return None
    try:
        return _convert(kind, value)
    except (ValueError, TypeError):
        raise UserError(f"{where} = {value!r} is not {_article(kind)}.", f"see the help of {flag(name)}") from None


def _kind(name: str) -> tuple[type, bool]:
    hint = typing.get_type_hints(TrainConfig)[name]
    if isinstance(hint, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None)), True
    return hint, False


def _convert(kind: type, value: Any) -> Any:
    if kind is bool:
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if str(value).lower() not in words:
            raise ValueError(value)
        return words[str(value).lower()]
    if isinstance(value, (bool, list, dict)) or (kind is int and isinstance(value, float)):
        raise TypeError(value)
    if kind is str and str(value) == "":
        raise ValueError(value)
    number = kind(value)
    if kind is float and not math.isfinite(number):
        raise ValueError(value)
    return number


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a non-empty text"}[kind]


def _check_value(field: "dataclasses.Field[Any]", value: Any) -> None:
    choices, minimum = field.metadata["choices"], field.metadata["minimum"]
    if choices and value not in choices:
        raise unknown_name(field.name.replace("_", " "), value, choices, flag(field.name))
    if minimum is not None and value is not None and not value >= minimum:
        raise UserError(f"{flag(field.name)} {value} is below {minimum}.", f"{flag(field.name)} {minimum} or more")


def from_process(flags: Mapping[str, Any], file: str | None) -> Resolved:
    """Resolve against this process's environment."""
    return resolve(flags, os.environ, file)
