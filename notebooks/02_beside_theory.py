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
# # How wide must my network be for theory to hold?
#
# Theory describes infinitely wide networks. How far is a network of width 64, or 1,024, from it?
#
# `ft.simulate`, `ft.predict` and `ft.compare` take the same algorithm, data and clients. `compare` trains networks of
# several widths, and the federated kernel flow predicts the same run, with its cohorts, its minibatches and each
# network's own initial function, without training anything. The difference that remains is the effect of the finite
# width.

# %%
import matplotlib.pyplot as plt
import numpy as np

import fedtangent as ft

ft.enable_x64()

# %% [markdown]
# ## Your own data
#
# Two classes that no linear classifier separates, on six clients with unequal label shares.

# %%
rng = np.random.default_rng(0)
x = rng.normal(size=(120, 3))
y = (x[:, 0] * x[:, 1] > 0).astype(int)
clients = ft.partition.dirichlet(y[:80], num_clients=6, alpha=0.5, seed=0)
data = x[:80], y[:80], x[80:], y[80:]
print(clients)

# %% [markdown]
# ## The comparison
#
# FedProx, with all clients in every round. `widths` and `draws` say which networks are trained, and how many of each.

# %%
WIDTHS = (64, 256, 1024)
model = ft.models.mlp(3, 2, widths=(256,))
fed_prox = ft.fed_prox(model, ft.schedules.all_clients(6), client_learning_rate=1.0, mu=0.1, loss="cross_entropy")
found = ft.compare(fed_prox, data, clients, num_rounds=10, seed=0, widths=WIDTHS, draws=60)
for gap, width in zip(found.gaps, WIDTHS, strict=True):
    print(f"width {width:4d}: relative error to the flow after the last round {gap.error[-1].mean():.3f}")

# %% [markdown]
# The learning curve of the widest networks, and dashed the prediction for them, each from its own start:

# %%
found.history

# %% [markdown]
# ## Verdicts, each with a wrong theory
#
# A verdict compares a measured number, with its interval in brackets, with the predicted number and its margin: it
# holds if the whole interval lies within the margin. A theory that is wrong on purpose is put through the same check:
# if it passes too, the verdict shows nothing. With fewer networks the intervals would be too long and the verdicts
# undecided: sixty of each width take a minute or two, most of it to compile.

# %%
for verdict in found.verdicts:
    answer = {True: "holds", False: "FAILS", None: "undecided"}[verdict.holds]
    told = "fails, as it must" if verdict.control_fails else "PASSES"
    print(f"{answer:9s} {verdict.statement}: {verdict.measured}, expected {verdict.expected}")
    print(f"          wrong theory: {verdict.control}: {told}")

# %% [markdown]
# ## Error against width
#
# Theory says width^-1/2.

# %%
errors = np.array([gap.error[-1].ravel() for gap in found.gaps])  # [width, draw]
figure, ax = plt.subplots(figsize=(5, 3.4), layout="constrained")
ax.loglog(WIDTHS, errors, ".", color="0.8")
ax.loglog(WIDTHS, errors.mean(axis=1), "o-", color="#0072b2", label="networks")
ax.loglog(
    WIDTHS, errors[0].mean() * (np.array(WIDTHS) / WIDTHS[0]) ** -0.5, "--", color="#d55e00", label="width$^{-1/2}$"
)
ax.set_xticks(WIDTHS, WIDTHS)
ax.xaxis.minorticks_off()
ax.set_xlabel("width")
ax.set_ylabel("relative error to the flow")
ax.legend()
plt.show()

# %% [markdown]
# ## Theory alone
#
# Theory predicts a run before it starts: its learning curve, the largest stable rate and the best rate. No network is
# trained here.

# %%
forecast = ft.predict(fed_prox, data, clients, num_rounds=10, seed=0)
print(forecast)
forecast.history

# %% [markdown]
# On the command line these are `fedtangent compare --algorithm fed_prox --mu 0.1 --dataset mine.npz` and
# `fedtangent predict` with the same options.

# %% [markdown]
# ## To play with
#
# How wide must a network be to end within `WITHIN` of theory? The line through the errors above gives the answer, a
# guess beyond the widths that were trained. `RATE`, `MU` and `STEPS` are settings of another run, which theory
# predicts.

# %%
WITHIN = 0.02
RATE, MU, STEPS = 0.5, 1.0, 20

slope, level = np.polyfit(np.log(WIDTHS), np.log(errors.mean(axis=1)), 1)
print(f"an error of {WITHIN:g} needs a width of about {np.exp((np.log(WITHIN) - level) / slope):.0f}")
other = ft.fed_prox(
    model,
    ft.schedules.all_clients(6),
    client_learning_rate=RATE,
    mu=MU,
    work=ft.Work(steps=STEPS, batch_size=16),
    loss="cross_entropy",
)
print(ft.predict(other, data, clients, num_rounds=10, seed=0))
