"""A run of the small stateful algorithm in a process that may be killed; ``test_kill.py`` starts it.

python killed_run.py ROUNDS [FOLDER EVERY [resume]]: prints a digest of the final state and history, all bits.
With the environment's JAX_COORDINATOR_ADDRESS it is one of several processes, and the second one of them, if told
STOP_AT, sends itself a SIGTERM at the evaluation of that round.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    import conftest  # noqa: F401  the same settings as in the tests
    import jax

    from fedtangent._src.engine import processes

    several = "JAX_COORDINATOR_ADDRESS" in os.environ
    if several:
        processes.start()
    import stateful

    from fedtangent._src.engine.checkpoints import Checkpoints

    rounds, *rest = sys.argv[1:]
    checkpoint = (
        Checkpoints(rest[0], every=int(rest[1]), config=stateful.CONFIG, resume="resume" in rest) if rest else None
    )

    def stop(evaluation: Any) -> None:
        if jax.process_index() == 1 and str(evaluation.round) == os.environ.get("STOP_AT"):
            os.kill(os.getpid(), signal.SIGTERM)

    mapping = "sharded" if several else "scan"
    ended = stateful.run(int(rounds), checkpoints=checkpoint, mapping=mapping, report=stop)
    print(stateful.summary(ended))
