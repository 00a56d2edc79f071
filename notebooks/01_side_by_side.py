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
# # Do federated networks do what kernel theory says? Fed-ensemble, NTK-FL and the Gaussian process, side by side
#
# Fed-ensemble trains $K$ networks at once: in every round each client trains one of them. Its Theorem 2 says what
# wide networks become when they are trained long enough: independent draws of a Gaussian process. This notebook
#
# 1. trains such networks on fifty clients that each hold two points of a noisy sine,
# 2. computes what theory predicts for the very same clients, schedule, step size and initialisation: the *federated
#    kernel flow*, which holds at every round, not only after many,
# 3. trains networks from the same initialisations by NTK-FL instead, and
# 4. asks whether they agree, and by how much.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fedtangent as ft

ft.enable_x64()  # theory and comparisons run in float64

# %% [markdown]
# ## Data and clients
#
# Fifty clients, two points each, with a gap in the middle where nobody has data: uncertainty should grow there.

# %%
toy = ft.data.load("sine", gap=True, seed=0)
clients = ft.partition.by_user(toy.user_train)
examples = ft.data.federated_data(toy.x_train, toy.y_train, clients)
print(f"{clients.num_clients} clients of {clients.sizes.min()} to {clients.sizes.max()} points")

# %% [markdown]
# ## A network, its kernels, and a schedule
#
# `Model.kernel` is the analytic kernel of exactly this network. Every client trains the five models in an order of
# its own (Fed-ensemble 2024, Algorithm 1).

# %%
K, ROUNDS, STEPS, WIDTH = 5, 80, 20, 1024
model = ft.models.mlp(1, 1, widths=(WIDTH,), activation="erf", w_std=8.0, b_std=4.0, last_w_std=1.0, dtype=jnp.float64)
permutations = ft.schedules.per_client_permutations(clients.num_clients, K)

blocks = ft.kernels.kernel_blocks(model.kernel, toy.x_train, toy.x_test)
largest = max(
    np.linalg.eigvalsh(blocks.ntk_train[np.ix_(own, own)])[-1] / len(own) for own in map(clients.client, range(50))
)
rate = 1 / largest  # half of the largest stable step
eigenvalues = np.linalg.eigvalsh(blocks.ntk_train)
print(f"client step size {rate:.4f}; spectrum of the kernel from {eigenvalues[0]:.1e} to {eigenvalues[-1]:.1e}")

# %% [markdown]
# The smallest eigenvalue is zero to rounding: Theorem 2's inverse does not exist in float64, and no run of finite
# length gets anywhere near that limit. The flow needs no inverse.

# %% [markdown]
# ## Theory first: the federated kernel flow
#
# The cohorts of a run can be unrolled without training anything. From them the flow gives the mean and the covariance
# of every model at every round.

# %%
cohorts = ft.schedules.drawn_cohorts(permutations, clients, ROUNDS, seed=0)
rule = ft.theory.Rule(local_steps=STEPS, learning_rate=rate)
flow = ft.theory.federated_flow(blocks, toy.y_train, clients, cohorts, rule)
mean, cov = np.asarray(flow.mean(ROUNDS)), np.asarray(flow.cov(ROUNDS))  # [K, m, 1], [K, m, m]

# %% [markdown]
# ## Simulation: networks trained by Fed-ensemble

# %%
algorithm = ft.fed_ensemble(model, permutations, client_learning_rate=rate, work=ft.Work(steps=STEPS, batch_size=None))
x_test = jnp.asarray(toy.x_test)
x_all = jnp.concatenate([jnp.asarray(toy.x_train), x_test])
n = len(toy.x_train)
trained, start = [], []
for draw in range(8):  # eight ensembles of five networks, all under the same schedule
    run = ft.simulate(
        algorithm,
        examples,
        num_rounds=ROUNDS,
        seed=0,
        start=jax.random.key(100 + draw),
        evaluation=ft.Evaluation(
            every=ROUNDS, measure=lambda _, state: {"f": np.asarray(algorithm.predict(state, x_all).members)}
        ),
    )
    start.append(run.history.evaluations[0].metrics["f"])
    trained.append(run.history.evaluations[-1].metrics["f"])
start, trained = np.stack(start, 1), np.stack(trained, 1)  # [K, draws, n + m, 1]

# %% [markdown]
# ## NTK-FL from the same initialisations
#
# One round: clients send Jacobians; the server trains the model with the kernel of the pooled data, and picks the
# number of steps by training loss. (The simulator never forms the Jacobians, but counts their bytes.)

# %%
ntk_fl = ft.ntk_fl(
    model,
    ft.schedules.all_clients(clients.num_clients, K),
    learning_rate=n / eigenvalues[-1],
    pooling=ft.Pooling(slots_per_model=clients.num_clients),
)
evolved = []
for draw in range(8):
    run = ft.simulate(ntk_fl, examples, num_rounds=1, seed=0, start=jax.random.key(100 + draw))
    evolved.append(np.asarray(ntk_fl.predict(run.state, x_all).members))
evolved = np.stack(evolved, 1)
print(f"uplink of one run: NTK-FL {run.history.evaluations[-1].uplink_bytes / 2**20:.1f} MiB in 1 round")

# %% [markdown]
# ## Side by side

# %%
x = toy.x_test[:, 0]
figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True, layout="constrained")
panels = (("Fed-ensemble", trained[:, :, n:]), ("NTK-FL", evolved[:, :, n:]))
for ax, (title, members) in zip(axes, panels, strict=False):
    draws = members.reshape(-1, len(x))
    spread = 1.96 * draws.std(0, ddof=1)
    ax.plot(x, draws[:8].T, color="0.5", lw=0.6, label=["eight of them", *[None] * 7])
    ax.plot(x, draws.mean(0), color="#0072b2", label="their mean")
    ax.fill_between(x, draws.mean(0) - spread, draws.mean(0) + spread, color="#0072b2", alpha=0.2, label="95 % of them")
    ax.set_title(f"{title}: {len(draws)} networks")
sd = np.sqrt(np.maximum(np.diagonal(cov, axis1=1, axis2=2).mean(0), 0))
axes[2].plot(x, mean.mean(0)[:, 0], color="#d55e00", label="predicted mean")
low, high = (mean.mean(0)[:, 0] + s * 1.96 * sd for s in (-1, 1))
axes[2].fill_between(x, low, high, color="#d55e00", alpha=0.2, label="predicted 95 %")
axes[2].set_title(f"Theory: the flow at round {ROUNDS}")
axes[0].set_ylabel("f(x)")
for ax in axes:
    ax.plot(toy.x_train[:, 0], toy.y_train[:, 0], "k.", ms=3, label="clients' data")
    ax.set_xticks((-1, -0.5, 0, 0.5, 1))
    ax.set_xlabel("input x")
    ax.legend(loc="upper right", fontsize=7, frameon=False)
plt.show()

# %% [markdown]
# ## Do they agree?
#
# Two questions. Is each network where the flow puts it, given its own initial function? And do the networks scatter
# as the flow's covariance says?

# %%
predicted = np.stack([np.asarray(flow.predict(start[:, e, :n], start[:, e, n:], ROUNDS)) for e in range(8)], 1)
moved = predicted - start[:, :, n:]
error = np.linalg.norm(trained[:, :, n:] - predicted, axis=(2, 3)) / np.linalg.norm(moved, axis=(2, 3))
variance_ratio = trained[:, :, n:].var(axis=1, ddof=1).sum(axis=(1, 2)) / np.trace(cov, axis1=1, axis2=2)
print(f"relative error of a network of width {WIDTH} to the flow: {error.mean():.4f} (mean of {error.size})")
print(f"variance over networks / predicted: {variance_ratio.mean():.3f}")

# %% [markdown]
# A negative control: the flow of a federation from which one client is missing, the one whose absence changes the
# prediction most. The networks must be farther from it than from the right one, and they are. (One client of two points
# changes little, so the two errors are close. Wider networks tell them apart more clearly.)


# %%
def flow_without(client):
    kept = cohorts._replace(weight=np.where(np.asarray(cohorts.client) == client, 0.0, cohorts.weight))
    return ft.theory.federated_flow(blocks, toy.y_train, clients, kept, rule)


change = [np.linalg.norm(np.asarray(flow_without(i).mean(ROUNDS)) - mean) for i in range(clients.num_clients)]
missed = int(np.argmax(change))
wrong = flow_without(missed)
wrong_prediction = np.stack([np.asarray(wrong.predict(start[:, e, :n], start[:, e, n:], ROUNDS)) for e in range(8)], 1)
gap = np.linalg.norm(trained[:, :, n:] - wrong_prediction, axis=(2, 3)) / np.linalg.norm(moved, axis=(2, 3))
print(f"relative error to the flow without client {missed}: {gap.mean():.4f}")

# %% [markdown]
# `fedtangent compare` does all of this for several widths and data sets, with standard errors, a fitted slope in the
# width (theory: -1/2) and a verdict for every comparison.

# %% [markdown]
# ## To play with
#
# `ROUND` is any round from 0 to 80, `MODEL` any of the five. The band narrows where there are data.

# %%
ROUND, MODEL = 10, 0

at, spread = np.asarray(flow.mean(ROUND))[MODEL, :, 0], np.asarray(flow.cov(ROUND))[MODEL]
width = 1.96 * np.sqrt(np.maximum(np.diag(spread), 0))
figure, ax = plt.subplots(figsize=(5, 3), layout="constrained")
ax.plot(x, at, color="#d55e00")
ax.fill_between(x, at - width, at + width, color="#d55e00", alpha=0.2)
ax.plot(toy.x_train[:, 0], toy.y_train[:, 0], "k.", ms=3)
ax.set(title=f"theory: model {MODEL} after round {ROUND}", xlabel="x")
plt.show()
