"""Loading and unloading models, in front of a stand-in for Triton's client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.cases import every_case
from triton_openai.config.tree import Settings, TritonSettings
from triton_openai.draining import Draining, ModelDraining
from triton_openai.errors import (
    ManagementDisabled,
    ModelConflict,
    ModelNotFound,
    ModelUnloading,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from triton_openai.models import control as module
from triton_openai.models.control import ModelControl
from triton_openai.triton.client import IndexEntry
from triton_openai.triton.fleet import Fleet
from triton_openai.triton.tensors import EnsembleStep, ModelConfig

EXPLICIT = Settings(triton=TritonSettings(model_control_mode="explicit"))


def ensemble(name: str, *steps: str) -> ModelConfig:
    """Return the config of an ensemble."""
    return ModelConfig(name=name, steps=tuple(EnsembleStep(model=step, input_map={}, output_map={}) for step in steps))


CONFIGS = {
    config.name: config
    for config in (ensemble("outer", "inner", "x"), ensemble("inner", "y"), *map(ensemble, ("x", "y", "alone")))
}


class Triton:
    """Models in states; an unload takes as many looks at the index as *looks*."""

    def __init__(self, looks: float = 1) -> None:
        self.states = dict.fromkeys(CONFIGS, "READY")
        self.calls: list[tuple[str, bool]] = []
        self._looks = looks

    async def repository_index(self) -> list[IndexEntry]:
        """Return every model's state."""
        leaving = [name for name, state in self.states.items() if state == "UNLOADING"]
        if leaving:
            self._looks -= 1
            if self._looks <= 0:
                self.states.update(dict.fromkeys(leaving, "UNAVAILABLE"))
        return [IndexEntry(name=name, state=state) for name, state in self.states.items()]

    async def load_model(self, name: str) -> None:
        """Load."""
        self.states[name] = "READY"

    async def unload_model(self, name: str, *, dependents: bool) -> None:
        """Begin to unload *name*, and with its *dependents* what it consists of."""
        self.calls.append((name, dependents))
        for each in {"outer": ("outer", "inner", "x", "y")}.get(name, (name,)) if dependents else (name,):
            self.states[each] = "UNLOADING"


class Away(Triton):
    """Its list cannot be read."""

    async def repository_index(self) -> list[IndexEntry]:
        """Fail."""
        raise UpstreamUnavailable("It cannot be reached.")


def control(
    *tritons: Triton, configs: Any = CONFIGS, settings: Settings = EXPLICIT, draining: ModelDraining | None = None
) -> ModelControl:
    """Return what controls the models of *tritons*, called a, b, …, of which *configs* are loaded and served."""

    async def reload() -> None:
        """Do nothing: the snapshot stays."""

    snapshot = SimpleNamespace(configs=configs, waiting={}, error=None)
    models: Any = SimpleNamespace(
        fleet=SimpleNamespace(reload=reload, snapshot=snapshot),
        served={name: SimpleNamespace(lora=None) for name in configs},
        unserved=[],
        triton_model=lambda name: name,
    )
    clients: dict[str | None, Any] = dict(zip("abc", tritons, strict=False))
    triton = settings.triton
    if len(tritons) > 1:
        listed = tuple(f"{name}=http://{name}:8000" for name in clients)
        triton = msgspec.structs.replace(triton, endpoints=listed)
    fleet = Fleet(triton, connect=lambda each: clients.get(each.name, tritons[0]))
    return ModelControl(settings, models, fleet, draining or ModelDraining(Draining()))


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0)


async def test_an_unload_waits_until_triton_has_let_go() -> None:
    """A model that is UNLOADING still has its memory."""
    triton = Triton(looks=5)

    assert "alone" == await control(triton).unload("alone")
    assert [("alone", False)] == triton.calls
    assert "UNAVAILABLE" == triton.states["alone"]


async def test_what_triton_does_not_let_go_of_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call ends, and names the model."""
    monkeypatch.setattr(module, "_UNLOAD_SECONDS", 0.01)

    with pytest.raises(UpstreamTimeout, match="'alone'"):
        await control(Triton(looks=float("inf"))).unload("alone")


async def test_parts_of_all_levels_go_with_an_ensemble() -> None:
    """While they go, none of them takes requests, and nobody else loads or unloads one."""
    triton, draining = Triton(looks=100), ModelDraining(Draining())
    controls = control(triton, draining=draining)
    work = asyncio.create_task(controls.unload("outer", dependents=True))
    while not triton.calls:  # noqa: ASYNC110 - what happens in tasks sets no event here
        await asyncio.sleep(0)
    for part in ("outer", "inner", "x", "y"):
        with pytest.raises(ModelUnloading):
            draining.check(part)
    draining.check("alone")
    with pytest.raises(ModelConflict) as caught:
        await controls.load("y")
    await work

    assert "model_busy" == caught.value.code
    assert {"alone"} == {name for name, state in triton.states.items() if state == "READY"}


@every_case("name, dependents", [("x", False), ("y", False), ("inner", True)])
async def test_a_model_that_others_use_stays(name: str, dependents: bool) -> None:
    """Whoever uses it has to go first."""
    triton = Triton()

    with pytest.raises(ModelConflict, match="is used by") as caught:
        await control(triton).unload(name, dependents=dependents)
    assert "model_in_use" == caught.value.code
    assert [] == triton.calls


@every_case(
    "state, load, code",
    [
        ("READY", True, "model_already_loaded"),
        ("LOADING", True, "model_busy"),
        ("UNLOADING", True, "model_busy"),
        ("UNAVAILABLE", False, "model_not_loaded"),
    ],
)
async def test_states_that_a_call_does_not_fit(state: str, load: bool, code: str) -> None:
    """Nothing is sent to Triton."""
    triton = Triton(looks=9)
    triton.states["alone"] = state
    controls = control(triton)

    with pytest.raises(ModelConflict) as caught:
        await (controls.load("alone") if load else controls.unload("alone"))
    assert code == caught.value.code
    assert [] == triton.calls


async def test_what_cannot_be_loaded() -> None:
    """Without the setting nothing; then no model that Triton does not have, and none that is gone again."""
    triton = Triton()
    triton.states["alone"] = "UNAVAILABLE"

    with pytest.raises(ManagementDisabled):
        await control(triton, settings=Settings()).load("alone")
    with pytest.raises(ModelNotFound):
        await control(triton).load("none")
    with pytest.raises(ModelConflict, match="was loaded and is gone again"):
        await control(triton, configs={}).load("alone")


async def test_a_load_does_what_it_can_and_names_the_rest() -> None:
    """A Triton whose list cannot be read, and one that is busy with the model, keep it from no other one."""
    a, b, c = Triton(), Away(), Triton()
    a.states["alone"] = c.states["alone"] = "UNAVAILABLE"

    with pytest.raises(UpstreamError) as caught:
        await control(a, b, c).load("alone")
    assert (a.states["alone"], c.states["alone"]) == ("READY", "READY")
    assert caught.value.status == 502
    assert caught.value.message == (
        "This failed at 1 of 3 Tritons. At 'b': It cannot be reached. The model is loaded at 'a' and 'c'."
    )
    a.states["alone"], c.states["alone"] = "UNAVAILABLE", "LOADING"
    with pytest.raises(UpstreamError, match=r"failed at 2 of 3 .* At 'c': Triton is loading .* loaded at 'a'"):
        await control(a, b, c).load("alone")
    assert a.states["alone"] == "READY"
    # Also where nothing is left to be done, it is not loaded everywhere.
    with pytest.raises(UpstreamError, match=r"At 'b': It cannot be reached. The model is loaded at 'a'"):
        await control(a, b).load("alone")


async def test_an_unload_does_what_it_can_and_names_the_rest() -> None:
    """The others let go of the model."""
    a, b = Triton(), Away()

    with pytest.raises(UpstreamError, match=r"At 'b': It cannot be reached. The model is unloaded at 'a'"):
        await control(a, b).unload("alone")
    assert a.states["alone"] == "UNAVAILABLE"


async def test_a_name_that_no_list_has_reaches_no_triton() -> None:
    """It is unknown, unless a list that cannot be read may have it."""
    with pytest.raises(ModelNotFound):
        await control(Triton(), Triton()).load("none")
    with pytest.raises(UpstreamError, match="At 'b'") as caught:
        await control(Triton(), Away()).load("none")
    assert caught.value.status == 502
    with pytest.raises(UpstreamUnavailable, match=r"^It cannot be reached"):
        await control(Away()).load("alone")


async def test_an_unload_at_one_triton_leaves_the_model_to_the_others() -> None:
    """Meanwhile requests for it are not refused."""
    a, b, draining = Triton(looks=100), Triton(), ModelDraining(Draining())
    work = asyncio.create_task(control(a, b, draining=draining).unload("alone", endpoint="a"))
    while not a.calls:  # noqa: ASYNC110 - what happens in tasks sets no event here
        await asyncio.sleep(0)
    draining.check("alone")
    await work
    assert (a.states["alone"], b.states["alone"]) == ("UNAVAILABLE", "READY")
