"""`trainer report RUN`: what a run was and how it ended, on one screen."""

import json
from pathlib import Path
from typing import Any

from trainer.errors import UserError

NEEDED = (
    "run_id", "status", "exit_code", "command", "topology", "runtime", "image", "environment", "git", "data",
    "started_at", "finished_at", "failure", "result",
)  # fmt: skip


def summary(run: Path) -> str:
    """The lines of the summary. Raises UserError if the folder holds no readable run."""
    told = read(run)
    topology, result, image = told["topology"], told["result"] or {}, told["image"]
    rows = {
        "run": f"{told['run_id']}  {told['status']} (exit code {told['exit_code']})",
        "command": " ".join(told["command"]),
        "layout": f"{topology['nodes']} nodes x {topology['nproc_per_node']} = {topology['world_size']} ranks, "
        f"{told['runtime']}",
        "image": image["reference"] or "none",
        "image id": image["id"],
        "code": f"{told['git']['revision'] or 'unknown'}{' + changes' if told['git']['dirty'] else ''}",
        "torch": told["environment"]["torch"],
        "data": f"{told['data']['name']} {(told['data']['sha256'] or '')[:12]}",
        "time": f"{told['started_at']} to {told['finished_at'] or 'now'}",
        **{name.replace("_", " "): value for name, value in result.items()},
        "failure": (told["failure"] or {}).get("message"),
    }
    return "\n".join(f"{name:15} {value}" for name, value in rows.items() if value is not None)


def read(run: Path) -> dict[str, Any]:
    """run.json of a run folder. Raises UserError if there is none or it is damaged."""
    path = run / "run.json"
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in NEEDED if name not in told]
    except OSError:
        raise UserError(f"{run} holds no run: there is no {path}.", "give a folder below --runs-dir") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}.", "restore it, or start the run again") from None
    if missing or not isinstance(told, dict):
        names = ", ".join(missing) or "everything"
        raise UserError(f"{path} is damaged: it lacks {names}.", "restore it, or start the run again")
    return told
