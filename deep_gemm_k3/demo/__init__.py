"""``python -m deep_gemm_k3 demo``: the main job on this machine, checked against computations that share no code with it.

Four ranks of one process, each in its own thread, run one MoE layer: dense, hidden-sharded and token-owner output. On a GPU
it has Kimi K3's widths; on CPU tensors the emulator executes the kernel's PTX at widths that take seconds. The shared expert's slices are those of eight ranks, so each mode is called twice: once with routed
tokens and the first four slices, once without any routed token and with the other four.

What is checked, and against what:

* every published value, bitwise, against the dense output of the rank that published it, and every place that must stay
  untouched, against the pattern put there before;
* the routed output of all modes, bitwise, against each other, and against a float64 computation that knows no ranks
  (``demo.reference``);
* the sum of all published fragments over the eight source ranks against the unsharded shared expert in float64.
"""
