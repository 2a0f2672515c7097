"""Tools for development, the demo, tests and benchmarks on one machine. No installation runs them."""
