"""These tests run in build/torch-venv, a stage of tests/run.sh of its own; without torch there is nothing here to collect."""

import importlib.util

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
