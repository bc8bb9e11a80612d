"""The LoRA adapters of a model: which can be served, where their files may lie, what they hold and what is sent."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases import every_case
from tests.lora_files import write_lora
from triton_openai.config.tree import LoraSettings, ModelSettings
from triton_openai.errors import ConfigurationError
from triton_openai.generation import LoraFormat
from triton_openai.models.lora.lora_files import (
    CONFIG,
    WEIGHTS,
    check,
    find_folder,
    find_loras,
    load,
    number_of,
    served_name,
)

FP16 = LoraFormat("FP16", 3)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with an adapter, beside another's, with links and oddities."""
    root = tmp_path_factory.mktemp("repository")
    write_lora(root / "model" / "1" / "good")
    write_lora(root / "other" / "secret")
    write_lora(root / "model-2" / "1")
    (root / "model" / "out").symlink_to(root / "other")
    (root / "model" / "in").symlink_to(root / "model" / "1")
    (root / "model" / "loop").symlink_to(root / "model" / "loop")
    (root / "model" / "file").write_text("no folder")
    return root


def save(folder: Path, weights: Any = None, config: Any = None) -> Path:
    """Write what is given over an adapter's files."""
    folder = write_lora(folder)
    if weights is not None:
        np.save(folder / WEIGHTS, weights)
    if config is not None:
        np.save(folder / CONFIG, config)
    return folder


# Where they lie


@every_case("path", ["1/good", "./1/../1/good", "in/good", "../model/1/good", "1//good/"])
def test_folders_inside(tree, path):
    """A folder counts by where it leads, however it is written."""
    root = tree / "model"

    assert (root / "1" / "good").resolve() == find_folder(path, root=root, bases=[root])


def test_an_absolute_path_inside(tree):
    """An absolute path inside is as good as a relative one."""
    root = tree / "model"

    assert (root / "1" / "good").resolve() == find_folder(str(root / "in" / "good"), root=root, bases=[root])


@every_case(
    "path",
    ["..", "../other/secret", "out/secret", "in/../../other/secret", "/", "/etc", "../model-2/1", "1/../../other"],
)
def test_folders_outside(tree, path):
    """Links, dots, absolute paths and names that begin alike do not lead out."""
    with pytest.raises(ConfigurationError, match="lies outside of"):
        find_folder(path, root=tree / "model", bases=[tree / "model"])


@every_case("path", ["none", "file", "1/good/model.lora_weights.npy", "loop", "a\0b", "x" * 5000, "~"])
def test_no_folder(tree, path):
    """What is not there is said plainly."""
    with pytest.raises(ConfigurationError):
        find_folder(path, root=tree / "model", bases=[tree / "model"])


def test_a_root_that_is_not_there(tree):
    """A root that does not exist is an error, and so is a model's folder."""
    with pytest.raises(ConfigurationError, match="cannot be read"):
        find_folder("1", root=tree / "none", bases=[tree / "none"])


PARTS = st.sampled_from(
    ["..", ".", "", "1", "good", "in", "out", "other", "model", "secret", "model-2", "file", "loop"]
)


@given(parts=st.lists(PARTS | st.text(max_size=5), max_size=8), absolute=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_path_leads_out(tree, parts, absolute):
    """Whatever the path, the answer is a folder inside, or an error of ours."""
    root = tree / "model"
    path = (f"{tree}/" if absolute else "") + "/".join(parts)
    try:
        folder = find_folder(path, root=root, bases=[root / "1", root, tree])
    except ConfigurationError:
        return
    assert folder.is_dir()
    assert folder == folder.resolve()
    assert folder.is_relative_to(root.resolve())


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_a_file_that_is_a_link_out(tmp_path, name):
    """The files themselves may not lead out either, when they are looked at and when they are read."""
    folder = write_lora(tmp_path / "model" / "lora")
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)

    for look in (check, load):
        with pytest.raises(ConfigurationError, match="leads out of"):
            look(folder, tmp_path / "model", FP16)


def test_a_pipe_is_no_file(tmp_path):
    """Opening one would wait for ever."""
    folder = write_lora(tmp_path / "lora")
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)

    with pytest.raises(ConfigurationError, match="there is no file"):
        check(folder, tmp_path, FP16)


# What they hold


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("form", ["object array", "bare pickle"])
def test_nothing_is_unpickled(tmp_path, form):
    """Neither arrays of objects nor plain pickles are unpickled."""
    folder = write_lora(tmp_path / "lora")
    mark = tmp_path / "mark"
    if form == "object array":
        np.save(folder / WEIGHTS, np.array([[Trap(mark)]], dtype=object), allow_pickle=True)
    else:
        (folder / WEIGHTS).write_bytes(pickle.dumps(Trap(mark)))

    for look in (check, load):
        with pytest.raises(ConfigurationError):
            look(folder, tmp_path, FP16)
    assert not mark.exists()


BROKEN = {
    "integers": (np.ones((1, 3, 8), np.int16), None, "holds int16"),
    "doubles": (np.ones((1, 3, 8)), None, "holds float64"),
    "text": (np.full((1, 3, 8), "x"), None, "holds"),
    "records": (np.zeros((1, 3, 8), [("a", "u1"), ("b", "u1")]), None, "holds"),
    "one dimension": (np.ones(8, np.float16), None, "shape [8]"),
    "a batch": (np.ones((2, 3, 8), np.float16), None, "shape [2, 3, 8]"),
    "four dimensions": (np.ones((1, 1, 3, 8), np.float16), None, "shape [1, 1, 3, 8]"),
    "no dimension": (np.float16(1), None, "shape []"),
    "other rows": (np.ones((1, 4, 8), np.float16), None, "4 rows"),
    "infinite": (np.full((1, 3, 8), np.inf, np.float16), None, "infinite"),
    "no number": (np.full((1, 3, 8), np.nan, np.float32), None, "infinite or not a number"),
    "too large for FP16": (np.full((1, 3, 8), 70000, np.float32), None, "as FP16"),
    "config of floats": (None, np.ones((1, 3, 3), np.float32), "holds float32"),
    "narrow config": (None, np.ones((1, 3, 2), np.int32), "2 columns"),
    "wide config": (None, np.ones((1, 3, 5), np.int32), "5 columns"),
    "DoRA": (None, np.ones((1, 3, 4), np.int32), "DoRA"),
    "negative config": (None, np.full((1, 3, 3), -1, np.int32), "none of a module"),
    "config beyond 32 bits": (None, np.full((1, 3, 3), 2**40), "none of a module"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_arrays_that_are_none_of_an_adapter(tmp_path, name):
    """Each is refused with what is wrong about it."""
    weights, config, reason = BROKEN[name]
    folder = save(tmp_path / "lora", weights, config)

    with pytest.raises(ConfigurationError) as failure:
        load(folder, tmp_path, FP16)
    assert reason in failure.value.message


@pytest.mark.parametrize("shape", [(1, 3, 0), (1, 0, 8), (0, 3, 8)])
def test_empty_arrays(tmp_path, shape):
    """An adapter of empty arrays is none."""
    folder = save(tmp_path / "lora", np.ones(shape, np.float16))

    with pytest.raises(ConfigurationError):
        check(folder, tmp_path, FP16)


def test_an_adapter_that_no_message_can_hold(tmp_path):
    """An adapter that no message can hold is found by its header, before two gigabytes are read."""
    folder = write_lora(tmp_path / "lora")
    file = np.lib.format.open_memmap(folder / WEIGHTS, mode="w+", dtype=np.float16, shape=(1, 3, 2**29))
    del file

    with pytest.raises(ConfigurationError, match="lora_prefetch_dir"):
        check(folder, tmp_path, FP16)


def test_a_file_shorter_than_its_header_says(tmp_path):
    """A file shorter than its header says is found without reading the file."""
    folder = write_lora(tmp_path / "lora")
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(ConfigurationError, match="not an array"):
        check(folder, tmp_path, FP16)


GOOD = io.BytesIO()
np.save(GOOD, np.ones((1, 3, 8), np.float16))


@given(
    st.binary(max_size=200)
    | st.builds(lambda head, tail: b"\x93NUMPY" + head + tail, st.binary(max_size=4), st.binary(max_size=200))
    | st.builds(
        lambda place, byte: GOOD.getvalue()[:place] + byte + GOOD.getvalue()[place + 1 :],
        st.integers(0, len(GOOD.getvalue()) - 1),
        st.binary(min_size=1, max_size=1),
    )
    | st.builds(
        lambda header: b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header,
        st.sampled_from(
            [
                b"{'descr': '<f2', 'fortran_order': False, 'shape': (-1, 8)}",
                b"{'descr': '<f2', 'fortran_order': False, 'shape': (99999999999999999999, 8)}",
                b"{'descr': '<f2', 'fortran_order': False, 'shape': (3037000500, 3037000500)}",
                b"{'descr': '<f2', 'fortran_order': 1, 'shape': (3, True)}",
                b"{'descr': '|O', 'fortran_order': False, 'shape': (3, 8)}",
                b"{'descr': [('a', '<f2')], 'fortran_order': False, 'shape': (3, 8)}",
                b"{'descr': '<f2', 'shape': (3, 8)}",
                b"(" * 5000,
                b"{" * 900 + b"}" * 900,
            ]
        ),
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_hostile_files(tmp_path, content):
    """Any bytes are an adapter, or an error of ours."""
    folder = tmp_path / "lora"
    if not folder.exists():
        write_lora(folder)
    (folder / WEIGHTS).write_bytes(content)
    for look in (check, load):
        with contextlib.suppress(ConfigurationError):
            look(folder, tmp_path, FP16)


# What is sent


def as_bf16(numbers: Any) -> Any:
    """Return float32 numbers as bfloat16 the way TensorRT-LLM writes them: two bytes without a meaning."""
    return (np.asarray(numbers, "<f4").view("<u4") >> 16).astype("<u2").view("V2")


EXACT = np.array([[0.0, -1.5, 2.0**-10, 384.0], [1.0, -0.0, 0.25, -3.0]], np.float32)
DTYPES = {"FP16": "<f2", "FP32": "<f4"}


@pytest.mark.parametrize("written", ["float16", "float32", "big endian", "bfloat16", "columns first", "two dimensions"])
@pytest.mark.parametrize("wanted", ["FP16", "FP32", "BF16"])
def test_weights_are_sent_as_the_model_takes_them(tmp_path, written, wanted):
    """Weights are converted from every dtype that the converter writes to every one that a model may declare."""
    array = {
        "float16": EXACT.astype(np.float16)[None],
        "float32": EXACT[None],
        "big endian": EXACT.astype(">f4")[None],
        "bfloat16": as_bf16(EXACT)[None],
        "columns first": np.asfortranarray(EXACT[None]),
        "two dimensions": EXACT,
    }[written]
    folder = save(tmp_path / "lora", array, np.ones((1, 2, 3), np.int64))

    weights, config = load(folder, tmp_path, LoraFormat(wanted, 3))

    assert (wanted, (2, 4)) == (weights.datatype, weights.shape)
    if wanted == "BF16":
        assert as_bf16(EXACT).tobytes() == weights.data
    else:
        assert EXACT.astype(DTYPES[wanted]).tobytes() == weights.data
    assert ("INT32", (2, 3), np.ones(6, "<i4").tobytes()) == (config.datatype, config.shape, config.data)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_bfloat16_is_rounded_to_the_nearest(tmp_path, values):
    """bfloat16 takes the nearer neighbour, the even one in the middle; the largest floats do not fit."""
    folder = tmp_path / "lora"
    if not folder.exists():
        write_lora(folder)
    np.save(folder / WEIGHTS, np.array([values], np.float32))
    np.save(folder / CONFIG, np.ones((1, 3), np.int32))
    try:
        weights, _ = load(folder, tmp_path, LoraFormat("BF16", 3))
    except ConfigurationError:
        assert max(map(abs, values)) > 3.389e38
        return
    bits = np.frombuffer(weights.data, "<u2").astype("<u4")
    got = (bits << 16).view("<f4").astype(float)
    below = ((bits - 1) << 16).view("<f4").astype(float)
    above = ((bits + 1) << 16).view("<f4").astype(float)
    for value, nearest, one, other in zip(values, got, below, above, strict=True):
        distances = [abs(value - each) for each in (one, other) if np.isfinite(each)]
        assert all(abs(value - nearest) <= distance for distance in distances)


def test_a_column_for_dora_that_says_no(tmp_path):
    """A model whose input has no room for it gets the others; one that has it gets all."""
    folder = write_lora(tmp_path / "lora", columns=4)

    assert (3, 3) == load(folder, tmp_path, FP16)[1].shape
    assert (3, 4) == load(folder, tmp_path, LoraFormat("FP16", 4))[1].shape


def test_numbers_come_from_the_contents(tmp_path):
    """The same contents make the same number wherever they lie; others make another."""
    one = write_lora(tmp_path / "one")
    two = write_lora(tmp_path / "two")
    same = tmp_path / "same"
    same.mkdir()
    for name in (WEIGHTS, CONFIG):
        (same / name).write_bytes((one / name).read_bytes())

    first, second, third = (number_of(*load(folder, tmp_path, FP16)) for folder in (one, two, same))

    assert first == third != second
    assert all(1 <= number < 2**63 for number in (first, second))


# Which adapters a model has


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose model has two versions with lists of their own."""
    repository = tmp_path / "models"
    for version, names in (("2", ["old"]), ("10", ["french", "german"])):
        folder = repository / "m" / version
        for name in names:
            write_lora(folder / name)
        (folder / "multi_lora.json").write_text(json.dumps({name: name for name in names}))
    return repository


def entry(name: str, task_id: int | None = None, path: str | None = None) -> LoraSettings:
    """Return an adapter of the settings file."""
    return LoraSettings(name=name, task_id=task_id, path=path)


def test_the_newest_version_counts(repository):
    """Ten is more than two."""
    found, problems = find_loras("m", ModelSettings(), [repository], FP16)

    assert ["french", "german"] == [lora.name for lora in found]
    assert [(repository / "m" / "10" / "french").resolve(), None] == [found[0].folder, found[0].number]
    assert [] == problems


def test_by_name(repository):
    """A model that knows its adapters itself needs no files, and its list may name any."""
    (repository / "m" / "10" / "multi_lora.json").write_text(json.dumps({"french": "/anywhere", "german": "hub/name"}))
    settings = ModelSettings(loras=("dutch", "french"))
    found, problems = find_loras("m", settings, [repository], None)

    assert ["dutch", "french", "german"] == [lora.name for lora in found]
    assert {None} == {lora.folder for lora in found}
    assert [] == problems


def test_settings_come_first(repository, tmp_path):
    """A name alone, or a number, takes its folder from the repository; a path is looked for in lora_dir."""
    write_lora(tmp_path / "shared" / "dutch")
    loras = ("french", entry("german", task_id=5), entry("dutch", path="dutch"), entry("known", task_id=6))
    found, problems = find_loras("m", ModelSettings(loras=loras, lora_dir=tmp_path / "shared"), [repository], FP16)

    assert [("french", None), ("german", 5), ("dutch", None), ("known", 6)] == [(it.name, it.number) for it in found]
    assert [True, True, True, False] == [lora.folder is not None for lora in found]
    assert [] == problems


def test_paths_of_the_settings_lie_in_the_models_folder(repository):
    """Paths of the settings lie in the model's folder where no other is given."""
    loras = (entry("inside", path="2/old"), entry("outside", path=".."))
    found, problems = find_loras("m", ModelSettings(loras=loras), [repository.parent, repository], FP16)

    assert ["inside", "french", "german"] == [lora.name for lora in found]
    (problem,) = problems
    assert "'outside'" in problem
    assert "lies outside of" in problem


@every_case(
    "lora, wanted, reason",
    [
        ("french", FP16, "needs its weights"),
        (entry("french", path="french"), FP16, "lora_dir"),
        (entry("french", path="french"), None, "by name"),
        (entry("french", task_id=3), None, "by name"),
    ],
)
def test_what_is_missing_is_said(lora, wanted, reason):
    """The adapter is not served, and the sentence names it."""
    found, problems = find_loras("m", ModelSettings(loras=(lora,)), [], wanted)

    assert [] == found
    (problem,) = problems
    assert "'french'" in problem
    assert reason in problem


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": 1}', b'{"": "a"}', b"\xff", b'{"a": "b"'])
def test_a_list_that_cannot_be_read(repository, content):
    """A list that cannot be read counts as none, and says why."""
    (repository / "m" / "10" / "multi_lora.json").write_bytes(content)
    found, problems = find_loras("m", ModelSettings(), [repository], FP16)

    assert [] == found
    assert 1 == len(problems)
    assert "multi_lora.json" in problems[0]


def test_public_names():
    """An adapter has its own name; with a separator, that of its model stands before it."""
    assert "french" == served_name("m", "french", None)
    assert "m_lora_french" == served_name("m", "french", "_lora_")
