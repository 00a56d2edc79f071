"""Options that recipes refuse, and what a lossy channel must not break."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import docstring_parser
import jax
import numpy as np
import optax
import pytest

from fedtangent._src.engine.clients import engine_for
from fedtangent._src.engine.run import simulate
from fedtangent._src.entries import catalogue
from fedtangent._src.federated import algorithms, faults, graph, predict, schedule
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import all_clients, per_client_permutations, uniform_sampling
from fedtangent._src.federated.wire import channel
from fedtangent._src.losses import get_loss
from fedtangent._src.types import Algorithm

from ..nightly import nightly
from .toys import arguments_of, go, two_layer, uneven_data

GIVEN: dict[str, Any] = {"client_learning_rate": 0.2, "work": Work(steps=2, batch_size=None)}
RING = graph.ring(6)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("fed_ensemble", {"base": "fed_avg"}, "base: got 'fed_avg', must be a recipe"),
    ("fed_prox", {"mu": "0.1"}, "mu: got '0.1', must be a number"),
    ("fed_avg", {"client_learning_rate": "0.1"}, "client_learning_rate: got '0.1', must be a number"),
    ("fed_dyn", {"mu": None}, "mu: got None, must be a number"),
    ("fed_avg", {"work": 5}, "work: got 5, must be a fedtangent.Work"),
    ("fed_avg", {"channel": "qsgd"}, "channel: got 'qsgd', must be a channel"),
    ("fed_avg", {"channel": channel.qsgd}, "channel: got <function qsgd"),
    ("fed_avg", {"accept": True}, "accept: got True, must be a function"),
    ("fed_avg", {"client_learning_rate": None}, "client_learning_rate: got none, must be given"),
    ("fed_avg", {"client_optimizer": optax.sgd(0.1)}, "client_optimizer: got one and a client_learning_rate"),
    ("fed_avg", {"client_learning_rate": optax.sgd(0.1)}, "client_learning_rate: got an optax optimiser"),
    ("fed_avg", {"personal": "own"}, "personal: got 'own', must be a function"),
    ("scaffold", {"personal": predict.own_models}, "personal: got own_models, must be left out"),
    ("local_only", {"accept": faults.finite()}, "accept: got"),
    ("dp_fed_avg", {"clip_norm": "a", "noise_multiplier": 1.0}, "clip_norm: got 'a', must be a number"),
    ("gossip", {"schedule": all_clients(6, 6), "graph": RING}, "schedule: must train model k on client k"),
    ("gossip", {"schedule": per_client_permutations(6, 6), "graph": RING}, "schedule: must train model k on"),
    (
        "gossip",
        {"schedule": schedule.own_models(6), "graph": RING, "channel": channel.top_k(1)},
        "channel: got .*, but gossip does not use it",
    ),
    (
        "random_walk",
        {"schedule": uniform_sampling(6, 3)},
        r"schedule: got Schedule\(.*\), must train each model on at most one",
    ),
]


def build(name: str, schedule: Any = None, **more: Any) -> Algorithm:
    plan = all_clients(6) if schedule is None else schedule
    recipe = getattr(algorithms, name)
    return recipe(two_layer(), plan, **arguments_of(recipe, GIVEN | more))


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_what_a_recipe_refuses(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, **options)


@pytest.mark.parametrize("optimizer", ["adam", optax.adam, lambda: optax.adam(0.1)])
def test_an_optimiser_is_one_of_optax_and_not_the_function_that_makes_it(optimizer: Any) -> None:
    with pytest.raises(ValueError, match=r"client_optimizer: got .*, must be an optax optimiser such as"):
        algorithms.fed_avg(two_layer(), all_clients(6), work=Work(steps=2, batch_size=None), client_optimizer=optimizer)


@dataclasses.dataclass
class NoHash:
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def test_objects_that_compiled_programs_could_not_be_found_by_are_refused() -> None:
    """Each is taken as soon as it is a function: a plain dataclass is equal by its values, and has no hash."""
    model, clients, sgd = two_layer(), all_clients(6), optax.sgd(0.1)

    def fed_avg(wrap: Callable[..., Any], of: str) -> Algorithm:
        network = model._replace(**{of: wrap(getattr(model, of))}) if of in ("init", "apply") else model
        loss = wrap(get_loss("squared_error")) if of == "loss" else None
        optimizer = sgd._replace(init=wrap(sgd.init)) if of == "client_optimizer" else sgd
        work = Work(steps=2, batch_size=None)
        return algorithms.fed_avg(network, clients, work=work, loss=loss, client_optimizer=optimizer)

    for of, name in {"init": "model", "apply": "model", "loss": "loss", "client_optimizer": "client_optimizer"}.items():
        assert isinstance(fed_avg(lambda function: lambda *arguments: function(*arguments), of), Algorithm)
        with pytest.raises(ValueError, match=rf"{name}: got .*, must have a hash, .* \(unhashable type: 'NoHash'\)"):
            fed_avg(NoHash, of)


@pytest.mark.parametrize(("name", "unknown"), [("fed_avg", "sever_learning_rate"), ("fed_sgd", "client_learning_rate")])
def test_an_argument_that_a_recipe_does_not_take_is_refused(name: str, unknown: str) -> None:
    with pytest.raises(TypeError, match=unknown):
        getattr(algorithms, name)(two_layer(), all_clients(6), **{unknown: 0.1})


def test_gossip_needs_every_client_to_train() -> None:
    algorithm, data = build("gossip", schedule.own_models(6), graph=RING), uneven_data()
    assert algorithm.cost(data, engine_for(data)).downlink == 0
    with pytest.raises(ValueError, match="data: client 3 holds no examples"):
        simulate(algorithm, uneven_data(sizes=(3, 5, 1, 0, 6, 2)), num_rounds=1)


def test_gossip_may_lose_clients_to_faults_and_be_built_under_a_trace() -> None:
    dropping = faults.dropout(schedule.own_models(6), 0.3)
    assert build("gossip", dropping, graph=RING).name == "gossip"

    def traced(rate: Any) -> Any:
        assert build("gossip", dropping, graph=RING, client_learning_rate=rate).name == "gossip"
        return rate

    assert float(jax.jit(traced)(0.5)) == 0.5


LOSSY: list[Callable[[], Any]] = [
    lambda: channel.qsgd(3),
    lambda: channel.top_k(5),
    lambda: channel.chain(channel.clip(0.1), channel.qsgd(4)),
]


@pytest.mark.parametrize("lossy", nightly(LOSSY, LOSSY[1:2]))
@pytest.mark.parametrize("name", ["scaffold", "fed_dyn"])
def test_the_server_mirrors_its_clients_behind_a_lossy_channel(name: str, lossy: Callable[[], Any]) -> None:
    """SCAFFOLD's c is the mean of all c_i, FedDyn's h of all h_i, also of clients that were not there."""
    own = {"mu": 0.3} if name == "fed_dyn" else {}
    algorithm = build(name, uniform_sampling(6, 3), channel=lossy(), **own)
    state, _ = go(algorithm, uneven_data(), "scan", 6, algorithm.init(1, 6))
    held = state.server.control if name == "scaffold" else state.server.correction
    servers, clients = (jax.tree.leaves(tree) for tree in (held, state.client))
    assert max(np.abs(np.asarray(leaf)).max() for leaf in servers) > 1e-3
    for server, client in zip(servers, clients, strict=True):
        np.testing.assert_allclose(np.asarray(server)[0], np.asarray(client)[0].mean(axis=0), atol=1e-12)


@pytest.mark.parametrize("name", [*catalogue("algorithms")])
def test_the_help_of_a_recipe_describes_every_argument(name: str) -> None:
    recipe = getattr(algorithms, name)
    parsed = docstring_parser.parse(inspect.getdoc(recipe) or "")
    assert [p.arg_name for p in parsed.params] == [*inspect.signature(recipe).parameters]
    assert all(p.description for p in parsed.params) and parsed.returns and parsed.raises
