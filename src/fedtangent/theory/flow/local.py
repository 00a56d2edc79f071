"""Local training in a client's own coordinates, for every rule.

A client starts at the server's model w and minimises ``F_i(v) + <tilt, v> + prox/2 |v - w|^2 + decay/2 |v|^2``. With
``b = tilt + decay w`` and ``nu = prox + decay`` its move is ``-Phi_i z - kappa b`` for its own features Phi_i, and with
the eigenvalues lambda of ``Theta_ii = Phi_i' Phi_i``, one step of size eta gives, mode by mode,

    z <- (1 - eta nu) z + (eta / n_i) (g - lambda z - kappa b_i),     kappa <- (1 - eta nu) kappa + eta,

g being the client's residual and ``b_i = Phi_i' b`` the values of b on its examples. So ``z = A g - C b_i`` with
numbers A, C per mode. Gradient flow is the limit of many small steps.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.theory.flow.clients import response
from fedtangent.theory.flow.rules import Kind, Numbers
from fedtangent.types import Array

NODES, NODE_WEIGHTS = np.polynomial.legendre.leggauss(8)
SMALL = 0.1  # below, a divided difference loses digits and its integral is exact to rounding with eight nodes


class Gains(NamedTuple):
    """A client's answer, mode by mode, after its local training."""

    own: Array  # [s] A, to its residual
    tilt: Array  # [s] C, to its tilt; 0 where there is none
    kappa: Array  # [] how far a constant force moves it


def gains(kind: Kind, numbers: Numbers, eigenvalues: Array, rate: Array, num_examples: Array, steps: Array) -> Gains:
    """The gains of ``steps`` full-batch steps of size ``rate``; see the module."""
    nu = numbers.prox + numbers.weight_decay
    if kind.dynamics == "gradient_flow":
        return _flow(kind, numbers, eigenvalues / num_examples, nu, rate, num_examples, steps)
    if kind.weighs_steps:
        return _by_recursion(kind, numbers, eigenvalues, rate, num_examples, steps)
    own = response(eigenvalues + num_examples * nu, rate, num_examples, steps)
    kappa = response(nu, rate, jnp.ones(()), steps)
    if not kind.tilts:
        return Gains(own, jnp.zeros_like(own), kappa)
    return Gains(own, _by_recursion(kind, numbers, eigenvalues, rate, num_examples, steps).tilt, kappa)


def sizes_of_steps(kind: Kind, numbers: Numbers, rate: Array, steps: Array) -> Array:
    """Step size of each local step, [most_steps]; 0 beyond the client's own."""
    return jnp.where(jnp.arange(kind.most_steps) < steps, rate * numbers.step_weights, 0.0)


def kappas(kind: Kind, numbers: Numbers, sizes: Array) -> tuple[Array, Array]:
    """kappa before each local step, [most_steps], and after the last, []."""
    nu = numbers.prox + numbers.weight_decay

    def step(kappa: Array, eta: Array) -> tuple[Array, Array]:
        return kappa * (1 - eta * nu) + eta, kappa

    last, before = jax.lax.scan(step, jnp.zeros(()), sizes)
    return before, last


def minibatch_descent(
    numbers: Numbers, block: Array, shares: Array, sizes: Array, before: Array, own: Array, tilt: Array | None
) -> Array:
    """z after local steps on minibatches in a fixed order, [s, D].

    Args:
        block: [s, s] Theta_ii; shares: [most_steps, s], ``1 / |B_t|`` on the rows of batch t, 0 elsewhere.
        sizes, before: of ``sizes_of_steps`` and ``kappas``; own: [s, D] residual; tilt: [s, D] values of b, or None.
    """
    nu = numbers.prox + numbers.weight_decay

    def step(z: Array, now: tuple[Array, Array, Array]) -> tuple[Array, None]:
        share, eta, kappa = now
        error = own - block @ z
        if tilt is not None:
            error = error - kappa * tilt
        return z * (1 - eta * nu) + eta * share[:, None] * error, None

    return jax.lax.scan(step, jnp.zeros_like(own), (shares, sizes, before))[0]


def _by_recursion(
    kind: Kind, numbers: Numbers, eigenvalues: Array, rate: Array, num_examples: Array, steps: Array
) -> Gains:
    nu = numbers.prox + numbers.weight_decay
    sizes = sizes_of_steps(kind, numbers, rate, steps)

    def step(carry: Gains, eta: Array) -> tuple[Gains, None]:
        each, shrink = eta / num_examples, 1 - eta * nu
        factor = shrink - each * eigenvalues
        tilt = carry.tilt * factor + each * carry.kappa
        return Gains(carry.own * factor + each, tilt, carry.kappa * shrink + eta), None

    zeros = jnp.zeros_like(eigenvalues)
    found, _ = jax.lax.scan(step, Gains(zeros, zeros, jnp.zeros(())), sizes)
    return found


def _flow(kind: Kind, numbers: Numbers, x: Array, nu: Array, rate: Array, num_examples: Array, steps: Array) -> Gains:
    """Gradient flow for the time ``sum of the step sizes``."""
    time = jnp.sum(sizes_of_steps(kind, numbers, rate, steps)) if kind.weighs_steps else rate * steps

    def phi(h: Array) -> Array:  # (1 - e^{-time h}) / h
        y = time * h
        near = jnp.abs(y) < 1e-150
        return time * jnp.where(near, 1.0 - y / 2 + y**2 / 6, -jnp.expm1(-y) / jnp.where(near, 1.0, y))

    def slope(y: Array) -> Array:  # -d/dy of (1 - e^{-y}) / y
        near = jnp.abs(y) < 0.5
        far = jnp.where(near, 1.0, y)
        series = sum((-1) ** j * (j + 1) * y**j / float(np.prod(np.arange(1, j + 3, dtype=float))) for j in range(16))
        return jnp.where(near, series, (1 - (1 + far) * jnp.exp(-far)) / far**2)

    own, kappa = phi(nu + x) / num_examples, phi(nu)
    if not kind.tilts:
        return Gains(own, jnp.zeros_like(own), kappa)
    near = time * x < SMALL
    theta, weight = jnp.asarray((NODES + 1) / 2), jnp.asarray(NODE_WEIGHTS / 2)
    safe = jnp.where(near, x, 0.0)
    close = time**2 * jnp.einsum(
        "j,j...->...", weight, slope(time * (nu + theta.reshape(-1, *([1] * x.ndim)) * safe[None]))
    )
    apart = (phi(nu) - phi(nu + x)) / jnp.where(near, 1.0, x)
    return Gains(own, jnp.where(near, close, apart) / num_examples, kappa)
