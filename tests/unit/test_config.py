"""Defaults, file, environment and flags: which one wins, and what is refused."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import config
from trainer.config import TrainConfig, resolve
from trainer.errors import UserError

PLAIN = TrainConfig()
LAYERS = ("default", "file", "environment", "flag")


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "train.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize("strongest", range(len(LAYERS)), ids=LAYERS)
def test_each_layer_beats_the_weaker_ones(strongest, toml):
    path = toml("epochs = 2")
    resolved = resolve(
        {"epochs": "4"} if strongest >= 3 else {},
        {"TRAINER_EPOCHS": "3"} if strongest >= 2 else {},
        path if strongest >= 1 else None,
    )
    assert resolved.config.epochs == (PLAIN.epochs, 2, 3, 4)[strongest]
    assert resolved.sources["epochs"] == ("default", f"file {path}", "environment", "flag")[strongest]


def test_the_table_names_every_field_its_value_and_where_it_came_from(toml):
    path = toml("lr = 0.5")
    table = resolve({"seed": "9"}, {"TRAINER_DATASET": "mnist"}, path).table().splitlines()
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in table}
    assert rows.keys() == config.fields().keys()
    assert rows["lr"] == ["0.5", f"file {path}"]
    assert rows["dataset"] == ["mnist", "environment"]
    assert rows["seed"] == ["9", "flag"]
    assert rows["epochs"] == [str(PLAIN.epochs), "default"]


def test_a_file_may_use_dashes_or_underscores_and_keeps_types(toml):
    resolved = resolve({}, {}, toml('batch-size = 32\nrun_id = "a"\ndownload = true\nlr = 1\nmax_steps = "none"'))
    values = resolved.config
    assert (values.batch_size, values.run_id, values.download, values.lr, values.max_steps) == (
        32,
        "a",
        True,
        1.0,
        None,
    )


def test_threads_come_from_the_name_that_torch_reads_too():
    assert resolve({}, {"OMP_NUM_THREADS": "3"}).config.threads == 3
    assert resolve({"threads": "2"}, {"OMP_NUM_THREADS": "3"}).config.threads == 2


def test_a_file_wins_over_the_threads_that_launchers_set_unasked(toml):
    path = toml("threads = 4")
    assert resolve({}, {"OMP_NUM_THREADS": "1"}, path).config.threads == 4
    assert resolve({}, {"OMP_NUM_THREADS": "1", "TRAINER_THREADS": "5"}, path).config.threads == 5


def test_names_of_launchers_and_strangers_pass_through():
    others = {"TRAINER_RUNTIME": "docker", "TRAINER_LOG_PREFIX": "1", "PET_NNODES": "2", "HOME": "/", "EPOCHS": "9"}
    assert resolve({}, others).config == PLAIN


UNKNOWN = {
    "a key of the file": ("epoch = 3", {}, {}, "epochs"),
    "a table in the file": ("[optimizer_options]\nlr = 1", {}, {}, "optimizer"),
    "an environment name": ("", {"TRAINER_EPOCH": "3"}, {}, "TRAINER_EPOCHS"),
    "a choice on the command line": ("", {}, {"dataset": "minst"}, "mnist"),
    "a choice in the environment": ("", {"TRAINER_WORKLOAD": "resnet"}, {}, "mnist"),
    "a choice in the file": ('schedule = "onecycle"', {}, {}, "one-cycle"),
}


@pytest.mark.parametrize(("text", "env", "flags", "valid"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_an_unknown_name_is_refused_and_the_valid_ones_listed(text, env, flags, valid, toml):
    with pytest.raises(UserError, match=r"^Unknown .*; valid are: .* HINT: ") as caught:
        resolve(flags, env, toml(text))
    assert valid in str(caught.value).partition("valid are: ")[2]


def test_a_name_nearly_right_is_guessed():
    with pytest.raises(UserError, match=r"HINT: --dataset fashion-mnist$"):
        resolve({"dataset": "fashion_mnist"}, {})


BAD = {
    "text for a number": ("epochs", "x", "a whole number"),
    "nothing for a number": ("epochs", "", "a whole number"),
    "a fraction for a whole number": ("batch_size", "1.5", "a whole number"),
    "text for a fraction": ("lr", "fast", "a number"),
    "a number for yes or no": ("download", "2", "true or false"),
    "nothing for a text": ("data_dir", "", "a non-empty text"),
    "text for an optional number": ("max_steps", "x", "a whole number"),
}


@pytest.mark.parametrize(("name", "text", "wanted"), BAD.values(), ids=BAD.keys())
def test_a_value_of_the_wrong_type_is_refused_where_it_was_given(name, text, wanted, toml):
    path = toml(f'{name} = "{text}"')
    for layers, place in (
        (({name: text}, {}, None), config.flag(name)),
        (({}, {f"TRAINER_{name.upper()}": text}, None), f"TRAINER_{name.upper()}"),
        (({}, {}, path), f"{path}: {name}"),
    ):
        with pytest.raises(UserError, match=f"{re.escape(place)} = .* is not {wanted}.* HINT: "):
            resolve(*layers)


@pytest.mark.parametrize("text", ["epochs = 1.0", "epochs = [1]", "epochs = true", "lr = {a = 1}", "seed = 1979-05-27"])
def test_a_value_of_the_wrong_toml_type_is_refused(text, toml):
    with pytest.raises(UserError, match=r"is not a (whole )?number"):
        resolve({}, {}, toml(text))


@pytest.mark.parametrize(
    ("name", "value"),
    [("epochs", 0), ("batch_size", -1), ("lr", -0.1), ("lr", float("nan")), ("seed", -1), ("threads", 0)],
)
def test_a_value_out_of_range_is_refused(name, value):
    with pytest.raises(UserError, match=rf"{config.flag(name)} .*below.* HINT: "):
        TrainConfig(**{name: value})


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", "", "/"])
def test_a_run_id_is_a_plain_folder_name(name):
    with pytest.raises(UserError, match="HINT"):
        resolve({"run_id": name}, {})


FILES = {
    "missing": (None, "Cannot read"),
    "not TOML": (b"epochs: 3", "is not TOML"),
    "not text": (b"\xff\xfe", "is not TOML"),
}


@pytest.mark.parametrize(("content", "told"), FILES.values(), ids=FILES.keys())
def test_a_file_that_cannot_be_read_is_a_user_error(content, told, tmp_path):
    path = tmp_path / "train.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"{told}.* HINT: ") as caught:
        resolve({}, {}, str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", config.fields())
def test_every_field_has_a_help_a_flag_and_an_environment_name(name):
    field = config.fields()[name]
    assert len(field.metadata["help"]) > 5
    assert re.fullmatch(r"--[a-z-]+", config.flag(name))
    assert re.fullmatch(r"[A-Z_]+", config.variable(field))


@pytest.mark.parametrize("name", config.fields())
def test_the_hash_changes_with_fields_that_shape_the_result_and_no_others(name):
    field = config.fields()[name]
    old = field.default
    choices = [choice for choice in field.metadata["choices"] if choice != old]
    if field.metadata["choices"] and not choices:
        return  # a single workload has no other value
    new = choices[0] if choices else {bool: not old, int: 7, float: 0.7, str: "other"}.get(type(old))
    if old is None:
        new = "other" if name == "run_id" else 7
    changed = dataclasses.replace(PLAIN, **{name: new})
    assert (changed.hash() != PLAIN.hash()) is field.metadata["shapes_result"]


def test_what_does_not_decide_the_weights_does_not_hinder_a_resume():
    free = set(config.fields()) - set(config.shaping_fields())
    assert {"epochs", "max_steps", "runs_dir", "data_dir", "resume", "run_id", "timeout_s"} <= free


@given(st.integers(1, 10**9), st.floats(0, 1e6), st.booleans(), st.sampled_from(config.DATASETS))
def test_what_str_writes_resolve_reads(steps, lr, download, dataset):
    env = {
        "TRAINER_MAX_STEPS": str(steps),
        "TRAINER_LR": str(lr),
        "TRAINER_DOWNLOAD": str(download),
        "TRAINER_DATASET": dataset,
    }
    values = resolve({}, env).config
    assert (values.max_steps, values.lr, values.download, values.dataset) == (steps, lr, download, dataset)


@given(st.text(min_size=1).filter(lambda text: text != "none"))
def test_any_text_reaches_a_text_field_unchanged(text):
    assert resolve({"data_dir": text}, {}).config.data_dir == text
