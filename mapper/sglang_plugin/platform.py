"""SGLang platform for CPUs without AMX, found through the `sglang.srt.platforms` entry point.

SGLang's own CPU engine needs AMX kernels. Declaring an out-of-tree platform makes it
dispatch every fused operation to its PyTorch implementation instead, which runs anywhere.
"""

from __future__ import annotations

import os
from typing import Any


def activate() -> str | None:
    """SGLang's question to a platform plugin: the class to use, or None for "not mine"."""
    import torch

    if torch.cuda.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    return "mapper.sglang_plugin.platform:PortableCpuPlatform"


def __getattr__(name: str) -> Any:
    # Defined on demand: the entry point is also asked on GPU machines, where importing
    # SGLang's CPU platform (and the attention backend behind it) would be for nothing.
    if name != "PortableCpuPlatform":
        raise AttributeError(name)
    from sglang.srt.platforms.cpu import CpuSRTPlatform
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities

    class PortableCpuPlatform(CpuSRTPlatform):
        """Any x86-64 or Arm CPU, PyTorch kernels only."""

        _enum = PlatformEnum.OOT
        capabilities = PlatformCapabilities()

        def get_device(self, device_id: int = 0) -> str:
            # Server arguments are compared with the string, not with a torch.device.
            return "cpu"

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_compile_backend(self, mode: str | None = None) -> str:
            return "eager"

        def get_dispatch_key_name(self) -> str:
            return "native"

        def apply_server_args_defaults(self, server_args: Any) -> None:
            server_args.attention_backend = "torch_native"
            server_args.disable_overlap_schedule = True
            # Without it every idle scheduler spins a whole core.
            server_args.sleep_on_idle = True

        def init_backend(self) -> None:
            from mapper.sglang_plugin.attention import register

            register()

    globals()[name] = PortableCpuPlatform
    return PortableCpuPlatform
