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
# # Does an ensemble know what it does not know?
#
# An ensemble says how much its members disagree. In the kernel regime that disagreement is a posterior variance
# (notebook 03); here it is measured on digits: entropy, knowledge uncertainty, reliability, and what it says of
# inputs that the clients have never seen.

# %%
import matplotlib.pyplot as plt
import numpy as np

import fedtangent as ft

ft.enable_x64(False)
digits = ft.data.load("digits", flatten=True)
known = digits.y_train < 8  # classes 8 and 9 are kept from everybody
x, y = digits.x_train[known], digits.y_train[known]
clients = ft.partition.classes(y, num_clients=20, classes_per_client=2, seed=0)
held = ft.data.federated_data(x, y, clients, num_classes=10)
model = ft.models.mlp(64, 10, (100,), parameterization="standard")
work = ft.Work(epochs=2, batch_size=16)

# %% [markdown]
# ## Ten networks by Fed-ensemble, one by FedAvg

# %%
ensemble = ft.fed_ensemble(
    model,
    ft.schedules.per_client_permutations(20, 10),
    client_learning_rate=0.1,
    work=work,
    loss="cross_entropy",
)
single = ft.fed_avg(model, ft.schedules.all_clients(20), client_learning_rate=0.1, work=work, loss="cross_entropy")
states = {a.name: ft.simulate(a, held, num_rounds=60, seed=0).state for a in (ensemble, single)}
seen = digits.y_test < 8
logits = {
    a.name: np.asarray(a.predict(states[a.name], digits.x_test).members) for a in (ensemble, single)
}  # [K, n, 10]

# %% [markdown]
# ## Accuracy and calibration, on classes that clients know
#
# A point is a bin of predictions, its area their number. Above the line a model is more accurate than it says: both
# are, and the ensemble more so, so that its calibration error (ECE) is the larger one here.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True, layout="constrained")
for ax, (name, members) in zip(axes, logits.items(), strict=True):
    own, labels = members[:, seen], digits.y_test[seen]
    bins = ft.measures.reliability(own, labels, num_bins=10)
    error, accuracy = float(ft.measures.calibration_error(bins)), float(ft.measures.accuracy(own, labels))
    filled = np.asarray(bins.examples) > 0
    ax.plot([0, 1], [0, 1], color="0.7")
    ax.scatter(
        np.asarray(bins.confidence)[filled], np.asarray(bins.accuracy)[filled], s=np.asarray(bins.examples)[filled]
    )
    ax.set_title(f"{name}: accuracy {accuracy:.3f}, ECE {error:.3f}")
    ax.set_xlabel("confidence")
axes[0].set_ylabel("accuracy")
plt.show()

# %% [markdown]
# ## What nobody has seen
#
# Digits 8 and 9: the entropy of the prediction, and the part of it that is lack of knowledge (mutual information),
# which is 0 for a single network.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
measures = (("entropy", ft.measures.predictive_entropy), ("mutual information", ft.measures.mutual_information))
for ax, (label, of) in zip(axes, measures, strict=True):
    values = np.asarray(of(logits["fed_ensemble"]))
    for chosen, name in ((seen, "0 to 7"), (~seen, "8 and 9, never seen")):
        ax.hist(values[chosen], bins=30, density=True, alpha=0.6, label=name)
    ax.set_xlabel(f"{label} (nats)")
    ax.legend()
    print(f"{label}: known {values[seen].mean():.3f}, never seen {values[~seen].mean():.3f}")
plt.show()

# %% [markdown]
# ## To play with
#
# How many models does it take? The output is the share of unseen digits among the `FLAGGED` predictions of which
# `MODELS` of the ten models know least. By chance it would be the share of unseen digits in the test set.

# %%
MODELS, FLAGGED = 3, 50

doubt = np.asarray(ft.measures.mutual_information(logits["fed_ensemble"][:MODELS]))
flagged = np.argsort(doubt)[-FLAGGED:]
print(f"{(~seen[flagged]).mean():.2f} of the {FLAGGED} most doubtful were never seen, {(~seen).mean():.2f} of all")
