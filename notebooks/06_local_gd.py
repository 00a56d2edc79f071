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
# # Which of many solutions does federated training find? The implicit bias of Local-GD
#
# A linear model with more dimensions than examples has many solutions. Which one does federated training find? For
# regression every round is known in closed form: the global model tends to the centralised minimum-norm solution. For
# separable classification a round is a projection onto every node's feasible set: plain averaging ends somewhere in
# their intersection; if it is drawn back to the start at the right pace, it ends at the support vector machine.

# %%
import matplotlib.pyplot as plt
import numpy as np

import fedtangent as ft

rng = np.random.default_rng(0)
x = rng.standard_normal((100, 300))
truth = rng.standard_normal(300)
nodes = ft.types.Partition(np.arange(100), np.arange(0, 101, 10))  # ten nodes of ten examples each

# %% [markdown]
# ## Regression

# %%
y = x @ truth
run = ft.theory.local_regression(x, y, nodes)
centralised = ft.theory.minimum_norm(x, y)
rounds = np.arange(0, 61)
path = run.models(60)
distance = np.linalg.norm(path - centralised, axis=1) / np.linalg.norm(centralised)
print(f"a round leaves {run.contraction:.3f} of the distance at most; {run.rounds_to(1e-3)} rounds to a thousandth")

figure, ax = plt.subplots(figsize=(5, 3.4), layout="constrained")
ax.semilogy(rounds, distance, color="#0072b2", label="closed form")
ax.semilogy(rounds, distance[0] * run.contraction**rounds, "--", color="#d55e00", label="Theorem 1's rate")
ax.set_xlabel("round")
ax.set_ylabel("distance to the centralised model")
ax.legend()
plt.show()

# %% [markdown]
# ## Separable classification

# %%
labels = np.sign(y)
sets = ft.theory.feasible_sets(x, labels, nodes)
machine = ft.theory.hard_margin(sets)
plain = ft.theory.parallel_projections(sets, 120)
drawn_back = ft.theory.parallel_projections(sets, 120, alpha=ft.theory.halpern(120))

figure, ax = plt.subplots(figsize=(5, 3.4), layout="constrained")
for label, models, color in (("Local-GD (eq. 13)", plain, "#0072b2"), ("modified (eq. 16)", drawn_back, "#009e73")):
    ax.loglog(np.arange(1, 121), ft.theory.direction_distance(models[1:], machine), color=color, label=label)
ax.set_xlabel("round")
ax.set_ylabel("distance of directions to the SVM")
ax.legend()
plt.show()
end = ft.theory.direction_distance(np.stack([plain[-1], drawn_back[-1]]), machine)
print(f"after 120 rounds: Local-GD {end[0]:.4f}, modified {end[1]:.4f}")

# %% [markdown]
# ## What holds on these data

# %%
print(ft.theory.local_theorem_1(run))

# %% [markdown]
# ## To play with
#
# The same in other sizes: regression with `EXAMPLES` examples on each of `NODES` nodes, in `DIMENSIONS` dimensions
# (more than there are examples). How many rounds are needed, and how does that grow with the number of nodes?

# %%
NODES, EXAMPLES, DIMENSIONS = 5, 20, 400

count = NODES * EXAMPLES
inputs = np.random.default_rng(1).standard_normal((count, DIMENSIONS))
own = ft.types.Partition(np.arange(count), np.arange(0, count + 1, EXAMPLES))
yours = ft.theory.local_regression(inputs, inputs @ np.ones(DIMENSIONS), own)
print(f"{NODES} nodes: a round leaves {yours.contraction:.3f} of the distance at most")
print(f"{yours.rounds_to(1e-3)} rounds to a thousandth of it")
