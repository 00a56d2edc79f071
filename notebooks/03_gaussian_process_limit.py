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
# # How many models does an ensemble need?
#
# The error of an ensemble's mean falls as 1 / K, and theory says from which value.
#
# Theorem 2 of Fed-ensemble: wide networks that are trained long enough are independent draws of a Gaussian process,
# with mean $m(x) = \Theta(x, X) \Theta^{-1} Y$ and a covariance $k$ that the kernels give. An ensemble of $K$ of them
# estimates the mean with a variance of $k(x, x) / K$ (Corollary 1), and its spread says how uncertain a prediction is.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fedtangent as ft

ft.enable_x64()

# %% [markdown]
# ## A problem whose kernel can be inverted
#
# A linear model of radial basis functions is exactly in the kernel regime: its flow and its limit hold to rounding.

# %%
rng = np.random.default_rng(1)
x, x_test = np.linspace(-1, 1, 16)[:, None], np.linspace(-1.3, 1.3, 80)[:, None]
y = np.sin(3 * x) + 0.1 * rng.standard_normal(x.shape)
clients = ft.partition.iid(len(x), num_clients=4, seed=0)
model = ft.models.rbf_linear(60, bandwidth=0.1, dtype="float64")
kernel = ft.kernels.kernel_blocks(model.kernel, x, x_test)
limit = ft.theory.gp_limit(kernel, y)
print(f"condition number of the kernel {np.linalg.cond(kernel.ntk_train):.2g}, jitter {limit.jitter:g}")

# %% [markdown]
# ## Ensembles of growing size, trained

# %%
K, ROUNDS = 20, 3000
schedule = ft.schedules.per_client_permutations(clients.num_clients, K)
work = ft.Work(steps=20, batch_size=None)
largest = max(
    np.linalg.eigvalsh(kernel.ntk_train[np.ix_(own, own)])[-1] / len(own) for own in map(clients.client, range(4))
)
algorithm = ft.fed_ensemble(model, schedule, client_learning_rate=1 / largest, work=work)
run = ft.simulate(algorithm, ft.data.federated_data(x, y, clients, jnp.float64), num_rounds=ROUNDS, seed=0)
members = np.asarray(algorithm.predict(run.state, x_test).members)[..., 0]  # [K, 80]

# %%
deviation = np.sqrt(np.maximum(np.diag(limit.cov), 0))
figure, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
ax.plot(x_test, members.T, color="0.6", lw=0.6)
ax.plot(x_test, limit.mean, color="#d55e00", label="limit: mean, 95 % band")
ax.fill_between(x_test[:, 0], *(limit.mean[:, 0] + s * 1.96 * deviation for s in (-1, 1)), color="#d55e00", alpha=0.2)
ax.plot(x, y, "k.", label="data of all clients")
ax.set_xlabel("x")
ax.legend()
plt.show()

# %% [markdown]
# ## Do they scatter as the limit says?
#
# The mean over points of (trained - mean)^2 / k(x, x) has to be one, within two of the standard errors shown. The
# negative control divides by the variance of the networks at the start in place of k(x, x), and gives another number.

# %%
inside = deviation > 1e-3
ratio = np.mean((members[:, inside] - limit.mean[inside, 0]) ** 2 / deviation[inside] ** 2, axis=1)
print(f"measured / predicted variance: {ratio.mean():.2f} +- {ratio.std(ddof=1) / np.sqrt(K):.2f}")
wrong = np.mean((members[:, inside] - limit.mean[inside, 0]) ** 2 / np.diag(kernel.nngp_test)[inside], axis=1)
print(f"against the prior's variance, which is wrong after training: {wrong.mean():.2f}")

# %% [markdown]
# ## Corollary 1: the error of an ensemble falls as 1 / K
#
# The twenty networks make twenty ensembles of one, but two of ten only: the points on the right scatter most.

# %%
sizes = np.array([1, 2, 4, 5, 10])
errors = [
    np.mean((members[: K // k * k].reshape(-1, k, members.shape[1]).mean(axis=1) - limit.mean[:, 0]) ** 2)
    for k in sizes
]
figure, ax = plt.subplots(figsize=(4.5, 3.2), layout="constrained")
ax.loglog(sizes, errors, "o", color="#0072b2", label="trained ensembles")
ax.loglog(sizes, np.mean(deviation**2) / sizes, color="#d55e00", label="k(x, x) / K")
ax.set_xlabel("size K of the ensemble")
ax.set_ylabel("mean squared distance to m(x)")
ax.legend()
plt.show()

# %% [markdown]
# ## Where the limit is not reached
#
# Networks with a kernel that is singular to rounding never get there in a run of finite length. `Flow` says where they
# are instead: exact at every round, without an inverse (notebooks 01 and 04). `ft.theory.gp_limit` adds to such a
# kernel the least jitter with which it can be inverted, and reports it (`limit.jitter`); it refuses one that needs more
# than `max_relative_jitter`. The example is the kernel of a smooth network at 32 points of an interval: its condition
# number is beyond what float64 resolves, so it needs jitter, and is refused without any.

# %%
x, x_test = np.linspace(-1, 1, 32)[:, None], np.linspace(-1.3, 1.3, 80)[:, None]
y = np.sin(3 * x)
smooth = ft.models.mlp(1, 1, widths=(64,), activation="erf", w_std=1.5, b_std=1.0, dtype=jnp.float64)
kernel = ft.kernels.kernel_blocks(smooth.kernel, x, x_test)
print(f"condition number {np.linalg.cond(kernel.ntk_train):.1g}, jitter {ft.theory.gp_limit(kernel, y).jitter:.1g}")
try:
    ft.theory.gp_limit(kernel, y, max_relative_jitter=0)
except ft.kernels.SingularKernelError as error:
    print(error)

# %% [markdown]
# ## To play with
#
# Where should the next example lie? `POINT` is added to the sixteen examples of the first problem (its target is not
# needed), and `MODELS` models are averaged. The figure has the standard deviation of their mean, before and after.

# %%
POINT, MODELS = 1.2, 5

x, x_test = np.linspace(-1, 1, 16)[:, None], np.linspace(-1.3, 1.3, 80)[:, None]
figure, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
for label, inputs in (("sixteen examples", x), (f"and one at {POINT:g}", np.concatenate([x, [[POINT]]]))):
    kernel = ft.kernels.kernel_blocks(model.kernel, inputs, x_test)
    cov = ft.theory.gp_limit(kernel, np.zeros((len(inputs), 1))).cov
    ax.plot(x_test, np.sqrt(np.maximum(np.diag(cov), 0) / MODELS), label=label)
ax.set(xlabel="x", ylabel=f"standard deviation of {MODELS} models' mean")
ax.legend()
plt.show()
