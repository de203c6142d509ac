"""The command `trainer`: verbs and flags. Nothing heavy is imported before a verb needs it."""

import argparse
import dataclasses
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainer import __version__, config, contract, output, stop, topology
from trainer.errors import UserError, unknown_name


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are UserErrors, one line with a hint."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}.", f"{self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code. Bad requests are one line on stderr."""
    try:
        arguments, unknown = build_parser().parse_known_args(argv)
        if unknown:
            raise unknown_name("argument", unknown[0], arguments.flags, "the flag")
        return int(arguments.run(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def build_parser() -> Parser:
    parser = Parser(prog="trainer", description="Distributed training, the same on every runtime.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB", parser_class=Parser)
    _add_train(verbs.add_parser("train", help="train a workload", allow_abbrev=False))
    _add_report(verbs.add_parser("report", help="summarise a run", allow_abbrev=False))
    _add_data(verbs.add_parser("data", help="make data sets", allow_abbrev=False))
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=train, flags=parser._option_string_actions)
    parser.add_argument("--config", metavar="FILE", help="TOML file of values; flags and environment win over it")
    parser.add_argument("--show-config", action="store_true", help="print all values and where they came from, and end")
    parser.add_argument(
        "--nproc-per-node", metavar="N", help="processes on this node (default: 1, or PET_NPROC_PER_NODE)"
    )
    for name, field in config.fields().items():
        _add_field(parser, name, field)


def _add_field(parser: argparse.ArgumentParser, name: str, field: "dataclasses.Field[Any]") -> None:
    default = "" if field.default is None else f" (default: {field.default})"
    text = f"{field.metadata['help']}{default}".replace("%", "%%")
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    if isinstance(field.default, bool):
        parser.add_argument(config.flag(name), action=argparse.BooleanOptionalAction, help=text, **common)
    else:
        metavar = "|".join(field.metadata["choices"]) or name.rpartition("_")[2].upper()
        parser.add_argument(config.flag(name), metavar=metavar, help=text, **common)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=report, flags=parser._option_string_actions)
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")


def _add_data(parser: argparse.ArgumentParser) -> None:
    make = parser.add_subparsers(title="verbs", required=True, metavar="VERB", parser_class=Parser).add_parser(
        "make", help="draw a data set", allow_abbrev=False
    )
    make.set_defaults(run=make_data, flags=make._option_string_actions)
    make.add_argument("name", metavar="NAME", help="drawn-digits")
    make.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder that torchvision's MNIST class reads"
    )
    make.add_argument("--train", type=int, default=60000, metavar="N", help="training samples (default: 60000)")
    make.add_argument("--test", type=int, default=10000, metavar="N", help="test samples (default: 10000)")
    make.add_argument("--seed", type=int, default=1, metavar="N", help="another seed draws other digits (default: 1)")


def train(arguments: argparse.Namespace) -> int:
    """`trainer train`: as one rank if there are ranks in the environment, else as this node's agent."""
    flags = {name: value for name, value in vars(arguments).items() if name in config.fields()}
    resolved = config.from_process(flags, arguments.config)
    if arguments.show_config:
        print(resolved.table())
        return contract.EXIT_DONE
    place = topology.resolve(os.environ, _nproc(arguments.nproc_per_node))
    output.prefix_lines(place.node_rank, place.rank)
    return start(resolved.config, place)


def start(settings: config.TrainConfig, place: topology.Topology) -> int:
    """Check what can be checked before any process is started, then train."""
    stop.hold()
    _prepare_libraries(settings.threads)
    from trainer import preflight

    settings, place = preflight.prepare(settings, place)
    if place.rank is not None:
        from trainer import worker

        return worker.run_alone(settings, place)
    from trainer import agent, environment

    return agent.run_node(settings, place, environment.agreed_facts(settings, place))


def _prepare_libraries(threads: int) -> None:
    """What torch, numpy and CUDA read once, when they are imported."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy would start threads, and an agent with threads cannot fork
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no C++ stacks where a peer is gone
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # counting GPUs must not open CUDA before the fork


def report(arguments: argparse.Namespace) -> int:
    """`trainer report RUN`."""
    from trainer import report as reports

    print(reports.summary(arguments.folder))
    return contract.EXIT_DONE


def make_data(arguments: argparse.Namespace) -> int:
    """`trainer data make drawn-digits`."""
    from trainer.datasets import drawn

    if arguments.name != "drawn-digits":
        raise unknown_name("data set to make", arguments.name, ["drawn-digits"], "the name")
    if min(arguments.train, arguments.test) < 1 or arguments.seed < 0:
        raise UserError("--train and --test must be at least 1 and --seed not negative.", "trainer data make --help")
    try:
        written = drawn.make(arguments.train, arguments.test, arguments.seed, arguments.out)
    except OSError as error:
        raise UserError(f"Cannot write to {arguments.out}: {error.strerror}.", "--out with a writable folder") from None
    print("\n".join(map(str, written)))
    return contract.EXIT_DONE


def _nproc(given: str | None) -> int | None:
    if given is None:
        return None
    if not re.fullmatch(r"[0-9]{1,6}", given) or int(given) < 1:
        raise UserError(f"--nproc-per-node {given!r} is not a whole number above 0.", "--nproc-per-node 2")
    return int(given)


if __name__ == "__main__":
    sys.exit(main())
