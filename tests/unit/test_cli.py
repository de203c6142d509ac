"""The command line: what it prints, what it refuses, and that it stays light."""

import json
import os
import subprocess
import sys

import pytest

import trainer
from trainer import cli, contract
from trainer.errors import UserError


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("TRAINER_", "PET_", "SLURM_", "OMPI_")) or name in ("OMP_NUM_THREADS", "RANK"):
            monkeypatch.delenv(name)


def refused(capsys, *words):
    """The one line on stderr of a bad request."""
    assert cli.main(words) == contract.EXIT_BAD_REQUEST == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert told.err.startswith("error: ")
    assert told.err.endswith("\n")
    assert " HINT: " in told.err
    return told.err


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["--version"], ["train", "--show-config"]])
def test_a_look_at_the_command_line_imports_nothing_heavy(words):
    code = (
        "import sys; from trainer import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'numpy', 'torchvision', 'tensorboardX', 'launch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_bad_request_ends_the_process_with_two_and_one_line():
    done = subprocess.run([sys.executable, "-m", "trainer", "trian"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


BAD = {
    "no verb": ([], "VERB"),
    "an unknown verb": (["trian"], "'trian'"),
    "an unknown flag": (["train", "--epoch", "3"], "'--epoch'"),
    "an unknown flag with its value": (["train", "--epoch=3"], "'--epoch"),
    "an unknown word": (["train", "mnist"], "mnist"),
    "an unknown workload": (["train", "--workload", "resnet"], "'resnet'"),
    "an unknown data set": (["train", "--dataset", "minst"], "'minst'"),
    "a flag without its value": (["train", "--epochs"], "--epochs"),
    "a number that is none": (["train", "--epochs", "x"], "--epochs = 'x'"),
    "a file that is missing": (["train", "--config", "/nowhere/train.toml"], "/nowhere/train.toml"),
    "processes that are no number": (["train", "--nproc-per-node", "auto"], "--nproc-per-node 'auto'"),
    "processes by a superscript": (["train", "--nproc-per-node", "²"], "--nproc-per-node '²'"),
    "no processes": (["train", "--nproc-per-node", "0"], "--nproc-per-node '0'"),
    "a report of nothing": (["report"], "RUN"),
    "data of an unknown kind": (["data", "make", "mnist", "--out", "/nowhere"], "drawn-digits"),
    "data for nowhere": (["data", "make", "drawn-digits"], "--out"),
    "no training data": (["data", "make", "drawn-digits", "--out", "/nowhere", "--train", "0"], "--train"),
    "test data that are no number": (["data", "make", "drawn-digits", "--out", "/nowhere", "--test", "x"], "--test"),
    "a seed below zero": (["data", "make", "drawn-digits", "--out", "/nowhere", "--seed", "-1"], "--seed"),
}


@pytest.mark.parametrize(("words", "told"), BAD.values(), ids=BAD.keys())
def test_a_bad_request_is_one_line_with_a_hint(words, told, capsys):
    assert told in refused(capsys, *words)


def test_an_unknown_flag_is_answered_with_the_nearest_one_of_its_verb(capsys):
    told = refused(capsys, "train", "--epoch", "3")
    assert "--batch-size" in told
    assert told.endswith("HINT: the flag --epochs\n")


def test_a_flag_is_never_abbreviated(capsys):
    assert "--batch" in refused(capsys, "train", "--batch", "3")


def test_show_config_tells_each_value_and_its_source(capsys, monkeypatch):
    monkeypatch.setenv("TRAINER_LR", "0.5")
    assert cli.main(["train", "--show-config", "--epochs", "3", "--no-deterministic"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["lr"] == ["0.5", "environment"]
    assert rows["epochs"] == ["3", "flag"]
    assert rows["deterministic"] == ["False", "flag"]
    assert rows["seed"] == ["1", "default"]


def test_a_contradictory_environment_is_found_before_anything_starts(capsys, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "2")
    assert "PET_NODE_RANK" in refused(capsys, "train")


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"{trainer.__version__}\n"


def test_ctrl_c_ends_as_a_shell_expects(monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "report", interrupted)
    assert cli.main(["report", "x"]) == 130


DAMAGED = {
    "no folder": None,
    "no record": {},
    "a record cut off": {"run.json": b'{"run_id": "a", "sta'},
    "a record that is no text": {"run.json": b"\xff\xfe\x00"},
    "a record that is a list": {"run.json": b"[]"},
    "an empty record": {"run.json": b"{}"},
}


@pytest.mark.parametrize("files", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_report_on_a_missing_or_damaged_run_says_so(files, tmp_path, capsys):
    run = tmp_path / "run"
    if files is not None:
        run.mkdir()
        for name, content in files.items():
            (run / name).write_bytes(content)
    assert str(run) in refused(capsys, "report", str(run))


def test_drawn_digits_are_made_where_asked(tmp_path, capsys):
    words = ["data", "make", "drawn-digits", "--out", str(tmp_path), "--train", "3", "--test", "2"]
    assert cli.main(words) == 0
    files = capsys.readouterr().out.splitlines()
    assert len(files) == 4
    assert all(os.path.isfile(path) for path in files)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "below"
    told = refused(capsys, "data", "make", "drawn-digits", "--out", str(out), "--train", "1", "--test", "1")
    assert str(out) in told


def test_every_user_error_carries_its_hint():
    assert str(UserError("It is so.", "do this")) == "It is so. HINT: do this"
    assert isinstance(UserError("a", "b"), ValueError)


def test_the_contract_is_plain_data_that_json_can_hold():
    assert json.loads(json.dumps(contract.TABLE)) == contract.TABLE
    assert contract.is_allowed("NCCL_DEBUG")
    assert not contract.is_allowed("SECRET")
