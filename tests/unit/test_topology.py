"""Which rank am I? Every way a process can be started, and every way that can go wrong."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import topology
from trainer.errors import UserError
from trainer.topology import expand_nodelist, is_loopback, port_for, resolve

PET = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "head",
    "PET_MASTER_PORT": "29400",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[01-08]",
}
BATCH = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_NAMESPACE": "prterun-1",
    "MASTER_ADDR": "head",
}
PYTORCHJOB = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
PYTORCHJOB_PET = {
    **PYTORCHJOB,
    "WORLD_SIZE": "8",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}
INDEXED = {
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "job-0.job",
}

RESOLVED = {
    "our own launchers": (PET, "PET", {"rank": None, "master_addr": "head", "master_port": 29400}),
    "torchrun": (TORCHRUN, "torchrun", {"rank": 5, "local_rank": 1, "master_port": 29400, "agent_store": True}),
    "srun": (SRUN, "Slurm", {"rank": 5, "local_rank": 1, "master_addr": "gpu07", "master_port": port_for("77")}),
    "mpirun": (MPI, "Open MPI", {"rank": 5, "local_rank": 1, "master_port": port_for("prterun-1")}),
    "PyTorchJob of Kubeflow with PET": (PYTORCHJOB_PET, "PET", {"rank": None, "master_port": 23456}),
    "Indexed Job with PET": (INDEXED, "PET", {"rank": None, "master_addr": "job-0.job", "master_port": 29500}),
}


@pytest.mark.parametrize(("env", "source", "more"), RESOLVED.values(), ids=RESOLVED.keys())
def test_the_second_of_two_nodes_with_four_processes_knows_its_place(env, source, more):
    place = resolve(env)
    assert (place.source, place.nnodes, place.nproc_per_node, place.node_rank) == (source, 2, 4, 1)
    assert place.world_size == 8
    assert {name: getattr(place, name) for name in more} == more


def test_an_older_pytorchjob_tells_nodes_and_index_by_rank_and_world_size():
    place = resolve(PYTORCHJOB, 3)
    assert (place.source, place.nnodes, place.nproc_per_node, place.node_rank, place.rank) == (
        "PyTorchJob",
        2,
        3,
        1,
        None,
    )
    assert (place.master_addr, place.master_port) == ("job-master-0", 23456)


def test_a_batch_script_of_one_task_runs_without_srun():
    place = resolve(BATCH, 2)
    assert (place.nnodes, place.nproc_per_node, place.rank, place.master_addr) == (1, 2, None, "127.0.0.1")


@pytest.mark.parametrize("step", ["-5", "4294967291"])
def test_a_batch_script_is_no_step_even_if_slurm_numbers_it(step):
    assert resolve({**BATCH, "SLURM_STEP_ID": step}).source == "nothing"


def test_without_any_launcher_there_is_one_node_on_any_free_port():
    place = resolve({})
    assert (place.source, place.world_size, place.rank, place.master_port) == ("nothing", 1, None, 0)
    assert resolve({}, 3).nproc_per_node == 3


def test_srun_with_one_task_a_node_and_a_count_of_processes_starts_agents():
    env = {**SRUN, "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    place = resolve(env, 4)
    assert (place.nnodes, place.nproc_per_node, place.node_rank, place.rank) == (2, 4, 1, None)
    assert (resolve(env).rank, resolve(env).nproc_per_node) == (1, 1)


@pytest.mark.parametrize("word", ["auto", "gpu", "cpu"])
def test_words_of_torchrun_leave_the_count_to_the_node(word):
    assert resolve({**PET, "PET_NPROC_PER_NODE": word}).nproc_per_node is None


def test_a_flag_decides_where_the_environment_leaves_the_count_open():
    assert resolve({**PET, "PET_NPROC_PER_NODE": "auto"}, 3).nproc_per_node == 3


def test_the_head_s_port_comes_with_its_address():
    env = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "MASTER_ADDR": "head", "MASTER_PORT": "4000"}
    assert resolve(env).master_port == 4000
    assert resolve({**env, "PET_MASTER_ADDR": "head"}).master_port == 29500


def test_all_tasks_of_a_slurm_job_derive_the_same_port_below_the_ephemeral_range():
    assert resolve(SRUN).master_port == resolve({**SRUN, "SLURM_PROCID": "7", "SLURM_LOCALID": "3"}).master_port
    assert port_for("77") != port_for("78")
    assert all(20000 <= port_for(str(job)) < 30000 for job in range(100))


NESTED = {
    "torchrun inside srun": ({**SRUN, **TORCHRUN}, "torchrun"),
    "mpirun inside a Slurm job": ({**BATCH, "SLURM_NTASKS": "8", "SLURM_NNODES": "2", **MPI}, "Open MPI"),
    "mpirun that starts its daemons with srun": ({**SRUN, **MPI}, "Open MPI"),
    "our launcher inside a Slurm job": ({**SRUN, **PET}, "PET"),
    "torchrun inside an Indexed Job": ({**INDEXED, **TORCHRUN}, "torchrun"),
}


@pytest.mark.parametrize(("env", "source"), NESTED.values(), ids=NESTED.keys())
def test_the_inner_of_two_launchers_wins(env, source):
    assert resolve(env).source == source


LOCAL_PET = {**PET, "PET_MASTER_ADDR": "127.0.0.1"}
REFUSED = {
    "index of the Job and of PET differ": ({**PET, "JOB_COMPLETION_INDEX": "0"}, None, "PET_NODE_RANK"),
    "RANK of a PyTorchJob and index of PET differ": ({**PYTORCHJOB_PET, "RANK": "0"}, None, "RANK=0"),
    "PET and the flag count other processes": (PET, 2, "--nproc-per-node says 2"),
    "torchrun and the flag count other processes": (TORCHRUN, 2, "LOCAL_WORLD_SIZE says 4"),
    "mpirun and the flag count other processes": (MPI, 2, "OMPI_COMM_WORLD_LOCAL_SIZE says 4"),
    "srun and the flag count other processes": (SRUN, 2, "SLURM_NTASKS says 4"),
    "world size is no multiple of the local one": ({**TORCHRUN, "WORLD_SIZE": "7"}, None, "Contradictory"),
    "MPI slots are uneven": ({**MPI, "OMPI_COMM_WORLD_SIZE": "7"}, None, "Contradictory"),
    "Slurm tasks are uneven": ({**SRUN, "SLURM_STEP_NUM_TASKS": "7"}, None, "Contradictory"),
    "node index beyond the nodes": ({**PET, "PET_NODE_RANK": "2"}, None, "Node index 2 of 2"),
    "rank beyond the world": ({**TORCHRUN, "RANK": "8"}, None, "Rank 8"),
    "local rank beyond the node": ({**TORCHRUN, "LOCAL_RANK": "4"}, None, "local 4"),
    "no node at all": ({**PET, "PET_NNODES": "0"}, None, "at least one node"),
    "no process at all": ({**PET, "PET_NPROC_PER_NODE": "0"}, None, "at least one"),
    "no process in torchrun's words": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, None, "HINT"),
    "no process in MPI's words": ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "0"}, None, "HINT"),
    "no node in Slurm's words": ({**SRUN, "SLURM_STEP_NUM_NODES": "0"}, None, "HINT"),
    "a world that is neither nodes nor ranks": ({**PET, "WORLD_SIZE": "5"}, None, "WORLD_SIZE"),
    "several nodes and no index": ({"PET_NNODES": "2", "PET_MASTER_ADDR": "head"}, None, "PET_NODE_RANK"),
    "several nodes and no head": ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, None, "PET_MASTER_ADDR"),
    "several MPI hosts and no head": ({**MPI, "MASTER_ADDR": ""}, None, "MASTER_ADDR"),
    "several Slurm nodes and no list": (
        {**SRUN, "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""},
        None,
        "MASTER_ADDR",
    ),
    "loopback head of two nodes": (LOCAL_PET, None, "loopback"),
    "localhost as head of two nodes": ({**PET, "PET_MASTER_ADDR": "localhost"}, None, "loopback"),
    "IPv6 loopback as head of two nodes": ({**TORCHRUN, "MASTER_ADDR": "::1"}, None, "loopback"),
    "a port that does not exist": ({**PET, "PET_MASTER_PORT": "65536"}, None, "Port 65536"),
    "Indexed Job without PET": ({"JOB_COMPLETION_INDEX": "1"}, None, "PET_NNODES"),
    "a batch script of many tasks without srun": ({**BATCH, "SLURM_NTASKS": "8"}, None, "srun trainer train"),
    "a batch script on many nodes without srun": ({**BATCH, "SLURM_NNODES": "2"}, None, "srun trainer train"),
    "a companion is missing": (
        {name: value for name, value in TORCHRUN.items() if name != "WORLD_SIZE"},
        None,
        "WORLD_SIZE is not set",
    ),
}


@pytest.mark.parametrize(("env", "nproc", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_a_contradictory_environment_is_refused_with_a_hint(env, nproc, told):
    with pytest.raises(UserError, match=re.escape(told)) as caught:
        resolve(env, nproc)
    assert re.fullmatch(r"[^\n]+ HINT: [^\n]+", str(caught.value))


def test_loopback_is_a_head_only_for_nodes_that_share_a_host():
    assert resolve({**LOCAL_PET, "TRAINER_SHARED_HOST": "1"}).shared_host
    assert resolve({**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "TRAINER_SHARED_HOST": "1"}).shared_host
    for other in ("0", "yes", ""):
        with pytest.raises(UserError, match="loopback"):
            resolve({**LOCAL_PET, "TRAINER_SHARED_HOST": other})


@pytest.mark.parametrize("text", ["", "x", "1:4", "-1", "1.0", " 1", "1\n", "9" * 30])
@pytest.mark.parametrize(
    ("env", "name"),
    [
        *((PET, name) for name in ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_PORT")),
        *((TORCHRUN, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")),
        *((SRUN, name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS")),
        *((MPI, name) for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")),
        (PYTORCHJOB, "WORLD_SIZE"),
        (INDEXED, "JOB_COMPLETION_INDEX"),
    ],
)
def test_a_bad_number_is_refused_by_name(env, name, text):
    with pytest.raises(UserError, match=rf"(?s){name}={re.escape(repr(text))} .* HINT: "):
        resolve({**env, name: text})


@pytest.mark.parametrize(
    ("address", "answer"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("localhost.localdomain", True),
        ("10.0.0.1", False),
        ("node1", False),
        ("localhost1", False),
    ],
)
def test_loopback_addresses_are_recognised(address, answer):
    assert is_loopback(address) is answer


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("a[01-03,7],b", ["a01", "a02", "a03", "a7", "b"]),
        ("n1", ["n1"]),
        ("r[1-2]c[1-2]", ["r1c1", "r1c2", "r2c1", "r2c2"]),
        ("gpu[098-101]-ib", ["gpu098-ib", "gpu099-ib", "gpu100-ib", "gpu101-ib"]),
        ("b,a", ["b", "a"]),
        ("", []),
    ],
)
def test_a_node_list_of_slurm_is_written_out(nodelist, hosts):
    assert expand_nodelist(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["gpu[x]", "gpu[1-y]", "gpu[]"])
def test_a_damaged_node_list_is_a_user_error(nodelist):
    with pytest.raises(UserError, match="HINT"):
        resolve({**SRUN, "SLURM_STEP_NODELIST": nodelist})


WORD = st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z]", fullmatch=True)


@st.composite
def bracketed(draw):
    """`stem[ranges]tail` and its hosts, made the other way round: hosts first."""
    stem, tail = draw(WORD), draw(st.sampled_from(["", "-ib", ".local"]))
    texts, hosts = [], []
    for _ in range(draw(st.integers(1, 3))):
        width, first = draw(st.integers(1, 4)), draw(st.integers(0, 120))
        numbers = [str(first + step).zfill(width) for step in range(draw(st.integers(1, 5)))]
        texts.append(numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
        hosts += [f"{stem}{number}{tail}" for number in numbers]
    return f"{stem}[{','.join(texts)}]{tail}", hosts


@given(st.lists(st.one_of(WORD.map(lambda name: (name, [name])), bracketed()), min_size=1, max_size=4))
def test_any_list_of_plain_and_bracketed_names_is_written_out(parts):
    text = ",".join(text for text, _ in parts)
    assert expand_nodelist(text) == [host for _, hosts in parts for host in hosts]


def test_every_row_of_the_table_is_met_by_a_test():
    met = {source for _, source, _ in RESOLVED.values()} | {
        "PyTorchJob",
        "Slurm batch script",
        "Indexed Job",
        "nothing",
    }
    assert met == {row.name for row in topology.TABLE}
