"""Asynchronous rounds: FedAsync and FedBuff beside a server that waits for every answer."""
