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
# # Is a round of Jacobians worth its bytes, and what does it give away?
#
# NTK-FL's clients send the Jacobian of the network at every example; the server trains the model with the tangent
# kernel of the pooled data, and so takes many steps of gradient descent in one round. It pays in bytes: CP-NTK-FL sends
# fewer rows and sparse Jacobians, shuffled, and can project the inputs (not done here). The second half shows what can
# still be read from these messages.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np

import fedtangent as ft

ft.enable_x64()  # the evolution of the kernel runs in float64

# %% [markdown]
# ## Ten rounds of NTK-FL beside FedAvg, on digits with label skew

# %%
digits = ft.data.load("digits", flatten=True)
clients = ft.partition.dirichlet(digits.y_train, num_clients=20, alpha=0.1, seed=0)
targets = ft.data.classification_targets(digits.y_train, num_classes=10, centred=True)
held = ft.data.federated_data(digits.x_train, targets, clients)
model = ft.models.mlp(64, 10, (100,), parameterization="standard", last_w_std=0.1)
schedule = ft.schedules.uniform_sampling(20, clients_per_round=10)
work = ft.Work(steps=20, batch_size=20)
methods = {
    "FedAvg": ft.fed_avg(model, schedule, client_learning_rate=0.3, work=work),
    "NTK-FL": ft.ntk_fl(
        model, schedule, learning_rate=0.5, evolution=ft.Evolution(times=(100, 200, 400, 800), unstable="clip")
    ),
    "CP-NTK-FL": ft.cp_ntk_fl(
        model,
        schedule,
        learning_rate=0.5,
        evolution=ft.Evolution(times=(100, 200, 400, 800), unstable="clip"),
        compression=ft.Compression(beta=0.3, sparsity=0.9, shuffle=True),
    ),
}


# %%
def accuracies(algorithm):
    def accuracy(algorithm, state):
        right = np.asarray(algorithm.predict(state, digits.x_test).mean).argmax(axis=-1) == digits.y_test
        return {"accuracy": right.mean()}

    run = ft.simulate(algorithm, held, num_rounds=10, seed=0, evaluation=ft.Evaluation(every=1, measure=accuracy))
    seen = run.history.evaluations
    return [e.metrics["accuracy"] for e in seen], [e.uplink_bytes / 2**20 for e in seen]


curves = {name: accuracies(algorithm) for name, algorithm in methods.items()}

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
for name, (accuracy, mib) in curves.items():
    axes[0].plot(accuracy, "o-", ms=3, label=name)
    axes[1].semilogx(mib[1:], accuracy[1:], "o-", ms=3, label=name)
axes[0].set_xlabel("round")
axes[0].set_ylabel("test accuracy")
axes[1].set_xlabel("MiB sent up")
axes[0].legend()
plt.show()
for name, (accuracy, mib) in curves.items():
    print(f"{name}: accuracy {accuracy[-1]:.3f} with {mib[-1]:.1f} MiB up")

# %% [markdown]
# Rounds are few, bytes are many: a Jacobian is as large as the network, for every example and output.
#
# ## What is read from a message
#
# The input of a dense first layer is read in closed form: the gradient of its weights is an outer product with the
# input. Sparsity does not hide it.

# %%
image = digits.x_test[:1]
readable = ft.models.mlp(64, 10, (100,), parameterization="standard", b_std=0.0)
params = readable.init(jax.random.key(0))
figure, axes = plt.subplots(1, 4, figsize=(8, 2.5), layout="constrained")
axes[0].imshow(np.reshape(image, (8, 8)), cmap="gray")
axes[0].set_title("image")
for ax, sparsity in zip(axes[1:], (0.0, 0.9, 0.98), strict=True):
    sent = ft.attacks.sparsify(ft.attacks.jacobians(readable, params, image), sparsity)
    found = np.asarray(ft.attacks.read_first_layer(readable, params, sent)).reshape(1, 8, 8)
    similarity = ft.attacks.ssim(found, np.reshape(image, (1, 8, 8)))[0]
    ax.imshow(found[0], cmap="gray")
    ax.set_title(f"sparsity {sparsity:g}\nSSIM {similarity:.2f}")
for ax in axes:
    ax.set_axis_off()
plt.show()

# %% [markdown]
# ## To play with
#
# Another image of the test set, and as sparse a message as you like. `SIZE` examples are sent in one message: what is
# read from their sum is a mixture of them.

# %%
IMAGE, SPARSITY, SIZE = 7, 0.95, 1

images = digits.x_test[IMAGE : IMAGE + SIZE]
sent = ft.attacks.sparsify(ft.attacks.jacobians(readable, params, images), SPARSITY)
found = np.asarray(ft.attacks.read_first_layer(readable, params, sent)).reshape(-1, 8, 8)
figure, axes = plt.subplots(2, len(images), figsize=(2 * len(images), 3.4), squeeze=False, layout="constrained")
for at, (image, read) in enumerate(zip(np.reshape(images, (-1, 8, 8)), found, strict=True)):
    axes[0, at].imshow(image, cmap="gray")
    axes[1, at].imshow(read, cmap="gray")
    axes[1, at].set_title(f"read: SSIM {ft.attacks.ssim(read[None], image[None])[0]:.2f}", fontsize="small")
for ax in axes.ravel():
    ax.set_axis_off()
plt.show()
