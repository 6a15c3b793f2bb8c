"""ComfyUI as a worker of resvisor: its own code and server, weights from the pool, jobs from the router.

`python -m resvisor.comfyui MAIN.PY ARGS…` is what the worker kind `comfyui` starts; docs/comfyui.md explains it.

launcher.py starts everything, imports.py and hooks.py connect ComfyUI's loader with the pool, pool.py keeps the mappings,
server.py gives ComfyUI its socket and watches its events, jobs.py runs jobs, files.py collects what they made. settings.py
looks at the files that ComfyUI will read, folders.py says what is each worker's own, packs.py watches custom nodes being
registered, warmup.py runs the first prompt, monitor.py says what HTTP does not show. trace.py says what a job did to models, and
baseline.py runs a plain ComfyUI beside it: both are for `resvisor verify`.
"""
