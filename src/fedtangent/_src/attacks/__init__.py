"""Attacks: what a curious server reads from the gradients and Jacobians that clients send.

::

    observation   what the server sees: ``jacobians``, ``gradient``, sparsified (``sparsify``) or shuffled
    leakage       deep leakage: the input whose gradient or Jacobian matches
    closed_form   the input read off a dense first layer, the order of shuffled weights, projected inputs taken back
    networks      the network that deep leakage was shown on (``lenet``), and how much of an image came back (``ssim``)
"""
