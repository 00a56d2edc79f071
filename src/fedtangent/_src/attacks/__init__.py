"""Attacks by which a curious server reads examples from the gradients and Jacobians that clients send.

::

    observation   the server's view: ``jacobians``, ``gradient``, sparsified (``sparsify``) or shuffled
    leakage       deep leakage: searches for the input whose gradient or Jacobian is the received one
    closed_form   inputs from a dense first layer, the order of shuffled weights, inverse projections
    networks      the network of the deep-leakage paper (``lenet``), and the similarity of images (``ssim``)
"""
