"""An interpreter that has imported the heavy libraries already, and forks a process for each command it is given.

A test that starts a program pays several seconds of a core for imports alone. Here the server imports them once, and
each command runs in a process of its own, forked from it, with its own arguments, folder, environment and streams.

    python warm.py serve                     the server; prints the path of its socket, ends with its standard input
    python warm.py SOCKET -m MODULE ...      a command, as ``python -m MODULE ...``; also ``-c CODE ...``, ``FILE ...``
"""

import array
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import types
import warnings
from select import select
from typing import Any

IMPORTED = (
    "safemerge_pl.commands.check",
    "safemerge_pl.commands.fold",
    "safemerge_pl.commands.study",
    "safemerge_pl.backbones.clip",
    "transformers.models.clip.modeling_clip",
    "transformers.models.clip.image_processing_clip",
    "torch.utils.tensorboard",
    "matplotlib.pyplot",
    "datasets",
)


def serve() -> dict[str, Any]:
    """Wait for commands; returns in the processes that run them, and ends in the server with its standard input."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # what is shared stays shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    folder = tempfile.mkdtemp(prefix="warm")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        print(listener.getsockname(), flush=True)
        while True:
            if sys.stdin in select([sys.stdin, listener], [], [])[0]:
                shutil.rmtree(folder)
                raise SystemExit
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    content, ancillary, _, _ = connection.recvmsg(2**20, socket.CMSG_LEN(3 * array.array("i").itemsize))
    streams = array.array("i", ancillary[0][2])
    runner = os.fork()
    if runner:
        _wait(runner, connection)
    connection.close()
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    request: dict[str, Any] = json.loads(content)
    return request


def _wait(runner: int, connection: socket.socket) -> None:
    """Tell how the command ended; whoever starts a command and goes away takes it along."""
    while True:
        done, status = os.waitpid(runner, os.WNOHANG)
        if done:
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        if select([connection], [], [], 0.01)[0]:
            os.kill(runner, signal.SIGKILL)
            os._exit(1)


def run(request: dict[str, Any]) -> None:
    """Do in this process what an interpreter does with its arguments."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    if os.environ.get("PYTHONWARNINGS") == "default":
        warnings.simplefilter("default")
    first, *rest = request["arguments"]
    if first == "-m":
        sys.path[0], sys.argv = os.getcwd(), rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path[0], sys.argv = os.path.dirname(first), request["arguments"]
        runpy.run_path(first, run_name="__main__")


def ask(path: str, arguments: list[str]) -> None:
    """Have the server run a command with the streams, folder and environment of this process, and end as it does."""
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        code = int(connection.recv(16) or b"1")
    if code < 0:
        os.kill(os.getpid(), -code)
        time.sleep(1)
    raise SystemExit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        run(serve())
    else:
        ask(sys.argv[1], sys.argv[2:])
