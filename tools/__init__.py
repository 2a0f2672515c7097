"""What runs on one machine for development, the demo, the tests and the benchmarks.

None of it is part of a running installation.
"""
