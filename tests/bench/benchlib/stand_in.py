"""Stands in for ComfyUI below a worker of kind `comfyui`: a server in C that costs little, so that the router is what is measured.

The configuration names a script that starts this as `python`. A job begins and lasts until it is cancelled: what is posted
waits in the router's queue, as behind a long video.
"""

import os
import socket
import subprocess
import sys
import time

from resvisor.worker import Worker

POLL_S = 0.02


def main():
    backend = sys.argv[1]
    fd = os.environ.get("RESVISOR_HTTP_FD")
    worker = Worker.open([])
    if fd:  # the supervisor keeps the port
        where, keep = f"fd:{fd}", [int(fd)]
        with socket.socket(fileno=os.dup(int(fd))) as found:
            port = found.getsockname()[1]
    else:
        port, keep = int(sys.argv[2]), []
        where = str(port)
    with subprocess.Popen([backend, "backend", where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=keep) as server:
        server.stdout.readline()
        worker.ready(f"ComfyUI stand-in at http://127.0.0.1:{port}; pooled: nothing")
        for job in worker:
            with job:
                while not job.cancelled:
                    time.sleep(POLL_S)
                job.fail("cancelled")
        server.stdin.close()


if __name__ == "__main__":
    main()
