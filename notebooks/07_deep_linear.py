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
# # How fast must a deep linear network converge, and how fast does it?
#
# FedAvg on a network without activations is the simplest problem that is not convex and whose rate can be proved: if
# the network is wide, the loss falls at least by a factor rho a round. The theorem's conditions can be checked on your
# own data; the same run at infinite width has a closed form; and the residual of a round is a sum of four terms.

# %%
import matplotlib.pyplot as plt
import numpy as np

import fedtangent as ft

ft.enable_x64()
rng = np.random.default_rng(0)
x = np.linalg.qr(rng.standard_normal((8, 2)))[0] * [1, 0.95]
y = x @ [[0.3], [-0.4]]
clients = ft.types.Partition(np.arange(8), np.arange(0, 9, 2))  # four of two examples each
work = ft.theory.full_batch_work(x, y, clients, learning_rate=0.003, local_steps=2)

# %% [markdown]
# ## The theorem, and which of its conditions hold
#
# L layers of width m, N clients of K local steps; P(0) is the tangent kernel at the start, given by its smallest and
# largest eigenvalue.

# %%
weights = [rng.standard_normal(shape) for shape in ((500, 2), (500, 500), (1, 500))]  # W^1 .. W^L
theorem = ft.theory.deep_linear_theorem(weights, work)
print(theorem)

# %% [markdown]
# ## A run beside the bound

# %%
ROUNDS = 200
model = ft.models.deep_linear(2, 1, width=500, depth=3, dtype="float64")
algorithm = ft.fed_avg(
    model,
    ft.schedules.all_clients(4),
    client_learning_rate=0.003,
    work=ft.Work(steps=2, batch_size=None),
    loss="squared_error_sum",
    averaging=ft.Averaging(weighting="uniform"),
)
held = ft.data.federated_data(x, y, clients, "float64")


def squared(algorithm, state):
    return {"loss": 0.5 * float(np.sum((np.asarray(algorithm.predict(state, x).mean) - y) ** 2))}


run = ft.simulate(algorithm, held, num_rounds=ROUNDS, seed=0, evaluation=ft.Evaluation(every=10, measure=squared))
rounds = np.array([e.round for e in run.history.evaluations])
losses = np.array([e.metrics["loss"] for e in run.history.evaluations])

figure, ax = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
ax.semilogy(rounds, losses / losses[0], "o", ms=4, color="#0072b2", label="simulated, width 500")
ax.semilogy(rounds, theorem.constants.rate() ** rounds, "--", color="#d55e00", label="the theorem's bound")
ax.set_xlabel("round")
ax.set_ylabel("loss / loss at the start")
ax.legend()
plt.show()

# %% [markdown]
# The bound holds, but is not tight: at infinite width a round removes about four times as much of the loss.

# %%
print(f"of the loss a round leaves {theorem.constants.rate():.4f} (bound), {theorem.linear_rate:.4f} (infinite width)")

# %% [markdown]
# ## The four terms of a round's residual (eq. 17)
#
# They come from the linear model, the change of the kernel, the drift of clients, and products of several layers'
# changes. Each is shown as a share of the whole, in the first round, from one random start for each width.

# %%
for width in (50, 200, 800):
    own = [rng.standard_normal(shape) for shape in ((width, 2), (width, width), (1, width))]
    terms = ft.theory.residual_terms(own, own, work)
    shares = [np.linalg.norm(term) / np.linalg.norm(terms.total) for term in terms]
    names = ("linear", "kernel", "drift", "products")
    print(f"width {width}: " + ", ".join(f"{n} {s:.1e}" for n, s in zip(names, shares, strict=True)))

# %% [markdown]
# ## To play with
#
# A rate, local steps and a width of your own: what the theorem promises, and which of its conditions then hold.

# %%
RATE, STEPS, WIDTH = 0.001, 5, 1000

own = [rng.standard_normal(shape) for shape in ((WIDTH, 2), (WIDTH, WIDTH), (1, WIDTH))]
print(ft.theory.deep_linear_theorem(own, ft.theory.full_batch_work(x, y, clients, RATE, STEPS)))
