"""Reference computation, test data and comparison; for tests and checks, never a substitute for a kernel.

* :mod:`.oracle` one rank's work as pure functions, :mod:`.world` all ranks of a call
* :mod:`.executor` the oracle behind the public entries, for tensors on the CPU
* :mod:`.data` seeded inputs, :mod:`.metrics` comparison
"""
