"""The agent of a node: starts this node's ranks through torch's elastic agent and ends them together.

Ranks are forked after torch is imported, so that torch is loaded once a node instead of once a rank. That is safe
because the agent never computes, never opens CUDA, and has no second thread: the store is served by another process.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from trainer import contract, distributed, record, stop, worker
from trainer.config import TrainConfig
from trainer.errors import Unavailable
from trainer.failures import Board, Failure, of_exception, of_exit, vanished
from trainer.rendezvous import StaticRendezvous
from trainer.topology import Topology


def run_node(config: TrainConfig, topology: Topology, facts: dict[str, Any]) -> int:
    """Start this node's ranks, wait for the end of the run, and return its exit code."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # ours are handled below
    rendezvous = StaticRendezvous(topology, facts, config.rendezvous_timeout_s)
    try:
        store = rendezvous.meet()
        if store is None:
            return contract.EXIT_PREEMPTED
        if topology.node_rank == 0:
            record.Record(record.run_folder(config)).start(config, topology)
        if topology.node_rank == 0 and topology.nnodes > 1:
            distributed.name_interface(topology, rendezvous.hosts[1])
        return _run_ranks(
            config, topology, rendezvous, Board(store, topology.node_rank, topology.nnodes, rendezvous.hosts)
        )
    except Unavailable as error:
        if topology.node_rank == 0:
            record.close_failed(config, of_exception(error, None, 0))
        raise
    finally:
        rendezvous.close()


def _run_ranks(config: TrainConfig, topology: Topology, rendezvous: StaticRendezvous, board: Board) -> int:
    _import_before_fork()
    spec = WorkerSpec(
        role="trainer",
        local_world_size=topology.nproc_per_node or 1,
        rdzv_handler=rendezvous,
        entrypoint=worker.run_forked,
        args=(config, topology),
        max_restarts=0,
        monitor_interval=0.05,
    )
    agent = Agent(spec, board, topology)
    result = agent.run()
    stop.hold()
    assert agent.failure or agent.preempted or not result.is_failed()
    return _conclude(agent, board, config, topology)


def start_method() -> str:
    """Fork if this process has no second thread, whose locks a fork would inherit; else spawn, which is slower."""
    tasks = "/proc/self/task"
    alone = os.path.isdir(tasks) and len(os.listdir(tasks)) == 1
    return "fork" if alone else "spawn"


class Agent(LocalElasticAgent):
    """torch's agent, plus: all ranks of all nodes end at the first failure, and signals ask the ranks to stop."""

    def __init__(self, spec: WorkerSpec, board: Board, topology: Topology) -> None:
        no_files = DefaultLogsSpecs(log_dir=os.devnull)  # else each run leaves a folder in /tmp
        super().__init__(spec, no_files, start_method=start_method(), exit_barrier_timeout=60, shutdown_timeout=5)
        self.failure: Failure | None = None
        self.preempted = False
        self._suspected = False
        self._board = board
        self._topology = topology
        self._asked = 0
        self._pid = os.getpid()
        for number in (*stop.STOP_SIGNALS, signal.SIGINT):
            signal.signal(number, self._ask_to_stop)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        stop.release()
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        try:
            self._watch(self._ended())
            if not self._suspected:
                result: RunResult = super()._monitor_workers(worker_group)
                if not result.is_failed():
                    return result
                self._explain(result)
        except DistError:
            self._head_is_gone()
        if self.failure:
            self._signal_ranks(signal.SIGKILL)
        ended = self.failure or self.preempted
        return RunResult(state=WorkerState.FAILED if ended else WorkerState.HEALTHY)

    def _head_is_gone(self) -> None:
        """Without the head's store nothing can be heard: a failure, unless all ranks here ended well before."""
        codes = self._ended()
        well = set(codes.values()) <= {contract.EXIT_DONE, contract.EXIT_PREEMPTED}
        if well and len(codes) == self._topology.nproc_per_node:
            self.preempted = contract.EXIT_PREEMPTED in codes.values()
        elif not self.preempted:
            self.failure = vanished(0, self._topology.master_addr)

    def _watch(self, ended: dict[int, int]) -> None:
        """Show that this node lives, tell of ranks that died without a word, hear what others told."""
        self._board.beat()
        if self._topology.node_rank == 0:
            self._board.watch_nodes()
        for local_rank, code in ended.items():
            self._report(local_rank, code)
        self._suspected = self._board.failed()
        self.failure = self._board.verdict()

    def _explain(self, result: RunResult) -> None:
        """A rank ended between two looks: an agreed stop, or a failure whose cause is known soon."""
        ended = {failure.local_rank: failure.exitcode for failure in result.failures.values()}
        self.preempted = contract.EXIT_PREEMPTED in ended.values()
        while not self.preempted and not self.failure:
            self._watch(ended)
            time.sleep(0.05)

    def _report(self, local_rank: int, code: int) -> None:
        if code < 0 or (code not in (contract.EXIT_DONE, contract.EXIT_PREEMPTED) and not self._board.failed()):
            rank = self._topology.node_rank * (self._topology.nproc_per_node or 1) + local_rank
            self._board.report(of_exit(code, rank, self._topology.node_rank))

    def _ended(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended, by local rank, without reaping them; negative for a signal."""
        codes = {}
        for local_rank, pid in self._pids().items():
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) if _is_child(pid) else None
            if found:
                codes[local_rank] = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return codes

    def _pids(self) -> dict[int, int]:
        return dict(self._pcontext.pids()) if self._pcontext else {}

    def _signal_ranks(self, number: signal.Signals) -> None:
        for pid in self._pids().values():
            if _is_child(pid):
                os.kill(pid, number)

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        """First signal: the ranks finish the step, save and leave. A second Ctrl-C ends them at once."""
        if os.getpid() != self._pid:
            return
        self._asked += 1
        again = number == signal.SIGINT and self._asked > 1
        self._signal_ranks(signal.SIGKILL if again else signal.SIGUSR1)


def _is_child(pid: int) -> bool:
    """True while the process is ours and not reaped, so that its number cannot belong to a stranger."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _import_before_fork() -> None:
    """What every rank needs and is slow to import (DDP's constructor imports torch._dynamo: a second)."""
    import torch._dynamo
    import torch.nn.parallel  # noqa: F401

    from trainer import loop  # noqa: F401


def _conclude(agent: Agent, board: Board, config: TrainConfig, topology: Topology) -> int:
    failure, code = agent.failure, contract.EXIT_DONE
    if failure:
        code = failure.exit_code
        ours = topology.node_rank in (0, failure.node_rank)
        print(failure.text() if ours else dataclasses.replace(failure, trace="").text(), file=sys.stderr, flush=True)
    elif agent.preempted:
        code = contract.EXIT_PREEMPTED
    if topology.node_rank == 0 and failure:
        record.close_failed(config, failure)
    with contextlib.suppress(DistError):  # the head has left already: nobody waits for this node
        board.leave(failure)
    return code
