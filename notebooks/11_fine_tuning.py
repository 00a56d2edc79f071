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
# # Does fine-tuning stay near its linearisation?
#
# Pre-trained networks are where the kernel regime is used today: fine-tuning moves the weights little, so a network may
# train like its linearisation at the pre-trained weights. Here a network is trained on the digits 0 to 4 and then
# fine-tuned federatedly on the digits 5 to 9: the whole network, its last layer, and low-rank changes of its matrices
# (LoRA). Theory predicts each curve and the best learning rate from the tangent kernel of the trained parameters, with
# no network trained.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fedtangent as ft

ft.enable_x64()

# %% [markdown]
# ## A pre-trained network

# %%
digits = ft.data.load("digits")
is_old, is_old_test = digits.y_train < 5, digits.y_test < 5
old = digits.x_train[is_old], digits.y_train[is_old], digits.x_test[is_old_test], digits.y_test[is_old_test]
network = ft.models.mlp(64, 5, widths=(64, 64), b_std=0.1)
sgd = ft.fed_avg(network, ft.schedules.all_clients(1), 1.0, ft.Work(steps=1000, batch_size=32))
pre_trained = ft.simulate(sgd, old, [np.arange(len(old[0]))], num_rounds=1)
weights = jax.tree.map(lambda leaf: leaf[0], sgd.params(pre_trained.state))
print(f"accuracy on digits 0 to 4: {pre_trained.history.curves()['test.accuracy'][-1]:.3f}")

# %% [markdown]
# ## Three models of the same function
#
# Each is a model like any other, whose parameters are the trained ones only: only these are sent, and the tangent
# kernel is with respect to them. `select` is searched for in a parameter's path; here the last layer is number 4, after
# two layers and their activations. LoRA adds to each matrix a product of two thin ones, of which one starts at zero.

# %%
parts = {
    "whole network": ft.models.trainable(network, weights, select=""),
    "last layer": ft.models.trainable(network, weights, select="^4/"),
    "LoRA of rank 4": ft.models.lora(network, weights, rank=4),
}
x, y = digits.x_train[~is_old][:120], digits.y_train[~is_old][:120] - 5
x_test, y_test = digits.x_test[~is_old_test], digits.y_test[~is_old_test] - 5
data, clients = (x, y, x_test, y_test), ft.partition.dirichlet(y, num_clients=10, alpha=0.5, seed=0)


def fed_avg(model, rate):
    schedule, work = ft.schedules.uniform_sampling(10, clients_per_round=5), ft.Work(steps=10, batch_size=16)
    return ft.fed_avg(model, schedule, rate, work, loss="squared_error")


for name, model in parts.items():
    start = model.init(jax.random.key(0))
    same = np.array_equal(model.apply(start, x), network.apply(weights, x))
    size = sum(leaf.size for leaf in jax.tree.leaves(start))
    print(f"{name}: {size} parameters, starts as the pre-trained network: {same}")

# %% [markdown]
# ## Predicted, then trained
#
# `predict` finds the rate with the least test loss after the last round. `compare` trains the network at half of that,
# and checks that the linearised network, trained by the same algorithm, is the predicted one.

# %%
rounds, forecasts, sides = 12, {}, {}
for name, model in parts.items():
    run = {"num_rounds": rounds, "seed": 0, "start": model.init(jax.random.key(0))}
    forecasts[name] = ft.predict(fed_avg(model, 0.1), data, clients, **run)
    sides[name] = ft.compare(fed_avg(model, forecasts[name].rates.best / 2), data, clients, **run)
    gap, verdict = sides[name].feature_learning[-1, 0], sides[name].verdicts[0]
    print(f"{name}: ends {gap:.2g} from its linearisation; linearised network = prediction: {verdict.passed}")

# %%
TICKS = (0.05, 0.1, 0.2)
figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True, layout="constrained")
for ax, (name, side) in zip(axes, sides.items(), strict=True):
    history = side.history
    ax.plot(history.evaluated, history.curves()["test.mse"], label="network, trained")
    ax.plot(history.evaluated, history.predicted.curves()["test.mse"], "k--", label="predicted")
    ax.set(title=name, xlabel="round", yscale="log", yticks=TICKS, yticklabels=TICKS)
    ax.minorticks_off()
axes[0].set_ylabel("test loss")
axes[0].legend()
plt.show()

# %% [markdown]
# The last layer is linear in its weights, so its prediction is exact. The other two learn features: LoRA trains few
# directions, and moves far along them.
#
# ## The best learning rate, before anything is trained
#
# Networks are trained at many rates, and the figure shows their loss after the last round with the predicted loss. For
# the squared error, `predict` and `compare` take labels as centred one-hot vectors, and so does the sweep here.

# %%
targets, targets_test = (ft.data.classification_targets(labels, 5, centred=True) for labels in (y, y_test))
federated = ft.data.federated_data(x, targets, clients, jnp.float32)


def loss(algorithm, state):
    outputs = algorithm.predict(state, jnp.asarray(x_test, jnp.float32)).mean
    return {"loss": ((outputs - targets_test) ** 2).mean()}


figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True, layout="constrained")
for ax, (name, model) in zip(axes, parts.items(), strict=True):
    predicted = forecasts[name].rates
    rates = [float(rate) for rate in predicted.best * 2.0 ** np.arange(-2, 3.5, 0.5)]
    trained = ft.sweep(
        lambda rate, model=model: fed_avg(model, rate),
        federated,
        num_rounds=rounds,
        seeds=[0],
        grid={"rate": rates},
        evaluation=ft.Evaluation(measure=loss),
    )
    losses = np.asarray(trained.metrics["loss"][0, :, -1])
    ax.plot(np.array(rates) / predicted.best, losses, label="network, trained")
    ax.plot(predicted.tried / predicted.best, predicted.losses, "k--", label="predicted")
    ax.set_xscale("log", base=2)
    ax.set(title=name, xlabel="client learning rate / predicted best", xlim=(0.25, 8))
    ax.set(yscale="log", ylim=(0.04, 0.3), yticks=TICKS, yticklabels=TICKS)
    ax.minorticks_off()
    print(f"{name}: best rate {rates[np.nanargmin(losses)]:.3g} by training, {predicted.best:.3g} predicted")
axes[0].set_ylabel(f"test loss after {rounds} rounds")
axes[0].legend()
plt.show()

# %% [markdown]
# Curves end where runs diverge. Here the whole network and LoRA still train at rates at which their linearisation
# diverges, and the best rate is among these: theory with a fixed kernel cannot predict this.
# `fedtangent experiment fine_tuning.regime` does this for five seeds and for LoRA of several ranks:
# docs/experiments/fine_tuning.md has the numbers.

# %% [markdown]
# ## To play with
#
# LoRA of another rank: the best learning rate and the test loss that theory expects, before anything is trained.

# %%
RANK = 1

lora = ft.models.lora(network, weights, rank=RANK)
print(ft.predict(fed_avg(lora, 0.1), data, clients, num_rounds=rounds, seed=0, start=lora.init(jax.random.key(0))))
