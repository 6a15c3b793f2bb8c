"""Helpers of the Python tests: a real resvisor, its sockets, /proc, and files good and bad."""
