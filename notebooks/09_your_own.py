# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Is my own server rule better than FedAvg? An algorithm, model and data of your own
#
# An algorithm is a composition of small pure functions; the engine maps it over clients, counts its bytes and writes
# its checkpoints. Here a new server rule, with a new network and arrays of your own, is compared with FedAvg, seed by
# seed.

# %%
import flax.linen as nn
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax.tree as tree

import fedtangent as ft
from fedtangent.parts import AveragingParts, train_and_average, trained
from fedtangent.types import Server

ft.enable_x64(False)

# %% [markdown]
# ## Data: arrays, and who holds what

# %%
rng = np.random.default_rng(0)
x = rng.normal(size=(1200, 8)).astype(np.float32)
y = (np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] > 0).astype(int)
clients = ft.partition.dirichlet(y[:1000], num_clients=10, alpha=1.0, seed=0)
held = ft.data.federated_data(x[:1000], y[:1000], clients, num_classes=2)
print(clients)


# %% [markdown]
# ## A network: any flax module


# %%
class Residual(nn.Module):
    """A dense network with a skip."""

    @nn.compact
    def __call__(self, x):
        hidden = nn.relu(nn.Dense(32)(x))
        hidden = hidden + nn.relu(nn.Dense(32)(hidden))
        return nn.Dense(2)(hidden)


model = ft.models.from_flax(Residual(), x[:1], output_size=2)


# %% [markdown]
# ## An algorithm: FedExP
#
# The server goes further the more the clients' updates disagree (Jhunjhunwala et al., 2023).


# %%
@ft.recipe
def fed_exp(
    model,
    schedule,
    client_learning_rate,
    work=ft.Work(steps=10, batch_size=None),
    epsilon: float = 1e-3,
    loss=None,
    averaging=ft.Averaging(),
):
    """FedExP (Jhunjhunwala et al., ICLR 2023, algorithm 1)."""

    def answer(broadcast, client_state, params, steps, client):
        update = tree.sub(broadcast, params)
        return {"update": update, "square": tree.vdot(update, update)}, client_state

    def step(params, mean, info):
        square = tree.vdot(mean["update"], mean["update"])
        rate = jnp.maximum(1.0, mean["square"] / (2 * (square + epsilon)))
        return tree.sub(params, tree.scale(rate, mean["update"])), {"server_rate": rate}

    server = Server(init=lambda p: p, broadcast=lambda p: p, params=lambda p: p, update=step)
    local = {"answer": answer, "message": lambda p: {"update": p, "square": jnp.zeros(())}}
    training = trained(model, client_learning_rate, None, work, loss)
    averaging = averaging.filled(weighting="uniform")
    return train_and_average("fed_exp", training, schedule, averaging, AveragingParts(server, local))


# %% [markdown]
# ## Compared with FedAvg, paired over seeds

# %%
schedule = ft.schedules.uniform_sampling(10, clients_per_round=5)
work = ft.Work(epochs=2, batch_size=20)


def build(name):
    recipe = {"fed_exp": fed_exp, "fed_avg": ft.fed_avg}[name]
    return recipe(model, schedule, client_learning_rate=0.1, work=work, loss="cross_entropy")


def accuracy(algorithm, state):
    return {"accuracy": (algorithm.predict(state, x[1000:]).mean.argmax(axis=-1) == y[1000:]).mean()}


grid = {"name": ["fed_avg", "fed_exp"]}
found = ft.sweep(
    build, held, num_rounds=20, seeds=range(10), grid=grid, evaluation=ft.Evaluation(every=1, measure=accuracy)
)
(difference,) = ft.measures.differences(found, "accuracy", baseline={"name": "fed_avg"})
print(f"FedExP minus FedAvg: {difference.mean:+.3f}, 95 % interval {difference.low:+.3f} to {difference.high:+.3f}")

# %% [markdown]
# An interval that contains zero decides nothing: on these data neither rule is shown to be ahead.

# %%
figure, ax = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
curves = np.asarray(found.metrics["accuracy"])  # [seeds, configurations, evaluations]
for at, config in enumerate(found.configs):
    ax.plot(found.rounds, curves[:, at].mean(axis=0), label=config["name"])
    ax.fill_between(found.rounds, curves[:, at].min(axis=0), curves[:, at].max(axis=0), alpha=0.2)
ax.xaxis.get_major_locator().set_params(integer=True)
ax.set_xlabel("round")
ax.set_ylabel("test accuracy: mean, range over seeds")
ax.legend()
plt.show()

# %% [markdown]
# In a file `mine.py` the algorithm is available on the command line:
# `fedtangent train --algorithm mine:fed_exp --epsilon 0.01`. Mappings, faults, checkpoints and counted bytes come with
# it. The tests of the laws that every algorithm keeps run for it once it is registered: docs/guides/own_algorithm.md
# says how, and how to test it before.

# %% [markdown]
# ## To play with
#
# More heterogeneous clients, more local epochs, another rate: does the answer change?

# %%
ALPHA, EPOCHS, RATE = 0.1, 5, 0.05

other = ft.partition.dirichlet(y[:1000], num_clients=10, alpha=ALPHA, seed=0)
found = ft.sweep(
    lambda name: {"fed_exp": fed_exp, "fed_avg": ft.fed_avg}[name](
        model, schedule, client_learning_rate=RATE, work=ft.Work(epochs=EPOCHS, batch_size=20), loss="cross_entropy"
    ),
    ft.data.federated_data(x[:1000], y[:1000], other, num_classes=2),
    num_rounds=20,
    seeds=range(5),
    grid=grid,
    evaluation=ft.Evaluation(measure=accuracy),
)
(difference,) = ft.measures.differences(found, "accuracy", baseline={"name": "fed_avg"})
print(f"FedExP minus FedAvg: {difference.mean:+.3f}, 95 % interval {difference.low:+.3f} to {difference.high:+.3f}")
