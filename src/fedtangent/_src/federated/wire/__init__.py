"""The wire between clients and server: its messages, their cost, and the methods that hide them.

::

    channel              transport of messages: whole, clipped, sparsified, quantised, chained, with error feedback
    ledger               bytes of all messages
    sparsify             which numbers of a Jacobian are sent
    subsample            clients that use a part of their examples
    shuffler             a server that permutes the messages
    secure_aggregation   masked messages, so that the server learns only their sum
    key_server           a secret seed, sealed to each client
"""
