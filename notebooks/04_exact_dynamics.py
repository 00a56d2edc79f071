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
# # Will heterogeneity, or many local steps, hurt here?
#
# And which rate is stable with 20 local steps? In the kernel regime these questions have answers without noise, in
# seconds: every round of federated gradient descent is a linear map of the residuals.
# `theory.federated_flow` composes these maps: mean and covariance of every model at every round, for any clients,
# cohorts, local steps, weights and corrections.

# %%
import matplotlib.pyplot as plt
import numpy as np

import fedtangent as ft

ft.enable_x64()

# %% [markdown]
# ## A problem

# %%
rng = np.random.default_rng(0)
x, x_test = rng.uniform(-1, 1, (60, 1)), np.linspace(-1, 1, 50)[:, None]
y, y_test = np.sin(2 * np.pi * x) + 0.2 * rng.standard_normal((60, 1)), np.sin(2 * np.pi * x_test)
model = ft.models.rbf_linear(40, bandwidth=0.2, dtype="float64")
kernel = ft.kernels.kernel_blocks(model.kernel, x, x_test)
parts = np.digitize(x[:, 0], np.linspace(-1, 1, 7)[1:-1])  # clients differ in the part of the line that they see
ROUNDS, SHOWN = 60, range(0, 61, 4)


def losses(alpha=0.1, steps=10, per_round=6):
    """Expected test loss after the rounds that are shown."""
    clients = ft.partition.dirichlet(parts, num_clients=6, alpha=alpha, seed=0)
    schedule = ft.schedules.uniform_sampling(6, per_round)
    cohorts = ft.schedules.drawn_cohorts(schedule, clients, num_rounds=ROUNDS, seed=0)
    rule = ft.theory.Rule(local_steps=steps, learning_rate=0.1)
    flow = ft.theory.federated_flow(kernel, y, clients, cohorts, rule)
    return [float(ft.theory.predicted_loss(flow, y_test, r).total) for r in SHOWN]


def show(curves, title):
    _, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for (label, values), color in zip(curves.items(), plt.cm.viridis(np.linspace(0, 0.85, len(curves))), strict=True):
        ax.semilogy(SHOWN, values, color=color, label=label)
    ax.set_xlabel("round")
    ax.set_ylabel("expected test loss")
    ax.set_title(title)
    ax.legend()
    plt.show()


# %% [markdown]
# ## Heterogeneity
#
# A small alpha gives every client a part of the line of its own.

# %%
show({f"alpha {alpha:g}": losses(alpha=alpha, steps=50) for alpha in (0.05, 0.3, 1, 100)}, "FedAvg: heterogeneity")

# %% [markdown]
# ## Local steps
#
# More local steps go faster at first, and end elsewhere: where clients differ, the fixed point of local work is not
# that of gradient descent on all data.

# %%
show({f"local steps: {steps}": losses(steps=steps) for steps in (1, 5, 20, 100)}, "FedAvg: local steps")

# %% [markdown]
# ## Participation
#
# With few clients a round the curve depends on the cohorts that were drawn: theory follows exactly these.

# %%
show({f"{per_round} of 6 clients": losses(per_round=per_round) for per_round in (1, 2, 4, 6)}, "FedAvg: participation")

# %% [markdown]
# ## Corrections
#
# SCAFFOLD takes out the client drift that local steps bring. The best rate of each algorithm is found through the flow
# itself, which is differentiable.

# %%
clients = ft.partition.dirichlet(parts, num_clients=6, alpha=0.1, seed=0)
cohorts = ft.schedules.drawn_cohorts(ft.schedules.all_clients(6), clients, num_rounds=20, seed=0)


def last_loss(rate, algorithm):
    rule = ft.theory.Rule(local_steps=10, learning_rate=rate, algorithm=algorithm)
    return ft.theory.predicted_loss(ft.theory.federated_flow(kernel, y, clients, cohorts, rule), y_test).total


for name in ("fed_avg", "scaffold"):
    found = ft.theory.best_learning_rate(lambda rate, name=name: last_loss(rate, name), 0.01, 2.0)
    print(f"{name}: test loss {found.loss:.4f} after 20 rounds at its best rate {found.rate:.3f}")

# %% [markdown]
# ## Which rate is stable?
#
# Above the largest stable rate a mode of the residual grows from round to round. With one local step a round is a step
# on the mean of all losses. With many, every client's own steps have to be stable, and some client's loss is curved
# more steeply than the mean.

# %%
for steps in (1, 5, 20, 100):
    rule = ft.theory.Rule(local_steps=steps, learning_rate=0.1)
    stable = ft.theory.federated_flow(kernel, y, clients, cohorts, rule).largest_stable_learning_rate()
    print(f"local steps: {steps:3d}, stable up to a rate of {stable:.3f}")

# %% [markdown]
# ## To play with
#
# Your own federation: a small `ALPHA` makes clients differ, `STEPS` are local steps, `PER_ROUND` of six clients train.

# %%
ALPHA, STEPS, PER_ROUND = 0.05, 100, 3

settings = {"alpha": ALPHA, "steps": STEPS, "per_round": PER_ROUND}
show({"yours": losses(**settings), "alpha 100": losses(**settings | {"alpha": 100})}, "FedAvg: your federation")
