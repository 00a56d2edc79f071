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
# # How fast is a round on my machine, and how are its clients laid out?
#
# A round is one compiled program. How its clients are laid onto the devices is a separate choice, which changes the
# speed and not the result.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np

import fedtangent as ft

ft.use_cores()  # before anything uses a device: each core trains clients of its own
import jax

ft.enable_x64(False)
print(jax.devices())

# %% [markdown]
# ## One run under every mapping

# %%
digits = ft.data.load("digits", flatten=True)
clients = ft.partition.dirichlet(digits.y_train, num_clients=100, alpha=0.5, seed=0)
held = ft.data.federated_data(digits.x_train, digits.y_train, clients, num_classes=10)
model = ft.models.mlp(64, 10, (64,), parameterization="standard")
schedule = ft.schedules.uniform_sampling(100, clients_per_round=50)
work = ft.Work(epochs=1, batch_size=8)
algorithm = ft.fed_avg(model, schedule, client_learning_rate=0.1, work=work, loss="cross_entropy")

seconds, ends = {}, {}
for mapping in ("scan", "vmap", "chunked:8", "sharded:scan", "auto"):
    devices = ft.Devices(mapping=mapping)
    ft.simulate(algorithm, held, num_rounds=20, seed=0, devices=devices)  # compiles, and where asked measures
    begun = time.perf_counter()
    ends[mapping] = ft.simulate(algorithm, held, num_rounds=20, seed=0, devices=devices)
    jax.block_until_ready(ends[mapping].state.server.params)
    seconds[mapping] = time.perf_counter() - begun

# %%
figure, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
ax.barh(list(seconds), [20 * 50 / s for s in seconds.values()], color="#0072b2")
ax.set_xlabel("client updates a second")
plt.show()

# %% [markdown]
# Dividing so little work among devices gains next to nothing. `auto` measures all mappings only for runs of 20 s or
# more. This run is shorter, so its bar is that of the default mapping, lowered by the hundredths of a second in which
# `auto` looks at the round.
#
# ## They are one run, to rounding

# %%
outputs = {name: np.asarray(algorithm.predict(run.state, digits.x_test).mean) for name, run in ends.items()}
for name, output in outputs.items():
    print(f"{name}: largest difference to scan {np.max(np.abs(output - outputs['scan'])):.1e}")

# %% [markdown]
# ## A sweep: seeds x rates as one program


# %%
def build(rate):
    return ft.fed_avg(model, schedule, client_learning_rate=rate, work=work, loss="cross_entropy")


def accuracy(algorithm, state):
    predicted = algorithm.predict(state, digits.x_test).mean.argmax(axis=-1)
    return {"accuracy": (predicted == digits.y_test).mean()}


begun = time.perf_counter()
found = ft.sweep(
    build,
    held,
    num_rounds=20,
    seeds=range(4),
    grid={"rate": [0.02, 0.05, 0.1, 0.2]},
    evaluation=ft.Evaluation(measure=accuracy),
)
print(f"16 runs in {time.perf_counter() - begun:.1f} s, compiled once")
for config, values in zip(found.configs, np.asarray(found.metrics["accuracy"])[:, :, -1].T, strict=True):
    print(f"rate {config['rate']:g}: {values.mean():.3f} +- {values.std(ddof=1) / 2:.3f}")
for difference in ft.measures.differences(found, "accuracy", baseline={"rate": 0.1}):
    print(f"{difference.config}: {difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]")

# %% [markdown]
# ## How much memory a run will need
#
# A run that does not fit is refused before it starts, and the message names the largest chunk that would fit.

# %%
print(ft.processes.resolve_mapping(algorithm, held, 20, "vmap"))

# %% [markdown]
# ## To play with
#
# A wider network, and more clients in a round: which mapping would be taken, and how much memory would it need?

# %%
WIDTH, PER_ROUND, MAPPING = 2048, 100, "auto"

wide = ft.models.mlp(64, 10, (WIDTH,), parameterization="standard")
larger = ft.fed_avg(wide, ft.schedules.uniform_sampling(100, PER_ROUND), 0.1, work, loss="cross_entropy")
print(ft.processes.resolve_mapping(larger, held, 20, MAPPING))
