"""What crosses the wire between clients and server, what it costs, and what hides it.

::

    channel              how messages travel: whole, clipped, sparsified, quantised, chained, with error feedback
    ledger               the bytes of everything that is sent
    sparsify             which numbers of a Jacobian are kept
    subsample            clients that use a part of their examples
    shuffler             a server that permutes the messages
    secure_aggregation   masks, of which the server sees the sum only
    key_server           a secret seed, sealed to each client
"""

from fedtangent.federated.wire import channel, key_server, ledger, secure_aggregation, shuffler, sparsify, subsample

__all__ = ["channel", "key_server", "ledger", "secure_aggregation", "shuffler", "sparsify", "subsample"]
