"""The rows of tests/bench/run."""
