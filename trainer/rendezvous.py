"""Static rendezvous: the head listens, every node knows its index, and whoever is missing is named.

Differs from torch's own static handler in what it says: a port in use, a head that cannot be reached, nodes that did
not arrive, and nodes that run something else are one-line errors, not stack traces after ten silent minutes.
"""

import json
import os
import signal
import socket
import time
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trainer import contract, stop
from trainer.errors import Unavailable, UserError
from trainer.topology import Topology

DECISION_GRACE_S = 5.0  # for hearing the head's decision


class StaticRendezvous(RendezvousHandler):
    """One meeting of all nodes. `facts` are what every node must agree on, such as versions."""

    def __init__(self, topology: Topology, facts: dict[str, Any], timeout_s: float) -> None:
        self._topology = topology
        self._facts = facts
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self.hosts: dict[int, str] = {}
        self.store: TCPStore | None = None
        self._server = 0

    def meet(self) -> TCPStore | None:
        """Open or reach the head's store and wait until every node has said hello. None if any was asked to stop.

        Raises UserError on every node for a port in use and nodes that differ, Unavailable for a head or nodes that
        did not come in time.
        """
        self.store = self._listen() if self._topology.node_rank == 0 else self._reach()
        if self.store is None:
            return None
        try:
            told = self._greet(PrefixStore("hello", self.store))
        except DistError:
            raise Unavailable("The head node went away while the nodes met.", "look at the log of node 0") from None
        if told["error"]:
            message, hint, code = told["error"]
            raise (UserError if code == contract.EXIT_BAD_REQUEST else Unavailable)(message, hint)
        self.hosts = {int(node): host for node, host in told["hosts"].items()}
        return None if told["stop"] else self.store

    def next_rendezvous(self) -> RendezvousInfo:
        assert self.store is not None, "meet() comes first"
        address = RendezvousStoreInfo(self._topology.master_addr, self.store.port)
        store = PrefixStore("agents", self.store)
        return RendezvousInfo(store, self._topology.node_rank, self._topology.nnodes, address)

    def get_backend(self) -> str:
        return "static"

    def get_run_id(self) -> str:
        return "intermodal"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True

    @property
    def use_agent_store(self) -> bool:
        return True

    def _listen(self) -> TCPStore:
        """Serve the store from a process of its own: its threads would make forking the ranks unsafe.

        (A rank forked while the server's thread looks up a peer's name inherits glibc's resolver lock, for good.)
        """
        reader, writer = os.pipe()
        self._server = os.fork()
        if not self._server:
            _serve(self._topology, self._timeout_s, writer)
        os.close(writer)
        with os.fdopen(reader) as answer:
            told = answer.read()
        if not told.isdigit():
            self.close()
            if "EADDRINUSE" not in told and "in use" not in told:
                raise RuntimeError(told)
            hint = "another PET_MASTER_PORT (--master-port of the launcher), or end the run that holds it"
            kind = Unavailable if "TRAINER_JOB_ID" in os.environ else UserError  # a job's port follows from its number
            raise kind(f"Port {self._topology.master_port} of the head node is in use.", hint)
        return TCPStore("127.0.0.1", int(told), is_master=False, timeout=timedelta(seconds=self._timeout_s))

    def close(self) -> None:
        """End the store's process, if it is ours."""
        if self._server:
            os.kill(self._server, signal.SIGKILL)
            os.waitpid(self._server, 0)
            self._server = 0

    def _reach(self) -> TCPStore | None:
        address, port = self._topology.master_addr, self._topology.master_port
        reason, told = "", time.monotonic() + 10
        while time.monotonic() < self._deadline:
            if stop.waiting():
                return None
            try:
                socket.create_connection((address, port), timeout=2).close()
                return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=self._timeout_s))
            except OSError as error:
                reason = error.strerror or str(error)
            if time.monotonic() > told:
                print(f"waiting for the head node {address}:{port}: {reason}", flush=True)
                told = time.monotonic() + 10
            time.sleep(0.1)
        raise Unavailable(
            f"Node {self._topology.node_rank} could not reach the head node {address}:{port} within "
            f"{self._timeout_s:g} s: {reason}.",
            "check the address and that node 0 has started",
        )

    def _greet(self, store: Store) -> dict[str, Any]:
        """Say hello, then hear what the head (or a node that was asked to stop) decided for all."""
        own = str(self._topology.node_rank)
        store.set(own, json.dumps({"host": socket.gethostname(), "facts": self._facts}))
        while not store.check(["decision"]):
            if stop.waiting():
                _decide(store, stop=True)
            elif self._topology.node_rank == 0:
                self._look(store)
            elif time.monotonic() > self._deadline + DECISION_GRACE_S:
                raise Unavailable("The head node does not answer.", "look at the log of node 0")
            time.sleep(0.05)
        told: dict[str, Any] = json.loads(store.get("decision"))
        store.set(f"heard/{own}", "1")
        if self._topology.node_rank == 0 and not told["hosts"]:
            self._linger(store)
        return told

    def _look(self, store: Store) -> None:
        """The head's part: decide once every node is there, or once the time is over."""
        nodes = range(self._topology.nnodes)
        missing = [node for node in nodes if not store.check([str(node)])]
        if not missing:
            greetings = {node: json.loads(store.get(str(node))) for node in nodes}
            hosts = {node: greeting["host"] for node, greeting in greetings.items()}
            difference = _difference({node: greeting["facts"] for node, greeting in greetings.items()}, hosts)
            _decide(store, error=difference) if difference else _decide(store, hosts=hosts)
        elif time.monotonic() > self._deadline:
            names = ", ".join(map(str, missing))
            message = f"Of {len(nodes)} nodes, these did not arrive within {self._timeout_s:g} s: {names}."
            hint = "look at their logs, or allow more with --rendezvous-timeout-s"
            _decide(store, error=Unavailable(message, hint))

    def _linger(self, store: Store) -> None:
        """Keep the store until all nodes that came have heard why there will be no run."""
        deadline = time.monotonic() + DECISION_GRACE_S
        came = [node for node in range(self._topology.nnodes) if store.check([str(node)])]
        while not store.check([f"heard/{node}" for node in came]) and time.monotonic() < deadline:
            time.sleep(0.05)


def _decide(
    store: Store, *, hosts: dict[int, str] | None = None, error: UserError | None = None, stop: bool = False
) -> None:
    """Write what happens next, for all nodes; only the first decision counts."""
    told = {"hosts": hosts or {}, "stop": stop, "error": error and (error.message, error.hint, error.exit_code)}
    store.compare_set("decision", "", json.dumps(told))


def _difference(facts: dict[int, dict[str, Any]], hosts: dict[int, str]) -> UserError | None:
    """The first fact that is not the same on all nodes, as an error."""
    for node, theirs in facts.items():
        for name in sorted(facts[0].keys() | theirs.keys()):
            if theirs.get(name) != facts[0].get(name):
                return UserError(
                    f"Nodes differ in {name}: node 0 ({hosts[0]}) has {facts[0].get(name)}, "
                    f"node {node} ({hosts[node]}) has {theirs.get(name)}.",
                    "start all nodes from one image with one command",
                )
    return None


def _serve(topology: Topology, timeout_s: float, writer: int) -> NoReturn:
    """Body of the store's process: listen, tell the port or the error, and stay until the agent ends."""
    stop.die_with_parent()
    for number in (*stop.STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        address = topology.master_addr if topology.master_port else "localhost"
        wait = timedelta(seconds=timeout_s)
        store = TCPStore(address, topology.master_port, is_master=True, wait_for_workers=False, timeout=wait)
        answer = str(store.port)
    except BaseException as error:  # noqa: BLE001 this process must never run on in its parent's code
        answer = str(error) or type(error).__name__
    with os.fdopen(writer, "w") as out:
        out.write(answer)
    while True:
        signal.pause()
