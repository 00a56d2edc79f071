"""Attacks by which a curious server reads examples from the gradients and Jacobians that clients send.

::

    observation   the server's view: ``jacobians``, ``gradient``, sparsified (``sparsify``) or shuffled
    leakage       deep leakage: the input whose gradient or Jacobian matches
    closed_form   the input read off a dense first layer, the order of shuffled weights, projected inputs taken back
    networks      the network that deep leakage was shown on (``lenet``), and how much of an image came back (``ssim``)
"""
