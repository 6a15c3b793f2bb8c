"""A complete worker in Python: measures the tensors of its model. docs/python.md explains it."""
import numpy
from resvisor.worker import Worker

for job in Worker.open():
    with job:
        lines, lease = [], job.models[job.model]
        for tensor in lease.tensors():
            lines.append(f"{tensor.name}: mean {tensor.numpy().mean(dtype=numpy.float64):.6f}")
            job.progress(len(lines), len(lease), tensor.name)
        job.add_output("means.txt", "\n".join(lines), "text/plain")
