"""A PTX emulator: runs the text a GPU compiler emits on this machine's processor, and says what is wrong with it.

    from deep_gemm_k3.emulator import Device, Module
    device = Device(num_sms=4, seed=1)
    device.launch(Module(ptx_text), "kernel", grid=8, block=128, params=[x, y, 1024])
    print(device.counters, device.findings)

Tensors among the parameters are host memory (torch CPU tensors or numpy arrays); results appear in place.
"""

from deep_gemm_k3.emulator._library import ArgumentError, EmulatorError
from deep_gemm_k3.emulator.device import Device, Finding, Launch, Module
from deep_gemm_k3.emulator.tensor_map import TensorMap

__all__ = ["ArgumentError", "Device", "EmulatorError", "Finding", "Launch", "Module", "TensorMap"]
