"""A script that writes down the world it finds itself in: `canary.py OUT MODE [ARGS]`.

It is run under `python` and under memopt, and both must leave the same lines in OUT, the same stdout and the same exit.
"""

# ruff: noqa: E402  (the names that the interpreter put here must be seen before anything else)
FIRST_GLOBALS = sorted(globals())

import atexit
import inspect
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time

OUT = sys.argv[1]
MODE = sys.argv[2] if len(sys.argv) > 2 else "world"


class Keepsake:
    """Pickled by a thread that outlives the body: `__main__` must still be this module."""

    def __init__(self, value):
        self.value = value


def note(**facts):
    with open(OUT, "a") as file:
        file.write(json.dumps(facts, sort_keys=True, default=str) + "\n")


def worker(number):
    return {
        "name": __name__,
        "argv": sys.argv[1:],
        "number": number * 2,
        "memopt": __name__ == "__mp_main__" and sorted(m for m in sys.modules if m.startswith("memopt")),
    }


def survivor():
    time.sleep(0.3)
    copy = pickle.loads(pickle.dumps(Keepsake(5)))
    note(thread=copy.value, main_is_mine=sys.modules["__main__"].__dict__ is globals())


def world():
    main = sys.modules["__main__"]
    spec = globals().get("__spec__")
    note(
        argv=[arg for arg in sys.argv if arg != OUT],
        first_globals=FIRST_GLOBALS,
        name=__name__,
        file=__file__,
        doc=__doc__.splitlines()[0],
        package=__package__,
        spec=spec and spec.name,
        loader=type(__loader__).__name__,
        path0=sys.path[0],
        cwd=os.getcwd(),
        main_is_mine=main.__dict__ is globals(),
        main_thread=threading.current_thread() is threading.main_thread(),
        daemon=multiprocessing.current_process().daemon,
        sigint=signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        sigterm=signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        source=inspect.getsource(Keepsake).splitlines()[0],
        pickled=pickle.loads(pickle.dumps(Keepsake([1, 2]))).value,
        stdin=sys.stdin.read(),
        recursion=sys.getrecursionlimit(),
        own_frames=[frame.function for frame in inspect.stack()][:2],
    )


def train(steps=6):
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4)]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.randn(2048, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    note(loss=loss.item().hex(), rng=torch.rand(1).item().hex(), grad_mode=torch.is_grad_enabled())


def spawned():
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            note(method=method, worker=pool.map(worker, [21]))


def ending():
    if MODE == "exit":
        sys.exit(7)
    if MODE == "message":
        sys.exit("the last words")
    if MODE == "raise":
        raise ValueError("a mistake of the script")
    if MODE == "hard":
        os._exit(5)
    if MODE == "sigint":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    if MODE == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    if MODE == "sigterm-handled":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


if __name__ == "__main__":
    print("said on stdout")
    atexit.register(note, atexit="registered first")
    atexit.register(note, atexit="registered second")
    if MODE == "world":
        world()
        train()
        spawned()
        threading.Thread(target=survivor).start()
    try:
        ending()
    finally:
        note(finally_of=MODE)
    note(body="ended")
